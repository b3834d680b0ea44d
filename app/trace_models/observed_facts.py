"""What is known of a run of another engine, in words: where it was observed, what was asked, and
which columns were reported. Facts may come from a file: every one may be of another type."""

from __future__ import annotations

from typing import Any

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


def observed_text(facts: dict[str, Any]) -> str:
    """A line for each kind of fact."""
    source, server = _section(facts, "source"), _section(facts, "server")
    engine = " ".join(str(source[name]) for name in ("engine", "version") if source.get(name))
    way = _WAYS.get(str(facts.get("attachment")), "")
    where = str(server.get("address") or _section(facts, "record").get("file") or "")
    lines = [
        f"source: {', '.join(part for part in (engine, way, where) if part)}",
        f"model: {_section(facts, 'model').get('name') or 'not observed'}",
    ]
    if listens_at := facts.get("listens_at"):
        lines.append(f"its clients use: {listens_at}")
    drafters = [one for one in _list(facts, "speculative_types") if one != "none"]
    if drafters:
        lines.append(f"drafting: {', '.join(map(str, drafters))}")
    requests = [one for one in _list(facts, "requests") if isinstance(one, dict)]
    if len(requests) > 1:
        lines.append(f"requests: {len(requests):,}, the first of which:")
    if requests:
        lines += _request(requests[0])
    lines += _columns(_section(facts, "columns"))
    if unread := ", ".join(map(str, _list(facts, "unknown_keys"))):
        more = "…" if len(unread) > _LONGEST else ""
        lines.append(f"kept, but not used: {unread[:_LONGEST]}{more}")
    if rescored := _section(facts, "rescored"):
        lines.append(f"re-scored by {rescored.get('by')}, compute {rescored.get('compute')}")
    return "\n".join(lines)


def _request(request: dict[str, Any]) -> list[str]:
    settings = _section(request, "settings")
    names = ("n_predict", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    asked = [f"{name} {settings[name]}" for name in names if name in settings]
    said = [str(request.get("path") or ""), *asked]
    lines = [f"request: {', '.join(filter(None, said))}"] if any(said) else []
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        more = "…" if len(prompt) > _LONGEST else ""
        lines.append(f"prompt: {prompt[:_LONGEST]}{more}")
    return lines


def _columns(tables: dict[str, Any]) -> list[str]:
    """The columns by how they are known, and what is not: columns of which nothing is said have no
    values."""
    by_state: dict[str, list[str]] = {}
    for columns in tables.values():
        for name, state in columns.items() if isinstance(columns, dict) else ():
            by_state.setdefault(str(state), []).append(str(name))
    lines = [
        f"{word}: {', '.join(dict.fromkeys(by_state[state]))}"
        for state, word in _STATES.items()
        if state in by_state
    ]
    untold = [
        what
        for what, table, name in _LOOKED_FOR
        if _section(tables, table).get(name) not in _STATES
    ]
    return [*lines, f"not observed: {', '.join(untold)}"] if tables and untold else lines


def _section(facts: dict[str, Any], name: str) -> dict[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _list(facts: dict[str, Any], name: str) -> list[Any]:
    found = facts.get(name)
    return found if isinstance(found, list) else []
