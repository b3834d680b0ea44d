"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floats hold NaN, so that an unwritten output is seen."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
            made = make(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return make_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(42)
