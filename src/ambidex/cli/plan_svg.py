"""A plan as one picture: both memories as stacked bars, and where each layer's weights lie.

Plain SVG: no script, no style sheet, no font of its own. Colours are those of Okabe and Ito, which
people with any colour vision tell apart; every colour is named beside its bytes too.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ambidex.cli.plan_rows import Row, by_layer
from ambidex.cli.plan_text import ACCOUNT_NAMES, SHARE_NAMES, model_parts, rate
from ambidex.memory.ledger import MemorySnapshot, format_bytes, format_seconds

if TYPE_CHECKING:
    from ambidex.memory.planner import Plan

ACCOUNT_COLOURS = {
    "weights": "#0072B2",
    "kv_cache": "#E69F00",
    "activations": "#009E73",
    "graphs": "#F0E442",
    "staging": "#56B4E9",
    "runtime": "#8C8C8C",
}
SHARE_COLOURS = {
    "resident": "#0072B2",
    "streamed": "#56B4E9",
    "computed": "#D55E00",
    "split": "#CC79A7",
}
_INK, _GREY, _LINE, _FREE = "#1A1A1A", "#555555", "#B0B0B0", "#F4F4F4"

_WIDTH, _MARGIN = 960, 32
_INNER = _WIDTH - 2 * _MARGIN
_BAR, _STRIP = 44, 132
#: Between what stands side by side.
_GAP = 1
#: Of a letter, in units of its size; a bit too wide, so that nothing overlaps.
_LETTER = 0.56
_SMALL, _TEXT, _LARGE = 13, 14, 20


def draw(plan: Plan) -> str:
    """The picture, as the text of an SVG file."""
    parts: list[str] = []
    y = _MARGIN + _LARGE
    parts.append(_text(_MARGIN, y, _cut(plan.shape.name, _LARGE), _LARGE, weight="bold"))
    y += 24
    for line in (*model_parts(plan.shape), _on(plan)):
        parts.append(_text(_MARGIN, y, _cut(line, _TEXT), colour=_GREY))
        y += 20
    y += 14
    for memory in plan.memories:
        drawn, y = _memory(memory, y)
        parts += drawn
    drawn, y = _layers(plan, y)
    parts += drawn
    drawn, y = _speed(plan, y)
    parts += drawn
    height = y + _MARGIN - 14
    title = html.escape(_clean(f"Plan for {plan.shape.name}"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img" '
            "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\">",
            f"<title>{title}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#FFFFFF"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _on(plan: Plan) -> str:
    profile = plan.profile
    host = f"{profile.host.name}, {format_bytes(profile.host.memory_bytes)}"
    if profile.device is None:
        return f"on {host}"
    device = f"{profile.device.name}, {format_bytes(profile.device.memory_bytes)}"
    return f"on {device}, beside {host}"


def _memory(memory: MemorySnapshot, y: int) -> tuple[list[str], int]:
    """One memory: a bar of its capacity, and the bytes of each account below."""
    capacity = max(memory.capacity_bytes, memory.reserved_bytes, 1)
    title = f"{memory.name}: {format_bytes(memory.capacity_bytes)}"
    parts = [_text(_MARGIN, y, _cut(title, _TEXT), weight="bold")]
    y += 10
    parts.append(_rect(_MARGIN, y, _INNER, _BAR, _FREE, _LINE))
    sizes = {name: size for name, size in memory.accounts.items() if size}
    legend = []
    x = float(_MARGIN)
    for (account, size), width in zip(
        sizes.items(), _widths([*sizes.values()], capacity), strict=True
    ):
        colour, label = ACCOUNT_COLOURS[account], f"{ACCOUNT_NAMES[account]} {format_bytes(size)}"
        note = f"{memory.name}: {label}"
        parts.append(_rect(x, y, width - _GAP, _BAR, colour, "none", note))
        legend.append((colour, label))
        x += width
    legend.append((_FREE, f"free {format_bytes(memory.free_bytes)}"))
    y += _BAR + 8
    drawn, y = _legend(legend, y)
    return parts + drawn, y + 18


def _widths(sizes: Sequence[int], capacity: int) -> list[float]:
    """Of each part of a bar: what is small is still seen, at the cost of the largest part."""
    exact = [_INNER * size / capacity for size in sizes]
    widths = [max(width, 2.0 + _GAP) for width in exact]
    if widths:
        widths[widths.index(max(widths))] -= sum(widths) - sum(exact)
    return widths


def _layers(plan: Plan, y: int) -> tuple[list[str], int]:
    """A column a layer, filled from below by the shares of what happens with its weights."""
    rows = by_layer(plan)
    title = "Where each layer's weights lie, in shares of its bytes"
    parts = [_text(_MARGIN, y, title, weight="bold")]
    y += 10
    column = _INNER / len(rows)
    for number, row in enumerate(rows):
        x = _MARGIN + number * column
        parts += _column(row, x, y, column)
    parts.append(_rect(_MARGIN, y, _INNER, _STRIP, "none", _LINE))
    y += _STRIP + 16
    parts += _axis(rows, column, y)
    y += 12
    totals = {name: sum(row.shares.parts[name] for row in rows) for name in SHARE_NAMES}
    legend = [
        (SHARE_COLOURS[name], f"{_share_name(plan, name)} {format_bytes(size)}")
        for name, size in totals.items()
        if size
    ]
    drawn, y = _legend(legend, y)
    return parts + drawn, y + 18


def _share_name(plan: Plan, name: str) -> str:
    names: Mapping[str, str] = {
        "resident": "on the accelerator" if plan.profile.device else "in host memory",
        "streamed": "on the host, streamed to the accelerator",
        "computed": "on the host, which computes with them",
        "split": "on the host, streamed or computed row by row",
    }
    return names[name]


def _column(row: Row, x: float, y: int, width: float) -> Iterator[str]:
    # Only where columns are wide enough for one.
    gap = _GAP if width >= 4 else 0
    bottom = float(y + _STRIP)
    for name, size in row.shares.parts.items():
        if not size:
            continue
        height = _STRIP * size / row.shares.total
        bottom -= height
        note = f"{row.name}: {format_bytes(size)} {SHARE_NAMES[name]}"
        yield _rect(x, bottom, width - gap, height, SHARE_COLOURS[name], "none", note)


def _axis(rows: Sequence[Row], column: float, y: int) -> Iterator[str]:
    """Numbers of layers below their columns, as many as there is room for, and the two ends."""
    layers = [(place, row) for place, row in enumerate(rows) if row.index is not None]
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if s * column >= 34)
    # The ends' names take room that numbers may not have.
    low, high = _MARGIN, _MARGIN + _INNER
    if rows[0].index is None:
        yield _text(_MARGIN, y, rows[0].name, _SMALL, colour=_GREY)
        low += int(_LETTER * _SMALL * len(rows[0].name)) + 10
    if rows[-1].index is None and len(rows) > 1:
        yield _text(_MARGIN + _INNER, y, rows[-1].name, _SMALL, colour=_GREY, anchor="end")
        high -= int(_LETTER * _SMALL * len(rows[-1].name)) + 10
    for place, row in layers:
        assert row.index is not None
        middle = _MARGIN + (place + 0.5) * column
        if row.index % step == 0 and low + 10 <= middle <= high - 10:
            yield _text(middle, y, str(row.index), _SMALL, colour=_GREY, anchor="middle")


def _speed(plan: Plan, y: int) -> tuple[list[str], int]:
    parts = [_text(_MARGIN, y, "Predicted", weight="bold")]
    y += 22
    rates = {"tpot_1": plan.tokens_per_s_1, "tpot_full": plan.tokens_per_s_full}
    for key, one in plan.predictions.items():
        speed = f", {rate(rates[key])} tokens/s" if key in rates else ""
        line = f"{format_seconds(one.seconds)}{speed}; held up by {one.limit}"
        names, room = 0.54 * _INNER, 0.46 * _INNER
        parts.append(_text(_MARGIN, y, _cut(one.name, _SMALL, names), _SMALL, colour=_GREY))
        parts.append(_text(_MARGIN + names, y, _cut(line, _SMALL, room), _SMALL))
        y += 20
    return parts, y


def _legend(items: Sequence[tuple[str, str]], y: int) -> tuple[list[str], int]:
    """Swatches with their texts, in as many lines as they need."""
    parts = []
    x = float(_MARGIN)
    y += 12
    for colour, text in items:
        width = 20 + _LETTER * _SMALL * len(text) + 18
        if x + width > _MARGIN + _INNER and x > _MARGIN:
            x, y = float(_MARGIN), y + 20
        parts.append(_rect(x, y - 11, 13, 13, colour, _LINE))
        parts.append(_text(x + 20, y, text, _SMALL))
        x += width
    return parts, y + 12


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    stroke: str,
    note: str = "",
) -> str:
    box = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    shape = f'<rect {box} fill="{fill}" stroke="{stroke}"'
    return f"{shape}><title>{html.escape(_clean(note))}</title></rect>" if note else f"{shape}/>"


def _text(
    x: float,
    y: float,
    text: str,
    size: int = _TEXT,
    colour: str = _INK,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{html.escape(_clean(text))}</text>'
    )


def _cut(text: str, size: int, width: float = _INNER) -> str:
    most = int(width / (_LETTER * size))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _clean(text: str) -> str:
    """Without control characters, which XML does not allow."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
