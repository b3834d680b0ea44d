"""Layers that keep their last tokens, and the window of a dilated convolution, with definitions."""

from __future__ import annotations

from functools import cache

import torch

from engine.model.recurrence import (
    ConvInputs,
    ConvWindow,
    RecurrenceInputs,
    RecurrentLayout,
    StateKey,
    TokenInputs,
    TokenWindow,
)

N_GRAM, N_TAPS, N_CHANNELS = 3, 4, 6
WIDTH = (N_TAPS - 1) * N_GRAM
Tensors = tuple[torch.Tensor, ...]

LAYOUT = RecurrentLayout.alike(
    (0, 1), tokens=TokenWindow(N_GRAM), ngrams=ConvWindow(WIDTH + 1, N_CHANNELS)
)


def of_token(key: StateKey, token: int) -> Tensors:
    if key.name == "tokens":
        return (torch.tensor(token + key.layer),)
    generator = torch.Generator().manual_seed(1000 * key.layer + token)
    return (torch.rand(N_CHANNELS, generator=generator),)


@cache
def _taps(layer: int) -> torch.Tensor:
    return torch.rand(N_CHANNELS, N_TAPS, generator=torch.Generator().manual_seed(layer))


def inputs(key: StateKey, tensors: Tensors) -> RecurrenceInputs:
    if key.name == "tokens":
        return TokenInputs(*tensors, *tensors)
    apart = torch.zeros(N_CHANNELS, WIDTH + 1)
    apart[:, ::N_GRAM] = _taps(key.layer)
    return ConvInputs(*tensors, apart)


def step(key: StateKey, state: torch.Tensor, given: Tensors) -> Tensors:
    if key.name == "tokens":
        rows = torch.cat((state, given[0].view(1, 1) + 1))
        return rows[1:], rows.flip(0)[:, 0] - 1
    rows = torch.cat((state, given[0][None]))
    taps = _taps(key.layer).double()
    y = sum(taps[:, k] * rows[k * N_GRAM] for k in range(N_TAPS))
    return rows[1:], y * torch.sigmoid(y)
