"""draft-eagle3 in whole runs: golden traces, plain decoding's text, a memory that keeps step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.analysis.findings.check import recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LaneSpec
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.ngram_drafter import NgramSizes
from engine.machine.graphs import VARIABLE
from engine.options import (
    KV_MODES,
    ROLLBACK_POLICIES,
    SPLITS,
    CacheOptions,
    Prompt,
    RunOptions,
    SamplerOptions,
    SpecOptions,
)
from engine.run import Run
from engine.session import Session
from resources import DEMO_EAGLE3, DEMO_TARGET
from tests.support.all_texts import texts_behind, written
from tests.support.cached_runs import OpenCache, decode_cached, drafted
from tests.support.chi_square import chi_square
from tests.support.comparisons import finish
from tests.support.golden_drafters import TARGETS, drafter_file, drafters, golden_drafter
from tests.support.golden_files import golden_file
from tests.support.golden_runs import SAMPLED, decode, tokens_of

NAMES = drafters("eagle3")
HYBRID, DENSE = "eagle3-a-shared", "eagle3-b-d2t-norms"
pytestmark = pytest.mark.skipif(not NAMES, reason="the golden drafters are not there")


@cache
def opened(name: str) -> Session:
    files = golden_file(f"{TARGETS[name]}.gguf"), drafter_file(f"{name}.gguf")
    return Session.open(*files, compute="f32")


def options_of(name: str, n: int = 40, front: Sequence[str] = (), **others) -> RunOptions:
    spec = SpecOptions(
        types=(*front, "draft-eagle3"),
        n_max=golden_drafter(name)["draft_ids"].shape[1],
        p_min=others.pop("p_min", 0.0),
        accept=others.pop("accept", "match"),
        ngram_simple=NgramSizes(2, 3),
    )
    return RunOptions(n_predict=n, spec=spec, **others)


def prompt_a(name: str) -> Prompt:
    golden = golden_drafter(name)
    return Prompt(tuple(golden["tokens"][: int(golden["n_prompt"])].tolist()))


def prompts_of(name: str, n: int) -> list[Prompt]:
    tokens = golden_drafter(name)["tokens"].tolist()
    return [Prompt(tuple(tokens[3 * i : 20 + 5 * i])) for i in range(n)]


def check_trace(run: Run, golden: dict[str, np.ndarray], kind: str) -> None:
    """Rounds of each sequence in the order of the golden trace."""
    rounds, tokens = run.trace.rounds, run.trace.tokens
    drafted_rows = tokens.column("draft_index") >= 0
    fields = ("seq", "past", "draft", "n_draft", "accepted")
    rows = zip(*(golden[f"{kind}_{field}"].tolist() for field in fields), strict=True)
    at = dict.fromkeys((0, 1), 0)  # the prompt's round is 0
    for seq, past, draft, n_draft, accepted in rows:
        at[seq] += 1
        mine = (rounds.column("seq_id") == seq) & (rounds.column("round") == at[seq])
        assert rounds.column("pos0")[mine].tolist() == [past]
        assert rounds.column("num_accepted_draft_tokens")[mine].tolist() == [accepted]
        here = drafted_rows & (tokens.column("round") == at[seq]) & (tokens.column("seq_id") == seq)
        assert tokens.column("token_id")[here].tolist() == draft[:n_draft]
    assert not [f for f in recorded(run.trace) if f.severity != "info"]


@pytest.mark.parametrize(("name", "kind"), list(product(NAMES, ("spec", "pmin"))))
@pytest.mark.thinned(4)
def test_drafts_and_acceptance_are_golden(name, kind):
    golden = golden_drafter(name)
    p_min = float(golden["pmin_value"]) if kind == "pmin" else 0.0
    run = decode(opened(name), [prompt_a(name)], options_of(name, p_min=p_min))
    assert tokens_of(run)[0] == golden["spec_out"].tolist()
    check_trace(run, golden, kind)


@pytest.mark.parametrize("name", NAMES)
def test_two_sequences_draft_in_one_pass(name):
    golden = golden_drafter(name)
    prompts = [prompt_a(name), Prompt(tuple(golden["prompt_b"].tolist()))]
    run = decode(opened(name), prompts, options_of(name, parallel=2))
    assert tokens_of(run) == [golden["multi_out"].tolist(), golden["multi_out1"].tolist()]
    check_trace(run, golden, "multi")


@pytest.mark.parametrize("name", NAMES)
def test_rounds_without_a_draft_leave_right_pairs(name, monkeypatch):
    """Every third round is not drafted, as if another drafter had been asked and had none."""
    golden, draft, asked = golden_drafter(name), DrafterChain.draft, iter(range(100))

    def skipping(chain: DrafterChain, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        if next(asked) % 3 < 2:
            return draft(chain, requests)
        chain.asked = []
        return {}

    monkeypatch.setattr(DrafterChain, "draft", skipping)
    run = decode(opened(name), [prompt_a(name)], options_of(name))
    golden = golden | {"skip_seq": np.zeros_like(golden["skip_past"])}
    check_trace(run, golden, "skip")


@cache
def plain(name: str, n_prompts: int, sampler: SamplerOptions) -> list[list[int]]:
    options = RunOptions(n_predict=14, sampler=sampler, parallel=n_prompts, ignore_eos=True)
    return tokens_of(decode(opened(name), prompts_of(name, n_prompts), options))


@settings(max_examples=8)
@given(
    name=st.sampled_from(NAMES),
    policy=st.sampled_from(list(ROLLBACK_POLICIES)),
    split=st.sampled_from(SPLITS),
    kv=st.sampled_from(KV_MODES),
    n_seqs=st.sampled_from([1, 4]),
    sampler=st.sampled_from([SamplerOptions(), SAMPLED]),
    front=st.sampled_from([(), ("ngram-simple",)]),
    n_batch=st.sampled_from([7, 64]),
)
def test_no_token_changes(name, policy, split, kv, n_seqs, sampler, front, n_batch):
    options = options_of(
        name,
        14,
        front,
        rollback=policy,
        split=split,
        kv=kv,
        parallel=n_seqs,
        sampler=sampler,
        n_batch=n_batch,
        ignore_eos=True,
    )
    run = decode(opened(name), prompts_of(name, n_seqs), options)
    assert tokens_of(run) == plain(name, n_seqs, sampler)
    assert run.trace.drafts.column("num_wrong_rows").max() == 0
    assert run.trace.drafts.column("num_wrong_tokens").max() == 0


@pytest.mark.parametrize("name", [HYBRID, DENSE])
def test_parts_of_a_prompt_change_no_draft(name):
    """The pair between two parts has the row of its own place."""
    whole, parts = (
        drafted(decode(opened(name), [prompt_a(name)], options_of(name, n_batch=n_batch)))
        for n_batch in (512, 9)
    )
    assert whole[0] == parts[0]


@pytest.mark.parametrize("name", [HYBRID, DENSE])
@pytest.mark.thinned(4)
def test_a_cached_prompt_drafts_as_a_new_one(name):
    """Cut back within the snapshots, from a context checkpoint, and from the beginning."""
    options = options_of(name, 6, n_ubatch=8, n_batch=16, ignore_eos=True, n_ctx=128)
    cache, source = OpenCache(CacheOptions(ctx_checkpoints=3)), list(prompt_a(name).tokens)
    texts = [source, [*source, 5, 6, 7], [*source[:-2], 9], [*source[:12], 3, 4, 5], source[5:]]
    for text in texts:
        run, _ = decode_cached(opened(name), [Prompt(tuple(text))], options, cache)
        bare, _ = decode_cached(opened(name), [Prompt(tuple(text))], options, None)
        assert tokens_of(run) == tokens_of(bare)
        assert drafted(run)[0] == drafted(bare)[0]


def test_recorded_passes_draft_the_same(monkeypatch):
    found = []
    for graphs in ("", "off"):
        monkeypatch.setenv(VARIABLE, graphs)
        run = decode(opened(HYBRID), prompts_of(HYBRID, 3), options_of(HYBRID, parallel=3))
        found.append([column.tolist() for column in _drafts(run)])
    assert found[0] == found[1]


def _drafts(run: Run) -> list[np.ndarray]:
    tokens = run.trace.tokens
    mine = tokens.column("draft_index") >= 0
    return [tokens.column(name)[mine] for name in ("token_id", "draft_p", "pos")]


def test_the_end_of_the_context_is_reached():
    n_ctx = len(prompt_a(DENSE).tokens) + 12
    options = options_of(DENSE, -1, n_ctx=n_ctx, ignore_eos=True)
    run = decode(opened(DENSE), [prompt_a(DENSE)], options)
    expected = decode(opened(DENSE), [prompt_a(DENSE)], replace(options, spec=SpecOptions()))
    assert run.results()[0].stop == expected.results()[0].stop == "context"
    assert tokens_of(run) == tokens_of(expected)


def test_lanes_share_its_drafts():
    lanes = [LaneSpec.parse("planes"), LaneSpec.parse("ring,free")]
    comparison = Comparison(opened(HYBRID), prompt_a(HYBRID), options_of(HYBRID, 12), lanes)
    finish(comparison)
    assert comparison.emitted[0] == golden_drafter(HYBRID)["spec_out"].tolist()[:12]
    assert comparison.trace.rounds.column("num_accepted_draft_tokens").max() > 0


def counted(name: str, **others) -> tuple[int, int]:
    run = decode(opened(name), [prompt_a(name)], options_of(name, **others))
    assert tokens_of(run)[0] == golden_drafter(name)["spec_out"].tolist()
    return run.summary()["draft_n"], run.summary()["draft_n_accepted"]


def rules_of(run: Run) -> set[str]:
    return {f.rule for f in recorded(run.trace) if f.severity != "info"}


@pytest.mark.skipif(DENSE not in NAMES, reason="the golden drafter is not there")
@pytest.mark.parametrize(("n_batch", "counters"), [(8, (49, 25)), (9, (44, 26)), (20, (50, 25))])
def test_the_boundary_fault_is_llama_cpps_and_is_named(n_batch, counters):
    """The counters are those that the reference's server showed with such batches."""
    faulty = {"faults": ("eagle3-boundary",), "n_batch": n_batch}
    assert counted(DENSE, n_batch=n_batch) == (41, 27)
    assert counted(DENSE, **faulty) == counters
    run = decode(opened(DENSE), [prompt_a(DENSE)], options_of(DENSE, **faulty))
    assert rules_of(run) == {"eagle3-boundary-row"}


def test_a_rejected_token_that_stays_is_named():
    for faults in ((), ("eagle3-stale-row",)):
        options = options_of(DENSE, front=("ngram-simple",), faults=faults)
        prompt = Prompt(prompt_a(DENSE).tokens + prompt_a(DENSE).tokens[:9])
        run = decode(opened(DENSE), [prompt], options)
        assert rules_of(run) == ({"eagle3-stale-row"} if faults else set())
        texts = tokens_of(run)
    assert texts == tokens_of(decode(opened(DENSE), [prompt], replace(options, spec=SpecOptions())))


@pytest.mark.repeats("test_rejection_runs.py")
def test_texts_are_distributed_as_by_plain_sampling():
    demo = Session.open(DEMO_TARGET, DEMO_EAGLE3, compute="f32")
    prompt = demo.prompt("for i in range(").tokens
    found, drafted, accepted = written(demo, 150, "draft-eagle3", prompt)
    assert 0.1 < accepted / drafted < 0.95
    assert chi_square(found, texts_behind(demo, prompt)) > 1e-2
