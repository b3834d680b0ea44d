"""The cost of recording: exact on a clock of its own, and a run that does not notice it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from engine.decode.forward import Forward
from engine.decode.recorder import Recorder
from engine.decode.verify_loop import VerifyLoop
from engine.experiments.bench.forward import (
    RECORDING_SECTIONS,
    SectionClock,
    bench_recording,
    recording_timed,
)
from engine.experiments.bench.request import Configuration
from engine.trace.store import TraceStore
from tests.support.golden_runs import decode, options_of, prompt_of, session, tokens_of

NAME = "qwen35-c-v2x-mtp-f32"
OPTIONS = options_of(20, "draft-mtp", ignore_eos=True)
CONFIGURATIONS = [Configuration.plain(OPTIONS), Configuration("draft-mtp", OPTIONS)]
PARTS = [(Recorder, name) for name in ("resume", "ubatch", "drafts", "prompt", "round")]


def parts() -> list[object]:
    return list(vars(Recorder).items())


class FakeTime:
    """Time that passes only where a test says so, for all clocks of a measurement."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self._patch = 100.0, patch
        # the run's too: how many rounds it does before it looks at its rows depends on time
        for module in (
            "engine.experiments.bench.forward",
            "engine.experiments.bench.request",
            "engine.run",
        ):
            patch.setattr(f"{module}.perf_counter", lambda: self.now)

    def spend(self, owner: Any, name: str, seconds: float) -> list[str]:
        """Each call of an attribute takes so long; returns the growing list of its calls."""
        calls: list[str] = []
        call: Callable[..., Any] = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            self.now += seconds
            return call(*args, **kwargs)

        self._patch.setattr(owner, name, slow)
        return calls


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda one: one.name)
def test_all_that_records_is_counted_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, configuration: Configuration
) -> None:
    time = FakeTime(monkeypatch)
    calls = {
        (owner, name): time.spend(owner, name, 2.0**i) for i, (owner, name) in enumerate(PARTS)
    }
    passes = time.spend(Forward, "run", 1000.0)
    for done in bench_recording(session(NAME), prompt_of(NAME), [configuration], repeats=2):
        drafts = calls[Recorder, "drafts"]
        assert bool(drafts) == (configuration.name == "draft-mtp")
        assert all(one for one in calls.values() if one is not drafts)
        recorded = sum(2.0**i * len(calls[part]) for i, part in enumerate(PARTS))
        assert done["recording_s"] == pytest.approx(recorded)
        assert done["wall_s"] == pytest.approx(recorded + 1000 * len(passes))
        assert done["share"] == pytest.approx(done["recording_s"] / done["wall_s"])
        for one in (passes, *calls.values()):
            one.clear()


def test_a_call_inside_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime(monkeypatch)

    def resume(self: Recorder) -> None:
        time.now += 2.0

    def prompt(self: Recorder) -> None:
        time.now += 1.0
        self.resume()
        time.now += 4.0

    monkeypatch.setattr(Recorder, "resume", resume)
    monkeypatch.setattr(Recorder, "prompt", prompt)
    store = TraceStore()
    recorder: Any = Recorder(store, store.begin_run({}), lambda token: b"")
    clock = SectionClock(sections=RECORDING_SECTIONS)
    with recording_timed(clock):
        recorder.prompt()
        time.now += 8.0
    assert clock.ms() == {"recording": 7000, "rest": 8000}


def test_what_the_clock_does_itself_is_in_no_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking what kind a device is takes longer than reading the time, on each side of a call."""
    time = FakeTime(monkeypatch)

    class Device:
        @property
        def type(self) -> str:
            time.now += 1.0
            return "cpu"

    clock = SectionClock(cast(torch.device, Device()), RECORDING_SECTIONS)
    call = clock.timed(lambda: setattr(time, "now", time.now + 4.0), "recording")
    for _ in range(3):
        call()
    assert clock.ms() == {"recording": 12000, "rest": 0}


def test_every_run_of_every_configuration_has_a_share() -> None:
    runs = list(bench_recording(session(NAME), prompt_of(NAME), CONFIGURATIONS, repeats=2))
    assert [run["configuration"] for run in runs] == ["plain", "plain", "draft-mtp", "draft-mtp"]
    for run in runs:
        assert run["predicted_n"] == 20
        assert 0 < run["recording_s"] < run["wall_s"]
        assert 0 < run["share"] < 1


def test_the_clocks_are_gone_behind_each_run() -> None:
    before = parts()
    with recording_timed(SectionClock(sections=RECORDING_SECTIONS)):
        assert all(getattr(owner, name).__name__ == "counted" for owner, name in PARTS)
        changed = [a[0] for a, b in zip(parts(), before, strict=True) if a != b]
        assert sorted(changed) == sorted([*(name for _, name in PARTS), "close", "go_on"])
    assert parts() == before
    for _ in bench_recording(session(NAME), prompt_of(NAME), CONFIGURATIONS):
        assert parts() == before


def test_the_clocks_are_gone_behind_a_run_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VerifyLoop, "run", interrupted)
    before = parts()
    with pytest.raises(KeyboardInterrupt):
        list(bench_recording(session(NAME), prompt_of(NAME), CONFIGURATIONS))
    assert parts() == before


def test_tokens_and_trace_are_the_same_as_without() -> None:
    plain = decode(session(NAME), [prompt_of(NAME)], OPTIONS)
    clock = SectionClock(sections=RECORDING_SECTIONS)
    with recording_timed(clock):
        timed = decode(session(NAME), [prompt_of(NAME)], OPTIONS)
    assert clock.ms()["recording"] > 0
    assert tokens_of(timed) == tokens_of(plain)
    for name in ("token_id", "target_p", "pos", "round"):
        ours, theirs = (run.trace.tokens.column(name).tolist() for run in (timed, plain))
        assert ours == pytest.approx(theirs, nan_ok=True)
