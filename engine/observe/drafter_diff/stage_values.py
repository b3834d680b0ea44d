"""Values of each stage of drafting as a run computes them: arguments and results of every function
of the drafter, its model and its memory, in order; and the first one that differs from a second
run's.

Calls are seen by Python's profile hook, so no functions are listed. A function that replaces one of
the engine's is matched with it by where it is called.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

import engine
import kernels
from engine.decode.acceptance import Judge
from engine.draft.chain import DrafterChain
from engine.draft.registry import DRAFTERS
from engine.machine.graphs import VARIABLE
from engine.memory.hybrid import MemoryShelf
from engine.observe.drafter_diff.operations import in_place, sites
from engine.observe.drafter_diff.records import (
    BLOCK,
    CANDIDATES,
    POSITIONS,
    ROWS,
    RULE,
    STATE,
    Cause,
)
from engine.observe.drafter_diff.sides import DraftSide
from engine.observe.drafter_diff.tensor_changes import CHANGED, MOVED, TensorChange
from engine.options import Prompt, SpecOptions
from engine.session import Session
from engine.trace.store import TraceStore

_ENGINE, _KERNELS = (os.path.join(package.__path__[0], "") for package in (engine, kernels))
_SEEN = tuple(
    _ENGINE + os.path.join(*parts) for parts in (["draft", ""], ["model", ""], ["decode", "accept"])
)
_WHOLE = (_KERNELS, _ENGINE + os.path.join("memory", ""), _ENGINE + os.path.join("sampling", ""))
"""Folders of which only the functions called from outside are seen."""
_PHASES = (
    *((DrafterChain, name) for name in ("begin", "observe", "decoded", "draft", "accept")),
    (Judge, "accept"),
)
_MOST_NUMBERS, _MOST_PARTS, _MOST_CALLS = 1 << 14, 64, 400_000
_TIE = 2e-3
"""Relative distance of two results that other pass widths may cause."""


@dataclass(slots=True)
class Call:
    """A call of a function. name: qualified name, empty if it is not this engine's. args, result:
    their known parts by name: f64 or int64 arrays, numbers, words."""

    name: str
    file: str
    args: dict[str, Any]
    calls: list[Call] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)


class StageValues:
    """The calls of a run's drafters, in order, from its start. take: receives each when it has
    returned, instead of `calls`."""

    def __init__(self, take: Callable[[Call], None] | None = None) -> None:
        self.calls: list[Call] = []
        self._take = take or self.calls.append
        self._open: list[tuple[FrameType, Call | None]] = []
        self._n = 0
        self._known: dict[CodeType, str] = {}

    @contextmanager
    def watch(self) -> Iterator[StageValues]:
        """Record what runs of this process compute within the context, without recorded passes."""
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "off"
        phases = [(kind, name, self._watched(getattr(kind, name))) for kind, name in _PHASES]
        try:
            with in_place([(MemoryShelf, "take", lambda _, key, make: make()), *phases]):
                yield self
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before

    def _watched(self, own: Any) -> Any:
        @wraps(own)
        def watched(*args: Any, **options: Any) -> Any:
            if self._n > _MOST_CALLS:
                return own(*args, **options)
            given = (pair for i, x in enumerate(args[1:]) for pair in _values(f"[{i}]", x))
            call = Call(own.__qualname__, "", dict(given))
            self._open = [(sys._getframe(), call)]
            sys.setprofile(self._on_event)
            try:
                return own(*args, **options)
            finally:
                sys.setprofile(None)
                self._open = []
                self._take(call)

        return watched

    def _on_event(self, frame: FrameType, event: str, value: Any) -> None:
        if event == "call":
            self._on_call(frame)
        elif event == "return" and len(self._open) > 1 and self._open[-1][0] is frame:
            call = self._open.pop()[1]
            if call is not None:
                sys.setprofile(None)
                call.result = dict(_values("", value))
                sys.setprofile(self._on_event)

    def _on_call(self, frame: FrameType) -> None:
        code = frame.f_code
        if (kind := self._known.get(code)) is None:
            kind = self._known[code] = _kind(code)
        parent = next(call for _, call in reversed(self._open) if call is not None)
        if not kind or (kind in _WHOLE and parent.file.startswith(kind)):
            return
        caller = "" if frame.f_back is None else frame.f_back.f_code.co_filename
        if kind == _FOREIGN and not caller.startswith((_ENGINE, _KERNELS)):
            return
        sys.setprofile(None)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = [(name, frame.f_locals.get(name)) for name in names if name != "self"]
        if kind == _SEEN[0]:
            own = getattr(frame.f_locals.get("self"), "__dict__", {})
            known += [(f"self.{name}", own[name]) for name in _SETTINGS if name in own]
        args = dict(pair for name, x in known for pair in _values(name, x))
        name = "" if kind == _FOREIGN else code.co_qualname.removesuffix("_with_llvm")
        call = Call(name, code.co_filename, args)
        parent.calls.append(call)
        self._open.append((frame, call))
        self._n += 1
        sys.setprofile(self._on_event)


def _kind(code: CodeType) -> str:
    """The category of a function, empty if it is not to be seen."""
    file = code.co_filename
    if code.co_name in _NOT_SEEN or file.endswith("chain.py") or "_by_device" in code.co_qualname:
        return ""
    if file.startswith((*_SEEN, *_WHOLE)):
        return next(one for one in (*_SEEN, *_WHOLE) if file.startswith(one))
    is_library = "site-packages" in file or file.startswith(("<", os.path.dirname(os.__file__)))
    return "" if is_library or file.startswith((_ENGINE, _KERNELS)) else _FOREIGN


_FOREIGN = "foreign"
_OPTIONS = (spec.options_of(SpecOptions()) for spec in DRAFTERS.values())
_SETTINGS = sorted({_ + name for one in _OPTIONS for name in asdict(one) for _ in ("", "_")})
"""Attributes in which drafters keep their settings."""
_UNSTEADY = {"pending", "ms", "record", "before", "rows", "of_tokens"}
_NOT_SEEN = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "__init__", "__new__", "_limit"}


def _values(name: str, x: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The known parts of a value, by its name and theirs."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        x = torch.from_numpy(np.ascontiguousarray(x))
    if torch.is_tensor(x):
        yield name, _numbers(x.detach())
    elif x is None or isinstance(x, bool | int | float | str | np.number):
        yield name, x
    elif depth <= _DEEPEST:
        for label, part in _parts(x):
            yield from _values(f"{name}{label}".removeprefix("."), part, depth + 1)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Named or indexed parts of a value, with the suffix of its name."""
    names = x._fields if isinstance(x, tuple) and hasattr(x, "_fields") else []
    if type(x).__name__ in _PLAIN and is_dataclass(x):
        names = [one.name for one in fields(x) if one.compare and one.name not in _UNSTEADY]
    yield from ((f".{name}", getattr(x, name)) for name in names)
    if not names and isinstance(x, list | tuple | range | dict) and len(x) <= _MOST_PARTS:
        parts = x.items() if isinstance(x, dict) else enumerate(x)
        yield from ((f"[{key!r}]", part) for key, part in parts)


_DEEPEST, _PLAIN = 3, {"UBatch", "Draft", "DraftRequest", "Span", "Round", "TargetRows"}


def _numbers(x: torch.Tensor) -> tuple[tuple[int, ...], np.ndarray]:
    """Shape and numbers, only some of a large tensor's."""
    flat = x.reshape(-1) if x.is_contiguous() else x.contiguous().view(-1)
    if len(flat) > _MOST_NUMBERS:
        flat = flat[:: -(-len(flat) // _MOST_NUMBERS)]
    whole = torch.float32 if x.is_floating_point() else torch.int64
    return tuple(x.shape), flat.to("cpu", whole, copy=True).numpy()


# -- the first difference ------------------------------------------------------------------------

Path = list[tuple[Call, Call]]


class Walk:
    """The calls of a right run and of another one in parallel, up to the first difference. other:
    its calls; those of the right one are taken one by one. path: the enclosing calls of a
    difference, of both runs. what: the name of the differing argument or result, with its value in
    both. skipped: functions that only the right run had called before."""

    def __init__(self, other: Sequence[Call]) -> None:
        self.path: Path = []
        self.what: tuple[str, Any, Any] | None = None
        self.is_argument = False
        self.skipped: list[str] = []
        self._suspect: tuple[Path, tuple[str, Any, Any]] | None = None
        self.n_calls = self.n_drafts = 0
        self._other, self._is_over = other, False

    def take(self, call: Call) -> None:
        """Take the next call of the right run."""
        if self._is_over or self.n_calls >= len(self._other):
            return
        other = self._other[self.n_calls]
        self.n_calls += 1
        self.n_drafts += call.name.endswith("draft")
        self._is_over = call.name != other.name or self._differ(call, other)

    def _differ(self, one: Call, two: Call) -> bool:
        """Whether there is a difference within two calls."""
        self.path.append((one, two))
        if one.name == two.name:
            for name in one.args.keys() & two.args.keys():
                both = one.args[name], two.args[name]
                if name.startswith("self.") or not _is_apart(*both):
                    continue  # a setting alone has no effect
                if _is_exact(*both):
                    self.what, self.is_argument = (name, *both), True
                    return True
                if self._suspect is None and not one.file.startswith(_KERNELS):
                    self._suspect = [*self.path], (name, *both)
        for first, second in self._pairs(one.calls, two.calls):
            if self._differ(first, second):
                return True
        for name, value in one.result.items():
            if name in two.result and _is_apart(value, two.result[name]):
                both_of = ((n, one.args[n], two.args[n]) for n in one.args if n in two.args)
                own = next((found for found in both_of if _is_apart(*found[1:])), None)
                if self._suspect is not None:
                    self.path, own = self._suspect
                self.what = own or (name, value, two.result[name])
                self.is_argument = own is not None
                return True
        self.path.pop()
        self.skipped = self.skipped if not one.result else []
        return False

    def _pairs(self, right: Sequence[Call], other: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
        """Calls that belong together: of one name, or of a function that replaces another."""
        i = j = 0
        while i < len(right) and j < len(other):
            one, two = right[i], other[j]
            if one.name == two.name:
                yield one, two
                i, j = i + 1, j + 1
                continue
            later = next((k for k in range(j, len(other)) if other[k].name == one.name), None)
            if not two.name and (later is None or _within(two, one.name) is not None):
                yield one, _within(two, one.name) or two
                i, j = i + 1, j + 1
            elif later is not None and later - j <= _MOST_SKIPPED:
                j = later
            else:
                self.skipped.append(one.name)
                i += 1
        self.skipped += [one.name for one in right[i:]]


_MOST_SKIPPED = 8


def _within(call: Call, name: str) -> Call | None:
    """A call that replaces another, as one of that name: with the arguments of the engine's own
    function called within it, and its own result."""
    own = next((one for one in call.calls if one.name == name), None)
    return own and Call(name, own.file, own.args, own.calls, call.result)


def _is_exact(one: Any, other: Any) -> bool:
    """Whether two values are not rows, which an earlier mistake may have changed."""
    return not all(isinstance(x, tuple) and x[1].dtype == np.float32 for x in (one, other))


def _is_apart(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        if one[0] != other[0] or one[1].dtype != other[1].dtype:
            return True
        x, y = one[1], other[1]
        if (same := np.array_equal(x, y)) or x.dtype != np.float32:
            return not same
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)):
            return True
        x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
        return bool(np.linalg.norm(x - y) > _TIE * max(np.linalg.norm(x), np.linalg.norm(y)))
    if isinstance(one, tuple) or isinstance(other, tuple):
        return True
    if isinstance(one, float) and isinstance(other, float):
        return not (math.isclose(one, other, rel_tol=_TIE) or (math.isnan(one) and one != one))
    return bool(one != other)


# -- in words ------------------------------------------------------------------------------------

_BY_PLACE = (
    (RULE, ("decode/", "sampling/"), ()),
    (POSITIONS, ("rope",), ("positions", "n_drafted", "pos0", "apply_rope", "norm_and_rope")),
    (ROWS, (), ("observe", "decoded", "_taken", "taps", "side_by_side", "fused", "inject")),
    (CANDIDATES, (), ("_ids", "_best", "_choose", "_step", "top_k", "lattice", "of_target")),
    (STATE, ("memory/",), ("_take_pairs", "_waiting", "waiting", "seq_rm", "next_position")),
    (BLOCK, ("model/", "kernels/"), ("_blocks",)),
)
"""Stages by the innermost function's folder or name, or a value's name, in order."""


def stage_of_walk(walk: Walk) -> str:
    """The stage of a difference."""
    assert walk.what is not None
    label = re.split(r"[.\[]", walk.what[0])[0]
    names = [one.name.rsplit(".", 1)[-1] for one, _ in walk.path]
    inner = next(one for one, _ in reversed(walk.path) if one.file or one is walk.path[0][0])
    file = inner.file.replace(os.sep, "/")
    if names[0] == "accept" and walk.path[0][0].name.startswith(Judge.__name__):
        return RULE
    if label == "self":
        return CANDIDATES
    if walk.is_argument and label in ("rows", "features", "hidden"):
        return STATE if "_next" in names else ROWS
    for stage, folders, known in _BY_PLACE:
        if any(one in file for one in folders) or {label, *names[-1:]} & {*known}:
            return stage
    if names[0] in ("observe", "decoded"):
        return ROWS
    return STATE if names[0] != "draft" else CANDIDATES if "_step" in names else STATE


def walk_words(walk: Walk, weights: Mapping[bytes, str]) -> str:
    """The difference as a sentence. weights: of the drafter, by their bytes as `_numbers` gives
    them."""
    assert walk.what is not None
    label, right, other = walk.what
    inner = walk.path[-1][0]
    named = [weights.get(_bytes(x)) for x in inner.args.values()]
    whose = ", ".join(f"`{name}`" for name in named if name)
    function = inner.name or "the code called in place of a function"
    said = f"`{function}`" + (f" of {whose}" if whose else "")
    around = [one.name for one, _ in walk.path[:-1] if one.name]
    said += f" in `{around[-1]}`" if around else ""
    is_other = weights.get(_bytes(other)) if isinstance(other, tuple) else None
    what = f"{is_other}, not {weights.get(_bytes(right))}" if is_other else _change(right, other)
    part = f" `{label}`" if label else ""
    skipped = f"; `{walk.skipped[-1]}` is not called before" if walk.skipped else ""
    if walk.is_argument:
        return f"{said} is called with another{part}: {what}{skipped}."
    return f"{said} returns another{part or ' result'}: {what}{skipped}."


def _bytes(x: Any) -> bytes:
    return x[1].tobytes() if isinstance(x, tuple) and x[1].size > 1 else b""


def _change(right: Any, other: Any) -> str:
    """How a value differs from the right one."""
    if not (isinstance(right, tuple) and isinstance(other, tuple)):
        return f"{_shown(other)}, not {_shown(right)}"
    if right[0] != other[0]:
        return f"of shape {[*other[0]]}, not {[*right[0]]}"
    x, y = right[1].astype(np.float64), other[1].astype(np.float64)
    if x.size == math.prod(right[0]):
        x, y = (z.reshape(right[0]) for z in (x, y))
    differ = x != y
    if right[1].dtype != np.float32:
        apart = np.unique((y - x)[differ])
        if len(apart) == 1 and not np.isin(x, (0, 1)).all():
            return f"{int(abs(apart[0]))} too {'high' if apart[0] > 0 else 'low'}"
        at = np.unravel_index(int(np.flatnonzero(differ)[0]), x.shape)
        return f"{differ.sum()} of {x.size} differ, the first is {y[at]:g}, not {x[at]:g}"
    if not np.isfinite(y).all():
        return "NaN or infinite"
    if not y.any():
        return "zeros"
    for words, change in _WAYS.items():
        if (
            x.ndim
            and x.size == math.prod(right[0])
            and _is_like(change(torch.from_numpy(x)).numpy(), y)
        ):
            return words
    factor = float((x * y).sum() / max((x * x).sum(), 1e-300))
    if _is_like(factor * x, y):
        return f"{factor:.4g} times the right value"
    rows = np.flatnonzero(differ.reshape(-1, differ.shape[-1] if differ.ndim else 1).any(-1))
    length = float(np.linalg.norm(y - x)) / max(float(np.linalg.norm(x)), 1e-300)
    n_rows = x.size // x.shape[-1] if x.ndim else 1
    which = f"{len(rows)} of {n_rows} rows, " if 0 < len(rows) < n_rows else ""
    return f"{which}relative error {length:.2g}"


def _shown(x: Any) -> str:
    return f"an array of shape {[*x[0]]}" if isinstance(x, tuple) else f"{x!r}"


def _is_like(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(np.linalg.norm(x - y) < 1e-3 * np.linalg.norm(y))


_WAYS: dict[str, TensorChange] = {**MOVED, **CHANGED}


def values_cause(session: Session, side: DraftSide, values: StageValues) -> Cause | None:
    """The first value of a run of this engine, with its drafters' values, that differs from what
    the session at hand computes for the same prompt and options."""
    options = side.run.facts.options
    if options is None or side.prompt is None or side.run.facts.compute != session.compute:
        return None
    walk = Walk(values.calls)
    with StageValues(walk.take).watch():
        run = session.start([Prompt(side.prompt)], options, TraceStore())
        while walk.what is None and run.step():
            pass
    if walk.what is None:
        return None
    weights = dict[bytes, str]()
    drafts = (getattr(loaded, "model", loaded) for loaded in session.drafts.values())
    for core in filter(None, (session.model.head, *drafts)):
        for site in sites(core):
            for i, owner in enumerate(site.owners):
                value = getattr(owner, site.name, None)
                for x in filter(torch.is_tensor, value if isinstance(value, list) else [value]):
                    which = f" in layer {i}" if len(site.owners) > 1 else ""
                    name = f"{type(owner).__name__}.{site.name.strip('_')}{which}"
                    weights.setdefault(_bytes(_numbers(x)), name)
    weights.pop(b"", None)
    place = f"call {walk.n_calls} of its drafters, in draft {walk.n_drafts}"
    place += f": {' > '.join(one.name.rsplit('.', 1)[-1] for one, _ in walk.path if one.name)}"
    size = f"the {walk.n_calls - 1} calls before it, of {len(values.calls)}, are equal"
    return Cause(stage_of_walk(walk), side.name, walk_words(walk, weights), place, size)
