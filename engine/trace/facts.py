"""Facts of a run: what a trace stores about it next to its rows, as typed records.

They remain the JSON object of session.json, which `RunFacts` reads and writes, so that unknown keys
are kept. `problems` reports what is wrong in a file; such a fact counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from engine.foreign import Count, Size
from engine.options import RunOptions
from engine.trace.prompt_reuse import PromptReuseRecord
from engine.trace.records import ColumnState
from engine.trace.typed_json import Lenient, read_or, within, wrong

Share = Annotated[float, Meta(ge=0)]


# -- parts of the facts ------------------------------------------------------------------------


class SourceFacts(Struct, frozen=True, omit_defaults=True):
    """The source of a run. source: the engine, None in early runs of this program. record: the file
    and its kind. server: its address, and what its log says about its start."""

    engine: str | None = None
    version: str = ""
    file: str = ""
    shape: str = ""
    address: str = ""
    launch: dict[str, list[str]] = {}


class FidelityFacts(Struct, frozen=True):
    """Means over n_tokens positions: nmse and kl (nats) of the logits against f32, as in
    engine.compare.divergence; top1: share of positions with the same most probable token; max_abs:
    the largest difference of any logit. None = not finite."""

    compute: str
    n_tokens: Count
    nmse: float | None
    kl: float | None
    top1: float | None
    max_abs: float | None = None


class GateFacts(Struct, frozen=True):
    """The llama.cpp check that a lane belongs to, and its outcome (engine.compare.rollback_check).
    settings: options other than the defaults; before: the baseline's outcome, or empty."""

    scenario: str
    policy: str
    n_draft: Count
    outcome: str
    about: str
    settings: str = ""
    before: str = ""


class PositionRates(Struct, frozen=True):
    """Acceptance rates of drafted tokens by position in the draft."""

    OTHERS: ClassVar[Any] = list[float | None]
    unconditional: list[float | None]
    unconditional_given_drafted: list[float | None]
    conditional: list[float | None]


class ToldFigures(Struct, frozen=True):
    """Figures by the names of engine.trace.timings.summary; all others are numbers."""

    OTHERS: ClassVar[Any] = float | None
    acceptance_histogram: list[Size] | None = None
    num_draft_tokens_per_pos: list[Size] | None = None
    num_accepted_tokens_per_pos: list[Size] | None = None
    num_judged_tokens_per_pos: list[Size] | None = None
    acceptance_per_position: PositionRates | None = None


class ToldTimings(Struct, frozen=True):
    """A server's counters for one sequence."""

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


class RequestFacts(Struct, frozen=True):
    """A request to another engine and its outcome. settings: as sent; generation_settings: as the
    server applied them. text: of the reply, if its tokens do not give it."""

    seq_ids: list[Count] = []
    told: Told = {}
    record: dict[str, Any] = {}
    engine: str = ""
    place: str = ""
    path: Lenient[str] = ""
    text: Lenient[str] = ""
    prompt: Lenient[str | None] = None
    messages: Lenient[list[dict[str, Any]]] = []
    settings: Lenient[dict[str, Any]] = {}
    generation_settings: Lenient[dict[str, Any]] = {}
    slot: Lenient[Count | None] = None


class TurnFacts(Struct, frozen=True):
    """A turn of a conversation (engine.conversation.turns.Turn)."""

    conversation: Count
    number: Count
    parent: Count | None
    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None = None
    is_recorded: bool = False
    is_chat: bool = False
    start: Count = 0
    rewritten_at: Count | None = None


class ForkOrigin(Struct, frozen=True):
    """The run that a fork continues, and where (engine.fork). rebuilt: how its state was rebuilt.
    token: replaces seq_id's newest one. n_kept: its tokens kept of the round before, None = all."""

    parent: Count
    round: Count
    rebuilt: str = ""
    token: Count | None = None
    seq_id: Count = 0
    n_kept: Count | None = None


class WrongRow(Struct, frozen=True):
    """A row of logits in its batch."""

    pos: Count
    row: Count
    width: Count


class CheckedBatch(Struct, frozen=True):
    """A text decoded again in other batches; first: the first row above the ceiling."""

    seq_id: Count
    rows: Count
    beyond: Count
    batches: str
    worst: Share | None
    first: WrongRow | None = None


class NoiseCheckFacts(Struct, frozen=True):
    """The ceiling of a noise lane (engine.compare.lanes)."""

    ceiling: Share
    share: Share
    batches: list[CheckedBatch]


class CopyFacts(Struct, frozen=True):
    """A pass of a copied sequence (engine.compare.policy_lane.ForkLane)."""

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
    """Where a free-running lane left the reference: whether its token follows from its own logits,
    and from the reference's logits in its compute mode."""

    seq_id: int
    pos: int = 0
    follows: bool = True
    by_mode: bool = False


class LogitRowFacts(Struct, frozen=True):
    """The first wrong logits row of a sequence, and the row that it equals."""

    round: int
    seq_id: int
    row: int
    of: int | None = None


class StateOriginFacts(Struct, frozen=True):
    """The explanation of a wrong state (engine.compare.state_origin)."""

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


class BadRowFacts(Struct, frozen=True):
    """A logits row that ended a sequence. what, where: if it was not finite
    (engine.decode.failure); why: if the grammar allowed no token (engine.decode.acceptance)."""

    round: int
    seq_id: int
    pos: int
    where: str = ""
    what: str = ""
    why: str = ""


class FileChangeFacts(Struct, frozen=True):
    """A change of a model file (engine.gguf.part_file)."""

    file: str = ""
    change: str = ""
    mapped: bool = False
    round: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A sequence of a run, or a whole run (seq_id None), to which a rule applies.

    round: the first offending one, None for the run as a whole. message: one sentence. evidence:
    its numbers. suggestion: replaces the rule's. The other fields name rule and run as in the
    findings table; engine.analysis.findings.check sets them.
    """

    message: str = ""
    evidence: str = ""
    round: Count | None = None
    seq_id: Count | None = None
    suggestion: str = ""
    run_id: int = -1
    rule: str = ""
    severity: str = ""


class HeldFacts(Struct, frozen=True):
    """Memory contents of a sequence when its run failed; drafters: tokens in theirs."""

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
    """The error that ended a run (engine.decode.failure)."""

    type: str
    message: str
    place: str
    round: int
    sequences: list[HeldFacts]


@dataclass(frozen=True, slots=True)
class ChangedToken:
    """A token that the request's sampler cannot have chosen from our logits, even with noise.

    best_id: the most probable token there; best_p: its probability; p, rank: of the emitted token.
    gap: best logit minus the emitted token's; top2_gap: minus the second best. short: how much
    smaller the logits of better tokens would have to be, infinite (None in a file) if it was
    forbidden.
    """

    round: Count
    pos: Count
    token_id: Count
    kind: str
    rank: Count
    p: float
    best_id: Count
    best_p: float
    gap: float
    top2_gap: float
    short: float | None = None


@dataclass(frozen=True, slots=True)
class RescoredSequence:
    """n_tokens: emitted ones that were re-scored; n_first: those of rank 1. greedy: whether
    temperature was 0, None if its tokens could not be judged; not_judged: why.

    Tokens that are not the sampler's choice: n_near_ties: by no more than noise explains; n_lossy:
    those that a lossy rule may accept; n_changed: the others; changed: the first of them. gap: why
    not all tokens were re-scored, empty if all were.
    """

    seq_id: Annotated[int, Meta(ge=0, lt=2**16)]
    n_tokens: int = 0
    n_first: int = 0
    greedy: bool | None = None
    not_judged: str = ""
    n_near_ties: int = 0
    n_lossy: int = 0
    n_changed: int = 0
    changed: ChangedToken | None = None
    gap: str = ""


class RescoredFacts(Struct, frozen=True):
    """engine.observe.rescoring.rescore.Rescored."""

    by: str = ""
    compute: str = ""
    noise: float | None = None
    sequences: list[RescoredSequence] = []


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
    """The user's and the window's notes on a run. name: empty for a run called by its number.
    number: over all sessions, where the lanes of a comparison count as one; None for that in its
    trace. prompt: the beginning of the first one. scenario: the one that started it."""

    name: str = ""
    starred: bool = False
    deleted: bool = False
    prompt: str = ""
    number: Count | None = None
    scenario: str = ""


# -- all of them -------------------------------------------------------------------------------


class RunFacts(dict[str, Any]):
    """The facts of one run. None: unknown; list entries that cannot be read are left out.

    `stops` is set last, when all rows and figures are in place. options: as recorded, without
    checks, because they may no longer be allowed; missing ones have their defaults.
    """

    source: SourceFacts | None
    columns: dict[str, dict[str, ColumnState]] | None
    options: RunOptions | None
    stops: list[str] | None
    told: Told | None
    told_timings: list[Timings | None] | None
    record: SourceFacts | None
    requests: list[RequestFacts] | None
    derived: list[str] | None
    speculative_types: list[str] | None
    accept_rule: Lenient[str | None]
    fidelity: FidelityFacts | None
    plain_pairs: Lenient[list[tuple[float, float]] | None]
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
    fork: Lenient[ForkOrigin | None]
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
    gate: Lenient[GateFacts | None]
    gate_scripts: Lenient[list[GateFacts] | None]
    logit_rows: Lenient[list[LogitRowFacts] | None]
    state_origins: Lenient[list[StateOriginFacts] | None]
    draft_accept: Lenient[list[int] | None]
    synthetic: Lenient[bool | None]
    threads: Lenient[int | None]
    threads_chosen: Lenient[str | None]
    started: Lenient[str | None]
    library: Lenient[RunNotes | None]
    audit: Lenient[AuditFacts | None]
    failure: Lenient[FailureFacts | None]
    non_finite: Lenient[list[BadRowFacts] | None]
    grammar_errors: Lenient[list[BadRowFacts] | None]
    file_changes: Lenient[list[FileChangeFacts] | None]
    observed_findings: Lenient[list[Finding] | None]
    rescored: Lenient[RescoredFacts | None]
    attachment: Lenient[str | None]
    server: Lenient[SourceFacts | None]
    listens_at: Lenient[str | None]
    requests_left_out: Lenient[int | None]
    unknown_keys: Lenient[list[str] | None]

    def pick(self, *names: str) -> dict[str, Any]:
        """These facts as JSON values; None for missing ones."""
        return {name: self.get(name) for name in names}

    def request(self, index: int) -> RequestFacts | None:
        """One of `requests`, without reading the others."""
        one = every[index : index + 1] if isinstance(every := self.get("requests"), list) else []
        return next(iter(read_or(list[RequestFacts], one, [])), None)

    def add_to(self, name: str, *entries: Mapping[str, Any]) -> None:
        """Append entries to a list fact, which may not exist yet."""
        self.setdefault(name, []).extend(entries)


class _Fact:
    """An attribute of RunFacts that reads and writes one key."""

    def __init__(self, name: str, hint: Any) -> None:
        self._name, self._hint = name, hint

    def __get__(self, facts: RunFacts | None, _owner: type) -> Any:
        if facts is None:
            return self
        value = facts.get(self._name)
        return None if value is None else read_or(self._hint, value, None)

    def __set__(self, facts: RunFacts, value: Any) -> None:
        facts[self._name] = msgspec.to_builtins(value) if isinstance(value, Struct) else value


_HINTS = get_type_hints(RunFacts, include_extras=True)
for _name, _hint in _HINTS.items():
    setattr(RunFacts, _name, _Fact(_name, _hint))


def recorded_options(value: Any) -> RunOptions | None:
    """Options as recorded, unchecked; unreadable ones have their defaults. None: not an object."""
    options: RunOptions | None = read_or(RunOptions, value, None)
    return options


def problems(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The problems in a run's facts: the place inside and what is wrong."""
    for name, value in facts.items():
        if name in _HINTS and value is not None:
            hint = _HINTS[name]
            is_union = get_origin(hint) in (Union, UnionType)
            yield from within(name, wrong(get_args(hint)[0] if is_union else hint, value))
