"""A tokenizer rebuilt from the metadata of a GGUF file.

Three kinds are supported: ``gpt2`` (byte-level BPE; the cut comes from ``gguf_pretokenizers``),
``llama`` (sentencepiece BPE: the merges are derived from the scores) and ``gemma4`` (BPE with
merges over text whose spaces are marked).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from ambidex.engine.detokenizer import SPACE_MARK
from ambidex.engine.gguf_pretokenizers import RECIPES
from ambidex.errors import InvalidModelError, UnsupportedModelError

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_PREFIX = "tokenizer.ggml."

#: Metadata keys of ids that end a turn or a text.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


_Item = TypeVar("_Item")


def _short(value: object) -> str:
    """A value of a header, as a message shows it."""
    return f"{value!r:.60}" if isinstance(value, str | int | float) else "an array"


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What a GGUF header says about text."""

    backend: Tokenizer
    #: bos_token, eos_token, unk_token, pad_token as templates name them.
    special_tokens: Mapping[str, str]
    bos_token_id: int | None
    #: eos, end of turn and end of message, as far as the file names them.
    end_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    #: Sentences for the start-up log.
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Vocabulary:
    """The vocabulary arrays of a header, checked."""

    metadata: Mapping[str, Any]
    name: str
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = self.array("tokens", str)
        # Some converters leave padding tokens empty; they need distinct names.
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        has_types = self.get("token_type") is not None
        self.types = self.array("token_type", int) if has_types else [_NORMAL] * len(tokens)
        if len(self.types) < len(tokens):
            raise self.damaged(f"{len(self.types)} token types for {len(tokens)} tokens")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) < len(tokens):
            raise self.damaged(f"only {len(self.ids)} of {len(tokens)} tokens are distinct")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(_PREFIX + key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.damaged(f"'{_PREFIX}{key}' is missing")
        return value

    def array(self, key: str, kind: type[_Item]) -> list[_Item]:
        """An array that must be there, all of whose values are of ``kind``."""
        value = self.require(key)
        what = {str: "texts", int: "whole numbers", float: "numbers"}[kind]
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.damaged(f"'{_PREFIX}{key}' is {_short(value)}, not an array of {what}")
        items = list(value)
        for index, item in enumerate(items):
            if not isinstance(item, (int, float) if kind is float else kind):
                raise self.damaged(
                    f"'{_PREFIX}{key}' has {_short(item)} at {index}, where an array of {what} is "
                    "expected"
                )
        return items

    def damaged(self, what: str) -> InvalidModelError:
        return InvalidModelError(
            f"{self.name}: the tokenizer in this GGUF file is damaged: {what}. Get the file again, "
            "or give a folder that has a tokenizer.json with --tokenizer."
        )

    def token_id(self, key: str) -> int | None:
        """The id under ``key``, or None where it is absent or outside the vocabulary."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int):
            raise self.damaged(f"'{_PREFIX}{key}' is {_short(value)}, not a number of a token")
        return int(value) if 0 <= value < len(self.tokens) else None

    def merges(self) -> list[tuple[str, str]]:
        """Pairs in order of rank. A piece may itself begin with a space, never be empty."""
        ids = self.ids
        pairs = []
        for merge in self.array("merges", str):
            left, _, right = merge.partition(" ")
            if not left and merge:
                # The piece begins with the space itself.
                left, _, right = merge[1:].partition(" ")
                left = merge[0] + left
            # The library panics on a merge whose parts or whole are not tokens.
            if left not in ids or right not in ids or left + right not in ids:
                raise self.damaged(f"the merge {merge!r} names a token that is not there")
            pairs.append((left, right))
        return pairs


def build_gguf_tokenizer(metadata: Mapping[str, Any], name: str) -> GGUFTokenizer:
    """Rebuild the tokenizer of a GGUF file.

    ``metadata`` is the header's key-value part; ``name`` is what error messages call the file.
    Raises :class:`UnsupportedModelError` for a kind or a cut that is not supported and
    :class:`InvalidModelError` for arrays that contradict each other.
    """
    kind = metadata.get(_PREFIX + "model")
    if kind is None:
        raise InvalidModelError(
            f"{name} holds no tokenizer ('{_PREFIX}model' is missing). Give a folder that has a "
            "tokenizer.json with --tokenizer."
        )
    builder = _KINDS.get(kind) if isinstance(kind, str) else None
    if builder is None:
        raise UnsupportedModelError(
            f"{name} has a tokenizer of kind {_short(kind)}, which is not supported; supported are "
            f"{', '.join(sorted(_KINDS))}. Give a folder that has a tokenizer.json with "
            "--tokenizer."
        )
    vocabulary = _Vocabulary(metadata, name)
    backend, adds_bos, notes = builder(vocabulary)
    bos_id = vocabulary.token_id("bos_token_id")
    if bos_id is None and kind == "llama" and "<s>" in vocabulary.ids:
        bos_id = vocabulary.ids["<s>"]
    end_ids = [vocabulary.token_id(key) for key in _END_KEYS]
    if end_ids[0] is None and kind == "llama" and "</s>" in vocabulary.ids:
        end_ids[0] = vocabulary.ids["</s>"]
    special_tokens = {}
    named = {
        "bos_token": bos_id,
        "eos_token": end_ids[0],
        "unk_token": vocabulary.token_id("unknown_token_id"),
        "pad_token": vocabulary.token_id("padding_token_id"),
    }
    for role, token_id in named.items():
        if token_id is not None:
            special_tokens[role] = vocabulary.tokens[token_id]
    _add_special_tokens(backend, vocabulary, [*end_ids, bos_id])
    add_bos_and_eos(
        backend,
        bos_id if vocabulary.get("add_bos_token", adds_bos) else None,
        end_ids[0] if vocabulary.get("add_eos_token", False) else None,
    )
    return GGUFTokenizer(
        backend=backend,
        special_tokens=special_tokens,
        bos_token_id=bos_id,
        end_token_ids=tuple(dict.fromkeys(i for i in end_ids if i is not None)),
        chat_templates=_chat_templates(vocabulary),
        notes=tuple(notes),
    )


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool, list[str]]:
    notes = []
    pre = vocabulary.get("pre")
    if not pre:
        pre = "default"
        notes.append(
            f"{vocabulary.name} does not name its pre-tokenizer ('{_PREFIX}pre'): a default is "
            "used, and output may be worse. A newer conversion of the model names it."
        )
    recipe = RECIPES.get(pre) if isinstance(pre, str) else None
    if recipe is None:
        raise UnsupportedModelError(
            f"{vocabulary.name} uses the pre-tokenizer {_short(pre)}, which is not supported; "
            f"supported are {', '.join(sorted(RECIPES))}. Give a folder that has a "
            "tokenizer.json with --tokenizer."
        )
    model = models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=recipe.ignore_merges)
    backend = Tokenizer(model)
    if recipe.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = recipe.build()
    backend.decoder = decoders.ByteLevel()
    return backend, recipe.adds_bos, notes


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool, list[str]]:
    scores = vocabulary.array("scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise vocabulary.damaged(f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    steps = []
    if vocabulary.get("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = bool(vocabulary.get("add_space_prefix", True))
    if prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    backend = _marked_space_bpe(vocabulary, _merges_from_scores(vocabulary, scores), steps, prefix)
    return backend, True, []


def _gemma4(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool, list[str]]:
    return _marked_space_bpe(vocabulary, vocabulary.merges(), [], False), True, []


def _marked_space_bpe(
    vocabulary: _Vocabulary,
    merges: list[tuple[str, str]],
    normalizing: Sequence[normalizers.Normalizer],
    prefix: bool,
) -> Tokenizer:
    unknown_id = vocabulary.token_id("unknown_token_id")
    if unknown_id is None and _UNKNOWN in vocabulary.types:
        unknown_id = vocabulary.types.index(_UNKNOWN)
    model = models.BPE(
        vocabulary.ids,
        merges,
        unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([*normalizing, normalizers.Replace(" ", SPACE_MARK)])
    decoding = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the pair whose whole scores best; as BPE: every way to cut each
    token in two tokens is a merge, ranked by the token's score."""
    # Whole tokens that text can never be joined to: they take no part.
    apart = (_CONTROL, _USER_DEFINED, _UNKNOWN)
    usable = {
        token: token_id
        for token, token_id in vocabulary.ids.items()
        if vocabulary.types[token_id] not in apart
    }
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in usable.items():
        score = -scores[token_id]
        for cut in range(1, len(token)):
            left = usable.get(token[:cut])
            if left is None:
                continue
            right = usable.get(token[cut:])
            if right is not None:
                ranked.append((score, token_id, left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


_KINDS: Mapping[str, Callable[[_Vocabulary], tuple[Tokenizer, bool, list[str]]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}


def _add_special_tokens(
    backend: Tokenizer, vocabulary: _Vocabulary, always_special: Sequence[int | None]
) -> None:
    special = {token_id for token_id in always_special if token_id is not None}
    # Phi-3's own tokenizer drops white space after its turn marks; GGUF has no field for that.
    model_name = str(vocabulary.metadata.get("general.name", "")).lower()
    drops_space = "phi-3" in model_name or "phi3" in model_name
    keeps_space = {"<unk>", "<s>", "<|endoftext|>"}
    added = []
    for token_id, (token, kind) in enumerate(
        zip(vocabulary.tokens, vocabulary.types, strict=False)
    ):
        is_special = kind in (_CONTROL, _UNKNOWN) or token_id in special
        if is_special or kind == _USER_DEFINED:
            drops = drops_space and token not in keeps_space and (is_special or token == "</s>")
            added.append(AddedToken(token, special=is_special, normalized=False, rstrip=drops))
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])


def add_bos_and_eos(backend: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Let encoding put these tokens around a text, where they are given."""
    # The names are ours: a token's own text may hold characters that the template syntax uses.
    named = [("bos", bos_id), ("eos", eos_id)]
    used = [(name, token_id) for name, token_id in named if token_id is not None]
    if not used:
        return
    names = dict(used)
    single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in names]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)


def _chat_templates(vocabulary: _Vocabulary) -> dict[str, str]:
    metadata = vocabulary.metadata
    templates = {}
    default = metadata.get("tokenizer.chat_template")
    if default:
        templates["default"] = str(default)
    names = metadata.get("tokenizer.chat_templates") or ()
    if not isinstance(names, Sequence):
        raise vocabulary.damaged(
            f"'tokenizer.chat_templates' is {_short(names)}, not an array of texts"
        )
    for name in names:
        template = metadata.get(f"tokenizer.chat_template.{name}")
        if template:
            templates[str(name)] = str(template)
    return templates
