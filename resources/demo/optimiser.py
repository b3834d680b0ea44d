"""Muon for the matrices inside the blocks, Adam for everything else."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

# quintic Newton-Schulz coefficients of Jordan et al., "Muon" (2024)
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of `matrices` [n, rows <= cols]."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x


class Optimiser:
    """Both update rules behind one `step`; rates are set per step by the schedule."""

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
    def step(self, scale: float, weight_decay: float = 0.05, momentum: float = 0.95) -> None:
        """One update with both rates times `scale`, then clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        rate = self.muon_rate * scale
        by_shape: dict[tuple[int, int], list[str]] = defaultdict(list)
        updates: dict[str, Tensor] = {}
        for name, parameter in self.matrices.items():
            if parameter.grad is None:
                continue
            buffer = self.momentum[name].lerp_(parameter.grad, 1 - momentum)
            update = parameter.grad.lerp(buffer, momentum)
            rows, columns = update.shape
            updates[name] = update if rows <= columns else update.mT
            by_shape[min(rows, columns), max(rows, columns)].append(name)
        for names in by_shape.values():  # equal shapes in one batched product
            for name, update in zip(
                names, orthogonalise(torch.stack([updates[n] for n in names])), strict=True
            ):
                parameter = self.matrices[name]
                rows, columns = parameter.shape
                direction = update if rows <= columns else update.mT
                parameter.mul_(1 - rate * weight_decay)
                parameter.add_(direction, alpha=-rate * max(1.0, rows / columns) ** 0.5)
                parameter.grad = None

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
