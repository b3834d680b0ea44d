"""What the figures of a record have to agree in: a number that was changed is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.analysis.findings.check import recorded
from engine.errors import TraceFileError
from engine.observe.files.records import fill
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.engine.observe.files.record_files import (
    RECORDS,
    STEPS,
    as_bytes,
    at,
    filled,
    numbers,
    words,
)


def _vllm(m: dict[str, Any]) -> bool:
    h = m["acceptance_histogram"]
    h = h if isinstance(h, list) else [h.get(str(j), 0) for j in range(1 + max(map(int, h)))]
    steps, accepted, drafted = (
        m[f"num_{name}"] for name in ("spec_steps", "accepted_draft_tokens", "draft_tokens")
    )
    holds = sum(h) == steps and sum(j * n for j, n in enumerate(h)) == accepted <= drafted
    holds &= abs(m["mean_acceptance_length"] - 1 - accepted / max(steps, 1)) < 1e-9
    if a := m.get("per_step_accepted"):
        d = m["per_step_drafted"]
        holds &= len(a) == len(d) == steps and sum(a) == accepted and sum(d) == drafted
    return holds


def _sglang(m: dict[str, Any], completion: int) -> bool:
    h, steps = m["spec_correct_drafts_histogram"], m["spec_verify_ct"]
    accepted = m["spec_num_correct_drafts"]
    return (
        sum(h) == steps
        and sum(j * n for j, n in enumerate(h)) == accepted <= m["spec_num_proposed_drafts"]
        and abs(m["spec_accept_length"] - completion / max(steps, 1)) < 1e-9
    )


def _trtllm(m: dict[str, Any]) -> bool:
    accepted, drafted = m["total_accepted_draft_tokens"], m["total_draft_tokens"]
    h = m.get("acceptance_histogram")
    return accepted <= drafted and (
        h is None
        or (sum(h) == m["num_spec_steps"] and sum(j * n for j, n in enumerate(h)) == accepted)
    )


def _lm_studio(m: dict[str, Any]) -> bool:
    parts = (m[f"{name}DraftTokensCount"] for name in ("accepted", "rejected", "ignored"))
    return sum(parts) == m["totalDraftTokensCount"]


HOLDS: dict[str, Callable[[Any], bool]] = {
    "aiperf-record.json": lambda d: _vllm(d["record"]),
    "vllm-summary.json": lambda d: _vllm(d["body"]["metrics"]["speculative_decoding"]),
    "vllm-detailed-stream.json": lambda d: _vllm(
        d["chunks"][-1]["metrics"]["speculative_decoding"]
    ),
    "sglang-generate.json": lambda d: _sglang(
        d["body"]["meta_info"], d["body"]["meta_info"]["completion_tokens"]
    ),
    "sglang-openai.json": lambda d: _sglang(
        d["body"]["sglext"]["spec_tokens_details"], d["body"]["usage"]["completion_tokens"]
    ),
    "trtllm-choice.json": lambda d: _trtllm(d["body"]["choices"][0]["speculative_decoding"]),
    "trtllm-perf-metrics.jsonl": lambda d: _trtllm(d["perf_metrics"]["speculative_decoding"]),
    "mlx-vlm-timings.json": lambda d: d["timings"]["draft_n_accepted"] <= d["timings"]["draft_n"],
    "lmstudio-prediction.json": lambda d: _lm_studio(d["stats"]),
}
"""The identities of each engine, written down once more."""


@settings(max_examples=60)
@given(st.data())
def test_a_changed_number_that_breaks_an_identity_is_found_with_its_key(
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(sorted(HOLDS)))
    document = json.loads((RECORDS / name).read_bytes())
    assert HOLDS[name](document)
    path = data.draw(st.sampled_from(sorted(numbers(document), key=str)))
    before = at(document, path)
    changed = before + data.draw(st.sampled_from([-3, -1, 1, 2, 40, 5000, 2**31, 0.25]))
    at(document, path[:-1])[path[-1]] = changed
    key = next(part for part in reversed(path) if isinstance(part, str) and not part.isdigit())
    store = TraceStore()
    error = None
    try:
        fill(store, as_bytes(document), name)
    except TraceFileError as caught:
        error = caught
    if error is not None:
        assert key in error.message and name in error.message and error.remedy
        assert not store.runs
        return
    found = recorded(store)
    if not HOLDS[name](document):
        (finding,) = found
        assert finding.rule == "counters-contradict" and finding.severity == "error"
        assert key in words(finding.evidence) or f"usage.{key}" in words(finding.evidence)
    if found:
        assert not len(store.rounds)
        assert summary(store, 0)["draft_acceptance_rate"] is None


def test_every_pair_of_lengths_and_counts_has_to_agree() -> None:
    body = json.loads((RECORDS / "vllm-summary.json").read_bytes())["body"]
    metrics = body["metrics"]["speculative_decoding"]
    for change in (
        {"acceptance_histogram_by_draft_length": {"3": [4, 2, 2, 3], "2": [0, 1, 0]}},
        {"acceptance_histogram_by_draft_length": {"3": [3, 2, 2, 3], "1": [1, 1]}},
        {"acceptance_histogram_by_draft_length": {"3": [3, 2, 2, 3], "2": [1, 1, 0, 1]}},
        {"num_spec_tokens": 2},
        {"per_step_accepted": [*STEPS], "per_step_drafted": [3] * 11},
        {"per_step_accepted": [*sorted(STEPS)], "per_step_drafted": [0, 4, *[3] * 10]},
    ):
        changed = copy.deepcopy(metrics) | change
        store = filled("changed", as_bytes({"metrics": {"speculative_decoding": changed}}))
        (finding,) = recorded(store)
        assert any(key in words(finding.evidence) for key in change)


def test_a_total_with_the_targets_own_tokens_is_named_as_such() -> None:
    body = json.loads((RECORDS / "vllm-summary.json").read_bytes())["body"]
    metrics = body["metrics"]["speculative_decoding"]
    metrics |= {"per_step_accepted": [*STEPS], "per_step_drafted": [2, *[3] * 10, 2]}
    for total in ("num_accepted_draft_tokens", "num_draft_tokens"):
        changed = metrics | {total: metrics[total] + metrics["num_spec_steps"]}
        (finding,) = recorded(
            filled("own", as_bytes({"metrics": {"speculative_decoding": changed}}))
        )
        found = [one for one in finding.evidence.split("; ") if "per_step" in one]
        own = "the target's own token" in "".join(found)
        assert found and own == (total == "num_accepted_draft_tokens"), finding.evidence


def test_a_ratio_may_be_rounded_but_not_wrong() -> None:
    body = json.loads((RECORDS / "vllm-summary.json").read_bytes())["body"]
    metrics = body["metrics"]["speculative_decoding"]
    for told, n in ((2.333, 0), (2.33333, 0), (2.334, 1), (2.33, 1), (2, 1)):
        metrics["mean_acceptance_length"] = told
        assert len(recorded(filled("rounded", as_bytes(body)))) == n, told


def test_one_record_that_contradicts_itself_leaves_the_others_their_figures() -> None:
    record = json.loads((RECORDS / "aiperf-record.json").read_bytes())["record"]
    wrong = record | {"num_spec_steps": 13}
    store = filled("two", as_bytes(record) + b"\n" + as_bytes(wrong))
    (finding,) = recorded(store)
    assert finding.seq_id == 1 and "line 2" in finding.message
    assert summary(store, 0)["num_spec_steps"] == 12
    assert set(store.rounds.column("seq_id").tolist()) == {0}
