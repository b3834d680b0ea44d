"""Random histories of attention cells against lists of what every sequence should hold."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Span, UBatch, make_ubatch
from engine.errors import ContextFullError
from engine.memory.kv import AttentionKV, AttentionState
from engine.model.memory import AttentionView
from engine.model.parts import CellSize, StateKey

CPU = torch.device("cpu")
N_SEQS = 3
WINDOW = 4
LAYERS = {
    0: CellSize(2, 3, 3),
    4: CellSize(1, 4, 2, WINDOW),
    StateKey(4, "more"): CellSize(1, 2, 0),
}
TURNED = (0, 4)
MARK = 4096  # a key gains this much for each position it is shifted
PATTERN = 0.18579  # what bytes of 0x3E are as a float32


@dataclass(frozen=True)
class Cell:
    """payload is unique to a written token; number tells cells apart that are alike."""

    pos: int
    payload: int
    shifted: int
    number: int

    @property
    def content(self) -> tuple[int, int, int]:
        """Position, key and value as numbers."""
        return self.pos, self.payload + MARK * self.shifted, -self.payload


class Model:
    """What attention memory means: a list of cells per sequence, and how many fit."""

    def __init__(self, n_ctx: int, unified: bool) -> None:
        self.n_ctx, self.unified = n_ctx, unified
        self.held: list[list[Cell]] = [[] for _ in range(N_SEQS)]
        self.numbers = itertools.count()

    def new(self, pos: int, payload: int, shifted: int = 0) -> Cell:
        return Cell(pos, payload, shifted, next(self.numbers))

    def used(self, held: list[list[Cell]]) -> int:
        return len({cell.number for cells in held for cell in cells})

    def fits(self, held: list[list[Cell]]) -> bool:
        if self.unified:
            return self.used(held) <= N_SEQS * self.n_ctx
        return all(len(cells) <= self.n_ctx for cells in held)

    def copied(self, cells: list[Cell]) -> list[Cell]:
        """As another sequence holds them after a copy."""
        return cells if self.unified else [self.new(c.pos, c.payload, c.shifted) for c in cells]

    def changed(self, seq: int, cells: list[Cell]) -> bool:
        """Let a sequence hold these instead, if they fit."""
        held = [*self.held[:seq], cells, *self.held[seq + 1 :]]
        if fits := self.fits(held):
            self.held = held
        return fits


def in_range(pos: int, p0: int, p1: int) -> bool:
    return pos >= p0 and (p1 < 0 or pos < p1)


def ubatch_of(seqs: list[int], starts: list[int], n: int) -> UBatch:
    spans = [Span(s, p, [0] * n, []) for s, p in zip(seqs, starts, strict=True)]
    return make_ubatch(spans, range(len(seqs)), [0] * len(seqs), n, "")


def contents(state: AttentionState) -> list[tuple[int, int, int]]:
    """What a saved sequence holds; all layers, heads and dimensions must agree."""
    rows = []
    for i, pos in enumerate(state.positions.tolist()):
        key, value = state.k[0][i, 0, 0].item(), state.v[0][i, 0, 0].item()
        for layer, keys in enumerate(state.k):
            turned = layer < len(TURNED)
            assert (keys[i] == (key if turned else -value) + layer / 2).all()
        for layer, values in enumerate(state.v):
            assert (values[i] == value - layer / 2).all()
        rows.append((pos, int(key), int(value)))
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    return sorted(rows)


def seen(view: AttentionView, row: int, token: int, layer: int) -> list[tuple[int, ...]]:
    """Positions, keys and values that a token may look at."""
    mask = view.mask[row, token]
    assert view.positions is not None
    keys, values = view.k[row, -1, mask, -1] - layer / 2, view.v[row, -1, mask, -1] + layer / 2
    columns = view.positions[row, mask], keys.int(), values.int()
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


class History:
    """A memory and its model, moved together by drawn operations."""

    def __init__(self, data: st.DataObject, poison: float) -> None:
        self.draw = data.draw
        unified = self.draw(st.booleans(), label="unified")
        n_ctx = self.draw(st.sampled_from([6, 17, 300]), label="n_ctx")
        self.kv = AttentionKV(
            LAYERS,
            N_SEQS,
            n_ctx,
            CPU,
            unified=unified,
            in_order=self.draw(st.booleans(), label="in_order"),
            rotate=dict.fromkeys(TURNED, lambda k, shift: k + MARK * shift),
        )
        self.kv.poison(poison)
        self.model = Model(n_ctx, unified)
        self.payloads = itertools.count()
        self.saves: list[tuple[AttentionState, list[Cell]]] = []
        self.most = 5 if n_ctx < 100 else 140

    def step(self) -> None:
        operations = (self.write, self.write, self.rm, self.cp, self.keep, self.add, self.save)
        self.draw(st.sampled_from([*operations, self.put]))()

    def seq(self) -> int:
        return self.draw(st.integers(0, N_SEQS - 1))

    def range(self) -> tuple[int, int]:
        top = max((c.pos for cells in self.model.held for c in cells), default=0)
        return self.draw(st.integers(-1, top + 1)), self.draw(st.integers(-1, top + 2))

    def ubatch(self) -> UBatch:
        seqs = self.draw(st.lists(st.integers(0, N_SEQS - 1), min_size=1, unique=True))
        starts = [max((c.pos for c in self.model.held[s]), default=-1) + 1 for s in seqs]
        if self.draw(st.integers(0, 4)) == 0:  # a faulty caller: positions that exist, or a gap
            starts = [self.draw(st.integers(0, start + 2)) for start in starts]
        return ubatch_of(seqs, starts, self.draw(st.integers(1, self.most)))

    def write(self) -> None:
        kv, model, ubatch = self.kv, self.model, self.ubatch()
        new = [
            [model.new(pos, next(self.payloads)) for pos in row]
            for row in ubatch.positions.tolist()
        ]
        held = list(model.held)
        for seq, cells in zip(ubatch.seq_ids, new, strict=True):
            held[seq] = held[seq] + cells
        assert kv.prepare([ubatch]) == model.fits(held)
        if not model.fits(held):
            with pytest.raises(ContextFullError):
                kv.begin(ubatch)
            return
        model.held = held
        kv.begin(ubatch, by_index=self.draw(st.booleans()))
        key = torch.tensor([[c.payload for c in cells] for cells in new])[..., None, None].float()
        for i, (layer, size) in enumerate(LAYERS.items()):
            k = (key + i / 2).expand(-1, -1, size.n_heads, size.k_dim)
            v = (-key - i / 2).expand(-1, -1, size.n_heads, size.v_dim) if size.v_dim else None
            view = kv.update(layer, k, v)
            assert torch.isfinite(view.k).all() and torch.isfinite(view.v).all()
            for row, cells in enumerate(new):
                for token in {0, len(cells) - 1}:
                    pos, window = cells[token].pos, size.window or math.inf
                    visible = [
                        c.content
                        for c in held[ubatch.seq_ids[row]]
                        if c.pos <= pos and pos - c.pos < window
                    ]
                    want = [c if size.v_dim else (c[0], -c[2], -c[2]) for c in visible]
                    at = 0 if size.v_dim else i  # keys stand for values, which are the negative
                    got = seen(view, row, token, i)
                    assert [(c[0], c[1], c[2] - at) for c in got] == sorted(want)

    def rm(self) -> None:
        seq, (p0, p1) = self.draw(st.integers(-1, N_SEQS - 1)), self.range()
        assert self.kv.seq_rm(seq, p0, p1)
        for s in range(N_SEQS):
            if seq in (-1, s):
                self.model.held[s] = [c for c in self.model.held[s] if not in_range(c.pos, p0, p1)]

    def cp(self) -> None:
        src, dst = self.seq(), self.seq()
        self.kv.seq_cp(src, dst)
        if src != dst:
            self.model.held[dst] = self.model.copied(self.model.held[src])

    def keep(self) -> None:
        seq = self.seq()
        self.kv.seq_keep(seq)
        self.model.held = [cells if s == seq else [] for s, cells in enumerate(self.model.held)]

    def add(self) -> None:
        model, seq, (p0, p1) = self.model, self.seq(), self.range()
        shift = self.draw(st.integers(-4, 4))
        others = {c.number for s in range(N_SEQS) if s != seq for c in model.held[s]}
        cells = []
        n_copies = 0
        for c in model.held[seq]:
            if shift and in_range(c.pos, p0, p1):
                if c.pos + shift < 0:
                    continue
                n_copies += c.number in others
                moved = replace(c, pos=c.pos + shift, shifted=c.shifted + shift)
                c = replace(moved, number=next(model.numbers))
            cells.append(c)
        room = N_SEQS * model.n_ctx - model.used(model.held)
        if n_copies > room:
            with pytest.raises(ContextFullError):
                self.kv.seq_add(seq, p0, p1, shift)
            return
        self.kv.seq_add(seq, p0, p1, shift)
        model.held[seq] = cells

    def save(self) -> None:
        seq = self.seq()
        self.saves.append((self.kv.state(seq), self.model.held[seq]))

    def put(self) -> None:
        if not self.saves:
            return
        state, cells = self.draw(st.sampled_from(self.saves))
        seq = self.seq()
        copies = [self.model.new(c.pos, c.payload, c.shifted) for c in cells]
        if self.model.changed(seq, copies):
            self.kv.put(seq, state)
        else:
            with pytest.raises(ContextFullError):
                self.kv.put(seq, state)

    def check(self) -> None:
        for seq, cells in enumerate(self.model.held):
            assert contents(self.kv.state(seq)) == sorted(c.content for c in cells)
            positions = [c.pos for c in cells]
            assert self.kv.used(seq) == len(positions)
            assert self.kv.seq_pos_max(seq) == max(positions, default=-1)
            assert self.kv.duplicates(seq) == len(positions) - len(set(positions))
        for state, cells in self.saves:
            assert contents(state) == sorted(c.content for c in cells)


@pytest.mark.parametrize("poison", [math.nan, PATTERN, 0.0])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_sequences_hold_what_their_history_says(poison, data):
    history = History(data, poison)
    for _ in range(data.draw(st.integers(1, 14))):
        history.step()
        history.check()


def everything(kv: AttentionKV) -> list[bytes]:
    table, storage = kv._table, kv._storage
    tensors = [t.numpy().tobytes() for t in storage.tensors()]
    counts = repr((table.end, table.used, storage._readable, storage.capacity)).encode()
    return [*tensors, table._pos.tobytes(), table._owners.tobytes(), counts]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_dry_run_foretells_and_changes_nothing(data):
    history = History(data, math.nan)
    for _ in range(data.draw(st.integers(0, 6))):
        history.step()
    ubatches = [history.ubatch() for _ in range(data.draw(st.integers(1, 4)))]
    before = everything(history.kv)
    foretold = history.kv.prepare(ubatches)
    assert everything(history.kv) == before
    trial = copy.deepcopy(history.kv)
    try:
        for ubatch in ubatches:
            unchanged = everything(trial)
            trial.begin(ubatch)
    except ContextFullError:
        assert not foretold
        assert everything(trial) == unchanged
    else:
        assert foretold


@pytest.mark.parametrize("unified", [False, True])
def test_a_dry_run_of_a_sequence_that_cannot_exist(unified):
    kv = AttentionKV(LAYERS, N_SEQS, 8, CPU, unified=unified)
    assert kv.prepare([])
    assert not kv.prepare([ubatch_of([N_SEQS], [0], 1)])
