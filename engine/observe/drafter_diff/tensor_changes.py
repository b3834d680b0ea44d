"""What a kernel may read in place of a tensor or a number, or give, and what layers have in place
of windows and ropes: a sentence's part, and how it is made of the right one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import product
from types import FunctionType
from typing import Any

import torch

from engine.model.layers import RopeTables
from engine.model.rope import RopeConfig
from kernels.pointwise import geglu, swiglu

FACTORS = (0.0, 0.5, 2.0, -1.0, 0.25, 4.0, math.sqrt(0.5), math.sqrt(2.0))
_NUMBERS = (0.0, 0.01, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 100.0, 1e3, 1e4, 1e5)
"""Factors of a number that a kernel is given, as an eps or a limit."""
TensorChange = Callable[[torch.Tensor], torch.Tensor]
MOVED: dict[str, TensorChange] = {
    "that of the row before": lambda x: rows_on(x, 1),
    "that of the row after": lambda x: rows_on(x, -1),
    "with its halves exchanged": lambda x: halves(x),
    "with its numbers in reverse order": lambda x: x.flip(-1),
}
"""Rows in place of others, and numbers of each in other places."""


def halves(x: torch.Tensor) -> torch.Tensor:
    """[..., n] with its halves exchanged."""
    return x.roll(x.shape[-1] // 2, -1) if x.is_floating_point() else x


def rows_on(x: torch.Tensor, by: int) -> torch.Tensor:
    """[..., n_rows, n] with each row in the place `by` after its own."""
    axis = -2 if x.is_floating_point() and x.dim() > 1 else -1
    if by == 1 and x.storage_offset() >= x.stride(axis) > 0:  # its first row is not the first one
        return x.as_strided(x.shape, x.stride(), x.storage_offset() - x.stride(axis)).contiguous()
    return x.roll(by, axis).contiguous()


def other_values(x: Any, is_weight: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Of an argument, a weight or not: how a sentence on it ends, and the change."""
    if isinstance(x, float):
        for value in (1.0, *(factor * x for factor in _NUMBERS)):
            yield f"as {value:.3g}, not {x:.3g}", lambda _, value=value: value
        yield "as about the square root of it", math.sqrt
        yield "as about its square", lambda x: x * x
    elif isinstance(x, FunctionType) and {"gate", "up"} <= {*signature(x).parameters}:
        for about, other in _other_gates(x):
            yield f"as {about}, not {x.__name__}", lambda _, other=other: other
    elif isinstance(x, list | tuple) and len(x) > 1 and all(map(is_floats, x)):
        yield "in reverse order", lambda x: x[::-1]
        for i in range(len(x)):
            before = partial(rows_on, by=1)
            yield f"with its part {i} of zeros", partial(with_part, i, torch.zeros_like)
            yield f"with its part {i} of the row before", partial(with_part, i, before)
    elif is_floats(x) and is_weight:
        root = x.shape[-1] ** 0.5 if x.dim() > 1 else 1.0
        yield "as ones", partial(torch.full_like, fill_value=root)
        yield "with one added", partial(torch.add, other=root)
        yield "less one", partial(torch.sub, other=root)
        yield "in another order: its halves are exchanged", halves
        yield "in reverse order", partial(torch.flip, dims=[-1])
        yield "of the next of its rows", partial(torch.roll, shifts=1, dims=0)
    elif is_floats(x):
        of_heads = [x.shape[-1] ** by for by in (0.5, -0.5)] if x.dim() > 3 else []  # of scores
        for factor in dict.fromkeys((*FACTORS[1:], *of_heads)):
            yield f"{factor:.3g} times what it should be", partial(torch.mul, other=factor)
        yield from ((f"as {about}", change) for about, change in MOVED.items())
        yield "less its mean", lambda x: x - x.mean(-1, keepdim=True)
        yield "with neighbours for what is half of it apart", partial(_reordered, (2, -1))
        yield "with every second number for halves", partial(_reordered, (-1, 2))
    elif torch.is_tensor(x) and x.dtype is torch.int64 and x.dim() > 1:
        yield from ((f"as {about}", change) for about, change in [*MOVED.items()][:2])
        yield "counted from the first of its pass", lambda x: (x - x[..., :1]).clamp(min=0)
        yield "one too low", lambda x: (x - 1).clamp(min=0)
    elif torch.is_tensor(x) and x.dtype is torch.bool and x.dim() == 3:
        for about, which in _SEEN.items():
            yield f"so that rows of a pass {about}", partial(_seeing, which)


def _other_gates(own: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What a feed-forward part may do with its two halves."""
    yield from ((one.__name__, one) for one in (swiglu, geglu) if one is not own)
    yield "the same of exchanged halves", lambda gate, up, *more, **how: own(up, gate, *more, **how)
    yield "a product", lambda gate, up, *_, **how: gate * up
    yield "its second half alone", lambda gate, up, *_, **how: up.contiguous()
    ones = torch.ones_like
    yield "its first half alone", lambda gate, up, *more, **how: own(gate, ones(up), *more, **how)


def is_floats(x: Any) -> bool:
    return torch.is_tensor(x) and x.is_floating_point() and x.dim() > 0


def with_part(i: int, change: TensorChange, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [*x[:i], change(x[i]), *x[i + 1 :]]


def _reordered(sizes: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[-1] % 2 else x.unflatten(-1, sizes).transpose(-1, -2).flatten(-2)


_SEEN: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "see nothing of each other": lambda _, own: own.logical_and_(_first_of(own, 0)),
    "see nothing of the context, each other alone": lambda mask, own: mask[
        ..., : -own.shape[-1]
    ].fill_(False),
    "see the context and the first of them": lambda _, own: own.logical_and_(_first_of(own, 1)),
    "see those after them, too": lambda _, own: own.fill_(True),
    "see none of those after them": lambda _, own: own.tril_(),
    "see all but the oldest": lambda mask, _: mask[..., 0].fill_(False),
}
"""How rows of a pass may see otherwise, by what is done to a mask and to its part of own cells."""


def _first_of(own: torch.Tensor, n: int) -> torch.Tensor:
    """The mask of rows that see themselves and the first n."""
    seen = torch.eye(own.shape[-1], dtype=torch.bool, device=own.device)
    seen[:, :n] = True
    return seen


def _seeing(
    change: Callable[[torch.Tensor, torch.Tensor], object], mask: torch.Tensor
) -> torch.Tensor:
    """A mask [B, T, N] of a pass whose own cells are the last ones."""
    mask = mask.clone()
    change(mask, mask[..., mask.shape[-1] - mask.shape[1] :])
    return mask


_MOST_LAYERS = 5


def other_windows(own: Sequence[int | None]) -> Iterator[tuple[str, Sequence[int | None]]]:
    """Windows of layers that are not these, and what that is."""
    sizes = dict.fromkeys(size for size in own if size)
    if not sizes:
        return
    about = "its windows are left out: a block sees all of the context"
    found: dict[str, list[int | None]] = {about: [None] * len(own)}
    if len(own) <= _MOST_LAYERS:
        for which in product((None, *sizes), repeat=len(own)):
            found[f"windows of its layers are {_listed(which)}, not {_listed(own)}"] = [*which]
    for by in (1, -1, max(sizes), -(max(sizes) // 2)):
        moved = [size + by if size else None for size in own]
        found[f"windows of its layers are {_listed(moved)}, not {_listed(own)}"] = moved
    yield from ((about, windows) for about, windows in found.items() if windows != [*own])


def _listed(windows: Sequence[int | None]) -> str:
    return ", ".join(str(size or "none") for size in windows)


def other_ropes(
    rope: RopeTables, places: Sequence[int], width: int = 0
) -> Iterator[tuple[str, RopeTables]]:
    """How ropes may turn otherwise: a sentence's part, and what is in their place. places:
    positions from which on they may. width: numbers of a head."""
    own, device = rope.config, rope.device
    for about, config in _other_angles(own, width) if own is not None else ():
        yield about, RopeTables(config, device)
    moved: dict[str, Callable[..., torch.Tensor]] = {}
    for at in places:
        about = f"turns positions from {at} on as"
        moved[f"{about} {at}"] = partial(torch.clamp, max=at)
        moved[f"{about} those from 0 on"] = lambda x, at=at: x - at * (x >= at)
    for by, where in ((1, "after"), (-1, "before")):
        moved[f"turns a position as the one {where} it"] = lambda x, by=by: (x + by).clamp(min=0)
    yield from ((about, RopeTables(own, device, place=place)) for about, place in moved.items())


_DIGITS, _BASES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 16.0), (1, 2, 3, 5)
"""What factors that people choose begin with, and frequency bases."""


def _other_angles(own: RopeConfig, width: int) -> Iterator[tuple[str, RopeConfig]]:
    """Those that turn otherwise, of those that turn alike the first."""
    seen = set[str]()
    for about, config in (("", own), *_scaled(own, width)):
        turns = " ".join(f"{x:.3g}" for x in (config.magnitude, *config.inverse_frequencies()))
        if about and turns not in seen:
            yield about, config
        seen.add(turns)


def _scaled(own: RopeConfig, width: int) -> Iterator[tuple[str, RopeConfig]]:
    plain = replace(own, scaling="none", factors=())
    yield "is not scaled, as its file says", plain
    for n in (n for n in (width, width // 2, width // 4) if n and n % 2 == 0):
        about = f"turns {n} of the {width} numbers of a head, not {own.n_rot}"
        yield about, replace(plain, n_rot=n)
    for power, digit in product(range(2, 9), _BASES):
        about = f"has a frequency base of about {digit * 10.0**power:g}, not {own.freq_base:g}"
        yield about, replace(own, freq_base=digit * 10.0**power)
    ones = own.factors or (1.0,) * (own.n_rot // 2)
    for x in (0.0, -1.0, *(y for digit in _DIGITS for y in (1 / digit, digit))):
        divided = tuple(one / x if x else math.inf for one in ones)
        yield f"turns by {x:.3g} times the angles", replace(own, factors=divided)
    for x in (0.5, 0.25, 0.75):
        about, n = f"turns the first {x:g} of its pairs alone", round(x * len(ones))
        yield about, replace(own, factors=(*ones[:n], *[math.inf] * (len(ones) - n)))
    # scaling that a file has and an engine has not, or the other way round
    for factor, n_ctx in product((2.0, 4.0, 8.0, 32.0), (1 << i for i in range(6, 16))):
        how = f"with a factor of {factor:g} for contexts of more than {n_ctx} tokens, or so"
        yarn = replace(plain, scaling="yarn", factor=factor, n_ctx_orig=n_ctx)
        yield f"is scaled {how} (yarn)", yarn
        share = torch.tensor(plain.inverse_frequencies()) * n_ctx / (2 * math.pi)
        keep = ((share - 1) / 3).clamp(0, 1)  # of pairs that turn once to four times in n_ctx
        factors = 1 / (keep + (1 - keep) / factor)
        yield f"is scaled {how} (llama3)", replace(plain, factors=tuple(factors.tolist()))


# -- calls of a kernel ------------------------------------------------------------------------

Given = dict[int | str, Any]
"""Arguments of a call, by position or name."""
Way = Callable[[Callable[[Given], Any], Given], Any]
"""What is called in place of a kernel, with it and with what it is given."""


def called_with(own: Callable[..., Any], given: Given) -> Any:
    """What a function gives of these arguments."""
    args = (x for key, x in given.items() if isinstance(key, int))
    return own(*args, **{key: x for key, x in given.items() if isinstance(key, str)})


def as_given(key: int | str) -> Way:
    return lambda _, given: given[key]


def scaled_by(factor: float) -> Way:
    return lambda own, given: own(given) * factor


def with_changed(changes: Mapping[Any, Callable[[Any], Any]]) -> Way:
    return lambda own, given: own(given | {key: changes[key](given[key]) for key in changes})


def flipped(axes: Mapping[Any, int]) -> Way:
    """Arguments that are read from the last number of an axis to the first."""
    return with_changed({key: partial(torch.flip, dims=[axis]) for key, axis in axes.items()})


def with_exchanged(a: int | str, b: int | str) -> Way:
    return lambda own, given: own(given | {a: given[b], b: given[a]})


def within_heads(n: int, part: slice, change: Way) -> Way:
    """What a way gives in some of n heads alone."""

    def within(own: Callable[[Given], Any], given: Given) -> Any:
        both = own(given).clone(), change(own, given)
        found, other = (x if x.dim() == 4 else x.unflatten(-1, (n, -1)) for x in both)
        found[..., part, :] = other[..., part, :]
        return both[0]

    return within
