"""Counting against a slow counter that follows an event log; the identity of earlier figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.options import Prompt
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance, summary, timings
from tests.support.golden_runs import decode, options_of, prompt_of, session


@dataclass(frozen=True)
class Event:
    """A verification: of `drafted` tokens `accepted` matched; replayed: it needed a replay, which
    was verified and gave one token more; of the list, `dropped` tokens fell to a stop."""

    drafted: int
    accepted: int
    replayed: bool = False
    dropped: int = 0


@st.composite
def events(draw: st.DrawFn) -> Event:
    drafted = draw(st.integers(0, 6))
    accepted = draw(st.integers(0, drafted))
    replayed = accepted < drafted and draw(st.booleans())
    dropped = draw(st.integers(0, accepted + replayed)) if draw(st.booleans()) else 0
    return Event(drafted, accepted, replayed, dropped)


@dataclass
class SlowCounter:
    """The rules one event at a time, as a server would follow them."""

    prompt_n: int = 0
    predicted_n: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    with_replayed: int = 0
    verif_steps: int = 0

    def __post_init__(self) -> None:
        self.accepted_at = [0] * 16
        self.drafted_at = [0] * 16
        self.lists: list[tuple[int, int]] = []

    def see(self, event: Event) -> None:
        size = event.accepted + (2 if event.replayed else 1)
        self.predicted_n += size - event.dropped
        if event.drafted == 0:
            return
        self.draft_n += event.drafted
        n = size - 2 if event.replayed else size - 1
        self.draft_n_accepted += n
        self.with_replayed += size - 1
        self.verif_steps += 1
        for i in range(event.drafted):
            self.drafted_at[i] += 1
        for i in range(n):
            self.accepted_at[i] += 1
        self.lists.append((event.drafted, n))


def record(store: TraceStore, seq_id: int, parts: list[int], log: list[Event]) -> None:
    run, pos, number = 0, 0, len(store.rounds)
    for i, n in enumerate(parts):
        is_last = i == len(parts) - 1
        store.rounds.append(
            run_id=run,
            round=number,
            seq_id=seq_id,
            t_ms=float(number),
            pos0=pos,
            verify_width=n,
            verify_ms=1.0,
            num_target_tokens=int(is_last),
            num_emitted=int(is_last),
        )
        pos, number = pos + n, number + 1
    for event in log:
        size = event.accepted + 1 + event.replayed
        store.rounds.append(
            run_id=run,
            round=number,
            seq_id=seq_id,
            t_ms=float(number),
            pos0=pos,
            verify_width=event.drafted + 1,
            num_draft_tokens=event.drafted,
            num_accepted_draft_tokens=event.accepted,
            num_target_tokens=1 + event.replayed,
            num_emitted=size - event.dropped,
            rollback_depth=event.drafted - event.accepted,
        )
        pos, number = pos + size, number + 1


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=3), st.lists(events(), max_size=9)
        ),
        max_size=3,
    )
)
def test_figures_are_those_of_the_slow_counter(
    tmp_path: Path, sequences: list[tuple[list[int], list[Event]]]
) -> None:
    store, slow = TraceStore(), SlowCounter()
    store.begin_run({})
    for seq_id, (parts, log) in enumerate(sequences):
        record(store, seq_id, parts, log)
        slow.prompt_n += sum(parts)
        slow.predicted_n += 1
        for event in log:
            slow.see(event)
    export_csv(store, tmp_path / "trace")
    for each in (store, open_trace(tmp_path / "trace")):
        check(each, slow)


def check(store: TraceStore, slow: SlowCounter) -> None:
    figures, fared = timings(store, 0), acceptance(store, 0)
    assert figures["prompt_n"] == slow.prompt_n
    assert figures["predicted_n"] == slow.predicted_n
    assert figures.get("draft_n", 0) == slow.draft_n
    assert figures.get("draft_n_accepted", 0) == slow.draft_n_accepted
    assert figures.get("draft_n_accepted_with_replayed", 0) == slow.with_replayed
    assert fared["num_spec_steps"] == slow.verif_steps
    assert (
        list(zip(fared["per_step_drafted"], fared["per_step_accepted"], strict=True)) == slow.lists
    )
    longest = max((drafted for drafted, _ in slow.lists), default=0)
    assert fared["num_accepted_tokens_per_pos"] == slow.accepted_at[:longest]
    assert fared["num_draft_tokens_per_pos"] == slow.drafted_at[:longest]
    rates = fared["acceptance_per_position"]
    for i in range(longest):
        judged = sum(drafted > i and accepted >= i for drafted, accepted in slow.lists)
        for name, whole in (
            ("unconditional", slow.verif_steps),
            ("unconditional_given_drafted", slow.drafted_at[i]),
            ("conditional", judged),
        ):
            expected = slow.accepted_at[i] / whole if whole else None
            assert rates[name][i] == expected
    if slow.verif_steps:
        assert fared["mean_acceptance_length"] == 1 + slow.draft_n_accepted / slow.verif_steps
        assert fared["draft_acceptance_rate"] == slow.draft_n_accepted / slow.draft_n
        histogram = fared["acceptance_histogram"]
        assert histogram == [sum(n == k for _, n in slow.lists) for k in range(longest + 1)]
    else:
        assert fared["mean_acceptance_length"] is None
        assert fared["draft_acceptance_rate"] is None
        assert "draft_n" not in figures
    assert summary(store, 0).items() >= figures.items()
    assert "per_step_drafted" not in summary(store, 0)


MTP = "qwen35-c-v2x-mtp-f32"


@pytest.mark.parametrize("rollback", ["planes", "checkpoint"])
@pytest.mark.parametrize("replay", ["trust", "verify"])
def test_which_rule_was_counted_shows_in_the_number_of_tokens(rollback: str, replay: str) -> None:
    """predicted - 1 = accepted + drafted / n_max, where every draft is n_max long (pitfall 8)."""
    prompt = Prompt(prompt_of(MTP).tokens[:20])
    options = replace(
        options_of(200, "draft-mtp", n_max=3), rollback=rollback, replay=replay, ignore_eos=True
    )
    run = session(MTP).start([prompt], options)
    for _ in range(25):  # before the last rounds, whose drafts are cut to what is still wanted
        run.step()
    run.stop()
    figures = run.results()[0].timings
    steps = figures["draft_n"] // 3
    assert steps == 24
    today = figures["draft_n_accepted"] + steps
    earlier = figures["draft_n_accepted_with_replayed"] + steps
    verified = rollback == "checkpoint" and replay == "verify"
    assert figures["predicted_n"] - 1 == (earlier if verified else today)
    n_restored = sum(path == "restore" for path in run.trace.rounds.texts("rollback_path"))
    assert earlier - today == (n_restored if verified else 0)
    assert (n_restored > 3) == (rollback == "checkpoint")


def test_figures_of_a_run_with_drops_and_refills(tmp_path: Path) -> None:
    """Tokens that a stop drops count as accepted; a reopened trace gives the same figures."""
    prompts = [Prompt(prompt_of(MTP).tokens[:n]) for n in (20, 7, 31, 3)]
    options = options_of(
        11, "draft-mtp", n_max=4, parallel=2, n_batch=16, replay="verify", rollback="checkpoint"
    )
    run = decode(session(MTP), prompts, options)
    store = run.trace
    target, accepted, emitted = (
        store.rounds.column(name)
        for name in ("num_target_tokens", "num_accepted_draft_tokens", "num_emitted")
    )
    figures = run.summary()
    assert figures["predicted_n"] == 44
    assert (emitted <= target + accepted.clip(0)).all()
    assert figures["draft_n_accepted"] == accepted.clip(0).sum()
    export_csv(store, tmp_path / "trace")
    again = open_trace(tmp_path / "trace")
    for seq_id in (None, 0, 1, 2, 3):
        ours, theirs = acceptance(store, 0, seq_id), acceptance(again, 0, seq_id)
        assert ours == theirs
        assert timings(again, 0, seq_id).keys() == timings(store, 0, seq_id).keys()
