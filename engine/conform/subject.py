"""A kernel under test: the interface of its adapter, and its memory."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from engine.conform.cases import Recurrence, Rows, Shape
from engine.conform.packages import Package, interpreted

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Signalling NaN, which any calculation turns into a quiet one, so that a read and unmodified write
# is detected
_NAN = {torch.float32: 0x7FA00001, torch.bfloat16: 0x7FA1, torch.float16: 0x7D01}
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap has its name from Python 3.13 on
Known = dict[str, torch.Tensor]  # what a part may hold, by its words


class Memory:
    """Tensors filled with NaN, so that reads of unwritten memory are detected, with NaN before and
    after them, so that writes there are, too. far: the slots of pools are far apart."""

    MARGIN = 1024
    FAR = 2**30  # values between far slots: 32 bits reach the second

    def __init__(self, device: str, blank: bool = False, far: bool = False) -> None:
        self.device, self.blank, self.far = device, blank, far
        self._kept: dict[tuple[int, torch.Size], tuple[str, str, torch.Tensor, Known]] = {}

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of NaN, or of -1 for integers; of zeros if `blank` is set."""
        n, m = math.prod(sizes), max(self.MARGIN, math.prod(sizes[1:]))  # slot -1, too
        whole = torch.empty(n + 2 * m, dtype=dtype, device=self.device)
        self._fill(whole)
        for words, part in (("before", whole[:m]), ("after", whole[m + n :])):
            self.keep("padding-written", f"{words} a tensor of {list(sizes)}", part)
        return whole[m : m + n].view(sizes)

    def pool(
        self, layers: int, slots: int, *sizes: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The slots of some layers, [layers, slots, …], whose first two strides may be anything:
        with `far`, on a CPU whose system maps that much, as within a tensor that others share."""
        n_bytes = layers * slots * self.FAR * dtype.itemsize
        if not self.far or self.device != "cpu" or not (held := _mapped(n_bytes)):
            return self.empty(layers, slots, *sizes, dtype=dtype)
        inner = torch.empty(sizes, device="meta").stride()
        strides = slots * self.FAR, self.FAR, *inner
        made = torch.frombuffer(held, dtype=dtype).as_strided((layers, slots, *sizes), strides)
        self._fill(made)
        return made

    def _fill(self, part: torch.Tensor) -> None:
        """Fill a tensor with the values of unwritten memory."""
        # different in each tensor, so that a copy is detected, too
        nan = _NAN[part.dtype] + len(self._kept) % 16 if part.dtype in _NAN else -1
        part.view(_BITS[part.itemsize]).fill_(0 if self.blank else nan)

    def keep(
        self,
        cause: str,
        words: str,
        part: torch.Tensor,
        wanted: torch.Tensor | None = None,
        others: Known | None = None,
    ) -> None:
        """Calls must leave this part of a tensor unchanged, or make it `wanted`, until the next
        call for it; cause and words name a violation, with those of `others`."""
        first = part.clone() if wanted is None else wanted.clone()
        self._kept[part.data_ptr(), part.shape] = cause, words, part, {"": first} | (others or {})

    def forget(self, part: torch.Tensor) -> None:
        """Let this part of a tensor change."""
        self._kept = {k: v for k, v in self._kept.items() if k[0] != part.data_ptr()}

    def changed(self) -> Iterator[tuple[str, str]]:
        """Cause and words of each part that is not as it should be."""
        for cause, words, part, known in self._kept.values():
            bits = _BITS[part.itemsize]
            alike = (x for x, t in known.items() if torch.equal(part.view(bits), t.view(bits)))
            if found := next(alike, "other values"):
                yield cause, f"{words} holds {found}" if len(known) > 1 else words

    def zeros(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of zeros, for what the engine clears."""
        return self.empty(*sizes, dtype=dtype).zero_()

    def whole(
        self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        """Integers as a tensor: indices, counts."""
        return torch.tensor(values, dtype=dtype, device=self.device)


def _mapped(n_bytes: int) -> mmap.mmap | None:
    """Memory whose pages are allocated on use; None: not available."""
    try:
        return mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (AttributeError, OSError, ValueError, OverflowError):
        return None


class _Zeros(TorchFunctionMode):
    """Empty tensors made by kernels' wrappers hold zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided)


@contextmanager
def blank() -> Iterator[None]:
    """Within the context, unwritten memory reads as zeros."""
    with ExitStack() as stack:
        if interpreted():
            from engine.conform import interpreter_with_triton

            stack.enter_context(interpreter_with_triton.blank())
        stack.enter_context(_Zeros())
        yield


class Subject(Protocol):
    """The interface of an adapter: states of `shape.n_sequences` sequences, and the calls of a
    round."""

    def load(self, sequence: int, state: torch.Tensor) -> None:
        """Set the state of an empty sequence (the reference's layout, float32)."""

    def verify(self, rows: Rows) -> torch.Tensor:
        """Outputs of all rows, [tokens, …]; which of them will be accepted is not known."""

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Commit: keep the first `counts` rows of the last pass."""

    def decode(self, rows: Rows) -> torch.Tensor:
        """One row per sequence without drafts, by the engine's path for that."""

    def state(self, sequence: int) -> torch.Tensor | None:
        """The state after the accepted rows in the reference's layout; None: not readable."""


class AsTensors:
    """A Subject that may return arrays instead of tensors."""

    def __init__(self, subject: Any) -> None:
        self._subject = subject

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._subject, name)
        if name not in ("verify", "decode", "state"):
            return found
        return lambda given: torch.as_tensor(x) if hasattr(x := found(given), "dtype") else x


class Layers:
    """Tensors of two layers, of which a kernel's passes use only the second: the first has the same
    with its heads turned, so that a commit must leave the same there, turned."""

    def __init__(self, shape: Shape, memory: Memory) -> None:
        self.shape, self.memory = shape, memory
        self.n = 2 if "layers" in shape.extras else 1

    def turned(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """A tensor with its heads, channels or groups, in dimension `heads`, turned."""
        groups = self.shape.n_groups
        return tensor.roll(tensor.shape[heads] // groups if groups > 1 else 1, heads)

    def fill(self, layers: torch.Tensor, heads: int) -> None:
        """Fill the first layer from the second; layers: [layers, …]."""
        if self.n > 1:
            layers[0] = self.turned(layers[1], heads - 1)

    def check(self, layers: torch.Tensor, heads: int) -> None:
        """Require that the first layer has what the second has."""
        if self.n > 1:
            wanted = self.turned(layers[1], heads - 1)
            self.memory.keep("other-layer", "the first layer differs", layers[0], wanted)


def as_a_pass(self: Subject, rows: Rows) -> torch.Tensor:
    """`decode` for a subject whose steps without drafts are passes of one row, which is kept."""
    out = self.verify(rows)
    self.accept(rows.sequences, [1] * len(rows.sequences))
    return out


class Prompts:
    """A Subject for prompt kernels: it continues from the last state, and keeps all rows."""

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        self.states: dict[int, torch.Tensor] = {}

    def load(self, sequence: int, state: torch.Tensor) -> None:
        self.states[sequence] = state

    def run(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [tokens, …] and the states [sequences, …] after all rows; first: those before
        them in the reference's layout, None if not given. By default one sequence at a time."""
        n = len(rows.sequences)
        made = [self.one(rows.one(i), None if first is None else first[i]) for i in range(n)]
        return torch.cat([o for o, _ in made]), torch.stack([state for _, state in made])

    def one(self, rows: Rows, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of one sequence, and its state after all rows."""
        raise NotImplementedError

    def verify(self, rows: Rows) -> torch.Tensor:
        known = all(s in self.states for s in rows.sequences)
        first = torch.stack([self.states[s] for s in rows.sequences]) if known else None
        outputs, states = self.run(rows, first)
        self.states |= zip(rows.sequences, states, strict=True)
        return outputs

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Keep all rows of a prompt."""

    decode = verify

    def state(self, sequence: int) -> torch.Tensor | None:
        return self.states.get(sequence)


class RowByRow:
    """A Subject for kernels with one token per call: a pass is played row by row, and copies what
    the kernel holds of a sequence after each. `held` are tensors [slots, …], in which slot 0
    belongs to no sequence."""

    held: tuple[torch.Tensor, ...] = ()

    def __init__(self, shape: Shape, memory: Memory, package: Package) -> None:
        self.shape, self.memory, self.package = shape, memory, package
        self.kept: dict[int, list[list[torch.Tensor]]] = {}

    def step(self, rows: Rows) -> torch.Tensor:
        """One row of each sequence, which is kept."""
        raise NotImplementedError

    def verify(self, rows: Rows) -> torch.Tensor:
        outputs = []
        for i, sequence in enumerate(rows.sequences):
            before, self.kept[sequence] = self._copied(sequence), []
            for row in range(rows.lengths[i]):
                outputs.append(self.step(rows.one(i, slice(row, row + 1))))
                self.kept[sequence].append(self._copied(sequence))
            self._restore(sequence, before)
        return torch.cat(outputs)

    def _copied(self, sequence: int) -> list[torch.Tensor]:
        return [tensor[1 + sequence].clone() for tensor in self.held]

    def _restore(self, sequence: int, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self.held, values, strict=True):
            tensor[1 + sequence] = value

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self._restore(sequence, self.kept[sequence][count - 1])

    def decode(self, rows: Rows) -> torch.Tensor:
        return self.step(rows)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel with its index rules, as an adapter plays it.

    `ring` is the number of rows that a circular log of inputs holds (0: there is none), `log`
    whether a pass keeps its rows and not its states; `least_d` is the smallest head that it takes;
    `dtypes` those that stored states may have; `grouped` whether value heads may share a key head,
    `square` whether d_v must be d_k; `equal_lengths` whether all sequences of a pass must have the
    same number of rows, `full_lengths` that it is the most that a pass has. `trees`: a pass may be
    a tree of drafts (Rows.parents); `padding`: a pass may hold sequence -1, rows that the engine
    adds to fill a batch; `chunk`: rows of a chunk of a kernel for prompts, which knows the last
    state alone (0: it is none); `extras`: what some shapes add: "layers" (commits of two), "lower
    bound" (of KDA's gate), "z" (Mamba-2's gate of outputs), "track slots" (states after fewer rows,
    kept elsewhere), "aligned blocks", "v first" (states are transposed) and "far slots"
    (Memory.pool); `bf16_products`: it rounds factors of its products to bfloat16, whatever its
    tensors are; `rows_dtype`: what rows are rounded to before the kernel and the reference take
    them; `d`: the only size of its heads (0: any), `powers`: it must be a power of two. `compiled`:
    who compiles a kernel that needs a CUDA device and its package as it is installed; `capability`:
    the major compute capability that it needs there; `host`: it runs on the processor alone.
    """

    name: str
    recurrences: tuple[Recurrence, ...]
    make: Callable[[Shape, Memory, Package], Subject]
    ring: int = 0
    log: bool = False
    least_d: int = 16
    equal_lengths: bool = False
    full_lengths: bool = False
    grouped: bool = True
    square: bool = False
    trees: bool = False
    padding: bool = False
    chunk: int = 0
    extras: tuple[str, ...] = ()
    bf16_products: bool = False
    rows_dtype: str = "float32"
    d: int = 0
    powers: bool = False
    compiled: str = ""
    capability: int = 0
    host: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
