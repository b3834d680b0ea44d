"""Facts of an audit as they come from a file that may be damaged."""

from __future__ import annotations

from typing import Any

import pytest

from engine.analysis.findings.check import find
from tests.support.golden_runs import decode, options_of, prompt_of, session

MODEL = "qwen35-c-v2x-mtp-f32"


@pytest.mark.parametrize(
    "damage",
    [
        {"drafts": [{}, {"what": "ahead"}, 3]},
        {"drafts": [{"seq_id": 0, "drafter": "x", "what": "ahead", "evidence": "", "round": "1"}]},
        {"drafts": {"what": "ahead"}},
        {"not_judged": [1, None]},
        {"wrong": [{}, {"what": "state"}], "sampler": [{"what": "token"}, None]},
        [],
    ],
    ids=str,
)
def test_damaged_facts_break_no_rule(damage: Any) -> None:
    trace = decode(session(MODEL), [prompt_of(MODEL)], options_of(4)).trace
    (run_id,) = trace.runs
    trace.runs[run_id]["audit"] = damage
    assert {one.rule for one in find(trace)} <= {"audit-incomplete"}
