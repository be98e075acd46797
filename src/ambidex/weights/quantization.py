"""Which quantisation a model gets: what was asked for, and what its files are."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ambidex.config import ModelConfig
from ambidex.errors import OptionError
from ambidex.quant.forms import ON_LOAD_FORMS


class Files(Protocol):
    """See ``checkpoint.Checkpoint``."""

    path: Path

    @property
    def quantization(self) -> str | None: ...

    @property
    def is_quantized(self) -> bool: ...

    @property
    def dtype_name(self) -> str: ...


def low_bit_kind(model: ModelConfig, checkpoint: Files) -> str | None:
    """What matrices are held in: int8 or int4 (quantised while they are loaded), the way of the
    files, or None for numbers of ``--dtype``.

    Raises OptionError where options contradict each other or the files.
    """
    kind = resolve_quantization(model.quantization, checkpoint)
    if kind in ON_LOAD_FORMS and model.dtype != "auto":
        raise OptionError(
            f"--quantization {kind} and --dtype {model.dtype} exclude each other: leave out one."
        )
    return kind if model.dtype == "auto" else None


def resolve_quantization(asked: str | None, checkpoint: Files) -> str | None:
    """``asked`` is ``--quantization``: what the weights are held in, None for plain numbers.

    Raises OptionError where the files are something else than was asked for.
    """
    held = checkpoint.quantization
    if asked is None:
        return held if checkpoint.is_quantized else None
    if asked in ON_LOAD_FORMS:
        if checkpoint.is_quantized:
            raise OptionError(
                f"--quantization {asked} quantises plain weights, and those of {checkpoint.path} "
                f"are quantised already ({checkpoint.dtype_name}). Leave the option out, or give "
                "an unquantised checkpoint of the model."
            )
        return asked
    if asked == held:
        return asked if checkpoint.is_quantized else None
    found = f"quantised with {held}" if checkpoint.is_quantized else "not quantised"
    remedy = "Leave the option out: files say themselves how they are quantised"
    if not checkpoint.is_quantized:
        remedy = f"Leave the option out, or give --quantization {' or '.join(ON_LOAD_FORMS)}"
    raise OptionError(
        f"--quantization {asked} does not fit: the weights of {checkpoint.path} are {found} "
        f"({checkpoint.dtype_name}). {remedy}."
    )
