"""Text to token ids and back, from a GGUF's own vocabulary (byte-level BPE).

Special tokens are cut out of the raw text first, longest text first; what is left is split by
the model family's pattern and merged. Nothing is normalised and nothing is put in front.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum

from tokenizers import Tokenizer as MergeTokenizer
from tokenizers.models import BPE

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.metadata import TypedMetadata
from engine.gguf.pretokenise import BYTE_CHARACTERS, PATTERNS, bytes_of, pre_tokeniser

MAX_TOKEN_LENGTH = 4096  # characters; real vocabularies stay below 300

# a model that writes one of these has finished, whatever type the file gives the token
_END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "</s>",
)
_REMEDY = "Use another copy of the model, or convert it again."
_SURROGATE = re.compile("[\ud800-\udfff]")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Tokenizer:
    """Byte-level BPE over the vocabulary of one file. `n_vocab` = rows of the embedding."""

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        merges: Iterable[tuple[str, str]],
        pre: str,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eot_id: int | None = None,
        pad_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        """Takes consistent parts; `from_gguf` is the way in that checks them.

        merges: pairs in rank order, the first merged first. Raises ValueError where a merge
        names a token that is not there.
        """
        self.model = "gpt2"
        self.pre = pre
        self.n_vocab = len(tokens)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eot_id = eot_id
        self.pad_id = pad_id
        self.add_bos = add_bos
        self.add_eos = add_eos
        self._tokens = tokens
        self._types = types
        ids = {token: i for i, token in enumerate(tokens)}
        ends = {ids[text] for text in _END_TEXTS if text in ids}
        self.eog_ids = frozenset(ends | {i for i in (eos_id, eot_id) if i is not None})
        self._merger = _merger(ids, merges, pre)
        self._always = _longest_first(tokens, types, {TokenType.USER_DEFINED})
        self._specials = _longest_first(
            tokens, types, {TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN}
        )
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, file: TypedMetadata) -> Tokenizer:
        """The tokenizer described by `tokenizer.ggml.*`.

        Raises UnsupportedModelError for another algorithm or split pattern and ModelFileError
        for parts that contradict each other.
        """
        model = file.str_("tokenizer.ggml.model")
        pre = file.str_("tokenizer.ggml.pre", "default")
        if model != "gpt2":
            raise UnsupportedModelError(
                f'{file.path.name} uses the tokenizer "{shorten(model)}".',
                'Only byte-level BPE ("gpt2") is supported, as in the Qwen3 and Qwen3.5 families.',
            )
        if pre not in PATTERNS:
            raise UnsupportedModelError(
                f'{file.path.name} splits text by the pattern "{shorten(pre)}".',
                f"Supported patterns are {' and '.join(sorted(PATTERNS))}.",
            )
        tokens = _read_tokens(file)
        types = _read_types(file, len(tokens))
        return cls(
            tokens,
            types,
            _read_merges(file, set(tokens) - {""}),
            pre,
            bos_id=_read_id(file, "bos_token_id", len(tokens)),
            eos_id=_read_id(file, "eos_token_id", len(tokens)),
            eot_id=_read_id(file, "eot_token_id", len(tokens)),
            pad_id=_read_id(file, "padding_token_id", len(tokens)),
            add_bos=file.bool_("tokenizer.ggml.add_bos_token", False),
            add_eos=file.bool_("tokenizer.ggml.add_eos_token", False),
        )

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """The ids of `text`; no beginning token is put in front.

        parse_special: whether the text of a control token stands for that token. User-defined
        tokens are always recognised. A lone surrogate counts as U+FFFD.
        """
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for part in _cut(text, self._specials if parse_special else self._always):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._merger.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. special: see `piece`."""
        joined = b"".join(self.piece(i, special=special) for i in ids)
        return joined.decode("utf-8", "replace")

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        """The bytes of one token, possibly part of a character; b"" outside the vocabulary.

        special: whether tokens that stand for no text (control, unknown, unused) show theirs.
        """
        if not 0 <= token_id < self.n_vocab:
            return b""
        kind = self._types[token_id]
        if not special and kind not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokens[token_id]
            known = bytes_of(token) if kind == TokenType.NORMAL else token.encode()
            self._bytes[token_id] = known
        return known

    def is_control(self, token_id: int) -> bool:
        """Whether the token steers the model and stands for no text."""
        return 0 <= token_id < self.n_vocab and self._types[token_id] == TokenType.CONTROL


class StreamDecoder:
    """Turns ids into text one at a time, holding back bytes that only start a character."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often "" inside a character."""
        return self._decoder.decode(self._tokenizer.piece(token_id, special=self._special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character. Ready for a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _merger(ids: dict[str, int], merges: Iterable[tuple[str, str]], pre: str) -> MergeTokenizer:
    merger = MergeTokenizer(BPE(vocab=ids, merges=list(merges)))
    merger.pre_tokenizer = pre_tokeniser(pre)
    return merger


def _longest_first(
    tokens: Sequence[str], types: Sequence[int], kinds: set[TokenType]
) -> list[tuple[str, int]]:
    """Texts and ids of the tokens of these kinds, most UTF-8 bytes first."""
    wanted = [(tokens[i], i) for i, kind in enumerate(types) if kind in kinds and tokens[i]]
    return sorted(wanted, key=lambda entry: len(entry[0].encode()), reverse=True)


def _cut(text: str, specials: list[tuple[str, int]]) -> list[str | int]:
    """Text with the ids of special tokens in place of theirs; no empty parts.

    Earlier entries of `specials` take their places first, from the left, and never overlap.
    """
    taken = bytearray(len(text))
    cuts: list[tuple[int, int, int]] = []
    for special, token_id in specials:
        start = text.find(special)
        while start >= 0:
            end = start + len(special)
            blocked = taken.find(1, start, end)
            if blocked < 0:
                taken[start:end] = b"\1" * len(special)
                cuts.append((start, end, token_id))
            else:
                # whatever starts before this run of taken places ends would overlap it too
                end = taken.find(0, blocked)
            start = text.find(special, end) if end >= 0 else -1
    parts: list[str | int] = []
    done = 0
    for start, end, token_id in sorted(cuts):
        parts += (text[done:start], token_id)
        done = end
    parts.append(text[done:])
    return [part for part in parts if part != ""]


def _read_tokens(file: TypedMetadata) -> list[str]:
    key = "tokenizer.ggml.tokens"
    tokens = file.strs(key)
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_LENGTH:
        what = f"a token of {longest:,} characters, more than {MAX_TOKEN_LENGTH:,}"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    missing = set(BYTE_CHARACTERS).difference(tokens)
    if missing:
        byte = min(map(BYTE_CHARACTERS.index, missing))
        what = f"no token for byte 0x{byte:02X} among {len(tokens):,}"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    return tokens


def _read_types(file: TypedMetadata, n_vocab: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    types = file.ints(key, [int(TokenType.NORMAL)] * n_vocab)
    if len(types) != n_vocab:
        what = f"{len(types):,} types for {n_vocab:,} tokens"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    unknown = set(types).difference(TokenType)
    if unknown:
        raise ModelFileError(file.path, f"key {key}", f"{min(unknown)} is no token type", _REMEDY)
    return types


def _read_merges(file: TypedMetadata, vocabulary: set[str]) -> list[tuple[str, str]]:
    """Pairs in rank order; of a pair that is listed twice the first counts."""
    key = "tokenizer.ggml.merges"
    pairs: dict[tuple[str, str], None] = {}
    for rank, merge in enumerate(file.strs(key)):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            what = f"merge {rank} ({shorten(merge)}) names a token that is not in the vocabulary"
            raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
        pairs[left, right] = None
    return list(pairs)


def _read_id(file: TypedMetadata, name: str, n_vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    token_id = file.int_(key, None)
    if token_id is None:
        return None
    if not 0 <= token_id < n_vocab:
        what = f"{token_id} is outside the vocabulary of {n_vocab:,} tokens"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    return token_id
