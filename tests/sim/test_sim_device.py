"""The simulated accelerator: its specification, its memory and copies, and who else may be one."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lane_harness import SIM, assert_same, assert_streamed, make_config, run

from ambidex.config import OffloadConfig
from ambidex.device import registry
from ambidex.device.base import Accelerator
from ambidex.device.queued import QueuedKernels
from ambidex.device.sim import SimDevice, SimSpec, make_sim, parse_spec
from ambidex.device.stream import Event
from ambidex.errors import DeviceError, OptionError, OutOfMemory
from ambidex.kernels.metadata import AttentionMetadata
from ambidex.memory.cost_model import ComputeRate, LinkRate

RATE = ComputeRate(10e9, 50e9)
#: What every test's device has room for.
RESERVED = {"weights": 8 << 20, "kv_cache": 8 << 20, "activations": 8 << 20, "staging": 8 << 20}


def make(settings: str = "") -> SimDevice:
    device = make_sim(settings or "memory=64MiB", lambda: RATE, ())
    for account, num_bytes in RESERVED.items():
        device.ledger.reserve(account, account, num_bytes)
    return device


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = make()
    yield made
    made.close()


@pytest.fixture
def make_gate(device: SimDevice) -> Iterator[Callable[[], Event]]:
    """Events that the test completes, or that are complete when it ends."""
    gates: list[Event] = []

    def make() -> Event:
        gates.append(Event(device.clock))
        return gates[-1]

    yield make
    for gate in gates:
        gate.complete(0.0)


# ------------------------------------------------------------------------------------- its spec


def test_defaults() -> None:
    spec = parse_spec("")
    assert spec == SimSpec()
    assert (spec.memory_bytes, spec.link_bytes_per_s, spec.latency_s) == (2 << 30, 4e9, 20e-6)
    assert (spec.speed, spec.clock, spec.threads) == (0.25, "virtual", 1)


def test_every_setting() -> None:
    text = (
        "memory=512MiB, link=10GB/s,latency=5ms,speed=2.5,clock=real,threads=3,"
        "core_bandwidth=12GB/s,core_flops=80G"
    )
    assert parse_spec(text) == SimSpec(512 << 20, 10e9, 5e-3, 2.5, "real", 3, 12e9, 80 * 2**30)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20us", 20e-6), ("3ms", 3e-3), ("1s", 1.0), ("0.5s", 0.5), ("0", 0.0)]
)
def test_latencies(text: str, seconds: float) -> None:
    assert parse_spec(f"latency={text}").latency_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memroy=2GiB", "'memroy' is no setting of the simulated accelerator. Did you mean memory"),
        ("bandwidth=2GB/s", "'bandwidth' is no setting .* Known are memory, link, latency"),
        ("xyz=1", r"'xyz' is no setting of the simulated accelerator\. Known are"),
        ("memory", "'memory' has no value; for example sim:memory=2GiB"),
        ("memory=", "'memory' has no value"),
        ("memory=lots", "'lots' is no value of 'memory'; for example sim:"),
        ("memory=-1GiB", "'memory' must be more than 0, not -1GiB"),
        ("memory=2", r"'memory=2' has no unit, such as GiB; for example sim:"),
        ("link=4.5", r"'link=4.5' has no unit, such as GB/s; for example sim:"),
        ("latency=20", r"'latency=20' has no unit, such as us; for example sim:"),
        ("core_flops=80", r"'core_flops=80' has no unit, such as G; for example sim:"),
        ("memory=0", "'memory' must be more than 0, not 0"),
        ("link=0", "'link' must be more than 0, not 0"),
        ("link=fast", "'fast' is no value of 'link'"),
        ("speed=nan", "'speed' must be more than 0 and finite, not nan"),
        ("speed=inf", "'speed' must be more than 0 and finite, not inf"),
        ("speed=-1", "'speed' must be more than 0, not -1"),
        ("latency=-1us", "'latency' must be at least 0, not -1us"),
        ("latency=inf", "'latency' must be at least 0 and finite, not inf"),
        ("threads=10000", "'threads' must be at most 1,024, not 10,000"),
        ("latency=1h", "'1h' is no value of 'latency'"),
        ("threads=1.5", "'1.5' is no value of 'threads'"),
        ("threads=0", "'threads' must be more than 0, not 0"),
        ("clock=vitrual", "clock is virtual or real, not 'vitrual'"),
        ("speed=1,speed=2", "'speed' is given twice"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=rf"^--device sim: {message}"):
        parse_spec(text)


def test_rates_come_from_the_core() -> None:
    measured: list[int] = []

    def measure() -> ComputeRate:
        measured.append(1)
        return RATE

    device = make_sim("memory=1MiB,speed=0.5,link=8GB/s,latency=3us", measure, ())
    assert device.rate == ComputeRate(5e9, 25e9)
    assert device.link == LinkRate(8e9, 3e-6)
    assert device.host_rate(3) == ComputeRate(30e9, 150e9)
    assert (device.name, device.ledger.name, device.ledger.capacity_bytes) == (
        "sim:0",
        "sim:0",
        1 << 20,
    )
    device.close()
    # Given, nothing is measured; half given, the other half is.
    make_sim("memory=1MiB,core_bandwidth=1GB/s,core_flops=1G", measure, ()).close()
    assert len(measured) == 1
    half = make_sim("memory=1MiB,core_bandwidth=1GB/s,speed=1", measure, ())
    assert half.rate == ComputeRate(1e9, 50e9) and len(measured) == 2
    half.close()


def test_it_needs_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMBIDEX_CPU_KERNELS", "reference")
    with pytest.raises(OptionError, match=r"--device sim needs the native kernels.*Leave it out"):
        make()


# ------------------------------------------------------------------------------------- memory


def test_memory_is_capped_by_account(device: SimDevice) -> None:
    held = device.empty((1 << 20,), torch.float32, "weights")
    assert device.owns(held) and not device.owns(torch.zeros(3))
    assert device.taken_bytes("weights") == 4 << 20
    with pytest.raises(OutOfMemory, match=r"sim:0: .* wanted for weights, of which 4\.00 MiB of"):
        device.empty((2 << 20,), torch.float32, "weights")
    assert (device.zeros((1 << 20,), torch.float32, "kv_cache") == 0).all()


def test_zeros_are_zero_wherever_they_lie(device: SimDevice) -> None:
    device.empty((4096,), torch.uint8, "kv_cache").fill_(7)
    device.synchronize()
    zeros = device.zeros((4096,), torch.uint8, "kv_cache")
    assert (zeros == 0).all()


def test_activations_wait_for_memory_that_launches_hold(
    device: SimDevice, make_gate: Callable[[], Event]
) -> None:
    """What was launched ahead holds memory until it has run."""
    gate = make_gate()
    device.compute.wait(gate)
    for _ in range(8):
        made = device.empty((1 << 20,), torch.uint8)
        device.compute.launch("work", lambda made=made: None, 1.0, writes=[made])
    del made
    gate.complete(0.0)
    # All of it is taken now, or was a moment ago.
    device.empty((8 << 20,), torch.uint8)
    assert device.clock.host_s == 0.0


# ------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_copies_both_ways(device: SimDevice, dtype: torch.dtype) -> None:
    plain = (torch.randn(37, 5) * 50).abs().to(dtype)
    stored = device.store(plain)
    assert device.owns(stored) and stored.dtype is dtype and stored.shape == plain.shape
    back = device.to_host(stored)
    assert not device.owns(back) and torch.equal(back, plain)
    device.write(stored[3:5], plain[:2])
    assert torch.equal(device.to_host(stored)[3:5], plain[:2])
    assert device.to_host(plain) is plain
    assert device.copy_in.num_bytes == plain.nbytes + plain[:2].nbytes
    assert device.copy_out.num_bytes == 2 * plain.nbytes


def test_copies_take_what_the_link_gives(device: SimDevice) -> None:
    host = torch.zeros(1 << 20, dtype=torch.uint8)
    there = device.empty((1 << 20,), torch.uint8, "staging")
    big = device.copy(there, host)
    small = device.copy(device.empty((16,), torch.uint8), host[:16], is_small=True)
    small.wait()
    # It does not wait behind the large one.
    assert device.clock.host_s == pytest.approx(20e-6 + 16 / 4e9)
    big.wait()
    assert device.clock.host_s == pytest.approx(20e-6 + (1 << 20) / 4e9)


def test_a_copy_needs_one_tensor_of_each(device: SimDevice) -> None:
    here, there = torch.zeros(4), device.empty((4,), torch.float32)
    with pytest.raises(DeviceError, match="one tensor of each; both are on sim:0"):
        device.copy(there, device.empty((4,), torch.float32))
    with pytest.raises(DeviceError, match="one tensor of each; neither is on sim:0"):
        device.copy(here, torch.zeros(4))


def test_a_tensor_is_poison_until_its_copy_is_done(
    device: SimDevice, make_gate: Callable[[], Event]
) -> None:
    host = torch.ones(100)
    there = device.empty((100,), torch.float32)
    there.fill_(5.0)
    gate = make_gate()
    device.copy_in.wait(gate)
    done = device.copy(there, host)
    assert there.isnan().all(), "who reads it now gets no plausible numbers"
    gate.complete(0.0)
    done.wait()
    assert torch.equal(there, host)
    # The other way round.
    back = torch.zeros(100)
    gate = make_gate()
    device.copy_out.wait(gate)
    done = device.copy(back, there)
    assert back.isnan().all()
    gate.complete(0.0)
    done.wait()
    assert torch.equal(back, host)


def test_poison_spares_what_is_still_in_use(
    device: SimDevice, make_gate: Callable[[], Event]
) -> None:
    """A buffer that a kernel reads before the copy may begin keeps its numbers until then."""
    there = device.store(torch.ones(100), "staging")
    gate, seen = make_gate(), []
    device.compute.wait(gate)
    device.compute.launch("reads", lambda: seen.append(there.clone()), 1.0, reads=[there])
    device.copy_in.wait(device.compute.record())
    done = device.copy(there, torch.zeros(100))
    assert not there.isnan().any()
    gate.complete(0.0)
    done.wait()
    assert torch.equal(seen[0], torch.ones(100))
    assert torch.equal(there, torch.zeros(100))


def test_a_buffer_is_poison_while_it_is_overwritten(device: SimDevice) -> None:
    there = device.store(torch.ones(8), "staging")
    device.compute.launch("reads", lambda: None, 1.0, reads=[there])
    device.copy_in.wait(device.compute.record())
    seen: list[torch.Tensor] = []

    host, copy = torch.zeros(8), torch.Tensor.copy_

    def copying(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        seen.append(self.clone())
        return copy(self, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copying)
        device.copy(there, host).wait()
    assert seen[0].isnan().all()


def test_copies_that_are_not_waited_for_fail(device: SimDevice) -> None:
    host, there = torch.zeros(8, 16), device.empty((8, 16), torch.float32)
    ones = device.store(torch.ones(16))
    device.copy(there, host)
    with pytest.raises(DeviceError, match="rms_norm on compute reads memory that copy_in has not"):
        device.kernels.rms_norm(there, ones, 1e-6)
    device.compute.wait(device.copy_in.record())
    out = device.kernels.rms_norm(there, ones, 1e-6)
    with pytest.raises(DeviceError, match="copy on copy_in overwrites memory that compute still"):
        device.copy(there, host)
    with pytest.raises(DeviceError, match="copy on copy_out reads memory that compute has not yet"):
        device.copy(torch.empty(8, 16), out)
    assert torch.equal(device.to_host(out), host)


def test_memory_is_handed_out_in_the_order_of_computing(device: SimDevice) -> None:
    """Whoever had it let go of it when the kernel that uses it was launched, not when it is done:
    only that stream may use it without waiting."""
    device.compute.launch("uses what had it", lambda: None, 1.0)
    made, host = device.empty((8,), torch.float32), torch.zeros(8)
    with pytest.raises(DeviceError, match="copy on copy_in overwrites memory that compute still"):
        device.copy(made, host)
    device.compute.launch("next", lambda: None, 1.0, writes=[made])
    # Memory of before is the stream's that has it.
    held = device.store(host, "staging")
    device.compute.launch("another", lambda: None, 1.0)
    device.copy(held, host).wait()


def test_an_error_is_raised_once_and_the_device_works_again(device: SimDevice) -> None:
    table = device.kernels.inner.pack(torch.ones(16, 8)).moved(device.store)
    device.kernels.embedding(device.store(torch.tensor([3.0])), table)
    with pytest.raises(DeviceError, match=r"failed: token_ids is torch\.float32 .* must be int64"):
        device.synchronize()
    device.synchronize()
    good = device.kernels.embedding(device.store(torch.tensor([3])), table)
    assert torch.equal(device.to_host(good), torch.ones(1, 8))


def test_copies_of_constants_run_while_a_graph_is_captured(device: SimDevice) -> None:
    graph = device.graph()
    constant = device.store(torch.ones(4))
    with graph.capture():
        assert torch.equal(device.to_host(constant), torch.ones(4))
        device.write(constant, torch.zeros(4))
        assert (device.zeros((4,), torch.float32, "kv_cache") == 0).all()
    assert torch.equal(device.to_host(constant), torch.zeros(4))


# ------------------------------------------------------------------------------------- kernels


def operations() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Every operation with operands of the host: positional ones, and others by name."""
    x, ids = torch.randn(4, 64), torch.tensor([0, 3, 2, 1])
    wide, narrow = torch.randn(128, 64), torch.randn(64, 64)
    metadata = AttentionMetadata(16, 2, None, [0, 4], [4], [[0]])
    heads = torch.randn(4, 2, 32)
    return {
        "linear": ([x, wide, torch.randn(128), torch.randn(4, 128)], {}),
        "gated_linear": ([x, wide, "silu", torch.randn(128)], {}),
        "embedding": ([ids, wide], {}),
        "position_rows": ([x.clone(), ids], {}),
        "rms_norm": ([x, torch.ones(64), 1e-6, 0.0, x.clone()], {}),
        "layer_norm": ([x, torch.ones(64), torch.zeros(64), 1e-6], {}),
        "add": ([x, x.clone()], {}),
        "activate": ([x, "gelu"], {}),
        "softcap": ([x, 30.0], {}),
        "take_logit_rows": ([x, [0, 2]], {}),
        "rope": ([heads, heads.clone(), torch.rand(8, 16), torch.rand(8, 16), ids], {}),
        "write_kv": ([heads, heads.clone(), "cache", metadata], {}),
        "attention": ([heads, "cache", metadata, 0.1], {}),
        "route_experts": ([x, 2], {"normalise": True}),
        "moe": (
            [x, [wide, wide], [narrow, narrow], torch.rand(4, 2), torch.tensor([[0, 1]] * 4),
             "silu"],
            {},
        ),
        "expert_outputs": (
            [x, [wide, wide], [narrow, narrow], torch.tensor([[0, 1]] * 4), "silu"],
            {},
        ),
        "combine_experts": (
            [[torch.randn(4, 2, 64)], torch.rand(4, 2), torch.tensor([[0, 1]] * 4)],
            {},
        ),
        "join": ([[x, x.clone()]], {}),
    }  # fmt: skip


def placed(device: SimDevice, name: str, operand: Any, is_there: bool = True) -> Any:
    """An operand as a kernel gets it, on the device or on the host."""
    move: Callable[[torch.Tensor], torch.Tensor] = (
        (lambda tensor: device.store(tensor, "weights")) if is_there else torch.Tensor.clone
    )
    if operand == "cache" if isinstance(operand, str) else False:
        layout = device.kernels.kv_layout(2, 48, 32, torch.float32)
        return tuple(move(torch.zeros(shape, dtype=dtype)) for shape, dtype in layout)
    if isinstance(operand, list) and operand and isinstance(operand[0], torch.Tensor):
        return [placed(device, name, item, is_there) for item in operand]
    if isinstance(operand, torch.Tensor):
        is_weight = operand.dim() == 2 and len(operand) >= 64
        if is_weight:
            return device.kernels.inner.pack(operand).moved(move)
        return move(operand)
    return operand


@pytest.mark.parametrize("name", operations())
def test_operations_give_the_hosts_bits(device: SimDevice, name: str) -> None:
    operands, named = operations()[name]
    there = [placed(device, name, operand) for operand in operands]
    here = [placed(device, name, operand, False) for operand in operands]
    got = getattr(device.kernels, name)(*there, **named)
    # One thread at a time may use a table.
    device.compute.record().wait()
    inner = device.kernels.inner
    expected = torch.cat(here[0], 1) if name == "join" else getattr(inner, name)(*here, **named)
    if name == "write_kv":
        got, expected = there[2], here[2]
        device.synchronize()
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    for ours, theirs in pairs:
        assert device.owns(ours)
        assert torch.equal(device.to_host(ours), theirs.reshape(ours.shape))
    if name != "join":
        assert device.kernels.num_calls == {name: 1}
    assert device.clock.timeline[-1].name in (name, "to_host")


def test_every_operation_is_checked() -> None:
    """None is missing above."""
    calls = {name for name in vars(QueuedKernels) if not name.startswith("_")}
    others = {
        "can_record", "memory", "rate", "put", "fetch", "begin_step", "end_step", "pack",
        "packed_bytes", "pack_table", "pack_head", "head_bytes", "pack_parts", "unpack_gguf",
        "kv_layout", "compress_words", "decompress_words",
    }  # fmt: skip
    assert calls - others == set(operations())


CHECKED = [
    (name, index)
    for name, (operands, _) in operations().items()
    for index, operand in enumerate(operands)
    if isinstance(operand, torch.Tensor)
    or operand == ["cache"]
    or (isinstance(operand, str) and operand == "cache")
    or (isinstance(operand, list) and isinstance(operand[0], torch.Tensor))
]


@pytest.mark.parametrize(("name", "index"), CHECKED)
def test_an_operand_of_the_host_is_refused(device: SimDevice, name: str, index: int) -> None:
    operands, named = operations()[name]
    there = [placed(device, name, operand, i != index) for i, operand in enumerate(operands)]
    message = rf"^{name} on sim:0 was given a tensor of shape \[.*\] that lies in another memory"
    with pytest.raises(DeviceError, match=message):
        getattr(device.kernels, name)(*there, **named)
    assert device.kernels.num_calls == {}


# ------------------------------------------------------------------------------------- others


class Toy:
    """Somebody else's accelerator: what ``Accelerator`` names, and nothing beside it."""

    KNOWN = {name for base in Accelerator.__mro__ for name in vars(base) if name[0] != "_"} | {
        name for base in Accelerator.__mro__ for name in getattr(base, "__annotations__", {})
    }

    def __init__(self, inner: SimDevice) -> None:
        self._inner = inner
        inner.name = inner.ledger.name = inner.kernels.name = "toy:7"

    def __getattr__(self, name: str) -> Any:
        if name not in Toy.KNOWN:
            raise AttributeError(f"an accelerator has no {name}")
        return getattr(self._inner, name)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An installed package that registers ``toy``; the settings that it was made with."""
    asked: list[str] = []

    def make_toy(settings: str, core_rate: Callable[[], ComputeRate], cpus: Any) -> Toy:
        asked.append(settings)
        return Toy(make_sim(SIM.removeprefix("sim:"), core_rate, cpus))

    entry = SimpleNamespace(name="toy", load=lambda: make_toy)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [entry] if group == "ambidex.devices" else []
    )
    return asked


@pytest.mark.parametrize("mode", ["resident", "compute", "stream", "split"])
def test_a_third_partys_device(sim_model: Callable[..., Path], toy: list[str], mode: str) -> None:
    folder = sim_model("llama")
    offload = OffloadConfig()
    if mode != "resident":
        offload = OffloadConfig(patterns=("layers.*",), mode=mode)
    ran = run(make_config(folder, "toy:dial=11", offload))
    assert toy == ["dial=11"]
    assert_same(ran, run(make_config(folder)))
    assert (ran.counts["rows_streamed"] > 0) == (mode in ("stream", "split"))
    if mode == "stream":
        assert_streamed(ran)


def test_the_page_names_all_that_a_device_has() -> None:
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    named = set(re.findall(r"`([a-z_]+)[`(]", page))
    assert named >= Toy.KNOWN, Toy.KNOWN - named


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'mychip'"), AttributeError("no make")]
)
def test_a_package_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load() -> None:
        raise error

    entry = SimpleNamespace(name="mychip", value="mychip.device:make", load=load)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(OptionError) as caught:
        registry.make_accelerator("mychip", lambda: RATE, ())
    assert str(caught.value) == (
        f"--device mychip: its package registers mychip.device:make, which cannot be loaded: "
        f"{error}. Install the package again, or choose another device."
    )


def test_a_name_that_is_nearly_right(toy: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        registry.make_accelerator("toi:dial=11", lambda: RATE, ())
    assert str(caught.value) == (
        "--device toi: there is no such device. Did you mean toy? Known here: auto, cpu, sim, toy."
    )
    with pytest.raises(OptionError, match=r"no such device\. Did you mean sim\? Known here: auto"):
        registry.make_accelerator("simm", lambda: RATE, ())
    with pytest.raises(OptionError, match=r"^--device quux: there is no such device\. Known here"):
        registry.make_accelerator("quux", lambda: RATE, ())
    assert toy == []


def test_an_engine_names_the_device_that_is_not_there(sim_model: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match="--device tpu: there is no such device"):
        run(make_config(sim_model("llama"), "tpu"))


def test_one_thread_at_a_time_uses_a_table(device: SimDevice) -> None:
    """Packing while launched work computes would share the table's threads: an error."""
    kernels: Any = device.kernels
    begun, gate = threading.Event(), threading.Event()

    def held() -> torch.Tensor:
        begun.set()
        assert gate.wait(20)
        return torch.zeros(1, 4)

    kernels._launch("held", (), held, [((1, 4), torch.float32)])
    assert begun.wait(20)
    with pytest.raises(AssertionError, match="two threads use the kernel table"):
        kernels.pack(torch.ones(16, 16))
    gate.set()
    device.synchronize()
    assert kernels.pack(torch.ones(16, 16)).shape == (16, 16)
