"""Tokenizer against golden vectors, a naive reimplementation, and malformed vocabularies."""

from __future__ import annotations

import functools
import json
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.gguf.metadata import TypedMetadata
from engine.gguf.pretokenise import BYTE_CHARACTERS, SPLITTINGS, bytes_of, pre_tokenizer
from engine.gguf.tokenizer import MAX_TOKEN_LENGTH, Tokenizer, _cut
from tests.support.counted_calls import calls_of, counted_calls
from tests.support.naive_splits import naive_pieces

DATA = Path(__file__).parents[2] / "data"
SHARED = Path(__file__).parents[3] / ".." / "shared"
VOCAB = SHARED / "golden" / "vocab"
FURTHER = SHARED / "golden2" / "vocab" / "pre_vectors.json"
NEEDS_VOCAB = pytest.mark.skipif(not VOCAB.is_dir(), reason="golden vocabularies are not here")
TINY = {"qwen35": "qwen35-a-f32.gguf", "qwen2": "qwen3-f-f32.gguf"}
# characters that unicodedata knows; the library's tables may be newer
KNOWN = st.characters(exclude_categories=["Cn", "Cs"])
TEXT = st.text(
    st.one_of(KNOWN, st.sampled_from(" \n\r\t'sStTreRElLdD0123456789!?.\u0301\u00a0\x1c\x85"))
)


def metadata(model: str) -> dict[str, Any]:
    with GgufFile.open(DATA / model) as file:
        return dict(file.metadata)


def build(changes: dict[str, Any], drop: tuple[str, ...] = ()) -> Tokenizer:
    """The tiny vocabulary with some `tokenizer.ggml.*` replaced or dropped."""
    entries = metadata(TINY["qwen35"])
    entries |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    for key in drop:
        del entries[f"tokenizer.ggml.{key}"]
    return Tokenizer.from_gguf(TypedMetadata(Path("tiny.gguf"), entries))


@pytest.fixture(scope="module", params=sorted(TINY))
def tiny(request: pytest.FixtureRequest) -> Tokenizer:
    with GgufFile.open(DATA / TINY[request.param]) as file:
        return Tokenizer.from_gguf(file)


def naive_merge(piece: str, ids: dict[str, int], ranks: dict[str, int]) -> list[int]:
    """Joins the best-ranked neighbours, leftmost first, until no merge applies."""
    parts = [BYTE_CHARACTERS[byte] for byte in piece.encode()]
    while True:
        found = [ranks.get(f"{a} {b}", len(ranks)) for a, b in pairwise(parts)]
        if not found or min(found) == len(ranks):
            return [ids[part] for part in parts]
        best = found.index(min(found))
        parts[best : best + 2] = ["".join(parts[best : best + 2])]


@NEEDS_VOCAB
@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.thinned(4)
def test_golden_vectors_of_the_full_vocabulary(parse_special: bool) -> None:
    golden = json.loads((VOCAB / "qwen35_vectors.json").read_text(encoding="utf-8"))
    with GgufFile.open(VOCAB / golden["vocab"]) as file:
        tokenizer = Tokenizer.from_gguf(file)
    check_vectors(tokenizer, golden, parse_special)
    assert tokenizer.n_vocab == 151936
    assert (tokenizer.model, tokenizer.pre) == ("gpt2", "qwen35")
    assert tokenizer.bos_id == tokenizer.pad_id == 151643
    assert not tokenizer.add_bos


@NEEDS_VOCAB
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("parse_special", [False, True])
def test_golden_vectors_of_the_tiny_vocabularies(index: int, parse_special: bool) -> None:
    golden = json.loads((VOCAB / "tiny_vectors.json").read_text(encoding="utf-8"))[index]
    with GgufFile.open(DATA / golden["vocab"]) as file:
        check_vectors(Tokenizer.from_gguf(file), golden, parse_special)


@pytest.mark.skipif(not FURTHER.is_file(), reason="further golden vectors are not here")
@pytest.mark.parametrize("pre", sorted(set(SPLITTINGS) - {"qwen2", "qwen35"}))
def test_golden_vectors_of_further_patterns(pre: str, pytestconfig: pytest.Config) -> None:
    """Every other text of a pattern, with --all each."""
    golden = json.loads(FURTHER.read_text(encoding="utf-8"))
    if pre not in golden["pre"]:
        pytest.skip("there are no vectors of this pattern")
    wanted = golden["pre"][pre]
    entries = {**_large_vocabulary(), "tokenizer.ggml.pre": pre}
    entries.pop("tokenizer.ggml.add_bos_token", None)
    original = "ids_original_pattern" in wanted  # the checkpoint's; llama.cpp's is another one
    if original:  # no text is cut out there
        del entries["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_gguf(TypedMetadata(Path("m.gguf"), entries))
    assert tokenizer.add_bos == wanted["bos_prepended"]
    front = [tokenizer.bos_id] if tokenizer.add_bos else []
    plain = wanted["ids_original_pattern" if original else "ids"]
    parsed = plain if original else wanted["ids_parse_special"]
    vectors = list(zip(golden["texts"], plain, parsed, strict=True))
    if not pytestconfig.getoption("all"):
        vectors = vectors[sorted(SPLITTINGS).index(pre) % 2 :: 2]
    for text, without_special, with_special in vectors:
        assert front + tokenizer.encode(text, parse_special=False) == without_special, text
        assert front + tokenizer.encode(text) == with_special, text


@functools.cache
def _large_vocabulary() -> dict[str, Any]:
    with GgufFile.open(VOCAB / "ggml-vocab-qwen35.gguf") as file:
        return dict(file.metadata)


def check_vectors(tokenizer: Tokenizer, golden: dict[str, Any], parse_special: bool) -> None:
    field = "ids_parse_special" if parse_special else "ids"
    assert tokenizer.pre == golden["pre"]
    assert tokenizer.eos_id == golden["eos"]
    assert sorted(tokenizer.eog_ids) == golden["eog_ids"]
    assert len(golden["vectors"]) == 77
    for vector in golden["vectors"]:
        ids = tokenizer.encode(vector["text"], parse_special=parse_special)
        assert ids == vector[field], vector["text"]
        assert tokenizer.decode(ids, special=True) == vector["text"]


@settings(max_examples=80, deadline=None)
@given(text=TEXT, pre=st.sampled_from(sorted(SPLITTINGS)))
def test_split_agrees_with_the_naive_splitter(text: str, pre: str) -> None:
    pieces = [
        bytes_of(piece).decode()
        for piece, _ in pre_tokenizer(SPLITTINGS[pre]).pre_tokenize_str(text)
    ]
    assert pieces == list(naive_pieces(text, pre))


@cache
def assigned() -> list[str]:
    """Of the ideographs and syllables some: they are many and alike."""
    kinds = ((point, unicodedata.category(chr(point))) for point in range(0x30000))
    few = {"Lo", "Co"}
    return [
        chr(point)
        for point, kind in kinds
        if kind not in ("Cn", "Cs") and (point < 0x3400 or kind not in few or point % 41 == 0)
    ]


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "lfm2", "kimi-k2", "refact", "granite-docling"])
@pytest.mark.thinned(4)
def test_split_puts_every_assigned_character_in_the_class_of_its_category(pre: str) -> None:
    splitter, known = pre_tokenizer(SPLITTINGS[pre]), assigned()
    for start in range(0, len(known), 512):
        # between two letters a character glues, is alone or glues to one side by its class
        text = "".join(f"a{c}b{c}{c}!" for c in known[start : start + 512])
        pieces = [bytes_of(piece).decode() for piece, _ in splitter.pre_tokenize_str(text)]
        assert pieces == list(naive_pieces(text, pre))


@settings(max_examples=60, deadline=None)
@given(text=TEXT | st.text(alphabet=" thei0an\n", max_size=40))
def test_ids_agree_with_naive_merging_and_come_back_as_text(tiny: Tokenizer, text: str) -> None:
    entries = metadata(TINY[tiny.pre])
    ids = {token: i for i, token in enumerate(entries["tokenizer.ggml.tokens"])}
    ranks = {merge: rank for rank, merge in enumerate(entries["tokenizer.ggml.merges"])}
    expected = [i for piece in naive_pieces(text, tiny.pre) for i in naive_merge(piece, ids, ranks)]
    assert tiny.encode(text, parse_special=False) == expected
    assert tiny.decode(expected) == text


def test_digits_stand_alone_and_marks_follow_the_pattern(tiny: Tokenizer) -> None:
    assert [tiny.piece(i) for i in tiny.encode("2026")] == [b"2", b"0", b"2", b"6"]
    pieces = [
        piece for piece, _ in pre_tokenizer(SPLITTINGS[tiny.pre]).pre_tokenize_str("cafe\u0301s")
    ]
    assert len(pieces) == (1 if tiny.pre == "qwen35" else 2)


def test_digits_come_in_threes_or_alone_by_the_pattern() -> None:
    def pieces(pre: str, text: str) -> list[str]:
        return [piece for piece, _ in pre_tokenizer(SPLITTINGS[pre]).pre_tokenize_str(text)]

    for pre in ("lfm2", "falcon-h1", "pixtral", "dbrx", "kimi-k2"):
        assert pieces(pre, "12345x") == ["123", "45", "x"]
    assert pieces("refact", "a 12") == ["a", "Ġ", "1", "2"]
    for pre in ("granite-docling", "gpt-2", "mpt", "olmo"):
        assert pieces(pre, "a 12") == ["a", "Ġ12"]
    assert pieces("kimi-k2", "XMLHttpRequest中x") == ["XMLHttp", "Request", "ä¸Ń", "x"]


def test_a_piece_that_is_a_token_needs_no_merges_where_the_pattern_says_so() -> None:
    tokens = [*TOKENS, "quick"]
    ids = build({"tokens": tokens, "pre": "lfm2"}, drop=("token_type",)).encode("quick")
    assert ids == [384]
    others = build({"tokens": tokens, "pre": "dbrx"}, drop=("token_type",)).encode("quick")
    assert len(others) > 1


def test_the_beginning_token_is_a_matter_of_the_pattern_and_then_of_the_file() -> None:
    assert build({"pre": "pixtral"}).add_bos
    assert not build({"pre": "pixtral", "add_bos_token": False}).add_bos
    assert not build({"pre": "kimi-k2"}).add_bos


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="abc d", max_size=24), order=st.permutations(range(6)))
def test_without_merges_the_lowest_token_is_made_first(text: str, order: list[int]) -> None:
    made = ["ab", "bc", "aa", "abc", "cab", "bcaa"]
    tokens = [*BYTE_CHARACTERS, *(made[i] for i in order)]
    drop = ("token_type", "merges", "eos_token_id", "padding_token_id")
    tokenizer = build({"tokens": tokens, "pre": "kimi-k2"}, drop)
    expected = []
    for piece in naive_pieces(text, "kimi-k2"):
        parts = [BYTE_CHARACTERS[byte] for byte in piece.encode()]
        while True:
            ranks = [tokens.index(a + b) if a + b in tokens else 999 for a, b in pairwise(parts)]
            if min(ranks, default=999) == 999:
                break
            at = ranks.index(min(ranks))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        expected += [tokens.index(part) for part in parts]
    assert tokenizer.encode(text) == expected


def test_nothing_is_normalised_or_put_in_front(tiny: Tokenizer) -> None:
    assert tiny.encode("") == []
    assert tiny.encode("e\u0301") != tiny.encode("é")
    assert tiny.decode(tiny.encode("e\u0301 \ufb01 👩‍👩‍👧")) == "e\u0301 \ufb01 👩‍👩‍👧"
    assert tiny.piece(tiny.encode("a")[0]) == b"a"


def test_a_lone_surrogate_becomes_a_replacement_character(tiny: Tokenizer) -> None:
    assert tiny.encode("a\ud800b") == tiny.encode("a\ufffdb")
    assert tiny.encode("\ud83d\ude00") == tiny.encode("😀")


def test_control_text_is_a_token_only_when_asked_for(tiny: Tokenizer) -> None:
    text = "a<|im_end|>b"
    end = tiny.eos_id
    assert end is not None
    assert tiny.encode(text).count(end) == 1
    plain = tiny.encode(text, parse_special=False)
    assert end not in plain
    assert tiny.decode(plain) == text
    assert tiny.decode(tiny.encode(text)) == "ab"
    assert tiny.decode(tiny.encode(text), special=True) == text
    assert tiny.is_control(end)
    assert tiny.piece(end) == b"<|im_end|>"
    assert tiny.piece(end, special=False) == b""


def test_user_defined_text_is_always_a_token_and_always_text(tiny: Tokenizer) -> None:
    for parse_special in (False, True):
        ids = tiny.encode("x<think>y", parse_special=parse_special)
        assert len(ids) == 3
        assert not tiny.is_control(ids[1])
        assert tiny.piece(ids[1], special=False) == b"<think>"
        assert tiny.decode(ids) == "x<think>y"


def test_the_longest_special_text_is_cut_first_wherever_it_is() -> None:
    entries = metadata(TINY["qwen35"])
    tokens = [*entries["tokenizer.ggml.tokens"], "[ab]", "b][long]", ""]
    types = np.append(entries["tokenizer.ggml.token_type"], [4, 4, 4])
    tokenizer = build({"tokens": tokens, "token_type": types})
    ids = tokenizer.encode("[ab][long]")
    assert [tokenizer.piece(i) for i in ids] == [b"[", b"a", b"b][long]"]
    assert tokenizer.encode("[ab][ab]") == [384, 384]


@given(
    text=st.text(alphabet="abc", max_size=30),
    specials=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), unique=True, max_size=6),
)
def test_cutting_agrees_with_splitting_fragment_by_fragment(text: str, specials: list[str]) -> None:
    entries = [(special, i) for i, special in enumerate(sorted(specials, key=len, reverse=True))]
    expected: list[str | int] = [text]
    for special, i in entries:
        split: list[str | int] = []
        for part in expected:
            if isinstance(part, int):
                split.append(part)
                continue
            for fragment in part.split(special):
                split += (fragment, i)
            split.pop()
        expected = split
    assert _cut(text, entries) == [part for part in expected if part != ""]


def test_ids_outside_the_vocabulary_have_no_bytes(tiny: Tokenizer) -> None:
    for token_id in (-1, tiny.n_vocab, 2**40):
        assert tiny.piece(token_id) == b""
        assert not tiny.is_control(token_id)
    assert tiny.decode([-1, *tiny.encode("a"), tiny.n_vocab]) == "a"


def test_decode_replaces_bytes_that_are_not_utf8(tiny: Tokenizer) -> None:
    ids = tiny.encode("é")
    assert len(ids) == 2
    assert tiny.decode(ids[:1]) == "\ufffd"
    assert tiny.decode(reversed(ids)) == "\ufffd\ufffd"


def test_end_of_generation_includes_named_tokens_and_the_given_ids(tiny: Tokenizer) -> None:
    assert {tiny.piece(i) for i in tiny.eog_ids} == {
        b"<|im_end|>",
        b"<|endoftext|>",
        b"<|fim_pad|>",
    }
    assert build({"eot_token_id": 5}).eog_ids == tiny.eog_ids | {5}
    assert build({"eot_token_id": 5}).eot_id == 5


def test_optional_keys_may_be_absent() -> None:
    tokenizer = build({}, drop=("eos_token_id", "padding_token_id", "token_type"))
    assert tokenizer.eos_id is tokenizer.pad_id is tokenizer.bos_id is tokenizer.eot_id is None
    assert not tokenizer.add_bos
    assert build({"add_bos_token": True, "bos_token_id": 376}).add_bos


def test_unused_tokens_are_no_text_but_can_be_shown() -> None:
    types = metadata(TINY["qwen35"])["tokenizer.ggml.token_type"].copy()
    types[383] = 5
    tokenizer = build({"token_type": types})
    assert tokenizer.piece(383) == b"<|fim_pad|>"
    assert tokenizer.piece(383, special=False) == b""
    assert 383 not in tokenizer.encode("<|fim_pad|>")


@pytest.mark.parametrize(
    ("key", "value"), [("model", "bert"), ("model", "x" * 5000), ("pre", "starcoder"), ("pre", "")]
)
def test_other_tokenizers_are_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build({key: value})
    assert value[:60] in caught.value.message
    assert len(caught.value.message) < 200
    assert "qwen" in caught.value.remedy.lower()


def test_a_missing_pattern_name_is_not_guessed() -> None:
    with pytest.raises(UnsupportedModelError, match="default"):
        build({}, drop=("pre",))


TOKENS = metadata(TINY["qwen35"])["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens": []}, "no token for byte 0x00"),
        ({"tokens": [*TOKENS[:100], "?", *TOKENS[101:]]}, "no token for byte"),
        ({"tokens": [*TOKENS, "a" * (MAX_TOKEN_LENGTH + 1)]}, "4,097 characters"),
        ({"tokens": 7}, "tokens"),
        ({"token_type": np.ones(383, np.int32)}, "383 types for 384 tokens"),
        ({"token_type": np.full(384, 9, np.int32)}, "9 is not a token type"),
        ({"merges": ["h e", "zzz q"]}, "merge 1 (zzz q)"),
        ({"merges": ["th"]}, "merge 0 (th)"),
        ({"merges": [" t"]}, "merge 0"),
        ({"merges": ["q" * 9000]}, "merge 0"),
        ({"eos_token_id": 384}, "384 is outside"),
        ({"bos_token_id": -1}, "-1 is outside"),
        ({"eot_token_id": "x"}, "eot_token_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_parts_that_contradict_each_other_are_file_errors(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        build(changes)
    assert named in caught.value.message
    assert next(iter(changes)) in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_required_keys_are_named_when_missing(key: str) -> None:
    with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{key}"):
        build({}, drop=(key,))


def test_of_a_merge_listed_twice_the_first_counts() -> None:
    merges = metadata(TINY["qwen35"])["tokenizer.ggml.merges"]
    repeated = build({"merges": [*merges, *merges[:60]]})
    text = "the lazy dog jumped over the quick keeper and ate the time"
    assert repeated.encode(text) == build({}).encode(text)


@pytest.mark.parametrize(
    "unit", ["a", " ", "1", "!", "\n", " \n", "the", "\u4e2d", "'", "<|im_end|>", "<|im_end|"]
)
@pytest.mark.thinned(6)
def test_work_grows_in_proportion_to_the_text(unit: str) -> None:
    tokenizer = build({})
    short, long = (unit * (n // len(unit)) for n in (5_000, 20_000))
    tokenizer.encode(unit * 30_000)  # the tables for long texts are made once
    assert calls_of(lambda: tokenizer.encode(long)) < 5 * calls_of(lambda: tokenizer.encode(short))
    text = unit * (100_000 // len(unit))  # quadratic work, also in C, would take minutes
    assert tokenizer.decode(tokenizer.encode(text), special=True) == text


def test_many_overlapping_specials_do_not_multiply_the_work() -> None:
    entries = [("a" * length, length) for length in range(2000, 1, -1)]
    with counted_calls() as count:
        parts = _cut("a" * 99_999, entries)
    assert count.n < 10 * len(entries)
    assert parts == [2000] * 49 + [1999]
