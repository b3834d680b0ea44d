"""Mistakes in formulas, decays, cursors and counts, planted into this program's own kernels: each
is named with its place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from engine.conform import replays
from engine.conform.adapters import own
from engine.conform.cases import Source
from engine.conform.causes import Situation
from engine.conform.checks import Fault, Player, check
from engine.conform.decays import ALIKE, Log, decays
from engine.conform.mistakes import (
    formulas,
    in_parts,
    layouts,
    of_other_channels,
    row_by_row,
    strides,
)
from engine.conform.passes import SCRIPTS
from engine.conform.reference import Reference, play, step, terms, token
from engine.conform.replays import placed
from engine.conform.subject import Kernel
from tests.engine.conform import wrong_formulas as form
from tests.engine.conform import wrong_states as held
from tests.engine.conform.drawn_rows import KERNEL, PACKAGE, SHAPES, drawn

TWO_FOR_E = "corrections see what earlier rows wrote with 2 for e in its decay"


def first(adapter, recurrence, name="depths", **kernel) -> Fault:
    kernel = Kernel("planted", (recurrence,), adapter, dtypes=("float32",), **kernel)
    shape = SHAPES[recurrence]
    found = check(kernel, PACKAGE, shape, name, 3, "cpu", 12)
    assert found
    return placed(Player(kernel, PACKAGE, shape, 3, "cpu"), found[0])


@pytest.mark.parametrize(
    ("adapter", "recurrence", "cause", "words"),
    [
        (form.NoBias, "gdn", "wrong-gate", "dt_bias is left out"),
        (form.TwiceBias, "kda", "wrong-gate", "dt_bias is taken 2 times"),
        (form.BaseTwo, "kda", "wrong-gate", "power of 2"),
        (form.RawBeta, "gdn", "wrong-gate", "sigmoid of beta is left out"),
        (form.RawKeys, "gdn", "wrong-norm", "k is not normalized"),
        (form.Exchanged, "kda", "wrong-term", "q and k are exchanged"),
        (form.OtherBias, "kda", "head-mapping", "dt_bias of head 0"),
        (form.FirstSkip, "mamba2", "head-mapping", "D of head 0"),
        (form.Backwards, "conv", "wrong-term", "tap 0 takes weight 3, tap 1 takes weight 2"),
        (form.SameTap, "conv", "wrong-term", "tap 1 takes weight 2"),
        (form.OtherKeys, "gdn", "head-mapping", "k of the last head first"),
        (form.Offset, "conv", "wrong-term", "outputs are another function of their sums than SiLU"),
        (form.MeanSquares, "gdn", "wrong-norm", "k is divided by the root mean square"),
        (form.OneHead, "gdn", "wrong-gate", "applied twice; wrong in heads 2 of 4"),
        (form.LaterRows, "kda", "gate-order", "the decay is left out, in rows 1 to 2 of 3"),
        (form.LowGates, "gdn", "wrong-gate", "exp is taken for softplus, in rows "),
        (form.ExchangedBetas, "gdn", "head-mapping", "of its key head, in heads 1 of 4; beta of"),
        (form.KeysForQueries, "gdn", "wrong-term", "k is taken for q"),
        (form.WideWindow, "conv", "window-not-rolled-back", "the window holds inputs -3, -1, 0"),
        (form.SharedUndecayed, "gdn", "head-mapping", "3 of 4; right where no heads share a key"),
        (form.OutputWindow, "conv", "wrong-term", "holds the output of row 2, not its input"),
        (form.TurnedWindow, "conv", "wrong-stride", "the transposed window is written"),
        (form.EndingDecay, "kda", "wrong-gate", "the decay's logarithm ends at -1"),
        (form.TwiceSigmoid, "gdn", "wrong-gate", "the sigmoid of beta is taken twice"),
        (held.Undecayed, "gdn", "gate-order", "see what earlier rows wrote without its decay"),
        (held.SecondRawFold, "gdn", "wrong-norm", "k is not normalized, in row 1 alone"),
        (held.RawFold, "gdn", "wrong-norm", "in the state alone"),
        (form.GateStride, "kda", "gate-of-other-row", "a of row r is read 4 r values on, not 32 r"),
        (form.ValueStride, "gdn", "other-row", "v of row r is read 16 r values on, not 32 r"),
        (form.SplitStride, "gdn", "wrong-stride", "v of row r is read 32 r values on, not 64 r"),
        (form.LateInput, "mamba2", "wrong-stride", "B is read at 33 of a row, not 32"),
        (held.ReadBase, "kda", "wrong-gate", "outputs see the state before them with e for 2"),
        (held.Unscaled, "gdn", "wrong-scale", "the row writes (beta) is taken without the scale"),
        (held.AlongValues, "kda", "wrong-gate", "the decay of a channel is applied along v"),
        (held.FirstDecay, "kda", "other-sequence", "with the decay of the pass's first rows"),
        (form.LogOfNegative, "kda", "wrong-gate", "finite where a is -4"),
        (form.RootOfNegative, "gdn", "wrong-norm", "finite where k is"),
        (held.HalfDecayed, "kda", "gate-order", "of row 0 sees; wrong in key channels 0 to 3 of 8"),
        (held.SomeRows, "gdn", "unused-memory", "no output is written for rows 2 of 3"),
        (held.LastOnly, "gdn", "state-not-committed", "leave the state after 0, none (NaN), 3"),
    ],
)
@pytest.mark.thinned(4)
def test_a_formula_a_decay_or_a_count_is_named_with_its_place(adapter, recurrence, cause, words):
    fault = first(adapter, recurrence)
    assert (fault.cause, words in fault.detail) == (cause, True), fault.detail
    assert "ended with" not in fault.detail


@pytest.mark.parametrize(
    ("adapter", "name", "cause", "words"),
    [
        (held.NotReset, "no-drafts", "stale-column", "right where the count is set to 1 by a step"),
        (held.StepsTwice, "no-drafts", "double-fold", "1 accepted rows are taken twice, 0 before"),
        (held.Refilled, "subsets", "stale-column", "3 were accepted, though it is not in this"),
        (held.AsIfLongest, "lengths", "wrong-stride", "right where every pass has 3 rows"),
        (form.NoZeros, "subsets", "wrong-norm", "finite where k is"),
        (form.NoZerosAtAll, "subsets", "wrong-norm", "finite where q is"),
        (form.NotANumber, "depths", "wrong-output", "NaN is computed"),
        (form.Clipped, "subsets", "wrong-gate", ""),
        (held.OfFirst, "depths", "other-sequence", "the state is a state of sequence 0"),
        (held.KeepsSlot, "subsets", "other-sequence", "of the sequence that had this slot before"),
        (held.KeepsCount, "subsets", "other-sequence", "right where no sequence begins in another"),
        (held.LateStale, "depths", "stale-column", "with zeros there round 1 is wrong: state"),
        (held.NoOneRow, "lengths", "unused-memory", "no output is written for rows all of 1"),
        (held.CutByFirst, "lengths", "other-sequence", "no output is written for rows"),
        (held.AllLost, "lengths", "state-not-committed", "leave the state after 1, 2, 0"),
        (form.Forgotten, "depths", "unused-memory", "from memory that was never written"),
    ],
)
def test_an_index_rule_is_named_by_another_play(adapter, name, cause, words):
    fault = first(adapter, "gdn", name)
    assert (fault.cause, words in fault.detail) == (cause, True), fault.detail


@pytest.mark.parametrize(
    ("adapter", "name", "cause", "words"),
    [
        (held.NotKept, "no-drafts", "stale-column", ", where state-not-committed looks the same"),
        (held.OtherChannels, "depths", "wrong-stride", "right where there is one channel"),
    ],
)
def test_the_window_of_a_convolution_is_named_by_another_play(adapter, name, cause, words):
    fault = first(adapter, "conv", name)
    assert (fault.cause, fault.detail.endswith(words)) == (cause, True), fault.detail


def test_the_rows_own_decay_in_one_part_alone_is_its_order():
    rows = [token(Source(SHAPES["kda"], 1).rows([0], [1]), 0)]
    ways = in_parts(SHAPES["kda"], rows, formulas(SHAPES["kda"], rows))
    causes = {words: cause for cause, words, _ in ways}
    twice = "the decay is applied twice"
    assert (causes[twice], causes[f"{twice}, in what is taken off v"]) == (
        "wrong-gate",
        "gate-order",
    )
    assert causes["dt_bias is left out, in what is taken off v"] == "wrong-gate"


def test_strong_decays_lose_all_where_rates_are_small():
    g = Source(SHAPES["kda"], 1, long=True, large=30.0).rows(range(3), [8] * 3).g
    assert g.min() < -10
    assert (g == 0).any()


def test_prompts_without_states_have_strong_decays():
    kernel = Kernel("planted", ("gdn",), held.Overflowing, dtypes=("float32",), chunk=16)
    shape = replace(SHAPES["gdn"], n_tokens=33)
    assert not check(kernel, PACKAGE, shape, "prompts", 3, "cpu", 1, large=False)
    fault = check(kernel, PACKAGE, shape, "prompts", 3, "cpu", 1)[0]
    fault = placed(Player(kernel, PACKAGE, shape, 3, "cpu", late=True), fault)
    assert (fault.cause, "finite where a is" in fault.detail) == ("wrong-gate", True), fault.detail


def test_a_mistake_of_some_rows_is_told_by_them():
    kernel = Kernel("planted", ("kda",), form.OddGates, dtypes=("float32",))
    shape = replace(SHAPES["kda"], n_tokens=5)
    fault = check(kernel, PACKAGE, shape, "depths", 3, "cpu", 12)[0]
    assert fault.cause == "gate-of-other-row"
    assert "decay of the row before, in rows 1, 3 of 5" in fault.detail


def test_one_head_is_named_by_two():
    half = form.altered(lambda rows: {"q_normed": 0.5 * rows.q_normed})
    kernel = Kernel("planted", ("gdn",), half, dtypes=("float32",))
    *_, (named, (fault,)) = replays.checked(kernel, PACKAGE, "gdn", "lengths", 1, "cpu")
    assert (named, fault.cause, fault.detail) == (True, "wrong-scale", "q is taken 0.5 times")
    assert fault.shape.n_heads == 1


def test_a_row_that_is_hardly_wrong_is_named_by_those_after_it():
    shape, state, rows = drawn("gdn", 12)
    views = {words: outputs for _, words, (outputs, _) in decays(shape, state, rows, False)}
    seen, right = (torch.stack(x) for x in (views[TWO_FOR_E], play(shape, state, rows)[0]))
    errors = (seen - right).abs().flatten(1).amax(1)
    bound = 0.95 * float(errors[9])
    assert (errors > bound).nonzero().flatten().tolist() == [9, 11]
    situation = Situation(replace(KERNEL, chunk=16), Reference(shape, [state]), 0, rows)
    assert situation.explain_outputs(seen, bound) == ("wrong-gate", TWO_FOR_E)


def test_a_search_ends_by_what_it_has_played(monkeypatch):
    monkeypatch.setattr(replays, "_MOST", 60)
    kernel = Kernel("planted", ("gdn",), held.Shifted, dtypes=("float32",))
    (fault, *_) = check(kernel, PACKAGE, SHAPES["gdn"], "depths", 3, "cpu", 12)
    assert fault.cause == "wrong-output"
    before = held.Shifted.played
    assert placed(Player(kernel, PACKAGE, SHAPES["gdn"], 3, "cpu"), fault).cause == "wrong-output"
    assert 0 < held.Shifted.played - before <= 60  # once in the last of the searches
    before = held.Shifted.played
    monkeypatch.setattr(replays, "_MOST", 4000)
    placed(Player(kernel, PACKAGE, SHAPES["gdn"], 3, "cpu"), fault)
    assert held.Shifted.played - before > 60


def test_what_is_wrong_alone_too_is_not_named_by_another_sequence():
    kernel = Kernel("planted", ("gdn",), form.TwiceSigmoid, dtypes=("float32",))
    fault = check(kernel, PACKAGE, SHAPES["gdn"], "depths", 3, "cpu", 12)[0]
    fault = replace(fault, cause="other-sequence", detail="by chance")
    found = replays.elsewhere(Player(kernel, PACKAGE, SHAPES["gdn"], 3, "cpu"), fault)
    assert (found.cause, found.detail[:15]) == ("wrong-gate", "sigmoid of beta")


@pytest.mark.parametrize("seed", [1, 6, 12])
def test_a_mistake_that_few_inputs_show_is_not_named_by_another_sequence(seed):
    kernel = Kernel("planted", ("gdn",), form.StraightGates, dtypes=("float32",))
    shape = replace(SHAPES["gdn"], n_heads=1, n_groups=1)
    fault = check(kernel, PACKAGE, shape, "no-drafts", seed, "cpu", 12)[0]
    found = replays.elsewhere(Player(kernel, PACKAGE, shape, seed, "cpu"), fault)
    assert (found.cause, found.detail[:26]) == ("wrong-gate", "softplus is left out above")


def test_a_drift_without_rounding_is_named_by_further_plays():
    kernel = Kernel("planted", ("gdn",), held.LastOnly)
    fault = Player(kernel, PACKAGE, SHAPES["gdn"], 3, "cpu").drift(6)[0]
    fault = placed(Player(kernel, PACKAGE, fault.shape, 3, "cpu"), fault)
    assert (fault.check, fault.cause) == ("drift", "state-not-committed")
    assert "leave the state after 0, none (NaN), 3" in fault.detail


def test_a_wrong_count_is_named_before_what_else_it_writes():
    kernel = Kernel("planted", ("gdn",), held.LateWindow, dtypes=("float32",))
    found = check(kernel, PACKAGE, SHAPES["gdn"], "depths", 3, "cpu", 12)
    causes = [fault.cause for fault in found]
    assert causes[0] == "stale-column"
    assert "window-not-rolled-back" in causes[1:]


def test_a_count_of_another_sequence_is_told():
    fault = first(held.ByPlace, "gdn", "subsets")
    assert "right where" in fault.detail


def corrected(shape, state, row, seen, key=None):
    """Output and state of a row of one head a key head, whose correction sees another state, or
    along another key."""
    k, q = (torch.nn.functional.normalize(row[x], dim=-1) for x in "kq")
    dt = softplus(row["a"] + row["dt_bias"])
    rate = torch.exp(row["A_log"]).view(-1, *[1] * (dt.dim() - 1))
    decay = torch.exp(-rate * dt).view(shape.n_heads, -1, 1)
    off = ((q if key == "q" else k)[:, :, None] * seen(decay)).sum(1)
    value = torch.sigmoid(row["b"])[:, None] * (row["v"] - off)
    after = decay * state + k[:, :, None] * value[:, None]
    return (q[:, :, None] * after).sum(1) * shape.d_k**-0.5, after


def test_z_may_be_read_with_the_stride_of_what_lies_side_by_side():
    shape, _, rows = drawn("mamba2", 3, extras=("z",))
    said = {words: (cause, made) for cause, words, made in strides(shape, rows, 0, rows)}
    cause, made = said["z of row r is read 64 r values on, not 32 r"]
    assert cause == "wrong-stride"
    assert torch.equal(made[1]["z"], rows[2]["z"])
    assert not made[2]["z"].any()


def test_a_decay_that_is_read_after_the_last_row_loses_nothing():
    shape, _, rows = drawn("gdn", 3)
    said = [(words, made) for _, words, made in strides(shape, rows, 0, rows)]
    of_decays = [m for w, m in said if w.startswith("a of row r is read 8 r") and "decay" in m[2]]
    assert [bool((made[2]["decay"] == 1).all()) for made in of_decays] == [True]


def test_corrections_along_q_are_a_wrong_term():
    shape, state, (row,) = drawn("kda", 1, n_groups=4)
    right = corrected(shape, state, row, lambda decay: decay * state, "q")
    words = "q is taken for k, in what is taken off v"
    ways = in_parts(shape, [row], formulas(shape, [row]))
    ((cause, _, rows),) = (way for way in ways if way[1] == words)
    assert cause == "wrong-term"
    for seen, made in zip(step(shape, state, rows[0]), right, strict=True):
        assert torch.allclose(seen, made, atol=1e-5)


def test_corrections_may_see_the_state_before_a_log_without_its_decay():
    shape, state, (logged, row) = drawn("gdn", 2, n_groups=4)
    log = Log(shape, state, [logged])
    wrote = log.states[1] - log.kept()
    before = log.states[1]
    seen = corrected(shape, before, row, lambda decay: decay * (state + wrote))[0]
    ways = decays(shape, state, [logged, row], False, 1)
    said = [(c, w) for c, w, played in ways if torch.allclose(played[0][1], seen, atol=1e-5)]
    words = "corrections see the state before them without the decay of rows 0 to 0"
    assert ("gate-order", words) in said


def test_a_block_of_a_state_in_anothers_place_is_a_wrong_tile():
    shape, state, _ = drawn("gdn", 1, d_k=32)
    seen = torch.cat([state[:, :16], state[:, :16]], 1)
    said = [(c, w) for c, w, made in layouts(shape, state) if torch.equal(made, seen)]
    assert said == [("wrong-tile", "key channels 16 to 31 are those of 0 to 15, of the state")]


def test_a_block_of_keys_in_anothers_place_is_a_wrong_tile():
    shape, state, rows = drawn("gdn", 2, d_k=64)
    log = Log(shape, state, rows)
    seen = state
    for row, write in zip(log.rows, log.writes, strict=True):
        value = (write * row["key"][:, :, None]).sum(1) / row["key"].square().sum(1, keepdim=True)
        key = row["key"][:, [*range(32), *range(32)]]
        seen = row["decay"] * seen + key[:, :, None] * value[:, None]
    said = {(c, w) for c, w, made in log.formulas() if torch.allclose(made, seen)}
    assert ("wrong-tile", "channels 32 to 63 are those of 0 to 31: k") in said


def test_a_last_channel_that_is_masked_off_is_a_wrong_tile():
    shape, state, rows = drawn("gdn", 2, d_k=24)
    some = torch.arange(24) < 23
    seen = play(shape, state * some[:, None], [r | {x: r[x] * some for x in "qk"} for r in rows])
    ways = of_other_channels(shape, rows)
    said = [w for _, w, made in ways if torch.allclose(play(shape, state, made)[0][1], seen[0][1])]
    assert said == ["channels 23 to 23 are left out: q and k, of the norm too"]


@pytest.mark.parametrize(
    ("ring", "said", "words", "cause"),
    [
        (16, "double-fold", "1 place on" + ALIKE, "wrong-wrap"),
        (16, "double-fold", "1 row again", "double-fold"),
        (16, "lost-fold", "", "wrong-wrap"),
        (0, "lost-fold", "", "unused-memory"),
    ],
)
def test_rows_of_a_log_that_was_never_written_there_are_at_another_place(
    monkeypatch, ring, said, words, cause
):
    player = Player(replace(KERNEL, ring=ring), PACKAGE, SHAPES["gdn"], 3, "cpu")
    fault = Fault("", "depths", "unused-memory", "", player.shape, 3, 1, 0, 0, math.inf)
    found = replace(fault, cause=said, detail=words, error=1.0)
    monkeypatch.setattr(Player, "script", lambda *_: [found])
    named = replays._filled(player, fault)
    assert (named.cause, ALIKE in named.detail) == (cause, False)


def test_rows_that_a_log_folds_twice_are_named():
    fault = first(held.Twice, "gdn", ring=16)
    assert fault.cause == "double-fold"


def test_rows_that_a_fold_finds_in_the_state_are_named():
    fault = first(held.FoldsDrafts, "gdn", log=True)
    assert fault.cause == "double-fold"
    assert "are folded into the state after 3" in fault.detail


def test_a_fold_that_is_lost_between_two_rows_of_a_pass_is_named():
    fault = first(held.ForgetsWithin, "gdn", "no-drafts", ring=16)
    assert fault.cause == "lost-fold", fault.detail


def test_a_decay_that_one_fold_of_a_log_leaves_out_is_named():
    fault = first(held.FoldsUndecayed, "gdn", ring=16)
    assert fault.cause == "gate-order", fault.detail
    assert "without the last row's decay" in fault.detail


def test_states_that_short_passes_store_elsewhere_have_another_stride():
    fault = first(held.ShortStride, "gdn", "rounds")
    assert fault.cause == "wrong-stride", fault
    assert "right where every pass has 3 rows" in fault.detail


def test_kernels_of_one_length_get_short_passes_too():
    import random

    kernel = Kernel("equal", ("gdn",), own._Slots, equal_lengths=True)
    passes = list(SCRIPTS["lengths"](SHAPES["gdn"], random.Random(1), kernel))
    assert all(len(set(one.lengths)) == 1 for one in passes)
    assert min(one.lengths[0] for one in passes) < SHAPES["gdn"].n_tokens


@pytest.mark.parametrize(("noise", "found"), [(0.0, True), (2e-4, False)])
def test_one_head_of_a_row_is_named_where_all_others_are_right(noise, found):
    shape, start, rows = drawn("gdn", 3)
    wrong = [row | {"b": 2 * row["b"]} for row in rows]
    seen = torch.stack(play(shape, start, rows)[0])
    seen[2, 1] = step(shape, play(shape, start, rows[:2])[1][-1], wrong[2])[0][1]
    seen += noise * (torch.rand(seen.shape) - 0.5)
    ways = [("wrong-gate", "b is taken twice", wrong)]
    said = row_by_row(shape, start, seen, rows, (), ways, None, 1e-4)
    expected = "wrong-gate", "b is taken twice, in rows 2 of 3, heads 1 of 4"
    assert said == (expected if found else None)


def test_a_row_of_a_tree_may_follow_one_that_has_no_state():
    shape = SHAPES["gdn"]
    source = Source(shape, 3)
    batch, start = source.rows([0], [2], [(-1, 0)]), source.state().double()
    tokens = [token(batch, i) for i in range(2)]
    seen = torch.stack(
        [step(shape, s, t)[0] for s, t in ((start, tokens[0]), (0 * start, tokens[1]))]
    )
    said = row_by_row(shape, start, seen, tokens, (-1, 0), [], None, 1e-6)
    assert said == (
        "wrong-parent",
        "row 1 follows no row that has a state and not row 0, in rows 1 of 2",
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda A, x, bias: torch.sigmoid(x), "A is left out of the decay"),
        (lambda A, x, bias: torch.sigmoid(A * (x - bias)), "dt_bias is left out"),
        (lambda A, x, bias: A * torch.sigmoid(x), "A multiplies the sigmoid, not its input"),
    ],
)
def test_formulas_under_a_lower_bound_are_named(wrong, words):
    shape = replace(SHAPES["kda"], extras=("lower bound",))
    source = Source(shape, 1)
    state, row = source.state().double(), token(source.rows([0], [1]), 0)
    A, x = row["A_log"].exp()[:, None], row["a"] + row["dt_bias"]
    decay = torch.exp(-5 * wrong(A, x, row["dt_bias"]))[..., None]
    seen = step(shape, state, terms(shape, row) | {"decay": decay})[1]
    situation = Situation(KERNEL, Reference(shape, [state]), 0, [row])
    cause, said = situation.explain_state(seen, 1, 1e-5)
    assert (cause, said.partition(",")[0]) == ("wrong-gate", words.partition(",")[0])


@pytest.mark.parametrize("part", ["beta", "key", "decay"])
def test_what_corrections_take_alone_is_told_apart(part):
    shape, state, (row,) = drawn("gdn", 1)
    right = terms(shape, row)
    wrong = {"beta": {"beta": 1 + 0 * right["beta"]}, "decay": {"decay": 1 + 0 * right["decay"]}}
    wrong["key"] = {"key": 2 * right["key"]}
    (_, both, _), (_, taken, off), (_, kept, rest) = in_parts(
        shape, [row], [("cause", "words", [right | wrong[part]])]
    )
    assert taken == f"{both}, in what is taken off v"
    assert kept == f"{both}, in what is kept and written"
    after = [step(shape, state, one)[1] for one in (right | wrong[part], off[0], rest[0])]
    assert not any(torch.allclose(a, step(shape, state, right)[1], atol=1e-6) for a in after)
    assert not torch.allclose(after[1], after[2], atol=1e-6)


def test_a_row_that_others_take_is_named_with_its_rows():
    shape, state, rows = drawn("gdn", 5)
    wrong = [row | {"a": rows[min(i, 2)]["a"]} for i, row in enumerate(rows)]
    seen = torch.stack(play(shape, state, wrong)[0])
    situation = Situation(KERNEL, Reference(shape, [state]), 0, rows)
    assert situation.explain_outputs(seen, 1e-5) == (
        "gate-of-other-row", "decay of row 2, in rows 3 to 4 of 5",
    )  # fmt: skip


def test_a_window_that_no_pass_leaves_is_what_taps_read():
    shape, state, rows = drawn("conv", 1)
    seen = step(shape, state[:, [0, 2, 2]], rows[0])[0][None]
    situation = Situation(KERNEL, Reference(shape, [state]), 0, rows)
    cause, said = situation.explain_outputs(seen, 1e-5)
    assert (cause, said[:27]) == ("other-row", "the window holds inputs -2,")


@pytest.mark.parametrize(("log", "cause"), [(True, "lost-fold"), (False, "wrong-term")])
def test_what_a_row_wrote_is_lost_by_the_fold_of_a_log(log, cause):
    shape, state, rows = drawn("gdn", 3)
    seen = Log(shape, state, rows)
    situation = Situation(replace(KERNEL, log=log), Reference(shape, [state]), 0, rows)
    assert situation.explain_state(seen.states[-1] - seen.writes[-1], 3, 1e-5)[0] == cause


def test_a_window_in_another_order_before_any_pass_is_that_of_taps():
    shape, state, rows = drawn("conv", 1)
    seen = step(shape, state[:, [1, 0, 2]], rows[0])[0][None]
    situation = Situation(KERNEL, Reference(shape, [state]), 0, rows)
    words = "tap 0 takes weight 1, tap 1 takes weight 0"
    assert situation.explain_outputs(seen, 1e-5) == ("wrong-term", words)


def test_a_state_that_is_found_without_other_sequences_is_named_by_its_count():
    fault = first(held.NextColumn, "gdn")
    assert (fault.cause, "leave the state after 3, 1, 2" in fault.detail) == ("stale-column", True)


def test_states_last_for_a_chunk_under_a_lower_bound_too():
    shape = replace(SHAPES["kda"], extras=("lower bound",))
    g = Source(shape, 1, long=True).rows([0], [64]).g
    assert g.sum(0).median() > -5
