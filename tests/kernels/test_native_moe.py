"""Mixtures of experts at every level: near the reference, and exact over rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.errors import KernelError
from ambidex.kernels import reference
from ambidex.kernels.cpu.float_linear import FloatLinearOps, FloatWeight
from ambidex.kernels.cpu.moe import MoEOps
from ambidex.kernels.cpu.small import SmallOps

_native = pytest.importorskip("ambidex.kernels.cpu._native")

LEVELS = _native.supported_levels()
FEW = settings(max_examples=25, deadline=None)

levels = st.sampled_from(LEVELS)
threads = st.integers(1, 3)


class Table(SmallOps, FloatLinearOps, MoEOps):
    """Weights of plain numbers only; counts the products."""

    num_products = 0

    def linear(self, x: torch.Tensor, weight: FloatWeight) -> torch.Tensor:  # type: ignore[override]
        self.num_products += 1
        return self.linear_float(x, weight)

    def gated_linear(  # type: ignore[override]
        self, x: torch.Tensor, weight: FloatWeight, activation: str
    ) -> torch.Tensor:
        self.num_products += 1
        out = self.gated_linear_float(x, weight, activation)
        if out is not None:
            return out
        return self.activate_and_multiply(self.linear_float(x, weight), activation)


_tables: dict[tuple[str, int], Table] = {}


def table(level: str, num_threads: int = 2) -> Table:
    key = (level, num_threads)
    if key not in _tables:
        _tables[key] = Table(num_threads, [], level)
    return _tables[key]


@FEW
@given(
    levels,
    threads,
    st.integers(0, 9),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_route_experts(
    level: str,
    count: int,
    n: int,
    num_experts: int,
    normalise: bool,
    softmax_first: bool,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, min(num_experts, 8)))
    logits = torch.randn(n, num_experts + 1)[:, :num_experts] * 4
    ops = table(level, count)
    weights, experts = ops.route_experts(
        logits, top_k, normalise=normalise, softmax_first=softmax_first
    )
    expected, ids = reference.route_experts(
        logits, top_k, normalise=normalise, softmax_first=softmax_first
    )
    assert torch.equal(experts, ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_ties_and_nan(level: str) -> None:
    ops = table(level)
    for softmax_first in (True, False):
        _, experts = ops.route_experts(
            torch.zeros(2, 20), 5, normalise=True, softmax_first=softmax_first
        )
        assert experts.tolist() == [[0, 1, 2, 3, 4]] * 2
        logits = torch.randn(2, 20)
        logits[0, 3] = math.nan
        weights, experts = ops.route_experts(logits, 4, normalise=True, softmax_first=softmax_first)
        assert weights[0].isnan().all() and not weights[1].isnan().any()
        assert len(set(experts[0].tolist())) == 4


@FEW
@given(
    levels,
    threads,
    st.integers(0, 40),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 40),
    st.sampled_from(["silu", "gelu"]),
    st.data(),
)
def test_moe(
    level: str,
    count: int,
    n: int,
    num_experts: int,
    hidden: int,
    width: int,
    activation: str,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    x, logits = torch.randn(n, hidden + 3)[:, :hidden], torch.randn(n, num_experts)
    gate_up = torch.randn(num_experts, 2 * width, hidden) / 4
    down = torch.randn(num_experts, hidden, width) / 4
    ops = table(level, count)
    packed = [ops.pack_float(w) for w in gate_up], [ops.pack_float(w) for w in down]
    weights, experts = ops.route_experts(logits, top_k, normalise=True)
    ops.num_products = 0
    out = ops.moe(x, *packed, weights, experts, activation)
    assert ops.num_products == 2 * len(set(experts.flatten().tolist()))
    expected = reference.moe(x.contiguous(), gate_up, down, weights, experts, activation)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    for row in range(0, n, 7):
        alone = ops.moe(
            x[row : row + 1],
            *packed,
            weights[row : row + 1],
            experts[row : row + 1],
            activation,
        )
        assert torch.equal(alone[0], out[row])
    # The order of a row's choices does not matter, nor the number of threads.
    flipped = table(level, 1).moe(
        x, *packed, weights.flip(1).contiguous(), experts.flip(1).contiguous(), activation
    )
    assert torch.equal(flipped, out)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize("level", LEVELS)
@FEW
@given(
    threads,
    st.integers(0, 20),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(1, 3),
    st.data(),
)
def test_experts_of_several_memories(
    level: str,
    count: int,
    n: int,
    num_experts: int,
    hidden: int,
    width: int,
    num_parts: int,
    data: st.DataObject,
) -> None:
    """However experts are dealt out, the sum of their results has the bits of one call."""
    top_k = data.draw(st.integers(1, num_experts))
    owners = data.draw(
        st.lists(st.integers(0, num_parts - 1), min_size=num_experts, max_size=num_experts)
    )
    x, logits = torch.randn(n, hidden), torch.randn(n, num_experts)
    ops = table(level, count)
    gate_up = [ops.pack_float(w) for w in torch.randn(num_experts, 2 * width, hidden) / 4]
    down = [ops.pack_float(w) for w in torch.randn(num_experts, hidden, width) / 4]
    weights, experts = ops.route_experts(logits, top_k, normalise=True)
    whole = ops.moe(x, gate_up, down, weights, experts, "silu")
    parts = []
    for part in range(num_parts):
        other = table(level, 1 + part)
        other.num_products = 0
        held = [
            [w if owner == part else None for w, owner in zip(matrices, owners, strict=True)]
            for matrices in (gate_up, down)
        ]
        parts.append(other.expert_outputs(x, held[0], held[1], experts, "silu"))
        used = {expert for expert in experts.flatten().tolist() if owners[expert] == part}
        assert other.num_products == 2 * len(used)
    assert same_bits(ops.combine_experts(parts, weights, experts), whole)
    # A choice's result is the expert's, in the choice's place, and the other parts' is zero.
    mine = torch.tensor(owners)[experts]
    for part, results in enumerate(parts):
        assert not results[mine != part].any()
    for row in range(0, n, 7):
        expert = int(experts[row, 0])
        alone = ops.linear(
            ops.gated_linear(x[row : row + 1], gate_up[expert], "silu"), down[expert]
        )
        assert same_bits(parts[owners[expert]][row, 0], alone[0])


@pytest.mark.parametrize("level", LEVELS)
def test_many_parts(level: str) -> None:
    """As many as one call combines; a part's zeros do not turn a sum of -0 into 0."""
    ops, most = table(level), _native.MAX_PARTS
    results = torch.randn(5, most, 400)
    edges = torch.tensor([-0.0, -1e-45, 1e-45, 0.0])
    results[1:4] = edges[torch.randint(len(edges), (3, most, 400))]
    results[4, 2, 7] = math.nan
    results[4, 3, 8] = math.inf
    weights, experts = ops.route_experts(torch.randn(5, 20), most, normalise=True)
    parts = [torch.zeros_like(results) for _ in range(most)]
    for choice, part in enumerate(parts):
        part[:, choice] = results[:, choice]
    out = ops.combine_experts(parts, weights, experts)
    assert same_bits(out, ops.combine_experts([results], weights, experts))
    torch.testing.assert_close(
        out,
        reference.combine_experts(parts, weights, experts),
        rtol=1e-5,
        atol=1e-6,
        equal_nan=True,
    )
    assert (torch.signbit(out) & (out == 0)).any()


def test_wrong_parts_raise() -> None:
    ops = table(LEVELS[-1])
    x, logits = torch.randn(3, 8), torch.randn(3, 4)
    gate_up = [ops.pack_float(torch.randn(32, 8)) for _ in range(4)]
    down = [ops.pack_float(torch.randn(8, 16)) for _ in range(4)]
    weights, experts = ops.route_experts(logits, 2, normalise=True)
    part = ops.expert_outputs(x, gate_up, down, experts, "silu")
    holed: list[FloatWeight | None] = [None, *down[1:]]
    calls = [
        lambda: ops.expert_outputs(x, gate_up, down[:3], experts, "silu"),
        lambda: ops.expert_outputs(x, gate_up, holed, experts, "silu"),
        lambda: ops.expert_outputs(x, gate_up, down, experts + 3, "silu"),
        lambda: ops.expert_outputs(x, gate_up, down, experts[:2], "silu"),
        lambda: ops.expert_outputs(x, gate_up, down, experts.int(), "silu"),
        lambda: ops.expert_outputs(x[:, :7], gate_up, down, experts, "silu"),
        lambda: ops.combine_experts([], weights, experts),
        lambda: ops.combine_experts([part] * 9, weights, experts),
        lambda: ops.combine_experts([part, part[:2]], weights, experts),
        lambda: ops.combine_experts([part, part[:, :1]], weights, experts),
        lambda: ops.combine_experts([part.double()], weights, experts),
        lambda: ops.combine_experts([part[..., ::2]], weights, experts),
        lambda: ops.combine_experts([part[0]], weights, experts),
        lambda: ops.combine_experts([part], weights[:2], experts[:2]),
        lambda: ops.combine_experts(
            [part], weights[:, :1].contiguous(), experts[:, :1].contiguous()
        ),
        lambda: ops.combine_experts([part], weights.double(), experts),
        lambda: ops.combine_experts([part], weights, experts.int()),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()


def test_wrong_arguments_raise() -> None:
    ops = table(LEVELS[-1])
    x, logits = torch.randn(3, 8), torch.randn(3, 4)
    gate_up = [ops.pack_float(torch.randn(32, 8)) for _ in range(4)]
    down = [ops.pack_float(torch.randn(8, 16)) for _ in range(4)]
    weights, experts = ops.route_experts(logits, 2, normalise=True)
    calls = [
        lambda: ops.route_experts(logits, 5, normalise=True),
        lambda: ops.route_experts(logits, 0, normalise=True),
        lambda: ops.route_experts(logits.double(), 2, normalise=True),
        lambda: ops.moe(x, gate_up, down[:3], weights, experts, "silu"),
        lambda: ops.moe(x, gate_up, down, weights, experts + 3, "silu"),
        lambda: ops.moe(x, gate_up, down, weights, experts - 4, "silu"),
        lambda: ops.moe(x, gate_up, down, weights[:2], experts[:2], "silu"),
        lambda: ops.moe(x, gate_up, down, weights, experts.int(), "silu"),
        lambda: ops.moe(x, gate_up, down, weights.t(), experts.t(), "silu"),
        lambda: ops.moe(x[:, :7], gate_up, down, weights, experts, "silu"),
        lambda: ops.moe(x, gate_up, [*down[:3], gate_up[0]], weights, experts * 0 + 3, "silu"),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()
