"""``ambidex plan``: its three forms, and every way to ask for it wrongly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex.cli.plan_rows import Shares, by_layer, by_part, runs
from ambidex.cli.plan_svg import ACCOUNT_COLOURS, SHARE_COLOURS, draw
from ambidex.cli.plan_text import ACCOUNT_NAMES, SHARE_NAMES, describe, refused, to_json
from ambidex.config import EngineConfig, ModelConfig, OffloadConfig, SchedulerConfig
from ambidex.memory import planner
from ambidex.memory.hardware_table import CPUS, GPUS, find_gpu, find_host
from ambidex.memory.ledger import ACCOUNTS, format_bytes, format_seconds
from ambidex.memory.model_shape import KVShape, ModelShape, WeightShape
from ambidex.memory.planner import Plan, PlanRefused, Prediction, Proposal
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.public_shapes import PUBLIC_SHAPES
from ambidex.memory.rates import LinkRate
from ambidex.memory.weight_places import WeightKind

CONFIG = EngineConfig(ModelConfig("m"))
LENGTHS = {"prompt_len": 512, "output_len": 128}
DOCS = Path(__file__).parents[2] / "docs"

Command = Callable[..., Any]


def make_shape(num_layers: int = 8, name: str = "tiny") -> ModelShape:
    hidden, inner, vocab = 1024, 4096, 8192

    def matrix(path: str, rows: int, columns: int, **more: Any) -> WeightShape:
        kind = more.pop("kind", WeightKind.MATRIX)
        return WeightShape(path, rows, columns, kind, "bfloat16", 2 * rows * columns, **more)

    def weights() -> Iterator[WeightShape]:
        yield matrix("embedding.weight", vocab, hidden, kind=WeightKind.TABLE)
        for i in range(num_layers):
            yield matrix(f"layers.{i}.attention_norm.weight", hidden, 1, kind=WeightKind.VECTOR)
            yield matrix(f"layers.{i}.attention.qkv.weight", 3 * hidden, hidden)
            yield matrix(f"layers.{i}.mlp.gate_up.weight", 2 * inner, hidden)
            yield matrix(f"layers.{i}.mlp.down.weight", hidden, inner)
        yield matrix("norm.weight", hidden, 1, kind=WeightKind.VECTOR)
        yield matrix("head.weight", vocab, hidden)

    kv = (KVShape(num_layers, 8, 128, num_layers * 4096, None),)
    return ModelShape(
        name=name,
        model_type="llama",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocab,
        num_heads=8,
        head_dim=128,
        weights=tuple(weights()),
        kv=kv,
        max_positions=4096,
        description="bfloat16",
    )


FLOPS = {"float32": ProductRate(((1, 1e12),))}
HOST = Processor("a host", 4 << 30, 100e9, FLOPS, num_threads=8)
DEVICE = Processor("a device", 2 << 30, 1e12, {"float32": ProductRate(((1, 1e14),))})


def make_plan(mode: str | None, name: str = "tiny") -> Plan:
    """A plan on two memories with half of the weights on the host; without ``mode`` on one. With
    rounder speeds than it has."""
    shape = make_shape(name=name)
    config = replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))
    profile = HardwareProfile("one", HOST)
    if mode is not None:
        half = shape.weight_bytes // 2
        config = replace(config, offload=OffloadConfig(cpu_offload_bytes=half, mode=mode))
        profile = HardwareProfile("two", HOST, DEVICE, LinkRate(10e9), LinkRate(8e9))
    plan = planner.make_plan(shape, profile, config)
    return replace(
        plan,
        predictions={
            "ttft_1": Prediction("first token, 1 request", 0.25, "link", {"link": 0.25}),
            "tpot_1": Prediction("a token, 1 request", 0.02, "DRAM", {"DRAM": 0.02, "HBM": 0.01}),
            "ttft_full": Prediction("first token, 4 requests", 1.0, "link", {"link": 1.0}),
            "tpot_full": Prediction("a token, 4 requests", 0.04, "DRAM", {"DRAM": 0.04}),
        },
        notes=("A note.",),
        warnings=("A warning.",),
        split_table=((1, 0.0), (64, 0.25)) if mode == "split" else (),
    )


def lines(plan: Plan) -> list[str]:
    return list(describe(plan, CONFIG))


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "stream", "compute", "split"])
def test_layers_hold_every_byte_once(mode: str | None) -> None:
    plan = make_plan(mode)
    total = sum((row.shares for row in by_layer(plan)), Shares())
    assert total.total == plan.shape.weight_bytes
    if plan.placement is None:
        assert total.resident == total.total
        return
    assert total.resident == plan.placement.device_bytes
    assert total.streamed == plan.placement.streamed_bytes
    assert total.computed == plan.placement.computed_bytes
    assert (total.split > 0) == (mode == "split")
    names = [row.name for row in by_layer(plan)]
    assert names == ["embedding", *(f"layer {i}" for i in range(8)), "head"]


def test_parts_hold_the_matrices_of_layers() -> None:
    plan = make_plan("compute")
    found = {row.name: row.shares.total for row in by_part(plan)}
    assert found == {"attention": 8 * 2 * 3 * 1024**2, "mlp": 8 * 2 * 12 * 1024**2}


def test_layers_shared_alike_are_one_row() -> None:
    plan = make_plan("compute")
    rows = runs(by_layer(plan))
    assert sum(row.shares.total for row in rows) == plan.shape.weight_bytes
    names = [row.name for row in rows]
    # One layer is cut, at most: what leaves is a layer's end, or a whole layer.
    assert names[0] == "embedding" and names[-1] == "head" and len(names) <= 5
    assert sum(name.startswith("layers ") for name in names) == 2
    assert [row.name for row in runs(by_layer(make_plan(None)))] == [
        "embedding",
        "layers 0 to 7",
        "head",
    ]


# --- text -----------------------------------------------------------------------------------------


def test_the_text_says_all_of_it() -> None:
    text = "\n".join(lines(make_plan("split")))
    for part in (
        "tiny: llama, 143 million parameters, bfloat16, 272.02 MiB of weights",
        "accelerator: a device, 2.00 GiB of memory read at 1,000 GB/s; a link of 10.0 GB/s there",
        "host: a host, 8 threads, 4.00 GiB",
        "KV cache: 1,024 blocks of 16 tokens; requests of up to 4,096 tokens, 4.00 such at once",
        "placement: split",
        "25% at 64",
        "250 ms",
        "DRAM (beside it: HBM 50%)",
        "warning: A warning.",
        "A note.",
    ):
        assert part in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_ledgers_are_a_column_each() -> None:
    plan = make_plan("stream")
    rows = {line.split("  ")[0]: line for line in lines(plan)}
    for name, sizes in (
        ("capacity", [memory.capacity_bytes for memory in plan.memories]),
        ("free", [memory.free_bytes for memory in plan.memories]),
        ("weights", [memory.accounts["weights"] for memory in plan.memories]),
    ):
        cells = rows[name].removeprefix(name).split("   ")
        found = [cell.strip() for cell in cells if cell.strip()]
        assert found == [format_bytes(size) for size in sizes], name
    assert "graphs" in rows


def test_one_memory_needs_no_table_of_layers() -> None:
    text = "\n".join(lines(make_plan(None)))
    assert "placement: every weight is in host memory" in text
    assert "accelerator:" not in text and "layers 0" not in text


def test_all_accounts_and_shares_have_names_and_colours_of_their_own() -> None:
    assert tuple(ACCOUNT_NAMES) == tuple(ACCOUNT_COLOURS) == ACCOUNTS
    assert set(SHARE_NAMES) == set(SHARE_COLOURS) == set(Shares().parts)
    for colours in (ACCOUNT_COLOURS, SHARE_COLOURS):
        assert len(set(colours.values())) == len(colours)


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "123 s"), (1.0, "1.00 s"), (0.0999, "99.9 ms"), (2e-5, "20.0 us"), (0.0, "0.00 us")],
)
def test_seconds_have_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_proposals_say_what_each_costs() -> None:
    error = PlanRefused("It does not fit.")
    assert list(refused(error)) == []
    predictions = {
        "ttft_1": Prediction("first", 2.0, "link", {}),
        "tpot_1": Prediction("more", 0.5, "DRAM", {}),
    }
    error.proposals = (Proposal("--max-model-len 4096", predictions), Proposal("-q int4", {}))
    _, head, first, second = refused(error)
    assert "each further token" in head
    assert " ".join(first.split()) == "--max-model-len 4096 2.00 s 500 ms (2.0 a second) DRAM"
    assert second.strip() == "-q int4"


# --- JSON -----------------------------------------------------------------------------------------


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields: ``memories[].name``."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from leaves(value[0], f"{path}[]")
    else:
        yield path


def test_json_is_complete_and_every_field_is_documented() -> None:
    plan = make_plan("split")
    found = json.loads(json.dumps(to_json(plan, CONFIG, LENGTHS)))
    assert found["version"] == 1 and found["fits"] is True
    assert found["model"]["weight_bytes"] == plan.shape.weight_bytes
    assert [memory["name"] for memory in found["memories"]] == ["host", "a device"]
    assert found["memories"][1]["accounts"] == plan.memories[1].accounts
    assert (
        found["kv_cache"]["num_blocks"] == list(plan.kv.num_blocks) and found["prompt_len"] == 512
    )
    assert found["predictions"]["tpot_1"]["parts"] == {"DRAM": 0.02, "HBM": 0.01}
    assert found["placement"]["split_table"][1] == {"num_tokens": 64, "streamed_share": 0.25}
    assert len(found["placement"]["layers"]) == 10
    page = (DOCS / "plan.md").read_text()
    for path in leaves(found):
        # What a memory's accounts, predictions and their parts are called is data.
        name = re.sub(r"\.(accounts|parts)\..*", r".\1", path).rpartition(".")[2]
        assert f"`{name}`" in page, path
    assert to_json(make_plan(None), CONFIG, LENGTHS)["placement"] is None


# --- the picture ----------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("mode", [None, "stream", "compute", "split"])
def test_the_picture_shows_both_memories_and_each_layer(mode: str | None) -> None:
    plan = make_plan(mode)
    picture = ET.fromstring(draw(plan))
    notes = [rect.findtext(f"{SVG}title") for rect in picture.iter(f"{SVG}rect")]
    for memory in plan.memories:
        used = [name for name, size in memory.accounts.items() if size]
        assert sum((note or "").startswith(f"{memory.name}: ") for note in notes) == len(used)
    columns = [note for note in notes if note and note.startswith("layer 3: ")]
    assert len(columns) == sum(bool(size) for size in by_layer(plan)[4].shares.parts.values())
    texts = [text.text or "" for text in picture.iter(f"{SVG}text")]
    assert any("GiB" in text for text in texts) and "embedding" in texts and "head" in texts
    for one in plan.predictions.values():
        assert one.name in texts
    assert "script" not in draw(plan) and "href" not in draw(plan)


@pytest.mark.parametrize("mode", [None, "stream", "split"])
def test_nothing_leaves_the_picture_or_lies_on_another(mode: str | None) -> None:
    plan = make_plan(mode, name="an-organisation/a-model-with-a-name-that-never-ends-" * 5)
    picture = ET.fromstring(draw(plan))
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    for rect in picture.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert w > 0 and h > 0 and x >= 0 and x + w <= width and y + h <= height
    boxes = []
    for text in picture.iter(f"{SVG}text"):
        size = float(text.attrib["font-size"])
        length = 0.5 * size * len(text.text or "")
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        x -= {"start": 0.0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
        assert x >= 0 and x + length <= width and y <= height
        boxes.append((x, x + length, y - 0.7 * size, y + 0.2 * size))
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart = one[1] <= other[0] or other[1] <= one[0]
            assert apart or one[3] <= other[2] or other[3] <= one[2], (one, other)


def test_a_name_cannot_break_the_picture() -> None:
    plan = make_plan("stream", name="<script>alert(1)</script>&\x00\x1b[31m")
    picture = ET.fromstring(draw(plan))
    assert not list(picture.iter(f"{SVG}script"))
    assert any((t.text or "") == "<script>alert(1)</script>&??[31m" for t in picture.iter())


# --- the command ----------------------------------------------------------------------------------

#: A model of the built-in list that fits any machine below.
SMALL = "qwen2-7b"


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ((), 2, "No model is given. Write `ambidex plan MODEL`"),
        (("no-such-model", "--gpu", "A10"), 1, "no-such-model"),
        ((SMALL, "--gpu", "A1O"), 2, "A10"),
        ((SMALL, "--gpu", "warp-drive"), 2, "memory="),
        ((SMALL, "--gpu", ""), 2, "--gpu"),
        ((SMALL, "--gpu"), 2, "--gpu needs a value"),
        ((SMALL, "--gpu", "memory=24GB"), 2, "bandwidth"),
        ((SMALL, "--gpu", "memory=24GB,bandwidth=-1"), 2, "bandwidth"),
        ((SMALL, "--gpu", "A10", "--cpu", "epyc-9345"), 2, "EPYC 9354"),
        ((SMALL, "--gpu", "A10", "--ram", "-5"), 2, "--ram must be at least"),
        ((SMALL, "--gpu", "A10", "--ram", "0"), 2, "--ram must be at least"),
        ((SMALL, "--gpu", "A10", "--ram", "lots"), 2, "--ram must be a size"),
        ((SMALL, "--gpu", "A10", "--this-machine"), 2, "name two machines"),
        ((SMALL, "--cpu", "epyc-9354", "--this-machine"), 2, "name two machines"),
        ((SMALL, "--gpu", "A10", "--device", "sim"), 2, "--device sim is a device of this mach"),
        ((SMALL, "--gpu", "A10", "--json", "--svg", "-"), 2, "both write to standard output"),
        ((SMALL, "--gpu", "A10", "--svg", "/no/such/folder/x.svg"), 2, "--svg: /no/such/folder"),
        ((SMALL, "--gpu", "A10", "--svg", "/"), 2, "--svg: / cannot be written"),
        ((SMALL, "--gpu", "A10", "--svg", ""), 2, "--svg"),
        ((SMALL, "--gpu", "A10", "--prompt-len", "0"), 2, "--prompt-len must be at least 1"),
        ((SMALL, "--gpu", "A10", "--max-model-len", "9M"), 2, "--max-model-len"),
        ((SMALL, "--gpus", "A10"), 2, "The nearest option is --gpu"),
    ],
)
def test_wrong_words_are_one_line(
    call_command: Command, words: tuple[str, ...], code: int, part: str
) -> None:
    done = call_command("plan", *words)
    assert (done.code, done.out) == (code, ""), done
    assert done.err.startswith("ambidex: error: ") and done.err.count("\n") == 1
    assert part in done.err, done.err


def test_a_plan_on_a_machine_of_the_table(call_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    words = ("plan", "llama-3-70b", "--gpu", "A100-80", "--ram", "128GB")
    done = call_command(*words, "--svg", str(path))
    assert done.code == 0, done.err
    assert "placement: " in done.out and "layers" in done.out
    assert ET.fromstring(path.read_text()).tag == f"{SVG}svg"
    found = json.loads(call_command(*words, "--json").out)
    assert found["fits"] and found["hardware"]["host"]["memory_bytes"] == 128 * 10**9
    picture = call_command(*words, "--svg", "-")
    assert picture.out == path.read_text()


def test_lengths_change_the_prediction(call_command: Command) -> None:
    def first_token(*words: str) -> float:
        done = call_command("plan", SMALL, "--gpu", "A10", "--json", *words)
        return float(json.loads(done.out)["predictions"]["ttft_1"]["seconds"])

    assert first_token("--prompt-len", "4k") > 2 * first_token()
    assert first_token("--prompt-len", "512") == first_token()


def test_options_of_an_accelerator_work_beside_a_gpu_of_the_table(call_command: Command) -> None:
    def placed(*words: str) -> Any:
        done = call_command("plan", SMALL, "--gpu", "A10", "--json", *words)
        assert "no effect" not in done.err
        return json.loads(done.out)["placement"]

    assert placed()["host_bytes"] == 0
    assert placed("--cpu-offload-gb", "4")["host_bytes"] >= 4 << 30


def test_a_device_in_the_file_gives_way_to_a_gpu(call_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("device: sim\nport: 9\nscheduler: {max_num_seqs: 2}\n")
    done = call_command("plan", SMALL, "--gpu", "A10", "--config", str(file), "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert "A10" in found["hardware"]["device"]["name"] and found["full_concurrency"] <= 2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """This machine, without a measurement: which devices were asked for."""
    asked: list[str] = []

    def measure(config: EngineConfig, *_: Any) -> HardwareProfile:
        asked.append(config.device.device)
        return HardwareProfile("this machine", HOST, origin="measured", sources=("measured here",))

    monkeypatch.setattr("ambidex.device.profile_cache._measure", measure)
    monkeypatch.setenv("AMBIDEX_CACHE", str(tmp_path / "cache"))
    return asked


def test_without_names_it_is_this_machine(
    call_command: Command, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ambidex.memory.host.host_capacity_bytes", lambda: 64 << 30)
    done = call_command("plan", "smollm2-135m")
    assert done.code == 0 and "rates: measured\n  measured here\n" in done.out
    assert "measuring this machine once" in done.err
    found = json.loads(call_command("plan", "smollm2-135m", "--this-machine", "--json").out)
    assert found["hardware"]["device"] is None and found["placement"] is None
    assert found["hardware"]["host"]["memory_bytes"] == 64 << 30
    # Lanes of this machine hold plain weights in float32.
    assert found["model"]["weight_bytes"] > 4 * found["model"]["num_parameters"] * 0.99
    words = ("plan", "smollm2-135m", "--ram", "8", "--json")
    assert json.loads(call_command(*words).out)["hardware"]["host"]["memory_bytes"] == 8 << 30
    assert measured == ["auto"]
    assert call_command(*words, "--measure").code == 0
    assert measured == ["auto", "auto"]
    done = call_command("plan", "smollm2-135m", "--gpu", "A10", "--measure")
    assert done.code == 2 and "--gpu A10 names another" in done.err


def test_a_cpu_of_the_table_is_a_machine_without_an_accelerator(call_command: Command) -> None:
    done = call_command("plan", SMALL, "--cpu", "epyc-9354", "--cpu-offload-gb", "4")
    assert done.code == 0 and "every weight is in host memory" in done.out
    assert "--cpu-offload-gb 4GiB: no effect here" in done.err


def test_weights_that_are_quantised_already_stay_so_beside_a_gpu(call_command: Command) -> None:
    words = ("plan", SMALL, "--gpu", "A10", "--json")
    plain = json.loads(call_command(*words).out)["model"]
    assert plain["weight_bytes"] == pytest.approx(2 * plain["num_parameters"], rel=0.01)
    low = json.loads(call_command(*words, "--quantization", "int4").out)["model"]
    assert low["weight_bytes"] < plain["weight_bytes"] / 3
    wide = json.loads(call_command(*words, "--dtype", "float32").out)["model"]
    assert wide["weight_bytes"] > 1.9 * plain["weight_bytes"]


def test_the_help_names_what_is_built_in(call_command: Command) -> None:
    text = call_command("plan", "--help").out
    for name in (*PUBLIC_SHAPES, *(row.name.replace(" ", "-") for row in (*GPUS, *CPUS))):
        assert re.search(rf"[ \n]{re.escape(name)}[,\n]", text), name
    for row in GPUS:
        assert find_gpu(row.name.replace(" ", "-")).processor.name == row.name
    for cpu in CPUS:
        assert find_host(cpu.name.replace(" ", "-")).name == cpu.name
    missing = call_command("plan", "nosuch", "--gpu", "A10")
    assert missing.code == 1 and "`ambidex plan --help` lists them." in missing.err


def test_layers_of_two_kinds_have_blocks_of_their_own(call_command: Command) -> None:
    text = call_command("plan", "gemma-3-27b", "--gpu", "A10").out
    assert re.search(
        r"KV cache: [\d,]+ blocks of 16 tokens for 52 layers with a window of 1,024 tokens and "
        r"[\d,]+ blocks of 16 tokens for 10 layers; requests of up to",
        text,
    )
    assert "capacity of A10: 0.92 of its 22.35 GiB (--gpu-memory-utilization)\n" in text
    less = call_command("plan", SMALL, "--gpu", "A10", "--gpu-memory-limit", "8GiB").out
    assert "capacity of A10: less than its 22.35 GiB (--gpu-memory-limit)\n" in less
    all_of_it = call_command("plan", SMALL, "--gpu", "A10", "--gpu-memory-utilization", "1").out
    assert "capacity of" not in all_of_it


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--ram", "-5"), "--ram must be at least 1 (GiB), not -5."),
        (("--RAM", "5"), "Unknown option --RAM. The nearest option is --ram."),
        (("--zzzzzzzzz", "5"), "Unknown option --zzzzzzzzz. See `ambidex plan --help` for what"),
    ],
)
def test_what_was_given_is_what_is_named(
    call_command: Command, words: tuple[str, ...], text: str
) -> None:
    done = call_command("plan", SMALL, "--gpu", "A10", *words)
    assert done.code == 2 and text in done.err


def test_a_few_parameters_are_counted(tmp_path: Path, call_command: Command) -> None:
    values = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert "llama, 4,656 parameters," in call_command("plan", str(path), "--gpu", "A10").out
    for value, kind in ((None, "null"), ([], "a list"), (1, "a number"), (True, "true or false")):
        path.write_text(json.dumps(value))
        done = call_command("plan", str(path), "--gpu", "A10")
        assert done.code == 1 and f"config.json holds {kind}, not an object." in done.err


def test_the_smallest_machine_without_a_size_of_the_kv_cache(call_command: Command) -> None:
    words = ("plan", "llama-3-8b", "--cpu", "epyc-9354")
    done = call_command(*words, "--ram", "3GB", "--kv-cache-memory-bytes", "100GB")
    found = re.search(r"--ram (\d+)GiB without --kv-cache-memory-bytes, with (--[^;.]+)", done.err)
    assert done.code == 1 and found is not None, done.err
    assert call_command(*words, "--ram", found[1], *found[2].split()).code == 0


def test_a_gpu_without_bfloat16_holds_float16(call_command: Command) -> None:
    found = json.loads(call_command("plan", SMALL, "--gpu", "T4", "--json").out)
    assert found["model"]["description"] == "float16 (auto)"


def test_threads_do_not_change_a_cpu_of_the_table(call_command: Command) -> None:
    words = ("plan", SMALL, "--cpu", "epyc-9354")
    done = call_command(*words, "--cpu-threads", "4")
    assert done.out == call_command(*words).out
    assert "--cpu-threads 4: no effect here: EPYC 9354 is planned with all its cores" in done.err
    assert "--cpu-threads" not in call_command(*words, "--cpu-threads", "32").err


@pytest.mark.parametrize(
    "words", ["--gpu-memory-utilization 0", "--gpu-memory-limit 0", "--num-gpu-blocks 0"]
)
def test_an_accelerator_with_nothing_to_work_with(call_command: Command, words: str) -> None:
    done = call_command("plan", SMALL, "--gpu", "A10", *words.split())
    assert done.code == 2
    assert done.err == (
        f"ambidex: error: {words} leaves --gpu A10 nothing to work with. Give more than 0, or "
        "leave it out.\n"
    )


def test_what_does_not_fit_names_what_does(call_command: Command) -> None:
    words = ("plan", "llama-3-70b", "--gpu", "A100-80", "--ram", "64GB")
    done = call_command(*words)
    assert done.code == 1 and done.err.startswith("ambidex: error: ")
    assert "What fits" in done.out and "a second" in done.out
    refusal = json.loads(call_command(*words, "--json").out)
    assert refusal["fits"] is False and 1 <= len(refusal["proposals"]) <= 3
    for proposal in refusal["proposals"]:
        again = call_command(*words, *proposal["flags"].split(), "--json")
        assert again.code == 0, proposal["flags"]
        found = json.loads(again.out)["predictions"]["tpot_1"]
        assert found["seconds"] == proposal["predictions"]["tpot_1"]["seconds"]


def test_what_nothing_helps_names_the_smallest_machine(call_command: Command) -> None:
    words = ("plan", "llama-3-70b", "--gpu", "rtx-3060", "--ram", "16GB")
    done = call_command(*words)
    assert (done.code, done.out) == (1, "") and done.err.count("\n") == 1
    as_they_are, frugal = re.findall(r"--ram (\d+)GiB with ([^;]*)[;.]", done.err)
    assert as_they_are[1] == "these options"
    for (size, _), more in ((as_they_are, ()), (frugal, frugal[1].split())):
        assert call_command(*words[:-1], size, *more).code == 0
        # Exact to a thirtieth.
        less = str(int(int(size) * 0.95))
        assert call_command(*words[:-1], less, *more).code == 1
    refusal = json.loads(call_command(*words, "--json").out)
    assert refusal["fits"] is False and refusal["proposals"] == []
    assert done.err == f"ambidex: error: {refusal['error']}\n"


def test_an_accelerator_may_be_what_is_too_small(call_command: Command) -> None:
    gpu = "memory=700MB,bandwidth=99GB/s,flops=9T"
    done = call_command("plan", "qwen2.5-7b", "--gpu", gpu, "--ram", "500GB", "-q", "int4")
    assert done.code == 1
    size, unit = re.findall(r"an accelerator of (\d+) ([MG]iB) with these options", done.err)[0]
    gpu = gpu.replace("700MB", f"{size}{unit}")
    assert call_command("plan", "qwen2.5-7b", "--gpu", gpu, "-q", "int4").code == 0


def test_a_small_accelerator_has_its_size_in_mib(call_command: Command) -> None:
    def gpu(size: str) -> tuple[str, ...]:
        return ("--gpu", f"memory={size},bandwidth=99GB/s,flops=9T", "--ram", "64GB")

    words = ("plan", SMALL, "--max-num-seqs", "4", "--max-num-batched-tokens", "128")
    done = call_command(*words, *gpu("64MiB"))
    assert done.code == 1 and "leave nothing of it for weights" in done.err
    # Steps are as small as those that would be named.
    assert "--max-num-seqs or" not in done.err and "Give more than" in done.err
    size = int(re.findall(r"an accelerator of (\d+) MiB with these options", done.err)[0])
    assert call_command(*words, *gpu(f"{size}MiB")).code == 0
    assert call_command(*words, *gpu(f"{size - 64}MiB")).code == 1


def _config(tmp_path: Path, **fields: Any) -> str:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64)
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"vocab_size": 512, "max_position_embeddings": 512, "num_experts_per_tok": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | counts | others | fields))
    return str(path)


@pytest.mark.parametrize("kinds", [[], ["full_attention"] * 3])
def test_kinds_of_too_few_layers_are_refused(
    call_command: Command, tmp_path: Path, kinds: list[str]
) -> None:
    path = _config(tmp_path, model_type="gemma3_text", head_dim=16, layer_types=kinds)
    done = call_command("plan", path, "--gpu", "A10")
    assert done.code == 1 and done.err.startswith(f"ambidex: error: {path}"), done.err
    assert f"'layer_types' names {len(kinds)} layers, and 'num_hidden_layers' is 4" in done.err


def test_no_experts_are_a_plain_mlp(call_command: Command, tmp_path: Path) -> None:
    path = _config(tmp_path, model_type="qwen3_moe", head_dim=16, num_experts=0)
    done = call_command("plan", path, "--gpu", "A10", "--json")
    assert done.code == 0, done.err
    model = json.loads(done.out)["model"]
    assert model["num_active_parameters"] == model["num_parameters"] < 300_000


def test_a_context_that_is_too_long_has_one_limit(call_command: Command, tmp_path: Path) -> None:
    path = _config(tmp_path, model_type="llama", max_position_embeddings=10**12)
    done = call_command("plan", path, "--gpu", "A10")
    assert done.code == 1 and done.err.count("at most 2147483647") == 1, done.err


def test_a_plan_loads_nothing_heavy() -> None:
    """What keeps ``ambidex plan`` under a second."""
    code = """
import sys
from ambidex.cli import main
assert main(["plan", "--help"]) == 0
late = {"ambidex.memory.planner", "ambidex.weights.shape"}
assert not late & set(sys.modules)
assert main(["plan", "qwen2-7b", "--gpu", "A10", "--svg", "/dev/null"]) == 0
heavy = {"torch", "numpy", "rich", "fastapi", "uvicorn", "zmq", "tokenizers", "huggingface_hub",
         "gguf", "asyncio", "httpx", "ruamel", "matplotlib"}
sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
