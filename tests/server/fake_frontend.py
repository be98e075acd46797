"""The real front end over a tokenizer of bytes: the id of a byte is its number."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ambidex.config import EngineConfig
from ambidex.engine.detokenizer import byte_level_alphabet
from ambidex.engine.frontend import Frontend, TextFrontend
from ambidex.engine.input import ModelLimits
from ambidex.engine.messages import EngineInfo
from ambidex.engine.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if tools %}[tools] {{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(
        backend,
        name="the fake model",
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=[0],
        chat_templates={"default": CHAT_TEMPLATE},
    )


def fake_frontend(config: EngineConfig, info: EngineInfo) -> Frontend:
    return TextFrontend(byte_tokenizer(), ModelLimits(info.max_model_len, info.vocab_size))
