"""Makes the GGUF files that the benchmarks need and nobody publishes in that form.

    python benchmarks/make_models.py requantise SOURCE.gguf TARGET.gguf --type Q8_0
    python benchmarks/make_models.py random SOURCE.gguf TARGET.gguf [--type Q8_0]
    python benchmarks/make_models.py folder SOURCE.gguf TARGET --as awq

``requantise`` dequantises every matrix of SOURCE and writes it as Q8_0, F16, BF16 or F32.
``random`` writes a model of Qwen2-1.5B's shape with random weights, and the tokenizer of SOURCE,
filled up to the size of its vocabulary. Both write one tensor at a time. Needs the gguf package.
``folder`` writes SOURCE as a Hugging Face folder without a tokenizer: ``plain``; ``int8-values``
and ``int4-values``, whose matrices have the values that ``--quantization`` gives them; ``awq``,
``gptq`` and ``gptq-order`` in 4 bits and groups of 64, by the writers of the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

#: Qwen2-1.5B: layers, width, feed-forward width, heads, key-value heads, vocabulary, context.
LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, VOCABULARY = 28, 1536, 8960, 12, 2, 151936
CONTEXT = 32768
_HEAD_WIDTH = WIDTH // HEADS
#: Standard deviation of random weights.
_SPREAD = 0.02
#: llama.cpp's file type of each type, as the header names it.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}

#: Kinds of folders, and the columns that share a scale in AWQ and GPTQ.
FOLDERS = ("plain", "int8-values", "int4-values", "awq", "gptq", "gptq-order")
GROUP = 64

#: Name, shape as PyTorch has it, type, and what makes its bytes.
Tensor = tuple[str, tuple[int, ...], Type, Callable[[], Any]]


def write(target: Path, architecture: str, fields: Iterable[Any], tensors: list[Tensor]) -> None:
    """A GGUF file; ``fields`` are (name, value, type, element type)."""
    writer = gguf.GGUFWriter(target, architecture)
    for name, value, value_type, element_type in fields:
        writer.add_key_value(name, value, value_type, element_type)
    for name, shape, tensor_type, _ in tensors:
        byte_shape = gguf.quant_shape_to_byte_shape(shape, tensor_type)
        num_bytes = int(np.prod(byte_shape))
        if tensor_type in (Type.F32, Type.F16):
            dtype = np.dtype(np.float32 if tensor_type == Type.F32 else np.float16)
            writer.add_tensor_info(name, shape, dtype, num_bytes)
        else:
            writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), num_bytes, tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, _, _, make in tensors:
        print(name, flush=True)
        writer.write_tensor_data(make())
    writer.close()


def copied_fields(reader: gguf.GGUFReader, prefix: str = "") -> list[Any]:
    """The header's fields whose name begins so, without those that the writer adds itself."""
    found = []
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or not name.startswith(prefix):
            continue
        if name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if len(field.types) > 1 else None
        found.append((name, field.contents(), field.types[0], element))
    return found


def requantise(source: Path, target: Path, type_name: str) -> None:
    reader = gguf.GGUFReader(source)
    wanted = Type[type_name]
    tensors: list[Tensor] = []
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        is_matrix = len(shape) > 1
        tensor_type = wanted if is_matrix else Type.F32

        def make(tensor: Any = tensor, shape: Any = shape, tensor_type: Type = tensor_type) -> Any:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            return gguf.quantize(values.astype(np.float32), tensor_type)

        tensors.append((tensor.name, shape, tensor_type, make))
    architecture = reader.fields["general.architecture"].contents()
    fields = copied_fields(reader)
    fields.append(("general.file_type", _FILE_TYPES[type_name], gguf.GGUFValueType.UINT32, None))
    write(target, architecture, fields, tensors)


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], tensor_type: Type) -> Any:
    rows, columns = shape
    if tensor_type == Type.Q8_0:
        # Uniform codes -128 .. 127 have a standard deviation of 74.
        blocks = np.empty((rows, columns // 32, 34), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(_SPREAD / 74).tobytes(), np.uint8)
        blocks[..., 2:] = rng.integers(0, 256, (rows, columns // 32, 32), np.uint8)
        return blocks.reshape(rows, -1)
    parts = [
        gguf.quantize(
            rng.normal(0, _SPREAD, (min(1024, rows - first), columns)).astype(np.float32),
            tensor_type,
        )
        for first in range(0, rows, 1024)
    ]
    return np.concatenate(parts)


def random_qwen2(source: Path, target: Path, type_name: str) -> None:
    matrix = Type[type_name]
    rng = np.random.default_rng(0)
    tensors: list[Tensor] = []

    def add_matrix(name: str, rows: int, columns: int) -> None:
        shape = (rows, columns)
        tensors.append((f"{name}.weight", shape, matrix, lambda: random_matrix(rng, shape, matrix)))

    def add_vector(name: str, size: int, value: float) -> None:
        tensors.append((name, (size,), Type.F32, lambda: np.full(size, value, np.float32)))

    add_matrix("token_embd", VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        add_vector(f"{at}attn_norm.weight", WIDTH, 1.0)
        for name, rows in (
            ("q", WIDTH),
            ("k", KV_HEADS * _HEAD_WIDTH),
            ("v", KV_HEADS * _HEAD_WIDTH),
        ):
            add_matrix(f"{at}attn_{name}", rows, WIDTH)
            add_vector(f"{at}attn_{name}.bias", rows, 0.01)
        add_matrix(f"{at}attn_output", WIDTH, WIDTH)
        add_vector(f"{at}ffn_norm.weight", WIDTH, 1.0)
        add_matrix(f"{at}ffn_gate", FEED_FORWARD, WIDTH)
        add_matrix(f"{at}ffn_up", FEED_FORWARD, WIDTH)
        add_matrix(f"{at}ffn_down", WIDTH, FEED_FORWARD)
    add_vector("output_norm.weight", WIDTH, 1.0)

    kind = gguf.GGUFValueType
    fields = [
        ("general.name", "random weights in Qwen2-1.5B's shape", kind.STRING, None),
        ("general.file_type", _FILE_TYPES[type_name], kind.UINT32, None),
        ("qwen2.block_count", LAYERS, kind.UINT32, None),
        ("qwen2.context_length", CONTEXT, kind.UINT32, None),
        ("qwen2.embedding_length", WIDTH, kind.UINT32, None),
        ("qwen2.feed_forward_length", FEED_FORWARD, kind.UINT32, None),
        ("qwen2.attention.head_count", HEADS, kind.UINT32, None),
        ("qwen2.attention.head_count_kv", KV_HEADS, kind.UINT32, None),
        ("qwen2.attention.layer_norm_rms_epsilon", 1e-6, kind.FLOAT32, None),
        ("qwen2.rope.freq_base", 1e6, kind.FLOAT32, None),
        *filled_up(copied_fields(gguf.GGUFReader(source), "tokenizer.")),
    ]
    write(target, "qwen2", fields, tensors)


def filled_up(fields: list[Any]) -> list[Any]:
    """A tokenizer's fields, with unused tokens up to the size of the vocabulary."""
    unused = int(gguf.TokenType.UNUSED)
    fill: dict[str, Callable[[int], Any]] = {
        "tokenizer.ggml.tokens": lambda index: f"<unused_{index}>",
        "tokenizer.ggml.token_type": lambda index: unused,
        "tokenizer.ggml.scores": lambda index: 0.0,
    }
    filled = []
    for name, value, value_type, element in fields:
        if name in fill:
            value = [*value, *(fill[name](index) for index in range(len(value), VOCABULARY))]
        filled.append((name, value, value_type, element))
    return filled


def write_folder(source: Path, target: Path, kind: str) -> None:
    import torch
    from safetensors.torch import save_file

    from ambidex.quant.on_load import quantise
    from ambidex.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(source)
    target.mkdir(parents=True)
    config = {name: value for name, value in checkpoint.config.values.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {}
    for name in checkpoint.tensor_names():
        tensor = checkpoint.load(name)
        if tensor.dim() == 2 and kind.endswith("-values"):
            tensor = quantise(name, tensor, kind.removesuffix("-values")).dequantise()
        elif tensor.dim() == 2:
            tensor = tensor.to(torch.float16)
        tensors[name] = tensor.contiguous()
    save_file(tensors, target / "model.safetensors")
    if kind in ("awq", "gptq", "gptq-order"):
        quantise_folder(target, kind)


def quantise_folder(folder: Path, kind: str) -> None:
    """The tests' writers compute the published layouts one number at a time: it takes minutes."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "weights"))
    import quantised_checkpoints as writers

    is_ordered = kind == "gptq-order"
    if kind == "awq":
        pack = writers.awq(GROUP)
        table = {"quant_method": "awq", "version": "gemm", "zero_point": True}
    else:
        pack = writers.gptq(4, GROUP, symmetric=not is_ordered, act_order=is_ordered)
        table = {"quant_method": "gptq", "sym": not is_ordered, "desc_act": is_ordered}
    writers.quantise_folder(folder, pack, table | {"bits": 4, "group_size": GROUP})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("requantise", "random", "folder"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=tuple(_FILE_TYPES), default="Q8_0")
    parser.add_argument("--as", dest="kind", choices=FOLDERS, default="plain")
    args = parser.parse_args()
    if args.what == "folder":
        write_folder(args.source, args.target, args.kind)
        return
    make = requantise if args.what == "requantise" else random_qwen2
    make(args.source, args.target, args.type)


if __name__ == "__main__":
    main()
