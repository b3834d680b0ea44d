"""Changes of a module's parts act while they are in force, and are undone after it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from engine.batch import UBatch
from engine.memory.hybrid import HybridMemory
from engine.model.layers import RopeTables
from engine.model.rope import RopeConfig
from engine.observe.drafter_diff.operations import (
    _called,
    _in_place_of,
    _of_round,
    in_place,
    in_rows,
    of_cells,
    part_changes,
    sites,
)
from engine.observe.drafter_diff.records import BLOCK, STATE
from engine.observe.drafter_diff.tensor_changes import (
    Operation,
    called_with,
    other_ropes,
    other_values,
    scaled_by,
    ways,
    within_heads,
)
from engine.session import Session
from kernels.attention import attend
from kernels.norm import rms_norm
from kernels.pointwise import swiglu
from kernels.recurrence.conv import block_conv
from tests.support.drafter_diff_campaign import kinds, opened


@pytest.fixture(scope="module")
def eagle() -> Session:
    return opened("eagle3")


def _hidden(session: Session) -> torch.Tensor:
    core: Any = session.drafts["draft-eagle3"]
    core = core.model
    tokens, n = torch.arange(40, 46).numpy()[None], 6
    memory = HybridMemory.for_layers(core.config.cells(), 1, 32, core.device)
    memory = HybridMemory(memory.attention, memory.recurrent)
    ubatch = UBatch(tokens, torch.arange(n).numpy()[None], (0,), torch.arange(0).numpy())
    features = torch.linspace(-3, 2, n * core.config.n_embd).view(1, n, -1)
    found: torch.Tensor = core.forward(ubatch, features, memory).hidden
    return found


def test_each_change_acts_and_is_undone(eagle: Session) -> None:
    core: Any = eagle.drafts["draft-eagle3"]
    core, right, acting = core.model, _hidden(eagle), []
    parts = list(part_changes(core, lambda: _hidden(eagle)))
    for one in parts:
        with in_place(one.changes):
            acting.append(not torch.equal(_hidden(eagle), right))
    assert torch.equal(_hidden(eagle), right)
    said = [one.about for one, acts in zip(parts, acting, strict=True) if acts]
    # the head's own norm comes after these rows
    assert [a for a in said if "`rms_norm` by `ffn_norm` in Eagle3._layers is skipped" in a]
    assert [a for a in said if "in Attention._turned (`attention` of Eagle3) is skipped" in a]
    assert [a for a in said if "`attend_rows`" in a and "argument 0 0.5 times" in a]
    assert [a for a in said if "`attend_rows`" in a and "returns zeros in its head 1" in a]
    assert [a for a in said if "Projection.__call__ (`output` of Attention) returns 2 times" in a]
    assert [a for a in said if "`join` in Eagle3._layers reads argument 0 in reverse order" in a]
    assert [a for a in said if "in RopeTables.at" in a and "argument 1 one too low" in a]
    added = "`add` in Eagle3._layers reads, as argument 0, what its `rms_norm` by `feature_norm`"
    assert [a for a in said if added in a]
    about = "its `rms_norm`, wherever it is called, reads argument 0 as if it were less their mean"
    assert about in said
    # of what is in several stages the block is wrong
    assert next(one.stage for one in parts if one.about == about) == "block"
    assert [a for a in said if a.endswith("reads argument 2 as geglu, not swiglu")]
    names = {site.name for site in sites(core)}
    assert {"_rope", "_token_norm", "_input", "_embedding"} <= names


def test_matrices_tables_and_ids_are_other_ones(eagle: Session) -> None:
    core: Any = eagle.drafts["draft-eagle3"]
    core, right = core.model, _hidden(eagle)
    parts = part_changes(core, lambda: _hidden(eagle), ids=(42,), target=eagle.model)
    ways = {one.about: one for one in parts}
    bits = "reads its matrix as if it were rounded to about 3 bits in blocks of 32"
    alone = f"its `linear` in Projection.__call__ (`fuse` of Eagle3) {bits}"
    everywhere = f"every matrix multiplication {bits}"
    assert len(ways[everywhere].changes) > 1
    for about in (everywhere, next(x for x in ways if x.startswith("its `linear`") and bits in x)):
        with in_place(ways[about].changes):
            assert not torch.equal(_hidden(eagle), right)
    assert f"every matrix multiplication of Attention {bits}" in ways
    assert alone not in ways  # what fuses rows is called for the table, not for these
    norm = "its `rms_norm` by `ffn_norm` in Eagle3._layers reads the target's `norm` of OutputHead"
    with in_place(ways[f"{norm} instead of its own"].changes):
        found = _hidden(eagle)
    with in_place([(core, "_ffn_norm", eagle.model._output.norm)]):
        assert torch.equal(_hidden(eagle), found)
    (ids,) = (one for about, one in ways.items() if "reads ids from about 42 on" in about)
    with in_place(ids.changes):
        lower = _hidden(eagle)
    # tokens 40 and 41 are as they were
    assert torch.equal(lower[:, :2], right[:, :2]) and not torch.equal(lower, right)
    assert torch.equal(_hidden(eagle), right)


@pytest.mark.skipif("dflash" not in kinds(), reason="the drafters are next to the tree")
def test_a_layer_has_parts_of_the_one_before_it() -> None:
    core: Any = opened("dflash").drafts["draft-dflash"]
    blocks = core.model._layers._blocks
    about = "its `ffn` of DFlashBlock in layer 1 is that of layer 0"
    (one,) = (one for one in part_changes(core.model, lambda: None) if one.about == about)
    with in_place(one.changes):
        assert blocks[1]._ffn is blocks[0]._ffn
    assert blocks[1]._ffn is not blocks[0]._ffn


def test_a_memory_is_given_other_keys_or_values() -> None:
    given: list[Any] = []
    cells = SimpleNamespace(update=lambda *kv: given.append(kv))
    made = [*of_cells(cells)]
    ways = {one.about: one for one in made}
    stages = {(one.about, phase): one.stage for one in made for phase in one.phases}
    mixed = "keys are written to its memory as values"
    assert [stages[mixed, phase] for phase in ("", "write", "draft")] == [BLOCK, STATE, BLOCK]
    rough = "the keys written to its memory are rounded to about 4 bits"
    assert stages[rough, ""] == STATE, "as a quantised cache"
    k, v = torch.randn(2, 1, 3, 2, 8, generator=torch.manual_seed(3))
    rotated = "rotated by a Hadamard matrix"
    for what, about in (("keys", rotated), ("values", "those of the previous token in its pass")):
        with in_place(ways[f"the {what} written to its memory are {about}"].changes):
            cells.update(0, k, v)
    (_, turned, own), (_, same, before) = given
    assert torch.equal(own, v) and torch.equal(same, k)
    assert torch.allclose(turned @ turned.transpose(-1, -2), k @ k.transpose(-1, -2), atol=1e-5)
    assert torch.equal(before[:, 1:], v[:, :-1]) and not torch.equal(turned, k)
    with in_place(ways["the keys and values written to its memory are less their mean"].changes):
        cells.update(0, k)  # of layers that keep keys alone
    assert len(given[2]) == 2
    with in_place(ways["keys are written to its memory as values"].changes):
        cells.update(0, k, v)
    assert given[3][2] is k and given[3][1] is k


def test_a_call_is_changed_at_its_own_place_alone(eagle: Session) -> None:
    core: Any = eagle.drafts["draft-eagle3"]
    core = core.model
    changes = part_changes(core, lambda: _hidden(eagle))
    (one,) = (
        c for c in changes if c.about.endswith("by `feature_norm` in Eagle3._layers is skipped")
    )
    module, own = sys.modules[type(core).__module__], rms_norm
    places: list[bool] = []

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        places.append(weight is core._feature_norm)
        return own(x, weight, eps)

    with in_place([(module, "rms_norm", norm)]):
        _hidden(eagle)
    assert places.count(True) == 1
    with in_place(one.changes):
        x = torch.randn(2, 3, core._feature_norm.shape[0], generator=torch.manual_seed(1))
        # elsewhere it is as it was
        assert torch.equal(
            module.rms_norm(x, core._feature_norm, 1e-6), own(x, core._feature_norm, 1e-6)
        )
    assert one.stage == "target rows"


def test_a_rope_of_which_a_share_of_the_pairs_turns(eagle: Session) -> None:
    core: Any = eagle.drafts["draft-eagle3"]
    rope: RopeTables = core.model._rope
    half = dict(other_ropes(rope, ()))["rotates only the first 0.5 of its pairs"]
    at = torch.tensor([[0, 7]])
    for one in (rope, half):
        one.reach(7)
    n = half.at(at)[0].shape[-1] // 2
    for own, other in zip(rope.at(at), half.at(at), strict=True):
        assert torch.equal(own[..., :n], other[..., :n])
    assert (half.at(at)[0][..., n:] == 1).all()


def test_ropes_are_scaled_as_files_have_it_and_not(eagle: Session) -> None:
    core: Any = eagle.drafts["draft-eagle3"]
    own: RopeConfig = core.model._rope.config
    ways = dict(other_ropes(core.model._rope, ()))
    yarn, llama3 = (
        ways[f"is scaled with a factor of 8 for contexts of more than about 64 tokens ({kind})"]
        for kind in ("yarn", "llama3")
    )
    assert yarn.config == replace(own, scaling="yarn", factor=8.0, n_ctx_orig=64)
    # a pair that turns four times in 64 tokens stays, one that does not turn once is slower
    frequencies = torch.tensor(own.inverse_frequencies())
    ratio = llama3._inv_freq.float() / frequencies
    turns = frequencies * 64 / (2 * math.pi)
    assert torch.allclose(ratio[turns > 4], torch.tensor(1.0))
    assert torch.allclose(ratio[turns < 1], torch.tensor(0.125))
    name = "is not scaled, although its file says so"
    plain = dict(other_ropes(yarn, ()))[name]
    assert name not in ways and plain._inv_freq.tolist() == own.inverse_frequencies()


def test_attention_is_scaled_otherwise_and_shares_heads_otherwise() -> None:
    q, k, v = (torch.randn(1, n, m, 64) for n, m in ((3, 4), (2, 5), (2, 5)))
    given = q, k, v, torch.ones(1, 3, 5, dtype=torch.bool)
    by_place = dict[int | str, Any](enumerate(given))
    place = SimpleNamespace(attend=attend)
    one = Operation(place, "attend", ANY, 0, None, "", "", by_place, attend(*given), {})
    found = {about: change(partial(called_with, attend), by_place) for about, change in ways(one)}
    own = [i // 2 for i in range(4)]
    assert torch.allclose(attend(q, k[:, own], v[:, own], given[3]), one.result, atol=1e-6)
    turns = found["assigns key heads to query heads in turn"]
    other = [i % 2 for i in range(4)]
    assert torch.allclose(turns, attend(q, k[:, other], v[:, other], given[3]), atol=1e-6)
    for factor, scale in ((8, 1.0), (0.125, 1 / 64)):
        scaled = found[f"reads argument 0 {factor:g} times the right value"]
        assert torch.allclose(scaled, attend(*given, scale=scale), atol=1e-6)


@pytest.mark.skipif("dflash2" not in kinds(), reason="the drafters are next to the tree")
def test_numbers_that_no_kernel_is_given_are_other_ones() -> None:
    core: Any = opened("dflash2").drafts["draft-dflash"]
    selector = core.model.selector
    about = "its `scale` of Selector is read as 0.1, not 1"
    (one,) = (one for one in part_changes(core.model, lambda: None) if one.about == about)
    with in_place(one.changes):
        assert (selector._scale, one.stage) == (0.1, "candidates")
    assert selector._scale == 1
    about = f"its `top_k` of Selector is 2, not {selector._top_k}"
    (one,) = (one for one in part_changes(core.model, lambda: None) if one.about == about)
    with in_place(one.changes):
        assert selector._top_k == 2


def test_positions_that_begin_at_0_again_go_on_from_there(eagle: Session) -> None:
    core: Any = eagle.drafts["draft-eagle3"]
    rope: RopeTables = core.model._rope
    again = dict(other_ropes(rope, (3,)))["rotates positions from 3 on as those from 0 on"]
    for one in (rope, again):
        one.reach(9)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(again.at(torch.arange(10)[None])[1], rope.at(places)[1])


def test_more_or_fewer_numbers_of_a_head_turn() -> None:
    (head,) = (opened("mtp").model.head,)
    assert head is not None
    ropes = [one for one in part_changes(head, lambda: None) if "dimensions of a head" in one.about]
    assert [one.about for one in ropes] == [
        f"its rope rotates {n} of the 64 dimensions of a head, not 16" for n in (64, 32)
    ]
    (_, name, rope), *_ = ropes[0].changes
    own: RopeConfig = head._rope.config
    assert (name, rope.config) == ("_rope", replace(own, n_rot=64, factors=()))
    rope.reach(7)
    assert rope.at(torch.tensor([[7]]))[0].shape == (1, 1, 32)


def test_ropes_turn_by_numbers_that_people_choose(eagle: Session) -> None:
    core: Any = eagle.drafts["draft-eagle3"]
    ways = dict(other_ropes(core.model._rope, ()))
    own: RopeConfig = core.model._rope.config
    slower = ways["rotates by 0.667 times the angles"]._inv_freq
    assert torch.allclose(1.5 * slower, core.model._rope._inv_freq)
    based = {one.config.freq_base for one in ways.values() if one.config is not None}
    assert {5e5, 1e6} <= based
    assert f"has a frequency base of about {own.freq_base:g}," not in str(ways)


def test_a_value_that_is_of_one_axis_is_not_read_for_rows() -> None:
    x = torch.ones(1, 2, 3)
    assert torch.equal(_in_place_of([torch.zeros(3)], x), x)
    assert not _in_place_of([torch.zeros(4, 3)], x).any()


@pytest.mark.parametrize(("first", "read"), [(True, [1, 1, 1, 1]), (False, [1, 1, 2, 3])])
def test_a_loop_reads_what_an_earlier_round_read(first: bool, read: list[int]) -> None:
    change = partial(_of_round, 0, first, [])

    def called(x: int) -> int:
        return int(change(partial(called_with, torch.neg), {0: torch.tensor(x)}))

    def looped() -> list[int]:
        return [called(i) for i in range(1, 5)]

    assert looped() == looped() == [-x for x in read]


def _own(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_kernel_is_changed_in_some_rows_of_a_block_alone() -> None:
    def called(x: torch.Tensor) -> torch.Tensor:
        return changed(x)

    place: Any = SimpleNamespace(code=called.__code__, at=ANY, owner=None)
    how = partial(_called, _own, [([place], scaled_by(10.0))], [None, 0], None)
    ((_, name, changed),) = in_rows(((None, "own", how), (None, "other", 1)), [1, 2], 4, 1)
    # a block has rows 0 to 3, and its first drafted token is of row 1
    assert name == "own" and called(torch.zeros(1, 4, 1)).flatten().tolist() == [1, 1, 10, 10]
    # in a pass of other rows there are none of these
    assert called(torch.zeros(1, 3, 1)).flatten().tolist() == [1, 1, 1]


def test_a_kernel_gives_something_else_in_one_head_alone() -> None:
    change = within_heads(3, slice(1, 2), scaled_by(0.0))
    for shape in ((1, 2, 3, 4), (1, 2, 12)):
        found = change(partial(called_with, _own), {0: torch.zeros(shape)}).reshape(2, 3, 4)
        assert found[:, 1].abs().max() == 0 and (found[:, [0, 2]] == 1).all()


def test_some_heads_in_a_row_are_changed_alone() -> None:
    rows = torch.ones(1, 1, 12)
    one = Operation(SimpleNamespace(_own=_own), "_own", ANY, 0, None, "", "", {}, rows, {})
    one = one._replace(given={0: rows.view(1, 1, 3, 4)})
    found = {
        about: change(partial(called_with, _own), {0: rows}).view(3, 4)[:, 0].tolist()
        for about, change in ways(one)
    }
    assert found["returns zeros in its first 2 heads"] == [0, 0, 2]
    assert found["returns zeros in its last 2 heads"] == [2, 0, 0]


def test_a_convolution_has_its_taps_in_reverse_order_or_reads_the_rows_after() -> None:
    x, base, own = torch.randn(1, 3, 4), torch.randn(2, 4), torch.zeros(1, 3, 2, 2)
    given = x, base, own
    by_place = dict[int | str, Any](enumerate(given))
    place = SimpleNamespace(block_conv=block_conv)
    one = Operation(place, "block_conv", ANY, 0, None, "", "", by_place, block_conv(*given), {})
    found = {
        about: change(partial(called_with, block_conv), by_place) for about, change in ways(one)
    }
    turned = found["has its taps in reverse order"]
    assert torch.allclose(turned[:, 1:], x[:, 1:] * base[1] + x[:, :-1] * base[0])
    after = found["reads rows after its own, not before"]
    assert torch.allclose(after[:, :-1], x[:, :-1] * base[0] + x[:, 1:] * base[1])


def test_a_gate_may_gate_the_other_half() -> None:
    ways = dict(other_values(swiglu, False))
    gate, up = torch.randn(2, 3, 4)
    turned = ways["as the same of exchanged halves, not swiglu"](None)
    assert torch.equal(turned(gate, up, invariant=True), swiglu(up, gate, invariant=True))
    assert torch.equal(ways["as a product, not swiglu"](None)(gate, up, invariant=True), gate * up)
