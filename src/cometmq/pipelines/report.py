"""Reports that a person reads: one HTML file that needs nothing else, or plain text.

Owns: tables and line plots, in both forms. One rule: whatever comes from a message (topics, keys,
groups) is text and never markup, and a report has bounds however much it tells of.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

MOST_POINTS = 1000
MOST_CELL_CHARS = 120
WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 96, 48, 12, 34
"""Room for 100,000,000 ms at the left, and for half of a time at the right."""
SHORT_MS = 5 * 60_000
"""Of a span up to this the times on the axis have seconds: they would be equal without."""
_NUMBER = ' class="number"'
COLOURS = ("#2563eb", "#d97706", "#dc2626", "#059669", "#7c3aed")
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;
color:#1f2937;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem;border-bottom:1px solid #e5e7eb}
table{border-collapse:collapse;margin:.5rem 0}th,td{padding:.2rem .7rem;text-align:left;
border-bottom:1px solid #e5e7eb}th{background:#f3f4f6}td.number{text-align:right;
font-variant-numeric:tabular-nums}.note{color:#6b7280}svg text{font:11px system-ui,sans-serif;
fill:#4b5563}
""".strip()


class Table(msgspec.Struct, frozen=True):
    """Rows under a heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""


class Plot(msgspec.Struct, frozen=True):
    """Lines over time: of each name its (ms since 1970, value), in the order of time."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[tuple[int, float]]]
    note: str = ""


class Report(msgspec.Struct, frozen=True):
    """A heading, and what follows it."""

    title: str
    note: str
    parts: Sequence[Table | Plot]

    def as_text(self) -> str:
        """For a terminal; plots are left out, their figures stand in tables."""
        told = [self.title, self.note, ""]
        for part in self.parts:
            if isinstance(part, Table):
                told += [part.title, *_text_rows(part), *([part.note] if part.note else []), ""]
        return "\n".join(told)

    def as_html(self) -> str:
        """A whole page; plots are SVG within it."""
        parts = [
            _html_table(one) if isinstance(one, Table) else _html_plot(one) for one in self.parts
        ]
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>"
            f'<p class="note">{html.escape(self.note)}</p>\n'
            + "\n".join(parts)
            + "</body></html>\n"
        )

    def at(self, path: str) -> bytes:
        """In the form that the file's name asks for."""
        text = self.as_html() if path.lower().endswith((".html", ".htm")) else self.as_text()
        return text.encode()


def shown(value: object) -> str:
    """One cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    text = "".join(one if one.isprintable() else "?" for one in str(value))
    return text if len(text) <= MOST_CELL_CHARS else text[: MOST_CELL_CHARS - 1] + "…"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text_rows(table: Table) -> Iterable[str]:
    if not table.rows:
        return ["  (none)"]
    cells = [list(table.columns), *([shown(one) for one in row] for row in table.rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(table.columns))]
    is_right = [_is_number(one) for one in table.rows[0]]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        ).rstrip()
        for row in cells
    ]


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(one)}</th>" for one in table.columns)
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<td{_NUMBER if _is_number(one) else ''}>{html.escape(shown(one))}</td>" for one in row
        )
        + "</tr>"
        for row in table.rows
    )
    rows = f"<table><tr>{head}</tr>\n{body}</table>" if table.rows else '<p class="note">none</p>'
    return f"<h2>{html.escape(table.title)}</h2>{_html_note(table.note)}{rows}"


def _html_note(note: str) -> str:
    return f'<p class="note">{html.escape(note)}</p>' if note else ""


# ------------------------------------------------------------------------------------------- plots


def _html_plot(plot: Plot) -> str:
    lines = {name: list(points)[-MOST_POINTS:] for name, points in plot.lines.items()}
    points = [one for line in lines.values() for one in line]
    title = f"<h2>{html.escape(plot.title)}</h2>{_html_note(plot.note)}"
    if not points:
        return title + '<p class="note">nothing to plot</p>'
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    top = _round_up(max(value for _, value in points))

    def x(at: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (
            (at - first) / (last - first) if last > first else 0.5
        )

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)

    drawn = [*_grid(top, plot.unit, y), *_times(first, last, x)]
    for colour, (name, line) in zip(_cycled(len(lines)), lines.items(), strict=True):
        drawn.append(_drawn_line(name, line, colour, x, y))
    drawn += _legend(list(lines))
    return (
        f'{title}<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 20}" '
        f'width="{WIDTH}" height="{HEIGHT + 20}" role="img" '
        f'aria-label="{html.escape(plot.title, quote=True)}">' + "".join(drawn) + "</svg>"
    )


def _cycled(count: int) -> list[str]:
    return [COLOURS[at % len(COLOURS)] for at in range(count)]


def _drawn_line(name: str, line: Sequence[tuple[int, float]], colour: str, x: Any, y: Any) -> str:
    if not line:
        return ""
    label = f"<title>{html.escape(name)}</title>"
    path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line)
    dots = "".join(
        f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}">'
        f"<title>{html.escape(name)} {_clock(at)} {value:,.1f}</title></circle>"
        for at, value in (line if len(line) <= 120 else [])
    )
    style = f'fill="none" stroke="{colour}" stroke-width="1.6"'
    return f'<g>{label}<polyline points="{path}" {style}/>{dots}</g>'


def _grid(top: float, unit: str, y: Any) -> list[str]:
    drawn = []
    for part in range(5):
        value = top * part / 4
        at = y(value)
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e7eb"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_scaled(value)} '
            f"{html.escape(unit)}</text>"
        )
    return drawn


def _times(first: int, last: int, x: Any) -> list[str]:
    places = sorted({first + (last - first) * part // 4 for part in range(5)})
    return [
        f'<text x="{x(at):.1f}" y="{HEIGHT - 14}" text-anchor="middle">'
        f"{_clock(at, last - first <= SHORT_MS)}</text>"
        for at in places
    ]


def _legend(names: Sequence[str]) -> list[str]:
    drawn, at = [], LEFT
    for colour, name in zip(_cycled(len(names)), names, strict=True):
        drawn.append(
            f'<rect x="{at}" y="{HEIGHT + 2}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{at + 14}" y="{HEIGHT + 11}">{html.escape(shown(name))}</text>'
        )
        at += 30 + 7 * len(shown(name))
    return drawn


def _clock(at_ms: int, has_seconds: bool = True) -> str:
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return f"{at:%m-%d %H:%M:%S}" if has_seconds else f"{at:%m-%d %H:%M}"


def _scaled(value: float) -> str:
    """A number at an axis: never 1.25e+04."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _round_up(value: float) -> float:
    """The next 1, 2, 2.5, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= value)
