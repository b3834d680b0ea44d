"""Trees of drafts: no token changes, whichever branch is right and whatever undoes the others.

Trees are drawn at random and planted in the place of ngram-simple's look-up: the text's own
continuation lies on one branch, as deep as drawn, and every other token is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.analysis.findings.check import recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode import verify_loop
from engine.decode.acceptance import Judge
from engine.draft.drafter import Draft, DraftRequest, branch_of, branches, tree_of, width_at
from engine.draft.model_drafter import ModelDrafter
from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_map import NgramSimple
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.options import (
    DRAFTERS,
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
from engine.trace.records import EMITTED_KINDS
from tests.support.all_pairs import all_pairs
from tests.support.cached_runs import OpenCache, decode_cached, poisoned
from tests.support.golden_drafters import TARGETS, drafter_file, drafters
from tests.support.golden_files import DATA, golden_file, second_set, with_mtp
from tests.support.golden_runs import (
    MODELS,
    SAMPLED,
    decode,
    options_of,
    prompt_of,
    session,
    tokens_of,
)

NAMES = [*MODELS, *second_set()]
HYBRID = "qwen35-c-v2x-mtp-f32"
N = 14
DEPTH = 5
SAMPLERS = (SamplerOptions(), SAMPLED)


def prompts_of(name: str) -> list[Prompt]:
    return [Prompt(prompt_of(name).tokens[:n]) for n in (20, 9, 31)]


@cache
def plain(name: str, sampler: SamplerOptions) -> list[list[int]]:
    options = replace(options_of(N), sampler=sampler)
    return [tokens_of(decode(session(name), [p], options))[0] for p in prompts_of(name)]


def a_tree(draw: random.Random, true: list[int], n_vocab: int, widths: tuple[int, ...]) -> Draft:
    """A tree that keeps to the widths, the first tokens of `true` on one of its branches."""
    draft, level = Draft(), [(-1, True)]
    n_right, depth = draw.randint(0, len(true)), draw.randint(1, DEPTH)
    for i in range(depth):
        children: list[tuple[int, bool]] = []
        for parent, is_true in level:
            n = draw.randint(1, widths[i]) if i < len(widths) else 1
            wrong = draw.sample([t for t in range(n_vocab) if t not in true[i : i + 1]], n)
            right = draw.randrange(n) if is_true and i < n_right else -1
            for rank in range(n if parent < 0 else draw.randint(0, n)):
                children.append((len(draft.tokens), rank == right))
                draft.tokens.append(true[i] if rank == right else wrong[rank])
                draft.parents.append(parent)
        level = children
    return draft


@contextmanager
def planted_trees(name: str, sampler: SamplerOptions, seed: int) -> Iterator[None]:
    draw = random.Random(seed)
    texts = [
        [*p.tokens, *new] for p, new in zip(prompts_of(name), plain(name, sampler), strict=True)
    ]

    def look_up(self: NgramSimple, seq: int, history: Any, last: int) -> Draft:
        known = [*history.part(0), last]
        text = next((one for one in texts if one[: len(known)] == known), known)
        true = text[len(known) :][:DEPTH]
        return a_tree(draw, true, session(name).config.n_vocab, tuple(self._tree))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramSimple, "_look_up", look_up)
        yield


def tree_options(tree: tuple[int, ...], **others: Any) -> RunOptions:
    return replace(options_of(N), spec=SpecOptions(types=("ngram-simple",), tree=tree), **others)


def with_trees(name: str, options: RunOptions, seed: int, n: int = 1) -> Run:
    """Nothing unwritten may be read: all memory begins as NaN."""
    with planted_trees(name, options.sampler, seed), poisoned():
        return decode(session(name), prompts_of(name)[:n], options)


@pytest.mark.parametrize(
    ("name", "policy", "split", "kv", "way"),
    all_pairs(
        NAMES, list(ROLLBACK_POLICIES), SPLITS, KV_MODES, [(s, n) for s in SAMPLERS for n in (1, 3)]
    ),
)
@pytest.mark.thinned(12)
def test_no_token_changes(name, policy, split, kv, way):
    sampler, n = way
    options = tree_options((3, 2), rollback=policy, split=split, kv=kv, sampler=sampler, parallel=n)
    snapshots = DEPTH if ROLLBACK_POLICIES[policy].keeps_snapshots else None
    run = with_trees(name, replace(options, n_rs_seq=snapshots), NAMES.index(name), n)
    assert tokens_of(run) == plain(name, sampler)[:n]
    assert [one.rule for one in recorded(run.trace) if one.severity == "error"] == []
    if split == "equal":
        assert run.trace.ubatches.column("n_seqs").max() > 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.thinned(8)
def test_whatever_is_drawn(seed, pytestconfig):
    """200 runs, 40 of them without --all: snapshots that reach and that do not, passes that split,
    replays of both kinds."""
    if seed >= 4 and not pytestconfig.getoption("all"):
        pytest.skip("with --all")
    draw = random.Random(seed)
    for _ in range(10):
        name, sampler, n = draw.choice(NAMES), draw.choice(SAMPLERS), draw.choice((1, 3))
        options = tree_options(
            tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 2))),
            sampler=sampler,
            rollback=draw.choice([*ROLLBACK_POLICIES]),
            split=draw.choice(SPLITS),
            kv=draw.choice(KV_MODES),
            n_rs_seq=draw.choice((None, *range(7))),
            n_ubatch=draw.choice((3, 8, 512)),
            replay=draw.choice(("trust", "verify")),
            parallel=n,
        )
        run = with_trees(name, options, draw.randrange(1000), n)
        assert tokens_of(run) == plain(name, sampler)[:n], (name, options)


class Verified:
    """A golden tree verified on top of its text: the logits of every node, and what is left."""

    def __init__(self, name: str, options: RunOptions) -> None:
        self.data = data = dict(np.load(DATA / "trees" / f"tree-{name}.npz"))
        ctx, tokens = data["ctx"].tolist(), data["tokens"].tolist()
        tree = Draft(tokens, drafter="ngram-simple", parents=data["parents"].tolist())
        self.logits = np.full(data["logits"].shape, np.nan, np.float32)
        self.round: Any = None

        def branch(judge: Judge, round_: Any, drafts: Any, logits: Any) -> int:
            for path, rows in zip(branches(tree.parents), logits, strict=True):
                self.logits[path] = rows[1 : 1 + len(path)]
            self.round = round_
            return choose(judge, round_, drafts, logits)

        choose = Judge.branch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NgramSimple, "_look_up", lambda *given: replace(tree))
            patch.setattr(Judge, "branch", branch)
            run = session(name).start([Prompt(tuple(ctx[:-1]))], options)
            scheduler = run._scheduler
            scheduler.force_newest(0, ctx[-1])
            run.step()
            scheduler._judge.forced = {}
            run.step()
        self.memory = scheduler._memory


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.parametrize("name", [HYBRID, "qwen3-f-f32"])
def test_golden_trees(name, policy):
    """llama.cpp decoded every path alone, and the accepted one for its states."""
    options = tree_options((24,), rollback=policy, n_ctx=128)
    found = Verified(name, options)
    data, memory = found.data, found.memory
    np.testing.assert_allclose(found.logits, data["logits"], atol=2e-4)
    accepted = data["accepted_path"].tolist()
    assert found.round.path[: len(accepted)] == accepted
    *drafted, bonus = found.round.accepted
    assert (drafted, bonus) == (data["tokens"][accepted].tolist(), int(data["bonus"]))
    assert memory.seq_pos_max(0) == len(data["ctx"]) + len(accepted) - 1
    assert [memory.attention.used(seq) for seq in range(1, memory.attention.n_seqs)] == [0] * 23
    if memory.recurrent:
        for key, state in memory.recurrent.live(0).items():
            golden = data[f"{'S' if key.name == 'state' else 'conv'}_{key.layer}"]
            np.testing.assert_allclose(state.numpy(), golden, atol=1e-4)


def test_a_wrong_parent_is_caught():
    """A branch whose first token is that of its neighbour: what follows has another history."""
    fill, wrong = verify_loop.padded, []

    def with_other_parent(span: Any, width: int) -> Any:
        wrong.append(span.tokens[1])
        tokens = list(span.tokens)
        if span.seq and len(tokens) > 2:
            tokens[1] = wrong[-2]
        return fill(replace(span, tokens=tokens), width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_loop, "padded", with_other_parent)
        with pytest.raises(AssertionError):
            test_golden_trees(HYBRID, "planes")
        runs = [with_trees(HYBRID, tree_options((3,), n_rs_seq=5), seed) for seed in range(4)]
    assert any(tokens_of(run) != plain(HYBRID, SAMPLERS[0])[:1] for run in runs)


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.thinned(4)
def test_the_state_of_another_branch_is_caught(policy):
    """The text goes on from its first branch, whichever was accepted."""
    copy = HybridMemory.fork

    def not_back(memory: HybridMemory, src: int, dst: int) -> None:
        if dst:
            copy(memory, src, dst)

    snapshots = DEPTH if ROLLBACK_POLICIES[policy].keeps_snapshots else None
    options = tree_options((3,), rollback=policy, n_rs_seq=snapshots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HybridMemory, "fork", not_back)
        runs = [with_trees(HYBRID, options, seed) for seed in range(4)]
    assert any(tokens_of(run) != plain(HYBRID, SAMPLERS[0])[:1] for run in runs)


@pytest.mark.parametrize(
    "spec",
    [
        {"types": ("ngram-mod",)},
        {"accept": "rejection"},
        {"verify_max": 2},
        {"synth_len": 2.0},
        {"tree": (0,)},
    ],
    ids=str,
)
def test_what_has_no_trees_says_so(spec):
    with pytest.raises(OptionError, match="--spec-"):
        SpecOptions(**{"types": ("ngram-simple",), "tree": (2, 2)} | spec)


def test_too_many_branches_are_refused():
    with pytest.raises(OptionError, match="90 branches for each of 1 sequences"):
        tree_options((10, 9))


EAGLE3 = drafters("eagle3")
MTPS = [(name, "") for name in with_mtp(NAMES)]
MODEL_DRAFTERS = [*MTPS, *((TARGETS[one], one) for one in EAGLE3)]


@cache
def opened(name: str, draft: str) -> Session:
    if not draft:
        return session(name)
    files = golden_file(f"{name}.gguf"), drafter_file(f"{draft}.gguf")
    return Session.open(*files, compute="f32")


def drafter_of(draft: str) -> str:
    return "draft-eagle3" if draft else "draft-mtp"


@pytest.mark.parametrize(
    ("models", "policy", "how", "way"),
    all_pairs(
        MODEL_DRAFTERS,
        list(ROLLBACK_POLICIES),
        [(split, kv) for split in SPLITS for kv in KV_MODES],
        [(s, n, p_min) for s in SAMPLERS for n, p_min in ((1, 0.0), (3, 0.1))],
    ),
)
@pytest.mark.thinned(10)
def test_model_drafters_change_no_token(models, policy, how, way):
    (name, draft), (split, kv), (sampler, n, p_min) = models, how, way
    spec = SpecOptions(types=(drafter_of(draft),), tree=(2, 2), n_max=3, p_min=p_min)
    options = replace(
        options_of(N), spec=spec, sampler=sampler, rollback=policy, split=split, kv=kv, parallel=n
    )
    run = decode(opened(name, draft), prompts_of(name)[:n], options)
    assert tokens_of(run) == plain(name, sampler)[:n]
    for column in ("num_wrong_rows", "num_wrong_tokens"):
        assert not run.trace.drafts.column(column).any()


@pytest.mark.parametrize(("name", "draft"), MODEL_DRAFTERS[:1] + MODEL_DRAFTERS[-1:])
def test_branches_are_the_chains_of_other_first_tokens(name, draft):
    """A chain that is made to begin with the second best token is the second branch."""
    step = ModelDrafter._step

    def first_draft(tree: tuple[int, ...], rank: int) -> Draft:
        calls = []

        def other_first(self: Any, *given: Any) -> Any:
            found = step(self, *given)
            calls.append(0)
            if len(calls) > 1 or not rank:
                return found
            ids, probs = found.ids.roll(-rank, 1), found.probs.roll(-rank, 1)
            return found._replace(ids=ids, probs=probs)

        spec = SpecOptions(types=(drafter_of(draft),), tree=tree, n_max=4, p_min=1e-6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelDrafter, "_step", other_first)
            run = opened(name, draft).start([prompt_of(name)], replace(options_of(N), spec=spec))
            run.step()
            run.step()
        return run._scheduler._chain.asked[0][1]

    tree = first_draft((3,), 0)
    found = [branch_of(tree, path) for path in branches(tree.parents)]
    for rank, branch in enumerate(found):
        chain = first_draft((), rank)
        assert branch.tokens == chain.tokens
        np.testing.assert_allclose(branch.probs, chain.probs, atol=1e-5)
    assert len(found) == 3


def test_the_trace_holds_every_node_once():
    """Numbers and parents make the tree again; what was judged is on one branch."""
    trees: dict[int, Draft] = {}
    branch = Judge.branch

    def noted(judge: Judge, round_: Any, *rest: Any) -> int:
        trees[round_.number] = round_.draft
        return branch(judge, round_, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "branch", noted)
        run = with_trees(HYBRID, tree_options((3, 2), n_rs_seq=DEPTH), 5)
    table, rounds = run.trace.tokens, run.trace.rounds
    rows = [table.row(i) for i in range(len(table))]
    assert trees
    for number, tree in trees.items():
        nodes = [r for r in rows if r["round"] == number and r["draft_node"] is not None]
        nodes.sort(key=lambda r: r["draft_node"])
        assert [r["token_id"] for r in nodes] == tree.tokens
        assert [r["draft_parent"] for r in nodes] == tree.parents
        judged = [r["draft_node"] for r in nodes if r["kind"] != "side"]
        for node, r in enumerate(nodes):
            assert r["draft_index"] == (tree.depths[node] if node in judged else None)
        assert judged in branches(tree.parents)
        row = next(r for r in (rounds.row(i) for i in range(len(rounds))) if r["round"] == number)
        assert [r["pos"] - row["pos0"] - 1 for r in nodes] == tree.depths
        assert row["num_draft_tokens"] == len(judged)
        assert row["verify_width"] == sum(1 + len(path) for path in branches(tree.parents))
        accepted = [r for r in nodes if r["kind"] == "accepted"]
        assert row["num_accepted_draft_tokens"] >= len(accepted)
        emitted = [r for r in rows if r["round"] == number and r["kind"] in EMITTED_KINDS]
        assert [r["pos"] for r in emitted] == [
            *range(row["pos0"] + 1, row["pos0"] + 1 + len(emitted))
        ]
    chains = [r for r in rows if r["round"] not in trees]
    assert all(r["draft_node"] is None and r["kind"] != "side" for r in chains)


@pytest.mark.parametrize("drafter", ["ngram-simple", "ngram-map-k4v"])
def test_n_grams_go_on_as_their_matches_did(drafter):
    """a b is followed by c, d and c again: both, each once."""
    sizes = NgramSizes(size_n=2, size_m=2)
    make = DRAFTERS[drafter].make
    ngrams = make(SimpleNamespace(options=sizes, tree=(3,)))
    a, b, filler = 1, 2, [7, 8, 9]
    ngrams.begin(0, [0, a, b, 3, 4, *filler, a, b, 5, 6, *filler, a, b, 3, 4, *filler, a])
    [draft] = ngrams.draft([DraftRequest(0, 25, b, 2)])
    found = [[draft.tokens[i] for i in path] for path in branches(draft.parents)]
    assert found == [[3, 4], [5, 6]]
    assert width_at((3, 2), 1) == 2
    assert width_at((3, 2), 2) == 1


def test_a_tree_keeps_to_its_widths():
    tree = tree_of([[1, 2, 3], [1, 4, 5], [6, 7], [1, 2, 8], [9, 9]], (2, 2))
    paths = [[tree.tokens[i] for i in path] for path in branches(tree.parents)]
    assert paths == [[1, 2, 3], [1, 4, 5], [6, 7]]
    tree.cut(2, "limit")
    assert [[tree.tokens[i] for i in path] for path in branches(tree.parents)] == [
        [1, 2],
        [1, 4],
        [6, 7],
    ]
    assert (tree.length, tree.reason) == (2, "limit")


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.thinned(4)
def test_a_prompt_cache_holds_the_text_after_trees(policy, kv):
    spec = SpecOptions(types=("draft-mtp",), tree=(2, 2))
    options = replace(options_of(N), spec=spec, rollback=policy, kv=kv, parallel=2)
    opened, cache = session(HYBRID), OpenCache(CacheOptions())
    first = prompts_of(HYBRID)[0]
    run, _ = decode_cached(opened, [first], options, cache)
    further = Prompt((*first.tokens, *tokens_of(run)[0], 5, 6))
    later, _ = decode_cached(opened, [further], options, cache)
    assert tokens_of(later) == tokens_of(decode(opened, [further], options_of(N)))
    assert later.results()[0].timings["cache_n"] > len(first.tokens)


@pytest.mark.parametrize(
    ("name", "policy", "split", "kv", "way"),
    all_pairs(
        NAMES, list(ROLLBACK_POLICIES), SPLITS, KV_MODES, [(s, n) for s in SAMPLERS for n in (1, 3)]
    )[::6],
)
@pytest.mark.thinned(12)
def test_a_lane_of_trees_is_as_plain_decoding(name, policy, split, kv, way):
    sampler, n = way
    options = tree_options((3, 2), sampler=sampler, parallel=n)
    text = f"{policy},split={split},kv={kv}"
    lanes = [NOISE_LANE, *map(LaneSpec.parse, (text, f"{text},free", "planes,forks"))]
    with planted_trees(name, sampler, seed=1), poisoned():
        found = Comparison(session(name), prompts_of(name)[:n], options, lanes)
        while found.step():
            pass
    assert found.emitted == [list(one) for one in plain(name, sampler)[:n]]
    for verdict in found.results():
        assert not verdict.is_beyond and not verdict.error, verdict
    kinds = found.trace.tokens.texts("kind")
    runs = found.trace.tokens.column("run_id").tolist()
    mine = {one.lane: one.run_id for one in found.results()}
    for lane in (text, f"{text},free"):
        assert any(k == "side" and r == mine[lane] for k, r in zip(kinds, runs, strict=True))


def test_a_lane_of_trees_that_undoes_wrongly_is_told():
    lanes = [NOISE_LANE, LaneSpec.parse("planes"), LaneSpec.parse("planes,fault=no-conv-rollback")]
    options = tree_options((3, 2), sampler=SAMPLERS[0], n_rs_seq=DEPTH)
    with planted_trees(HYBRID, SAMPLERS[0], 1):
        found = Comparison(session(HYBRID), prompts_of(HYBRID)[:1], options, lanes)
        while found.step():
            pass
    right, wrong = found.results()[-2:]
    assert not right.is_beyond and wrong.is_beyond
