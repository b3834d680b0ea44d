"""Counts of verified drafts, a row for each or for the sums of a request, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.trace.facts import RunFacts
from engine.trace.records import MISSING
from engine.trace.run_columns import RunColumns

_LONGEST_USUAL = 8
"""Tokens of a draft, where only the sum of all is known."""
_INTERVALS = ("vllm-log", "sglang-log")
"""Records whose requests are spans of time, each of all requests then."""
_LOOKS_UP = ("ngram", "suffix", "lookup")
"""In the names of drafters without a model."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of one drafter, int64 [u] each: number, those whose first token was accepted, tokens
    drafted and accepted, sequence, slot, round (of sums: number of the request), position of the
    first token (of sums: tokens of the prompt; MISSING where unknown), and whether the sampler's
    settings are those of the others.

    reached, passed: drafts that came to index i with a token there, and those whose token there was
    accepted, int64 [K]; of sums as far as they leave no choice. is_by_round: a row for each
    draft; else unit says what a row is.
    """

    drafter: str
    n: np.ndarray
    first: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    seq: np.ndarray
    slot: np.ndarray
    at: np.ndarray
    pos: np.ndarray
    setting: np.ndarray
    reached: np.ndarray
    passed: np.ndarray
    is_by_round: bool
    unit: str = "request"

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in the text, where what is not repeated is not found."""
        return any(word in self.drafter for word in _LOOKS_UP)

    def only(self, rows: np.ndarray) -> DraftCounts:
        """Some of the rows, bool or indices; of sums all indices of drafts stay."""
        names = ("n", "first", "drafted", "accepted", "seq", "slot", "at", "pos", "setting")
        mine = {name: getattr(self, name)[rows] for name in names}
        reached, passed = self.reached, self.passed
        if self.is_by_round:
            reached, passed = _by_index(mine["drafted"], mine["accepted"])
        return DraftCounts(
            drafter=self.drafter,
            reached=reached,
            passed=passed,
            is_by_round=self.is_by_round,
            unit=self.unit,
            **mine,
        )

    def by_sequence(self, least: int = 1) -> list[DraftCounts]:
        """Each sequence by itself that has at least this many rows."""
        order = np.argsort(self.seq, kind="stable")
        starts = np.flatnonzero(np.diff(self.seq[order])) + 1
        bounds = np.concatenate([[0], starts, [len(order)]])
        is_long = np.diff(bounds) >= least
        pairs = zip(bounds[:-1][is_long].tolist(), bounds[1:][is_long].tolist(), strict=True)
        return [self.only(order[begin:end]) for begin, end in pairs]


def draft_counts(
    facts: RunFacts, rounds: RunColumns, is_later: np.ndarray, drafters: Sequence[str]
) -> Iterator[DraftCounts]:
    """Of each drafter of a run: from its rounds, of requests without rounds from their sums.

    is_later: rounds after the prompt, bool [n]. drafters: the run's, for rounds that name none.
    """
    requests = [
        one for one in facts.pick("requests").values() for one in one or () if isinstance(one, dict)
    ]
    slots = dict(_slots(facts, requests))
    names = ", ".join(drafters)
    settings = {seq: _setting(one) for one in requests for seq in _seq_ids(one)}
    known = {text: i for i, text in enumerate(dict.fromkeys(settings.values()))}
    numbers = dict.fromkeys(np.unique(rounds["seq_id"]).tolist(), 0)
    numbers |= {seq: known[text] for seq, text in settings.items()}
    judged = is_later & (rounds["num_draft_tokens"] > 0)
    judged &= (rounds["num_accepted_draft_tokens"] >= 0) & (rounds["n_merged"] == MISSING)
    judged &= ~rounds.is_text("stop_kind", "end")  # cut before its end
    for code in np.unique(rounds["drafter"][judged]).tolist():
        rows = np.flatnonzero(judged & (rounds["drafter"] == code))
        drafted = rounds["num_draft_tokens"][rows].astype(np.int64)
        accepted = np.minimum(rounds["num_accepted_draft_tokens"][rows], drafted).astype(np.int64)
        seq = rounds["seq_id"][rows].astype(np.int64)
        reached, passed = _by_index(drafted, accepted)
        yield DraftCounts(
            rounds.texts("drafter", rows[:1])[0] or names,
            np.ones(len(rows), np.int64),
            (accepted > 0).astype(np.int64),
            drafted,
            accepted,
            seq,
            _mapped(seq, slots),
            rounds["round"][rows].astype(np.int64),
            rounds["pos0"][rows].astype(np.int64),
            _mapped(seq, numbers),
            reached,
            passed,
            is_by_round=True,
        )
    with_rounds = set(np.unique(rounds["seq_id"][judged]).tolist())
    sums = [one for one in requests if not with_rounds.intersection(_seq_ids(one))]
    unit = "interval" if facts.record and facts.record.shape in _INTERVALS else "request"
    if (found := _of_sums(names, sums, slots, known, unit)) is not None:
        yield found


def _of_sums(
    drafter: str,
    requests: list[dict[str, Any]],
    slots: Mapping[int, int],
    known: Mapping[str, int],
    unit: str,
) -> DraftCounts | None:
    rows, reached, passed = [], np.zeros(0, np.int64), np.zeros(0, np.int64)
    for number, one in enumerate(requests):
        told = one.get("told")
        seq = next(iter(_seq_ids(one)), number)
        if not isinstance(told, dict) or not (drafted := _count(told, *_DRAFTED)):
            continue
        accepted = min(_count(told, *_ACCEPTED) or 0, drafted)
        per_pos = _list(told, "num_accepted_tokens_per_pos")
        steps = _count(told, "num_spec_steps")
        n = min(steps or -(-drafted // _longest(one)), drafted)
        first = min(per_pos[0] if per_pos else accepted, n)
        prompt = (_count(told, "prompt_n") or 0) + (_count(told, "cache_n") or 0)
        setting = known.get(_setting(one), 0)
        pos = prompt or MISSING
        slot = slots.get(seq, seq) if unit == "request" else 0
        rows.append((n, first, drafted, accepted, seq, slot, number, pos, setting))
        if steps and per_pos:
            offered = _list(told, "num_draft_tokens_per_pos")
            offered = offered or _least_offered(drafted, steps, len(per_pos))
            came = [steps, *per_pos]
            lost = [max(steps - offer, 0) for offer in offered[: len(per_pos)]]
            reached = _added(reached, [max(c - m, 0) for c, m in zip(came, lost, strict=False)])
            passed = _added(passed, per_pos)
    if not rows:
        return None
    n, first, drafts, taken, seqs, slot, at, at_pos, which = np.array(rows, np.int64).T
    reached, passed = reached[: len(passed)], passed[: len(reached)]
    return DraftCounts(
        drafter,
        n,
        first,
        drafts,
        taken,
        seqs,
        slot,
        at,
        at_pos,
        which,
        reached,
        np.minimum(passed, reached),
        is_by_round=False,
        unit=unit,
    )


_DRAFTED = ("num_draft_tokens", "draft_n")
_ACCEPTED = ("num_accepted_draft_tokens", "draft_n_accepted")


def _least_offered(drafted: int, steps: int, n_pos: int) -> list[int]:
    """Drafts that had a token at each index at least, where only their sum is known."""
    return [
        min(steps, max(0, -(-(drafted - i * steps) // (n_pos - i)))) if n_pos > i else 0
        for i in range(n_pos)
    ]


def _by_index(drafted: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drafts that came to each index, and those accepted there."""
    size = int(drafted.max(initial=0))
    came = np.minimum(accepted, drafted - 1)  # the last index that was judged
    ended = np.bincount(came, minlength=size)[:size]
    passed = np.bincount(accepted, minlength=size + 1)
    return (
        ended[::-1].cumsum()[::-1].astype(np.int64),
        passed[::-1].cumsum()[::-1][1 : size + 1].astype(np.int64),
    )


def _slots(facts: RunFacts, requests: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """The slot of each sequence, as far as known."""
    for record in facts.prompt_reuse or ():
        yield record.seq_id, record.slot
    for one in requests:
        if isinstance(slot := one.get("slot"), int) and not isinstance(slot, bool) and slot >= 0:
            for seq in _seq_ids(one):
                yield seq, slot


def _setting(request: dict[str, Any]) -> str:
    """What acceptance depends on in a request's settings."""
    for name in ("generation_settings", "settings"):
        if isinstance(one := request.get(name), dict) and "temperature" in one:
            return str(one["temperature"])[:20]
    return ""


def _seq_ids(request: dict[str, Any]) -> list[int]:
    ids = request.get("seq_ids")
    return [one for one in ids if isinstance(one, int)] if isinstance(ids, list) else []


def _longest(request: dict[str, Any]) -> int:
    settings = request.get("generation_settings")
    n_max = settings.get("speculative.n_max") if isinstance(settings, dict) else None
    return n_max if isinstance(n_max, int) and n_max > 0 else _LONGEST_USUAL


def _count(told: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = told.get(name)
        if isinstance(value, (int, float)) and 0 <= value < 2**53:
            return int(value)
    return None


def _list(told: dict[str, Any], name: str) -> list[int]:
    value = told.get(name)
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        return []
    return value


def _mapped(seq: np.ndarray, names: Mapping[int, int]) -> np.ndarray:
    ids, at = np.unique(seq, return_inverse=True)
    return np.array([names.get(one, one) for one in ids.tolist()], np.int64)[at]


def _added(one: np.ndarray, other: list[int]) -> np.ndarray:
    size = max(len(one), len(other))
    total = np.zeros(size, np.int64)
    total[: len(one)] += one
    total[: len(other)] += np.array(other, np.int64)
    return total
