"""Quantising on load: small errors, the same on any thread count, and no surprises at the edges."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.errors import InvalidModelError
from ambidex.quant import on_load
from ambidex.quant.on_load import FORMS, quantise


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.02


@pytest.mark.parametrize("kind", FORMS)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 130),
    seed=st.integers(0, 1 << 20),
    power=st.integers(-30, 15),
)
def test_errors_are_below_a_step(kind: str, rows: int, columns: int, seed: int, power: int) -> None:
    weight = random(rows, columns, seed) * 2.0**power
    made = quantise("w", weight, kind)
    assert made.shape == (rows, columns) and made.group == 32 and made.bits == FORMS[kind].bits
    assert (made.minimum is None) == (kind == "int8")
    assert made.zero == (128 if kind == "int8" else 0)
    error = (made.dequantise() - weight).abs()
    for group in range(made.num_groups):
        part = slice(32 * group, 32 * group + 32)
        if kind == "int8":
            # Half a step; a step is 1 / 127 of the largest, or as small as float16 can be.
            bound = weight[:, part].abs().amax(1) * (0.502 / 127) + 2.0**-25
        else:
            # Clipped values may lie further away than half a step of 1 / 15 of the range.
            bound = (weight[:, part].amax(1) - weight[:, part].amin(1)) * 0.2
            bound += weight[:, part].abs().amax(1) * 2.0**-10 + 2.0**-21
        assert (error[:, part].amax(1) <= bound).all()


def test_the_search_is_better_than_the_plain_range() -> None:
    weight = random(256, 512, 1)
    kind = GGMLQuantizationType.Q4_1
    plain = torch.from_numpy(
        gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
    )
    found = quantise("w", weight, "int4").dequantise()
    ratio = (found - weight).pow(2).sum() / (plain - weight).pow(2).sum()
    assert ratio < 0.9


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 65504.0, 1e-7, 1e-30])
def test_constant_weights(kind: str, value: float) -> None:
    made = quantise("w", torch.full((3, 40), value), kind).dequantise()
    assert torch.isfinite(made).all()
    assert (made - value).abs().max() <= abs(value) * 2e-3 + 2.0**-25


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights(kind: str, dtype: torch.dtype) -> None:
    weight = random(20, 96, 3).to(dtype)
    half, full = quantise("w", weight, kind), quantise("w", weight.float(), kind)
    assert torch.equal(half.dequantise(), full.dequantise())


@pytest.mark.parametrize("kind", FORMS)
def test_slices_and_threads_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(300, 320, 4)
    want = quantise("w", weight, kind)
    threads = torch.get_num_threads()
    try:
        for count, size in ((1, 7000), (2, 1 << 20), (3, 1)):
            torch.set_num_threads(count)
            monkeypatch.setattr(on_load, "_SLICE_WEIGHTS", size)
            got = quantise("w", weight, kind)
            assert torch.equal(got.codes, want.codes)
            assert got.scale is not None and want.scale is not None
            assert torch.equal(got.scale, want.scale)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e6])
def test_weights_that_are_no_weights(kind: str, value: float) -> None:
    weight = random(20, 96, 5)
    weight[11, 90] = value
    with pytest.raises(
        InvalidModelError, match=r"layers\.3\.up_proj has weights that are"
    ) as error:
        quantise("layers.3.up_proj", weight, kind)
    assert str(error.value).endswith(".")
