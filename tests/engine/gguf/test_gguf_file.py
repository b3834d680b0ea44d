"""The validated view of a GGUF file: right on good files, one clear error on bad ones."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.gguf.binary import StringArray
from engine.gguf.directory import tensor_type
from engine.gguf.file import GgufFile
from tests.support.counted_calls import calls_of
from tests.support.gguf_refusal import refusal
from tests.support.gguf_writer import Tensor, write

DATA = Path(__file__).parents[2] / "data"
GOLDEN = sorted(DATA.glob("*.gguf"))
U64_MAX = 2**64 - 1


# good files


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_files_agree_with_gguf_py(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with GgufFile.open(path) as file:
        assert file.parts == (path,)
        assert file.n_bytes == path.stat().st_size
        assert path.stem.startswith(f"{file.architecture}-")
        keys = {name for name in reader.fields if not name.startswith("GGUF.")}
        assert keys == set(file.metadata)
        for name in keys:
            found = file.metadata[name]
            plain = found.tolist() if isinstance(found, np.ndarray) else found
            assert plain == reader.fields[name].contents(), name
        assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert info.type == tensor_type(tensor.tensor_type)
            assert info.n_elements == tensor.n_elements
            assert (info.offset, info.n_bytes) == (tensor.data_offset, tensor.n_bytes)
            expected = tensor.data.reshape(-1).view(np.uint8)
            np.testing.assert_array_equal(file.raw(tensor.name), expected)


def test_every_scalar_and_array_type_comes_back(tmp_path: Path) -> None:
    scalars = {
        "uint8": 200,
        "int8": -100,
        "uint16": 60_000,
        "int16": -30_000,
        "uint32": 4_000_000_000,
        "int32": -2_000_000_000,
        "uint64": U64_MAX,
        "int64": -(2**62),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
    }
    metadata = {name: np.dtype(name).type(number) for name, number in scalars.items()}
    arrays = {f"{name}s": np.full(3, number, name) for name, number in scalars.items()}
    path = write(tmp_path / "types.gguf", {**metadata, **arrays, "empty": []})
    with GgufFile.open(path) as file:
        for name, number in scalars.items():
            assert file.metadata[name] == number
            assert type(file.metadata[name]) is type(number)
            found = file.metadata[f"{name}s"]
            assert found.dtype == np.dtype(name)
            np.testing.assert_array_equal(found, arrays[f"{name}s"])
        assert file.metadata["empty"] == []


def test_version_2_and_other_alignments(tmp_path: Path) -> None:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = [Tensor.of("a", weights), Tensor.of("b", weights + 1)]
    for alignment in (1, 8, 256):
        path = write(
            tmp_path / f"{alignment}.gguf",
            {"general.alignment": alignment},
            tensors,
            version=2,
            alignment=alignment,
        )
        with GgufFile.open(path) as file:
            assert file.version == 2
            assert file.raw("b").tobytes() == (weights + 1).tobytes()


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", [(b"k\xff", "v"), ("tokens", [b"ok", b"\xc3\x28"])])
    with GgufFile.open(path) as file:
        assert file.str_("k\N{REPLACEMENT CHARACTER}") == "v"
        assert file.strs("tokens") == ["ok", "\N{REPLACEMENT CHARACTER}("]


def test_absent_architecture_is_empty(tmp_path: Path) -> None:
    with GgufFile.open(write(tmp_path / "x.gguf")) as file:
        assert file.architecture == ""
        assert file.tensors == {}


def test_a_large_vocabulary_takes_few_calls_a_token(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(250_000)]
    path = write(tmp_path / "x.gguf", {"tokenizer.ggml.tokens": tokens})
    with GgufFile.open(path) as file:
        assert file.strs("tokenizer.ggml.tokens") == tokens
    assert calls_of(lambda: GgufFile.open(path).close()) < 5 * len(tokens)


def test_identity_changes_with_the_header(tmp_path: Path) -> None:
    identities = []
    for i, name in enumerate(["one", "two"]):
        with GgufFile.open(write(tmp_path / f"{i}.gguf", {"general.name": name})) as file:
            identities.append(file.identity())
    assert identities[0]["name"] == "0.gguf"
    assert identities[0]["size"] == (tmp_path / "0.gguf").stat().st_size
    assert identities[0]["sha256"] != identities[1]["sha256"]


def test_opening_does_not_import_torch() -> None:
    code = "import sys, engine.gguf.file; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# typed access


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[GgufFile]:
    metadata = {
        "int": np.uint16(3),
        "float": 0.5,
        "nan": float("nan"),
        "str": "text",
        "bool": np.bool_(True),
        "ints": np.array([1, 2], np.int32),
        "flags": np.array([True, False]),
        "floats": np.array([0.5, 1.5], np.float32),
        "strs": ["a", "b"],
    }
    with GgufFile.open(write(tmp_path / "typed.gguf", metadata)) as file:
        yield file


def test_typed_access(typed: GgufFile) -> None:
    assert typed.int_("int") == 3
    assert typed.float_("float") == 0.5
    assert typed.float_("int") == 3.0
    assert typed.str_("str") == "text"
    assert typed.bool_("bool") is True
    assert typed.ints("ints") == [1, 2]
    assert typed.ints("flags") == [1, 0]
    assert typed.ints("int") == [3]
    assert typed.floats("floats") == [0.5, 1.5]
    assert typed.strs("strs") == ["a", "b"]


def test_defaults_stand_for_absent_keys_only(typed: GgufFile) -> None:
    assert typed.int_("absent", 9) == 9
    assert typed.str_("absent", None) is None
    assert typed.strs("absent", []) == []
    with pytest.raises(ModelFileError, match="key str: must be an integer, but is str 'text'"):
        typed.int_("str", 9)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("int_", "bool"),
        ("int_", "float"),
        ("int_", "ints"),
        ("float_", "nan"),
        ("float_", "bool"),
        ("str_", "strs"),
        ("bool_", "int"),
        ("ints", "floats"),
        ("ints", "strs"),
        ("floats", "float"),
        ("strs", "str"),
        ("strs", "ints"),
    ],
)
def test_wrong_types_name_the_key(typed: GgufFile, method: str, key: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        getattr(typed, method)(key)
    assert caught.value.place == f"key {key}"
    assert caught.value.message.startswith("typed.gguf: ")


def test_a_missing_required_key_is_named(typed: GgufFile) -> None:
    with pytest.raises(ModelFileError, match=r"typed.gguf: key absent: missing from the metadata"):
        typed.int_("absent")


# several parts


def write_parts(folder: Path, count: int = 3) -> list[Path]:
    """A model of `count` parts with two tensors in each."""
    paths = []
    for no in range(count):
        metadata = {"split.no": np.uint16(no), "split.count": np.uint16(count)}
        metadata["split.tensors.count"] = np.int32(2 * count)
        if no == 0:
            metadata["general.architecture"] = "qwen3"
        tensors = [Tensor.of(f"t{2 * no + i}", np.full(8, 2 * no + i)) for i in range(2)]
        path = folder / f"model-Q8-{no + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(path, metadata, tensors))
    return paths


def test_parts_are_opened_from_the_first(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    with GgufFile.open(paths[0]) as file:
        assert file.parts == tuple(paths)
        assert file.n_bytes == sum(path.stat().st_size for path in paths)
        assert file.architecture == "qwen3"
        assert list(file.tensors) == [f"t{i}" for i in range(6)]
        for i in range(6):
            assert file.tensors[f"t{i}"].part == i // 2
            assert file.raw(f"t{i}").view(np.float32).tolist() == [i] * 8


def test_another_part_points_to_the_first(tmp_path: Path) -> None:
    error = refusal(write_parts(tmp_path)[1])
    assert "this is part 2 of 3" in error.message
    assert error.remedy == "Open model-Q8-00001-of-00003.gguf instead."


def test_parts_with_each_others_names(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path, 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    error = refusal(first)
    assert "this is part 2 of 2" in error.message and "original names" in error.remedy


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[2].unlink()
    error = refusal(paths[0])
    assert "part 3 of 3: model-Q8-00003-of-00003.gguf is missing" in error.message
    assert paths[2].name in error.remedy


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-32])
    assert refusal(paths[0]).path == paths[1]


def test_renamed_and_mixed_parts(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    other = paths[0].rename(tmp_path / "renamed.gguf")
    assert "-00001-of-00003.gguf" in refusal(other).remedy
    other.rename(paths[0])
    paths[2].write_bytes(paths[1].read_bytes())
    assert "part 3 of 3 is expected, but this is part 2 of 3" in refusal(paths[0]).message


def test_tensors_of_all_parts_are_counted_and_unique(tmp_path: Path) -> None:
    one = {"split.no": 0, "split.count": 2, "split.tensors.count": 3}
    first = write(tmp_path / "m-00001-of-00002.gguf", one, [Tensor.of("a", np.ones(8))])
    two = {"split.no": 1, "split.count": 2}
    second = write(tmp_path / "m-00002-of-00002.gguf", two, [Tensor.of("b", np.ones(8))])
    assert "3 tensors are expected, but the parts have 2" in refusal(first).message
    write(second, two, [Tensor.of("a", np.ones(8))])
    assert "tensor a: already in m-00001-of-00002.gguf" in refusal(first).message


def test_an_absurd_part_count(tmp_path: Path) -> None:
    metadata = {"split.no": 0, "split.count": np.uint16(65535)}
    error = refusal(write(tmp_path / "m-00001-of-65535.gguf", metadata))
    assert "m-00002-of-65535.gguf is missing" in error.message


# closing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.gguf", {"count": 7}, [Tensor.of("t", np.arange(16))])


def test_views_outlive_the_file(path: Path) -> None:
    with GgufFile.open(path) as file:
        view = file.raw("t").view(np.float32)
    assert view.tolist() == list(range(16))
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.raw("t")
    assert file.int_("count") == 7


def test_a_file_cut_short_after_opening_is_an_error(path: Path) -> None:
    file = GgufFile.open(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelFileError, match="has changed while it was being read"):
        file.raw("t")
    file.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's list of open files")
def test_a_refused_file_is_not_kept_open(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        refusal(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_strings_are_a_sequence_that_is_decoded_when_asked_for():
    written = ["", "ä" * 3, "no text \ufffd", "x"]
    stored = [text.encode().replace("\ufffd".encode(), b"\xff") for text in written]
    data, ends = b"", []
    for one in stored:
        data += struct.pack("<Q", len(one)) + one
        ends.append(len(data))
    texts = StringArray(data, ends)
    assert list(texts) == written == texts and len(texts) == 4
    assert (texts[0], texts[-1], texts[1:3], texts[::-2]) == ("", "x", written[1:3], written[::-2])
    assert "x" in texts and texts != written[:3] and StringArray(b"", []) == []
    with pytest.raises(IndexError):
        texts[4]


@pytest.mark.parametrize("at", [0, 9_000])
def test_strings_of_any_length_are_read_in_any_order(tmp_path, at):
    lengths = [0, 1, 255, 256, 70_000]
    texts = [*["ab" * (n % 9) for n in range(at)], *["x" * n for n in lengths], "last"]
    written = write(tmp_path / "x.gguf", {"general.tags": texts, "general.name": "y" * 300})
    with GgufFile.open(written) as file:
        assert file.strs("general.tags") == texts
        assert file.str_("general.name") == "y" * 300
