"""A report as one HTML page that needs nothing else: style and plots are inside, and its own
content policy keeps everything out. Light and dark as the reader's system is; light on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.files import written_whole
from engine.report.parts import CodeSample, Facts, Part, Plot, Remark, Report, ReportTable, Tokens
from engine.report.svg import draw
from engine.report.text import escape, escape_lines

_LIGHT = (
    "--paper:#fff;--ink:#1c2128;--muted:#59636e;--edge:#d5d9df;--raised:#f4f5f7;"
    "--s0:#005a9c;--s1:#b34700;--s2:#1f7a46;--s3:#8a6100;--s4:#4763c9;--s5:#3f7fa6;"
    "--accept:#c7e0ee;--reject:#f6dcc7;--bad:#b42318;--warn:#8a6100"
)
_DARK = (
    "--paper:#16181c;--ink:#e6e8eb;--muted:#9aa3ad;--edge:#32373f;--raised:#1e2126;"
    "--s0:#56b4e9;--s1:#ff9e57;--s2:#7fcf9b;--s3:#e6c15c;--s4:#7aa2f7;--s5:#8fb6cc;"
    "--accept:#325265;--reject:#644b14;--bad:#ff7b72;--warn:#e6c15c"
)
_N_COLOURS = 6
_SHORT = 24
"""Cells of this many characters stay on one line."""
_STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f"@media print{{:root{{color-scheme:light;{_LIGHT}}}"
    "*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);"
    "max-width:60rem;margin:0 auto;padding:1.5rem}"
    "h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.1rem;margin:2rem 0 .5rem;"
    "border-bottom:1px solid var(--edge);padding-bottom:.2rem}"
    "h3{font-size:1rem;margin:1rem 0 .3rem}"
    ".summary,.muted{color:var(--muted);margin:0}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;margin:.5rem 0;font-size:.9rem;"
    "font-variant-numeric:tabular-nums}"
    "th,td{padding:.2rem .6rem;text-align:left;vertical-align:top;"
    "border-bottom:1px solid var(--edge);overflow-wrap:break-word;max-width:40rem}"
    "th{color:var(--muted);font-weight:600}.n{text-align:right}.n,.k{white-space:nowrap}"
    "pre{background:var(--raised);border:1px solid var(--edge);border-radius:4px;padding:.6rem;"
    "overflow-x:auto;font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;"
    "overflow-wrap:anywhere}"
    "figure{margin:1rem 0}svg{width:100%;max-width:680px;height:auto}"
    "svg text{font:12px system-ui,sans-serif;fill:var(--muted)}"
    "svg .name{font-weight:600;fill:var(--ink)}svg .value{fill:var(--ink)}"
    ".grid{stroke:var(--edge)}.heat{fill:var(--s0)}.best{stroke:var(--s1);stroke-width:2}"
    + "".join(
        f".s{i}{{fill:var(--s{i % _N_COLOURS})}}"
        f".l{i}{{fill:none;stroke-width:2;stroke:var(--s{i % _N_COLOURS})}}"
        for i in range(8)
    )
    + ".accepted{background:var(--accept);border-bottom:2px solid var(--s0)}"
    ".rejected{background:var(--reject);text-decoration:line-through}"
    ".ignored,.side{color:var(--muted);text-decoration:line-through}"
    ".replacement{border-bottom:3px double var(--s1)}.bonus{border-bottom:2px dotted var(--ink)}"
    ".prompt{color:var(--muted)}"
    ".error b{color:var(--bad)}.warning b{color:var(--warn)}"
    # after what it changes
    "@media print{body{max-width:none;padding:0;font-size:12px}table{font-size:10px}"
    ".wide{overflow:visible}th,td{padding:.1rem .4rem}.n,.k{white-space:normal}"
    "figure,tr{break-inside:avoid}h2,h3{break-after:avoid}}"
)


def html_page(report: Report) -> str:
    """The whole page, ASCII apart from what the texts hold; any text may be hostile."""
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
    if isinstance(part, Facts):
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in part.values.items()
        )
        return f'<div class="wide"><table>{rows}</table></div>' if rows else ""
    if isinstance(part, Remark):
        tone = escape(part.tone)
        return f'<p class="{tone}">{f"<b>{tone}</b> " if tone else ""}{escape(part.text)}</p>'
    if isinstance(part, CodeSample):
        return f"<pre>{escape_lines(part.text)}</pre>"
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
    """As one HTML page, in place of an earlier file. Raises OptionError where the system does not
    let us write."""
    text = html_page(report)
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")
