"""What a drafter's module may compute otherwise: every norm, rope, scale, table, sublayer and layer
that it is made of left out, scaled or exchanged; everywhere, or only for what is written into its
memory, or only while it drafts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations, count
from typing import Any, NamedTuple

import torch

from engine.model.drafters.dflash import Lattice, MarkovHead, Selector
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
    for kind in (_ropes, _norms, _exchanged, _heads, _scales, _left_out, _layers):
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
        yield PartChange(BLOCK, about, tuple(_functions(found, ("attend",), _scaled, factor)))
    for which, about in _SEEN.items():
        changes = tuple(_functions(found, ("attend",), _seeing, which))
        yield PartChange(BLOCK, f"rows of a block {about}", changes, ["draft"])
    for site in found:
        tables = [getattr(owner, site.name) for owner in site.owners]
        if site.name != "_embedding" or not all(map(callable, tables)):
            continue
        (owner,), (table,) = site.owners[:1], tables[:1]
        width = table._width if isinstance(table, Embedding) else 1
        for factor in dict.fromkeys((0.0, width**0.5, width**-0.5, 2.0, 0.5)):
            about = f"embeddings of its tokens are {factor:.3g} times what they should be"
            changed = partial(_times, table, factor)
            yield PartChange(BLOCK, about, ((owner, site.name, changed),), [*PHASES])


_SEEN = {
    "alone": "do not see each other",
    "block": "do not see the context, each other alone",
    "first": "see the first of them and the context, not each other",
}


def _seeing(
    own: Callable[..., torch.Tensor],
    which: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attention of a pass whose own cells are the last ones."""
    n = q.shape[1]
    mask = mask.clone()
    if which == "block":
        mask[..., : mask.shape[-1] - n] = False
    else:
        inside = torch.eye(n, dtype=torch.bool, device=mask.device)
        inside[:, 0] |= which == "first"
        mask[..., mask.shape[-1] - n :] &= inside
    return own(q, k, v, mask, **options)


def _scaled(
    own: Callable[..., torch.Tensor], factor: float, q: torch.Tensor, *more: Any, **options: Any
) -> torch.Tensor:
    return own(q * factor, *more, **options)


def _times(own: Callable[..., torch.Tensor], factor: float, *args: Any, **options: Any) -> Any:
    return own(*args, **options) * factor


def _left_out(found: Sequence[_Site]) -> Iterator[PartChange]:
    for site in found:
        value, name = getattr(site.owners[0], site.name), site.name
        changes: Changes
        for owners, whose in _some(site.owners):
            words = f"{site.words}{whose}"
            if name in _OPTIONAL.split() and value is not None:
                none: Any = [None] * len(value) if isinstance(value, list) else None
                if none != value:
                    changes = tuple((owner, name, none) for owner in owners)
                    about = f"its {words} is left out"
                    if name == "_ids":
                        about = f"ids are not mapped to the target's (d2t) in {words.split()[-1]}"
                    stage = CANDIDATES if name == "_ids" else BLOCK
                    yield PartChange(stage, about, changes, ["", "draft"])
            elif isinstance(site.owners[0], ResidualBlock) and name in ("_mixer", "_ffn"):
                changes = tuple((owner, name, None) for owner in owners)
                yield PartChange(BLOCK, f"its {words} adds nothing", changes)
            elif name in ("_attention", "attention", "_ffn") and callable(value):
                changes = tuple((o, name, partial(_times, getattr(o, name), 0.0)) for o in owners)
                yield PartChange(BLOCK, f"its {words} adds nothing", changes, ["draft"])


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
        for site in own:
            value = getattr(site.owners[0], site.name)
            if "norm" in site.name and isinstance(value, list) and len(value) == 2:
                swapped = tuple((o, site.name, getattr(o, site.name)[::-1]) for o in site.owners)
                yield PartChange(BLOCK, f"the two of {site.words} are exchanged", swapped)


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
    """What reads the rows of a block after it."""
    for site in found:
        owner, value = site.owners[0], getattr(site.owners[0], site.name)
        if isinstance(value, Selector):
            for by, which in ((1, "before"), (-1, "after")):
                about = f"its selector reads the row {which} the one that is drafted for its gate"
                changed = ((value, "lattice", partial(_of_row, value.lattice, by)),)
                yield PartChange(CANDIDATES, about, changed)
        if isinstance(value, MarkovHead):
            for rows, where in ((range(1), "its first row"), (range(1, 1024), "all later rows")):
                changed = ((owner, site.name, partial(_unbiased, value, rows)),)
                about = f"the bias of its chain over a block is left out in {where}"
                yield PartChange(CANDIDATES, about, changed)


def _of_row(
    own: Callable[..., Lattice],
    by: int,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    *more: Any,
    **options: Any,
) -> Lattice:
    return own(logits, hidden.roll(by, 1), *more, **options)


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
