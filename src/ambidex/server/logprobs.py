"""Log probabilities in the forms of the two OpenAI endpoints.

Input is a list with one mapping a token, ``token id -> Logprob(logprob, rank, decoded_token)``,
that holds the chosen token and the best ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ambidex.engine.output import Logprob
from ambidex.engine.tokenizer import Tokenizer

#: JSON has no minus infinity; this is what vLLM sends in its place.
LOWEST = -9999.0

Position = Mapping[int, Logprob]


def _value(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)


class TokenNames:
    """How a token is written: its text, or ``token_id:123`` where the client asked for that."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int, entry: Logprob | None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self._tokenizer.token_text(token_id)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt given as token ids, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def raw(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position], num_top: int, names: TokenNames
) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``, one entry a token."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=False):
        best = sorted(position.items(), key=lambda item: (item[1].rank or 0, item[0]))[:num_top]
        content.append(
            {
                **_chat_entry(token_id, position[token_id], names),
                "top_logprobs": [_chat_entry(i, entry, names) for i, entry in best],
            }
        )
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id, entry),
        "logprob": _value(entry),
        "bytes": names.raw(token_id),
    }


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Position | None],
    num_top: int,
    names: TokenNames,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset`` as parallel lists, and
    the offset after them. The first token of a prompt has no probability: null.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, position in zip(token_ids, positions, strict=False):
        entry = position.get(token_id) if position else None
        name = names.name(token_id, entry)
        tokens.append(name)
        values.append(None if entry is None else _value(entry))
        if position is None or num_top == 0:
            tops.append(None)
        else:
            ordered = sorted(position.items(), key=lambda item: (item[1].rank or 0, item[0]))
            tops.append({names.name(i, e): _value(e) for i, e in ordered})
        offsets.append(offset)
        offset += len(name)
    logprobs = {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return logprobs, offset


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[Any] | None:
    """vLLM's form: one mapping a prompt token, null for the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(i): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token}
            for i, e in position.items()
        }
        for position in positions
    ]
