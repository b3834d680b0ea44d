"""What a run's facts tell of each of its requests: the prompt, and what was sampled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.trace.facts import RequestFacts, RunFacts


@dataclass(frozen=True, slots=True)
class Asked:
    """One sequence's request. prompt: its text, None where not known; messages: of a chat.
    settings: of the sampler as llama-server names them."""

    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)


_OURS = {"temp": "temperature"}
"""Names of our sampler's options that are others at llama-server."""


def asked_of(facts: RunFacts, seq_id: int) -> Asked:
    """The request of a sequence. facts: of its run, which may come from a file."""
    if (options := facts.options) is not None:
        sampler = asdict(options.sampler)
        settings = {_OURS.get(name, name): value for name, value in sampler.items()}
        return Asked(settings=settings | {"ignore_eos": options.ignore_eos})
    requests = facts.requests or []
    return _asked(requests[seq_id]) if seq_id < len(requests) else Asked()


def _asked(request: RequestFacts) -> Asked:
    """What was sent, and what the server said it took of it."""
    prompt, messages = request.prompt, request.messages
    if prompt is not None and request.path.endswith("/responses"):
        prompt, messages = None, [{"role": "user", "content": prompt}]
    return Asked(prompt, messages, request.settings | request.generation_settings)
