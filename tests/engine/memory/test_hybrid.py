"""Both parts of the memory together: order of asking, files, shifted positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Span
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.memory.state_file import SequenceCheckpoint, load_state, save_state
from engine.options import ROLLBACK_POLICIES
from tests.support.golden_runs import session

CPU = torch.device("cpu")
MTP, DENSE, OTHER = "qwen35-c-v2x-mtp-f32", "qwen3-f-f32", "qwen35-b-v2x-tied-f32"
TOKENS = [(7 * i + 3) % 370 for i in range(30)]


def memory_of(name: str, **settings) -> HybridMemory:
    memory = HybridMemory.for_model(session(name).config, 3, 64, CPU, **settings)
    memory.poison(float("nan"))
    return memory


def decode(name: str, memory: HybridMemory, seq: int, pos0: int, tokens: list[int]) -> torch.Tensor:
    span = Span(seq, pos0, tokens, range(len(tokens)))
    forward = session(name)._model.forward
    return torch.cat([forward(u, memory).logits for u in memory.split([span], 16, "equal")])


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.thinned(4)
def test_a_sequence_goes_on_from_a_file(policy: str, unified: bool, tmp_path: Path) -> None:
    n_rs_seq = 0 if policy == "checkpoint" else 4
    memory = memory_of(MTP, policy=policy, n_rs_seq=n_rs_seq, unified=unified)
    decode(MTP, memory, 1, 0, TOKENS[:12])
    if n_rs_seq:
        assert memory.seq_rm(1, 9)  # saved while a rollback is pending
    n = memory.seq_pos_max(1) + 1
    save_state(tmp_path / "seq.state", memory.state(1))
    expected = decode(MTP, memory, 1, n, TOKENS[n : n + 5])
    fresh = memory_of(MTP, policy="planes", n_rs_seq=2)
    decode(MTP, fresh, 2, 0, TOKENS[20:27])  # a dirty destination
    fresh.put(2, load_state(tmp_path / "seq.state"))
    assert fresh.seq_pos_max(2) == n - 1
    assert not fresh.seq_rm(2, n - 1)  # history does not travel
    torch.testing.assert_close(
        decode(MTP, fresh, 2, n, TOKENS[n : n + 5]), expected, atol=1e-4, rtol=0
    )


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    memory, other = memory_of(MTP), memory_of(OTHER)
    decode(MTP, memory, 0, 0, TOKENS[:6])
    decode(OTHER, other, 0, 0, TOKENS[:6])
    with pytest.raises(OptionError, match="belongs to a model with other"):
        memory.put(0, other.state(0))
    dense = memory_of(DENSE)
    decode(DENSE, dense, 0, 0, TOKENS[:6])
    with pytest.raises(OptionError, match="other recurrent layers"):
        memory.put(0, dense.state(0))
    assert memory.seq_pos_max(0) == 5


def test_a_full_checkpoint_survives_a_cleared_sequence() -> None:
    memory = memory_of(MTP)
    decode(MTP, memory, 0, 0, TOKENS[:8])
    full = memory.save(0, full=True)
    expected = decode(MTP, memory, 0, 8, TOKENS[8:10])
    memory.clear(0)
    memory.restore(0, full)
    assert torch.equal(decode(MTP, memory, 0, 8, TOKENS[8:10]), expected)


def test_a_refused_removal_leaves_attention_alone() -> None:
    memory = memory_of(MTP, policy="planes", n_rs_seq=2)
    decode(MTP, memory, 0, 0, TOKENS[:8])
    assert not memory.seq_rm(0, 3)
    assert memory.attention.seq_pos_max(0) == memory.recurrent.seq_pos_max(0) == 7
    assert memory.attention.used(0) == 8


@pytest.mark.parametrize("name", [DENSE, MTP])
def test_shifted_positions_give_the_same_logits(name: str) -> None:
    """Rotary positions are relative: shifting all of a sequence changes nothing."""
    memory, shifted = memory_of(name), memory_of(name)
    for each in (memory, shifted):
        decode(name, each, 0, 0, TOKENS[:10])
    shifted.seq_add(0, 0, -1, 13)
    assert shifted.seq_pos_max(0) == 22
    torch.testing.assert_close(
        decode(name, shifted, 0, 23, TOKENS[10:13]),
        decode(name, memory, 0, 10, TOKENS[10:13]),
        atol=2e-4,
        rtol=0,
    )


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
def test_a_copied_sequence_goes_its_own_way(policy: str, unified: bool) -> None:
    memory = memory_of(MTP, policy=policy, n_rs_seq=0, unified=unified)
    decode(MTP, memory, 0, 0, TOKENS[:9])
    memory.seq_cp(0, 2)
    one = decode(MTP, memory, 0, 9, TOKENS[9:12])
    decode(MTP, memory, 2, 9, TOKENS[20:22])
    memory.seq_keep(2)
    assert (memory.seq_pos_max(0), memory.seq_pos_max(2)) == (-1, 10)
    fresh = memory_of(MTP)
    decode(MTP, fresh, 0, 0, TOKENS[:9])
    torch.testing.assert_close(decode(MTP, fresh, 0, 9, TOKENS[9:12]), one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("unified", [False, True])
def test_a_mirror_is_the_source_bit_by_bit(unified: bool) -> None:
    """After other tokens than the source's, and after fewer; other sequences are left alone."""
    source, mirror = memory_of(MTP), memory_of(MTP, unified=unified)
    for memory in (source, mirror):
        decode(MTP, memory, 1, 0, TOKENS[:12])
        decode(MTP, memory, 2, 0, TOKENS[5:9])
    others = mirror.state(2)
    decode(MTP, source, 1, 12, TOKENS[12:15])
    for n in (2, 6):
        decode(MTP, mirror, 1, 12, TOKENS[20 : 20 + n])
        mirror.mirror(1, source, 12)
        assert_equal(mirror.state(1), source.state(1))
        assert_equal(mirror.state(2), others)
        mirror.seq_rm(1, 12)
        mirror.mirror(1, source, 12)
        assert_equal(mirror.state(1), source.state(1))
        mirror.attention.seq_rm(1, 12)
        mirror.recurrent.put(1, 11, source.recurrent.live(1))
    mirror.mirror(1, source, 0)
    expected = decode(MTP, source, 1, 15, TOKENS[15:17])
    torch.testing.assert_close(decode(MTP, mirror, 1, 15, TOKENS[15:17]), expected)


def assert_equal(one: SequenceCheckpoint, other: SequenceCheckpoint) -> None:
    assert torch.equal(one.attention.positions, other.attention.positions)
    for a, b in (
        (one.attention.k, other.attention.k),
        (one.attention.v, other.attention.v),
        (one.recurrent.states.values(), other.recurrent.states.values()),
    ):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
