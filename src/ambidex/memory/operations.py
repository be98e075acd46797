"""Seconds of a step's operations on one processor: rooflines, pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ambidex.memory.model_shape import KVShape, ModelShape, WeightShape
from ambidex.memory.profile import Processor, ProductRate
from ambidex.memory.weight_places import WeightKind

# What neither a data sheet nor a probe gives: see ``device/probe.py`` for the others.
#: Half a tile of keys: what is computed of the last tile without being seen, on average.
HALF_TILE = 32
#: Operations of a score beside its multiplications: exponential, largest, sum.
SCORE_FLOPS = 40
#: Attention starts its threads so many times, the others once.
ATTENTION_LAUNCHES = 3
#: Queries that one packed tile of keys is multiplied with at a time.
BLOCK_QUERIES = 96


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
    processor: Processor,
    weight: WeightShape,
    num_tokens: float,
    share: float = 1.0,
    kept: float = 0.0,
) -> tuple[float, float]:
    """(seconds of reading, seconds of arithmetic) of a product of ``num_tokens`` rows with
    ``share`` of the rows of ``weight``; the longer one counts. ``kept``: the share that caches
    hold."""
    used = experts_used(weight, num_tokens)
    read = weight.num_bytes * used / weight.num_experts
    rows_each = num_tokens * weight.num_chosen / used if used else 0
    flops = 2.0 * weight.rows * weight.columns * weight.num_chosen * num_tokens
    rate = processor.product(weight.form)
    input_s = rate.input_s * weight.columns * weight.num_chosen * num_tokens
    compute_s = share * (flops / rate.flops(rows_each) + input_s) if flops else 0.0
    return _parts(processor.bytes_per_s, rate, compute_s, share * read, kept)


def experts_used(weight: WeightShape, num_tokens: float) -> float:
    """Of a weight's experts, how many are expected to be used by ``num_tokens`` tokens that choose
    apart from each other, each expert as often as the others."""
    left_out = 1 - weight.num_chosen / weight.num_experts
    return float(weight.num_experts * (1 - left_out**num_tokens))


def attention_parts(
    processor: Processor, shape: ModelShape, group: KVShape, load: StepLoad, kept: float = 0.0
) -> tuple[float, float]:
    """(seconds of reading keys and values, seconds of arithmetic) of attention over the layers of
    ``group``; the longer one counts."""
    first = load.num_context - load.num_new
    seen = sum(_seen(group, n) for n in (first + 1, load.num_context)) / 2
    read = load.num_seqs * _seen(group, load.num_context) * group.bytes_per_token
    rate = processor.attention_rate(_kv_form(group))
    if rate is None:
        width = shape.num_heads * group.head_dim
        flops = 4.0 * load.num_tokens * seen * width * group.num_layers
        of_products = processor.product("float32").flops(load.num_new)
        rate = ProductRate(((1, processor.attention_flops or of_products),))
    else:
        num_pairs = load.num_tokens * (seen + HALF_TILE) * group.num_layers
        flops = attention_flops(num_pairs, shape.num_heads, group.head_dim)
    rows = min(load.num_new * shape.num_heads / group.num_kv_heads, BLOCK_QUERIES)
    compute_s = flops / rate.flops(rows) if flops else 0.0
    compute_s += load.num_seqs * group.num_kv_heads * group.num_layers * processor.attention_task_s
    return _parts(processor.kv_bytes_per_s or processor.bytes_per_s, rate, compute_s, read, kept)


def attention_flops(num_pairs: float, num_heads: int, head_dim: int) -> float:
    """Operations of ``num_pairs`` queries that each see a key, in every head."""
    return num_pairs * num_heads * (4.0 * head_dim + SCORE_FLOPS)


def small_parts(processor: Processor, shape: ModelShape, load: StepLoad) -> tuple[int, float]:
    """(operations that are started in a step, seconds of those that touch every number once):
    norms, rotations, what is written to the KV cache, the embedding, the choice of tokens."""
    numbers = 0.0
    operations = 0
    vectors = [weight for weight in shape.weights if weight.kind is WeightKind.VECTOR]
    for weight in vectors:
        if not weight.path.endswith(".bias"):
            # Read and written.
            numbers += 2.0 * weight.rows * load.num_tokens
            operations += 1
    for group in shape.kv:
        heads = shape.num_heads + group.num_kv_heads
        # Turned in place; keys and values are read and written.
        turned = 2.0 * heads * group.head_dim
        written = 4.0 * group.num_kv_heads * group.head_dim
        numbers += (turned + written) * group.num_layers * load.num_tokens
        operations += (2 + ATTENTION_LAUNCHES) * group.num_layers
    # The embedding; the rows that give logits; the choice among those.
    numbers += 2.0 * shape.hidden_size * load.num_tokens + 1.0 * shape.vocab_size * load.num_seqs
    operations += 3
    operations += sum(1 for weight in shape.weights if is_product(weight))
    return operations, 4.0 * numbers / processor.small_rate(load.num_tokens)


def is_product(weight: WeightShape) -> bool:
    """Whether something is multiplied with it."""
    return weight.kind not in (WeightKind.VECTOR, WeightKind.TABLE)


def is_head(weight: WeightShape) -> bool:
    """Whether it gives logits: its product has a row for each sequence only."""
    return weight.kind is WeightKind.TIED or weight.path.startswith("head.")


def step_bytes(shape: ModelShape, load: StepLoad) -> float:
    """Weights, keys and values that a step reads."""
    total = 0.0
    for weight in shape.weights:
        if is_product(weight):
            used = experts_used(weight, load.num_tokens)
            total += weight.num_bytes * used / weight.num_experts
    for group in shape.kv:
        total += load.num_seqs * _seen(group, load.num_context) * group.bytes_per_token
    return total


def host_step_s(processor: Processor, shape: ModelShape, load: StepLoad) -> float:
    """Seconds of a step on ``processor`` alone, from the decision to the tokens."""
    return sum(host_step_parts(processor, shape, load).values())


def host_step_parts(processor: Processor, shape: ModelShape, load: StepLoad) -> dict[str, float]:
    """The same by kind of operation: products, head, attention, small, fixed."""
    kept = processor.kept_share(step_bytes(shape, load))
    parts = dict.fromkeys(("products", "head", "attention", "small", "fixed"), 0.0)
    for weight in filter(is_product, shape.weights):
        name, rows = ("head", load.num_seqs) if is_head(weight) else ("products", load.num_tokens)
        parts[name] += max(product_parts(processor, weight, rows, kept=kept))
    for group in shape.kv:
        parts["attention"] += max(attention_parts(processor, shape, group, load, kept))
    operations, parts["small"] = small_parts(processor, shape, load)
    parts["fixed"] = (
        operations * processor.launch_s
        + processor.step_s
        + load.num_seqs * processor.token_s
        + load.num_tokens * processor.prompt_token_s
    )
    return parts


def prefill_steps(
    num_prompt: int, max_num_batched_tokens: int, num_seqs: int = 1
) -> Iterator[StepLoad]:
    """The steps that compute ``num_seqs`` prompts of ``num_prompt`` tokens that come together.
    Prompts that fit into a step go together; longer ones are cut."""
    if num_prompt <= max_num_batched_tokens:
        together = max_num_batched_tokens // num_prompt
        for first in range(0, num_seqs, together):
            yield StepLoad(min(together, num_seqs - first), num_prompt, num_prompt)
        return
    for _ in range(num_seqs):
        for start in range(0, num_prompt, max_num_batched_tokens):
            end = min(start + max_num_batched_tokens, num_prompt)
            yield StepLoad(1, end - start, end)


def fit_reading(times: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(seconds of reading, overlap) that explain products whose weights come out of memory: pairs
    of (seconds of the same product where caches hold the weights, seconds measured)."""
    pairs = list(times)
    longest = min(measured for _, measured in pairs)
    best = (math.inf, longest, math.inf)
    for step in range(101):
        read_s = longest * (1 - step / 200)
        for overlap in (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, math.inf):
            rate = ProductRate(((1, 1.0),), overlap=overlap)
            error = sum(
                math.log(rate.together(read_s, compute_s) / measured) ** 2
                for compute_s, measured in pairs
            )
            best = min(best, (error, read_s, overlap))
    return best[1], best[2]


def _parts(
    bytes_per_s: float, rate: ProductRate, compute_s: float, read: float, kept: float
) -> tuple[float, float]:
    """What both take beside each other is the longer one's."""
    read_s = (1 - kept) * read / (rate.bytes_per_s or bytes_per_s)
    seconds = rate.together(read_s, compute_s)
    return (seconds, compute_s) if read_s > compute_s else (read_s, seconds)


def _kv_form(group: KVShape) -> str:
    """By the bytes of a number."""
    numbers = 2 * group.num_kv_heads * group.head_dim * group.num_layers
    return "float32" if group.bytes_per_token >= 4 * numbers else "float16"


def _seen(group: KVShape, length: int) -> int:
    return length if group.window is None else min(length, group.window)
