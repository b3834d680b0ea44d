"""Texts decoded into a recurrent memory, and what their states are when computed from scratch.

Six kinds of layers stand for all: the delta rule with one gate per head, with one per key channel,
Mamba-2 and a short convolution by itself (tests.support.mamba_layers), tokens and a dilated
convolution (tests.support.ngram_layers), and made-up ones of other shapes
(tests.support.moving_average). No policy may know which it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from engine.batch import UBatch
from engine.memory.recurrent import RecurrentCheckpoint, SnapshotPolicy
from engine.model.recurrence import (
    ConvInputs,
    ConvWindow,
    RecurrenceInputs,
    RecurrentLayout,
    StateKey,
)
from engine.model.recurrent_states import DeltaInputs, DeltaState
from tests.support import mamba_layers, moving_average, ngram_layers
from tests.support.closeness import nmse

CPU = torch.device("cpu")
N_KEY_HEADS, N_HEADS, D = 2, 4, 8
N_CHANNELS, N_TAPS = (2 * N_KEY_HEADS + N_HEADS) * D, 4
LIMIT = 1e-10
Make = Callable[[int, int], SnapshotPolicy]
"""A memory of (n_seqs, n_rs_seq)."""
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Layers:
    """Recurrent layers and what tokens put into them.

    of_token: the inputs of one token, without batch or time, which depend on nothing else.
    inputs: those of a ubatch, from tensors [B, T, ...]. step: state and output of the definition,
    one token, in f64.
    """

    layout: RecurrentLayout
    of_token: Callable[[StateKey, int], Tensors]
    inputs: Callable[[StateKey, Tensors], RecurrenceInputs]
    step: Callable[[StateKey, torch.Tensor, Tensors], Tensors]

    @property
    def keys(self) -> list[StateKey]:
        """Layer by layer, windows first, as a model advances them."""
        states = self.layout.states
        return sorted(states, key=lambda key: (key.layer, not states[key].is_window))


@cache
def _of_token(key: StateKey, token: int, channels: bool) -> Tensors:
    random = torch.Generator().manual_seed(1000 * key.layer + token)
    n_gates = N_HEADS * (D if channels else 1)
    sizes = [N_CHANNELS, N_KEY_HEADS * D, N_KEY_HEADS * D, N_HEADS * D, n_gates, N_HEADS]
    x, q, k, v, g, beta = torch.rand(sum(sizes), generator=random).split(sizes)
    if key.name == "window":
        return (x,)
    q, k = (torch.nn.functional.normalize(t.view(-1, D) - 0.5, dim=-1) for t in (q, k))
    return q, k, v.view(-1, D), -2 * (g.view(-1, D) if channels else g), beta


@cache
def weight_of(layer: int) -> torch.Tensor:
    return torch.rand(N_CHANNELS, N_TAPS, generator=torch.Generator().manual_seed(layer))


def _inputs(key: StateKey, tensors: Tensors) -> RecurrenceInputs:
    if key.name == "window":
        return ConvInputs(*tensors, weight_of(key.layer))
    return DeltaInputs(*tensors)


def _step(key: StateKey, state: torch.Tensor, inputs: Tensors) -> Tensors:
    if key.name == "window":
        rows = torch.cat((state, inputs[0][None]))
        y = (rows * weight_of(key.layer).double().t()).sum(0)
        return rows[1:], y * torch.sigmoid(y)
    q, k, v, g, beta = inputs
    # tiled pairing: value head j reads key head j mod H_k
    q, k = (t.repeat(N_HEADS // N_KEY_HEADS, 1) for t in (q, k))
    S = g.exp().view(N_HEADS, -1, 1) * state
    u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", S, k))
    S = S + k[:, :, None] * u[:, None, :]
    return S, torch.einsum("hkv,hk->hv", S, q) / math.sqrt(D)


def _delta(state: DeltaState, *, channels: bool) -> Layers:
    window = ConvWindow(N_TAPS, N_CHANNELS)
    return Layers(
        RecurrentLayout.alike((0, 2), state=state, window=window),
        lambda key, token: _of_token(key, token, channels),
        _inputs,
        _step,
    )


HEAD_GATES = _delta(DeltaState(N_KEY_HEADS, N_HEADS, D, grouped=False), channels=False)
CHANNEL_GATES = _delta(
    DeltaState(N_KEY_HEADS, N_HEADS, D, grouped=False, channels=True), channels=True
)
AVERAGES = Layers(
    moving_average.LAYOUT, moving_average.of_token, moving_average.inputs, moving_average.step
)
MAMBA = Layers(
    mamba_layers.MAMBA, mamba_layers.mamba_token, mamba_layers.mamba_inputs, mamba_layers.mamba_step
)
SHORT_CONV = Layers(
    mamba_layers.SHORT_CONV,
    mamba_layers.short_conv_token,
    mamba_layers.short_conv_inputs,
    mamba_layers.short_conv_step,
)
NGRAMS = Layers(ngram_layers.LAYOUT, ngram_layers.of_token, ngram_layers.inputs, ngram_layers.step)
LAYERS = {
    "head gates": HEAD_GATES,
    "channel gates": CHANNEL_GATES,
    "averages": AVERAGES,
    "mamba": MAMBA,
    "short convolution": SHORT_CONV,
    "n-grams": NGRAMS,
}
LAYOUT = HEAD_GATES.layout
_LAYERS_OF = {layers.layout: layers for layers in LAYERS.values()}


@cache
def truth(layout: RecurrentLayout, key: StateKey, tokens: tuple[int, ...]) -> Tensors:
    """State after the tokens and the output of the last one, by the definition in f64."""
    if not tokens:
        return torch.zeros(layout.states[key].shape, dtype=torch.float64), torch.zeros(0)
    before, _ = truth(layout, key, tokens[:-1])
    layers = _LAYERS_OF[layout]
    given = tuple(t.double() for t in layers.of_token(key, tokens[-1]))
    return layers.step(key, before, given)


def ubatch_of(texts: dict[int, list[int]], memory: SnapshotPolicy) -> UBatch:
    """Equally many new tokens for each of the sequences."""
    rows = list(texts.values())
    starts = [memory.seq_pos_max(seq) + 1 for seq in texts]
    positions = [list(range(start, start + len(rows[0]))) for start in starts]
    none = np.zeros(0, np.int64)
    return UBatch(np.array(rows), np.array(positions), tuple(texts), none)


@torch.inference_mode()
def decode(
    memory: SnapshotPolicy, new: dict[int, list[int]], *, by_index: bool = False
) -> list[torch.Tensor]:
    """One ubatch; the output [n_seqs, T, ...] of every state, in the order of Layers.keys."""
    ubatch, layers = ubatch_of(new, memory), _LAYERS_OF[memory.layout]
    assert memory.prepare([ubatch])
    memory.begin(ubatch, by_index=by_index)
    assert by_index or memory.pass_inputs() is None
    out = []
    for key in layers.keys:
        rows = [[layers.of_token(key, token) for token in tokens] for tokens in new.values()]
        given = (
            torch.stack([torch.stack([token[i] for token in row]) for row in rows])
            for i in range(len(rows[0][0]))
        )
        out.append(memory.advance(key, layers.inputs(key, tuple(given))))
    memory.commit()
    return out


def close(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within LIMIT; zeros have to be zeros."""
    return nmse(result, wanted) <= LIMIT if wanted.any() else torch.equal(result.double(), wanted)


def assert_state(memory: SnapshotPolicy, seq: int, text: list[int]) -> None:
    """Position and states are those of the text."""
    assert memory.seq_pos_max(seq) == len(text) - 1
    live = memory.live(seq)
    assert live.keys() == memory.layout.states.keys()
    for key, state in live.items():
        assert close(state, truth(memory.layout, key, tuple(text))[0]), (seq, key)


def assert_outputs(
    out: list[torch.Tensor], row: int, text: list[int], n_new: int, layers: Layers = HEAD_GATES
) -> None:
    """The last n_new tokens' outputs of a text, in row `row` of what decode gave."""
    ends = range(len(text) - n_new + 1, len(text) + 1)
    for key, found in zip(layers.keys, out, strict=True):
        wanted = [truth(layers.layout, key, tuple(text[:end]))[1] for end in ends]
        assert close(found[row], torch.stack(wanted)), key


def copies(memory: SnapshotPolicy, seq: int) -> list[torch.Tensor]:
    return [t.clone() for t in memory.live(seq).values()]


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
