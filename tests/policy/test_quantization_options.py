"""--quantization: what works, what it must fit, what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, cast

import pytest

from ambidex.config import EngineConfig
from ambidex.errors import OptionError
from ambidex.options import resolve, resolve_keywords
from ambidex.weights.checkpoint import Checkpoint
from ambidex.weights.quantization import resolve_quantization


def engine(line: str) -> EngineConfig:
    return resolve(shlex.split(f"m {line}"), {}, None).engine_config()


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("", None),
        ("-q int8", "int8"),
        ("--quantization INT4", "int4"),
        ("--quantization=gguf", "gguf"),
        ("-q awq", "awq"),
        ("-q awq_marlin", "awq"),
        ("-q gptq_marlin", "gptq"),
        ("-q bnb", "bitsandbytes"),
        ("-q bitsandbytes", "bitsandbytes"),
        ("-q None", None),
        ("-q auto", None),
    ],
)
def test_what_works(line: str, value: str | None) -> None:
    assert engine(line).model.quantization == value
    assert resolve(shlex.split(f"m {line}"), {}, None).notes == ()


def test_keywords_and_cache() -> None:
    assert not engine("-q int4").quantization_cache
    assert engine("-q int4 --quantization-cache").quantization_cache
    assert not engine("--quantization-cache --no-quantization-cache").quantization_cache
    made = resolve_keywords({"model": "m", "quantization": "int8"}, {}).engine_config()
    assert made.model.quantization == "int8"


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("fp8", "int8 or int4"),
        ("ptpc_fp8", "unquantised checkpoint"),
        ("compressed-tensors", "GGUF"),
        ("modelopt_fp4", "cannot be used"),
        ("mxfp4", "cannot be used"),
        ("int5", "must be one of int8, int4, awq, bitsandbytes, gguf, gptq"),
        ("q4_k_m", "must be one of"),
    ],
)
def test_what_does_not(value: str, part: str) -> None:
    with pytest.raises(OptionError) as caught:
        engine(f"-q {value}")
    message = str(caught.value)
    assert part in message and message.endswith(".") and "\n" not in message


class FakeCheckpoint:
    path = Path("/models/m")

    def __init__(self, quantization: str | None, is_quantized: bool) -> None:
        self.quantization = quantization
        self.is_quantized = is_quantized
        self.dtype_name = "Q4_1" if is_quantized else "float16"


@pytest.mark.parametrize(
    ("asked", "held", "is_quantized", "expected"),
    [
        (None, None, False, None),
        (None, "gguf", True, "gguf"),
        (None, "gguf", False, None),
        (None, "awq", True, "awq"),
        ("int8", None, False, "int8"),
        ("int4", "gguf", False, "int4"),
        ("gguf", "gguf", True, "gguf"),
        ("gguf", "gguf", False, None),
        ("gptq", "gptq", True, "gptq"),
        ("int8", "gguf", True, OptionError),
        ("int4", "gptq", True, OptionError),
        ("awq", "gptq", True, OptionError),
        ("gguf", None, False, OptionError),
        ("bitsandbytes", None, False, OptionError),
    ],
)
def test_it_must_fit_the_files(
    asked: str | None, held: str | None, is_quantized: bool, expected: Any
) -> None:
    checkpoint = cast(Checkpoint, FakeCheckpoint(held, is_quantized))
    if expected is not OptionError:
        assert resolve_quantization(asked, checkpoint) == expected
        return
    with pytest.raises(OptionError) as caught:
        resolve_quantization(asked, checkpoint)
    message = str(caught.value)
    assert f"--quantization {asked}" in message and "/models/m" in message
    assert "Leave the option out" in message and message.endswith(".") and "\n" not in message
    assert ("--quantization int8 or int4" in message) == (not is_quantized)
