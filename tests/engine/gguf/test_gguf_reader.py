"""Reading tensors: right numbers, progress by bytes, cancelling, errors that name the tensor."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import Cancelled, ModelFileError, OutOfMemoryError, UnsupportedModelError
from engine.gguf import reader as reader_module
from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from tests.support.gguf_writer import Tensor, build, write

DATA = Path(__file__).parents[2] / "data"
GOLDEN = sorted(DATA.glob("*.gguf"))
NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_files_agree_with_gguf_py(path: Path) -> None:
    with GgufFile.open(path) as file:
        reader = TensorReader(file)
        for tensor in gguf.GGUFReader(path).tensors:
            if tensor.tensor_type is gguf.GGMLQuantizationType.I32:
                continue  # ids of experts
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            found = reader.take(tensor.name, expected.shape)
            assert found.dtype == torch.float32
            np.testing.assert_array_equal(found.numpy(), expected)


def test_the_result_may_be_written_and_outlives_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", (), [Tensor.of("t", NUMBERS)])
    before = path.read_bytes()
    with GgufFile.open(path) as file:
        tensor = TensorReader(file).take("t", (3, 4))
    tensor += 1
    assert tensor.tolist() == (NUMBERS + 1).tolist()
    assert path.read_bytes() == before


def test_an_unaligned_tensor(tmp_path: Path) -> None:
    tensors = [Tensor("a", [3], bytes(3), type_id=24), Tensor.of("b", NUMBERS)]
    metadata = {"general.alignment": 1}
    path = write(tmp_path / "x.gguf", metadata, tensors, alignment=1)
    with GgufFile.open(path) as file:
        assert TensorReader(file).take("b", (3, 4)).tolist() == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ((12,), (1, 12)),
        ((12,), (12, 1)),
        ((1, 12), (12,)),
        ((12, 1), (12,)),
        ((1, 3, 4), (3, 4, 1)),
        ((3, 1, 4), (1, 3, 1, 4)),
        ((1,), ()),
        ((), (1, 1)),
    ],
)
def test_ones_at_the_ends_do_not_matter(
    tmp_path: Path, found: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    array = np.resize(np.arange(12, dtype=np.float32), found)
    path = write(tmp_path / "x.gguf", (), [Tensor.of("t", array)])
    with GgufFile.open(path) as file:
        tensor = TensorReader(file).take("t", wanted)
        assert tensor.shape == wanted
        assert tensor.flatten().tolist() == array.flatten().tolist()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_slices_are_those_of_the_whole(path: Path) -> None:
    """Of a tensor of each type and number of dimensions."""
    with GgufFile.open(path) as file:
        reader = TensorReader(file)
        kinds = {(info.type.name, len(info.shape)): name for name, info in file.tensors.items()}
        for name in kinds.values():
            info = file.tensors[name]
            if info.type.name == "I32":
                continue
            whole = reader.take(name, info.shape)
            slices = list(reader.take_each(name, info.shape))
            assert len(slices) == info.shape[0]
            assert all(torch.equal(a, b) for a, b in zip(slices, whole, strict=True))


def test_slices_count_as_progress_once_and_can_be_cancelled(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", (), [Tensor.of("t", NUMBERS)])
    seen: list[int] = []
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 5

    with GgufFile.open(path) as file:
        reader = TensorReader(file, lambda done, total, phase: seen.append(done), cancelled)
        slices = reader.take_each("t", (3, 4))
        assert next(slices).tolist() == NUMBERS[0].tolist()
        assert seen == [0, 16]  # the others are not read yet
        list(slices)
        assert seen == [0, 16, 16, 32, 32, 48]
        again = reader.take_each("t", (3, 4))
        assert [next(again).tolist(), next(again).tolist()] == NUMBERS[:2].tolist()
        assert seen[6:] == [48] * 4
        with pytest.raises(Cancelled):
            next(again)


@pytest.mark.parametrize("wanted", [(4, 3), (12,), (3, 4, 2), (3, 1, 4), (3,), ()])
def test_another_shape_is_an_error(tmp_path: Path, wanted: tuple[int, ...]) -> None:
    path = write(tmp_path / "x.gguf", (), [Tensor.of("t", NUMBERS)])
    with GgufFile.open(path) as file, pytest.raises(ModelFileError) as caught:
        TensorReader(file).take("t", wanted)
    assert caught.value.place == "tensor t"
    assert (
        f"has shape [3, 4], but by the metadata it must be {list(wanted)}" in caught.value.message
    )


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", (), [Tensor.of("t", NUMBERS)])
    with GgufFile.open(path) as file:
        reader = TensorReader(file)
        with pytest.raises(ModelFileError) as caught:
            reader.take("u", (3, 4))
    assert caught.value.place == "tensor u"
    assert "[3, 4]" in caught.value.message


def test_a_type_without_a_decoder_is_an_error(tmp_path: Path) -> None:
    q8_1 = gguf.GGMLQuantizationType.Q8_1
    path = write(tmp_path / "x.gguf", (), [Tensor("t", [32], bytes(40), int(q8_1))])
    with GgufFile.open(path) as file, pytest.raises(UnsupportedModelError) as caught:
        TensorReader(file).take("t", (32,))
    assert "x.gguf: tensor t has type Q8_1" in caught.value.message


def test_no_memory_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(reader_module, "dequantise", fail)
    path = write(tmp_path / "x.gguf", (), [Tensor.of("t", NUMBERS)])
    with GgufFile.open(path) as file, pytest.raises(OutOfMemoryError, match="tensor t"):
        TensorReader(file).take("t", (3, 4))


def three_tensors(folder: Path) -> Path:
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.11.attn_q.weight"]
    tensors = [Tensor.of(name, NUMBERS) for name in names]
    return write(folder / "x.gguf", (), tensors)


def test_progress_counts_bytes_and_names_the_block(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    with GgufFile.open(three_tensors(tmp_path)) as file:
        reader = TensorReader(file, lambda *call: calls.append(call))
        for name in [*file.tensors, "token_embd.weight"]:  # a tied head is read twice
            reader.take(name, (3, 4))
    assert [(done, total) for done, total, _ in calls] == [
        (0, 144),
        (48, 144),
        (48, 144),
        (96, 144),
        (96, 144),
        (144, 144),
        (144, 144),
        (144, 144),
    ]
    phases = ["token_embd", "blk.0", "blk.11", "token_embd"]
    assert [phase for _, _, phase in calls[::2]] == [f"dequantising {name}" for name in phases]


def test_cancelling_between_tensors(tmp_path: Path) -> None:
    done: list[int] = []
    with GgufFile.open(three_tensors(tmp_path)) as file:
        reader = TensorReader(file, lambda *call: done.append(call[0]), lambda: max(done) >= 96)
        done.append(0)
        first, second, third = file.tensors
        reader.take(first, (3, 4))
        reader.take(second, (3, 4))
        with pytest.raises(Cancelled):
            reader.take(third, (3, 4))
    assert max(done) == 96


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "x.gguf"


def valid() -> bytes:
    rng = np.random.default_rng(11)
    types = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"]
    arrays = {name: rng.standard_normal((2, 64)) for name in types}
    return build((), [Tensor.of(name, array, name) for name, array in arrays.items()])


@given(st.lists(st.tuples(st.integers(0, 449), st.integers(0, 255)), max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_reads_or_is_refused(scratch: Path, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(valid())
    for position, byte in flips:
        damaged[position] = byte
    scratch.write_bytes(damaged)
    try:
        with GgufFile.open(scratch) as file:
            reader = TensorReader(file)
            for name, info in file.tensors.items():
                assert reader.take(name, info.shape).numel() == info.n_elements
    except (ModelFileError, UnsupportedModelError):
        assert flips
