"""Matrices that are read some rows at a time: packed as if they were there at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ambidex.device.cpu import CPUDevice
from ambidex.errors import KernelError
from ambidex.kernels import reference, rows
from ambidex.kernels.rows import TensorRows


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    made = CPUDevice(1, kernels="native")
    yield made.kernels
    made.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 14)


def reader(matrix: torch.Tensor, dtype: torch.dtype, asked: list[int]) -> TensorRows:
    def read(start: int, end: int) -> torch.Tensor:
        asked.append(end - start)
        return matrix[start:end]

    return TensorRows((matrix.shape[0], matrix.shape[1]), dtype, read)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 64, 65, 1000])
def test_the_same_weight(kernels: Any, num_rows: int, dtype: torch.dtype) -> None:
    matrix, asked = torch.randn(num_rows, 48), list[int]()
    made = kernels.pack_table(reader(matrix, dtype, asked))
    whole = kernels.pack_table(matrix.to(dtype))
    assert made.shape == whole.shape == (num_rows, 48)
    assert torch.equal(made.panels.view(torch.uint8), whole.panels.view(torch.uint8))
    assert sum(asked) == num_rows
    assert max(asked) * 48 * dtype.itemsize <= 1 << 14
    assert len(asked) > 1 or num_rows <= 128


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [192, 208, 100])
def test_beside_other_parts(kernels: Any, num_rows: int, dtype: torch.dtype) -> None:
    """A gate above what it is multiplied with is never there twice, unless it ends within a
    panel."""
    one, two, three = torch.randn(num_rows, 48), torch.randn(200, 48), torch.randn(64, 48).to(dtype)
    asked: list[int] = []
    parts = [reader(one, dtype, asked), three, reader(two, dtype, asked)]
    made = kernels.pack_parts(parts)
    whole = kernels.pack(torch.cat([one.to(dtype), three, two.to(dtype)]))
    assert made.shape == whole.shape == (num_rows + 264, 48)
    assert torch.equal(made.panels.view(torch.uint8), whole.panels.view(torch.uint8))
    assert sum(asked) == num_rows + 200
    assert (max(asked) * 48 * dtype.itemsize <= 1 << 14) == (num_rows != 100)


def test_parts_that_do_not_belong_together(kernels: Any) -> None:
    for other in (torch.randn(64, 32), torch.randn(64, 48).bfloat16()):
        with pytest.raises(KernelError, match="is to be packed into memory for"):
            kernels.pack_parts([torch.randn(64, 48), other])


def test_the_reference_reads_all_of_it() -> None:
    matrix, asked = torch.randn(100, 16), list[int]()
    table = reference.pack_table(reader(matrix, torch.bfloat16, asked))
    assert torch.equal(table, matrix.bfloat16()) and asked == [100]
