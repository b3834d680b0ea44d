"""Texts decoded into a recurrent memory, and what their states are when computed from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from engine.batch import UBatch
from engine.memory.recurrent import RecurrentCheckpoint, RecurrentMemory, RecurrentShape
from tests.support.closeness import nmse

CPU = torch.device("cpu")
N_KEY_HEADS = 2
SHAPE = RecurrentShape((0, 2), n_v_heads=4, d_state=8, d_conv=4, conv_dim=64, grouped=False)
LIMIT = 1e-10
Make = Callable[[int, int], RecurrentMemory]
"""A memory of (n_seqs, n_rs_seq)."""


@cache
def layer_inputs(layer: int, token: int) -> tuple[torch.Tensor, ...]:
    """x, q, k, v, g and beta of one token, which depend on nothing else."""
    random = torch.Generator().manual_seed(1000 * layer + token)
    d, heads = SHAPE.d_state, SHAPE.n_v_heads
    sizes = [SHAPE.conv_dim, N_KEY_HEADS * d, N_KEY_HEADS * d, heads * d, heads, heads]
    x, q, k, v, g, beta = torch.rand(sum(sizes), generator=random).split(sizes)
    q, k = (torch.nn.functional.normalize(t.view(-1, d) - 0.5, dim=-1) for t in (q, k))
    return x, q, k, v.view(-1, d), -2 * g, beta


@cache
def weight_of(layer: int) -> torch.Tensor:
    return torch.rand(SHAPE.conv_dim, SHAPE.d_conv, generator=torch.Generator().manual_seed(layer))


@cache
def truth(layer: int, tokens: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """State, window, and the last token's y and o, by the recurrence in f64."""
    if not tokens:
        d = SHAPE.d_state
        state = torch.zeros(SHAPE.n_v_heads, d, d, dtype=torch.float64)
        none = torch.zeros(0)
        window = torch.zeros(SHAPE.d_conv - 1, SHAPE.conv_dim, dtype=torch.float64)
        return state, window, none, none
    S, window, _, _ = truth(layer, tokens[:-1])
    x, q, k, v, g, beta = (t.double() for t in layer_inputs(layer, tokens[-1]))
    # tiled pairing: value head j reads key head j mod H_k
    q, k = (t.repeat(SHAPE.n_v_heads // N_KEY_HEADS, 1) for t in (q, k))
    S = g.exp()[:, None, None] * S
    u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", S, k))
    S = S + k[:, :, None] * u[:, None, :]
    o = torch.einsum("hkv,hk->hv", S, q) / math.sqrt(SHAPE.d_state)
    rows = torch.cat((window, x[None]))
    y = (rows * weight_of(layer).double().t()).sum(0)
    return S, rows[1:], y * torch.sigmoid(y), o


def ubatch_of(texts: dict[int, list[int]], memory: RecurrentMemory) -> UBatch:
    """Equally many new tokens for each of the sequences."""
    rows = list(texts.values())
    starts = [memory.seq_pos_max(seq) + 1 for seq in texts]
    positions = [list(range(start, start + len(rows[0]))) for start in starts]
    none = np.zeros(0, np.int64)
    return UBatch(np.array(rows), np.array(positions), tuple(texts), none)


@torch.inference_mode()
def decode(
    memory: RecurrentMemory, new: dict[int, list[int]], *, by_index: bool = False
) -> list[torch.Tensor]:
    """One ubatch; per layer y [n_seqs, T, C] and o [n_seqs, T, H_v, d]."""
    ubatch = ubatch_of(new, memory)
    assert memory.prepare([ubatch])
    memory.begin(ubatch, by_index=by_index)
    assert by_index or memory.fixed() is None
    out = []
    for layer in SHAPE.layers:
        rows = [[layer_inputs(layer, token) for token in tokens] for tokens in new.values()]
        x, *rest = (
            torch.stack([torch.stack([token[i] for token in row]) for row in rows])
            for i in range(6)
        )
        out += [memory.conv(layer, x, weight_of(layer)), memory.delta(layer, *rest)]
    memory.commit()
    return out


def close(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within LIMIT; zeros have to be zeros."""
    return nmse(result, wanted) <= LIMIT if wanted.any() else torch.equal(result.double(), wanted)


def assert_state(memory: RecurrentMemory, seq: int, text: list[int]) -> None:
    """Position, states and windows are those of the text."""
    assert memory.seq_pos_max(seq) == len(text) - 1
    for layer, state, window in zip(SHAPE.layers, *memory.live(seq), strict=True):
        wanted = truth(layer, tuple(text))
        assert close(state, wanted[0]), (seq, layer)
        assert close(window, wanted[1]), (seq, layer)


def assert_outputs(out: list[torch.Tensor], row: int, text: list[int], n_new: int) -> None:
    """y and o of the last n_new tokens of a text, in row `row` of what decode gave."""
    for i, layer in enumerate(SHAPE.layers):
        ends = range(len(text) - n_new + 1, len(text) + 1)
        wanted = [truth(layer, tuple(text[:end])) for end in ends]
        assert close(out[2 * i][row], torch.stack([w[2] for w in wanted]))
        assert close(out[2 * i + 1][row], torch.stack([w[3] for w in wanted]))


def copies(memory: RecurrentMemory, seq: int) -> list[torch.Tensor]:
    return [t.clone() for part in memory.live(seq) for t in part]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def walk(
    data: st.DataObject, make: Make, after_decode: Callable[[int | None, int, int], int]
) -> None:
    """Random operations, every sequence compared with decoding its text after each.

    after_decode(depth, n, R): how far back a sequence can go after n more tokens, when it could
    go back `depth` before (None: empty).
    """
    n_seqs, bound = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 1, 2, 3, 5, 8]))
    memory = make(n_seqs, bound)
    memory.poison(data.draw(st.sampled_from([math.nan, 0.0, 0.125])))
    texts: list[list[int]] = [[] for _ in range(n_seqs)]
    depths: list[int | None] = [None] * n_seqs
    saves: list[tuple[list[int], RecurrentCheckpoint]] = []
    seqs = st.integers(0, n_seqs - 1)
    operations = ["decode", "decode", "decode", "remove", "remove", "copy", "keep", "save", "put"]
    for _ in range(data.draw(st.integers(1, 14))):
        operation, seq = data.draw(st.sampled_from(operations)), data.draw(seqs)
        before = {other: copies(memory, other) for other in range(n_seqs)}
        touched = {seq}
        if operation == "decode":
            n = data.draw(st.sampled_from([1, 1, 2, 3, 4, 5, 9, 12]))
            touched = set(data.draw(st.lists(seqs, min_size=1, unique=True)))
            tokens = st.lists(st.integers(0, 60), min_size=n, max_size=n)
            new = {one: data.draw(tokens) for one in sorted(touched, key=lambda s: (s * 7) % 4)}
            promised = [memory.guaranteed_depth(one, n) for one in new]
            out = decode(memory, new, by_index=data.draw(st.booleans()))
            for row, one in enumerate(new):
                texts[one] = texts[one] + new[one]
                depths[one] = after_decode(depths[one], n, bound)
                assert_outputs(out, row, texts[one], n)
                assert memory.valid_depth(one) == promised[row]
                assert memory.pending(one) == 0
        elif operation == "remove" and texts[seq]:
            valid = depths[seq]
            assert valid is not None
            depth = data.draw(st.integers(0, min(len(texts[seq]), bound + 2)))
            possible = depth <= valid or depth == len(texts[seq])
            pending = memory.pending(seq)
            assert memory.seq_rm(seq, len(texts[seq]) - depth) == possible
            if possible and depth:
                texts[seq] = texts[seq][:-depth]
                depths[seq] = valid - depth if texts[seq] else None
                assert memory.pending(seq) == (pending + depth if texts[seq] else 0)
            else:
                touched = set()
        elif operation == "copy":
            src = data.draw(seqs)
            memory.seq_cp(src, seq)
            texts[seq], depths[seq] = texts[src], depths[src]
        elif operation == "keep":
            memory.seq_keep(seq)
            touched = set(range(n_seqs)) - {seq}
            for other in touched:
                texts[other], depths[other] = [], None
        elif operation == "save":
            saves.append((texts[seq], memory.save(seq)))
            touched = set()
        elif operation == "put" and saves:
            texts[seq], saved = data.draw(st.sampled_from(saves))
            memory.restore(seq, saved)
            depths[seq] = 0 if texts[seq] else None
        for one in range(n_seqs):
            assert_state(memory, one, texts[one])
            assert memory.valid_depth(one) == (depths[one] or 0)
            newest = [s for s in memory.slots(one) if s.state in ("live", "pending")]
            assert len(newest) == bool(texts[one])
            if one not in touched:
                assert same(copies(memory, one), before[one])
