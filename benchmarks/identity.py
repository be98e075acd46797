"""The identity matrix: the same tokens wherever the weights lie.

    python benchmarks/identity.py [MODEL ...] [--tokens 8] [--record]

Every placement runs on the simulated accelerator with steps captured and not, at three links, and,
where weights are streamed, on demand and one to three layers ahead; in float32, and in bfloat16
where what is streamed is compressed. The models are small random ones of four architectures, and
every MODEL (a GGUF file or folder). A token counts as the same if it is the CPU lane's and its log
probability and those of the two best tokens have the same bits. A run whose counters do not show
the path that it is about, or other bytes over the link than planned, ends the script. --record
appends the table to benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from record_levels import cpu_model

from ambidex.config import OffloadConfig
from ambidex.kernels.cpu.levels import machine_name

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "sim")]

from lane_harness import (  # noqa: E402
    SIM,
    SIZES,
    Ran,
    assert_streamed,
    make_config,
    place_by,
    prompts,
    run,
    thirds,
)

from conftest import save_tiny  # noqa: E402

KINDS = ("llama", "qwen2", "gemma3_text", "qwen3_moe")
LINKS = ("link=4GB/s,latency=20us", "link=10MB/s,latency=1ms", "link=1TB/s,latency=0")
LAYERS, MLPS, EXPERTS = ("layers.*",), ("*.mlp",), ("*.gate_up", "*.down")


@dataclass(frozen=True)
class Placement:
    """A row of the matrix, and what its runs have to count."""

    name: str
    offload: OffloadConfig
    #: Of rows_resident, rows_host, rows_streamed.
    counted: tuple[str, ...]
    dtype: str = "float32"
    is_of_experts: bool = False
    #: Every matrix has rows in all three places, instead of what the policy would choose.
    is_split: bool = False
    #: Those at which the path is worth taking.
    links: tuple[str, ...] = LINKS

    @property
    def is_streamed(self) -> bool:
        return "rows_streamed" in self.counted


def offload(patterns: tuple[str, ...], mode: str, **more: object) -> OffloadConfig:
    return OffloadConfig(patterns=patterns, mode=mode, **more)  # type: ignore[arg-type]


PLACEMENTS = [
    Placement("resident", OffloadConfig(), ("rows_resident",)),
    Placement("MLPs on the host", offload(MLPS, "compute"), ("rows_resident", "rows_host")),
    Placement("layers on the host", offload(LAYERS, "compute"), ("rows_host",)),
    Placement("all on the host", offload(("*",), "compute"), ("rows_host",)),
    Placement("MLPs streamed", offload(MLPS, "stream"), ("rows_resident", "rows_streamed")),
    Placement("layers streamed", offload(LAYERS, "stream"), ("rows_streamed",)),
    Placement("all streamed", offload(("*",), "stream"), ("rows_streamed",)),
    Placement(
        "split in three",
        OffloadConfig(),
        ("rows_resident", "rows_host", "rows_streamed"),
        is_split=True,
    ),
    Placement(
        "layers streamed, compressed",
        offload(LAYERS, "stream", compress=True),
        ("rows_streamed",),
        dtype="bfloat16",
        links=LINKS[:2],
    ),
    Placement(
        "experts on the host",
        offload(EXPERTS, "compute", moe_expert_cache="off"),
        ("rows_host",),
        is_of_experts=True,
    ),
    Placement(
        "experts on the host, copies cached",
        offload(EXPERTS, "compute"),
        ("expert_hits",),
        is_of_experts=True,
        links=LINKS[::2],
    ),
]


def variants(placement: Placement) -> Iterator[tuple[str, bool, OffloadConfig]]:
    """Link, ``enforce_eager`` and options of every run."""
    ahead: tuple[int, ...] = (0, 1, 2, 3) if placement.is_streamed else (1,)
    for link, eager, depth in itertools.product(placement.links, (False, True), ahead):
        options = replace(placement.offload, is_async=depth > 0, prefetch_step=depth or None)
        yield link, eager, options if placement.is_streamed else placement.offload


@dataclass
class Model:
    name: str
    path: Path
    memory: str
    num_tokens: int

    def run(
        self, dtype: str, device: str = "auto", *, is_split: bool = False, **changes: object
    ) -> Ran:
        config = make_config(
            self.path,
            device,
            dtype=dtype,
            kv_cache_bytes=64 << 20,
            cpu_threads=2,
            **changes,  # type: ignore[arg-type]
        )
        with pytest.MonkeyPatch.context() as patch:
            if is_split:
                place_by(patch, lambda _, parameter: thirds(parameter))
            return run(config, prompts(), self.num_tokens)


def compare(model: Model, placement: Placement, expected: Ran) -> str:
    """A cell: runs, and tokens that are the same of all that there are."""
    runs = same = total = 0
    for link, eager, options in variants(placement):
        device = SIM.replace(LINKS[0], link).replace("256MiB", model.memory)
        ran = model.run(
            placement.dtype,
            device,
            is_split=placement.is_split,
            offload=options,
            enforce_eager=eager,
        )
        check(placement, ran, f"{model.name}, {placement.name}, {link}, eager {eager}, {options}")
        runs += 1
        for got, wanted in zip(ran.traces, expected.traces, strict=True):
            total += len(wanted)
            same += sum(a == b for a, b in zip(got, wanted, strict=True))
    return f"{runs} runs: {same:,} of {total:,}"


def check(placement: Placement, ran: Ran, what: str) -> None:
    """Raises where the counters do not show the placement's path."""
    missing = [name for name in placement.counted if not ran.counts.get(name)]
    if missing or any(ran.errors):
        raise AssertionError(f"{what}: no {missing} in {ran.counts}, errors {ran.errors}")
    if placement.is_streamed:
        assert_streamed(ran, is_constant=False)
    if (ran.counts.get("decompressed_bytes", 0) > 0) != placement.offload.compress:
        raise AssertionError(f"{what}: {ran.counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=8, help="new tokens a prompt")
    parser.add_argument("--memory", default="2GiB", help="of the accelerator beside a MODEL")
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        models = []
        for kind in KINDS:
            folder = Path(scratch, kind)
            models.append(Model(kind, save_tiny(kind, folder, sizes(kind)), "256MiB", args.tokens))
        models += [Model(path.name, path, args.memory, args.tokens) for path in args.models]
        lines = table(models)
    lines[:0] = [
        f"## {time.strftime('%Y-%m-%d', time.gmtime())}: {cpu_model()}, {machine_name()}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}",
        "",
        "### Identity on the simulated accelerator: tokens that are the CPU lane's, bit for bit",
        "",
        f"`benchmarks/identity.py`; four prompts of 1 to 70 tokens, {args.tokens} new tokens each; "
        f"{len(LINKS)} links, captured and not; streamed: on demand and 1 to 3 layers ahead.",
        "",
    ]
    if args.record:
        with (HERE / "RESULTS.md").open("a") as file:
            file.write("\n" + "\n".join(lines) + "\n")


def sizes(kind: str) -> dict[str, int]:
    # Gemma's configuration names the kind of each of its four layers.
    return {k: v for k, v in SIZES.items() if (kind, k) != ("gemma3_text", "num_hidden_layers")}


def table(models: list[Model]) -> list[str]:
    lines = [
        "| weights | " + " | ".join(model.name for model in models) + " |",
        "| --- |" + " --- |" * len(models),
    ]
    print("\n".join(lines), flush=True)
    expected: dict[tuple[str, str], Ran] = {}
    for placement in PLACEMENTS:
        cells = []
        for model in models:
            if placement.is_of_experts and not model.name.endswith("_moe"):
                cells.append("")
                continue
            key = (model.name, placement.dtype)
            if key not in expected:
                expected[key] = model.run(placement.dtype)
            cells.append(compare(model, placement, expected[key]))
        lines.append(f"| {placement.name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
