"""Small tokenizers, made here: nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ambidex.engine.tokenizer import Tokenizer, TokenizerSource, load_tokenizer
from ambidex.weights.headers import read_gguf_header

DATA = Path(__file__).parents[1] / "data"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _lines() -> list[str]:
    text = (DATA / "northanger_abbey_opening.txt").read_text(encoding="utf-8")
    return [
        *text.splitlines(),
        "caf\u00e9 na\u00efve \u4f60\u597d \U0001f999",
        "def f(x):\n    return 1",
    ]


def _train_byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_lines(), trainer)
    return backend


def _train_byte_fallback() -> Backend:
    """As Llama 2's: marked spaces, a prefix space, bytes for what is not in the vocabulary."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator(_lines(), trainer)
    state = json.loads(backend.to_str())
    # The bytes are plain tokens, not added ones.
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < 3]
    backend = Backend.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def _train_metaspace() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_lines(), trainer)
    return backend


@pytest.fixture(scope="session")
def train() -> Callable[[str], Backend]:
    """Makes a tokenizer of a kind: byte_level, byte_fallback or metaspace."""
    kinds = {
        "byte_level": _train_byte_level,
        "byte_fallback": _train_byte_fallback,
        "metaspace": _train_metaspace,
    }
    states = {kind: make().to_str() for kind, make in kinds.items()}
    return lambda kind: Backend.from_str(states[kind])


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Hugging Face folder: ``make_folder(backend, eos_token=..., ...)``."""

    def make(backend: Backend, **config: Any) -> Path:
        backend.save(str(tmp_path / "tokenizer.json"))
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        text = json.dumps(config)
        (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A loaded byte-level tokenizer with a ChatML template."""
    folder = tmp_path_factory.mktemp("byte_level")
    _train_byte_level().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(TokenizerSource(folder, None, name="tiny"))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_fallback")
    _train_byte_fallback().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(TokenizerSource(folder, None, name="tiny-spm"))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2: Path) -> Mapping[str, Any]:
    """The header of the default model."""
    return read_gguf_header(smollm2).metadata
