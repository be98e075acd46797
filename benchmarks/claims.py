"""Figures of practitioners' guides, held against the planner: writes docs/claims.md.

    python benchmarks/claims.py [--write]

Every number comes from ``ambidex plan`` with the hardware of the built-in table (its own default
host where a guide names none), or from a line of arithmetic that is printed with it. No rate is
chosen for a claim.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ambidex.cli.plan import main as plan_command

DOCUMENT = Path(__file__).parent.parent / "docs" / "claims.md"

REPRODUCED, IMPOSSIBLE, LACKING = "reproduced", "impossible", "lacking data"
#: A prediction and a claim agree within this factor.
AGREES = 1.3

#: Of the same guides' examples.
A100, A10 = ("--gpu", "A100-80"), ("--gpu", "A10")
RAM = ("--ram", "256GB")


@dataclass(frozen=True)
class Judged:
    """One claim: what is said, what follows, and why."""

    claim: str
    verdict: str
    reasons: tuple[str, ...]


@cache
def plan(*words: str) -> dict[str, Any]:
    """``ambidex plan WORDS --json``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        plan_command([*words, "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def seconds(key: str, *words: str) -> float:
    """``ttft_1`` and the like of a plan that fits."""
    found = plan(*words)
    assert found["fits"], f"{' '.join(words)}: {found['error']}"
    value: float = found["predictions"][key]["seconds"]
    return value


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def command(*words: str) -> str:
    quoted = (f'"{word}"' if " " in word else word for word in words)
    return f"`ambidex plan {' '.join(quoted)}`"


def agrees(claimed: float, predicted: float) -> bool:
    return 1 / AGREES <= predicted / claimed <= AGREES


# --------------------------------------------------------------------------- 70B on one A100


def offload_sizes() -> Judged:
    weights = plan("llama-3-70b", *A100, *RAM)["model"]["weight_bytes"]
    capacity = plan("llama-3-70b", *A100, *RAM)["hardware"]["device"]["memory_bytes"]
    lines = []
    for size in (24, 64):
        asked = ("llama-3-70b", *A100, *RAM, "--cpu-offload-gb", str(size))
        assert not plan(*asked)["fits"]
        left = weights - (size << 30)
        lines.append(f"{size} GiB offloaded leave {gb(left)} of {gb(weights)} on the card.")
    placed = plan("llama-3-70b", *A100, *RAM)["placement"]
    lines.append(
        f"The card has {gb(capacity)}, less what a step, its captured copies and the KV cache need:"
        f" {gb(placed['host_bytes'])} have to leave it ({command('llama-3-70b', *A100, *RAM)})."
    )
    lines.append("In 8 bits both sizes would do: the claim may be of such weights.")
    return Judged("70B fp16 on an A100-80 with 24 to 64 GB of offload", IMPOSSIBLE, tuple(lines))


def peak_and_utilisation() -> Judged:
    total = 80e9
    return Judged(
        "the same: 71 GB peak at a utilisation of 0.6 to 0.65",
        IMPOSSIBLE,
        (
            f"0.65 x 80 GB = {gb(0.65 * total)}: a process that keeps to it never holds 71 GB; "
            "71 GB are a utilisation of 0.89.",
        ),
    )


def tokens_of_70b() -> Judged:
    words = ("llama-3-70b", *A100, *RAM)
    stream = (*words, "--offload-mode", "stream")
    alone = 1 / seconds("tpot_1", *words)
    streamed = 1 / seconds("tpot_1", *stream)
    return Judged(
        "the same: 12 tok/s",
        LACKING,
        (
            f"One request: {streamed:.2f} tok/s where weights are streamed, {alone:.1f} where the "
            f"processor multiplies with its rows ({command(*words)}, also with --offload-mode "
            "stream).",
            f"Requests share a step's weights: 12 tok/s need {12 / streamed:.0f} at once where "
            f"weights are streamed, {12 / alone:.0f} where they are shared. The number is not "
            "said.",
        ),
    )


def ttft_of_70b() -> Judged:
    words = ("llama-3-70b", *A100, *RAM)
    short = seconds("ttft_1", *words, "--prompt-len", "16")
    long = seconds("ttft_1", *words, "--prompt-len", "2000")
    return Judged(
        "the same: TTFT of 1.2 to 8.7 s",
        LACKING,
        (
            f"A prompt of 16 tokens: {short:.2f} s; of 2,000: {long:.2f} s ({command(*words)} "
            "with --prompt-len). The lower end is within reach of short prompts, the upper one of "
            "prompts that wait for others; neither lengths nor load are said.",
        ),
    )


def fifty_times() -> Judged:
    lines, ratios = [], {}
    for gpu in ("RTX 4090", "A100-80", "H100"):
        words = ("llama-2-7b", "--gpu", gpu)
        out = (*words, "--cpu-offload-gb", "100", "--offload-mode")
        resident = seconds("tpot_1", *words)
        ratios[gpu] = seconds("tpot_1", *out, "stream") / resident
        computed = seconds("tpot_1", *out, "compute") / resident
        lines.append(
            f"{gpu}: all weights streamed {ratios[gpu]:.0f}x slower than resident, all computed by "
            f"the host {computed:.0f}x ({command(*out, 'stream')} and compute)."
        )
    is_met = max(ratios.values()) * AGREES >= 50
    lines.append(
        "One token, everything outside the card: the ratio is that of the two memories, or of "
        "memory and link. A part that stays on the card lowers it in proportion."
    )
    return Judged(
        "offload is 50x slower than the GPU", REPRODUCED if is_met else IMPOSSIBLE, tuple(lines)
    )


# --------------------------------------------------------------------------- Qwen2-7B on an A10


def requests_of_7b() -> Judged:
    words = ("qwen2-7b", *A10)
    prefill = 512 / seconds("ttft_1", *words)
    found = plan(*words)
    decode = found["tokens_per_s_full"]
    return Judged(
        "Qwen2-7B on an A10: 12 to 41 requests a second",
        LACKING,
        (
            f"The card computes {prefill:,.0f} prompt tokens or, {found['full_concurrency']} "
            f"requests at once, {decode:,.0f} output tokens a second ({command(*words)}). A "
            "request of p prompt and o output tokens takes p / "
            f"{prefill:,.0f} + o / {decode:,.0f} of it: 512 and 128 are "
            f"{1 / (512 / prefill + 128 / decode):.1f} requests a second.",
            f"41 requests a second leave {prefill / 41:.0f} prompt tokens each and no output, or "
            f"{decode / 41:.0f} output tokens and no prompt. Lengths are not said.",
        ),
    )


def ttft_with_cpu_prefill() -> Judged:
    words = ("qwen2-7b", *A10)
    each = seconds("ttft_1", *words, "--prompt-len", "2048") / 2048
    tokens = 0.890 / each
    length = f"{tokens:.0f}"
    on_host = seconds(
        "ttft_1", "qwen2-7b", "--cpu", "EPYC 7543", "--quantization", "int8", "--prompt-len", length
    )
    return Judged(
        "the same: TTFT from 890 to 210 ms by prefill on the CPU",
        IMPOSSIBLE,
        (
            f"890 ms are {tokens:,.0f} tokens of prompt on the A10. The table's host for it, an "
            f"EPYC 7543, takes {on_host:.0f} s for them, in 8 bits: prefill there cannot shorten "
            "an answer's own wait.",
            "It can take work from a card that others queue for, if prompts are short; or a "
            "prefix cache has most of the prompt, which is not prefill on the CPU.",
        ),
    )


def kv_of_2048() -> Judged:
    per_token = plan("qwen2-7b", *A10)["model"]["kv_bytes_per_token"]
    return Judged(
        "the same: 2,048 tokens are 1.2 GB of KV",
        IMPOSSIBLE,
        (
            f"28 layers x 4 KV heads x 128 x 2 (keys and values) x 2 bytes = {per_token:,} bytes a "
            f"token; 2,048 tokens are {2048 * per_token / 1e6:.0f} MB. 1.2 GB hold "
            f"{1.2e9 / per_token:,.0f} tokens.",
        ),
    )


def kv_transfer() -> Judged:
    found = plan("qwen2-7b", *A10)
    num_bytes = 2048 * found["model"]["kv_bytes_per_token"]
    link = found["hardware"]["link_bytes_per_s"]
    return Judged(
        "the same: its transfer from 18 to 2.3 ms",
        IMPOSSIBLE,
        (
            f"{num_bytes / 1e6:.0f} MB over PCIe 4.0 x16 ({link / 1e9:.1f} GB/s reached) take "
            f"{1e3 * num_bytes / link:.1f} ms. 18 ms are {num_bytes / 18e-3 / 1e9:.1f} GB/s, what "
            f"copies from pageable memory reach; 2.3 ms would be {num_bytes / 2.3e-3 / 1e9:.0f} "
            "GB/s, more than the link's 31.5 at its peak. With the claimed 1.2 GB both are "
            "impossible. A copy behind the computation may show 2.3 ms of waiting.",
        ),
    )


def redis() -> Judged:
    words = ("qwen2-7b", *A10)
    prompt = 4096
    whole = seconds("ttft_1", *words, "--prompt-len", str(prompt))
    rest = seconds("ttft_1", *words, "--prompt-len", str(round(0.18 * prompt)))
    num_bytes = 0.82 * prompt * plan(*words)["model"]["kv_bytes_per_token"]
    return Judged(
        "the same: 95 ms with Redis at 82% hits",
        LACKING,
        (
            f"A prompt of {prompt:,} tokens, 82% of it cached: {1e3 * rest:.0f} ms of prefill "
            f"instead of {1e3 * whole:.0f} ms, and {num_bytes / 1e6:.0f} MB to fetch: "
            f"{1e3 * num_bytes / 1.25e9:.0f} ms over 10 Gbit/s, "
            f"{1e3 * num_bytes / 12.5e9:.0f} ms over 100. Half as long a prompt would come near "
            "95 ms with the faster one. Neither the network nor the length is said.",
        ),
    )


def fragmentation() -> Judged:
    limit = 2048
    used = 0.37 * limit
    lost = {block: block / 2 / used for block in (16, 128)}
    return Judged(
        "the same: fragmentation from 63% to 8%",
        REPRODUCED,
        (
            f"A cache that reserves {limit:,} tokens a request wastes 63% where requests use 37% "
            f"of it, {used:.0f} on average. In blocks half a block is lost a request: "
            + ", ".join(f"{share:.0%} in blocks of {block}" for block, share in lost.items())
            + ". (In blocks of 16 and at the same lengths the gain is larger than claimed.)",
        ),
    )


def cpu_prefill() -> Judged:
    shape = plan("qwen2-7b", *A10)["model"]
    flops = 2 * shape["num_active_parameters"] * 8192
    host = ("--quantization", "int8", "--prompt-len", "8192")
    times = {
        cpu: seconds("ttft_1", "qwen2-7b", "--cpu", cpu, *host)
        for cpu in ("EPYC 7543", "EPYC 9654", "Xeon Platinum 8480+")
    }
    card = seconds("ttft_1", "qwen2-7b", *A10, "--prompt-len", "8192")
    return Judged(
        "the same: 8,192 tokens of prefill on the CPU in 150 ms",
        IMPOSSIBLE,
        (
            f"2 x {shape['num_active_parameters'] / 1e9:.1f} billion x 8,192 = {flops:.2g} "
            f"operations: {flops / 0.15 / 1e12:.0f} TFLOP/s, before attention. The A10 itself "
            f"takes {card:.1f} s.",
            "Predicted, 8 bits: "
            + ", ".join(f"{cpu} {value:.1f} s" for cpu, value in times.items())
            + f" ({command('qwen2-7b', '--cpu', 'EPYC 7543', *host)}).",
        ),
    )


# --------------------------------------------------------------------------- small cards


def ninety_on_24() -> Judged:
    words = ("llama-3.2-90b", "--gpu", "RTX 4090", "--ram", "128GB", "--quantization", "int4")
    rate = 1 / seconds("tpot_1", *words)
    placed = plan(*words)["placement"]
    verdict = REPRODUCED if rate * AGREES >= 4 else IMPOSSIBLE
    together = plan(*words)
    return Judged(
        "90B on 24 GB at 4 to 6 tok/s",
        verdict if verdict == REPRODUCED else LACKING,
        (
            f"In 4 bits on an RTX 4090 and its desktop host {gb(placed['host_bytes'])} stay in "
            f"memory that is read at {together['hardware']['host']['bytes_per_s'] / 1e9:.0f} "
            f"GB/s: {rate:.1f} tok/s for one request, "
            f"{together['tokens_per_s_full']:.1f} for {together['full_concurrency']} together "
            f"({command(*words)}).",
            f"For one request it takes {placed['host_bytes'] * 4 / 1e9:.0f} to "
            f"{placed['host_bytes'] * 6 / 1e9:.0f} GB/s of host memory: a server of 8 channels, "
            "not a desktop. Host and number of requests are not said.",
        ),
    )


def seventy_on_6() -> Judged:
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512")
    words = (
        *("llama-3-70b", "--gpu", "RTX 3060", "--gpu-memory-limit", "6GB", "--ram", "64GB"),
        *("--quantization", "int4", *limits),
    )
    rate = 1 / seconds("tpot_1", *words)
    return Judged(
        "70B on 6 GB",
        REPRODUCED,
        (
            f"In 4 bits, with 64 GB of host memory and small steps, it runs: {rate:.1f} tok/s, a "
            f"prompt of 512 tokens in {seconds('ttft_1', *words):.1f} s ({command(*words)}). In 16 "
            "bits it takes 141 GB of host memory, and a third of that speed.",
        ),
    )


def times_the_memory() -> Judged:
    lines = []
    for model in ("gemma-3-27b", "qwen2.5-32b"):
        words = (model, "--gpu", "RTX 4090", "--ram", "128GB")
        found = plan(*words)
        weights = found["model"]["weight_bytes"]
        device = found["hardware"]["device"]
        ideal = weights / device["bytes_per_s"]
        factor = seconds("tpot_1", *words) / ideal
        lines.append(
            f"{model} ({weights / device['memory_bytes']:.1f} times the memory of an RTX 4090): "
            f"{factor:.1f}x the time that its weights would take in the card's memory "
            f"({command(*words)})."
        )
    lines.append(
        "The factor follows from shares: what is outside, over the host's memory rate, against "
        "all of it over the card's. With a desktop's memory 3x is where a fifth is outside."
    )
    return Judged(
        "models of 2 to 3 times the card's memory at 3 to 10 times the latency",
        REPRODUCED,
        tuple(lines),
    )


# --------------------------------------------------------------------------- 7B on processors


def seven_on_cpus() -> Judged:
    claims = {"i9-13900K": 8.2, "Xeon E5-2678 v3": 5.7, "Ryzen 5800X": 3.1}
    forms = {
        "4 bits": ("--quantization", "int4"),
        "8 bits": ("--quantization", "int8"),
        "16 bits": ("--dtype", "bfloat16"),
    }
    lines = []
    fitting: dict[str, int] = dict.fromkeys(forms, 0)
    for cpu, claimed in claims.items():
        rates = {}
        for form, words in forms.items():
            rates[form] = 1 / seconds(
                "tpot_1", "llama-2-7b", "--cpu", cpu, *words, "--max-num-seqs", "1"
            )
            fitting[form] += agrees(claimed, rates[form])
        shown = ", ".join(f"{form} {rate:.1f}" for form, rate in rates.items())
        lines.append(f"{cpu}: {claimed} claimed; predicted {shown}.")
    whole = [form for form, number in fitting.items() if number == len(claims)]
    lines.append(
        f"{whole[0]} agree with all three."
        if whole
        else "No precision agrees with all three within 30%: they are of several programs or "
        "several precisions, which are not said. None is faster than memory allows in 8 bits."
    )
    return Judged(
        "7B on processors: 8.2 / 5.7 / 3.1 tok/s (i9-13900K, Xeon E5-2678 v3, Ryzen 5800X)",
        REPRODUCED if whole else LACKING,
        tuple(lines),
    )


def int8_memory() -> Judged:
    def held(*words: str) -> float:
        base = ("llama-2-7b", "--cpu", "i9-13900K", "--max-num-seqs", "1", "--max-model-len")
        reserved: float = plan(*base, "4096", *words)["memories"][0]["reserved_bytes"]
        return reserved

    wide, narrow = held("--dtype", "bfloat16"), held("--quantization", "int8")
    met = agrees(22e9, wide) and agrees(12e9, narrow)
    return Judged(
        "the same: from 22 to 12 GB with int8",
        REPRODUCED if met else LACKING,
        (
            f"All accounts of the ledger, a context of 4,096 tokens: {gb(wide)} in 16 bits, "
            f"{gb(narrow)} in 8. The ratio is what halving the weights gives.",
        ),
    )


SECTIONS: dict[str, tuple[Callable[[], Judged], ...]] = {
    "A model of 70 billion on one A100": (
        *(offload_sizes, peak_and_utilisation, tokens_of_70b, ttft_of_70b, fifty_times),
    ),
    "Qwen2-7B on an A10": (
        *(requests_of_7b, ttft_with_cpu_prefill, kv_of_2048, kv_transfer),
        *(redis, fragmentation, cpu_prefill),
    ),
    "Large models on small cards": (ninety_on_24, seventy_on_6, times_the_memory),
    "Processors alone": (seven_on_cpus, int8_memory),
}

HEAD = """\
# Claims

Figures that practitioners' guides give for offloading and for serving on processors, held against
`ambidex plan`. Hardware is that of the built-in table, with the host that the table gives a card;
rates are data sheets' times the shares that the table states, the same for every claim. A claim is

* **reproduced** where the planner comes within a factor of 1.3, or its arithmetic gives it;
* **impossible** where no schedule can reach it: bytes or operations exceed what the hardware does;
* **lacking data** where what it depends on (lengths, requests at once, precision) is not said.

`python benchmarks/claims.py --write` writes this page, and a test compares it.
"""


def document() -> Iterator[str]:
    yield HEAD
    judged = {title: [judge() for judge in judges] for title, judges in SECTIONS.items()}
    yield "| claim | verdict |\n| --- | --- |"
    for found in judged.values():
        for one in found:
            yield f"| {one.claim} | {one.verdict} |"
    for title, found in judged.items():
        yield f"\n## {title}"
        for one in found:
            yield f"\n**{one.claim[0].upper()}{one.claim[1:]}: {one.verdict}.** " + " ".join(
                one.reasons
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/claims.md")
    text = "\n".join(document()) + "\n"
    if parser.parse_args().write:
        DOCUMENT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
