"""Facts of a server in words, from its reports on itself and its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from engine.plain_text import size_text

if TYPE_CHECKING:
    from engine.observe.rounds.observed_run import ServerFacts

_MOST_SLOTS = 16


def server_name(facts: ServerFacts) -> str:
    """Name of a server in lists of models: "llama-server 127.0.0.1:8080"."""
    return f"{facts.engine} {facts.address.partition('://')[2] or facts.address}"


def known_facts(
    facts: ServerFacts, slots: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, str]:
    """Labels and texts of a server's reports; missing ones are empty."""
    props = facts.props
    data = facts.models.get("data")
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    meta = _section(first, "meta")
    path = str(props.get("model_path") or first.get("id") or "")
    n_params, size = _number(meta, "n_params"), _number(meta, "size")
    mix = str(meta.get("ftype") or props.get("model_ftype") or "")
    context = [
        f"{value:,} {word}"
        for value, word in (
            (_number(_section(props, "default_generation_settings"), "n_ctx"), "tokens per slot"),
            (_number(meta, "n_ctx_train"), "in training"),
            (_number(meta, "n_vocab"), "vocabulary"),
        )
        if value
    ]
    n_slots = _number(props, "total_slots")
    return {
        "server": f"{facts.engine} at {facts.address}",
        "build": str(props.get("build_info") or ""),
        "model": PurePath(path.replace("\\\\", "/")).name,
        "parameters": " ".join(
            part
            for part in (
                f"{n_params / 1e6:,.1f} M" if n_params else "",
                f"in {size_text(size)}" if size else "",
                mix,
            )
            if part
        ),
        "context": " · ".join(context),
        "slots": f"{n_slots:,}" if n_slots else "",
        "drafting": _drafting(slots),
    }


def slot_lines(slots: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """A line per slot: "0: generating, 12 tokens of task 3"."""
    if slots is None:
        return ["not observed: the server does not report"]
    lines = []
    for slot in slots[:_MOST_SLOTS]:
        n_decoded = None
        following = slot.get("next_token")
        if isinstance(following, list) and following and isinstance(following[0], dict):
            n_decoded = _number(following[0], "n_decoded")
        words = "idle"
        if slot.get("is_processing"):
            words = f"generating, {n_decoded or 0:,} tokens of task {slot.get('id_task', '–')}"
        lines.append(f"{slot.get('id', '–')}: {words}")
    if len(slots) > _MOST_SLOTS:
        lines.append(f"and {len(slots) - _MOST_SLOTS} more")
    return lines


def _drafting(slots: Sequence[Mapping[str, Any]] | None) -> str:
    """The drafters of the slots; /props does not contain them."""
    if slots is None:
        return ""
    types = {
        str(_section(slot, "params").get("speculative.types") or "")
        for slot in slots
        if slot.get("speculative")
    } - {""}
    named = sorted({name for text in types for name in text.split(",") if name and name != "none"})
    if named:
        return ", ".join(named)
    return "on" if any(slot.get("speculative") for slot in slots) else "off"


def _section(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = said.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(said: Mapping[str, Any], name: str) -> int | None:
    found = said.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        return None
    return found
