"""Files whose tensors are used where they are mapped: written to, replaced, and let go of."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from tests.support.gguf_writer import Tensor, write

NUMBERS = np.arange(3 * 8192, dtype=np.float32).reshape(3, 8192)
BYTES = torch.from_numpy(NUMBERS.copy()).view(torch.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.gguf", (), [Tensor.of("a", NUMBERS), Tensor.of("b", NUMBERS)])


def test_a_tensor_is_read_in_place_and_outlives_the_closed_file(path):
    with GgufFile.open(path) as file:
        reader = TensorReader(file)
        a, b = (reader.take_blocks(name, NUMBERS.shape) for name in "ab")
        mapped = np.frombuffer(file.raw("a"), np.uint8).ctypes.data
    assert a.data_ptr() == mapped
    assert b.data_ptr() == a.data_ptr() + a.nbytes
    assert torch.equal(a, BYTES) and torch.equal(b, BYTES)


def test_a_tensor_of_three_dimensions_keeps_them(path):
    with GgufFile.open(path) as file:
        whole = TensorReader(file).take_blocks("a", (3, 8192)).clone()
    experts = write(path.with_name("e.gguf"), (), [Tensor.of("e", NUMBERS.reshape(3, 64, 128))])
    with GgufFile.open(experts) as file:
        found = TensorReader(file).take_blocks("e", (3, 64, 128))
    assert found.shape == (3, 64, 4 * 128)
    assert torch.equal(found.flatten(1), whole)


def test_an_unaligned_tensor_is_copied(tmp_path):
    tensors = [Tensor("odd", [3], bytes(3), type_id=24), Tensor.of("a", NUMBERS)]
    path = write(tmp_path / "x.gguf", {"general.alignment": 1}, tensors, alignment=1)
    with GgufFile.open(path) as file:
        found = TensorReader(file).take_blocks("a", NUMBERS.shape)
    assert found.data_ptr() % 32 == 0
    assert torch.equal(found, BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_released_pages_leave_memory_and_come_back(path):
    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            if line.endswith(str(path)):
                return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
        raise AssertionError("the file is not mapped")

    with GgufFile.open(path) as file:
        reader = TensorReader(file)
        a = reader.take_blocks("a", NUMBERS.shape)
        before = resident()
        assert before >= NUMBERS.nbytes >> 10
        reader.release("a")
        assert resident() <= before - (NUMBERS.nbytes - 2 * mmap.PAGESIZE >> 10)
        assert torch.equal(a, BYTES)


@pytest.mark.parametrize("change", ["cut", "grown", "written"])
def test_a_file_that_is_written_to_while_in_use_is_an_error(path, change):
    with GgufFile.open(path) as file:
        held = TensorReader(file).take_blocks("a", NUMBERS.shape)
    file.lent.check()
    with path.open("r+b") as opened:
        if change == "cut":
            opened.truncate(100)
        else:
            opened.seek(-1 if change == "written" else 0, os.SEEK_END)
            opened.write(b"x")
    os.utime(path, ns=(0, 1))
    with pytest.raises(ModelFileError, match=r"x\.gguf: file: has changed since it was opened"):
        file.lent.check()
    del held


def test_a_file_that_is_replaced_removed_or_no_longer_in_use_is_none(path):
    with GgufFile.open(path) as file:
        held = TensorReader(file).take_blocks("a", NUMBERS.shape)
    with GgufFile.open(path) as copied:
        TensorReader(copied).take("a", NUMBERS.shape)
    other = path.with_name("other")
    other.write_bytes(b"other")
    other.replace(path)
    file.lent.check()
    path.unlink()
    file.lent.check()
    copied.lent.check()
    assert torch.equal(held, BYTES)
