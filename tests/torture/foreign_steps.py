"""Changes of what other engines wrote, records and captures, each drawn as JSON."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.captures import SHARED
from tests.support.foreign_traces import JUNK
from tests.support.golden_files import DATA

Step = dict[str, Any]
Random = np.random.Generator
_FOLDERS = (DATA / "records", DATA / "captures", SHARED)


@cache
def others() -> dict[str, Path]:
    """Files by their names; captures that lie next to the tree are among them where there are
    any."""
    found = [path for folder in _FOLDERS if folder.is_dir() for path in sorted(folder.iterdir())]
    return {path.name: path for path in found if path.is_file()}


def draw_others(random: Random) -> tuple[str, list[Step]]:
    """A name, and steps for its file."""
    names = sorted(others())
    steps = [_draw(random) for _ in range(int(random.choice([1, 1, 2, 3])))]
    return names[int(random.integers(len(names)))], steps


def _draw(random: Random) -> Step:
    how = ("value", "value", "drop", "drop", "number", "number", "bytes", "cut", "twice")
    return {
        "how": how[int(random.integers(len(how)))],
        "at": int(random.integers(1 << 20)),
        "junk": int(random.integers(len(JUNK))),
    }


def write_other(name: str, steps: list[Step], folder: Path) -> Path:
    """The changed file. Raises FileNotFoundError for one that is not here."""
    source = others().get(name)
    if source is None:
        raise FileNotFoundError(name)
    data = source.read_bytes()
    zipped = source.suffix == ".gz"
    text = gzip.decompress(data) if zipped else data
    for step in steps:
        text = _changed(text, step)
    path = folder / source.name
    path.write_bytes(gzip.compress(text, 1) if zipped else text)
    return path


def _changed(text: bytes, step: Step) -> bytes:
    at, how = step["at"] % max(1, len(text)), step["how"]
    if how in ("value", "drop", "twice", "number"):
        try:
            value = json.loads(text)
        except ValueError:
            how = "bytes"
        else:
            places = list(_places(value))
            if how == "number":
                places = [p for p in places if type(p[0][p[1]]) in (int, float)] or places
            if places:
                holder, key = places[step["at"] % len(places)]
                _change(holder, key, how, step)
            return json.dumps(value).encode()
    if how == "cut":
        return text[:at]
    return text[:at] + bytes([step["at"] % 256]) + text[at + 1 :]


def _change(holder: Any, key: Any, how: str, step: Step) -> None:
    if how == "drop":
        del holder[key]
    elif how == "twice":
        holder[key] = [holder[key]] * 2
    elif how == "number":
        holder[key] = (0, 1, 7, 10**6, -1, 0.5)[step["at"] % 6]
    else:
        holder[key] = JUNK[step["junk"]]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
