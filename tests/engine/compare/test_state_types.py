"""Lanes whose states storage rounds: what rounding costs a text, and what rollbacks add to it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from engine.compare.comparison import Comparison
from engine.session import Session
from tests.support.comparisons import differences_of, finish, specs, verdicts
from tests.support.golden_runs import DATA, MTP_MODELS, options_of, prompt_of

TYPED = "cache_type_s=bf16,cache_type_r=f16,gate_type=bf16"
POLICIES = ("planes", "carry", "ring", "checkpoint")


@cache
def compared(compute: str, *accept: int) -> Comparison:
    """All drafts of a text rejected, or some of them, in forms whose bits no batch changes."""
    name = MTP_MODELS[2 if compute == "q8" else 0]
    opened = Session.open(DATA / f"{name}.gguf", compute=compute)
    options = options_of(40, n_max=3, ignore_eos=True, batch_invariant=True)
    lanes = specs(*(f"{policy},{TYPED}" for policy in (*POLICIES, "replay")), "planes")
    return finish(Comparison(opened, prompt_of(name), options, lanes, draft_accept=accept))


@pytest.mark.parametrize("compute", ["f32", "q8"])
@pytest.mark.thinned(4)
def test_where_every_draft_is_rejected_rounding_is_that_of_plain_decoding(compute: str) -> None:
    found = verdicts(compared(compute, 0))
    distance = found[f"reference,{TYPED}"]
    assert (distance.verdict, distance.compute) == ("mode", compute)
    assert distance.types == "states in bf16, windows in f16, gates in bf16"
    assert 1e-8 < distance.worst_nmse < 1e-2 and distance.state_error > 1e-4
    for policy in POLICIES:
        assert found[f"{policy},{TYPED}"].verdict == "exact", policy
    # what is folded from a log is rounded like a state, and is not a state bit by bit
    assert found[f"replay,{TYPED}"].state_error < distance.state_error
    assert found["planes"].verdict == "exact", "lanes of f32 are what they were"


def test_accepted_drafts_are_rounded_once_a_batch() -> None:
    comparison = compared("f32", 2, 0, 3)
    found = verdicts(comparison)
    lanes = [f"{policy},{TYPED}" for policy in POLICIES]
    assert {found[lane].verdict for lane in lanes} == {"within"}
    first, *others = (differences_of(comparison, lane) for lane in lanes)
    for other in others:  # each rounds at the same places
        for column in ("nmse", "state_error", "conv_error"):
            np.testing.assert_array_equal(other[column], first[column])
    assert np.nanmax(first["state_error"]) > 1e-5
