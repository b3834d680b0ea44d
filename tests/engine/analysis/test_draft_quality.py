"""Calibration, survival, ranks at rejections and tree gains against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from engine.analysis.acceptance.breakdown import Judged
from engine.analysis.acceptance.counts import Survival
from engine.analysis.draft_quality import (
    Calibration,
    DraftQuality,
    DraftReader,
    by_drafter,
    tree_gains,
    width_cost,
)
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

Drafted = tuple[float | None, list[int]]
"""Confidence and candidates; the drafted token is the first of them."""


def write(
    store: TraceStore,
    run_id: int,
    round_: int,
    draft: list[Drafted],
    n_accepted: int,
    own: int,
    *,
    drafter: str = "draft-mtp",
    seq_id: int = 0,
    lost: int = 0,
    unverified: int = 0,
) -> None:
    """A round in which the target chose `own` after the accepted tokens; the last `lost` drafted
    tokens are not reported, the last `unverified` ones were no part of the verified draft."""
    ids = {"run_id": run_id, "round": round_, "seq_id": seq_id}
    pos = 100 * round_
    for i, (confidence, candidates) in enumerate(draft[: len(draft) - lost]):
        kind = "accepted" if i < n_accepted else "rejected" if i == n_accepted else "ignored"
        looked_up = {} if confidence is None else {"draft_p": confidence}
        tops = {} if confidence is None else {"draft_top_id": candidates}
        store.tokens.append(
            **ids,
            pos=pos + i,
            kind=kind,
            token_id=candidates[0],
            draft_index=i,
            **looked_up,
            **tops,
        )
    for i in range(n_accepted):  # decoded again: no draft of its own
        store.tokens.append(**ids, pos=pos + i, kind="replayed", token_id=7, draft_index=i)
    kind = "bonus" if n_accepted == len(draft) else "replacement"
    store.tokens.append(**ids, pos=pos + n_accepted, kind=kind, token_id=own)
    store.rounds.append(
        **ids,
        drafter=drafter,
        num_draft_tokens=len(draft) - unverified,
        num_accepted_draft_tokens=n_accepted,
    )


def scripted(store: TraceStore) -> RunRef:
    """Five drafts of one drafter, one that was looked up, and a run that is not asked for."""
    store.begin_run({})
    run_id = store.begin_run({})
    write(store, 0, 1, [(0.5, [1, 2])], 0, 2)
    write(store, run_id, 1, [(0.95, [1, 2]), (0.95, [3, 4]), (0.5, [5, 6])], 2, 9, unverified=1)
    write(store, run_id, 2, [(0.85, [1, 2, 3]), (0.35, [4, 5, 6]), (0.1, [7, 8])], 1, 6)
    write(store, run_id, 2, [(0.9, [1, 2])], 0, 2, seq_id=1)
    write(store, run_id, 3, [(0.9, [1, 2])], 0, 5)
    write(store, run_id, 4, [(0.3, [1, 2]), (0.2, [1, 2])], 1, 3, lost=1)
    write(store, run_id, 5, [(None, [1]), (None, [2])], 1, 3, drafter="ngram-mod")
    return RunRef(store, run_id)


def test_drafts_are_taken_apart_by_drafter() -> None:
    store = TraceStore()
    run = scripted(store)
    drafts = DraftReader(run).read()
    assert drafts is not None
    found = {store.text_pool.text(code): q for code, q in by_drafter(drafts).items()}
    mtp, looked_up = found["draft-mtp"], found["ngram-mod"]
    # judged: .95 .95 accepted; .85 accepted, .35 rejected; .9 and .9 rejected; the rest unknown
    assert mtp.calibration.n.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1, 4]
    assert mtp.calibration.accepted.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    assert mtp.calibration.ece == pytest.approx((0.35 + 0.15 + abs(2 - 3.7)) / 6)
    assert mtp.calibration.excess == pytest.approx((4.9 - 3) / 6)
    assert mtp.by_rank.tolist() == [0, 1, 1, 0, 0, 1]  # 2 of [1, 2]; 6 of [4, 5, 6]; 5 of neither
    assert (mtp.n_steps, mtp.n_untold, mtp.n_ranked, mtp.n_ranked_accepted) == (5, 1, 4, 3)
    assert mtp.tokens_per_step == pytest.approx(1 + 4 / 5)
    assert (looked_up.n_steps, looked_up.calibration.n_tokens, looked_up.n_rejections) == (1, 0, 0)
    assert looked_up.tree_gains == []
    assert looked_up.calibration.ece is None


def test_a_growing_run_gives_the_same_sums() -> None:
    whole = DraftQuality()
    drafts = DraftReader(scripted(TraceStore())).read()
    assert drafts is not None
    for quality in by_drafter(drafts).values():
        whole += quality
    store = TraceStore()
    source = scripted(TraceStore())
    store.begin_run({})
    run = RunRef(store, store.begin_run({}))
    reader, grown = DraftReader(run), DraftQuality()
    rows = [
        (row["run_id"], row["round"], row["seq_id"], table.name == "rounds", table, row)
        for table in (source.store.tokens, source.store.rounds)
        for row in map(table.row, range(len(table)))
    ]
    for *_, table, row in sorted(rows, key=lambda one: one[:4]):  # tokens, then their round
        known = {n: v for n, v in row.items() if not isinstance(v, list) or None not in v}
        tops = [0 if i is None else i for i in row.get("draft_top_id", ())]
        if any(tops):
            known["draft_top_id"] = tops
        store.tables[table.name].append(**known)
        new = reader.read()
        if new is not None:
            for quality in by_drafter(new).values():
                grown += quality
    assert reader.read() is None
    assert grown.counts.tolist() == whole.counts.tolist()
    assert grown.ranks.tolist() == whole.ranks.tolist()
    assert grown.calibration.n.tolist() == whole.calibration.n.tolist()
    assert (grown.n_untold, grown.n_ranked) == (whole.n_untold, whole.n_ranked)


def test_confidence_and_rate_are_compared_bin_by_bin() -> None:
    rng = np.random.default_rng(5)
    confidence = np.append(rng.random(4000), [1.0, 0.0, np.nan])
    accepted = np.append(rng.random(4000) < confidence[:4000] ** 2, [True, False, True])
    found = Calibration.of(confidence[:1000], accepted[:1000]) + Calibration.of(
        confidence[1000:], accepted[1000:]
    )
    bins = [np.flatnonzero((confidence >= b / 10) & (confidence < (b + 1) / 10)) for b in range(10)]
    bins[9] = np.append(bins[9], 4000)
    assert found.rate == pytest.approx([accepted[of].mean() for of in bins])
    assert found.mean_confidence == pytest.approx([confidence[of].mean() for of in bins])
    gaps = [len(of) * abs(accepted[of].mean() - confidence[of].mean()) for of in bins]
    assert found.ece == pytest.approx(sum(gaps) / 4002)
    assert found.excess == pytest.approx(1 / 2 - 1 / 3, abs=0.02)
    low, high = Calibration.of(np.full(10, 0.5), np.arange(10) < 8).interval
    assert (low[5], high[5]) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson, 8 of 10
    assert np.isnan(low[4])


def test_drafts_that_end_early_leave_later_indices_alone() -> None:
    drafted, accepted = np.array([3, 3, 1, 1, 2, 3, 0]), np.array([3, 1, 1, 0, 2, 2, 0])
    survival = Survival.of(drafted, accepted)
    assert survival.judged.tolist() == [6, 4, 2]  # the drafts of one end before the second
    assert survival.accepted.tolist() == [5, 3, 1]
    assert survival.rate == pytest.approx([5 / 6, 5 / 6 * 3 / 4, 5 / 6 * 3 / 4 / 2])
    assert survival.conditional == pytest.approx([5 / 6, 3 / 4, 1 / 2])
    none = Survival.of(np.zeros(2, np.int64), np.zeros(2, np.int64), size=1)
    assert none.conditional.tolist() == [0.0] and np.isnan(none.rate).all()


def test_a_drafted_end_token_is_neither_accepted_nor_rejected() -> None:
    store = TraceStore()
    run = RunRef(store, store.begin_run({}))
    store.rounds.append(run_id=run.run_id, round=0, seq_id=0, num_emitted=1)  # of the prompt
    kinds = ("accepted", "accepted", "bonus"), ("accepted", "replacement", "ignored")
    for number, of_round in enumerate(kinds, 1):
        ids = {"run_id": run.run_id, "round": number, "seq_id": 0}
        for i, kind in enumerate(of_round):
            at = {} if kind == "bonus" else {"draft_index": i, "draft_p": 0.9}
            store.tokens.append(**ids, **at, kind=kind, token_id=i, pos=3 * number + i)
        n_accepted = of_round.count("accepted")
        n = sum(kind != "bonus" for kind in of_round)
        at_start = {"pos0": 3 * number - 1, "num_draft_tokens": n}
        store.rounds.append(**ids, **at_start, num_accepted_draft_tokens=n_accepted)
    drafts = DraftReader(run).read()
    assert drafts is not None
    (found,) = by_drafter(drafts).values()
    assert (found.calibration.n_tokens, found.n_rejections) == (3, 0)
    assert found.survival.conditional.tolist() == [1.0, 1.0]
    assert found.survival.judged.tolist() == [2, 1] and found.tokens_per_step == 2.5
    assert (found.n_ranked, found.n_ranked_accepted) == (2, 3)  # its step is a tree's too
    assert Judged.of(run).place.tolist() == [0, 1, 0]  # the same tokens are counted there


def test_a_tree_takes_the_places_that_helped_most() -> None:
    ranks = np.zeros((3, 5), np.int64)
    ranks[0, 1], ranks[0, 2], ranks[1, 1], ranks[2, 4] = 40, 10, 25, 1
    two, four, eight = tree_gains(ranks, 200, 300)
    assert (two.places, two.tokens_per_step) == (((0, 2),), pytest.approx(2.5 + 0.2))
    assert four.places == ((0, 2), (1, 2), (0, 3))
    assert four.tokens_per_step == pytest.approx(2.5 + 75 / 200)
    assert (eight.n_more, eight.tokens_per_step) == (4, pytest.approx(2.5 + 76 / 200))
    assert tree_gains(ranks, 0, 0) == []


def test_the_cost_of_a_wider_pass_is_told_where_it_was_measured() -> None:
    widths, ms, n = np.array([1, 2, 4]), np.array([10.0, 12.0, 20.0]), np.array([5, 1, 9])
    cost = width_cost(widths, ms, n, 2.0, 1)
    assert cost == (pytest.approx(16 / 12), True)
    guess = width_cost(widths, ms, n, 3.0, 3)
    slope = np.polyfit(widths, ms, 1, w=np.sqrt(n))[0]
    assert guess == (pytest.approx((20 + 2 * slope) / 16), False)
    assert width_cost(widths, ms, n, 0.5, 1) is None
    assert width_cost(widths[:1], ms[:1], n[:1], 1.0, 1) is None
    assert width_cost(widths[:0], ms[:0], n[:0], 3.0, 1) is None


def test_a_confidence_head_goes_before_the_probability() -> None:
    store = TraceStore()
    run = RunRef(store, store.begin_run({}))
    ids = {"run_id": 0, "round": 1, "seq_id": 0}
    for i, conf in enumerate((0.25, None)):
        store.tokens.append(
            **ids, kind="accepted", draft_index=i, draft_p=0.9, draft_conf=conf, token_id=1, pos=i
        )
    store.rounds.append(**ids, num_draft_tokens=2, num_accepted_draft_tokens=2)
    drafts = DraftReader(run).read()
    assert drafts is not None
    assert drafts.confidence.tolist() == [0.25, 0.9]
