"""Shares of the right parts in a kernel's result, solved head by head, and the quantities that they
equal: what a kernel may have used as decay, beta, norm or scale."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch

from engine.conform.cases import Shape
from engine.conform.decays import Log
from engine.conform.fits import nearest, spans
from engine.conform.mistakes import channels_of, heads_of
from engine.conform.reference import Row, Way, correction, terms

_MOST_RANGES = 12  # rows of a pass of which all ranges are tried
_DECAYS = (
    (0, "without its decay"),
    (2, "with its decay twice"),
    (-1, "with the inverse of its decay"),
    (math.log(2), "with 2 for e in its decay"),
    (1 / math.log(2), "with e for 2 in its decay"),
)
Kept = tuple[str, torch.Tensor, int, bool]


class Quantities:
    """Quantities of the rows of a pass, relative to the right ones of row `at`, whose sequence
    begins at row `begin` and has `own` rows there."""

    def __init__(self, shape: Shape, batch: Sequence[Row], begin: int, own: int, at: int) -> None:
        self.shape, self.begin, self.end, self.at = shape, begin, begin + own, at
        self.rows = [terms(shape, row) for row in batch]
        logs = [row["decay"].log().clamp(min=-80)[..., 0] for row in self.rows]
        self.up = torch.stack([torch.zeros_like(logs[0]), *logs]).cumsum(0)  # [rows + 1, heads, …]

    def _ranges(self, near: Collection[int]) -> Iterator[tuple[int, int]]:
        n = len(self.rows)
        for a in range(n):
            ends = range(a + 1, n + 1) if n <= _MOST_RANGES or a in near else (a + 1,)
            yield from ((a, b) for b in ends)

    def of(self, since: int) -> Iterator[Way]:
        """Cause, words and factors [heads] or [heads, d_k] of what has the decays of rows `since`
        to `at`."""
        right = self.up[self.at + 1] - self.up[since]
        for power, words in _DECAYS if since <= self.at else ():
            cause = "wrong-gate" if power else "gate-order"
            yield cause, words, torch.exp((power - 1) * right)
        for words, at in heads_of(self.shape):
            yield "head-mapping", f"with the decay of {words}", torch.exp(right[at] - right)
        for words, at in channels_of(right.shape[1]) if right.dim() > 1 else ():
            yield "wrong-tile", f"with the decay of {words}", torch.exp(right[:, at] - right)
        near = {0, self.begin, since, since - 1, since + 1, self.at - 1, self.at}
        for a, b in self._ranges(near):
            if (a, b) != (since, self.at + 1):
                own = self.begin <= a and b <= self.end
                one = b - a == 1 and self.at == since
                cause = "gate-of-other-row" if one else "gate-order"
                words = f"rows {a} to {b - 1}" if b - a > 1 else f"row {a}"
                factor = torch.exp(self.up[b] - self.up[a] - right)
                rows = f"not {since} to {self.at}" if since <= self.at else "which it has not"
                cause = cause if own else "other-sequence"
                yield cause, f"with the decay of {words} of the pass, {rows}", factor
        yield from self._others(near)

    def _others(self, near: Collection[int]) -> Iterator[Way]:
        row, mamba = self.rows[self.at], self.shape.recurrence == "mamba2"
        name = "dt" if mamba else "beta"
        beta = row["beta"][:, 0]
        yield "wrong-gate", f"without {name}", 1 / beta
        yield "wrong-gate", f"with {name} twice", beta
        # one head has one value, which some of many rows have by chance
        all_ = len(beta) > 1 or len(self.rows) <= _MOST_RANGES
        for i, other in ((i, x) for i, x in enumerate(self.rows) if all_ or i in near):
            own = self.begin <= i < self.end
            cause, factor = "other-row" if own else "other-sequence", other["beta"][:, 0] / beta
            yield cause, f"with the {name} of row {i} of the pass, not {self.at}", factor
        for words, at in heads_of(self.shape):
            yield "head-mapping", f"with the {name} of {words}", beta[at] / beta
        if not mamba:
            root, per_group = self.shape.d_k**0.5, self.shape.n_heads // self.shape.n_groups
            one = torch.ones_like(beta)
            yield "wrong-scale", "without the scale", root * one
            yield "wrong-scale", "with the scale twice", one / root
            for x in "qk":
                size = row[x].norm(dim=-1).repeat_interleave(per_group, 0)
                yield "wrong-norm", f"times the length of {x}", size
                yield "wrong-norm", f"divided by the length of {x} twice", 1 / size
        for times, words in ((2.0, "twice"), (-1.0, "with the other sign"), (0.5, "by half")):
            yield "", words, torch.full_like(beta, times)


def kept_at(row: int, log: Log, before: Sequence[Kept], first: int, is_joint: bool) -> list[Kept]:
    """What row `row` of a pass sees of the parts of the state before it and of its earlier rows'
    writes, in one part or separately. first: the place of the pass's first row."""
    kept = [(about, log.kept(part), begin, one) for about, part, begin, one in before]
    if is_joint:
        wrote = log.states[-1] - log.kept()
        return [*kept, ("what earlier rows wrote", wrote, first + row, row == 1)]
    for j, write in enumerate(log.writes):
        words, since = f"what row {first + j} wrote", first + j + 1
        kept.append((words, log.kept(write, j + 1), since, True))
    return kept


def shares(
    shape: Shape, kept: Sequence[Kept], row: Row, seen: torch.Tensor, bound: float, last: bool,
    known: Quantities, sought: Collection[str] = (),
) -> tuple[str, str] | None:  # fmt: skip
    """Cause and sentence if a row's result contains the right parts with wrong factors.

    kept: parts of the state before the row, [heads, d_k, d_v]: words, the part, the first row of
    the pass whose decay it has, and whether one row wrote it; seen: the row's output, or (last) the
    state after it. Factors are per head, or per channel if decays are. sought: as in fits.closest.
    """
    if shape.recurrence == "conv":
        return None
    row, mamba = terms(shape, row), shape.recurrence == "mamba2"
    channels = last and shape.recurrence == "kda"
    key, held = row["key"][:, :, None], [row["decay"] * part for _, part, _, _ in kept]
    parts = [*held, key * (row["beta"] * row["value"])[:, None]]
    if not mamba:
        off = [-key * (row["beta"] * (key * part).sum(1))[:, None] for part in held]
        # for a single row's write, what is read and what is subtracted are parallel
        both = [one and (channels or not last) for _, _, _, one in kept]
        parts[: len(kept)] = [h + o * b for h, o, b in zip(held, off, both, strict=True)]
        parts += [o for o, b in zip(off, both, strict=True) if not b]
        kept = [(*k[:3], b) for k, b in zip(kept, both, strict=True)]
    if not last:
        parts = [(row["read"][:, :, None] * part).sum(1) for part in parts]
        parts += [row["skip"]] * mamba
    flat = [p.flatten(0, 1) if channels else p.flatten(1) for p in parts]
    basis = torch.stack(flat, -1)
    seen = seen if last else seen / row.get("gate", 1.0)
    wanted = seen.reshape(*basis.shape[:2], 1)
    share = torch.linalg.lstsq(basis, wanted, driver="gelsd").solution
    limit = 4 * bound * max(1.0, float(wanted.abs().max()))
    rest = (basis @ share - wanted).abs().max()
    share, weight = share[..., 0], basis.abs().amax(1)
    near = ((share - 1).abs() < 1e-2) | ((share - 1).abs() * weight <= limit)
    if basis.shape[1] < len(parts) + 4 or not rest <= limit or near.all():
        return None  # or within rounding

    def error(factor: torch.Tensor, powers: Sequence[int], columns: Sequence[int]) -> float:
        made = torch.stack([factor ** powers[i] for i in columns], 1)
        return float(((made - share[:, columns]).abs() * weight[:, columns]).max())

    def ways(pattern: _Pattern, columns: Sequence[int]) -> Iterator[tuple[float, tuple[str, str]]]:
        what, cause, powers, since = pattern
        for of_cause, words, one in known.of(since):
            if channels:
                one = one.view(shape.n_heads, -1).expand(-1, shape.d_k).flatten()
            one = one.view(len(one), -1)
            if one.shape[1] == 1:
                said = of_cause or cause, f"{what} is taken {words}"
                yield error(one[:, 0], powers, columns), said

    def named(pattern: _Pattern, columns: Sequence[int]) -> tuple[str, str]:
        what, cause, powers, since = pattern
        factor = share[:, powers.index(1)]
        none = error(0 * factor, powers, [i for i in columns if powers[i]]) <= limit
        alone = since > known.at and not last  # otherwise its state would lack it, too
        lost = "gate-order" if alone else "state-lost" if since <= known.begin else "lost-fold"
        if none and (not sought or lost in sought):
            return lost, f"{what}{', as outputs see it,' * alone} is lost"
        if found := nearest(ways(pattern, columns), limit, sought):
            return found
        even = len(factor) > 1 and float(factor.max() - factor.min()) < 1e-3  # lengths are not
        if even and cause == "wrong-norm" and (not sought or "wrong-scale" in sought):
            cause = "wrong-scale"
        at = int((factor - 1).abs().argmax())
        place = f"head {at // shape.d_k}, channel {at % shape.d_k}" if channels else f"head {at}"
        return cause, f"{what} of {place} is {float(factor[at]):.4g} times what it should be"

    every, patterns = range(len(parts)), _patterns(kept, known.at, mamba, len(parts), last)
    for pattern in patterns:
        if error(share[:, pattern[2].index(1)], pattern[2], every) <= limit:
            return named(pattern, every)
    singles = {p[2].index(1): p for p in patterns if sum(p[2]) == 1}
    said = [named(singles[i], [i]) for i in every if not near[:, i].all()]
    return said[0][0], "; ".join(words for _, words in said)


def channels(
    shape: Shape, before: torch.Tensor, row: Row, seen: torch.Tensor, bound: float,
    known: Quantities, sought: Collection[str] = (),
) -> tuple[str, str] | None:  # fmt: skip
    """Cause and sentence if the state after a row, [heads, d_k, d_v], keeps each key channel of the
    state before with a factor of its own, and adds anything along the row's key: both are solved
    for, head by head, as a wrong per-channel decay also changes the write."""
    row = terms(shape, row)
    heads, d_k, d_v = seen.shape
    decayed, key = row["decay"] * before, row["key"]
    # [heads, d_k, d_v, d_k + d_v]: each channel's factor, and the write of each column
    kept = torch.einsum("hkc,kj->hkcj", decayed, torch.eye(d_k, dtype=seen.dtype))
    wrote = torch.einsum("hk,cj->hkcj", key, torch.eye(d_v, dtype=seen.dtype))
    basis, wanted = torch.cat([kept, wrote], -1).flatten(1, 2), seen.flatten(1)[..., None]
    solved = torch.linalg.lstsq(basis, wanted, driver="gelsd").solution
    limit = 4 * bound * max(1.0, float(seen.abs().max()))
    if d_k * d_v < d_k + d_v + 4 or not (basis @ solved - wanted).abs().max() <= limit:
        return None
    factor, value = solved[:, :d_k, 0], solved[:, d_k:, 0]
    weight = decayed.abs().amax(2)
    off = (factor - 1).abs() * weight > limit
    if not off.any():
        return None
    predicted = correction(shape, factor[:, :, None] * decayed, row)
    whole = bool(((value - predicted).abs() * key.abs().amax(1)[:, None] <= 4 * limit).all())
    what = "the decay" if whole else "what is kept of the state before"
    alone = "" if off.all() else f", in key channels {spans(off.any(0))} alone"

    def error(made: torch.Tensor) -> float:
        return float(((made - factor).abs() * weight)[off].max())

    def ways() -> Iterator[tuple[float, tuple[str, str]]]:
        for cause, words, one in known.of(known.at):
            one = one.view(heads, -1).expand(-1, d_k)
            if not (one - 1).abs().max() < 1e-3:
                yield error(one), (cause or "wrong-gate", f"{what} is taken {words}{alone}")
        yield error(0 * factor), ("state-lost", f"{what} is lost{alone}")

    if found := nearest(ways(), limit, sought):
        return found
    at = int(((factor - 1).abs() * weight).argmax())
    times = float(factor.flatten()[at])
    place = f"head {at // d_k}, channel {at % d_k}"
    return "wrong-gate", f"{what} of {place} is {times:.4g} times what it should be{alone}"


_Pattern = tuple[str, str, tuple[int, ...], int]


def _patterns(kept: Sequence[Kept], at: int, mamba: bool, size: int, last: bool) -> list[_Pattern]:
    """The power of one mistaken factor in each part: words, cause, powers, and the first row of its
    decay."""
    n, made = len(kept), []
    apart = [i for i in range(n) if not (mamba or kept[i][3])]
    off = {i: n + 1 + at for at, i in enumerate(apart)}
    for indices in (range(n), *([i] for i in range(n) if n > 1)):
        words = kept[indices[0]][0] if len(indices) < n else "the state before"
        since = kept[indices[0]][2] if len(indices) < n else at
        views = {words: {*indices}}
        taken_off = {off[i] for i in indices if i in off}
        if taken_off:
            views = {
                words + " and is taken off v" * last: {*indices, *taken_off},
                words + ", as outputs see it" * (not last): {*indices},
                f"{words}, as it is taken off v": taken_off,
            }
        for about, columns in views.items():
            powers = tuple(int(i in columns) for i in range(size))
            about = "the decay" if since == at and len(columns) > len(indices) else about
            made.append((about, "wrong-gate", powers, since))
    value = [int(i == n) for i in range(size)]
    if mamba:
        made.append(("what the row writes", "wrong-gate", tuple(value), at + 1))
        if size > n + 1:
            made.append(("C", "wrong-scale", (1,) * (n + 1) + (0,), at + 1))
            made.append(("D x", "wrong-term", tuple(int(i > n) for i in range(size)), at + 1))
        return made
    taken = [int(i in off.values()) for i in range(size)]
    whole = ("all of the state", "wrong-state") if last else ("q", "wrong-norm")
    of_beta = tuple(a + b for a, b in zip(value, taken, strict=True))
    made += [
        (*whole, (1,) * size, at + 1),
        ("what the row writes (beta)", "wrong-gate", of_beta, at + 1),
        ("k", "wrong-norm", tuple(a + 2 * b for a, b in zip(value, taken, strict=True)), at + 1),
        ("v", "wrong-term", tuple(value), at + 1),
    ]
    return made
