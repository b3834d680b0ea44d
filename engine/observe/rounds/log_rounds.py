"""Rounds and requests that a log tells of, and the phases of a server's iterations."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from operator import ge

import numpy as np

from engine.foreign import LONGEST_DRAFT, OutOfRangeError, real
from engine.observe.rounds.log_prompts import LoggedPrompt
from engine.trace.timings import n_timed

UNKNOWN_TOKEN = (-1, "")
"""A token whose line the log does not have."""
Counts = tuple[int, int, int, str]
_SHARE = re.compile(r"[01]\.\d{1,20}")


@dataclass(slots=True, eq=False)
class LogRound:
    """One verification. pos: position of its first token; None in the light form. drafted: number
    of tokens. draft: of those of a drafter with a model, the candidates of each, ids and
    probabilities, the proposed one first. tokens: emitted ids with their
    text. end_us: on the server's clock, None without times. phases: milliseconds by phase."""

    pos: int | None
    drafted: int
    accepted: int = 0
    restored: bool = False
    drafter: str = ""
    draft: tuple[tuple[tuple[int, float], ...], ...] = ()
    tokens: list[tuple[int, str]] = field(default_factory=list)
    checkpoint_bytes: int | None = None
    end_us: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    is_complete: bool = False
    n_max: int | None = None
    """Longest draft by the server's rule of adaptive depth, None as long as it says nothing."""
    first_n: int | None = None
    """Number of its first token among those of the answer, from 1."""


@dataclass(slots=True)
class LogRequest:
    """One task of a slot, both -1 where the log does not say. first: its first token, sampled from
    the prompt. n_processed: tokens of the prompt that were not in the cache. predicted, drafted,
    accepted, ratio and mean_length as written, rates (by position in the draft): the server's own
    sums, None or empty where not given. speeds: time in milliseconds, tokens so far, tokens per
    second so far and of the last three seconds. statistics: by drafter its drafts, their tokens,
    those accepted and the shares by position as written, of the requests before and this one
    together, and the same before it. is_over: the slot is done with it; is_released: a line says
    so."""

    slot: int
    task: int
    n_prompt: int | None = None
    n_cached: int | None = None
    first: tuple[int, str] | None = None
    first_us: int | None = None
    rounds: list[LogRound] = field(default_factory=list)
    prompt_ms: float | None = None
    predicted_ms: float | None = None
    n_timed: int | None = None
    predicted: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    n_processed: int | None = None
    ratio: str = ""
    mean_length: str = ""
    rates: list[float] | None = None
    speeds: list[tuple[float | None, int, float, float | None]] = field(default_factory=list)
    statistics: dict[str, tuple[Counts, Counts | None]] = field(default_factory=dict)
    last_n: int = 0
    n_missing: int = 0
    """Tokens whose lines are missing."""
    is_over: bool = False
    is_released: bool = False
    batches: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """Rounds of the light form, of which there are millions: how many of `rounds` are before them,
    and int64 [n, 3] with tokens accepted and drafted and the time, -1 without."""
    is_broken: bool = False
    """Some entry of it cannot be read: nothing after that is."""
    prompt: LoggedPrompt | None = None
    """What its prompt found in the slot, as far as logged."""

    def is_closed(self, index: int) -> bool:
        """Whether a round is complete with all its tokens."""
        return self.is_over or index < len(self.rounds) - 1

    @property
    def has_rows(self) -> bool:
        """Whether the log has rounds of it, or its first token."""
        return bool(self.rounds or self.first)

    def on_prompt_sums(self, ms: float, n: int) -> bool:
        """Time and number of tokens of the prompt that were processed."""
        self.prompt_ms, self.n_processed = ms, n
        if self.n_prompt is None and self.n_cached is not None:
            self.n_prompt = self.n_cached + n
        return True

    def on_answer_sums(self, ms: float, n: int, speed: float | None) -> bool:
        """Time and number of tokens of the answer, and tokens per second."""
        self.predicted_ms, self.predicted, self.is_over = ms, n, True
        self.n_timed = n_timed(ms, n, speed)
        return True

    def on_draft_sums(
        self,
        ratio: str | None,
        accepted: int | None,
        drafted: int | None,
        mean: str | None,
        rates: str | None,
    ) -> bool:
        """What the line about its drafts says. Raises OutOfRangeError."""
        if accepted is not None and drafted is not None and accepted > drafted:
            raise OutOfRangeError(f"{accepted} is more than {drafted:,}")
        parts = [] if rates is None else rates.split(",")
        if len(parts) > LONGEST_DRAFT:
            raise OutOfRangeError(f"{len(parts):,} positions are more than {LONGEST_DRAFT:,}")
        values = [_rate(one) for one in parts if one.strip()]
        if ratio is not None:
            self.ratio, self.accepted, self.drafted = ratio, accepted, drafted
        self.mean_length = self.mean_length if mean is None else mean
        self.rates = self.rates if rates is None else values
        return True

    @property
    def told_shares(self) -> list[float]:
        """Shares of its drafts by position, from those of one drafter after it and before it, where
        their digits leave no doubt; empty else."""
        if len(self.statistics) != 1:
            return []
        ((now, before),) = self.statistics.values()
        (n, _, k, said), (m, _, j, was) = now, before or (0, 0, 0, "")
        parts = (
            [float(one) for one in text.split(",") if _SHARE.fullmatch(one.strip())]
            for text in (said, was)
        )
        counts = [round(a * n) - round(b * m) for a, b in zip_longest(*parts, fillvalue=0.0)]
        is_sure = sum(counts) == k - j and all(map(ge, [n - m, *counts], [*counts, 0]))
        return [one / (n - m) for one in counts] if is_sure and n > m else []

    def unfold(self) -> None:
        """Make the batches rounds like others."""
        for at, batch in reversed(self.batches):
            self.rounds[at:at] = [
                LogRound(None, n, accepted, end_us=None if us < 0 else us, is_complete=True)
                for accepted, n, us in batch.tolist()
            ]
        self.batches = []

    @property
    def ids(self) -> list[int]:
        """All emitted ids, in order."""
        first = [self.first[0]] if self.first else []
        return first + [token for one in self.rounds for token, _ in one.tokens]


class LogClock:
    """Splits the time of the server's iterations into phases, shared by the slots in one."""

    def __init__(self) -> None:
        self._rounds: list[LogRound] = []
        self._at: dict[str, int] = {}
        self._n_yielded = 0

    @property
    def is_at_work(self) -> bool:
        """Whether the log tells of phases."""
        return bool(self._at)

    def mark(self, us: int | None, what: str) -> None:
        """An entry that begins or ends a phase."""
        if us is None:
            return
        if what == "yielded":
            if "verify" in self._at:
                self._n_yielded += 1
                self._at["verified" if self._n_yielded == 1 else "kept"] = us
        elif what == "update":
            self._rounds, self._at, self._n_yielded = [], {}, 0
        elif what == "draft":
            self._at.setdefault(what, us)
        elif what == "verify":
            self._at[what], self._n_yielded = us, 0
        else:
            self._at[what] = us

    def joins(self, one: LogRound | None) -> None:
        """A round is verified, or replayed, in this iteration."""
        if one is not None:
            self._rounds.append(one)

    def ends(self, one: LogRound, us: int | None) -> None:
        """A round's verification or replay is complete."""
        at, n = self._at, len(self._rounds)
        if us is None or not n or "verified" not in at:
            return
        spans = {
            "verify": ("verify", "verified"),
            "draft": ("draft", "drafted"),
            "save": ("drafted", "saved"),
        }
        if one.phases:  # the replay
            spans = {"replay": ("verify", "verified")}
        for phase, (begin, end) in spans.items():
            if begin in at and end in at and at[begin] <= at[end]:
                one.phases[phase] = (at[end] - at[begin]) / 1e3 / n
        kept = at.get("kept", at["verified"])
        one.phases["draft"] = one.phases.get("draft", 0.0) + max(kept - at["verified"], 0) / 1e3 / n
        one.phases["sample"] = one.phases.get("sample", 0.0) + max(us - kept, 0) / 1e3 / n


@lru_cache(1 << 12)
def _rate(text: str) -> float:
    return real(text.strip(), 1.0)
