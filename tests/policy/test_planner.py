"""Plans before anything is loaded: what fits, where it lies, how fast it will be."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import paper
import pytest

from ambidex.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
)
from ambidex.errors import OptionError
from ambidex.memory.cost_model import CostModel, StepLoad, StepTime
from ambidex.memory.hardware_table import table_profile
from ambidex.memory.judge import Judge, Mix
from ambidex.memory.ledger import ACCOUNTS
from ambidex.memory.model_shape import ModelShape
from ambidex.memory.placement import FORBIDS, PlacementPlan, plan_placement
from ambidex.memory.planner import Plan, PlanRefused, make_plan
from ambidex.memory.profile import HardwareProfile, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.memory.split import SplitTable
from ambidex.memory.weight_places import Placement

on_paper: Any = paper.load()
CASES = {case.shape.name: case for case in on_paper.cases()}
ROWS = {name: list(on_paper.rows(case)) for name, case in CASES.items()}
LLAMA, QWEN = "llama-3-70b", "qwen2.5-32b"


# --- on paper -----------------------------------------------------------------------------------


def row(name: str, tokens: int) -> Any:
    return next(r for r in ROWS[name] if r.load.num_tokens == tokens and r.load.num_new == 1)


def test_the_models_on_paper_have_their_sizes() -> None:
    llama, qwen = CASES[LLAMA].shape, CASES[QWEN].shape
    assert llama.weight_bytes == pytest.approx(141.1e9, rel=1e-3)
    assert qwen.weight_bytes == pytest.approx(65.5e9, rel=1e-3)
    assert llama.kv_bytes_per_token == 320 << 10 and qwen.kv_bytes_per_token == 256 << 10


@pytest.mark.parametrize("name", CASES)
def test_auto_is_near_the_bound_everywhere(name: str) -> None:
    """Within 10% of the bound and what handing over takes; never slower than the better pure plan;
    at least 0.9 of what the bound would gain over that."""
    rows = ROWS[name]
    assert [r.load.num_tokens for r in rows] == [*(1 << n for n in range(13)), 4096]
    for r in rows:
        assert r.bound_s <= r.auto.seconds <= 1.1 * (r.bound_s + r.sync_s), r
        assert r.auto.seconds <= 1.1 * r.bound_s, "even without what handing over takes"
        assert r.auto.seconds <= r.pure_s, r
        assert r.pure_s / r.auto.seconds >= 0.9 * r.pure_s / r.bound_s, r


def test_what_both_hands_gain_on_the_large_machine() -> None:
    one, some, many = (row(LLAMA, n) for n in (1, 64, 128))
    assert one.stream_s / one.auto.seconds == pytest.approx(12, abs=0.5), "over streaming"
    assert one.compute_s / one.auto.seconds > 1.1, "rows are split at one token too"
    assert one.auto.limit == "DRAM"
    assert some.pure_s / some.auto.seconds == pytest.approx(1.5, abs=0.05)
    assert many.pure_s / many.auto.seconds == pytest.approx(1.95, abs=0.06)


def test_what_both_hands_gain_on_the_small_machine() -> None:
    one, some, many = (row(QWEN, n) for n in (1, 64, 128))
    # Streamed bytes cross DRAM too: 80 / 25 is the ceiling.
    assert 3.0 < one.stream_s / one.auto.seconds < 3.3
    assert some.pure_s / some.auto.seconds == pytest.approx(1.6, abs=0.05)
    assert many.pure_s / many.auto.seconds == pytest.approx(1.3, abs=0.05)


@pytest.mark.parametrize("name", CASES)
def test_a_long_prompt_streams(name: str) -> None:
    prompt = ROWS[name][-1]
    assert prompt.load.num_new == 4096
    assert prompt.auto.seconds <= 1.05 * prompt.stream_s
    assert prompt.share > 0.95


@pytest.mark.parametrize("name", CASES)
def test_the_break_even_is_where_physics_has_it(name: str) -> None:
    """T* = CPU flops / link bytes a second, in 16 bits: there half of the rows are streamed."""
    host = CASES[name].profile.host.product("bfloat16").flops(1)
    link = CASES[name].profile.link.bytes_per_s
    shares = {r.load.num_tokens: r.share for r in ROWS[name] if r.load.num_new == 1}
    break_even = host / link
    below = max(n for n in shares if n <= break_even)
    assert shares[below] <= 0.55 <= shares[4 * below] + 0.1
    steps = list(itertools.pairwise(shares.values()))
    assert all(b >= a - 0.06 for a, b in steps), "more rows, more streaming"


# --- the choice flips where a search over all says ----------------------------------------------


def small_shape() -> ModelShape:
    shape: ModelShape = on_paper.llama_like(
        "small", layers=4, hidden=1024, intermediate=4096, heads=8, kv_heads=2, vocab=4096
    )
    return shape


def small_machine(**values: float) -> HardwareProfile:
    defaults = {
        "memory": 24e9, "hbm": 1e12, "flops": 1e14, "link": 25e9, "dram": 80e9, "host_flops": 1e12
    }  # fmt: skip
    profile: HardwareProfile = on_paper.machine("made up", **(defaults | values))
    return profile


def placed(profile: HardwareProfile, mode: str, mix: Mix) -> PlacementPlan:
    shape = small_shape()
    budget = int(0.7 * shape.weight_bytes)
    return plan_placement(shape, budget, 1 << 40, OffloadConfig(mode=mode), profile, mix)


def searched(profile: HardwareProfile, mode: str, mix: Mix) -> float:
    """The mix's cost in a mode, the shares of streamed rows by trying all."""
    plan = placed(profile, mode, mix)
    model = CostModel(profile, small_shape(), plan.places, ring_bytes=plan.staging_bytes)
    cost = 1.0
    for load in mix.loads:
        shares = [n / 128 for n in range(129)] if mode == "split" else [0.0]
        cost *= min(model.seconds(load, share) for share in shares)
    return cost ** (1 / 3)


def sweep(machines: list[HardwareProfile], mix: Mix) -> list[str]:
    """The modes that auto takes; each is the one of a search over everything."""
    chosen = []
    for profile in machines:
        costs = {mode: searched(profile, mode, mix) for mode in ("compute", "stream", "split")}
        mode = placed(profile, "auto", mix).mode
        assert costs[mode] <= 1.01 * min(costs.values()), (mode, costs)
        chosen.append(mode)
    return chosen


def test_only_the_link_decides() -> None:
    mix = Mix(num_seqs=1, chunk_tokens=1, num_context=64)
    links = [1e8 * 2**n for n in range(12)]
    # At one token of arithmetic a byte the host computes for 10 GB of weights a second.
    chosen = sweep([small_machine(link=link, host_flops=1e10) for link in links], mix)
    assert len(set(chosen)) >= 2, chosen
    # What the search says changes where auto changes, and so do the rows that are streamed.
    shares = []
    for link in links:
        plan = placed(small_machine(link=link, host_flops=1e11), "split", Mix(64, 64, 64))
        assert plan.split_table is not None
        shares.append(plan.split_table.share(64))
    assert shares == sorted(shares) and shares[0] < 0.15 and shares[-1] > 0.9, shares


def test_only_the_processor_decides() -> None:
    mix = Mix(num_seqs=64, chunk_tokens=256, num_context=64)
    flops = [1e9 * 4**n for n in range(9)]
    machines = [small_machine(host_flops=rate, link=2e9) for rate in flops]
    sweep(machines, mix)
    shares = []
    for profile in machines:
        table = placed(profile, "split", mix).split_table
        assert table is not None
        shares.append(table.share(64))
    assert shares == sorted(shares, reverse=True), shares
    assert shares[0] > 0.95 and shares[-1] < 0.1, shares


def test_only_the_queue_decides() -> None:
    """The same placement: few running requests are computed for, many streamed for; at each number
    the share is that of a search over all shares."""
    profile = dataclasses.replace(small_machine(), sync_s=0.0)
    mix = Mix(num_seqs=4096, chunk_tokens=4096, num_context=1)
    plan = placed(profile, "split", mix)
    table = plan.split_table
    assert table is not None
    model = CostModel(profile, small_shape(), plan.places, ring_bytes=plan.staging_bytes)
    shares = {}
    for tokens in (1 << n for n in range(13)):
        load = StepLoad(tokens, 1, 1)
        best = min(model.seconds(load, n / 256) for n in range(257))
        assert model.seconds(load, table) <= 1.02 * best, tokens
        shares[tokens] = table.share(tokens)
    assert shares[1] < 0.1 and shares[4096] > 0.9
    # T* = 1e12 / 25e9 = 40 tokens.
    assert shares[8] < 0.5 < shares[128]


def test_a_mode_that_is_asked_for_is_kept() -> None:
    mix = Mix(1, 1, 1)
    for mode in ("compute", "stream", "split"):
        assert placed(small_machine(link=1e8), mode, mix).mode == mode


def test_the_mix_counts_each_load_alike() -> None:
    """Twice as fast at one of the loads outweighs 1.5 times as slow at another."""
    mix = Mix(3, 5, 7)
    assert mix.loads == (StepLoad(1, 1, 7), StepLoad(3, 1, 7), StepLoad(1, 5, 5))
    shape = small_shape()
    judge = Judge(shape, small_machine(), OffloadConfig(), mix)
    assert judge.computes("head.weight") is True
    fast_link = Judge(
        shape, small_machine(link=1e12, dram=1e12, host_flops=1e9), OffloadConfig(), mix
    )
    assert fast_link.computes("head.weight") is False


# --- plans --------------------------------------------------------------------------------------


def config(
    *,
    length: int | None = None,
    cache: CacheConfig | None = None,
    limits: SchedulerConfig | None = None,
    offload: OffloadConfig | None = None,
    device: str = "auto",
    **model: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("m", max_model_len=length, **model),
        cache=cache or CacheConfig(),
        scheduler=limits or SchedulerConfig(),
        offload=offload or OffloadConfig(),
        device=DeviceConfig(device),
    )


def seven_b() -> ModelShape:
    shape: ModelShape = on_paper.llama_like(
        "7B", layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, vocab=152064
    )
    return shape


def check(plan: Plan) -> None:
    """Every byte has an account, nothing exceeds a memory, speed is that of the cost model."""
    for memory in plan.memories:
        assert list(memory.accounts) == list(ACCOUNTS)
        assert 0 <= memory.reserved_bytes <= memory.capacity_bytes, memory
    assert plan.memories[0].name == "host"
    lane = plan.memories[-1]
    assert lane.accounts["kv_cache"] > 0 and lane.accounts["activations"] > 0
    weights = sum(memory.accounts["weights"] for memory in plan.memories)
    assert weights >= plan.shape.weight_bytes
    assert set(plan.predictions) == {"ttft_1", "tpot_1", "ttft_full", "tpot_full"}
    for prediction in plan.predictions.values():
        assert prediction.seconds > 0 and prediction.limit in (*prediction.parts, "fixed costs")
        assert prediction.name
    assert plan.tokens_per_s_1 == pytest.approx(1 / plan.predictions["tpot_1"].seconds)
    full = plan.full_concurrency / plan.predictions["tpot_full"].seconds
    assert plan.tokens_per_s_full == pytest.approx(full)
    assert plan.tokens_per_s_full >= 0.99 * plan.tokens_per_s_1
    assert plan.max_concurrency >= 0.99


def test_a_model_that_fits_stays_on_the_accelerator() -> None:
    plan = make_plan(seven_b(), table_profile("A10", "epyc 7543", 64 << 30), config())
    check(plan)
    assert plan.placement is not None and plan.placement.mode == "resident"
    assert plan.placement.host_bytes == 0 and plan.split_table == ()
    host, device = plan.memories
    assert device.name == "A10" and device.capacity_bytes == int(24e9 * 0.92)
    assert device.accounts["runtime"] == 512 << 20 and device.accounts["graphs"] > 0
    assert host.accounts["weights"] == 0 and host.accounts["runtime"] == 220 << 20
    assert plan.predictions["tpot_1"].limit == "HBM"
    assert plan.predictions["ttft_1"].limit == "device arithmetic"
    # 14.1 GB without the table, at 80% of 600 GB/s.
    assert plan.predictions["tpot_1"].seconds == pytest.approx(14.14e9 / 480e9, rel=0.05)


def test_a_model_that_does_not_fit_is_split() -> None:
    shape = CASES[LLAMA].shape
    plan = make_plan(shape, table_profile("A100-80", "epyc 7763", 256 << 30), config())
    check(plan)
    assert plan.placement is not None and plan.placement.mode == "split"
    assert plan.split_table[0][0] == 1 and plan.split_table[-1][0] == 2048
    host, device = plan.memories
    assert device.accounts["staging"] == plan.placement.staging_bytes > 0
    assert host.accounts["weights"] == plan.placement.host_bytes
    assert plan.predictions["tpot_1"].limit == "DRAM"
    assert plan.predictions["ttft_1"].parts["link"] > 0


def test_without_an_accelerator_and_with_device_cpu() -> None:
    alone = make_plan(seven_b(), table_profile(None, "13900k", 64 << 30), config())
    check(alone)
    assert alone.placement is None and [m.name for m in alone.memories] == ["host"]
    assert alone.predictions["tpot_1"].limit == "DRAM"
    assert alone.predictions["ttft_1"].limit == "host arithmetic"
    profile = table_profile("A10", "13900k", 64 << 30)
    same = make_plan(seven_b(), profile, config(device="cpu"))
    assert same.memories == alone.memories and same.predictions == alone.predictions
    # At batch 1 no faster than memory gives the weights.
    assert alone.tokens_per_s_1 < 89.6e9 * 0.8 / 14e9


def test_the_longest_context() -> None:
    profile = table_profile("A10", "epyc 7543", 64 << 30)
    shape = seven_b()
    assert make_plan(shape, profile, config()).kv.max_model_len == 32768
    capped = config(max_model_len_cap=8000)
    assert make_plan(shape, profile, capped).kv.max_model_len == 8000
    assert make_plan(shape, profile, config(length=4096)).kv.max_model_len == 4096
    with pytest.raises(OptionError, match=r"--max-model-len 40000 is more than the 32768 tokens"):
        make_plan(shape, profile, config(length=40000))
    unknown = dataclasses.replace(shape, max_positions=None)
    with pytest.raises(OptionError, match="does not say how long a context may be"):
        make_plan(unknown, profile, config())
    assert make_plan(unknown, profile, config(length=4096)).kv.max_model_len == 4096


def test_weights_leave_room_for_the_context_that_was_asked_for() -> None:
    """Else a start with --max-model-len would be refused though offload makes room."""
    shape = CASES[QWEN].shape
    profile = table_profile("rtx 4090", "12700k", 96 << 30)
    for length in (2048, 8192, 32768):
        plan = make_plan(shape, profile, config(length=length))
        check(plan)
        assert plan.kv.max_model_len == length and plan.max_concurrency >= 1


def test_concurrency_counts_requests_of_prompt_and_answer() -> None:
    profile = table_profile("A10", "epyc 7543", 64 << 30)
    plan = make_plan(seven_b(), profile, config(), prompt_len=1000, output_len=1000)
    tokens = plan.kv.num_blocks[0] * 16
    assert plan.full_concurrency == tokens // 2000
    assert plan.max_concurrency == pytest.approx(tokens / 32768)
    few = make_plan(seven_b(), profile, config(limits=SchedulerConfig(max_num_seqs=3)))
    assert few.full_concurrency == 3
    short = make_plan(seven_b(), profile, config(length=256), prompt_len=1000)
    assert "do not fit into the context of 256" in short.warnings[0]
    assert "255 tokens" in short.predictions["ttft_1"].name


def test_a_step_that_comes_again_is_reckoned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reckoned: list[StepLoad] = []
    step = CostModel.step

    def counted(self: CostModel, load: StepLoad, *rest: Any) -> StepTime:
        reckoned.append(load)
        return step(self, load, *rest)

    monkeypatch.setattr(CostModel, "step", counted)
    limits = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=64)
    profile = table_profile(None, "epyc 7543", 256 << 30)
    plan = make_plan(seven_b(), profile, config(limits=limits))
    assert plan.full_concurrency == 64
    # 512 tokens in steps of 16, for one request and for all, and a step of answers of each.
    assert len(reckoned) == 2 * 32 + 2
    one, full = (plan.predictions[name] for name in ("ttft_1", "ttft_full"))
    assert full.seconds == pytest.approx(64 * one.seconds)
    assert full.parts == pytest.approx({k: 64 * v for k, v in one.parts.items()})


def test_a_small_accelerator_of_the_simulator_has_no_context() -> None:
    profile = table_profile("A10", "epyc 7543", 64 << 30)
    assert profile.device is not None
    sim = dataclasses.replace(profile, device=dataclasses.replace(profile.device, name="sim:0"))
    plan = make_plan(seven_b(), sim, config())
    assert plan.memories[1].accounts["runtime"] == 0


# --- what does not fit --------------------------------------------------------------------------


def options(flags: str, base: EngineConfig) -> EngineConfig:
    """What a proposal's text makes of a configuration."""

    def value(name: str) -> str | None:
        match = re.search(rf"--{name} (\S+)", flags)
        return None if match is None or "leave out" in flags else match[1]

    model, cache, limits, offload = base.model, base.cache, base.scheduler, base.offload
    if kind := value("quantization"):
        model = dataclasses.replace(model, quantization=kind)
    if length := value("max-model-len"):
        model = dataclasses.replace(model, max_model_len=int(length))
    if kv := value("kv-cache-dtype"):
        cache = dataclasses.replace(cache, kv_cache_dtype=kv)
    if seqs := value("max-num-seqs"):
        limits = dataclasses.replace(limits, max_num_seqs=int(seqs))
    if tokens := value("max-num-batched-tokens"):
        limits = dataclasses.replace(limits, max_num_batched_tokens=int(tokens))
    if mode := value("offload-mode"):
        offload = dataclasses.replace(offload, mode=mode)
    if "leave out" in flags and "offload" in flags:
        offload = OffloadConfig()
    if flags.startswith(("leave out --kv-cache", "leave out --num-gpu")):
        cache = dataclasses.replace(cache, kv_cache_bytes=None, num_blocks=None)
    return dataclasses.replace(base, model=model, cache=cache, scheduler=limits, offload=offload)


def reshaped(shape: ModelShape, base: EngineConfig) -> Callable[[EngineConfig], ModelShape]:
    from ambidex.memory.proposals import reckoned

    return lambda changed: reckoned(shape, base, changed)


REFUSED: dict[str, tuple[ModelShape, HardwareProfile, EngineConfig]] = {
    "weights beyond both memories": (
        CASES[LLAMA].shape,
        table_profile("A100-80", "epyc 7763", 64 << 30),
        config(),
    ),
    "offload forbidden": (
        CASES[QWEN].shape,
        table_profile("rtx 4090", "12700k", 96 << 30),
        config(offload=OffloadConfig(cpu_offload_bytes=0)),
    ),
    "a context that no KV cache holds": (
        seven_b(),
        table_profile("A10", "epyc 7543", 64 << 30),
        config(length=32768, cache=CacheConfig(kv_cache_bytes=1 << 30)),
    ),
    "a KV cache that holds nothing": (
        seven_b(),
        table_profile("A10", "epyc 7543", 64 << 30),
        config(cache=CacheConfig(kv_cache_bytes=1000)),
    ),
    "a KV cache beyond the memory": (
        seven_b(),
        table_profile("A10", "epyc 7543", 64 << 30),
        config(cache=CacheConfig(kv_cache_bytes=100 << 30)),
    ),
    "blocks beyond the memory, and no offload": (
        CASES[QWEN].shape,
        table_profile("rtx 4090", "12700k", 96 << 30),
        config(cache=CacheConfig(num_blocks=10**6), offload=OffloadConfig(cpu_offload_bytes=0)),
    ),
    "streaming that leaves no room": (
        CASES[QWEN].shape,
        table_profile("rtx 4090", "12700k", 96 << 30),
        config(offload=OffloadConfig(mode="stream", prefetch_step=30)),
    ),
    "more than the host": (seven_b(), table_profile(None, "5800x", 14 << 30), config()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_proposed_was_planned_and_fits(name: str) -> None:
    shape, profile, base = REFUSED[name]
    with pytest.raises(PlanRefused) as caught:
        make_plan(shape, profile, base)
    proposals = caught.value.proposals
    assert 1 <= len(proposals) <= 3
    for proposal in proposals:
        changed = options(proposal.flags, base)
        assert changed != base, proposal.flags
        plan = make_plan(reshaped(shape, base)(changed), profile, changed)
        check(plan)
        assert plan.predictions == proposal.predictions
        assert proposal.flags in str(caught.value)
    assert "These were planned, and fit: " in str(caught.value)


def test_an_offload_is_proposed_before_fewer_bits() -> None:
    shape, profile, base = REFUSED["offload forbidden"]
    with pytest.raises(PlanRefused) as caught:
        make_plan(shape, profile, base)
    assert caught.value.proposals[0].flags == f"leave out {FORBIDS}"
    assert f"{FORBIDS} forbids" in str(caught.value)


def test_a_size_of_the_kv_cache_is_not_held_on_to() -> None:
    for name in ("a KV cache that holds nothing", "a KV cache beyond the memory"):
        shape, profile, base = REFUSED[name]
        with pytest.raises(PlanRefused) as caught:
            make_plan(shape, profile, base)
        assert "leave out --kv-cache-memory-bytes" in [p.flags for p in caught.value.proposals]
        # Beside weights that need fewer bits too.
        with pytest.raises(PlanRefused) as caught:
            make_plan(shape, table_profile(None, "5800x", 8 << 30), base)
        flags = [p.flags for p in caught.value.proposals]
        assert any("leave out --kv-cache-memory-bytes, --quantization" in f for f in flags), flags


def test_a_shorter_context_is_proposed_with_its_length() -> None:
    shape, profile, base = REFUSED["a context that no KV cache holds"]
    with pytest.raises(PlanRefused) as caught:
        make_plan(shape, profile, base)
    flags = [proposal.flags for proposal in caught.value.proposals]
    match = re.fullmatch(r"--max-model-len (\d+)", flags[0])
    # A gibibyte of 56 KiB a token.
    assert match is not None and 0.85 * 18724 <= int(match[1]) <= 18724


def test_too_big_for_every_proposal() -> None:
    profile = table_profile("rtx 3060", "5800x", 16 << 30)
    with pytest.raises(PlanRefused) as caught:
        make_plan(CASES[LLAMA].shape, profile, config())
    assert caught.value.proposals == ()
    assert "a machine with more memory, or a smaller model" in str(caught.value)


def test_a_host_too_small_for_its_part_of_steps_says_what_helps() -> None:
    profile = table_profile("A100-80", "epyc 7543", 1 << 30)
    with pytest.raises(PlanRefused) as caught:
        make_plan(seven_b(), profile, config())
    assert "of host memory beside the accelerator's, and 804.00 MiB are free" in caught.value.reason
    assert "Lower --max-num-batched-tokens or --max-num-seqs" in caught.value.reason


def small_gpu(size: str) -> HardwareProfile:
    numbers = f"memory={size},bandwidth=100GB/s,flops=10T,link=4GB/s"
    return table_profile(numbers, "epyc 7543", 64 << 30)


def test_steps_too_large_for_the_accelerator_come_with_smaller_ones() -> None:
    """The refusal names limits that leave weights what it says, and they are planned."""
    profile = small_gpu("2GiB")
    with pytest.raises(PlanRefused) as caught:
        make_plan(seven_b(), profile, config())
    match = re.search(
        r"--max-num-batched-tokens (\d+) --max-num-seqs (\d+) leave ([\d.]+) MiB for weights",
        caught.value.reason,
    )
    assert match is not None
    tokens, seqs, left = int(match[1]), int(match[2]), float(match[3])
    assert f"--max-num-seqs {seqs} --max-num-batched-tokens {tokens}" in str(caught.value)
    limits = SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    plan = make_plan(seven_b(), profile, dataclasses.replace(config(), scheduler=limits))
    taken = plan.memories[1].accounts
    others = sum(taken[name] for name in ("weights", "staging"))
    assert 0 < others <= (left + 1) * 2**20


def test_a_cache_that_is_too_large_is_what_is_named() -> None:
    asked = config(cache=CacheConfig(kv_cache_bytes=90 << 30))
    with pytest.raises(PlanRefused) as caught:
        make_plan(seven_b(), table_profile("A10", "epyc 7543", 64 << 30), asked)
    assert "are left for cache and weights: lower --kv-cache-memory-bytes" in caught.value.reason
    assert "--max-num-batched-tokens" not in caught.value.reason


def test_capturing_nothing_is_the_last_way_out() -> None:
    with pytest.raises(PlanRefused) as caught:
        make_plan(seven_b(), small_gpu("1.2GiB"), config())
    eager = "--max-num-seqs 16 --max-num-batched-tokens 512 --enforce-eager"
    assert [proposal.flags for proposal in caught.value.proposals] == [eager]


def test_a_comfortable_cache_gives_way_to_weights() -> None:
    """An eighth of the accelerator for the cache would leave nothing for weights here."""
    with pytest.raises(PlanRefused) as caught:
        make_plan(seven_b(), small_gpu("1.5GiB"), config())
    smaller = "--max-num-seqs 16 --max-num-batched-tokens 512"
    assert [proposal.flags for proposal in caught.value.proposals] == [
        smaller,
        f"{smaller} --enforce-eager",
    ]


def test_the_host_alone_is_the_very_last_way_out() -> None:
    """Of this machine; one that was described has an accelerator because that is asked about."""
    described = small_gpu("0.7GiB")
    here = dataclasses.replace(described, origin="measured")
    for profile, flags in ((described, []), (here, ["--device cpu"])):
        with pytest.raises(PlanRefused) as caught:
            make_plan(seven_b(), profile, config())
        assert [proposal.flags for proposal in caught.value.proposals] == flags
    cpu = dataclasses.replace(config(), device=DeviceConfig("cpu"))
    alone = make_plan(seven_b(), here, cpu)
    assert caught.value.proposals[0].predictions == alone.predictions
    with pytest.raises(PlanRefused) as caught:
        make_plan(seven_b(), table_profile("A10", "epyc 7543", 2 << 30), cpu)
    assert "--device cpu" not in str(caught.value)


def test_a_refusal_crosses_processes() -> None:
    shape, profile, base = REFUSED["more than the host"]
    with pytest.raises(PlanRefused) as caught:
        make_plan(shape, profile, base)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.proposals == caught.value.proposals


def test_shapes_of_other_options_are_asked_for() -> None:
    shape, profile, base = REFUSED["more than the host"]
    asked = []

    def reshape(changed: EngineConfig) -> ModelShape:
        asked.append((changed.model.quantization, changed.cache.kv_cache_dtype))
        return reshaped(shape, base)(changed)

    with pytest.raises(PlanRefused):
        make_plan(shape, profile, base, reshape=reshape)
    assert ("int4", "auto") in asked and (None, "int8") in asked
    assert (None, "auto") not in asked, "the shape is the same"


def test_what_is_quantised_already_is_not_quantised_again() -> None:
    shape = seven_b()
    small = dataclasses.replace(
        shape,
        weights=tuple(
            dataclasses.replace(w, num_bytes=w.num_bytes // 4, form="int4") for w in shape.weights
        ),
    )
    with pytest.raises(PlanRefused) as caught:
        make_plan(small, table_profile(None, "5800x", 3 << 30), config())
    assert not any("--quantization" in p.flags for p in caught.value.proposals)


# --- limits in words ----------------------------------------------------------------------------


def test_a_slow_link_limits_a_prompt_and_slow_arithmetic_too() -> None:
    profile = table_profile("A100-80", "epyc 7763", 256 << 30)
    streamed = config(offload=OffloadConfig(mode="stream"))
    plan = make_plan(CASES[LLAMA].shape, profile, streamed)
    assert plan.predictions["tpot_1"].limit == "link"
    assert plan.placement is not None
    seconds = plan.placement.streamed_bytes / (31.5e9 * 0.8)
    assert plan.predictions["tpot_1"].seconds == pytest.approx(seconds, rel=0.05)
    slow = dataclasses.replace(
        profile,
        host=dataclasses.replace(profile.host, products={"float32": ProductRate(((1, 1e9),))}),
    )
    computed = make_plan(CASES[LLAMA].shape, slow, config(offload=OffloadConfig(mode="compute")))
    assert computed.predictions["ttft_1"].limit == "host arithmetic"
    assert all(place.placement is not Placement.SPLIT for place in plan.placement.places.values())


def test_a_link_limit_is_a_slower_link() -> None:
    profile = table_profile("A100-80", "epyc 7763", 256 << 30)
    plans = [
        make_plan(
            CASES[LLAMA].shape,
            dataclasses.replace(profile, link=LinkRate(link), link_back=LinkRate(link)),
            config(offload=OffloadConfig(link_limit_bytes_per_s=limit)),
        )
        for link, limit in ((25e9, 5e9), (5e9, None))
    ]
    limited, slow = (SplitTable(plan.split_table).share(256) for plan in plans)
    assert limited == pytest.approx(slow, abs=0.05)
