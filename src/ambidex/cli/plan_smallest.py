"""The smallest machine for a model that no set of options makes fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.memory.model_shape import ModelShape
    from ambidex.memory.profile import HardwareProfile

_GIB = 1 << 30
#: Sizes are multiples of it; from 2 GiB on, of whole GiB.
_UNIT = 64 << 20
#: More memory is not looked at.
_MOST = 1 << 44
#: Of a size, that it is exact to.
_STEPS = 32


def smallest_machine(
    shape: ModelShape,
    profile: HardwareProfile,
    config: EngineConfig,
    reshape: Callable[[EngineConfig], ModelShape],
) -> str:
    """A sentence with the least memory of the host, or of the accelerator where the host's does
    not help, with the options as they are and with the most frugal ones; each was planned. Empty
    where no memory is enough."""
    from ambidex.memory.planner import fits

    def least(shape: ModelShape, config: EngineConfig, part: str) -> int | None:
        """Bytes of one part of the machine that are enough; None: none are."""
        # Whatever fits in some mode fits in this one, which is planned soonest.
        quick = config
        if config.offload.mode == "auto":
            quick = replace(config, offload=replace(config.offload, mode="compute"))

        def enough(size: int) -> bool:
            return fits(shape, _with(profile, part, size), quick)

        if not enough(_MOST):
            return None
        low = _rounded(getattr(profile, part).memory_bytes) - _UNIT
        high = 2 * max(low, _UNIT)
        while not enough(high):
            low, high = high, 2 * high
        while high - low > max(high // _STEPS, _UNIT):
            middle = _rounded((low + high) // 2)
            if middle in (low, high):
                break
            low, high = (low, middle) if enough(middle) else (middle, high)
        high = _rounded(high)
        return high if fits(shape, _with(profile, part, high), config) else None

    found: dict[tuple[str, int], str] = {}
    for words, its_config, its_shape in _ways(config, shape, reshape):
        for part in ("host", "device") if profile.device is not None else ("host",):
            size = least(its_shape, its_config, part)
            if size is not None:
                number, unit = (size // _GIB, "GiB") if size % _GIB == 0 else (size >> 20, "MiB")
                what = f"an accelerator of {number} {unit}"
                if part == "host":
                    what = f"--ram {number}{unit}"
                found.setdefault((part, size), f"{what} {words}")
                break
    ways = "; ".join(found.values())
    return f"The smallest machines that would do: {ways}." if found else ""


def _ways(
    config: EngineConfig, shape: ModelShape, reshape: Callable[[EngineConfig], ModelShape]
) -> Iterator[tuple[str, EngineConfig, ModelShape]]:
    """The options as they are, and the last, most frugal ones that a planner tries."""
    from ambidex.memory.proposals import changes

    def plan(_config: EngineConfig, _shape: ModelShape) -> NoReturn:
        raise AssertionError("only a context that was asked for is planned with")

    yield "with these options", config, shape
    length = config.model.max_model_len
    free = replace(config, model=replace(config.model, max_model_len=None))
    for together in (True, False):
        tried = list(changes(free, shape, plan, reshape, together))
        if not tried:
            continue
        flags, frugal, its_shape = tried[-1]
        frugal = replace(frugal, model=replace(frugal.model, max_model_len=length))
        words = f"with {flags}"
        if flags.startswith("leave out "):
            words = flags.replace("leave out", "without", 1).replace(", ", ", with ", 1)
        yield words, frugal, its_shape
        return


def _rounded(num_bytes: int) -> int:
    """Up to a size that people give memory."""
    unit = _UNIT if num_bytes < 2 * _GIB else _GIB
    return -(-num_bytes // unit) * unit


def _with(profile: HardwareProfile, part: str, num_bytes: int) -> HardwareProfile:
    """The same machine with another size of the host's or the device's memory."""
    processor = replace(getattr(profile, part), memory_bytes=num_bytes)
    return replace(profile, **{part: processor})
