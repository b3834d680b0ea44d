"""Attention over split cells in Triton, against the law in f64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import attention
from kernels.attention import with_triton
from kernels.linear.block_parts import PreparedRows
from kernels.linear.blocks import pack_blocks
from kernels.linear.integer_blocks.rows_with_triton import integer_rows
from tests.kernels.with_triton.conftest import INTERPRETED
from tests.support.attention import WithDefaults
from tests.support.closeness import nmse
from tests.support.implementations import implementations
from tests.support.random_blocks import random_blocks

naive, with_torch = map(WithDefaults, implementations(attention, "naive", "with_torch"))
triton = WithDefaults(with_triton)

# what is asked for is 1e-7
F32 = 1e-11
# heads, key/value heads, head dim; sequences, tokens, cells: rows that fill no tile or several
# (alone, and of several heads), cells that fill no tile, splits left empty at the end
ONE, FEW, MANY = (1, 1, 1), (2, 3, 17), (1, 7, 101)
SHAPES = [
    *(((1, 1, 8), sizes) for sizes in (ONE, FEW, MANY)),
    ((8, 2, 64), MANY),
    ((3, 1, 80), FEW),
    ((4, 4, 128), FEW),
    ((6, 1, 256), ONE),
    ((4, 2, 12), MANY),
]


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits, and several tiles in a split, of few cells."""
    monkeypatch.setattr(with_triton, "LEAST_CELLS", 32)


def make(n_batch, n_tokens, heads, n_cells):
    n_heads, n_kv_heads, head_dim = heads
    mask = torch.rand(n_batch, n_tokens, n_cells) < 0.6
    mask[..., n_cells // 2] = True
    return (
        torch.randn(n_batch, n_tokens, n_heads, head_dim),
        torch.randn(n_batch, n_kv_heads, n_cells, head_dim),
        torch.randn(n_batch, n_kv_heads, n_cells, head_dim),
        mask,
    )


def assert_near(result: torch.Tensor, q, k, v, mask) -> None:
    assert result.dtype == torch.float32 and result.shape == q.shape
    assert nmse(result.cpu(), naive.attend(q.double(), k.double(), v.double(), mask)) < F32


def run(device, *inputs):
    return triton.attend(*(x.to(device) for x in inputs))


@pytest.mark.parametrize(("heads", "sizes"), SHAPES, ids=str)
@pytest.mark.thinned(4)
def test_equals_the_law(device, small_splits, heads, sizes):
    n_batch, n_tokens, n_cells = sizes
    inputs = make(n_batch, n_tokens, heads, n_cells)
    assert_near(run(device, *inputs), *inputs)


@pytest.mark.parametrize("n_cells", [5, 101])
def test_values_are_columns_of_the_keys(device, small_splits, n_cells):
    """As in latent attention: keys longer than values, one row for both, a scale of its own."""
    q, k, _, mask = make(2, 3, (6, 1, 24), n_cells)
    given, rows, seen = (x.to(device) for x in (q, k, mask))
    o = triton.attend(given, rows, rows[..., :16], seen, 0.125)
    wanted = naive.attend(q.double(), k.double(), k[..., :16].double(), mask, 0.125)
    assert o.shape == (2, 3, 6, 16)
    assert nmse(o.cpu(), wanted) < F32


def test_splits_of_the_real_size(device):
    inputs = make(1, 1, (2, 1, 16), 300)
    assert with_triton.cells_per_split(300) == 64
    assert_near(run(device, *inputs), *inputs)


def test_there_are_never_too_many_splits():
    for n_cells in (1, 64, 4096, 4097, 8192, 100_000, 1 << 20):
        size = with_triton.cells_per_split(n_cells)
        assert size % with_triton.CELLS == 0
        assert 1 <= -(-n_cells // size) <= with_triton.MOST_SPLITS


def test_one_visible_cell_gives_its_value_to_the_right_heads(device, small_splits):
    q, k, v, mask = make(1, 3, (6, 2, 8), 70)
    mask[:] = False
    for t, cell in enumerate((69, 2, 33)):
        mask[0, t, cell] = True
    o = run(device, q, k, v, mask).cpu()
    for t, cell in enumerate((69, 2, 33)):
        for h in range(6):
            torch.testing.assert_close(o[0, t, h], v[0, h // 3, cell])


def test_cells_that_no_query_sees_are_not_read(device, small_splits):
    """Single cells, whole tiles and whole splits of NaN."""
    q, k, v, mask = make(2, 2, (4, 2, 16), 150)
    mask[:, :, 3] = mask[:, :, 20:50] = mask[:, :, 64:128] = mask[:, :, 149] = False
    expected = naive.attend(q.double(), k.double(), v.double(), mask)
    hidden = ~mask.any(1)
    for x in (k, v):
        x.masked_fill_(hidden[:, None, :, None], torch.nan)
    assert nmse(run(device, q, k, v, mask).cpu(), expected) < F32


def test_hidden_cells_weigh_nothing_however_large(device, small_splits):
    """Also those that another query sees, whose finite numbers are read."""
    q, k, v, mask = make(1, 4, (4, 2, 16), 40)
    mask[:, :3, [0, 3, 39]], mask[:, 3] = False, True
    truth = naive.attend(q.double(), k.double(), v.double(), mask)
    k[:, :, [0, 3, 39]] = v[:, :, [0, 3, 39]] = 1e15
    assert nmse(run(device, q, k, v, mask)[:, :3].cpu(), truth[:, :3]) < F32


def test_large_scores_do_not_overflow(device, small_splits):
    q, k, v, mask = make(1, 3, (2, 1, 16), 40)
    truth = naive.attend(q.double() * 300, k.double() * 300, v.double(), mask)
    assert nmse(run(device, q * 300, k * 300, v, mask).cpu(), truth) < 1e-6


def test_any_strides(device, small_splits):
    """A token-major cache of more cells, one view of it for all sequences, a shared mask."""
    q, k, v, mask = make(2, 3, (4, 2, 16), 45)
    caches = torch.full((2, 60, 2, 16), torch.nan)
    caches[0, :45], caches[1, :45] = k[0].transpose(0, 1), v[0].transpose(0, 1)
    unified = [c.transpose(0, 1)[None, :, :45].expand(2, -1, -1, -1) for c in caches.to(device)]
    shared = mask[:1].to(device).expand(2, 3, 45)
    strided_q = q.to(device).transpose(1, 2).contiguous().transpose(1, 2)
    every_second = torch.stack((shared, ~shared), -1)[..., 0]
    for given in (shared, every_second):
        o = triton.attend(strided_q, *unified, given)
        assert_near(o, q, *(x[:1].expand(2, -1, -1, -1) for x in (k, v)), mask[:1].expand(2, 3, 45))


def test_a_query_has_the_same_bits_among_others(device, small_splits, products_in_order):
    q, k, v, mask = (x.to(device) for x in make(2, 9, (4, 2, 16), 70))
    together = triton.attend(q, k, v, mask)
    for b, t in ((0, 0), (1, 8)):
        one = triton.attend(
            q[b : b + 1, t : t + 1], k[b : b + 1], v[b : b + 1], mask[b : b + 1, t : t + 1]
        )
        assert torch.equal(one[0, 0], together[b, t])


def test_hidden_cells_at_the_end_do_not_change_a_bit(device, small_splits, products_in_order):
    q, k, v, mask = make(1, 2, (2, 1, 16), 100)
    mask[..., 40:] = False
    longer = run(device, q, k, v, mask)
    assert torch.equal(run(device, q, k[:, :, :40], v[:, :, :40], mask[..., :40]), longer)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.thinned(4)
def test_sinks(device, small_splits, invariant):
    q, k, v, mask = make(2, 3, (6, 2, 16), 101)
    sinks = torch.randn(6) * 3
    run_one = triton.attend_invariant if invariant else triton.attend
    o = run_one(*(x.to(device) for x in (q, k, v, mask)), None, sinks.to(device))
    wanted = naive.attend(q.double(), k.double(), v.double(), mask, None, sinks.double())
    assert nmse(o.cpu(), wanted) < F32


@pytest.mark.parametrize(("heads", "sizes"), [*SHAPES, ((2, 1, 300), (1, 17, 70))], ids=str)
@pytest.mark.thinned(6)
def test_each_query_by_itself(device, small_splits, heads, sizes):
    """Keys of latent attention and prompts too."""
    n_batch, n_tokens, n_cells = sizes
    inputs = make(n_batch, n_tokens, heads, n_cells)
    assert_near(triton.attend_invariant(*(x.to(device) for x in inputs)), *inputs)


def test_only_the_order_of_visible_cells_counts(device, monkeypatch):
    """Not their places, nor how many others there are, nor other queries; hidden ones are NaN."""
    monkeypatch.setattr(with_triton, "LEAST_CELLS", 8)
    monkeypatch.setattr(with_triton, "MOST_SPLITS", 8)
    q, k, v, mask = make(2, 5, (4, 2, 16), 100)
    hidden = ~mask.any(1)[:, None, :, None]
    given = q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), mask
    together = triton.attend_invariant(*(x.to(device) for x in given))
    for b, t in ((0, 0), (1, 4)):
        seen = mask[b, t].nonzero().squeeze(1)
        one = triton.attend_invariant(
            q[b : b + 1, t : t + 1].to(device),
            *(x[b : b + 1, :, seen].to(device) for x in (k, v)),
            torch.ones(1, 1, len(seen), dtype=torch.bool, device=device),
        )
        assert torch.equal(one[0, 0], together[b, t])


def test_prompts_run_in_torch(device, monkeypatch):
    monkeypatch.setattr(with_triton, "attend_with_torch", lambda *args: args)
    for n_tokens, in_torch in ((16, False), (17, True)):
        result = run(device, *make(1, n_tokens, (1, 1, 8), 20))
        assert isinstance(result, tuple) == in_torch


@pytest.mark.parametrize("most", [1, 8 * 20 * 7])
def test_prompts_keep_few_scores(device, monkeypatch, most):
    monkeypatch.setattr(with_triton, "attend_with_torch", None)
    monkeypatch.setattr(with_triton, "MOST_SCORES", most)
    inputs = make(2, 17, (8, 2, 8), 20)
    assert_near(run(device, *inputs), *inputs)


# a block of zeros has no factor: numpy, in which the interpreter counts, says so
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("heads", "types", "invariant"),
    [
        ((16, 2, 16), ("Q4_K", "Q8_0"), False),
        ((2, 1, 256), ("Q8_0",), False),
        ((2, 1, 128), ("Q4_K",), True),
        ((8, 1, 20), ("Q8_0",), False),
    ],
    ids=str,
)
def test_rows_are_gated_and_rounded(device, small_splits, heads, types, invariant):
    """The bits of attention, gate and rounding one after the other; the gate is columns of
    something wider, and heads of 20 numbers fill no blocks together."""
    q, k, v, mask = (x.to(device) for x in make(1, 2, heads, 37))
    n_in = heads[0] * heads[2]
    gate = torch.randn(1, 2, n_in + 5, device=device)[..., 2:-3]
    reads = [pack_blocks(random_blocks(name, 4, 256).to(device), name, "q8") for name in types]
    run = triton.attend_invariant if invariant else triton.attend
    out = run(q, k, v, mask).flatten(2)
    for given in (None, gate):
        y = with_triton.attend_rows(q, k, v, mask, given, reads, invariant=invariant)
        wanted = out if given is None else out * torch.sigmoid(given)
        assert isinstance(y, PreparedRows) == (heads[2] != 20)
        numbers = y.numbers if isinstance(y, PreparedRows) else y
        torch.testing.assert_close(numbers, wanted, rtol=1e-6, atol=1e-12)
        if isinstance(y, PreparedRows):
            apart = integer_rows(numbers.flatten(0, 1), list(y.integers))
            assert all(
                torch.equal(a, b)
                for part, made in y.integers.items()
                for a, b in zip(made, apart[part], strict=True)
            )


@pytest.mark.skipif(not INTERPRETED, reason="addresses are seen in the interpreter")
@pytest.mark.parametrize("name", ["_split", "_split_alone"])
def test_cells_far_behind_others(monkeypatch, name):
    """The cells of a head may begin more than 2^31 numbers after those of the first one."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    inputs = make(1, 1, (3, 3, 8), 4)
    first = [x.data_ptr() for x in inputs[1:3]]
    kernel, load, seen = getattr(with_triton, name), InterpreterBuilder.create_masked_load, set()

    class Far:
        def __getitem__(self, grid):
            def launch(*given, **constants):
                numbers = dict(zip(kernel.arg_names, given, strict=False))
                kernel[grid](**{**numbers, "k_h": 1 << 30, "v_h": 1 << 30}, **constants)

            return launch

    def look(self, places, known, *others):
        there, near = places.data.astype(np.int64), known.data
        for start in first:
            heads, rest = np.divmod(there - start, 4 << 30)
            far = known.data & (heads > 0) & (rest < 4 * 4 * 8)
            seen.update(heads[far].tolist())
            near = near & ~far & (heads >= -1)
        return load(self, places, TensorHandle(near, known.dtype), *others)

    monkeypatch.setattr(with_triton, name, Far())
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", look)
    (triton.attend if name == "_split" else triton.attend_invariant)(*inputs)
    assert seen == {1, 2}
