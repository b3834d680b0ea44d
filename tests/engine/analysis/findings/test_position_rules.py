"""Rules about cells, positions, states and hidden rows, on rows made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from engine.analysis.findings.check import find
from engine.trace.store import TraceStore
from tests.support.round_rows import add_draft, add_round, found, new_run


def held(n_used: int, pos_max: int, recurrent: int | None = None, duplicate: int = 0):
    return {
        "kv_cells_used": n_used,
        "kv_cells_duplicate": duplicate,
        "attention_pos_max": pos_max,
        "recurrent_pos_max": pos_max if recurrent is None else recurrent,
    }


@pytest.mark.parametrize(
    ("columns", "lacking"),
    [
        (held(10, 9), 0),
        (held(9, 9), 1),  # a hole
        (held(9, 8, 9), 1),  # the last one
        (held(13, 9, duplicate=3), 0),
        (held(12, 9, duplicate=3), 1),
        (held(10, 9) | {"recurrent_pos_max": None}, 0),  # an attention-only model
        ({"kv_cells_used": None, "attention_pos_max": None}, 0),  # another engine
    ],
)
def test_missing_cells(store: TraceStore, columns: dict[str, int | None], lacking: int) -> None:
    add_draft(store, 1, 3, 1, **columns)
    findings = found(store, "missing-kv-cells")
    assert len(findings) == bool(lacking)
    if lacking:
        assert findings[0].message == "There are no KV cells for 1 of 10 positions."
        assert findings[0].round == 1


@pytest.mark.parametrize(
    ("ends", "rule", "says"),
    [
        ((6, 6), "", ""),
        ((8, 8), "rollback-end", "keeps 2 tokens beyond"),
        ((5, 5), "rollback-end", "takes 1 token too many"),
        ((6, 7), "recurrent-position", "position is 1 above"),
        ((6, 4), "recurrent-position", "position is 2 below"),
        ((7, 6), "attention-ahead", "are 1 positions ahead"),
        ((5, 6), "missing-kv-cells", "no KV cells for 1 of 7"),
    ],
)
def test_where_memory_ends_after_a_round(
    store: TraceStore, ends: tuple[int, int], rule: str, says: str
) -> None:
    cells, state = ends
    more = held(cells + 1, cells, state) | {"pos0": 5, "num_target_tokens": 1}
    add_draft(store, 1, 3, 1, **more)
    errors = [f for f in find(store) if f.severity == "error"]
    assert [f.rule for f in errors] == ([rule] if rule else [])
    assert not rule or says in errors[0].message


def a_pass(store: TraceStore, number: int, gap: int | None, seq_ids: str = "0") -> None:
    store.ubatches.append(
        run_id=0, round=number, ubatch=number, seq_ids=seq_ids, purpose="verify", pos_gap=gap
    )


def test_passes_that_do_not_start_behind_what_is_held(store: TraceStore) -> None:
    for number, gap in enumerate((0, None, 0)):
        a_pass(store, number, gap)
    assert find(store) == []
    a_pass(store, 3, 2)
    a_pass(store, 4, -1, "0 1")
    late, early = found(store, "position-gap")
    assert (late.round, late.seq_id) == (3, 0)
    assert late.message == "A verify pass leaves out 2 after the positions in memory."
    assert (early.round, early.seq_id) == (4, None)
    assert "repeats 1 of the positions" in early.message


def test_a_cache_with_another_text() -> None:
    store = TraceStore()
    new_run(store)
    add_round(store, 0, cache_wrong=0)
    add_round(store, 0, seq_id=1, cache_wrong=2, pos0=17)
    (finding,) = find(store)
    assert (finding.rule, finding.seq_id) == ("cache-mismatch", 1)
    assert "2 of the prompt tokens" in finding.message
    assert "position 17" in finding.evidence


@pytest.mark.parametrize(("again", "fires"), [(2, False), (3, True)])
def test_replays_that_choose_other_tokens(store: TraceStore, again: int, fires: bool) -> None:
    for number in range(1, 11):
        times = 2 if number <= again else 1
        add_draft(store, number, 3, 1, rollback_path="restore", replay_index=times)
    assert [f.round for f in found(store, "replay-disagrees")] == [1] * fires


def test_hidden_rows_of_other_places(store: TraceStore) -> None:
    for number, wrong in enumerate((None, 0, 2, 1)):
        store.drafts.append(run_id=0, round=number, seq_id=0, num_wrong_rows=wrong)
        add_draft(store, number + 1, 3, 1)
    (finding,) = find(store)
    assert (finding.rule, finding.severity, finding.round) == ("wrong-hidden-row", "warning", 2)
    assert "paired 2 of its tokens" in finding.message
    assert "2 rounds, the first 2, the last 3; 4 of 12 drafted tokens" in finding.evidence


def a_lane(store: TraceStore, number: int, **errors: float) -> None:
    row = {"run_id": 2, "round": number, "seq_id": 0, "pos": number, "nmse": 1e-12, "top2_gap": 1.0}
    store.divergence.append(**row, state_error=np.nan, conv_error=np.nan, cells_differ=None)
    both = {"state_error": 0.0, "conv_error": 0.0, **errors}
    store.divergence.append(**row, **both, cells_differ=0)
    for layer in (0, 1, 3):
        mine = both if layer > 0 else {"state_error": 0.0, "conv_error": 0.0}
        store.states.append(run_id=2, round=number, seq_id=0, pos=number, layer=layer, **mine)


def test_a_wrong_state_is_named_by_round_layer_policy_and_path() -> None:
    store = TraceStore()
    for lane in ("reference", "noise"):
        new_run(store, lane)
    store.divergence.append(run_id=1, round=1, seq_id=0, nmse=1e-12, top1_equal=1)
    new_run(store, "ring", options={"rollback": "ring"})
    add_round(store, 0, run_id=2)
    for number, accepted in ((1, 1), (2, 3), (3, 0), (4, 1)):
        add_draft(store, number, 3, accepted, run_id=2)
        a_lane(store, number, **({"state_error": 2e-4} if number >= 3 else {}))
    (finding,) = find(store)
    assert (finding.rule, finding.run_id, finding.round) == ("state-wrong", 2, 3)
    assert finding.message == (
        "The state is wrong after the rollback of 3 tokens by seq_rm in round 3; first layer 1, "
        "2 of 3 recurrent layers, policy ring."
    )
    assert finding.evidence.startswith(
        "3 rolled back by seq_rm in round 3, before that 2 rolled back by seq_rm in round 1; error "
        "of the state 2.0e-04"
    )
    assert finding.evidence.endswith("logits right")


def test_a_wrong_window_where_nothing_was_undone() -> None:
    store = TraceStore()
    for lane in ("reference", "noise"):
        new_run(store, lane)
    store.divergence.append(run_id=1, round=1, seq_id=0, nmse=1e-12, top1_equal=1)
    new_run(store, "replay", options={"rollback": "replay"})
    add_round(store, 0, run_id=2)
    a_lane(store, 0, conv_error=1e-5)
    assert find(store) == []
    a_lane(store, 1, conv_error=0.5)
    (finding,) = find(store)
    assert finding.message.startswith(
        "The convolution window is wrong after round 1; first layer 1"
    )
    assert "none undone here" in finding.evidence
