"""Server counters: the text of /metrics, and their change between two replies."""

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

_EXACT = 1e6  # llama-server prints larger values with six digits
MOST_TEXT = 2**20
"""Longest text of /metrics that is read, characters."""

LONGEST_LINE = 4096
"""Longest line of such a text, characters: the parser's time is quadratic in it."""

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
"""Counters that can be compared with recordings, by their user-visible names."""
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
"""Equivalent counters of other engines, with each engine's prefix."""


@dataclass(frozen=True, slots=True)
class Counters:
    """One reply of /metrics. values: by llama-server's names without prefix, summed over labels;
    only finite non-negative numbers. per_position: accepted tokens by draft position."""

    values: Mapping[str, float] = field(default_factory=dict)
    per_position: tuple[float, ...] = ()

    @property
    def busy(self) -> int:
        """Running and waiting requests."""
        return int(
            self.values.get("requests_processing", 0) + self.values.get("requests_deferred", 0)
        )


def read_counters(text: str) -> Counters:
    """Parse a text of /metrics. Raises ValueError if it is not in Prometheus's format, or too
    long."""
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
    """Length of the longest line of a text, characters."""
    return max(map(len, text.split("\n")))


@dataclass(frozen=True, slots=True)
class Movement:
    """Change of counters from one reply to a later one.

    moved: by name. slack: possible error, because large values are printed with six digits; 0 if
    exact. restarted: a counter fell, so the server was restarted, and nothing else is known.
    """

    moved: Mapping[str, float] = field(default_factory=dict)
    slack: Mapping[str, float] = field(default_factory=dict)
    per_position: tuple[float, ...] = ()
    restarted: bool = False

    def count(self, name: str) -> int | None:
        """Change of one counter, None if the server does not have it."""
        moved = self.moved.get(name)
        return None if moved is None else round(moved)

    def differs(self, name: str, counted: float) -> bool:
        """Whether a count made here contradicts the server's; never without one."""
        moved = self.moved.get(name)
        return moved is not None and abs(moved - counted) > self.slack.get(name, 0.0) + 1e-6


def movement(before: Counters, after: Counters) -> Movement:
    """Change of the counters between two replies."""
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
    """Recorded counts of a run, by the names of the server's counters. A row that sums several
    rounds counts as several drafts."""
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
    """Half a unit of the last printed digit."""
    return 0.0 if value < _EXACT else 0.5 * 10.0 ** (math.floor(math.log10(value)) - 5)
