"""Facts of a run in words; for another engine's run also how it was observed, what was requested,
and which columns were reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from app.trace_models.run_notes import notes_of, number_of, prompt_text, run_name, started_at
from app.trace_models.shown_text import significant
from engine.option_fields import options_in
from engine.options import RunOptions
from engine.trace.facts import FidelityFacts, RequestFacts, RunFacts, SourceFacts
from engine.trace.records import NOISE, PEER_NOISE, REFERENCE
from engine.trace.run_ref import RunColumns, RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance_of, timings_of, with_told

_PATH_NAMES = {"restore_depth": "restore (depth > n_rs_seq)"}


@dataclass(frozen=True, slots=True)
class LiveNumbers:
    """Figures of a run; None = not observed. tokens_per_step: 1 + accepted / steps. path: of the
    last round with a rollback. seconds: of its rounds, including prompts, without pauses. That and
    tokens_per_second are None for lanes, whose rounds are timed without the shared drafting."""

    rounds: int = 0
    tokens: int | None = 0
    acceptance: float | None = None
    tokens_per_second: float | None = None
    tokens_per_step: float | None = None
    path: str | None = None
    seconds: float | None = None

    @classmethod
    def read(cls, store: TraceStore, run_id: int) -> LiveNumbers:
        rows = RunColumns(store, "rounds", run_id)
        figures = with_told({**acceptance_of(rows), **timings_of(rows)}, store, run_id)
        reported = cls.told(figures)
        n = len(store.rounds)
        of_run = store.rounds.column("run_id", 0, n) == run_id
        rounds = store.rounds.column("round", 0, n)[of_run]
        if store.runs[run_id].lane is not None:
            reported = replace(reported, tokens_per_second=None, seconds=None)
        return replace(
            reported,
            rounds=int(rounds[-1]) + 1 if len(rounds) else 0,
            path=_last_path(store, of_run),
        )

    @classmethod
    def told(cls, summary: Any) -> LiveNumbers:
        """The figures of a summary (engine.trace.timings); from a file only numbers count."""
        found = summary if isinstance(summary, dict) else {}
        known = {k: v for k, v in found.items() if isinstance(v, int | float)}
        tokens, ms = known.get("predicted_n"), known.get("predicted_ms")
        return cls(
            seconds=(ms + known.get("prompt_ms", 0.0)) / 1e3 if ms else None,
            tokens=None if tokens is None else int(tokens),
            acceptance=known.get("draft_acceptance_rate"),
            tokens_per_second=known.get("predicted_per_second") or None,
            tokens_per_step=known.get("mean_acceptance_length"),
        )


def _last_path(store: TraceStore, of_run: np.ndarray) -> str | None:
    codes = store.rounds.column("rollback_path", 0, len(of_run))[of_run]
    used = codes[(codes != store.text_pool.find("none")) & (codes != 0)]
    if not len(used):
        return None
    name = store.text_pool.text(int(used[-1]))
    return _PATH_NAMES.get(name, name)


RUNNING = "running"
OURS = "draftscope"


@dataclass(frozen=True, slots=True)
class ModelRuns:
    """The trace of a model's runs. in_use: the model is open.

    is_earlier: recorded by an earlier session. interrupted: runs that were active when their window
    ended; the folder does not say so yet.
    """

    model: str
    store: TraceStore
    in_use: bool = False
    is_earlier: bool = False
    interrupted: tuple[RunRef, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run as a line of a list; None = not observed. ended: its figures are final."""

    run: RunRef
    model: str
    number: int
    name: str
    starred: bool
    prompt: str
    title: str
    drafter: str
    policy: str
    n_max: int | None
    started: datetime | None
    tokens: int | None
    acceptance: float | None
    tokens_per_second: float | None
    seconds: float | None
    stop: str
    marks: tuple[str, ...]
    ended: bool
    on_disk: bool


_PLAIN_LANES = (REFERENCE, NOISE, PEER_NOISE)
"""Lanes that neither draft nor roll back, whatever the comparison's options."""


def run_names(first: RunRef, second: RunRef) -> tuple[str, str]:
    """Two runs in words: the user's names, else their numbers; across traces with the model, and
    the time if that is the same."""
    names = [notes_of(run.facts).name for run in (first, second)]
    origins = ["", ""]
    if first.store is not second.store:
        origins = [f" of {run_origin(run.facts)}" for run in (first, second)]
        if origins[0] == origins[1]:
            starts = [started_at(run.facts) for run in (first, second)]
            origins = [
                of if when is None else f"{of}, {when:%b %d %H:%M:%S}"
                for of, when in zip(origins, starts, strict=True)
            ]
    one, two = (
        name or f"{run_name(run)}{of}"
        for name, run, of in zip(names, (first, second), origins, strict=True)
    )
    return one, two


def comparison_label(lanes: tuple[RunRef, ...]) -> str:
    """Lanes of one comparison, in words."""
    return f"run {number_of(lanes[0])}, {len(lanes)} lanes"


def run_origin(facts: RunFacts) -> str:
    """The source of a run, in a few words: its server, else its engine and model."""
    name = str((facts.model or {}).get("name", ""))
    if facts.server and (address := facts.server.address):
        return address.partition("://")[2] or address
    return name.removesuffix(".gguf") if is_ours(facts) and name else engine_name(facts)


def run_row(run: RunRef, model: str = "") -> RunRow:
    """A run's facts and figures at present."""
    facts, on_disk = run.facts, run.store.rows_in is not None
    stops = facts.stops  # before the figures: if the run had ended, they are final
    notes = notes_of(facts)
    numbers = (
        LiveNumbers.told(facts.summary) if on_disk else LiveNumbers.read(run.store, run.run_id)
    )
    options = facts.options
    if options and (not options.spec.types or facts.lane_kind in _PLAIN_LANES):
        options = None  # it drafts nothing
    return RunRow(
        run,
        model,
        number_of(run),
        notes.name,
        notes.starred,
        notes.prompt or ("" if on_disk else prompt_text(run)),
        run_title(facts),
        _drafter(run),
        options.rollback if options else "",
        options.spec.n_max if options else None,
        started_at(facts),
        numbers.tokens,
        numbers.acceptance,
        *((None, None) if facts.lane is not None else (numbers.tokens_per_second, numbers.seconds)),
        _stop(stops, facts.lane_error or facts.error or ""),
        run_marks(facts),
        stops is not None,
        on_disk,
    )


def _drafter(run: RunRef) -> str:
    """The lane of a comparison, the changes of a fork, else the drafters; for another engine also
    its name."""
    facts, fork = run.facts, run.facts.fork
    if facts.lane or not is_ours(facts):
        return run_title(facts)
    drafters = ", ".join(facts.options.spec.types if facts.options else ()) or "no drafter"
    if fork is None:
        return drafters
    known = fork.parent in run.store.runs
    changes = other_options(run.sibling(fork.parent).facts.options, facts.options) if known else []
    changes += [] if fork.token is None else ["another token"]
    return f"round {fork.round}" + (f": {', '.join(changes)}" if changes else f", {drafters}")


def other_options(before: RunOptions | None, after: RunOptions | None) -> list[str]:
    """Options of `after` that differ from `before`: "n_max 6"."""
    if before is None or after is None:
        return []
    found = []
    for one in options_in(type(after)):
        value = one.value(after)
        if value != one.value(before):
            row = one.option.row
            name = (row.short or row.label) if row else one.field
            found.append(f"{name} {_option_text(value)}")
    return found


def _option_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def engine_name(facts: RunFacts) -> str:
    """The engine of a run; early traces do not name it and are our own."""
    engine = facts.source.engine if facts.source else None
    return OURS if engine is None else engine


def untold_by(facts: RunFacts, what: str) -> str:
    """A sentence on what a run's engine does not report."""
    return f"{engine_name(facts) or 'The engine'} does not report {what}."


def is_ours(facts: RunFacts) -> bool:
    return engine_name(facts) == OURS


def has_no_client(facts: RunFacts) -> bool:
    """Whether it waits, or waited, for clients and none has sent a request."""
    return bool(facts.listens_at) and not facts.requests


def run_title(facts: RunFacts) -> str:
    """The lane of a comparison, else drafters and rollback policy: "draft-mtp · planes"; for
    another engine its name, its drafters and the source file; for a fork also its origin."""
    if lane := facts.lane:
        return f"lane {lane}"
    if not is_ours(facts):
        drafters = ", ".join(one for one in facts.speculative_types or () if one != "none")
        file = facts.record.file if facts.record else ""
        return " · ".join(filter(None, (engine_name(facts), drafters, file)))
    options = facts.options
    how = "no drafter"
    if options is not None and options.spec.types:
        how = f"{', '.join(options.spec.types)} · {options.rollback}"
    fork = facts.fork
    return f"fork at round {fork.round} · {how}" if fork else how


def run_marks(facts: RunFacts) -> tuple[str, ...]:
    """Why the output is not the model's: "invalid: synthetic acceptance", "fault …"."""
    marks = [f"fault {name}" for name in (facts.options.faults if facts.options else ())]
    if facts.synthetic:
        marks.insert(0, "invalid: synthetic acceptance")
    return tuple(marks)


def effective(facts: RunFacts, run: RunRef | None = None) -> str:
    """The effective parameters, one line per kind; for another engine's run what was observed, also
    by the rows of `run`."""
    options = facts.options
    if options is None:
        return "" if is_ours(facts) else observed_text(facts, run)
    sampler, spec = options.sampler, options.spec
    memory = [
        f"n_ctx {facts.n_ctx or 0:,}",
        f"n_rs_seq {facts.n_rs_seq or 0}",
        f"n_batch {options.n_batch:,}",
        f"n_ubatch {options.n_ubatch:,}",
        f"parallel {options.parallel}",
        f"split {options.split}",
        f"KV {options.kv}",
        f"compute {facts.compute or ''}",
    ]
    if options.batch_invariant:
        memory.append("batch-invariant")
    lines = ["memory: " + ", ".join(memory)]
    if spec.types:
        drafting = [", ".join(spec.types)]
        drafting += _each(spec, "n_max", "n_min", "p_min", "accept")
        drafting += _each(spec, "adapt") if spec.adapt != "none" else []
        drafting += _each(options, "rollback", "replay")
        lines.append(f"drafting: {', '.join(drafting)}, checkpoints on {options.checkpoint_device}")
    if sampler.temp > 0:
        named = _each(sampler, "temp", "top_k", "typical_p", "top_p", "min_p", "seed")
        lines.append(f"sampler: {', '.join(named)}")
    else:
        lines.append("sampler: greedy")
    if chat := facts.chat:
        lines.append(f"chat template: {chat}")
    if fidelity := facts.fidelity:
        lines.append(f"fidelity: {fidelity_text(fidelity)}")
    return "\n".join(lines)


def _each(options: Any, *names: str) -> list[str]:
    """Name and value of each of these options."""
    return [f"{name} {getattr(options, name)}" for name in names]


def fidelity_text(found: FidelityFacts) -> str:
    """The fields: "int8 against f32 over 131 tokens: NMSE …, KL … nats, …"."""
    return (
        f"{found.compute} against f32 over {found.n_tokens} tokens: "
        f"NMSE {significant(found.nmse)}, KL {significant(found.kl)} nats, "
        f"same top-1 {significant(found.top1 and 100 * found.top1)} %"
    )


def _stop(stops: list[str] | None, error: str) -> str:
    if error:
        return error
    if stops is None:
        return RUNNING
    kinds = list(dict.fromkeys(stop or RUNNING for stop in stops))
    return ", ".join(kinds)


_WAYS = {
    "ask": "requested by this window",
    "proxy": "recorded between its clients and the server",
    "log": "read from the server's log",
    "light-log": "read from the server's log, counts only",
    "record": "read from a file",
}
_STATES = {"observed": "reported", "derived": "derived"}
_LOOKED_FOR = (
    ("rollback path", "rounds", "rollback_path"),
    ("phase times", "rounds", "verify_ms"),
    ("checkpoint bytes", "rounds", "checkpoint_bytes"),
    ("KV cells", "rounds", "kv_cells_used"),
    ("token ids", "tokens", "token_id"),
    ("target probabilities", "tokens", "target_p"),
    ("draft probabilities", "tokens", "draft_p"),
    ("snapshot slots", "memory", "state"),
)
"""Facts that readers look for, and their columns."""
_LONGEST = 200


def observed_text(facts: RunFacts, run: RunRef | None = None) -> str:
    """A line per kind of fact. run: its rows show what else was observed."""
    source = facts.source or SourceFacts()
    engine = " ".join(filter(None, (source.engine, source.version)))
    way = _WAYS.get(facts.attachment or "", "")
    where = facts.server.address if facts.server else ""
    where = where or (facts.record.file if facts.record else "")
    lines = [
        f"source: {', '.join(part for part in (engine, way, where) if part)}",
        f"model: {(facts.model or {}).get('name') or 'not observed'}",
    ]
    if listens_at := facts.listens_at:
        lines.append(f"its clients use: {listens_at}")
    drafters = [one for one in facts.speculative_types or () if one != "none"]
    if drafters:
        lines.append(f"drafting: {', '.join(drafters)}")
    requests = facts.requests or []
    of_first = _request(requests[0]) if requests else []
    if len(requests) > 1:
        lines.append(f"requests: {len(requests):,}{', the first of which:' if of_first else ''}")
    lines += of_first
    if figures := ", ".join(counts_of(requests)):
        lines.append(f"of its drafts: {figures}")
    lines += _columns(facts.columns or {}, run)
    if unread := ", ".join(facts.unknown_keys or ()):
        more = "…" if len(unread) > _LONGEST else ""
        lines.append(f"kept, but not used: {unread[:_LONGEST]}{more}")
    if rescored := facts.rescored:
        lines.append(f"re-scored by {rescored.by}, compute {rescored.compute}")
    return "\n".join(lines)


def counts_of(requests: Sequence[RequestFacts]) -> Iterator[str]:
    """The counts of requests that have any, otherwise the range of their rates."""
    of_server = "draft_n_accepted", "draft_n"
    of_record = "num_accepted_draft_tokens", "num_draft_tokens"
    pairs = [
        [one.told.get(name) for name in (of_server if "draft_n" in one.told else of_record)]
        for one in requests
    ]
    sums = [(n, drafted) for n, drafted in pairs if n is not None]
    if sums:
        accepted = sum(n for n, _ in sums)
        known = [drafted for _, drafted in sums if drafted is not None]
        of = f"of {sum(known):,} drafted" if len(known) == len(sums) else "drafted tokens"
        where = f" in {len(sums):,} of {len(requests):,}" if len(sums) < len(requests) else ""
        yield f"{accepted:,} {of} accepted{where}"
        return
    names = {
        "mean_acceptance_length": "mean acceptance length",
        "draft_acceptance_rate": "acceptance rate",
    }
    for name, words in names.items():
        values = [v for one in requests if (v := one.told.get(name)) is not None]
        if values:
            least, most = f"{min(values):.3g}", f"{max(values):.3g}"
            yield f"{words} {least}" + (f" to {most}" if most != least else "")


def _request(request: RequestFacts) -> list[str]:
    settings = request.settings
    names = ("n_predict", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    asked = [f"{name} {settings[name]}" for name in names if name in settings]
    said = [request.path, *asked]
    lines = [f"request: {', '.join(filter(None, said))}"] if any(said) else []
    prompt = request.prompt
    if prompt is not None:
        more = "…" if len(prompt) > _LONGEST else ""
        lines.append(f"prompt: {prompt[:_LONGEST]}{more}")
    return lines


def _columns(tables: Mapping[str, Mapping[str, str]], run: RunRef | None) -> list[str]:
    """Columns by how they are known, and the missing ones. The rows decide for a column without a
    state, and after the end of the run also for one declared observed."""
    by_state: dict[str, list[str]] = {}
    for _, table, name in _LOOKED_FOR if tables else ():
        known = tables.get(table, {})
        if run is None or (name in known and (known[name] != "observed" or not run.ended)):
            continue
        is_seen = RunColumns(run.store, table, run.run_id).has_values(name)
        tables = {**tables, table: {**known, name: "observed" if is_seen else "absent"}}
    for columns in tables.values():
        for name, state in columns.items():
            by_state.setdefault(state, []).append(name)
    lines = [
        f"{word}: {', '.join(dict.fromkeys(by_state[state]))}"
        for state, word in _STATES.items()
        if state in by_state
    ]
    untold = [
        what for what, table, name in _LOOKED_FOR if tables.get(table, {}).get(name) not in _STATES
    ]
    return [*lines, f"not observed: {', '.join(untold)}"] if tables and untold else lines


def counted_since(store: TraceStore, first_run: int) -> tuple[int, int] | None:
    """Drafted and accepted tokens of the runs from this one on, from rows or replies; None if
    unknown."""
    every = (run_id for run_id in list(store.runs) if run_id >= first_run)
    told = (with_told(timings_of(RunColumns(store, "rounds", i)), store, i) for i in every)
    known = [one for one in told if one.get("draft_n") is not None]
    if not known:
        return None
    return sum(one["draft_n"] for one in known), sum(one["draft_n_accepted"] or 0 for one in known)
