"""Rules about lanes, neighbours and prompts on rows made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from engine.analysis.findings.check import find
from engine.trace.prompt_reuse import ProcessedPart, PromptReuseRecord, ReuseSource, WhyProcessed
from engine.trace.store import TraceStore
from tests.support.round_rows import add_draft, add_round, found, new_run


def lanes(store: TraceStore, *names: str, **options) -> None:
    for name in names:
        new_run(store, name, **({"options": options} if name not in ("reference", "noise") else {}))


def diverges(store: TraceStore, run_id: int, number: int, nmse: float, **columns) -> None:
    store.divergence.append(
        **{
            "run_id": run_id,
            "round": number,
            "seq_id": 0,
            "pos": number,
            "nmse": nmse,
            "max_abs": 1e-3,
            "top1_equal": 1,
            "rank": 1,
            "top2_gap": 1.0,
            "state_error": 1e-6,
            "conv_error": 1e-6,
            "cells_differ": 0,
            **columns,
        }
    )


def test_forks_at_near_ties() -> None:
    def rules(gap: float, nmse: float) -> list[str]:
        store = TraceStore()
        lanes(store, "reference", "noise", "planes")
        diverges(store, 1, 1, 1e-6)
        diverges(store, 2, 1, 1e-6)
        diverges(store, 2, 2, nmse, top1_equal=0, top2_gap=gap)
        return [f.rule for f in find(store)]

    assert rules(2e-3, 1e-6) == ["noise-near-ties"]
    assert rules(3e-3, 1e-6) == []
    assert rules(2e-3, 1e-2) == []


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"conv_error": 0.5}, "conv-not-rolled-back"),
        ({"conv_error": 0.5, "state_error": 0.5}, "state-wrong"),
        ({"nmse": 0.5}, "stale-logits"),
        ({"nmse": 0.5, "state_error": 0.5}, "state-wrong"),
        ({"nmse": 0.5, "cells_differ": 2}, None),
    ],
)
def test_what_is_wrong_first_tells_the_fault(columns, rule) -> None:
    store = TraceStore()
    lanes(store, "reference", "noise", "planes")
    diverges(store, 1, 1, 1e-9)
    add_round(store, 0, run_id=2)
    add_draft(store, 1, 3, 1, run_id=2)
    diverges(store, 2, 1, 1e-9, state_error=np.nan, conv_error=np.nan)
    diverges(store, 2, 1, **{"nmse": 1e-9, **columns})
    if "conv_error" in columns:  # later on the state is wrong too
        diverges(store, 2, 2, 0.5, state_error=0.5)
    found = find(store)
    assert [(f.rule, f.round) for f in found] == ([(rule, 1)] if rule else [])
    if rule == "conv-not-rolled-back":
        assert "relative error 0.5 of the window" in found[0].evidence


def test_wrong_logits_without_a_rejection_are_not_stale_ones() -> None:
    store = TraceStore()
    lanes(store, "reference", "noise", "planes")
    diverges(store, 1, 1, 1e-9)
    add_draft(store, 1, 3, 3, run_id=2)
    diverges(store, 2, 1, 0.5)
    assert find(store) == []


def test_no_verdict_on_a_lane_without_noise_lane() -> None:
    store = TraceStore()
    lanes(store, "reference", "planes")
    add_draft(store, 1, 3, 1, run_id=1)
    diverges(store, 1, 1, 0.5)
    assert find(store) == []


def text(store: TraceStore, run_id: int, seq: int, prompt: list[int], tokens: list[int]) -> None:
    kinds = ["prompt"] * len(prompt) + ["target"] * len(tokens)
    for i, (token, kind) in enumerate(zip([*prompt, *tokens], kinds, strict=True)):
        number = max(0, i - len(prompt))
        store.tokens.append(
            run_id=run_id, round=number, seq_id=seq, pos=i, kind=kind, token_id=token
        )
        if kind == "target":
            add_round(store, number, run_id=run_id, seq_id=seq)


@pytest.mark.parametrize(
    ("kv", "last", "fires"), [("unified", 9, True), ("unified", 6, False), ("per-seq", 9, False)]
)
def test_a_neighbour_changes_the_text(kv: str, last: int, fires: bool) -> None:
    store = TraceStore()
    new_run(store)
    text(store, 0, 0, [1, 2], [4, 5, 6])
    new_run(store, options={"kv": kv, "parallel": 2})
    text(store, 1, 0, [7, 2], [4, 4, 4])
    text(store, 1, 1, [1, 2], [4, 5, last])
    findings = find(store)
    assert [(f.rule, f.run_id, f.seq_id, f.round) for f in findings] == [
        ("unified-kv-crosstalk", 1, 1, 2)
    ] * fires


@pytest.mark.parametrize("other", [1e-9, 0.5])
def test_a_neighbour_changes_the_logits_of_a_lane(other: float) -> None:
    store = TraceStore()
    lanes(store, "reference", "noise")
    lanes(store, "planes,kv=unified", kv="unified")
    lanes(store, "planes", kv="per-seq")
    diverges(store, 1, 1, 1e-9)
    for run_id, nmse in ((2, 0.5), (3, other)):
        for seq in (0, 1):
            add_round(store, 1, run_id=run_id, seq_id=seq)
            diverges(store, run_id, 1, nmse if seq else 1e-9, seq_id=seq)
    rows = [(f.run_id, f.seq_id, f.round) for f in found(store, "unified-kv-crosstalk")]
    assert rows == [(2, 1, 1)] * (other < 0.1)


def test_a_prompt_processed_again_by_this_engine(store: TraceStore) -> None:
    def hits(n_reused: int, why: WhyProcessed) -> list[str]:
        parts = [ProcessedPart(n_reused, 900, why), ProcessedPart(900, 950, WhyProcessed.DIFFERS)]
        record = PromptReuseRecord(0, 0, 950, 1000, 900, n_reused, ReuseSource.NOTHING, parts)
        record.note(store.runs[0])
        return [f.message for f in found(store, "prompt-processed-again")]

    (message,) = hits(0, WhyProcessed.NO_CHECKPOINT)
    assert "900 of the prompt's 950 tokens were in memory, 0 were reused and 900" in message
    assert len(hits(300, WhyProcessed.BEHIND_CHECKPOINT)) == 1
    assert hits(880, WhyProcessed.BEHIND_CHECKPOINT) == []  # the nearest checkpoint is near
    assert hits(0, WhyProcessed.DIFFERS) == []


@pytest.mark.parametrize(
    ("cached", "settings", "n_hits"), [(0, {}, 1), (0, {"cache_prompt": False}, 0), (1180, {}, 0)]
)
def test_replies_that_reuse_little_of_a_repeated_history(
    cached: int, settings: dict[str, bool], n_hits: int
) -> None:
    said = [{"role": "user", "content": "a"}]
    more = [*said, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    other = [{"role": "user", "content": "z"}]
    store, zeros = TraceStore(), {"prompt_ms": 1.0, "predicted_n": 4, "predicted_ms": 1.0}
    store.begin_run(
        {
            "requests": [
                {
                    "seq_ids": [i],
                    "messages": messages,
                    "settings": settings,
                    "told": {"cache_n": n, "prompt_n": 1200 - n, **zeros},
                }
                for i, (messages, n) in enumerate([(said, 0), (other, 0), (more, cached)])
            ]
        }
    )
    hits = found(store, "prompt-processed-again")
    assert len(hits) == n_hits
    if hits:
        assert hits[0].seq_id == 2 and "messages of request 1" in hits[0].message
