"""How text is cut into the pieces that byte-pair merges may not cross, and bytes written as text.

The split patterns are data of the model family: a file names its own by `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split


def _pattern(word: str) -> str:
    r"""The split pattern for words made of the classes `word`; alternatives in order.

    `\s` is Unicode's White_Space here: 0x85 is in it, 0x1C to 0x1F are not.
    """
    return "|".join(
        (
            r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
            rf"[^\r\n\p{{L}}\p{{N}}]?[{word}]+",
            r"\p{N}",
            rf" ?[^\s{word}\p{{N}}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


PATTERNS = {"qwen2": _pattern(r"\p{L}"), "qwen35": _pattern(r"\p{L}\p{M}")}


def pre_tokeniser(pre: str) -> PreTokenizer:
    """Splits by the pattern named `pre` (a key of `PATTERNS`), then writes bytes as characters."""
    split = Split(Regex(PATTERNS[pre]), behavior="isolated", invert=False)
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself if printable, else the next from U+0100."""
    printable: Iterable[int] = (*range(33, 127), *range(161, 173), *range(174, 256))
    characters = dict.fromkeys(range(256), "") | {byte: chr(byte) for byte in printable}
    hidden = (byte for byte, character in characters.items() if not character)
    return list((characters | {byte: chr(256 + i) for i, byte in enumerate(hidden)}).values())


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF = {character: bytes([byte]) for byte, character in enumerate(BYTE_CHARACTERS)}


def bytes_of(token: str) -> bytes:
    """The bytes a token stands for; a character outside the byte alphabet stands for itself."""
    return b"".join(_BYTE_OF.get(character) or character.encode() for character in token)
