"""Pre-tokenisation: splitting text into the pieces that byte-pair merges may not cross, and bytes
as characters.

Split patterns depend on the model family: a file names its own in `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split


class Splitting(NamedTuple):
    """How tokenizers of one name split and join text.

    patterns: applied in turn, each to the pieces of the previous one. whole_words: a piece that is
    a token is used as it is, whatever its merges. add_bos: if the file does not say. by_rank:
    without merges, the order of tokens replaces them.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    by_rank: bool = False


_SHORT_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


def _pattern(word: str, digits: str = r"\p{N}", breaks: str = r"\s*[\r\n]+") -> str:
    r"""The split pattern for words made of the classes `word`; alternatives in order.

    `\s` is Unicode's White_Space here: 0x85 is in it, 0x1C to 0x1F are not.
    """
    return "|".join(
        (
            _SHORT_ENDINGS,
            rf"[^\r\n\p{{L}}\p{{N}}]?[{word}]+",
            digits,
            rf" ?[^\s{word}\p{{N}}]+[\r\n]*",
            breaks,
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def _kimi() -> str:
    """Runs of Han characters; other words, including marks, which end before an upper case letter
    that follows a lower case one."""
    both = r"\p{Lm}\p{Lo}\p{M}"
    upper, lower = (rf"[{case}{both}&&[^\p{{Han}}]]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    before, ending = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return "|".join(
        (
            r"\p{Han}+",
            f"{before}{upper}*{lower}+{ending}",
            f"{before}{upper}+{lower}*{ending}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


# Deepseek 3: numbers and East Asian runs are cut off first
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "|".join(
        (
            r"[!-/:-~&&[^A-Za-z]][A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _pattern(r"\p{L}", r"\p{N}{1,3}")

SPLITTINGS = {
    "qwen2": Splitting((_pattern(r"\p{L}"),)),
    "qwen35": Splitting((_pattern(r"\p{L}\p{M}"),)),
    "lfm2": Splitting((_LLAMA3,), whole_words=True, add_bos=True),
    "falcon-h1": Splitting((_LLAMA3,), whole_words=True, add_bos=True),
    "pixtral": Splitting((_LLAMA3,), whole_words=True, add_bos=True),
    "glm4": Splitting((_LLAMA3,), whole_words=True),
    "glm5": Splitting((_LLAMA3,), whole_words=True),
    "dbrx": Splitting((_LLAMA3,)),
    "bailingmoe2": Splitting((_pattern(r"\p{L}", breaks=r"\s*[\r\n]"),)),
    "kimi-k2": Splitting((_kimi(),), by_rank=True),
    "deepseek-v3": Splitting(_DEEPSEEK),
    "refact": Splitting((r"\p{N}", _GPT2)),
    **dict.fromkeys(("granite-docling", "gpt-2", "mpt", "olmo"), Splitting((_GPT2,))),
}
"""By `tokenizer.ggml.pre`."""


def pre_tokenizer(splitting: Splitting) -> PreTokenizer:
    """Splits text, then writes bytes as characters."""
    cuts = [Split(Regex(each), behavior="isolated", invert=False) for each in splitting.patterns]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


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
