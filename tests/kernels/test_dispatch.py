"""The choice of an implementation."""

from __future__ import annotations

import pytest

from kernels.dispatch import VARIABLE, pick


def naive() -> str:
    return "naive"


def fast() -> str:
    return "torch"


@pytest.mark.parametrize("value", ["naive", "torch"])
def test_the_variable_names_the_implementation(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert pick(naive, fast)() == value


@pytest.mark.parametrize("value", [None, ""])
def test_torch_is_the_default(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert pick(naive, fast)() == "torch"


def test_an_unknown_name_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match=r"DRAFTSCOPE_KERNELS=cuda .*torch, naive"):
        pick(naive, fast)
