"""Unpacking GGUF's blocks natively, against quant/gguf.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.errors import KernelError
from ambidex.kernels.cpu.unpack import UnpackOps
from ambidex.quant.gguf import from_gguf

native: Any = importlib.import_module("ambidex.kernels.cpu._native")
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(scope="module")
def ops() -> Callable[[str, int], UnpackOps]:
    made: dict[tuple[str, int], UnpackOps] = {}

    def get(level: str, threads: int) -> UnpackOps:
        if (level, threads) not in made:
            made[level, threads] = UnpackOps(threads, [], level)
        return made[level, threads]

    return get


def packed_rows(type_name: str, rows: int, blocks: int, seed: int) -> tuple[np.ndarray, int]:
    width, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (rows, blocks * size), dtype=np.uint8), blocks * width


@pytest.mark.parametrize("level", native.supported_levels())
@pytest.mark.parametrize("type_name", TYPES)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 20),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
    threads=st.integers(1, 3),
    apart=st.integers(0, 3),
)
def test_every_array_is_the_reference_s(
    ops: Any, level: str, type_name: str, rows: int, blocks: int, seed: int, threads: int,
    apart: int,
) -> None:  # fmt: skip
    packed, columns = packed_rows(type_name, rows, blocks, seed)
    want = from_gguf("w", type_name, packed, columns)
    # Rows may lie apart, at any address.
    wide = np.zeros((rows, packed.shape[1] + apart), np.uint8)
    spread = wide[:, apart:]
    spread[:] = packed
    got = ops(level, threads).unpack_gguf("w", type_name, spread, columns)
    assert got is not None and got.name == "w"
    for field in type(want).__dataclass_fields__:
        a, b = getattr(got, field), getattr(want, field)
        if not isinstance(b, torch.Tensor):
            assert a == b, field
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, field
        # As bytes: NaN is not equal to itself.
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field


def test_other_types_and_wrong_lengths(ops: Any) -> None:
    one = ops("generic", 1)
    packed, columns = packed_rows("Q4_0", 4, 2, 0)
    assert one.unpack_gguf("w", "Q3_K", packed, columns) is None
    for wrong in (packed[:, :-1], packed[0], packed.view(np.int8), np.asfortranarray(packed)):
        with pytest.raises(KernelError, match=r"^w"):
            one.unpack_gguf("w", "Q4_0", wrong, columns)
    with pytest.raises(KernelError):
        one.unpack_gguf("w", "Q4_0", packed, columns + 1)
