"""The schema of the trace: one table per grain, one column per fact, listed in columns.txt.

The same names are the header rows of the CSV files. Names follow vLLM and AIPerf where they have
one. A value that was not observed is stored as MISSING (integers) or NaN (reals) and is an empty
field in CSV, never 0. Times are milliseconds, sizes are bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from engine.draft.drafter import N_TOP as N_TOP
from engine.foreign import COUNT, LARGEST, LONGEST_DRAFT, LONGEST_MS

REFERENCE, NOISE, PEER, POLICY = "reference", "noise", "peer", "policy"
PEER_NOISE = "peer noise"
"""Lanes that a peer lane is compared with."""

SCHEMA_VERSION = 4
"""Incremented when the meaning of a column changes."""
READ_VERSIONS = (3, SCHEMA_VERSION)
"""Other versions are not read. In version 3 every token has an id."""
SCHEMA_MINOR = 5
"""Incremented when tables or columns are added (`since`), across versions. In older traces those
are empty; unknown columns of newer ones are kept and written back."""
MISSING = int(np.iinfo(np.int32).min)
ColumnState = Literal["observed", "derived", "absent"]
COLUMN_STATES: tuple[str, ...] = get_args(ColumnState)
"""What a run may state about a column in its fact `columns`: read off the engine, computed from
other observations, or unknown to this source."""

TOKEN_KINDS = (
    "prompt",
    "target",
    "accepted",
    "rejected",
    "ignored",
    "replacement",
    "bonus",
    "replayed",
    "unknown",
    "side",
)
EMITTED_KINDS = ("target", "accepted", "replacement", "bonus", "unknown")
"""unknown: emitted by another engine that does not report which part of a round it came from."""
GHOST_KINDS = ("rejected", "ignored", "side")
SLOT_STATES = ("free", "live", "fresh", "carried", "stale", "pending")
ROLLBACK_PATHS = ("none", "seq_rm", "restore", "restore_depth", "refused")
SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Column:
    """One column. kind: "int" (int64), "real" (float64), "text" (interned code), "tops".

    A "tops" column holds [n, N_TOP] float32 or int32 and becomes N_TOP columns in CSV, `<name>_1` …
    `<name>_N`. The rest are checks for traces that are read: least, most: limits of observed
    numbers. required: every row has a value. choices: the allowed texts, if limited. since: minor
    version of the schema that added the column.
    """

    name: str
    kind: str
    about: str
    least: float = -math.inf
    most: float = math.inf
    required: bool = False
    choices: tuple[str, ...] = ()
    since: int = 0

    @property
    def unit(self) -> str:
        """ms, bytes or tokens, from the suffix of the name; empty for plain numbers."""
        endings = {"_ms": "ms", "_bytes": "bytes", "_tokens": "tokens"}
        return next((unit for end, unit in endings.items() if self.name.endswith(end)), "")

    @property
    def is_whole(self) -> bool:
        """Whether a "tops" column holds int32 and not float32."""
        return self.name.endswith(("_id", "_forbidden"))


_KINDS: dict[str, dict[str, Any]] = {
    "count": {"kind": "int", "least": 0, "most": COUNT},
    "draft": {"kind": "int", "least": 0, "most": LONGEST_DRAFT},
    "block": {"kind": "int", "least": 0, "most": LONGEST_DRAFT + 1},
    "round": {"kind": "int", "least": 0, "most": 10**9},
    "sequence": {"kind": "int", "least": 0, "most": 2**16 - 1},
    "sequences": {"kind": "int", "least": 0, "most": 2**16},
    "layer": {"kind": "int", "least": 0, "most": 4095},
    "flag": {"kind": "int", "least": 0, "most": 1},
    "bytes": {"kind": "int", "least": 0, "most": LARGEST},
    "ms": {"kind": "real", "least": 0.0, "most": LONGEST_MS},
    # float32 sums can end slightly above 1
    "probability": {"kind": "real", "least": 0.0, "most": 1.001},
    "real": {"kind": "real"},
    "text": {"kind": "text"},
    "token_kind": {"kind": "text", "choices": TOKEN_KINDS},
    "rollback_path": {"kind": "text", "choices": ("", *ROLLBACK_PATHS)},
    "slot_state": {"kind": "text", "choices": SLOT_STATES},
    "severity": {"kind": "text", "choices": SEVERITIES},
    "ids": {"kind": "tops", "least": 0, "most": COUNT},
    "probabilities": {"kind": "tops", "least": 0.0, "most": 1.001},
    "flags": {"kind": "tops", "least": 0, "most": 1},
}
"""The kinds of columns in columns.txt."""
_HELD = re.compile(
    r"(?P<kind>\w+)(?: from (?P<least>-?\d+))?(?P<signed> signed)?(?P<required> required)?"
    r"(?: since (?P<since>\d+))?"
)


def _tables() -> Iterator[tuple[str, tuple[Column, ...]]]:
    """The tables of columns.txt: after `[table]`, one line per column with its name, its kind, and
    its meaning.

    The kind is one of _KINDS, then `from N`, the least number, or `signed`; `required`; `since N`.
    """
    text = Path(__file__).with_name("columns.txt").read_text(encoding="utf-8")
    for table in text.split("\n\n"):
        title, *lines = table.splitlines()
        yield title.strip("[]"), tuple(_column(*line.split("  ", 2)) for line in lines)


def _column(name: str, held: str, about: str) -> Column:
    found = _HELD.fullmatch(held)
    assert found is not None, held
    keywords = {"least": -COUNT} if found["signed"] else {}
    if found["least"]:
        keywords["least"] = int(found["least"])
    return Column(
        name=name,
        about=about,
        required=bool(found["required"]),
        since=int(found["since"] or 0),
        **_KINDS[found["kind"]] | keywords,
    )


TABLES = dict(_tables())

PHASES = ("draft", "verify", "sample", "save", "rollback", "restore", "replay")
