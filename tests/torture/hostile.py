"""Words that a terminal would obey, or show as something else, and files that hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.cli.run_arguments import styled
from engine.gguf.pretokenise import BYTE_CHARACTERS
from engine.trace.records import TOKEN_KINDS
from tests.support.gguf_writer import value
from tests.torture.gguf_parts import Parts, parts_of

MODEL = "qwen35-c-v2x-mtp-f32"
WORDS = {
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://x\x1b\\here\x1b]8;;\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "conceal": "\x1b[8m",
    "c1": "\x9b2J\x9d0;x\x9c",
    "bidi": "\u202eabc\u202c\u2066\u2069",
    "marks": "\u200e\u200f\u061c",
    "return": "good\rbad",
    "back": "abc\b\b\bx",
    "bell": "\a\x0e\x0f",
    "feed": "\v\f",
    "delete": "\x7f",
    "next line": "\x85",
    "separators": "\u2028\u2029",
    "tags": "\U000e0041\U000e007f",
    "surrogate": "\udcff\ud800",
    "null": "\0",
    "lines": "\ndraftscope: error: forged\n",
}
_STYLES = "|".join(style for kind in TOKEN_KINDS if (style := styled("", kind)[1]))
OURS = re.compile(rf"\x1b\[(?:0|3[0-7]|90|{_STYLES})m|\r\x1b\[K")
"""What the program itself says to a terminal."""
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def obeyed(text: str) -> str:
    """The first forbidden character, and text that it is in, escaped; empty if there is none."""
    found = _FORBIDDEN.search(text)
    if found is None:
        return ""
    return f"U+{ord(found[0]):04X} in {text[max(0, found.start() - 40) : found.end() + 40]!a}"


def word_of(names: Sequence[str], carrier: str) -> str:
    """Words together, as what is to carry them can: no NUL in names and options, no slash in
    names, nothing but UTF-8 in files."""
    word = "".join(WORDS[name] for name in names)
    if carrier != "text":
        word = word.replace("\0", "")
    if carrier == "name":
        word = word.replace("/", "")
        return word.encode("utf-8", "surrogatepass")[:120].decode("utf-8", "surrogateescape")
    if carrier == "option":
        return word.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    return word.encode("utf-8", "replace").decode()


def model_with(word: str, places: Sequence[str], path: Path) -> Path:
    """A model whose metadata, tensors' names or tokens hold a word."""
    parts = parts_of(MODEL).copy()
    for place in places:
        _PLACES[place](parts, word)
    path.write_bytes(parts.bytes())
    return path


def _set(parts: Parts, key: str, item: Any) -> None:
    parts.metadata = [pair for pair in parts.metadata if pair[0] != key] + [(key, value(item))]


def _tokens(parts: Parts, word: str, *, as_bytes: bool) -> None:
    """Tokens that no merge makes hold the word; those of single bytes stay."""
    said = dict(parts.metadata)["tokenizer.ggml.tokens"].payload[12:]
    tokens = []
    while said:
        n = int.from_bytes(said[:8], "little")
        tokens.append(said[8 : 8 + n].decode())
        said = said[8 + n :]
    if as_bytes:
        word = "".join(BYTE_CHARACTERS[byte] for byte in word.encode())
    n_bytes = len(BYTE_CHARACTERS)
    hold = [f"{i}{word}" if i >= n_bytes and i % 2 else t for i, t in enumerate(tokens)]
    hold[-8:] = tokens[-8:]
    _set(parts, "tokenizer.ggml.tokens", hold)
    _set(parts, "tokenizer.ggml.merges", ["Ġ t"] if "Ġt" in hold else [])


_PLACES: dict[str, Any] = {
    "name": lambda parts, word: _set(parts, "general.name", f"n{word}"),
    "key": lambda parts, word: _set(parts, f"own.{word}", f"v{word}"),
    "list": lambda parts, word: _set(parts, "own.list", [word, "b"]),
    "architecture": lambda parts, word: _set(parts, "general.architecture", f"qwen35{word}"),
    "template": lambda parts, word: _set(
        parts, "tokenizer.chat_template", f"{word}{{{{ messages[0]['content'] }}}}"
    ),
    "broken template": lambda parts, word: _set(
        parts, "tokenizer.chat_template", f"{{{{ raise_exception('{word}') }}}}"
    ),
    "pre": lambda parts, word: _set(parts, "tokenizer.ggml.pre", f"x{word}"),
    "tensor": lambda parts, word: parts.tensors.append(
        type(parts.tensors[0])(f"own.{word}".encode(), (4,), bytes(16))
    ),
    "renamed tensor": lambda parts, word: parts.tensors.__setitem__(
        5, type(parts.tensors[5])(f"own.{word}".encode(), (4,), bytes(16))
    ),
    "tokens": lambda parts, word: _tokens(parts, word, as_bytes=False),
    "bytes": lambda parts, word: _tokens(parts, word, as_bytes=True),
}
PLACES = tuple(_PLACES)


def with_word(said: Any, word: str, every: int) -> Any:
    """JSON with a word in every few of its strings, keys among them."""
    n = 0

    def changed(item: Any) -> Any:
        nonlocal n
        if isinstance(item, dict):
            return {key: changed(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [changed(inner) for inner in item]
        if isinstance(item, str):
            n += 1
            return item + word if n % every == 0 else item
        return item

    return changed(json.loads(json.dumps(said)))
