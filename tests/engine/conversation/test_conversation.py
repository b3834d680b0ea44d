"""Conversations give the tokens of plain decoding, whatever is said, edited and branched."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.analysis.findings.check import find
from engine.conversation.conversation import Rendering
from engine.conversation.turns import CheckpointHistory, TurnTree, conversations
from engine.errors import OptionError
from engine.gguf.chat import ChatTemplate
from engine.options import ROLLBACK_POLICIES, CacheOptions, RunOptions, SpecOptions
from engine.session import Session
from engine.trace.prompt_reuse import ReuseSource, WhyProcessed, processed_lines, reused_text
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.support.conversations import conversation, converse, finish, moves, said
from tests.support.golden_runs import session

MTP, DENSE = "qwen35-c-v2x-mtp-f32", "qwen3-f-f32"
CACHE = CacheOptions(ctx_checkpoints=3, checkpoint_min_step=5)
LONG = "The quick brown fox jumps over the lazy dog. " * 3


def options_of(*types: str, **others) -> RunOptions:
    spec = SpecOptions(types=types, n_max=3)
    sizes = {"n_predict": 5, "n_ctx": 512, "n_ubatch": 8, "n_batch": 16, "ignore_eos": True}
    return RunOptions(spec=spec, **(sizes | others))


@cache
def demo() -> Session:
    return Session.open(DEMO_TARGET, [DEMO_DRAFT, DEMO_EAGLE3], compute="f32")


turns = given(st.lists(moves(), min_size=3, max_size=6))


@pytest.mark.parametrize(
    ("policy", "n_slots"), [*zip(ROLLBACK_POLICIES, cycle((2, 1))), ("checkpoint", 1)]
)
@settings(max_examples=3)
@turns
@pytest.mark.thinned(8)
def test_answers_are_those_of_plain_decoding(policy, n_slots, made):
    options = options_of("draft-mtp", rollback=policy, parallel=n_slots)
    converse(session(MTP), options, made, CACHE)


@pytest.mark.parametrize("drafter", ["", "draft-simple", "draft-eagle3", "draft-mtp"])
@settings(max_examples=2)
@turns
@pytest.mark.thinned(4)
def test_also_with_every_drafter(drafter, made):
    options = options_of(*([drafter] if drafter else []), n_ubatch=32, n_batch=64)
    converse(demo(), options, made, CACHE)


def test_what_a_turn_says_of_itself():
    held, trace = conversation(demo())
    options = options_of("draft-mtp", rollback="ring", n_predict=12)
    first = finish(held.start(said(LONG), None, options)).turn
    assert [part.why for part in first.record.parts] == [WhyProcessed.FIRST]
    assert first.record.created and first.record.source is ReuseSource.NOTHING
    second = finish(held.start(said(" And then"), 0, options)).turn
    assert second.record.source is not ReuseSource.NOTHING
    assert second.parent == 0 and second.start >= first.record.n_prompt
    # the same text as at first, but for its end: what lies before comes from a checkpoint
    edited = finish(held.start(said(LONG + "Never."), None, options)).turn
    record = edited.record
    assert record.source is ReuseSource.CHECKPOINT and record.checkpoint == record.n_reused > 0
    assert "context checkpoint at" in reused_text(record)
    whys = [part.why for part in record.parts]
    assert whys == [WhyProcessed.BEHIND_CHECKPOINT, WhyProcessed.DIFFERS]
    assert len(processed_lines(record)) == 2 and record.n_again > 0
    # back to the second turn's branch
    third = finish(held.start(said("!"), 1, options)).turn
    tree = held.tree
    assert [turn.number for turn in tree.path(third.number)] == [0, 1, 3]
    assert tree.siblings(0) == [0, 2] and tree.newest_behind(0) == 3
    assert tree.messages(1)[-1] == second.answer
    assert conversations(trace.runs) == [0]
    assert TurnTree.of(trace.runs, 7).turns == {}


def test_an_answer_that_is_given_is_in_memory_as_if_it_had_been_written():
    held, _ = conversation(demo())
    options = options_of("draft-mtp")
    answer = {"role": "assistant", "content": " Yes, said the fox."}
    first = finish(held.start(said(LONG), None, options, answer))
    assert first.turn.answer == answer and first.turn.is_recorded
    assert len(first.emitted[0]) == 1
    second = finish(held.start(said(" And then"), 0, options)).turn
    n_answer = len(demo().prompt(answer["content"]).tokens)
    assert second.record.n_held == first.turn.record.n_prompt + n_answer
    assert (second.record.n_reused, second.record.n_again) == (second.record.n_held, 0)
    assert [one.n_tokens for one in second.record.created]  # and none within the answer
    assert all(n <= first.turn.record.n_prompt for n, _ in first.turn.record.held)
    assert held.tree.messages(0)[-1] == answer


THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "A:{% if loop.last or keep %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
"""Leaves out the thinking of all answers but the newest."""


@pytest.mark.parametrize("keeps", [False, True])
def test_a_template_that_strips_thinking_has_its_price(monkeypatch, keeps):
    opened = demo()
    monkeypatch.setattr(opened, "chat", ChatTemplate(THINKS, None, None))
    held, _ = conversation(opened, is_chat=True, template_values={"keep": keeps})
    options = options_of(n_ubatch=64, n_batch=64)
    thinking = "The fox is quick and the dog is lazy, so it jumps. " * 4
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": thinking}
    first = finish(held.start(said(LONG), None, options, answer)).turn
    second = finish(held.start(said("And then?"), 0, options)).turn
    record, n_prompt = second.record, first.record.n_prompt
    n_thinking = len(opened.tokenizer.encode(thinking))
    assert record.n_held > n_prompt + n_thinking
    found = [one.rule for one in find(held._trace, [second.run_id])]
    if keeps:
        assert record.n_common == record.n_held and record.n_again == 0
        assert "prompt-processed-again" not in found
    else:
        assert n_prompt - 2 <= record.n_common < n_prompt + 4
        assert record.n_again > 0 and second.rewritten_at == record.n_common
        assert record.parts[0].why is WhyProcessed.BEHIND_CHECKPOINT


def test_an_answer_that_the_template_does_not_show_is_taken_as_it_is():
    opened = SimpleNamespace(
        chat=SimpleNamespace(render=lambda *_, **__: "something else"),
        prompt=demo().prompt,
        tokenizer=demo().tokenizer,
    )
    rendering = Rendering(opened, is_chat=True)
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Well"}
    written = rendering.answer(said("a"), answer, demo().prompt("a\n"))
    text = demo().tokenizer.decode(written)
    assert text == "<think>\nWell\n</think>\n\nYes."


def test_reasons_where_no_checkpoint_serves():
    for cache_options, why in (
        (CacheOptions(ctx_checkpoints=0), WhyProcessed.OFF),
        (CacheOptions(), WhyProcessed.NO_CHECKPOINT),
    ):
        held, _ = conversation(demo(), cache_options)
        options = options_of(n_ubatch=64, n_batch=64)
        finish(held.start(said(LONG), None, options))
        record = finish(held.start(said(LONG[:40] + "Never."), None, options)).turn.record
        assert [part.why for part in record.parts] == [why, WhyProcessed.DIFFERS]
    held, _ = conversation(session(DENSE))
    finish(held.start(said(LONG), None, options_of()))
    record = finish(held.start(said(LONG[:40] + "Never."), None, options_of())).turn.record
    assert record.source is ReuseSource.CELLS and record.n_reused == record.n_common > 0


def test_a_turn_goes_on_behind_one_that_has_ended():
    held, _ = conversation(demo())
    with pytest.raises(OptionError, match="Turn 4 of conversation 1 does not exist"):
        held.start(said("x"), 3, options_of())
    run = held.start(said(LONG), None, options_of())
    with pytest.raises(OptionError, match="has no answer yet"):
        held.start(said("x"), 0, options_of())
    run.stop()
    assert run.turn.answer == {"role": "assistant", "content": ""}
    with pytest.raises(OptionError, match="no chat template"):
        Rendering(SimpleNamespace(chat=None), is_chat=True)


FAULTS = {
    "checkpoint-boundary": ("checkpoint-boundary", {}),
    "checkpoint-invalidated": ("checkpoint-invalidated", {}),
    "rollback-twice": ("rollback-twice", {"rollback": "ring"}),
    "mtp-carried": ("drafter-carried", {}),
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
@pytest.mark.thinned(4)
def test_a_fault_is_named_by_its_finding(fault):
    """Turns that go on, roll back, and start from a checkpoint."""
    rule, others = FAULTS.get(fault, ("", {"rollback": "ring"}))
    faults = (fault,) if fault else ()
    options = options_of("draft-mtp", n_predict=12, n_ubatch=32, faults=faults, **others)
    held, trace = conversation(demo())
    finish(held.start(said(LONG), None, options))
    finish(held.start(said(" And then"), 0, options))
    for text in ("Never.", "Always.", "Perhaps."):
        finish(held.start(said(LONG + text), None, options))
    # back by one token, which snapshots reach
    cut = demo().tokenizer.decode(held._tokens[4][:-2])
    finish(held.start(said(cut + "?"), None, options))
    named = set(trace.findings.texts("rule"))
    ours = {"checkpoint-boundary", "checkpoint-invalidated", "rollback-twice", "drafter-carried"}
    assert named & ours == ({rule} if rule else set())
    if fault == "checkpoint-invalidated":
        assert any("processed 3 times" in text for text in trace.findings.texts("evidence"))
    if fault in ("", "checkpoint-invalidated", "mtp-carried"):  # these leave the text right
        plain = replace(options, spec=SpecOptions(), faults=())
        bare, _ = conversation(demo())
        assert (
            finish(bare.start(said(LONG + "Perhaps."), None, plain)).turn.answer
            == held.tree.turns[4].answer
        )


def test_the_history_of_checkpoints():
    held, trace = conversation(demo(), CacheOptions(ctx_checkpoints=2, checkpoint_min_step=5))
    options = options_of("draft-mtp", n_predict=12, n_ubatch=16, n_batch=64)
    finish(held.start(said(LONG), None, options))
    finish(held.start(said(LONG + "Never."), None, options))
    last = finish(held.start(said(LONG[:60] + "Always."), None, options)).run_id
    first = CheckpointHistory.of(trace.runs, 0, 0)
    assert len(first.held) == 2 and first.n_hits == 0 and not first.misses
    second = CheckpointHistory.of(trace.runs, 0, 1)
    assert second.n_hits == 1 and sum(mark.hits for mark in second.held) <= 1
    third = CheckpointHistory.of(trace.runs, 0, last)
    ((run_id, n_common, n_reused, _),) = third.misses
    assert run_id == last and n_reused == 0 < n_common
    assert third.n_erased > 0 and len(third.held) <= 2
    assert CheckpointHistory.of(trace.runs, 1, last).held == []
