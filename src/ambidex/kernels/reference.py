"""The reference kernels: plain PyTorch on the CPU, and the definition of every operation.

Results are exact over batch, chunking and thread count: the bits of a row depend on that row
alone. Four rules make it so, each with a test in tests/kernels:

* products get their rows padded to a multiple of 8 and their columns to a multiple of 16 (libraries
  pick other loops for what is left over, and what is left over depends on the threads);
* attention reduces over 64-token tiles at absolute positions, added in rising order;
* sums, norms and softmax reduce along the last, contiguous dimension only;
* functions with a scalar version beside that for vectors (exp, tanh, erf) run on whole vectors
  only: see :func:`_elementwise`.

Activations are float32. Weights and the KV cache may be float32, float16 or bfloat16; they are
widened where they are read, because such products are many times slower than float32 ones on
processors without arithmetic for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ambidex.kernels.lossless import compress_words, decompress_words  # noqa: F401
from ambidex.kernels.metadata import (
    COLUMN_PAD,
    PANEL,
    ROW_PAD,
    TILE,
    AttentionMetadata,
    padded,
)
from ambidex.kernels.reference_moe import combine_experts as combine_experts
from ambidex.kernels.reference_moe import route_experts as route_experts
from ambidex.kernels.reference_plan import make_plan, unit_size
from ambidex.kernels.reference_weights import (  # noqa: F401
    head_bytes,
    pack,
    pack_head,
    pack_parts,
    pack_table,
    packed_bytes,
    unpack_gguf,
)

name = "reference"
description = "reference (PyTorch)"

#: Rows of a batch are padded to a multiple of this.
row_pad = ROW_PAD
#: This table has no recording of steps.
can_record = False
gathers_kv = True

# PyTorch's elementwise operations: elements that one more thread is worth, and elements of the
# widest loop of vectors (what does not fill one goes through the scalar version).
_GRAIN_ELEMENTS = 32768
_VECTOR_ELEMENTS = 32
# Rows of an input up to which a product is cut into panels.
_MAX_PANEL_ROWS = 128
# A weight is multiplied in pieces of this many elements.
_PIECE_ELEMENTS = 1 << 22


def _elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a ``function`` with a vector and a scalar version so that only the vector version ever
    runs: on runs of whole vectors, cut so that every thread's share is whole vectors too."""
    if not x.is_contiguous():
        x = x.contiguous()
    if x.numel() < _GRAIN_ELEMENTS and x.numel() % _VECTOR_ELEMENTS == 0:
        return function(x)
    flat = x.view(-1)
    threads = torch.get_num_threads()
    size = flat.numel()
    if size >= _VECTOR_ELEMENTS and _whole_vectors(size, threads) == size:
        return function(x)
    out = torch.empty_like(flat)
    start = 0
    while size - start >= _VECTOR_ELEMENTS:
        end = start + _whole_vectors(size - start, threads)
        out[start:end] = function(flat[start:end])
        start = end
    if start < size:
        rest = F.pad(flat[start:], (0, start + _VECTOR_ELEMENTS - size))
        out[start:] = function(rest)[: size - start]
    return out.view(x.shape)


def _whole_vectors(size: int, threads: int) -> int:
    """The most elements up to ``size`` whose equal shares are whole vectors, for the number of
    threads that PyTorch takes for them."""
    while True:
        shares = min(threads, -(-size // _GRAIN_ELEMENTS))
        size = size // (shares * _VECTOR_ELEMENTS) * shares * _VECTOR_ELEMENTS
        if min(threads, -(-size // _GRAIN_ELEMENTS)) == shares:
            return size


def _pad_rows(x: Tensor) -> Tensor:
    """``x`` [n, ...] with zero rows appended up to a multiple of 8."""
    extra = padded(x.shape[0]) - x.shape[0]
    if not extra:
        return x
    return torch.cat([x, x.new_zeros(extra, *x.shape[1:])])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [n, in] times ``weight`` [rows, in] transposed, float32: [n, rows]."""
    num_rows, num_out = x.shape[0], weight.shape[0]
    panels = num_out // PANEL
    if num_rows > _MAX_PANEL_ROWS or not panels:
        extra = -num_out % COLUMN_PAD
        if extra:
            weight = F.pad(weight, (0, 0, 0, extra))
        return torch.mm(x, weight.t())[:, :num_out]
    # One small product a panel: the same bits as one large product (tested), and few rows keep
    # all threads busy.
    whole = panels * PANEL
    out = torch.bmm(
        x.expand(panels, -1, -1), weight[:whole].view(panels, PANEL, -1).transpose(1, 2)
    )
    out = out.transpose(0, 1).reshape(num_rows, whole)
    if whole < num_out:
        rest = F.pad(weight[whole:], (0, 0, 0, -(num_out - whole) % COLUMN_PAD))
        out = torch.cat([out, torch.mm(x, rest.t())[:, : num_out - whole]], 1)
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """``x`` [n, in] times ``weight`` [out, in] transposed, plus ``bias`` [out], plus ``residual``
    [n, out]: [n, out]. ``weight`` may come from :func:`pack`."""
    out = _linear(x, weight, bias)
    return out if residual is None else residual + out


def gated_linear(x: Tensor, weight: Tensor, activation: str, bias: Tensor | None = None) -> Tensor:
    """``activation(gate) * up``, where ``weight`` [2 * width, in] has the gate's rows first."""
    return activate_and_multiply(_linear(x, weight, bias), activation)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows, num_out = x.shape[0], weight.shape[0]
    x = _pad_rows(x)
    if weight.is_mkldnn:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        if bias is not None:
            out += bias
        return out[:num_rows]
    # Pieces of a large product are faster, and bound what is widened at a time.
    step = max(PANEL, _PIECE_ELEMENTS // weight.shape[1] // PANEL * PANEL)
    if num_out <= step:
        out = _product(x, weight.float())
    else:
        out = x.new_empty(x.shape[0], num_out)
        for start in range(0, num_out, step):
            end = min(start + step, num_out)
            out[:, start:end] = _product(x, weight[start:end].float())
    if bias is not None:
        out += bias
    return out[:num_rows]


def embedding(token_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Rows ``token_ids`` [n] of ``weight`` [vocab, width], times ``scale``: [n, width] float32."""
    rows = weight.index_select(0, token_ids).float()
    return rows if scale == 1.0 else rows * scale


def position_rows(table: Tensor, positions: Tensor) -> Tensor:
    """Rows ``positions`` [n] of ``table`` [m, width] float32."""
    return table.index_select(0, positions)


def put(x: Tensor) -> Tensor:
    """``x``, of the host, where these kernels can read it."""
    return x


def fetch(x: Tensor) -> Tensor:
    """``x`` in the host's memory, once it has been computed."""
    return x


def begin_step(num_tokens: int, num_logits: int) -> None:
    """Nothing has to be fetched ahead."""


def end_step() -> None:
    """Nothing goes on after it."""


def take_logit_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Those ``rows`` of ``x`` [n, width], from which logits are computed."""
    return x[list(rows)]


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``."""
    return x + y


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` along the last dimension, plus
    ``residual``."""
    variance = (x * x).mean(-1, keepdim=True)
    scaled = x * torch.rsqrt(variance + eps)
    out = scaled * (weight + offset if offset else weight)
    return out if residual is None else residual + out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation along the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    out = centred * torch.rsqrt(variance + eps)
    if weight is not None:
        out *= weight
    return out if bias is None else out + bias


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``2 * width`` channels of ``query`` and ``key`` [n, heads, head_dim].

    ``cos`` and ``sin`` are [positions, width], of which the rows ``positions`` [n] count; channel
    ``i`` turns together with ``i + width``. The other channels pass.
    """
    cos, sin = cos[positions], sin[positions]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :width], x[..., width : 2 * width]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * width:
        turned.append(x[..., 2 * width :])
    return torch.cat(turned, -1)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` of ``x`` [n, width]."""
    return _elementwise(F.silu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form of ``x`` [n, width]: ``(1 + tanh(z)) / 2`` is ``sigmoid(2 z)``."""

    def function(part: Tensor) -> Tensor:
        cubic = (part * part).mul_(part).mul_(0.044715).add_(part)
        return cubic.mul_(math.sqrt(8 / math.pi)).sigmoid_().mul_(part)

    return _elementwise(function, x)


def gelu(x: Tensor) -> Tensor:
    """GELU (error function) of ``x`` [n, width]."""

    def function(part: Tensor) -> Tensor:
        # PyTorch cuts this one among threads in a way of its own: give it less than it would cut.
        return torch.cat([F.gelu(piece) for piece in part.view(-1).split(8192)]).view(part.shape)

    return _elementwise(function, x)


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return F.relu(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": relu,
}


def activate(x: Tensor, activation: str) -> Tensor:
    """``ACTIVATIONS[activation](x)``."""
    return ACTIVATIONS[activation](x)


def activate_and_multiply(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of ``gate_up`` [n, 2 * width], gate first: [n, width]."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` of ``x`` [n, width]."""
    return _elementwise(lambda part: torch.tanh(part / cap) * cap, x)


def kv_layout(
    num_kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of a layer's KV cache: keys, then values."""
    return [((num_kv_heads, num_slots, head_dim), dtype)] * 2


def write_kv(
    key: Tensor, value: Tensor, cache: tuple[Tensor, ...], metadata: AttentionMetadata
) -> None:
    """Store ``key`` and ``value`` [n, kv_heads, head_dim] in a layer's cache, where the metadata's
    block tables say; rows beyond the last sequence are padding."""
    slots = _slots(metadata)
    store_kv(key[: len(slots)], value[: len(slots)], cache, slots)


def store_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], slots: Tensor) -> None:
    """Store ``key`` and ``value`` [n, kv_heads, head_dim] at ``slots`` [n] of a layer's cache."""
    key_store, value_store = cache
    key_store.index_copy_(1, slots, key.transpose(0, 1).to(key_store.dtype))
    # A value that is not finite would reach others: a weight of zero times NaN is NaN, and blocks
    # are read whole. The key keeps its NaN, so that its own request still fails.
    finite = value.transpose(0, 1).to(value_store.dtype).nan_to_num_()
    value_store.index_copy_(1, slots, finite)


def _slots(metadata: AttentionMetadata) -> Tensor:
    """block * block_size + offset, where each row's key and value are written: [n] int64."""
    slots: Tensor | None = metadata.derived.get("slots")
    if slots is None:
        size, parts = metadata.block_size, [torch.empty(0, dtype=torch.int64)]
        for index, table in enumerate(metadata.block_tables):
            count = metadata.query_starts[index + 1] - metadata.query_starts[index]
            end = metadata.context_lens[index]
            where = torch.arange(end - count, end)
            parts.append(torch.tensor(table)[where // size] * size + where % size)
        slots = metadata.derived["slots"] = torch.cat(parts)
    return slots


def attention(
    query: Tensor,
    cache: tuple[Tensor, ...],
    metadata: AttentionMetadata,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of ``query`` [n, heads, head_dim] over the cached keys and values.

    ``cache`` is a layer's pair of [kv_heads, num_slots, head_dim], written by :func:`write_kv`. Its
    last block is all zero and is read in place of blocks that must not be seen. What an earlier
    request left in a block's unused slots gets a weight of zero. Returns [n, heads * head_dim].
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = cache[0].shape[0]
    group = num_heads // num_kv_heads
    out = query.new_zeros(num_rows, num_kv_heads, group, head_dim)
    plan = metadata.derived.get("reference")
    if plan is None:
        plan = metadata.derived["reference"] = make_plan(metadata, num_heads)
    unit = unit_size(metadata.block_size)
    for part in plan:
        key, value = (
            part.gather(number, store.view(num_kv_heads, -1, unit * head_dim))
            .float()
            .view(num_kv_heads * part.num_sequences, part.num_tiles * TILE, head_dim)
            for number, store in enumerate(cache)
        )
        if head_dim % COLUMN_PAD:
            value = F.pad(value, (0, COLUMN_PAD - head_dim % COLUMN_PAD))
        for block in part.blocks:
            rows = slice(block.first_row, block.first_row + block.num_rows)
            keys = block.num_tiles * TILE
            # [kv_heads * sequences, query rows * group, head_dim], rows padded with zeros.
            q = query[rows].view(part.num_sequences, -1, num_kv_heads, group, head_dim)
            rows_each = q.shape[1]
            num_q = block.padded_rows(rows_each, group)
            q = q.permute(2, 0, 1, 3, 4).reshape(-1, rows_each * group, head_dim) * scale
            if num_q != q.shape[1]:
                q = F.pad(q, (0, 0, 0, num_q - q.shape[1]))
            scores = torch.bmm(q, key[:, :keys].transpose(1, 2))
            if softcap:
                scores = _softcap_scores(scores, softcap)
            seen = scores[:, : rows_each * group].view(
                num_kv_heads, part.num_sequences, rows_each, group, keys
            )
            seen.masked_fill_(block.hidden, float("-inf"))
            weights = torch.softmax(scores, -1)
            result = _weighted_values(weights, value[:, :keys], rows_each * group)
            result = result.view(num_kv_heads, part.num_sequences, rows_each, group, -1)
            out[rows].view(part.num_sequences, rows_each, num_kv_heads, group, head_dim).copy_(
                result[..., :head_dim].permute(1, 2, 0, 3, 4)
            )
    return out.view(num_rows, num_heads * head_dim)


def _softcap_scores(scores: Tensor, cap: float) -> Tensor:
    return softcap(scores.view(-1, scores.shape[-1]), cap).view(scores.shape)


def _weighted_values(weights: Tensor, value: Tensor, num_rows: int) -> Tensor:
    """``weights`` [b, rows, keys] times ``value`` [b, keys, head_dim], a tile at a time."""
    batch, rows, keys = weights.shape
    num_tiles = keys // TILE
    if rows <= 64 and num_tiles > 1:
        # Few rows: all tiles in one batched product, then added in order.
        tiles = weights.view(batch, rows, num_tiles, TILE).transpose(1, 2)
        parts = torch.bmm(
            tiles.reshape(batch * num_tiles, rows, TILE),
            value.reshape(batch * num_tiles, TILE, -1),
        ).view(batch, num_tiles, rows, -1)
        total = parts[:, 0, :num_rows].clone()
        for tile in range(1, num_tiles):
            total += parts[:, tile, :num_rows]
        return total
    total = torch.bmm(weights[:, :, :TILE], value[:, :TILE])
    for start in range(TILE, keys, TILE):
        total += torch.bmm(weights[:, :, start : start + TILE], value[:, start : start + TILE])
    return total[:, :num_rows].contiguous()


def moe(
    x: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    weights: Tensor,
    experts: Tensor,
    activation: str,
) -> Tensor:
    """Mixture of experts: ``x`` [n, hidden]; a matrix an expert, ``gate_up`` [2 * width, hidden]
    and ``down`` [hidden, width]; routing from :func:`route_experts`. Experts are added in index
    order, so a row's sum does not depend on the others."""
    out = torch.zeros_like(x)
    for expert in torch.unique(experts).tolist():
        rows, choice = torch.where(experts == expert)
        hidden = gated_linear(_pad_rows(x[rows]), gate_up[expert], activation)
        result = linear(hidden, down[expert])[: rows.shape[0]]
        out[rows] += result * weights[rows, choice][:, None]
    return out


def expert_outputs(
    x: Tensor,
    gate_up: Sequence[Tensor | None],
    down: Sequence[Tensor | None],
    experts: Tensor,
    activation: str,
) -> Tensor:
    """What :func:`moe` adds up, before it is weighted: [n, top_k, hidden]. Zero for experts that
    are None: another device computes those."""
    out = x.new_zeros(*experts.shape, x.shape[1])
    for expert in torch.unique(experts).tolist():
        first, second = gate_up[expert], down[expert]
        if first is None or second is None:
            continue
        rows, choice = torch.where(experts == expert)
        hidden = gated_linear(_pad_rows(x[rows]), first, activation)
        out[rows, choice] = linear(hidden, second)[: rows.shape[0]]
    return out
