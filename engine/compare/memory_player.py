"""Player of memory scripts on any engine with contexts.

A player uses only the small protocol below. Statements run one after another; a failed check or
expectation is noted and the script continues, while an operation with an unexpected outcome ends
it, because what follows would be meaningless.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.analysis.noise_ceiling import logits_ceiling, rows_beyond, tipped_share
from engine.compare.divergence import LogitsDifference, MemoryDifference, ReferenceLogits
from engine.compare.memory_script import (
    CompareRanges,
    ContextSpec,
    DecodeTokens,
    ExpectFacts,
    MeasureBound,
    MemoryScript,
    PositionRange,
    SequenceOperation,
    Statement,
    TokenPart,
)
from engine.errors import DraftscopeError


class MemoryContext:
    """The memory of a model, as a script sees it. Errors: those of engine.errors."""

    def decode(self, batch: Mapping[int, Sequence[int]]) -> Mapping[int, Tensor]:
        """Decode tokens of sequences in one batch, appending to each.

        Returns the logits of each sequence, [n_tokens, n_vocab].
        """
        raise NotImplementedError

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Remove positions p0 <= pos < p1 (negative: no bound). False: refused."""
        raise NotImplementedError

    def operate(self, name: str, *numbers: int) -> None:
        """Do seq_cp, seq_keep or seq_add."""
        raise NotImplementedError

    def copy(self, name: str, seq: int, place: Any) -> Any:
        """Do save or load, of a whole sequence to or from a path that any context can read; or
        checkpoint, which returns the part that cannot be truncated, or restore, within this
        context."""
        raise NotImplementedError

    def fact(self, seq: int, name: str) -> int | None:
        """The value of one of memory_script.FACTS; None if this memory has no such fact."""
        raise NotImplementedError

    def apart(self, seq: int, reference: Any, reference_seq: int) -> MemoryDifference | None:
        """Distance of a sequence's states from those of `reference_seq` in the context `reference`;
        None if states cannot be read."""
        raise NotImplementedError


class MemoryEngine:
    """Makes contexts and tokenises; may record what checks measured."""

    n_vocab: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        raise NotImplementedError

    def context(self, spec: ContextSpec, policy: str) -> MemoryContext:
        """A new, empty context."""
        raise NotImplementedError

    def compared(
        self, check: CompareRanges, logits: LogitsDifference, left: Tensor, right: Tensor
    ) -> None:
        """Record the measures of a check's positions, and both sides' logits [n, n_vocab]."""

    def states(self, check: CompareRanges, pos: int, found: MemoryDifference) -> None:
        """Record how far states are apart."""

    def failed(self, statement: Statement, message: str) -> None:
        """Record a deviation from the script."""

    def end(self) -> None:
        """Called after the last statement."""


@dataclass(frozen=True, slots=True)
class StatementOutcome:
    """Outcome of a check or expectation, or of a failed operation. value: the measure compared with
    `bound`, NaN without one. message: what is wrong, empty if nothing is."""

    statement: Statement
    value: float
    bound: MeasureBound | None
    message: str


class MemoryPlay:
    """One script under one policy, played statement by statement.

    All contexts are made at once, so that the lanes are known from the start.
    """

    def __init__(
        self,
        script: MemoryScript,
        policy: str,
        engine: MemoryEngine,
        witness: MemoryEngine | None = None,
        noise: Mapping[str, float] | None = None,
        *,
        has_ties: bool = False,
    ) -> None:
        """noise: by measure, the allowed difference of a correct engine; smaller upper bounds are
        raised to it. has_ties: the model chooses by rank, so a difference may be a tie that flips
        with the width of a batch; when a check fails, this is tested by the same batches without a
        rollback."""
        self.script, self.policy, self._has_ties = script, policy, has_ties
        self.outcomes: list[StatementOutcome] = []
        self.tipped: list[str] = []
        """Checks explained by a tie, in words."""
        self.worst_nmse = math.nan
        """Over all checks with an upper bound, NaN before the first."""
        self.error: DraftscopeError | None = None
        """The error that ended the play, unless it was a statement's deviation."""
        self._engine, self._witness, self._noise = engine, witness, noise or {}
        self._statements = statements = script.for_policy(policy)
        specs = [one.action for one in statements if isinstance(one.action, ContextSpec)]
        self._n_seqs = {spec.name: spec.n_seqs for spec in specs}
        self._left = [one for one in statements if not isinstance(one.action, ContextSpec)]
        self._wanted = {
            (place.context, place.seq, pos)
            for statement in self._left
            if isinstance(check := statement.action, CompareRanges)
            for place in (check.left, check.right)
            for pos in range(place.start, place.stop)
        }
        self._logits: dict[tuple[str, int, int], Tensor] = {}
        self._contexts = {spec.name: engine.context(spec, spec.policy or policy) for spec in specs}
        self._checkpoints: dict[tuple[str, str], object] = {}
        self._copies: dict[tuple[str, int], tuple[int, str]] = {}
        """Sequences that are copies: their source, and how they were made."""
        self._folder = tempfile.TemporaryDirectory(prefix="draftscope-memory-")

    @property
    def failures(self) -> list[StatementOutcome]:
        """Outcomes that deviate from the script."""
        return [outcome for outcome in self.outcomes if outcome.message]

    def step(self) -> bool:
        """Play the next statement; whether any is left."""
        if not self._left:
            return False
        statement = self._left.pop(0)
        try:
            self._play(statement)
        except DraftscopeError as error:
            self.error = error
            self._note(statement, error.message.rstrip("."))
            self._left.clear()
        if not self._left:
            self.stop()
        return bool(self._left)

    def stop(self) -> None:
        """End the play: drop the remaining statements, close the contexts, end the recording."""
        self._left.clear()
        if self._witness:
            self._witness.end()
        self._witness = None
        self._contexts.clear()
        self._logits.clear()
        self._checkpoints.clear()
        self._folder.cleanup()

    def _play(self, statement: Statement) -> None:
        action = statement.action
        if isinstance(action, CompareRanges):
            self._check(statement, action)
        elif isinstance(action, ExpectFacts):
            context = self._contexts[action.context]
            missed = action.misses(lambda name: context.fact(action.seq, name))
            self._note(statement, " and ".join(missed))
        elif isinstance(action, DecodeTokens):
            self._decode(action)
        elif isinstance(action, SequenceOperation) and action.label:
            self._copy(action)
        elif isinstance(action, SequenceOperation) and (
            self._operate(action, statement.line) != action.accepted
        ):
            refused = "refused" if action.accepted else "not refused"
            self._note(statement, f"the removal was {refused}")
            self._left.clear()

    def _decode(self, action: DecodeTokens) -> None:
        context = self._contexts[action.context]
        batch = self._resolved(action)
        longest = max(map(len, batch.values()))
        pieces = [batch]
        if action.one_by_one:
            pieces = [
                {seq: ids[i : i + 1] for seq, ids in batch.items() if i < len(ids)}
                for i in range(longest)
            ]
        for piece in pieces:
            starts = {seq: (context.fact(seq, "pos") or 0) + 1 for seq in piece}
            for seq, rows in context.decode(piece).items():
                for pos, row in enumerate(rows, starts[seq]):
                    if (action.context, seq, pos) in self._wanted:
                        self._logits[action.context, seq, pos] = row.detach().clone()

    def _resolved(self, action: DecodeTokens) -> dict[int, list[int]]:
        n_vocab, encode = self._engine.n_vocab, self._engine.encode
        return {
            seq: [id_ for part in tokens for id_ in part.resolve(seq, n_vocab, encode)]
            for seq, tokens in action.batch
        }

    def _operate(self, action: SequenceOperation, line: int) -> bool:
        context, numbers = self._contexts[action.context], action.numbers
        if action.name == "seq_rm":
            seq, p0, *p1 = numbers
            return context.seq_rm(seq, p0, *(p1 or [-1]))
        if action.name == "seq_cp":
            src, dst = numbers
            self._note_copy(action.context, src, dst, line)
        if action.name != "clear":
            context.operate(action.name, *numbers)
        else:
            for seq in numbers or range(self._n_seqs[action.context]):
                context.seq_rm(seq, 0, -1)
                self._copies.pop((action.context, seq), None)
        return True

    def _note_copy(self, context: str, src: int, dst: int, line: int) -> None:
        if src != dst:
            pending = self._contexts[context].fact(src, "pending") or 0
            how = f"line {line}, {pending} tokens pending, policy {self.policy}"
            self._copies[context, dst] = src, how

    def _about_copies(self, statement: Statement) -> str:
        """Which copies are involved in a check or expectation."""
        action, places = statement.action, set[tuple[str, int]]()
        if isinstance(action, CompareRanges):
            places = {(place.context, place.seq) for place in (action.left, action.right)}
        elif isinstance(action, ExpectFacts):
            places = {(action.context, action.seq)}
        return "".join(
            f"; {name} {dst} is a copy of {name} {src} ({how})"
            for (name, dst), (src, how) in self._copies.items()
            if places & {(name, dst), (name, src)}
        )

    def _copy(self, action: SequenceOperation) -> None:
        (seq,), context, label = action.numbers, self._contexts[action.context], action.label
        place: Any = Path(self._folder.name) / f"{label}.seq"
        if action.name == "load":
            self._copies.pop((action.context, seq), None)
        if action.name == "restore":
            place = self._checkpoints[action.context, label]
        found = context.copy(action.name, seq, place)
        if action.name == "checkpoint":
            self._checkpoints[action.context, label] = found

    def _check(self, statement: Statement, check: CompareRanges) -> None:
        if check.for_states:
            self._check_states(statement, check)
            return
        left, right = self._rows(check.left), self._rows(check.right)
        missing = check.left if left is None else check.right
        if left is None or right is None:
            where = f"{missing.context} {missing.seq} at {missing.start}:{missing.stop}"
            self._note(statement, f"nothing was decoded in {where}", check.bound)
            return
        found = ReferenceLogits(right, right.argmax(1).tolist()).difference(left)
        value, bound = _measured(check.bound.measure, found, right), self._raised(check.bound)
        message = _beyond(bound, value)
        if message and self._is_tipped(statement, check, bound, value):
            message = ""
        self._note(statement, message, bound, value)
        if check.bound.compare == "<=":
            self.worst_nmse = max(found.nmse + [v for v in [self.worst_nmse] if not math.isnan(v)])
        if self._witness:
            self._witness.compared(check, found, left, right)

    def _check_states(self, statement: Statement, check: CompareRanges) -> None:
        left, right = self._contexts[check.left.context], self._contexts[check.right.context]
        found = left.apart(check.left.seq, right, check.right.seq)
        if found is None:
            return
        value, bound = _state_error(found), self._raised(check.bound)
        message = _beyond(bound, value)
        if message and self._is_tipped(statement, check, bound, value):
            message = ""
        if not message and check.bound.compare == "<=" and found.n_cells:
            message = f"{found.n_cells} attention cells differ"
        self._note(statement, message, bound, value)
        if self._witness:
            self._witness.states(check, left.fact(check.left.seq, "pos") or 0, found)

    def _is_tipped(
        self, statement: Statement, check: CompareRanges, bound: MeasureBound, value: float
    ) -> bool:
        """Whether the same batches without a rollback differ as much: then a tie of the model flips
        with the width of a batch, and both sides equal their versions without rollback."""
        if not self._has_ties or bound.compare != "<=" or not math.isfinite(value):
            return False
        played = self._statements[: self._statements.index(statement)]
        twin_of = _without_rollback(played, self._resolved)
        if twin_of is None:
            return False
        script = replace(self.script, statements=(*twin_of, statement))
        twin = MemoryPlay(script, self.policy, self._engine)
        while len(twin._left) > 1:
            twin.step()
        measure = self._states_apart if check.for_states else self._logits_apart
        clean, *moved = (math.nan,) if twin.error else measure(twin, check, bound)
        twin.stop()
        if not clean > bound.limit or not all(map(bound.holds, moved)):
            return False
        self.tipped.append(
            f"line {statement.line}, {statement.text}: {bound.measure} is {value:.1e}, and "
            f"{clean:.1e} for the same batches without a rollback, a difference of "
            f"{max(moved):.1e}: a near tie, for example of experts, decided by the batch width"
        )
        return True

    def _states_apart(
        self, twin: MemoryPlay, check: CompareRanges, bound: MeasureBound
    ) -> list[float]:
        """State errors: the twin's left from its right, then each side from the twin's."""
        sides = (check.left, check.right)
        mine = [(self._contexts[side.context], side.seq) for side in sides]
        clean = [(twin._contexts[side.context], side.seq) for side in sides]
        pairs = [tuple(clean), *zip(mine, clean, strict=True)]
        found = [one.apart(seq, other, place) for (one, seq), (other, place) in pairs]
        return [math.nan if one is None else _state_error(one) for one in found]

    def _logits_apart(
        self, twin: MemoryPlay, check: CompareRanges, bound: MeasureBound
    ) -> list[float]:
        """The same for logits; NaN where ties explain fewer rows."""
        sides = (check.left, check.right)
        mine, clean = ([play._rows(side) for side in sides] for play in (self, twin))
        values = []
        for left, right in (clean, *zip(mine, clean, strict=True)):
            if left is None or right is None:
                return [math.nan]
            found = ReferenceLogits(right, right.argmax(1).tolist()).difference(left)
            values.append(_measured(bound.measure, found, right))
            share = tipped_share("f32", ranks=True)
            if len(rows_beyond(np.array(found.nmse), logits_ceiling("f32"), share)):
                return [math.nan]
        return values

    def _raised(self, bound: MeasureBound) -> MeasureBound:
        least = self._noise.get(bound.measure, 0.0)
        return (
            replace(bound, limit=least) if bound.compare == "<=" and bound.limit < least else bound
        )

    def _rows(self, place: PositionRange) -> Tensor | None:
        keys = [(place.context, place.seq, pos) for pos in range(place.start, place.stop)]
        if not all(key in self._logits for key in keys):
            return None
        return torch.stack([self._logits[key] for key in keys])

    def _note(
        self,
        statement: Statement,
        message: str,
        bound: MeasureBound | None = None,
        value: float = math.nan,
    ) -> None:
        message += self._about_copies(statement) if message else ""
        self.outcomes.append(StatementOutcome(statement, value, bound, message))
        if message and self._witness:
            self._witness.failed(statement, message)


def _without_rollback(
    statements: Sequence[Statement], resolved: Callable[[DecodeTokens], dict[int, list[int]]]
) -> list[Statement] | None:
    """The contexts of statements without planes, and their batches without tokens that are removed
    later; None if they do more than decode, remove a tail and restore a checkpoint."""
    contexts: list[Statement] = []
    batches: list[tuple[Statement, DecodeTokens, dict[int, list[int]]]] = []
    marks: dict[tuple[str, str], int] = {}

    def length(context: str, seq: int) -> int:
        return sum(len(ids.get(seq, ())) for _, one, ids in batches if one.context == context)

    def cut(context: str, seq: int, n: int) -> None:
        for _, one, ids in batches:
            if one.context == context and seq in ids:
                ids[seq] = ids[seq][:n]
                n -= len(ids[seq])

    for statement in statements:
        action = statement.action
        if isinstance(action, ContextSpec):
            contexts.append(replace(statement, action=replace(action, n_rs_seq=0)))
        elif isinstance(action, DecodeTokens):
            batches.append((statement, action, resolved(action)))
        elif isinstance(action, SequenceOperation) and action.label:
            (seq,) = action.numbers
            place, n = (action.context, action.label), length(action.context, seq)
            if action.name == "checkpoint":
                marks[place] = n
            elif action.name != "restore" or n < marks[place]:
                return None
            else:
                cut(action.context, seq, marks[place])
        elif isinstance(action, SequenceOperation):
            if not action.accepted:
                continue
            if action.name != "seq_rm":
                return None
            seq, start, end = (*action.numbers, -1)[:3]
            if 0 <= end < length(action.context, seq):
                return None
            cut(action.context, seq, max(0, start))
    return contexts + [
        replace(
            statement,
            action=replace(
                action,
                batch=tuple((seq, (TokenPart(ids=tuple(row)),)) for seq, row in ids.items() if row),
            ),
        )
        for statement, action, ids in batches
        if any(ids.values())
    ]


def _state_error(found: MemoryDifference) -> float:
    known = [one for one in (*found.state, *found.conv) if not math.isnan(one)]
    return max(known, default=0.0)


def _measured(measure: str, found: LogitsDifference, right: Tensor) -> float:
    """The worst over the positions; for top1 the number of positions with another choice."""
    if measure == "top1":
        return float(found.top1_equal.count(False))
    values = found.nmse if measure == "nmse" else found.max_abs
    worst = math.nan if any(map(math.isnan, values)) else max(values)
    return worst / float(right.abs().max()) if measure == "relative" else worst


def _beyond(bound: MeasureBound, value: float) -> str:
    if bound.holds(value):
        return ""
    if bound.measure == "top1":
        return f"the most probable token differs at {value:.0f} positions"
    return f"{bound.measure} is {value:.1e}, not {bound.compare} {bound.limit:g}"
