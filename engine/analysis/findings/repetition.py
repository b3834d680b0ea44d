"""The rule for texts that have fallen into a loop, where every drafter is right about nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.analysis.findings.rule import WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed
from engine.trace.records import EMITTED_KINDS, MISSING

_LONGEST = 32
"""Tokens of the longest n-gram that is looked for."""
_LEAST_TOKENS, _LEAST_TIMES, _LEAST_ROUNDS = 64, 4, 8
"""Less than that may be a table, a banner or a list of zeros."""
_BLANK = -1
"""Stands for every token of white space."""


class _Loop(NamedTuple):
    """Tokens first .. stop - 1 repeat the `period` tokens before them; blank: all white space."""

    first: int
    stop: int
    period: int
    blank: bool = False


def _repeats(run: ExaminedRun) -> Iterator[RuleHit]:
    if not run.drafts:
        return
    tokens = run.tokens
    emitted = tokens.is_text("kind", *EMITTED_KINDS)
    for seq, rows in tokens.by_sequence(emitted):
        ids, numbers = _identities(run, rows), tokens["round"][rows]
        loop = _first_loop(ids, np.isin(ids, list(_blanks(run, ids))))
        if loop is None:
            continue
        start, last = int(numbers[loop.first]), int(numbers[loop.stop - 1])
        if last - start + 1 < _LEAST_ROUNDS:
            continue
        what = "white space"
        if not loop.blank:
            what = f"the same {loop.period} token{'s' if loop.period > 1 else ''}"
        goes_on = loop.stop == len(ids)
        yield RuleHit(
            start,
            seq,
            f"From round {start} {'on' if goes_on else f'to {last}'} the text is {what} over and "
            f"over ({loop.stop - loop.first} tokens): acceptance there says nothing of the "
            f"drafter. Up to there: {_figures(run, seq, 0, start)}.",
            f"{'in the loop' if goes_on else f'rounds {start} to {last}'}: "
            f"{_figures(run, seq, start, last + 1)}; {len(ids) - (loop.stop - loop.first)} of "
            f"{len(ids)} tokens outside of it",
        )


def _identities(run: ExaminedRun, rows: np.ndarray) -> np.ndarray:
    """A number for each token, its id, or one of its text where no id is known: int64 [n]."""
    ids = run.tokens["token_id"][rows].astype(np.int64)
    return np.where(ids == MISSING, -2 - run.tokens["text"][rows].astype(np.int64), ids)


def _blanks(run: ExaminedRun, ids: np.ndarray) -> Iterator[int]:
    """Which of the tokens are white space."""
    for one in np.unique(ids).tolist():
        piece = run.trace.pieces.get(one, b"")
        if one < 0:
            piece = run.trace.text_pool.decode(np.array([-2 - one]))[0].encode()
        if piece and not piece.strip():
            yield one


def _first_loop(ids: np.ndarray, is_blank: np.ndarray) -> _Loop | None:
    """The first long repetition, and of those that begin together the one of the shortest n-gram;
    None without any."""
    found = []
    blank = np.where(is_blank, _BLANK, ids)
    for first, stop in _stretches((blank[1:] == _BLANK) & (blank[:-1] == _BLANK)):
        found.append(_Loop(first + 1, stop + 1, 1, blank=True))
    for period in range(1, min(_LONGEST, len(ids) // _LEAST_TIMES) + 1):
        for first, stop in _stretches(ids[period:] == ids[:-period]):
            if stop - first >= (_LEAST_TIMES - 1) * period:
                found.append(_Loop(first + period, stop + period, period))
    return min(found, key=lambda loop: (loop.first - loop.period, loop.period), default=None)


def _stretches(same: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where long runs of True begin and end."""
    edges = np.flatnonzero(np.diff(same.astype(np.int8), prepend=0, append=0))
    for first, stop in edges.reshape(-1, 2).tolist():
        if stop - first >= _LEAST_TOKENS:
            yield first, stop


def _figures(run: ExaminedRun, seq: int, first: int, stop: int) -> str:
    """Acceptance and tokens per round of a sequence in rounds first .. stop - 1."""
    rounds = run.rounds
    here = (rounds["seq_id"] == seq) & run.is_later & observed(rounds["num_accepted_draft_tokens"])
    here &= (rounds["round"] >= first) & (rounds["round"] < stop)
    drafted, accepted, emitted = (
        int(rounds[name][here].sum())
        for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_emitted")
    )
    if not drafted:
        return "no drafts"
    return (
        f"acceptance {accepted / drafted:.3f} ({accepted} of {drafted}), "
        f"{emitted / int(here.sum()):.2f} tokens a round"
    )


RULES = (
    Rule(
        "degenerate-repetition",
        WARNING,
        "The text repeats itself",
        "The target has fallen into a loop: the same few tokens, or white space, for ever. Any "
        "drafter is right about that, so acceptance, tokens per step and speed-up rise on nothing, "
        "and figures over the whole run promise what no real text keeps.",
        "Take the figures up to that round, or end the run there; another prompt, a repeat penalty "
        "or a temperature may keep the target out of the loop.",
        _repeats,
    ),
)
