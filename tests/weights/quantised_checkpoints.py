"""Writers of quantised Hugging Face checkpoints, after the published layouts, one number at a
time, and what the numbers mean by the published formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
#: ``(weight [out, in], name, generator) -> (tensors of the file, the values they stand for)``.
Packer = Callable[[torch.Tensor, str, np.random.Generator], tuple[Tensors, torch.Tensor]]

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(stream: list[int], bits: int) -> list[int]:
    """Codes as one stream of bits, the lowest first, cut into signed words of 32."""
    total = 0
    for index, code in enumerate(stream):
        total |= code << (index * bits)
    count = len(stream) * bits // 32
    raw = [(total >> (32 * index)) & 0xFFFFFFFF for index in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in raw]


def rounded(
    weight: np.ndarray, group: int, bits: int, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], zeros [out, groups] and scales [out, groups] of groups along the row."""
    out, columns = weight.shape
    parts = weight.reshape(out, columns // group, group)
    top = (1 << bits) - 1
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    if symmetric:
        scale = (2 * np.maximum(-low, high) / top).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, top).astype(int)
    codes = np.round(parts / scale.astype(np.float32)[..., None]) + zero[..., None]
    return np.clip(codes, 0, top).astype(int).reshape(out, columns), zero, scale


def meaning(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, group: np.ndarray) -> Any:
    """``scale * (code - zero)``, ``group[c]`` being column c's, in float32."""
    values = np.empty(codes.shape, np.float32)
    for column in range(codes.shape[1]):
        g = group[column]
        values[:, column] = scale[:, g].astype(np.float32) * (codes[:, column] - zero[:, g])
    return torch.from_numpy(values)


def awq(group: int) -> Packer:
    def pack(weight: torch.Tensor, name: str, _: Any) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        codes, zero, scale = rounded(weight.numpy(), size, 4, symmetric=False)

        def packed(table: np.ndarray) -> torch.Tensor:
            rows = [
                words([line[8 * j + o] for j in range(len(line) // 8) for o in AWQ_ORDER], 4)
                for line in table.T.tolist()
            ]
            return torch.tensor(rows, dtype=torch.int32)

        tensors = {
            f"{name}.qweight": packed(codes),
            f"{name}.qzeros": packed(zero),
            f"{name}.scales": torch.from_numpy(scale.T.copy()),
        }
        return tensors, meaning(codes, zero, scale, np.arange(codes.shape[1]) // size)

    return pack


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool, version: int = 1) -> Packer:
    def pack(weight: torch.Tensor, name: str, rng: Any) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = rng.permutation(columns) if act_order else np.arange(columns)
        # Groups are of columns in the order in which they were quantised.
        sorted_codes, zero, scale = rounded(
            weight.numpy()[:, order], size, bits, symmetric=symmetric
        )
        codes, index = np.empty_like(sorted_codes), np.empty(columns, np.int32)
        codes[:, order] = sorted_codes
        index[order] = np.arange(columns) // size
        stored = (zero - 1) % (1 << bits) if version == 1 else zero
        tensors = {
            f"{name}.qweight": torch.tensor(
                [words(line, bits) for line in codes.tolist()], dtype=torch.int32
            ).t(),
            f"{name}.qzeros": torch.tensor(
                [words(line, bits) for line in stored.T.tolist()], dtype=torch.int32
            ),
            f"{name}.scales": torch.from_numpy(scale.T.copy()),
            f"{name}.g_idx": torch.from_numpy(index),
        }
        return tensors, meaning(codes, zero, scale, index)

    return pack


def int8(weight: torch.Tensor, name: str, _: Any) -> tuple[Tensors, torch.Tensor]:
    scb = weight.abs().amax(1)
    codes = torch.round(weight * (127 / scb[:, None])).to(torch.int8)
    tensors = {
        f"{name}.weight": codes,
        f"{name}.SCB": scb,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes.float() * scb[:, None] * (1 / 127)


def four_bits(kind: str, block: int, *, nested: bool) -> Packer:
    def pack(weight: torch.Tensor, name: str, rng: Any) -> tuple[Tensors, torch.Tensor]:
        book = torch.from_numpy(np.sort(rng.uniform(-1, 1, 16)).astype(np.float32))
        flat = weight.reshape(-1, block)
        absmax = flat.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        tensors: Tensors = {}
        if nested:
            size = 8
            offset = float(absmax.mean())
            table = torch.linspace(-1, 1, 256)
            parts = (absmax - offset).split(size)
            tops = torch.stack([part.abs().amax() for part in parts])
            coded = torch.stack(
                [
                    (table - (value - offset) / tops[i // size]).abs().argmin()
                    for i, value in enumerate(absmax)
                ]
            ).to(torch.uint8)
            absmax = torch.stack(
                [table[int(c)] * tops[i // size] + offset for i, c in enumerate(coded)]
            )
            state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {
                f"{name}.weight.absmax": coded,
                f"{name}.weight.nested_absmax": tops,
                f"{name}.weight.nested_quant_map": table,
            }
        else:
            tensors[f"{name}.weight.absmax"] = absmax
        codes = ((flat / absmax[:, None])[..., None] - book).abs().argmin(-1)
        pairs = codes.reshape(-1, 2)
        tensors[f"{name}.weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
        tensors[f"{name}.weight.quant_map"] = book
        text = json.dumps(state).encode()
        key = f"{name}.weight.quant_state.bitsandbytes__{kind}"
        tensors[key] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (book[codes] * absmax[:, None]).reshape(weight.shape)

    return pack


def quantise_folder(folder: Path, pack: Packer, table: dict[str, Any]) -> Tensors:
    """Quantise the layers' matrices of a saved model in place; returns every tensor's values."""
    rng = np.random.default_rng(0)
    file = folder / "model.safetensors"
    tensors: Tensors = {}
    values: Tensors = {}
    for name, tensor in load_file(file).items():
        # The experts' router, of 4 rows, is left as it is.
        if tensor.dim() == 2 and ".layers." in name and len(tensor) % 32 == 0:
            parts, values[name] = pack(tensor.float(), name.removesuffix(".weight"), rng)
            tensors |= parts
        else:
            tensors[name] = values[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    set_table(folder, table)
    return values


def set_table(folder: Path, table: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = table
    (folder / "config.json").write_text(json.dumps(config))
