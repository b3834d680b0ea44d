"""Tokens that are decoded at once are those of a pass each, and so is every row of the trace."""

from __future__ import annotations

from typing import Any

import pytest

from engine.audit.run_audit import audit_of
from engine.decode import scheduler
from engine.machine.graphs import StepGraphs
from engine.options import RunOptions
from engine.run import Run
from engine.trace.store import TraceStore
from tests.support.golden_runs import MTP_MODELS, options_of, prompt_of, session
from tests.support.recorded_runs import assert_same

MTP = MTP_MODELS[0]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each pass that was there already; however long one takes."""
    found: list[None] = []
    take = StepGraphs.next_ahead

    def counted(self: StepGraphs) -> Any:
        found.append(None)
        return take(self)

    monkeypatch.setattr(StepGraphs, "next_ahead", counted)
    monkeypatch.setattr(scheduler, "AHEAD_MS", 1e9)
    return found


def both(name: str, options: RunOptions, *, audit: bool = False) -> tuple[Run, Run]:
    """A run that goes on, and the same in single steps."""
    one, other = (
        (opened := session(name)).start(
            [prompt_of(name)],
            options,
            TraceStore(),
            audit=audit_of(opened, [prompt_of(name)], options) if audit else None,
        )
        for _ in range(2)
    )
    while one.advance(60):
        pass
    while other.step():
        pass
    return one, other


@pytest.mark.parametrize("name", [MTP, "qwen35-a-f32", *MTP_MODELS[1:]])
@pytest.mark.thinned(4)
def test_every_table_is_that_of_single_steps(taken: list[None], name: str) -> None:
    one, other = both(name, options_of(90, ignore_eos=True))
    assert_same(one, other)
    assert len(taken) > 60 or "moe" in name  # experts are chosen by the host


@pytest.mark.parametrize("policy", ["planes", "carry", "ring", "replay", "checkpoint"])
def test_every_policy(taken: list[None], policy: str) -> None:
    assert_same(*both(MTP, options_of(40, rollback=policy)))


def test_rows_that_are_written_amid_such_passes(
    taken: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, real, left = options_of(40, ignore_eos=True), Run.step, iter(range(12))

    def step(self: Run) -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(self)

    run = session(MTP).start([prompt_of(MTP)], options, TraceStore())
    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", step)
        with pytest.raises(KeyboardInterrupt):
            run.advance(60)
    assert run._scheduler.is_ahead
    while run.advance(60):
        pass
    assert_same(run, both(MTP, options)[1])


def test_an_audit_sees_the_states_of_each_round(taken: list[None]) -> None:
    one, other = both(MTP, options_of(60, ignore_eos=True), audit=True)
    assert_same(one, other)
    ours, theirs = (run.trace.runs[run.run_id]["audit"] for run in (one, other))
    assert ours["verdict"] == theirs["verdict"]
    assert taken


@pytest.mark.parametrize("n_ctx", [40, 64])
def test_the_context_ends_it(taken: list[None], n_ctx: int) -> None:
    n_ctx = max(n_ctx, len(prompt_of(MTP).tokens) + 20)
    assert_same(*both(MTP, options_of(-1, ignore_eos=True, n_ctx=n_ctx)))
    assert taken


def test_an_end_token_ends_it(taken: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(MTP)
    whole, _ = both(MTP, options_of(60, ignore_eos=True))
    end = whole.emitted[0][30]
    monkeypatch.setattr(opened.tokenizer, "eog_ids", frozenset([end]))
    assert_same(*both(MTP, options_of(60)))
    assert_same(*both(MTP, options_of(60, ignore_eos=True)))  # banned: another token is chosen
