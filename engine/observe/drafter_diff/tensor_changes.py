"""Changes of tensors and numbers that a kernel call may read or return, and of layers' windows and
ropes: a part of a sentence, and the function that makes the changed value from the right one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from inspect import signature
from itertools import combinations, product
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from engine.model.drafters.dflash import MarkovHead, Selector
from engine.model.layers import RopeTables
from engine.model.rope import RopeConfig
from engine.observe.drafter_diff.records import BLOCK, CANDIDATES, POSITIONS, ROWS
from kernels.linear import pack
from kernels.linear.dequant import dequantise
from kernels.linear.packed import BlockData, PackedWeight
from kernels.pointwise import geglu, swiglu

FACTORS = (0.0, 0.5, 2.0, -1.0, 0.25, 4.0, math.sqrt(0.5), math.sqrt(2.0))
_NUMBERS = (0.0, 0.01, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 100.0, 1e3, 1e4, 1e5)
"""Factors of a kernel's number, such as an eps or a limit."""
TensorChange = Callable[[torch.Tensor], torch.Tensor]
MOVED: dict[str, TensorChange] = {
    "that of the previous row": lambda x: rows_on(x, 1),
    "that of the next row": lambda x: rows_on(x, -1),
}
"""Rows in place of others."""


def _of_half(is_first: bool, x: torch.Tensor) -> torch.Tensor:
    inside = torch.arange(x.shape[-1], device=x.device) < x.shape[-1] // 2
    return torch.where(inside == is_first, x, 0.0)


def _reordered(sizes: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[-1] % 2 else x.unflatten(-1, sizes).transpose(-1, -2).flatten(-2)


def halves(x: torch.Tensor) -> torch.Tensor:
    """[..., n] with its halves swapped."""
    return x.roll(x.shape[-1] // 2, -1)


def rounded(n_bits: int, x: torch.Tensor, axes: Sequence[int] = (-1,)) -> torch.Tensor:
    """Rows as n_bits integers, scaled by the largest magnitude along these axes, all if empty."""
    step = x.abs().amax(tuple(axes), keepdim=True).clamp(min=1e-30) / (2 ** (n_bits - 1) - 1)
    return (x / step).round() * step


def rounded_by_pass(n_bits: int, sizes: list[int], x: torch.Tensor) -> torch.Tensor:
    """The same with one scale for all rows of a pass."""
    return torch.cat([rounded(n_bits, rows, ()) for rows in x.split(sizes)])


def _as_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn).to(x.dtype)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rows times a Hadamard matrix of the largest power of two that divides their width, as in
    caches with few bits."""
    n, size = x.shape[-1], 1
    while n % (2 * size) == 0:
        a, b = x.unflatten(-1, (-1, 2, size)).unbind(-2)
        x, size = torch.stack((a + b, a - b), -2).flatten(-3), 2 * size
    return x / size**0.5


_LARGEST_E4M3, _TINY = 448.0, 1e-30
ROUNDED: dict[str, TensorChange] = {
    **{f"rounded to about {n} bits": partial(rounded, n) for n in (2, 3, 4)},
    "rounded to e4m3": _as_e4m3,
    "rounded to bf16": lambda x: x.bfloat16().to(x.dtype),
}
CHANGED: dict[str, TensorChange] = {
    "normed": lambda x: x * (x.square().mean(-1, keepdim=True) + _TINY).rsqrt(),
    **ROUNDED,
    "in another order: halves are exchanged": halves,
    "in reverse order": partial(torch.flip, dims=[-1]),
    "in another order: interleaved instead of in halves": partial(_reordered, (2, -1)),
    "in another order: in halves instead of interleaved": partial(_reordered, (-1, 2)),
    "without its negative numbers": partial(torch.clamp, min=0.0),
    "without their signs": torch.abs,
    "less their mean": lambda x: x - x.mean(-1, keepdim=True),
    "zeros in the first half": partial(_of_half, False),
    "zeros in the second half": partial(_of_half, True),
    "rotated by a Hadamard matrix": _rotated,
}
"""Possible changes of the numbers of each row, wherever rows are handed on."""
AS_IF = "as if it were "
_MOST_ROUNDED, _BLOCK = 1 << 22, 32
"""Most numbers of a matrix that is tried rounded, and the numbers that share a scale."""


def _numbers_of(matrix: PackedWeight) -> torch.Tensor | None:
    """f32 [out, in], None if it is large or has another layout."""
    data, n = matrix.data, math.prod(matrix.shape)
    if n > _MOST_ROUNDED or matrix.factors is not None:
        return None
    if isinstance(data, BlockData):
        flat = data.bytes.contiguous().view(-1)
        return dequantise(flat, data.type, n).view(matrix.shape)
    is_plain = is_floats(data) and data.layout is torch.strided and not data.is_mkldnn
    return data.float() if is_plain and data.shape == matrix.shape else None


def _of_blocks(change: TensorChange, x: torch.Tensor) -> torch.Tensor:
    return change(x.unflatten(-1, (-1, _BLOCK))).flatten(-2)


OF_MATRICES: dict[str, TensorChange] = {
    **ROUNDED,
    **{f"{about} in blocks of {_BLOCK}": partial(_of_blocks, x) for about, x in ROUNDED.items()},
    "with halves of its results exchanged": lambda x: x.roll(len(x) // 2, 0),
    "with results in halves instead of interleaved": lambda x: _reordered((-1, 2), x.T).T,
    "with results interleaved instead of in halves": lambda x: _reordered((2, -1), x.T).T,
    "transposed": lambda x: x.T,
}


@lru_cache(16)
def _other_matrix(about: str, matrix: PackedWeight) -> PackedWeight:
    """A matrix with changed numbers; unchanged if that is impossible."""
    numbers, n_in = _numbers_of(matrix), matrix.shape[1]
    if numbers is None or ("blocks" in about and n_in % _BLOCK):
        return matrix
    other = OF_MATRICES[about](numbers)
    return pack(other.contiguous(), "f32") if other.shape == numbers.shape else matrix


def rows_on(x: torch.Tensor, by: int) -> torch.Tensor:
    """[..., n_rows, n] with each row moved by `by`."""
    axis = -2 if x.is_floating_point() and x.dim() > 1 else -1
    if by == 1 and x.storage_offset() >= x.stride(axis) > 0:  # its first row is not the first one
        return x.as_strided(x.shape, x.stride(), x.storage_offset() - x.stride(axis)).contiguous()
    return x.roll(by, axis).contiguous()


def other_values(x: Any, is_weight: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Changes of an argument, a weight or not: the end of a sentence, and the change."""
    if isinstance(x, float):
        for value in (1.0, *(factor * x for factor in _NUMBERS)):
            yield f"as {value:.3g}, not {x:.3g}", lambda _, value=value: value
        yield "as about its square root", math.sqrt
        yield "as about its square", lambda x: x * x
    elif isinstance(x, PackedWeight):
        yield from ((AS_IF + about, partial(_other_matrix, about)) for about in OF_MATRICES)
    elif isinstance(x, FunctionType) and {"gate", "up"} <= {*signature(x).parameters}:
        for about, other in _other_gates(x):
            yield f"as {about}, not {x.__name__}", lambda _, other=other: other
    elif isinstance(x, list | tuple) and len(x) > 1 and all(map(is_floats, x)):
        yield "in reverse order", lambda x: x[::-1]
        for i in range(len(x)):
            before = partial(rows_on, by=1)
            yield f"with zeros in its part {i}", partial(with_part, i, torch.zeros_like)
            yield f"with its part {i} from the previous row", partial(with_part, i, before)
    elif is_floats(x):
        yield from ((AS_IF + about, change) for about, change in CHANGED.items())
    if is_floats(x) and is_weight:
        root = x.shape[-1] ** 0.5 if x.dim() > 1 else 1.0
        yield "as ones", partial(torch.full_like, fill_value=root)
        yield "with one added", partial(torch.add, other=root)
        yield "less one", partial(torch.sub, other=root)
        yield "shifted by one row", partial(torch.roll, shifts=1, dims=0)
    elif is_floats(x):
        of_heads = [x.shape[-1] ** by for by in (0.5, -0.5)] if x.dim() > 3 else []  # scores
        for factor in dict.fromkeys((*FACTORS[1:], *of_heads)):
            yield f"{factor:.3g} times the right value", partial(torch.mul, other=factor)
        yield from ((f"as {about}", change) for about, change in MOVED.items())
    elif torch.is_tensor(x) and x.dtype is torch.int64 and x.dim() > 1:
        yield from ((f"as {about}", change) for about, change in MOVED.items())
        yield "counted from the first one in its pass", lambda x: (x - x[..., :1]).clamp(min=0)
        yield "one too low", lambda x: (x - 1).clamp(min=0)
    elif torch.is_tensor(x) and x.dtype is torch.bool and x.dim() == 3:
        for about, which in _SEEN.items():
            yield f"so that rows of a pass {about}", partial(_seeing, which)


def _other_gates(own: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Other functions of a feed-forward part's two halves."""
    yield from ((one.__name__, one) for one in (swiglu, geglu) if one is not own)
    yield "the same of exchanged halves", lambda gate, up, *more, **how: own(up, gate, *more, **how)
    yield "a product", lambda gate, up, *_, **how: gate * up
    yield "only its second half", lambda gate, up, *_, **how: up.contiguous()
    ones = torch.ones_like
    yield "only its first half", lambda gate, up, *more, **how: own(gate, ones(up), *more, **how)


def is_floats(x: Any) -> bool:
    return torch.is_tensor(x) and x.is_floating_point() and x.dim() > 0


def with_part(i: int, change: TensorChange, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [*x[:i], change(x[i]), *x[i + 1 :]]


_SEEN: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "do not see each other": lambda _, own: own.logical_and_(_first_of(own, 0)),
    "see only each other, not the context": lambda mask, own: mask[..., : -own.shape[-1]].fill_(
        False
    ),
    "see the context and the first of them": lambda _, own: own.logical_and_(_first_of(own, 1)),
    "also see later rows": lambda _, own: own.fill_(True),
    "do not see later rows": lambda _, own: own.tril_(),
    "see everything except the oldest token": lambda mask, _: mask[..., 0].fill_(False),
}
"""How rows of a pass may attend differently, by a change of the mask and of its part for own
cells."""


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
    """Windows of layers that differ from these, with words."""
    sizes = dict.fromkeys(size for size in own if size)
    if not sizes:
        return
    about = "its windows are ignored: a block sees the whole context"
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
    """Other rotations of ropes: a part of a sentence, and the replacement. places: positions from
    which on they may apply. width: of a head."""
    own, device = rope.config, rope.device
    for about, config in _other_angles(own, width) if own is not None else ():
        yield about, RopeTables(config, device)
    moved: dict[str, Callable[..., torch.Tensor]] = {}
    for at in places:
        about = f"rotates positions from {at} on as"
        moved[f"{about} {at}"] = partial(torch.clamp, max=at)
        moved[f"{about} those from 0 on"] = lambda x, at=at: x - at * (x >= at)
        moved[f"rotates positions as in a ring of {at}"] = partial(torch.remainder, other=at)
    for by, where in ((1, "after"), (-1, "before")):
        moved[f"rotates a position as the one {where} it"] = lambda x, by=by: (x + by).clamp(min=0)
    yield from ((about, RopeTables(own, device, place=place)) for about, place in moved.items())


_DIGITS, _BASES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 16.0), (1, 2, 3, 5)
"""Leading digits of factors that people choose, and frequency bases."""


def _other_angles(own: RopeConfig, width: int) -> Iterator[tuple[str, RopeConfig]]:
    """Other rope configurations; of equivalent ones the first."""
    seen = set[str]()
    for about, config in (("", own), *_scaled(own, width)):
        turns = " ".join(f"{x:.3g}" for x in (config.magnitude, *config.inverse_frequencies()))
        if about and turns not in seen:
            yield about, config
        seen.add(turns)


def _scaled(own: RopeConfig, width: int) -> Iterator[tuple[str, RopeConfig]]:
    plain = replace(own, scaling="none", factors=())
    yield "is not scaled, although its file says so", plain
    for n in (n for n in (width, width // 2, width // 4) if n and n % 2 == 0):
        about = f"rotates {n} of the {width} dimensions of a head, not {own.n_rot}"
        yield about, replace(plain, n_rot=n)
    for power, digit in product(range(2, 9), _BASES):
        about = f"has a frequency base of about {digit * 10.0**power:g}, not {own.freq_base:g}"
        yield about, replace(own, freq_base=digit * 10.0**power)
    ones = own.factors or (1.0,) * (own.n_rot // 2)
    for x in (0.0, -1.0, *(y for digit in _DIGITS for y in (1 / digit, digit))):
        divided = tuple(one / x if x else math.inf for one in ones)
        yield f"rotates by {x:.3g} times the angles", replace(own, factors=divided)
    for x in (0.5, 0.25, 0.75):
        about, n = f"rotates only the first {x:g} of its pairs", round(x * len(ones))
        yield about, replace(own, factors=(*ones[:n], *[math.inf] * (len(ones) - n)))
    # scaling that only the file or only the engine has
    for factor, n_ctx in product((2.0, 4.0, 8.0, 32.0), (1 << i for i in range(6, 16))):
        how = f"with a factor of {factor:g} for contexts of more than about {n_ctx} tokens"
        yarn = replace(plain, scaling="yarn", factor=factor, n_ctx_orig=n_ctx)
        yield f"is scaled {how} (yarn)", yarn
        share = torch.tensor(plain.inverse_frequencies()) * n_ctx / (2 * math.pi)
        keep = ((share - 1) / 3).clamp(0, 1)  # pairs that turn one to four times in n_ctx
        factors = 1 / (keep + (1 - keep) / factor)
        yield f"is scaled {how} (llama3)", replace(plain, factors=tuple(factors.tolist()))


# -- calls of a kernel ------------------------------------------------------------------------

Given = dict[int | str, Any]
"""Arguments of a call, by position or name."""
Way = Callable[[Callable[[Given], Any], Given], Any]
"""A replacement of a kernel, called with the kernel and its arguments."""


def called_with(own: Callable[..., Any], given: Given) -> Any:
    """The result of a function for these arguments."""
    args = (x for key, x in given.items() if isinstance(key, int))
    return own(*args, **{key: x for key, x in given.items() if isinstance(key, str)})


def as_given(key: int | str) -> Way:
    return lambda _, given: given[key]


def scaled_by(factor: float) -> Way:
    return lambda own, given: own(given) * factor


def with_changed(changes: Mapping[Any, Callable[..., Any]]) -> Way:
    return lambda own, given: own(given | {key: changes[key](given[key]) for key in changes})


def flipped(axes: Mapping[Any, int]) -> Way:
    """Arguments read in reverse along an axis."""
    return with_changed({key: partial(torch.flip, dims=[axis]) for key, axis in axes.items()})


def with_exchanged(a: int | str, b: int | str) -> Way:
    return lambda own, given: own(given | {a: given[b], b: given[a]})


def within_heads(n: int, part: slice, change: Way) -> Way:
    """A way applied in some of n heads alone."""

    def within(own: Callable[[Given], Any], given: Given) -> Any:
        both = own(given).clone(), change(own, given)
        found, other = (x if x.dim() == 4 else x.unflatten(-1, (n, -1)) for x in both)
        found[..., part, :] = other[..., part, :]
        return both[0]

    return within


# -- calls at their places ----------------------------------------------------------------------

CHOOSE = (MarkovHead.__name__, Selector.__name__)
_OF_ROWS = ("fuse", "context", "feature", "hnorm")
_MOST_HEADS = 8


class Operation(NamedTuple):
    """A kernel call at one place of a module. module, name: where its name is bound. code, at: the
    caller and the instruction; owner: whose method that is, part: its name in the parent, layer:
    index of several. given, result: of one call. weights: names of the weights, by position or name
    of an argument."""

    module: Any
    name: str
    code: CodeType
    at: int
    owner: Any
    part: str
    layer: str
    given: Given
    result: Any
    weights: dict[int | str, str]

    @property
    def words(self) -> str:
        """Its name in sentences."""
        whose = " and ".join(f"`{name}`" for name in self.weights.values())
        by = f" by {whose}" if whose else ""
        part = f" ({self.part})" if self.part else ""
        return f"its `{self.name}`{by} in {self.code.co_qualname}{part}"

    @property
    def weight(self) -> Any:
        """The only weight that it reads, None if there is not exactly one."""
        return self.given[next(iter(self.weights))] if len(self.weights) == 1 else None

    @property
    def rows(self) -> Given:
        """Its arguments that are rows of numbers."""
        known = self.given.items()
        return {key: x for key, x in known if is_floats(x) and key not in self.weights}

    @property
    def stage(self) -> str:
        """The stage of a mistake there."""
        names = (*self.weights.values(), self.code.co_name, self.part)
        if "rope" in vars(self.module)[self.name].__module__ + self.code.co_qualname.lower():
            return POSITIONS
        if any(part in name for name in names for part in _OF_ROWS):
            return ROWS
        is_of_choice = self.code.co_qualname.startswith(CHOOSE) or self.part.endswith(CHOOSE)
        return CANDIDATES if is_of_choice else BLOCK


_PLAIN = {"cos": torch.ones_like, "sin": torch.zeros_like}
_TAPS = {"base": 0, "own": 2}
"""Names of arguments: the replacement of angles without rotation, the axis of taps."""


def ways(one: Operation) -> Iterator[tuple[str, Way]]:
    """Possible changes of a kernel call: the end of a sentence, and the replacement."""
    given, rows = one.given, one.rows
    if is_floats(one.result):
        for key, x in rows.items():
            if x.shape == one.result.shape:
                which = "" if len(rows) == 1 or key == 0 else f", and returns its argument {key}"
                yield f"is skipped{which}", as_given(key)
                if key == 0:
                    yield "is applied twice", lambda own, its: own(its | {0: own(its)})
        of_width = [one.result.shape[-1] ** by for by in (0.5, -0.5)] if one.weights else []
        for factor in dict.fromkeys((*of_width, *FACTORS)):
            yield f"returns {factor:.3g} times the right result", scaled_by(factor)
        if one.weights:  # 0 for a gate: left out
            yield "returns ones", lambda own, its: torch.ones_like(own(its))
        in_heads = {"returns zeros": scaled_by(0.0)}
        names = [*signature(vars(one.module)[one.name]).parameters]
        of_name = {name: i for i, name in enumerate(names) if i in given}
        if names[:3] == ["q", "k", "v"]:
            shared = given[0].shape[2] // given[1].shape[1]
            by_turns: Any = dict.fromkeys((1, 2), lambda x: x.repeat(1, shared, 1, 1))
            yield "assigns key heads to query heads in turn", with_changed(by_turns)
        if plain := {of_name[name]: x for name, x in _PLAIN.items() if name in of_name}:
            in_heads["rotates nothing"] = with_changed(plain)
            yield "rotates nothing", in_heads["rotates nothing"]
        n = _n_heads(one)
        heads = {f"head {i}": slice(i, i + 1) for i in range(n)}
        for i in range(2, n):  # of queries, or keys
            heads |= {f"first {i} heads": slice(i), f"last {n - i + 1} heads": slice(i - 1, n)}
        for (which, part), (about, change) in product(heads.items(), in_heads.items()):
            yield f"{about} in its {which}", within_heads(n, part, change)
        if "base" in of_name:  # of a convolution
            taps = {of_name[name]: axis for name, axis in _TAPS.items() if name in of_name}
            yield "has its taps in reverse order", flipped(taps)
            turned = flipped({key: 1 for key, x in rows.items() if x.dim() > 2})
            yield "reads rows after its own, not before", lambda own, its: turned(own, its).flip(1)
    elif torch.is_tensor(one.result):
        for key, x in given.items():
            if torch.is_tensor(x) and (x.shape, x.dtype) == (one.result.shape, one.result.dtype):
                yield "is skipped", as_given(key)
    for key, x in given.items():
        what = f"`{one.weights[key]}`" if key in one.weights else f"argument {key}"
        what = "its matrix" if isinstance(x, PackedWeight) else what
        if key in one.weights and isinstance(key, str):
            yield f"is called without {what}", with_changed({key: lambda _: None})
        for about, change in other_values(x, key in one.weights):
            yield f"reads {what} {about}", with_changed({key: change})
    for a, b in combinations(rows, 2):
        if rows[a].shape == rows[b].shape:
            yield f"has its arguments {a} and {b} exchanged", with_exchanged(a, b)


def _n_heads(one: Operation) -> int:
    """Heads in a kernel's result, 0 if it has none or many."""
    (*_, n) = one.result.shape
    known = (
        x.shape for x in (one.result, *one.given.values()) if torch.is_tensor(x) and x.dim() == 4
    )
    heads = next((shape[2] for shape in known if n in (shape[3], shape[2] * shape[3])), 0)
    return heads if 1 < heads <= _MOST_HEADS else 0
