"""``--offload-layers``: which weights a pattern names.

A pattern is a glob or a range of layers, as people write them:

- a glob over a weight's path in the model (``layers.3.mlp.down.weight``), over its names in the
  checkpoint (``model.layers.3.mlp.down_proj.weight``), and over any run of parts within:
  ``*.mlp``, ``layers.[0-9].mlp.*``, ``down_proj``. Whatever lies below a match belongs to it.
- layers as Python counts them: ``decoder.layers.40:``, ``layers.10:20`` (10 to 19), ``layers.:8``,
  ``layers.-4:`` (the last four), ``layers.5``; or both ends included: ``10-20``, ``40-``.
  What stands before ``layers`` does not matter; ``layers.10:20.mlp`` is a part of each.

Commas and several patterns join what each names.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ambidex.errors import OptionError

_LAYER = re.compile(r"(?:^|(?<=\.))(?:layers|blocks|blk|h)\.(\d+)(?=\.|$)")
_RANGE = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)*(?:layers?|blocks?|blk|h)(?:\.|(?=\[)))?"
    r"\[?(?:(?P<start>-?\d+)?(?P<colon>:)(?P<stop>-?\d+)?|(?P<low>\d+)-(?P<high>\d+)?|(?P<only>\d+))"
    r"\]?(?:\.(?P<rest>.+))?",
    re.ASCII,
)
#: How alike a name must be to be named as near.
_NEAR = 0.4


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """What one pattern names: indices into the weights."""

    pattern: str
    weights: frozenset[int]


def layer_index(path: str) -> int | None:
    """The layer of a weight: 3 for ``layers.3.mlp.down.weight``; None for ``head.weight``."""
    match = _LAYER.search(path)
    return int(match[1]) if match else None


def match_patterns(patterns: Sequence[str], weights: Sequence[Sequence[str]]) -> list[PatternMatch]:
    """What each pattern names, of weights with one or more names (the path in the model first).

    Raises :class:`OptionError` for a pattern that names nothing; it tells what is near.
    """
    layers = [layer_index(names[0]) for names in weights]
    num_layers = max((layer + 1 for layer in layers if layer is not None), default=0)
    found = []
    for pattern in (part.strip() for text in patterns for part in text.split(",")):
        if not pattern:
            raise OptionError(
                "--offload-layers has an empty pattern. Give a pattern such as '*.mlp' or "
                "layers.0:8, or leave the option out."
            )
        index = _RANGE.fullmatch(pattern)
        if index is None:
            named = {i for i, names in enumerate(weights) if _is_named(pattern, names)}
        else:
            chosen = _layers_of(index, num_layers)
            named = {
                i
                for i, (layer, names) in enumerate(zip(layers, weights, strict=True))
                if layer in chosen and _has_part(index["rest"], names)
            }
        if not named:
            raise OptionError(_nothing_named(pattern, index, weights, num_layers))
        found.append(PatternMatch(pattern, frozenset(named)))
    return found


def _is_named(pattern: str, names: Sequence[str]) -> bool:
    """Whether the glob matches a run of whole parts of one of the names."""
    runs = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    return any(fnmatch.fnmatchcase(name, run) for name in names for run in runs)


def _has_part(rest: str | None, names: Sequence[str]) -> bool:
    """Whether ``rest`` matches what follows the layer's number, from its beginning."""
    if rest is None:
        return True
    below = [name[match.end() + 1 :] for name in names if (match := _LAYER.search(name))]
    return any(fnmatch.fnmatchcase(name, run) for name in below for run in (rest, f"{rest}.*"))


def _layers_of(index: re.Match[str], num_layers: int) -> range:
    every = range(num_layers)
    if index["only"] is not None:
        # Slices, not indices: a layer that does not exist is an empty range.
        return every[int(index["only"]) : int(index["only"]) + 1]
    if index["colon"] is not None:
        start, stop = (None if index[n] is None else int(index[n]) for n in ("start", "stop"))
        return every[start:stop]
    high = num_layers if index["high"] is None else int(index["high"]) + 1
    return every[int(index["low"]) : high]


def _nothing_named(
    pattern: str,
    index: re.Match[str] | None,
    weights: Sequence[Sequence[str]],
    num_layers: int,
) -> str:
    known = f"{num_layers} layers, 0 to {num_layers - 1}" if num_layers else "no numbered layers"
    near = _near(pattern, weights)
    if index is not None and num_layers and not _layers_of(index, num_layers):
        last, every = f"layers.{num_layers - 1}", f"layers.0:{num_layers}"
        rest = index["rest"]
        if any(_has_part(rest, names) for names in weights):
            near = [f"{layers}.{rest}" if rest else layers for layers in (last, every)]
    turned = ""
    if index is not None and _is_reversed(index):
        turned = " Its end comes before its beginning."
    return (
        f"--offload-layers {pattern!r} matches no weight of this model, which has {known}.{turned} "
        f"Near: {', '.join(near)}."
    )


def _is_reversed(index: re.Match[str]) -> bool:
    """Whether both ends of a range are given, and the first is the greater one."""
    ends = ("start", "stop") if index["colon"] is not None else ("low", "high")
    first, last = (int(index[end] or 0) for end in ends)
    return first > last > 0


def _near(pattern: str, weights: Sequence[Sequence[str]]) -> list[str]:
    """Up to three patterns that do name something, the most alike first."""
    known: dict[str, None] = {}
    for names in weights:
        for name in names:
            parts = [part if not part.isdigit() else "*" for part in name.split(".")]
            for end in range(1, len(parts) + 1):
                known[".".join(parts[:end])] = None
            if "*" in parts:
                below = parts[parts.index("*") + 1 :]
                for end in range(1, len(below) + 1):
                    known[".".join(("*", *below[:end]))] = None
    asked = re.sub(r"(?<=[.\[])[-\d:]+\]?(?=\.|$)", "*", pattern)
    close = difflib.get_close_matches(asked, known, n=3, cutoff=_NEAR)
    return close or list(known)[:3]
