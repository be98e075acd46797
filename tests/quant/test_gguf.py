"""GGUF's block formats against the gguf package's own dequantisation, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.quant import gguf as reader
from ambidex.quant.forms import GGUF_FORMS, Form
from ambidex.quant.gguf import from_gguf

TYPES = sorted(GGUF_FORMS)


def packed_rows(type_name: str, rows: int, blocks: int, seed: int) -> tuple[np.ndarray, int]:
    """Random bytes: every code, and scales of every kind, infinite and NaN among them."""
    width, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (rows, blocks * size), dtype=np.uint8), blocks * width


@pytest.mark.parametrize("type_name", TYPES)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 40), blocks=st.integers(1, 5), seed=st.integers(0, 1 << 30))
def test_values_are_those_of_gguf(type_name: str, rows: int, blocks: int, seed: int) -> None:
    packed, columns = packed_rows(type_name, rows, blocks, seed)
    made = from_gguf("w", type_name, packed, columns)
    form = GGUF_FORMS[type_name]
    assert made.shape == (rows, columns) and made.name == "w"
    assert (made.bits, made.group) == (form.bits, form.group)
    if not rows:
        return
    assert int(made.codes.max()) < 1 << made.bits
    with np.errstate(all="ignore"):
        want = quants.dequantize(packed, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(made.dequantise().numpy(), want)


@pytest.mark.parametrize("type_name", TYPES)
def test_the_form_counts_what_is_held(type_name: str) -> None:
    packed, columns = packed_rows(type_name, 32, 8, 1)
    made = from_gguf("w", type_name, packed, columns)
    arrays = [
        tensor
        for field in type(made).__dataclass_fields__
        if isinstance(tensor := getattr(made, field), torch.Tensor)
        and field not in ("codes", "codebook")
    ]
    held = made.codes.numel() * made.bits // 8
    held += sum(array.numel() * array.element_size() for array in arrays)
    form = GGUF_FORMS[type_name]
    assert form.has_codebook == (made.codebook is not None)
    held += form.fixed_bytes(columns)
    assert form.num_bytes(32, columns) == pytest.approx(held, abs=2 * 64)


def test_bytes_of_odd_sizes_are_rounded_up() -> None:
    # 17 rows are two panels; 33 columns are 64: 32 bytes of codes and two scales.
    assert Form(4, 32).num_bytes(17, 33) == 2 * 16 * (32 + 4)
    assert Form(8, 0).num_bytes(1, 1) == -(-16 * (32 + 2) // 64) * 64
    assert Form(4, 32, is_permuted=True).num_bytes(16, 32) == 16 * 18 // 64 * 64 + 64 + 128
    assert Form(4, 32).num_bytes(0, 32) == 0
    assert Form(4, 32, has_codebook=True).num_bytes(16, 32) == Form(4, 32).num_bytes(16, 32) + 128


def test_large_matrices_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, columns = packed_rows("Q4_K", 21, 2, 3)
    whole = from_gguf("w", "Q4_K", packed, columns).dequantise()
    monkeypatch.setattr(reader, "_SLICE_WEIGHTS", 2000)
    part = from_gguf("w", "Q4_K", packed, columns).dequantise()
    np.testing.assert_array_equal(part.numpy(), whole.numpy())


@pytest.mark.parametrize("type_name", TYPES)
def test_wrong_lengths_are_errors(type_name: str) -> None:
    packed, columns = packed_rows(type_name, 4, 2, 0)
    for wrong in (packed[:, :-1], packed[:, : packed.shape[1] // 2], packed[0]):
        with pytest.raises(InvalidModelError, match="w is packed as"):
            from_gguf("w", type_name, wrong, columns)
    with pytest.raises(InvalidModelError, match="no multiple"):
        from_gguf("w", type_name, packed, columns + 1)


def test_types_without_a_form_name_those_with_one() -> None:
    with pytest.raises(UnsupportedModelError, match=r"IQ2_XXS.*Q4_0, Q4_1"):
        from_gguf("w", "IQ2_XXS", np.zeros((1, 66), np.uint8), 256)
