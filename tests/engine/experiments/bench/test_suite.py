"""The suite on a golden model: what it measures is what a run of its own gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import ContextFullError, OptionError
from engine.experiments.bench.request import PLAIN, Configuration, RequestResult, measure_request
from engine.experiments.bench.suite import PromptSuite, medians
from engine.options import Prompt, RunOptions, SpecOptions
from tests.support.golden_runs import decode, options_of, prompt_of, session

NAME = "qwen35-c-v2x-mtp-f32"
OPTIONS = options_of(20, "draft-mtp", ignore_eos=True)
MTP = Configuration("draft-mtp", OPTIONS)
CONFIGURATIONS = [Configuration.plain(OPTIONS), MTP]


def prompts() -> list[tuple[str, Prompt]]:
    whole = prompt_of(NAME).tokens
    return [("long", Prompt(whole)), ("short", Prompt(whole[:7]))]


def done_of(suite: PromptSuite) -> dict[str, list[RequestResult]]:
    names = [configuration.name for configuration in suite.configurations]
    return medians(names, [name for name, _ in suite.prompts], suite.measured)


def test_the_plain_configuration_has_nothing_that_speculation_needs() -> None:
    options = RunOptions(
        n_predict=7,
        spec=SpecOptions(("draft-mtp",), n_max=5),
        rollback="ring",
        n_rs_seq=2,
        kv="unified",
        faults=("stale-logits",),
    )
    plain = Configuration.plain(options)
    assert plain.name == PLAIN
    assert plain.options == RunOptions(n_predict=7, spec=SpecOptions((), n_max=5), kv="unified")


def test_a_request_is_measured_as_the_run_reports_it() -> None:
    prompt = prompt_of(NAME)
    measured = measure_request(session(NAME), prompt, "whole", MTP)
    run = decode(session(NAME), [prompt], OPTIONS)
    result, rounds = run.results()[0], run.trace.rounds
    assert (measured.prompt, measured.configuration) == ("whole", "draft-mtp")
    assert list(measured.tokens) == result.tokens
    assert measured.text == result.text
    for name in ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"):
        assert getattr(measured, name) == result.timings[name]
    assert measured.num_rounds == sum(rounds.column("round") > 0)
    assert measured.stop == "limit"
    assert 0 < measured.draft_ms + measured.verify_ms < measured.predicted_ms
    assert measured.predicted_ms < 1000 * measured.wall_s


def test_restores_and_duplicate_cells_are_counted() -> None:
    options = replace(OPTIONS, rollback="checkpoint", faults=("keep-stale-kv",), n_predict=30)
    measured = measure_request(session(NAME), prompt_of(NAME), "p", Configuration("x", options))
    run = decode(session(NAME), [prompt_of(NAME)], options)
    restores = run.trace.rounds.texts("rollback_path").count("restore")
    assert measured.num_restores == restores > 0
    assert measured.duplicate_cells == max(run.trace.rounds.column("kv_cells_duplicate")) > 0


def test_configurations_take_turns_and_the_first_changes() -> None:
    suite = PromptSuite(session(NAME), prompts(), CONFIGURATIONS, repeats=2)
    order = [(done.prompt, done.configuration) for done, _ in suite.requests()]
    plain, mtp = PLAIN, "draft-mtp"
    assert order == [
        ("long", plain),
        ("long", mtp),
        ("long", mtp),
        ("long", plain),
        ("short", mtp),
        ("short", plain),
        ("short", plain),
        ("short", mtp),
    ]
    assert suite.n_requests == len(order)
    done = done_of(suite)
    assert [[m.prompt for m in done[name]] for name in (plain, mtp)] == [["long", "short"]] * 2
    assert [m.tokens for m in done[plain]] == [m.tokens for m in done[mtp]]


def test_the_median_request_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([30.0, 90.0, 50.0])

    def scripted(*args: object) -> object:
        return replace(measured, predicted_ms=next(times))

    measured = measure_request(session(NAME), Prompt((1, 2)), "p", CONFIGURATIONS[0])
    monkeypatch.setattr("engine.experiments.bench.suite.measure_request", scripted)
    suite = PromptSuite(session(NAME), [("p", Prompt((1, 2)))], CONFIGURATIONS[:1], repeats=3)
    list(suite.requests())
    assert [m.predicted_ms for m in done_of(suite)[PLAIN]] == [50.0]


def test_what_is_done_stays_when_the_rest_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure_request(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.experiments.bench.suite.measure_request", interrupted)
    suite = PromptSuite(session(NAME), prompts(), CONFIGURATIONS)
    with pytest.raises(KeyboardInterrupt):
        list(suite.requests())
    assert {name: len(requests) for name, requests in done_of(suite).items()} == {
        PLAIN: 1,
        "draft-mtp": 1,
    }


def test_the_warm_up_is_short_and_not_counted() -> None:
    endless = replace(OPTIONS, n_predict=-1)
    suite = PromptSuite(session(NAME), prompts(), [Configuration.plain(endless)])
    suite.warm_up()
    assert done_of(suite) == {PLAIN: []}


def test_what_cannot_be_measured_is_refused_before_the_first_request() -> None:
    opened = session(NAME)
    with pytest.raises(OptionError, match="draft-mtp is given twice"):
        PromptSuite(opened, prompts(), [CONFIGURATIONS[0], MTP, MTP])
    with pytest.raises(ContextFullError, match="Prompt 0 has 48 tokens, but the context only 20"):
        PromptSuite(opened, prompts(), [Configuration.plain(replace(OPTIONS, n_ctx=20))])
    simple = Configuration("draft-simple", options_of(20, "draft-simple"))
    with pytest.raises(OptionError, match="needs a draft model"):
        PromptSuite(opened, prompts(), [CONFIGURATIONS[0], simple]).warm_up()
