"""Checks of one kernel: rounds of verify and accept, played on its adapter and on the reference."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.conform import adapters
from engine.conform.cases import Rows, Shape, Source, loads
from engine.conform.causes import Situation
from engine.conform.fits import axes, joined, misplaced, place, spans
from engine.conform.packages import Package
from engine.conform.passes import SCRIPTS, Pass
from engine.conform.reference import Reference, step, token
from engine.conform.subject import Kernel, Memory, Subject, blank

# Largest relative rounding error against f64; right kernels have 1e-6 and below in float32.
BOUNDS = {"float32": 5e-5, "bfloat16": 4e-2, "float16": 1e-2}

# Causes that are less specific than another one in a sequence of the same pass; the last if no
# first chunk is wrong
VAGUE = ("unused-memory", "wrong-output", "wrong-state", "wrong-chunk")
_WRITTEN = "null-slot-written", "other-sequence-written"  # for which a state is more specific
_LESS = ("state-not-committed", *_WRITTEN, "state-lost", "other-layer", *VAGUE)
_GUARD = "interpreter_with_triton"


@dataclass(frozen=True, slots=True)
class Fault:
    """An error that a check found. `note` marks a remark that is not an error.

    `row_errors`: of a wrong output, the error of each row of the pass. `depth_errors`: of a wrong
    state, its distance from the state after 0, 1, … rows of the pass; it should be that after `row`
    + 1. All relative to the largest value.
    """

    kernel: str
    check: str
    cause: str
    detail: str
    shape: Shape
    seed: int
    round: int
    sequence: int
    row: int
    error: float
    note: bool = False
    row_errors: tuple[float, ...] = ()
    depth_errors: tuple[float, ...] = ()

    @property
    def symptom(self) -> tuple[bool, bool, bool, str]:
        """The symptom without the cause: of outputs or states, NaN or not; else the cause."""
        of_what = bool(self.row_errors), bool(self.depth_errors)
        return *of_what, self.error < math.inf, "" if any(of_what) else self.cause


CHECKS = (*(name for name in SCRIPTS if name != "drift"), "repeat", "batch", "drift")
Started = tuple[Source, Subject, Reference]


@contextmanager
def limited(work: int) -> Iterator[None]:
    """A context in which players stop after this much more work."""
    Player.most = Player.work + work
    try:
        yield
    finally:
        Player.most = math.inf


def has_check(kernel: Kernel, name: str) -> bool:
    """Whether a check applies: prompt kernels have no rollback, few kernels take trees, and float32
    states do not drift."""
    if kernel.chunk:
        return name in ("prompts", "repeat", "batch")
    rounds = "bfloat16" in kernel.dtypes
    some = {"prompts": False, "trees": kernel.trees, "padding": kernel.padding, "drift": rounds}
    return some.get(name, True)


@dataclass(eq=False)
class Player:
    """Plays scripts of one kernel at one shape. Counts `rows` of passes, each times its heads, and
    `work`, in Triton's interpreter loads, else rows; `most`: where it stops (`limited`)."""

    rows, work, most = 0, 0, math.inf
    states = 0  # that were compared

    kernel: Kernel
    package: Package
    shape: Shape
    seed: int
    device: str
    blank: bool = False  # memory is zeros, not NaN
    named: bool = True  # causes are sought
    sought: Collection[str] = ()  # which; empty: all
    replaced: dict[str, float] | None = None  # of cases.Source
    copies: bool = False  # the same
    large: bool = True  # the same, if a check has large inputs
    late: bool = False  # for a check with two starts, only the second is played

    def __post_init__(self) -> None:
        rounded = self.kernel.bf16_products
        self.bound = max(BOUNDS[self.shape.state_dtype], BOUNDS[self.kernel.rows_dtype])
        if rounded or (self.kernel.chunk and self.device == "cuda"):  # of tensor cores
            self.bound = max(self.bound, 1e-2)
        self.own_size = rounded and self.device == "cpu"  # of which rounding takes 0.0022

    def starts(self, check: str) -> tuple[bool, ...]:
        """For each start of a check, whether states are not given."""
        return (False, True)[self.late :] if check == "prompts" else (False,)

    def start(self, empty: bool = False, check: str = "") -> Started:
        """Inputs, an adapter with its first states loaded, and the reference with the same; empty:
        no states are given, and the reference starts with zeros."""
        source = Source(
            self.shape, self.seed, self.device, self.kernel.rows_dtype,
            long=self.kernel.chunk > 0 or check in ("drift", "subsets"),
            # to lose everything; for KDA's prompts limited by a product of e^g over 16 rows
            large=(30.0 if check == "subsets" else 10.0 * empty) * self.large,
            replaced=self.replaced, copies=self.copies,
        )  # fmt: skip
        self.memory = Memory(self.device, self.blank, far="far slots" in self.shape.extras)
        subject = self.kernel.make(self.shape, self.memory, self.package)
        first = [source.state() * (not empty) for _ in range(self.shape.n_sequences)]
        for sequence, state in enumerate(() if empty else first):
            subject.load(sequence, state.to(self.device))
        return source, subject, Reference(self.shape, first)

    def script(
        self,
        check: str,
        rounds: int,
        changed: Callable[[Pass, int], Pass | None] = lambda one, index: one,
        seed: int | None = None,  # of the passes
    ) -> list[Fault]:
        """The faults of the first wrong pass of a script, whose passes may be changed or left out;
        empty: all passes are right."""
        dice = random.Random(f"{check} {self.seed if seed is None else seed}")
        with blank() if self.blank else nullcontext():
            for empty in self.starts(check):
                started = self.start(empty, check)
                passes = SCRIPTS[check](self.shape, dice, self.kernel)
                for index, one in zip(range(1 if empty else rounds), passes, strict=False):
                    played = changed(one, index)
                    if faults := self.play(check, index, played, started) if played else []:
                        return faults
        return []

    def play(self, check: str, index: int, one: Pass, started: Started) -> list[Fault]:
        source, subject, reference = started

        def fault(cause: str, detail: str, sequence: int, row: int, error: float) -> Fault:
            detail = joined(detail, "in a step without drafts" * (not one.drafts))
            return self._fault(check, cause, detail, index, sequence, row, error)

        for sequence in one.anew:
            state = source.state()
            subject.load(sequence, state.to(self.device))
            reference.begin(sequence, state)
        ids = (*one.sequences, *(-1 for _ in one.padding))
        rows = source.rows(ids, (*one.lengths, *one.padding), one.parents)
        others = [s for s in range(self.shape.n_sequences) if s not in one.sequences]
        still = {s: copied(subject.state(s)) for s in others}
        wanted = reference.verify(rows)  # before a call that may overwrite its inputs
        batch = [token(rows, i) for i in range(sum(rows.lengths))]
        outputs = self.outputs(one, rows, subject)
        if one.padding and isinstance(outputs, torch.Tensor):
            outputs = outputs[: len(wanted)]  # padding may be left out
        if words := _unlike(outputs, list(wanted.shape), getattr(torch, self.kernel.rows_dtype)):
            words = f"{'verify' if one.drafts else 'decode'} {words}"
            return [fault("wrong-return", words, one.sequences[0], -1, math.inf)]
        seen = outputs.double().cpu()
        faults: list[Fault] = []
        situations = {}
        parts = dict(zip(one.sequences, rows.slices(), strict=False))
        places = {s: part.start for s, part in zip(ids, rows.slices(), strict=True)}
        of_rows: dict[str, torch.Tensor] = {}
        for i, (sequence, part) in enumerate(parts.items()):
            tree = one.parents[i] if one.parents else ()
            given = self.kernel, reference, sequence, batch[part], tree, batch, places, self.sought
            situations[sequence] = Situation(*given)
            error, row = _worst(seen[part], wanted[part])
            size = float(wanted[part].abs().max()) if self.own_size else 1.0
            bound = max(BOUNDS["float32"], self.bound * min(1.0, size))
            if error > bound:
                cause, detail = "wrong-output", ""
                if self._unnamed(faults):
                    detail = misplaced(seen, wanted, part, bound, "row {} of the pass")
                    explain, of = situations[sequence].explain_outputs, (seen[part], bound)
                    cause, detail = ("other-row", detail) if detail else _named(cause, explain, *of)
                each = errors_of(seen[part], wanted[part])
                where = place(self.shape, seen[part], wanted[part], bound)
                found = fault(cause, joined(detail, where), sequence, row, error)
                faults.append(replace(found, row_errors=each))
            if (nan := ~seen[part].flatten(1).isfinite().all(1)).any():
                none = torch.zeros(self.shape.n_sequences, dtype=torch.bool)
                of_rows.setdefault(spans(nan), none)[sequence] = True
        words = "; ".join(f"{rows} in sequences {spans(at)}" for rows, at in of_rows.items())
        if words and any(fault.cause == "unused-memory" for fault in faults):
            words += f" {axes(['in columns'], (~seen.isfinite()).flatten(0, -2).any(0))}"
            words = f"no number in the output of rows {words}".rstrip()
            faults = [replace(f, detail=words) for f in faults]
        if one.drafts or one.reset:
            subject.accept(one.sequences, one.accepted)
        if faults and not self.kernel.chunk:
            return faults
        off = {fault.sequence for fault in faults}
        written = []
        for cause, words in () if faults else self.memory.changed():
            if cause == "padding-written":  # wrong-wrap if a log was about to wrap
                cause, words = max(x.unnamed(cause, words) for x in situations.values())
            written.append(fault(cause, words, one.sequences[0], -1, math.inf))
        tracked = getattr(subject, "tracked", lambda _: None)
        kept_of = zip(one.sequences, one.accepted, strict=True)
        states = [(s, count, subject.state(s), "") for s, count in kept_of]
        for s in one.sequences if one.drafts else ():
            count, held = tracked(s) or (1, None)
            states.append((s, count, held, f"in what is kept after row {count}, elsewhere"))
        for sequence, count, held, elsewhere in states:
            right = reference.depths(sequence)[count - 1]
            if held is None or sequence in off:
                continue
            if words := _unlike(held, list(self.shape.state), self.shape.dtype):
                return [fault("wrong-return", f"state {words}", sequence, -1, math.inf)]
            state, Player.states = held.double().cpu(), Player.states + 1
            error, _ = _worst(state.unsqueeze(0), right.unsqueeze(0))
            if error > self.bound:
                cause, detail = "wrong-state", ""
                if self._unnamed(faults):
                    this = state, count, self.bound
                    cause, detail = _named(cause, situations[sequence].explain_state, *this)
                depths = torch.stack([reference.state(sequence), *reference.depths(sequence)])
                each = errors_of(state.expand_as(depths), depths)
                where = place(self.shape, state, right, self.bound)
                detail = joined(detail, elsewhere, where)
                found = fault(cause, detail, sequence, count - 1, error)
                faults.append(replace(found, depth_errors=each))
        if "state-not-committed" not in {fault.cause for fault in faults}:  # no write is missing
            causes = {"other-sequence-written": "other-sequence"}
            faults = [replace(f, cause=causes.get(f.cause, f.cause)) for f in faults]
        faults += written  # a state says more about the writer
        for sequence, first in still.items():
            after = copied(subject.state(sequence))
            if first is not None and after is not None and not torch.equal(first, after):
                idle = Situation(self.kernel, reference, sequence, [])
                cause, words = idle.explain_still(after, self.bound)
                error = float((first - after).abs().max())
                faults.append(fault(cause, words, sequence, -1, error))
        reference.accept(one.sequences, one.accepted)
        return faults

    def outputs(self, one: Pass, rows: Rows, subject: Subject) -> torch.Tensor:
        """The kernel's outputs for a pass. Raises RuntimeError if its rows would exceed `most`, by
        the work that they have taken so far."""
        n = sum(rows.lengths) * (1 if self.shape.recurrence == "conv" else self.shape.n_heads)
        if Player.work + n * Player.work / max(1, Player.rows) > Player.most:
            raise RuntimeError("the search for a cause reached its limit")
        before = loads[0]
        outputs = subject.verify(rows) if one.drafts else subject.decode(rows)
        Player.rows += n
        Player.work += max(n, loads[0] - before)
        return outputs

    def _fault(self, check: str, cause: str, detail: str, *place: Any) -> Fault:
        """place: round, sequence, row, error, and whether it is a note."""
        return Fault(self.kernel.name, check, cause, detail, self.shape, self.seed, *place)

    def _unnamed(self, faults: Sequence[Fault]) -> bool:
        """Whether to look for a cause: one specific cause is enough."""
        return self.named and all(fault.cause in _LESS for fault in faults)

    def repeat(self) -> list[Fault]:
        """Two plays of the same calls must be bit-equal."""
        a, b = (self._bits([range(self.shape.n_sequences)]) for _ in range(2))
        return self._unequal("repeat", "not-repeatable", a, b, note=False)

    def batch(self) -> list[Fault]:
        """Sequences in one pass and each in its own pass must be bit-equal."""
        every = range(self.shape.n_sequences)
        a, b = self._bits([every]), self._bits([[s] for s in every])
        return self._unequal("batch", "bits-depend-on-batch", a, b, note=True)

    def _bits(self, groups: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Results of a fully accepted verify pass of each group of sequences, and of a step without
        drafts, [sequences, …], and the states after them."""
        source, subject, _ = self.start()
        n, t, made = self.shape.n_sequences, self.shape.n_tokens, {}
        for words, length in (("the verify pass", t), ("a step without drafts", 1)):
            rows = source.rows(range(n), [length] * n)
            outputs = []
            for group in groups:
                part = rows.one(group[0]) if len(groups) > 1 else rows
                outputs.append(subject.verify(part) if length == t else subject.decode(part))
                if length == t:
                    subject.accept(group, [t] * len(group))
            made[words] = torch.cat(outputs).unflatten(0, (n, length))
            held = (copied(subject.state(s)) for s in range(n))
            states = [state for state in held if state is not None]
            if len(states) == n:
                made[f"the states after {words}"] = torch.stack(states)
        return made

    def _unequal(
        self, check: str, cause: str, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor],
        note: bool,
    ) -> list[Fault]:  # fmt: skip
        for words, one in a.items():
            x, y = (t.double().cpu() for t in (one, b[words]))
            unlike = (x != y) & ~(x.isnan() & y.isnan())
            off = unlike.flatten(1).any(1)
            if off.any():
                sequence, error = int(off.nonzero()[0]), float((x - y).abs().max())
                rows = unlike[sequence].flatten(1).any(1).nonzero()
                words = f"in {words} of sequences {spans(off)}"
                place = 0, sequence, int(rows[0]) if "states" not in words else -1, error
                return [self._fault(check, cause, words, *place, note)]
        return []

    def drift(self, rounds: int) -> list[Fault]:
        """The error of bfloat16 states after many rounds, compared with one rounding per row and
        with plain decoding; if float32 states are wrong, too, the cause of that."""
        one = replace(self.shape, state_dtype="bfloat16", n_sequences=1)
        player = replace(self, shape=one)
        error, plain, least = player._drifted(rounds)
        if error <= 2 * least + 1e-4:
            return []
        one = replace(one, state_dtype="float32")
        exact = replace(self, shape=one)
        off = "float32" in self.kernel.dtypes and not exact._drifted(rounds)[0] <= exact.bound
        if off and (found := exact.script("drift", rounds)):  # it is wrong without rounding, too
            return found
        detail = (
            f"{error:.2g} of the state's size after {rounds} rounds; {least:.2g} with one "
            f"rounding per row, {plain:.2g} in plain decoding"
        )
        return [player._fault("drift", "drift", detail, rounds, 0, -1, error)]

    def _drifted(self, rounds: int) -> tuple[float, ...]:
        """Errors of the last state, of plain decoding's, and of one rounded after each row,
        relative to its size (root mean squares)."""
        _, plain, _ = self.start(check="drift")
        source, subject, reference = self.start(check="drift")
        dice, rounded = random.Random(self.seed), reference.state(0)
        for _ in range(rounds):
            count = dice.randint(1, self.shape.n_tokens)
            rows = source.rows([0], [self.shape.n_tokens])
            reference.verify(rows)
            subject.verify(rows)
            subject.accept([0], [count])
            for i in range(count):
                plain.decode(rows.one(0, slice(i, i + 1)))
            reference.accept([0], [count])
            for row in reference.tokens[0][-1]:
                rounded = step(self.shape, rounded, row)[1].to(self.shape.dtype).double()
        right, errors = reference.state(0), []
        for state in (copied(subject.state(0)), copied(plain.state(0)), rounded):
            assert state is not None
            errors.append(float(((state - right).square().mean() / right.square().mean()).sqrt()))
        return tuple(errors)


def _named(cause: str, explain: Callable[..., tuple[str, str]], *seen: Any) -> tuple[str, str]:
    """The result of a search for the cause; the present cause if it fails."""
    try:
        return explain(*seen)
    except Exception as error:  # the fault remains, whatever the search raised
        return cause, f"the search for its cause ended with {type(error).__name__}: {error}"


def _unlike(made: object, size: list[int], least: torch.dtype) -> str:
    """What an adapter returned, if it is not a tensor of this size and precision."""
    precision = str(least).removeprefix("torch.")
    wanted = f"a tensor of {size} in {precision} or finer"
    if not isinstance(made, torch.Tensor):
        return f"returned {type(made).__name__}, not {wanted}"
    exact = made.is_floating_point() and torch.finfo(made.dtype).eps <= torch.finfo(least).eps
    if exact and list(made.shape) == size:
        return ""
    return f"returned {list(made.shape)} in {str(made.dtype).removeprefix('torch.')}, not {wanted}"


def copied(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.detach().double().cpu().clone()


def _worst(seen: torch.Tensor, wanted: torch.Tensor) -> tuple[float, int]:
    """Largest difference relative to the largest value (1 at least), and its row."""
    difference = (seen - wanted).abs().flatten(1)
    if not seen.isfinite().all():
        return math.inf, int((~seen.isfinite()).flatten(1).any(1).nonzero()[0])
    scale = max(1.0, float(wanted.abs().max()))
    return float(difference.max()) / scale, int(difference.max(1).values.argmax())


def errors_of(seen: torch.Tensor, wanted: torch.Tensor) -> tuple[float, ...]:
    """The errors of all rows; infinite for NaN."""
    return tuple(_worst(a[None], b[None])[0] for a, b in zip(seen, wanted, strict=True))


def check(
    kernel: Kernel, package: Package, shape: Shape, name: str, seed: int, device: str, rounds: int,
    named: bool = True, large: bool = True, sought: Collection[str] = (),
) -> list[Fault]:  # fmt: skip
    """Faults that one check of one kernel finds at this shape, with causes or without; errors of
    the call are faults."""
    player = Player(kernel, package, shape, seed, device, named=named, sought=sought, large=large)
    try:
        if name == "repeat":
            return player.repeat()
        if name == "batch":
            return player.batch()
        if name == "drift":
            return player.drift(rounds)
        faults = player.script(name, rounds)
        ranks, moved = {c: i for i, c in enumerate(_LESS, 1)}, "window-not-rolled-back"
        # for a commit that also moves windows, states are more specific
        return sorted(faults, key=lambda f: 3 if f.symptom[3] == moved else ranks.get(f.cause, 0))
    except Exception as error:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = [c for c in codes if Path(c.co_filename).parent == Path(adapters.__file__).parent]
        # a wrapper refuses an adapter's call before the named function's first line
        asked = str(error).partition("(")[0].rpartition(".")[2]
        refused = any(asked in c.co_names for c in ours) and all(c.co_name != asked for c in codes)
        cause = "signature" if isinstance(error, TypeError) and refused else "crash"
        words, place_, called = met(error)
        if words.startswith("OutsideMemoryError: "):
            cause, words = "padding-written", words.partition(": ")[2]
        if called and not package.name and isinstance(error, (TypeError, AttributeError)):
            cause, place_ = "signature", "; `draftscope help conform` has each call"
        return [Fault(kernel.name, name, cause, words + place_, shape, seed, 0, 0, -1, math.inf)]


def met(error: BaseException) -> tuple[str, str, bool]:
    """What an error says (in Triton's interpreter the kernel's own error); its file and line; and
    whether it is in a call by this module, not in the adapter."""
    while error.__cause__ and type(error).__name__ == "InterpreterError":
        error = error.__cause__
    others, frames = {"triton", "numpy", "importlib"}, traceback.extract_tb(error.__traceback__)
    files = [f for f in frames if not (f.filename[:1] == "<" or others & {*Path(f.filename).parts})]
    last = [f for f in files or frames if Path(f.filename).stem != _GUARD][-1]
    at = f" ({Path(last.filename).name}, line {last.lineno})"
    called = Path(last.filename).parent == Path(__file__).parent
    return f"{type(error).__name__}: {error}"[:300], at, called
