"""AWQ, GPTQ and bitsandbytes checkpoints, against the published formulas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as files
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ambidex.errors import AmbidexError, InvalidModelError, UnsupportedModelError
from ambidex.kernels.quantized import Quantized
from ambidex.weights.checkpoint import open_checkpoint
from ambidex.weights.config_check import check_config
from ambidex.weights.quantized_source import QuantizedSource
from ambidex.weights.safetensors import SafetensorsSource

Maker = Callable[..., Path]
LAYER = "model.layers.0.self_attn.q_proj"


def awq_table(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", **more}


def gptq_table(bits: int, group: int, sym: bool, order: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym,
            "desc_act": order, **more}  # fmt: skip


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CASES = {
    "awq": (files.awq(32), awq_table(32)),
    "awq-16": (files.awq(16), awq_table(16)),
    "awq-row": (files.awq(-1), awq_table(-1)),
    "gptq-4-sym": (files.gptq(4, 32, symmetric=True, act_order=False),
                   gptq_table(4, 32, True, False)),
    "gptq-4-asym": (files.gptq(4, 16, symmetric=False, act_order=False),
                    gptq_table(4, 16, False, False)),
    "gptq-4-order": (files.gptq(4, 32, symmetric=False, act_order=True),
                     gptq_table(4, 32, False, True)),
    "gptq-4-v2": (files.gptq(4, 32, symmetric=False, act_order=True, version=2),
                  gptq_table(4, 32, False, True, checkpoint_format="gptq_v2")),
    "gptq-2": (files.gptq(2, 32, symmetric=True, act_order=True), gptq_table(2, 32, True, True)),
    "gptq-3": (files.gptq(3, 32, symmetric=False, act_order=False),
               gptq_table(3, 32, False, False)),
    "gptq-3-row": (files.gptq(3, -1, symmetric=True, act_order=True),
                   gptq_table(3, -1, True, True)),
    "gptq-8": (files.gptq(8, 32, symmetric=False, act_order=False),
               gptq_table(8, 32, False, False)),
    "gptq-8-sym": (files.gptq(8, 32, symmetric=True, act_order=True),
                   gptq_table(8, 32, True, True)),
    "int8": (files.int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (files.four_bits("nf4", 32, nested=False), BNB),
    "nf4-nested": (files.four_bits("nf4", 32, nested=True), BNB),
    "fp4": (files.four_bits("fp4", 16, nested=True), BNB),
}  # fmt: skip


def make(hf_folder: Maker, case: str, model: str = "llama") -> tuple[Path, Any]:
    pack, table = CASES[case]
    folder = hf_folder(model)
    return folder, files.quantise_folder(folder, pack, table)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_formula(hf_folder: Maker, case: str) -> None:
    folder, values = make(hf_folder, case)
    checkpoint = open_checkpoint(folder)
    method = CASES[case][1]["quant_method"]
    assert checkpoint.quantization == method and checkpoint.is_quantized
    assert checkpoint.dtype_name.startswith(method)
    assert sorted(checkpoint.tensor_names()) == sorted(values)
    assert checkpoint.num_parameters == sum(tensor.numel() for tensor in values.values())
    check_config(checkpoint.config, checkpoint)
    for name, want in values.items():
        assert checkpoint.tensor_shape(name) == tuple(want.shape)
        got, form = checkpoint.load_quantized(name), checkpoint.quantized_form(name)
        if ".layers." not in name or want.dim() == 1:
            assert isinstance(got, torch.Tensor) and torch.equal(got, want) and form is None
            continue
        assert isinstance(got, Quantized) and form is not None and got.name == name
        assert (form.bits, form.group) in ((got.bits, got.group), (got.bits, 0))
        assert form.group or got.group == want.shape[1]
        assert form.zero_bytes == (0 if got.zeros is None else 1)
        assert form.is_permuted == (got.permutation is not None)
        assert form.has_codebook == (got.codebook is not None)
        assert got.scale is not None and form.scale_bytes == got.scale.element_size()
        assert checkpoint.quantized_bytes(name) == form.num_bytes(*want.shape)
        # The library multiplies by SCB before it divides by 127.
        exact = case != "int8"
        torch.testing.assert_close(
            got.dequantise(), want, rtol=0 if exact else 2.0**-22, atol=0, msg=name
        )
        assert torch.equal(checkpoint.load(name), got.dequantise())
        assert got.codes.is_contiguous() and got.scale.is_contiguous()


@pytest.mark.parametrize("case", ["awq", "gptq-4-order", "nf4-nested", "int8"])
@pytest.mark.parametrize("model", ["mixtral", "phi3"])
def test_other_models(hf_folder: Maker, case: str, model: str) -> None:
    folder, values = make(hf_folder, case, model)
    checkpoint = open_checkpoint(folder)
    for name, want in values.items():
        torch.testing.assert_close(checkpoint.load(name), want, rtol=2.0**-22, atol=0)


def test_torch_files_too(hf_folder: Maker) -> None:
    for case in ("awq", "nf4-nested", "int8"):
        folder, values = make(hf_folder, case)
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "pytorch_model.bin")
        checkpoint = open_checkpoint(folder)
        for name, want in values.items():
            torch.testing.assert_close(checkpoint.load(name), want, rtol=2.0**-22, atol=0)
        (folder / "pytorch_model.bin").unlink()


def test_opening_needs_no_torch(hf_folder: Maker) -> None:
    for case in ("awq", "gptq-3", "nf4-nested"):
        folder, _ = make(hf_folder, case)
        code = (
            "import sys; from ambidex.weights.checkpoint import open_checkpoint\n"
            f"c = open_checkpoint({str(folder)!r}); assert c.is_quantized\n"
            "assert sum(c.quantized_bytes(n) or 0 for n in c.tensor_names()) > 1000\n"
            "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules), 'imported'"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(folder: Path, *parts: str, kind: type[Exception] = InvalidModelError) -> None:
    def load_all() -> None:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.tensor_names():
            checkpoint.load_quantized(name)

    with pytest.raises(kind) as caught:
        load_all()
    message = str(caught.value)
    assert "\n" not in message and message.endswith("."), message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("case", "suffix"),
    [
        ("awq", "qweight"), ("awq", "qzeros"), ("awq", "scales"),
        ("gptq-3", "qweight"), ("gptq-3", "qzeros"), ("gptq-3", "scales"), ("gptq-3", "g_idx"),
        ("int8", "SCB"),
        ("nf4-nested", "weight"), ("nf4-nested", "weight.absmax"),
        ("nf4-nested", "weight.quant_map"), ("nf4-nested", "weight.nested_absmax"),
        ("nf4-nested", "weight.nested_quant_map"),
    ],
)  # fmt: skip
def test_wrong_lengths(hf_folder: Maker, case: str, suffix: str) -> None:
    folder, _ = make(hf_folder, case)

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{LAYER}.{suffix}"
        tensors[name] = tensors[name][:-1].contiguous()

    edited(folder, shorten)
    refused(folder, LAYER)

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{LAYER}.{suffix}"]

    if suffix in ("qweight", "SCB", "g_idx"):
        return
    edited(folder, remove)
    refused(folder, f"lack the tensor '{LAYER}.{suffix}'")


@pytest.mark.parametrize("case", ["awq", "gptq-4-order", "nf4"])
def test_wrong_types(hf_folder: Maker, case: str) -> None:
    folder, _ = make(hf_folder, case)
    suffix = "weight.absmax" if case == "nf4" else "qzeros"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{suffix}"] = tensors[f"{LAYER}.{suffix}"].double()

    edited(folder, widen)
    refused(folder, suffix, "float64", "Download the model again")


@pytest.mark.parametrize(
    ("case", "changes", "parts", "kind"),
    [
        ("awq", {"group_size": 28}, ["groups of 28"], InvalidModelError),
        ("awq", {"group_size": 0}, ["groups of 0"], InvalidModelError),
        ("awq", {"group_size": "x"}, ["group_size is 'x'"], InvalidModelError),
        ("awq", {"group_size": 8}, ["groups of 8", "16, 32, 64"], UnsupportedModelError),
        ("awq", {"bits": 8}, ["4 bits only"], UnsupportedModelError),
        ("awq", {"version": "gemv"}, ["'gemv'", "gemm"], UnsupportedModelError),
        ("gptq-3", {"bits": 5}, ["2, 3, 4 and 8"], UnsupportedModelError),
        ("gptq-3", {"bits": True}, ["bits is True"], InvalidModelError),
        ("gptq-3", {"sym": "yes"}, ["sym is 'yes'"], InvalidModelError),
        ("gptq-3", {"checkpoint_format": "marlin"}, ["'marlin'"], UnsupportedModelError),
        ("gptq-3", {"dynamic": {"a": 1}}, ["dynamic"], UnsupportedModelError),
        ("gptq-3", {"group_size": 128}, ["groups of 128"], InvalidModelError),
    ],
)
def test_odd_settings(
    hf_folder: Maker, case: str, changes: dict[str, Any], parts: list[str], kind: Any
) -> None:
    folder, _ = make(hf_folder, case)
    files.set_table(folder, {**CASES[case][1], **changes})
    refused(folder, *parts, kind=kind)


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([2, 3, 4, 8, 16, 32, 64, -1, 0]),
    st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip
_FIELDS = st.sampled_from(
    ["bits", "w_bit", "group_size", "q_group_size", "version", "desc_act", "sym", "dynamic",
     "checkpoint_format", "zero_point"]
)  # fmt: skip


@pytest.mark.parametrize("case", ["awq", "gptq-4-order", "gptq-3", "nf4-nested", "int8"])
def test_any_setting_is_understood_or_refused(hf_folder: Maker, case: str) -> None:
    folder, _ = make(hf_folder, case)
    source = SafetensorsSource([folder / "model.safetensors"])

    @settings(max_examples=60, deadline=None)
    @given(table=st.dictionaries(_FIELDS, _VALUES, max_size=4))
    @example(table={"checkpoint_format": "\n", "version": "\n", "bnb_4bit_quant_type": "\n"})
    def check(table: dict[str, Any]) -> None:
        table = {**CASES[case][1], **table}
        try:
            made = QuantizedSource(source, table, "config.json")
        except AmbidexError as error:
            text = str(error)
        else:
            for name in made.names():
                made.load_quantized(name)
            return
        assert text.endswith(".") and "\n" not in text

    check()


def test_groups_that_are_no_groups(hf_folder: Maker) -> None:
    folder, _ = make(hf_folder, "gptq-4-order")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.g_idx"][:] = 7

    edited(folder, spoil)
    refused(folder, f"{LAYER}.weight", "g_idx")


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"shape": [1]}', b'{"shape": "a"}', b"\xff"])
def test_damaged_state(hf_folder: Maker, text: bytes) -> None:
    folder, _ = make(hf_folder, "nf4")
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.tensor(list(text), dtype=torch.uint8)

    edited(folder, spoil)
    refused(folder, name)


@pytest.mark.parametrize(("side", "size"), [(3, 4), (1, 0)])
def test_values_that_do_not_fill_their_bytes(hf_folder: Maker, side: int, size: int) -> None:
    """Two values a byte: an odd number of them has no whole bytes."""
    folder, _ = make(hf_folder, "nf4")
    name = f"{LAYER}.weight"
    state = json.dumps({"shape": [side, side], "blocksize": side}).encode()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(size, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.ones(side)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(state), dtype=torch.uint8
        )

    edited(folder, spoil)
    refused(folder, name, f"{side} x {side} values of 4 bits")


@pytest.mark.parametrize("offset", ["1" + "0" * 400, "-1" + "0" * 400, "1e400", "NaN"])
def test_an_offset_that_is_no_float(hf_folder: Maker, offset: str) -> None:
    folder, _ = make(hf_folder, "nf4-nested")
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        state = json.loads(bytes(tensors[name].tolist()))
        text = json.dumps(state | {"nested_offset": 0}).replace(
            '"nested_offset": 0', f'"nested_offset": {offset}'
        )
        tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    edited(folder, spoil)
    refused(folder, name, "'nested_offset'")


def test_a_block_that_does_not_divide_the_row(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    files.quantise_folder(folder, files.four_bits("nf4", 128, nested=False), BNB)
    refused(folder, "rows of 96 columns", "groups of 128")


def test_a_table_without_quantised_tensors(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    for method in ("awq", "gptq", "bitsandbytes"):
        files.set_table(folder, {"quant_method": method})
        refused(folder, f"'{method}'", "unquantised checkpoint")
        assert not open_checkpoint(folder, {"quantization_config": None}).is_quantized


def test_other_methods_name_the_supported(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    for method in ("fp8", ["awq"], "compressed-tensors"):
        files.set_table(folder, {"quant_method": method})
        checkpoint = open_checkpoint(folder)
        with pytest.raises(UnsupportedModelError, match="awq, bitsandbytes, gptq"):
            check_config(checkpoint.config, checkpoint)


def test_wide_groups_become_several(hf_folder: Maker) -> None:
    pack = files.awq(256)
    weight = torch.randn(32, 512)
    tensors, want = pack(weight, "w", None)
    from ambidex.quant.awq import from_awq

    made = from_awq("w", tensors["w.qweight"], tensors["w.qzeros"], tensors["w.scales"], 256)
    assert made.group == 128 and torch.equal(made.dequantise(), want)
