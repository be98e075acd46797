"""How well copies, the accelerator and the host overlap, on the simulated accelerator.

    python benchmarks/offload.py MODEL [--clock virtual real] [--only CASE ...]
        [--timeline FILE.png] [--record]

Decode steps of one request, weights in float32, one thread a side, each on a CPU of its own. The
link is as fast as it takes for copies to take as long as the compute that they overlap with; beside
bfloat16 weights, as they are and compressed, it is a quarter of the accelerator's bandwidth. On the
virtual clock every figure is a consequence of the cost model. On the real one operations sleep
until their modelled end; both sides are 1/32 as fast, so that arithmetic, Python and threads that
wait for a CPU take little beside that. Steps in which arithmetic was behind by more than 1% of the
step, all streams together, are counted as late, and left out unless all are. --record appends the
table to benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record_levels import cpu_model

from ambidex.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
)
from ambidex.device.stream import Span
from ambidex.engine.engine import Engine
from ambidex.kernels.cpu.levels import machine_name
from ambidex.request import EngineRequest, SamplingParams

HERE = Path(__file__).parent
#: Of the accelerator, in cores, and how fast a core is taken to be.
SPEED = 0.25
CORES = {"virtual": 1.0, "real": 1 / 32}
#: A step is late if arithmetic was behind by more than this part of it.
LATE = 0.01
#: For sys.setswitchinterval: a thread that wakes up has Python to itself after so long.
_SWITCH_S = 100e-6
#: The tied head too: it is a fifth of a small model.
LAYERS = ("layers.*", "embedding")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    offload: OffloadConfig
    #: The step is compared with the longest of these streams, or with the sum of them.
    streams: tuple[str, ...]
    is_sum: bool
    limit: float
    dtype: str = "float32"
    #: Of the accelerator's own bandwidth; None: copies take as long as its work.
    link_share: float | None = None


CASES = (
    Case(
        "streamed",
        OffloadConfig(patterns=LAYERS, mode="stream"),
        ("compute", "copy_in"),
        False,
        1.15,
    ),
    Case(
        "streamed, not ahead",
        OffloadConfig(patterns=LAYERS, mode="stream", is_async=False),
        ("compute", "copy_in"),
        True,
        1.15,
    ),
    Case(
        "MLPs on the host",
        OffloadConfig(patterns=("*.mlp.*",), mode="compute"),
        ("compute", "host"),
        True,
        1.1,
    ),
    Case(
        "split",
        OffloadConfig(patterns=LAYERS, mode="split"),
        ("compute", "copy_in", "host"),
        False,
        1.15,
    ),
    *(
        Case(
            f"bfloat16 streamed{', compressed' if is_compressed else ''}",
            OffloadConfig(patterns=LAYERS[:1], mode="stream", compress=is_compressed),
            ("compute", "copy_in"),
            False,
            1.15,
            "bfloat16",
            0.25,
        )
        for is_compressed in (False, True)
    ),
)


@dataclass(slots=True)
class Measured:
    """Means over steps: seconds of a step and of each stream's work; bytes of each stream."""

    step_s: float
    busy_s: dict[str, float]
    num_bytes: dict[str, int]
    num_steps: int
    num_late: int
    #: How far arithmetic was behind, all streams together, as a part of the step.
    behind: float
    #: Of one step.
    spans: list[Span] = field(default_factory=list)


def measure(args: argparse.Namespace, clock: str, core: float, case: Case, link: float) -> Measured:
    device = (
        f"sim:memory=4GiB,link={round(link)}B/s,speed={SPEED},clock={clock},"
        f"core_bandwidth={round(core * args.core_bandwidth * 1e9)}B/s,"
        f"core_flops={core * args.core_flops * 1e9 / (1 << 30):.9f}G"
    )
    engine = Engine(
        EngineConfig(
            model=ModelConfig(str(args.model), max_model_len=512, dtype=case.dtype),
            cache=CacheConfig(kv_cache_bytes=64 << 20),
            scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4),
            device=DeviceConfig(device),
            offload=case.offload,
            cpu_threads=1,
            # The accelerator's thread takes another.
            cpu_bind=str(min(os.sched_getaffinity(0))),
        )
    )
    try:
        return _steps(engine, args.steps)
    finally:
        engine.close()


def _steps(engine: Engine, count: int) -> Measured:
    accelerator: Any = engine.lane.hands.accelerator
    clock = accelerator.clock
    params = SamplingParams(temperature=0.0, max_tokens=count + 6, ignore_eos=True)
    engine.add_request(EngineRequest("r", list(range(5, 21)), params, 0.0))
    steps = []
    while engine.has_work:
        began, first, late_s = clock.host_s, len(clock.timeline), clock.late_s
        engine.step()
        spans = [clock.timeline[i] for i in range(first, len(clock.timeline))]
        step_s = clock.host_s - began
        steps.append((step_s, spans, (clock.late_s - late_s) / step_s))
    # The first make and capture what is made once; the last one has nothing to fetch for.
    steps = steps[4:-1]
    good = [step for step in steps if step[2] <= LATE] or steps
    busy: dict[str, float] = {}
    num_bytes: dict[str, int] = {}
    for _, spans, _ in good:
        for span in spans:
            busy[span.stream] = busy.get(span.stream, 0.0) + span.end_s - span.start_s
            num_bytes[span.stream] = num_bytes.get(span.stream, 0) + span.num_bytes
    size = len(good)
    return Measured(
        statistics.fmean(step[0] for step in good),
        {name: total / size for name, total in busy.items()},
        {name: total // size for name, total in num_bytes.items()},
        len(steps),
        sum(1 for step in steps if step[2] > LATE),
        statistics.fmean(step[2] for step in steps),
        good[len(good) // 2][1],
    )


def link_for(args: argparse.Namespace, core: float, case: Case) -> float:
    """Bytes a second of the case's share of the accelerator's bandwidth, or at which copies take as
    long as the accelerator's own work; times are those of the cost model."""
    if case.link_share is not None:
        return case.link_share * SPEED * core * args.core_bandwidth * 1e9
    link = 8e9 * SPEED * core
    for _ in range(2):
        found = measure(args, "virtual", core, case, link)
        copied = found.num_bytes.get("copy_in", 0)
        if not copied:
            return link
        link = copied / found.busy_s["compute"]
    return link


def check_drawing() -> None:
    """Before minutes of measurements."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--timeline needs matplotlib: pip install matplotlib.")


def draw(spans: list[Span], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    start = min(span.start_s for span in spans)
    shortest = 1e-3 * (max(span.end_s for span in spans) - start)
    names = ["compute", "host", "copy_in", "copy_in_small", "copy_out"]
    # Streams with work too short to be seen are left out.
    shown = [
        name
        for name in names
        if any(span.stream == name and span.end_s - span.start_s >= shortest for span in spans)
    ]
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.6 * len(shown)))
    colours = {"linear": "#4c72b0", "gated_linear": "#55a868", "attention": "#c44e52"}
    copy, other = "#dd8452", "#8c8c8c"
    for row, name in enumerate(shown):
        for span in spans:
            if span.stream == name:
                axes.broken_barh(
                    [((span.start_s - start) * 1e3, (span.end_s - span.start_s) * 1e3)],
                    (row - 0.4, 0.8),
                    facecolors=colours.get(span.name, copy if "copy" in name else other),
                    edgecolor="white",
                    linewidth=0.2,
                )
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    keys = {**colours, "copy": copy, "other": other}
    patches = [Patch(color=colour, label=name) for name, colour in keys.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clock", nargs="+", choices=list(CORES), default=["virtual"])
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--core-bandwidth", type=float, default=16.0, help="GB/s of one core")
    parser.add_argument("--core-flops", type=float, default=80.0, help="GFLOP/s of one core")
    parser.add_argument("--timeline", type=Path, help="PNG of a streamed step")
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    args = parser.parse_args()
    if args.timeline is not None:
        check_drawing()
    lines = [
        f"## {time.strftime('%Y-%m-%d', time.gmtime())}: {cpu_model()}, {machine_name()}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}",
        "",
        f"### Overlap on the simulated accelerator: {args.model.name}, float32, one request",
        "",
        f"`benchmarks/offload.py --clock {' '.join(args.clock)} --steps {args.steps}`; the host is "
        f"a core of {args.core_bandwidth:g} GB/s and {args.core_flops:g} GFLOP/s, the accelerator "
        f"{SPEED} of it; on the real clock both have 1/32 of that. Behind: how much "
        "longer arithmetic took than modelled, all streams together, as a part of the step; late: "
        "steps where that is more than 1%, left out unless all are.",
        "",
        "| clock | weights | step ms | accelerator | host | copies | MB copied | step / bound | "
        "limit | behind | late |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    is_good = True
    sys.setswitchinterval(_SWITCH_S)
    for clock in args.clock:
        for case in CASES:
            if args.only is not None and case.name not in args.only:
                continue
            core = CORES[clock]
            link = link_for(args, core, case)
            found = measure(args, clock, core, case, link)
            parts = [found.busy_s.get(name, 0.0) for name in case.streams]
            bound = sum(parts) if case.is_sum else max(parts)
            ratio = found.step_s / bound
            is_good = is_good and ratio <= case.limit
            cells = [f"{found.busy_s.get(n, 0) * 1e3:.1f}" for n in ("compute", "host", "copy_in")]
            lines.append(
                f"| {clock} | {case.name} | {found.step_s * 1e3:.1f} | {' | '.join(cells)} | "
                f"{found.num_bytes.get('copy_in', 0) / 1e6:.1f} | "
                f"{ratio:.3f} ({'sum' if case.is_sum else 'longest'}) | {case.limit} | "
                f"{found.behind:.1%} | {found.num_late} of {found.num_steps} |"
            )
            print(lines[-1], flush=True)
            if args.timeline is not None and case.name == "streamed" and clock == args.clock[-1]:
                draw(
                    found.spans, args.timeline, f"One decode step, weights streamed ({clock} clock)"
                )
    print("\n".join(lines), flush=True)
    if args.record:
        with (HERE / "RESULTS.md").open("a") as file:
            file.write("\n" + "\n".join(lines) + "\n")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
