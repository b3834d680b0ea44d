"""State origin: which tokens a wrong recurrent state was made from, found by trial.

The text is decoded again, token by token in a memory of its own, and the inputs of the wrong layer
are kept. From these the layer's states are computed as they would be after other tokens (fewer,
more, one left out, one twice, from another start), and the wrong one is compared with each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import Span, UBatch, split_seq
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.recurrence import Recurrence, RecurrenceInputs, StateKey

TRIED = 12
"""Number of positions before the wrong one that are tried."""
LEAST = 1e-2
"""Relative error from which a state is examined; rounding never reaches it at once."""
_NEAR, _MUCH_NEARER = 0.1, 0.2
"""For a match: its relative error, and its ratio to the error of the expected state."""
_N_UBATCH = 512
_LONGEST = 48
"""Most tokens of a batch that are decoded one by one; of a longer one the last few."""


class SequenceText(NamedTuple):
    """A sequence in a round: tokens in memory before it, tokens it keeps, tokens it decoded
    including rejected ones, and the one chosen next."""

    before: Sequence[int]
    kept: Sequence[int]
    decoded: Sequence[int]
    next: int


_Decoded = tuple[list[dict[StateKey, Tensor]], list[dict[StateKey, RecurrenceInputs]]]
"""After each of some tokens: the states of one layer, and its inputs for the token."""
_Candidate = tuple[str, int, Tensor]
"""One explanation: its kind, its number (of tokens, a position, a sequence, a layer), and the
state."""


class StateOrigin:
    """Explains wrong states of one sequence of a lane. make_memory: makes an empty memory of one
    sequence; model: of the lane it is compared with."""

    def __init__(self, model: HybridModel, make_memory: Callable[[], HybridMemory]) -> None:
        self._model, self._make_memory = model, make_memory

    def of(
        self,
        text: SequenceText,
        memory: HybridMemory,
        seq: int,
        beside: Sequence[int],
        layer: int,
        others: Mapping[int, SequenceText],
        earlier: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Explanations of the wrong states of a layer, one record each.

        memory: holds sequence `seq` after the round; beside: the sequences of the next pass,
        including it. others: further sequences, by seq_id. earlier: tokens of the slot's previous
        sequence.

        A record for the facts of a run has pos (last position in memory), layer, name, is_window,
        error, kind and number of the explanation ("" = none), holds (for each stored snapshot, the
        one to start from first, the position whose state it is, None if unknown) and rows (of a
        window: the position of each row, likewise).
        """
        recurrent = memory.recurrent
        assert recurrent is not None
        tokens = [*text.before, *text.kept]
        keys = [key for key in recurrent.layout.states if key.layer == layer]
        n = max(TRIED, min(len(text.kept) + 1, _LONGEST))
        ours = self._decode(tokens[:-n], tokens[-n:], keys)
        rejected = self._decode(tokens, text.decoded[len(text.kept) :], keys)
        ahead = self._decode(tokens, [text.next], keys)
        theirs = {
            other: self._decode(
                [*its.before, *its.kept][:-n],
                [*[*its.before, *its.kept][-n:], *its.decoded[len(its.kept) :]],
                keys,
            )
            for other, its in others.items()
        }
        lengths = [len(its.before) + len(its.kept) for its in others.values()]
        if earlier:
            theirs[-1] = self._decode(earlier[:-n], earlier[-n:], keys)
        found = memory.inputs(beside)[beside.index(seq)]
        first = len(tokens) - len(ours[0])
        records = []
        for key in keys:
            recurrence = recurrent.layout.states[key]
            right = recurrence.needed(ours[0][-1][key], len(tokens))
            error = _error(found[key], right)
            if not error > LEAST / 2:
                continue
            known = {first + i: one[key] for i, one in enumerate(ours[0])}
            known |= {len(tokens) + i: one[key] for i, one in enumerate(rejected[0])}
            known = {pos: recurrence.needed(state, pos + 1) for pos, state in known.items()}
            of_layers = [
                ("layer", other.layer, state)
                for other, state in found.items()
                if other.layer != layer and other.name == key.name
            ]
            candidates = [
                # before the sequence's own: texts with equal beginnings have equal states
                *(
                    ("sequence", other, decoded[0][min(n, n_text) - 1][key])
                    for (other, decoded), n_text in zip(theirs.items(), lengths, strict=False)
                ),
                *_candidates(key, recurrence, ours, rejected, theirs, len(text.kept)),
                *(("ahead", 1, one[key]) for one in ahead[0]),
                *of_layers,
                *(
                    ("sequence", other, one[key])
                    for other, decoded in theirs.items()
                    for one in reversed(decoded[0])
                ),
            ]
            kind, number = _best(
                found[key],
                error,
                [
                    (kind, number, recurrence.needed(state, len(tokens)))
                    for kind, number, state in candidates
                ],
                is_first=not text.before,
            )
            record = {"pos": len(tokens) - 1, "layer": layer, "name": key.name}
            record |= {"is_window": recurrence.is_window, "error": error}
            record |= {"kind": kind, "number": number, "rows": None}
            record["holds"] = [
                _position({pos: recurrence.needed(one, pos + 1) for pos in known}, known)
                for one in recurrent.kept(seq, key)
            ]
            if recurrence.is_window:
                newest = {
                    pos: recurrence.in_order(state, pos + 1)[-1:] for pos, state in known.items()
                }
                # a ring does not need rows of a block that has just ended
                newest = {pos: rows[0] for pos, rows in newest.items() if len(rows)}
                rows = recurrence.in_order(found[key], len(tokens))
                record["rows"] = [
                    _position(dict.fromkeys(newest, row), newest, len(tokens) - len(rows) + i)
                    for i, row in enumerate(rows)
                ]
            records.append(record)
        return records

    def _decode(
        self, before: Sequence[int], tokens: Sequence[int], keys: Sequence[StateKey]
    ) -> _Decoded:
        """Decode `before` at once and `tokens` one by one."""
        memory = self._make_memory()
        recurrent = memory.recurrent
        assert recurrent is not None
        if before:
            span = Span(0, 0, list(before), [])
            for ubatch in split_seq([span], _N_UBATCH):
                self._model.forward(ubatch, memory)
        states: list[dict[StateKey, Tensor]] = []
        noted_inputs: list[dict[StateKey, RecurrenceInputs]] = []
        advance = recurrent.advance

        def noted(key: StateKey, inputs: RecurrenceInputs) -> Tensor:
            if key in keys:
                noted_inputs[-1][key] = _copied(inputs)
            return advance(key, inputs)

        recurrent.advance = noted  # type: ignore[method-assign]
        for pos, token in enumerate(tokens, len(before)):
            noted_inputs.append({})
            one = UBatch(np.array([[token]]), np.array([[pos]]), (0,), np.arange(0))
            self._model.forward(one, memory)
            (live,) = recurrent.inputs((0,), whole=True)
            states.append({key: live[key].clone() for key in keys})
        return states, noted_inputs


def _candidates(
    key: StateKey,
    recurrence: Recurrence,
    ours: _Decoded,
    rejected: _Decoded,
    theirs: Mapping[int, _Decoded],
    n_kept: int,
) -> Iterator[_Candidate]:
    """Explanations by the sequence's own tokens, simplest first. n_kept: tokens of the round, the
    last ones of `ours`."""
    states, inputs = [one[key] for one in ours[0]], [one[key] for one in ours[1]]
    last = len(states) - 1
    zero = torch.zeros_like(states[0])
    yield ("empty", 0, zero)
    for back in range(1, last + 1):
        yield ("earlier", back, states[last - back])
    for ahead, after in enumerate(rejected[0], 1):
        yield ("rejected", ahead, after[key])

    def after_all(start: Tensor, tokens: Sequence[RecurrenceInputs]) -> Tensor:
        state = start.unsqueeze(0)
        for one in tokens:
            out = torch.empty_like(state)
            recurrence.into(one, state, [out])
            state = out
        return state[0]

    for back in range(1, last):
        at = last - back
        yield ("missing", back, after_all(states[at - 1], inputs[at + 1 :]))
    for back in range(last):
        at = last - back
        yield ("twice", back, after_all(states[at], inputs[at:]))
    first = last + 1 - n_kept
    if first < 0:
        return
    # the round's tokens from another start than the state before them
    mine, start = inputs[first:], states[first - 1] if first else zero
    if first:
        yield ("from nothing", 0, after_all(zero, mine))
    for back in range(1, first):
        yield ("from earlier", back, after_all(states[first - 1 - back], mine))
    for ahead, other in enumerate(rejected[0], 1):
        yield ("from rejected", ahead, after_all(other[key], mine))
    for seq, decoded in theirs.items():
        for one in reversed(decoded[0][-TRIED:]):
            yield ("from sequence", seq, after_all(one[key], mine))
    for name, changed in _other_gates(mine):
        yield (name, 0, after_all(start, changed))
    # one token's log entry removed
    starts = [start, *states[first:]]
    logs = [recurrence.log(one, state[None])[1] for one, state in zip(mine, starts, strict=False)]
    for at in range(n_kept - 1):
        rest = [torch.cat(rows, 1) for rows in zip(*(logs[:at] + logs[at + 1 :]), strict=True)]
        without = recurrence.fold(start[None], rest, n_kept - 1)[0]
        yield ("missing", n_kept - 1 - at, without)


def _other_gates(
    inputs: Sequence[RecurrenceInputs],
) -> Iterator[tuple[str, list[RecurrenceInputs]]]:
    """The inputs of tokens with the gates of the first one, or none."""
    names = getattr(inputs[0], "_fields", ())
    for name in ("g", "beta", "dt"):
        if name in names:
            first = getattr(inputs[0], name)
            yield f"first {name}", [one._replace(**{name: first}) for one in inputs]
            none = torch.zeros_like(first)
            yield f"no {name}", [one._replace(**{name: none}) for one in inputs]


def _best(
    found: Tensor, error: float, candidates: Sequence[_Candidate], *, is_first: bool
) -> tuple[str, int]:
    """The simplest of the nearest explanations; ("", 0) if none is near.

    is_first: in the first batch of a sequence. A start from another sequence's state is then
    accepted from half the error on, because the window was not cleared either, so that the first
    tokens' inputs differed.
    """
    tried = [(_error(found, one[2]), one) for one in candidates]
    near = [(e, one) for e, one in tried if e < _NEAR and e < _MUCH_NEARER * error]
    if not near and is_first:
        near = [(e, one) for e, one in tried if e < error / 2 and one[0] == "from sequence"]
    if not near:
        return "", 0
    least = min(e for e, _ in near)
    best = next(one for e, one in near if e <= max(2 * least, 1e-5))
    return best[:2]


def _position(
    state: Mapping[int, Tensor], known: Mapping[int, Tensor], expected: int | None = None
) -> int | None:
    """The position whose state it is, of equal ones the nearest to `expected`. state: in the form
    to be compared with each position's."""
    errors = {pos: _error(state[pos], one) for pos, one in known.items()}
    near = [pos for pos, error in errors.items() if error < _NEAR]
    if expected is None:
        return min(near, key=errors.__getitem__, default=None)
    return min(near, key=lambda pos: abs(pos - expected), default=None)


def _error(found: Tensor, expected: Tensor) -> float:
    """found - expected| / |expected|; 0 / 0 = 0, x / 0 = 1."""
    apart = torch.linalg.vector_norm(found - expected, dtype=torch.float64)
    size = torch.linalg.vector_norm(expected, dtype=torch.float64)
    return float(apart / size) if size > 0 else float(apart > 0)


def _copied(inputs: RecurrenceInputs) -> RecurrenceInputs:
    """Copied, because they may be views of memory reused for the next token."""
    values = (x.clone() if isinstance(x, Tensor) else x for x in inputs)
    return type(inputs)(*values)
