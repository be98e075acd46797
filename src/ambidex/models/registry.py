"""Which model file serves which ``model_type`` of a config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ambidex.config import CheckpointConfig, config_errors
from ambidex.errors import UnsupportedModelError

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

    #: Checkpoint names to parameters, see ``layers.module.NameTable``.
    names: Mapping[str, str | None]
    head: Module

    def __call__(self, batch: Batch) -> Tensor: ...

    def named_parameters(self, prefix: str = "") -> list[tuple[str, Parameter]]: ...


def model_config(config: CheckpointConfig) -> CheckpointConfig:
    """The language model's part of ``config`` (of a model that also reads images, only text is
    served), with what its config.json may leave out. Raises UnsupportedModelError."""
    module = _find(config)
    inner = config.get("text_config")
    if isinstance(inner, dict):
        outer = {name: value for name, value in config.values.items() if name != "text_config"}
        config = CheckpointConfig(outer | inner, config.source)
    return config.with_defaults(**getattr(module, "DEFAULTS", {}))


def build_model(context: BuildContext, config: CheckpointConfig) -> CausalLM:
    """The model of ``config``, without weights. Raises UnsupportedModelError or
    InvalidModelError."""
    module = _find(config)
    with config_errors(config):
        model: CausalLM = module.Model(context, model_config(config))
    return model


def _find(config: CheckpointConfig) -> Any:
    """The module of the model's ``model_type``."""
    kind = config.get("model_type", "")
    module = MODELS.get(kind) if isinstance(kind, str) else None
    if module is None:
        names = config.get("architectures", [])
        first = names[0] if isinstance(names, list) and names else "?"
        raise UnsupportedModelError(
            f"{config.source}: architecture {first!s:.80} (model_type '{kind!s:.80}') is not "
            f"supported. Supported model types: {', '.join(sorted(MODELS))}."
        )
    return importlib.import_module(module)
