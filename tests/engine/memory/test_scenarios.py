"""Rollback scenarios of the field on small real models, whole forward passes at a time.

They are the bundled scripts, whose sources are the rollback tests of llama.cpp as merged and of its
open proposal #25004. Storage is filled beforehand with NaN, 0x00 and 0x3E bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.compare.memory_engine import FILLS, play_script
from engine.compare.memory_player import MemoryPlay
from engine.compare.memory_script import MemoryScript
from engine.compare.memory_script_parser import memory_scripts, parse_script
from engine.memory.cells import UBatchCells
from engine.memory.hybrid import HybridMemory
from engine.memory.planes import PlaneMemory
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.ring import RingMemory
from engine.session import Session
from resources import MEMORY_SCRIPTS
from tests.support.closeness import nmse

DATA = Path(__file__).resolve().parents[2] / "data"
CPU = torch.device("cpu")
MODELS = ("qwen35-a-f32", "qwen35-b-v2x-tied-f32", "qwen3next-e-v2x-f32")
ROLLING = ("planes", "carry", "ring", "replay")
SCRIPTS = {script.name: script for script in memory_scripts(MEMORY_SCRIPTS)}
CASES = [(name, policy) for name, script in SCRIPTS.items() for policy in script.policies]
FIRST = "1-save-after-rollback"

every_case = pytest.mark.parametrize(("name", "policy"), CASES)
every_model = pytest.mark.parametrize("model", MODELS)


@cache
def session(model: str) -> Session:
    return Session.open(DATA / f"{model}.gguf", compute="f32")


def play(model: str, script: MemoryScript, policy: str, fill: str = "nan", **how) -> MemoryPlay:
    played = play_script(session(model), script, policy, fill=FILLS[fill], **how)
    while played.step():
        pass
    return played


def wrong(played: MemoryPlay) -> list[str]:
    return [f"{o.statement.text}: {o.message}" for o in played.failures]


def changed(name: str, old: str, new: str) -> MemoryScript:
    """A bundled script with another setting in every context."""
    text = (MEMORY_SCRIPTS / f"{name}.memory").read_text(encoding="utf-8")
    assert old in text
    return parse_script(name, name, text.replace(old, new))


def test_every_script_is_there() -> None:
    assert sorted(int(name.split("-")[0]) for name in SCRIPTS) == [*range(1, 13)]
    assert {policy for _, policy in CASES} == {*ROLLING, "checkpoint"}


@every_model
@every_case
def test_scenario(model: str, name: str, policy: str) -> None:
    played = play(model, SCRIPTS[name], policy)
    assert played.outcomes
    assert wrong(played) == []


@pytest.mark.parametrize("fill", ["00", "3E"])
@every_case
def test_scenario_over_other_bytes(name: str, policy: str, fill: str) -> None:
    assert wrong(play(MODELS[0], SCRIPTS[name], policy, fill)) == []


@pytest.mark.parametrize("policy", ROLLING)
@pytest.mark.parametrize("name", ["6-active-gap", "9-additions"])
def test_scenario_in_a_pool_of_cells(name: str, policy: str) -> None:
    script = changed(name, "n_rs_seq=", "kv=unified n_rs_seq=")
    assert wrong(play(MODELS[1], script, policy)) == []


@pytest.mark.parametrize("policy", ROLLING)
def test_scenario_with_bits_that_no_batch_changes(policy: str) -> None:
    """Then even what differs in the shape of batches is equal bit by bit."""
    text = (MEMORY_SCRIPTS / "4-independence.memory").read_text(encoding="utf-8")
    script = parse_script("4", "4", text.replace("nmse<=1e-4", "exact"))
    assert wrong(play(MODELS[0], script, policy, batch_invariant=True)) == []


@pytest.mark.parametrize("target", [*ROLLING, "checkpoint"])
@pytest.mark.parametrize("policy", ROLLING)
def test_a_saved_state_fits_every_policy(policy: str, target: str) -> None:
    script = changed(FIRST, "context B n_rs_seq=8", f"context B n_rs_seq=8 policy={target}")
    text = [o for o in play(MODELS[0], script, policy).failures if o.bound is None]
    assert text == []
    assert play(MODELS[0], script, policy).worst_nmse <= 1e-10


@every_model
@pytest.mark.parametrize(
    ("policy", "fault"),
    [("planes", "plane-off-by-one"), ("carry", "plane-off-by-one")]
    + [(policy, "no-conv-rollback") for policy in ROLLING],
)
def test_a_fault_fails_the_scenario(model: str, policy: str, fault: str) -> None:
    """So that a script that passes says something."""
    played = play(
        model, changed("3-split-replay", "context A ", f"context A fault={fault} "), policy
    )
    assert any("nmse is" in message or "pending is" in message for message in wrong(played))


@every_model
@pytest.mark.parametrize("policy", ROLLING)
@pytest.mark.parametrize("n_draft", [1, 3])
def test_rejected_drafts_leave_the_golden_logits(model, policy, n_draft):
    """A whole speculative walk along the golden tokens, most of its drafts wrong."""
    with np.load(DATA / f"{model}.npz") as golden:
        tokens, logits = golden["tokens"].tolist(), torch.from_numpy(golden["logits"])
        rows, n_prompt = golden["rows"].tolist(), int(golden["n_prompt"])
    opened = session(model)
    memory = HybridMemory.for_model(opened.config, 1, 256, CPU, policy=policy, n_rs_seq=n_draft)
    memory.poison(float("nan"))

    def decode(pos: int, new: list[int]) -> torch.Tensor:
        (ubatch,) = memory.split([Span(0, pos, new, range(len(new)))], 512, "equal")
        return opened.model.forward(ubatch, memory).logits

    at = dict(zip(rows, logits, strict=True))
    decode(0, tokens[:n_prompt])
    pos = n_prompt
    while pos + n_draft < len(tokens):
        n_right = pos % (n_draft + 1)
        right = tokens[pos : pos + 1 + n_right]
        false = (right[0] + 1) % opened.config.n_vocab
        found = decode(pos, right + [false] * (n_draft - n_right))
        wanted = torch.stack([at[p] for p in range(pos, pos + len(right))])
        assert nmse(found[: len(right)], wanted) <= 1e-9
        pos += len(right)
        assert memory.seq_rm(0, pos)


def ring_does_not_count_the_copy(patch: pytest.MonkeyPatch) -> None:
    def share(self: RingMemory, src: int, dst: int) -> None:
        self._held[dst] = list(self._held[src])

    patch.setattr(RingMemory, "_share", share)


def ring_writes_at_home(patch: pytest.MonkeyPatch) -> None:
    choose = RingMemory._choose

    def at_home(self: RingMemory, n_refs: np.ndarray, seq: int, n_new: int):
        held, new = choose(self, n_refs, seq, n_new)
        home = [seq * self._n_lanes + slot % self._n_lanes for slot in new]
        return held[: len(held) - n_new] + home, home

    patch.setattr(RingMemory, "_choose", at_home)


def replay_stays_in_a_shared_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(np, "count_nonzero", lambda rows: 1)


def a_copy_loses_the_pending_rollback(patch: pytest.MonkeyPatch) -> None:
    seq_cp = SnapshotPolicy.seq_cp

    def forgetful(self: SnapshotPolicy, src: int, dst: int) -> None:
        seq_cp(self, src, dst)
        if src != dst:
            self._pending[dst] = 0

    patch.setattr(SnapshotPolicy, "seq_cp", forgetful)


def idle_states_move_from_plane_0(patch: pytest.MonkeyPatch) -> None:
    moves = PlaneMemory._moves

    def newest(self: PlaneMemory, cells, slot):
        pending, self._pending = self._pending, [0] * self.n_seqs
        try:
            return moves(self, cells, slot)
        finally:
            self._pending = pending

    patch.setattr(PlaneMemory, "_moves", newest)


def idle_states_keep_their_pending_rollback(patch: pytest.MonkeyPatch) -> None:
    commit = PlaneMemory._commit

    def keeping(self: PlaneMemory, ubatch) -> None:
        moved = {seq: self._pending[seq] for seq in self._running().moved}
        commit(self, ubatch)
        for seq, pending in moved.items():
            self._pending[seq] = pending

    patch.setattr(PlaneMemory, "_commit", keeping)


def rows_are_read_by_cell(patch: pytest.MonkeyPatch) -> None:
    rows = PlaneMemory._rows

    def by_cell(self: PlaneMemory, slot: UBatchCells, read):
        here = tuple(range(slot.first, slot.first + len(read)))
        return rows(self, replace(slot, sources=here), read)

    patch.setattr(PlaneMemory, "_rows", by_cell)


def carry_reads_from_plane_0(patch: pytest.MonkeyPatch) -> None:
    carried = PlaneMemory._carried_rows

    def newest(self: PlaneMemory, slot: UBatchCells, read, n_carried, n: int):
        return carried(self, slot, [0] * len(read), n_carried, n)

    patch.setattr(PlaneMemory, "_carried_rows", newest)


def carry_reads_by_cell(patch: pytest.MonkeyPatch) -> None:
    carried = PlaneMemory._carried_rows

    def by_cell(self: PlaneMemory, slot: UBatchCells, read, n_carried, n: int):
        here = tuple(range(slot.first, slot.first + len(read)))
        return carried(self, replace(slot, sources=here), read, n_carried, n)

    patch.setattr(PlaneMemory, "_carried_rows", by_cell)


@pytest.mark.parametrize(
    ("script", "policy", "bug"),
    [
        ("10-forks", "ring", ring_does_not_count_the_copy),
        ("10-forks", "ring", ring_writes_at_home),
        ("10-forks", "replay", replay_stays_in_a_shared_row),
        *(
            ("10-forks", p, a_copy_loses_the_pending_rollback)
            for p in ("planes", "carry", "replay")
        ),
        ("11-forks-of-forks", "ring", ring_does_not_count_the_copy),
        ("11-forks-of-forks", "ring", ring_writes_at_home),
        ("11-forks-of-forks", "replay", replay_stays_in_a_shared_row),
        *(("11-forks-of-forks", p, rows_are_read_by_cell) for p in ("planes", "carry")),
        *(("12-idle-neighbours", p, idle_states_move_from_plane_0) for p in ("planes", "carry")),
        *(
            ("12-idle-neighbours", p, idle_states_keep_their_pending_rollback)
            for p in ("planes", "carry")
        ),
        *(("12-idle-neighbours", p, rows_are_read_by_cell) for p in ("planes", "carry")),
        ("12-idle-neighbours", "carry", carry_reads_from_plane_0),
        ("12-idle-neighbours", "carry", carry_reads_by_cell),
    ],
)
def test_a_bug_of_copies_or_neighbours_fails_its_script(
    script: str, policy: str, bug: Callable[[pytest.MonkeyPatch], None], monkeypatch
) -> None:
    bug(monkeypatch)
    assert wrong(play(MODELS[0], SCRIPTS[script], policy)) != []
