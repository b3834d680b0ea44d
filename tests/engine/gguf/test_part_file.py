"""Files of a model: tensors copied or used where they are mapped, and what becomes of the files."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import Cancelled, ModelFileError
from engine.gguf import part_file
from engine.gguf.file import GgufFile
from engine.gguf.part_file import REPLACED, WRITTEN, PartFile, check_mapped
from engine.gguf.reader import TensorReader
from tests.support.gguf_writer import Tensor, write

NUMBERS = np.arange(3 * 8192, dtype=np.float32).reshape(3, 8192)
BYTES = torch.from_numpy(NUMBERS.copy()).view(torch.uint8)
both = pytest.mark.parametrize("mapped", [False, True], ids=["copied", "mapped"])
caught = pytest.mark.skipif(sys.platform != "linux", reason="bus errors are caught on Linux")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.gguf", (), [Tensor.of("a", NUMBERS), Tensor.of("b", NUMBERS)])


@both
def test_neighbours_lie_in_one_piece_and_outlive_the_closed_file(path: Path, mapped: bool) -> None:
    with GgufFile.open(path) as file:
        reader = TensorReader(file, mapped=mapped)
        a, b = (reader.take_blocks(name, NUMBERS.shape) for name in "ab")
        del reader
    assert b.data_ptr() == a.data_ptr() + a.nbytes
    assert b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    assert torch.equal(a, BYTES) and torch.equal(b, BYTES)
    assert file.files[0].is_mapped == mapped


def test_tensors_that_go_elsewhere_have_memory_of_their_own(path: Path) -> None:
    with GgufFile.open(path) as file:
        reader = TensorReader(file, in_place=False)
        a, b = (reader.take_blocks(name, NUMBERS.shape) for name in "ab")
    assert torch.equal(a, BYTES) and torch.equal(b, BYTES)
    assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() == NUMBERS.nbytes


@both
def test_a_tensor_of_three_dimensions_keeps_them(path: Path, mapped: bool) -> None:
    experts = write(path.with_name("e.gguf"), (), [Tensor.of("e", NUMBERS.reshape(3, 64, 128))])
    with GgufFile.open(experts) as file:
        found = TensorReader(file, mapped=mapped).take_blocks("e", (3, 64, 128))
    assert found.shape == (3, 64, 4 * 128)
    assert torch.equal(found.flatten(1), BYTES)


@both
def test_an_unaligned_tensor_is_moved(tmp_path: Path, mapped: bool) -> None:
    tensors = [Tensor("odd", [3], bytes(3), type_id=24), Tensor.of("a", NUMBERS)]
    path = write(tmp_path / "x.gguf", {"general.alignment": 1}, tensors, alignment=1)
    with GgufFile.open(path) as file:
        found = TensorReader(file, mapped=mapped).take_blocks("a", NUMBERS.shape)
    assert found.data_ptr() % 32 == 0
    assert torch.equal(found, BYTES)


def test_copying_is_cancelled_within_a_tensor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.gguf.reader._STEP", 4096)
    answers = iter([False, False, True])
    with GgufFile.open(path) as file, pytest.raises(Cancelled):
        TensorReader(file, cancelled=lambda: next(answers)).take_blocks("a", NUMBERS.shape)
    assert not list(answers)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc/self/smaps")
@both
def test_released_memory_is_given_back(path: Path, mapped: bool) -> None:
    def resident(address: int) -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            start, _, stop = line.split()[0].partition("-")
            if stop and int(start, 16) <= address < int(stop, 16):
                return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
        raise AssertionError("nothing is there")

    tensors = [Tensor.of(name, NUMBERS) for name in "abc"]
    with GgufFile.open(write(path.with_name("y.gguf"), (), tensors)) as file:
        reader = TensorReader(file, mapped=mapped)
        a, _, c = (reader.take_blocks(name, NUMBERS.shape) for name in "abc")
        before = resident(a.data_ptr())
        assert before >= 2 * NUMBERS.nbytes >> 10
        joined = torch.cat([c, a])
        assert reader.settle(["c", "a"], joined) is joined  # what is between them is in use
        reader.release(["c", "a"])
        assert resident(a.data_ptr()) <= before - 2 * (NUMBERS.nbytes - 2 * mmap.PAGESIZE >> 10)
        if mapped:  # the file's pages come back
            assert torch.equal(a, BYTES)


def test_neighbours_that_were_joined_lie_where_they_were_read(path: Path) -> None:
    with GgufFile.open(path) as file:
        reader = TensorReader(file)
        a, b = (reader.take_blocks(name, NUMBERS.shape) for name in "ab")
        joined = torch.cat([b[1:], a, b[:1]])
        settled = reader.settle(["a", "b"], joined)
        reader.release(["a", "b"])
        again = reader.take_blocks("a", NUMBERS.shape)
    assert settled.data_ptr() == a.data_ptr() and torch.equal(settled, joined)
    assert torch.equal(again, BYTES)


# what is read ahead


@pytest.fixture
def stored(path: Path) -> Path:
    tensors = [Tensor.of("a", NUMBERS, "Q8_0"), Tensor.of("c", NUMBERS)]
    return write(path, (), [*tensors, Tensor.of("b", -NUMBERS, "Q8_0")])


def test_what_is_stored_in_blocks_is_read_once_ahead_of_its_use(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gguf.part_file._AT_ONCE", 1000)
    read: list[str] = []
    really = GgufFile.read
    with GgufFile.open(stored) as file:
        wanted = [torch.from_numpy(file.raw(name)) for name in "acb"]
        file.read_ahead()
        file.read_ahead()
        monkeypatch.setattr(
            GgufFile,
            "read",
            lambda self, name, *rest: read.append(name) or really(self, name, *rest),
        )
        first, second = TensorReader(file), TensorReader(file)
        for reader in first, second:
            for name, one in zip("acb", wanted, strict=True):
                assert torch.equal(reader.take_blocks(name, NUMBERS.shape).flatten(), one)
    assert read == ["c", "a", "c", "b"]  # the second reader has memory of its own


@pytest.mark.parametrize("size", [0.0, 0.6])
def test_a_file_cut_short_while_it_is_read_ahead_is_refused(stored: Path, size: float) -> None:
    file = GgufFile.open(stored)
    os.truncate(stored, int(size * stored.stat().st_size))
    file.read_ahead()
    with pytest.raises(ModelFileError, match="has changed while it was being read"):
        TensorReader(file).take_blocks("b", NUMBERS.shape)
    file.close()


def test_waiting_for_what_is_read_ahead_is_cancelled(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def late(file: int, into: list[memoryview], offset: int) -> int:
        goes_on.wait()
        return 0

    monkeypatch.setattr("os.preadv", late)
    monkeypatch.setattr("engine.gguf.reader._LOOK_S", 0.0)
    answers = iter([False, False, True])
    with GgufFile.open(stored) as file:
        file.read_ahead()
        with pytest.raises(Cancelled):
            TensorReader(file, cancelled=lambda: next(answers)).take_blocks("b", NUMBERS.shape)
        goes_on.set()
    assert not list(answers)


# what becomes of the file


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def write_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"xxxx")


def write_over_and_set_the_time_back(path: Path) -> None:
    status = path.stat()
    write_over(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_over(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    shutil.copyfile(other, path)


def turn_the_clock_back(path: Path) -> None:
    write_over(path)
    os.utime(path, ns=(0, 1))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


def unlink_and_write(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[::-1])


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def move_and_write(path: Path) -> None:
    move(path)
    write_over(path.with_name("moved"))


def link(path: Path) -> None:
    path.with_name("linked").hardlink_to(path)


CHANGES: dict[Callable[[Path], object], str] = {
    lambda path: os.truncate(path, 0): WRITTEN,
    lambda path: os.truncate(path, path.stat().st_size // 2): WRITTEN,
    append: WRITTEN,
    write_over: WRITTEN,
    write_over_and_set_the_time_back: WRITTEN,
    turn_the_clock_back: WRITTEN,
    copy_over: WRITTEN,
    replace: REPLACED,
    unlink_and_write: REPLACED,
    Path.unlink: "",
    move: "",
    link: "",
    lambda path: path.chmod(0o600): "",
}
changes = pytest.mark.parametrize(
    ("change", "expected"),
    CHANGES.items(),
    ids=[getattr(one, "__name__", "").strip("<>") or str(i) for i, one in enumerate(CHANGES)],
)


@both
@changes
def test_what_becomes_of_a_file_that_was_loaded(
    path: Path, mapped: bool, change: Callable[[Path], object], expected: str
) -> None:
    path.chmod(0o644)
    with GgufFile.open(path) as file:
        held = TensorReader(file, mapped=mapped).take_blocks("a", NUMBERS.shape)
    (part,) = file.files
    assert part.change() == ""
    part.check()
    change(path)
    # a number that is free on the disk may be that of the new file
    assert part.change() == expected or (not mapped and expected == REPLACED and part.change())
    if mapped and expected == WRITTEN:
        with pytest.raises(ModelFileError, match=r"x\.gguf: file: has changed since it was opene"):
            part.check()
    else:
        part.check()
        assert torch.equal(held, BYTES)
    write_back = path.with_name("other")
    write_back.write_bytes(b"another")
    write_back.replace(path)  # what was written over stays written over
    assert part.change() == (WRITTEN if expected == WRITTEN else REPLACED) or not mapped


@changes
def test_what_becomes_of_a_file_while_it_is_loaded(
    path: Path, change: Callable[[Path], object], expected: str
) -> None:
    def load() -> None:
        with GgufFile.open(path) as file:
            change(path)
            for _ in range(2):
                TensorReader(file).take("b", NUMBERS.shape)

    if expected == WRITTEN:
        with pytest.raises(ModelFileError, match="has changed while it was being read") as caught:
            load()
        assert caught.value.remedy == "Open it again when it is complete."
    else:
        load()


def test_a_moved_file_is_written_to_under_its_new_name(path: Path) -> None:
    with GgufFile.open(path) as file:
        mapped = TensorReader(file, mapped=True).take_blocks("a", NUMBERS.shape)
    with GgufFile.open(path) as copy:
        copied = TensorReader(copy).take_blocks("a", NUMBERS.shape)
    move_and_write(path)
    assert file.files[0].change() == WRITTEN
    assert copy.files[0].change() == ""
    assert torch.equal(copied, BYTES) and mapped.shape == copied.shape


def test_an_error_in_a_file_that_is_being_written_names_the_cause(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, whole = PartFile.read, path.read_bytes()

    def late(part: PartFile, offset: int, into: memoryview) -> None:
        path.write_bytes(b"GGUF" + whole[4:40])  # the copy that goes on has come that far
        read(part, offset, into[: min(len(into), 40)])

    monkeypatch.setattr(PartFile, "read", late)
    with pytest.raises(ModelFileError, match="has changed while it was being read"):
        GgufFile.open(path)


def test_a_head_is_read_in_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i:>200}" for i in range(500)]
    path = write(path, {"names": names, "numbers": np.arange(2000)}, [Tensor.of("a", NUMBERS)])
    with GgufFile.open(path) as at_once:
        pass
    monkeypatch.setattr("engine.gguf.binary._FIRST_READ", 7)
    with GgufFile.open(path) as file:
        assert file.metadata["names"] == names
        assert file.metadata["numbers"].tolist() == list(range(2000))
    assert file.tensors == at_once.tensors
    assert file.identity() == at_once.identity()


# bus errors


@caught
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_lies_beyond_the_end_of_a_mapped_file_is_noticed(path: Path, share: float) -> None:
    with GgufFile.open(path) as file:
        held = TensorReader(file, mapped=True).take_blocks("b", NUMBERS.shape)
    check_mapped()
    os.truncate(path, int(share * path.stat().st_size))
    held.sum()  # torch's own threads
    with pytest.raises(ModelFileError, match=r"x\.gguf: file: was cut short") as caught:
        check_mapped()
    assert "--mmap" in caught.value.remedy
    check_mapped()  # others go on
    with pytest.raises(ModelFileError, match="has changed since it was opened"):
        file.files[0].check()
    assert not held.view(torch.uint8)[-1, -4096:].any()


@caught
def test_a_mapping_is_forgotten_with_its_last_view(path: Path) -> None:
    gc.collect()
    n_before = len(part_file._guarded)
    for _ in range(100):  # more than there is room for
        with GgufFile.open(path) as file:
            held = TensorReader(file, mapped=True).take_blocks("a", NUMBERS.shape)
        assert torch.equal(held, BYTES)
        del held, file
    assert len(part_file._guarded) == n_before


def test_a_file_of_which_nothing_is_in_use_is_closed(path: Path) -> None:
    with GgufFile.open(path) as file:
        TensorReader(file, mapped=True).take("a", NUMBERS.shape)
    assert not file.files[0].is_mapped
    with GgufFile.open(path) as file:
        held = TensorReader(file).take_blocks("a", NUMBERS.shape)
    assert not file.files[0].is_mapped and file.files[0]._file.closed
    assert torch.equal(held, BYTES)


def test_a_file_as_a_whole_has_no_place(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"^x\.gguf: no such file in {tmp_path}\. Check"):
        PartFile(tmp_path / "x.gguf")
    with pytest.raises(ModelFileError, match=f"^{tmp_path.name}: this is a folder\\."):
        PartFile(tmp_path)
