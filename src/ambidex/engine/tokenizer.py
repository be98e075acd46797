"""Text to token ids and back, and everything a model's files say about both.

A tokenizer comes from a Hugging Face folder (``tokenizer.json``, or GPT-2's ``vocab.json`` and
``merges.txt``) or from the metadata of a GGUF file. Only the ``tokenizers`` library is used; code
in a model folder is never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ambidex.engine.chat_template import ChatTemplate
from ambidex.engine.detokenizer import Decoding, Detokenizer
from ambidex.engine.gguf_tokenizer import add_bos_and_eos, build_gguf_tokenizer
from ambidex.errors import InvalidModelError, RequestError, UnsupportedModelError
from ambidex.weights.headers import require_regular

__all__ = ["Detokenizer", "Tokenizer", "TokenizerSource", "load_tokenizer"]

#: Special tokens that end a turn. Where a chat template writes one of them and it is a special
#: token of the model, generating it ends the answer, even if no config says so.
END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_utterance>",
    "[|endofturn|]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|EOT|>",
    "[EOT]",
    "[e~[",
)

#: Longer texts are encoded without the GIL, which takes a hand-over between threads. In the time
#: that this many characters take, other threads can wait.
MAX_CHARS_WITH_GIL = 2048

#: The special tokens that chat templates may name as variables.
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer comes from: a folder, or a GGUF header's metadata.

    ``config`` and ``generation_config`` are the model's, for end-of-sequence ids. ``name`` is
    what error messages call the model.
    """

    folder: Path | None
    gguf_metadata: Mapping[str, Any] | None
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    name: str = "the model"


class Tokenizer:
    """One model's tokenizer. Encoding and decoding are thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        special_tokens: Mapping[str, str],
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        chat_templates: Mapping[str, str],
        notes: Sequence[str] = (),
    ) -> None:
        # A tokenizer.json may pad or cut every text, for training: serving must do neither.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.name = name
        #: ``bos_token`` and so on, as chat templates name them.
        self.special_tokens = dict(special_tokens)
        self.bos_token_id = bos_token_id
        self.chat_templates = dict(chat_templates)
        #: Sentences for the start-up log.
        self.notes = list(notes)
        added = backend.get_added_tokens_decoder()
        self._special_ids = {i: str(t.content) for i, t in added.items() if t.special}
        self.decoding = Decoding(backend, self._special_ids)
        base_size = int(backend.get_vocab_size(with_added_tokens=False))
        #: One more than the largest id.
        self.vocab_size = max(base_size, max(added, default=-1) + 1)
        #: Every id that ends a sequence.
        self.eos_token_ids: list[int] = _distinct(
            [*eos_token_ids, *self._end_of_turn_ids(self.chat_templates.values())]
        )
        self._compiled: dict[str, ChatTemplate] = {}
        self._max_chars_per_token = 0

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or None."""
        return self.chat_templates.get("default")

    @property
    def max_chars_per_token(self) -> int:
        """The most characters that one token can stand for: a bound before encoding."""
        if not self._max_chars_per_token:
            longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
            self._max_chars_per_token = max(longest, 1)
        return self._max_chars_per_token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. The text of a special token becomes that token.

        A long text leaves other threads running meanwhile. Raises :class:`RequestError` for text
        that is no Unicode (a lone surrogate).
        """
        check_unicode(text)
        if len(text) > MAX_CHARS_WITH_GIL:
            # Of the library's calls, only those for batches release the GIL.
            (encoding,) = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self.decoding.decode(ids, skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, continues: bool = False) -> Detokenizer:
        """A detokenizer for one sequence; ``continues``: its text follows other text."""
        return Detokenizer(self.decoding, skip_special_tokens, continues)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special or not (part of a character: U+FFFD)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, special or not."""
        return self.decoding.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary."""
        token_id = self.backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Messages as one prompt text; encode it with ``add_special_tokens=False``.

        ``chat_template`` is a template's text, or the name of one of the model's own. ``kwargs``
        are further variables for the template. Raises :class:`RequestError` for messages that
        the template refuses and where there is no template.
        """
        template = self._template(chat_template, tools is not None)
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **kwargs},
        )

    def _template(self, requested: str | None, has_tools: bool) -> ChatTemplate:
        templates = self.chat_templates
        if requested is not None:
            source = templates.get(requested, requested)
        elif has_tools and "tool_use" in templates:
            source = templates["tool_use"]
        elif "default" in templates:
            source = templates["default"]
        elif templates:
            raise RequestError(
                f"{self.name} has several chat templates ({', '.join(sorted(templates))}) and none "
                "is its default. Name one with 'chat_template', or start with --chat-template.",
                param="chat_template",
            )
        else:
            raise RequestError(
                f"{self.name} has no chat template, so messages cannot be turned into a prompt. "
                "Start with --chat-template FILE, or send a plain prompt to /v1/completions.",
                param="messages",
            )
        template = self._compiled.get(source)
        if template is None:
            template = ChatTemplate(source)
            # Templates sent with requests must not pile up.
            if len(self._compiled) >= 16:
                self._compiled.clear()
            self._compiled[source] = template
        return template

    def _end_of_turn_ids(self, templates: Iterable[str]) -> list[int]:
        special = {token: token_id for token_id, token in self._special_ids.items()}
        text = "\n".join(templates)
        return [special[t] for t in END_OF_TURN_TOKENS if t in special and t in text]


def check_unicode(text: str, param: str | None = None) -> None:
    """Raises :class:`RequestError` where ``text`` holds a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = "The text" if param is None else f"'{param}'"
        raise RequestError(
            f"{what} is not valid Unicode: a lone surrogate (U+{ord(text[error.start]):04X}) is "
            f"at position {error.start}. Send text that can be written as UTF-8.",
            param=param,
        ) from None


def load_tokenizer(source: TokenizerSource, chat_template: str | None = None) -> Tokenizer:
    """Load a model's tokenizer; ``chat_template`` replaces the model's own templates.

    Raises :class:`InvalidModelError` for missing or damaged files and
    :class:`UnsupportedModelError` for a kind that is not supported.
    """
    replacement = None if chat_template is None else {"default": chat_template}
    if source.folder is not None:
        return _load_folder(source, source.folder, replacement)
    if source.gguf_metadata is None:
        raise InvalidModelError(
            f"{source.name} has neither tokenizer files nor GGUF metadata. Name a folder that has "
            "a tokenizer.json with --tokenizer."
        )
    gguf = build_gguf_tokenizer(source.gguf_metadata, source.name)
    return Tokenizer(
        gguf.backend,
        name=source.name,
        special_tokens=gguf.special_tokens,
        bos_token_id=gguf.bos_token_id,
        eos_token_ids=[*gguf.end_token_ids, *_config_eos_ids(source)],
        chat_templates=gguf.chat_templates if replacement is None else replacement,
        notes=gguf.notes,
    )


def _load_folder(
    source: TokenizerSource, folder: Path, templates: Mapping[str, str] | None
) -> Tokenizer:
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    named = {role: _token_text(config.get(role, special_map.get(role))) for role in _ROLES}
    special_tokens = {role: text for role, text in named.items() if text is not None}
    tokenizer_file = folder / "tokenizer.json"
    if tokenizer_file.is_file():
        backend = _guarded(
            lambda: tokenizers.Tokenizer.from_file(str(tokenizer_file)), str(tokenizer_file)
        )
        is_complete = True
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        for role in ("bos_token", "eos_token", "unk_token"):
            special_tokens.setdefault(role, "<|endoftext|>")
        backend = _build_gpt2(folder, config)
        is_complete = False
    else:
        raise _missing_files(source, folder)
    _add_tokens(backend, folder, config, special_map, special_tokens.values())
    bos_id = _id_of(backend, special_tokens.get("bos_token"))
    eos_id = _id_of(backend, special_tokens.get("eos_token"))
    if not is_complete:
        # Only here: where there is a tokenizer.json, its own post-processor decides.
        add_bos_and_eos(
            backend,
            bos_id if config.get("add_bos_token") else None,
            eos_id if config.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend,
        name=source.name,
        special_tokens=special_tokens,
        bos_token_id=bos_id,
        eos_token_ids=[*([] if eos_id is None else [eos_id]), *_config_eos_ids(source)],
        chat_templates=_folder_templates(folder, config) if templates is None else templates,
    )


def _missing_files(source: TokenizerSource, folder: Path) -> Exception:
    others = [
        n for n in ("tokenizer.model", "spiece.model", "tekken.json") if (folder / n).exists()
    ]
    if others:
        return UnsupportedModelError(
            f"{folder} has {others[0]} but no tokenizer.json, which is what is read here. Get the "
            "tokenizer.json of this model, or name a folder that has one with --tokenizer."
        )
    return InvalidModelError(
        f"{source.name}: {folder} has no tokenizer.json, and no vocab.json with merges.txt. Name a "
        "folder that has them with --tokenizer."
    )


def _build_gpt2(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE from GPT-2's two files, as GPT-2, OPT and their like are published."""
    vocab = _read_json(folder / "vocab.json")
    merges = []
    path = folder / "merges.txt"
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise InvalidModelError(
                f"{path}, line {number}: the merge {line!r} names a token that vocab.json lacks. "
                "Get both files again from one place."
            )
        merges.append((left, right))
    backend = _guarded(lambda: tokenizers.Tokenizer(models.BPE(vocab, merges)), str(folder))
    prefix = bool(config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Path,
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    named: Iterable[str],
) -> None:
    """Add what the other files name and the vocabulary does not mark yet, by ascending id."""
    known = {str(token.content) for token in backend.get_added_tokens_decoder().values()}
    wanted: list[tuple[float, AddedToken]] = []
    for token_id, value in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(value, Mapping) and isinstance(value.get("content"), str):
            wanted.append((int(token_id), _added_token(value, special=False)))
    extra = [
        *(config.get("additional_special_tokens") or ()),
        *(special_map.get("additional_special_tokens") or ()),
    ]
    special_texts = {*named, *filter(None, map(_token_text, extra))}
    if not config.get("added_tokens_decoder"):
        for text, token_id in _read_json(folder / "added_tokens.json").items():
            is_special = text in special_texts
            token = AddedToken(text, special=is_special, normalized=not is_special)
            wanted.append((int(token_id), token))
    for text in [*named, *filter(None, map(_token_text, extra))]:
        wanted.append((float("inf"), AddedToken(text, special=True, normalized=False)))
    wanted.sort(key=lambda entry: entry[0])
    for _, token in wanted:
        if token.content and token.content not in known:
            known.add(token.content)
            add = backend.add_special_tokens if token.special else backend.add_tokens
            add([token])


def _added_token(value: Mapping[str, Any], special: bool) -> AddedToken:
    return AddedToken(
        value["content"],
        single_word=bool(value.get("single_word", False)),
        lstrip=bool(value.get("lstrip", False)),
        rstrip=bool(value.get("rstrip", False)),
        normalized=bool(value.get("normalized", False)),
        special=bool(value.get("special", special)),
    )


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files come before what tokenizer_config.json holds."""
    templates: dict[str, str] = {}
    default_file = folder / "chat_template.jinja"
    if default_file.is_file():
        templates["default"] = _read_text(default_file)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if templates:
        return templates
    value = config.get("chat_template")
    if value is None:
        # Multi-modal models keep it beside the processor.
        value = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            str(entry["name"]): str(entry["template"])
            for entry in value
            if isinstance(entry, Mapping) and "name" in entry and "template" in entry
        }
    return {}


def _config_eos_ids(source: TokenizerSource) -> list[int]:
    """The end-of-sequence ids of generation_config.json and config.json, nested ones too."""
    values: list[Any] = [
        source.generation_config.get("eos_token_id"),
        source.config.get("eos_token_id"),
    ]
    text_config = source.config.get("text_config")
    if isinstance(text_config, Mapping):
        values.append(text_config.get("eos_token_id"))
    ids: list[int] = []
    for value in values:
        entries = value if isinstance(value, (list, tuple)) else [value]
        ids += [e for e in entries if isinstance(e, int) and not isinstance(e, bool) and e >= 0]
    return ids


def _distinct(ids: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    token_id = None if token is None else backend.token_to_id(token)
    return None if token_id is None else int(token_id)


def _token_text(value: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_text(path: Path) -> str:
    try:
        require_regular(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModelError(f"{path} cannot be read ({error}). Get the file again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidModelError(
            f"{path} is not valid JSON ({error}). Get the file again."
        ) from error
    if not isinstance(value, dict):
        raise InvalidModelError(f"{path} holds no JSON object. Get the file again.")
    return value


def _guarded(build: Callable[[], tokenizers.Tokenizer], what: str) -> tokenizers.Tokenizer:
    """Run the library's loader, whose errors and panics share no base class."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InvalidModelError(
            f"{what} cannot be loaded as a tokenizer ({error}). Get the file again."
        ) from error
