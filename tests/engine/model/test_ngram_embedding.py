"""The window of tokens that n-grams are made of; the rows of a mapped table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from engine.model.recurrence import TokenInputs, TokenWindow
from tests.support.golden_files import DATA

TABLE = "per_layer_token_embd.weight"


def test_a_window_of_tokens_keeps_any_number_of_a_vocabulary():
    most, window = (1 << 24) - 2, TokenWindow(3)
    tokens = torch.tensor([[0, most, 5], [most - 1, 0, most]])
    slots = [torch.empty(2, 2, 1) for _ in range(3)]
    context = window.into(TokenInputs(tokens, tokens), torch.zeros(2, 2, 1), slots)
    assert context.tolist() == [
        [[0, -1, -1], [most, 0, -1], [5, most, 0]],
        [[most - 1, -1, -1], [0, most - 1, -1], [most, 0, most - 1]],
    ]
    assert (slots[1][..., 0] - 1).tolist() == [[0, most], [most - 1, 0]]
    _, entries = window.log(TokenInputs(tokens, tokens), torch.zeros(2, 2, 1))
    for n, slot in ((3, slots[0]), (1, slots[2])):
        assert torch.equal(window.fold(torch.zeros(2, 2, 1), entries, n), slot)


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_are_there_after_the_file_was_closed(tmp_path, mapped):
    path = tmp_path / "copy.gguf"
    path.write_bytes((DATA / "qwen4exp-b-qsa-f32.gguf").read_bytes())
    with GgufFile.open(path) as file:
        info = file.tensors[TABLE]
        table = TensorReader(file, tables_mapped=mapped).rows(TABLE, info.shape)
        whole = file.raw(TABLE).view(np.float32).reshape(info.shape).copy()
    ids = torch.tensor([[5, 0, 415], [7, 7, 1]])
    assert np.array_equal(table.take(ids).numpy(), whole[ids.numpy()])
    with path.open("r+b") as short:
        short.truncate(info.offset + 9)
    if mapped:
        with pytest.raises(ModelFileError, match="cut short"):
            file.files[0].check_whole()
    else:
        file.files[0].check_whole()
        assert np.array_equal(table.take(ids).numpy(), whole[ids.numpy()])
