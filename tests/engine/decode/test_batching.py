"""Groups of verify batches against every possible grouping, and what filler leaves in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Span
from engine.compare.divergence import ReferenceMemory
from engine.decode.batching import (
    CONTEXT,
    COST,
    LAST,
    N_UBATCH,
    PASS_COST,
    SNAPSHOTS,
    group,
    verify_batches,
)
from engine.decode.forward import Forward
from engine.decode.recorder import Recorder
from engine.decode.round import PhaseClock
from engine.memory.hybrid import HybridMemory
from engine.options import ROLLBACK_POLICIES, RunOptions
from engine.trace.store import TraceStore
from tests.support.golden_runs import session

MTP, DENSE = "qwen35-c-v2x-mtp-f32", "qwen3-f-f32"
CPU = torch.device("cpu")


def free(i: int, width: int) -> str:
    return ""


def shapes(lengths: list[int], n_ubatch: int = 512) -> list[tuple[tuple[int, ...], int, str]]:
    return group(lengths, n_ubatch, free)


def test_hand_made_groups():
    assert shapes([4, 4, 4]) == [((0, 1, 2), 4, LAST)]
    assert shapes([2, 4, 1]) == [((0, 1, 2), 4, LAST)]
    assert shapes([2, 49, 2, 2, 2]) == [((1,), 49, COST), ((0, 2, 3, 4), 2, LAST)]
    assert shapes([4] * 5, 16) == [((0, 1, 2, 3), 4, N_UBATCH), ((4,), 4, LAST)]
    assert shapes([9], 4) == [((0,), 9, LAST)]
    # 16 more tokens cost no more than another pass, 17 do
    assert len(shapes([PASS_COST + 1, 1])) == 1
    assert len(shapes([PASS_COST + 2, 1])) == 2


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def cost(parts: list[list[int]], lengths: list[int]) -> int:
    return sum(PASS_COST + len(part) * max(lengths[i] for i in part) for part in parts)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([8, 24, 60, 512]))
def test_no_grouping_is_cheaper(lengths: list[int], n_ubatch: int) -> None:
    found = group(lengths, n_ubatch, free)
    allowed = [
        cost(parts, lengths)
        for parts in partitions(list(range(len(lengths))))
        if all(
            len(part) == 1 or len(part) * max(lengths[i] for i in part) <= n_ubatch
            for part in parts
        )
    ]
    # runs of neighbouring lengths are best only while a ubatch has room for all of them
    if len(lengths) * max(lengths) <= n_ubatch:
        assert cost([list(members) for members, *_ in found], lengths) == min(allowed)
    assert cost([list(members) for members, *_ in found], lengths) >= min(allowed)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_every_span_is_in_one_group_that_it_may_be_in(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 65), min_size=1, max_size=20))
    n_ubatch = data.draw(st.sampled_from([1, 7, 32, 100, 512]))
    extra = [data.draw(st.sampled_from([0, 1, 3, 64])) for _ in lengths]

    def obstacle(i: int, width: int) -> str:
        assert width > lengths[i]
        return SNAPSHOTS if width > lengths[i] + extra[i] else ""

    groups = group(lengths, n_ubatch, obstacle)
    members = [i for members, *_ in groups for i in members]
    assert sorted(members) == list(range(len(lengths)))
    assert [width for _, width, _ in groups] == sorted(
        (width for _, width, _ in groups), reverse=True
    )
    for (members, width, reason), after in zip(groups, [*groups[1:], None], strict=True):
        assert list(members) == sorted(members)
        assert width == max(lengths[i] for i in members)
        assert len(members) == 1 or width * len(members) <= n_ubatch
        assert all(width <= lengths[i] + extra[i] for i in members)
        refused = after and any(width > lengths[i] + extra[i] for i in after[0])
        assert (reason == SNAPSHOTS) == bool(refused)
        assert (reason == LAST) == (after is None)
        if reason == N_UBATCH:
            assert after
            assert width * (len(members) + len(after[0])) > n_ubatch
        if reason == COST:
            assert after
            joined = [[*members, *after[0]]]
            apart = [list(members), list(after[0])]
            assert cost(joined, lengths) > cost(apart, lengths)


class Bench:
    """A memory with texts in it, and what the scheduler would decode with."""

    def __init__(self, name: str, texts: list[list[int]], n_ctx: int = 64, **settings) -> None:
        opened = session(name)
        self.memory = HybridMemory.for_model(opened.config, len(texts), n_ctx, CPU, **settings)
        self.memory.poison(float("nan"))
        store = TraceStore()
        store.begin_run({})
        self.recorder = recorder = Recorder(store, 0, lambda token: b"")
        self.forward = Forward(opened.model, self.memory, RunOptions(), recorder, lambda seq: seq)
        self.trace, self.n_done = store, [len(text) for text in texts]
        self.clock = PhaseClock()
        self.clock.start()
        for seq, text in enumerate(texts):
            self.forward.run(self.forward.split([Span(seq, 0, text, [])]), 0, "prompt", self.clock)

    def spans(self, drafts: list[list[int]]) -> list[Span]:
        return [
            Span(seq, self.n_done[seq], draft, range(len(draft)))
            for seq, draft in enumerate(drafts)
        ]

    def verify(self, drafts: list[list[int]], kept: list[int], split: str) -> dict:
        """Decode batch by batch, keep this many tokens of each; logits by sequence."""
        found = {}
        for spans, ubatches in verify_batches(self.forward, self.spans(drafts), split):
            logits, _ = self.forward.run(ubatches, 1, "verify", self.clock)
            found.update(logits)
            for span in spans:
                assert self.memory.seq_rm(span.seq, span.pos0 + kept[span.seq])
        self.recorder.resume()  # what it has of the passes is written
        return found


def drafts_of(lengths: list[int]) -> list[list[int]]:
    return [[(31 * seq + 7 * i + 5) % 370 for i in range(n)] for seq, n in enumerate(lengths)]


@cache
def texts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    return [[(11 * seq + 3 * i + 1) % 370 for i in range(n)] for seq, n in enumerate(lengths)]


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_filler_leaves_no_trace_in_memory(data: st.DataObject) -> None:
    """After the rollback, memory is what single passes without filler would have left."""
    policy = data.draw(st.sampled_from([p for p in ROLLBACK_POLICIES if p != "checkpoint"]))
    name = data.draw(st.sampled_from([MTP, DENSE]))
    unified = data.draw(st.booleans())
    n_seqs = data.draw(st.integers(2, 4))
    size = st.integers(1, 5)
    texts = texts_of(tuple(data.draw(st.integers(1, 9)) for _ in range(n_seqs)))
    many = {"policy": policy, "n_rs_seq": 4, "unified": unified}
    padded, alone = Bench(name, texts, **many), Bench(name, texts, **many)
    for _ in range(2):  # the second round starts from pending rollbacks
        lengths = [data.draw(size) for _ in range(n_seqs)]
        kept = [data.draw(st.integers(1, n)) for n in lengths]
        drafts = drafts_of(lengths)
        ours = padded.verify(drafts, kept, "equal")
        theirs = alone.verify(drafts, kept, "seq")
        for seq in range(n_seqs):
            torch.testing.assert_close(ours[seq], theirs[seq], atol=2e-4, rtol=0)
            assert len(ours[seq]) == lengths[seq]
            padded.n_done[seq] += kept[seq]
            alone.n_done[seq] += kept[seq]
            assert padded.memory.seq_pos_max(seq) == alone.memory.seq_pos_max(seq)
            difference = ReferenceMemory(alone.memory, seq).difference(padded.memory, seq)
            assert difference.n_cells == 0
            assert max([*difference.state, *difference.conv], default=0.0) < 1e-4
    verify = [
        i for i, what in enumerate(padded.trace.ubatches.texts("purpose")) if what == "verify"
    ]
    assert len(verify) == 2 or (name == DENSE and unified)


@pytest.mark.parametrize(("policy", "n_rs_seq"), [("planes", 3), ("ring", 3), ("replay", 3)])
def test_filler_does_not_go_beyond_the_snapshots(policy, n_rs_seq):
    bench = Bench(MTP, texts_of((3, 4, 5)), policy=policy, n_rs_seq=n_rs_seq)
    batches = verify_batches(bench.forward, bench.spans(drafts_of([6, 2, 4])), "equal")
    assert [(ubatches[0].seq_ids, ubatches[0].reason) for _, ubatches in batches] == [
        ((0,), SNAPSHOTS),
        ((1, 2), LAST),
    ]
    assert [ubatches[0].n_padding for _, ubatches in batches] == [0, 2]
    assert batches[1][0][0].tokens == [*drafts_of([6, 2])[1], *[drafts_of([6, 2])[1][-1]] * 2]
    assert batches[1][1][0].outputs.tolist() == [0, 1, 4, 5, 6, 7]


def test_checkpoints_alone_allow_no_filler():
    bench = Bench(MTP, texts_of((3, 4, 5)), policy="checkpoint")
    batches = verify_batches(bench.forward, bench.spans(drafts_of([2, 3, 2])), "equal")
    assert [(ubatches[0].seq_ids, ubatches[0].reason) for _, ubatches in batches] == [
        ((1,), SNAPSHOTS),
        ((0, 2), LAST),
    ]


@pytest.mark.parametrize("unified", [False, True])
def test_filler_does_not_go_beyond_the_context(unified):
    bench = Bench(MTP, texts_of((3, 13)), n_ctx=16, policy="ring", n_rs_seq=8, unified=unified)
    batches = verify_batches(bench.forward, bench.spans(drafts_of([4, 1])), "equal")
    assert [ubatches[0].reason for _, ubatches in batches] == [CONTEXT, LAST]
    batches = verify_batches(bench.forward, bench.spans(drafts_of([3, 1])), "equal")
    assert [ubatches[0].n_padding for _, ubatches in batches] == [2]


def test_a_pool_of_cells_needs_no_filler():
    bench = Bench(DENSE, texts_of((3, 4)), unified=True)
    ((_, ubatches),) = verify_batches(bench.forward, bench.spans(drafts_of([5, 1])), "equal")
    assert [u.n_padding for u in ubatches] == [0]
    assert len(verify_batches(bench.forward, bench.spans(drafts_of([5, 1])), "seq")) == 2
