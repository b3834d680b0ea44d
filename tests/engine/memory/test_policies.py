"""What holds for every snapshot policy: random operations agree with decoding from scratch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import UBatch
from engine.memory.policies import POLICIES
from engine.memory.recurrent import RecurrentCheckpoint, SnapshotPolicy
from engine.trace.records import SLOT_STATES
from tests.support.recurrent_texts import (
    CPU,
    HEAD_GATES,
    LAYERS,
    LAYOUT,
    Layers,
    assert_outputs,
    assert_state,
    copies,
    decode,
    same,
    ubatch_of,
)

ROLLING = [name for name in POLICIES if name != "checkpoint"]
POISON = (0.0, struct.unpack("<f", b"\x3e" * 4)[0], math.nan)
N_SEQS = 4


def memory_of(
    name: str,
    n_rs_seq: int,
    poison: float = math.nan,
    faults: Sequence[str] = (),
    layers: Layers = HEAD_GATES,
) -> SnapshotPolicy:
    memory = POLICIES[name](layers.layout, N_SEQS, n_rs_seq, CPU, faults)
    memory.poison(poison)
    return memory


def bits(memory: SnapshotPolicy) -> list[object]:
    """Everything there is to see of a memory, storage included bit for bit."""
    seen: list[object] = [t.clone().view(torch.int32).numpy().tobytes() for t in memory._storage]
    for seq in range(N_SEQS):
        seen += [memory.seq_pos_max(seq), memory.pending(seq), memory.valid_depth(seq)]
        seen += [memory.guaranteed_depth(seq, 2), memory.slots(seq)]
    return seen


def assert_cells(memory: SnapshotPolicy) -> None:
    """INV11, for the policies that have cells."""
    cells = getattr(memory, "cells", None)
    if cells is None:
        return
    for seq in range(N_SEQS):
        held = [cell for cell, owners in enumerate(cells.owners) if seq in owners]
        assert held == [cells.tail[seq]] * (memory.seq_pos_max(seq) >= 0)


class Walk:
    """One memory, and the text of each of its sequences."""

    def __init__(self, name: str, data: st.DataObject, layers: Layers) -> None:
        self.data, self.name, self.layers = data, name, layers
        self.bound = data.draw(st.sampled_from([3, 8, 1, 2, 0]))
        poison = data.draw(st.sampled_from(POISON))
        self.memory = memory_of(name, self.bound, poison, layers=layers)
        self.texts: list[list[int]] = [[] for _ in range(N_SEQS)]
        self.saves: list[tuple[list[int], RecurrentCheckpoint]] = []

    def seq(self) -> int:
        return self.data.draw(st.integers(0, N_SEQS - 1))

    def decode(self) -> set[int]:
        """A batch of 1 to 9 tokens for some sequences, in any legal ubatches (INV9)."""
        seqs = self.data.draw(st.lists(st.integers(0, N_SEQS - 1), min_size=1, unique=True))
        tokens = st.lists(st.integers(0, 50), min_size=1, max_size=9)
        left = {seq: self.data.draw(tokens) for seq in seqs}
        while left:
            chosen = self.data.draw(st.permutations(sorted(left)))
            chosen = chosen[: self.data.draw(st.integers(1, len(chosen)))]
            longest = min(len(left[seq]) for seq in chosen)
            n = (
                longest
                if self.data.draw(st.booleans())
                else self.data.draw(st.integers(1, longest))
            )
            self.dry_run(chosen, n)
            promised = [self.memory.guaranteed_depth(seq, n) for seq in chosen]
            new = {seq: left[seq][:n] for seq in chosen}
            out = decode(self.memory, new, by_index=self.data.draw(st.booleans()))
            for row, seq in enumerate(chosen):
                self.texts[seq] = self.texts[seq] + left[seq][:n]
                left[seq] = left[seq][n:]
                assert_outputs(out, row, self.texts[seq], n, self.layers)
                assert self.memory.pending(seq) == 0  # INV4
                assert self.memory.valid_depth(seq) == promised[row]
            left = {seq: rest for seq, rest in left.items() if rest}
        return set(seqs)

    def dry_run(self, seqs: Sequence[int], n: int) -> None:
        """INV8: neither a dry run that fits nor one that does not changes anything."""
        before = bits(self.memory)
        good = ubatch_of({seq: [0] * n for seq in seqs}, self.memory)
        twice = UBatch(
            np.tile(good.tokens, (2, 1)),
            np.tile(good.positions, (2, 1)),
            good.seq_ids * 2,
            good.outputs,
        )
        assert self.memory.prepare([good, good])
        assert not self.memory.prepare([good, twice])
        assert bits(self.memory) == before

    def remove(self) -> set[int]:
        seq, memory = self.seq(), self.memory
        text, before, valid = self.texts[seq], bits(memory), memory.valid_depth(seq)
        depths = [*range(1, valid + 1)] * 4 + [0, valid + 1, len(text)]
        depth = min(len(text), self.data.draw(st.sampled_from(depths)))
        # INV6 and the single use are in valid_depth; all end above the last position is not end
        p1 = self.data.draw(st.sampled_from([-1, len(text), len(text) + 3]))
        accepted = memory.seq_rm(seq, len(text) - depth, p1)
        assert accepted == (depth <= valid or depth == len(text))
        if accepted and depth:
            self.texts[seq] = text[:-depth]
            return {seq}
        assert bits(memory) == before  # INV3
        return set()

    def copy(self) -> set[int]:
        src, dst = self.seq(), self.seq()
        self.memory.seq_cp(src, dst)
        self.texts[dst] = self.texts[src]
        return {dst}

    def keep(self) -> set[int]:
        seq = self.seq()
        self.memory.seq_keep(seq)
        self.texts = [text if s == seq else [] for s, text in enumerate(self.texts)]
        return set(range(N_SEQS)) - {seq}

    def save(self) -> set[int]:
        seq, before = self.seq(), bits(self.memory)
        self.saves.append((self.texts[seq], self.memory.save(seq)))
        assert bits(self.memory) == before
        return set()

    def restore(self) -> set[int]:
        if not self.saves:
            return set()
        seq = self.seq()
        self.texts[seq], saved = self.data.draw(st.sampled_from(self.saves))
        self.memory.restore(seq, saved)
        assert self.memory.pending(seq) == self.memory.valid_depth(seq) == 0
        assert len(self.texts[seq]) < 2 or not self.memory.seq_rm(seq, len(self.texts[seq]) - 1)
        return {seq}

    def check(self, touched: set[int], before: dict[int, list[torch.Tensor]]) -> None:
        memory = self.memory
        assert_cells(memory)
        for seq, text in enumerate(self.texts):
            assert_state(memory, seq, text)
            assert memory.pending(seq) + memory.valid_depth(seq) <= self.bound  # INV5
            slots = memory.slots(seq)
            assert [slot.slot for slot in slots] == list(range(len(slots)))
            assert {slot.state for slot in slots} <= set(SLOT_STATES)
            assert len(slots) == memory.n_rs_seq + (2 if self.name == "replay" else 1)
            if seq not in touched:
                assert same(copies(memory, seq), before[seq])  # INV7


def random_operations(name: str, data: st.DataObject, layers: Layers) -> None:
    walk = Walk(name, data, layers)
    operations = [walk.decode] * 8 + [walk.remove] * 10
    operations += [walk.copy, walk.copy, walk.keep, walk.save, walk.restore]
    for operation in data.draw(st.lists(st.sampled_from(operations), min_size=8, max_size=16)):
        before = {seq: copies(walk.memory, seq) for seq in range(N_SEQS)}
        walk.check(operation(), before)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_random_operations_agree_with_decoding_from_scratch(name, data):
    random_operations(name, data, HEAD_GATES)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
@pytest.mark.thinned(4)
def test_layers_of_another_kind_need_no_other_policy(name, data):
    kinds = sorted(kind for kind, layers in LAYERS.items() if layers is not HEAD_GATES)
    random_operations(name, data, LAYERS[data.draw(st.sampled_from(kinds))])


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", ROLLING)
def test_every_kind_of_layer_rolls_back(name, layers):
    """The walk above without chance: drafts and rollbacks, with rows as views and by number."""
    memory, kind = memory_of(name, 3, layers=LAYERS[layers]), LAYERS[layers]
    texts = {1: list(range(6)), 3: list(range(6))}
    decode(memory, texts)
    for by_index in (False, True, True):
        new = {seq: [10 * seq + i for i in range(4)] for seq in texts}
        out = decode(memory, new, by_index=by_index)
        for row, (seq, n_rejected) in enumerate(((1, 3), (3, 1))):
            texts[seq] = texts[seq] + new[seq]
            assert_outputs(out, row, texts[seq], 4, kind)
            del texts[seq][-n_rejected:]
            assert memory.seq_rm(seq, len(texts[seq]))
            assert_state(memory, seq, texts[seq])


@pytest.mark.parametrize("name", ROLLING)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_rolled_back_token_leaves_no_trace(name, depth):
    """INV2: state and outputs as if the tokens had never been there."""
    memory = memory_of(name, 3)
    text = list(range(10))
    decode(memory, {0: text, 2: text})
    assert memory.seq_rm(0, 10 - depth)
    text = text[:-depth]
    out = decode(memory, {0: [30, 31]})
    assert_outputs(out, 0, [*text, 30, 31], 2)
    assert_state(memory, 0, [*text, 30, 31])


@pytest.mark.parametrize("name", POLICIES)
def test_a_saved_rollback_replays_elsewhere(name):
    """INV10: the same bits as replay in place, into a memory that has a history of its own."""
    memory, other = memory_of(name, 3), memory_of(name, 3, 0.5)
    decode(memory, {1: list(range(9))})
    decode(other, {0: list(range(20, 29))})
    if name in ROLLING:
        assert memory.seq_rm(1, 7) and other.seq_rm(0, 7)
    text = list(range(memory.seq_pos_max(1) + 1))
    other.restore(0, memory.save(1))
    for token in (30, 31, 32):
        assert same(decode(memory, {1: [token]}), decode(other, {0: [token]}))
    assert_state(other, 0, [*text, 30, 31, 32])


@pytest.mark.parametrize("name", POLICIES)
def test_positions_shift_and_states_do_not(name):
    memory = memory_of(name, 3)
    decode(memory, {0: list(range(9))})
    memory.seq_cp(0, 1)
    before = copies(memory, 0)
    memory.seq_add(0, 4, 9, -4)
    memory.seq_add(0, 6, -1, 7)  # the last position is 4 now: outside
    memory.seq_add(0, 0, 4, 7)
    memory.seq_add(2, 0, -1, 7)  # empty
    assert [memory.seq_pos_max(seq) for seq in range(3)] == [4, 8, -1]
    assert same(copies(memory, 0), before)


def after_a_rollback(name: str, *faults: str) -> SnapshotPolicy:
    """Prompt, a verify pass of 4, two of them undone, one more token: the text is TEXT."""
    memory = memory_of(name, 3, 0.0, faults)
    decode(memory, {0: list(range(9))})
    decode(memory, {0: [10, 11, 12, 13]})
    assert memory.seq_rm(0, 11)
    decode(memory, {0: [20]})
    return memory


TEXT = [*range(9), 10, 11, 20]
FAULTY = [
    (name, fault)
    for fault in ("plane-off-by-one", "no-conv-rollback")
    for name in ROLLING
    if fault != "plane-off-by-one" or name in ("planes", "carry")
]


@pytest.mark.parametrize("name", ROLLING)
def test_without_a_fault_the_state_is_true(name):
    assert_state(after_a_rollback(name), 0, TEXT)


@pytest.mark.parametrize(("name", "fault"), FAULTY)
def test_a_fault_shows_in_the_state(name, fault):
    memory = after_a_rollback(name, fault)
    with pytest.raises(AssertionError):
        assert_state(memory, 0, TEXT)
    # and nowhere else: what was never rolled back is right
    decode(memory, {1: TEXT})
    assert_state(memory, 1, TEXT)


@pytest.mark.parametrize("name", ROLLING)
def test_the_window_alone_is_wrong_without_its_rollback(name):
    """The states of these tests do not depend on the window, so the fault has to show there."""
    good = copies(after_a_rollback(name), 0)
    bad = copies(after_a_rollback(name, "no-conv-rollback"), 0)
    n = len(LAYOUT.layers)
    assert same(good[:n], bad[:n])
    assert not any(torch.equal(a, b) for a, b in zip(good[n:], bad[n:], strict=True))


@pytest.mark.parametrize("faults", [(), ("stale-plane",)])
def test_the_fault_of_stale_planes_shows_in_the_state(faults):
    """Nine tokens, one more, then back by two: the second newest plane is older than that."""
    memory = memory_of("planes", 3, 0.0, faults)
    decode(memory, {0: list(range(9))})
    decode(memory, {0: [10]})
    assert memory.seq_rm(0, 8) == bool(faults)
    if faults:
        decode(memory, {0: [20]})
        with pytest.raises(AssertionError):
            assert_state(memory, 0, [*range(8), 20])


@pytest.mark.parametrize("name", POLICIES)
def test_poison_is_really_in_storage(name):
    """Otherwise the property above would not notice a read of unwritten memory."""
    assert all(t.isnan().all() for t in memory_of(name, 3)._storage if t.is_floating_point())
    memory = memory_of(name, 3)
    assert all(not t.any() for t in memory.live(0).values())
