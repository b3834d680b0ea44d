"""Byte pairs looked up for one text against the tables of all, and checks by keys against texts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFileError
from engine.gguf.binary import StringArray, among, joined, keys
from engine.gguf.byte_pairs import _FEW, BytePairs, _are_of_tokens
from engine.gguf.file import GgufFile
from engine.gguf.metadata import TypedMetadata
from engine.gguf.pretokenise import BYTE_CHARACTERS, SPLITTINGS
from tests.support.counted_calls import calls_of

DATA = Path(__file__).parents[2] / "data"
NORMAL = bytes([1])


def made(tokens: list[str], merges: list[str], pre: str = "qwen35") -> BytePairs:
    entries = {"tokenizer.ggml.merges": merges}
    types = NORMAL * len(tokens)
    file = TypedMetadata(Path("x.gguf"), entries)
    return BytePairs(file, StringArray.of(tokens), types, SPLITTINGS[pre], lambda: False)


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    with GgufFile.open(DATA / "qwen35-a-f32.gguf") as file:
        return {name: list(file.strs(f"tokenizer.ggml.{name}")) for name in ("tokens", "merges")}


@pytest.mark.parametrize("pre", ["qwen35", "lfm2"])
def test_a_text_alone_gives_what_the_tables_of_all_give(tiny: dict[str, Any], pre: str) -> None:
    chosen = random.Random(36)
    # merges in another order, some twice, and a token twice: the last one counts
    merges = [*chosen.sample(tiny["merges"], len(tiny["merges"])), *tiny["merges"][:40]]
    tokens = [*tiny["tokens"], *chosen.sample(tiny["tokens"], 30)]
    whole = made(tokens, merges, pre)
    whole.encode("the " * _FEW)
    for _ in range(40):
        words = chosen.choices(
            [*tiny["tokens"], " ", "the", "quick", "é", "\ufffd", "\n", "12"], k=9
        )
        text = "".join(words)
        assert made(tokens, merges, pre).encode(text) == whole.encode(text), text


def test_many_texts_make_the_tables_of_all_once(tiny: dict[str, Any]) -> None:
    pairs = made(tiny["tokens"], tiny["merges"])
    first = pairs.encode("the quick dog")
    for _ in range(20):
        assert pairs.encode("the quick dog") == first
    assert calls_of(lambda: pairs.encode("the quick dog")) < 10


LONG = ["abcdefgh", "ijklmnopq", "abcdefghijklmnopq", "abcdefgx", "abcdefgxijklmnopq"]


@pytest.mark.parametrize(
    ("merge", "is_right"),
    [
        ("a b", True),
        ("b a", False),
        ("a", False),
        (" a", False),
        ("a ", False),
        ("abcdefgh ijklmnopq", True),
        ("abcdefgx ijklmnopq", True),
        ("abcdefgh ijklmnopx", False),
        ("abcdefg hijklmnopq", False),
    ],
)
def test_keys_find_merges_of_what_is_no_token(merge: str, is_right: bool) -> None:
    tokens = [*BYTE_CHARACTERS, "ab", *LONG]
    found = _are_of_tokens(StringArray.of(["a b", merge]), StringArray.of(tokens), lambda: False)
    assert found == is_right
    if not is_right:
        with pytest.raises(ModelFileError, match="merge 1"):
            made(tokens, ["a b", merge])


def test_what_keys_take_for_a_token_is_refused_by_the_tables_of_all() -> None:
    middle = "abcdefgh{}ijklmnop".format
    tokens = [*BYTE_CHARACTERS, middle("1"), middle("1") + "a"]
    pairs = made(tokens, [f"{middle('2')} a"])  # first and last eight bytes are a token's
    assert pairs.encode(middle("2") + "a") == [BYTE_CHARACTERS.index(c) for c in middle("2") + "a"]
    with pytest.raises(ModelFileError, match="merge 0"):
        pairs.encode("a" * _FEW * 2)


def test_keys_of_joined_strings_are_those_of_the_whole() -> None:
    texts = ["", "a", "ä", "abcdefg", "abcdefgh", "abcdefghi", "x" * 300]
    for left in texts:
        for right in texts:
            parts = [StringArray.of([text]).parts(None, None) for text in (left, right)]
            assert keys(joined(*parts)) == StringArray.of([left + right]).keys
    strings = StringArray.of([*texts, "abcdefgh"])
    assert strings.places({"abcdefgh", "x" * 300, "y"}) == [4, 6, 7]
    assert strings.places([]) == StringArray.of([]).places(["a"]) == []
    assert not among(strings.keys, StringArray.of([]).keys).any()
