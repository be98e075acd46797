"""Predicted and measured: time to the first token, and time per token after it, on this machine.

    python benchmarks/foretold.py --models FOLDER [--seed N] [--only NAME ...] [--record]

FOLDER holds the GGUF files named in ``MODELS``; models whose file is not there are left out. For
each configuration the engine is loaded, and three times the machine is probed, the prediction made
from that probe, and the same engine measured; medians of the three are compared. A turn in which
other programs had more than a fiftieth of the processors is taken again, up to three times. The
configurations of ``CASES`` are judged; four more are drawn at random, with a seed that is printed,
and are reported beside them. ``TTFT`` is the time
from the arrival of all prompts until each has its first token, ``TPOT`` that of a decode step of
the whole batch; medians of what is measured. ``others`` is the share of the machine's processors
that other programs had while it was probed and while it was measured: where it is not small the row
says little. Constants are in ``ambidex/device/probe.py`` and
``ambidex/memory/operations.py``; nothing is fitted here.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from record_levels import cpu_model

from ambidex.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ambidex.device.cpu import CPUDevice
from ambidex.device.probe import measure_host
from ambidex.engine.engine import Engine
from ambidex.kernels.cpu.levels import machine_name
from ambidex.kernels.cpu.topology import plan_threads
from ambidex.memory.operations import StepLoad, host_step_parts, host_step_s, prefill_steps
from ambidex.memory.profile import Processor
from ambidex.request import EngineRequest, SamplingParams
from ambidex.weights.shape import model_shape

HERE = Path(__file__).parent
LOW, HIGH = 0.85, 1.15

#: Name -> (file, dtype, quantization).
MODELS = {
    "SmolLM2-135M float32": ("SmolLM2-135M-Instruct.F16.gguf", "float32", None),
    "SmolLM2-135M bfloat16": ("SmolLM2-135M-Instruct.F16.gguf", "bfloat16", None),
    "SmolLM2-135M int8": ("SmolLM2-135M-Instruct.F16.gguf", "auto", "int8"),
    "SmolLM2-135M Q8_0": ("SmolLM2-135M-Instruct.Q8_0.gguf", "auto", None),
    "SmolLM2-135M Q4_1": ("SmolLM2-135M-Instruct.Q4_1.gguf", "auto", None),
    "Qwen2.5-0.5B Q4_K_M": ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "auto", None),
    "1.5B (random) Q8_0": ("random-qwen2-1.5b.Q8_0.gguf", "auto", None),
}


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    batch: int
    prompt: int
    #: Tokens of a step.
    chunk: int = 2048


CASES = (
    Case("SmolLM2-135M float32", 1, 512),
    Case("SmolLM2-135M float32", 8, 128),
    Case("SmolLM2-135M bfloat16", 1, 1024),
    Case("SmolLM2-135M bfloat16", 4, 256),
    Case("SmolLM2-135M int8", 2, 512),
    Case("SmolLM2-135M Q8_0", 1, 2048, 512),
    Case("SmolLM2-135M Q8_0", 16, 128),
    Case("SmolLM2-135M Q4_1", 1, 128),
    Case("SmolLM2-135M Q4_1", 4, 512),
    Case("Qwen2.5-0.5B Q4_K_M", 1, 512),
    Case("Qwen2.5-0.5B Q4_K_M", 1, 2048, 1024),
    Case("Qwen2.5-0.5B Q4_K_M", 16, 128),
    Case("1.5B (random) Q8_0", 1, 128),
    Case("1.5B (random) Q8_0", 4, 256),
)
#: What is drawn from.
BATCHES, PROMPTS, CHUNKS = (1, 2, 4, 8, 16), (128, 256, 512, 1024, 2048), (512, 2048)
NUM_DRAWN = 4
#: A decode step is measured after this many tokens of output, on average.
NUM_OUTPUT = 17
#: Seconds after which no further round of a measurement begins.
ENOUGH_S = 1.5
MAX_ROUNDS = 6
#: Turns of a probe and a measurement; those that are disturbed are taken again.
NUM_TURNS, MORE_TURNS = 3, 3
DISTURBED = 0.02


@dataclass(slots=True)
class Outcome:
    case: Case
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    #: Bytes a second and so on, of the probe that the prediction is from.
    processor: Processor
    #: While probing, while measuring.
    others: tuple[float, float]

    def cells(self) -> str:
        case = self.case
        cells = [case.model, str(case.batch), str(case.prompt), str(case.chunk)]
        for predicted, measured in (self.ttft, self.tpot):
            cells += [f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}"]
            cells.append(f"{predicted / measured:.2f}")
        cells.append(f"{self.processor.bytes_per_s / 1e9:.1f}")
        cells.append(" / ".join(f"{share:.0%}" for share in self.others))
        return f"| {' | '.join(cells)} |"

    @property
    def ratios(self) -> tuple[float, float]:
        return self.ttft[0] / self.ttft[1], self.tpot[0] / self.tpot[1]


HEADER = (
    "| model | batch | prompt | tokens a step | TTFT predicted, ms | measured | ratio | "
    "TPOT predicted, ms | measured | ratio | probe: GB/s | others |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def drawn(seed: int, models: Sequence[str]) -> list[Case]:
    """Four configurations that nobody chose; none of them among the judged."""
    choose, found = random.Random(seed), []
    while len(found) < NUM_DRAWN:
        case = Case(
            choose.choice(models),
            choose.choice(BATCHES),
            choose.choice(PROMPTS),
            choose.choice(CHUNKS),
        )
        # All prompts of a batch in one step, or one prompt in several.
        fits = case.batch * case.prompt <= case.chunk or case.batch == 1
        if fits and case not in found and case not in CASES:
            found.append(case)
    return found


def make_config(case: Case, folder: Path, threads: int) -> EngineConfig:
    file, dtype, quantization = MODELS[case.model]
    length = case.prompt + NUM_OUTPUT + 16
    return EngineConfig(
        model=ModelConfig(
            str(folder / file), dtype=dtype, quantization=quantization, max_model_len=length
        ),
        cache=CacheConfig(enable_prefix_caching=False, prefault=True),
        scheduler=SchedulerConfig(max_num_batched_tokens=case.chunk, max_num_seqs=16),
        cpu_threads=threads,
    )


def probe(engine: Engine) -> Processor:
    """Probe in a thread of its own, so that this one stays where the system put it."""
    from concurrent.futures import ThreadPoolExecutor

    plan = engine.lane.hands.threads

    def measure() -> Processor:
        device = CPUDevice(plan.num_threads, cpus=plan.cpus)
        try:
            return measure_host(device, "this machine", 0)
        finally:
            device.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


class Others:
    """How much of the processors others have, between two looks."""

    def __init__(self) -> None:
        self._before = self._look()

    def share(self) -> float:
        """Since the last look; 0 where the system does not say."""
        before, self._before = self._before, self._look()
        wall, busy, own = (now - then for now, then in zip(self._before, before, strict=True))
        return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1))) if wall else 0.0

    @staticmethod
    def _look() -> tuple[float, float, float]:
        """Seconds: of the clock, of all processors' work, of this process's."""
        try:
            first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            first = []
        # user, nice, system; irq, softirq, steal
        busy = sum(int(first[i]) for i in (0, 1, 2, 5, 6, 7) if i < len(first))
        return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()


class Measurement:
    """What the engine takes for one case."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self._engine, self._case = engine, case
        self._choose = random.Random(case.prompt)
        self._count = 0
        self.ttft: list[float] = []
        self.tpot: list[float] = []

    def run(self) -> tuple[float, float]:
        """Medians of (seconds to the first tokens, seconds of a decode step)."""
        self._round(min(self._case.prompt, 64))
        self.ttft.clear()
        self.tpot.clear()
        began = time.perf_counter()
        for _ in range(MAX_ROUNDS):
            self._round(self._case.prompt)
            if time.perf_counter() - began > ENOUGH_S:
                break
        return statistics.median(self.ttft), statistics.median(self.tpot)

    def _round(self, prompt: int) -> None:
        engine, batch = self._engine, self._case.batch
        vocab = engine.lane.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
        requests = []
        for _ in range(batch):
            self._count += 1
            ids = [self._choose.randrange(vocab // 2) for _ in range(prompt)]
            requests.append(EngineRequest(str(self._count), ids, params, time.monotonic()))
        began = last = time.perf_counter()
        for request in requests:
            engine.add_request(request)
        waiting = {request.request_id for request in requests}
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter()
            if not waiting:
                self.tpot.append(now - last)
            elif outputs:
                waiting -= {output.request_id for output in outputs}
                if not waiting:
                    self.ttft.append(now - began)
            last = now


def judge(case: Case, folder: Path, threads: int, verbose: bool) -> Outcome:
    config = make_config(case, folder, threads)
    engine = Engine(config)
    try:
        shape = model_shape(config.model.model, config)
        context = case.prompt + (NUM_OUTPUT + 1) // 2
        turns: list[Outcome] = []
        while len(turns) < NUM_TURNS + MORE_TURNS:
            watch = Others()
            processor = probe(engine)
            others = watch.share()
            predicted = (
                sum(
                    host_step_s(processor, shape, load)
                    for load in prefill_steps(case.prompt, case.chunk, case.batch)
                ),
                host_step_s(processor, shape, StepLoad(case.batch, 1, context)),
            )
            watch.share()
            measured = Measurement(engine, case).run()
            shares = others, watch.share()
            ttft, tpot = zip(predicted, measured, strict=True)
            turns.append(Outcome(case, ttft, tpot, processor, shares))
            quiet = [turn for turn in turns if max(turn.others) <= DISTURBED]
            if len(quiet) == NUM_TURNS:
                turns = quiet
                break
        if verbose:
            for load in (
                StepLoad(case.batch, min(case.prompt, case.chunk), case.prompt),
                StepLoad(case.batch, 1, context),
            ):
                parts = host_step_parts(processor, shape, load)
                print("   ", {name: f"{s * 1e3:.2f} ms" for name, s in parts.items()}, flush=True)
    finally:
        engine.close()
    return Outcome(
        case,
        _medians(turn.ttft for turn in turns),
        _medians(turn.tpot for turn in turns),
        turns[0].processor,
        _medians(turn.others for turn in turns),
    )


def _medians(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--seed", type=int, help="of the configurations drawn at random")
    parser.add_argument("--only", nargs="+", default=[], help="parts of models' names")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--verbose", action="store_true", help="the parts of a prediction")
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    folders = {
        name: folder
        for name, (file, _, _) in MODELS.items()
        for folder in args.models
        if (folder / file).is_file()
        and (not args.only or any(part.lower() in name.lower() for part in args.only))
    }
    threads = args.threads or plan_threads(None, None, os.environ).num_threads
    chosen = [case for case in CASES if case.model in folders]
    print(
        f"{len(chosen)} configurations and {NUM_DRAWN} drawn with seed {seed}; left out, having no "
        f"file or not asked for: {', '.join(set(MODELS) - set(folders)) or 'none'}",
        flush=True,
    )
    title = (
        f"## {time.strftime('%Y-%m-%d', time.gmtime())}: {cpu_model()}, {machine_name()}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    lines = [title, "", f"### Foretold: predicted over measured, CPU lane, {threads} threads", ""]
    began = time.perf_counter()
    for name, cases in (("Judged", chosen), ("Drawn", drawn(seed, sorted(folders)))):
        print(HEADER, flush=True)
        outcomes = []
        for case in cases:
            outcome = judge(case, folders[case.model], threads, args.verbose)
            outcomes.append(outcome)
            print(f"{outcome.cells()} ({time.perf_counter() - began:.0f} s)", flush=True)
        ratios = [ratio for outcome in outcomes for ratio in outcome.ratios]
        good = sum(LOW <= ratio <= HIGH for ratio in ratios)
        lines.append(
            f"{name}{f' with seed {seed}' if name == 'Drawn' else ''}: {good} of {len(ratios)} "
            f"ratios within {LOW} to {HIGH}; {min(ratios):.2f} to {max(ratios):.2f}. Probes and "
            "measurements take turns."
        )
        print(lines[-1], flush=True)
        lines += ["", HEADER, *(outcome.cells() for outcome in outcomes), ""]
    if args.record:
        path = HERE / "RESULTS.md"
        before = path.read_text() if path.exists() else "# Results\n\nNewest last.\n"
        path.write_text(before.rstrip("\n") + "\n\n" + "\n".join(lines).rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
