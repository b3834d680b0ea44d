"""Decays that parts of a recurrence see wrongly, and logs folded wrongly, without a kernel."""

from __future__ import annotations

import pytest
import torch

from engine.conform.cases import Source
from engine.conform.decays import Log, decays
from engine.conform.reference import play, token
from tests.engine.conform.drawn_rows import SHAPES, drawn

OF_BLOCK = "with the beta at their place in the block that wrote it"


def test_passes_that_write_over_the_oldest_rows_of_a_log_wrap_wrongly():
    source = Source(SHAPES["gdn"], 1)
    rows = source.rows([0], [3])
    rows = [token(rows, i) for i in range(3)]
    log = Log(SHAPES["gdn"], source.state().double(), rows)
    seen = [state for cause, _, state in log.passes([2, 1]) if cause == "wrong-wrap"]
    right = play(SHAPES["gdn"], log.states[0], [rows[2], rows[1]])[1][-1]
    assert any(torch.allclose(state, right) for state in seen)


def test_a_block_of_a_chunk_may_see_another_ones_rows_without_a_decay_between():
    shape, state, rows = drawn("gdn", 33, n_heads=1, n_groups=1)
    log = Log(shape, state, rows)
    part = sum(log.kept(log.writes[j], j + 1) for j in range(16))
    between = torch.stack([row["decay"] for row in log.rows[17:33]]).prod(0)
    more = (log.rows[32]["read"][:, :, None] * part * (1 / between - 1)).sum(1)
    ways = decays(shape, state, rows, False, 32)
    said = [w for _, w, one in ways if torch.allclose(one[0][32], log.outputs[32] + more)]
    assert "outputs see what rows 0 to 15 wrote without the decay of rows 17 to 32" in said


def chunk(rows=33, recurrence="gdn"):
    """A shape, a state, rows and their log; and what corrections take off, as a matrix."""
    shape, state, drawn_rows = drawn(recurrence, rows, n_heads=1, n_groups=1)
    log = Log(shape, state, drawn_rows)
    off = torch.zeros(rows, rows, dtype=torch.float64)
    for j in range(rows):
        held = log.rows[j]["key"][0, :, None]
        for i in range(j + 1, rows):
            held = log.rows[i]["decay"][0] * held
            off[i, j] = log.rows[i]["beta"][0] * (log.rows[i]["key"][0] * held[:, 0]).sum()
    return shape, state, drawn_rows, log, off


def written(log, wrote):
    """Outputs of rows that write these values along their keys."""
    state, outputs = log.states[0], []
    for row, value in zip(log.rows, wrote, strict=True):
        state = row["decay"] * state + row["key"][:, :, None] * value[None, None]
        outputs.append((row["read"][:, :, None] * state).sum(1))
    return torch.stack(outputs)


@pytest.mark.parametrize("recurrence", ["gdn", "kda"])
@pytest.mark.parametrize("below", [False, True])
def test_a_block_of_a_chunks_inverse_may_be_left_out(recurrence, below):
    shape, state, rows, log, off = chunk(recurrence=recurrence)
    inverse = torch.linalg.inv(torch.eye(33, dtype=torch.float64) + off)
    pairs = ((w[0], row["key"][0]) for w, row in zip(log.writes, log.rows, strict=True))
    wrote = torch.stack([write.T @ key / key.square().sum() for write, key in pairs])
    alone = torch.linalg.solve(inverse, wrote)
    inverse[16:32, :16] = 0
    if below:
        inverse[32:, :16] = -inverse[32:, 32:] @ off[32:, 16:32] @ inverse[16:32, :16]
        inverse[32:, :16] -= inverse[32:, 32:] @ off[32:, :16] @ inverse[:16, :16]
    seen = written(log, inverse @ alone)
    ways = decays(shape, state, rows, False)
    said = [w for _, w, one in ways if torch.allclose(torch.stack(one[0]), seen, atol=1e-7)]
    words = "of the chunk's inverse, rows 16 to 31, columns 0 to 15 are left out"
    assert words + ", and so in those below" * below in said


def test_one_value_of_a_few_rows_inverse_may_be_wrong():
    shape, state, rows, log, off = chunk(4)
    inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) + off)
    pairs = ((w[0], row["key"][0]) for w, row in zip(log.writes, log.rows, strict=True))
    wrote = torch.stack([write.T @ key / key.square().sum() for write, key in pairs])
    alone = torch.linalg.solve(inverse, wrote)
    inverse[2, 0] = -off[2, 0]
    inverse[3, 0] = -off[3, :3] @ inverse[:3, 0]
    seen = written(log, inverse @ alone)
    ways = decays(shape, state, rows, False)
    said = [w for _, w, one in ways if torch.allclose(torch.stack(one[0]), seen, atol=1e-7)]
    words = "of the chunk's inverse, rows 2 to 2, columns 0 to 0 have the first power"
    assert any(w.startswith(words) and w.endswith(", and so in those below") for w in said)


@pytest.mark.parametrize(
    ("n", "row", "words"),
    [
        (3, None, "what earlier rows wrote without beta"),
        (3, lambda i, j: j, "what earlier rows wrote with the beta of the row that wrote it"),
        (
            33,
            lambda i, j: j // 16 * 16 + i % 16 if j < i // 16 * 16 else i,
            f"what rows of earlier blocks of 16 wrote {OF_BLOCK}",
        ),
    ],
)
def test_corrections_may_take_what_rows_wrote_times_another_beta(n, row, words):
    shape, state, rows, log, off = chunk(n)
    pairs = ((w[0], r["key"][0]) for w, r in zip(log.writes, log.rows, strict=True))
    wrote = torch.stack([write.T @ key / key.square().sum() for write, key in pairs])
    one, beta = torch.eye(n, dtype=torch.float64), [float(r["beta"][0]) for r in log.rows]
    alone = (one + off) @ wrote
    for i, j in torch.ones(n, n).tril(-1).nonzero().tolist():
        off[i, j] *= (beta[row(i, j)] if row else 1.0) / beta[i]
    seen = written(log, torch.linalg.solve(one + off, alone))
    ways = decays(shape, state, rows, False)
    said = [w for _, w, made in ways if torch.allclose(torch.stack(made[0]), seen, atol=1e-7)]
    assert f"corrections see {words}" in said


def test_outputs_may_see_what_later_rows_write():
    shape, state, rows, log, _ = chunk(4, "kda")
    more = log.writes[1] / log.rows[1]["decay"]
    first = log.outputs[0] + (log.rows[0]["read"][:, :, None] * more).sum(1)
    ways = decays(shape, state, rows[:1], False, chunk=rows)
    said = [w for _, w, one in ways if torch.allclose(one[0][0], first)]
    assert said == ["outputs see what the next row writes too"]
    assert not any("later rows" in w for _, w, _ in decays(shape, state, rows, True, chunk=rows))


def test_a_block_of_a_chunk_may_see_another_with_decays_of_a_block_later():
    shape, state, rows = drawn("kda", 33)
    log = Log(shape, state, rows)
    read, seen = log.rows[32]["read"][:, :, None], log.outputs[32].clone()
    for j, write in enumerate(log.writes[:16]):
        seen += (read * (log.kept(write, j + 17) - log.kept(write, j + 1))).sum(1)
    ways = ((c, w, made[0][32]) for c, w, made in decays(shape, state, rows, False, 32))
    said = [(c, w) for c, w, made in ways if torch.allclose(made, seen)]
    words = "outputs see what rows 0 to 15 wrote with the decay from 16 rows later"
    assert ("gate-of-other-row", words) in said


def test_rows_that_are_folded_again_from_another_place_have_two_names():
    shape, state, rows = drawn("gdn", 3)
    log, alike = Log(shape, state, rows), "; wrong-wrap looks the same"
    said = {words: cause for cause, words, _ in log.stretches(16, 10, [])}
    (of_all,) = (w for w in said if w.startswith("the state after 0 rows") and "then 3" in w
                 and "from 10 on" in w)  # fmt: skip
    assert (said[of_all], of_all.endswith(alike)) == ("double-fold", True)
    assert all(cause == "double-fold" for words, cause in said.items() if words.endswith(alike))


def test_a_fold_may_take_the_weight_of_one_head():
    shape, state, rows = drawn("kda", 2)
    wrong = [row | {"A_log": row["A_log"][:1].expand(4)} for row in rows]
    seen = play(shape, state, wrong)[1][-1]
    ways = Log(shape, state, rows).formulas()
    said = {(c, w) for c, w, made in ways if torch.allclose(made, seen)}
    assert ("head-mapping", "A_log of head 0") in said


def test_a_log_may_hold_what_rows_write_without_beta():
    shape, state, rows = drawn("kda", 2)
    log = Log(shape, state, rows)
    seen = state
    for row, write in zip(log.rows, log.writes, strict=True):
        seen = row["decay"] * seen + write / row["beta"][:, :, None]
    said = {(c, w) for c, w, made in log.formulas() if torch.allclose(made, seen)}
    assert ("wrong-gate", "beta is left out") in said
