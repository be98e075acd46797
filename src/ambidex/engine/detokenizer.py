"""From token ids back to text, whole or streamed, without ever giving half a character.

Every tokenizer that language models use today maps an id to a fixed run of bytes, and text is
those bytes read as UTF-8. So the table id -> bytes is all that decoding needs: streaming is an
incremental UTF-8 decoder, and cutting the ids anywhere gives the same text. (Tokenizers with
another kind of decoder are decoded with a sliding window by the library.)

Invalid bytes become U+FFFD, one a maximal invalid run, as in the Unicode standard. For
byte-fallback vocabularies the library gives one U+FFFD a byte of the whole run instead, which
no stream could do without waiting; for valid text both agree.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

#: U+2581, which stands for a space in sentencepiece vocabularies.
SPACE_MARK = "\u2581"

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")

#: How the first text is treated: kept, its first space dropped, or the first token's spaces.
KEEP, DROP_FIRST_SPACE, DROP_FIRST_TOKEN_SPACES = range(3)


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


def byte_of(token: str) -> int | None:
    """The byte that a byte-fallback token such as ``<0x0A>`` stands for, or None."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class _Pieces(dict[int, bytes]):
    """Token id -> the bytes that it adds to the text; filled on first use."""

    def __init__(
        self, lookup: Callable[[int], str | None], convert: Callable[[str], bytes]
    ) -> None:
        super().__init__()
        self._lookup = lookup
        self._convert = convert

    def __missing__(self, token_id: int) -> bytes:
        token = self._lookup(token_id)
        if token is None:
            # Padding of the model's vocabulary: no text, and nothing is kept for it.
            return b""
        piece = self._convert(token)
        self[token_id] = piece
        return piece


class Decoding:
    """How one tokenizer's ids become text."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: Iterable[int]) -> None:
        self.backend = backend
        self.special_ids = frozenset(special_ids)
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        plan = _plan(json.loads(state))
        #: False: only the library can decode this, with a window over the last tokens.
        self.is_bytewise = plan is not None
        convert, self.start_rule = plan if plan is not None else (_plain_bytes, KEEP)
        self.pieces = _Pieces(_id_to_token(backend), convert)
        self.visible_pieces = _Pieces(_id_to_token(backend), convert)
        for token_id in self.special_ids:
            self.visible_pieces[token_id] = b""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if not self.is_bytewise:
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        stream = Detokenizer(self, skip_special_tokens)
        return stream.push(ids) + stream.flush()


class Detokenizer:
    """Text of one sequence as its tokens arrive.

    ``continues`` says that text precedes the first token, so that a leading space is kept.
    The concatenation of all that ``push`` and ``flush`` return is the text of all ids.
    """

    __slots__ = ("_decoding", "_ids", "_offsets", "_pieces", "_skip", "_start_rule", "_utf8")

    def __init__(
        self, decoding: Decoding, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._decoding = decoding
        self._skip = skip_special_tokens
        self._pieces = decoding.visible_pieces if skip_special_tokens else decoding.pieces
        self._start_rule = KEEP if continues else decoding.start_rule
        self._utf8 = _UTF8_DECODER("replace")
        # Only for decoders that are not bytewise: all ids of the window, and how much of its
        # text has been given.
        self._ids: list[int] = []
        self._offsets = (0, 0)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        if not self._decoding.is_bytewise:
            return self._push_window(ids)
        pieces = self._pieces
        if self._start_rule != KEEP:
            return self._utf8.decode(self._first_bytes(ids))
        if len(ids) == 1:
            return self._utf8.decode(pieces[ids[0]])
        return self._utf8.decode(b"".join([pieces[token_id] for token_id in ids]))

    def flush(self) -> str:
        """What remains at the end: U+FFFD for a character that was never completed."""
        if not self._decoding.is_bytewise:
            start, given = self._offsets
            text = self._window_text(start, len(self._ids))
            done = self._window_text(start, given)
            self._offsets = (len(self._ids), len(self._ids))
            return text[len(done) :]
        return self._utf8.decode(b"", True)

    def _first_bytes(self, ids: Sequence[int]) -> bytes:
        data = b""
        for i, token_id in enumerate(ids):
            piece = self._pieces[token_id]
            if self._start_rule == DROP_FIRST_TOKEN_SPACES:
                hidden = self._skip and token_id in self._decoding.special_ids
                if hidden or self._decoding.backend.id_to_token(token_id) is None:
                    continue
                piece = piece.replace(b" ", b"")
            elif not piece:
                continue
            elif piece.startswith(b" "):
                piece = piece[1:]
            self._start_rule = KEEP
            data = piece + b"".join([self._pieces[other] for other in ids[i + 1 :]])
            break
        return data

    def _window_text(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return str(self._decoding.backend.decode(ids, skip_special_tokens=self._skip))

    def _push_window(self, ids: Sequence[int]) -> str:
        # The text of a window that begins a little before the new tokens, less the text of the
        # window without them: decoders that join tokens by what stands before them stay right.
        parts = []
        for token_id in ids:
            self._ids.append(token_id)
            start, given = self._offsets
            done = self._window_text(start, given)
            text = self._window_text(start, len(self._ids))
            if len(text) > len(done) and not text.endswith("\ufffd"):
                parts.append(text[len(done) :])
                self._offsets = (given, len(self._ids))
        return "".join(parts)


def _id_to_token(backend: tokenizers.Tokenizer) -> Callable[[int], str | None]:
    lookup = backend.id_to_token

    def token_of(token_id: int) -> str | None:
        return lookup(token_id) if token_id >= 0 else None

    return token_of


def _plain_bytes(token: str) -> bytes:
    return token.encode()


def _byte_level_bytes(alphabet: Mapping[str, int]) -> Callable[[str], bytes]:
    def convert(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            # An added token whose text is not written in the byte alphabet.
            return token.encode()

    return convert


def _sentencepiece_bytes(mark: str | None, byte_fallback: bool) -> Callable[[str], bytes]:
    def convert(token: str) -> bytes:
        byte = byte_of(token) if byte_fallback else None
        if byte is not None:
            return bytes([byte])
        return (token.replace(mark, " ") if mark else token).encode()

    return convert


def _plan(state: Any) -> tuple[Callable[[str], bytes], int] | None:
    """Reads the library's decoder description; None where it is not bytewise."""
    if not isinstance(state, dict):
        return None
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes(byte_level_alphabet()), KEEP
    if kinds == ["Metaspace"]:
        rule = KEEP if steps[0].get("prepend_scheme") == "never" else DROP_FIRST_TOKEN_SPACES
        return _sentencepiece_bytes(steps[0]["replacement"], byte_fallback=False), rule
    mark: str | None = None
    byte_fallback = False
    rule = KEEP
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and step["content"] == " " and mark is None and not byte_fallback:
            pattern = step["pattern"].get("String")
            if pattern is None:
                return None
            mark = pattern
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            rule = DROP_FIRST_SPACE
        elif kind != "Fuse":
            return None
    if rule == DROP_FIRST_SPACE and "Fuse" not in kinds:
        # Without Fuse the library strips every token.
        return None
    return _sentencepiece_bytes(mark, byte_fallback), rule
