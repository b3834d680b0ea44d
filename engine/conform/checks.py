"""Checks of one kernel: rounds of verify and accept played on its adapter and on the reference."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.conform import adapters
from engine.conform.cases import Shape, Source
from engine.conform.causes import Situation
from engine.conform.fits import spans
from engine.conform.packages import Package, interpreted
from engine.conform.passes import SCRIPTS, Pass
from engine.conform.reference import ROW_INPUTS, Reference, token
from engine.conform.subject import Kernel, Memory, Subject

# Largest relative difference from f64 that rounding gives; figures of kernels known to be right
# are 1e-6 and below in float32.
_BOUNDS = {"float32": 5e-5, "bfloat16": 4e-2, "float16": 1e-2}

# Causes that say less than another one that a sequence of the same pass may have; the last is one
# where no first chunk is wrong
VAGUE = ("unused-memory", "wrong-output", "wrong-state", "wrong-chunk")
_LESS = ("state-not-committed", "other-sequence-written", "state-lost", *VAGUE)
# Causes that may be those of a wrong count, or of another sequence's
_COUNTED = (
    "stale-column",
    "window-not-rolled-back",
    "state-not-committed",
    "lost-fold",
    "state-lost",
    "unused-memory",
)
# Causes that those of another sequence may look like
_OF_OTHERS = ("gate-order", "gate-of-other-row", "wrong-gate", "wrong-chunk", "other-row")
# Causes that a short last chunk may have
_OF_CHUNKS = ("state-lost", "state-not-committed", "wrong-gate", "wrong-term", "other-row")
# Inputs and weights by the cause that a value made of them has, and values that they are given
_INPUTS = {
    "wrong-gate": ("a", "dt", "b", "dt_bias", "A_log", "A"),
    "wrong-norm": ("q", "k"),
    "wrong-term": ("v", "x", "B", "C", "D", "weight", "bias"),
}
_VALUES = (-4.0, 4.0, 0.5)
Changed = Callable[[Pass], Iterator[Pass]]
_GUARD = "interpreter_with_triton"
_WRITTEN = ("null-slot-written", "padding-written", "other-sequence-written")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong that a check found. `note` marks what is worth knowing and no error.

    `row_errors`: of a wrong output, the error of each row of the pass. `depth_errors`: of a wrong
    state, its distance from the state after 0, 1, … rows of the pass; it should be that after
    `row` + 1. All relative to the largest value.
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


CHECKS = (*SCRIPTS, "repeat", "batch", "drift")


def has_check(kernel: Kernel, name: str) -> bool:
    """Whether a check applies: kernels for prompts have no rollback, few take trees, and states in
    float32 do not drift."""
    if kernel.chunk:
        return name in ("prompts", "repeat", "batch")
    rounds = "bfloat16" in kernel.dtypes
    some = {"prompts": False, "trees": kernel.trees, "padding": kernel.padding, "drift": rounds}
    return some.get(name, True)


class Player:
    """Plays scripts of one kernel at one shape."""

    def __init__(
        self,
        kernel: Kernel,
        package: Package,
        shape: Shape,
        seed: int,
        device: str,
        blank: bool = False,  # memory is zeros, not NaN
        named: bool = True,  # causes are sought
        replaced: dict[str, float] | None = None,  # an input or a weight that has one value
    ) -> None:
        self.kernel, self.package, self.shape = kernel, package, shape
        self.seed, self.device = seed, device
        self.bound = max(_BOUNDS[shape.state_dtype], _BOUNDS[kernel.rows_dtype])
        if kernel.bf16_products or (kernel.chunk and device == "cuda"):  # of tensor cores
            self.bound = max(self.bound, 1e-2)
        self.blank, self.named, self.replaced = blank, named, replaced
        self.memory = Memory(device, blank)

    def start(self, empty: bool = False) -> tuple[Source, Subject, Reference]:
        """Inputs, an adapter with first states loaded, and the reference with the same; empty: no
        states are given, and the reference starts with zeros."""
        dtype, long = self.kernel.rows_dtype, self.kernel.chunk > 0
        source = Source(self.shape, self.seed, self.device, dtype, long, self.replaced)
        self.memory = Memory(self.device, self.blank)
        subject = self.kernel.make(self.shape, self.memory, self.package)
        first = [source.state() * (not empty) for _ in range(self.shape.n_sequences)]
        for sequence, state in enumerate(() if empty else first):
            subject.load(sequence, state.to(self.device))
        return source, subject, Reference(self.shape, first)

    def script(self, check: str, rounds: int) -> list[Fault]:
        """The faults of the first wrong pass of a script; none: all passes are right."""
        with _blank() if self.blank else nullcontext():
            return self._script(check, rounds)

    def _script(self, check: str, rounds: int) -> list[Fault]:
        dice = random.Random(f"{check} {self.seed}")
        for empty in (False, True) if check == "prompts" else (False,):
            started = self.start(empty)
            passes = SCRIPTS[check](self.shape, dice, self.kernel)
            for index, one in zip(range(1 if empty else rounds), passes, strict=False):
                faults = self._pass(check, index, one, *started)
                if faults:
                    return faults
        return []

    def placed(self, fault: Fault) -> Fault:
        """The fault with what further plays tell: with zeros in place of NaN, of every number of
        accepted rows, and with other passes and shapes."""
        try:
            for further in (self._filled, self._by_count, self.elsewhere):
                fault = further(fault)
        except Exception:  # of a play that the check had not; the fault remains
            return fault
        return fault

    def _filled(self, fault: Fault) -> Fault:
        """What a value that is no number stands for: the cause where memory that was never written
        is zeros, or, where it is none of these, the input under other values of which all is finite;
        and where it is first read or made."""
        if fault.cause != "unused-memory":
            return fault
        places = self._places(fault)
        fault = replace(fault, detail="; ".join((fault.detail, *places)))
        other = Player(self.kernel, self.package, self.shape, self.seed, self.device, blank=True)
        for found in other.script(fault.check, fault.round + 1):
            words = f"{found.detail}; from memory that was never written; {'; '.join(places)}"
            if found.cause == "state-lost" and found.row_errors:
                cause = "wrong-chunk" if self.kernel.chunk else "stale-column"
                return replace(fault, cause=cause, detail=words)
            if found.cause not in (*VAGUE, "state-lost", "null-slot-written"):
                return replace(fault, cause=found.cause, detail=words)
            if found.cause == "unused-memory":
                return self._computed(fault)
            if found.cause in VAGUE:
                return replace(fault, detail=words)
        return fault

    def _places(self, fault: Fault) -> list[str]:
        """Where kernels in Triton's interpreter first read, or make, what is no number."""
        if not interpreted():
            return []
        from engine.conform.interpreter_with_triton import watched

        with watched() as places:
            self.script(fault.check, fault.round + 1)
        return places

    def _computed(self, fault: Fault) -> Fault:
        """The input under other values of which no value that is no number is computed."""
        for cause, names in _INPUTS.items():
            for name, value in product(names, _VALUES):
                player = Player(
                    self.kernel, self.package, self.shape, self.seed, self.device, named=False,
                    blank=True, replaced={name: value},
                )  # fmt: skip
                source = player.start()[0]
                if name not in (*source.weights, *ROW_INPUTS[self.shape.recurrence]):
                    continue
                faults = player.script(fault.check, fault.round + 1)
                if all(f.error < math.inf for f in faults):
                    words = f"{fault.detail}; finite where {name} is {value:g}"
                    return replace(fault, cause=cause, detail=words)
        return fault

    def _by_count(self, fault: Fault) -> Fault:
        """Which state each number of accepted rows leaves, where one sequence alone shows it."""
        if fault.cause not in _COUNTED or self.kernel.chunk or fault.check == "trees":
            return fault
        if fault.row_errors:  # of an output: no state of the pass is known
            return fault
        t = max(3, self.shape.n_tokens)
        shape = replace(self.shape, n_tokens=t, n_sequences=1)
        player = Player(self.kernel, self.package, shape, self.seed, self.device)
        left: list[int | None] = []
        for count in range(1, t + 1):
            source, subject, reference = player.start()
            rows = source.rows([0], [t])
            subject.verify(rows)
            reference.verify(rows)
            subject.accept([0], [count])
            state = _copy(subject.state(0))
            if state is None:
                return fault
            depths = torch.stack([reference.state(0), *reference.depths(0)])
            errors = _each(state.expand_as(depths), depths)
            if self.bound < min(errors) < math.inf:
                return fault
            left.append(errors.index(min(errors)) if min(errors) < math.inf else None)
        wrong = [row for count, row in enumerate(left, 1) if row != count]
        if not wrong:
            return fault
        cause = fault.cause
        if cause in ("unused-memory", "state-not-committed", "state-lost"):
            cause = "stale-column" if any(wrong) else "state-not-committed"
        each = ", ".join("none (NaN)" if row is None else str(row) for row in left)
        words = f"1 to {t} rows accepted leave the state after {each}"
        return replace(fault, cause=cause, detail=f"{fault.detail}; {words}")

    def elsewhere(self, fault: Fault) -> Fault:
        """A fault that several mistakes have is named by the first change of its passes, or of its
        shape, under which they are right."""
        shape, n, t = self.shape, self.shape.n_sequences, self.shape.n_tokens
        c, vague = self.kernel.chunk, fault.cause in VAGUE[:3]
        stale = fault.cause in ("stale-column", "window-not-rolled-back", "state-not-committed")
        of_length = (*_WRITTEN, "other-sequence")
        log = self.kernel.ring or self.kernel.log
        whole = {k: 2 ** (getattr(shape, k) - 1).bit_length() for k in ("d_k", "d_v")}
        one = fault.sequence
        others = "other-sequence", n > 1 and (vague or fault.cause in (*_COUNTED, *_OF_OTHERS))
        ways: tuple[tuple[tuple[str, bool], str, Changed, Shape], ...] = (
            (
                ("wrong-chunk", c > 0 and (vague or fault.cause in _OF_CHUNKS)),
                "all prompts have whole chunks", lambda p: p.chunked(c), shape,
            ),
            (
                ("wrong-stride", not c and (stale or vague or fault.cause in of_length)),
                f"every pass has {t} rows", lambda p: p.full(t), shape,
            ),
            (
                ("lost-fold" if log else "stale-column", stale or vague),
                "the count is set to 1 by a step without drafts", Pass.counted, shape,
            ),
            (others, "no other sequence is in its passes", lambda p: p.only(one), shape),
            (others, "all sequences are in its passes", lambda p: p.whole(n), shape),
            (
                ("head-mapping", vague and shape.n_groups < shape.n_heads),
                "no heads share a key", Pass.same, replace(shape, n_groups=shape.n_heads),
            ),
            (
                ("head-mapping", vague and shape.n_heads > 1),
                "there is one head", Pass.same, replace(shape, n_heads=1, n_groups=1),
            ),
            (
                ("wrong-tile", vague and replace(shape, **whole) != shape),
                "the size of a head is a power of two", Pass.same, replace(shape, **whole),
            ),
        )  # fmt: skip
        if (vague or fault.cause == "wrong-tile") and self.kernel.ring and fault.round:
            words = f"{fault.detail}; right while the log holds no rows"
            return replace(fault, cause="wrong-wrap", detail=words)
        for (cause, may_be), words, changed, other in ways:
            if may_be and not self._wrong_with(fault, changed, other):
                kept = stale and fault.cause != "state-not-committed"
                if cause == "other-sequence" and kept and "all" not in words:
                    cause = fault.cause
                words = f"{fault.detail}; right where {words}".lstrip("; ")
                return replace(fault, cause=cause, detail=words)
        return fault

    def _wrong_with(self, fault: Fault, changed: Changed, shape: Shape) -> bool:
        """Whether a check's passes, up to some after that of its fault, are wrong where they are
        changed; of two seeds, as few values may be right by chance (of prompts, which take long, of
        one)."""
        for seed in range(self.seed, self.seed + (1 if self.kernel.chunk else 2)):
            dice = random.Random(f"{fault.check} {self.seed}")
            player = Player(self.kernel, self.package, shape, seed, self.device, named=False)
            for empty in (False, True) if fault.check == "prompts" else (False,):
                started = player.start(empty)
                script = SCRIPTS[fault.check](self.shape, dice, self.kernel)
                played = (p for one in islice(script, fault.round + 3) for p in changed(one))
                if any(player._pass(fault.check, i, p, *started) for i, p in enumerate(played)):
                    return True
        return False

    def _pass(
        self,
        check: str,
        index: int,
        one: Pass,
        source: Source,
        subject: Subject,
        reference: Reference,
    ) -> list[Fault]:
        def fault(cause: str, detail: str, sequence: int, row: int, error: float) -> Fault:
            return self._fault(check, cause, detail, index, sequence, row, error)

        ids = (*one.sequences, *(-1 for _ in one.padding))
        rows = source.rows(ids, (*one.lengths, *one.padding), one.parents)
        before = [list(passes) for passes in reference.passes]
        kept = [len(t[-1]) if t else 0 for t in reference.tokens]
        others = [s for s in range(self.shape.n_sequences) if s not in one.sequences]
        still = {s: _copy(subject.state(s)) for s in others}
        outputs = subject.verify(rows) if one.drafts else subject.decode(rows)
        wanted = reference.verify(rows)
        if one.padding and isinstance(outputs, torch.Tensor):
            outputs = outputs[: len(wanted)]  # those of padding may be left out
        size = list(wanted.shape)
        if words := _unlike(outputs, size, getattr(torch, self.kernel.rows_dtype)):
            words = f"{'verify' if one.drafts else 'decode'} {words}"
            return [fault("wrong-return", words, one.sequences[0], -1, math.inf)]
        seen = outputs.double().cpu()
        faults: list[Fault] = []
        situations = {}
        batch = [token(rows, i) for i in range(sum(one.lengths))]
        for i, (sequence, part) in enumerate(zip(one.sequences, rows.slices(), strict=False)):
            situations[sequence] = Situation(
                self.kernel,
                reference,
                sequence,
                batch[part],
                before[sequence],
                kept[sequence],
                one.parents[i] if one.parents else (),
                batch,
                part.start,
            )
            error, row = _worst(seen[part], wanted[part])
            if error > self.bound:
                cause, detail = "wrong-output", ""
                if self._unnamed(faults):
                    one_seen = seen[part], self.bound
                    cause, detail = _named(cause, situations[sequence].explain_outputs, *one_seen)
                each = _each(seen[part], wanted[part])
                found = fault(cause, detail, sequence, row, error)
                faults.append(replace(found, row_errors=each))
        if any(fault.cause == "unused-memory" for fault in faults):
            parts = zip(one.sequences, rows.slices(), strict=False)
            where = [(s, ~seen[part].flatten(1).isfinite().all(1)) for s, part in parts]
            words = ", ".join(f"{spans(off)} of sequence {s}" for s, off in where if off.any())
            faults = [replace(f, detail=f"no number in the output of rows {words}") for f in faults]
        if one.drafts or one.reset:
            subject.accept(one.sequences, one.accepted)
        if faults and not self.kernel.chunk:
            return faults
        off = {fault.sequence for fault in faults}
        for cause, words in () if faults else self.memory.changed():
            if cause == "padding-written":
                of_each = [situation.unnamed(cause, words) for situation in situations.values()]
                cause, words = max(of_each)  # wrong-wrap, where a log was about to wrap
            faults.append(fault(cause, words, one.sequences[0], -1, math.inf))
        for sequence, count in zip(one.sequences, one.accepted, strict=True):
            held = subject.state(sequence)
            right = reference.depths(sequence)[count - 1]
            if held is None or sequence in off:
                continue
            if words := _unlike(held, list(self.shape.state), self.shape.dtype):
                return [fault("wrong-return", f"state {words}", sequence, -1, math.inf)]
            state = held.double().cpu()
            error, _ = _worst(state.unsqueeze(0), right.unsqueeze(0))
            if error > self.bound:
                cause, detail = "wrong-state", ""
                if self._unnamed(faults):
                    this = state, count, self.bound
                    cause, detail = _named(cause, situations[sequence].explain_state, *this)
                depths = torch.stack([reference.state(sequence), *reference.depths(sequence)])
                each = _each(state.expand_as(depths), depths)
                found = fault(cause, detail, sequence, count - 1, error)
                faults.append(replace(found, depth_errors=each))
        for sequence, first in still.items():
            after = _copy(subject.state(sequence))
            if first is not None and after is not None and not torch.equal(first, after):
                past = reference.passes[sequence]
                idle = Situation(self.kernel, reference, sequence, [], past, kept[sequence])
                cause, words = idle.explain_still(after, self.bound)
                error = float((first - after).abs().max())
                faults.append(fault(cause, words, sequence, -1, error))
        reference.accept(one.sequences, one.accepted)
        return faults

    def _fault(self, check: str, cause: str, detail: str, *place: Any) -> Fault:
        """place: round, sequence, row, error, and whether it is a note."""
        return Fault(self.kernel.name, check, cause, detail, self.shape, self.seed, *place)

    def _unnamed(self, faults: Sequence[Fault]) -> bool:
        """Whether a cause is sought: one that says something is enough."""
        return self.named and all(fault.cause in _LESS for fault in faults)

    def repeat(self) -> list[Fault]:
        """Two plays of the same calls give the same bits."""
        plays = [self._outputs([range(self.shape.n_sequences)]) for _ in range(2)]
        return self._bits("repeat", "not-repeatable", plays, note=False)

    def batch(self) -> list[Fault]:
        """Sequences in one pass and each in a pass of its own give the same bits."""
        alone = [[s] for s in range(self.shape.n_sequences)]
        plays = [self._outputs([range(self.shape.n_sequences)]), self._outputs(alone)]
        return self._bits("batch", "bits-depend-on-batch", plays, note=True)

    def _outputs(self, groups: Sequence[Sequence[int]]) -> torch.Tensor:
        source, subject, _ = self.start()
        rows = source.rows(
            range(self.shape.n_sequences), [self.shape.n_tokens] * self.shape.n_sequences
        )
        if len(groups) == 1:
            return subject.verify(rows)
        return torch.cat([subject.verify(rows.one(s)) for group in groups for s in group])

    def _bits(self, check: str, cause: str, plays: list[torch.Tensor], note: bool) -> list[Fault]:
        a, b = (t.double().cpu() for t in plays)
        if torch.equal(a, b):
            return []
        different = (a != b).flatten(1).any(1).nonzero()
        place = divmod(int(different[0]), self.shape.n_tokens)
        words = f"{len(different)} of {len(a)} rows"
        return [self._fault(check, cause, words, 0, *place, float((a - b).abs().max()), note)]

    def drift(self, rounds: int) -> list[Fault]:
        """Error of bfloat16 states after many rounds, next to plain decoding's own."""
        player = Player(
            self.kernel, self.package, replace(self.shape, state_dtype="bfloat16", n_sequences=1),
            self.seed, self.device,
        )  # fmt: skip
        errors = [player._drifted(rounds, drafts) for drafts in (True, False)]
        if errors[0] <= 4 * errors[1] + 0.02:
            return []
        detail = (
            f"{errors[0]:.2g} of the state after {rounds} rounds, plain decoding {errors[1]:.2g}"
        )
        return [player._fault("drift", "drift", detail, rounds, 0, -1, errors[0])]

    def _drifted(self, rounds: int, drafts: bool) -> float:
        source, subject, reference = self.start()
        dice = random.Random(self.seed)
        for _ in range(rounds):
            count = dice.randint(1, self.shape.n_tokens)
            rows = source.rows([0], [self.shape.n_tokens])
            reference.verify(rows)
            if drafts:
                subject.verify(rows)
                subject.accept([0], [count])
            else:
                for i in range(count):
                    subject.decode(rows.row(i))
            reference.accept([0], [count])
        state = _copy(subject.state(0))
        assert state is not None
        return _worst(state.unsqueeze(0), reference.state(0).unsqueeze(0))[0]


class _Zeros(TorchFunctionMode):
    """Tensors that kernels' wrappers leave empty hold zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided)


@contextmanager
def _blank() -> Iterator[None]:
    """All memory that was never written reads as zeros."""
    with ExitStack() as stack:
        if interpreted():
            from engine.conform.interpreter_with_triton import blank

            stack.enter_context(blank())
        stack.enter_context(_Zeros())
        yield


def _named(cause: str, explain: Callable[..., tuple[str, str]], *seen: Any) -> tuple[str, str]:
    """What a search for the cause says; the cause that is there already, where it fails."""
    try:
        return explain(*seen)
    except Exception as error:  # the fault remains, whatever the search met
        return cause, f"the search for its cause ended with {type(error).__name__}: {error}"


def _unlike(made: object, size: list[int], least: torch.dtype) -> str:
    """What an adapter returned, where it is not a tensor of this size and precision."""
    precision = str(least).removeprefix("torch.")
    wanted = f"a tensor of {size} in {precision} or finer"
    if not isinstance(made, torch.Tensor):
        return f"returned {type(made).__name__}, not {wanted}"
    exact = made.is_floating_point() and torch.finfo(made.dtype).eps <= torch.finfo(least).eps
    if exact and list(made.shape) == size:
        return ""
    return f"returned {list(made.shape)} in {str(made.dtype).removeprefix('torch.')}, not {wanted}"


def _copy(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.detach().double().cpu().clone()


def _worst(seen: torch.Tensor, wanted: torch.Tensor) -> tuple[float, int]:
    """Largest difference relative to the largest value (1 at least), and its row."""
    difference = (seen - wanted).abs().flatten(1)
    if not seen.isfinite().all():
        return math.inf, int((~seen.isfinite()).flatten(1).any(1).nonzero()[0])
    scale = max(1.0, float(wanted.abs().max()))
    return float(difference.max()) / scale, int(difference.max(1).values.argmax())


def _each(seen: torch.Tensor, wanted: torch.Tensor) -> tuple[float, ...]:
    """The errors of all rows; infinite where one holds NaN."""
    return tuple(_worst(a[None], b[None])[0] for a, b in zip(seen, wanted, strict=True))


def check(
    kernel: Kernel, package: Package, shape: Shape, name: str, seed: int, device: str, rounds: int
) -> list[Fault]:
    """Faults that one check of one kernel finds at this shape; errors of the call are faults."""
    player = Player(kernel, package, shape, seed, device)
    try:
        if name == "repeat":
            return player.repeat()
        if name == "batch":
            return player.batch()
        if name == "drift":
            return player.drift(rounds)
        order = ("", *_LESS)
        faults = player.script(name, rounds)
        return sorted(faults, key=lambda f: order.index(f.cause) if f.cause in order else 0)
    except Exception as error:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = [c for c in codes if Path(c.co_filename).parent == Path(adapters.__file__).parent]
        # an adapter's call is refused before the named function's first line, if by a wrapper
        called = str(error).partition("(")[0].rpartition(".")[2]
        refused = any(called in c.co_names for c in ours) and all(
            c.co_name != called for c in codes
        )
        cause = "signature" if isinstance(error, TypeError) and refused else "crash"
        met: BaseException = error  # of Triton's interpreter, what it met in the kernel
        while met.__cause__ and type(met).__name__ == "InterpreterError":
            met = met.__cause__
        words = f"{type(met).__name__}: {met}"[:300]
        if type(met).__name__ == "OutsideMemoryError":
            cause, words = "padding-written", str(met)
        frames = traceback.extract_tb(met.__traceback__)
        theirs = [f for f in frames if not {"triton", "numpy"} & {*Path(f.filename).parts}]
        last = [f for f in theirs or frames if Path(f.filename).stem != _GUARD][-1]
        words += f" ({Path(last.filename).name}, line {last.lineno})"
        return [Fault(kernel.name, name, cause, words, shape, seed, 0, 0, -1, math.inf)]
