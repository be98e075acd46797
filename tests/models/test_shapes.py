"""What a plan lists of a model against the model that is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.config import CheckpointConfig
from ambidex.device.cpu import CPUDevice
from ambidex.errors import UnsupportedModelError
from ambidex.layers.module import BuildContext, Experts, Matrix, submodules
from ambidex.layers.moe import MoE
from ambidex.layers.rope import rope_bytes
from ambidex.memory.architectures import (
    FAMILIES,
    architecture_of,
    head_size,
    model_config,
    served_types,
)
from ambidex.memory.public_shapes import PUBLIC_SHAPES
from ambidex.memory.weight_places import WeightKind
from ambidex.models.registry import MODELS, build_model
from ambidex.runner.placing import _kind
from ambidex.weights.shape import _number_bytes

KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
             "int8": torch.int8}  # fmt: skip
LENGTH = 1500


def compare(config: CheckpointConfig, dtype: str = "bfloat16") -> None:
    """Every parameter and KV group, and the rotation tables."""
    values = model_config(config)
    device = CPUDevice(1)
    try:
        context = BuildContext(device, KV_DTYPES[dtype], LENGTH)
        model = build_model(context, values)
        listed = architecture_of(values)
        built = list(model.named_parameters())
        assert [spec.path for spec in listed.weights] == [path for path, _ in built]
        for spec, (path, parameter) in zip(listed.weights, built, strict=True):
            assert spec.shape == tuple(parameter.shape), path
            assert spec.stacked == tuple(parameter.stacked), path
            assert spec.kind is _kind(parameter), path
            assert spec.is_matrix == parameter.is_matrix, path
            assert dict(spec.parts) == parameter.parts, path
            assert list(spec.parts) == list(parameter.parts), path
            paired = isinstance(parameter, Matrix) and parameter.is_paired
            assert spec.is_paired == paired, path
            assert _number_bytes(spec, dtype) == parameter.num_bytes, path
            count = len(parameter.data) if isinstance(parameter, Experts) else 1
            assert spec.num_experts == count, path
        for name, kv_dtype in KV_DTYPES.items():
            groups = context.kv_groups(kv_dtype)
            shapes = listed.kv_shapes(name)
            assert [
                (s.num_layers, s.num_kv_heads, s.head_dim, s.window, s.bytes_per_token)
                for s in shapes
            ] == [
                (len(g.layers), g.num_kv_heads, g.head_dim, g.window, g.bytes_per_token)
                for g in groups
            ]
        chunks = -(-LENGTH // 1024) * 1024
        assert listed.rope_bytes * chunks == rope_bytes(model)
        # Every name of a published checkpoint leads back to its part, and all parts have one.
        found = listed.tensors(FAMILIES[values.require("model_type")].is_fused)
        for name, (spec, part, _) in found.items():
            assert listed.names.find(name) == (spec.path, part)
        assert {spec.path for spec, _, _ in found.values()} == {path for path, _ in built}
        chosen = {spec.num_chosen for spec in listed.weights if spec.kind is WeightKind.EXPERTS}
        assert chosen == {item.top_k for item in submodules(model) if isinstance(item, MoE)}
    finally:
        device.close()


def config_of(case: Case) -> CheckpointConfig:
    from transformers import AutoConfig

    values = AutoConfig.for_model(case.kind, **case.values).to_dict()
    return CheckpointConfig(values, f"{case.name}/config.json")


def test_the_models_are_those_that_are_listed() -> None:
    assert served_types() == sorted(MODELS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tiny_model(case: Case) -> None:
    compare(config_of(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_names_are_those_that_transformers_saves(case: Case) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.kind, **case.values))
    config = model_config(config_of(case))
    listed = architecture_of(config)
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or ())
        if config.get("tie_word_embeddings", False)
        else set()
    )
    saved = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}
    found = listed.tensors(FAMILIES[config.require("model_type")].is_fused)
    if not any(".experts." in name for name in saved):
        assert {name: shape for name, (_, _, shape) in found.items()} == saved
    # Transformers stacks experts in memory, and saves them one by one.
    paths = {listed.names.find(name)[0] for name in saved}  # type: ignore[index]
    assert paths == {spec.path for spec in listed.weights}


@pytest.mark.parametrize(
    "key", [k for k, s in PUBLIC_SHAPES.items() if FAMILIES[s.values["model_type"]].is_served]
)
def test_every_public_shape(key: str) -> None:
    values: dict[str, Any] = dict(PUBLIC_SHAPES[key].values)
    values["num_hidden_layers"] = min(values["num_hidden_layers"], 7)
    compare(CheckpointConfig(values, key))


sizes = st.integers(1, 4)
flags = st.booleans()


@st.composite
def configurations(draw: st.DrawFn) -> CheckpointConfig:
    """Of every model type, with fields left out where the model may do without."""
    kind = draw(st.sampled_from(served_types()))
    kv_heads = draw(sizes)
    heads = kv_heads * draw(sizes)
    layers = draw(st.integers(1, 6))
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    optional = {
        "num_key_value_heads": st.just(kv_heads),
        "head_dim": st.sampled_from([8, 24, 32]),
        "tie_word_embeddings": flags,
        "attention_bias": flags,
        "qkv_bias": flags,
        "mlp_bias": flags,
        "sliding_window": st.sampled_from([None, 7, 300]),
        "use_sliding_window": flags,
        "max_window_layers": st.integers(0, 3),
        "layer_types": st.lists(kinds, min_size=layers, max_size=layers),
        "sliding_window_pattern": st.integers(1, 4),
        "partial_rotary_factor": st.sampled_from([0.5, 0.75, 1.0]),
        "word_embed_proj_dim": st.sampled_from([16, heads * 16]),
        "enable_bias": flags,
        "layer_norm_elementwise_affine": flags,
        "do_layer_norm_before": flags,
        "_remove_final_layer_norm": flags,
        "num_experts": st.integers(2, 5),
        "num_local_experts": st.integers(2, 5),
        "decoder_sparse_step": st.integers(1, 3),
        "mlp_only_layers": st.lists(st.integers(0, 5), max_size=2),
    }
    values = {
        "model_type": kind,
        "vocab_size": draw(st.integers(1, 200)),
        "hidden_size": heads * 16,
        "intermediate_size": draw(st.integers(1, 90)),
        "moe_intermediate_size": draw(st.integers(1, 90)),
        "ffn_dim": draw(st.integers(1, 90)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_experts_per_tok": 2,
        "max_position_embeddings": draw(st.integers(1, 4096)),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        values[name] = draw(optional[name])
    return CheckpointConfig(values, "drawn")


@given(configurations(), st.sampled_from(["float32", "float16", "bfloat16"]))
@settings(max_examples=150, deadline=None)
def test_any_configuration(config: CheckpointConfig, dtype: str) -> None:
    compare(config, dtype)


def test_a_text_model_inside_another() -> None:
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 7}
    outer = CheckpointConfig({"model_type": "gemma3", "text_config": inner}, "m")
    compare(outer)
    # A kind that nobody knows says less than the outer one.
    compare(CheckpointConfig({"model_type": "gemma3", "text_config": inner | {
        "model_type": "gemma9"}}, "m"))  # fmt: skip
    assert head_size(model_config(outer)) == 256


def test_what_is_planned_only_is_not_served() -> None:
    config = CheckpointConfig(dict(PUBLIC_SHAPES["llama-3.2-90b"].values), "m")
    with pytest.raises(UnsupportedModelError, match=r"'mllama'.*Supported model types: gemma3, "):
        model_config(config)
    model_config(config, planned=True)
