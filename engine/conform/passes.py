"""Passes of verify and accept that checks play: scripts drawn for a shape, and the shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.conform.cases import Recurrence, Shape
from engine.conform.subject import Kernel


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a script: its sequences, the number of rows of each, and how many are
    accepted."""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    accepted: tuple[int, ...]
    drafts: bool = True
    parents: tuple[tuple[int, ...], ...] = ()
    padding: tuple[int, ...] = ()  # rows of sequences that the engine adds to fill the batch
    reset: bool = False  # a step without drafts is also committed by a count, of one row
    anew: tuple[int, ...] = ()  # the sequences that start in another one's slot

    def at(self, places: Sequence[int]) -> Pass:
        """The pass of the sequences at these places alone, in their order."""
        lists = self.sequences, self.lengths, self.accepted
        ids, lengths, accepted = (tuple(x[i] for i in places) for x in lists)
        parents = tuple(self.parents[i] for i in places) if self.parents else ()
        anew = tuple(s for s in self.anew if s in ids)
        return Pass(ids, lengths, accepted, self.drafts, parents, anew=anew)

    def only(self, sequence: int) -> Pass | None:
        """The pass of this sequence alone, None if it is not in it."""
        at = [i for i, s in enumerate(self.sequences) if s == sequence]
        return self.at(at) if at else None

    def ascending(self) -> Pass:
        """The pass with shorter sequences first."""
        return self.at(sorted(range(len(self.lengths)), key=self.lengths.__getitem__))

    def full(self, t: int) -> Pass:
        """The pass with t rows of every sequence."""
        return replace(self, lengths=(t,) * len(self.lengths), drafts=True)

    def counted(self) -> Pass:
        """The pass with its count reset, if it has no drafts."""
        return replace(self, reset=not self.drafts)

    def chunked(self, size: int) -> Pass:
        """The pass with prompts of whole chunks."""
        lengths = tuple(-(-n // size) * size for n in self.lengths)
        return replace(self, lengths=lengths, accepted=lengths)

    def whole(self, n: int) -> Pass:
        """The pass with all of n sequences in order; added ones copy the first."""
        at = [self.sequences.index(s) if s in self.sequences else 0 for s in range(n)]
        return replace(self.at(at), sequences=tuple(range(n)))


Script = Callable[[Shape, random.Random, Kernel], Iterator[Pass]]


def _all(shape: Shape, drafts: int, accepted: Sequence[int]) -> Pass:
    every = tuple(range(shape.n_sequences))
    return Pass(every, (drafts,) * len(every), tuple(accepted), drafts=True)


def _depths(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    t, n = shape.n_tokens, shape.n_sequences
    # each number is accepted, and read afterwards; rows per sequence alternate between more and
    # fewer, and requests of a batch between the order of their slots and another
    for first in range(0, max(t, n + 1), n):
        one = _all(shape, t, [1 + (i + first) % t for i in range(n)][::-1])
        yield replace(one, sequences=one.sequences[::-1]) if first // n % 2 else one
    # a log is filled, folded and wrapped
    for _ in range(1 + 2 * kernel.ring // t):
        yield _all(shape, t, [t - dice.randint(0, 1) for _ in range(shape.n_sequences)])


def _lengths(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    for _ in range(3):
        yield _drawn(shape, dice, kernel, everyone=True)


def _subsets(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    yield _all(shape, shape.n_tokens, [shape.n_tokens] * shape.n_sequences)
    for n_anew in range(3):
        one = _drawn(shape, dice, kernel, everyone=False)
        yield replace(one, anew=one.sequences[:n_anew])


def _without_drafts(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    every = tuple(range(shape.n_sequences))
    one = (1,) * len(every)
    for _ in range(2):
        yield _all(shape, shape.n_tokens, [shape.n_tokens] * len(every))
        yield Pass(every, one, one, drafts=False)
        yield Pass(every, one, one, drafts=False)


def _rounds(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    while True:
        if dice.random() < 0.2:
            some = tuple(sorted(dice.sample(range(shape.n_sequences), 1)))
            yield Pass(some, (1,), (1,), drafts=False)
        else:
            yield _drawn(shape, dice, kernel, everyone=dice.random() < 0.6)


def _drift(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    """Long scripts after which states have drifted."""
    every, t = range(shape.n_sequences), shape.n_tokens
    while True:
        yield _all(shape, t, [dice.randint(1, t) for _ in every])


def _drawn(shape: Shape, dice: random.Random, kernel: Kernel, everyone: bool) -> Pass:
    n = shape.n_sequences
    ids = dice.sample(range(n), n if everyone else dice.randint(1, n))
    longest = shape.n_tokens
    if kernel.equal_lengths:
        least = longest if kernel.full_lengths else 1
        lengths = [dice.randint(least, longest)] * len(ids)
    else:
        lengths = [dice.randint(1, longest) for _ in ids]
    accepted = [dice.randint(1, n) for n in lengths]
    return Pass(tuple(ids), tuple(lengths), tuple(accepted))


def _padding(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    for drafts in (True, False, True):
        one = _drawn(shape, dice, kernel, everyone=False)
        ones = (1,) * len(one.sequences)
        if not drafts:
            one = Pass(one.sequences, ones, ones, drafts=False)
        yield replace(one, padding=(one.lengths[0],) * 2)


def _trees(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    """Trees in which a row's index is larger than its parent's; any row may end the accepted path,
    and the path's last row is committed."""
    every, t = tuple(range(shape.n_sequences)), shape.n_tokens
    yield _all(shape, t, [t] * len(every))
    for _ in range(3):
        parents = tuple((-1, *(dice.randint(0, i - 1) for i in range(1, t))) for _ in every)
        yield replace(_all(shape, t, [dice.randint(1, t) for _ in every]), parents=parents)


def _prompts(shape: Shape, dice: random.Random, kernel: Kernel) -> Iterator[Pass]:
    """Lengths around whole chunks, all rows kept; a second prompt continues the first."""
    c = kernel.chunk
    ends = [1, c - 1, c, c + 1, 2 * c, dice.randint(c + 2, 2 * c - 1), 2 * c + 1]
    for i in range(2):
        lengths = tuple(dice.sample(ends, shape.n_sequences))
        if not i and shape.n_sequences == 1:  # one that shows the state a chunk leaves
            lengths = (c + c // 4,)
        yield Pass(tuple(range(shape.n_sequences)), lengths, lengths)


SCRIPTS: dict[str, Script] = {
    "depths": _depths,
    "lengths": _lengths,
    "subsets": _subsets,
    "no-drafts": _without_drafts,
    "rounds": _rounds,
    "padding": _padding,
    "trees": _trees,
    "prompts": _prompts,
    "drift": _drift,
}


def shapes(kernel: Kernel, recurrence: Recurrence, device: str) -> list[Shape]:
    """The shapes that checks use in turn: small heads and large, with shared keys and without."""
    if recurrence == "conv":
        sizes = [(24, 1, 4, 1, 3, 3), (300, 1, 3, 1, 4, 2), (64, 1, 4, 1, 2, 4)]
    else:
        d = kernel.least_d
        sizes = [
            (2, 1, max(32, d), 16, 3, 3),
            (4, 2, max(16, d), 16, 5, 2),
            (1, 1, *((max(64, d), 32) if kernel.powers else (max(48, d), 40)), 3, 5),
            (2, 2, 128, 16, 3, 2),
            (1, 1, 256 if kernel.powers else 192, 16, 4, 3),
        ]
        if kernel.chunk:
            # with a gate for each channel, 256 of them take minutes in the interpreter
            large = 128 if recurrence == "kda" and device == "cpu" else 256
            sizes = [
                # 48: a product in blocks of 32 or 64 ends with a partial one
                (4 if kernel.grouped else 2, 2, 48, 16, 2 * kernel.chunk + 1, 2),
                (1, 1, large, 16, 2 * kernel.chunk + 1, 1),
            ]
        elif device == "cuda":
            sizes += [(16, 8, 128, 128, 8, 16), (4, 4, 256, 256, 5, 4)]
    made = [Shape(recurrence, *size, kernel.dtypes[0]) for size in sizes]
    if kernel.d:
        made = [replace(shape, d_k=kernel.d, d_v=kernel.d) for shape in made[:2]]
    if not kernel.grouped:
        made = [replace(shape, n_groups=shape.n_heads) for shape in made]
    made = [with_extras(kernel, s) if i % 2 else s for i, s in enumerate(made)]
    if kernel.square and not kernel.d:
        made = [replace(s, d_v=s.d_k) for s in made if s.d_k != 128 or kernel.chunk]
    return made


def with_extras(kernel: Kernel, shape: Shape) -> Shape:
    """A shape with the kernel's extras that apply to this recurrence."""
    about = {"lower bound": "kda", "z": "mamba2"}
    extras = (x for x in kernel.extras if about.get(x, shape.recurrence) == shape.recurrence)
    return replace(shape, extras=tuple(extras))
