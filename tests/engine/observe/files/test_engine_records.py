"""Records of other engines: recognised by keys, read with their counts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.observe.files.importing import import_file
from engine.observe.files.records import recognise
from engine.observe.files.records.aiperf import acceptance_records
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.engine.observe.files.record_files import EVERY, RECORDS, STEPS, as_bytes, filled, words
from tests.support.scripted_replies import read_capture

NO_HISTOGRAM = (
    "aiperf-summary.csv",
    "benchmark.txt",
    "mlx-vlm-timings.json",
    "trtllm-iterations.json",
)
HISTOGRAM = [STEPS.count(j) for j in range(4)]
SURVIVAL = [sum(a > i for a in STEPS) / len(STEPS) for i in range(3)]


@pytest.mark.parametrize("name", EVERY)
def test_a_record_is_known_by_its_keys_and_keeps_its_counts(name: str) -> None:
    data = (RECORDS / name).read_bytes()
    assert recognise(data) == EVERY[name]
    store = filled("any name at all", data)
    figures = summary(store, 0)
    assert figures["num_accepted_draft_tokens"] == figures["draft_n_accepted"] == sum(STEPS)
    # the assumption of engines that do not count what they draft
    drafted = 36 if "sglang" in name or "mlx" in name else 34
    assert figures["num_draft_tokens"] == drafted
    assert figures["draft_acceptance_rate"] == pytest.approx(16 / drafted)
    told_steps = name not in ("lmstudio-prediction.json", "trtllm-perf-metrics.jsonl")
    assert figures["num_spec_steps"] == (12 if told_steps else None)
    assert figures["mean_acceptance_length"] == (pytest.approx(28 / 12) if told_steps else None)
    told_tokens = "metrics" not in name and name != "trtllm-iterations.json"
    assert figures["predicted_n"] == (29 if told_tokens else None)
    if told_steps and name not in NO_HISTOGRAM:
        assert figures["acceptance_histogram"] == HISTOGRAM
        assert figures["acceptance_per_position"]["unconditional"] == pytest.approx(SURVIVAL)
    else:
        assert figures["acceptance_histogram"] is None
        given = [0.75, 0.42, 0.17] if name == "benchmark.txt" else None
        rates = figures["acceptance_per_position"]
        assert (rates and rates["unconditional"]) == given
    assert not len(store.findings)
    assert store.runs[0]["record"] == {"file": "any name at all", "shape": EVERY[name]}


@pytest.mark.parametrize("name", EVERY)
def test_only_lists_by_step_become_rows(name: str) -> None:
    store = filled(name)
    columns = store.runs[0]["columns"]
    if name not in ("aiperf-record.json", "vllm-detailed-stream.json"):
        assert len(store.rounds) == 0
        assert len(store.tokens) == (29 if name == "sglang-generate.json" else 0)
        assert set(columns["rounds"].values()) == {"absent"}
        return
    rows = [store.rounds.row(i) for i in range(len(store.rounds))]
    assert [row["num_accepted_draft_tokens"] for row in rows] == [None, *STEPS]
    assert [row["num_emitted"] for row in rows] == [1, *(a + 1 for a in STEPS)]
    assert [row["stop_kind"] for row in rows[1:5]] == ["bonus", *["replacement"] * 3]
    for row in rows:
        assert not row["rollback_path"] and row["t_ms"] is None and row["verify_ms"] is None
        assert row["memory_rollback"] is None and row["n_rs_seq"] is None
    knows_prompt = "vllm" in name
    first = 1 + STEPS[0]
    pos0 = [None, 17, 17 + first, 17 + first + 2] if knows_prompt else [None] * 4
    assert [row["pos0"] for row in rows[:4]] == pos0
    assert len(store.tokens) == (29 if knows_prompt else 0)
    assert columns["rounds"]["num_accepted_draft_tokens"] == "observed"
    assert ("tokens" in columns) == knows_prompt


def test_the_chunks_of_a_stream_are_the_steps_tokens() -> None:
    store = filled("vllm-detailed-stream.json")
    rows = [store.tokens.row(i) for i in range(29)]
    assert [row["token_id"] for row in rows] == list(range(1000, 1029))
    assert [row["pos"] for row in rows] == list(range(17, 46))
    assert [row["text"] for row in rows[:8]] == [" w1000", *[""] * 6, " w1007"]
    kinds = [row["kind"] for row in rows[:7]]
    assert kinds == ["target", *["accepted"] * 3, "bonus", "accepted", "replacement"]


def test_the_prompts_ids_are_kept_with_the_steps() -> None:
    stream = json.loads((RECORDS / "vllm-detailed-stream.json").read_bytes())
    stream["chunks"][1]["choices"][0]["prompt_token_ids"] = [*range(17)]
    store = filled("stream", as_bytes(stream))
    assert store.tokens.column("token_id")[:17].tolist() == [*range(17)]
    assert store.tokens.texts("kind")[16:18] == ["prompt", "target"]
    assert store.tokens.column("pos").tolist() == [*range(46)]


def test_tokens_are_not_shared_out_where_chunks_are_not_steps() -> None:
    """One chunk of two steps: the ids are known, but not which step is which's."""
    stream = json.loads((RECORDS / "vllm-detailed-stream.json").read_bytes())
    one, two = (stream["chunks"][i]["choices"][0] for i in (2, 3))
    two["token_ids"] = one["token_ids"] + two["token_ids"]
    del stream["chunks"][2]
    store = filled("stream", as_bytes(stream))
    assert len(store.rounds) == 13
    assert set(store.tokens.texts("kind")) == {"unknown"}
    assert store.tokens.column("token_id").tolist() == list(range(1000, 1029))


def test_rounds_without_a_draft_are_at_places_that_nobody_tells() -> None:
    record = json.loads((RECORDS / "vllm-detailed-stream.json").read_bytes())
    usage = record["chunks"][-1]["usage"]
    usage |= {"completion_tokens": 40, "total_tokens": 57}
    store = filled("stream", as_bytes(record))
    assert set(store.rounds.column("pos0").tolist()) == {
        store.rounds.column("t_ms").size and -(2**31)
    }
    assert summary(store, 0)["predicted_n"] == 40 and not len(store.findings)


def test_the_last_step_emits_what_is_left() -> None:
    record = json.loads((RECORDS / "aiperf-record.json").read_bytes())
    record["record"]["completion_tokens"] = 28
    store = filled("record", as_bytes(record))
    assert store.rounds.row(12)["num_emitted"] == 1
    assert store.rounds.row(12)["stop_kind"] == "end"
    record["record"]["completion_tokens"] = 20  # more than the last step is missing
    store = filled("record", as_bytes(record))
    assert {store.rounds.row(i)["num_emitted"] for i in range(1, 13)} == {None}
    record["record"]["completion_tokens"] = None
    store = filled("record", as_bytes(record))
    assert summary(store, 0)["predicted_n"] is None


def test_a_step_whose_draft_lost_all_its_tokens_is_a_step() -> None:
    """A grammar may leave nothing of a draft; vLLM counts the verification all the same."""
    record = {
        "engine": "vllm",
        "num_spec_steps": 2,
        "mean_acceptance_length": 1.5,
        "per_step_accepted": [0, 1],
        "per_step_drafted": [0, 3],
        "acceptance_histogram": [1, 1],
    }
    store = filled("record", as_bytes(record))
    assert summary(store, 0)["num_spec_steps"] == 2
    assert summary(store, 0)["mean_acceptance_length"] == 1.5
    assert store.rounds.row(1)["stop_kind"] == ""  # completion_tokens is not reported


def test_older_names_of_sglang_are_read_and_have_to_agree() -> None:
    old = {
        "spec_verify_ct": 12,
        "spec_accept_token_num": 16,
        "spec_draft_token_num": 36,
        "completion_tokens": 29,
        "spec_accept_length": 29 / 12,
    }
    middle = {"spec_verify_ct": 12, "spec_accepted_drafts": 16, "spec_proposed_drafts": 36}
    for told in (old, middle):
        figures = summary(filled("old", as_bytes({"meta_info": told})), 0)
        assert figures["draft_acceptance_rate"] == 16 / 36
        assert figures["mean_acceptance_length"] == 1 + 16 / 12, "not SGLang's length"
    store = filled("both", as_bytes(old | {"spec_num_correct_drafts": 15}))
    (finding,) = recorded(store)
    assert {"spec_num_correct_drafts", "spec_accept_token_num"} <= set(words(finding.evidence))


def test_counts_that_grow_from_chunk_to_chunk_are_of_one_request() -> None:
    """SGLang repeats `meta_info` in every chunk of a stream, with what it has counted by then."""
    told = [
        {"id": name, "spec_verify_ct": n, "spec_num_correct_drafts": n, "completion_tokens": 2 * n}
        for n in (1, 2, 3)
        for name in ("a", "b")
    ]
    text = "".join(f"data: {json.dumps({'meta_info': one})}\n\n" for one in told)
    store = filled("stream", text.encode())
    assert len(store.runs[0]["requests"]) == 2
    assert summary(store, 0)["num_spec_steps"] == 6
    # lines are requests of their own, whatever their names
    lines = b"\n".join(as_bytes({"meta_info": one}) for one in told[:2] + told[:2])
    assert len(filled("lines", lines).runs[0]["requests"]) == 4


def test_the_tokens_of_several_choices_are_not_those_of_each() -> None:
    body = json.loads((RECORDS / "trtllm-choice.json").read_bytes())["body"]
    body["choices"].append({**body["choices"][0], "index": 1})
    store = filled("two", as_bytes(body))
    assert len(store.runs[0]["requests"]) == 2
    assert summary(store, 0)["num_spec_steps"] == 24
    assert summary(store, 0)["predicted_n"] is None


@pytest.mark.parametrize("where", ["usage", "stats"])
def test_a_reply_of_lm_studio_has_its_drafts_in_usage_or_stats(where: str, tmp_path: Path) -> None:
    names = ("total", "accepted", "rejected", "ignored")
    counts = {f"{k}_draft_tokens_count": n for k, n in zip(names, (40, 30, 8, 2), strict=True)}
    reply: dict[str, Any] = {
        "usage": {"prompt_tokens": 24, "completion_tokens": 53, "total_tokens": 77},
        "stats": {"tokens_per_second": 51.5, "stop_reason": "eosFound"},
    }
    reply[where] |= counts
    path = tmp_path / "reply.json"
    path.write_text(json.dumps(reply))
    store = TraceStore()
    import_file(store, path)
    (told,) = (one["told"] for one in store.runs[0]["requests"])
    named = ("predicted_n", "draft_n", "draft_n_accepted", "predicted_per_second")
    assert [told[name] for name in named] == [53, 38, 30, 51.5]
    assert store.runs[0]["stops"] == ["eosFound"]


def test_what_lm_studios_python_library_shows_has_tokens_and_speed(tmp_path: Path) -> None:
    path = tmp_path / "shown.txt"
    path.write_text(
        "LlmPredictionStats(stop_reason='eosFound', tokens_per_second=62.5, "
        "prompt_tokens_count=40, predicted_tokens_count=220, total_tokens_count=260, "
        "total_draft_tokens_count=190, accepted_draft_tokens_count=133, "
        "rejected_draft_tokens_count=57, ignored_draft_tokens_count=0)\n"
    )
    store = TraceStore()
    import_file(store, path)
    (told,) = (one["told"] for one in store.runs[0]["requests"])
    named = ("predicted_n", "draft_n", "draft_n_accepted", "predicted_per_second")
    assert [told[name] for name in named] == [220, 190, 133, 62.5]
    assert store.runs[0]["stops"] == ["eosFound"]


def test_what_lm_studio_ignored_was_never_verified() -> None:
    stats = {
        "totalDraftTokensCount": 40,
        "acceptedDraftTokensCount": 16,
        "rejectedDraftTokensCount": 18,
        "ignoredDraftTokensCount": 6,
    }
    figures = summary(filled("stats", as_bytes({"stats": stats})), 0)
    assert figures["num_draft_tokens"] == 34
    fragments = [{"tokensCount": 2, "containsDrafted": False}] * 3
    store = filled("fragments", as_bytes({"fragments": fragments}))
    assert summary(store, 0)["predicted_n"] == 6
    assert summary(store, 0)["draft_acceptance_rate"] is None


def test_many_records_are_sequences_of_one_run() -> None:
    record = json.loads((RECORDS / "aiperf-record.json").read_bytes())["record"]
    plain = record | {"per_step_accepted": None, "per_step_drafted": None, "session": "a"}
    store = filled("many", b"\n".join(as_bytes(one) for one in (record, plain, record)) + b"\n")
    assert len(store.runs) == 1
    figures = summary(store, 0)
    assert figures["num_spec_steps"] == 36 and figures["predicted_n"] == 87
    assert figures["acceptance_per_position"]["unconditional"] == pytest.approx(SURVIVAL)
    assert summary(store, 0, 1)["num_spec_steps"] == 12
    assert sorted(set(store.rounds.column("seq_id").tolist())) == [0, 2]
    assert store.runs[0]["unknown_keys"] == ["session"]
    assert store.runs[0]["requests"][1]["unknown"] == {"session": "a"}
    whole = filled("list", as_bytes({"run": 7, "records": [record, plain]}))
    assert whole.runs[0]["unknown"] == {"run": 7}


def test_a_stream_saved_as_text_is_read() -> None:
    chunks = json.loads((RECORDS / "vllm-detailed-stream.json").read_bytes())["chunks"]
    lines = [f"data: {json.dumps(chunk)}" for chunk in chunks]
    text = ": ping\n\n" + "\n\n".join([*lines, "data: [DONE]", ""]) + "\n"
    store = filled("stream", text.encode())
    assert recognise(text.encode()) == "vllm"
    assert len(store.rounds) == 13 and len(store.tokens) == 29


def test_scrapes_tell_what_was_between_them() -> None:
    after = (RECORDS / "vllm-metrics.prom").read_text()
    before = after
    for old, new in ((" 12.0", " 2.0"), (" 34.0", " 4.0"), (" 16.0", " 3.0")):
        before = before.replace(old, new)
    for old, new in ((" 8.0", " 2.0"), (" 5.0", " 1.0"), ("} 3.0\n", "} 0.0\n")):
        before = before.replace(old, new)
    before = before.replace(
        'accepted_tokens_total{engine="0",model_name="example"} 0.0',
        'accepted_tokens_total{engine="0",model_name="example"} 3.0',
    )
    figures = summary(filled("two", (before + after).encode()), 0)
    assert figures["num_spec_steps"] == 10
    assert figures["num_accepted_tokens_per_pos"] == [6, 4, 3]
    restarted = filled("two", (after + before).encode())
    assert summary(restarted, 0)["num_spec_steps"] == 2
    assert "fell" in restarted.runs[0]["requests"][0]["record"]["restarted"]
    more = filled("three", (before + after + after).encode())  # each as long as it took
    assert [one.told["num_spec_steps"] for one in more.runs[0].requests or ()] == [10, 0]


@pytest.mark.parametrize("accepted", [5 * 10**9, 2**53])
def test_counters_of_a_server_that_runs_for_long(accepted: int) -> None:
    """They have all digits up to 2^53; 2^31 tokens are drafted in weeks."""
    counts = {"drafts": 3 * 10**9, "draft_tokens": 9 * 10**9, "accepted_tokens": accepted}
    lines = [f"vllm:spec_decode_num_{name}_total {n}\n" for name, n in counts.items()]
    store = filled("long", "".join(lines).encode())
    is_wrong = accepted > counts["draft_tokens"]
    assert [one.rule for one in recorded(store)] == ["counters-contradict"] * is_wrong
    figures = summary(store, 0)
    assert figures["num_accepted_draft_tokens"] == (None if is_wrong else accepted)


def test_positions_that_a_server_counts_later_begin_at_zero() -> None:
    """llama-server has no counter of a position before the first token is accepted there."""
    name = "llamacpp:spec_decode_num"
    before = f"# TYPE x counter\n{name}_drafts_total 0\n{name}_accepted_tokens_total 0\n"
    after = (
        f"# TYPE x counter\n{name}_drafts_total 121\n{name}_draft_tokens_total 357\n"
        f"{name}_accepted_tokens_total 106\n"
        + "".join(
            f'{name}_accepted_tokens_per_pos_total{{position="{i}"}} {n}\n'
            for i, n in enumerate((67, 26, 13))
        )
    )
    store = filled("two", (before + after).encode())
    assert store.runs[0]["source"]["engine"] == "llama-server"
    assert summary(store, 0)["acceptance_histogram"] == [54, 41, 13, 13]


# -- llama-server's own replies --------------------------------------------------------------


@pytest.mark.parametrize("name", ["mtp", "draft", "endpoints"])
def test_a_saved_stream_of_llama_server_has_its_own_sums(name: str) -> None:
    n_read = 0
    for request in read_capture(name)["requests"]:
        reply = request["reply"]
        if "events" not in reply:
            continue
        text = "".join(f"{lines}\n\n" for _, lines in reply["events"]).encode()
        last = [line for line in text.split(b"\n") if b'"predicted_n"' in line]
        if not last:
            continue
        n_read += 1
        assert recognise(text) == "llama-server"
        store = filled("stream", text)
        figures = summary(store, 0)
        told = json.loads(last[-1].removeprefix(b"data: "))
        told = told.get("timings") or told["response"]["timings"]
        assert store.runs[0]["record"]["shape"] == "llama-server"
        assert not len(store.findings)
        for key in ("predicted_n", "draft_n", "draft_n_accepted"):
            assert figures[key] == told[key], key
        t_ms = store.rounds.column("t_ms")
        if name != "endpoints":
            assert t_ms[0] == pytest.approx(told["prompt_ms"])
            assert t_ms[-1] == pytest.approx(told["prompt_ms"] + told["predicted_ms"], rel=0.02)
        if len(store.rounds):
            cut = filled("stream", text[: len(text) // 2])
            assert 0 < len(cut.rounds) < len(store.rounds)
    assert n_read


def test_a_saved_reply_of_llama_server_has_sums_and_no_rows() -> None:
    reply = next(
        r["reply"]["body"] for r in read_capture("mtp")["requests"] if "body" in r["reply"]
    )
    told = json.loads(reply)["timings"]
    store = filled("reply", reply.encode())
    assert not len(store.rounds)
    figures = summary(store, 0)
    for key in ("predicted_n", "prompt_n", "draft_n", "draft_n_accepted"):
        assert figures[key] == told[key], key
    assert figures["draft_acceptance_rate"] == told["draft_n_accepted"] / told["draft_n"]
    assert figures["num_spec_steps"] is None


def test_a_sequence_with_rows_of_several_steps_has_no_acceptance_record() -> None:
    request = read_capture("utf8")["requests"][0]
    text = "".join(f"{lines}\n\n" for _, lines in request["reply"]["events"]).encode()
    store = filled("stream", text)
    assert max(store.rounds.row(i)["n_merged"] or 1 for i in range(len(store.rounds))) > 1
    assert [record for *_, record in acceptance_records(store)] == [None]


def test_whatever_is_kept_of_a_record_opens_again(tmp_path: Path) -> None:
    deep: Any = ["\ud800 \x00 \u2028", 10**300, -1.5e-300, None, True, {"": []}]
    for _ in range(28):
        deep = {"deeper": [deep]} if isinstance(deep, list) else [deep]
    odd = {"spec_verify_ct": 3, "finish_reason": deep, "x" * 1000: {"y\n": "z"}}
    store = filled("odd\n\u202ename", as_bytes({"id": [], "meta_info": odd, "more": [[deep]]}))
    export_csv(store, tmp_path / "trace")
    again = open_trace(tmp_path / "trace")
    assert again.runs[0]["unknown_keys"] == store.runs[0]["unknown_keys"]
    assert again.runs[0]["requests"][0]["record"]["spec_verify_ct"] == 3


@pytest.mark.parametrize("name", ["vllm-metrics.prom", "sglang-generate.json"])
def test_a_file_name_of_bytes_that_are_no_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xed\xa0\x80-" + name.encode())
    path.write_bytes((RECORDS / name).read_bytes())
    store = TraceStore()
    (run,) = import_file(store, path)
    assert store.runs[run]["record"]["file"] == "\N{REPLACEMENT CHARACTER}" * 3 + f"-{name}"
