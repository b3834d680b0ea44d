"""Ends of drafts: which number of a token is compared with p_min, and which drafts are too short to
send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.draft.model_drafter import N_CANDIDATES
from engine.observe.drafter_diff.candidate_mistakes import N_BEFORE
from engine.observe.drafter_diff.records import FEW
from engine.observe.drafter_diff.wrong_drafts import SHARES_TIE

_EXPLAINS, _EXPLAINS_FITTED, _FITTED = 0.34, 0.1, 1.5
_MOST_SPARED = 4
_FLOORS = [round(0.05 * i, 2) for i in range(20)]


class DraftEnd(NamedTuple):
    """A draft as sent, and the candidates of as many tokens as it might have had: logits f64 [n,
    k], best first; sure: a confidence head's outputs, or empty."""

    pos0: int
    length: int
    logits: np.ndarray
    sure: Sequence[float]


class _Rule(NamedTuple):
    """A comparison: `number` of _numbers with p_min."""

    about: str
    number: str
    p_min: float
    n_min: int
    is_fitted: bool = False


def wrong_ends(drafts: Sequence[DraftEnd], p_min: float, n_min: int) -> list[int]:
    """Positions of drafts that do not end as they should; empty if they are few."""
    numbers = [*map(_numbers, drafts)]
    usual = next(iter(numbers[0] if numbers else ()), "")
    found = _wrong(_Rule("", usual, p_min, n_min), drafts, numbers)
    return found if len(found) >= FEW else []


def ends_words(
    drafts: Sequence[DraftEnd], wrong: Sequence[int], p_min: float, n_min: int
) -> tuple[str, int]:
    """The rule by which drafts end if not as they should: a sentence, and how many would end by it.
    If no rule gives most of them, what is known."""
    numbers = [*map(_numbers, drafts)]
    rules = _rules([*numbers[0]], p_min, n_min)
    left = [(len(_wrong(rule, drafts, numbers)), rule) for rule in rules]
    # a fitted bound proves less than another number
    n, rule = min(left, key=lambda pair: pair[0] + _FITTED * pair[1].is_fitted)
    if n <= (_EXPLAINS_FITTED if rule.is_fitted else _EXPLAINS) * len(wrong):
        return rule.about, n
    early = sum(draft.pos0 in wrong and draft.length < len(draft.logits) for draft in drafts)
    how = "early, whatever their probability" if early == len(wrong) else ("not by it")
    about = "Drafted tokens are right, but drafts do not end by their probability"
    return f"{about}: {how}; another number is compared with p_min.", len(wrong)


def _rules(numbers: Sequence[str], p_min: float, n_min: int) -> Iterator[_Rule]:
    """numbers: those by which drafts may end, the usual one first."""
    usual, *others = numbers
    if p_min:
        for number in others:
            yield _Rule(f"p_min is compared with {number}.", number, p_min, n_min)
        for floor in _FLOORS:
            if abs(floor - p_min) > SHARES_TIE:
                about = f"Drafts end as if p_min were about {floor:g} instead of {p_min:g}."
                yield _Rule(about, usual, floor, n_min, True)
    for least in (n for n in range(max(0, n_min - 2), n_min + 5) if n != n_min):
        about = f"Drafts are discarded as if n_min were {least} instead of {n_min}."
        yield _Rule(about, usual, p_min, least, True)


def _numbers(draft: DraftEnd) -> Mapping[str, np.ndarray]:
    """Numbers per token that may be compared with p_min, f64 [n], the right one first."""
    logits, sure = draft.logits[:, :N_CANDIDATES], np.array(draft.sure)
    shares, of_all = _shares(logits), _shares(draft.logits[:, :N_BEFORE])
    share, second = shares[:, 0], shares[:, 1] if shares.shape[1] > 1 else 0.0
    firsts = [(n, np.arange(len(share)) >= n) for n in range(1, _MOST_SPARED + 1)]
    usual, own = ("the output of the confidence head", sure) if len(sure) else (_SHARE, share)
    found = {
        usual: own,
        "the probability over the whole vocabulary, not the ten best": of_all[:, 0],
        f"the product over the draft so far, not {usual} alone": np.cumprod(own),
        f"the mean over the draft so far, not {usual} alone": np.cumsum(own)
        / range(1, len(own) + 1),
        "that of the previous token: drafts end one token late": np.append(1.0, own[:-1]),
        "that of the next token: drafts end one token early": np.append(own[1:], own[-1:]),
        **{
            f"{usual}, except for the first {n} of a draft (always sent)": np.where(later, own, 1.0)
            for n, later in firsts
        },
        **{
            f"{usual}, but only for the first {n} of a draft": np.where(later, 1.0, own)
            for n, later in firsts
        },
        f"{usual} after the token was sent, except for the first": np.append(own[:1], own[:-1]),
        f"the lead of the best token over the second, instead of {usual}": share - second,
        "the probability among the two best, not the ten best": _shares(logits[:, :2])[:, 0],
        "the probability at a temperature of 0.5": _shares(2 * logits)[:, 0],
        "the probability at a temperature of 2": _shares(logits / 2)[:, 0],
    }
    if len(sure):
        inner = sure.clip(1e-9, 1 - 1e-9)
        found[f"{usual} before its sigmoid"] = np.log(inner / (1 - inner))
        found[f"{_SHARE}, not {usual}"] = share
    return found


_SHARE = "the token's probability"


def _shares(logits: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.exp(logits - logits[:, :1])
    return shares / shares.sum(1, keepdims=True)


def _wrong(
    rule: _Rule, drafts: Sequence[DraftEnd], numbers: Sequence[Mapping[str, np.ndarray]]
) -> list[int]:
    """Positions of drafts that do not end by a rule, within rounding."""
    found = []
    for draft, known in zip(drafts, numbers, strict=True):
        number = known.get(rule.number)
        if number is None:
            return [one.pos0 for one in drafts]
        below = np.flatnonzero(number < rule.p_min)
        n = int(below[0]) if len(below) else len(number)
        is_near = (np.abs(number[: n + 1] - rule.p_min) < SHARES_TIE).any() and rule.p_min > 0
        if draft.length != (n if n >= rule.n_min else 0) and not is_near:
            found.append(draft.pos0)
    return found
