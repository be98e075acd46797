"""What crosses the link between two memories, how often, and what waits for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lane_harness import Ran, assert_same, make_config, num_rows, place_by, prompts, run
from test_placed import Lane

from ambidex.config import OffloadConfig
from ambidex.layers.module import Experts, Parameter, Place, Table
from ambidex.weights.crossing import Crossings

HOST = Place(0, lambda _: 0)
#: A third of 192 rows each.
THIRDS = Place(64, lambda _: 64)

#: Neither side is much slower than the other.
DEVICE = "sim:memory=256MiB,core_bandwidth=10GB/s,core_flops=50G,link=10GB/s,latency=20us,speed=1"


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.close()


def spans(lane: Lane, stream: str) -> list[int]:
    """Bytes of each copy so far."""
    lane.device.synchronize()
    return [span.num_bytes for span in lane.device.clock.timeline if span.stream == stream]


def test_parts_of_one_product_cross_at_once(lane: Lane) -> None:
    """Queries, keys and values; what is sent is in use once, so that rotating it harms nobody."""
    weight = torch.randn(256, 64)
    held = lane.place(weight, HOST)
    lane.stream()
    x = torch.randn(3, 64)
    q, k, v = lane.kernels.linear(x, held).split([128, 64, 64], -1)
    heads = [part.view(3, -1, 32) for part in (q, k, v)]
    there = [lane.kernels.put(part) for part in heads]
    assert spans(lane, "copy_in_small") == [3 * 256 * 4]
    for part, copy in zip(heads, there, strict=True):
        assert lane.device.owns(copy)
        assert torch.equal(lane.fetch(copy), part)


def test_the_next_product_is_not_given_the_last_ones_copy(lane: Lane) -> None:
    one, two = (lane.place(torch.randn(64, 64), HOST) for _ in range(2))
    lane.stream()
    x = torch.randn(2, 64)
    for held in (one, two, one):
        got = lane.kernels.put(lane.kernels.linear(x, held))
        assert torch.equal(lane.fetch(got), lane.plain.linear(x, held.host))
    assert len(spans(lane, "copy_in_small")) == 3


def test_each_side_sends_its_part(lane: Lane) -> None:
    """Between two shared products a norm and a residual are computed on both sides: what crosses
    is the parts, never the whole."""
    first, second = torch.randn(192, 192), torch.randn(192, 192)
    held = [lane.place(weight, THIRDS) for weight in (first, second)]
    lane.stream()
    x, scale = torch.randn(2, 192), torch.rand(192)
    there, weight = lane.device.store(x, "activations"), lane.device.store(scale)
    lane.kernels.begin_step(2, 0)
    kernels = lane.kernels
    y = kernels.linear(there, held[0], None, there)
    z = kernels.linear(kernels.rms_norm(y, weight, 1e-5), held[1], None, y)
    plain = lane.plain
    expected = plain.linear(x, plain.pack(first), None, x)
    normed = plain.rms_norm(expected, scale, 1e-5)
    assert torch.equal(lane.fetch(z), plain.linear(normed, plain.pack(second), None, expected))
    part = 2 * 64 * 4
    # The host's third of both; the input, and the accelerator's two thirds of the first.
    assert spans(lane, "copy_in_small") == [part, part]
    kept = [size for size in spans(lane, "copy_out") if size not in (scale.nbytes,)]
    assert kept == [x.nbytes, 2 * part, x.nbytes]  # the last is what was asked for here


def test_a_residual_of_the_host_stays_there(lane: Lane) -> None:
    """Nothing crosses between products of the host, norm and residual included."""
    weights = [torch.randn(64, 64) for _ in range(3)]
    held = [lane.place(weight, HOST) for weight in weights]
    lane.stream()
    x, scale = torch.randn(4, 64), torch.rand(64)
    there = lane.device.store(scale)
    y = x
    for weight in held:
        y = lane.kernels.linear(lane.kernels.rms_norm(y, there, 1e-5), weight, None, y)
    assert not lane.device.owns(lane.kernels.take_logit_rows(y, [0, 3]))
    assert lane.kernels.num_activation_bytes == 0
    expected = x
    for weight in weights:
        normed = lane.plain.rms_norm(expected, scale, 1e-5)
        expected = lane.plain.linear(normed, lane.plain.pack(weight), None, expected)
    assert torch.equal(lane.fetch(y), expected)


def test_layer_norms_too(lane: Lane) -> None:
    held = lane.place(torch.randn(64, 64), HOST)
    lane.stream()
    x, scale, bias = torch.randn(4, 64), torch.rand(64), torch.randn(64)
    there = [lane.device.store(part) for part in (scale, bias)]
    got = lane.kernels.linear(lane.kernels.layer_norm(x, *there, 1e-5), held)
    assert not lane.device.owns(got) and lane.kernels.num_activation_bytes == 0
    normed = lane.plain.layer_norm(x, scale, bias, 1e-5)
    assert torch.equal(lane.fetch(got), lane.plain.linear(normed, held.host))
    plain = lane.kernels.layer_norm(lane.device.store(x, "activations"), None, None, 1e-5)
    assert lane.device.owns(plain)
    assert torch.equal(lane.fetch(plain), lane.plain.layer_norm(x, None, None, 1e-5))


def test_what_nobody_asks_for_is_let_go(lane: Lane) -> None:
    """A chain of sums of which the host's versions are not needed does not keep its beginning."""
    lane.stream()
    x = torch.randn(64, 256)
    y = lane.device.store(x, "activations")
    taken = []
    for _ in range(12):
        y = lane.kernels.add(y, y)
        lane.device.synchronize()
        gc.collect()
        taken.append(lane.device.taken_bytes("activations"))
    assert max(taken) <= 6 * x.nbytes
    # The host catches up in its own stream.
    there = lane.kernels._to_host(y)
    lane.kernels._host.stream.record().wait()
    assert torch.equal(there, y)
    lane.device.synchronize()
    assert torch.equal(lane.fetch(y), x * 4096)


# ------------------------------------------------------------------------------------- whole steps


@pytest.fixture(scope="module")
def folder(sim_model: Callable[..., Path]) -> Path:
    return sim_model("llama", hidden_size=256, intermediate_size=768, num_hidden_layers=8)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Ran:
    return run(make_config(folder, dtype="float32"), prompts((8,)), 12)


def measure(folder: Path, offload: OffloadConfig, **changes: Any) -> Ran:
    config = make_config(folder, DEVICE, offload, dtype="float32", **changes)
    return run(config, prompts((8,)), 12)


def crossings(ran: Ran) -> tuple[int, int]:
    """Copies to the accelerator and back in the last steady step."""
    step = ran.steady(1)[-1]
    names = [s.stream for s in ran.timeline if step.end_s - step.seconds < s.end_s <= step.end_s]
    return names.count("copy_in_small"), names.count("copy_out")


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_all_layers_on_the_host(folder: Path, expected: Ran, enforce_eager: bool) -> None:
    """Attention is the accelerator's: its inputs go there and its results come back, once a layer;
    then ids, positions and logits."""
    offload = OffloadConfig(patterns=("*",), mode="compute")
    ran = measure(folder, offload, enforce_eager=enforce_eager)
    assert_same(ran, expected, 12)
    there, back = crossings(ran)
    assert there <= 8 + 2 and back <= 8 + 1


def halves(path: str, parameter: Parameter) -> Place | None:
    if isinstance(parameter, Experts | Table):
        return None
    return Place(num_rows(parameter) // 128 * 64, lambda _: 0)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_less_waits_than_without_mirrors(
    folder: Path, expected: Ran, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """On the virtual clock: three crossings a layer wait for nothing else any more."""
    place_by(monkeypatch, halves)
    seconds = []
    for is_off in (False, True):
        if is_off:
            monkeypatch.setattr(Crossings, "mirror", lambda *_: None)
        ran = measure(folder, OffloadConfig(), enforce_eager=enforce_eager)
        assert_same(ran, expected, 12)
        seconds.append(min(step.seconds for step in ran.steady(1)))
    assert seconds[1] - seconds[0] > 8 * 2 * 20e-6, seconds
