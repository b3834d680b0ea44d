"""Heads made to take long: refused at once, or read in bounded time that can be cut short."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Cancelled
from engine.gguf.binary import BLOCK
from engine.gguf.file import GgufFile
from engine.gguf.pretokenise import BYTE_CHARACTERS
from engine.gguf.tokenizer import Tokenizer
from tests.support.counted_calls import counted_calls
from tests.support.gguf_refusal import refusal
from tests.support.gguf_writer import ARRAY, STRING, Tensor, Typed, build, write

MOST_KEYS, MOST_TENSORS, MOST_STRINGS = 1 << 14, 1 << 16, 1 << 21


def announce(item_type: int, count: int) -> Typed:
    return Typed(ARRAY, struct.pack("<IQ", item_type, count))


def sparse(path: Path, metadata: Any = (), **counts: int) -> Path:
    """A file of 8 GiB that takes no room on the disk: any count would fit into it."""
    path.write_bytes(build(metadata, **counts))
    os.truncate(path, 2**33)
    return path


@pytest.mark.parametrize(
    ("metadata", "counts", "what"),
    [
        ((), {"n_keys": MOST_KEYS + 1}, "it has 16385 metadata keys, but at most 16384"),
        ((), {"n_tensors": MOST_TENSORS + 1}, "it has 65537 tensors, but at most 65536"),
        (
            {"some.key": announce(STRING, MOST_STRINGS + 1)},
            {},
            "key some.key: it has 2097153 strings, but at most 2097152 are read",
        ),
        (
            {"some.key": announce(0, 2**22 + 1)},
            {},
            "key some.key: it has 4194305 numbers, but at most 4194304 are read",
        ),
    ],
    ids=["keys", "tensors", "strings", "numbers"],
)
def test_more_than_any_model_needs_is_refused_before_it_is_read(
    tmp_path: Path, metadata: Any, counts: dict[str, int], what: str
) -> None:
    assert what in refusal(sparse(tmp_path / "x.gguf", metadata, **counts)).message


def test_many_arrays_share_what_one_may_have(tmp_path: Path) -> None:
    many = Typed(ARRAY, struct.pack("<IQ", STRING, 1 << 17) + bytes(8 << 17))
    path = tmp_path / "x.gguf"
    path.write_bytes(build([(f"key{i}", many) for i in range(17)]))  # 17 MiB of empty strings
    with pytest.raises(Exception, match="key key16: it has 131072 strings, but at most 0"):
        GgufFile.open(path)


def test_parts_share_it_too(tmp_path: Path) -> None:
    half = [("split.no", 0), ("split.count", 2), ("a", announce(STRING, 0))]
    filler = [(f"{i}", 0) for i in range(MOST_KEYS // 2)]
    for part in (0, 1):
        metadata = [("split.no", part), *half[1:], *filler]
        write(tmp_path / f"m-0000{part + 1}-of-00002.gguf", metadata)
    with pytest.raises(Exception, match="metadata keys, but at most 8189"):
        GgufFile.open(tmp_path / "m-00001-of-00002.gguf")


def test_as_many_keys_and_tensors_as_are_allowed_take_few_calls_each(tmp_path: Path) -> None:
    tensors = [Tensor(f"{i}", [1], bytes(4)) for i in range(10_000)]
    path = write(tmp_path / "x.gguf", [(f"key{i}", i) for i in range(MOST_KEYS)], tensors)
    with counted_calls() as count, GgufFile.open(path) as file:
        assert (len(file.metadata), len(file.tensors)) == (MOST_KEYS, 10_000)
    assert count.n < 60 * (MOST_KEYS + 10_000)


# cancelling


class Watch:
    """A `cancelled` that counts how often it is asked and gives up after some looks."""

    def __init__(self, looks: float = float("inf")) -> None:
        self.most, self.n = looks, 0

    def __call__(self) -> bool:
        self.n += 1
        return self.n > self.most


def vocabulary(n_tokens: int) -> dict[str, Any]:
    """Every character of the byte alphabet, pairs and triples of them, and how they merge."""

    def merges() -> Iterable[tuple[str, str]]:
        pairs = [a + b for a, b in product(BYTE_CHARACTERS, repeat=2)]
        yield from ((pair[0], pair[1]) for pair in pairs)
        yield from product(pairs, BYTE_CHARACTERS)

    chosen = list(islice(merges(), n_tokens - len(BYTE_CHARACTERS)))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*BYTE_CHARACTERS, *(a + b for a, b in chosen)],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in chosen],
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 250,000 tokens."""
    return write(tmp_path_factory.mktemp("large") / "x.gguf", vocabulary(250_000))


def test_a_large_vocabulary_looks_often_whether_it_goes_on(large: Path) -> None:
    """Once per block of its texts, when they are read, and between steps over all of them."""
    opening, using = Watch(), Watch()
    with GgufFile.open(large, opening) as file:
        tokenizer = Tokenizer.from_gguf(file, using)
    assert tokenizer.n_vocab == 250_000
    assert opening.n > 500_000 // BLOCK
    assert using.n > 3


def test_opening_and_the_tokenizer_end_when_cancelled(large: Path) -> None:
    for looks in (0, 1, 3):
        with pytest.raises(Cancelled):
            GgufFile.open(large, Watch(20 * looks))
        with GgufFile.open(large) as file, pytest.raises(Cancelled):
            Tokenizer.from_gguf(file, Watch(looks))


def test_tensors_and_parts_are_looks_too(tmp_path: Path) -> None:
    tensors = [Tensor(f"{i}", [1], bytes(4)) for i in range(50)]
    with pytest.raises(Cancelled):
        GgufFile.open(write(tmp_path / "x.gguf", (), tensors), Watch(30))
    for part in range(3):
        metadata = {"split.no": part, "split.count": 3}
        write(tmp_path / f"m-0000{part + 1}-of-00003.gguf", metadata)
    first = tmp_path / "m-00001-of-00003.gguf"
    watch = Watch()
    GgufFile.open(first, watch).close()
    for looks in range(watch.n):
        with pytest.raises(Cancelled):
            GgufFile.open(first, Watch(looks))
