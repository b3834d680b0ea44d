"""Causes of a wrong output or state: what the reference gives under each known mistake, compared
with what the kernel gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from typing import Any

import torch

from engine.conform.cases import Shape
from engine.conform.mistakes import Log, Played, decays, formulas
from engine.conform.reference import VARIANTS, Reference, play, step
from engine.conform.subject import Kernel

_MOST_COMMITS, _MOST_HEADS, _MOST_ROWS = 12, 16, 8
# What a row brings, its gate first
_ROW_INPUTS = {
    "gdn": ("a", "b", "q", "k", "v"),
    "kda": ("a", "b", "q", "k", "v"),
    "mamba2": ("dt", "x", "B", "C"),
    "conv": ("x",),
}
# Weights that a head has of its own
_HEAD_WEIGHTS = {
    "gdn": ("A_log", "dt_bias"),
    "kda": ("A_log", "dt_bias"),
    "mamba2": ("A", "dt_bias", "D"),
}

# What each cause means, for reports and `draftscope help conform`
CAUSES = {
    "stale-column": "the state after another number of rows is read than was accepted",
    "window-not-rolled-back": "the window of the convolution still holds rejected inputs",
    "state-not-committed": "the pass left no trace: the state before it is read",
    "state-lost": "an empty state is read",
    "other-sequence": "the state of another sequence is read",
    "other-sequence-written": "a sequence that was not in the pass has changed",
    "lost-fold": "rows that the log had taken are missing from the state",
    "double-fold": "rows of the log are folded into the state twice",
    "wrong-wrap": "rows at the end of the log are read or written at another place",
    "gate-order": "decay, correction, write and read are in another order, or the decay is missing",
    "gate-of-other-row": "the decay of another row is applied",
    "wrong-gate": "the decay, beta or dt is computed by another formula",
    "wrong-norm": "q or k are not divided by their own length",
    "wrong-term": "an input is left out or exchanged, or taps are in another order",
    "other-row": "a row's input or output is that of another row",
    "head-mapping": "heads read the input of another head",
    "wrong-scale": "outputs are the right ones times a constant",
    "wrong-tile": "only some columns of the heads are wrong",
    "wrong-parent": "a row of a tree of drafts follows another row than its parent",
    "wrong-chunk": "wrong from a later chunk of a prompt on, or a last short chunk is lost",
    "wrong-stride": "states are stored elsewhere where a pass is shorter than the longest",
    "null-slot-written": "a slot that belongs to no sequence has changed",
    "padding-written": "memory outside of the tensors has changed",
    "signature": "the kernel takes other arguments than in the versions that were tried",
    "wrong-return": "the adapter returned no tensor of the wanted shape and precision",
    "unused-memory": "a value comes from memory that was never written",
    "not-repeatable": "the same calls give other bits",
    "bits-depend-on-batch": "a row's bits depend on the rows that come with it",
    "drift": "stored states lose more precision than plain decoding's",
    "wrong-output": "outputs differ, and no known mistake gives them",
    "wrong-state": "states differ, and no known mistake gives them",
    "crash": "the call raised an error",
    "hang": "the call did not end in time",
}


class Situation:
    """One sequence of one pass, with all that a wrong kernel might have used for it.

    `tokens` are the rows of the pass; `before` the reference's states after each row of the passes
    before it, of the last of which `accepted` were kept.
    """

    def __init__(
        self,
        kernel: Kernel,
        reference: Reference,
        sequence: int,
        tokens: Sequence[dict[str, torch.Tensor]],
        before: Sequence[Sequence[torch.Tensor]],
        accepted: int,
        parents: Sequence[int] = (),
    ) -> None:
        self.kernel, self.reference, self.sequence = kernel, reference, sequence
        self.shape: Shape = reference.shape
        self.tokens, self.before, self.accepted = list(tokens), list(before), accepted
        self.parents = tuple(parents)

    def starts(self, bound: float) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Wrong states to start from: cause, sentence, state."""
        right = self.reference.state(self.sequence)
        for cause, sentence, state in self._starts():
            if not _same(state, [right], bound / 4):  # as one row of a log may leave it
                yield cause, sentence, state

    def _starts(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        yield from self._columns(0)
        commits = self.reference.committed[self.sequence]
        if self.kernel.ring:
            yield from self._folds()
        if len(commits) > 1:
            yield "state-not-committed", "state before the last pass", commits[-2]
        for age in range(1, len(self.before)):
            yield from self._columns(age)
        yield from self._others()
        yield "state-lost", "empty state", torch.zeros_like(commits[-1])
        if self.shape.recurrence == "conv":
            yield from self._windows()

    def _columns(self, age: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """States after the rows of the last pass (age 0), of the one before it (1), and so on."""
        for count, state in enumerate(self.before[-1 - age] if self.before else (), 1):
            if (not age and count == self.accepted) or count % max(1, self.kernel.chunk):
                continue
            cause = "stale-column"
            if not age and count > self.accepted and self.shape.recurrence == "conv":
                cause = "window-not-rolled-back"
            elif not age and count < self.accepted and self.kernel.ring:
                cause = "lost-fold"
            when = f"of the pass {age} earlier" if age else f"where {self.accepted} were accepted"
            yield cause, f"state after row {count} {when}", state

    def _others(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for other, states in enumerate(self.reference.committed):
            if other != self.sequence:
                passes = self.reference.passes[other][-2:]
                for state in (states[-1], *(state for one in passes for state in one)):
                    yield "other-sequence", f"a state of sequence {other}", state

    def _folds(
        self, also: Sequence[dict[str, torch.Tensor]] = ()
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """States after a log that is folded otherwise, from each of the last commits on; also: rows
        of this pass that it holds too, as where a token is taken at a time."""
        commits = self.reference.committed[self.sequence]
        taken = self.reference.tokens[self.sequence]
        logs: list[Log] = []
        last = len(commits) - (1 if also else 2)
        for kept in range(last, max(-1, last - _MOST_COMMITS), -1):
            rows = [*(row for commit in taken[kept:] for row in commit), *also]
            if not logs or len(rows) <= self.kernel.ring + 1:
                logs.append(Log(self.shape, commits[kept], rows))
        if not logs:
            return
        yield from logs[-1].cursors(self.kernel.ring)
        for log in logs:
            for words, state in log.decays():
                yield "gate-order", f"{words}, {len(log.rows)} rows of the log", state
        oldest, rows = logs[-1], logs[-1].rows
        for end in range(len(rows) - 1, max(0, len(rows) - self.kernel.ring), -1):
            log = Log(self.shape, oldest.states[0], rows[:end])
            for words, state in log.decays(rows[end:]):
                yield "gate-order", f"{words}, {len(rows) - end} rows ago", state
        rejected = [] if also else self.reference.rows[self.sequence][-2][self.accepted :]
        first = sum(map(len, taken)) + len(also) - len(rows)
        yield from oldest.stretches(self.kernel.ring, first, rejected)
        for log in logs:
            for cause, words, state in log.formulas():
                yield cause, f"{words}, in the fold of {len(log.rows)} rows", state

    def _inputs_before(self) -> tuple[list[torch.Tensor], int]:
        """Inputs of a convolution before this pass, and how many of them were accepted: those of
        the window before the last pass, of that pass, and nothing."""
        commits = self.reference.committed[self.sequence]
        first = commits[-2] if len(commits) > 1 else commits[-1]
        rows = self.reference.rows[self.sequence]
        last = rows[-2] if len(commits) > 1 else []
        known = [*first.unbind(-1), *(row["x"] for row in last)]
        return [*known, torch.zeros_like(known[0])], self.shape.d_k - 1 + self.accepted * bool(last)

    def _windows(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Windows of other inputs than the last accepted ones."""
        known, accepted = self._inputs_before()
        for at in product(range(len(known)), repeat=self.shape.d_k - 1):
            yield *self._window(at, len(known), accepted), torch.stack([known[i] for i in at], -1)

    def _window(self, at: Sequence[int], n: int, accepted: int) -> tuple[str, str]:
        rejected = any(accepted <= i < n - 1 for i in at)
        cause = "window-not-rolled-back" if rejected else "stale-column"
        names = [f"{i - accepted + 1}" if i < n - 1 else "nothing" for i in at]
        return cause, f"the window holds inputs {', '.join(names)} (0: the last that was accepted)"

    def inputs(self) -> Iterator[tuple[str, str, list[dict[str, torch.Tensor]], str]]:
        """Wrong ways through the rows: cause, sentence, rows, variant of the recurrence."""
        for variant in VARIANTS[self.shape.recurrence]:
            order = variant not in ("no-correction", "no-activation")
            cause = "gate-order" if order else "wrong-term"
            yield cause, variant.replace("-", " "), self.tokens, variant
        gate, *others = _ROW_INPUTS[self.shape.recurrence]
        for name in (gate, *others) if len(self.tokens) > 1 else ():
            cause = "gate-of-other-row" if name in ("a", "dt") else "other-row"
            words = {"a": "decay", "dt": "decay", "b": "beta"}.get(name, name)
            first, *rest = (row[name] for row in self.tokens)
            for which, values in (
                ("first row", [first] * len(self.tokens)),
                ("row before", [first, first, *rest[:-1]]),
                ("row after", [*rest, rest[-1]]),
            ):
                rows = [row | {name: x} for row, x in zip(self.tokens, values, strict=True)]
                yield cause, f"{words} of the {which}", rows, ""
        for cause, words, rows in formulas(self.shape, self.tokens):
            yield cause, words, rows, ""

    def _played(
        self, state: torch.Tensor, tokens: Sequence[dict[str, Any]], variant: str = ""
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return play(self.shape, state, tokens, variant, self.parents)

    def _ways(
        self, state: torch.Tensor, count: int, of: int, bound: float
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Cause, sentence and what each wrong way through the first rows gives that is not right;
        of: 0 outputs, 1 the last state."""

        def part(played: Played) -> torch.Tensor:
            return played[1][-1] if of else torch.stack(played[0])

        right = part(self._played(state, self.tokens[:count]))
        ways = (
            (cause, sentence, self._played(state, tokens[:count], variant))
            for cause, sentence, tokens, variant in self.inputs()
        )
        views: Iterable[tuple[str, str, Played]] = ()
        if count <= _MOST_ROWS and not self.parents:
            views = decays(self.shape, state, self.tokens[:count])
        carried = (("gate-order", *way) for way in self._carried(state, count))
        for cause, sentence, played in chain(ways, views, carried):
            if not _same(part(played), [right], bound / 4):
                yield cause, sentence, part(played)
        if of and self.shape.recurrence != "conv" and count <= _MOST_ROWS:
            log = Log(self.shape, state, self.tokens[:count])
            yield from (("gate-order", *fold) for fold in log.decays())
            yield from log.formulas()

    def _carried(self, state: torch.Tensor, count: int) -> Iterator[tuple[str, Played]]:
        """Ways in which the state is folded with other decays after one of the rows."""
        if count > _MOST_ROWS or self.parents or self.shape.recurrence == "conv":
            return
        for end in range(1, count):
            log = Log(self.shape, state, self.tokens[:end])
            before = self._played(state, self.tokens[:end])
            for words, after in log.decays():
                outputs, states = self._played(after, self.tokens[end:count])
                sentence = f"{words}, after row {end} of {count}"
                yield sentence, ([*before[0], *outputs], [*before[1][:-1], after, *states])

    def _folded_within(
        self, seen: torch.Tensor, wanted: torch.Tensor, bound: float
    ) -> tuple[str, str] | None:
        """A wrong fold between two rows of the pass, the first of which have right outputs."""
        row = int(((seen - wanted).abs().flatten(1).max(1).values > bound).nonzero()[0])
        right = self._played(self.reference.state(self.sequence), self.tokens[:row])[1]
        for cause, words, state in self._folds(self.tokens[:row]) if row else ():
            outputs = self._played(state, self.tokens[row:])[0]
            if _same(seen[row:], outputs, bound) and not _same(state, [right[-1]], bound / 4):
                return cause, f"{words}, after row {row} of the pass"
        return None

    def _heads(self, seen: torch.Tensor, tokens: Sequence[Any], bound: float, last: bool) -> str:
        """Which key heads a value head reads, where other ones than its own explain all; last:
        seen is the last state [heads, …], else outputs [rows, heads, …]."""
        n, groups = self.shape.n_heads, self.shape.n_groups
        if self.shape.recurrence == "conv" or n > _MOST_HEADS:
            return ""
        of_heads = seen if last else seen.view(len(tokens), n, -1).transpose(0, 1)
        start = self.reference.state(self.sequence)
        shared = ("C", "B") if self.shape.recurrence == "mamba2" else ("q", "k")
        others = (x for x in _ROW_INPUTS[self.shape.recurrence] if x not in shared)
        weights = _HEAD_WEIGHTS[self.shape.recurrence]
        for names, count in (
            (shared, groups),
            *(((x,), n) for x in (*others, *weights)),
            (weights, n),
        ):
            read: dict[int, tuple[int, ...]] = {}
            for heads in product(range(count), repeat=len(names)):
                if (last or names is weights) and len(set(heads)) > 1:
                    continue  # states do not depend on q
                at = dict(zip(names, heads, strict=True))
                rows = [
                    row | {x: row[x][i : i + 1].expand_as(row[x]) for x, i in at.items()}
                    for row in tokens
                ]
                outputs, states = self._played(start, rows)
                for head, made in enumerate(states[-1] if last else torch.stack(outputs, 1)):
                    if _same(of_heads[head], [made], bound):
                        read.setdefault(head, heads)
            wrong = [(h, at) for h, at in read.items() if set(at) != {h // (n // count)}]
            if len(read) == n and wrong:
                head, heads = wrong[0]
                words = (f"{x} of head {i}" for x, i in zip(names, heads, strict=True))
                return f"value head {head} reads {', '.join(words)}"
        return ""

    def _outputs_of(self, seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
        """The first row that has another one's output, where every row has some row's; else ""."""
        words = ""
        for i, row in enumerate(seen):
            has = [j for j, other in enumerate(wanted) if _same(row, [other], bound)]
            if not has:
                return ""
            if i not in has and not words:
                words = f"row {i} has the output of row {has[0]}"
        return words

    def _parents(self, seen: torch.Tensor, bound: float) -> str:
        """Of a tree, a row whose output is right after another row than its parent, where all
        outputs can be had from some row, or from the state before the pass (-1); else empty."""
        states, words = [self.reference.state(self.sequence)], ""
        for i, row in enumerate(self.tokens if self.parents else ()):
            others = [p for p in range(-1, i) if p != self.parents[i]]
            for parent in (self.parents[i], *others):
                output, after = step(self.shape, states[parent + 1], row)
                if _same(seen[i], [output], bound):
                    break
            else:
                return ""
            if parent != self.parents[i] and not words:
                words = f"row {i} follows row {parent} and not row {self.parents[i]}"
            states.append(after)
        return words

    def _rounded(self, seen: torch.Tensor, state: torch.Tensor, count: int, of: int) -> str:
        """Which states are rounded to fewer digits, where that explains most of the error; of: 0
        outputs, 1 the last state."""

        def error(fewer: Callable[[torch.Tensor], torch.Tensor], rounded: range) -> float:
            states: list[torch.Tensor] = []
            outputs = []
            for i in range(count + 1):
                after = state
                if i:
                    start = states[self.parents[i - 1] + 1] if self.parents else states[-1]
                    output, after = step(self.shape, start, self.tokens[i - 1])
                    outputs.append(output)
                states.append(fewer(after).double() if i in rounded else after)
            return float((seen - (states[-1] if of else torch.stack(outputs))).abs().mean())

        whole = error(torch.Tensor.double, range(0))
        for kind, fewer in (
            ("to bfloat16", torch.Tensor.bfloat16),
            ("to float16", torch.Tensor.half),
            ("to bfloat16, towards zero", _cut),  # as Triton's interpreter does
        ):
            for words, rounded in (
                ("before the pass", range(1)),
                ("after each row", range(1, count + 1)),
                ("before the pass and after each row", range(count + 1)),
                ("after the pass", range(count, count + 1)),
            ):
                if error(fewer, rounded) < whole / 4:
                    return f"states {words} are rounded {kind}"
        return ""

    def explain_outputs(self, seen: torch.Tensor, bound: float) -> tuple[str, str]:
        """Cause and sentence for outputs [rows, …] that differ from the reference's."""
        if seen.isnan().any():
            first = int(seen.flatten(1).isnan().any(1).nonzero()[0])
            return "unused-memory", f"NaN in the output of row {first + 1} of {len(seen)}"
        right = self.reference.state(self.sequence)
        for cause, sentence, state in self.starts(bound):
            ends = (1, len(self.tokens))  # most are wrong in the first row
            if all(_same(seen[:n], self._played(state, self.tokens[:n])[0], bound) for n in ends):
                return cause, sentence
        wanted = torch.stack(self._played(right, self.tokens)[0]).view(seen.shape)
        if found := _closest(seen, self._ways(right, len(self.tokens), 0, bound), bound):
            return found
        if self.kernel.ring and (folded := self._folded_within(seen, wanted, bound)):
            return folded
        if parents := self._parents(seen, bound):
            return "wrong-parent", parents
        if rounded := self._rounded(seen, right, len(self.tokens), 0):
            return "drift", rounded
        if heads := self._heads(seen, self.tokens, bound, last=False):
            return "head-mapping", heads
        if row := self._outputs_of(seen, wanted, bound):
            return "other-row", row
        times = float((seen * wanted).sum() / (wanted * wanted).sum())
        if times and _same(seen / times, [wanted], bound):
            words = f"outputs are {times:.4g} times the right ones"
            if (size := self.shape.d_k / times**2) > 1 and abs(size - round(size)) < 1e-3:
                words += f": the root of {round(size)} in place of {self.shape.d_k}"
            return "wrong-scale", words
        if tile := _tile(seen, wanted, bound):
            return "wrong-tile", tile
        wrong = ((seen - wanted).abs().flatten(1).max(1).values > bound).nonzero()
        chunk = self.kernel.chunk
        if chunk and len(wrong) and int(wrong[0]) >= chunk:
            return "wrong-chunk", f"from row {int(wrong[0])} on, chunks have {chunk} rows"
        return self._unnamed("wrong-output", _place(seen, wanted, bound))

    def explain_state(self, seen: torch.Tensor, count: int, bound: float) -> tuple[str, str]:
        """Cause and sentence for the state after `count` accepted rows of this pass."""
        if seen.isnan().any():
            return "unused-memory", f"NaN in the state after row {count} of {len(self.tokens)}"
        start = self.reference.state(self.sequence)
        states = self._played(start, self.tokens)[1]
        for rows, state in enumerate(states, 1):
            if rows != count and _same(seen, [state], bound):
                cause = "wrong-chunk" if self.kernel.chunk else "stale-column"
                if self.shape.recurrence == "conv" and rows > count:
                    cause = "window-not-rolled-back"
                return cause, f"state after {rows} of {len(states)} rows, {count} accepted"
        if _same(seen, [start], bound):
            cause = "lost-fold" if self.kernel.ring else "state-not-committed"
            if count < self.kernel.chunk:
                cause = "wrong-chunk"
            return cause, f"state before the pass, {count} of {len(states)} rows accepted"
        if not seen.any():
            return "state-lost", f"nothing is kept of the state after row {count} of {len(states)}"
        if self.shape.recurrence == "conv" and (held := self._held(seen, count, bound)):
            return held
        for cause, sentence, state in self.starts(bound):
            if _same(seen, [self._played(state, self.tokens[:count])[1][-1]], bound):
                return cause, sentence
            if _same(seen, [state], bound):
                words = "" if cause == "other-sequence" else ", without the rows of this pass"
                return cause, sentence + words
        if found := _closest(seen, self._ways(start, count, 1, bound), bound):
            return found[0], f"{found[1]}, in the state alone: outputs are right"
        if rounded := self._rounded(seen, start, count, 1):
            return "drift", rounded
        if heads := self._heads(seen, self.tokens[:count], bound, last=True):
            return "head-mapping", heads
        if tile := _tile(seen, states[count - 1], bound):
            return "wrong-tile", tile
        if 0 < self.kernel.chunk < count:  # the last chunk's outputs need the state before it
            return "wrong-chunk", f"state after {count} rows, of which all outputs are right"
        return self._unnamed("wrong-state", _place(seen, states[count - 1], bound))

    def _held(self, seen: torch.Tensor, count: int, bound: float) -> tuple[str, str] | None:
        """The inputs that a window after `count` rows of this pass holds, where all are known."""
        known, accepted = self._inputs_before()
        known = [*known[:accepted], *(row["x"] for row in self.tokens), known[-1]]
        at = []
        for column in seen.unbind(-1):
            same = [i for i, x in enumerate(known) if _same(column, [x], bound)]
            if not same:
                return None
            at.append(same[0])
        return self._window(at, len(known), accepted + count)

    def _unnamed(self, cause: str, place: str) -> tuple[str, str]:
        taken = sum(len(commit) for commit in self.reference.tokens[self.sequence])
        if self.kernel.ring and taken + len(self.tokens) > self.kernel.ring:
            return "wrong-wrap", f"after {taken} rows in a log of {self.kernel.ring}"
        return cause, f"no known mistake gives this; {place}"


def _cut(x: torch.Tensor) -> torch.Tensor:
    return (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32)


def _place(seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    """Which rows (or heads) and heads (or channels) are wrong."""
    off = (seen - wanted).abs() > bound * max(1.0, float(wanted.abs().max()))
    words = []
    for dim in range(min(2, off.dim())):
        rest = off.transpose(0, dim).flatten(1).any(1)
        at = rest.nonzero().flatten().tolist()
        shown = "all" if len(at) == len(rest) else ", ".join(str(i) for i in at[:8])
        words.append(f"{shown} of {len(rest)}")
    return "wrong are " + " and ".join(words) + " of its first dimensions"


def _tile(seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    """The only columns, a range of the last dimension, that are wrong; empty where it is none."""
    off = (seen - wanted).abs() > bound * max(1.0, float(wanted.abs().max()))
    columns = off.flatten(0, -2).any(0).nonzero().flatten().tolist()
    n = seen.shape[-1]
    if not columns or columns != list(range(columns[0], columns[-1] + 1)) or len(columns) > n - 8:
        return ""
    return f"columns {columns[0]} to {columns[-1]} of {n} are wrong, and no other"


def _closest(
    seen: torch.Tensor, ways: Iterable[tuple[str, str, torch.Tensor]], bound: float
) -> tuple[str, str] | None:
    """Cause and sentence of the way that gives what is nearest, where it is near enough."""
    best, least = None, 4 * bound
    for cause, sentence, made in ways:
        off = _off(seen, made)
        if off <= (least / 2 if best else least):  # a later way must be clearly nearer
            best, least = (cause, sentence), off
    return best


def _off(seen: torch.Tensor, made: torch.Tensor) -> float:
    """The largest difference relative to the largest value, 1 at least."""
    other = made.view(seen.shape)
    return float((seen - other).abs().max()) / max(float(other.abs().max()), 1.0)


def _same(seen: torch.Tensor, wanted: Sequence[torch.Tensor], bound: float) -> bool:
    return _off(seen, torch.stack(list(wanted))) <= 4 * bound
