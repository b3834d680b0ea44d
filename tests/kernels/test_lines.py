"""Lines of a text, against regular expressions."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import numpy as np
import pytest

from kernels.lines import CUT, scanned


@pytest.mark.parametrize("seed", range(4))
def test_lines_numbers_and_shapes(seed: int) -> None:
    source = random.Random(seed)
    parts = [b"1", b"23", b"000", b"99999999999999999999", b" ", b"a", b"\n", b"\xc3\xa9", b"\n\n"]
    data = b"".join(source.choices(parts, k=4000)) + b"7\n"
    found = scanned(data)
    lines = data.split(b"\n")[:-1]
    ends = np.cumsum([len(one) + 1 for one in lines]) - 1
    assert found.ends.tolist() == ends.tolist()
    shapes = [re.sub(rb"[0-9]+", b"0", one) for one in lines]
    known = list(dict.fromkeys(shapes))
    assert found.shape_of.tolist() == [known.index(one) for one in shapes]
    assert found.first_of.tolist() == [shapes.index(one) for one in known]
    assert len(set(found.hashes.tolist())) == len(known)
    numbers = list(re.finditer(rb"[0-9]+", data))
    spans = zip(found.stops - found.lengths, found.stops, strict=True)
    assert list(spans) == [one.span() for one in numbers]
    values = np.array([int(one[0]) % 2**64 for one in numbers], np.uint64).astype(np.int64)
    assert (found.values == values).all()
    begins = [0, *(ends[:-1] + 1)]
    assert found.first.tolist() == np.searchsorted(found.stops, begins).tolist()


def test_hashes_of_shapes_are_the_same_in_every_text() -> None:
    one, other = scanned(b"a 1\nb 22\n"), scanned(b"b 333\nc\na 4\n")
    assert one.hashes.tolist() == [other.hashes.tolist()[i] for i in (2, 0)]


def alike(line: bytes) -> bytes:
    """What lines of one shape have in common."""
    head, _, rest = line.partition(b" '")
    found = re.fullmatch(rb"([^'0-9\\\\\x1b]+)'((?:[\"\\\\][^']*)?)", rest)
    if found and re.search(rb"draft candidate|next token:", head[-95:]):
        line = head + b" 'x'" + found[2]
    return re.sub(rb"[0-9]+", b"0", line)


@pytest.mark.parametrize("seed", range(4))
def test_texts_of_tokens_are_alike(seed: int) -> None:
    source = random.Random(seed)
    heads = [b"next token: ", b"draft candidate  0, pos 1: ", b"text token: ", b"draft candidates"]
    parts = [
        *heads,
        b" '",
        b"'",
        b"'",
        b"abc",
        b" of",
        b"7",
        b"\\n",
        b"\x1b",
        b'"}',
        b"\xc3\xa9",
        b"x",
    ]
    lines = [
        source.choice(heads) + b" '" + b"".join(source.choices(parts, k=source.randrange(5)))
        for _ in range(6000)
    ]
    found = scanned(b"".join(one + b"\n" for one in lines))
    shapes = [alike(one) for one in lines]
    known = list(dict.fromkeys(shapes))
    assert found.shape_of.tolist() == [known.index(one) for one in shapes]
    assert len(known) < len({re.sub(rb"[0-9]+", b"0", one) for one in lines}) - 30


def test_words_that_end_differently_are_not_alike() -> None:
    lines = [b"abcdefg\x07", b"abcdefg", b"abcdefg\x071", b"abcdefg1", b"", b"\0", b"\0\0"]
    assert len(scanned(b"\n".join([*lines, b""])).hashes) == len(lines)


def test_objects_that_a_server_sends_are_alike() -> None:
    chunk = b"1 D http: streamed chunk: data: "
    lines = [
        chunk + b'{"a": 1}',
        chunk + b"{'b': 22} 3",
        chunk + b"[1]",
        b"2 D x" + chunk[3:] + b"{",
    ]
    lines += [b"streamed chunk: data: {1}", b"", chunk + b"{", b"5 {", b"{"]
    found = scanned(b"\n".join([*lines, b""]), cuts=True)
    assert found.shape_of.tolist() == [0, 0, 1, 2, 3, 4, 0, 5, 6]
    assert [one & CUT for one in found.hashes.tolist()] == [CUT, 0, CUT, 0, 0, 0, 0]
    assert found.values.tolist() == [1, 1, 1, 1, 2, 1, 1, 5]
    assert len(scanned(b"\n".join([*lines, b""])).hashes) == len(lines)


def test_nothing() -> None:
    assert len(scanned(b"").ends) == 0
    assert scanned(b"\n\n").shape_of.tolist() == [0, 0]


def test_torch_is_not_loaded() -> None:
    code = "import sys, kernels.lines as a; a.scanned(b'1\\n'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
