"""Snapshot planes against states recomputed from scratch."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.batch import Piece, Span, make_ubatch
from engine.memory.planes import PlanesMemory
from engine.memory.recurrent import RecurrentShape
from kernels.conv.naive import causal_conv
from kernels.delta_rule.naive import gated_delta_rule

CPU = torch.device("cpu")
SHAPE = RecurrentShape((0, 2), n_v_heads=4, d_state=8, d_conv=4, conv_dim=6, grouped=False)
N_HEADS_K = 2


def inputs(tokens: list[int], layer: int):
    """Layer inputs that depend on the token only: x, weight, q, k, v, g, beta."""
    rows = []
    for token in tokens:
        random = torch.Generator().manual_seed(1000 * layer + token)
        rows.append(torch.rand(6 + 2 * N_HEADS_K * 8 + 4 * 8 + 8, generator=random))
    x, q, k, v, g, beta = torch.stack(rows)[None].split([6, 16, 16, 32, 4, 4], -1)
    n = len(tokens)
    q, k = (
        torch.nn.functional.normalize(t.reshape(1, n, N_HEADS_K, 8) - 0.5, dim=-1) for t in (q, k)
    )
    weight = torch.rand(6, 4, generator=torch.Generator().manual_seed(layer))
    return x, weight, q, k, v.reshape(1, n, 4, 8), -2 * g, beta


def decode(memory: PlanesMemory, seq: int, tokens: list[int]) -> torch.Tensor:
    pos0 = memory.seq_pos_max(seq) + 1
    piece = Piece((0,), (0,), len(tokens), "")
    memory.begin(make_ubatch([Span(seq, pos0, tokens, [])], piece, CPU))
    out = []
    for layer in SHAPE.layers:
        x, weight, *rest = inputs(tokens, layer)
        out += [memory.conv(layer, x, weight).flatten(), memory.delta(layer, *rest).flatten()]
    memory.commit()
    return torch.cat(out)


def from_scratch(tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    states, windows = [], []
    for layer in SHAPE.layers:
        x, weight, *rest = inputs(tokens, layer)
        _, history = causal_conv(x, weight, torch.zeros(1, 3, 6))
        _, snapshots = gated_delta_rule(*rest, torch.zeros(1, 4, 8, 8), grouped=False)
        states.append(snapshots[0, 0])
        windows.append(history[0, -3:])
    return states, windows


def assert_state(memory: PlanesMemory, seq: int, tokens: list[int]) -> None:
    assert memory.seq_pos_max(seq) == len(tokens) - 1
    states, windows = memory.live(seq)
    if not tokens:
        assert all((t == 0).all() for t in (*states, *windows))
        return
    for got, want in zip((*states, *windows), chain(*from_scratch(tokens)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def memory_of(n_rs_seq: int, n_seqs: int = 3) -> PlanesMemory:
    memory = PlanesMemory(SHAPE, n_seqs, n_rs_seq, CPU)
    for planes in (*memory._states.values(), *memory._windows.values()):
        planes[1:] = torch.nan  # unwritten planes must never be read
    return memory


def test_worked_example():
    memory = memory_of(3)
    prompt = list(range(10))
    decode(memory, 0, prompt)
    decode(memory, 0, [20, 21, 22, 23])
    assert memory.seq_rm(0, 12)
    assert (memory.pending(0), memory.seq_pos_max(0)) == (2, 11)
    assert [s.state for s in memory.slots(0)] == ["fresh", "fresh", "pending", "fresh"]
    assert_state(memory, 0, [*prompt, 20, 21])
    decode(memory, 0, [30])
    assert memory.pending(0) == 0
    assert_state(memory, 0, [*prompt, 20, 21, 30])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stale_plane_is_refused(depth):
    """A single-token step makes one plane fresh: no rollback is truthful (llama.cpp #29117)."""
    memory = memory_of(3)
    decode(memory, 0, list(range(9)))
    decode(memory, 0, [50])
    before = [t.clone() for t in chain(*memory.live(0))]
    assert memory.valid_depth(0) == 0
    assert not memory.seq_rm(0, 10 - depth)
    assert memory.seq_pos_max(0) == 9
    for got, want in zip(chain(*memory.live(0)), before, strict=True):
        assert torch.equal(got, want)
    assert [s.state for s in memory.slots(0)] == ["live", "stale", "stale", "stale"]
    assert [s.age for s in memory.slots(0)] == [0, 2, 3, 4]


def test_a_pending_rollback_is_used_once():
    memory = memory_of(4)
    decode(memory, 0, list(range(6)))
    assert memory.seq_rm(0, 5)
    assert not memory.seq_rm(0, 4)
    assert_state(memory, 0, list(range(5)))


def test_removals_that_touch_nothing():
    memory = memory_of(2)
    decode(memory, 0, [1, 2, 3])
    assert memory.seq_rm(0, 3) and memory.seq_rm(0, 0, 2)
    assert_state(memory, 0, [1, 2, 3])


def test_restore_clears_what_was_pending():
    memory = memory_of(3)
    decode(memory, 0, [1, 2, 3])
    memory.seq_rm(0, 2)
    saved = memory.save(0)  # the logical state, one token back
    decode(memory, 1, [7, 8, 9, 10])
    memory.seq_rm(1, 2)
    memory.restore(1, saved)
    assert (memory.pending(1), memory.valid_depth(1)) == (0, 0)
    assert not memory.seq_rm(1, 1)
    assert_state(memory, 1, [1, 2])
    assert saved.n_bytes == SHAPE.n_bytes


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n_rs_seq=st.integers(0, 5))
def test_random_operations_agree_with_decoding_from_scratch(data, n_rs_seq):
    memory = memory_of(n_rs_seq)
    texts: list[list[int]] = [[], [], []]
    saves: list[tuple[int, list[int], object]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        seq = data.draw(st.integers(0, 2))
        others = [s for s in range(3) if s != seq]
        before = {s: [t.clone() for t in chain(*memory.live(s))] for s in others}
        operation = data.draw(st.sampled_from(["decode", "decode", "remove", "save", "restore"]))
        if operation == "decode":
            tokens = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=9))
            decode(memory, seq, tokens)
            texts[seq] = texts[seq] + tokens
            assert memory.valid_depth(seq) == min(len(tokens), n_rs_seq + 1) - 1
        elif operation == "remove" and texts[seq]:
            p0 = data.draw(st.integers(0, len(texts[seq])))
            possible = memory.valid_depth(seq) >= len(texts[seq]) - p0 or p0 == 0
            assert memory.seq_rm(seq, p0) == possible
            if possible:
                texts[seq] = texts[seq][:p0]
        elif operation == "save":
            saves.append((seq, texts[seq], memory.save(seq)))
        elif operation == "restore" and saves:
            _, texts[seq], saved = data.draw(st.sampled_from(saves))
            memory.restore(seq, saved)
        assert_state(memory, seq, texts[seq])
        for other in others:
            for got, want in zip(chain(*memory.live(other)), before[other], strict=True):
                assert torch.equal(got, want)
