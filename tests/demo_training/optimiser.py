"""Muon for the matrices inside the blocks, Adam for everything else."""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.demo_training.model import HAS_BF16

# quintic Newton-Schulz coefficients of Jordan et al., "Muon" (2024)
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """A nearly orthogonal matrix with the singular vectors of `matrix` [rows <= columns].

    In bf16 where the CPU multiplies that fast: in f32 it would cost as much as the gradients.
    """
    x = matrix / (matrix.norm() + 1e-7)
    if HAS_BF16:
        x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.float()


class Optimiser:
    """Both update rules in one `step`; rates are set per step by the schedule."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float) -> None:
        self.muon_rate = muon_rate
        self.adam_rate = adam_rate
        self.matrices: dict[str, nn.Parameter] = {}
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            wide = parameter.ndim == 2 and min(parameter.shape) >= 32
            if wide and "token_embd" not in name:
                self.matrices[name] = parameter
            else:
                others.append(parameter)
        self.momentum = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(
        self, scale: float, pool: Executor, weight_decay: float = 0.05, momentum: float = 0.95
    ) -> None:
        """One update with both rates times `scale`, then clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        rate = self.muon_rate * scale
        chosen = {n: p for n, p in self.matrices.items() if p.grad is not None}
        directions = pool.map(
            partial(self._direction, momentum=momentum),
            chosen.values(),
            [self.momentum[n] for n in chosen],
        )
        for parameter, direction in zip(chosen.values(), directions, strict=True):
            rows, columns = direction.shape
            parameter.mul_(1 - rate * weight_decay)
            parameter.add_(direction, alpha=-rate * max(1.0, rows / columns) ** 0.5)
            parameter.grad = None

    @staticmethod
    @torch.no_grad()  # holds for one thread
    def _direction(parameter: nn.Parameter, buffer: Tensor, momentum: float) -> Tensor:
        """The update of one matrix; moves its momentum on."""
        assert parameter.grad is not None
        buffer.lerp_(parameter.grad, 1 - momentum)
        update = parameter.grad.lerp(buffer, momentum)
        if update.shape[0] <= update.shape[1]:
            return orthogonalise(update)
        return orthogonalise(update.mT).mT

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, buffer in state["momentum"].items():
            self.momentum[name].copy_(buffer)
        self.adam.load_state_dict(state["adam"])


def decay(step: int, n_steps: int, start: float, warm_up: int = 30, end: float = 0.02) -> float:
    """Rate factor: linear warm-up, 1, then linear to `end` from fraction `start` of the run."""
    progress = (step - start * n_steps) / max(1.0, (1 - start) * n_steps)
    return min((step + 1) / warm_up, 1.0) * (1 - (1 - end) * min(max(progress, 0.0), 1.0))
