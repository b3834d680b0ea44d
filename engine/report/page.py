"""Self-contained HTML pages of reports, with embedded style and plots and a content policy that
blocks everything else. Light and dark as the reader's system; light on paper.

Plots are SVG: bars, grouped bars, lines, a heat map. Their colours are classes defined by the
page's style, so that one picture suits light, dark and paper. All text is escaped here. Non-finite
values count as missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from engine.files import write_text
from engine.report.parts import CODE, Part, Plot, Remark, Report, ReportTable, Tokens
from engine.report.text import escape, escape_lines

WIDTH, HEIGHT = 680, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 30, 40
_ROW = 26
_MOST_NAMES = 200
_MOST_SERIES = 8
_LONGEST = 34
_TICKS = 5


def draw(plot: Plot) -> str:
    """A plot with its title, empty if it has no value."""
    series = {
        name: [_finite(value, plot.log) for value in values[:_MOST_NAMES]]
        for name, values in list(plot.series.items())[:_MOST_SERIES]
    }
    if not any(value is not None for values in series.values() for value in values):
        return ""
    shown = Plot(plot.kind, plot.title, plot.names[:_MOST_NAMES], series, plot.unit, plot.log)
    return PLOTS[plot.kind](shown)


def _finite(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return float(value)


def _picture(plot: Plot, height: float, body: Iterator[str]) -> str:
    parts = "".join(body)
    unit = f", {plot.unit}" if plot.unit else ""
    title = escape(f"{plot.title}{unit}")
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{title}">'
        f'<text class="name" x="0" y="16">{title}</text>{parts}</svg></figure>'
    )


def _label(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> str:
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(short)}</text>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    if len(names) < 2:
        return
    x = float(WIDTH)
    for i, name in reversed(list(enumerate(names))):
        short = name if len(name) <= 28 else f"{name[:27]}…"
        x -= 7 * len(short) + 24
        yield f'<rect class="s{i}" x="{x:.1f}" y="7" width="10" height="10"/>'
        yield f'<text class="tick" x="{x + 14:.1f}" y="16">{escape(short)}</text>'


def _values(plot: Plot) -> list[float]:
    return [value for values in plot.series.values() for value in values if value is not None]


def number(value: float) -> str:
    """A value in few characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# -- horizontal bars, one row per name --------------------------------------------------------


def _bars(plot: Plot) -> str:
    n_series = len(plot.series)
    row = max(_ROW, 16 * n_series + 8)
    values = _values(plot)
    low, high = min(values), max(values)
    place = _log_scale(low, high) if plot.log else _scale(max(high, 0.0) or 1.0)
    left = min(260.0, 12 + 7.2 * max(min(len(name), _LONGEST) for name in plot.names))
    room = WIDTH - left - 80

    def body() -> Iterator[str]:
        yield from _legend(list(plot.series))
        for i, name in enumerate(plot.names):
            top = _TOP + i * row
            yield _label(left - 8, top + row / 2 + 4, name, "end")
            thick = (row - 8) / n_series
            for j, series in enumerate(plot.series.values()):
                y = top + 4 + j * thick
                value = series[i] if i < len(series) else None
                if value is None:
                    yield _label(left + 4, y + thick / 2 + 4, "n/a")
                    continue
                length = max(1.0, room * min(max(place(value), 0.0), 1.0))
                yield (
                    f'<rect class="s{j}" x="{left:.1f}" y="{y:.1f}" width="{length:.1f}" '
                    f'height="{max(2.0, thick - 2):.1f}"/>'
                )
                yield _label(left + length + 5, y + thick / 2 + 3, number(value))

    return _picture(plot, _TOP + len(plot.names) * row + 6, body())


def _scale(high: float) -> Callable[[float], float]:
    return lambda value: value / high


def _log_scale(low: float, high: float) -> Callable[[float], float]:
    bottom, top = math.floor(math.log10(low)) - 1, math.log10(high)
    return lambda value: (math.log10(value) - bottom) / max(top - bottom, 1e-9)


# -- columns and lines over x ------------------------------------------------------------------


def _columns(plot: Plot) -> str:
    def marks(
        x: Callable[[float], float], y: Callable[[float], float], step: float
    ) -> Iterator[str]:
        width = min(step * 0.8, 48.0 * len(plot.series)) / len(plot.series)
        for j, series in enumerate(plot.series.values()):
            for i, value in enumerate(series):
                if value is not None:
                    left, height = x(i) + (j - len(plot.series) / 2) * width, y(0) - y(value)
                    yield (
                        f'<rect class="s{j}" x="{left:.1f}" y="{y(value):.1f}" '
                        f'width="{max(width - 1, 0.5):.1f}" height="{max(height, 0.5):.1f}"/>'
                    )

    return _over_x(plot, marks)


def _lines(plot: Plot) -> str:
    def marks(
        x: Callable[[float], float], y: Callable[[float], float], step: float
    ) -> Iterator[str]:
        for j, series in enumerate(plot.series.values()):
            pen, path = "M", []
            for i, value in enumerate(series):
                if value is None:
                    pen = "M"
                    continue
                path.append(f"{pen}{x(i):.1f} {y(value):.1f}")
                pen = "L"
                yield f'<circle class="s{j}" cx="{x(i):.1f}" cy="{y(value):.1f}" r="3"/>'
            yield f'<path class="l{j}" d="{"".join(path)}"/>'

    return _over_x(plot, marks)


Marks = Callable[[Callable[[float], float], Callable[[float], float], float], Iterator[str]]


def _over_x(plot: Plot, marks: Marks) -> str:
    high = max(0.0, *_values(plot)) or 1.0
    tick = _step(high / _TICKS)
    top_value = math.ceil(high / tick - 1e-9) * tick
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    step = (right - _LEFT) / max(1, len(plot.names))

    def x(i: float) -> float:
        return _LEFT + (i + 0.5) * step

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * max(value, 0.0) / top_value

    def body() -> Iterator[str]:
        yield from _legend(list(plot.series))
        for k in range(round(top_value / tick) + 1):
            at = y(k * tick)
            yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield _label(_LEFT - 6, at + 4, number(k * tick), "end")
        longest = max((len(name) for name in plot.names), default=1)
        every = max(1, math.ceil(7.5 * min(longest, _LONGEST) / step))
        for i, name in enumerate(plot.names):
            if i % every == 0:
                yield _label(x(i), bottom + 16, name, "middle")
        yield from marks(x, y, step)

    return _picture(plot, HEIGHT - 14, body())


def _step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


# -- heat map: a series is a row ---------------------------------------------------------------


def _heat(plot: Plot) -> str:
    values = _values(plot)
    low, high = min(values), max(values)
    left = min(200.0, 12 + 7.2 * max(min(len(name), _LONGEST) for name in plot.series))
    step = (WIDTH - left - _RIGHT) / max(1, len(plot.names))

    def body() -> Iterator[str]:
        for i, name in enumerate(plot.names):
            yield _label(left + (i + 0.5) * step, _TOP + 8, name, "middle")
        for j, (name, series) in enumerate(plot.series.items()):
            top = _TOP + 16 + j * _ROW
            yield _label(left - 8, top + 17, name, "end")
            for i, value in enumerate(series):
                if value is None:
                    continue
                strength = (value - low) / (high - low) if high > low else 1.0
                best = " best" if value == high else ""
                yield (
                    f'<rect class="heat{best}" style="fill-opacity:{0.1 + 0.45 * strength:.2f}" '
                    f'x="{left + i * step + 1:.1f}" y="{top + 1}" width="{max(step - 2, 1):.1f}" '
                    f'height="{_ROW - 2}"/>'
                )
                if step > 44:
                    yield _label(
                        left + (i + 0.5) * step, top + 17, number(value), "middle", "value"
                    )

    return _picture(plot, _TOP + 20 + len(plot.series) * _ROW, body())


PLOTS: dict[str, Callable[[Plot], str]] = {
    "bars": _bars,
    "columns": _columns,
    "lines": _lines,
    "heat": _heat,
}
"""bars: horizontal, one row per name. columns: vertical over x. lines: over x. heat: one row per
series, values as colour strength."""


_SHORT = 24
"""Text cells up to this many characters stay on one line."""
_STYLE = "".join(Path(__file__).with_name("page.css").read_text(encoding="utf-8").splitlines())


def html_page(report: Report) -> str:
    """The whole page, ASCII except for texts; any text may be hostile."""
    body = "".join(_body(report))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _body(report: Report) -> Iterator[str]:
    yield f'<h1>{escape(report.title)}</h1><p class="summary">{escape(report.summary)}</p>'
    for section in report.sections:
        if inner := "".join(map(_part, section.parts)):
            yield f"<section><h2>{escape(section.heading)}</h2>{inner}</section>\n"


def _part(part: Part) -> str:
    if isinstance(part, ReportTable):
        return _table(part)
    if isinstance(part, Mapping):
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in part.items()
        )
        return f'<div class="wide"><table>{rows}</table></div>' if rows else ""
    if isinstance(part, Remark):
        if part.tone == CODE:
            return f"<pre>{escape_lines(part.text)}</pre>"
        tone = escape(part.tone)
        return f'<p class="{tone}">{f"<b>{tone}</b> " if tone else ""}{escape(part.text)}</p>'
    if isinstance(part, Plot):
        return draw(part)
    return _tokens(part)


def _table(table: ReportTable) -> str:
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    numeric = table.numeric
    heads = "".join(
        _cell("th", head, is_number) for head, is_number in zip(table.heads, numeric, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(_cell('td', *cell) for cell in zip(row, numeric, strict=True))}</tr>"
        for row in table.rows
    )
    return f'{title}<div class="wide"><table><tr>{heads}</tr>{rows}</table></div>'


def _cell(tag: str, text: str, is_number: bool) -> str:
    kind = ' class="n"' if is_number else ' class="k"' if len(text) <= _SHORT else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"


def _tokens(part: Tokens) -> str:
    pieces = "".join(
        f'<span class="{escape(kind)}">{escape_lines(text)}</span>' for text, kind in part.pieces
    )
    return f"<h3>{escape(part.title)}</h3><pre>{pieces}</pre>" if pieces else ""


def write_report(report: Report, path: Path) -> None:
    """Write a report as one HTML page, replacing an earlier file. Raises OptionError if that
    fails."""
    write_text(path, html_page(report))
