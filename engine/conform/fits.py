"""Comparisons of a kernel's result with that of a mistake: equality, places of errors, and errors
of rounding size."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise, product

import torch
import torch.nn.functional as F

from engine.conform.cases import Shape, instead
from engine.conform.reference import Row, Way, terms

_LEAST = 12  # values that distinguish a mistake from chance
_MOST_FITTED = 4  # mistakes whose number is searched closely


def taken(shape: Shape, row: Row, state: torch.Tensor) -> torch.Tensor:
    """A row's output from the state before it; zero for a window."""
    if shape.recurrence == "conv":
        return torch.full((1,), torch.nan, dtype=torch.float64)
    row = terms(shape, row)
    return (row["read"][:, :, None] * row["decay"] * state).sum(1) * row.get("gate", 1.0)


def joined(*words: str) -> str:
    """Non-empty words, joined."""
    return "; ".join(filter(None, words))


def of_rounding(seen: torch.Tensor, wanted: torch.Tensor) -> str:
    """The precision whose errors have this size in most values; empty if none."""
    error = (seen - wanted).abs()
    size = float(error.square().mean().sqrt() / wanted.square().mean().sqrt())
    spread = float((error > error.square().mean().sqrt() / 8).double().mean())
    kind = "float16 or TF32" if size < 4e-4 else "bfloat16"
    if not 3e-5 < size < 1.5e-2 or spread < 0.5:
        return ""
    return f"{size:.1g} of the values' size in most of them, as of rounding to {kind}"


def place(shape: Shape, seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    """Where outputs of a pass, or a state, are wrong, in the axes along which only some are; empty
    if everywhere."""
    error = (seen - wanted).abs() / max(1.0, float(wanted.abs().max()))
    # a value far above rounding is wrong, too, if others are by much
    off = ~(error <= min(bound, max(bound / 16, float(error.max()) / 256)))
    conv, held = shape.recurrence == "conv", off.shape == shape.state
    names = "heads, key channels, columns" if held else "rows, heads, columns"
    if conv:
        names = "channels, inputs of the window" if held else "rows, channels"
    words = axes(names.split(", "), off)
    return words and f"wrong in {words}"


def axes(names: Sequence[str], off: torch.Tensor) -> str:
    """Where some of the values are true, in words: for each named axis with an index where none
    is."""
    moved = (off.unsqueeze(-1).transpose(0, d).flatten(1).any(1) for d in range(off.dim()))
    each = zip(names, moved, strict=True)
    return ", ".join(f"{name} {spans(some)}" for name, some in each if not some.all())


def unwritten(seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    """Which whole rows, or heads of all rows, [rows, heads, …] are zero instead of right, if
    everything else is right; else empty."""
    none = (seen == 0) & (wanted != 0)
    for words, dim in (("rows", 0), ("heads", 1)):
        off = none.transpose(0, dim).flatten(1).all(1)
        rest = (x.transpose(0, dim)[~off] for x in (seen, wanted))
        if off.any() and (off.all() or same(next(rest), [next(rest)], bound)):
            return f"no output is written for {words} {spans(off)}"
    return ""


def numbered(
    ways: Callable[[float], Iterable[tuple[str, str, Callable[[], torch.Tensor]]]],
    seen: torch.Tensor,
    wanted: torch.Tensor,
    rows: Sequence[Row],
) -> Iterator[Way]:
    """Mistakes with a number, each with the value from 1e-4 to 30, or between inputs or outputs of
    softplus in these rows, that fits best, of the few that leave least, and less than half of the
    error; ways: the mistakes for a number, without those that have no effect then."""

    def each(log: float) -> Iterator[tuple[str, tuple[str, str, Callable[[], torch.Tensor]]]]:
        x = math.exp(log)
        return ((way[1].replace(f"{x:.4g}", "", 1), way) for way in ways(x))

    def error(log: float) -> float:
        return next((off(seen, way[2]()) for of, way in each(log) if of == name), math.inf)

    of = next(x for x in ("a", "dt", "x") if x in rows[0])
    y = torch.cat([(row[of] + row.get("dt_bias", 0.0)).flatten() for row in rows])
    y = torch.cat([y, F.softplus(y)]).sort().values
    y = y[y > 1e-4][:: 1 + len(y) // 64]
    more = (y[1:] * y[:-1]).sqrt().log().tolist()
    first, step, best = math.log(1e-4), math.log(3e5) / 24, dict[str, tuple[float, float]]()
    for log in (*(first + i * step for i in range(25)), *more):
        for name, way in each(log):
            best[name] = min(best.get(name, (math.inf, 0.0)), (off(seen, way[2]()), log))
    least = sorted(best, key=lambda name: best[name][0])[:_MOST_FITTED]
    for name in (name for name in least if best[name][0] < off(seen, wanted) / 2):
        low, high = best[name][1] - step, best[name][1] + step
        for _ in range(32):  # golden-section search
            a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
            low, high = (low, b) if error(a) < error(b) else (a, high)
        low = low if error(low) < best[name][0] else best[name][1]
        yield from ((cause, words, made()) for of, (cause, words, made) in each(low) if of == name)


def fewest(
    gives: dict[tuple[str, str], torch.Tensor], wrong: torch.Tensor, names: Sequence[str]
) -> tuple[str, str] | None:
    """The cause of the first, and the sentences with their places, of the fewest ways that together
    explain everything wrong (True), chosen greedily."""
    said, left = list[tuple[str, str]](), wrong
    while left.any():
        way = max(gives, key=lambda x: int((gives[x] & left).sum()), default=None)
        if way is None or not (gives[way] & left).any():
            return None
        at = axes(names, gives[way] & wrong)
        said.append((way[0], way[1] + (at and f", in {at}")))
        left = left & ~gives[way]
    return (said[0][0], "; ".join(words for _, words in said)) if said else None


def wrong_heads(seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> torch.Tensor:
    """Which heads, or channels, of [rows, heads, …] have a wrong value; bool [heads]."""
    # relative to the seen values, as the wanted ones may have NaN or infinity, and count as wrong
    # there
    off = ~((seen - wanted).abs() <= bound * max(1.0, float(seen.abs().max())))
    return off.transpose(0, 1).flatten(1).any(1)


def spans(off: torch.Tensor) -> str:
    """Which of the values [n] are true, in words."""
    at = off.nonzero().flatten().tolist()
    if len(at) == len(off):
        return f"all of {len(off)}"
    firsts, lasts = ([i for i in at if i + way not in at] for way in (-1, 1))
    runs = [f"{a} to {b}" if b > a else f"{a}" for a, b in zip(firsts, lasts, strict=True)]
    return f"{', '.join(runs[:8])}{', …' * (len(runs) > 8)} of {len(off)}"


def tiles(d_k: int) -> set[tuple[int, int]]:
    """Ranges of key channels, after the first ones, that separate code may handle."""
    ends = {(n, d_k) for n in (16, 32, 64)}
    return ends | {(a, a + n) for n in (16, 32, 64) for a in range(n, d_k, n)}


def blocks_of(n: int, least: int = 16) -> Iterator[tuple[str, torch.Tensor]]:
    """Channels, of n, that a block of `least` or more may use instead, n for none, with words; the
    last ones may be masked off."""
    for end in sorted({n - 1, *(n // size * size for size in (16, 32, 64))} - {0, n}):
        yield f"{end} to {n - 1} are zeros", torch.where(torch.arange(n) < end, torch.arange(n), n)
    for size in (size for size in (16, 32, 64, 128) if least <= size < n <= 8 * size):
        for to, of in product(range(0, n, size), (*range(0, n, size), n)):
            at, m = torch.arange(n), min(size, n - to)
            at[to : to + m] = torch.arange(of, of + m).clamp(max=n)
            if to != of and (of == n or of + m <= n):
                words = f"those of {of} to {of + m - 1}" if of < n else "zeros"
                yield f"{to} to {to + m - 1} are {words}", at


def misplaced(
    seen: torch.Tensor, wanted: torch.Tensor, part: slice, bound: float, what: str
) -> str:
    """Which row of one sequence, `part`, has the output of another row of the pass, or (turned)
    which head; else ""."""
    limit = bound * max(1.0, float(wanted.abs().max()))
    some = wanted.flatten(1).abs().amax(1) > 16 * limit  # rows of zeros look alike
    error = (seen[part].flatten(1)[:, None] - wanted.flatten(1)[None]).abs().amax(2)
    for row, there in zip(range(len(seen))[part], (error <= limit) & some, strict=True):
        at = there.nonzero().flatten().tolist()
        if at and row not in at:
            return f"the output of {what.format(row)} is that of {what.format(at[0])}"
    return ""


def tapped(
    known: Sequence[torch.Tensor], rows: Sequence[Row], seen: torch.Tensor, bound: float
) -> tuple[str, str] | None:
    """Cause and sentence of the inputs that a convolution's taps use in each row, with the fewest
    wrong; None if some row has no solution. known: all inputs, the window's first."""
    words, limit = [], 4 * bound * max(1.0, float(seen.abs().max()))
    inputs = torch.stack([*known, torch.zeros_like(known[0])])
    for i, (row, output) in enumerate(zip(rows, seen, strict=True)):
        weight, taps = row["weight"], row["weight"].shape[-1]
        at = torch.cartesian_prod(*[torch.arange(len(inputs))] * taps)
        y = row["bias"] + sum(inputs[at[:, t]] * weight[:, t] for t in range(taps))
        fit = (F.silu(y) - output).abs().amax(1) <= limit
        if not fit.any():
            return None
        moved = (at != torch.arange(i, i + taps)).sum(1)
        for t, j in enumerate(at[torch.where(fit, moved, taps + 1).argmin()].tolist()):
            if j != i + t:
                of = f"input {j - len(known) + len(rows)}" if j < len(known) else "nothing"
                words.append(f"tap {t} of row {i} takes {of}")
    return "other-row", f"{'; '.join(words)} (0: the first row's)"


def mapped(
    known: Sequence[torch.Tensor], rows: Sequence[Row], seen: torch.Tensor, bound: float
) -> tuple[str, str] | None:
    """Cause and sentence if channels of a convolution take the input, weight or bias of other
    channels; known: as above."""
    weight, bias = rows[0]["weight"], rows[0]["bias"]
    taps, inputs = weight.shape[-1], torch.stack([*known], -1)
    before = inputs * (torch.arange(len(known)) < taps - 1)  # of the window alone
    every, old = (  # the sum of each channel's inputs, in each row, with every channel's weight
        torch.einsum("crt,dt->cdr", x.unfold(-1, taps, 1), weight) for x in (inputs, before)
    )
    own, kept, of = every.diagonal().T[:, None], old.diagonal().T[:, None], bias[:, None]
    limit = 4 * bound * max(1.0, float(seen.abs().max()))
    for name, y in {
        "weight": every + of[:, None],
        "bias": own + of,
        "weight and bias": every + of,
        "input": (every - old).transpose(0, 1) + kept + of[:, None],
    }.items():
        fit = (F.silu(y) - seen.T[:, None]).abs().amax(2) <= limit
        wrong = ~fit.diagonal()
        if wrong.any() and fit.any(1).all():
            channel, *_ = wrong.nonzero().flatten().tolist()
            other = int(fit[channel].nonzero()[0])
            return "head-mapping", f"channel {channel} takes the {name} of channel {other}"
    return None


def window(at: Sequence[int], n: int, accepted: int) -> tuple[str, str]:
    """Cause and sentence of a window with these of n inputs, of which the first `accepted` were
    accepted and the last is zero."""
    shifted = at[-1] < accepted and all(b - a == 1 for a, b in pairwise(at))
    cause = "stale-column" if shifted else "window-not-rolled-back"
    names = [f"{i - accepted + 1}" if i < n - 1 else "nothing" for i in at]
    return cause, f"the window holds inputs {', '.join(names)} (0: the last that was accepted)"


def windows(
    known: Sequence[torch.Tensor], accepted: int, width: int, is_later: bool
) -> Iterator[Way]:
    """Windows of other inputs than the last accepted ones; if an input is repeated, taps are at
    fault, as no pass leaves such a window; likewise for exchanged inputs before the first pass."""
    right = [*range(accepted - width, accepted)]
    for at in product(range(len(known)), repeat=width):
        inputs = [i for i in at if i < len(known) - 1]
        cause, words = window(at, len(known), accepted)
        cause = cause if len({*inputs}) == len(inputs) else "other-row"
        if is_later or sorted(at) != right:
            yield cause, words, torch.stack([known[i] for i in at], -1)


def summed(
    known: Sequence[torch.Tensor], rows: Sequence[Row], seen: torch.Tensor, bound: float
) -> tuple[str, str] | None:
    """Cause and sentence if each row of a convolution sums its taps, its bias and earlier rows'
    sums with wrong factors, solved for where the activation can be inverted; known: as above."""
    sums, said = list[torch.Tensor](), dict[str, torch.Tensor]()
    for i, (row, output) in enumerate(zip(rows, seen, strict=True)):
        taps = row["weight"].shape[-1]
        parts = [row["weight"][:, t] * known[i + t] for t in range(taps)] + [row["bias"], *sums]
        names = [*(f"tap {t}" for t in range(taps)), "the bias"]
        wanted = [1.0] * len(names) + [0.0] * i
        names += [f"the sum of row r - {i - j}" for j in range(i)]
        basis, above = torch.stack(parts, -1), output > 0.05  # below 0 two sums have one output
        total = output[above]
        for _ in range(60):
            total = output[above] * (1 + torch.exp(-total))
        if int(above.sum()) < len(parts) + 2:
            return None
        share = torch.linalg.lstsq(basis[above], total[:, None], driver="gelsd").solution
        sums.append((basis @ share)[:, 0])
        made = F.silu(sums[-1])
        if not (made - output).abs().max() <= 4 * bound * max(1.0, float(output.abs().max())):
            return None
        for name, one, right in zip(names, share[:, 0].tolist(), wanted, strict=True):
            if abs(one - right) > 1e-3:
                words = f"{name} is taken {round(one, 3) + 0.0:g} times"
                said.setdefault(words, torch.zeros(len(rows)) > 0)[i] = True
    each = [", ".join(filter(None, (words, axes(["in rows"], at)))) for words, at in said.items()]
    cause = "other-row" if any("the sum" in words for words in said) else "wrong-term"
    return (cause, "; ".join(each)) if said else None


def activated(
    known: Sequence[torch.Tensor], rows: Sequence[Row], seen: torch.Tensor, bound: float
) -> tuple[str, str] | None:
    """Cause and sentence if a convolution's outputs are another smooth function of their sums than
    SiLU; known: as above."""
    weight, inputs = rows[0]["weight"][:, None], torch.stack([*known], -1)[None]
    y, at = F.conv1d(inputs, weight, rows[0]["bias"], groups=len(weight))[0].T.flatten().sort()
    made = seen.flatten()[at]
    ways = ((off(made, x), ("wrong-term", words)) for words, x in instead("silu", y).items())
    if found := nearest(ways, 4 * bound):
        return found
    more = made - F.silu(y)
    share = (y[1:-1] - y[:-2]) / (y[2:] - y[:-2]).clamp(min=1e-12)
    rest = more[:-2] + share * (more[2:] - more[:-2]) - more[1:-1]
    least, most = (float(x.abs().quantile(0.9)) for x in (rest, more))
    if len(y) < _LEAST or not bound < most or least > most / 8:
        return None
    return "wrong-term", "outputs are another function of their sums than SiLU"


def advanced(shape: Shape, seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    """By how many values outputs [rows, heads, d_v] advance per row if that is wrong, and
    everything written once fits; else ""."""
    n, size = len(seen), seen[0].numel()
    for s in sorted({a * b for a in (1, *shape.state, shape.n_groups) for b in shape.state[1:]}):
        at = torch.arange(size) + s * torch.arange(n)[:, None]
        at, right = at.flatten(), wanted.flatten()
        once = (at < seen.numel()) & (at.bincount()[at] == 1)
        moved = once & (at != torch.arange(n * size))
        if s != size and moved.any() and same(seen.flatten()[at[once]], [right[once]], bound):
            return f"the output of row r is written {s} r values on, not {size} r"
    return ""


def tile(seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> bool:
    """Whether a range of the last dimension is wrong, and no other columns are, even slightly."""
    error = (seen - wanted).abs().flatten(0, -2).amax(0)
    columns = (error > bound * max(1.0, float(wanted.abs().max()))).nonzero().flatten()
    n, rest = len(columns), error.sort().values[: len(error) - len(columns)]
    whole = 0 < n <= len(error) - 8 and int(columns[-1] - columns[0]) == n - 1
    return whole and 16 * float(rest.max()) <= float(error.max())


def closest(
    seen: torch.Tensor, ways: Iterable[Way], bound: float, right: torch.Tensor, last: bool = False,
    sought: Collection[str] = (),
) -> tuple[str, str] | None:  # fmt: skip
    """Cause and sentence of the way with the nearest result, if near enough; if none explains
    everything, of the one that explains all wrong columns of heads or (last: of a state) values;
    sought: causes to look for, empty: all."""
    parts = _apart(right, last)
    limit = min(bound, max(4 * bound, off(seen, right)) / 16)  # of nearly all of the error
    there = (_apart(seen, last) - parts).abs().amax(1) > bound
    some = not there.all() and there.sum() * parts.shape[1] > _LEAST
    best, least, part, nearest = None, limit, None, limit
    for cause, sentence, made in (way for way in ways if not sought or way[0] in sought):
        error = off(seen, made)
        if error <= (least / 2 if best else least):  # a later way must be clearly nearer
            best, least = (cause, sentence), error
            if error <= bound / 16:  # within rounding
                break
        elif some and not best:
            made = _apart(made.view(seen.shape), last)
            error = off(_apart(seen, last)[there], made[there])
            if error <= (nearest / 2 if part else nearest):
                part, nearest = (cause, sentence), error
    return best or part


def nearest(
    ways: Iterable[tuple[float, tuple[str, str]]], limit: float, sought: Collection[str] = ()
) -> tuple[str, str] | None:
    """Cause and sentence of the way with the least error, if below the limit; a later one must be
    clearly nearer, and one within rounding is enough; sought: as above."""
    best, enough = None, limit / 64
    for error, way in ways:
        if error <= limit and (not sought or way[0] in sought):
            best, limit = way, error / 2
        if best and error <= enough:
            break
    return best


def _apart(x: torch.Tensor, last: bool) -> torch.Tensor:
    """Values [parts, …] of outputs [rows, …] or, last, of a state."""
    return x.reshape(-1, 1) if last else x.flatten(1).T


def off(seen: torch.Tensor, made: torch.Tensor) -> float:
    """The largest difference relative to the largest value, 1 at least."""
    other = made.view(seen.shape)
    return float((seen - other).abs().max()) / max(float(other.abs().max()), 1.0)


def same(seen: torch.Tensor, wanted: Sequence[torch.Tensor], bound: float) -> bool:
    return off(seen, torch.stack(list(wanted))) <= 4 * bound
