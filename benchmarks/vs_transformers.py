"""Ambidex against transformers' batched generate, in one run, in alternating pairs.

    python benchmarks/vs_transformers.py [--requests 16] [--input-len 128] [--output-len 128]

Both compute the same dequantised weights in float32 with the same threads; transformers uses sdpa
and equal lengths, so that its batch has no padding. It runs in a process of its own, which sleeps
while Ambidex is measured: threads of one process would slow each other.

Prints a table of tokens per second, the ratio of each pair and their median, and the share of a
step that Ambidex spends outside the model at 64 running requests. Needs the test extra.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ambidex import LLM, SamplingParams
from ambidex.device.cpu import default_num_threads
from ambidex.weights.hub import DEFAULT_MODEL, resolve_model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(100, 49000) for _ in range(length)] for _ in range(count)]


def ours(llm: LLM, prompts: list[list[int]], num_output: int) -> tuple[float, float]:
    """(end-to-end seconds, seconds from the last prompt's first token to the end)."""
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    elapsed = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
    first = max(output.metrics.first_token_s or 0.0 for output in outputs)
    last = max(output.metrics.last_token_s or 0.0 for output in outputs)
    return elapsed, last - first


class Peer:
    """transformers in another process; answers a line of JSON with a line of JSON."""

    def __init__(self, path: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--peer", str(path), "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self._read()["versions"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def generate(self, prompts: list[list[int]], num_output: int) -> tuple[float, float]:
        """(end-to-end seconds, seconds from the first tokens to the end)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_output": num_output}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return answer["total_s"], answer["decode_s"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve_peer(path: Path, threads: int) -> None:
    """The other process: transformers' batched generate, greedy, equal lengths."""
    import torch
    import transformers

    class FirstToken(transformers.StoppingCriteria):
        """Called after every step: the first call is when the prompts are done."""

        first: float | None = None

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            if self.first is None:
                self.first = time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"versions": versions}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        ids = torch.tensor(task["prompts"])
        clock, num_output = FirstToken(), task["num_output"]
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        ended = time.perf_counter()
        assert out.shape[1] == ids.shape[1] + num_output and clock.first is not None
        print(json.dumps({"total_s": ended - began, "decode_s": ended - clock.first}), flush=True)


def share_outside_model(llm: LLM) -> float:
    """Share of the time outside the forward pass while 64 requests decode: scheduling, batches,
    sampling, detokenising and whatever else happens between two steps."""
    engine = llm.engine
    plain_step = engine.step
    seen: list[tuple[float, float]] = []

    def step(timeout_s: float | None = None) -> Any:
        if engine.scheduler.num_running == 64:
            seen.append((engine.times.model_s, time.perf_counter()))
        return plain_step(timeout_s)

    engine.step = step  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(64, 64, seed=99)]
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False
    )
    engine.step = plain_step  # type: ignore[method-assign]
    (model_a, began), (model_b, ended) = seen[1], seen[-1]
    return 1 - (model_b - model_a) / (ended - began)


def main() -> None:
    args = parse()
    if args.peer is not None:
        serve_peer(args.peer, args.threads)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(resolve_model(DEFAULT_MODEL).path)
    peer = Peer(path, args.threads)
    llm = LLM(
        str(path), dtype="float32", cpu_threads=args.threads, kv_cache_memory_bytes="3GiB",
        enable_prefix_caching=False, max_num_seqs=64,
    )  # fmt: skip
    sides: dict[str, Callable[[list[list[int]], int], tuple[float, float]]] = {
        "ours": partial(ours, llm),
        "theirs": peer.generate,
    }
    tokens = args.requests * args.output_len
    decoded = args.requests * (args.output_len - 1)
    print(
        f"{platform.machine()}, {args.threads} threads, {peer.versions}; {args.requests} requests, "
        f"{args.input_len} in, {args.output_len} out, float32, greedy"
    )
    for side in sides.values():
        side(random_prompts(args.requests, args.input_len, seed=0), 8)
    print("pair  end-to-end tok/s: ours  theirs  ratio   decode tok/s: ours  theirs  ratio")
    ratios: list[tuple[float, float]] = []
    for pair in range(args.pairs):
        prompts = random_prompts(args.requests, args.input_len, seed=pair + 1)
        order = list(sides) if pair % 2 == 0 else list(sides)[::-1]
        times = {name: sides[name](prompts, args.output_len) for name in order}
        (our_total, our_decode), (their_total, their_decode) = times["ours"], times["theirs"]
        ratios.append((their_total / our_total, their_decode / our_decode))
        print(
            f"{pair + 1:4}  {tokens / our_total:22.1f} {tokens / their_total:7.1f} "
            f"{ratios[-1][0]:6.2f} {decoded / our_decode:19.1f} {decoded / their_decode:7.1f} "
            f"{ratios[-1][1]:6.2f}",
            flush=True,
        )
    total, decode = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median ratio: end-to-end {total:.2f}, decode {decode:.2f}")
    print(f"share of a step outside the model at 64 running: {share_outside_model(llm):.2%}")
    llm.close()
    peer.close()


if __name__ == "__main__":
    main()
