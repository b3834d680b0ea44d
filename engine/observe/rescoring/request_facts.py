"""What a run's facts tell of each of its requests: the prompt, and what was sampled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One sequence's request. prompt: its text, None where not known; messages: of a chat.
    settings: of the sampler as llama-server names them."""

    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)


_OURS = {"temp": "temperature"}
"""Names of our sampler's options that are others at llama-server."""


def asked_of(facts: Mapping[str, Any], seq_id: int) -> Asked:
    """The request of a sequence. facts: of its run, which may come from a file."""
    options = facts.get("options")
    if isinstance(options, dict) and isinstance(sampler := options.get("sampler"), dict):
        settings = {_OURS.get(str(name), str(name)): value for name, value in sampler.items()}
        return Asked(settings=settings | {"ignore_eos": options.get("ignore_eos")})
    requests = _listed(facts.get("requests"))
    if seq_id < len(requests) and isinstance(requests[seq_id], dict):
        return _asked(requests[seq_id])
    return Asked()


def _asked(request: Mapping[str, Any]) -> Asked:
    """What was sent, and what the server said it took of it."""
    prompt, messages = request.get("prompt"), _listed(request.get("messages"))
    if isinstance(prompt, str) and str(request.get("path")).endswith("/responses"):
        prompt, messages = None, [{"role": "user", "content": prompt}]
    settings: dict[str, Any] = {}
    for name in ("settings", "generation_settings"):
        if isinstance(told := request.get(name), dict):
            settings |= told
    return Asked(
        prompt if isinstance(prompt, str) else None,
        [message for message in messages if isinstance(message, dict)],
        settings,
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
