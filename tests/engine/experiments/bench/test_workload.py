"""W1: every turn continues the whole history, and the counters are those of its trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.decode.held_sequences import PromptCache
from engine.experiments.bench.prompts import NamedPrompt
from engine.experiments.bench.request import Configuration, Workload, turn_counters, turn_totals
from engine.options import Prompt, RunOptions, SpecOptions
from engine.session import Session
from resources import DEMO_TARGET
from tests.support.golden_runs import decode

MESSAGES = [NamedPrompt("one", "def quicksort(arr):"), NamedPrompt("two", "\n\nclass A:\n    def")]
OPTIONS = RunOptions(n_predict=16, ignore_eos=True, spec=SpecOptions(("draft-mtp",)))


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(DEMO_TARGET, compute="f32")


def test_turns_continue_the_plain_concatenation(demo: Session) -> None:
    workload = Workload(demo, MESSAGES, Configuration("draft-mtp", OPTIONS))
    turns = list(workload.turns())
    assert workload.done == turns
    history = ""
    for message, turn in zip(MESSAGES, turns, strict=True):
        history += message.text
        run = decode(demo, [demo.prompt(history)], OPTIONS)
        (result,) = run.results()
        counters = turn_counters(turn)
        assert (counters["turn"], turn.text) == (message.name, result.text)
        assert counters["prompt_tokens"] == len(result.prompt_tokens)
        assert (turn.cache_n, turn.prompt_n) == (0, len(result.prompt_tokens))
        rounds = run.trace.rounds
        drafted = rounds.column("num_draft_tokens")
        assert counters["drafts"] == sum(drafted > 0)
        assert counters["drafted"] == drafted[1:].sum()
        assert counters["accepted"] == sum(rounds.column("num_accepted_draft_tokens")[1:])
        assert counters["accepted"] + counters["rejected"] == counters["drafted"]
        assert [counters[name] for name in ("tokens", "restores", "duplicate_cells")] == [16, 0, 0]
        history += result.text


def test_a_cache_spares_work_and_changes_no_text(demo: Session) -> None:
    messages = [*MESSAGES, NamedPrompt("three", "\n\nx = [")]
    for types in ((), ("draft-mtp",)):
        options = Configuration("x", replace(OPTIONS, spec=SpecOptions(types)))
        cached = list(Workload(demo, messages, options, cache=PromptCache()).turns())
        control = list(Workload(demo, messages, options).turns())
        names = ("predicted_n", "num_spec_steps", "draft_n", "draft_n_accepted", "text")
        for turn, bare in zip(cached, control, strict=True):
            assert [getattr(turn, name) for name in names] == [
                getattr(bare, name) for name in names
            ]
            assert turn.cache_n + turn.prompt_n == bare.prompt_n
        assert [turn.cache_n > 0 for turn in cached] == [False, True, True]
        assert cached[1].cache_n >= cached[0].prompt_n - 4  # its last checkpoint


def test_a_turn_knows_where_its_message_starts(
    demo: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Prompt] = []
    start = demo.start

    def spy(prompts, options, **others):
        seen.extend(prompts)
        return start(prompts, options, **others)

    monkeypatch.setattr(demo, "start", spy)
    messages = [*MESSAGES, NamedPrompt("three", "\n\nx = [")]
    turns = list(Workload(demo, messages, Configuration("x", OPTIONS), cache=PromptCache()).turns())
    assert [len(prompt.message_starts) for prompt in seen] == [0, 1, 2]
    text = ""
    for prompt, message, turn in zip(seen, messages, turns, strict=True):
        rest = prompt.tokens[max(prompt.message_starts, default=0) :]
        assert demo.tokenizer.decode(rest).strip() == message.text.strip()
        text += message.text + turn.text


def test_damage_shows_in_the_counters(demo: Session) -> None:
    broken = replace(OPTIONS, rollback="checkpoint", faults=("keep-stale-kv",))
    (first, second) = Workload(demo, MESSAGES, Configuration("x", broken)).turns()
    assert first.num_restores > 0 and second.num_restores > 0
    assert first.duplicate_cells > 0
    sums = turn_totals([turn_counters(first), turn_counters(second)])
    assert sums["restores"] == first.num_restores + second.num_restores
    assert sums["duplicate_cells"] == max(first.duplicate_cells, second.duplicate_cells)
    assert sums["tokens"] == 32
    assert set(turn_totals([]).values()) == {0}


def test_a_chat_template_gets_the_messages_and_the_answers(
    demo: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[dict[str, str]]] = []

    class Template:
        def render(self, messages: list[dict[str, str]], **values: object) -> str:
            assert values == {"enable_thinking": False}
            seen.append([dict(message) for message in messages])
            return "|".join(message["content"] for message in messages)

    monkeypatch.setattr(demo, "chat", Template())
    workload = Workload(
        demo,
        MESSAGES,
        Configuration("x", OPTIONS),
        chat=True,
        template_values={"enable_thinking": False},
    )
    first, second = workload.turns()
    assert [[message["role"] for message in messages] for messages in seen] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert seen[1][1]["content"] == first.text
    text = "|".join((MESSAGES[0].text, first.text, MESSAGES[1].text))
    assert second.prompt_n == len(demo.prompt(text).tokens)
