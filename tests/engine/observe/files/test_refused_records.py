"""Records that are none, that are too large, or that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import TraceFileError
from engine.observe.files.importing import import_file
from engine.observe.files.records import NAMES, fill, recognise
from engine.trace.export import export_csv
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.engine.observe.files.record_files import (
    DRAFTS,
    EVERY,
    RECORDS,
    as_bytes,
    at,
    filled,
    numbers,
)


def refused(data: bytes | Any) -> TraceFileError:
    store = TraceStore()
    with pytest.raises(TraceFileError) as caught:
        fill(store, data if isinstance(data, bytes) else as_bytes(data), "file.json")
    error = caught.value
    assert not store.runs and not store.size()
    assert "file.json" in error.message and error.message.endswith(".") and error.remedy
    assert len(error.message) < 400
    return error


def test_our_own_figures_are_no_records_of_others(tmp_path: Path) -> None:
    store = filled("vllm-detailed-stream.json")
    export_csv(store, tmp_path / "trace")
    session = json.loads((tmp_path / "trace" / "session.json").read_bytes())
    (facts,) = session["runs"].values()
    figures = as_bytes({"runs": [{"summary": facts["summary"]}]})
    assert recognise(figures) is None
    assert "none of the keys" in refused(figures).message


def test_values_that_grafana_has_rounded_are_named() -> None:
    head = "Time,vllm:spec_decode_num_drafts_total"
    error = refused(f"{head}\n2026-11-20 14:00:00,1.2 K\n2026-11-20 14:05:00,1.3 K\n".encode())
    assert "'1.3 K'" in error.message and "Formatted data" in error.remedy


def test_keys_of_two_engines_ask_which() -> None:
    both = {"spec_verify_ct": 12, "inner": {"total_accepted_draft_tokens": 16}}
    error = refused(both)
    assert "SGLang (spec_verify_ct)" in error.message
    assert "TensorRT-LLM (total_accepted_draft_tokens in inner)" in error.message
    assert "--as sglang or --as tensorrt-llm" in error.remedy
    store = filled("both", as_bytes(both), name="tensorrt-llm")
    assert store.runs[0]["source"]["engine"] == "tensorrt-llm"


@pytest.mark.parametrize(
    "change",
    [
        {"num_spec_steps": "12"},
        {"num_spec_steps": 12.0},
        {"num_spec_steps": True},
        {"num_spec_steps": -1},
        {"num_spec_steps": 2**31},
        {"num_spec_steps": 10**19},
        {"mean_acceptance_length": "long"},
        {"mean_acceptance_length": -0.5},
        {"acceptance_histogram": 12},
        {"acceptance_histogram": [1] * 1026},
        {"acceptance_histogram": {"1000000000": 1}},
        {"acceptance_histogram": {"-1": 1}},
        {"acceptance_histogram": {"01": 1}},
        {"acceptance_histogram": {"1": None, "2": []}},
        {"acceptance_histogram_by_draft_length": []},
        {"acceptance_histogram_by_draft_length": {"1025": [1]}},
        {"per_step_accepted": {"0": 1}},
        {"per_step_accepted": [1, None]},
        {"per_step_drafted": [1025]},
    ],
    ids=str,
)
def test_a_known_key_of_another_type_is_named(change: dict[str, Any]) -> None:
    body = json.loads((RECORDS / "vllm-summary.json").read_bytes())["body"]
    body["metrics"]["speculative_decoding"] |= change
    (key,) = change
    assert f"metrics.speculative_decoding.{key}" in refused(body).message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"   \n \n", "empty"),
        (b"<html>", "line 1 is not valid JSON"),
        (b'{"a": 1', "line 1 is not valid JSON"),
        (b'{"spec_verify_ct": 1}\n{"spec_verify_ct": }\n', "line 2 is not valid JSON"),
        (b'{"spec_verify_ct": NaN}', "NaN is not a number"),
        (b'{"spec_verify_ct": 1, "spec_accept_length": 1e999}', "1e999 is beyond the range"),
        (b'{"spec_verify_ct": -Infinity}', "-Infinity is not a number"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested more than 48 times"),
        (b"[" * 200_000, "nested more than 48 times"),
        (b'data: {"spec_verify_ct": \n\n', "the event before line 2"),
        (b"data: " + b'{"a":' * 100 + b"1" + b"}" * 100 + b"\n\n", "nested"),
        (b"{}", "none of the keys"),
        (b"[1, 2, 3]", "none of the keys"),
        (b'"spec_verify_ct"', "none of the keys"),
    ],
)
def test_what_is_no_record_is_refused_in_one_sentence(data: bytes, said: str) -> None:
    assert said in refused(data).message


def test_sizes_are_checked_before_rows_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.observe.files.records.document.MOST_BYTES", 100)
    assert "more than 100 bytes" in refused(b" " * 101).message
    monkeypatch.undo()
    monkeypatch.setattr("engine.foreign.MOST_OBJECTS", 3)
    monkeypatch.setattr("engine.observe.files.records.document.MOST_VALUES", 4 * 3 - 1)
    assert "more than 3 objects" in refused(b"[{}, {}, {}]").message
    monkeypatch.undo()
    monkeypatch.setattr("engine.observe.files.records.document.MOST_STEPS", 11)
    error = refused((RECORDS / "aiperf-record.json").read_bytes())
    assert "per_step_accepted" in error.message and "at most 11" in error.message
    monkeypatch.undo()
    monkeypatch.setattr("engine.observe.files.records.writing.MOST_STEPS", 11)
    record = (RECORDS / "aiperf-record.json").read_bytes()
    assert "more than 11 steps" in refused(record).message
    monkeypatch.undo()
    monkeypatch.setattr("engine.observe.files.records.writing._MOST_FACTS", 100)
    assert "more than 100 bytes about its requests" in refused(record).message
    monkeypatch.undo()
    monkeypatch.setattr("engine.observe.files.records.writing.MOST_REQUESTS", 1)
    one = as_bytes({"spec_verify_ct": 1}) + b"\n"
    assert "more than 1 requests" in refused(one * 2).message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('vllm:spec_decode_num_drafts_total{engine="0"} NaN', "not a whole number"),
        ('vllm:spec_decode_num_drafts_total{engine="0"} -1', "not a whole number"),
        ('vllm:spec_decode_num_drafts_total{engine="0"} 1e300', "not a whole number"),
        ('vllm:spec_decode_num_drafts_total{engine="0"} 1.5', "not a whole number"),
        ('vllm:spec_decode_num_drafts_total{engine="0} 1', "Prometheus"),
        ("vllm:spec_decode_num_drafts_total 1\nvllm:spec_decode_num_drafts_total{} many", "Prom"),
        (
            f'{DRAFTS} 1\nvllm:spec_decode_num_accepted_tokens_per_pos{{position="99999"}} 1',
            "is not a draft position",
        ),
    ],
)
def test_counters_that_cannot_be_are_refused(line: str, said: str) -> None:
    assert said in refused(line.encode() + b"\n").message


def test_positions_that_accepted_more_than_was_drafted_make_no_histogram() -> None:
    """It would hold a negative count, and no trace opens with one."""
    text = (RECORDS / "spec-bench.jsonl").read_text().replace('"num_drafts": 4', '"num_drafts": 0')
    runs = filled("none", text.encode()).runs.values()
    told = [one["told"] for run in runs for one in run["requests"] if one["told"]]
    histograms = [one["acceptance_histogram"] for one in told if one["num_spec_steps"] == 0]
    assert histograms and not any(histograms)


@settings(max_examples=80)
@given(st.data())
def test_whatever_a_file_holds_it_is_read_or_refused(data: st.DataObject) -> None:
    """Values of any type anywhere in a record, and bytes cut or changed anywhere."""
    name = data.draw(st.sampled_from(sorted(EVERY)))
    raw = bytearray((RECORDS / name).read_bytes())
    if name.endswith((".json", ".jsonl")) and data.draw(st.booleans()):
        document = json.loads(bytes(raw))
        path = data.draw(st.sampled_from(sorted(numbers(document), key=str)))
        at(document, path[:-1])[path[-1]] = data.draw(
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                max_leaves=5,
            )
        )
        raw = bytearray(as_bytes(document))
    else:
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    store = TraceStore()
    try:
        fill(store, bytes(raw), "file")
    except TraceFileError:
        assert not store.runs
    else:
        summary(store, 0)
    recognise(bytes(raw))
    assert set(EVERY.values()) <= set(NAMES)


def test_answers_of_a_benchmark_are_no_replies(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer = {"index": 0, "turns": ["x"], "new_tokens": [30], "wall_time": [0.5]}
    path.write_text(
        "".join(json.dumps({"question_id": i, "choices": [answer]}) + "\n" for i in "ab")
    )
    with pytest.raises(TraceFileError, match="none of the keys of a known engine's records"):
        import_file(TraceStore(), path)
