"""Files that say the same in other words: older configurations, fused and split tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Case, make_reference
from harness import Session, load
from safetensors.torch import load_file, save_file
from torch import Tensor

from ambidex.errors import InvalidModelError, UnsupportedModelError

torch.set_num_threads(1)

PROMPT = {"a": list(range(5, 95))}
Config = dict[str, Any]
Tensors = dict[str, Tensor]


def case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def save(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def logits(folder: Path, max_model_len: int = 512) -> Tensor:
    return Session(load(folder, max_model_len=max_model_len)).run(PROMPT, budget=1000)["a"]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], tuple[Path, Config, Tensors]]:
    def make(name: str) -> tuple[Path, Config, Tensors]:
        folder = tmp_path / name
        make_reference(case(name)).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        return folder, config, load_file(folder / "model.safetensors")

    return make


Saved = Callable[[str], tuple[Path, Config, Tensors]]


def _old_rope(config: Config, kind: str = "rope_type") -> None:
    """Before transformers 5: ``rope_theta`` beside ``rope_scaling``."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    share = scaling.pop("partial_rotary_factor", None)
    if share is not None:
        config["partial_rotary_factor"] = share
    scaling[kind] = scaling.pop("rope_type")
    config["rope_scaling"] = None if scaling[kind] == "default" else scaling


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize(
    "name",
    [
        "llama-plain",
        "llama-linear",
        "llama-dynamic-long",
        "llama-yarn",
        "llama-longrope",
        "llama-llama3",
        "phi3-longrope-window",
        "mixtral-plain",
    ],
)
def test_rope_before_transformers_5(saved: Saved, tmp_path: Path, name: str, kind: str) -> None:
    folder, config, tensors = saved(name)
    _old_rope(config, kind)
    assert torch.equal(logits(folder), logits(save(tmp_path / "old", config, tensors)))


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_phi3_names_longrope_otherwise(saved: Saved, tmp_path: Path, kind: str) -> None:
    folder, config, tensors = saved("phi3-longrope-window")
    _old_rope(config, "type")
    config["rope_scaling"]["type"] = kind
    # The first files have it at the top only.
    config["rope_scaling"].pop("original_max_position_embeddings", None)
    assert torch.equal(logits(folder), logits(save(tmp_path / "old", config, tensors)))


def _old_gemma3(config: Config) -> None:
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["full_attention"].pop("rope_theta")
    config["rope_scaling"] = ropes["full_attention"]
    config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    config.pop("layer_types")
    config["sliding_window_pattern"] = 2
    config.pop("tie_word_embeddings")


def test_gemma3_before_transformers_5(saved: Saved, tmp_path: Path) -> None:
    folder, config, tensors = saved("gemma3_text-scaled")
    _old_gemma3(config)
    assert torch.equal(logits(folder), logits(save(tmp_path / "old", config, tensors)))


def test_gemma3_without_defaults(saved: Saved, tmp_path: Path) -> None:
    folder, config, tensors = saved("gemma3_text-plain")
    for layer_type in config["rope_parameters"].values():
        layer_type.pop("rope_theta")
    assert torch.equal(logits(folder), logits(save(tmp_path / "short", config, tensors)))


@pytest.mark.parametrize("newer", [False, True])
def test_gemma3_with_images(saved: Saved, tmp_path: Path, newer: bool) -> None:
    """The text model of an image model; what reads images is left alone."""
    folder, config, tensors = saved("gemma3_text-scaled")
    outer = {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 8}}
    prefix = "language_model.model." if not newer else "model.language_model."
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = torch.zeros(8)
    both = save(tmp_path / "both", outer, tensors)
    assert torch.equal(logits(folder), logits(both))
    assert load(both).unused == ["vision_tower.vision_model.post_layernorm.weight"]


def _stack(tensors: Tensors, gate: str, up: str, down: str, target: str) -> Tensors:
    """Experts as transformers 5 holds them in memory."""
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in sorted(layers):
        count = sum(name.startswith(f"{layer}.experts.") for name in tensors) // 3
        experts = [f"{layer}.experts.{expert}" for expert in range(count)]
        out = layer.replace("block_sparse_moe", target)
        stacked[f"{out}.experts.gate_up_proj"] = torch.stack(
            [
                torch.cat([tensors[f"{e}.{gate}.weight"], tensors[f"{e}.{up}.weight"]])
                for e in experts
            ]
        )
        stacked[f"{out}.experts.down_proj"] = torch.stack(
            [tensors[f"{e}.{down}.weight"] for e in experts]
        )
    return {name.replace("block_sparse_moe", target): tensor for name, tensor in stacked.items()}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mixtral-plain", ("w1", "w3", "w2")),
        ("qwen3_moe-mixed-layers", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_stacked_experts(
    saved: Saved, tmp_path: Path, name: str, parts: tuple[str, str, str]
) -> None:
    folder, config, tensors = saved(name)
    stacked = save(tmp_path / "stacked", config, _stack(tensors, *parts, target="mlp"))
    assert load(stacked).unused == []
    assert torch.equal(logits(folder), logits(stacked))


def test_number_of_experts_has_two_names(saved: Saved, tmp_path: Path) -> None:
    folder, config, tensors = saved("qwen3_moe-plain")
    count = config.pop("num_local_experts", None) or config.pop("num_experts")
    config["num_experts"] = count
    assert torch.equal(logits(folder), logits(save(tmp_path / "named", config, tensors)))


def test_more_experts_than_configured(saved: Saved, tmp_path: Path) -> None:
    _, config, tensors = saved("mixtral-plain")
    config["num_local_experts"] = 4
    with pytest.raises(InvalidModelError, match=r"gate\.weight has shape \[6, 64\]|has no place"):
        load(save(tmp_path / "few", config, tensors))


@pytest.mark.parametrize("name", ["llama-tied", "opt-plain", "qwen2-plain"])
def test_saved_without_head(saved: Saved, tmp_path: Path, name: str) -> None:
    """Names lack ``model.`` where the base model was saved alone."""
    folder, config, tensors = saved(name)
    bare = {
        key.removeprefix("model."): tensor
        for key, tensor in tensors.items()
        if key != "lm_head.weight"
    }
    assert torch.equal(logits(folder), logits(save(tmp_path / "bare", config, bare)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-biases", "mixtral-plain", "gemma3_text-plain"])
def test_low_precision_files_are_computed_in_float32(
    saved: Saved, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Widened at load or in the kernel, the products are the same."""
    _, config, tensors = saved(name)
    low = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    small = save(tmp_path / "low", config, low)
    large = save(tmp_path / "wide", config, {key: t.float() for key, t in low.items()})
    widened = Session(load(small, dtype=dtype)).run(PROMPT, budget=33)["a"]
    assert torch.equal(widened, logits(large))


def test_one_scaling_field_is_missing(saved: Saved, tmp_path: Path) -> None:
    _, config, tensors = saved("llama-linear")
    del config["rope_parameters"]["factor"]
    with pytest.raises(InvalidModelError, match="lacks the field 'factor'"):
        load(save(tmp_path / "bad", config, tensors))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, UnsupportedModelError, "'spiral'"),
        ({"hidden_act": "step"}, UnsupportedModelError, "'step'.*Supported: gelu"),
        ({"model_type": "perceptron"}, UnsupportedModelError, "Supported model types: gemma3"),
        ({"hidden_size": None}, InvalidModelError, "lacks the field 'hidden_size'"),
        ({"intermediate_size": 80}, InvalidModelError, r"shape \[.*112.*asks for \[.*80"),
        ({"num_hidden_layers": 3}, InvalidModelError, "lacks 9 of the model's tensors"),
    ],
)
def test_refusals(
    saved: Saved, tmp_path: Path, changes: Config, error: type[Exception], words: str
) -> None:
    _, config, tensors = saved("llama-linear")
    with pytest.raises(error, match=words):
        load(save(tmp_path / "bad", config | changes, tensors))
