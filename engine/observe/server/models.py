"""Models that a server lists: the engine that serves them, and which one is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ServerModelError
from engine.observe.rounds.stream import server_words

_MOST_MODELS = 10_000
OPENAI = "openai"
"""A server of the OpenAI API of an unknown engine."""
_OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "library": "ollama",
    "ollama": "ollama",
    "organization_owner": "lm-studio",
    "tensorrt_llm": "tensorrt-llm",
    "llama-swap": "llama-swap",
}
VERSIONS = {
    "vllm": "/version",
    "sglang": "/get_server_info",
    "tensorrt-llm": "/version",
    "ollama": "/api/version",
}
"""Endpoints that report a server's version."""
_SHOWN = 8


def listed_models(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The named entries of a /v1/models response."""
    data = reply.get("data")
    models = data[:_MOST_MODELS] if isinstance(data, list) else []
    return [one for one in models if isinstance(one, dict) and isinstance(one.get("id"), str)]


def other_engine(listed: Sequence[dict[str, Any]]) -> str | None:
    """The engine of a server by the owner of its models; None if it may be llama-server."""
    owner = listed[0].get("owned_by") if listed else None
    if not isinstance(owner, str) or owner in ("", "llamacpp"):
        return None
    return _OWNERS.get(owner, OPENAI)


def model_state(entry: dict[str, Any]) -> str:
    """Whether a router has loaded a model: loaded, loading, unloaded; empty if it does not say."""
    status = entry.get("status")
    value = status.get("value") if isinstance(status, dict) else status
    return value if isinstance(value, str) else ""


def chosen_model(
    address: str, listed: Sequence[dict[str, Any]], name: str
) -> tuple[dict[str, Any], str]:
    """The entry of the chosen model, and a sentence about the choice if there was one.

    name: as typed; if empty, the only model, or the only loaded one. Raises ServerModelError, which
    names the models, if that leaves several or none.
    """
    shown = ", ".join(map(_shown, listed[:_SHOWN]))
    more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
    remedy = "Name one with --model-name, or in the dialog Connect to Server of the window."
    if not listed:
        raise ServerModelError(f"{address} has no model.", "Let the server load one.")
    if name:
        named = [(one, one.get("aliases")) for one in listed]
        aliases = [a for a, b in named if name in (a["id"], *(b if isinstance(b, list) else ()))]
        if aliases:
            return aliases[0], ""
        raise ServerModelError(f"{address} has no model {name[:80]}; it has {shown}{more}.", remedy)
    loaded = [one for one in listed if model_state(one) in ("loaded", "sleeping")]
    own = [one for one in listed if not one.get("parent")]  # an adapter names its model
    for found, why in ((listed, ""), (loaded, "the only loaded one"), (own, "")):
        if len(found) == 1:
            about = f"of {len(listed)} models, {_name(found[0])} is used, {why}" if why else ""
            return found[0], about
    raise ServerModelError(f"{address} has {len(listed):,} models: {shown}{more}.", remedy)


def _name(entry: dict[str, Any]) -> str:
    return server_words(entry["id"], 80)


def _shown(entry: dict[str, Any]) -> str:
    state = model_state(entry)
    return f"{_name(entry)} ({server_words(state, 20)})" if state else _name(entry)
