"""Rows that n-grams are hashed to, against plain numbers; the window of tokens; mapped rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from engine.model.ngram_hash import ngram_rows
from engine.model.parts.ngram_embedding import NgramEmbeddingPart
from engine.model.token_window import TokenInputs, TokenWindow
from tests.support.golden_files import DATA

END = 3
TABLE = "per_layer_token_embd.weight"


def naive_rows(text: list[int], part: NgramEmbeddingPart) -> list[int]:
    """Rows of the n-grams that end with a text."""
    context = list(reversed(text)) + [-1] * part.n_gram
    for s in range(1, part.n_gram):
        if context[s] in (-1, END):
            context[s:] = [END] * len(context[s:])
    heads, rows = len(part.sizes) // (part.n_gram - 1), []
    for n in range(2, part.n_gram + 1):
        mixed = 0
        for token, factor in zip(context[:n], part.multipliers, strict=False):
            mixed ^= token * factor % 2**64
        for head in range((n - 2) * heads, (n - 1) * heads):
            rows.append(mixed % part.sizes[head] + part.offsets[head])
    return rows


@given(
    text=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    n_gram=st.integers(2, 5),
    heads=st.integers(1, 3),
    data=st.data(),
)
def test_rows_of_every_token(text, n_gram, heads, data):
    n = (n_gram - 1) * heads
    numbers = st.lists(st.integers(1, 2**64 - 1), min_size=n_gram, max_size=n_gram)
    sizes = st.lists(st.integers(1, 2**31 - 1), min_size=n, max_size=n)
    part = NgramEmbeddingPart(
        n_gram=n_gram,
        d_conv=4,
        multipliers=tuple(data.draw(numbers)),
        sizes=tuple(data.draw(sizes)),
        offsets=tuple(range(n)),
        end_id=END,
        n_streams=2,
        n_embd=8,
        n_rows=2**31,
    )
    window, state, found = TokenWindow(n_gram), torch.zeros(1, n_gram - 1, 1), []
    at = 0
    while at < len(text):  # in portions: tokens of earlier ones count
        width = data.draw(st.integers(1, len(text) - at))
        tokens = torch.tensor([text[at : at + width]])
        context = window.into(TokenInputs(tokens), state, [state])
        found += ngram_rows(context.numpy(), part)[0].tolist()
        at += width
    assert found == [naive_rows(text[: i + 1], part) for i in range(len(text))]


def test_a_window_of_tokens_keeps_any_number_of_a_vocabulary():
    most, window = (1 << 24) - 2, TokenWindow(3)
    tokens = torch.tensor([[0, most, 5], [most - 1, 0, most]])
    slots = [torch.empty(2, 2, 1) for _ in range(3)]
    context = window.into(TokenInputs(tokens), torch.zeros(2, 2, 1), slots)
    assert context.tolist() == [
        [[0, -1, -1], [most, 0, -1], [5, most, 0]],
        [[most - 1, -1, -1], [0, most - 1, -1], [most, 0, most - 1]],
    ]
    assert (slots[1][..., 0] - 1).tolist() == [[0, most], [most - 1, 0]]
    _, entries = window.log(TokenInputs(tokens), torch.zeros(2, 2, 1))
    for n, slot in ((3, slots[0]), (1, slots[2])):
        assert torch.equal(window.fold(torch.zeros(2, 2, 1), entries, n), slot)


def test_rows_are_read_from_the_file_after_it_was_closed(tmp_path):
    path = tmp_path / "copy.gguf"
    path.write_bytes((DATA / "qwen4exp-b-qsa-f32.gguf").read_bytes())
    with GgufFile.open(path) as file:
        info = file.tensors[TABLE]
        table = TensorReader(file).mapped_rows(TABLE, info.shape)
        whole = file.raw(TABLE).view(np.float32).reshape(info.shape).copy()
    ids = np.array([[5, 0, 415], [7, 7, 1]])
    assert np.array_equal(table.take(ids).numpy(), whole[ids])
    with path.open("r+b") as short:
        short.truncate(info.offset + 9)
    with pytest.raises(ModelFileError, match="shorter"):
        table.take(ids)
