"""Recurrences by themselves: every way of advancing leaves the same, a log folds to the states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.gguf.file import GgufFile
from engine.model.families import read_config
from engine.model.info import describe
from engine.model.mixers import layout_of
from engine.model.recurrence import RecurrentLayout, RowNumbers, StateKey
from tests.support.recurrent_texts import LAYERS, close, truth

TEXTS = (0, 1, 2, 3, 4), (10, 11, 12, 13, 14)
CASES = [(name, key) for name, layers in LAYERS.items() for key in layers.keys if key.layer < 2]
every_state = pytest.mark.parametrize(("name", "key"), CASES, ids=lambda part: str(part))


def given(name: str, key: StateKey):
    """The recurrence, zero states of two sequences, and both texts as inputs."""
    layers = LAYERS[name]
    rows = [[layers.of_token(key, token) for token in text] for text in TEXTS]
    tensors = tuple(
        torch.stack([torch.stack([token[i] for token in row]) for row in rows])
        for i in range(len(rows[0][0]))
    )
    one = layers.layout.states[key]
    return one, torch.zeros(2, *one.shape), layers.inputs(key, tensors)


def state(name: str, key: StateKey, n_tokens: int) -> torch.Tensor:
    return torch.stack([truth(LAYERS[name].layout, key, text[:n_tokens])[0] for text in TEXTS])


@every_state
def test_a_log_folds_to_the_state_behind_any_of_its_tokens(name, key):
    one, start, inputs = given(name, key)
    o, entries = one.log(inputs, start)
    assert close(o, one.into(inputs, start, [torch.empty_like(start)]).double())
    assert [tuple(rows.shape) for rows in entries] == [(2, 5, *size) for size in one.entry]
    for n in range(6):
        poisoned = [rows.clone() for rows in entries]
        for rows in poisoned:
            rows[:, n:] = float("nan")
        assert close(one.fold(start, poisoned, n), state(name, key, n))
        folded = one.fold(start, poisoned, torch.full((2,), n))
        assert close(folded, state(name, key, n))
    there = start.clone()
    assert one.fold(there, entries, torch.tensor([4, 1]), out=there) is there
    wanted = torch.stack((state(name, key, 4)[0], state(name, key, 1)[1]))
    assert close(there, wanted)


@every_state
def test_rows_of_a_pool_by_views_and_by_numbers(name, key):
    one, start, inputs = given(name, key)
    write, read = [[1, 2], [5, 3]], [4, 0]
    wanted = {1: (0, 4), 2: (0, 5), 5: (1, 4), 3: (1, 5)}
    for numbers in (False, True):
        pool = torch.zeros(6, *one.shape)
        in_order = torch.tensor(write)
        if numbers:
            rows = RowNumbers(torch.tensor(read), in_order.flip(1), in_order)
            o = one.by_index(inputs, pool, rows)
        else:
            views = pool.unsqueeze(1).unbind(0)
            o = one.in_rows(inputs, pool, views, [4, None], write, in_order)
        assert close(o, one.into(inputs, start, [torch.empty_like(start)]).double())
        for row, (seq, n) in wanted.items():
            assert close(pool[row], state(name, key, n)[seq])
        assert not pool[[0, 4]].any()


def test_a_layout_knows_its_states(golden_path):
    with GgufFile.open(golden_path("qwen35-a-f32")) as file:
        layout, info = layout_of(read_config(file)), describe(file)
    assert layout.n_bytes == info.state_bytes
    assert layout.entry_bytes == info.log_bytes_per_token
    zeros = {key: torch.zeros(one.shape) for key, one in layout.states.items()}
    assert layout.fits(zeros)
    assert not layout.fits(dict(list(zeros.items())[1:]))
    key = StateKey(layout.layers[0], "window")
    assert not layout.fits({**zeros, key: zeros[key][1:]})


def test_the_worst_state_stands_for_a_layer():
    layout = RecurrentLayout(LAYERS["averages"].layout.states)
    errors = dict(zip(layout.states, (1.0, 3.0, 2.0, 0.5, 4.0), strict=True))
    assert layout.worst(errors, windows=False) == [3.0, 0.5]
    assert layout.worst(errors, windows=True) == [2.0, 4.0]


def test_a_layer_without_a_window_has_no_error_of_one():
    states = LAYERS["averages"].layout.states
    key, recurrence = next((k, one) for k, one in states.items() if not one.is_window)
    layout = RecurrentLayout({key: recurrence})
    assert layout.worst({key: 0.0}, windows=False) == [0.0]
    assert np.isnan(layout.worst({key: 0.0}, windows=True)).all()
