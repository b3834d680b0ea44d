"""Traces, captures and records from anywhere, opened in the real window."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import DraftscopeError
from engine.observe.files.importing import recognise_file
from engine.trace.export import SESSION_FILE
from engine.trace.records import TABLES
from tests.support.foreign_traces import (
    DAMAGES,
    JUNK,
    columns,
    damaged,
    export_real_trace,
    facts,
    read_rows,
    replaced,
    write_rows,
)
from tests.support.golden_files import DATA
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.real_window import RealWindow

_FILES = ("gone", "empty", "cut", "bytes", "folder", "link", "long line", "no header", "bom")
_ROWS = ("fewer", "more", "turned", "none", "wide", "thousands")
_VERSIONS = (0, 1, 2, 3, 4, 5, 99, -1, "4", None, 4.5)
_FOREIGN = "foreign"


@cache
def _real() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="draftscope-torture-trace-")) / "trace"
    export_real_trace(folder)
    return folder


@cache
def _columns() -> dict[str, tuple[str, Any]]:
    """Table and record of every column, by "table.name"."""
    return {f"{table}.{name}": (table, column) for table, column, name in columns()}


@cache
def _facts() -> list[tuple[str, ...]]:
    session = json.loads((_real() / SESSION_FILE).read_text())
    return [(key,) for key in session] + facts(session)


def _others() -> list[str]:
    """What other engines wrote, by its name below tests/data."""
    folders = (DATA / "records", DATA / "captures")
    return sorted(str(p.relative_to(DATA)) for folder in folders for p in folder.iterdir())


def _pick(random: np.random.Generator, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _draw(random: np.random.Generator, number: int) -> Case:
    if number % 4 == 3:
        steps = [_foreign_step(random) for _ in range(int(random.integers(1, 4)))]
        return {"base": _pick(random, _others()), "steps": steps}
    steps = [_step(random) for _ in range(int(random.choice([1, 1, 2, 4, 12])))]
    return {"base": "", "steps": steps}


def _step(random: np.random.Generator) -> dict[str, Any]:
    kind = str(
        random.choice(["column", "fact", "rows", "file", "schema"], p=[0.4, 0.3, 0.15, 0.1, 0.05])
    )
    table = _pick(random, list(TABLES))
    own: dict[str, Any] = {
        "column": lambda: {
            "column": _pick(random, list(_columns())),
            "how": _pick(random, DAMAGES),
        },
        "fact": lambda: {"place": ".".join(_pick(random, _facts())), "junk": _junk(random)},
        "rows": lambda: {"table": table, "how": _pick(random, _ROWS)},
        "file": lambda: {
            "name": _pick(random, [SESSION_FILE, f"{table}.csv"]),
            "how": _pick(random, _FILES),
        },
        "schema": lambda: {"version": _pick(random, _VERSIONS), "minor": _pick(random, _VERSIONS)},
    }[kind]()
    return {"do": kind, "at": int(random.integers(1 << 16)), **own}


def _foreign_step(random: np.random.Generator) -> dict[str, Any]:
    how = _pick(random, ("value", "value", "value", "drop", "bytes", "cut", "twice"))
    return {"do": _FOREIGN, "how": how, "at": int(random.integers(1 << 20)), "junk": _junk(random)}


def _junk(random: np.random.Generator) -> int:
    return int(random.integers(len(JUNK)))


def _write(case: Case, folder: Path) -> Path:
    """What is to be opened."""
    if case["base"]:
        return _write_foreign(case, folder)
    target = folder / "trace"
    shutil.copytree(_real(), target)
    for step in case["steps"]:
        path = target / str(step.get("name", SESSION_FILE))
        # an earlier step may have taken away what this one would change
        with contextlib.suppress(OSError, ValueError, LookupError, csv.Error):
            _apply(step, target, path)
    return target


def _apply(step: dict[str, Any], target: Path, path: Path) -> None:
    if step["do"] == "column":
        table, column = _columns()[step["column"]]
        name = step["column"].partition(".")[2]
        write_rows(target, table, damaged(read_rows(target, table), name, column, step["how"]))
    elif step["do"] == "rows":
        write_rows(target, step["table"], _changed_rows(read_rows(target, step["table"]), step))
    elif step["do"] == "file":
        _change_file(path, step)
    else:
        session = json.loads(path.read_text())
        if step["do"] == "fact":
            session = replaced(session, tuple(step["place"].split(".")), JUNK[step["junk"]])
        else:
            session |= {"schema_version": step["version"], "schema_minor": step["minor"]}
        path.write_text(json.dumps(session))


def _changed_rows(rows: list[list[str]], step: dict[str, Any]) -> list[list[str]]:
    head, body, at = rows[0], rows[1:], step["at"] % max(1, len(rows) - 1)
    return [
        head,
        *{
            "fewer": lambda: body[:at],
            "more": lambda: body + body[at:],
            "turned": lambda: body[::-1],
            "none": list,
            "wide": lambda: [row + ["1"] * (i == at) for i, row in enumerate(body)],
            "thousands": lambda: body * (20_000 // max(1, len(body))),
        }[step["how"]](),
    ]


def _change_file(path: Path, step: dict[str, Any]) -> None:
    data, how = path.read_bytes(), step["how"]
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(path)
    elif how != "gone":
        at = step["at"] % max(1, len(data))
        path.write_bytes(
            {
                "empty": lambda: b"",
                "cut": lambda: data[:at],
                "bytes": lambda: data[:at] + bytes([step["at"] % 256]) + data[at + 1 :],
                "long line": lambda: data[:at] + b"x" * (1 << 21) + data[at:],
                "no header": lambda: data.partition(b"\n")[2],
                "bom": lambda: b"\xef\xbb\xbf" + data,
            }[how]()
        )


def _write_foreign(case: Case, folder: Path) -> Path:
    source = DATA / case["base"]
    data = source.read_bytes()
    zipped = source.suffix == ".gz"
    text = gzip.decompress(data) if zipped else data
    for step in case["steps"]:
        text = _changed_text(text, step)
    path = folder / source.name
    path.write_bytes(gzip.compress(text, 1) if zipped else text)
    return path


def _changed_text(text: bytes, step: dict[str, Any]) -> bytes:
    at, how = step["at"] % max(1, len(text)), step["how"]
    if how in ("value", "drop", "twice"):
        try:
            value = json.loads(text)
        except ValueError:
            how = "bytes"
        else:
            holders = list(_holders(value))
            if holders:
                holder, key = holders[step["at"] % len(holders)]
                if how == "drop":
                    del holder[key]
                else:
                    holder[key] = [holder[key]] * 2 if how == "twice" else JUNK[step["junk"]]
            return json.dumps(value).encode()
    if how == "cut":
        return text[:at]
    return text[:at] + bytes([step["at"] % 256]) + text[at + 1 :]


def _holders(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _holders(inner)


_shown: list[RealWindow] = []
"""The window of this process, once a case has made it."""


def _play(case: Case, folder: Path) -> Figures:
    if not _shown:
        _shown.append(RealWindow(Path(tempfile.mkdtemp(dir=os.path.dirname(folder)))))
    real = _shown[0]
    path = _write(case, folder)
    if case["base"]:
        try:
            known = recognise_file(path)
        except DraftscopeError:
            known = None
        if not known:
            return {"refused": 1}
    real.blocked_s, n = 0.0, real.n_read
    real.window.sessions.open(path)
    real.until(lambda: real.n_read > n, "the end of reading")
    opened = real.window.bridge.trace_folder == path
    if opened:
        real.look_at_all()
    real.check()
    said = [b for b in real.window.banners.banners if b.severity == "error"]
    assert opened or said, "it is neither open nor refused"
    return {"opened": opened, "refused": not opened, "blocked_s_max": real.blocked_s}


def _prepare() -> None:
    _real(), _columns(), _facts()
    import app.shell.window  # noqa: F401


CAMPAIGN = Campaign(
    "trace",
    "A sentence, or a trace on show: alive, blocked 2 s at most, within 1 GiB.",
    _draw,
    _play,
    _prepare,
    seconds=60.0,
    n_bytes=2**30,
    batch=10,
    share=1.5,
)
