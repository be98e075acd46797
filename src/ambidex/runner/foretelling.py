"""How long the steps of a lane should take, as far as the machine's speed is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ambidex.device.profile_cache import known_machine, this_machine
from ambidex.errors import OutOfMemory
from ambidex.memory.cost_model import CostModel
from ambidex.memory.judge import TYPICAL_PROMPT
from ambidex.memory.operations import StepLoad, prefill_steps
from ambidex.weights.hub import cache_dir

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.memory.model_shape import ModelShape
    from ambidex.memory.profile import HardwareProfile

logger = logging.getLogger(__name__)

#: predict(load) -> seconds of a step
Predict = Callable[[StepLoad], float]


def host_profile(config: EngineConfig) -> HardwareProfile | None:
    """What this machine does in a second, where that has been measured. A server measures it at its
    first start, before anything is loaded; a single answer does not wait for that."""
    folder = cache_dir()
    if not config.warm_up_fully:
        return known_machine(config, folder)
    try:
        return this_machine(config, folder)
    except (RuntimeError, MemoryError, OutOfMemory) as error:
        # It is only about foretelling: serving needs none of it.
        logger.warning("this machine could not be measured, so nothing is foretold: %s", error)
        return None


def predictor(profile: HardwareProfile, shape: ModelShape) -> Predict:
    """For a lane whose weights are all on the host."""
    return CostModel(profile, shape).seconds


def foretell(predict: Predict, config: EngineConfig, max_model_len: int) -> dict[str, float]:
    """Seconds by what they are of, for the start-up table: a typical prompt, a token of one
    request, and one of as many as may run."""
    limits = config.scheduler
    prompt = min(TYPICAL_PROMPT, max(max_model_len - 1, 1))
    steps = prefill_steps(prompt, limits.max_num_batched_tokens)
    found = {
        f"first token of a prompt of {prompt:,} tokens": sum(map(predict, steps)),
        "a token, 1 request": predict(StepLoad(1, 1, prompt)),
    }
    if limits.max_num_seqs > 1:
        each = predict(StepLoad(limits.max_num_seqs, 1, prompt))
        found[f"a token of each, {limits.max_num_seqs} requests"] = each
    return found
