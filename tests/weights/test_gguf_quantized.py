"""Low-bit matrices of GGUF files: the same values as ``load`` gives, and sizes known before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ambidex.kernels.quantized import Quantized
from ambidex.quant.forms import GGUF_FORMS
from ambidex.weights.checkpoint import open_checkpoint
from ambidex.weights.gguf import DEQUANTISABLE

Maker = Callable[..., tuple[Path, Path]]
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "gemma3", "phi3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
def test_all_tensors_of_a_model(gguf_file: Maker, name: str, kind: str) -> None:
    _, file = gguf_file(name, dtype=GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(file)
    assert checkpoint.is_quantized == (kind in GGUF_FORMS)
    for key in checkpoint.tensor_names():
        want, got = checkpoint.load(key), checkpoint.load_quantized(key)
        form = checkpoint.quantized_form(key)
        if isinstance(got, Quantized):
            assert form == GGUF_FORMS[kind]
            assert checkpoint.quantized_bytes(key) == form.num_bytes(*want.shape)
            assert got.name == key
            assert torch.equal(got.dequantise(), want), key
        else:
            assert form is None and checkpoint.quantized_bytes(key) is None
            half = kind == "BF16" and want.dim() == 2
            assert got.dtype is (torch.bfloat16 if half else torch.float32)
            assert torch.equal(got.float(), want), key


@pytest.mark.parametrize("type_name", sorted(DEQUANTISABLE))
def test_every_type_loads(one_tensor_gguf: Callable[..., Path], type_name: str) -> None:
    kind = GGMLQuantizationType[type_name]
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(1)
    packed = generator.integers(0, 256, (50, 256 // block * size), dtype=np.uint8)
    data = packed.view({"F32": np.float32, "F16": np.float16}.get(type_name, np.uint8))
    checkpoint = open_checkpoint(one_tensor_gguf(data, kind))
    made = checkpoint.load_quantized(DOWN)
    assert isinstance(made, Quantized) == (type_name in GGUF_FORMS)
    values = made.dequantise() if isinstance(made, Quantized) else made.float()
    with np.errstate(all="ignore"):
        want = quants.dequantize(data, kind)
    np.testing.assert_array_equal(values.numpy(), want)
