"""What a drafter's module may compute otherwise: one search over all its parts. Each norm, rope,
table, projection, sublayer, layer and head is left out, scaled, exchanged, or reads another row or
its halves in another order; always, or only in what is written into memory, or while it drafts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations, count
from typing import Any, NamedTuple

import torch

from engine.model.drafters.dflash import MarkovHead, Selector
from engine.model.layers import OutputHead, ResidualBlock
from engine.model.rope_tables import RopeTables
from engine.model.weights import Embedding, Projection
from engine.observe.drafter_diff.records import BLOCK, CANDIDATES, POSITIONS, ROWS
from kernels.rope import apply_rope, norm_and_rope

Changes = tuple[tuple[Any, str, Any], ...]
"""Objects, their attributes, and what is in place of these."""
PHASES = {
    "": "",
    "write": ", in what is written into its memory of the text",
    "draft": ", while it drafts",
}
"""When a change is in force, by the method of a DraftModel, and how that is said."""
_BASES = (10.0, 0.1, 100.0, 0.01, 50.0, 0.02)
_STRETCHES = (0.0, 0.5, 2.0, 0.25, 4.0, 0.125, 8.0, -1.0)
_FACTORS = (0.5, 2.0, 0.25, 4.0, math.sqrt(0.5), math.sqrt(2.0), 0.0)
_NORMS = ("rms_norm", "rms_norm_rows", "head_norm", "layer_norm", "norm_and_rope")
_OPTIONAL = (
    "_sinks _value_factors _out_scale _factors _embedding_factors _post_norms _convs _scale _ids"
)
_OF_ROWS = ("fuse", "context", "feature", "hnorm")
_MOST_ALONE = 4
"""Layers that are changed one by one, too."""


@contextmanager
def in_place(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While these are in force."""
    changes = [*changes]
    own = [(one, name, vars(one).get(name, _NONE)) for one, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for one, name, value in reversed(own):
            if value is _NONE:
                delattr(one, name)
            else:
                setattr(one, name, value)


_NONE = object()


class PartChange(NamedTuple):
    """A change of one part. phases: of PHASES, when it may be in force."""

    stage: str
    about: str
    changes: Changes
    phases: Sequence[str] = ("",)


class _Site(NamedTuple):
    """The attributes of a name that objects of one class have. owners: those of every layer."""

    name: str
    owners: list[Any]

    @property
    def words(self) -> str:
        """For sentences."""
        return f"`{self.name.strip('_')}` of {type(self.owners[0]).__name__}"


def sites(core: Any) -> Iterator[_Site]:
    """Of a module and of all its parts, layer after layer."""
    owners: dict[type, list[Any]] = {}
    waiting, seen = [core], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        owners.setdefault(type(one), []).append(one)
        for name, value in vars(one).items():
            parts = value if isinstance(value, list | tuple) else [value]
            waiting += [x for x in parts if _is_part(x) and name not in ("head", "config")]
    for same in owners.values():
        for name in vars(same[0]):
            yield _Site(name, same)


def _is_part(x: Any) -> bool:
    return type(x).__module__.startswith("engine.model.") and hasattr(x, "__dict__")


def part_changes(core: Any) -> Iterator[PartChange]:
    """Changes of a module's parts, the likely ones first."""
    found = list(sites(core))
    for kind in (_ropes, _norms, _exchanged, _heads, _scales, _left_out, _layers, _calls):
        yield from kind(found)


# -- positions ---------------------------------------------------------------------------------


def _ropes(found: Sequence[_Site]) -> Iterator[PartChange]:
    for site in found:
        ropes = [getattr(owner, site.name) for owner in site.owners]
        if not all(isinstance(rope, RopeTables) for rope in ropes):
            continue
        others: dict[str, Callable[[RopeTables], RopeTables]] = {}
        for base in _BASES:
            about = f"its rope has {base:g} times the frequency base, or about that"
            others[about] = partial(_turned, base=base)
        for stretch in _STRETCHES:
            about = f"its rope turns by {stretch:g} times the angles, as with another scaling"
            others[about] = partial(_turned, stretch=stretch)
        for share in (0.5, 0.25, 0.75):
            about = f"its rope turns the first {share:g} of its pairs alone (partial dimensions)"
            others[about] = partial(_turned, share=share)
        for about, other in others.items():
            made = [(one, site.name, other(getattr(one, site.name))) for one in site.owners]
            phases = [*PHASES] if "by 0 times" in about else [""]
            yield PartChange(POSITIONS, about, tuple(made), phases)
    about = "its rope turns neighbouring numbers, not those half of a head apart"
    yield PartChange(POSITIONS, about, tuple(_functions(found, ("apply_rope",), _neighbours)))


def _turned(rope: RopeTables, **how: float) -> RopeTables:
    return rope.turned(**how)


def _neighbours(
    own: Callable[..., torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    n = 2 * cos.shape[-1]
    order = [*range(0, n, 2), *range(1, n, 2), *range(n, x.shape[-1])]
    back = sorted(range(len(order)), key=order.__getitem__)
    return own(x[..., order].contiguous(), cos, sin)[..., back].contiguous()


def _functions(
    found: Sequence[_Site], names: Sequence[str], change: Callable[..., Any], *args: Any
) -> Iterator[tuple[Any, str, Any]]:
    """Kernels of these names in place of which `change` is called with their own and `args`,
    wherever a part may call them."""
    modules = dict.fromkeys(type(owner).__module__ for site in found for owner in site.owners)
    for module in (sys.modules[name] for name in (*modules, "kernels.rope")):
        for name in names:
            if name in vars(module):
                yield module, name, partial(change, vars(module)[name], *args)


# -- norms -------------------------------------------------------------------------------------


def _norms(found: Sequence[_Site]) -> Iterator[PartChange]:
    for site in found:
        for words, get, put in _tensors(site, "norm"):
            for owners, whose in _some(site.owners):
                weights = [get(owner) for owner in owners]
                if not all(torch.is_tensor(weight) for weight in weights):
                    continue
                stage = ROWS if any(part in site.name for part in _OF_ROWS) else BLOCK
                name = f"its norm {words}{whose}"
                left_out: Changes = tuple(_functions(found, _NORMS, _unnormed, weights))
                if isinstance(owners[0], OutputHead):
                    left_out = tuple(put(owner, None) for owner in owners)
                yield PartChange(stage, f"{name} is left out", left_out, [*PHASES])
                ones = [weight.shape[-1] ** 0.5 if weight.dim() > 1 else 1.0 for weight in weights]
                for about, factor in (("are left out", 0.0), ("have one added", 1.0)):
                    changes = [
                        put(owner, factor * weight + one)
                        for owner, weight, one in zip(owners, weights, ones, strict=True)
                    ]
                    yield PartChange(stage, f"the weights of {name} {about}", tuple(changes))


def _unnormed(
    own: Callable[..., Any],
    weights: Sequence[torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *more: Any,
) -> Any:
    """A norm that leaves what these weights would norm as it is."""
    if not any(weight is one for one in weights):
        return own(x, weight, eps, *more)
    return apply_rope(x, *more) if own is norm_and_rope else x


def _tensors(
    site: _Site, part: str
) -> Iterator[tuple[str, Callable[[Any], Any], Callable[[Any, Any], tuple[Any, str, Any]]]]:
    """Tensors of a site whose name has a part, by themselves or in lists: words, how to get one of
    an owner, and how to put another in its place."""
    value, name = getattr(site.owners[0], site.name), site.name
    if part not in name:
        return
    if torch.is_tensor(value):
        yield site.words, lambda owner: getattr(owner, name), lambda one, x: (one, name, x)
    elif isinstance(value, list):
        for i in range(len(value)):

            def put(owner: Any, x: Any, i: int = i) -> tuple[Any, str, Any]:
                own = getattr(owner, name)
                return owner, name, [*own[:i], x, *own[i + 1 :]]

            yield f"{site.words} [{i}]", partial(_at, name, i), put


def _at(name: str, i: int, owner: Any) -> Any:
    return getattr(owner, name)[i]


def _some(owners: Sequence[Any]) -> Iterator[tuple[Sequence[Any], str]]:
    """The owners of all layers, and those of one each."""
    yield owners, ""
    if 1 < len(owners) <= _MOST_ALONE:
        yield from (([one], f" in layer {i}") for i, one in enumerate(owners))


# -- scales, and what may be missing -----------------------------------------------------------


def _scales(found: Sequence[_Site]) -> Iterator[PartChange]:
    for factor in _FACTORS:
        about = f"its attention has {factor:.3g} times the scale, or about that"
        yield PartChange(BLOCK, about, tuple(_functions(found, _ATTENTIONS, _scaled, factor)))
    for which, about in _SEEN.items():
        changes = tuple(_functions(found, _ATTENTIONS, _seeing, which))
        yield PartChange(BLOCK, f"rows of a block {about}", changes, ["draft"])


_ATTENTIONS = ("attend", "attend_rows")
_SEEN = {
    "alone": "do not see each other",
    "block": "do not see the context, each other alone",
    "first": "see the first of them and the context, not each other",
}


def _seeing(
    own: Callable[..., Any],
    which: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *more: Any,
    **options: Any,
) -> Any:
    """Attention of a pass whose own cells are the last ones."""
    n = q.shape[1]
    mask = mask.clone()
    if which == "block":
        mask[..., : mask.shape[-1] - n] = False
    else:
        inside = torch.eye(n, dtype=torch.bool, device=mask.device)
        inside[:, 0] |= which == "first"
        mask[..., mask.shape[-1] - n :] &= inside
    return own(q, k, v, mask, *more, **options)


def _scaled(
    own: Callable[..., Any], factor: float, q: torch.Tensor, *more: Any, **options: Any
) -> Any:
    return own(q * factor, *more, **options)


def _left_out(found: Sequence[_Site]) -> Iterator[PartChange]:
    for site in found:
        value, name = getattr(site.owners[0], site.name), site.name
        for owners, whose in _some(site.owners):
            none: Any = [None] * len(value) if isinstance(value, list) else None
            if name in _OPTIONAL.split() and value is not None and none != value:
                about, stage = f"its {site.words}{whose} is left out", BLOCK
                if name == "_ids":
                    about = f"ids are not mapped to the target's (d2t) in {site.words.split()[-1]}"
                    stage = CANDIDATES
                changes = tuple((owner, name, none) for owner in owners)
                yield PartChange(stage, about, changes, ["", "draft"])
            elif isinstance(site.owners[0], ResidualBlock) and name in ("_mixer", "_ffn"):
                changes = tuple((owner, name, None) for owner in owners)
                yield PartChange(BLOCK, f"its {site.words}{whose} adds nothing", changes)


# -- what a part reads, and what it gives ------------------------------------------------------


class _Altered:
    """A part that is called in another way."""

    def __init__(self, own: Any, read: _Change | None, given: _Change | None) -> None:
        self._own, self._read, self._given = own, read, given

    def __call__(self, x: Any, *more: Any, **options: Any) -> Any:
        if self._read is not None and torch.is_tensor(x):
            x = self._read(x)
        y = self._own(x, *more, **options)
        return y if self._given is None or not torch.is_tensor(y) else self._given(y)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


_Change = Callable[[torch.Tensor], torch.Tensor]
_READS: dict[str, _Change] = {
    "reads the row before its own": lambda x: _rows_on(x, 1),
    "reads the row after its own": lambda x: _rows_on(x, -1),
    "reads its halves the other way round": lambda x: _halves(x),
}


def _halves(x: torch.Tensor) -> torch.Tensor:
    return x.roll(x.shape[-1] // 2, -1) if x.is_floating_point() else x


def _rows_on(x: torch.Tensor, by: int) -> torch.Tensor:
    axis = -2 if x.is_floating_point() and x.dim() > 1 else -1
    return x.roll(by, axis).contiguous()


def _calls(found: Sequence[_Site]) -> Iterator[PartChange]:
    """Parts that are called with rows or ids."""
    for site in found:
        value, name = getattr(site.owners[0], site.name), site.name
        if not callable(value) or isinstance(value, MarkovHead | Selector | RopeTables):
            continue
        factors = [0.0, 2.0, 0.5]
        if isinstance(value, Embedding):
            factors += [value._width**0.5, value._width**-0.5]
        reads = [(how, change, None) for how, change in _READS.items()]
        gives = [
            (f"gives {factor:.3g} times what it should", None, partial(torch.mul, other=factor))
            for factor in factors
        ]
        head = any(isinstance(owner, MarkovHead | Selector) for owner in site.owners)
        for owners, whose in _some(site.owners):
            for how, read, given in (*gives, *reads):
                changes = tuple(
                    (owner, name, _Altered(getattr(owner, name), read, given)) for owner in owners
                )
                stage = CANDIDATES if head else BLOCK
                if any(part in name for part in _OF_ROWS):
                    stage = ROWS
                yield PartChange(stage, f"its {site.words}{whose} {how}", changes, [*PHASES])


# -- what is taken for another ----------------------------------------------------------------


def _exchanged(found: Sequence[_Site]) -> Iterator[PartChange]:
    """Two parts of one kind and shape, each in the place of the other."""
    by_class: dict[int, list[_Site]] = {}
    for site in found:
        by_class.setdefault(id(site.owners), []).append(site)
    for own in by_class.values():
        for one, other in combinations(own, 2):
            values = [_shape(getattr(site.owners[0], site.name)) for site in (one, other)]
            if values[0] is None or values[0] != values[1]:
                continue
            changes = [
                change
                for owner in one.owners
                for change in (
                    (owner, one.name, getattr(owner, other.name)),
                    (owner, other.name, getattr(owner, one.name)),
                )
            ]
            about = f"{one.name.strip('_')}` and `{other.name.strip('_')}` are exchanged"
            what = "norms" if "norm" in one.name else "parts"
            yield PartChange(BLOCK, f"its {what} `{about}", tuple(changes), [*PHASES])
        pairs = [site for site in own if _is_pair(site)]
        if pairs:
            both = [
                (owner, site.name, _swapped(getattr(owner, site.name)))
                for site in own
                for owner in site.owners
                if site in pairs or isinstance(getattr(owner, site.name), Projection)
            ]
            about = f"the two {pairs[0].words} are exchanged, with what is made for each"
            yield PartChange(BLOCK, about, tuple(both))
        for site in own:
            value = getattr(site.owners[0], site.name)
            if "norm" in site.name and isinstance(value, list) and len(value) == 2:
                swapped = tuple((o, site.name, getattr(o, site.name)[::-1]) for o in site.owners)
                yield PartChange(BLOCK, f"the two of {site.words} are exchanged", swapped)


def _is_pair(site: _Site) -> bool:
    x = getattr(site.owners[0], site.name)
    return torch.is_tensor(x) and x.dim() > 1 and len(x) == 2 and "norm" not in site.name


def _swapped(x: Any) -> Any:
    """Two tensors, or the halves of what a projection gives, in the other order."""
    return x.flip(0) if torch.is_tensor(x) else _Altered(x, None, _halves)


def _shape(x: Any) -> tuple[Any, ...] | None:
    if torch.is_tensor(x):
        return ("tensor", *x.shape)
    if isinstance(x, Embedding):
        return ("table", *x.rows.data.shape)
    return ("matrix", *x.packed.shape) if isinstance(x, Projection) else None


def _layers(found: Sequence[_Site]) -> Iterator[PartChange]:
    for site in found:
        value = getattr(site.owners[0], site.name)
        is_list = isinstance(value, list) and len(value) > 1 and all(map(_is_part, value))
        if len(site.owners) > 1 or not is_list:
            continue
        orders = {
            f"its layer {i} is left out": value[:i] + value[i + 1 :] for i in range(len(value))
        }
        orders["its layers are run in reverse order"] = value[::-1]
        for about, order in orders.items():
            yield PartChange(BLOCK, about, ((site.owners[0], site.name, order),), ["draft"])


def _heads(found: Sequence[_Site]) -> Iterator[PartChange]:
    """What reads the rows of a block after it: logits and hidden rows."""
    for site in found:
        owner, value = site.owners[0], getattr(site.owners[0], site.name)
        if not isinstance(value, Selector | MarkovHead):
            continue
        name = type(value).__name__
        place = (value, "lattice") if isinstance(value, Selector) else (owner, site.name)
        called = getattr(*place)
        for i, what in enumerate(("logits", "hidden rows")):
            for by, which in ((1, "before"), (-1, "after")):
                about = f"its {name} reads the {what} of the row {which} the one that is drafted"
                yield PartChange(CANDIDATES, about, ((*place, partial(_of_row, called, i, by)),))
        if isinstance(value, MarkovHead):
            for rows, where in ((range(1), "its first row"), (range(1, 1024), "all later rows")):
                changed = ((owner, site.name, partial(_unbiased, value, rows)),)
                about = f"the bias of its chain over a block is left out in {where}"
                yield PartChange(CANDIDATES, about, changed)


def _of_row(own: Callable[..., Any], which: int, by: int, *args: Any, **options: Any) -> Any:
    rows = [x.roll(by, 1).contiguous() if i == which else x for i, x in enumerate(args)]
    return own(*rows, **options)


def _unbiased(own: MarkovHead, which: range, *args: Any, **options: Any) -> Any:
    """A MarkovHead without its bias in some of the rows that it drafts."""
    bias, calls = own._bias, count()

    def changed(known: torch.Tensor, **more: Any) -> torch.Tensor:
        return bias(known, **more) * (next(calls) not in which)

    own._bias = changed  # type: ignore[assignment]
    try:
        return own(*args, **options)
    finally:
        own._bias = bias
