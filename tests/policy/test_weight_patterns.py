"""--offload-layers: which weights a pattern names."""

from __future__ import annotations

import pytest

from ambidex.errors import OptionError
from ambidex.memory.weight_patterns import layer_index, match_patterns

NUM_LAYERS = 12


def weights() -> list[tuple[str, ...]]:
    """A model's names, the checkpoint's behind ours."""
    found: list[tuple[str, ...]] = [("embedding.weight", "model.embed_tokens.weight")]
    for i in range(NUM_LAYERS):
        below = f"model.layers.{i}."
        found += [
            (f"layers.{i}.attention_norm.weight", f"{below}input_layernorm.weight"),
            (
                f"layers.{i}.attention.qkv.weight",
                *(f"{below}self_attn.{part}_proj.weight" for part in "qkv"),
            ),
            (f"layers.{i}.attention.output.weight", f"{below}self_attn.o_proj.weight"),
            (
                f"layers.{i}.mlp.gate_up.weight",
                f"{below}mlp.gate_proj.weight",
                f"{below}mlp.up_proj.weight",
            ),
            (f"layers.{i}.mlp.down.weight", f"{below}mlp.down_proj.weight"),
        ]
    return [*found, ("norm.weight", "model.norm.weight"), ("head.weight", "lm_head.weight")]


WEIGHTS = weights()


def named(*patterns: str) -> set[str]:
    matches = match_patterns(patterns, WEIGHTS)
    return {WEIGHTS[index][0] for match in matches for index in match.weights}


def layers(*patterns: str) -> list[int]:
    """Layers of which every weight is named, where no other weight is."""
    paths = named(*patterns)
    found = {layer_index(path) for path in paths}
    whole = {path for path, *_ in WEIGHTS if layer_index(path) in found}
    assert None not in found and paths == whole
    return sorted(layer for layer in found if layer is not None)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("decoder.layers.10:", [10, 11]),
        ("layers.3:6", [3, 4, 5]),
        ("layers.:3", [0, 1, 2]),
        ("layers.-2:", [10, 11]),
        ("layers.:-10", [0, 1]),
        ("layers[9:]", [9, 10, 11]),
        ("model.layers.9:99", [9, 10, 11]),
        ("10:", [10, 11]),
        (":2", [0, 1]),
        (":", list(range(12))),
        ("10-", [10, 11]),
        ("4-6", [4, 5, 6]),
        ("layers.4-6", [4, 5, 6]),
        ("layers.5", [5]),
        ("model.layers.5", [5]),
        ("transformer.h.5", [5]),
        ("5", [5]),
        ("layers.1", [1]),
        ("layers.1*", [1, 10, 11]),
        ("layers.[0-2]", [0, 1, 2]),
        ("model.layers.3.*", [3]),
        ("1:2,4:5, 7", [1, 4, 7]),
        ("layers", list(range(12))),
    ],
)
def test_whole_layers(pattern: str, expected: list[int]) -> None:
    assert layers(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "part", "count"),
    [
        ("*.mlp", ".mlp.", 24),
        ("mlp", ".mlp.", 24),
        ("*.mlp.*", ".mlp.", 24),
        ("layers.*.mlp", ".mlp.", 24),
        ("layers.[0-9].mlp.*", ".mlp.", 20),
        ("layers.3:5.mlp", ".mlp.", 4),
        ("3-5.mlp.*", ".mlp.", 6),
        ("layers.5.mlp.down", ".mlp.down.", 1),
        ("decoder.layers.5.self_attn.q_proj", ".attention.qkv.", 1),
        ("*.down_proj.weight", ".mlp.down.", 12),
        ("up_proj", ".mlp.gate_up.", 12),
        ("self_attn.?_proj", ".attention.", 24),
        ("lm_head", "head.", 1),
        ("head.weight", "head.", 1),
        ("model.embed_tokens", "embedding.", 1),
        ("layers.2.*norm", "attention_norm", 1),
    ],
)
def test_parts(pattern: str, part: str, count: int) -> None:
    paths = named(pattern)
    assert len(paths) == count and all(part in path for path in paths)


def test_all_and_unions() -> None:
    assert len(named("*")) == len(WEIGHTS)
    assert named("*.mlp", "head") == named("*.mlp") | {"head.weight"}
    matches = match_patterns(["5,6", "head"], WEIGHTS)
    assert [match.pattern for match in matches] == ["5", "6", "head"]
    assert [len(match.weights) for match in matches] == [5, 5, 1]


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("*.mpl", ["'*.mpl'", "12 layers, 0 to 11", "*.mlp"]),
        ("layers.3.mpl", ["layers.*.mlp"]),
        ("layrs.3.mlp", ["layers.*.mlp"]),
        ("model.layers.3.mlp.dwn_proj", ["model.layers.*.mlp.down_proj"]),
        ("layers.3:5.mpl", ["layers.*.mlp"]),
        ("layers.12", ["'layers.12'", "12 layers, 0 to 11", "layers.11"]),
        ("decoder.layers.40:", ["12 layers, 0 to 11", "layers.11", "layers.0:12"]),
        ("40-", ["12 layers"]),
        ("6:3", ["12 layers, 0 to 11. Its end comes before its beginning. Near: "]),
        ("layers.6-3", ["Its end comes before its beginning."]),
        ("layers.40:.mlp", ["layers.11.mlp"]),
        ("*.MLP", ["*.mlp"]),
        ("%$", ["matches no weight", "Near: "]),
        ("", ["empty pattern"]),
        ("5,,6", ["empty pattern"]),
    ],
)
def test_what_names_nothing_names_what_is_near(pattern: str, parts: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        named("*.mlp", pattern)
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert message.startswith("--offload-layers") and message.endswith(".")


@pytest.mark.parametrize("pattern", ["*.mpl", "layers.3.mpl", "layers.12", "nothing", "40-.mpl"])
def test_what_is_near_does_name_something(pattern: str) -> None:
    with pytest.raises(OptionError) as caught:
        named(pattern)
    near = str(caught.value).partition("Near: ")[2].removesuffix(".")
    for suggestion in near.split(", "):
        assert named(suggestion)


def test_a_model_without_layers() -> None:
    names = [("a.weight",), ("b.weight",)]
    with pytest.raises(OptionError, match="has no numbered layers") as caught:
        match_patterns(["layers.0"], names)
    near = str(caught.value).partition("Near: ")[2].removesuffix(".")
    assert match_patterns(near.split(", "), names)


def test_layer_index() -> None:
    assert layer_index("layers.12.mlp.down.weight") == 12
    assert layer_index("model.decoder.layers.0.fc1.weight") == 0
    assert layer_index("blk.7.ffn_down.weight") == 7
    assert layer_index("head.weight") is None and layer_index("players.3.x") is None
