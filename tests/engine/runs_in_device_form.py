"""Runs in the form of a CUDA device have every table of runs whose host looks at each step.

test_record_runs.py runs this in a process of its own, where kernels are those of torch.
"""

from __future__ import annotations

import pytest

from engine.memory.hybrid import MemoryShelf
from engine.options import Prompt
from tests.support.device_form import device_form, host_form
from tests.support.golden_runs import MTP_MODELS, decode, options_of, prompt_of, session
from tests.support.recorded_runs import assert_same

POLICIES = ["planes", "carry", "ring", "replay", "checkpoint"]
DRAFTERS = [(), ("ngram-mod",), ("draft-simple",)]
RUNS = [*((policy, ("draft-mtp",)) for policy in POLICIES), *(("planes", x) for x in DRAFTERS)]


@pytest.fixture(autouse=True)
def with_new_memory(monkeypatch):
    monkeypatch.setattr(MemoryShelf, "take", lambda self, key, make: make())


def compared(monkeypatch, name, prompts, options, draft=None):
    """The tape of the run in the form of a device, and its number of rounds."""
    with host_form(monkeypatch):
        plain = decode(session(name, draft), prompts, options)
    with device_form(monkeypatch) as tape:
        run = decode(session(name, draft), prompts, options)
    assert_same(run, plain)
    return tape, len(run.trace.rounds)


@pytest.mark.parametrize(("policy", "types"), RUNS)
def test_policies_and_drafters(monkeypatch, policy, types):
    name, draft = MTP_MODELS[0], "qwen35-a-f32" if types == ("draft-simple",) else None
    options = options_of(40, *types, rollback=policy)
    tape, n_rounds = compared(monkeypatch, name, [prompt_of(name)], options, draft)
    assert tape.n_replayed > n_rounds / 2


@pytest.mark.parametrize("name", [MTP_MODELS[0], MTP_MODELS[2]])  # no experts: on the host here
def test_a_round_is_two_replays(monkeypatch, name):
    """A draft and a verification, once the widths have been seen."""
    options = options_of(60, "draft-mtp", rollback="planes")
    tape, n_rounds = compared(monkeypatch, name, [prompt_of(name)], options)
    assert tape.n_replayed + 2 * tape.n_recorded <= 2 * n_rounds
    assert tape.n_replayed > n_rounds


@pytest.mark.parametrize("kv", ["per-seq", "unified"])
def test_several_sequences(monkeypatch, kv):
    name = MTP_MODELS[0]
    tokens = prompt_of(name).tokens
    prompts = [Prompt(tokens[:n]) for n in (len(tokens), 5, 9)]
    compared(monkeypatch, name, prompts, options_of(24, "draft-mtp", parallel=2, kv=kv))
