"""Causes of a wrong output or state: known mistakes with which the reference gives the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain, tee
from types import MappingProxyType

import torch

from engine.conform import fits, mistakes
from engine.conform.decays import Log, Played, decays
from engine.conform.fits import fewest, joined, place, same, spans, wrong_heads
from engine.conform.mistakes import formulas, heads_of, in_parts, layouts, strides
from engine.conform.reference import ROW_INPUTS, Reference, Row, Way, linear, play, step, terms
from engine.conform.shares import Kept, Quantities, channels, kept_at, shares
from engine.conform.subject import Kernel

_MOST_COMMITS, _MOST_ROWS = 12, 8


class Situation:
    """One sequence of one pass, with everything that a wrong kernel might have used for it.

    `tokens` are the rows of the pass, empty if the sequence is not in it; `before` the reference's
    states after each row of the previous passes, of the last of which `accepted` were kept. `batch`
    are the rows of all sequences of the pass, each starting at its place. `sought`: the causes to
    look for, empty: all.
    """

    def __init__(
        self,
        kernel: Kernel,
        reference: Reference,
        sequence: int,
        tokens: Sequence[Row],
        parents: Sequence[int] = (),
        batch: Sequence[Row] = (),
        places: Mapping[int, int] = MappingProxyType({}),
        sought: Collection[str] = (),
    ) -> None:
        self.kernel, self.reference, self.sequence = kernel, reference, sequence
        self.folds, self.shape = kernel.ring > 0 or kernel.log, reference.shape
        passes, commits = reference.passes[sequence], reference.tokens[sequence]
        self.tokens, self.before = list(tokens), passes[:-1] if tokens else passes
        self.accepted = len(commits[-1]) if commits else 0
        self.parents, self.places, self.sought = tuple(parents), places, sought
        self._closest = partial(fits.closest, sought=sought)
        self.batch, self.first = batch or self.tokens, places.get(sequence, 0)
        self.begin, self.own = self.first, len(self.tokens)
        self.start = reference.state(sequence)
        # for a chunk: the right states of earlier chunks, and the rows of the last of them
        self.earlier: list[torch.Tensor] = []
        self.before_chunk: list[Row] = []
        self.whole = self.tokens[: kernel.chunk or None]  # rows of the chunk, or of the pass

    def _chunk(self, row: int) -> Situation:
        """The chunk of a row, as a pass of its own from the right state before it."""
        part, size = copy(self), self.kernel.chunk
        first = row // size * size
        states = [self.start, *self._played(self.start, self.tokens[:first])[1]]
        part.before_chunk = self.tokens[max(0, first - size) : first]
        part.tokens, part.first = self.tokens[first : first + size], self.first + first
        part.whole = part.tokens
        part.start, part.earlier = states[-1], states[:-1:size]
        return part

    def starts(self, bound: float) -> Iterator[Way]:
        """Wrong initial states: cause, sentence, state."""
        each, again = tee(self._carries() if self.earlier else self._starts())
        for cause, sentence, state in each:
            if not same(state, [self.start], bound / 4):  # as one row of a log may leave it
                yield cause, sentence, state
        if self.kernel.chunk:
            after = self._played(self.start, self.whole)[1][-1]
            yield "wrong-chunk", "the state after the chunk, not the one before it", after
        for cause, sentence, state in again if self.earlier else ():
            for a, b in fits.tiles(self.shape.d_k):
                part = torch.cat([self.start[:, :a], state[:, a:b], self.start[:, b:]], 1)
                if a < b <= self.shape.d_k and not same(part, [self.start], bound / 4):
                    yield cause, f"{sentence}, in key channels {a} to {b - 1} alone", part

    def _carries(self) -> Iterator[Way]:
        """Wrong states that the previous chunk may leave."""
        for state in (torch.zeros_like(self.start), *self.earlier[::-1]):
            yield "wrong-chunk", "the state of the chunk before is lost", state
        log = Log(self.shape, self.earlier[-1], self.before_chunk)
        for cause, words, state in log.decays():
            yield cause, f"{words}, the chunk's", state
        for cause, words, state in log.formulas():
            yield cause, f"{words}, in what the chunk before leaves", state
        first = self.first - len(self.before_chunk)
        yield from log.kept_with(self.batch, first, self.begin, self.kernel.chunk)
        yield from self._others()
        yield from layouts(self.shape, self.start)

    def _starts(self) -> Iterator[Way]:
        yield from self._columns(0)
        commits = self.reference.committed[self.sequence]
        yield from self._folds() if self.kernel.ring else ()
        if len(commits) > 1:
            yield "state-not-committed", "state before the last pass", commits[-2]
        for age in range(1, len(self.before)):
            yield from self._columns(age)
        yield from self._others()
        yield from self.reference.former.get(self.sequence, ())
        yield from layouts(self.shape, commits[-1])
        rows = self.tokens[: max(1, self.accepted)]  # up to the column that is read
        yield from mistakes.overwritten(self.shape, commits[-1], rows)
        yield "state-lost", "empty state", torch.zeros_like(commits[-1])
        if self.shape.recurrence == "conv":
            yield from fits.windows(*self._inputs_before(), self.shape.d_k - 1, bool(self.before))
        elif len(commits) > 1:
            rows = self.reference.tokens[self.sequence][-1]
            yield from Log(self.shape, commits[-2], rows).cursors(len(rows))

    def _columns(self, age: int) -> Iterator[Way]:
        """States after the rows of the last pass (age 0), of the one before it (1), and so on."""
        for count, state in enumerate(self.before[-1 - age] if self.before else (), 1):
            if (not age and count == self.accepted) or count % max(1, self.kernel.chunk):
                continue
            cause = "stale-column" if age else self._after(count, self.accepted)
            when = f"of the pass {age} earlier" if age else f"where {self.accepted} were accepted"
            yield cause, f"state after row {count} {when}", state

    def _after(self, rows: int, count: int) -> str:
        """The cause if the state after these rows replaces the one after `count`."""
        if self.shape.recurrence == "conv" and rows > count:
            return "window-not-rolled-back"
        return "lost-fold" if self.folds and rows < count else "stale-column"

    def _others(self) -> Iterator[Way]:
        for other, states in enumerate(self.reference.committed):
            if other != self.sequence:
                passes, n = self.reference.passes[other][-2:], max(1, self.kernel.chunk)
                for state in (states[-1], *(state for one in passes for state in one[n - 1 :: n])):
                    yield "other-sequence", f"a state of sequence {other}", state

    def _logged(self, also: Sequence[Row] = ()) -> Iterator[tuple[int, list[Row]]]:
        """For each of the last commits, the rows of a log started after it, and these of the
        pass."""
        taken, first = self.reference.tokens[self.sequence], True
        last = len(self.reference.committed[self.sequence]) - (1 if also else 2)
        for kept in range(last, max(-1, last - _MOST_COMMITS), -1):
            rows = [*(row for commit in taken[kept:] for row in commit), *also]
            if first or len(rows) <= self.kernel.ring + 1:
                yield kept, rows
            first = False

    def _folds(self, also: Sequence[Row] = ()) -> Iterator[Way]:
        """States after a wrongly folded log, from each of the last commits on; also: rows of this
        pass in the log, as with one token per call."""
        commits = self.reference.committed[self.sequence]
        taken = self.reference.tokens[self.sequence]
        logs: list[Log] = []
        for kept, rows in self._logged(also):
            logs.append(Log(self.shape, commits[kept], rows))
            yield from logs[-1].passes([*map(len, taken[kept:]), len(also)])
        if not logs:
            return
        yield from logs[-1].cursors(self.kernel.ring)
        for log in logs:
            for cause, words, state in log.decays():
                yield cause, f"{words}, {len(log.rows)} rows of the log", state
        oldest, rows = logs[-1], logs[-1].rows
        for end in range(len(rows) - 1, max(0, len(rows) - self.kernel.ring), -1):
            log = Log(self.shape, oldest.states[0], rows[:end])
            for cause, words, state in log.decays(rows[end:]):
                yield cause, f"{words}, {len(rows) - end} rows ago", state
        rejected = [] if also else self.reference.rows[self.sequence][-2][self.accepted :]
        first = sum(map(len, taken)) + len(also) - len(rows)
        yield from oldest.stretches(self.kernel.ring, first, rejected)
        yield from oldest.places(self.kernel.ring, first, rejected)
        for log in logs:
            for cause, words, state in log.formulas():
                yield cause, f"{words}, in the fold of {len(log.rows)} rows", state

    def _inputs_before(self) -> tuple[list[torch.Tensor], int]:
        """Inputs of a convolution before this pass, and how many of them were accepted: those of
        the window before the last pass, of that pass, and a zero."""
        commits = self.reference.committed[self.sequence]
        first = commits[-2] if len(commits) > 1 else commits[-1]
        rows = self.reference.rows[self.sequence]
        last = rows[-2] if len(commits) > 1 else []
        known = [*first.unbind(-1), *(row["x"] for row in last)]
        return [*known, torch.zeros_like(known[0])], self.shape.d_k - 1 + self.accepted * bool(last)

    def _mappings(self, n: int) -> Iterator[tuple[str, str, list[Row]]]:
        """Rows that may replace a sequence's first n, with cause and words."""
        first, own = self.first, ""
        ways = mistakes.other_rows(first, n)
        for s, begin in self.places.items() if self.begin == first else ():
            if s != self.sequence:
                of = f"sequence {s}" if s >= 0 else "padding"
                ways.append((f"the rows of {of}", list(range(begin, begin + n))))
        for words, at in ways:
            # of the sequence before, of the first, or of one that is named
            others = at[0] < first or "the rows of" in words
            rows = [self.batch[min(max(i, 0), len(self.batch) - 1)] for i in at]
            yield "other-sequence" if others else own, words, rows
        old = self.reference.rows[self.sequence][-2:-1] if not self.kernel.chunk else []
        for rows in (rows for rows in old if rows):
            before = [rows[min(i, len(rows) - 1)] for i in range(n)]
            yield own, "the same row of the pass before", before

    def inputs(self, tokens: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
        """Wrong mappings of the rows: cause, sentence, rows."""
        named = formulas, mistakes.of_other_heads, mistakes.of_other_channels
        each = (*(of(self.shape, tokens) for of in named), mistakes.turned(tokens))
        yield from in_parts(self.shape, tokens, chain(self._of_rows(tokens), *each))
        yield from strides(self.shape, self.batch, self.first, tokens)

    def _of_rows(self, tokens: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
        """Cause, sentence and rows if an input, or all, comes from other rows."""
        gate, *others = (x for x in ROW_INPUTS[self.shape.recurrence] if x in tokens[0])
        for of_rows, words, taken in self._mappings(len(tokens)):
            for names in dict.fromkeys(((gate,), *((x,) for x in others), (gate, *others))):
                cause = "gate-of-other-row" if names in (("a",), ("dt",)) else "other-row"
                what = {"a": "decay", "dt": "decay", "b": "beta"}.get(names[0], names[0])
                what = "all inputs" if len(names) > 1 else what
                pairs = zip(tokens, taken, strict=True)
                rows = [row | {x: other[x] for x in names} for row, other in pairs]
                yield of_rows or cause, f"{what} of {words}", rows

    def _played(self, state: torch.Tensor, tokens: Sequence[Row]) -> Played:
        return play(self.shape, state, tokens, self.parents)

    def _ways(
        self, state: torch.Tensor, count: int, of: int, bound: float, first: int = 0
    ) -> Iterator[Way]:
        """Cause, sentence and result of each wrong computation of the first rows, from row `first`
        on, that differs from the right one; of: 0 outputs, 1 the last state."""

        def part(played: Played) -> torch.Tensor:
            return played[1][-1] if of else torch.stack(played[0])

        def after(rows: Sequence[Row]) -> Played:
            outputs, states = self._played(before, rows[first:])
            return [*right[0][:first], *outputs], states

        tokens = self.tokens[:count]
        right = self._played(state, tokens)
        before = right[1][first - 1] if first else state
        ways = ((cause, words, after(rows)) for cause, words, rows in self.inputs(tokens))
        few = count <= max(_MOST_ROWS, self.kernel.chunk)
        views: Iterable[tuple[str, str, Played]] = ()
        if few and not self.parents:
            rows = self.batch[self.first - self.begin :][:count] if self.begin else ()
            views = decays(self.shape, state, tokens, bool(of), first, rows, self.whole)
            if self.kernel.ring and not of:
                views = chain(views, self._views_of_logs(count))
        for cause, sentence, played in chain(ways, views):
            if not same(part(played), [part(right)], bound / 4):
                yield cause, sentence, part(played)
        if of and few and self.shape.recurrence != "conv":
            log = Log(self.shape, state, tokens)
            yield from log.decays()
            yield from log.formulas()
            yield from log.cursors(count)
            for i in range(count) if count > 1 else ():
                lost = log.kept(log.writes[i], i + 1)
                yield "lost-fold", f"what row {i} wrote is lost", log.states[-1] - lost

    def _fitted(
        self, rows: Sequence[Row], seen: torch.Tensor, right: torch.Tensor, bound: float, last: bool
    ) -> tuple[str, str] | None:
        """Cause and sentence of a mistake with a number that gives the outputs of these rows, or
        the last state, as computed or with their stored writes."""
        plain = last and self.shape.recurrence != "conv"
        log = Log(self.shape, self.start, rows) if plain else None

        def played(others: Sequence[Row]) -> torch.Tensor:
            outputs, states = self._played(self.start, others)
            return states[-1] if last else torch.stack(outputs)

        def each(x: float) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
            for cause, words, others in in_parts(self.shape, rows, formulas(self.shape, rows, x)):
                yield cause, words, partial(played, others)
                if log:
                    yield cause, f"{words}, as what rows wrote is kept", partial(log.stored, others)

        return self._closest(seen, fits.numbered(each, seen, right, rows), bound, right, last)

    def _views_of_logs(self, count: int) -> Iterator[tuple[str, str, Played]]:
        """Cause, sentence and outputs if the pass sees the state before a log, or writes of the
        log's rows, with other decays."""
        for kept, rows in self._logged():
            state, n = self.reference.committed[self.sequence][kept], len(rows)
            rows += self.tokens[:count]
            for cause, words, (outputs, states) in decays(self.shape, state, rows, False, n):
                yield cause, f"{words}; the first {n} are the log's", (outputs[n:], states)

    def _begun(self, seen: torch.Tensor, wanted: torch.Tensor, bound: float) -> Iterator[Way]:
        """Cause, sentence and outputs of wrong initial states that explain the first row."""
        row, wrong = terms(self.shape, self.tokens[0]), wrong_heads(seen, wanted, bound)
        for cause, sentence, state in self.starts(bound):
            made = step(self.shape, state, row)[0]
            if same(seen[0][wrong], [made[wrong]], bound / 4):  # most do not
                yield cause, sentence, torch.stack(self._played(state, self.tokens)[0])
            more = wanted[0] + fits.taken(self.shape, row, state - self.start)
            if not same(seen[0], [wanted[0]], bound) and same(seen[0], [more], bound):
                alone = torch.cat([more[None], seen[1:]])
                yield cause, f"{sentence}, which outputs see alone", alone

    def explain_outputs(self, seen: torch.Tensor, bound: float) -> tuple[str, str]:
        """Cause and sentence for outputs [rows, …] that differ from the reference's."""
        wanted = torch.stack(self._played(self.start, self.tokens)[0]).view(seen.shape)
        if len(seen) <= _MOST_ROWS and (words := fits.advanced(self.shape, seen, wanted, bound)):
            return "wrong-stride", words
        if not seen.isfinite().all():
            return self.unnamed("unused-memory", "NaN in outputs")
        errors = (seen - wanted).abs().flatten(1).max(1).values
        wrong, chunk = (errors > bound).nonzero(), self.kernel.chunk
        row = end = int(wrong[0])
        if chunk and errors[row] < 4 * bound:  # a slightly wrong one proves little
            end += int(errors[row : row // chunk * chunk + chunk].argmax())
        if words := fits.unwritten(seen, wanted, bound):
            cause = "wrong-chunk" if chunk else "unused-memory"
            return "head-mapping" if "heads" in words else cause, words
        if chunk and len(seen) > min(chunk, max(_MOST_ROWS, end % chunk + 1)):
            part, first = self._chunk(row), row // chunk * chunk
            part.tokens = part.tokens[: max(_MOST_ROWS, end - first + 1)]
            cause, words = part.explain_outputs(seen[first : first + len(part.tokens)], bound)
            if cause in ("wrong-output", "wrong-gate") and row >= chunk:
                return "wrong-chunk", joined(f"from row {row} on, chunks have {chunk} rows", words)
            return cause, words
        if found := self._closest(seen, self._begun(seen, wanted, bound), bound, wanted):
            return found
        share = self._shares(seen[row], row, bound, last=False)
        if share and chunk and "times what" not in share[1]:
            return share
        # rows before a slightly wrong one may be wrong, too, within the bound
        begin = row if len(seen) > _MOST_ROWS and not self.parents and row == end else 0
        ways = self._ways(self.start, len(seen), 0, bound, begin)
        if found := self._closest(seen, ways, bound, wanted):
            return found[0], found[1] + f", seen from row {begin} on" * (begin > 0)
        few = len(seen) <= _MOST_ROWS
        if few and (found := self._fitted(self.tokens, seen, wanted, bound, False)):
            return found
        every, folds = list(self.inputs(self.tokens)), self._folds if self.kernel.ring else None
        rows = self.shape, self.start, seen, self.tokens, self.parents
        if found := mistakes.row_by_row(*rows, every, folds, bound):
            return found
        if self.shape.recurrence == "conv" and not self.parents:
            known = [*self.start.unbind(-1), *(row["x"] for row in self.tokens)]
            for solved in (fits.tapped, fits.mapped, fits.summed, fits.activated):
                if found := solved(known, self.tokens, seen, bound):
                    return found
        if seen.dim() > 2:
            of_heads = seen.transpose(0, 1), wanted.transpose(0, 1), slice(None), bound
            if words := fits.misplaced(*of_heads, "head {}"):
                return "head-mapping", words
        if fits.tile(seen, wanted, bound):
            return "wrong-tile", ""
        if share:
            return share
        if words := fits.of_rounding(seen[wrong.flatten()], wanted[wrong.flatten()]):
            return "drift", words
        return self.unnamed("wrong-output", "")

    def explain_state(self, seen: torch.Tensor, count: int, bound: float) -> tuple[str, str]:
        """Cause and sentence for the state after `count` accepted rows of this pass."""
        if not seen.isfinite().all():
            return "unused-memory", f"NaN in the state after row {count} of {len(self.tokens)}"
        states, chunk = self._played(self.start, self.tokens)[1], self.kernel.chunk
        for rows, state in enumerate(states, 1):
            if rows != count and same(seen, [state], bound):
                cause = "wrong-chunk" if chunk else self._after(rows, count)
                return cause, f"state after {rows} of {len(states)} rows, {count} accepted"
            if self.folds:  # writes of rows are recomputed, or were stored
                log = Log(self.shape, self.start, self.tokens[:count])
                anew = self._played(state, log.rows)[1][-1]
                stored = log.states[-1] + log.kept(state - self.start)
                if same(seen, [anew], bound) or same(seen, [stored], bound):
                    return "double-fold", f"{count} rows are folded into the state after {rows}"
        if same(seen, [self.start], bound):
            cause = "lost-fold" if self.folds else "state-not-committed"
            cause = "wrong-chunk" if count < chunk else cause
            return cause, f"state before the pass, {count} of {len(states)} rows accepted"
        if same(seen, [0 * self.start], bound):
            return "state-lost", f"nothing is kept of the state after row {count} of {len(states)}"
        if 0 < chunk < count:  # the last chunk's outputs are right, so the state before it is, too
            part, rest = self._chunk(count - 1), (count - 1) % chunk + 1
            cause, words = part.explain_state(seen, rest, bound)
            if cause == "wrong-state":
                after = f"state after {count} rows, of which all outputs are right"
                return "wrong-chunk", joined(after, words)
            return cause, words
        right = states[count - 1]
        for cause, sentence, state in layouts(self.shape, right):
            if same(seen, [state], bound) and not same(state, [right], bound):
                return cause, f"{sentence} is written"
        for words, at in heads_of(self.shape) if self.shape.recurrence != "conv" else ():
            made = seen.clone()
            for head, place_ in enumerate(at.tolist()):  # the last write to a place remains
                made[place_] = right[head]
            moved = not same(made[at], [right[at]], bound)
            if moved and same(seen, [made], bound):
                return "head-mapping", f"states are written to the place of {words}"
        if self.shape.recurrence == "conv" and (held := self._held(seen, count, bound)):
            return held
        heads = wrong_heads(seen[None], right[None], bound)
        tokens, plain = self.tokens[:count], self.shape.recurrence != "conv" and not self.parents
        change = linear(self.shape, tokens if plain else ())
        for cause, sentence, state in self.starts(bound):
            other = state - self.start
            made = right + change @ other if plain else self._played(state, tokens)[1][-1]
            if same(seen[heads], [made[heads]], bound / 4):  # nearer than the right one
                return cause, sentence
            if same(seen[heads], [state[heads]], bound / 4):
                if cause == "other-sequence":
                    return "other-sequence-written", f"the state is {sentence}"
                return cause, f"{sentence}, without the rows of this pass"
        ways, again = tee(self._ways(self.start, count, 1, bound))
        found = self._closest(seen, ways, bound, right, True)
        if not found and self.shape.recurrence != "conv":
            gives: dict[tuple[str, str], torch.Tensor] = {}
            for c, w, made in again:  # several ways may have the same sentence
                none = gives.get((c, w), heads & False)
                gives[c, w] = none | ~wrong_heads(seen[None], made[None], bound / 8)
            found = fewest(gives, heads, ["heads"])
        if found:
            cause = "lost-fold" if self.folds and " nothing of " in found[1] else found[0]
            return cause, f"{found[1]}, in the state alone: outputs are right"
        if count <= _MOST_ROWS and (found := self._fitted(tokens, seen, right, bound, True)):
            return found
        none = (seen.abs() <= bound) & (right.abs() > bound)
        if self.shape.recurrence != "conv" and (lost := none.all(2).all(0)).any():
            return "wrong-tile", f"nothing is kept in key channels {spans(lost)}"
        if fits.tile(seen, right, bound) or fits.tile(seen.mT, right.mT, bound):
            return "wrong-tile", ""
        if found := self._shares(seen, count - 1, bound, last=True):
            return found
        if words := fits.of_rounding(seen, right):
            return "drift", words
        return self.unnamed("wrong-state", "")

    def _shares(
        self, seen: torch.Tensor, row: int, bound: float, last: bool
    ) -> tuple[str, str] | None:
        """Wrong factors of the parts of a row's output, or (last) of the state after it."""
        if self.parents or self.shape.recurrence == "conv":
            return None
        kept: list[Kept] = [("the state before the pass", self.start, self.first, False)]
        if self.before_chunk:
            first = self.first - len(self.before_chunk)
            whole = Log(self.shape, self.earlier[-1], self.before_chunk).kept()
            kept = [("the state before the chunk before", whole, first, False)]
            kept.append(("what the chunk before wrote", self.start - whole, self.first, False))
        log = Log(self.shape, self.start, self.tokens[:row])
        most = 0 if self.before_chunk else _MOST_COMMITS if last else 2
        kept = kept_at(row, log, kept, self.first, row > most)
        known = Quantities(self.shape, self.batch, self.begin, self.own, self.first + row)
        given = self.shape, log.states[-1], self.tokens[row], seen, bound, known
        if last and self.shape.recurrence == "kda" and (found := channels(*given, self.sought)):
            return found
        for parts in ([("the state before", log.states[-1], self.first + row, False)], kept):
            solved = self.shape, parts, self.tokens[row], seen, bound, last, known, self.sought
            if found := shares(*solved):
                return found
        return None

    def _held(self, seen: torch.Tensor, count: int, bound: float) -> tuple[str, str] | None:
        """The inputs, or outputs, in a window after `count` rows of this pass, if all are
        recognised."""
        known, accepted = self._inputs_before()
        known = [*known[:accepted], *(row["x"] for row in self.tokens), known[-1]]
        all_ = [*known, *self._played(self.start, self.tokens)[0]]
        at = []
        for column in seen.unbind(-1):
            at += [i for i, x in enumerate(all_) if same(column, [x], bound)][:1]
        if len(at) < seen.shape[-1]:
            return None
        if (row := max(at) - len(known)) >= 0:
            return "wrong-term", f"the window holds the output of row {row}, not its input"
        return fits.window(at, len(known), accepted + count)

    def explain_still(self, seen: torch.Tensor, bound: float) -> tuple[str, str]:
        """Cause and sentence for the changed state of a sequence that was not in the pass."""
        if not seen.isfinite().all():
            return "unused-memory", "NaN in a state that was not in the pass"
        last = self.reference.committed[self.sequence][:-1][-1:]
        before = (("stale-column", "state before its last pass", state) for state in last)
        for cause, words, state in chain(self._columns(0), before, self._others()):
            if same(seen, [state], bound):
                cause = "other-sequence-written" if cause == "other-sequence" else "stale-column"
                return cause, f"{words}, though it is not in this pass"
        return "other-sequence-written", place(self.shape, seen, self.start, bound)

    def unnamed(self, cause: str, words: str) -> tuple[str, str]:
        """A cause that only describes the error; for a log, whether it was about to wrap."""
        taken = sum(len(commit) for commit in self.reference.tokens[self.sequence])
        if self.kernel.ring and taken + len(self.tokens) > self.kernel.ring:
            return "wrong-wrap", joined(words, f"after {taken} rows in a log of {self.kernel.ring}")
        return cause, words
