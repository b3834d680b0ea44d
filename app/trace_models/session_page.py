"""A session as one self-contained HTML page: the runs of a trace with their text, plots, findings
and every round in full, with the window's keys.

Plots are drawn by Bokeh (the extra `share`), whose script is embedded, so that we need no drawing
code of our own. uPlot would be a twentieth of its 1.3 MB, but its makers publish no Python package;
installing and testing would then need a second index.

Texts are untrusted. They are in a JSON block without any "<", and the script of
resources/session_page inserts them as text. The content policy admits this script and Bokeh's by
their hashes, nothing else, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_notes import run_name
from engine.errors import OptionError
from engine.files import written_whole
from engine.report.session_data import SHOWN_STATES, ring_images, session_data
from engine.report.text import escape
from engine.trace.records import PHASES
from engine.trace.run_ref import RunColumns, RunRef
from resources import SESSION_PAGE, theme_roles

_LANES = 8
"""Lanes in the divergence plot."""
_HEIGHT = 150
_WIDEST = 8192
"""Rounds per image: browsers do not draw much wider ones."""
_COUNTED = ("tokens", "slot")
"""Units that are counted in integers."""
_PATHS = ("seq_rm", "restore", "restore_depth", "refused")


def write_session_page(
    runs: Sequence[RunRef], title: str, path: Path, shown: RunRef | None = None
) -> None:
    """Write the page, replacing an earlier file. Raises OptionError without Bokeh, for too many
    tokens, and if the file cannot be written."""
    page = session_page(runs, title, shown)
    with written_whole(path) as part:
        part.write_bytes(page)


def session_page(runs: Sequence[RunRef], title: str, shown: RunRef | None = None) -> bytes:
    """The whole page as UTF-8. shown: the initial run, None = a compared lane, else the first.
    Raises OptionError without Bokeh, and for too many tokens."""
    runs = [run for run in runs if RunColumns(run.store, "rounds", run.run_id).n] or runs
    plots, bokeh = _plots(runs)
    data = session_data(runs) | {"title": title, "shown": shown.run_id if shown else None}
    for run, on_page in zip(runs, data["runs"], strict=True):
        on_page["name"] = " · ".join(filter(None, (run_name(run), on_page["drafters"])))
        on_page["comparison"] = next((lane.run_id for lane in lanes_of(run)), None)
    script = (SESSION_PAGE / "page.js").read_text(encoding="utf-8")
    style = (SESSION_PAGE / "page.css").read_text(encoding="utf-8")
    body = (SESSION_PAGE / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(script)} {_hash(bokeh)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{_colours()}{style}</style></head>"
        f"<body>{body}{_block('data', data)}{_block('plots', plots)}"
        f"<script>{script}</script><script>{bokeh}</script></body></html>\n"
    )
    return page.encode("utf-8", "replace")


def _hash(script: str) -> str:
    """A content policy source that admits only this script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _block(name: str, value: Any) -> str:
    """A block of JSON that its texts cannot terminate."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _colours() -> str:
    """The theme roles of both themes as CSS variables, such as --accepted-line."""
    rules = []
    for name in ("light", "dark"):
        roles = theme_roles(name).items()
        inner = "".join(f"--{role.replace('.', '-')}:{colour};" for role, colour in roles)
        rules.append(f':root[data-theme="{name}"]{{color-scheme:{name};{inner}}}')
    return "".join(rules)


def _plots(runs: Sequence[RunRef]) -> tuple[dict[str, Any], str]:
    """The plots in Bokeh's JSON, with data only for the snapshot planes, and Bokeh's script.

    Sources, plots and markers have names, through which our script fills them. Raises OptionError.
    """
    try:
        from bokeh.document import Document
        from bokeh.models import BasicTicker, ColumnDataSource, LinearColorMapper, Range1d, Span
        from bokeh.plotting import figure
        from bokeh.resources import Resources
    except ImportError as error:
        raise OptionError(
            "The plots of a session page need Bokeh, which is not installed.",
            "Install it: pip install 'draftscope[share]'.",
        ) from error

    figures: list[Any] = []
    rounds = Range1d(-1, 1, name="rounds")

    def plot(name: str, unit: str, x: str = "round", **options: Any) -> Any:
        made = figure(
            name=name,
            height=_HEIGHT,
            sizing_mode="stretch_width",
            x_range=rounds if x == "round" else Range1d(-1, 1, name=x),
            tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
            active_drag="xbox_zoom",
            x_axis_label=x,
            y_axis_label=unit,
            y_range=Range1d(1e-9, 1),
            output_backend="canvas",
            **options,
        )
        made.xaxis.ticker = BasicTicker(min_interval=1)
        if unit in _COUNTED:
            made.yaxis.ticker = BasicTicker(min_interval=1)
        made.toolbar.logo = None
        made.toolbar.autohide = True
        made.add_layout(
            Span(name=f"{name} cursor", dimension="height", location=-9, line_dash="dashed")
        )
        figures.append(made)
        return made

    times = ColumnDataSource({name: [] for name in ("x", *PHASES, "total")}, name="times")
    time = plot("time", "ms")
    time.vbar_stack([*PHASES, "total"], x="x", width=1.0, source=times, line_color=None)
    for renderer, phase in zip(time.renderers, (*PHASES, "total"), strict=True):
        renderer.name = f"phase-{phase}"
    accepted = ColumnDataSource({"x": [], "rate": [], "so_far": []}, name="acceptance data")
    acceptance = plot("acceptance", "rate")
    acceptance.line("x", "rate", source=accepted, name="accepted-line", line_width=1.5)
    acceptance.line("x", "so_far", source=accepted, name="plot-text", line_dash="dashed")
    drafted = ColumnDataSource({"x": [], "drafted": [], "accepted": []}, name="drafts data")
    drafts = plot("drafts", "tokens")
    drafts.vbar("x", 1.0, "drafted", source=drafted, name="rejected-tint", line_color=None)
    drafts.vbar("x", 1.0, "accepted", source=drafted, name="accepted-line", line_color=None)
    depth = plot("depth", "tokens")
    for path in _PATHS:
        source = ColumnDataSource({"x": [], "depth": []}, name=f"depth {path}")
        depth.vbar("x", 1.0, "depth", source=source, name=f"path-{path}", line_color=None)
    limit = ColumnDataSource({"x": [], "limit": []}, name="limit")
    depth.step("x", "limit", source=limit, mode="center", name="plot-limit", line_dash="dashed")
    ring, n_states = plot("ring", "slot"), len(SHOWN_STATES) + 1
    colours = LinearColorMapper(palette=["#000000"] * n_states, low=-0.5, high=n_states - 0.5)
    for run in runs:
        for seq_id, first, image in ring_images(run):
            starts = range(0, image.shape[1], _WIDEST)
            parts = [np.ascontiguousarray(image[:, at : at + _WIDEST]) for at in starts]
            places = {
                "image": parts,
                "x": [first - 0.5 + at for at in starts],
                "y": [-0.5] * len(parts),
                "dw": [part.shape[1] for part in parts],
                "dh": [part.shape[0] for part in parts],
            }
            name = f"ring-{run.run_id}-{seq_id}"
            ring.image(**{key: key for key in places}, source=ColumnDataSource(places), name=name)
            ring.renderers[-1].glyph.color_mapper = colours
            ring.renderers[-1].visible = False
    lanes = plot("divergence", "NMSE", "position", y_axis_type="log")
    for i in range(_LANES):
        source = ColumnDataSource({"x": [], "nmse": []}, name=f"lane {i}")
        lanes.scatter("x", "nmse", source=source, size=3, name=f"lane-{i}")
    lanes.add_layout(Span(name="bound", dimension="width", location=1e-30, line_dash="dashed"))
    document = Document()
    for made in figures:  # last, because everything added to a document checks the rest
        document.add_root(made)
    script = Resources(mode="inline", components=["bokeh"], minified=True).js_raw[0]
    if "</script" in script:
        raise OptionError(
            "The script of this Bokeh cannot be put into a page.", "Install Bokeh 3.9."
        )
    roots = {root.id: root.name for root in document.roots}
    return {"document": document.to_json(deferred=False), "roots": roots}, script
