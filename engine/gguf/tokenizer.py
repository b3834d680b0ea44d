"""Text to token ids and back, with a GGUF file's own vocabulary.

First, special tokens are cut out of the raw text, longest text first. The rest is split by the
model family's pattern and merged (byte-level BPE), or divided into pieces by their scores
(engine.gguf.scored_pieces). Nothing is normalised.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import StringArray, check_cancelled, never, shorten
from engine.gguf.byte_pairs import BytePairs
from engine.gguf.metadata import TypedMetadata
from engine.gguf.pretokenise import BYTE_CHARACTERS, SPLITTINGS, bytes_of
from engine.gguf.scored_pieces import BYTE_TOKENS, SCORED, bytes_of_scored

MAX_TOKEN_LENGTH = 4096  # characters; real vocabularies stay below 300

# a model that emits one of these has finished, whatever the token's type in the file
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
    "<|end_of_msg|>",
    "[EOT]",
    "[EOS]",
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


# plain numbers, because comparison with enumeration members takes several times as long
_NORMAL, _USER_DEFINED, _BYTE = (
    int(kind) for kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE)
)
_WRITTEN = {_NORMAL, _USER_DEFINED}
_CUT_OUT = {_USER_DEFINED, int(TokenType.CONTROL), int(TokenType.UNKNOWN)}


class Tokenizer:
    """The vocabulary of one file. `n_vocab` = rows of the embedding."""

    def __init__(
        self,
        tokens: Sequence[str],
        types: bytes,
        ids: dict[str, int],
        encode: Callable[[str], list[int]],
        *,
        model: str,
        pre: str,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eot_id: int | None = None,
        pad_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        prefix: str = "",
    ) -> None:
        """Takes consistent parts; `from_gguf` is the checked constructor.

        ids: at least of texts in `tokens` that may end a text. encode: tokenises a text without
        special tokens. prefix: inserted before a text at the beginning and after a special token.
        """
        self.model = model
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
        ends = {ids[text] for text in _END_TEXTS if text in ids}
        self.eog_ids = frozenset(ends | {i for i in (eos_id, eot_id) if i is not None})
        self._encode, self._prefix = encode, prefix
        self._bytes_of = bytes_of_scored(model) if model in SCORED else bytes_of
        self._written = _WRITTEN | ({_BYTE} if model in SCORED else set())
        self._specials = _longest_first(tokens, types)
        self._always = [(text, i) for text, i in self._specials if types[i] == _USER_DEFINED]
        self._bytes: dict[int, bytes] = {}
        self._by_piece: dict[bytes, tuple[int, ...]] | None = None

    @classmethod
    def from_gguf(cls, file: TypedMetadata, cancelled: Callable[[], bool] = never) -> Tokenizer:
        """The tokenizer described by `tokenizer.ggml.*`.

        Raises UnsupportedModelError for another algorithm or split pattern, ModelFileError for
        parts that contradict each other, and Cancelled soon after `cancelled` returns True.
        """
        model = file.str_("tokenizer.ggml.model")
        pre = file.str_("tokenizer.ggml.pre", "default")
        if model in SCORED:
            return cls._scored(file, model, pre, cancelled)
        if model != "gpt2":
            raise UnsupportedModelError(
                f'{file.path.name} has the tokenizer "{shorten(model)}", which is not supported.',
                f"Supported are {', '.join(SCORED)} and gpt2 (Qwen families).",
            )
        splitting = SPLITTINGS.get(pre)
        if splitting is None:
            raise UnsupportedModelError(
                f'{file.path.name} has the pre-tokenizer "{shorten(pre)}", which is not supported.',
                f"Supported are {', '.join(sorted(SPLITTINGS))}.",
            )
        tokens, ids = _read_tokens(file, BYTE_CHARACTERS, cancelled)
        types = _read_types(file, len(tokens))
        encode = BytePairs(file, tokens, types, splitting, cancelled).encode
        kept = _kept(file, len(tokens), add_bos=splitting.add_bos)
        return cls(tokens, types, ids, encode, model=model, pre=pre, **kept)

    @classmethod
    def _scored(
        cls, file: TypedMetadata, model: str, pre: str, cancelled: Callable[[], bool]
    ) -> Tokenizer:
        tokens, ids = _read_tokens(file, BYTE_TOKENS, cancelled)
        types, scores = _read_types(file, len(tokens)), _read_scores(file, len(tokens))
        make_encoder, begins = SCORED[model]
        kept = _kept(file, len(tokens), bos=1, eos=2, add_bos=begins)
        spaced = file.bool_("tokenizer.ggml.add_space_prefix", begins) and begins
        encode = make_encoder(tokens, {text: i for i, text in enumerate(tokens)}, scores, types)
        prefix = " " if spaced else ""
        return cls(tokens, types, ids, encode, model=model, pre=pre, prefix=prefix, **kept)

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """The ids of `text`; no beginning token is put in front.

        parse_special: whether the text of a control token stands for that token. User-defined
        tokens are always recognised. A lone surrogate counts as U+FFFD.
        """
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        prefix = self._prefix
        for part in _cut(text, self._specials if parse_special else self._always):
            if isinstance(part, int):
                ids.append(part)
                prefix = self._prefix
            else:
                ids += self._encode(prefix + part)
                prefix = ""
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
        if not special and kind not in self._written:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokens[token_id]
            is_plain = kind == _NORMAL or (kind == _BYTE and kind in self._written)
            known = self._bytes_of(token) if is_plain else token.encode()
            self._bytes[token_id] = known
        return known

    def ids_of_piece(self, piece: bytes) -> tuple[int, ...]:
        """The tokens that add exactly these bytes to a text."""
        if self._by_piece is None:
            self._by_piece = {}
            for token_id in range(self.n_vocab):
                found = self.piece(token_id, special=False)
                self._by_piece[found] = (*self._by_piece.get(found, ()), token_id)
        return self._by_piece.get(piece, ())

    def is_control(self, token_id: int) -> bool:
        """Whether the token controls the model and represents no text."""
        return 0 <= token_id < self.n_vocab and self._types[token_id] == TokenType.CONTROL


class StreamDecoder:
    """Turns ids into text one at a time, holding back bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text completed by this token, often "" within a character."""
        return self._decoder.decode(self._tokenizer.piece(token_id, special=self._special))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character. Then ready for a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _longest_first(tokens: Sequence[str], types: bytes) -> list[tuple[str, int]]:
    """Texts and ids of tokens that are cut out of a text, most UTF-8 bytes first."""
    places = np.flatnonzero(np.isin(np.frombuffer(types, np.uint8), list(_CUT_OUT)))
    wanted = [(tokens[i], i) for i in places.tolist() if tokens[i]]
    return sorted(wanted, key=lambda entry: len(entry[0].encode()), reverse=True)


def _cut(text: str, specials: list[tuple[str, int]]) -> list[str | int]:
    """The text, with special tokens replaced by their ids; no empty parts.

    Earlier entries of `specials` are found first, from left to right; matches never overlap.
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
                # a match that starts before the end of this taken run would overlap it too
                end = taken.find(0, blocked)
            start = text.find(special, end) if end >= 0 else -1
    parts: list[str | int] = []
    done = 0
    for start, end, token_id in sorted(cuts):
        parts += (text[done:start], token_id)
        done = end
    parts.append(text[done:])
    return [part for part in parts if part != ""]


def _read_tokens(
    file: TypedMetadata, of_bytes: Sequence[str], cancelled: Callable[[], bool]
) -> tuple[StringArray, dict[str, int]]:
    """All tokens, and ids of those needed by name; for duplicates the last one. of_bytes: the byte
    tokens, all of which are required."""
    key = "tokenizer.ggml.tokens"
    tokens = StringArray.of(file.strs(key))
    check_cancelled(cancelled)
    longest = tokens.longest
    if longest > MAX_TOKEN_LENGTH and (longest := max(map(len, tokens))) > MAX_TOKEN_LENGTH:
        what = f"a token of {longest:,} characters, more than {MAX_TOKEN_LENGTH:,}"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    ids = {tokens[i]: i for i in tokens.places({*of_bytes, *_END_TEXTS})}
    missing = [byte for byte, text in enumerate(of_bytes) if text not in ids]
    if missing:
        what = f"no token for byte 0x{missing[0]:02X} among {len(tokens):,}"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    return tokens, ids


def _read_types(file: TypedMetadata, n_vocab: int) -> bytes:
    key = "tokenizer.ggml.token_type"
    types = np.array(file.ints(key, [int(TokenType.NORMAL)] * n_vocab))
    if len(types) != n_vocab:
        what = f"{len(types):,} types for {n_vocab:,} tokens"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    if (unknown := types[(types < min(TokenType)) | (types > max(TokenType))]).size:
        what = f"{unknown.min()} is not a token type"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    return types.astype(np.uint8).tobytes()


def _read_scores(file: TypedMetadata, n_vocab: int) -> list[float]:
    key = "tokenizer.ggml.scores"
    scores = file.floats(key)
    if len(scores) != n_vocab:
        what = f"{len(scores):,} scores for {n_vocab:,} tokens"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    return scores


def _kept(
    file: TypedMetadata,
    n_vocab: int,
    *,
    bos: int | None = None,
    eos: int | None = None,
    add_bos: bool,
) -> dict[str, Any]:
    """Special tokens from a file; bos, eos, add_bos: defaults."""
    return {
        "bos_id": _read_id(file, "bos_token_id", n_vocab, bos),
        "eos_id": _read_id(file, "eos_token_id", n_vocab, eos),
        "eot_id": _read_id(file, "eot_token_id", n_vocab),
        "pad_id": _read_id(file, "padding_token_id", n_vocab),
        "add_bos": file.bool_("tokenizer.ggml.add_bos_token", add_bos),
        "add_eos": file.bool_("tokenizer.ggml.add_eos_token", False),
    }


def _read_id(
    file: TypedMetadata, name: str, n_vocab: int, default: int | None = None
) -> int | None:
    key = f"tokenizer.ggml.{name}"
    token_id = file.int_(key, default)
    if token_id is None:
        return None
    if not 0 <= token_id < n_vocab:
        what = f"{token_id} is outside the vocabulary of {n_vocab:,} tokens"
        raise ModelFileError(file.path, f"key {key}", what, _REMEDY)
    return token_id
