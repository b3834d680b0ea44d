"""Mistakes in choosing a draft among a drafter's right candidates: id maps, ranks, ids left out,
penalties, sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from operator import add

import torch

from engine.audit.draft_models import Candidates
from engine.observe.drafter_diff.records import FEW, Drafts, one_for_one

Change = Callable[[Candidates, Sequence[int]], Candidates]
"""The wrong candidates of a row, best first, given the right ones and the preceding tokens of text
and draft."""
N_BEFORE = 64
"""Preceding tokens that candidates may depend on, as llama.cpp's penalties do."""
_SHOWS_SHIFT, _N_PARTS = 0.8, 4
_PENALTIES, _REACHES = (1.1, 1.25, 1.35, 1.5, 1.75, 2.0, 2.5), (N_BEFORE, 32, 24, 16, 8)
_LEADS = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_BIASES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


class OfText(partial[Candidates]):
    """A Change that is given the text alone, as a sampler that is not shown what is drafted."""


def of_map(ids: Sequence[int], n_vocab: int) -> Iterator[tuple[str, Change]]:
    """Mistakes of an id map. ids: target ids by rows of the drafter's head (d2t)."""
    rows, offsets = range(len(ids)), [token - row for row, token in enumerate(ids)]
    wrong = {
        "is not applied": [*rows],
        "has offsets that are used as ids": offsets,
        "is added twice": [token + row for row, token in enumerate(ids)],
        "has ids one too high": [token + 1 for token in ids],
        "has ids one too low": [max(0, token - 1) for token in ids],
    }
    for by in (y for x in (1, 2, 3, 4) for y in (x, -x)):
        how = f"{abs(by)} row{'s' * (abs(by) > 1)} {'too far' if by > 0 else 'too early'}"
        wrong[f"is read {how}"] = [ids[min(max(row + by, 0), len(ids) - 1)] for row in rows]
    for kind in ("bfloat16", "float16"):  # if all of a file is read as one type
        near = [torch.tensor(x).to(getattr(torch, kind)).long().tolist() for x in (ids, offsets)]
        wrong[f"has ids that are rounded to {kind}"] = near[0]
        wrong[f"has offsets that are rounded to {kind}"] = [*map(add, rows, near[1])]
    for bits in (8, 16):  # the upper half of them negative
        half = 1 << bits - 1
        short = [[(x + half) % (2 * half) - half for x in own] for own in (ids, offsets)]
        wrong[f"has ids that are read as {bits}-bit numbers"] = [max(0, x) for x in short[0]]
        wrong[f"has offsets that are read as {bits}-bit numbers"] = [*map(add, rows, short[1])]
    spans = {"": rows}
    for row in (i * len(ids) // _N_PARTS for i in range(1, _N_PARTS)):
        spans[f", from about row {row} on"] = rows[row:]
        spans[f", up to about row {row}"] = rows[:row]
    for (what, found), (which, span) in product(wrong.items(), spans.items()):
        names = {ids[row]: min(found[row], n_vocab - 1) for row in span}
        if any(token != own for own, token in names.items()):
            about = f"the map of draft ids (d2t) {what}{which}"
            yield about, partial(_renamed, {token: token for token in ids} | names)


def of_choice() -> Iterator[tuple[str, Change]]:
    """Mistakes that any drafter may make."""
    for rank in (1, 2, 3):
        about = f"the candidate of rank {rank + 1} is drafted instead of the best one"
        yield about, partial(_from_rank, rank)
    for lead in _LEADS:
        about = f"the second candidate is drafted if the best leads by less than about {lead:g}"
        yield about, partial(_unless_clear, lead)
    for step in (0.125, 0.25, 0.5, 1.0, 2.0):
        about = f"logits are rounded to steps of {step:g}, and ties go to the {{}} id"
        for which, sign in (("lowest", 1), ("highest", -1)):
            yield about.format(which), partial(_rounded, step, sign)
    weaker: dict[str, Callable[..., float]] = {}
    for x in _PENALTIES:
        # llama.cpp's penalties of repeated tokens
        weaker[f"penalised, by about {x:g}"] = lambda v, _, x=x: v / x if v > 0 else v * x
        lowered = f"lowered by about {2 * x - 2:g}"
        weaker[f"{lowered} (presence penalty)"] = lambda v, _, x=x: v - 2 * (x - 1)
        weaker[f"{lowered} each time (frequency penalty)"] = lambda v, n, x=x: v - 2 * n * (x - 1)
    ways: dict[str, Callable[..., Candidates]] = {
        f"candidates in the last {n} tokens{{}} are {how}": partial(_penalised, change, n)
        for (how, change), n in product(weaker.items(), _REACHES)
    }
    for n in (1, N_BEFORE, *(2**i for i in range(1, 6))):
        about = f"no token of the last {n}{{}} is drafted"
        ways[about] = lambda row, text, n=n: _without({*text[-n:]}, row, text)
    for about, way in ways.items():
        yield about.format(""), way
        yield about.format(" of the text alone"), OfText(way)


Seen = tuple[Drafts, Mapping[int, Sequence[int]], Mapping[tuple[int, int], int]]
"""Some drafts, right tokens by round, and how often a right candidate was better than the drafted
token, by draft position."""


def observed(
    drafts: Drafts, seen: Seen, shown: Callable[[int], str], first: int = 0
) -> Iterator[tuple[str, Change]]:
    """Mistakes built from observed drafts, which explain a part of anything. drafts: all; first:
    only their tokens from this one on."""
    window, best, by_place = seen
    above = Counter(t for (i, t), n in by_place.items() if i >= first for _ in range(n))
    drafted = {token for draft in drafts for token in draft.tokens[first:]}
    never = {token for token in above if token not in drafted}
    gap = range(min(never, default=0), max(never, default=0) + 1)
    if len(gap) >= FEW and len(never) >= FEW and drafted.isdisjoint(gap):
        about = f"no id from about {gap[0]} to {gap[-1]} is ever drafted: the head lacks them"
        if gap[0] > max(drafted):
            gap = range(max(drafted) + 1, 1 << 30)
            about = f"only ids up to {max(drafted)} are ever drafted: the output head is truncated"
        yield about, partial(_without, gap)
    if never and len(never) <= sum(above.values()) / 2:
        token = max(never, key=lambda token: above[token])
        more = f" and {len(never) - 1} others are" if len(never) > 1 else " is"
        about = f"token {shown(token)}{more} never drafted: not among the candidates"
        yield about, partial(_without, never)
    both = [
        pair
        for draft in window
        for pair in zip(best.get(draft.round, ())[first:], draft.tokens[first:], strict=False)
    ]
    pairs = [(own, token) for own, token in both if own != token]
    apart = [token - own for own, token in pairs]
    for token, n in Counter(token for _, token in pairs).most_common(1):
        if n >= max(FEW, _SHOWS_SHIFT * len(pairs)):
            for bias in _BIASES:
                about = f"token {shown(token)} is favoured, as if by a logit bias of about {bias:g}"
                yield about, partial(_favoured, token, bias)
    shift, n = next(iter(Counter(apart).most_common(1)), (0, 0))
    if n >= max(FEW, _SHOWS_SHIFT * len(apart)):
        about = f"ids are {abs(shift)} too {'high' if shift > 0 else 'low'}: a wrong id map"
        yield about, lambda row, _: {token + shift: value for token, value in row.items()}
    if names := one_for_one(both):
        about = "each id of the drafter is consistently replaced by another one: a wrong id map"
        yield about, partial(_renamed, names)


def any_of_ten(row: Candidates, _: Sequence[int]) -> Candidates:
    """All of the ten best as good as the best."""
    return dict.fromkeys([*row][:10], 0.0)


def _renamed(names: Mapping[int, int], row: Candidates, _: Sequence[int]) -> Candidates:
    found: Candidates = {}
    for token, value in row.items():
        if token in names:
            found.setdefault(names[token], value)
    return found


def _from_rank(rank: int, row: Candidates, _: Sequence[int]) -> Candidates:
    return dict([*row.items()][rank:])


def _unless_clear(lead: float, row: Candidates, text: Sequence[int]) -> Candidates:
    values = [*row.values()]
    is_clear = len(values) < 2 or values[0] - values[1] >= lead
    return row if is_clear else _from_rank(1, row, text)


def _rounded(step: float, sign: int, row: Candidates, _: Sequence[int]) -> Candidates:
    steps = {token: round(value / step) for token, value in row.items()}
    order = sorted(row, key=lambda t: (-steps[t], sign * t))
    return {token: -float(i) for i, token in enumerate(order)}  # clearly apart


def of_shards(n_vocab: int) -> Iterator[tuple[str, Change]]:
    """Parts of an output head in another order."""
    for n in (n for n in (2, 4, 8) if n_vocab % n == 0):
        size, orders = n_vocab // n, {"reverse": [*range(n)][::-1]}
        for by in (1, -1) if n > 2 else ():
            orders["moved round" if by > 0 else "moved back"] = [(i + by) % n for i in range(n)]
        for how, order in orders.items():
            about = f"{n} parts of the output head are in the wrong order ({how}): ids differ"
            yield about, partial(_of_parts, order, size)


def _of_parts(order: Sequence[int], size: int, row: Candidates, _: Sequence[int]) -> Candidates:
    return {order[t // size] * size + t % size: value for t, value in row.items()}


def _without(tokens: Collection[int], row: Candidates, _: Sequence[int]) -> Candidates:
    return {token: value for token, value in row.items() if token not in tokens}


def _penalised(
    change: Callable[[float, int], float], n: int, row: Candidates, text: Sequence[int]
) -> Candidates:
    seen = Counter(text[-n:])
    return _sorted({t: change(value, seen[t]) if t in seen else value for t, value in row.items()})


def _favoured(token: int, bias: float, row: Candidates, _: Sequence[int]) -> Candidates:
    return _sorted({**row, token: row[token] + bias}) if token in row else row


def _sorted(row: Candidates) -> Candidates:
    return dict(sorted(row.items(), key=lambda pair: -pair[1]))
