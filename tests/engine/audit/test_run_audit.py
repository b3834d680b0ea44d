"""The audit of a run: clean runs agree with plain decoding, planted bugs are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.analysis.findings.audit import audit_sentence, audit_text
from engine.analysis.findings.check import find, recorded, with_consequences
from engine.audit import run_audit
from engine.audit.drafts import FEW_DRAFTS
from engine.audit.run_audit import audit_of, note_why_not
from engine.audit.text_check import AuditedTexts, StateSamples
from engine.decode import acceptance
from engine.decode.acceptance import match
from engine.decode.held_sequences import PromptCache
from engine.draft.drafter import Draft
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions, StateTypes
from engine.report.run import run_report
from engine.run import Run
from engine.sampling.sampler import Sampler
from engine.trace.export import export_csv
from engine.trace.facts import Finding, RunFacts
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from tests.support.golden_runs import options_of, prompt_of, session
from tests.support.mutations import MUTATIONS, mutate
from tests.support.noisy_logits import with_logits
from tests.torture.reworded import reworded

MODEL = "qwen35-c-v2x-mtp-f32"
PENALISED = SamplerOptions(temp=0.8, seed=11, repeat_penalty=1.5, repeat_last_n=8)


def audited(options: RunOptions, name: str = MODEL, n: int = 14) -> Run:
    opened, prompts = session(name), [Prompt(prompt_of(name).tokens[:n])]
    run = opened.start(prompts, options, audit=audit_of(opened, prompts, options))
    while run.step():
        pass
    return run


def drafting(n: int = 24, **others: Any) -> RunOptions:
    return options_of(n, "draft-mtp", n_max=4, ignore_eos=True, **others)


def causes(run: Run) -> list[Finding]:
    errors = [one for one in recorded(run.trace) if one.severity == "error"]
    return [cause for cause, _ in with_consequences(errors)]


def result(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.trace.runs[run.run_id]["audit"]
    return found


@pytest.mark.parametrize(
    "options",
    [
        drafting(rollback="ring"),
        drafting(rollback="replay", sampler=PENALISED),
        drafting(rollback="checkpoint", sampler=PENALISED, replay="verify"),
        replace(
            drafting(sampler=PENALISED),
            spec=SpecOptions(("draft-mtp",), n_max=4, accept="rejection"),
        ),
        replace(drafting(), spec=SpecOptions(("draft-mtp",), n_max=4, synth_len=2.5)),
    ],
    ids=["ring", "replay", "verified replay", "rejection", "synthetic"],
)
def test_a_clean_run_agrees(options: RunOptions) -> None:
    run = audited(options)
    assert not causes(run)
    found = result(run)
    assert found["verdict"] == "agrees"
    assert found["not_judged"] == []
    assert found["n_tokens"] == 24
    assert found["logits_error"] < 1e-8
    n_rounds = found["n_rounds_sampled"]
    said = f"Audit: text and {n_rounds} rounds equal to plain decoding"
    assert audit_sentence(run.trace.runs[0]) == said


def test_auditing_changes_no_row() -> None:
    options = drafting(rollback="replay", sampler=PENALISED)
    plain = session(MODEL).start([Prompt(prompt_of(MODEL).tokens[:14])], options)
    while plain.step():
        pass
    other = audited(options)
    for name in ("token_id", "target_p", "rule_p"):
        both = (run.trace.tokens.column(name) for run in (plain, other))
        np.testing.assert_array_equal(*both)
    assert plain.trace.runs[0].keys() | {"audit"} == other.trace.runs[0].keys()


STATES = {
    "ring cursor one too far after a wrap": ("ring", "wrong-snapshot-index"),
    "fold skips the last token": ("replay", "wrong-fold"),
    "state not rolled back": ("planes", "recurrent-position"),
    "cells missing": ("planes", "missing-kv-cells"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_wrong_memory_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, rule = STATES[name]
    mutate(monkeypatch, next(one for one in MUTATIONS if one.name == name))
    run = audited(drafting(rollback=policy))
    (cause,) = causes(run)
    assert cause.rule == rule
    assert result(run)["verdict"] == "differs"
    assert audit_sentence(run.trace.runs[0]) == f"Audit: wrong from round {cause.round}"


def _sees_the_next_token(original: Any) -> Any:
    def forward(self: HybridModel, ubatch: Any, memory: Any, *rest: Any, **others: Any) -> Any:
        out = original(self, ubatch, memory, *rest, **others)
        if 1 < ubatch.n_seq_tokens <= 5 and len(out.logits) == ubatch.n_seq_tokens:
            out.logits[:-1] += 0.1 * out.logits[1:]
            out = with_logits(out, out.logits)
        return out

    return forward


def test_wrong_logits_of_narrow_batches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridModel, "forward", _sees_the_next_token(HybridModel.forward))
    (cause,) = causes(audited(drafting()))
    assert (cause.rule, cause.round) == ("logits-not-plain", 1)


def test_wrong_logits_that_a_look_at_memory_prevents_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, inputs, looked = HybridModel.forward, HybridMemory.inputs, set[int]()
    wrong = _sees_the_next_token(right)

    def forward(self: HybridModel, ubatch: Any, memory: Any, *rest: Any, **others: Any) -> Any:
        was_looked_at = id(memory) in looked
        looked.discard(id(memory))
        return (right if was_looked_at else wrong)(self, ubatch, memory, *rest, **others)

    def look(self: HybridMemory, seqs: Any) -> Any:
        looked.add(id(self))
        return inputs(self, seqs)

    monkeypatch.setattr(HybridModel, "forward", forward)
    monkeypatch.setattr(HybridMemory, "inputs", look)
    (cause,) = causes(audited(drafting(60)))
    assert cause.rule == "logits-not-repeated"


def _rule(change: Callable[..., list[int]]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        name = "rejection" if "residual" in change.__name__ else "match"
        patch.setitem(acceptance.RULES, name, change)

    return apply


def _top_1_is_kept(draft: Draft, rows: Any, sampler: Sampler, _: Any) -> list[int]:
    found: list[int] = []
    for i, drafted in enumerate(draft.tokens):
        p, number = rows(i), sampler.uniform()
        token = drafted if p.ids[0] == drafted else p.at(number)
        sampler.accept(token)
        found.append(token)
        if token != drafted:
            return found
    return [*found, sampler.draw(rows(len(found)))]


def _whole_draft_in_the_window(
    draft: Draft, rows: Any, sampler: Sampler, end_tokens: Any
) -> list[int]:
    def row(i: int) -> Any:
        for token in draft.tokens[i:]:
            sampler._penalties.accept(token)
        p = rows(i)
        for _ in draft.tokens[i:]:
            sampler._penalties.retract()
        return p

    return match(draft, row, sampler, end_tokens)


def _rejected_token_stays(draft: Draft, rows: Any, sampler: Sampler, ends: Any) -> list[int]:
    found = match(draft, rows, sampler, ends)
    n = len(found)
    if n <= len(draft.tokens) and found[-1] != draft.tokens[n - 1]:
        sampler._penalties.accept(draft.tokens[n - 1])
    return found


def _number_for_the_rejected(draft: Draft, rows: Any, sampler: Sampler, ends: Any) -> list[int]:
    found = match(draft, rows, sampler, ends)
    if len(found) <= len(draft.tokens):
        sampler._random.random()
    return found


def _bonus_of_the_row_before(
    draft: Draft, rows: Any, sampler: Sampler, end_tokens: Any
) -> list[int]:
    last = len(draft.tokens)
    return match(draft, lambda i: rows(i - (i == last > 0)), sampler, end_tokens)


SAMPLERS = {
    "top-1 kept": (_rule(_top_1_is_kept), "wrong-acceptance"),
    "whole draft in the window": (_rule(_whole_draft_in_the_window), "wrong-acceptance"),
    "rejected token stays": (_rule(_rejected_token_stays), "penalties-of-other-tokens"),
    "number for a rejected token": (_rule(_number_for_the_rejected), "random-numbers-off"),
    "bonus from another row": (_rule(_bonus_of_the_row_before), "wrong-acceptance"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_wrong_sampler_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, rule = SAMPLERS[name]
    apply(monkeypatch)
    run = audited(drafting(30, sampler=PENALISED))
    assert [one.rule for one in causes(run)] == [rule], [one.message for one in causes(run)]


def test_a_draw_from_p_is_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    spec = SpecOptions(("draft-mtp",), n_max=4, accept="rejection")
    run = audited(replace(drafting(40, sampler=SamplerOptions(temp=1.0, seed=5)), spec=spec))
    (cause,) = causes(run)
    assert cause.rule == "wrong-acceptance"
    assert "p - q" in cause.message


def test_samples_are_few_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    original = StateSamples.look

    def look(self: StateSamples, number: int, *rest: Any, **others: Any) -> None:
        original(self, number, *rest, **others)
        looks.append(len(self.of(0)))

    monkeypatch.setattr(StateSamples, "look", look)
    run = audited(drafting(60, rollback="planes"))
    assert max(looks) <= 13
    assert result(run)["n_rounds_sampled"] >= 7


def test_a_stopped_audit_says_so() -> None:
    opened, prompts = session(MODEL), [prompt_of(MODEL)]
    run = opened.start(prompts, drafting(), audit=audit_of(opened, prompts, drafting()))
    while result_verdict(run) != "going on":
        run.step()
    run.stop()
    assert result(run)["verdict"] == "stopped"
    assert audit_sentence(run.trace.runs[0]) == "Audit stopped"
    assert result(run)["not_judged"] == ["The audit was stopped."]
    assert run.trace.runs[0]["stops"] == ["limit"]


def result_verdict(run: Run) -> str:
    return str(run.trace.runs[run.run_id].get("audit", {}).get("verdict"))


def test_a_result_is_kept_by_an_exported_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _rule(_rejected_token_stays)(monkeypatch)
    run = audited(drafting(30, sampler=PENALISED))
    export_csv(run.trace, tmp_path / "out")
    opened = open_trace(tmp_path / "out")
    assert opened.runs[0]["audit"] == result(run)
    assert {one.rule for one in recorded(opened)} == {one.rule for one in recorded(run.trace)}
    assert "penalties-of-other-tokens" in {one.rule for one in find(opened)}
    assert "audit': 'differs, 30 of 30 tokens" in str(run_report(RunRef(opened, 0), {}))


def test_a_damaged_result_accuses_nobody() -> None:
    run = audited(drafting(4))
    for damaged in ({"wrong": [{"what": "cells"}], "sampler": [3]}, [], {"wrong": "x"}):
        run.trace.runs[0]["audit"] = damaged
        assert not [one for one in find(run.trace) if one.severity == "error"]
        assert list(audit_text(run.trace.runs[0])) is not None
        assert "wrong" not in audit_sentence(run.trace.runs[0])


def test_tokens_are_not_drawn_again_where_rounding_is_coarse() -> None:
    opened, prompts, options = session(MODEL), [prompt_of(MODEL)], drafting(sampler=PENALISED)
    rounded = replace(options, state_types=StateTypes(s="bf16"))
    found = [AuditedTexts.of(opened, prompts, one).has_ties for one in (options, rounded)]
    assert found == [False, True]


def _default_audit(options: RunOptions) -> Run:
    opened, prompts = session(MODEL), [Prompt(prompt_of(MODEL).tokens[:14])]
    audit = audit_of(opened, prompts, options, asked=None)
    run = opened.start(prompts, options, audit=audit)
    while run.step():
        pass
    return run


@pytest.mark.parametrize(("share", "n"), [(0.0, 0), (1e3, FEW_DRAFTS)])
def test_the_default_audit_makes_a_few_drafts_again_where_there_is_time(
    share: float, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_audit, "SHARE_OF_RUN", share)
    run = _default_audit(drafting(30))
    said = [one["evidence"] for one in result(run)["drafts"]]
    assert len(said) == bool(n)
    assert all(one.startswith(f"{n} of ") for one in said)
    assert not recorded(run.trace)


def test_the_default_audit_sees_a_drafter_that_is_not_rewound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_audit, "SHARE_OF_RUN", 1e3)
    place, cut = "engine.draft.row_drafter:RowDrafter.observe", "self._memory.seq_rm"
    owner, name, changed = reworded(place, f"{cut}(seq, paired.n_decoded)", "pass")
    monkeypatch.setattr(owner, name, changed)
    found = {one.rule for one in recorded(_default_audit(drafting(30)).trace)}
    assert found == {"drafter-not-rewound"}


def test_by_default_only_short_runs_are_audited() -> None:
    opened, prompts = session(MODEL), [Prompt(prompt_of(MODEL).tokens[:14])]
    assert audit_of(opened, prompts, drafting(24), asked=None)
    assert not audit_of(opened, prompts, drafting(8), asked=None)
    assert not audit_of(opened, prompts, drafting(4096), asked=None)
    assert not audit_of(opened, prompts, drafting(24), asked=False)


@pytest.mark.parametrize(
    ("n", "why"),
    [
        (24, ""),
        (8, "Not audited because its prompt is longer than the text that it may generate"),
        (4096, "Not audited because it may have more than 2,048 tokens"),
        (-1, "Not audited because it has no limit of tokens"),
    ],
)
def test_why_a_run_is_not_audited_is_noted(n: int, why: str) -> None:
    facts = RunFacts()
    note_why_not(facts, [Prompt(prompt_of(MODEL).tokens[:14])], drafting(n))
    assert audit_sentence(facts) == why
    assert list(audit_text(facts)) == ([why] if why else [])


def test_a_run_that_is_not_audited_has_no_finding_for_that() -> None:
    run = session(MODEL).start([Prompt(prompt_of(MODEL).tokens[:14])], drafting(4))
    note_why_not(run.trace.runs[0], [Prompt(prompt_of(MODEL).tokens[:14])], drafting(4))
    while run.step():
        pass
    assert "audit-incomplete" not in {one.rule for one in recorded(run.trace)}


def test_a_run_after_a_cached_one_is_audited_from_its_beginning() -> None:
    """The state that a prompt goes on from is wrong, and the prompt itself is not recorded."""
    opened, tokens, cache = session(MODEL), prompt_of(MODEL).tokens, PromptCache()
    options = replace(drafting(6, rollback="ring"), n_ctx=96)
    first = opened.start([Prompt(tokens[:20])], options, None, cache)
    while first.step():
        pass
    recurrent = opened_memory(cache).recurrent
    assert recurrent is not None
    for tensor in recurrent._storage:
        tensor.mul_(0.5)
    prompts = [Prompt((*tokens[:20], *first.emitted[0], 7))]
    audit = audit_of(opened, prompts, options, can_repeat=False)
    run = opened.start(prompts, options, None, cache, audit=audit)
    while run.step():
        pass
    assert result(run)["verdict"] == "differs"
    assert causes(run)


def opened_memory(cache: PromptCache) -> HybridMemory:
    assert cache._cached is not None
    return cache._cached.memory
