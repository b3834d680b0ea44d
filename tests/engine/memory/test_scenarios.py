"""Rollback scenarios of the field on small real models, whole forward passes at a time.

They are the bundled scripts, whose sources are the rollback tests of llama.cpp as merged and of its
open proposal #25004. Storage is filled beforehand with NaN, 0x00 and 0x3E bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
from engine.memory.hybrid import HybridMemory
from engine.session import Session
from resources import MEMORY_SCRIPTS
from tests.support.all_pairs import all_pairs
from tests.support.closeness import nmse
from tests.support.copy_bugs import (
    a_copy_loses_the_pending_rollback,
    carry_reads_by_cell,
    carry_reads_from_plane_0,
    idle_states_keep_their_pending_rollback,
    idle_states_move_from_plane_0,
    replay_stays_in_a_shared_row,
    ring_does_not_count_the_copy,
    ring_writes_at_home,
    rows_are_read_by_cell,
)

DATA = Path(__file__).resolve().parents[2] / "data"
CPU = torch.device("cpu")
MODELS = ("qwen35-a-f32", "qwen35-b-v2x-tied-f32", "qwen3next-e-v2x-f32")
ROLLING = ("planes", "carry", "ring", "replay")
SCRIPTS = {script.name: script for script in memory_scripts(MEMORY_SCRIPTS)}
CASES = [(name, policy) for name, script in SCRIPTS.items() for policy in script.policies]
FIRST = "1-save-after-rollback"

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
    text = (MEMORY_SCRIPTS / f"{name}.toml").read_text(encoding="utf-8")
    assert old in text
    return parse_script(name, f"{name}.toml", text.replace(old, new))


def test_every_script_is_there() -> None:
    assert sorted(int(name.split("-")[0]) for name in SCRIPTS) == [*range(1, 13)]
    assert {policy for _, policy in CASES} == {*ROLLING, "checkpoint"}


@pytest.mark.parametrize(
    ("script", "policy"), [case for case in CASES if case[0].startswith(("7-", "8-", "9-", "11-"))]
)
@pytest.mark.thinned(4)
def test_rings_by_position(script: str, policy: str) -> None:
    """Where they differ from other states, or copies of copies share them."""
    assert wrong(play("deepseek4-a-mtp-f32", SCRIPTS[script], policy)) == []


@pytest.mark.parametrize(("case", "model", "fill"), all_pairs(CASES, MODELS, list(FILLS)))
@pytest.mark.thinned(6)
def test_scenario(case: tuple[str, str], model: str, fill: str) -> None:
    name, policy = case
    played = play(model, SCRIPTS[name], policy, fill)
    assert played.outcomes
    assert wrong(played) == []


@pytest.mark.parametrize("policy", ROLLING)
@pytest.mark.parametrize("name", ["6-active-gap", "9-additions"])
def test_scenario_in_a_pool_of_cells(name: str, policy: str) -> None:
    script = changed(name, "n_rs_seq=", "kv=unified n_rs_seq=")
    assert wrong(play(MODELS[1], script, policy)) == []


@pytest.mark.parametrize("policy", ROLLING)
def test_scenario_with_bits_that_no_batch_changes(policy: str) -> None:
    """Then even what differs in the shape of batches is equal bit by bit."""
    text = (MEMORY_SCRIPTS / "4-independence.toml").read_text(encoding="utf-8")
    script = parse_script("4", "4.toml", text.replace("nmse<=1e-4", "exact"))
    assert wrong(play(MODELS[0], script, policy, batch_invariant=True)) == []


@pytest.mark.parametrize("target", [*ROLLING, "checkpoint"])
@pytest.mark.parametrize("policy", ROLLING)
@pytest.mark.thinned(6)
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
@pytest.mark.thinned(4)
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
@pytest.mark.thinned(4)
def test_a_bug_of_copies_or_neighbours_fails_its_script(
    script: str, policy: str, bug: Callable[[pytest.MonkeyPatch], None], monkeypatch
) -> None:
    bug(monkeypatch)
    found = wrong(play(MODELS[0], SCRIPTS[script], policy))
    assert found != []
    if script == "10-forks":
        how = rf"; (A|D|F) 1 is a copy of \1 0 \(line \d+, \d tokens pending, policy {policy}\)"
        assert all(re.search(how, text) for text in found)
