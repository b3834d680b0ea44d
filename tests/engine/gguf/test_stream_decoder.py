"""StreamDecoder against decoding the whole text at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import StreamDecoder, Tokenizer

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GgufFile.open(DATA / "qwen35-a-f32.gguf") as file:
        return Tokenizer.from_gguf(file)


def pushed(tokenizer: Tokenizer, ids: list[int], special: bool = False) -> list[str]:
    decoder = StreamDecoder(tokenizer, special=special)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


# ids 0..255 are the single bytes, in another order; 256..383 are words and special tokens
@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(-2, 390) | st.integers(94, 255), max_size=40), special=st.booleans()
)
def test_the_parts_join_to_the_text_of_all_bytes(
    tokenizer: Tokenizer, ids: list[int], special: bool
) -> None:
    whole = b"".join(tokenizer.piece(i, special=special) for i in ids)
    joined = "".join(pushed(tokenizer, ids, special))
    assert joined == whole.decode("utf-8", "replace")
    assert joined == tokenizer.decode(ids, special=special)


@settings(deadline=None)
@given(text=st.text())
def test_valid_text_never_shows_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    shown = ""
    decoder = StreamDecoder(tokenizer)
    for i in tokenizer.encode(text, parse_special=False):
        shown += decoder.push(i)
        assert text.startswith(shown)
    assert decoder.flush() == ""
    assert shown == text


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 6
    assert pushed(tokenizer, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")[:3]
    assert pushed(tokenizer, ids) == ["", "", "", "\ufffd"]


def test_an_invalid_byte_is_replaced_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    lead, a = tokenizer.encode("é")[0], tokenizer.encode("a")[0]
    assert pushed(tokenizer, [lead, a]) == ["", "\ufffda", ""]


def test_control_tokens_show_only_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>")
    assert "".join(pushed(tokenizer, ids)) == "a"
    assert "".join(pushed(tokenizer, ids, special=True)) == "a<|im_end|>"


def test_flush_makes_the_decoder_ready_for_a_new_text(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    lead, a = tokenizer.encode("é")[0], tokenizer.encode("a")[0]
    decoder.push(lead)
    assert decoder.flush() == "\ufffd"
    assert decoder.push(a) == "a"
