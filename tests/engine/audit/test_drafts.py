"""The audit of drafts: planted bugs of drafters that leave the text right are seen and named."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache

import pytest
import torch

from engine.analysis.findings.check import find, recorded
from engine.audit.deviations import CLEAN as RIGHT
from engine.audit.deviations import JUDGED, NOT_JUDGED
from engine.audit.draft_models import draft_model, taps_of
from engine.audit.recorded_drafts import DraftAudit, DraftedText
from engine.draft.ngram_drafter import NgramSizes
from engine.observe.drafter_diff.target_rows import TextRows
from engine.options import Prompt, RunOptions, SpecOptions
from engine.run import Run
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.support.draft_audits import audited
from tests.support.golden_drafters import TARGETS, drafter_file, drafters
from tests.support.golden_files import golden_file
from tests.support.golden_runs import SAMPLED, decode, prompt_of
from tests.torture.reworded import reworded

DEMO = ("draft-simple", "draft-eagle3", "draft-mtp")
TEXTS = ("def quicksort(arr):", "class Stack:\n    def __init__(self):", "import os\n")
BLOCKS = [name for name in ("dflash-a-mrope", "dspark-a-anchor") if name in drafters("d")]
_DRAFT = "engine.draft."
_SIMPLE, _ROW = f"{_DRAFT}draft_simple:DraftSimple.", f"{_DRAFT}row_drafter:RowDrafter."
_BLOCK, _FOLLOW = (
    f"{_DRAFT}block_drafter:BlockDrafter.",
    "engine.decode.scheduler:Scheduler._follow",
)
_REQUEST = "engine.decode.sequences:DecodingSequence.draft_request"
_N_DECODED = "paired.n_decoded += len(tokens)"
_CUT = "self._memory.seq_rm(seq, paired.n_decoded)"


@cache
def demo() -> Session:
    return Session.open(DEMO_TARGET, [DEMO_DRAFT, DEMO_EAGLE3], compute="f32")


@cache
def opened(kind: str) -> Session:
    if kind in DEMO:
        return demo()
    target = golden_file(f"{TARGETS[kind]}.gguf")
    return Session.open(target, drafter_file(f"{kind}.gguf"), compute="f32")


def options_for(kind: str, n: int = 24, *front: str, **spec) -> RunOptions:
    drafter = kind if kind in DEMO else next(iter(opened(kind).drafts))
    sizes = NgramSizes(1, 4)
    spec = SpecOptions(types=(*front, drafter), n_max=4, ngram_simple=sizes, **spec)
    return RunOptions(n_predict=n, ignore_eos=True, spec=spec)


def play(kind: str, options: RunOptions, n_prompts: int = 1) -> Run:
    session = opened(kind)
    if kind in DEMO:
        prompts = [session.prompt(text) for text in TEXTS[:n_prompts]]
    else:
        tokens = prompt_of(TARGETS[kind]).tokens
        prompts = [Prompt(tokens[: 20 - 3 * i]) for i in range(n_prompts)]
    return decode(session, prompts, options)


def rules(kind: str, run: Run, options: RunOptions) -> set[str]:
    """Findings above info, with those of the audit."""
    drafts = [asdict(one) for one in audited(opened(kind), run, options)]
    run.trace.runs[run.run_id]["audit"] = {"drafts": drafts}
    return {finding.rule for finding in find(run.trace, [run.run_id]) if finding.severity != "info"}


@dataclass(frozen=True)
class Planted:
    """A bug in a drafter's code. finds: the rule that names it. n_prompts: one after the other."""

    name: str
    kind: str
    place: str
    old: str
    new: str
    finds: str
    n_prompts: int = 1


_OLDER = "(self.emitted[-2:])[0], limit)"
PLANTED = [
    Planted(
        "a rejected guess counts as decoded",
        "draft-simple",
        f"{_SIMPLE}observe",
        "progress.n_decoded += n_true",
        "progress.n_decoded += min(n_true + 1, len(progress.tokens))",
        "drafter-ahead",
    ),
    Planted(
        "not rewound",
        "draft-simple",
        f"{_SIMPLE}observe",
        "if n_true < len(progress.guessed):",
        "if False:",
        "drafter-not-rewound",
    ),
    Planted(
        "a token decoded twice",
        "draft-simple",
        f"{_SIMPLE}observe",
        "progress.n_decoded += n_true",
        "progress.n_decoded += max(0, n_true - 1)",
        "drafter-behind",
    ),
    Planted(
        "an older token to go on from",
        "draft-simple",
        _REQUEST,
        "self.last, limit)",
        _OLDER,
        "drafter-behind",
    ),
    Planted("cells not cut", "draft-mtp", f"{_ROW}observe", _CUT, "pass", "drafter-not-rewound"),
    Planted(
        "a drafted pair counts as decoded",
        "draft-mtp",
        f"{_ROW}_take_pairs",
        _N_DECODED,
        f"{_N_DECODED} + 1",
        "drafter-ahead",
    ),
    Planted(
        "tokens of rounds shifted",
        "draft-mtp",
        _FOLLOW,
        "round_.decoded",
        "round_.accepted",
        "drafter-rows-shifted",
    ),
    Planted(
        "not forgotten",
        "draft-mtp",
        f"{_DRAFT}chain:DrafterChain.forget",
        "drafter.forget(seq)",
        "pass",
        "drafter-of-other-text",
        2,
    ),
    Planted(
        "one row for all drafted tokens",
        "draft-eagle3",
        f"{_ROW}_next",
        "self._own = out.hidden.squeeze(1)",
        "pass",
        "drafter-rows-shifted",
    ),
    Planted(
        "drafted one position too far",
        "draft-eagle3",
        f"{_ROW}_next",
        "n_drafted - self.AHEAD",
        "n_drafted",
        "drafter-ahead",
    ),
    Planted(
        "layers in another order",
        "draft-eagle3",
        f"{_DRAFT}draft_eagle3:DraftEagle3._taken",
        "side_by_side(self.taps)",
        "side_by_side(self.taps[::-1])",
        "drafter-wrong-layers",
    ),
    Planted(
        "a drafted pair counts as decoded",
        "draft-eagle3",
        f"{_ROW}_take_pairs",
        _N_DECODED,
        f"{_N_DECODED} + 1",
        "drafter-ahead",
    ),
]
_KEPT = "self._memory.seq_rm(request.seq, request.pos0)"
BLOCK_PLANTED = [
    ("block left in memory", f"{_BLOCK}draft", _KEPT, "pass", "drafter-not-rewound"),
    (
        "one row of the block left",
        f"{_BLOCK}draft",
        _KEPT,
        "self._memory.seq_rm(request.seq, request.pos0 + 1)",
        "drafter-not-rewound",
    ),
    (
        "rows of rejected places",
        "engine.decode.verify_loop:VerifyLoop._judged",
        "rows.first(len(round_.accepted))",
        "rows[-len(round_.accepted) :]",
        "wrong-context-row",
    ),
    (
        "layers in another order",
        f"{_BLOCK}observe",
        "side_by_side(self.taps)",
        "side_by_side(self.taps[::-1])",
        "drafter-wrong-layers",
    ),
    (
        "positions one ahead",
        f"{_BLOCK}_inject",
        "context.n_injected + len(context.tokens)",
        "context.n_injected + len(context.tokens) + 1",
        "drafter-ahead",
    ),
]
PLANTED += [Planted(name, BLOCKS[0], *bug) for name, *bug in BLOCK_PLANTED if BLOCKS]
PLANTED += [Planted(name, BLOCKS[-1], *bug) for name, *bug in BLOCK_PLANTED[2:3] if BLOCKS]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: f"{bug.kind}: {bug.name}")
@pytest.mark.thinned(4)
def test_a_planted_bug_is_named(bug, monkeypatch):
    owner, name, changed = reworded(bug.place, bug.old, bug.new)
    options = options_for(bug.kind)
    monkeypatch.setattr(owner, name, changed)
    run = play(bug.kind, options, bug.n_prompts)
    assert rules(bug.kind, run, options) == {bug.finds}


CLEAN = [
    *((kind, (), {}) for kind in BLOCKS),
    ("draft-simple", (), {"p_min": 0.5}),
    ("draft-mtp", ("ngram-simple",), {"n_min": 2}),
    ("draft-eagle3", ("suffix",), {"accept": "rejection"}),
]


@pytest.mark.parametrize(("kind", "front", "spec"), CLEAN)
@pytest.mark.thinned(4)
def test_clean_drafts_are_made_again(kind, front, spec):
    options = replace(options_for(kind, 12, *front, **spec), parallel=2)
    if "accept" in spec:
        options = replace(options, sampler=SAMPLED, rollback="checkpoint")
    run = play(kind, options, 3)
    found = audited(opened(kind), run, options)
    assert {one.what for one in found} == {JUDGED}
    assert {one.seq_id for one in found} == {0, 1, 2}
    assert not [f for f in recorded(run.trace) if f.severity != "info"]


def test_evidence_says_what_it_costs(monkeypatch):
    owner, name, changed = reworded(
        f"{_DRAFT}row_drafter:PairedRows.waiting",
        "self.n_decoded + self.ahead :",
        "self.n_decoded + self.ahead + 1 :",
    )
    monkeypatch.setattr(owner, name, changed)
    options = options_for("draft-mtp")
    (found,) = audited(opened("draft-mtp"), play("draft-mtp", options), options)
    assert (found.round, found.what) == (1, "shifted")
    assert "tokens of one position after; 2 of 2 recomputed drafts differ" in found.evidence
    assert "with a right state" in found.evidence


def test_a_target_with_a_wrong_state_is_not_the_drafter_s_fault():
    options = replace(options_for("draft-mtp"), rollback="checkpoint", faults=("keep-stale-kv",))
    (found,) = audited(opened("draft-mtp"), play("draft-mtp", options), options)
    assert found.what == NOT_JUDGED
    assert "the target's own logits at position" in found.evidence


def test_a_difference_elsewhere_is_a_consequence():
    """Where the cause is known in one sequence, a drafter whose drafts only differ in others is not
    named twice."""
    options = options_for("draft-mtp", 4)
    run = play("draft-mtp", options)
    found = [
        DraftAudit(0, 2, "draft-mtp", "ahead", ""),
        DraftAudit(1, 3, "draft-mtp", "differs", ""),
    ]
    run.trace.runs[run.run_id]["audit"] = {"drafts": [asdict(one) for one in found]}
    assert {f.rule for f in find(run.trace) if f.severity != "info"} == {"drafter-ahead"}


def test_rows_of_a_batch_come_late() -> None:
    text = DraftedText(0, range(8), [3, 5], None, [])
    assert text.others_of_batch(8, "late") == [0, 0, 1, 3, 3, 5, 5, 6]
    assert text.others_of_batch(8, "late", with_prompt=False) == [0, 1, 2, 3, 3, 5, 5, 6]
    assert text.others_of_batch(8, "rolled") == [2, 0, 1, 4, 3, 7, 5, 6]


@pytest.mark.parametrize("kind", ["draft-mtp", "draft-eagle3"])
def test_rows_of_known_tokens_are_those_of_one_step_after_the_other(kind: str) -> None:
    session = opened(kind)
    model = draft_model(session, options_for(kind), kind, 64)
    taps = taps_of(session, options_for(kind))
    tokens = session.prompt(TEXTS[1]).tokens
    rows = TextRows(session.model, tokens, taps, lambda: False).rows
    text = DraftedText(0, tokens, [4], model.table(rows), [])
    model.write(text.entries(model, range(5), RIGHT, 6))
    newest, known = text.entries(model, [5], RIGHT, 6), [*tokens[:3]]
    at_once = model.draft(newest, 6, known, 3)
    left = model.left
    model.hands = lambda given, _: given[-1]
    one_by_one = model.draft(newest, 6, known, 3)
    assert [next(iter(row)) for row in at_once] == [next(iter(row)) for row in one_by_one]
    for one, other in zip(at_once, one_by_one, strict=True):
        assert max(abs(one[token] - other[token]) for token in one.keys() & other.keys()) < 1e-3
    assert left.tokens == model.left.tokens
    assert torch.allclose(left.rows, model.left.rows, atol=1e-4)


@pytest.mark.parametrize("kind", ["draft-simple", "draft-mtp"])
def test_what_is_kept_comes_back_whatever_is_drafted_meanwhile(kind: str) -> None:
    session = opened(kind)
    model = draft_model(session, options_for(kind), kind, 64)
    tokens = session.prompt(TEXTS[1]).tokens
    rows = TextRows(session.model, tokens, taps_of(session, options_for(kind)), lambda: False).rows
    text = DraftedText(0, tokens, [4], model.table(rows), [])
    newest, after = (text.entries(model, [at], RIGHT, at + 1) for at in (5, 9))
    model.write(text.entries(model, range(5), RIGHT, 6))
    model.keep()
    first = model.draft(newest, 6, None, 3)
    model.write(text.entries(model, range(5, 9), RIGHT, 10))
    model.draft(after, 10, None, 3)
    model.go_back()
    assert model.draft(newest, 6, None, 3) == first
