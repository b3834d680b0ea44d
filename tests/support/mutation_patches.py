"""Patches of the code that rolls back, each a plausible bug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.decode import acceptance, held_sequences
from engine.decode.acceptance import Judge, with_bonus
from engine.decode.forward import Forward
from engine.decode.held_sequences import HeldSequences, PromptReuse
from engine.decode.round import Round
from engine.decode.verify_loop import Rollback, VerifyLoop
from engine.memory import planes as plane_memory
from engine.memory.hybrid import HybridMemory
from engine.memory.kv import AttentionKV
from engine.memory.planes import CarryMemory, PlaneMemory, PlanesMemory
from engine.memory.recurrent import RecurrentCheckpoint, SnapshotPolicy
from engine.memory.replay import ReplayMemory
from engine.memory.ring import RingMemory
from engine.memory.state_file import SequenceCheckpoint
from engine.model.layers import join_rows
from engine.model.recurrence import StateKey
from engine.model.recurrent_states import MatrixState

Patch = pytest.MonkeyPatch


UNDO: list[tuple[Any, str, Any]] = []
"""The originals of what the mutation in force has patched."""


def _wrap(patch: Patch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    original = owner.__dict__[name]
    UNDO.append((owner, name, original))
    patch.setattr(owner, name, make(original))


# -- the recurrent state -------------------------------------------------------------------


def cursor_after_a_wrap(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def move(self: RingMemory, seq: int, depth: int) -> None:
            held = self._held[seq]
            wraps = held[-1] % self._n_lanes < depth < len(held) - 1
            original(self, seq, depth)
            if wraps:
                self._count(self._n_refs, held[-1:], -1)
                del held[-1:]

        return move

    _wrap(patch, RingMemory, "_move_cursor", make)


def fold_without_the_last(patch: Patch) -> None:
    _fold_less(patch, windows=False)


def _fold_less(patch: Patch, *, windows: bool) -> None:
    def make(original: Any) -> Any:
        def to_fold(self: ReplayMemory, key: StateKey) -> Any:
            n, n_read = original(self, key)
            if self.layout.states[key].is_window is not windows:
                return n, n_read
            return max(n - 1, 0) if isinstance(n, int) else (n - 1).clamp_min(0), n_read

        return to_fold

    _wrap(patch, ReplayMemory, "_to_fold", make)


def stale_log_entry(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def advance(self: ReplayMemory, key: StateKey, inputs: Any) -> Any:
            before = [rows[:, :1].clone() for rows in self._logs[key]]
            out = original(self, key, inputs)
            if self._plan.n_kept > 1:
                for rows, old in zip(self._logs[key], before, strict=True):
                    rows[:, :1] = old
            return out

        return advance

    _wrap(patch, ReplayMemory, "advance", make)


def window_too_early(patch: Patch) -> None:
    _fold_less(patch, windows=True)


def one_layer_not_rolled_back(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def read(self: RingMemory, key: StateKey) -> Any:
            slots = list(original(self, key))
            if key.layer != self.layout.layers[1] or self.layout.states[key].is_window:
                return slots
            both = zip(self._held, self._newest_written, strict=True)
            newest = {held[-1]: slot for held, slot in both if held}
            return [newest.get(slot, slot) for slot in slots]

        return read

    _wrap(patch, RingMemory, "_read", make)


def a_leak(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def pick(planes: torch.Tensor, rows: Any) -> torch.Tensor:
            taken = original(planes, rows)
            if (
                isinstance(rows, tuple)
                and isinstance(rows[0], int)
                and rows[0]
                and planes.dim() == 5
            ):
                return taken * 0.999 + planes[0, rows[1]] * 0.001
            return taken

        return pick

    _wrap(patch, plane_memory, "_pick", make)


def planes_in_reverse(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def into(self: MatrixState, inputs: Any, start: Any, slots: Any, **others: Any) -> Any:
            slots = list(slots)
            return original(self, inputs, start, [*slots[:1], *slots[:0:-1]], **others)

        return into

    _wrap(patch, MatrixState, "into", make)


def rows_of_another_sequence(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def rows(self: PlaneMemory, slot: Any, read: Any) -> Any:
            if not any(read):
                return original(self, slot, read)
            first = read[0] * self.n_seqs + slot.sources[0]
            own = zip(read[:-1], slot.sources[:-1], strict=True)
            return self._row_numbers([*(p * self.n_seqs + c for p, c in own), first])

        return rows

    _wrap(patch, PlaneMemory, "_rows", make)


def window_of_another_sequence(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def read(self: RingMemory, key: StateKey) -> Any:
            slots = list(original(self, key))
            # only where a rollback is pending, so that prompts are right
            swaps = self.layout.states[key].is_window and any(self._pending)
            return slots[::-1] if swaps else slots

        return read

    _wrap(patch, RingMemory, "_read", make)


def one_more_than_planes(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def depth(self: PlanesMemory, seq: int) -> int:
            found = int(original(self, seq))
            return found + (found == self.n_rs_seq > 0)

        return depth

    _wrap(patch, PlanesMemory, "valid_depth", make)

    def clamp(original: Any) -> Any:
        def move(self: PlaneMemory, seq: int, depth: int) -> None:
            original(self, seq, depth)
            self._pending[seq] = min(self._pending[seq], self.n_rs_seq)

        return move

    _wrap(patch, PlaneMemory, "_move_cursor", clamp)


def one_more_than_the_ring(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def depth(self: RingMemory, seq: int) -> int:
            return len(self._held[seq])

        return depth

    _wrap(patch, RingMemory, "valid_depth", make)


def index_not_consumed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def commit(self: SnapshotPolicy) -> None:
            before = self._pending[:]
            original(self)
            if isinstance(self, CarryMemory):
                self._pending = before

        return commit

    _wrap(patch, SnapshotPolicy, "commit", make)


def wrong_plane_carried(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def rows(self: PlaneMemory, slot: Any, read: Any, n_carried: Any, n: int) -> Any:
            return original(self, slot, [min(p + 1, self.n_rs_seq) for p in read], n_carried, n)

        return rows

    _wrap(patch, PlaneMemory, "_carried_rows", make)


def a_plane_dropped(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def rows(self: PlaneMemory, slot: Any, read: Any, n_carried: Any, n: int) -> Any:
            return original(self, slot, read, [max(0, k - 1) for k in n_carried], n)

        return rows

    _wrap(patch, PlaneMemory, "_carried_rows", make)


# -- checkpoints ---------------------------------------------------------------------------


def older_checkpoint(patch: Patch) -> None:
    latest: dict[int, RecurrentCheckpoint] = {}

    def make(original: Any) -> Any:
        def restore(self: SnapshotPolicy, seq: int, checkpoint: RecurrentCheckpoint) -> None:
            older = latest.get(seq, checkpoint)
            latest[seq] = checkpoint
            original(self, seq, replace(older, pos=checkpoint.pos))

        return restore

    _wrap(patch, SnapshotPolicy, "restore", make)


def checkpoint_not_copied(patch: Patch) -> None:
    def make(_: Any) -> Any:
        def save(self: SnapshotPolicy, seq: int, device: Any = None) -> RecurrentCheckpoint:
            return RecurrentCheckpoint(self.seq_pos_max(seq), self.live(seq))

        return save

    _wrap(patch, SnapshotPolicy, "save", make)


def position_off_after_restore(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def restore(self: SnapshotPolicy, seq: int, checkpoint: RecurrentCheckpoint) -> None:
            original(self, seq, replace(checkpoint, pos=checkpoint.pos - 1))

        return restore

    _wrap(patch, SnapshotPolicy, "restore", make)


def cells_above_the_checkpoint(patch: Patch) -> None:
    def make(_: Any) -> Any:
        def restore(self: HybridMemory, seq: int, checkpoint: SequenceCheckpoint) -> None:
            assert self.recurrent and checkpoint.recurrent
            self.recurrent.restore(seq, checkpoint.recurrent)

        return restore

    _wrap(patch, HybridMemory, "restore", make)


def sampler_not_restored(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def again(self: Judge, round_: Round) -> Any:
            round_.before = self._samplers[round_.seq_id].clone()
            return original(self, round_)

        return again

    _wrap(patch, Judge, "accept_again", make)


# -- attention cells, positions, acceptance ------------------------------------------------


def cells_missing(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def seq_rm(self: AttentionKV, seq: int, p0: int, p1: int = -1) -> bool:
            return bool(original(self, seq, p0 - (p0 > 1 and p1 < 0), p1))

        return seq_rm

    _wrap(patch, AttentionKV, "seq_rm", make)


def cells_not_removed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def seq_rm(self: AttentionKV, seq: int, p0: int, p1: int = -1) -> bool:
            return p0 > 0 or bool(original(self, seq, p0, p1))

        return seq_rm

    _wrap(patch, AttentionKV, "seq_rm", make)


def state_not_rolled_back(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def seq_rm(self: SnapshotPolicy, seq: int, p0: int, p1: int = -1) -> bool:
            return p0 > 0 or bool(original(self, seq, p0, p1))

        return seq_rm

    _wrap(patch, SnapshotPolicy, "seq_rm", make)


def filler_kept(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def undo(self: Rollback, round_: Round, span: Any, *rest: Any) -> Any:
            n = len(span.tokens) - span.n_padding
            short = replace(span, tokens=span.tokens[:n], n_padding=0)
            return original(self, round_, short, *rest)

        return undo

    _wrap(patch, Rollback, "undo", make)


def hidden_row_not_rewound(patch: Patch) -> None:
    verified: dict[int, Any] = {}

    def make_run(original: Any) -> Any:
        def run(self: Forward, ubatches: Any, number: int, purpose: str, *rest: Any) -> Any:
            logits, of_tokens = original(self, ubatches, number, purpose, *rest)
            if purpose == "verify":
                verified.update(of_tokens)
            return logits, of_tokens

        return run

    def make(original: Any) -> Any:
        def run(self: VerifyLoop, *args: Any) -> Any:
            for round_ in original(self, *args):
                kept, rows = round_.of_tokens, verified[round_.seq]
                if len(round_.accepted) < len(rows):
                    round_.of_tokens = join_rows([kept[: len(kept) - 1], rows[-1:]])
                yield round_

        return run

    _wrap(patch, Forward, "run", make_run)
    _wrap(patch, VerifyLoop, "run", make)


def wrong_draft_accepted(patch: Patch) -> None:
    def match(draft: Any, rows_: Any, sampler: Any, end_tokens: Any) -> Any:
        if len(draft.tokens) < 3:
            return original(draft, rows_, sampler, end_tokens)
        for i, token in enumerate(draft.tokens[:2]):
            rows_(i)
            sampler.accept(token)
        return with_bonus(draft.tokens[:2], rows_, sampler)

    original = acceptance.RULES["match"]
    UNDO.append((acceptance, "RULES", dict(acceptance.RULES)))
    patch.setitem(acceptance.RULES, "match", match)


def cached_token_too_many(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def reuse(self: HeldSequences, seq: int, tokens: Sequence[int]) -> PromptReuse:
            n_tokens, checkpoint = original(self, seq, tokens)
            return n_tokens + (n_tokens > 0), checkpoint

        return reuse

    _wrap(patch, HeldSequences, "reuse", make)


def common_prefix_too_long(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def n_common(a: Sequence[int], b: Sequence[int]) -> int:
            n = int(original(a, b))
            return n + (0 < n < min(len(a), len(b)))

        return n_common

    _wrap(patch, held_sequences, "n_common", make)
