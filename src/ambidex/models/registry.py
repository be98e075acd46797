"""Which model file serves which ``model_type`` of a config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ambidex.config import CheckpointConfig, config_errors
from ambidex.memory.architectures import model_config

if TYPE_CHECKING:
    from torch import Tensor

    from ambidex.layers.batch import Batch
    from ambidex.layers.module import BuildContext, Module, Parameter

#: model_type -> module whose ``Model`` builds it.
MODELS = {
    "gemma3": "ambidex.models.gemma3_text",
    "gemma3_text": "ambidex.models.gemma3_text",
    "llama": "ambidex.models.llama",
    "mistral": "ambidex.models.mistral",
    "mixtral": "ambidex.models.mixtral",
    "opt": "ambidex.models.opt",
    "phi3": "ambidex.models.phi3",
    "qwen2": "ambidex.models.qwen2",
    "qwen3": "ambidex.models.qwen3",
    "qwen3_moe": "ambidex.models.qwen3_moe",
}


class CausalLM(Protocol):
    """What the runner asks of a model."""

    #: Checkpoint names to parameters, see ``checkpoint_names.NameTable``.
    names: Mapping[str, str | None]
    head: Module

    def __call__(self, batch: Batch) -> Tensor: ...

    def named_parameters(self, prefix: str = "") -> list[tuple[str, Parameter]]: ...


def build_model(context: BuildContext, config: CheckpointConfig) -> CausalLM:
    """The model of ``config``, without weights. Raises UnsupportedModelError or
    InvalidModelError."""
    config = model_config(config)
    module = importlib.import_module(MODELS[config.require("model_type")])
    with config_errors(config):
        model: CausalLM = module.Model(context, config)
    return model
