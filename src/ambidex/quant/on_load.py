"""Weights that are plain numbers, quantised while they are loaded.

* int8: groups of 32, symmetric, ``scale * (code - 128)``, scale float16;
* int4: groups of 32, ``scale * code + minimum``, both float16, chosen for the least squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ambidex.errors import InvalidModelError
from ambidex.kernels.quantized import Quantized
from ambidex.quant.forms import Form

GROUP = 32
#: ``--quantization`` -> the form that it makes.
FORMS = {"int8": Form(8, GROUP), "int4": Form(4, GROUP, zero_bytes=2)}

#: Weights that are quantised at once: temporary tensors stay in the processor's cache.
_SLICE_WEIGHTS = 1 << 18
#: The largest float16.
_MOST = 65504.0
#: Shares of a group's range that the codes of int4 are tried on; what lies outside is clipped.
_SHARES = (1.0, 0.94, 0.88, 0.8, 0.7)

_Parts = tuple[Tensor, Tensor, Tensor | None]


def quantise(name: str, weight: Tensor, kind: str) -> Quantized:
    """``weight`` [rows, columns] of any float type as ``kind``, int8 or int4.

    Raises InvalidModelError for weights that are not finite, or larger than a float16.
    """
    rows, columns = weight.shape
    form = FORMS[kind]
    groups = -(-columns // GROUP)
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, groups, dtype=torch.float16)
    minimum = torch.empty_like(scale) if kind == "int4" else None
    make: Callable[[Tensor], _Parts] = _int4 if kind == "int4" else _int8
    step = max(1, _SLICE_WEIGHTS // max(columns, 1))
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        largest = float(part.abs().max()) if part.numel() else 0.0
        if not largest <= _MOST:
            problem = "not finite" if largest in (float("inf"),) or largest != largest else "huge"
            raise InvalidModelError(
                f"{name} has weights that are {problem} in rows {start} to "
                f"{start + part.shape[0] - 1}, which cannot be quantised. Download the model "
                "again, or leave --quantization out."
            )
        if columns % GROUP:
            # The last group repeats its last column, which changes no minimum and no maximum.
            last = part[:, -1:].expand(-1, groups * GROUP - columns)
            part = torch.cat([part, last], 1)
        part_codes, part_scale, part_minimum = make(part.view(-1, GROUP))
        end = start + step
        codes[start:end] = part_codes.view(-1, groups * GROUP)[:, :columns]
        scale[start:end] = part_scale.reshape(-1, groups)
        if minimum is not None and part_minimum is not None:
            minimum[start:end] = part_minimum.reshape(-1, groups)
    tensors = {"codes": codes, "scale": scale}
    return rebuild(name, kind, tensors if minimum is None else tensors | {"minimum": minimum})


def rebuild(name: str, kind: str, tensors: Mapping[str, Tensor]) -> Quantized:
    """The matrix that :func:`quantise` made, from its ``codes``, ``scale`` and ``minimum``.

    Raises LookupError or InvalidModelError where they are no such matrix.
    """
    bits, zero = FORMS[kind].bits, 0 if kind == "int4" else 128
    minimum = tensors["minimum"] if kind == "int4" else None
    codes, scale = tensors["codes"], tensors["scale"]
    return Quantized(name, bits, GROUP, codes, scale=scale, zero=zero, minimum=minimum)


def _inverse(scale: Tensor) -> Tensor:
    """``1 / scale``, and 0 where a group has no scale."""
    return torch.where(scale > 0, 1 / scale, torch.zeros(()))


def _int8(weight: Tensor) -> _Parts:
    """Groups [n, 32]: codes, scale [n, 1], no minimum."""
    largest = weight.abs().amax(1, keepdim=True)
    scale = (largest / 127).half()
    # A small scale loses much when it is rounded: never so that the largest code would be clipped.
    short = scale.float() * 127.5 < largest
    above = (scale.view(torch.int16) + 1).view(torch.float16)
    scale = torch.where(short, above, scale)
    codes = (weight * _inverse(scale.float())).round_().clamp_(-127, 127).add_(128)
    return codes.to(torch.uint8), scale, None


def _int4(weight: Tensor) -> _Parts:
    """Groups [n, 32]: codes, scale and minimum [n, 1].

    Every share of the range gives codes; the scale and minimum that fit them best are found in
    closed form and rounded, and the codes that fit those are compared.
    """
    # Groups side by side: sums over them are sums of wide vectors.
    weight = weight.t().contiguous()
    low, high = weight.amin(0, keepdim=True), weight.amax(0, keepdim=True)
    middle, width = (low + high) * 0.5, high - low
    total = weight.sum(0, keepdim=True)
    best_error = torch.full_like(low, float("inf"))
    best_scale, best_minimum = torch.zeros_like(low), low.clone()
    codes, work = torch.empty_like(weight), torch.empty_like(weight)
    for share in _SHARES:
        first = width * (share / 15)
        _codes(weight, first, middle - width * (share / 2), codes)
        sum_c = codes.sum(0, keepdim=True)
        square = torch.mul(codes, codes, out=work).sum(0, keepdim=True)
        product = torch.mul(codes, weight, out=work).sum(0, keepdim=True)
        scale = (GROUP * product - sum_c * total) * _inverse(GROUP * square - sum_c * sum_c)
        scale = torch.where(scale > 0, scale, first).half().float()
        minimum = ((total - scale * sum_c) / GROUP).half().float()
        _codes(weight, scale, minimum, codes)
        codes.mul_(scale).add_(minimum).sub_(weight)
        error = codes.mul_(codes).sum(0, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    _codes(weight, best_scale, best_minimum, codes)
    columns = codes.to(torch.uint8).t().contiguous()
    return columns, best_scale.half().t(), best_minimum.half().t()


def _codes(weight: Tensor, scale: Tensor, minimum: Tensor, out: Tensor) -> None:
    torch.sub(weight, minimum, out=out)
    out.mul_(_inverse(scale)).round_().clamp_(0, 15)
