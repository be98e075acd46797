"""Ambidex in a process of its own, for benchmarks: a line of JSON in, a line of JSON out.

    python benchmarks/run_ambidex.py --model MODEL.gguf [--threads 2] [--option name=value ...]
    python benchmarks/run_ambidex.py --bandwidth --threads 2

The first line that it writes says how long the start took and what is held in memory. Then each
line read is a task, ``{"requests": 1, "input": 128, "output": 64}``, and each line written its
seconds. Prompts are random token ids, decoding is greedy, nothing stops early, and no prefix is
cached. ``--bandwidth`` measures how fast all threads together read memory instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

#: Seconds since the epoch at which this process began, as its parent saw it.
STARTED = float(os.environ.get("BENCHMARK_STARTED", time.time()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=4096, help="prompt and output together")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bandwidth", action="store_true")
    return parser.parse_args()


def read_bandwidth(num_threads: int, num_bytes: int = 2**30, repeats: int = 5) -> float:
    """Bytes per second that all threads read together: the best of some sums over memory that no
    cache holds, by torch and by numpy."""
    import numpy as np
    import torch

    memory = np.ones(num_bytes // 8, dtype=np.int64)
    parts = np.array_split(memory, num_threads)
    whole = torch.from_numpy(memory.view(np.float32))

    def by_numpy() -> None:
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def by_torch() -> None:
        whole.sum()

    torch.set_num_threads(num_threads)
    best = 0.0
    for read in (by_numpy, by_torch) * repeats:
        began = time.perf_counter()
        read()
        best = max(best, num_bytes / (time.perf_counter() - began))
    return best


def peak_rss_bytes() -> int:
    """The most memory that was resident at once (VmHWM); 0 where the system does not say."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


class Runner:
    """A loaded model, and what it takes to run tasks with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        began = time.perf_counter()
        import torch

        self._torch_s = time.perf_counter() - began
        import ambidex
        from ambidex import LLM, SamplingParams

        self._params_type = SamplingParams
        self._version = f"ambidex {ambidex.__version__}, torch {torch.__version__}"
        options: dict[str, Any] = dict(option.split("=", 1) for option in args.option)
        began = time.perf_counter()
        self.llm = LLM(
            args.model,
            **{
                "cpu_threads": args.threads,
                "enable_prefix_caching": False,
                "max_num_seqs": args.max_requests,
                "max_model_len": args.max_tokens,
                # One step takes all prompts of a task, so that all requests decode together.
                "max_num_batched_tokens": 2048,
            }
            | options,
        )
        self._load_s = time.perf_counter() - began
        self._vocab_size = self.llm.info.vocab_size
        #: For each step: when it ended, and the tokens that it gave to requests by id.
        self._steps: list[tuple[float, Counter[str]]] = []
        self._watch_steps()

    def _watch_steps(self) -> None:
        engine = self.llm.engine
        plain_step = engine.step

        def step(timeout_s: float | None = None) -> Any:
            outputs = plain_step(timeout_s)
            tokens = Counter({o.request_id: len(o.new_token_ids) for o in outputs})
            self._steps.append((time.perf_counter(), tokens))
            return outputs

        engine.step = step  # type: ignore[method-assign]

    def start(self) -> dict[str, Any]:
        """Computes a first token, and says what the start took and what is held."""
        self.run(1, 16, 1, seed=0)
        first_token_s = time.time() - STARTED
        info = self.llm.info
        level = getattr(self.llm.engine.lane.device.kernels, "level", "reference")
        accounts: Counter[str] = Counter()
        for memory in info.memory:
            accounts.update(memory.accounts)
        return {
            "version": self._version,
            "level": str(level),
            "dtype": info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "torch_s": self._torch_s,
            "load_s": self._load_s,
            "first_token_s": first_token_s,
            "weights_bytes": accounts["weights"],
            "kv_cache_bytes": accounts["kv_cache"],
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def run(self, requests: int, num_input: int, num_output: int, seed: int) -> dict[str, Any]:
        """One task.

        ``total_s`` is from the first request's arrival to the end, ``decode_s`` from the step after
        which every request had a token, and ``decode_tokens`` what was computed in that time.
        """
        choose = random.Random(seed)
        low, high = min(100, self._vocab_size // 2), self._vocab_size
        prompts = [
            {"prompt_token_ids": [choose.randrange(low, high) for _ in range(num_input)]}
            for _ in range(requests)
        ]
        params = self._params_type(temperature=0, max_tokens=num_output, ignore_eos=True)
        self._steps.clear()
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        total_s = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
        seen: set[str] = set()
        decode_began, decode_tokens = 0.0, 0
        for ended, tokens in self._steps:
            if len(seen) == requests:
                decode_tokens += tokens.total()
                continue
            seen |= {name for name, count in tokens.items() if count}
            decode_began = ended
        return {
            "total_s": total_s,
            "decode_s": self._steps[-1][0] - decode_began,
            "decode_tokens": decode_tokens,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def close(self) -> None:
        self.llm.close()


def main() -> None:
    args = parse()
    if args.bandwidth:
        print(json.dumps({"bytes_per_s": read_bandwidth(args.threads)}), flush=True)
        return
    runner = Runner(args)
    print(json.dumps(runner.start()), flush=True)
    for number, line in enumerate(sys.stdin, 1):
        task = json.loads(line)
        answer = runner.run(task["requests"], task["input"], task["output"], seed=number)
        print(json.dumps(answer), flush=True)
    runner.close()


if __name__ == "__main__":
    main()
