"""draft-dflash and draft-dspark: golden traces, p_min, the end of the context, cut memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

from engine.draft.block_drafter import BlockDrafter
from engine.draft.draft_dflash import DraftDflash
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.registry import meaning
from engine.errors import OptionError
from engine.model.layers import TargetRows
from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.run import Run
from engine.session import Session
from tests.support.chi_square import chi_square
from tests.support.golden_drafters import TARGETS, drafter_file, drafters, golden_drafter
from tests.support.golden_files import golden_file
from tests.support.golden_runs import decode, tokens_of

FAMILY = [*drafters("dflash"), *drafters("dspark")]
HERE = pytest.mark.skipif(not FAMILY, reason="the golden drafters are not there")
PLAIN, SELECTING, SURE, UNSURE = (
    "dflash-b-swa-d2t",
    "dflash2-a",
    "dspark-a-anchor",
    "dspark-b-bonus-d2t",
)


@cache
def opened(name: str) -> Session:
    target = golden_file(f"{TARGETS[name]}.gguf")
    return Session.open(target, drafter_file(f"{name}.gguf"), compute="f32")


def options_for(name: str, n: int = 40, p_min: float = 0.0, **others) -> RunOptions:
    (drafter,) = opened(name).drafts
    n_max = golden_drafter(name)["draft_ids"].shape[1]
    spec = SpecOptions(types=(drafter,), n_max=n_max, p_min=p_min)
    return RunOptions(n_predict=n, spec=spec, **others)


def prompts_of(name: str) -> list[Prompt]:
    golden = golden_drafter(name)
    first = golden["tokens"][: int(golden["n_prompt"])]
    return [Prompt(tuple(ids.tolist())) for ids in (first, golden["prompt_b"])]


def rounds_of(run: Run, seq_id: int) -> list[tuple[int, list[int], int]]:
    """Of every round that is not a prompt: tokens in memory, drafted ids, how many were
    accepted."""
    tokens, drafted = run.trace.tokens, {}
    for i in range(len(tokens)):
        row = tokens.row(i)
        if row["seq_id"] == seq_id and row["draft_index"] is not None and row["kind"] != "replayed":
            drafted.setdefault(row["round"], []).append(row["token_id"])
    rows = (run.trace.rounds.row(i) for i in range(len(run.trace.rounds)))
    return [
        (row["pos0"], drafted.get(row["round"], []), row["num_accepted_draft_tokens"])
        for row in rows
        if row["seq_id"] == seq_id and row["num_draft_tokens"] is not None
    ]


def golden_rounds(golden, kind: str, seq: int = 0) -> list[tuple[int, list[int], int]]:
    n_rounds = len(golden[f"{kind}_past"])
    seqs = golden[f"{kind}_seq"] if f"{kind}_seq" in golden else [0] * n_rounds
    return [
        (
            int(golden[f"{kind}_past"][i]),
            golden[f"{kind}_draft"][i][: golden[f"{kind}_n_draft"][i]].tolist(),
            int(golden[f"{kind}_accepted"][i]),
        )
        for i in range(n_rounds)
        if seqs[i] == seq
    ]


@pytest.mark.parametrize("kind", ["spec", "pmin", "multi"])
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.thinned(8)
def test_traces_are_golden(name, kind):
    golden = golden_drafter(name)
    if f"{kind}_past" not in golden:
        assert name == UNSURE  # p_min needs a confidence head
        return
    p_min = float(golden["pmin_value"]) if kind == "pmin" else 0.0
    prompts = prompts_of(name)[: 2 if kind == "multi" else 1]
    options = options_for(name, p_min=p_min, parallel=len(prompts))
    run = decode(opened(name), prompts, options)
    outputs = [golden[f"{kind}_out"].tolist()]
    if kind == "multi":
        outputs.append(golden["multi_out1"].tolist())
    assert tokens_of(run) == outputs
    for seq in range(len(prompts)):
        assert rounds_of(run, seq) == golden_rounds(golden, kind, seq)


@pytest.mark.parametrize("name", FAMILY)
def test_rounds_without_a_draft_leave_no_gap(name):
    asked = []

    def every_third_is_empty(drafter, requests):
        asked.append(len(requests))
        if len(asked) % 3 == 0:
            return [Draft(drafter=drafter.name) for _ in requests]
        return draft(drafter, requests)

    draft = BlockDrafter.draft
    with patch.object(BlockDrafter, "draft", every_third_is_empty):
        run = decode(opened(name), prompts_of(name)[:1], options_for(name))
    assert rounds_of(run, 0) == golden_rounds(golden_drafter(name), "skip")


@HERE
def test_what_a_draft_tells():
    run = decode(opened(SURE), prompts_of(SURE)[:1], options_for(SURE))
    drafts, tokens = run.trace.drafts, run.trace.tokens
    assert set(drafts.column("block_length").tolist()) == {5}
    drafted = tokens.column("draft_index") >= 0
    p, conf = tokens.column("draft_p")[drafted], tokens.column("draft_conf")[drafted]
    assert (p > 0).all() and (conf > 0).all() and (conf < 1).all()
    assert (
        tokens.column("draft_top_id")[drafted][:, 0] == tokens.column("token_id")[drafted]
    ).all()
    assert drafts.column("confidence")[0] == pytest.approx(conf[:5].mean(), abs=1e-6)
    unsure = decode(opened(PLAIN), prompts_of(PLAIN)[:1], options_for(PLAIN))
    assert set(unsure.trace.tokens.texts("kind")) >= {"accepted", "rejected"}
    assert not (unsure.trace.tokens.column("draft_conf") >= 0).any()
    assert (unsure.trace.drafts.column("confidence") > 0).all()


@HERE
def test_p_min_means_another_thing_to_each():
    for name, reason in ((PLAIN, "p_min"), (SELECTING, "p_min"), (SURE, "confidence")):
        p_min = float(golden_drafter(name)["pmin_value"])
        run = decode(opened(name), prompts_of(name)[:1], options_for(name, p_min=p_min))
        tokens = run.trace.tokens
        drafted = tokens.column("draft_index") >= 0
        column = "draft_conf" if name == SURE else "draft_p"
        assert drafted.any() and (tokens.column(column)[drafted] >= p_min).all()
        reasons = set(run.trace.drafts.texts("reason"))
        assert reason in reasons and meaning(reason)
    with pytest.raises(OptionError, match="dspark-b-bonus-d2t has none"):
        decode(opened(UNSURE), prompts_of(UNSURE)[:1], options_for(UNSURE, p_min=0.1))


@HERE
@pytest.mark.parametrize("n_max", [1, 2, 64])
def test_a_block_is_as_long_as_n_max_asks_for_and_no_longer_than_trained(n_max):
    options = options_for(UNSURE, 12)
    options = replace(options, spec=replace(options.spec, n_max=n_max))
    run = decode(opened(UNSURE), prompts_of(UNSURE)[:1], options)
    wanted = min(n_max, 4)
    assert set(run.trace.drafts.column("block_length").tolist()) == {wanted + 1}
    assert run.trace.rounds.column("num_draft_tokens").max() == wanted


@pytest.mark.parametrize("name", FAMILY)
def test_blocks_end_where_the_context_does(name):
    (prompt,) = prompts_of(name)[:1]
    n_short = 0
    for n_more in (12, 13, 15):
        n_ctx = len(prompt.tokens) + n_more
        plain = decode(opened(name), [prompt], RunOptions(n_predict=40, n_ctx=n_ctx))
        run = decode(opened(name), [prompt], options_for(name, n_ctx=n_ctx))
        assert tokens_of(run) == tokens_of(plain)
        rounds, drafts = run.trace.rounds, run.trace.drafts
        m = int(drafts.column("block_length").max())
        pos0 = {row["round"]: row["pos0"] for row in map(rounds.row, range(len(rounds)))}
        for row in map(drafts.row, range(len(drafts))):
            fits = pos0[row["round"]] + m <= n_ctx
            assert row["block_length"] == (m if fits else None)
            assert fits or row["reason"] == "limit"
            n_short += not fits
    assert n_short


@HERE
def test_memory_is_cut_where_another_text_goes_on():
    """Rows of another text after 20 tokens are gone, and a draft is that of the text itself."""
    golden, session = golden_drafter(PLAIN), opened(PLAIN)
    (drafter,) = session.make_drafters(options_for(PLAIN), 2, 128)
    assert isinstance(drafter, DraftDflash)
    taps = drafter.taps
    tokens = golden["tokens"].tolist()

    def rows(start, stop):
        found = torch.from_numpy(golden["features"][start:stop])
        return TargetRows(found[:, 0], {tap: found[:, i] for i, tap in enumerate(taps)})

    start, request = 30, DraftRequest(0, 30, tokens[30], 4)
    drafter.observe(0, 0, tokens[:start], rows(0, start))
    (expected,) = drafter.draft([request])
    for n_kept, n_drafted_before in ((20, 24), (20, 0), (30, 30), (0, 16)):
        drafter.forget(0)
        drafter.observe(0, 0, tokens[:24], rows(0, 24))
        if n_drafted_before:
            drafter.draft([replace(request, pos0=24, last=5)])
        drafter.observe(0, 24, tokens[40:46], rows(40, 46))
        n_kept = min(n_kept, 24)
        drafter.resume(0, n_kept)
        drafter.observe(0, n_kept, tokens[n_kept:start], rows(n_kept, start))
        (found,) = drafter.draft([request])
        assert found.tokens == expected.tokens
        assert found.probs == pytest.approx(expected.probs, abs=1e-5)


@HERE
def test_several_sequences_share_a_pass():
    golden, session = golden_drafter(SELECTING), opened(SELECTING)
    (drafter,) = session.make_drafters(options_for(SELECTING), 3, 128)
    tokens, taps, starts = golden["tokens"].tolist(), drafter.taps, golden["starts"][:3].tolist()
    features = torch.from_numpy(golden["features"])
    for seq, start in enumerate(starts):
        rows = {tap: features[:start, i] for i, tap in enumerate(taps)}
        drafter.observe(seq, 0, tokens[:start], TargetRows(features[:start, 0], rows))
    asked = [DraftRequest(seq, start, tokens[start], 5) for seq, start in enumerate(starts)]
    with patch.object(drafter._model, "block", wraps=drafter._model.block) as passes:
        drafts = drafter.draft(asked)
    assert passes.call_count == 1
    assert [draft.tokens for draft in drafts] == golden["draft_ids"][:3].tolist()


@pytest.mark.parametrize("name", [name for name in FAMILY if name.startswith("dflash")])
@pytest.mark.thinned(4)
def test_tokens_are_drawn_from_what_is_told_of_them(name):
    """Also a second token after a certain first one: what it is drawn from depends on that."""
    golden, session = golden_drafter(name), opened(name)
    options = options_for(name, sampler=SamplerOptions(temp=3.0, seed=1))
    options = replace(options, spec=replace(options.spec, accept="rejection"))
    (drafter,) = session.make_drafters(options, 1, 128)
    tokens, taps, start = golden["tokens"].tolist(), drafter.taps, int(golden["starts"][0])
    features = torch.from_numpy(golden["features"][:start])
    rows = TargetRows(features[:, 0], {tap: features[:, i] for i, tap in enumerate(taps)})
    drafter.observe(0, 0, tokens[:start], rows)
    drafts = [drafter.draft([DraftRequest(0, start, tokens[start], 5)])[0] for _ in range(600)]
    first = {draft.tokens[0] for draft in drafts}
    assert len(first) > 2
    for at, some in ((0, drafts), (1, [d for d in drafts if d.tokens[0] == drafts[0].tokens[0]])):
        laws = {tuple(zip(d.q[at].ids.tolist(), d.q[at].probs.tolist(), strict=True)) for d in some}
        (law,) = laws
        assert chi_square((d.tokens[at] for d in some), dict(law)) > 1e-3
