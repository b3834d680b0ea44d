"""Rollback scenarios of the field on small real models, whole forward passes at a time.

The sources are the rollback tests of llama.cpp as merged (save after a rollback, split replay,
independence) and of its open proposal #25004 (parallel rollback, active gap, cross-ubatch carry,
depth bookkeeping). Storage is filled beforehand with 0x00 bytes, 0x3E bytes and NaN.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Span, make_ubatch, split_equal
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.loader import load_model
from tests.support.closeness import nmse

DATA = Path(__file__).resolve().parents[2] / "data"
CPU = torch.device("cpu")
MODELS = ("qwen35-a-f32", "qwen35-b-v2x-tied-f32", "qwen3next-e-v2x-f32")
ROLLING = ("planes", "carry", "ring", "replay")
ACCUMULATING = ("carry", "ring", "replay")
POLICIES = (*ROLLING, "checkpoint")
POISON = (0.0, struct.unpack("<f", b"\x3e" * 4)[0], math.nan)
PANGRAM = [17, 203, 88, 41, 350, 9, 126, 271, 64]

every_model = pytest.mark.parametrize("name", MODELS)
every_poison = pytest.mark.parametrize("poison", POISON, ids=["00", "3E", "NaN"])


@cache
def model_of(name: str) -> HybridModel:
    with GgufFile.open(DATA / f"{name}.gguf") as file:
        return load_model(file)


class Context:
    """A model with a memory; every batch is tried out (prepare) before it is decoded."""

    def __init__(
        self,
        name: str,
        policy: str,
        n_rs_seq: int,
        n_seqs: int = 1,
        *,
        poison: float = math.nan,
        n_ubatch: int = 512,
        n_ctx: int = 256,
        unified: bool = False,
        faults: Sequence[str] = (),
    ) -> None:
        self.model, self.n_ubatch = model_of(name), n_ubatch
        self.memory = HybridMemory.for_model(
            self.model.config,
            n_seqs,
            n_ctx,
            CPU,
            policy=policy,
            n_rs_seq=n_rs_seq,
            unified=unified,
            faults=faults,
        )
        assert self.memory.recurrent is not None
        self.recurrent = self.memory.recurrent
        self.memory.poison(poison)

    def decode(
        self, new: Mapping[int, Sequence[int]], *, keep: int | None = None
    ) -> dict[int, torch.Tensor]:
        """Logits [n_tokens, V] of one batch, by sequence; keep: instead of the memory's rule."""
        spans = [
            Span(seq, self.memory.seq_pos_max(seq) + 1, tokens, range(len(tokens)))
            for seq, tokens in new.items()
        ]
        if keep is None:
            ubatches = self.memory.split(spans, self.n_ubatch, "equal")
        else:
            pieces = split_equal(spans, self.n_ubatch, keep=keep)
            ubatches = [make_ubatch(spans, piece) for piece in pieces]
        assert self.memory.prepare(ubatches)
        found: dict[int, list[torch.Tensor]] = {seq: [] for seq in new}
        for ubatch in ubatches:
            logits = self.model.forward(ubatch, self.memory).logits.split(ubatch.n_seq_tokens)
            for seq, rows in zip(ubatch.seq_ids, logits, strict=True):
                found[seq].append(rows)
        return {seq: torch.cat(rows) for seq, rows in found.items()}

    def one_by_one(self, tokens: Sequence[int], seq: int = 0) -> torch.Tensor:
        return torch.cat([self.decode({seq: [token]})[seq] for token in tokens])


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference of two rows of logits; NaN stays NaN."""
    return float((ours - theirs).abs().max())


def shifted(name: str, tokens: Sequence[int], by: int = 1) -> list[int]:
    return [(token + by) % model_of(name).config.n_vocab for token in tokens]


def rolled_back(name: str, policy: str, poison: float) -> Context:
    """Scenario 1: nine tokens in one batch, back to the first six."""
    context = Context(name, policy, 8, poison=poison)
    context.decode({0: PANGRAM})
    assert context.memory.seq_rm(0, 6)
    return context


@every_model
@every_poison
@pytest.mark.parametrize("policy", ROLLING)
def test_1_a_state_saved_after_a_rollback_replays_exactly(name, poison, policy):
    source, fresh = rolled_back(name, policy, poison), Context(name, policy, 8, poison=poison)
    fresh.memory.put(0, source.memory.state(0))
    assert torch.equal(source.one_by_one(PANGRAM[6:]), fresh.one_by_one(PANGRAM[6:]))


@every_poison
@pytest.mark.parametrize("target", POLICIES)
@pytest.mark.parametrize("policy", ROLLING)
def test_1_a_saved_state_fits_every_policy(poison, policy, target):
    source = rolled_back(MODELS[0], policy, poison)
    fresh = Context(MODELS[0], target, 8, poison=poison)
    fresh.memory.put(0, source.memory.state(0))
    wanted = source.one_by_one(PANGRAM[6:])
    assert nmse(fresh.one_by_one(PANGRAM[6:]), wanted) <= 1e-10


@every_model
@every_poison
@pytest.mark.parametrize("policy", ROLLING)
def test_2_loading_wipes_what_was_pending_and_foreign(name, poison, policy):
    source = rolled_back(name, policy, poison)
    dirty = Context(name, policy, 8, poison=poison)
    dirty.decode({0: shifted(name, PANGRAM)})
    assert dirty.memory.seq_rm(0, 6)
    dirty.memory.put(0, source.memory.state(0))
    assert (dirty.recurrent.pending(0), dirty.recurrent.valid_depth(0)) == (0, 0)
    assert torch.equal(source.one_by_one(PANGRAM[6:]), dirty.one_by_one(PANGRAM[6:]))


def token_at(name: str, seq: int, pos: int) -> int:
    return (7 * pos + 31 * seq + 1) % model_of(name).config.n_vocab


def tokens_at(name: str, start: int, stop: int) -> dict[int, list[int]]:
    return {seq: [token_at(name, seq, pos) for pos in range(start, stop)] for seq in range(2)}


@every_model
@pytest.mark.parametrize("policy", ROLLING)
def test_3_and_4_split_replay_and_independence(name, policy):
    """Two sequences, 16 tokens per ubatch, a rollback to position 15 on both, 2 x 40 tokens.

    The merged test decodes only positions 16 .. 18 before it goes back by three, one more than
    that ubatch's planes hold; `planes` refuses that here, so it decodes position 15 with them.
    """
    first = 15 if policy == "planes" else 16
    ours, theirs = (Context(name, policy, 8, 2, n_ubatch=16) for _ in range(2))
    ours.decode(tokens_at(name, 0, first))
    ours.decode(tokens_at(name, first, 19))
    theirs.decode(tokens_at(name, 0, 16))
    for seq in range(2):
        assert ours.memory.seq_rm(seq, 16)
        assert ours.recurrent.pending(seq) == 3
        if policy == "planes":
            assert not ours.memory.seq_rm(seq, 15)
    more = tokens_at(name, 16, 56)
    a, b = ours.decode(more), theirs.decode(more)
    assert nmse(torch.cat([a[0], a[1]]), torch.cat([b[0], b[1]])) <= 1e-4
    theirs.decode({0: [token_at(name, 0, pos + 7) for pos in range(56, 60)]})
    following = tokens_at(name, 56, 60)[1]
    assert nmse(ours.one_by_one(following, 1), theirs.one_by_one(following, 1)) <= 1e-4


def test_3_planes_refuse_a_depth_that_the_last_ubatch_does_not_hold():
    name = MODELS[0]
    context = Context(name, "planes", 8, 2, n_ubatch=16)
    context.decode(tokens_at(name, 0, 16))
    context.decode(tokens_at(name, 16, 19))
    assert not context.memory.seq_rm(0, 16)
    assert context.memory.seq_rm(0, 17)


@every_model
@every_poison
@pytest.mark.parametrize("policy", ROLLING)
def test_5_parallel_rollback(name, poison, policy):
    prompt, n = PANGRAM, len(PANGRAM)
    context = Context(name, policy, 8, 2, poison=poison)
    context.decode({0: prompt, 1: prompt})
    assert context.memory.seq_rm(0, n - 2) and context.memory.seq_rm(1, n - 2)
    logits = context.decode({0: prompt[-1:], 1: prompt[-1:]})
    assert apart(logits[0], logits[1]) <= 1e-5
    alone = Context(name, policy, 8)
    alone.decode({0: prompt[: n - 2]})
    wanted = alone.decode({0: prompt[-1:]})[0]
    assert logits[0].argmax() == logits[1].argmax() == wanted.argmax()


@every_model
@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("policy", ROLLING)
def test_6_an_active_gap_does_not_alias(name, policy, unified):
    """Cells in the order 1, 3, 2, 0; the pair 1, 2 is decoded, the idle 3 between gives way."""
    n_pair = 2 if policy == "planes" else 1
    prefix = PANGRAM[:-1]
    gap, natural = (Context(name, policy, 8, 4, unified=unified) for _ in range(2))
    for context, order in ((gap, (1, 3, 2, 0)), (natural, (0, 1, 2, 3))):
        for seq in order:
            context.decode({seq: shifted(name, prefix, seq)})
    if policy in ("planes", "carry"):
        assert gap.recurrent.cells.tail == [3, 0, 2, 1]
    pair = {seq: shifted(name, PANGRAM[-1:] * n_pair, seq) for seq in (1, 2)}
    ours, theirs = gap.decode(pair), natural.decode(pair)
    assert all(apart(ours[seq], theirs[seq]) <= 1e-5 for seq in (1, 2))
    last = pair[2][-1:]
    for context in (gap, natural):
        assert context.memory.seq_rm(2, len(prefix) + n_pair - 1)
    assert apart(gap.decode({2: last})[2], natural.decode({2: last})[2]) <= 1e-5
    # the relocated sequence: no history in cells, a plain continuation everywhere
    assert natural.recurrent.valid_depth(3) > 0
    if policy in ("planes", "carry"):
        assert gap.recurrent.valid_depth(3) == 0
        assert not gap.memory.seq_rm(3, len(prefix) - 1)
        assert gap.memory.attention.seq_pos_max(3) == len(prefix) - 1
    for seq in (3, 0):
        token = shifted(name, PANGRAM[-1:], seq)
        assert apart(gap.decode({seq: token})[seq], natural.decode({seq: token})[seq]) <= 1e-5


@every_model
@every_poison
@pytest.mark.parametrize("policy", ["carry", "ring"])
def test_7_history_survives_ubatches_shorter_than_it(name, poison, policy):
    """Not in planes or replay, whose history is the last ubatch: they refuse that depth."""
    n, last = len(PANGRAM), PANGRAM[-1:]
    small = Context(name, policy, 8, poison=poison, n_ubatch=2)
    whole = Context(name, policy, 8, poison=poison)
    small.decode({0: PANGRAM}, keep=0)
    whole.decode({0: PANGRAM})
    for _ in range(2):  # the second time by one token, on the same context
        for context in (small, whole):
            assert context.memory.seq_rm(0, n - 2)
        ours, theirs = small.decode({0: last})[0], whole.decode({0: last})[0]
        # the ubatches differ in shape, so rounding does: 1e-5 of the largest logit, about 4
        assert apart(ours, theirs) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("policy", ["planes", "replay", "checkpoint"])
def test_7_without_carry_history_ends_with_the_ubatch(policy):
    small = Context(MODELS[0], policy, 8, n_ubatch=2)
    small.decode({0: PANGRAM}, keep=0)
    assert not small.memory.seq_rm(0, len(PANGRAM) - 2)


@every_model
@pytest.mark.parametrize(("depth", "possible"), [(3, True), (4, False)])
def test_8_depth_bookkeeping(name, depth, possible):
    bound = 4
    context = Context(name, "carry", bound)
    context.decode({0: PANGRAM[: bound + 2]})
    assert context.recurrent.valid_depth(0) == bound
    assert context.memory.seq_pos_max(0) == bound + 1
    assert context.memory.seq_rm(0, bound)
    assert context.memory.seq_pos_max(0) == bound - 1
    context.decode({0: [PANGRAM[bound]]})
    assert context.recurrent.valid_depth(0) == bound - 1
    assert context.memory.seq_rm(0, bound + 1 - depth) == possible


@every_model
@pytest.mark.parametrize("policy", ACCUMULATING)
def test_9_rollbacks_add_up(name, policy):
    twice, once = Context(name, policy, 4), Context(name, policy, 4)
    for context in (twice, once):
        context.decode({0: PANGRAM})
    assert twice.memory.seq_rm(0, 8) and twice.memory.seq_rm(0, 7)
    assert once.memory.seq_rm(0, 7)
    assert torch.equal(twice.one_by_one(PANGRAM[7:]), once.one_by_one(PANGRAM[7:]))


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_9_a_copied_sequence_goes_its_own_way(policy, unified):
    name = MODELS[1]
    context = Context(name, policy, 4, 2, unified=unified)
    context.decode({0: PANGRAM})
    context.memory.seq_cp(0, 1)
    if policy in ("planes", "carry"):
        assert not context.memory.seq_rm(0, 8) and not context.memory.seq_rm(1, 8)
    ours = {1: context.decode({1: [30, 31]})[1], 0: context.decode({0: [40, 41]})[0]}
    for seq, tokens in ((0, [40, 41]), (1, [30, 31])):
        alone = Context(name, policy, 4)
        alone.decode({0: PANGRAM})
        assert apart(ours[seq], alone.decode({0: tokens})[0]) <= 1e-5


@pytest.mark.parametrize("policy", ROLLING)
def test_9_keep_clear_and_restore_reset_the_depth(policy):
    context = Context(MODELS[0], policy, 4, 3)
    context.decode(dict.fromkeys(range(3), PANGRAM))
    for seq in range(3):
        assert context.memory.seq_rm(seq, 7)
    context.memory.restore(1, context.memory.save(1))
    assert not context.memory.seq_rm(1, 6)
    context.memory.clear(0)
    context.memory.seq_keep(1)
    for seq in range(3):
        assert (context.recurrent.pending(seq), context.recurrent.valid_depth(seq)) == (0, 0)
    assert [context.memory.seq_pos_max(seq) for seq in range(3)] == [-1, 6, -1]


@every_model
@pytest.mark.parametrize("policy", POLICIES)
def test_9_a_refusal_leaves_both_parts_alone(name, policy):
    context, other = Context(name, policy, 2), Context(name, policy, 2)
    for each in (context, other):
        each.decode({0: PANGRAM})
    assert not context.memory.seq_rm(0, 4)
    assert context.memory.attention.used(0) == len(PANGRAM)
    assert torch.equal(context.one_by_one([5, 6]), other.one_by_one([5, 6]))


@every_model
@pytest.mark.parametrize("faults", [(), ("stale-plane",)])
def test_9_the_stale_acceptance_of_upstream_is_wrong(name, faults):
    """Decode 9, back by 2, decode 1, back by 3: that plane was never written for this."""
    context = Context(name, "planes", 8, faults=faults)
    context.decode({0: PANGRAM})
    assert context.memory.seq_rm(0, 7)
    context.decode({0: [30]})
    assert context.memory.seq_rm(0, 5) == bool(faults)
    if faults:
        alone = Context(name, "planes", 8)
        alone.decode({0: PANGRAM[:5]})
        assert nmse(context.one_by_one([31]), alone.one_by_one([31])) > 1e-4


@every_model
@pytest.mark.parametrize(
    ("policy", "fault"),
    [("planes", "plane-off-by-one"), ("carry", "plane-off-by-one")]
    + [(policy, "no-conv-rollback") for policy in ROLLING],
)
def test_9_the_other_faults_change_the_logits(name, policy, fault):
    wanted = rolled_back(name, policy, 0.0).one_by_one([30])
    for faults, wrong in (((), False), ((fault,), True)):
        context = Context(name, policy, 8, faults=faults)
        context.decode({0: PANGRAM})
        assert context.memory.seq_rm(0, 6)
        assert (nmse(context.one_by_one([30]), wanted) > 1e-6) == wrong


@every_model
@pytest.mark.parametrize("faults", [(), ("keep-stale-kv",)])
def test_9_a_checkpoint_restored_with_and_without_removing_attention_cells(name, faults):
    context, alone = Context(name, "checkpoint", 0, faults=faults), Context(name, "checkpoint", 0)
    for each in (context, alone):
        each.decode({0: PANGRAM})
    saved = context.memory.save(0)
    context.decode({0: [30, 31, 32, 33]})
    context.memory.restore(0, saved)
    ours, theirs = (each.decode({0: [30, 40]})[0] for each in (context, alone))
    assert (context.memory.attention.duplicates(0) > 0) == bool(faults)
    assert (nmse(ours, theirs) > 1e-6) == bool(faults)


@every_model
@pytest.mark.parametrize("policy", ROLLING)
@pytest.mark.parametrize("n_draft", [1, 3])
def test_rejected_drafts_leave_the_golden_logits(name, policy, n_draft):
    """A whole speculative walk along the golden tokens, most of its drafts wrong."""
    with np.load(DATA / f"{name}.npz") as golden:
        tokens, logits = golden["tokens"].tolist(), torch.from_numpy(golden["logits"])
        rows, n_prompt = golden["rows"].tolist(), int(golden["n_prompt"])
    context = Context(name, policy, n_draft)
    at = dict(zip(rows, logits, strict=True))
    context.decode({0: tokens[:n_prompt]})
    pos = n_prompt
    while pos + n_draft < len(tokens):
        n_right = pos % (n_draft + 1)
        right = tokens[pos : pos + 1 + n_right]
        found = context.decode({0: right + shifted(name, right[:1]) * (n_draft - n_right)})[0]
        wanted = torch.stack([at[p] for p in range(pos, pos + len(right))])
        assert nmse(found[: len(right)], wanted) <= 1e-9
        pos += len(right)
        assert context.memory.seq_rm(0, pos)
