"""Mixtures of experts for the reference kernels: who computes what, and the sum of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def route_experts(
    router_logits: Tensor, top_k: int, *, normalise: bool, softmax_first: bool = True
) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts a row of ``router_logits`` [n, experts].

    Returns weights [n, top_k] and expert ids [n, top_k]; ``normalise`` makes weights sum to 1.
    """
    probabilities = torch.softmax(router_logits, -1) if softmax_first else router_logits
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    if not softmax_first:
        weights = torch.softmax(weights, -1)
    elif normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def combine_experts(parts: Sequence[Tensor], weights: Tensor, experts: Tensor) -> Tensor:
    """The sum of ``moe`` from ``parts`` of ``expert_outputs``: a choice's result is in one
    of them, and the others are zero there."""
    results = parts[0]
    for part in parts[1:]:
        results = results + part
    order = torch.argsort(experts, stable=True, dim=1)
    every, out = torch.arange(len(results)), torch.zeros_like(results[:, 0])
    for choice in order.unbind(1):
        out += results[every, choice] * weights[every, choice][:, None]
    return out
