"""A module like those with Triton versions, without Triton: it notes how it is called."""

from __future__ import annotations

calls: list[int] = []


def implementation(x: object, *, more: int = 0) -> str:
    calls.append(more)
    return "triton"
