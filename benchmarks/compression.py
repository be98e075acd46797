"""What lossless compression of streamed weights saves and costs.

    python benchmarks/compression.py MODEL.gguf [--threads 1] [--words 4194304] [--rounds 15]

Prints the ratio of every kind of matrix of a checkpoint, as bfloat16; then, for every level of this
host, the rates of compressing, of decompressing into memory that is used again, and of copying the
raw words, in bytes of raw words. The three take turns, and the best of the rounds counts: other
programs only make them slower. One thread is timed by the processor's time that it used, so that
waiting for a core does not count. With --words as small as 65536 everything stays in the caches.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from ambidex.kernels.cpu import _native
from ambidex.kernels.cpu.lossless import LosslessOps
from ambidex.quant.lossless import compress

LEVELS = _native.supported_levels()


def read_matrices(path: Path) -> list[tuple[str, torch.Tensor]]:
    """Name and bfloat16 [rows, columns] of every matrix."""
    found = []
    for tensor in GGUFReader(path).tensors:
        if len(tensor.shape) == 2:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).bfloat16()
            found.append((tensor.name, values))
    return found


def print_ratios(matrices: list[tuple[str, torch.Tensor]], ops: LosslessOps) -> None:
    """A table: kind of matrix, megabytes, ratio."""
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, matrix in matrices:
        words = panels(matrix)
        made = compress(words, 64 * matrix.shape[1], ops)
        for kind in (re.sub(r"\d+", "*", name), "all"):
            sizes[kind][0] += 2 * words.numel()
            sizes[kind][1] += made.num_bytes if made else 2 * words.numel()
    print("| matrices | MB | ratio |\n| --- | --- | --- |")
    for kind, (raw, packed) in sizes.items():
        print(f"| {kind} | {raw / 1e6:.1f} | {raw / packed:.3f} |")


def panels(matrix: torch.Tensor) -> torch.Tensor:
    """The words in the native layout: [panel][in][16]."""
    rows = matrix.shape[0] // 16 * 16
    return matrix[:rows].view(-1, 16, matrix.shape[1]).transpose(1, 2).contiguous()


def best_rates(
    calls: dict[str, Callable[[], object]],
    clock: Callable[[], float],
    num_bytes: int,
    rounds: int,
) -> list[float]:
    """GB/s of each call, which take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            began = clock()
            call()
            best[name] = min(best[name], clock() - began)
    return [num_bytes / seconds / 1e9 for seconds in best.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--words", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    matrices = read_matrices(options.model)
    print_ratios(matrices, LosslessOps(options.threads, [], LEVELS[-1]))

    words = torch.cat([panels(matrix).view(-1) for name, matrix in matrices if "ffn" in name])
    words = words[: options.words].view(torch.int16).clone()
    out = torch.empty_like(words)
    num_bytes = 2 * words.numel()
    print(
        f"\n{num_bytes / 1e6:.1f} MB of raw words, {options.threads} thread(s), GB/s of raw words"
    )
    print("| level | compress | decompress | copy |\n| --- | --- | --- | --- |")
    for level in LEVELS:
        ops = LosslessOps(options.threads, [], level)
        made = compress(words, codec=ops)
        assert made is not None
        rates = best_rates(
            {
                "compress": lambda ops=ops: compress(words, codec=ops),
                "decompress": lambda ops=ops, made=made: ops.decompress_words(
                    made.payload, made.num_words, out
                ),
                "copy": lambda: out.copy_(words),
            },
            time.thread_time if options.threads == 1 else time.perf_counter,
            num_bytes,
            options.rounds,
        )
        ops.decompress_words(made.payload, made.num_words, out)
        assert torch.equal(out, words)
        print(f"| {level} | {' | '.join(f'{rate:.2f}' for rate in rates)} |")


if __name__ == "__main__":
    main()
