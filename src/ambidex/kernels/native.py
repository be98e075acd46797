"""The native kernel table: C++ for every instruction set that this build and the host share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.attention import AttentionOps
from ambidex.kernels.cpu.float_linear import PANEL_ROWS, FloatLinearOps, FloatWeight
from ambidex.kernels.cpu.lossless import LosslessOps
from ambidex.kernels.cpu.moe import MoEOps
from ambidex.kernels.cpu.quantized_linear import PackedWeight, QuantizedLinearOps
from ambidex.kernels.cpu.recording import Recorder, Recording
from ambidex.kernels.cpu.small import SmallOps
from ambidex.kernels.cpu.unpack import UnpackOps
from ambidex.kernels.quantized import Quantized, are_of_one_form, concatenate
from ambidex.kernels.reference import ACTIVATIONS
from ambidex.kernels.rows import TensorRows


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights of different forms, one below the other: GGUF's mixtures give value projections more
    bits than queries and keys."""

    parts: tuple[FloatWeight | PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def moved(self, move: Callable[[Tensor], Tensor]) -> StackedWeight:
        """The same matrix over what ``move`` gives for each piece of its memory."""
        return StackedWeight(tuple(part.moved(move) for part in self.parts))

    def gather(
        self, ranges: Sequence[tuple[int, int]], store: Callable[[list[Tensor]], Tensor]
    ) -> StackedWeight:
        """Those rows, one range behind the other; ``store`` copies pieces of bytes, one behind the
        other, to where they shall lie."""
        cut = [part for start, end in ranges for part in self.rows(start, end).parts]
        return StackedWeight(tuple(part.gather([(0, part.shape[0])], store) for part in cut))

    def rows(self, start: int, end: int) -> StackedWeight:
        """Rows ``start`` to ``end`` in the same memory. Both are multiples of 16, or the end."""
        parts, first = [], 0
        for part in self.parts:
            low, high = max(start - first, 0), min(end - first, part.shape[0])
            if low < high:
                parts.append(part.rows(low, high))
            first += part.shape[0]
        return StackedWeight(tuple(parts))


Weight = FloatWeight | PackedWeight | StackedWeight


class NativeKernels(
    QuantizedLinearOps, FloatLinearOps, AttentionOps, MoEOps, SmallOps, UnpackOps, LosslessOps
):
    """One lane's table: its threads compute, and it records steps."""

    name = "native"
    row_pad = 1
    can_record = True
    gathers_kv = False
    ACTIVATIONS = ACTIVATIONS

    def __init__(
        self, num_threads: int, cpus: Sequence[int], level: str, nodes: Sequence[int] = ()
    ) -> None:
        super().__init__(num_threads, cpus, level, nodes)
        self.description = f"native, {level}"
        self._recorder: Recorder | None = None

    # ---------------------------------------------------------------- rows and memory of results

    def _is_recording(self) -> bool:
        return self._recorder is not None

    def _rows(self, x: Tensor) -> int:
        recorder = self._recorder
        if recorder is None:
            return x.shape[0]
        computed = recorder.rows(x)
        if computed is not None:
            return computed
        if x.shape[0] == recorder.max_tokens:
            return int(self._native.ROWS_TOKENS)
        if x.shape[0] == recorder.max_logits:
            return int(self._native.ROWS_LOGITS)
        raise KernelError(f"A tensor of {x.shape[0]} rows cannot be recorded.")

    def _empty(self, like: Tensor, *shape: int) -> Tensor:
        if self._recorder is None:
            return super()._empty(like, *shape)
        return self._recorder.empty((like.shape[0], *shape), self._recorder.rows(like))

    def _empty_ids(self, like: Tensor, width: int) -> Tensor:
        if self._recorder is None:
            return super()._empty_ids(like, width)
        return self._recorder.empty((like.shape[0], 2 * width)).view(torch.int64)

    def _kept_ids(self, size: int) -> Tensor:
        ids = super()._kept_ids(size)
        if self._recorder is not None:
            self._recorder.kept.append(ids)
        return ids

    def _expert_counts(self, x: Tensor, counts: Tensor) -> list[int]:
        if self._recorder is None:
            return super()._expert_counts(x, counts)
        return [x.shape[0]] * len(counts)

    def _counted(self, x: Tensor, count: int, address: int) -> Tensor:
        if self._recorder is None:
            return super()._counted(x, count, address)
        self._context.set_condition(address)
        # The rows of a number that is computed in the step: see Rows in step.h.
        return self._recorder.empty((count, x.shape[1]), rows=-address)

    def _end_counted(self) -> None:
        self._context.set_condition(0)

    def _logit_rows_out(self, x: Tensor, rows: Sequence[int], width: int) -> tuple[Tensor, int]:
        recorder = self._recorder
        if recorder is None:
            return super()._logit_rows_out(x, rows, width)
        return recorder.empty((recorder.max_logits, width)), int(self._native.ROWS_LOGITS)

    # ---------------------------------------------------------------- weights of any form

    def pack(
        self, weight: Tensor | Quantized | TensorRows, precise: bool = False
    ) -> FloatWeight | PackedWeight:
        """A matrix [out, in] in this table's layout."""
        if isinstance(weight, Quantized):
            return self.pack_quantized(weight, precise)
        if not isinstance(weight, TensorRows):
            return self.pack_float(weight)
        return self._pack_numbers([weight])

    def _pack_numbers(self, parts: Sequence[Tensor | TensorRows]) -> FloatWeight:
        """The rows of all ``parts``, one below the other, each packed where it stays: nothing is
        there twice but some rows at a time."""
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        made, first = self.empty_float(shape, parts[0].dtype), 0
        for part in parts:
            rows = part.blocks(0, part.shape[0]) if isinstance(part, TensorRows) else [(0, part)]
            for start, block in rows:
                at = first + start
                self.pack_float(block.contiguous(), made.rows(at, at + len(block)))
            first += part.shape[0]
        return made

    def packed_in(self, memory: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> FloatWeight:
        """The matrix of numbers that lies packed in ``memory`` [bytes] uint8."""
        return FloatWeight(memory.view(dtype).view(-1, shape[1], PANEL_ROWS), shape[0])

    def room(self, num_bytes: int) -> Tensor:
        """Memory [num_bytes] uint8 of the weights that stay, to be written to; see :meth:`keep`."""
        memory = self._kept_weights.take(num_bytes)
        self._kept_placer.place(memory.data_ptr(), num_bytes // 64, 64)
        return memory

    def pack_parts(
        self, parts: Sequence[Tensor | Quantized | TensorRows], precise: bool = False
    ) -> Weight:
        """:meth:`pack` of the rows of all ``parts``, one below the other."""
        if len(parts) == 1:
            return self.pack(parts[0], precise)
        numbers = [part for part in parts if not isinstance(part, Quantized)]
        is_cut_well = not any(part.shape[0] % PANEL_ROWS for part in parts[:-1])
        if len(numbers) == len(parts) and is_cut_well:
            return self._pack_numbers(numbers)
        parts = [part.all() if isinstance(part, TensorRows) else part for part in parts]
        low_bit = [part for part in parts if isinstance(part, Quantized)]
        if not low_bit:
            return self.pack(torch.cat(list(parts)))  # type: ignore[arg-type]
        if len(low_bit) == len(parts) and are_of_one_form(low_bit):
            if not is_cut_well:
                return self.pack(concatenate(low_bit), precise)
            return self.pack_quantized(low_bit[0], precise, low_bit[1:])
        return StackedWeight(tuple(self.pack(part, precise) for part in parts))

    def stack(self, parts: Sequence[FloatWeight | PackedWeight | StackedWeight]) -> StackedWeight:
        """Packed matrices, one below the other, as one."""
        flat: list[FloatWeight | PackedWeight] = []
        for part in parts:
            flat += part.parts if isinstance(part, StackedWeight) else [part]
        return StackedWeight(tuple(flat))

    def pack_table(self, weight: Tensor | Quantized | TensorRows) -> FloatWeight | PackedWeight:
        """Embedding and head read the same layout: a tied table is held once."""
        return self.pack(weight, precise=True)

    def pack_head(self, table: FloatWeight | PackedWeight) -> FloatWeight | PackedWeight:
        return table

    def head_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        return 0

    def packed_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        return -(-shape[0] // 16) * 16 * shape[1] * dtype.itemsize

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, PackedWeight):
            return self.linear_quantized(x, weight, bias, residual)
        if isinstance(weight, FloatWeight):
            return self.linear_float(x, weight, bias, residual)
        out = self._empty(x, weight.shape[0])
        first = 0
        for part in weight.parts:
            end = first + part.shape[0]
            rows = slice(first, end)
            self._linear_into(
                out[:, rows],
                x,
                part,
                None if bias is None else bias[rows],
                None if residual is None else residual[:, rows],
            )
            first = end
        return out

    def _linear_into(
        self,
        out: Tensor,
        x: Tensor,
        weight: FloatWeight | PackedWeight,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> None:
        if isinstance(weight, PackedWeight):
            self.linear_quantized(x, weight, bias, residual, out)
        else:
            self.linear_float(x, weight, bias, residual, out)

    def gated_linear(
        self, x: Tensor, weight: Weight, activation: str, bias: Tensor | None = None
    ) -> Tensor:
        out = None
        if isinstance(weight, PackedWeight):
            out = self.gated_linear_quantized(x, weight, activation, bias)
        elif isinstance(weight, FloatWeight):
            out = self.gated_linear_float(x, weight, activation, bias)
        if out is not None:
            return out
        return self.activate_and_multiply(self.linear(x, weight, bias), activation)

    def embedding(
        self, token_ids: Tensor, weight: FloatWeight | PackedWeight, scale: float = 1.0
    ) -> Tensor:
        if isinstance(weight, PackedWeight):
            return self.embedding_quantized(token_ids, weight, scale)
        return self.embedding_float(token_ids, weight, scale)

    # ---------------------------------------------------------------- steps

    def set_step(self, token_ids: Tensor, positions: Tensor, num_tokens: int) -> None:
        """This step's ids and positions, int64 [num_tokens]; the caller keeps them alive."""
        self._context.set_tokens(num_tokens, token_ids.data_ptr(), positions.data_ptr())

    def record(
        self,
        max_tokens: int,
        max_logits: int,
        compute: Callable[[int], tuple[Tensor, Tensor]],
    ) -> Recording:
        """Record what ``compute(max_tokens)`` calls, and the choice of each row's best token;
        it returns hidden states and logits.

        Nothing is computed. Raises KernelError where an operation cannot be recorded.
        """
        if max_logits == max_tokens:
            max_logits += 1
        self._recorder = Recorder(max_tokens, max_logits)
        self._context.begin_recording()
        try:
            hidden, logits = compute(max_tokens)
            best, is_finite = self.greedy(logits)
            program: Any = self._context.end_recording()
            recorder = self._recorder
            return Recording(
                program,
                recorder.arena,
                recorder.kept,
                hidden,
                logits,
                best,
                is_finite,
                self._context.replay,
                self._context.replay_timed,
            )
        finally:
            self._context.end_recording()
            self._recorder = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory that the threads share, and of what each has for itself. Grows with
        what is computed; not while something is."""
        num_bytes: int = self._context.memory_bytes
        return num_bytes

    @property
    def num_runs(self) -> int:
        """How often the threads were started: the native calls of eager steps, and one a replay."""
        runs: int = self._context.num_runs
        return runs
