"""Rounds and requests of a log, and the phases of a server's iterations."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, zip_longest
from operator import ge
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from engine.foreign import LONGEST_DRAFT, OutOfRangeError, real
from engine.observe.rounds.log_prompts import LoggedPrompt
from engine.observe.rounds.log_shapes import LogTexts, lengths_of_runs
from engine.trace.timings import n_timed

UNKNOWN_TOKEN = (-1, "")
"""A token without a line in the log."""
MOST_RANKS = 8
"""Candidates of a drafter kept per position."""
_SHORTEST_RUN = 8
Counts = tuple[int, int, int, str]
_SHARE = re.compile(r"[01]\.\d{1,20}")


class LogRound(Struct, eq=False):
    """One verification. pos: position of its first token; None in the light form. drafted: number
    of tokens. draft: for drafters with a model, the candidates of each, ids and probabilities,
    proposed one first. tokens: emitted ids with text. end_us: on the server's clock, None without
    times. phases: milliseconds by phase."""

    pos: int | None
    drafted: int
    accepted: int = 0
    restored: bool = False
    drafter: str = ""
    draft: tuple[tuple[tuple[int, float], ...], ...] = ()
    tokens: list[tuple[int, str]] = []
    checkpoint_bytes: int | None = None
    end_us: int | None = None
    phases: dict[str, float] = {}
    is_complete: bool = False
    n_max: int | None = None
    """Longest draft by the server's adaptive depth, None if not stated."""
    first_n: int | None = None
    """Number of its first token within the answer, from 1."""


class LogRequest(Struct):
    """One task of a slot, both -1 if not logged. first: its first token, sampled from the prompt.
    n_processed: prompt tokens not in the cache. predicted, drafted, accepted, ratio and mean_length
    as written, rates (by draft position): the server's sums, None or empty if absent. speeds:
    milliseconds, tokens so far, tokens per second so far and over the last three seconds.
    statistics: by drafter its drafts, their tokens, accepted ones and shares by position as
    written, summed over requests up to this one, and before it. is_over: the slot is done with it;
    is_released: by a line of the log."""

    slot: int
    task: int
    n_prompt: int | None = None
    n_cached: int | None = None
    first: tuple[int, str] | None = None
    first_us: int | None = None
    rounds: list[LogRound] = []
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
    speeds: list[tuple[float | None, int, float, float | None]] = []
    statistics: dict[str, tuple[Counts, Counts | None]] = {}
    last_n: int = 0
    n_missing: int = 0
    """Tokens without lines."""
    is_over: bool = False
    is_released: bool = False
    batches: list[tuple[int, np.ndarray]] = []
    """Rounds of the light form, of which there are millions: the number of `rounds` before them,
    and int64 [n, 3] with tokens accepted and drafted and the time, -1 without."""
    is_broken: bool = False
    """An entry could not be read; later ones are ignored."""
    prompt: LoggedPrompt | None = None
    """Its prompt reuse, as far as logged."""

    def is_closed(self, index: int) -> bool:
        """Whether a round is complete with all its tokens."""
        return self.is_over or index < len(self.rounds) - 1

    @property
    def has_rows(self) -> bool:
        """Whether the log has its rounds, or its first token."""
        return bool(self.rounds or self.first)

    def on_prompt_sums(self, ms: float, n: int) -> None:
        """Set time and number of the prompt tokens processed."""
        self.prompt_ms, self.n_processed = ms, n
        if self.n_prompt is None and self.n_cached is not None:
            self.n_prompt = self.n_cached + n
        if (prompt := self.prompt) is not None:
            prompt.prompt_ms, prompt.processed = ms, n
            if prompt.n_prompt is None and prompt.cached is not None:
                prompt.n_prompt = prompt.cached + n

    def on_answer_sums(self, ms: float, n: int, speed: float | None) -> None:
        """Set time and number of generated tokens, and tokens per second."""
        self.predicted_ms, self.predicted, self.is_over = ms, n, True
        self.n_timed = n_timed(ms, n, speed)
        if self.prompt is not None:
            self.prompt.written = n

    def on_draft_sums(
        self,
        ratio: str | None,
        accepted: int | None,
        drafted: int | None,
        mean: str | None,
        rates: str | None,
    ) -> None:
        """Set the contents of the line about its drafts. Raises OutOfRangeError."""
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

    @property
    def told_shares(self) -> list[float]:
        """Acceptance by position, from one drafter's values after it and before it, if their digits
        determine it; else empty."""
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
        """Convert the batches to ordinary rounds."""
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


Tops: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""By draft position the drafter's candidates and their probabilities."""


class Slot(Struct):
    """State of a slot. candidates: by position and rank; draft: the same if they came in order.
    replay: a restore was logged and its replay has not ended. n_max: of adaptive depth, None until
    a line gives it. early: for servers that log a round after its tokens, those since the last
    round, each with number, token and time; the first n_plain precede the draft."""

    request: LogRequest
    round: LogRound | None = None
    candidates: dict[int, dict[int, tuple[int, float]]] = {}
    draft: Tops = ()
    checkpoint_bytes: int | None = None
    replay: bool = False
    n_max: int | None = None
    early: list[tuple[int, tuple[int, str], int | None]] = []
    n_plain: int = 0

    def add_tops(self, rank: int, at: int, tops: Tops) -> None:
        """Add candidates: all of a draft, or one by rank and position."""
        if not (rank or at):
            self.candidates, self.draft = {}, tops
            return
        if self.draft:
            self.candidates = {i: dict(enumerate(top)) for i, top in enumerate(self.draft)}
            self.draft = ()
        self.candidates.setdefault(at, {})[rank] = tops[0][0]

    def take_tops(self, drafted: int) -> Tops:
        """Take the candidates of a round, if known for each drafted token; they are removed."""
        known, tops = self.candidates, self.draft
        self.candidates, self.draft = {}, ()
        if tops:
            return tops[:drafted] if len(tops) >= drafted else ()
        if len(known) < drafted or None in [known.get(i, {}).get(0) for i in range(drafted)]:
            return ()
        each = [known[i] for i in range(drafted)]
        return tuple(tuple(map(top.__getitem__, sorted(top))) for top in each)


class LogClock:
    """Splits the server's iteration time into phases, shared by the slots of an iteration."""

    def __init__(self) -> None:
        self._rounds: list[LogRound] = []
        self._at: dict[str, int] = {}
        self._n_yielded = 0

    @property
    def is_at_work(self) -> bool:
        """Whether the log contains phases."""
        return bool(self._at)

    def mark(self, us: int | None, what: str) -> None:
        """An entry that starts or ends a phase."""
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


class _LineRows(ABC):
    """Lines of a block with the same meaning: integers, the last of them the time in microseconds
    or -1, int64 [n, m], by line."""

    def __init__(self, n_lines: int) -> None:
        self._names: list[str] = []
        self._rows = np.zeros((0, 5), np.int64)
        self._server = np.zeros(n_lines, np.int64)
        """By line the number of its server, from 1; 0 for none."""

    def add(
        self,
        rows: np.ndarray,
        columns: list[Any],
        is_good: np.ndarray,
        streams: tuple[list[str], np.ndarray],
    ) -> None:
        """Add lines of a shape, as for `Burst.rows`."""
        us, *columns = columns
        if not len(self._rows):
            self._rows = np.zeros((len(self._server), 5), np.int64)
        for i, column in enumerate((*columns[:4], us)):
            self._rows[rows, i] = -1 if column is None else column
        names, of = streams
        self._names += [one for one in names if one not in self._names]
        numbers = np.array([1 + self._names.index(one) for one in names])
        self._server[rows[is_good]] = numbers[of[is_good]]
        self._keep(rows, columns, is_good)

    @abstractmethod
    def _keep(self, rows: np.ndarray, columns: list[Any], is_good: np.ndarray) -> None:
        """Add further values of these lines, after the time."""

    def row(self, line: int) -> tuple[Any, ...] | None:
        """A single line: server, time and values; None if it is not among them."""
        if not self._server[line]:
            return None
        *values, us = self._rows[line].tolist()
        return self._names[self._server[line] - 1], None if us < 0 else us, *values


class LightRows(_LineRows):
    """Light-form rounds in a block: slot, task, tokens accepted and drafted."""

    def __init__(self, n_lines: int) -> None:
        super().__init__(n_lines)
        self._is_usual = np.zeros(n_lines, bool)

    def _keep(self, rows: np.ndarray, columns: list[Any], is_good: np.ndarray) -> None:
        *_, accepted, drafted = columns
        self._is_usual[rows] = is_good & (accepted <= drafted) & (drafted > 0)

    def runs(self, lines: np.ndarray) -> dict[int, int]:
        """Start and length of runs of rounds within some lines."""
        return lengths_of_runs(self._is_usual[lines], _SHORTEST_RUN)

    def by_server(self, lines: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The rows of some lines, by server."""
        server, rows = self._server[lines], self._rows[lines]
        is_one = (server == server[0]).all()
        numbers = server[:1].tolist() if is_one else sorted(set(server.tolist()))
        for number in numbers:
            mine = rows if len(numbers) == 1 else rows[server == number]
            yield self._names[number - 1], mine


class LookedAt(_LineRows):
    """Drafters' candidates in a block: slot or -1, rank, position and id; then probability and
    text."""

    def __init__(self, n_lines: int) -> None:
        super().__init__(n_lines)
        self._p = np.zeros(n_lines)
        self._texts: LogTexts | None = None

    def _keep(self, rows: np.ndarray, columns: list[Any], is_good: np.ndarray) -> None:
        *_, self._p[rows], texts = columns
        if self._texts is None:
            self._texts = texts.blank(len(self._server))
        self._texts.put(rows, texts)

    def server(self, line: int) -> str | None:
        """The server of a line; None if it is not among them."""
        number = self._server[line]
        return self._names[number - 1] if number else None

    def drop(self, line: int) -> None:
        """Remove an invalid line."""
        self._server[line] = 0

    def row(self, line: int) -> tuple[Any, ...] | None:
        """A single line."""
        found = super().row(line)
        if found is None or self._texts is None:
            return None
        name, us, slot, *values = found
        more = float(self._p[line]), self._texts[line]
        return name, us, None if slot < 0 else slot, *values, *more

    def drafts(self, lines: np.ndarray) -> dict[int, tuple[Any, ...]]:
        """Complete drafts, from first position and rank, by starting line: number of lines, server,
        whether it has times, and the arguments of `ServerState.take_candidates`."""
        server = self._server[lines]
        at = np.flatnonzero(server)
        if not len(at):
            return {}
        mine = lines[at]
        slot, rank, place, token, us = self._rows[mine].T
        goes_on = (np.diff(at) == 1) & (np.diff(server[at]) == 0) & (np.diff(slot) == 0)
        is_next = (np.diff(rank) == 1) & (np.diff(place) == 0)
        goes_on &= is_next | ((rank[1:] == 0) & (np.diff(place) == 1))
        begins = np.flatnonzero(np.concatenate([np.ones(1, bool), ~goes_on]))
        ends = np.append(begins[1:], len(at))
        is_one = (rank[begins] == 0) & (place[begins] == 0) & (place[ends - 1] < LONGEST_DRAFT)
        is_one &= np.maximum.reduceat(rank, begins) < MOST_RANKS
        pairs = list(zip(token.tolist(), np.minimum(self._p[mine], 1.0).tolist(), strict=True))
        parts = np.union1d(begins, np.flatnonzero(rank == 0))
        tops = [tuple(pairs[i:j]) for i, j in pairwise([*parts.tolist(), len(at)])]
        begins, ends = begins[is_one], ends[is_one]
        assert self._texts is not None
        texts, names = self._texts[mine], self._names
        found = zip(
            *(one.tolist() for one in (at[begins], begins, ends, server[at[begins]])),
            *(one.tolist() for one in (us[begins], slot[begins])),
            *(np.searchsorted(parts, one).tolist() for one in (begins, ends)),
            strict=True,
        )
        return {
            where: (
                end - begin,
                names[name - 1],
                time >= 0,
                (None if of < 0 else of, 0, 0, tuple(tops[i:j]), texts, begin),
            )
            for where, begin, end, name, time, of, i, j in found
        }


@lru_cache(1 << 12)
def _rate(text: str) -> float:
    return real(text.strip(), 1.0)
