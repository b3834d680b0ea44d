"""Texts inside of what other programs make of them: several files, exports, spanned cells."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import TraceFileError
from engine.files import shown_files
from engine.observe.files.records import recognise
from tests.engine.observe.files.pasted_text import imported, read, sums

LINES = """slot print_timing: id  0 | task 3 |        eval time =    4000.00 ms /   {n} tokens
slot print_timing: id  0 | task 3 | draft acceptance = {rate} (  {a} accepted /   200 generated)
"""
FIRST, SECOND = LINES.format(n=200, rate=0.6, a=120), LINES.format(n=240, rate=0.45, a=90)
SECOND = SECOND.replace("4000.00", "4800.00")
COUNTS = [(200, None, 200, 120), (240, None, 200, 90)]


def test_files_that_tail_has_shown_are_runs_of_their_own(tmp_path: Path) -> None:
    *begin, last = SECOND.splitlines(keepends=True)
    text = (
        f"==> a.log <==\n{FIRST}\n==> b.log <==\n{begin[0]}\n==> a.log <==\n\n==> b.log <==\n{last}"
    )
    store = read(text, tmp_path)
    told = [store.runs[run]["requests"][0]["told"] for run in (0, 1)]
    names = "predicted_n", "num_spec_steps", "draft_n", "draft_n_accepted"
    assert [tuple(one.get(name) for name in names) for one in told] == COUNTS


@pytest.mark.parametrize("name", ["..", ".", "/", " ", "日" * 66, "x" * 200])
def test_any_name_of_a_shown_file(tmp_path: Path, name: str) -> None:
    assert sums(read(f"==> {name} <==\n{FIRST}", tmp_path)) == COUNTS[:1]


def test_many_shown_files_are_not_opened_each(tmp_path: Path) -> None:
    text = "".join(f"==> {i}.log <==\nx\n" for i in range(5000))
    with pytest.raises(TraceFileError, match="has more than 1,024 files"):
        read(text, tmp_path)
    # what is added to is not copied each time
    data = b"==> a <==\n" + (b"x" * 99 + b"\n==> b <==\n\n==> a <==\n") * 60_000
    start = time.process_time()
    assert [len(content) for _, content in shown_files(data, "x", TraceFileError)] == [6e6, 6e4]
    assert time.process_time() - start < 2


def test_shown_files_inside_of_a_shown_one_are_not_opened(tmp_path: Path) -> None:
    text = "\n".join(f"{'> ' * i}==> {i}.log <==" for i in range(400))
    with pytest.raises(TraceFileError, match="is itself an archive of several files"):
        read(f"{text}\n", tmp_path)


def test_a_second_time_of_an_answer_is_another_request(tmp_path: Path) -> None:
    assert sums(read(FIRST + SECOND, tmp_path)) == COUNTS
    assert sums(read(FIRST + FIRST, tmp_path)) == COUNTS[:1]  # copied twice


def test_lines_in_messages_of_a_chat(tmp_path: Path) -> None:
    export = [
        {"type": "message", "user": "U1", "text": f"got:\n```{FIRST}```", "ts": "1764500000.1"}
    ]
    assert sums(imported(tmp_path, json.dumps(export))) == COUNTS[:1]


def test_series_with_their_times_apart(tmp_path: Path) -> None:
    def line(name: str, *values: int) -> str:
        labels = {"__name__": f"vllm:spec_decode_num_{name}_total", "model_name": "q"}
        one = {"metric": labels, "values": values, "timestamps": [1764500000000] * len(values)}
        return json.dumps(one) + "\n"

    text = line("drafts", 100, 400) + line("draft_tokens", 300, 1200) + line("accepted_tokens", 640)
    assert sums(read(text, tmp_path)) == [(None, 400, 1200, 640)]


def test_a_long_series_is_read_once() -> None:
    labels = b'{"metric":{"__name__":"vllm:spec_decode_num_drafts_total"},"values":['
    start = time.process_time()
    recognise(labels + b'1],"timestamps"' * 130_000 + b"x")
    assert recognise(labels + b"1 " * (1 << 20) + b"]}") == "prometheus"
    assert time.process_time() - start < 4


def _cells(*cells: str, head: str = "td") -> str:
    return "<tr>" + "".join(f"<{head}>{one}</{head}>" for one in cells) + "</tr>"


def test_cells_of_several_columns_and_rows(tmp_path: Path) -> None:
    above = '<tr><th rowspan="2">Prompt</th><th colspan=2>n=1</th><th colspan="2">n=3</th></tr>'
    below = _cells("tok/s", "acceptance", "tok/s", "acceptance", head="th")
    body = _cells("code", "44.0", "91%", "58.1", "81%")
    store = read(f"<table><thead>{above}{below}</thead><tbody>{body}</tbody></table>", tmp_path)
    found: list[tuple[Any, ...]] = [
        (one["place"], one["told"]["predicted_per_second"], one["told"]["draft_acceptance_rate"])
        for one in store.runs[0]["requests"]
    ]
    assert found == [("code, n=1", 44.0, 0.91), ("code, n=3", 58.1, 0.81)]


@pytest.mark.parametrize("kind", ["i64", "f64"])
def test_a_frame_of_polars(tmp_path: Path, kind: str) -> None:
    frame = f"""shape: (2, 3)
┌────────┬─────────┬──────────┐
│ config ┆ drafted ┆ accepted │
│ ---    ┆ ---     ┆ ---      │
│ str    ┆ {kind}     ┆ i64      │
╞════════╪═════════╪══════════╡
│ mtp-1  ┆ 200     ┆ 120      │
│ mtp-3  ┆ 200     ┆ 90       │
└────────┴─────────┴──────────┘
"""
    assert sums(read(frame, tmp_path)) == [(None, *one[1:]) for one in COUNTS]


def test_bars_as_entities_of_a_page(tmp_path: Path) -> None:
    page = f"<div><pre>{FIRST.replace('|', '&#124;')}</pre></div>"
    assert sums(read(page, tmp_path)) == COUNTS[:1]


def test_a_record_after_a_line_of_tensorrt_llm(tmp_path: Path) -> None:
    counts = {"total_accepted_draft_tokens": 30, "total_draft_tokens": 60}
    record = {"request_id": 1, "perf_metrics": {"speculative_decoding": counts}}
    text = f"[11/30/2026-10:00:01] [TRT-LLM] [I] finished\n{json.dumps(record)}\n"
    assert sums(imported(tmp_path, text)) == [(None, None, 60, 30)]
