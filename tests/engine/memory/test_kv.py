"""Attention cells: found by position, shared or streamed, freed by range, counted when double."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.batch import Span, make_ubatch
from engine.errors import ContextFullError, OptionError
from engine.memory.kv import AttentionKV, AttentionState
from engine.memory.kv_storage import key_rotation
from engine.model.parts import CellSize, StateKey
from engine.model.rope import RopeConfig
from kernels import attention
from kernels.attention import attend
from kernels.rope import apply_rope, rope_table
from tests.support.attention import WithDefaults
from tests.support.implementations import Implementation

naive_attention = WithDefaults(Implementation(attention, "naive"))

CPU = torch.device("cpu")
LAYERS = {0: CellSize(2, 4, 4)}
BOTH = pytest.mark.parametrize("unified", [False, True], ids=["per-seq", "unified"])


def ubatch_of(*spans: Span):
    n = len(spans[0].tokens)
    return make_ubatch(list(spans), range(len(spans)), [0] * len(spans), n, "")


def memory(n_seqs: int, n_ctx: int, *, unified: bool = False, **kwargs) -> AttentionKV:
    kv = AttentionKV(LAYERS, n_seqs, n_ctx, CPU, unified=unified, **kwargs)
    kv.poison(math.nan)
    return kv


def write_all(kv: AttentionKV, seqs: list[int], pos0: list[int], n: int):
    """Write keys that carry seq * 10000 + position, values that carry its negative."""
    kv.begin(ubatch_of(*(Span(s, p, [0] * n, []) for s, p in zip(seqs, pos0, strict=True))))
    starts = torch.tensor([10000.0 * s + p for s, p in zip(seqs, pos0, strict=True)])
    k = (starts[:, None] + torch.arange(n)).view(len(seqs), n, 1, 1).expand(-1, -1, 2, 4)
    return kv.update(0, k, -k)


def write(kv: AttentionKV, seq: int, pos0: int, n: int):
    return write_all(kv, [seq], [pos0], n)


def seen(view, row: int = 0, query: int = -1) -> list[int]:
    """Payloads that a query sees; every head and dimension carries the same one."""
    keys = view.k[row, :, view.mask[row, query]]
    assert (keys == keys[:1, :, :1]).all()
    assert torch.equal(view.v[row, :, view.mask[row, query]], -keys)
    assert torch.isfinite(view.k).all() and torch.isfinite(view.v).all()
    return sorted(keys[0, :, 0].int().tolist())


@BOTH
def test_a_query_sees_what_came_before_it(unified):
    kv = memory(2, 64, unified=unified)
    view = write(kv, 0, 0, 3)
    assert [seen(view, query=i) for i in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert seen(write(kv, 0, 3, 1)) == [0, 1, 2, 3]
    assert seen(write(kv, 1, 5, 1)) == [10005]
    assert kv.used(1) == 1 and kv.seq_pos_max(0) == 3 and kv.seq_pos_max(1) == 5


def test_an_empty_sequence():
    kv = memory(2, 64)
    write(kv, 0, 0, 3)
    assert (kv.used(1), kv.seq_pos_max(1), kv.duplicates(1)) == (0, -1, 0)


@BOTH
def test_removed_cells_are_used_again_and_never_seen(unified):
    kv = memory(1, 8, unified=unified)
    write(kv, 0, 0, 8)
    kv.seq_rm(0, 5)
    assert seen(write(kv, 0, 5, 1)) == [0, 1, 2, 3, 4, 5]
    assert kv.used(0) == 6
    kv.seq_rm(0, 2, 4)
    assert seen(write(kv, 0, 6, 2)) == [0, 1, 4, 5, 6, 7]


@BOTH
def test_ranges_of_seq_rm(unified):
    def left(p0: int, p1: int, seq: int = 0) -> list[list[int]]:
        kv = memory(2, 16, unified=unified)
        write(kv, 0, 2, 4)
        write(kv, 1, 3, 2)
        assert kv.seq_rm(seq, p0, p1)
        return [kv.state(s).positions.tolist() for s in range(2)]

    assert left(-7, 4) == [[4, 5], [3, 4]]
    assert left(4, -1) == [[2, 3], [3, 4]]
    assert left(4, -9) == [[2, 3], [3, 4]]
    assert left(3, 5) == [[2, 5], [3, 4]]
    assert left(3, 3) == left(6, -1) == [[2, 3, 4, 5], [3, 4]]
    assert left(-1, -1) == [[], [3, 4]]
    assert left(4, -1, seq=-1) == [[2, 3], [3]]
    kv = memory(2, 16, unified=unified)
    assert not kv.seq_rm(2, 0) and not kv.seq_rm(-2, 0)


@BOTH
def test_growth_keeps_the_cells_and_doubles(unified):
    kv = memory(1, 5000, unified=unified)
    write(kv, 0, 0, 200)
    sizes = [kv.n_bytes()]
    for pos in range(200, 1200):
        view = write(kv, 0, pos, 1)
        if kv.n_bytes() != sizes[-1]:
            sizes.append(kv.n_bytes())
    assert seen(view) == list(range(1200))
    assert [size // sizes[0] for size in sizes] == [1, 2, 4, 8]
    write(kv, 0, 1200, 3800)
    assert kv.n_bytes() == 2 * 4 * 2 * 4 * 5000


def test_growth_in_inference_mode_leaves_ordinary_tensors():
    kv = memory(2, 600, rotate={0: lambda k, shift: k})
    with torch.inference_mode():
        write(kv, 0, 0, 500)
    kv.seq_cp(0, 1)
    kv.seq_add(1, 0, -1, 3)
    kv.put(0, kv.state(1))
    assert kv.seq_pos_max(0) == 502


def test_a_full_context_changes_nothing():
    kv = memory(2, 8)
    write(kv, 0, 0, 6)
    with pytest.raises(ContextFullError, match=r"Sequence 0 has 6 used and 2 free .* 3 more") as e:
        write_all(kv, [1, 0], [0, 6], 3)
    assert "-c" in e.value.remedy
    assert kv.used(0) == 6 and kv.used(1) == 0
    assert seen(write(kv, 0, 6, 2)) == list(range(8))
    assert seen(write(kv, 1, 0, 8))[0] == 10000


def test_a_full_pool_changes_nothing():
    kv = memory(2, 8, unified=True)
    write(kv, 0, 0, 9)  # more than its share
    with pytest.raises(ContextFullError, match=r"pool .* 9 used and 7 free .* 8 more"):
        write_all(kv, [0, 1], [9, 0], 4)
    assert kv.used(0) == 9 and kv.used(1) == 0
    view = write_all(kv, [0, 1], [9, 0], 3)
    assert seen(view, 0) == list(range(12)) and seen(view, 1) == [10000, 10001, 10002]


@BOTH
def test_duplicates_are_counted(unified):
    kv = memory(2, 32, unified=unified)
    write(kv, 0, 0, 6)
    write(kv, 1, 0, 6)
    assert kv.duplicates(0) == 0
    write(kv, 0, 4, 3)
    assert kv.duplicates(0) == 2 and kv.duplicates(1) == 0
    assert kv.used(0) == 9
    assert seen(write(kv, 0, 7, 1)) == [0, 1, 2, 3, 4, 4, 5, 5, 6, 7]


@BOTH
@pytest.mark.parametrize("seqs", [[0, 2], [2, 0], [0, 1, 2], [0, 1, 3], [3]])
def test_sequences_of_unequal_length_side_by_side(seqs, unified):
    kv = memory(4, 300, unified=unified)
    lengths = [7 * s + 1 for s in range(4)]
    for seq in range(4):
        write(kv, seq, 0, lengths[seq])
    for n in (1, 5, 270):
        view = write_all(kv, seqs, [lengths[s] for s in seqs], n)
        for row, seq in enumerate(seqs):
            lengths[seq] += n
            assert seen(view, row) == [10000 * seq + p for p in range(lengths[seq])]
            assert seen(view, row, 0) == [10000 * seq + p for p in range(lengths[seq] - n + 1)]


def storage_pointers(kv: AttentionKV) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in kv._storage.tensors()}


@pytest.mark.parametrize(
    ("unified", "seqs"), [(False, [2]), (False, [0, 1, 2]), (False, [0, 2]), (True, [2, 0, 3])]
)
def test_views_are_no_copies(unified, seqs):
    kv = memory(4, 64, unified=unified)
    for seq in range(4):
        write(kv, seq, 0, seq + 1)
    view = write_all(kv, seqs, [s + 1 for s in seqs], 1)
    assert {view.k.untyped_storage().data_ptr(), view.v.untyped_storage().data_ptr()} == (
        storage_pointers(kv)
    )


def test_a_copy_shares_the_cells_of_a_pool():
    kv = memory(3, 4, unified=True)
    write(kv, 0, 0, 6)
    write(kv, 1, 0, 2)
    kv.seq_cp(0, 1)
    assert kv.state(1).positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert kv.prepare([ubatch_of(Span(2, 0, [0] * 6, []))])  # six cells in use, not twelve
    assert not kv.prepare([ubatch_of(Span(2, 0, [0] * 7, []))])
    kv.seq_rm(0, 3)
    assert seen(write(kv, 0, 3, 1)) == [0, 1, 2, 3]
    assert seen(write(kv, 1, 6, 1)) == [0, 1, 2, 3, 4, 5, 10006]
    kv.seq_rm(1, 0)
    assert kv.state(0).positions.tolist() == [0, 1, 2, 3]
    assert kv.prepare([ubatch_of(Span(2, 0, [0] * 8, []))])


def test_a_copy_between_streams_is_independent():
    kv = memory(3, 600)
    write(kv, 0, 0, 400)
    write(kv, 2, 0, 9)
    kv.seq_rm(0, 3, 398)
    kv.seq_cp(0, 2)
    assert kv.state(2).positions.tolist() == [0, 1, 2, 398, 399]
    kv.seq_rm(0, 0)
    write(kv, 0, 0, 400)
    assert seen(write(kv, 2, 400, 1)) == [0, 1, 2, 398, 399, 20400]


@BOTH
def test_copying_a_sequence_to_itself_and_an_empty_one(unified):
    kv = memory(2, 8, unified=unified)
    write(kv, 0, 0, 3)
    kv.seq_cp(0, 0)
    assert kv.used(0) == 3
    kv.seq_cp(1, 0)
    assert kv.used(0) == 0
    assert seen(write(kv, 1, 0, 8)) == list(range(10000, 10008))


@BOTH
def test_keeping_one_sequence(unified):
    kv = memory(3, 8, unified=unified)
    for seq in range(3):
        write(kv, seq, 0, 4)
    kv.seq_cp(1, 2)
    kv.seq_keep(1)
    assert [kv.used(s) for s in range(3)] == [0, 4, 0]
    assert seen(write(kv, 1, 4, 1)) == [10000, 10001, 10002, 10003, 10004]


@BOTH
def test_shifted_keys_equal_keys_written_at_the_new_positions(unified):
    rope = RopeConfig(n_rot=4, freq_base=100.0)
    inverse = torch.tensor(rope.inverse_frequencies())

    def keys_at(positions: list[int]) -> torch.Tensor:
        raw = torch.randn(1, 6, 2, 6, generator=torch.Generator().manual_seed(3))
        return apply_rope(raw, *rope_table(torch.tensor([positions]), 4, inverse))

    layers = dict.fromkeys((2, 5), CellSize(2, 6, 6))
    turn = dict.fromkeys(layers, key_rotation(rope))
    kv = AttentionKV(layers, 2, 32, CPU, unified=unified, rotate=turn)
    kv.poison(math.nan)
    kv.begin(ubatch_of(Span(0, 0, [0] * 6, [])))
    for layer in (2, 5):
        kv.update(layer, layer * keys_at([0, 1, 2, 3, 4, 5]), keys_at([0] * 6))
    kv.seq_cp(0, 1)
    kv.seq_add(1, 2, 5, 7)
    kv.seq_add(1, 9, 11, -3)
    original, shifted = kv.state(0), kv.state(1)
    assert original.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert shifted.positions.tolist() == [0, 1, 5, 6, 7, 11]
    tokens = [0, 1, 5, 2, 3, 4]
    for i, layer in enumerate((2, 5)):
        want = layer * keys_at([0, 1, 6, 7, 11, 5])[0]
        torch.testing.assert_close(shifted.k[i], want[tokens], atol=1e-5, rtol=1e-5)
        assert torch.equal(shifted.v[i], original.v[i][tokens])
        assert torch.equal(original.k[i], layer * keys_at([0, 1, 2, 3, 4, 5])[0])


def shifted_by_marker(k: torch.Tensor, shift: int) -> torch.Tensor:
    return k + 100000 * shift


def test_what_is_shifted_below_zero_is_removed():
    kv = memory(1, 8, rotate={0: shifted_by_marker})
    write(kv, 0, 0, 6)
    kv.seq_add(0, 1, 4, -2)
    assert kv.state(0).positions.tolist() == [0, 0, 1, 4, 5]
    kv.seq_add(0, 0, -1, -6)
    assert kv.used(0) == 0
    kv.seq_add(0, 0, -1, 4)
    assert kv.used(0) == 0


def test_shifting_a_shared_cell_needs_a_free_one():
    kv = memory(2, 4, unified=True, rotate={0: shifted_by_marker})
    write(kv, 0, 0, 6)
    kv.seq_cp(0, 1)
    before = kv.state(1)
    with pytest.raises(ContextFullError, match="2 free"):
        kv.seq_add(1, 3, -1, -3)
    assert kv.state(1).positions.tolist() == before.positions.tolist()
    kv.seq_rm(1, 0, 3)
    kv.seq_add(1, 4, -1, 2)
    assert kv.state(1).positions.tolist() == [3, 6, 7]
    assert kv.state(1).k[0][:, 0, 0].tolist() == [3, 200004, 200005]
    assert kv.state(0).k[0][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_free_cells_around_a_shared_one_take_its_copy():
    one_head = {0: CellSize(1, 4, 4)}  # there neighbouring cells are one piece of memory
    kv = AttentionKV(one_head, 3, 4, CPU, unified=True, rotate={0: shifted_by_marker})
    for seq, n in ((2, 4), (0, 3)):  # cells 0 to 3, and 4 to 6
        kv.begin(ubatch_of(Span(seq, 0, [0] * n, [])))
        k = torch.arange(n).float().view(1, n, 1, 1).expand(-1, -1, -1, 4)
        kv.update(0, k, -k)
    kv.seq_cp(0, 1)
    kv.seq_rm(2, 1, 3)
    kv.seq_add(1, 0, -1, 1)  # to cells 1, 2 and 7
    assert kv.state(1).positions.tolist() == [1, 2, 3]
    assert kv.state(1).k[0][:, 0, 0].tolist() == [100000, 100001, 100002]
    assert kv.state(0).k[0][:, 0, 0].tolist() == [0, 1, 2]


def test_latent_keys_turn_behind_their_first_columns():
    rope = RopeConfig(n_rot=4, freq_base=100.0)
    raw = torch.randn(3, 1, 7)
    turned = key_rotation(rope, first=3)(raw, 5)
    assert torch.equal(turned[..., :3], raw[..., :3])
    assert torch.equal(turned[..., 3:], key_rotation(rope)(raw[..., 3:].contiguous(), 5))


@BOTH
def test_what_has_no_position_stays_as_it_is_when_shifted(unified):
    layers = {0: CellSize(2, 4, 4), StateKey(0, "more"): CellSize(1, 2, 0)}
    kv = AttentionKV(layers, 2, 8, CPU, unified=unified, rotate={0: shifted_by_marker})
    write(kv, 0, 0, 3)
    kv.update(StateKey(0, "more"), torch.arange(6.0).view(1, 3, 1, 2))
    kv.seq_add(0, 1, -1, 2)
    state = kv.state(0)
    assert state.positions.tolist() == [0, 3, 4]
    assert state.k[0][:, 0, 0].tolist() == [0, 200001, 200002]
    assert state.k[1].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert len(state.v) == 1


@BOTH
def test_a_window_hides_cells_and_keeps_them(unified):
    kv = AttentionKV({0: CellSize(2, 4, 4, window=3)}, 2, 16, CPU, unified=unified)
    write(kv, 1, 0, 4)
    view = write(kv, 0, 0, 6)
    assert [seen(view, 0, p) for p in range(6)] == [
        list(range(max(0, p - 2), p + 1)) for p in range(6)
    ]
    kv.seq_rm(0, 3)
    assert seen(write(kv, 0, 3, 1)) == [1, 2, 3]
    assert kv.used(0) == 4


@BOTH
def test_shifting_without_rotation_is_refused(unified):
    kv = memory(1, 8, unified=unified)
    kv.seq_add(0, 0, -1, 5)
    write(kv, 0, 0, 4)
    kv.seq_add(0, 0, -1, 0)
    kv.seq_add(0, 4, -1, 5)
    with pytest.raises(OptionError, match="cannot be shifted"):
        kv.seq_add(0, 3, -1, 1)
    assert kv.state(0).positions.tolist() == [0, 1, 2, 3]


@BOTH
def test_a_saved_sequence_continues_like_the_original(unified):
    kv = memory(3, 16, unified=unified)
    write(kv, 0, 0, 8)
    kv.seq_rm(0, 2, 5)
    write(kv, 0, 8, 2)  # into holes: cells are no longer in the order of positions
    write(kv, 1, 0, 5)
    saved = kv.state(0)
    assert saved.n_bytes == 7 * 8 + 2 * 7 * 2 * 4 * 4
    assert saved.positions.tolist() == [0, 1, 5, 6, 7, 8, 9]
    assert saved.k[0][:, 0, 0].tolist() == [0, 1, 5, 6, 7, 8, 9]
    kv.put(1, saved)
    kv.seq_rm(0, 0)
    write(kv, 0, 0, 3)
    assert seen(write(kv, 1, 10, 1)) == [0, 1, 5, 6, 7, 8, 9, 10010]
    assert saved.k[0][:, 0, 0].tolist() == [0, 1, 5, 6, 7, 8, 9]  # a copy, not a view


@BOTH
def test_a_saved_sequence_that_does_not_fit_changes_nothing(unified):
    kv = memory(2, 8, unified=unified)
    write(kv, 0, 0, 5)
    write(kv, 1, 0, 4)
    long = memory(1, 20)
    write(long, 0, 0, 13)
    with pytest.raises(ContextFullError):
        kv.put(0, long.state(0))
    assert seen(write(kv, 0, 5, 1)) == list(range(6))
    if unified:  # its own cells count as free, shared ones do not
        long.seq_rm(0, 12)
        kv.put(0, long.state(0))
        assert kv.used(0) == 12
        kv.seq_cp(0, 1)
        with pytest.raises(ContextFullError, match=r"12 used and 4 free .* 12 more"):
            kv.put(0, long.state(0))
        assert kv.used(0) == 12 and seen(write(kv, 1, 12, 1))[:12] == list(range(12))


def test_a_saved_sequence_of_another_model_is_refused():
    kv = memory(1, 8)
    write(kv, 0, 0, 2)
    good = kv.state(0)
    for k, v in (((), ()), (good.k, ()), ((torch.zeros(2, 2, 5),), (torch.zeros(2, 2, 5),))):
        with pytest.raises(OptionError, match="other attention layers"):
            kv.put(0, AttentionState(good.positions, k, v))
    assert kv.used(0) == 2


def test_sixty_four_sequences_share_a_pool_and_no_more():
    kv = memory(64, 4, unified=True)
    for seq in (0, 63, 31):
        write(kv, seq, 0, 3)
    for seq in range(1, 63):
        kv.seq_cp(63, seq)
    assert seen(write(kv, 62, 3, 1)) == [620003, 630000, 630001, 630002]
    kv.seq_keep(63)
    assert kv.used(62) == 0 and seen(write(kv, 63, 3, 1)) == [630000, 630001, 630002, 630003]
    with pytest.raises(OptionError, match="64"):
        memory(65, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.18579])
@BOTH
@pytest.mark.thinned(4)
def test_garbage_in_storage_never_reaches_attention(unified, value, monkeypatch):
    """Freed, foreign and unwritten cells, storage that grew, views wider than a sequence."""
    empty = torch.empty

    def spoilt(*size: int, **kw: Any) -> torch.Tensor:
        found = empty(*size, **kw)
        return found.fill_(value) if found.is_floating_point() else found.fill_(-1)

    monkeypatch.setattr(torch, "empty", spoilt)
    kv = AttentionKV(LAYERS, 3, 700, CPU, unified=unified)
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 0, 0]

    def check(seqs: list[int], n: int) -> None:
        kv.begin(ubatch_of(*(Span(s, lengths[s], [0] * n, []) for s in seqs)))
        k, v, q = (torch.randn(len(seqs), n, h, 4, generator=generator) for h in (2, 2, 4))
        view = kv.update(0, k, v)
        want = naive_attention.attend(q, view.k, view.v, view.mask)  # reads visible cells only
        torch.testing.assert_close(attend(q, view.k, view.v, view.mask), want)
        for seq in seqs:
            lengths[seq] += n

    check([1], 3)
    check([0, 1], 2)
    check([2], 300)
    check([0, 2], 1)
    kv.seq_rm(2, 250)
    lengths[2] = 250
    check([1, 2], 4)
    kv.seq_cp(2, 0)
    lengths[0] = lengths[2]
    check([0], 5)
    kv.put(1, kv.state(0))
    lengths[1] = lengths[0]
    check([0, 1, 2], 30)
    kv.seq_rm(-1, 0)
    lengths = [0, 0, 0]
    kv.poison(value)
    check([2], 3)
    check([2, 1], 1)


def test_rows_of_a_block_see_each_other_and_windows_end_behind_them():
    layers = {0: CellSize(1, 4, 4), 1: CellSize(1, 4, 4, window=3)}
    kv = AttentionKV(layers, 1, 16, CPU, ahead=True)
    rows = torch.randn(1, 5, 1, 4)
    kv.begin(ubatch_of(Span(0, 0, [0] * 5, [])))
    assert kv.update(0, rows, rows).mask.all()
    # from row a of the block on, and from two positions before it
    seen = kv.update(1, rows, rows).mask[0]
    assert seen.tolist() == [[p > a - 3 for p in range(5)] for a in range(5)]
