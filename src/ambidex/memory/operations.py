"""Seconds of a step's operations on one processor: rooflines, pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from ambidex.memory.model_shape import KVShape, ModelShape, WeightShape
from ambidex.memory.profile import Processor


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes: ``num_seqs`` sequences of ``num_new`` tokens each, that have
    ``num_context`` tokens when the step is done."""

    num_seqs: int
    num_new: int
    num_context: int

    @property
    def num_tokens(self) -> int:
        """Rows of every product but the head's."""
        return self.num_seqs * self.num_new


def product_parts(
    processor: Processor, weight: WeightShape, num_tokens: float, share: float = 1.0
) -> tuple[float, float]:
    """(seconds of reading, seconds of arithmetic) of a product of ``num_tokens`` rows with
    ``share`` of the rows of ``weight``; the longer one counts."""
    used = min(weight.num_experts, num_tokens * weight.num_chosen)
    read = weight.num_bytes * used / weight.num_experts
    rows_each = num_tokens * weight.num_chosen / used if used else 0
    flops = 2.0 * weight.rows * weight.columns * weight.num_chosen * num_tokens
    rate = processor.product(weight.form).flops(rows_each)
    return share * read / processor.bytes_per_s, share * flops / rate


def attention_parts(
    processor: Processor, shape: ModelShape, group: KVShape, load: StepLoad
) -> tuple[float, float]:
    """(seconds of reading keys and values, seconds of arithmetic) of attention over the layers of
    ``group``."""
    first = load.num_context - load.num_new
    seen = sum(_seen(group, n) for n in (first + 1, load.num_context)) / 2
    read = load.num_seqs * _seen(group, load.num_context) * group.bytes_per_token
    width = shape.num_heads * group.head_dim
    flops = 4.0 * load.num_tokens * seen * width * group.num_layers
    rate = processor.attention_flops or processor.product("float32").flops(load.num_new)
    return read / (processor.kv_bytes_per_s or processor.bytes_per_s), flops / rate


def _seen(group: KVShape, length: int) -> int:
    return length if group.window is None else min(length, group.window)
