"""Layers of Mamba-2, and layers that are nothing but a short convolution, with their definitions.

The first have a state of three axes, none of them alike, and a window with a bias; the second no
state next to their window.
"""

from __future__ import annotations

from functools import cache

import torch

from engine.model.recurrence import (
    ConvInputs,
    ConvWindow,
    RecurrenceInputs,
    RecurrentLayout,
    StateKey,
)
from engine.model.recurrent_states import SsdInputs, SsdState

N_HEADS, HEAD_DIM, N_GROUPS, D_STATE, N_TAPS = 4, 3, 2, 5, 4
N_CHANNELS = N_HEADS * HEAD_DIM + 2 * N_GROUPS * D_STATE
SHORT_TAPS, N_EMBD = 3, 7
Tensors = tuple[torch.Tensor, ...]

MAMBA = RecurrentLayout.alike(
    (0, 2),
    state=SsdState(N_HEADS, HEAD_DIM, N_GROUPS, D_STATE),
    window=ConvWindow(N_TAPS, N_CHANNELS),
)
SHORT_CONV = RecurrentLayout.alike((1, 3), window=ConvWindow(SHORT_TAPS, N_EMBD, activate=False))


def _drawn(seed: int, *sizes: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sum(sizes), generator=generator).split(sizes)


@cache
def mamba_token(key: StateKey, token: int) -> Tensors:
    written, groups = N_HEADS * HEAD_DIM, N_GROUPS * D_STATE
    row, x, dt, g, B, C = _drawn(
        1000 * key.layer + token, N_CHANNELS, written, N_HEADS, N_HEADS, groups, groups
    )
    if key.name == "window":
        return (row,)
    B, C = (part.view(N_GROUPS, D_STATE) - 0.3 for part in (B, C))
    return x.view(N_HEADS, HEAD_DIM), dt, -2 * g, B, C


@cache
def _of_layer(key: StateKey) -> Tensors:
    """Taps and bias of a window, or D of a state."""
    if key.name == "state":
        return _drawn(key.layer, N_HEADS)
    taps, bias = _drawn(key.layer, N_TAPS * N_CHANNELS, N_CHANNELS)
    return taps.view(N_CHANNELS, N_TAPS), bias


def mamba_inputs(key: StateKey, tensors: Tensors) -> RecurrenceInputs:
    make = ConvInputs if key.name == "window" else SsdInputs
    return make(*tensors, *_of_layer(key))


def mamba_step(key: StateKey, state: torch.Tensor, given: Tensors) -> Tensors:
    if key.name == "window":
        taps, bias = (part.double() for part in _of_layer(key))
        rows = torch.cat((state, given[0][None]))
        y = (rows * taps.t()).sum(0) + bias
        return rows[1:], y * torch.sigmoid(y)
    x, dt, g, B, C = given
    B, C = (part.repeat_interleave(N_HEADS // N_GROUPS, 0) for part in (B, C))
    S = g.exp()[:, None, None] * state + torch.einsum("h,hp,hn->hpn", dt, x, B)
    (D,) = _of_layer(key)
    return S, torch.einsum("hpn,hn->hp", S, C) + D.double()[:, None] * x


@cache
def short_conv_token(key: StateKey, token: int) -> Tensors:
    return _drawn(1000 * key.layer + token, N_EMBD)


@cache
def _short_taps(layer: int) -> torch.Tensor:
    return _drawn(layer, SHORT_TAPS * N_EMBD)[0].view(N_EMBD, SHORT_TAPS)


def short_conv_inputs(key: StateKey, tensors: Tensors) -> RecurrenceInputs:
    return ConvInputs(*tensors, _short_taps(key.layer))


def short_conv_step(key: StateKey, state: torch.Tensor, given: Tensors) -> Tensors:
    rows = torch.cat((state, given[0][None]))
    return rows[1:], (rows * _short_taps(key.layer).double().t()).sum(0)
