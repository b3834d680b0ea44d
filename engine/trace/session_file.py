"""session.json of an exported trace, checked: what is known of runs has the types that views and
figures expect, whoever wrote it. What is not named here is kept as it is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.files import decoded, file_bytes
from engine.foreign_json import JsonError, parse_json
from engine.foreign_numbers import COUNT, LARGEST, OutOfRangeError, whole
from engine.trace.cell_text import EXCEL, PLAIN
from engine.trace.csv_fields import REMEDY
from engine.trace.export import FORMAT
from engine.trace.records import COLUMN_STATES, READ_VERSIONS, REFERENCE

_MOST_BYTES = 256 << 20
_MOST_RUNS = 10_000
_MOST_LANES = 256
_LONGEST_LIST = 1 << 16
_LONGEST_TEXT = 1 << 16
_LONGEST_PIECE = 1 << 16
_TABLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_WRITTEN_ANEW = (
    "format",
    "schema_version",
    "schema_minor",
    "csv_variant",
    "runs",
    "rows",
    "columns",
    "unknown_columns",
    "pieces",
)

FieldCheck = Callable[[Any], Iterator[tuple[str, str]]]
"""Gives, for whatever is wrong in a value, its place inside and what is wrong."""


@dataclass(frozen=True, slots=True)
class SessionFile:
    """What session.json says. minor: of the schema. about: by table and column. more: what this
    program knows nothing of."""

    minor: int
    variant: str
    runs: dict[int, dict[str, Any]]
    rows: dict[str, int]
    pieces: dict[int, bytes]
    about: dict[str, dict[str, str]]
    more: dict[str, Any]


def read_session(path: Path) -> SessionFile:
    """Read and check the file. Raises TraceFileError naming the place in it."""
    session = read_json(path)
    found = session.get("schema_version")
    if not isinstance(found, int) or found not in READ_VERSIONS:
        raise TraceFileError(
            f"{path} has schema version {_shown(found)}, this program reads "
            f"{' and '.join(map(str, READ_VERSIONS))}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    for place, problem in _SESSION(session):
        raise _wrong(path, place, problem)
    runs = _runs(path, session["runs"])
    return SessionFile(
        session.get("schema_minor", 0),
        session.get("csv_variant", PLAIN),
        runs,
        session["rows"],
        _pieces(path, session["pieces"]),
        session.get("columns", {}),
        {key: value for key, value in session.items() if key not in _WRITTEN_ANEW},
    )


def read_json(path: Path) -> dict[str, Any]:
    """The file as it is, so far as it describes a trace. Raises TraceFileError."""
    if not path.exists():
        raise TraceFileError(
            f"{path.parent} is no exported trace: {path.name} is missing.",
            "Choose the folder that an export wrote.",
        )
    raw = file_bytes(path, _MOST_BYTES, TraceFileError)
    try:
        session = parse_json(decoded(raw, str(path), TraceFileError))
    except JsonError as error:
        raise TraceFileError(f"{path} is not valid JSON ({error}).", REMEDY) from error
    if not isinstance(session, dict) or session.get("format") != FORMAT:
        raise TraceFileError(
            f"{path} does not describe a trace.", "Choose the folder that an export wrote."
        )
    return session


def _wrong(path: Path, place: str, problem: str) -> TraceFileError:
    place = place if len(place) <= 120 else f"{place[:120]}…"
    return TraceFileError(f"{path}: {place} {problem}.", REMEDY)


def _not(value: Any, wanted: str) -> tuple[str, str]:
    return "", f"{_shown(value)} is not {wanted}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _runs(path: Path, runs: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    if list(runs) != [str(run_id) for run_id in range(len(runs))]:
        raise TraceFileError(f"{path}: runs are not numbered from 0.", REMEDY)
    if len(runs) > _MOST_RUNS:
        raise TraceFileError(f"{path}: there are more than {_MOST_RUNS:,} runs.", REMEDY)
    n_lanes = 0
    for run_id, facts in runs.items():
        n_lanes = n_lanes + 1 if facts.get("lane", REFERENCE) != REFERENCE else 0
        if n_lanes > _MOST_LANES:
            raise TraceFileError(
                f"{path}: runs.{run_id} is one of more than {_MOST_LANES} lanes of a comparison.",
                REMEDY,
            )
    return {int(run_id): facts for run_id, facts in runs.items()}


def _pieces(path: Path, pieces: dict[str, str]) -> dict[int, bytes]:
    try:
        return {whole(token): bytes.fromhex(piece) for token, piece in pieces.items()}
    except OutOfRangeError as error:
        raise _wrong(path, "pieces", f"has a key that is not a token id: {error}") from error
    except ValueError as error:
        raise _wrong(path, "pieces", "are not token ids with hexadecimal bytes") from error


# -- what facts have to be -------------------------------------------------------------------


def _number(least: float = -math.inf, most: float = math.inf, *, whole: bool = False) -> FieldCheck:
    def check(value: Any) -> Iterator[tuple[str, str]]:
        fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (fits and least <= value <= most):
            bounds = f" from {least:,} to {most:,}" if math.isfinite(least) else ""
            yield _not(value, f"a {'whole ' if whole else ''}number{bounds}")

    return check


def _count(least: int = 0, most: int = COUNT) -> FieldCheck:
    return _number(least, most, whole=True)


def _text(value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        yield _not(value, f"a text of at most {_LONGEST_TEXT:,} characters")


def _plain(value: Any) -> Iterator[tuple[str, str]]:
    """A number, a text, true, false or null."""
    if isinstance(value, (dict, list)):
        yield _not(value, "a number or a text")


def _one_of(*choices: str) -> FieldCheck:
    def check(value: Any) -> Iterator[tuple[str, str]]:
        if value not in choices:
            yield _not(value, f"one of {', '.join(choices)}")

    return check


def _or_none(check: FieldCheck) -> FieldCheck:
    def check_unless_none(value: Any) -> Iterator[tuple[str, str]]:
        for place, problem in check(value) if value is not None else ():
            yield place, f"{problem}, or null"

    return check_unless_none


def _list(of: FieldCheck) -> FieldCheck:
    def check(value: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(value, list) or len(value) > _LONGEST_LIST:
            yield _not(value, f"a list of at most {_LONGEST_LIST:,} entries")
            return
        for i, one in enumerate(value):
            yield from _within(str(i), of(one))

    return check


def _object(
    known: Mapping[str, FieldCheck] | None = None,
    *,
    needed: tuple[str, ...] = (),
    each: FieldCheck | None = None,
) -> FieldCheck:
    """known: checks by key, for keys that are there. each: for the values of all other keys."""

    def check(value: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(value, dict):
            yield _not(value, "an object")
            return
        for key in needed:
            if key not in value:
                yield key, "is missing"
        for key, one in value.items():
            of = (known or {}).get(key, each)
            if of is not None:
                yield from _within(key, of(one))

    return check


def _within(key: str, found: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for place, problem in found:
        yield f"{key}.{place}" if place else key, problem


_SPEC = _object(
    {
        "types": _list(_text),
        "n_max": _count(),
        "n_min": _count(),
        "p_min": _number(),
        "accept": _text,
        **dict.fromkeys(
            ("ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "suffix"),
            _object(each=_plain),
        ),
    }
)
_OPTIONS = _object(
    {
        "n_predict": _count(-1),
        "faults": _list(_text),
        "sampler": _object({"temp": _number()}),
        "spec": _SPEC,
        "n_rs_seq": _or_none(_count()),
        **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch", "parallel"), _count()),
        **dict.fromkeys(("split", "kv", "rollback", "replay", "checkpoint_device"), _text),
    }
)
_FIDELITY = _object(
    {
        "compute": _text,
        "n_tokens": _count(),
        **dict.fromkeys(("nmse", "kl", "top1"), _or_none(_number())),
    },
    needed=("compute", "n_tokens", "nmse", "kl", "top1"),
)
_TIMINGS = (
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "predicted_n",
    "predicted_ms",
    "draft_n",
    "draft_n_accepted",
)
_UNSURE = _or_none(_number())
_TOLD = _object(
    {
        **dict.fromkeys(
            ("acceptance_histogram", "num_draft_tokens_per_pos", "num_accepted_tokens_per_pos"),
            _or_none(_list(_count(0, LARGEST))),
        ),
        "acceptance_per_position": _or_none(
            _object(
                each=_list(_UNSURE),
                needed=("unconditional", "unconditional_given_drafted", "conditional"),
            )
        ),
    },
    each=_UNSURE,
)
_PARTS = _list(
    _object({"start": _count(), "stop": _count(), "why": _text}, needed=("start", "stop", "why"))
)
_REUSE_COUNTS = ("slot", "n_prompt", "n_held", "n_common", "n_reused")
_PROMPT_REUSE = _object(
    {
        **dict.fromkeys((*_REUSE_COUNTS, "seq_id", "depth"), _count()),
        **dict.fromkeys(
            ("valid_depth", "checkpoint", "state_tokens", "cell_tokens"), _or_none(_count())
        ),
        "source": _text,
        "parts": _PARTS,
        "drafters": _object(each=_count()),
        "created": _list(
            _object({"n_tokens": _count(), "state_tokens": _count(), "n_bytes": _count(0, LARGEST)})
        ),
        **dict.fromkeys(("evicted", "erased", "usable"), _list(_count())),
        "held": _list(_list(_count(0, LARGEST))),
    },
    needed=(*_REUSE_COUNTS, "seq_id", "source", "parts"),
)
_TURN = _object(
    {
        **dict.fromkeys(("conversation", "number", "start", "given"), _count()),
        **dict.fromkeys(("parent", "rewritten_at"), _or_none(_count())),
        "messages": _list(_object()),
        "answer": _or_none(_object()),
    },
    needed=("conversation", "number", "parent", "messages"),
)
_NOISE_CHECK = _object(
    {
        **dict.fromkeys(("ceiling", "share"), _number(0)),
        "batches": _list(
            _object(
                {
                    **dict.fromkeys(("seq_id", "rows", "beyond"), _count()),
                    "batches": _text,
                    "worst": _or_none(_number(0)),
                    "first": _object(
                        dict.fromkeys(("pos", "row", "width"), _count()),
                        needed=("pos", "row", "width"),
                    ),
                },
                needed=("seq_id", "rows", "beyond", "batches", "worst"),
            )
        ),
    },
    needed=("ceiling", "share", "batches"),
)
_COPY = _object(
    {
        **dict.fromkeys(
            ("round", "seq_id", "verified_in", "sequence", "made_in", "pending"), _count()
        ),
        **dict.fromkeys(("n_verified", "n_idle"), _count()),
        "source": _or_none(_count()),
        "together": _list(_count()),
        **dict.fromkeys(("nmse", "state_error"), _or_none(_number(0))),
        "again": _plain,
    },
    needed=(
        *("round", "seq_id", "verified_in", "sequence", "source", "made_in", "pending"),
        *("n_verified", "n_idle", "together", "again", "nmse", "state_error"),
    ),
)
_RUN = _object(
    {
        "source": _object({"engine": _text, "version": _text}),
        "columns": _object(each=_object(each=_one_of(*COLUMN_STATES))),
        "options": _OPTIONS,
        "stops": _list(_text),
        "told": _TOLD,
        "record": _object({"file": _text, "shape": _text}),
        "requests": _list(
            _object(
                {
                    "seq_ids": _list(_count()),
                    "told": _TOLD,
                    "record": _object(),
                    **dict.fromkeys(("engine", "place"), _text),
                }
            )
        ),
        **dict.fromkeys(("derived", "speculative_types"), _list(_text)),
        "told_timings": _list(_or_none(_object(each=_number(0), needed=_TIMINGS))),
        "fidelity": _FIDELITY,
        "banned_tokens": _list(_count()),
        "lane_against": _or_none(_count()),
        "noise_check": _NOISE_CHECK,
        "lane_copies": _list(_COPY),
        **dict.fromkeys(("lane_tolerance", "lane_margin"), _number()),
        **dict.fromkeys(("environment", "summary", "drafters"), _object()),
        "model": _or_none(_object()),
        **dict.fromkeys(("n_ctx", "n_rs_seq"), _count()),
        **dict.fromkeys(("weight_bytes", "snapshot_bytes", "memory_bytes"), _count(0, LARGEST)),
        **dict.fromkeys(
            ("lane", "lane_kind", "lane_error", "error", "compute", "device", "architecture"), _text
        ),
        "chat": _text,
        "prompt_reuse": _list(_PROMPT_REUSE),
        "turn": _TURN,
    }
)


def _piece(value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, str) or len(value) > 2 * _LONGEST_PIECE:
        yield _not(value, f"at most {_LONGEST_PIECE:,} bytes, hexadecimal")


def _rows(value: Any) -> Iterator[tuple[str, str]]:
    yield from _object(each=_count())(value)
    for name in value if isinstance(value, dict) else ():
        if not _TABLE_NAME.fullmatch(name):
            yield name, "is no name of a table"


_SESSION = _object(
    {
        "schema_minor": _count(),
        "csv_variant": _one_of(PLAIN, EXCEL),
        "runs": _object(each=_RUN),
        "rows": _rows,
        "pieces": _object(each=_piece),
        "columns": _object(each=_object(each=_text)),
    },
    needed=("runs", "rows", "pieces"),
)
