"""Damaged, absurd and hostile files: one clear error each, at once and without memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from tests.support.gguf_refusal import flat, refusal, refusal_of
from tests.support.gguf_writer import ARRAY, STRING, Tensor, Typed, build, string, value, write

U64_MAX = 2**64 - 1
SMALL_PADDING = 64 - 2 * 18  # after the last tensor of `small`: two Q4_0 blocks
Q4_K = 12


def small() -> bytes:
    """A valid file with every kind of metadata value and several tensor types."""
    rng = np.random.default_rng(5)
    metadata = {
        "general.architecture": "qwen35",
        "tokens": ["a", "bc", "", "é"],
        "scores": np.arange(5, dtype=np.float32),
        "flags": np.array([True, False, True]),
        "count": 7,
        "eps": 1e-6,
        "tied": np.bool_(True),
    }
    tensors = [
        Tensor.of("blk.0.norm", rng.standard_normal((1, 6))),
        Tensor.of("blk.0.weight", rng.standard_normal((3, 64)), "Q8_0"),
        Tensor.of("output", rng.standard_normal((2, 32)), "Q4_0"),
    ]
    return build(metadata, tensors)


# what is not a GGUF file at all


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.gguf").message
    assert "no such file" in refusal(str(tmp_path / "none.gguf")).message
    assert "folder" in refusal(tmp_path).message
    with pytest.raises(ModelFileError, match="cannot be opened"):
        GgufFile.open(tmp_path / "a\0b")
    assert "cannot be opened" in refusal(tmp_path / ("a" * 300)).message
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe").message


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.gguf")

    def deny(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    assert "no permission" in refusal(path).message


@pytest.mark.parametrize(
    ("data", "place", "what"),
    [
        (b"", "byte 0", "the file is empty"),
        (b"G", "byte 0", "not a GGUF file"),
        (b"Hello, I am a text file.\n", "byte 0", "not a GGUF file but a text, it begins with 'He"),
        (b"<!DOCTYPE html><title>404</title>", "byte 0", "but an HTML page. Save or download"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "byte 0",
            "Fetch the file: `git lfs pull`",
        ),
        (b"Entry not found", "byte 0", "an error message of a server"),
        (bytes(64), "byte 0", "but zeros. The download is incomplete"),
        (b"\x1f\x8b\x08\0" + bytes(20), "byte 0", "Unpack it first"),
        (b'\x40\0\0\0\0\0\0\0{"a":{}}', "byte 0", "but safetensors"),
        (b"PK\3\4" + bytes(20), "byte 0", "not a GGUF file, it begins with 'PK"),
        (b"GGUF", "byte 4", "4 bytes are needed at byte 4, but 0 are left"),
        (b"GGUF\0\0\0\3" + bytes(40), "byte 4", "big-endian"),
        (build(version=1), "byte 4", "version 1"),
        (build(version=4), "byte 4", "version 4"),
        (build(version=0), "byte 4", "version 0"),
        (b"GGUF\3\0\0\0" + bytes(12), "byte 16", "8 bytes are needed"),
    ],
)
def test_other_formats_and_versions(tmp_path: Path, data: bytes, place: str, what: str) -> None:
    error = refusal_of(tmp_path, data)
    assert error.place == place
    assert what in str(error)


# counts, lengths and types that do not fit


def array_of(item_type: int, count: int, payload: bytes = b"") -> Typed:
    return Typed(ARRAY, item_type.to_bytes(4, "little") + count.to_bytes(8, "little") + payload)


@pytest.mark.parametrize("count", [2**60, U64_MAX, 10_000])
@pytest.mark.parametrize(("name", "what"), [("n_keys", "metadata keys"), ("n_tensors", "tensors")])
def test_absurd_counts(tmp_path: Path, name: str, count: int, what: str) -> None:
    error = refusal_of(tmp_path, build({"key": "value"}, **{name: count}))
    assert error.place == "header"
    assert f"it has {count} {what}, but" in error.message


@pytest.mark.parametrize(
    ("item", "what"),
    [
        (Typed(STRING, (2**60).to_bytes(8, "little")), "bytes are needed"),
        (Typed(STRING, U64_MAX.to_bytes(8, "little")), "bytes are needed"),
        (array_of(STRING, 2**60), "it has 1152921504606846976 strings"),
        (array_of(STRING, 2, string("a") + (2**40).to_bytes(8, "little")), "bytes are needed"),
        (array_of(STRING, 2, string("a" * 40)), "8 bytes are needed"),
        (array_of(4, U64_MAX), "it has 18446744073709551615 numbers"),
        (array_of(7, 2**40), "it has 1099511627776 numbers"),
        (array_of(10, 9), "it has 9 numbers"),
        (array_of(ARRAY, 1, value(["a"]).payload), "array of arrays"),
        (array_of(13, 1), "unknown type 13 of array items"),
        (Typed(13, b""), "unknown value type 13"),
        (Typed(2**32 - 1, b""), "unknown value type 4294967295"),
        (Typed(10, b"\0\0\0"), "8 bytes are needed"),
    ],
)
def test_bad_values_name_their_key(tmp_path: Path, item: Typed, what: str) -> None:
    # the file ends right after the value
    path = tmp_path / "x.gguf"
    path.write_bytes(build({"some.key": item}, alignment=1))
    error = refusal(path)
    assert error.place == "key some.key"
    assert what in error.message


def test_a_header_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(build({"blob": Typed(STRING, (2**32).to_bytes(8, "little"))}))
    os.truncate(path, 2**33)  # sparse: takes no room on the disk
    assert "metadata exceeds 64 MiB" in refusal(path).message


def test_duplicate_keys(tmp_path: Path) -> None:
    error = refusal_of(tmp_path, build([("k", 1), ("k", 2)]))
    assert "key k: appears twice" in error.message


@pytest.mark.parametrize("alignment", [0, 3, -32, 0.5, "32"])
def test_bad_alignment(tmp_path: Path, alignment: object) -> None:
    error = refusal_of(tmp_path, build({"general.alignment": alignment}))
    assert "general.alignment: must be a power of two" in error.message


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (Tensor("t", [9], bytes(32)), "its data ends at byte"),
        (Tensor("t", [8], bytes(32), offset=32), "its data ends at byte"),
        (Tensor("t", [8], bytes(32), offset=2**63), "its data ends at byte"),
        (Tensor("t", [8], bytes(32), offset=4), "data offset 4 is not a multiple of 32"),
        (Tensor("t", [2**32, 2**32], bytes(32)), "bytes of data, but the file has only"),
        (Tensor("t", [U64_MAX] * 4, bytes(32)), "bytes of data, but the file has only"),
        (Tensor("t", [1] * 5, bytes(32)), "5 dimensions, but at most 4 are allowed"),
        (Tensor("t", [8], bytes(32), n_dims=2**32 - 1), "4294967295 dimensions"),
        (Tensor("t", [8, 0], bytes(32)), "a dimension is zero"),
        (Tensor("t", [8], bytes(32), type_id=1024), "unknown tensor type 1024"),
        (Tensor("t", [8], bytes(32), type_id=2**32 - 1), "unknown tensor type 4294967295"),
        (Tensor("t", [2**62, 2**62], bytes(32), type_id=144), "more than a file can hold"),
        (Tensor("t", [128, 2], bytes(256), type_id=Q4_K), "rows of 128 elements cannot be divided"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, tensor: Tensor, what: str) -> None:
    error = refusal_of(tmp_path, build((), [tensor]))
    assert what in error.message
    assert error.place == "tensor t"


def test_overlapping_and_repeated_tensors(tmp_path: Path) -> None:
    first, second = Tensor("a", [16], bytes(64)), Tensor("b", [16], bytes(64), offset=32)
    assert (
        "tensor b: its data overlaps that of a"
        in refusal_of(tmp_path, build((), [first, second])).message
    )
    assert "tensor a: appears twice" in refusal_of(tmp_path, build((), [first, first])).message


def test_hostile_names_stay_on_one_line(tmp_path: Path) -> None:
    error = refusal_of(tmp_path, build((), [Tensor("x\n\x1b[31m" + "y" * 500, [0], bytes(32))]))
    assert "a dimension is zero" in error.message


def test_a_tensor_without_dimensions_is_one_number(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", (), [Tensor("t", [], np.float32(2.5).tobytes())])
    with GgufFile.open(path) as file:
        assert file.tensors["t"].shape == ()
        assert file.raw("t").view(np.float32) == 2.5


# damage at random


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "x.gguf"


def survives(path: Path, data: bytes) -> bool:
    """Whether the file opens; anything but a ModelFileError, or much memory, fails the test."""
    path.write_bytes(data)
    with flat():
        try:
            with GgufFile.open(path) as file:
                for name, info in file.tensors.items():
                    assert file.raw(name).size == info.n_bytes
        except ModelFileError:
            return False
    return True


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_every_truncation_is_refused(scratch: Path, data: st.DataObject) -> None:
    whole = small()
    length = data.draw(st.integers(0, len(whole) - SMALL_PADDING - 1))
    assert not survives(scratch, whole[:length])


@given(st.lists(st.tuples(st.integers(0, len(small()) - 1), st.integers(0, 255)), min_size=1))
@settings(max_examples=80, deadline=None)
def test_flipped_bytes_never_do_harm(scratch: Path, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(small())
    for position, byte in flips:
        damaged[position] = byte
    survives(scratch, bytes(damaged))


@given(st.integers(8, 24 + 600), st.integers(0, U64_MAX))
@settings(max_examples=100, deadline=None)
def test_overwritten_lengths_never_do_harm(scratch: Path, position: int, length: int) -> None:
    damaged = bytearray(small())
    damaged[position : position + 8] = length.to_bytes(8, "little")
    survives(scratch, bytes(damaged))


def test_the_undamaged_file_survives(scratch: Path) -> None:
    assert survives(scratch, small())
