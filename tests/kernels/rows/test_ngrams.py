"""N-grams: the last tokens, the rows that they are hashed to, values by agreement."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.rows import ngrams as op
from kernels.rows.ngrams import NgramHash
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

FAST = pytest.mark.parametrize("ops", [with_torch, with_llvm, op], ids=["torch", "llvm", "op"])
END = 3


@pytest.mark.parametrize("ops", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"])
def test_hashes_by_hand(ops):
    hashing = NgramHash((2, 2**64 - 1), (100,), (0,), END)
    # 5 * 2 XOR 2^64 - 4, 5 * 2 XOR 2^64 - 3 after the end, and the end itself after 4
    context = torch.tensor([[5, 4], [5, END], [5, -1], [END, 4]])
    numbers = [10 ^ (2**64 - 4), 10 ^ (2**64 - 3), 10 ^ (2**64 - 3), 6 ^ (2**64 - 4)]
    assert ops.hash_rows(context, hashing).tolist() == [[n % 100] for n in numbers]


@FAST
@given(
    text=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    n_gram=st.integers(2, 5),
    n_heads=st.integers(1, 3),
    data=st.data(),
)
def test_rows_of_every_token(ops, text, n_gram, n_heads, data):
    n = (n_gram - 1) * n_heads
    numbers = st.lists(st.integers(1, 2**64 - 1), min_size=n_gram, max_size=n_gram)
    sizes = st.lists(st.integers(1, 2**31 - 1), min_size=n, max_size=n)
    hashing = NgramHash(tuple(data.draw(numbers)), tuple(data.draw(sizes)), tuple(range(n)), END)
    tokens, window = torch.tensor([text, text[::-1]]), torch.zeros(2, n_gram - 1, 1)
    wanted, history = naive.recent_tokens(tokens, window)
    at = data.draw(st.integers(0, len(text)))
    found = []
    for part in (tokens[:, :at], tokens[:, at:]):  # in portions: tokens of earlier ones count
        if part.numel():
            context, joined = ops.recent_tokens(part, window)
            found.append(context)
            window = joined[:, 1 - n_gram :]
    context = torch.cat(found, 1)
    assert torch.equal(context, wanted)
    assert torch.equal(window, history[:, 1 - n_gram :])
    assert torch.equal(ops.hash_rows(context, hashing), naive.hash_rows(wanted, hashing))


@FAST
@pytest.mark.parametrize("d", [1, 16, 53])
def test_agreement(ops, d):
    key, query = torch.randn(2, 2, 3, 4, d + 5)[..., 3 : 3 + d]
    value = torch.randn(2, 3, d + 1)[..., 1:]
    key[0, 0, 0], query[0, 0, 1] = 0, 1e-5
    law = naive.agreeing(*(x.double() for x in (key, query, value)))
    y = ops.agreeing(key, query, value)
    assert y.shape == key.shape
    assert nmse(y, law) < 1e-11
    # nothing in common: half of the value
    torch.testing.assert_close(y[0, 0, 0], value[0, 0] / 2)


@pytest.mark.parametrize("run", [op.agreeing, with_torch.agreeing], ids=["op", "torch"])
def test_bits_do_not_depend_on_neighbours(run):
    key, query, value = *torch.randn(2, 9, 3, 21), torch.randn(9, 21)
    y = run(key, query, value, invariant=True)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(run(key[one], query[one], value[one], invariant=True), y[one])
