"""Facts of a run: what its trace keeps of it beside the rows, each with its type.

They stay the JSON object that session.json has, so that what this program does not know is kept
and written back; the attributes of `RunFacts` read and write that object. A trace may come from
anyone: `problems` says what is wrong in a file, and what cannot be read nevertheless is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np
from msgspec import Meta, Struct

from engine.foreign_numbers import COUNT, Count, Size
from engine.options import RunOptions
from engine.trace.prompt_reuse import PromptReuseRecord
from engine.trace.records import ColumnState

_T = TypeVar("_T")
LONGEST = 1 << 16
"""Characters of a text, entries of a list."""

Share = Annotated[float, Meta(ge=0)]
Lenient = Annotated[_T, Meta(extra={"lenient": True})]
"""No error in a file: of what cannot be read nothing is known."""


# -- parts of the facts ------------------------------------------------------------------------


class SourceFacts(Struct, frozen=True):
    """What made a run. engine: early versions do not name their own."""

    engine: str | None = None
    version: str = ""


class FidelityFacts(Struct, frozen=True):
    """engine.compare.fidelity.Fidelity; None is not finite."""

    compute: str
    n_tokens: Count
    nmse: float | None
    kl: float | None
    top1: float | None


class PositionRates(Struct, frozen=True):
    """Shares of drafted tokens that were accepted, by position in the draft."""

    OTHERS: ClassVar[Any] = list[float | None]
    unconditional: list[float | None]
    unconditional_given_drafted: list[float | None]
    conditional: list[float | None]


class ToldFigures(Struct, frozen=True):
    """Figures by name as engine.trace.timings.summary has them; all others are numbers."""

    OTHERS: ClassVar[Any] = float | None
    acceptance_histogram: list[Size] | None = None
    num_draft_tokens_per_pos: list[Size] | None = None
    num_accepted_tokens_per_pos: list[Size] | None = None
    acceptance_per_position: PositionRates | None = None


class ToldTimings(Struct, frozen=True):
    """Counters of a server for one sequence."""

    OTHERS: ClassVar[Any] = Share
    cache_n: Share
    prompt_n: Share
    prompt_ms: Share
    predicted_n: Share
    predicted_ms: Share
    draft_n: Share
    draft_n_accepted: Share


Told = Annotated[dict[str, Any], Meta(extra={"form": ToldFigures})]
Timings = Annotated[dict[str, Any], Meta(extra={"form": ToldTimings})]


class RecordFacts(Struct, frozen=True):
    """The file that a run was read from, and whose records it has."""

    file: str = ""
    shape: str = ""


class RequestFacts(Struct, frozen=True):
    """A request to another engine: what was sent, and what came of it. settings: as sent,
    generation_settings: as the server took them."""

    seq_ids: list[Count] = []
    told: Told = {}
    record: dict[str, Any] = {}
    engine: str = ""
    place: str = ""
    path: Lenient[str] = ""
    prompt: Lenient[str | None] = None
    messages: Lenient[list[dict[str, Any]]] = []
    settings: Lenient[dict[str, Any]] = {}
    generation_settings: Lenient[dict[str, Any]] = {}


class ServerFacts(Struct, frozen=True):
    """A server that was observed."""

    address: str = ""


class TurnFacts(Struct, frozen=True):
    """A turn of a conversation, see engine.conversation.turns.Turn."""

    conversation: Count
    number: Count
    parent: Count | None
    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None = None
    is_recorded: bool = False
    is_chat: bool = False
    start: Count = 0
    rewritten_at: Count | None = None
    given: Count = 0


class WrongRow(Struct, frozen=True):
    """A row of logits in its batch."""

    pos: Count
    row: Count
    width: Count


class CheckedBatch(Struct, frozen=True):
    """A text decoded afresh in other batches; first: the first row beyond the ceiling."""

    seq_id: Count
    rows: Count
    beyond: Count
    batches: str
    worst: Share | None
    first: WrongRow | None = None


class NoiseCheckFacts(Struct, frozen=True):
    """The ceiling of a noise lane, see engine.compare.noise_check."""

    ceiling: Share
    share: Share
    batches: list[CheckedBatch]


class CopyFacts(Struct, frozen=True):
    """A pass of a copied sequence, see engine.compare.fork_lane."""

    round: Count
    seq_id: Count
    verified_in: Count
    sequence: Count
    source: Count | None
    made_in: Count
    pending: Count
    n_verified: Count
    n_idle: Count
    together: list[Count]
    again: Any
    nmse: Share | None
    state_error: Share | None


class ForkFacts(Struct, frozen=True):
    """Where a free lane left the reference: whether its token follows from its logits, and from
    the reference's logits in its compute mode."""

    seq_id: int
    pos: int = 0
    follows: bool = True
    by_mode: bool = False


class LogitRowFacts(Struct, frozen=True):
    """The first wrong row of logits of a sequence, and the row that it is of."""

    round: int
    seq_id: int
    row: int
    of: int | None = None


class StateOriginFacts(Struct, frozen=True):
    """What explains a wrong state, see engine.compare.state_origin."""

    round: int
    seq_id: int
    pos: int
    layer: int
    name: str
    is_window: bool
    kind: str
    number: int
    holds: list[Any]
    rows: list[Any] | None = None
    is_prompt: bool = False


class NonFiniteFacts(Struct, frozen=True):
    """A row of logits that was not finite, see engine.decode.failure."""

    round: int
    seq_id: int
    pos: int
    where: str
    what: str


class GrammarErrorFacts(Struct, frozen=True):
    """Why a grammar ended a sequence, see engine.decode.grammar_limits."""

    round: int
    seq_id: int
    pos: int
    why: str = ""


class FileChangeFacts(Struct, frozen=True):
    """What has become of a model file, see engine.gguf.model_files."""

    file: str = ""
    change: str = ""
    mapped: bool = False
    round: int | None = None
    after: int | None = None


class ObservedFinding(Struct, frozen=True):
    """What was found while another engine was observed."""

    rule: str
    message: str = ""
    evidence: str = ""
    seq_id: Count | None = None
    round: Count | None = None


class HeldFacts(Struct, frozen=True):
    """What memory held of a sequence when its run failed; drafters: tokens in theirs."""

    seq_id: int
    n_tokens: int
    attention_pos: int
    cells: int
    duplicates: int
    drafters: dict[str, Any]
    recurrent_pos: int | None = None
    pending: int | None = None
    n_rs_seq: int | None = None
    valid_depth: int | None = None


class FailureFacts(Struct, frozen=True):
    """The error that ended a run, see engine.decode.failure."""

    type: str
    message: str
    place: str
    round: int
    sequences: list[HeldFacts]


class ChangedTokenFacts(Struct, frozen=True):
    """engine.observe.rescoring.rescore.ChangedToken."""

    round: Count
    pos: Count
    token_id: Count
    rank: Count
    best_id: Count
    p: float
    best_p: float
    gap: float
    top2_gap: float
    kind: str = ""


class RescoredSequenceFacts(Struct, frozen=True):
    """engine.observe.rescoring.rescore.RescoredSequence."""

    seq_id: Annotated[int, Meta(ge=0, lt=2**16)]
    n_tokens: int | None = None
    n_changed: int | None = None
    greedy: bool | None = None
    changed: ChangedTokenFacts | None = None


class RescoredFacts(Struct, frozen=True):
    """engine.observe.rescoring.rescore.Rescored."""

    by: str = ""
    compute: str = ""
    noise: float | None = None
    sequences: list[RescoredSequenceFacts] = []


class AuditFacts(Struct, frozen=True):
    """What the audit of a run found, see engine.audit.run_audit; wrong, sampler, drafts: one
    object for each, which the rules of audits read."""

    verdict: str = ""
    wrong: list[dict[str, Any]] = []
    sampler: list[dict[str, Any]] = []
    drafts: list[dict[str, Any]] = []
    n_tokens: int | None = None
    n_text: int | None = None
    n_drawn: int | None = None
    n_rounds_sampled: int | None = None
    not_judged: list[str] = []
    seconds: float | None = None


class RunNotes(Struct, frozen=True):
    """What the user and the window keep of a run. name: empty for a run that is called by its
    number. prompt: the beginning of the first one. prompt_key: see engine.analysis.baseline."""

    name: str = ""
    starred: bool = False
    deleted: bool = False
    prompt: str = ""
    prompt_key: str = ""


# -- all of them -------------------------------------------------------------------------------


class RunFacts(dict[str, Any]):
    """The facts of one run. None: not known; of a list, entries that cannot be read are left out.

    `stops` comes last, when all rows and figures are in place. options: as recorded and not
    checked, since what ran may not be allowed any more; those that a trace lacks have their
    defaults.
    """

    source: SourceFacts | None
    columns: dict[str, dict[str, ColumnState]] | None
    options: RunOptions | None
    stops: list[str] | None
    told: Told | None
    told_timings: list[Timings | None] | None
    record: RecordFacts | None
    requests: list[RequestFacts] | None
    derived: list[str] | None
    speculative_types: list[str] | None
    fidelity: FidelityFacts | None
    banned_tokens: list[Count] | None
    environment: dict[str, Any] | None
    summary: dict[str, Any] | None
    drafters: dict[str, Any] | None
    model: dict[str, Any] | None
    n_ctx: Count | None
    n_rs_seq: Count | None
    weight_bytes: Size | None
    snapshot_bytes: Size | None
    memory_bytes: Size | None
    compute: str | None
    device: str | None
    architecture: str | None
    chat: str | None
    error: str | None
    prompt_reuse: list[PromptReuseRecord] | None
    turn: TurnFacts | None
    lane: str | None
    lane_kind: str | None
    lane_against: Count | None
    lane_error: str | None
    lane_tolerance: float | None
    lane_margin: float | None
    lane_copies: list[CopyFacts] | None
    noise_check: NoiseCheckFacts | None
    lane_about: Lenient[str | None]
    lane_free: Lenient[bool | None]
    lane_forks: Lenient[list[ForkFacts] | None]
    lane_unread: Lenient[str | None]
    logit_rows: Lenient[list[LogitRowFacts] | None]
    state_origins: Lenient[list[StateOriginFacts] | None]
    draft_accept: Lenient[list[int] | None]
    synthetic: Lenient[bool | None]
    threads: Lenient[int | None]
    started: Lenient[str | None]
    library: Lenient[RunNotes | None]
    audit: Lenient[AuditFacts | None]
    failure: Lenient[FailureFacts | None]
    non_finite: Lenient[list[NonFiniteFacts] | None]
    grammar_errors: Lenient[list[GrammarErrorFacts] | None]
    file_changes: Lenient[list[FileChangeFacts] | None]
    observed_findings: Lenient[list[ObservedFinding] | None]
    rescored: Lenient[RescoredFacts | None]
    attachment: Lenient[str | None]
    server: Lenient[ServerFacts | None]
    listens_at: Lenient[str | None]
    requests_left_out: Lenient[int | None]
    unknown_keys: Lenient[list[str] | None]

    def pick(self, *names: str) -> dict[str, Any]:
        """These facts as they are in JSON; None for one that is not there."""
        return {name: self.get(name) for name in names}

    def add_to(self, name: str, *entries: Mapping[str, Any]) -> None:
        """Add entries to a fact that is a list, which may not be there yet."""
        self.setdefault(name, []).extend(entries)


class _Fact:
    """An attribute of RunFacts: reads and writes one key of it."""

    def __init__(self, name: str, hint: Any) -> None:
        self._name, self._hint = name, hint

    def __get__(self, facts: RunFacts | None, _owner: type) -> Any:
        if facts is None:
            return self
        value = facts.get(self._name)
        return None if value is None else _read_or(self._hint, value, None)

    def __set__(self, facts: RunFacts, value: Any) -> None:
        facts[self._name] = msgspec.to_builtins(value) if isinstance(value, Struct) else value


_HINTS = get_type_hints(RunFacts, include_extras=True)
for _name, _hint in _HINTS.items():
    setattr(RunFacts, _name, _Fact(_name, _hint))


def strict_json(value: Any) -> Any:
    """A value for strict JSON, which has no NaN and no infinity: they become None, tuples lists."""
    if isinstance(value, dict):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


# -- reading -----------------------------------------------------------------------------------


def options_of(value: Any) -> RunOptions | None:
    """Options as a file has them, not checked; those that are missing or cannot be read have their
    defaults. None for what is no object."""
    options: RunOptions | None = _read_or(RunOptions, value, None)
    return options


def _read_or(hint: Any, value: Any, default: Any) -> Any:
    try:
        return _read(hint, value)
    except (msgspec.ValidationError, OverflowError):
        return default


def _read(hint: Any, value: Any) -> Any:
    """A value of a type, but for entries of lists and fields with a default that cannot be read.
    Raises msgspec.ValidationError."""
    hint = _without_extra(hint)
    if not hasattr(hint, "__post_init__"):  # a record without checks of its own
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError:
            value = strict_json(value)
    if get_origin(hint) in (Union, UnionType) and value is not None:
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is list and isinstance(value, list):
        entries = (_read_or(get_args(hint)[0], one, MISSING) for one in value)
        return [one for one in entries if one is not MISSING]
    if _is_record(hint) and isinstance(value, dict):
        return _read_record(hint, value)
    return msgspec.convert(value, hint)


def _read_record(kind: type, value: dict[str, Any]) -> Any:
    """A Struct, or a dataclass without its own checks, field by field."""
    known = {}
    for name, hint, default in _fields(kind):
        found = _read_or(hint, value[name], MISSING) if name in value else MISSING
        if found is MISSING:
            if default is None:
                raise msgspec.ValidationError(f"{name} is missing")
            found = default()
        known[name] = found
    if issubclass(kind, Struct):
        return kind(**known)
    record = object.__new__(kind)
    for name, found in known.items():
        object.__setattr__(record, name, found)
    return record


def _without_extra(hint: Any) -> Any:
    """A type without what only this module reads of it."""
    extra = get_origin(hint) is Annotated and get_args(hint)[1].extra
    return _without_extra(get_args(hint)[0]) if extra else hint


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (issubclass(hint, Struct) or is_dataclass(hint))


@cache
def _fields(kind: type) -> list[tuple[str, Any, Callable[[], Any] | None]]:
    """Names and types of the fields of a record, and what makes their defaults."""
    hints = get_type_hints(kind, include_extras=True)
    found: Sequence[Any] = (
        msgspec.structs.fields(kind) if issubclass(kind, Struct) else fields(cast(Any, kind))
    )
    return [(one.name, hints[one.name], _default_of(one)) for one in found]


def _default_of(one: Any) -> Callable[[], Any] | None:
    absent = (MISSING, msgspec.NODEFAULT)
    if one.default_factory not in absent:
        return one.default_factory
    return None if one.default in absent else lambda: one.default


# -- checking ----------------------------------------------------------------------------------


def problems(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """For whatever is wrong in the facts of a run, its place inside and what is wrong."""
    for name, value in facts.items():
        if name in _HINTS and value is not None:
            hint = _HINTS[name]
            is_union = get_origin(hint) in (Union, UnionType)
            yield from within(name, wrong(get_args(hint)[0] if is_union else hint, value))


def wrong(hint: Any, value: Any) -> Iterator[tuple[str, str]]:
    """Where and how a value is not of a type."""
    limits: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *limits = get_args(hint)
        extra = limits[0].extra or {}
        if "lenient" in extra:
            return
        hint = extra.get("form", hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is not None:
            for place, problem in wrong(args[0], value):
                yield place, f"{problem}, or null"
    elif hint in (int, float):
        yield from _wrong_number(hint, value, *limits)
    elif origin is Literal:
        if value not in args:
            yield "", not_a(value, f"one of {', '.join(args)}")
    elif hint is bool:
        if not isinstance(value, bool):
            yield "", not_a(value, "true or false")
    elif origin in (list, tuple):
        yield from _wrong_entries(args, value)
    elif origin is dict or _is_record(hint):
        yield from _wrong_object(hint, value)
    elif hint is not Any and (not isinstance(value, str) or len(value) > LONGEST):
        yield "", not_a(value, f"a text of at most {LONGEST:,} characters")


def _wrong_number(kind: type, value: Any, *limits: Any) -> Iterator[tuple[str, str]]:
    least, most = (-1, COUNT) if kind is int else (-math.inf, math.inf)
    if limits:
        least, most = limits[0].ge, math.inf if limits[0].le is None else limits[0].le
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not (fits and least <= value <= most):
        upto = f" to {most:,}" if math.isfinite(most) else ""
        bounds = f" from {least:,}{upto}" if math.isfinite(least) else ""
        yield "", not_a(value, f"a {'whole ' if kind is int else ''}number{bounds}")


def _wrong_entries(of: tuple[Any, ...], value: Any) -> Iterator[tuple[str, str]]:
    """of: the type of each entry, or of all of them."""
    if not isinstance(value, list) or len(value) > LONGEST:
        yield "", not_a(value, f"a list of at most {LONGEST:,} entries")
        return
    is_pair = len(of) == 2 and of[1] is not ...
    if is_pair and len(value) != 2:
        yield "", not_a(value, "a list of two")
        return
    for i, one in enumerate(value):
        yield from within(str(i), wrong(of[i] if is_pair else of[0], one))


def _wrong_object(kind: Any, value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield "", not_a(value, "an object")
        return
    known: dict[str, Any] = {}
    others = getattr(kind, "OTHERS", Any)
    if get_origin(kind) is dict:
        others = get_args(kind)[1]
    else:
        for name, hint, default in _fields(kind):
            known[name] = hint
            if default is None and name not in value:
                yield name, "is missing"
    for name, one in value.items():
        yield from within(name, wrong(known.get(name, others), one))


def within(name: str, found: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """What is wrong in a part of this name."""
    for place, problem in found:
        yield f"{name}.{place}" if place else name, problem


def not_a(value: Any, wanted: str) -> str:
    """What is wrong with a value, and what it has to be."""
    return f"{shown(value)} is not {wanted}"


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
