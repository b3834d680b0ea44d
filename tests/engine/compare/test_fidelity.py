"""Fidelity of a compute mode: nothing against itself, little but something for int8."""

from __future__ import annotations

import numpy as np
import pytest

from engine.compare.divergence import greedy_text, measure_fidelity
from engine.errors import Cancelled, OptionError
from engine.session import Session
from resources import DEMO_DRAFT


@pytest.fixture(scope="module")
def f32() -> Session:
    return Session.open(DEMO_DRAFT, compute="f32")


@pytest.fixture(scope="module")
def int8() -> Session:
    return Session.open(DEMO_DRAFT, compute="int8")


def test_a_mode_against_itself_is_exact(f32: Session) -> None:
    tokens = greedy_text(f32, "def f(x):", 20)
    assert len(tokens) == len(f32.prompt("def f(x):").tokens) + 20
    found = measure_fidelity(f32, f32, tokens)
    assert (found.nmse, found.kl, found.top1, found.max_abs) == (0.0, 0.0, 1.0, 0.0)
    assert (found.compute, found.n_tokens) == ("f32", len(tokens) - 1)


def test_means_against_those_done_by_hand(f32: Session, int8: Session) -> None:
    tokens = greedy_text(int8, "import os\n", 30)
    found = measure_fidelity(int8, f32, tokens)
    a = f32.logits(tokens[:-1]).astype(np.float64)
    b = int8.logits(tokens[:-1]).astype(np.float64)
    nmse = ((a - b) ** 2).mean(1) / (a**2).mean(1)
    p, q = (np.exp(x - x.max(1, keepdims=True)) for x in (a, b))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    assert found.nmse == pytest.approx(nmse.mean(), rel=1e-6)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-5)
    assert found.top1 == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    assert found.max_abs == pytest.approx(np.abs(a - b).max())
    assert 0 < found.nmse < 0.1
    assert found.compute == "int8"


def test_one_token_says_nothing(f32: Session) -> None:
    with pytest.raises(OptionError, match="two tokens"):
        measure_fidelity(f32, f32, [5])


def test_it_can_be_cancelled(f32: Session) -> None:
    with pytest.raises(Cancelled):
        greedy_text(f32, "def f(x):", 20, lambda: True)
