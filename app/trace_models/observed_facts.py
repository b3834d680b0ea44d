"""What is known of a run of another engine, in words: where it was observed, what was asked, and
which columns were reported."""

from __future__ import annotations

from collections.abc import Mapping

from engine.trace.facts import RequestFacts, RunFacts, SourceFacts

_WAYS = {
    "ask": "asked by this window",
    "proxy": "watched between its clients and the server",
    "log": "read from the server's log",
    "light-log": "read from the server's log, counts only",
    "record": "read from a file",
}
_STATES = {"observed": "reported", "derived": "derived"}
_LOOKED_FOR = (
    ("rollback path", "rounds", "rollback_path"),
    ("phase times", "rounds", "verify_ms"),
    ("checkpoint bytes", "rounds", "checkpoint_bytes"),
    ("attention cells", "rounds", "kv_cells_used"),
    ("token ids", "tokens", "token_id"),
    ("target probabilities", "tokens", "target_p"),
    ("draft probabilities", "tokens", "draft_p"),
    ("snapshot slots", "memory", "state"),
)
"""What a reader of a run looks for, and the column that has it."""
_LONGEST = 200


def observed_text(facts: RunFacts) -> str:
    """A line for each kind of fact."""
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
    if len(requests) > 1:
        lines.append(f"requests: {len(requests):,}, the first of which:")
    if requests:
        lines += _request(requests[0])
    lines += _columns(facts.columns or {})
    if unread := ", ".join(facts.unknown_keys or ()):
        more = "…" if len(unread) > _LONGEST else ""
        lines.append(f"kept, but not used: {unread[:_LONGEST]}{more}")
    if rescored := facts.rescored:
        lines.append(f"re-scored by {rescored.by}, compute {rescored.compute}")
    return "\n".join(lines)


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


def _columns(tables: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The columns by how they are known, and what is not: columns of which nothing is said have no
    values."""
    by_state: dict[str, list[str]] = {}
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
