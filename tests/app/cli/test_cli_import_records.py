"""`draftscope import` of other engines' records, from files to the trace and out of it again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.trace.reopen import open_trace

Cli = Callable[..., Any]
RECORDS = Path(__file__).parents[2] / "data" / "records"
FILES = sorted(RECORDS.iterdir())


def test_every_record_is_a_run_of_one_trace(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("import", *FILES, "--trace", tmp_path / "trace")
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [path.name for path in FILES]
    printed = "1 request, 13 rounds, 29 tokens, 16 of 34 drafted accepted"
    assert lines[0].endswith(f": {printed}, 2 keys kept but not used")
    store = open_trace(tmp_path / "trace")
    assert [store.runs[i]["record"]["file"] for i in store.runs] == [path.name for path in FILES]
    assert not len(store.findings)


def test_two_scrapes_in_a_row_are_one_run(cli: Cli, tmp_path: Path) -> None:
    after = (RECORDS / "vllm-metrics.prom").read_text()
    text = after
    for old, new in ((" 12.0", " 9.0"), ("} 34.0", "} 25.0"), ("} 16.0", "} 7.0")):
        text = text.replace(old, new)
    for old, new in (('"0"} 8.0', '"0"} 5.0'), ('"1"} 5.0', '"1"} 2.0'), ('"2"} 3.0', '"2"} 0.0')):
        text = text.replace(old, new)
    (before := tmp_path / "before").write_text(text)
    words = ["import", before, RECORDS / "vllm-metrics.prom", RECORDS / "vllm-summary.json"]
    figures = [run["summary"] for run in cli(*words, "--json").json["runs"]]
    assert [f["num_spec_steps"] for f in figures] == [3, 12]
    assert [f["draft_n_accepted"] for f in figures] == [9, 16]
    assert cli(*words).out.startswith("before, vllm-metrics.prom: ")


def test_keys_at_the_end_of_a_long_or_packed_file_are_found(cli: Cli, tmp_path: Path) -> None:
    stream = json.loads((RECORDS / "vllm-detailed-stream.json").read_bytes())
    stream["request"]["messages"] = "long " * 40_000
    (path := tmp_path / "stream.gz").write_bytes(gzip.compress(json.dumps(stream).encode()))
    run = cli("import", path, "--json").json["runs"][0]
    assert "request" in run["unknown_keys"]
    assert run["rounds"] == 13 and run["source"]["engine"] == "vllm"


def test_what_contradicts_itself_or_is_of_two_engines_fails(cli: Cli, tmp_path: Path) -> None:
    record = json.loads((RECORDS / "aiperf-record.json").read_bytes())
    record["record"]["num_spec_steps"] = 11
    (wrong := tmp_path / "wrong").write_text(json.dumps(record))
    outcome = cli("import", wrong)
    assert outcome.status == 1 and "counters-contradict" in outcome.err
    assert "num_spec_steps" in outcome.err
    (both := tmp_path / "both").write_text(
        '{"spec_verify_ct": 3, "total_accepted_draft_tokens": 2}'
    )
    outcome = cli("import", both)
    assert outcome.status == 1 and "--as sglang or --as tensorrt-llm" in outcome.err
    assert cli("import", both, "--as", "sglang").status == 0
    outcome = cli("import", wrong, "--as", "lm-studio")
    assert outcome.status == 1 and "no records of LM Studio" in outcome.err


def test_a_request_without_sums_does_not_hide_those_of_others(cli: Cli, tmp_path: Path) -> None:
    head = 'time="2026-08-27T18:41:57Z" level=info msg="'
    lines = [
        "prompt eval time =     163.37 ms /    43 tokens (  3.80 ms per token, 263.21 per second)",
        "       eval time =    3002.64 ms /   148 tokens ( 20.29 ms per token,  49.29 per second)",
        "slot print_timing: id  0 | task 9 | draft acceptance = 0.75 (90 accepted / 120 generated)",
        "slot print_timing: id  0 | task 12 | n_gen =    100, tg =  20.33 t/s, tg_3s =  20.54 t/s",
    ]
    (log := tmp_path / "log").write_text("".join(f'{head}{one}" component=x\n' for one in lines))
    said = cli("import", log).out
    assert said.startswith("log: 3 requests") and "90 of 120 drafted accepted in 1 of 3" in said
    counters = ("num_drafts", 22), ("num_draft_tokens", 66), ("num_accepted_tokens", 10)
    rows = [f'vllm:spec_decode_{name}_total{{engine="0"}} | {n}' for name, n in counters]
    (table := tmp_path / "table").write_text("\n".join([rows[0], "-- | --", *rows[1:]]))
    outcome = cli("import", table)
    assert "10 of 66 drafted accepted" in outcome.out and not outcome.err
