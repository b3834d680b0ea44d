"""Training text: Python's own library, the installed dependencies, the texts of our grammars."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tests.demo_training.texts.generator import texts
from tests.demo_training.tokenizer import EOT, entries

# installed with torch, numpy, pyqtgraph, gguf and jinja2, or with Python itself
PACKAGES = (
    "jinja2",
    "networkx",
    "numpy",
    "packaging",
    "pip",
    "pyqtgraph",
    "setuptools",
    "sympy",
    "torch",
    "mpmath",
    "fsspec",
    "filelock",
    "gguf",
    "yaml",
    "requests",
    "tqdm",
)
MAX_PACKAGE_CHARS = 2_000_000
GROUPS = ("library", "packages", "tests", "texts")
N_TEXTS = 20_000
_GOLDEN, _SILVER = 0.6180339887498949, 0.4142135623730951


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of the corpus."""

    group: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """True for the files never trained on: one in 25, by a hash of the name."""
        return _hash(self.name) % 25 == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_suitable(text: str) -> bool:
    """True for program text; False for tables, generated files and repeated lines."""
    if not 400 <= len(text) <= 120_000 or "\t" in text or "def " not in text:
        return False
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    long = [line for line in lines if len(line) > 12]
    if not long or max(map(len, lines)) > 300:
        return False
    digits = sum(character.isdigit() for character in text)
    other = sum(ord(character) > 126 for character in text)
    distinct = len(set(long)) / len(long)
    return distinct >= 0.7 and digits <= 0.06 * len(text) and other <= 0.01 * len(text)


def _candidates() -> Iterator[tuple[str, str, Path]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if parts[0] in ("site-packages", "dist-packages", "encodings", "pydoc_data", "ensurepip"):
            continue
        tests = {"test", "tests", "idle_test"}.intersection(parts)
        yield "tests" if tests else "library", "/".join(parts), path
    site = Path(sysconfig.get_paths()["purelib"])
    for package in PACKAGES:
        paths = sorted((site / package).rglob("*.py"))
        named = sorted((_hash(str(p.relative_to(site))), p) for p in paths)
        size = 0
        for _, path in named:
            size += path.stat().st_size
            if size > MAX_PACKAGE_CHARS:
                break
            parts = path.relative_to(site).parts
            if not {"test", "tests", "testing", "lexers", "styles"}.intersection(parts):
                yield "packages", "/".join(parts), path


def read_sources() -> list[CorpusFile]:
    """All suitable files, each text once."""
    sources = []
    seen: set[int] = set()
    for group, name, path in _candidates():
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            continue
        key = _hash(" ".join(text.split()))
        if key not in seen and is_suitable(text):
            seen.add(key)
            sources.append(CorpusFile(group, name, text))
    return sources


def generated(n: int = N_TEXTS, seed: int = 1) -> list[CorpusFile]:
    """The group "texts": the first n that the grammars write."""
    found = islice(texts(seed), n)
    return [CorpusFile("texts", f"text {i}", text) for i, text in enumerate(found)]


class Stream:
    """The tokens of one group of files, each file ended by end-of-text."""

    def __init__(self, documents: Sequence[Sequence[int]], newline: np.ndarray | None) -> None:
        """`newline` [V] is True for tokens that end a line; None: windows begin with a document."""
        ids: list[int] = []
        for document in documents:
            ids.extend(document)
            ids.append(EOT)
        self.ids = np.array(ids, dtype=np.uint16)
        ends = self.ids == EOT
        if newline is not None:
            ends |= newline[self.ids]
        self.line_starts = np.concatenate([[0], np.flatnonzero(ends)[:-1] + 1])

    def window(self, index: int, length: int) -> np.ndarray:
        """Window number `index` of `length` tokens, beginning where one may, int64.

        Multiples of the golden ratio spread the windows evenly over the stream without any
        state to save, so that a resumed run sees what an unbroken one would have seen.
        """
        last = len(self.ids) - length
        if last < 0:
            raise ValueError(f"a stream of {len(self.ids)} tokens has no window of {length}")
        wanted = int((index * _GOLDEN) % 1.0 * (last + 1))
        at = int(np.searchsorted(self.line_starts, wanted, side="right")) - 1
        start = int(self.line_starts[at])
        return self.ids[start : start + length].astype(np.int64)


def newline_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """[V] True where the token's text ends in a line feed."""
    return np.array([text.endswith("Ċ") for text in entries(tokenizer)])


def layout_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """[V] True where the token ends a line or is white space only."""
    space = set("ĠĊĉč")
    return np.array([t.endswith("Ċ") or set(t) <= space for t in entries(tokenizer)])


def _parts(source: CorpusFile) -> tuple[str, str]:
    """The text in two parts that are encoded apart.

    Most generated texts are cut at the end of a line, half of these the first line: a prompt ends
    there, and what follows it begins with a line feed that elsewhere belongs to the token before.
    """
    text, key = source.text, _hash(source.name) // 25
    ends = [i for i, character in enumerate(text) if character == "\n"]
    if source.group != "texts" or not ends or key % 5 == 0:
        return text, ""
    at = ends[0 if key % 5 < 3 else key // 5 % len(ends)]
    return text[:at], text[at:]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised training streams and held-out documents by group."""

    train: dict[str, Stream]
    held_out: dict[str, list[np.ndarray]]

    @classmethod
    def build(cls, sources: Sequence[CorpusFile], tokenizer: Tokenizer) -> Corpus:
        """Tokenise `sources`; groups without a training file are left out."""
        newline = newline_tokens(tokenizer)
        train: dict[str, Stream] = {}
        held_out: dict[str, list[np.ndarray]] = {}
        for group in GROUPS:
            chosen = [s for s in sources if s.group == group]
            halves = [
                tokenizer.encode_batch(list(h)) for h in zip(*map(_parts, chosen), strict=True)
            ]
            encoded = [[i for half in halves for i in half[n].ids] for n in range(len(chosen))]
            kept = [ids for ids, s in zip(encoded, chosen, strict=True) if not s.held_out]
            held = [ids for ids, s in zip(encoded, chosen, strict=True) if s.held_out]
            if kept:
                # a text is learned from its beginning, where it will be asked for
                train[group] = Stream(kept, None if group == "texts" else newline)
            held_out[group] = [np.array(ids, dtype=np.int64) for ids in held]
        return cls(train, held_out)

    def batch(self, step: int, shares: dict[str, int], rows: int, length: int) -> np.ndarray:
        """Rows [rows, length] for step number `step`, groups in proportion to `shares`.

        `shares` counts sixteenths of a batch; groups that are absent give way to the library.
        """
        windows = []
        order = [g for group, n in shares.items() for g in [group] * n]
        for row in range(rows):
            number = step * rows + row
            # a step that takes every other row must not always find the same groups
            group = order[int(number * _SILVER % 1.0 * len(order))]
            if group not in self.train:
                group = GROUPS[0]
            windows.append(self.train[group].window(number, length))
        return np.stack(windows)
