"""Shares of what one row keeps, writes and takes off, fitted to a wrong output or state, and errors
that are of the size of rounding."""

from __future__ import annotations

import torch

from engine.conform.cases import Shape
from engine.conform.reference import Row, terms

# Which power of one mistaken factor each part has: what is kept, what is written, and what is taken
# off (delta rules) or D x (Mamba-2)
_POWERS = {
    True: {
        ("wrong-gate", "the decay"): (1, 0, 0),
        ("wrong-gate", "dt (or B)"): (0, 1, 0),
        ("wrong-scale", "C"): (1, 1, 0),
        ("wrong-term", "D"): (0, 0, 1),
    },
    False: {
        ("wrong-norm", "q"): (1, 1, 1),
        ("wrong-gate", "the decay"): (1, 0, 1),
        ("wrong-gate", "beta"): (0, 1, 1),
        ("wrong-norm", "k"): (0, 1, 2),
        ("wrong-term", "v"): (0, 1, 0),
        ("wrong-gate", "what is taken off v"): (0, 0, 1),
    },
}


def fitted(
    shape: Shape, state: torch.Tensor, row: Row, seen: torch.Tensor, bound: float, last: bool
) -> tuple[str, str] | None:
    """Cause and sentence where a row's output has the right parts in other shares, head by head;
    last: seen is the state [heads, …] after it."""
    if shape.recurrence == "conv":
        return None
    row, mamba = terms(shape, row), shape.recurrence == "mamba2"
    key, kept = row["key"][:, :, None], row["decay"] * state
    parts = [kept, key * (row["beta"] * row["value"])[:, None]]
    if not mamba:
        parts.append(-key * (row["beta"] * (key * kept).sum(1))[:, None])
    if not last:
        parts = [(row["read"][:, :, None] * part).sum(1) for part in parts]
        parts += [row["skip"]] * mamba
    basis = torch.stack([part.flatten(1) for part in parts], -1)
    wanted = seen.reshape(len(state), -1, 1)
    share = torch.linalg.lstsq(basis, wanted).solution
    limit = 4 * bound * max(1.0, float(wanted.abs().max()))
    off = (basis @ share - wanted).abs().max()
    share, weight = share[..., 0], basis.abs().amax(1)
    near = ((share - 1).abs() < 1e-2) | ((share - 1).abs() * weight <= limit)
    if basis.shape[1] < 2 * len(parts) or not off <= limit or near.all():
        return None  # or as of rounding
    for (cause, name), powers in _POWERS[mamba].items():
        factor = share[:, powers.index(1) % len(parts)]
        alike = torch.stack([factor**n for n in powers[: len(parts)]], 1)
        if ((alike - share).abs() * weight <= limit).all():
            head = int((factor - 1).abs().argmax())
            return (
                cause,
                f"{name} of head {head} is {float(factor[head]):.4g} times what it should be",
            )
    return "wrong-gate", "what is kept, written and taken off have other shares than they should"


def of_rounding(seen: torch.Tensor, wanted: torch.Tensor) -> str:
    """Which precision has errors of this size in most values; empty where none has."""
    error = (seen - wanted).abs()
    size = float(error.square().mean().sqrt() / wanted.square().mean().sqrt())
    spread = float((error > error.square().mean().sqrt() / 8).double().mean())
    kind = "float16 or TF32" if size < 6e-4 else "bfloat16"
    if not 3e-5 < size < 1.5e-2 or spread < 0.5:
        return ""
    return f"{size:.1g} of the values' size in most of them, as of rounding to {kind}"
