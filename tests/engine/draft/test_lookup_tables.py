"""Lookup cache files: what llama.cpp writes is read, anything else is refused with its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft import lookup_tables
from engine.draft.lookup_tables import read_lookup_cache
from engine.errors import LookupCacheError

GOOD = [1, 2, -1, -1, 2, 3, 7, 4, 1, 5, -1, -1, -1, 1, 6, 2, 1, 2, 3, 4, 1, 5, 9]


def write(folder: Path, values: list[int], extra: bytes = b"") -> Path:
    path = folder / "lookup.bin"
    path.write_bytes(np.array(values, "<i4").tobytes() + extra)
    return path


def test_records_of_all_lengths(tmp_path: Path) -> None:
    table = read_lookup_cache(write(tmp_path, GOOD), 10)
    assert len(table) == 3
    assert table.find((1, 2)) == {3: 7, 4: 1}
    assert table.find((5,)) == {6: 2}
    assert table.find((1, 2, 3, 4)) == {5: 9}
    assert table.find((2, 1)) is None
    assert table.find((1, 2, -1, -1)) is None


def test_an_empty_file_knows_nothing(tmp_path: Path) -> None:
    assert len(read_lookup_cache(write(tmp_path, []), 10)) == 0


def test_the_first_of_two_records_or_counts_holds(tmp_path: Path) -> None:
    values = [1, -1, -1, -1, 2, 3, 7, 3, 1, 1, -1, -1, -1, 1, 5, 5]
    assert read_lookup_cache(write(tmp_path, values), 10).find((1,)) == {3: 7}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, -1], "byte 0: the file ends inside a record"),
        ([*GOOD, 1], "byte 92: the file ends inside a record"),
        ([-1, -1, -1, -1, 1, 3, 7], r"byte 0: \[-1, -1, -1, -1\] is no n-gram"),
        ([1, -1, 2, -1, 1, 3, 7], "is no n-gram"),
        ([1, -2, -1, -1, 1, 3, 7], "is no n-gram"),
        ([1, 10, -1, -1, 1, 3, 7], "token 10 is outside the vocabulary of 10"),
        ([1, 2, -1, -1, 0, 3, 7], "byte 0: 0 pairs do not fit the file"),
        ([1, 2, -1, -1, -3, 3, 7], "-3 pairs do not fit"),
        ([1, 2, -1, -1, 2, 3, 7], "2 pairs do not fit"),
        ([1, 2, -1, -1, 2**31 - 1, 3, 7], "pairs do not fit"),
        ([1, 2, -1, -1, 1, 3, 0], "byte 24: count 0 is below 1"),
        ([1, 2, -1, -1, 1, 3, -5], "count -5 is below 1"),
        ([1, 2, -1, -1, 1, 10, 1], "byte 20: token 10 is outside"),
        ([1, 2, -1, -1, 2, 3, 1, -1, 1], "byte 28: token -1 is outside"),
    ],
)
def test_refused_with_the_place(tmp_path: Path, values: list[int], message: str) -> None:
    with pytest.raises(LookupCacheError, match=message) as caught:
        read_lookup_cache(write(tmp_path, values), 10)
    assert caught.value.message.startswith("lookup.bin: byte ")
    assert "llama-lookup-create" in caught.value.remedy


def test_half_a_number_and_no_file_and_too_large_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LookupCacheError, match="ends inside a number"):
        read_lookup_cache(write(tmp_path, GOOD, b"\0\0"), 10)
    with pytest.raises(LookupCacheError, match="cannot be read: No such file"):
        read_lookup_cache(tmp_path / "none", 10)
    monkeypatch.setattr(lookup_tables, "_MAX_BYTES", 1 << 20)
    with pytest.raises(LookupCacheError, match=r"lookup\.bin is larger than 1 MiB"):
        read_lookup_cache(write(tmp_path, [0] * (1 << 19)), 10)


@given(st.lists(st.integers(-3, 11), max_size=40))
def test_any_file_is_read_or_refused(tmp_path_factory, values) -> None:
    path = write(tmp_path_factory.mktemp("fuzz"), values)
    try:
        table = read_lookup_cache(path, 10)
    except LookupCacheError:
        return
    for ngram in table._records:
        counts = table.find(ngram)
        assert counts and all(0 <= t < 10 and c > 0 for t, c in counts.items())
