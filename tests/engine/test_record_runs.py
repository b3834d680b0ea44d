"""Greedy runs in the form of a device, on the processor: drafts are looked at with the record of
the rows that verify them, and every table is as of runs whose host looks at each draft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.decode import scheduler
from engine.machine.graphs import VARIABLE
from engine.options import Prompt
from engine.run import Run
from tests.support.golden_runs import MTP_MODELS, decode, options_of, prompt_of, session
from tests.support.recorded_runs import assert_same

MTP = MTP_MODELS[0]
POLICIES = ["planes", "carry", "ring", "replay", "checkpoint"]


@pytest.fixture(autouse=True)
def without_recordings(monkeypatch):
    """A pass on the processor could not record how the largest logits are picked."""
    monkeypatch.setenv(VARIABLE, "off")


def both(monkeypatch, name, prompts, options, draft=None) -> tuple[Run, Run]:
    """The run as it is, and in the form of a device."""
    plain = decode(session(name, draft), prompts, options)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "drafts_may_stay", lambda device: True)
        return decode(session(name, draft), prompts, options), plain


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", ["draft-mtp", "ngram-mod", "none"])
@pytest.mark.thinned(16)
def test_every_table_is_the_same(monkeypatch, policy, drafter):
    types = () if drafter == "none" else (drafter,)
    options = options_of(40, *types, rollback=policy)
    assert_same(*both(monkeypatch, MTP, [prompt_of(MTP)], options))


def test_as_graphs_of_a_device():
    """runs_in_device_form.py in a process whose kernels are those of torch, which a double of
    CUDA's graphs records."""
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(here.with_name("runs_in_device_form.py"))],
        cwd=here.parents[2],
        env={**os.environ, "DRAFTSCOPE_KERNELS": "torch", VARIABLE: ""},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", MTP_MODELS[1:])
def test_other_models(monkeypatch, name):
    options = options_of(30, "draft-mtp", rollback="planes")
    assert_same(*both(monkeypatch, name, [prompt_of(name)], options))


def test_several_sequences_of_several_lengths_with_a_draft_model(monkeypatch):
    tokens = prompt_of(MTP).tokens
    prompts = [Prompt(tokens[:n]) for n in (len(tokens), 5, 9)]
    options = options_of(24, "draft-simple", rollback="planes", parallel=2)
    assert_same(*both(monkeypatch, MTP, prompts, options, "qwen35-a-f32"))


def test_a_banned_token_is_not_chosen(monkeypatch):
    """The largest logit is one of a token that ends texts: the host looks for the next one."""
    options = options_of(30, "draft-mtp", rollback="planes", ignore_eos=True)
    assert_same(*both(monkeypatch, MTP, [prompt_of(MTP)], options))
