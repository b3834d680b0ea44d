"""Sums that a server keeps over all requests: the text of /metrics, and how far it moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile

import numpy as np

from engine.foreign import LARGEST, is_real
from engine.trace.records import MISSING
from engine.trace.run_ref import RunColumns
from engine.trace.store import TraceStore

_EXACT = 1e6  # beyond, llama-server prints six digits of it
MOST_TEXT = 2**20
"""Longest text of /metrics that is read, characters."""

LONGEST_LINE = 4096
"""Of such a text, characters: the time of its parser grows with the square of it."""

DRAFTS = "spec_decode_num_drafts_total"
DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
PREDICTED = "tokens_predicted_total"
PROMPT = "prompt_tokens_total"
NAMES = {
    DRAFTS: "drafts",
    DRAFTED: "drafted tokens",
    ACCEPTED: "accepted tokens",
    PREDICTED: "emitted tokens",
    PROMPT: "prompt tokens",
}
"""Counters that can be compared with what is recorded, as users call them."""
COUNTED = {
    DRAFTS: "num_spec_steps",
    DRAFTED: "draft_n",
    ACCEPTED: "draft_n_accepted",
    PREDICTED: "predicted_n",
    PROMPT: "prompt_n",
}
"""Their names in `engine.trace.timings.summary`."""
_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_OTHERS = {
    "vllm:": {
        **{name: name for name in (DRAFTS, DRAFTED, ACCEPTED, PROMPT, _POSITION)},
        "generation_tokens_total": PREDICTED,
        "num_requests_running": "requests_processing",
        "num_requests_waiting": "requests_deferred",
    },
    "sglang:": {
        PROMPT: PROMPT,
        "generation_tokens_total": PREDICTED,
        "num_running_reqs": "requests_processing",
        "num_queue_reqs": "requests_deferred",
    },
}
"""Other engines' names, with the prefix that each has, of what llama-server counts too."""


@dataclass(frozen=True, slots=True)
class Counters:
    """One reply of /metrics. values: by llama-server's names without their prefix, sums over all
    labels; only numbers that are finite and not negative. per_position: accepted tokens by place
    in the draft."""

    values: Mapping[str, float] = field(default_factory=dict)
    per_position: tuple[float, ...] = ()

    @property
    def busy(self) -> int:
        """Requests that the server is working at or that wait."""
        return int(
            self.values.get("requests_processing", 0) + self.values.get("requests_deferred", 0)
        )


def read_counters(text: str) -> Counters:
    """What a text of /metrics says. Raises ValueError for one that is not in Prometheus's format,
    or too long."""
    from prometheus_client.parser import text_string_to_metric_families

    if len(text) > MOST_TEXT or longest_line(text) > LONGEST_LINE:
        raise ValueError("too long")
    values: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix, colon, rest = sample.name.partition(":")
            known = _OTHERS.get(prefix + colon)
            name = rest if known is None else known.get(rest, "")
            is_known = name and (known is not None or prefix == "llamacpp")
            if not is_known or not is_real(sample.value, LARGEST):
                continue
            value, place = float(sample.value), sample.labels.get("position", "")
            if name != _POSITION:
                values[name] = min(values.get(name, 0.0) + value, LARGEST)
            elif place.isascii() and place.isdigit() and len(place) < 5:
                positions[int(place)] = positions.get(int(place), 0.0) + value
    places = takewhile(positions.__contains__, count())
    return Counters(values, tuple(map(positions.__getitem__, places)))


def longest_line(text: str) -> int:
    """Characters of the longest line of a text."""
    return max(map(len, text.split("\n")))


@dataclass(frozen=True, slots=True)
class Movement:
    """How far counters went from one reply to a later one.

    moved: by name. slack: by how much a movement may be off, because large values are printed
    with six digits; 0 where they are exact. restarted: a counter fell, so a new server began, and
    nothing else is known.
    """

    moved: Mapping[str, float] = field(default_factory=dict)
    slack: Mapping[str, float] = field(default_factory=dict)
    per_position: tuple[float, ...] = ()
    restarted: bool = False

    def count(self, name: str) -> int | None:
        """How far one moved, None where the server does not count it."""
        moved = self.moved.get(name)
        return None if moved is None else round(moved)

    def differs(self, name: str, counted: float) -> bool:
        """Whether a count made here contradicts the server's; never where it keeps none."""
        moved = self.moved.get(name)
        return moved is not None and abs(moved - counted) > self.slack.get(name, 0.0) + 1e-6


def movement(before: Counters, after: Counters) -> Movement:
    """What was counted between two replies."""
    totals = [name for name in after.values if name.endswith("_total")]
    if any(after.values[name] < before.values.get(name, 0.0) for name in totals):
        return Movement(restarted=True)
    moved = {name: after.values[name] - before.values.get(name, 0.0) for name in totals}
    slack = {
        name: _rounding(before.values.get(name, 0.0)) + _rounding(after.values[name])
        for name in totals
    }
    earlier = before.per_position + (0.0,) * len(after.per_position)
    places = tuple(b - a for a, b in zip(earlier, after.per_position, strict=False))
    return Movement(moved, slack, places)


def counted(trace: TraceStore, run_id: int) -> dict[str, int]:
    """What was recorded of a run, by the names of the server's counters. A row that is
    several rounds counts as several drafts."""
    rounds = RunColumns(trace, "rounds", run_id)
    drafted, merged = rounds["num_draft_tokens"], rounds["n_merged"]
    return {
        DRAFTS: int(np.maximum(merged, 1)[drafted > 0].sum()),
        DRAFTED: int(np.maximum(drafted, 0).sum()),
        ACCEPTED: int(np.maximum(rounds["num_accepted_draft_tokens"], 0).sum()),
        PREDICTED: int(np.maximum(rounds["num_emitted"], 0).sum()),
        PROMPT: int(np.maximum(rounds["verify_width"], 0)[drafted == MISSING].sum()),
    }


def differences(moved: Movement, counts: Mapping[str, int]) -> list[str]:
    """Where counts made here contradict the server's: "accepted tokens 43, here 42"."""
    return [
        f"{NAMES[name]} {moved.moved[name]:.0f}, here {count}"
        for name, count in counts.items()
        if moved.differs(name, count)
    ]


def _rounding(value: float) -> float:
    """Half a unit of the last digit that is printed of a value."""
    return 0.0 if value < _EXACT else 0.5 * 10.0 ** (math.floor(math.log10(value)) - 5)
