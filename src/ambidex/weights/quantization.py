"""Which quantisation a model gets: what was asked for, and what its files are."""

from __future__ import annotations

from ambidex.errors import OptionError
from ambidex.weights.checkpoint import Checkpoint

#: Made from plain numbers while loading.
ON_LOAD = ("int8", "int4")


def resolve_quantization(asked: str | None, checkpoint: Checkpoint) -> str | None:
    """``asked`` is ``--quantization``: what the weights are held in, None for plain numbers.

    Raises OptionError where the files are something else than was asked for.
    """
    held = checkpoint.quantization
    if asked is None:
        return held if checkpoint.is_quantized else None
    if asked in ON_LOAD:
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
        remedy = f"Leave the option out, or give --quantization {' or '.join(ON_LOAD)}"
    raise OptionError(
        f"--quantization {asked} does not fit: the weights of {checkpoint.path} are {found} "
        f"({checkpoint.dtype_name}). {remedy}."
    )
