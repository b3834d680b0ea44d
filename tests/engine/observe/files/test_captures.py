"""What real llama-servers sent gives the rounds that their own logs and counters tell."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find
from engine.errors import TraceFileError
from engine.files import unpacked
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.observe.files.capture import capture_of, read_capture, replay, write_capture
from engine.observe.files.log_run import fill_log
from engine.observe.rounds.kept_requests import RawStore
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.trace.export import export_csv
from engine.trace.records import EMITTED_KINDS
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.captures import SHARED, ids_of, imported, load, rounds_of
from tests.support.scripted_replies import token_events

DEMO = Path(__file__).parents[4] / "resources" / "demo"
# rows, tokens, accepted, drafted, paths but none; of each stream, as the README of the captures has
TOLD = {
    "plain": [(48, 48, 0, 0, {})],
    "mtp": [(53, 96, 43, 152, {"seq_rm": 45}), (50, 96, 46, 142, {"seq_rm": 43})],
    "mtp-2-slots": [(45, 80, 36, 125, {"seq_rm": 36}), (47, 80, 34, 130, {"seq_rm": 38})],
    "draft": [(32, 96, 44, 90, {"restore": 20}), (36, 96, 29, 103, {"restore": 31})],
    "ngram-mod": [(35, 128, 93, 93, {}), (106, 128, 20, 36, {"restore": 2})],
    "chain": [
        (25, 160, 135, 160, {"seq_rm": 9}),
        (96, 160, 63, 291, {"seq_rm": 81, "restore_depth": 1}),
    ],
    "utf8": [(17, 52, 33, 54, {"seq_rm": 4, "": 1})],
    "qwen3next": [(32, 80, 15, 124, {"restore": 28, "": 3})],
    "synthetic": [(34, 96, 62, 98, {"seq_rm": 15})],
}
STREAMED = [*TOLD, "endpoints", "jsonl", "stops", "proxy-openai-client"]


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.thinned(4)
def test_a_capture_gives_the_table_of_its_readme(name: str) -> None:
    store = imported(load(name), with_log=False)
    for seq_id, (n_rows, n_tokens, accepted, drafted, paths) in enumerate(TOLD[name]):
        names = ("num_emitted", "num_accepted_draft_tokens", "num_draft_tokens", "rollback_path")
        rows = rounds_of(store, seq_id, *names)
        assert len(rows) == n_rows
        sums = [sum(row[i] or 0 for row in rows) for i in range(3)]
        assert sums == [n_tokens, accepted, drafted]
        assert Counter(row[3] for row in rows if row[3] != "none") == paths
    said = {f.rule for f in find(store)} - {"degenerate-repetition"}  # so the texts do
    assert said <= {"drafter-mute"}, "n-grams find little at 0.8"


@pytest.mark.parametrize(("name", "with_log"), list(zip(STREAMED, cycle((True, False)))))
@pytest.mark.thinned(6)
def test_rows_have_the_sums_of_the_server(name: str, with_log: bool) -> None:
    store = imported(load(name), with_log=with_log)
    for seq_id, request in enumerate(store.runs[0]["requests"]):
        sums = request.get("told", {})
        rows = rounds_of(
            store, seq_id, "num_emitted", "num_draft_tokens", "num_accepted_draft_tokens"
        )
        if not rows:
            continue
        found = [sum(row[i] or 0 for row in rows) for i in range(3)]
        assert found == [
            sums.get(name, 0) for name in ("predicted_n", "draft_n", "draft_n_accepted")
        ]
        n_tokens = len(ids_of(store, seq_id, *EMITTED_KINDS))
        assert n_tokens == sums["predicted_n"]
    said = {f.rule for f in find(store)} - {"degenerate-repetition"}  # so the texts do
    assert said <= {"checkpoint-dominates", "drafter-mute"}


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.thinned(6)
def test_rounds_of_a_stream_are_those_of_the_log_by_itself(name: str) -> None:
    capture = load(name)
    streamed, logged = imported(capture, with_log=False), TraceStore()
    fill_log(logged, capture.log, name)
    n_logged = len(logged.runs[0]["stops"])
    by_log = [_rounds(logged, seq_id) for seq_id in range(n_logged)]
    for seq_id, stop in enumerate(streamed.runs[0]["stops"]):
        rows = _rounds(streamed, seq_id)
        if not rows:
            continue
        if stop == "stopped":  # the client left; the server may have gone on
            assert any(_is_equal(rows[:-1], other[: len(rows) - 1]) for other in by_log)
        elif name in ("utf8", "qwen3next"):
            assert any(_is_summed(rows, other) for other in by_log)
        else:
            assert any(_is_equal(rows, other) for other in by_log)


def _rounds(store: TraceStore, seq_id: int) -> list[tuple[Any, ...]]:
    """What stream and log both tell of each round."""
    names = ("pos0", "num_draft_tokens", "num_accepted_draft_tokens", "num_emitted")
    rows = rounds_of(store, seq_id, *names, "rollback_path", "stop_kind")
    first = next((i for i, row in enumerate(rows) if row[3]), 0)  # parts of the prompt before it
    ids = ids_of(store, seq_id, *EMITTED_KINDS)
    found, at = [], 0
    for i, row in enumerate(rows[first:]):
        known = tuple(ids[at : at + row[3]])
        at += row[3]
        # a log does not tell apart what is before the prompt's last part
        found.append((*(row[1:] if not i else row), known))
    return found


def _is_equal(rows: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> bool:
    return len(rows) == len(other) and all(map(_fits, rows, other))


def _is_summed(rows: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> bool:
    """Whether rows are those of the other, but for the ones without a path, which have its sums."""
    plain = [row for row in rows[1:] if row[4]]
    rest = [row for row in rows[1:] if not row[4]]
    left = [row for row in other[1:] if not any(_fits(one, row) for one in plain)]
    sums = [[sum(int(row[i]) for row in some) for i in (1, 2, 3)] for some in (rest, left)]
    return len(left) >= len(rest) and sums[0] == sums[1]


def _fits(one: tuple[Any, ...], row: tuple[Any, ...]) -> bool:
    """Equal, where an id of the stream may be unknown."""
    known = zip(one[-1], row[-1], strict=False)
    return one[:-1] == row[:-1] and all(a is None or a == b for a, b in known)


def test_a_log_adds_drafts_drafters_and_what_a_stream_holds_back() -> None:
    store = imported(load("utf8"), with_log=True)
    assert len(rounds_of(store, 0, "round")) == 19, "the merged row is three rounds"
    assert None not in ids_of(store, 0, *EMITTED_KINDS)
    store = imported(load("chain"), with_log=True)
    drafters = Counter(name for (name,) in rounds_of(store, 1, "drafter"))
    assert drafters["ngram-mod"] == 1
    assert drafters["draft-mtp"] == 93
    rejected = [store.tokens.row(i) for i in range(len(store.tokens))]
    rejected = [row for row in rejected if row["kind"] == "rejected"]
    assert len(rejected) >= 80
    assert all(0 <= row["draft_p"] <= 1 and row["draft_top_id"][2] for row in rejected[:20])
    assert all(store.pieces[row["token_id"]] for row in rejected if row["draft_p"] is not None)
    assert {n for (n,) in rounds_of(store, 0, "n_rs_seq")} == {3}
    paths = rounds_of(store, 1, "rollback_path", "checkpoint_bytes", "replay_ms")
    assert [bool(ms) and size == 430252 for path, size, ms in paths if path == "restore_depth"] == [
        True
    ]


def test_phases_of_the_log_are_most_of_the_time() -> None:
    store = imported(load("mtp"), with_log=True)
    phases = store.runs[0]["summary"]["phase_ms"]
    share = sum(ms or 0 for ms in phases.values()) / (371.257 + 478.076)
    assert 0.8 < share < 1


def test_the_log_of_another_run_is_kept_apart() -> None:
    capture, other = load("mtp"), load("utf8")
    store = TraceStore()
    replay(capture, store, log=other.log)
    rules = [finding.rule for finding in find(store)]
    assert rules == ["log-of-another-run"] * 2
    plain = imported(capture, with_log=False)
    names = ("num_draft_tokens", "num_emitted", "t_ms")
    assert rounds_of(store, 0, *names) == rounds_of(plain, 0, *names)


def test_prompts_in_parts_have_a_row_for_each() -> None:
    store = imported(load("mtp-2-slots"), with_log=False)
    rows = rounds_of(store, 0, "pos0", "verify_width", "num_emitted")[:3]
    assert rows == [(0, 6, 0), (6, 4, 1), (10, 4, 2)]
    times = store.rounds.column("t_ms")
    assert (times[1:] >= times[:-1]).all(), "rows are numbered by the end of their rounds"


def test_the_light_log_gives_rounds_with_drafts_only() -> None:
    capture = load("light-log")
    store = TraceStore()
    fill_log(store, capture.log, "light")
    assert store.runs[0]["attachment"] == "light-log"
    names = ("num_draft_tokens", "num_accepted_draft_tokens")
    for seq_id, wanted in enumerate([(182, 417, 545), *[(185, 414, 554)] * 3]):
        rows = [row for row in rounds_of(store, seq_id, *names) if row[0]]
        assert (len(rows), sum(a for _, a in rows), sum(d for d, _ in rows)) == wanted
    assert not len(store.tokens)
    assert not find(store)


@pytest.mark.parametrize("name", ["mtp", "utf8"])
def test_an_imported_run_is_exported_and_opened_again(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    store = imported(load(name), with_log=True)
    export_csv(store, folder)
    again = open_trace(folder)
    for table in ("rounds", "tokens", "drafts"):
        mine, theirs = store.tables[table], again.tables[table]
        assert len(mine) == len(theirs)
        assert [mine.row(i)["round"] for i in range(len(mine))] == theirs.column("round").tolist()
    assert again.tokens.texts("text") == store.tokens.texts("text")
    assert again.runs[0]["requests"] == store.runs[0]["requests"]


@pytest.mark.parametrize("name", ["plain.json", "plain.json.gz"])
def test_a_capture_is_written_and_read_back(name: str, tmp_path: Path) -> None:
    store = TraceStore()
    run = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1", props={"total_slots": 1}))
    request = run.request("/completion", {"prompt": "a", "stream": True}, 1.0)
    request.head(200, {"content-type": "text/event-stream", "x-api-key": "secret"}, 2.0)
    stream = b"".join(piece for _, piece in load("mtp").requests[0].pieces)
    for at in range(0, len(stream), 777):
        request.data(stream[at : at + 777], 3.0 + at / 100)
    request.done(2000.0)
    run.end()
    path = tmp_path / name
    write_capture(path, capture_of(run, "plain"))
    assert b"secret" not in unpacked(path.read_bytes(), name, 1 << 26)
    again = imported(read_capture(path.read_bytes(), name), with_log=False)
    names = ("num_draft_tokens", "num_emitted", "rollback_path", "pos0")
    assert rounds_of(again, 0, *names) == rounds_of(store, 0, *names)
    assert len(rounds_of(again, 0, "round")) == 53


def test_what_is_kept_has_a_bound_and_no_gaps() -> None:
    raw = RawStore(most_bytes=1000)
    request = raw.request("/completion", {}, 0.0)
    assert request is not None
    for _ in range(20):
        raw.data(request, b"x" * 100, 1.0)
    assert not raw.is_whole and not request.is_whole
    assert len(request.pieces) == 5
    raw.data(request, b"", 2.0)
    assert len(request.pieces) == 5
    assert raw.request("/completion", {}, 3.0) is None


def test_the_first_counters_say_when_a_stream_came() -> None:
    """Whatever comes between: its later events are read together, and two streams take turns."""
    events = token_events(60)
    reply = {"head_ms": 5.0, "done_ms": 9000.0, "headers": {"Content-Type": "text/event-stream"}}
    role = 'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": null}}]}'
    requests = []
    for begun in (0.0, 1000.0):
        texts = [role, *(one.decode().removesuffix("\n\n") for one in events)]
        times = [begun + 10.0, *(begun + 100.0 + 500.0 * i for i in range(len(events)))]
        pairs = [list(one) for one in zip(times, texts, strict=True)]
        requests.append({"path": "/completion", "reply": {**reply, "events": pairs}})
    said = json.dumps({"format": "draftscope-capture", "requests": requests}).encode()
    store = imported(read_capture(said, "two.json"), with_log=False)
    for seq_id, begun in enumerate((0.0, 1000.0)):
        rows = rounds_of(store, seq_id, "t_ms", "num_emitted", "num_accepted_draft_tokens")
        assert [n for _, n, _ in rows] == [1, *[3] * 19, 2]
        assert [t for t, _, _ in rows] == pytest.approx(
            [begun + 100.0 - 0.001, *(begun + 100.0 + 0.5 * i for i in range(1, 21))]
        )
    assert sorted(store.rounds.column("t_ms").tolist()) == store.rounds.column("t_ms").tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b'{"requests": 3}',
        b'{"requests": [3]}',
        b'{"requests": [{"path": "/completion", "reply": {"events": [[1]]}}]}',
        b'{"requests": [{"reply": {}}]}',
        b"\x1f\x8b" + b"nonsense",
        b'{"log": [' + b"[" * 100_000,
    ],
)
def test_a_damaged_capture_is_refused_in_a_sentence(data: bytes) -> None:
    with pytest.raises(TraceFileError):
        read_capture(data, "some.json")


def test_every_capture_of_the_folder_is_covered() -> None:
    if not SHARED.is_dir():
        pytest.skip("the captures are not here")
    found = {path.name.removesuffix(".json.gz") for path in SHARED.glob("*.json.gz")}
    assert found <= {*STREAMED, "light-log", "inprocess"}


def test_a_vocabulary_gives_ids_of_prompts_and_chats() -> None:
    with GgufFile.open(DEMO / "demo-target.gguf") as file:
        vocabulary = Tokenizer.from_gguf(file)
    store, plain = TraceStore(), TraceStore()
    capture = replace(load("endpoints"), log="")
    replay(capture, store, vocabulary=vocabulary)
    replay(capture, plain)
    told = ids_of(store, 0, "prompt")
    assert (
        vocabulary.decode([token for token in told if token is not None]) == "def quicksort(arr):"
    )
    assert not ids_of(plain, 0, "prompt")
    chat = 5
    assert set(ids_of(plain, chat, *EMITTED_KINDS)) == {None}
    found = ids_of(store, chat, *EMITTED_KINDS)
    logged = imported(load("endpoints"), with_log=True)
    assert found == ids_of(logged, chat, *EMITTED_KINDS)
    assert store.runs[0]["columns"]["tokens"]["token_id"] == "derived"
