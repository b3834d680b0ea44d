"""What a run is, in words: from the facts that the trace keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from app.trace_models.live_numbers import LiveNumbers
from app.trace_models.number_text import significant
from app.trace_models.observed_facts import observed_text
from app.trace_models.run_notes import notes_of, prompt_text, started_at
from engine.trace.records import NOISE, PEER_NOISE, REFERENCE
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

RUNNING = "going on"
OURS = "draftscope"


@dataclass(frozen=True, slots=True)
class ModelRuns:
    """The trace that takes the runs of a model. in_use: the model is the one that is open.

    on_disk: where its rows are, in case they are not in memory: of the runs no more than the facts
    is known then. is_earlier: an earlier session recorded them.
    """

    model: str
    store: TraceStore
    in_use: bool = False
    on_disk: Path | None = None
    is_earlier: bool = False


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run as a line of a list; None is not observed. ended: its figures do not change."""

    run: RunRef
    model: str
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
    stop: str
    marks: tuple[str, ...]
    ended: bool
    on_disk: bool


_PLAIN_LANES = (REFERENCE, NOISE, PEER_NOISE)
"""Lanes that neither draft nor roll back, whatever the comparison's options are."""


def run_names(first: RunRef, second: RunRef) -> tuple[str, str]:
    """Two runs in words: what the user calls them, else their numbers; those name runs of one trace
    only, so that of others the model is named too, and the time where it is the same one."""
    names = [notes_of(run.facts).name for run in (first, second)]
    origins = ["", ""]
    if first.store is not second.store:
        origins = [f" of {run_origin(run.facts)}" for run in (first, second)]
        if origins[0] == origins[1]:
            begun = [started_at(run.facts) for run in (first, second)]
            origins = [
                of if when is None else f"{of}, {when:%b %d %H:%M:%S}"
                for of, when in zip(origins, begun, strict=True)
            ]
    one, two = (
        name or f"{run}{of}" for name, run, of in zip(names, (first, second), origins, strict=True)
    )
    return one, two


def run_origin(facts: dict[str, Any]) -> str:
    """Where a run comes from, in a few words: its server, else its engine and model."""
    model = facts.get("model")
    name = str(model.get("name", "")) if isinstance(model, dict) else ""
    server = facts.get("server")
    if isinstance(server, dict) and (address := server.get("address")):
        return str(address).partition("://")[2] or str(address)
    return name.removesuffix(".gguf") if is_ours(facts) and name else engine_name(facts)


def run_row(run: RunRef, model: str = "", *, on_disk: bool = False) -> RunRow:
    """Read a run's facts and figures as they are now; on_disk: the rows are not in memory."""
    facts = run.facts
    stops = facts.get("stops")  # before the figures: if the run had ended, they are final
    notes = notes_of(facts)
    numbers = (
        LiveNumbers.told(facts.get("summary"))
        if on_disk
        else LiveNumbers.read(run.store, run.run_id)
    )
    options, spec = _section(facts, "options"), _section(_section(facts, "options"), "spec")
    drafts = bool(spec.get("types")) and facts.get("lane_kind") not in _PLAIN_LANES
    n_max = spec.get("n_max")
    return RunRow(
        run,
        model,
        notes.name,
        notes.starred,
        notes.prompt or ("" if on_disk else prompt_text(run)),
        run_title(facts),
        _drafter(facts, spec),
        str(options.get("rollback", "")) if drafts else "",
        n_max if drafts and isinstance(n_max, int) else None,
        started_at(facts),
        numbers.tokens,
        numbers.acceptance,
        None if "lane" in facts else numbers.tokens_per_second,
        _stop(stops, str(facts.get("lane_error") or facts.get("error", ""))),
        run_marks(facts),
        stops is not None,
        on_disk,
    )


def _drafter(facts: dict[str, Any], spec: dict[str, Any]) -> str:
    """The lane of a comparison, else what drafts; of another engine its name too."""
    if facts.get("lane") or not is_ours(facts):
        return run_title(facts)
    return ", ".join(map(str, spec.get("types", ()))) or "no drafter"


def _section(facts: dict[str, Any], name: str) -> dict[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def engine_name(facts: dict[str, Any]) -> str:
    """The engine that decoded a run; traces of early versions do not say and are our own."""
    source = facts.get("source")
    return str(source.get("engine", OURS)) if isinstance(source, dict) else OURS


def is_ours(facts: dict[str, Any]) -> bool:
    """Whether this program decoded a run itself."""
    return engine_name(facts) == OURS


def run_title(facts: dict[str, Any]) -> str:
    """The lane of a comparison, else drafters and rollback policy: "draft-mtp · planes"; of
    another engine its name, and its drafters or the file that tells of it."""
    if lane := facts.get("lane"):
        return f"lane {lane}"
    if not is_ours(facts):
        types = facts.get("speculative_types")
        named = types if isinstance(types, list) else []
        drafters = ", ".join(str(one) for one in named if one != "none")
        known = drafters or facts.get("record", {}).get("file", "")
        return " · ".join(filter(None, (engine_name(facts), known)))
    options = facts.get("options", {})
    types = options.get("spec", {}).get("types", ())
    if not types:
        return "no drafter"
    return f"{', '.join(types)} · {options.get('rollback', '')}"


def run_marks(facts: dict[str, Any]) -> tuple[str, ...]:
    """Why the output is not the model's: "invalid: synthetic acceptance", "fault …"."""
    faults = facts.get("options", {}).get("faults", ())
    marks = [f"fault {name}" for name in faults]
    if facts.get("synthetic"):
        marks.insert(0, "invalid: synthetic acceptance")
    return tuple(marks)


def effective(facts: dict[str, Any]) -> str:
    """The parameters in effect, a line for each kind of them; of another engine's run what was
    observed."""
    options = facts.get("options", {})
    if not options:
        return "" if is_ours(facts) else observed_text(facts)
    sampler, spec = options.get("sampler", {}), options.get("spec", {})
    memory = [
        f"n_ctx {facts.get('n_ctx', 0):,}",
        f"n_rs_seq {facts.get('n_rs_seq', 0)}",
        f"n_batch {options.get('n_batch', 0):,}",
        f"n_ubatch {options.get('n_ubatch', 0):,}",
        f"parallel {options.get('parallel', 1)}",
        f"split {options.get('split', '')}",
        f"KV {options.get('kv', '')}",
        f"compute {facts.get('compute', '')}",
    ]
    if options.get("batch_invariant"):
        memory.append("batch-invariant")
    lines = ["memory: " + ", ".join(memory)]
    if spec.get("types"):
        drafting = [", ".join(spec["types"])]
        drafting += _known(spec, {name: name for name in ("n_max", "n_min", "p_min", "accept")})
        also = {"rollback": "rollback", "replay": "replay", "checkpoint_device": "checkpoints on"}
        lines.append("drafting: " + ", ".join((*drafting, *_known(options, also))))
    if sampler.get("temp", 0) > 0:
        names = ("temp", "top_k", "typical_p", "top_p", "min_p", "seed")
        lines.append("sampler: " + ", ".join(_known(sampler, {name: name for name in names})))
    elif sampler:
        lines.append("sampler: greedy")
    if chat := facts.get("chat"):
        lines.append(f"chat template: {chat}")
    if fidelity := facts.get("fidelity"):
        lines.append(f"fidelity: {fidelity_text(fidelity)}")
    return "\n".join(lines)


def _known(values: dict[str, Any], names: dict[str, str]) -> list[str]:
    """One text for each of names (key -> label) that values holds: label and value."""
    return [f"{text} {values[name]}" for name, text in names.items() if name in values]


def fidelity_text(found: dict[str, Any]) -> str:
    """The fields of a Fidelity: "int8 against f32 over 131 tokens: NMSE …, KL … nats, …"."""
    return (
        f"{found['compute']} against f32 over {found['n_tokens']} tokens: "
        f"NMSE {significant(found['nmse'])}, KL {significant(found['kl'])} nats, "
        f"same top-1 {significant(found['top1'] and 100 * found['top1'])} %"
    )


def _stop(stops: list[str] | None, error: str) -> str:
    if error:
        return error
    if stops is None:
        return RUNNING
    kinds = list(dict.fromkeys(stop or RUNNING for stop in stops))
    return ", ".join(kinds)
