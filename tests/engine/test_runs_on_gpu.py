"""Runs on a CUDA device against runs on the processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.session import Session
from tests.support.golden_runs import (
    DATA,
    MODELS,
    MTP_MODELS,
    decode,
    options_of,
    prompt_of,
    session,
    tokens_of,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; fake tensors stand for one in test_rounds_on_cuda.py")


def on_cuda(name: str, compute: str = "f32") -> Session:
    return Session.open(DATA / f"{name}.gguf", compute=compute, device="cuda")


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_f32(name):
    prompt = prompt_of(name).tokens
    mine, exact = on_cuda(name).logits(prompt), session(name).logits(prompt)
    assert np.abs(mine - exact).max() < 1e-3


@pytest.mark.parametrize("compute", ["bf16", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_other_modes(name, compute):
    prompt = prompt_of(name).tokens
    mine, exact = on_cuda(name, compute).logits(prompt), session(name).logits(prompt)
    assert np.square(mine - exact).mean() < 1e-2 * np.square(exact).mean()


@pytest.mark.parametrize("policy", ["ring", "planes", "carry", "replay", "checkpoint"])
@pytest.mark.parametrize("name", MTP_MODELS)
def test_speculation_keeps_the_tokens(name, policy):
    opened = on_cuda(name)
    plain = decode(opened, [prompt_of(name)], options_of(30))
    drafted = decode(opened, [prompt_of(name)], options_of(30, "draft-mtp", rollback=policy))
    assert tokens_of(drafted) == tokens_of(plain)
    assert tokens_of(plain) == tokens_of(decode(session(name), [prompt_of(name)], options_of(30)))
