"""Rows rounded to two bits through PyTorch."""

from __future__ import annotations

import torch

from kernels.linear.two_bits.blocks import BLOCK, GROUP, MOST, MOST_SCALE


def two_bits(rows: torch.Tensor) -> torch.Tensor:
    """See kernels.linear.two_bits.two_bits."""
    groups = rows.unflatten(-1, (-1, BLOCK // GROUP, GROUP))
    least = groups.amin(-1).clamp_max(0).abs_()
    steps = (groups.amax(-1) + least).div_(MOST)
    step_scale, steps = _scaled(steps)
    least_scale, leasts = _scaled(least)
    # what the rounded steps and minimums say, so that the integers make up for them
    step = (steps * step_scale.unsqueeze(-1)).clamp_min_(torch.finfo(rows.dtype).tiny)
    least = leasts * least_scale.unsqueeze(-1)
    levels = ((groups + least.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, MOST)
    fours = levels.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    shifts = torch.tensor([1, 4, 16, 64], dtype=torch.uint8).view(4, 1)
    integers = (fours * shifts).sum(-2, dtype=torch.uint8).flatten(-2)
    scales = (steps + leasts * (MOST_SCALE + 1)).to(torch.uint8)
    halves = torch.stack((step_scale, least_scale), -1).half().view(torch.uint8)
    return torch.cat((scales, integers, halves), -1).flatten(-2)


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., groups], not negative, as a scale that float16 holds, [...], and integers 0..15."""
    scale = (x.amax(-1) / MOST_SCALE).half().float()
    integers = x / scale.clamp_min(torch.finfo(x.dtype).tiny).unsqueeze(-1)
    return scale, integers.round_().clamp_(0, MOST_SCALE)
