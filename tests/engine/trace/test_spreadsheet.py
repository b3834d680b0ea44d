"""The variant for spreadsheets: nothing in it can run, and nothing is lost."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Cancelled, TraceFileError
from engine.trace.csv_fields import guard, unguard
from engine.trace.export import SESSION_FILE, export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore

DANGEROUS = ["=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "-2+3", "+1_0"]
SEPARATORS = (";", "\t", "|", "\u061b")
TEXTS = st.text(st.sampled_from("=+-@'\";|,\t\r\n\u061b＝ a1."), max_size=8) | st.text(max_size=5)


def fields_of(text: str, separator: str) -> list[str]:
    """Where a spreadsheet sees fields begin that splits at a separator, as leniently as any: a
    quoted field may go on after its closing quote."""
    fields, at = [""], 0
    begins = True
    while at < len(text):
        char = text[at]
        if begins and char == '"':
            end = at + 1
            while end < len(text) and (text[end] != '"' or text[end + 1 : end + 2] == '"'):
                end += 2 if text[end] == '"' else 1
            fields[-1] += text[at + 1 : end].replace('""', '"')
            at, begins = end + 1, False
            continue
        begins = char in (separator, "\r", "\n")
        if begins:
            fields.append("")
        else:
            fields[-1] += char
        at += 1
    return fields


def runs(field: str) -> bool:
    if not field.startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠")):
        return False
    try:
        float(field)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("cell", DANGEROUS)
def test_what_could_run_becomes_text(cell: str) -> None:
    (guarded,) = guard([cell])
    assert guarded.startswith("'" + cell[0])


@pytest.mark.parametrize(
    ("cell", "guarded"),
    [
        (";=1", ";'=1"),
        ("a|-b;+c", "a|'-b;'+c"),
        ("a;'=1", "a;''=1"),
        ('a;"=1"', 'a;\'"=1"'),
        ("a\n=1", "a\n'=1"),
        ("a; =1;b", "a; =1;b"),
    ],
)
def test_what_could_run_behind_a_separator_becomes_text(cell: str, guarded: str) -> None:
    assert guard([cell]) == [guarded]


@given(st.lists(TEXTS, min_size=1, max_size=3), st.sampled_from((",", *SEPARATORS)))
def test_nothing_runs_wherever_fields_end(cells: list[str], separator: str) -> None:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow([0, *guard(cells), 1])
    assert not any(runs(field) for field in fields_of(file.getvalue(), separator))


@pytest.mark.parametrize("cell", ["-1", "-1.5e-07", "a=1", "", " =1", "a,=1", 7, -3])
def test_the_rest_stays_as_it_is(cell: object) -> None:
    assert guard([cell]) == [cell]


@given(st.lists(TEXTS | st.sampled_from(DANGEROUS)))
def test_every_text_comes_back(cells: list[str]) -> None:
    assert unguard(guard(cells)) == cells


def test_a_trace_comes_back_and_holds_no_formula(small_trace: TraceStore, tmp_path: Path) -> None:
    small_trace.pieces[7] = b"=cmd|' /C calc'!A0"
    small_trace.tokens.append(run_id=0, round=3, seq_id=0, pos=10, kind="target", token_id=7)
    small_trace.findings.append(
        run_id=0, round=3, seq_id=0, rule="@x", severity="info", message="'quoted'", evidence="-a"
    )
    export_csv(small_trace, tmp_path / "t", excel_safe=True)
    for path in (tmp_path / "t").glob("*.csv"):
        assert path.read_bytes().startswith(b"\xef\xbb\xbf")
        with path.open(encoding="utf-8-sig", newline="") as file:
            for row in csv.reader(file):
                for cell in row:
                    assert not cell.startswith(("=", "+", "@", "\t", "\r"))
                    assert not cell.startswith("-") or float(cell) < 0
    again = open_trace(tmp_path / "t")
    assert again.findings.texts("message")[-1] == "'quoted'"
    assert again.findings.texts("evidence")[-1] == "-a"
    assert again.findings.texts("rule")[-1] == "@x"
    assert again.pieces == small_trace.pieces
    export_csv(small_trace, tmp_path / "plain")
    export_csv(again, tmp_path / "again")
    for path in (tmp_path / "plain").glob("*.csv"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_an_unknown_variant_is_refused(small_trace: TraceStore, tmp_path: Path) -> None:
    export_csv(small_trace, tmp_path / "t")
    session = tmp_path / "t" / SESSION_FILE
    session.write_text(session.read_text().replace('"plain"', '"fancy"'))
    with pytest.raises(TraceFileError, match="fancy"):
        open_trace(tmp_path / "t")


def test_reading_tells_its_progress_and_can_be_cancelled(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    export_csv(small_trace, tmp_path / "t")
    seen: list[tuple[int, int, str]] = []
    open_trace(tmp_path / "t", progress=lambda *step: seen.append(step))
    assert seen[-1][:2] == (small_trace.size(), small_trace.size())
    assert seen[0][2] == "reading rounds.csv"
    with pytest.raises(Cancelled):
        open_trace(tmp_path / "t", cancelled=lambda: True)
