"""A run whose tokens come from a server: what is recorded however the server behaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.errors import ApiKeyError, OptionError, ServerError
from engine.observe.server.client import ServerClient
from engine.observe.server.request_options import RequestOptions, ServerRequest, completion
from engine.observe.server.server_run import ServerRun
from engine.options import RunOptions
from engine.sampling.options import SamplerOptions
from engine.trace.export import export_csv
from engine.trace.store import TraceStore
from tests.support.scripted_replies import (
    CAPTURES,
    LOADING,
    WEB_PAGE,
    Hold,
    Reply,
    backwards,
    cut,
    error_reply,
    events,
    halved,
    server_error,
    stream,
    without_timings,
)
from tests.support.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[ServerClient]:
    with ServerClient(server.url) as client:
        yield client


def requests_of(server: ScriptedServer) -> list[ServerRequest]:
    """The capture's streamed requests."""
    return [
        ServerRequest(one["path"], one["body"])
        for one in server.capture["requests"]
        if one["body"]["stream"]
    ]


def begin(client: ServerClient, requests: list[ServerRequest], **more: Any) -> ServerRun:
    return ServerRun(client, client.facts(), requests, TraceStore(), **more)


def finish(run: ServerRun) -> ServerError | None:
    """Run it to its end; the error that it ends with."""
    try:
        while run.advance():
            pass
    except ServerError as error:
        return error
    return None


def sums(run: ServerRun, seq_id: int) -> tuple[int, int, int]:
    """Emitted, drafted and accepted tokens of a sequence."""
    rounds = [run.trace.rounds.row(i) for i in range(len(run.trace.rounds))]
    mine = [row for row in rounds if row["seq_id"] == seq_id]
    return tuple(  # type: ignore[return-value]
        sum(max(0, row[name] or 0) for row in mine)
        for name in ("num_emitted", "num_draft_tokens", "num_accepted_draft_tokens")
    )


def found(run: ServerRun) -> set[str]:
    return {finding.rule for finding in recorded(run.trace)}


@pytest.mark.parametrize("parallel", [1, 2])
def test_every_request_is_a_sequence_with_the_server_s_own_sums(
    server: ScriptedServer, client: ServerClient, parallel: int
) -> None:
    run = begin(client, requests_of(server), parallel=parallel)
    assert finish(run) is None and run.done and not run.advance()
    assert sums(run, 0) == (96, 152, 43) and sums(run, 1) == (96, 142, 46)
    assert [len(one["tokens"]) for one in run.sequences] == [96, 96]
    assert "".join(run.first_texts).startswith("  # noqa")
    assert run.counted.moved["spec_decode_num_accepted_tokens_total"] == 89
    assert not found(run) and not run.errors and not run.uncounted
    assert run.trace.runs[run.run_id]["stops"] == ["limit", "limit"]


def test_events_cut_anywhere_give_the_same_rounds(
    server: ScriptedServer, client: ServerClient
) -> None:
    whole = begin(client, requests_of(server)[:1])
    finish(whole)
    server.script("/completion", Reply(halved(stream(server.capture["requests"][0]))))
    run = begin(client, requests_of(server)[:1])
    assert finish(run) is None
    n = len(whole.trace.rounds)
    for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_emitted", "pos0"):
        a, b = whole.trace.rounds.column(name, 0, n), run.trace.rounds.column(name, 0, n)
        assert a.tolist() == b.tolist()
    assert whole.sequences == run.sequences


def test_several_answers_to_one_request_are_sequences(
    server: ScriptedServer, client: ServerClient
) -> None:
    path = CAPTURES / "unusual-replies.json"
    if not path.exists():
        pytest.skip("the captures are not here")
    status, kind, body = json.loads(path.read_text())["replies"]["two_prompts"]
    server.script("/completion", Reply(body.encode(), status, {"Content-Type": kind}))
    run = begin(client, [ServerRequest("/completion", {"prompt": ["a", "b"], "stream": True}, "a")])
    assert finish(run) is None
    first, second = run.sequences
    assert (first["seq_id"], second["seq_id"]) == (0, 1)
    assert "".join(run.first_texts) == first["text"]
    assert (
        sums(run, 0)[0] == len(first["tokens"]) > 4 and sums(run, 1)[0] == len(second["tokens"]) > 4
    )
    assert first["text"].startswith("udio_fixed") and second["text"].startswith("ad_")


def test_counters_that_differ_are_found(server: ScriptedServer, client: ServerClient) -> None:
    run = begin(client, requests_of(server)[:1])
    run.step()
    server.counters["spec_decode_num_accepted_tokens_total"] += 1
    assert finish(run) is None
    (finding,) = recorded(run.trace)
    assert (finding.rule, finding.evidence) == ("counters-differ", "accepted tokens 44, here 43")


def test_a_server_without_metrics_is_observed_all_the_same(
    server: ScriptedServer, client: ServerClient
) -> None:
    for _ in range(2):
        server.script("/metrics", error_reply(501, "not supported"))
    run = begin(client, requests_of(server)[:1])
    assert finish(run) is None and not run.counted.moved and sums(run, 0) == (96, 152, 43)


def test_other_work_of_the_server_leaves_its_counters_aside(
    server: ScriptedServer, client: ServerClient
) -> None:
    busy = b"llamacpp:requests_processing 1\nllamacpp:spec_decode_num_drafts_total 5\n"
    same = {"Content-Type": "text/plain", "Process-Start-Time-Unix": "1001"}
    server.script("/metrics", Reply(busy, 200, same))
    run = begin(client, requests_of(server)[:1])
    assert finish(run) is None
    assert (
        run.uncounted == "The server is also processing requests of other clients."
        and not found(run)
    )


@pytest.mark.parametrize(
    ("reply", "said", "n_tokens"),
    [
        ("cut", "broke off its reply.", 9),
        ("error", "The server reported: the slot is gone.", 10),
        ("early", "The reply ended before the answer was complete.", 10),
        ("page", "answers /completion with text/html", 0),
        ("refused", "refuses /completion with status 500: no.", 0),
        ("not json", "sent text that is not valid JSON", 10),
        ("no number", "which is not a count", 10),
    ],
)
def test_a_failed_reply_is_one_sentence_and_what_came_is_kept(
    server: ScriptedServer, client: ServerClient, reply: str, said: str, n_tokens: int
) -> None:
    whole = stream(server.capture["requests"][0])
    bad = json.loads(whole[10].removeprefix(b"data: "))
    bad["timings"]["draft_n"] = -3
    replies = {
        "cut": Reply(cut(whole, 9)),
        "error": Reply(server_error(whole, 10, "the slot is gone")),
        "early": Reply(whole[:10]),
        "page": WEB_PAGE,
        "refused": error_reply(500, "no."),
        "not json": Reply([*whole[:10], b"data: {]\n\n", *whole[10:]]),
        "no number": Reply([*whole[:10], *events(bad)]),
    }
    server.script("/completion", replies[reply])
    if reply == "cut":  # and the stream is not to be had any more
        server.script("/v1/stream", error_reply(404, "Stream not found"))
    run = begin(client, requests_of(server), parallel=2)
    error = finish(run)
    assert error is not None and said in error.message and run.errors == [error]
    assert run.done and run.trace.runs[run.run_id]["error"] == error.message
    failed = next(i for i in (0, 1) if not run._sent[i].observed.known["complete"])
    assert sums(run, failed)[0] <= n_tokens
    assert sums(run, failed)[0] >= n_tokens - 4  # the last round is not settled
    assert sums(run, 1 - failed)[0] == 96, "the other request went on"
    assert bool(found(run)) == (reply != "refused")


def test_counters_that_fall_end_what_is_shown(server: ScriptedServer, client: ServerClient) -> None:
    server.script("/completion", Reply(backwards(stream(server.capture["requests"][0]), 40)))
    run = begin(client, requests_of(server)[:1])
    finish(run)
    assert "counters-contradict" in found(run) and 0 < sums(run, 0)[0] <= 40
    assert run.done


def test_a_server_without_timings_of_tokens_tells_sums_only(
    server: ScriptedServer, client: ServerClient
) -> None:
    server.script("/completion", Reply(without_timings(stream(server.capture["requests"][0]))))
    run = begin(client, requests_of(server)[:1])
    assert finish(run) is None and len(run.trace.rounds) == 0
    assert "".join(run.first_texts).startswith("  # noqa")


def test_a_piece_of_10_mb_and_bytes_that_are_no_text_are_survived(
    server: ScriptedServer, client: ServerClient
) -> None:
    whole = stream(server.capture["requests"][0])
    large = b"data: " + json.dumps({"content": "x" * (10 * 2**20)}).encode() + b"\n\n"
    odd = [*whole[:5], large, b": \xff\xfe\x80\n\n", *whole[5:]]
    server.script("/completion", Reply(odd))
    run = begin(client, requests_of(server)[:1])
    assert finish(run) is None and sums(run, 0) == (96, 152, 43)


def test_a_line_without_end_is_given_up(server: ScriptedServer, client: ServerClient) -> None:
    whole, held = stream(server.capture["requests"][0]), Hold()
    server.script("/completion", Reply([*whole[:10], b"data: ", *[b"x" * 2**20] * 18, held]))
    run = begin(client, requests_of(server)[:1])
    error = finish(run)
    assert error is not None and "more than 16 MiB" in error.message
    client.close()
    assert server.of("/completion")[0].left.wait(60)
    held.release()


def test_a_restart_in_the_middle_keeps_the_rounds(
    server: ScriptedServer, client: ServerClient
) -> None:
    held = Hold()
    server.script("/completion", Reply([*stream(server.capture["requests"][0])[:30], held]))
    run = begin(client, requests_of(server)[:1])
    while not held.reached.is_set() or run._inbox._waiting or sums(run, 0)[0] < 20:
        run.advance()
    server.restart()
    error = finish(run)
    assert error is not None and "broke off" in error.message
    assert "stream-cut" in found(run) and 20 <= sums(run, 0)[0] <= 30
    assert run.uncounted == "The server was restarted in the meantime."


def test_a_lost_connection_is_told_until_it_is_found(
    server: ScriptedServer, client: ServerClient
) -> None:
    whole, held = stream(server.capture["requests"][0]), Hold()
    behind = b"".join(whole)[len(b"".join(whole[:20])) + len(whole[20]) // 2 :]
    server.script("/completion", Reply([*cut(whole, 20), behind]))
    server.script("/v1/stream", LOADING, LOADING)
    run = begin(client, requests_of(server)[:1])
    lost = []
    while run.advance():
        lost.append(run._reported)
    assert f"{server.url} broke off its reply; requesting the rest" in lost
    assert not any(one.lost for one in run._sent)
    assert sums(run, 0) == (96, 152, 43) and not found(run)
    held.release()


def test_a_sequence_is_cancelled_at_the_server_and_the_others_go_on(
    server: ScriptedServer, client: ServerClient
) -> None:
    first, second = (stream(one) for one in server.capture["requests"][:2])
    held = Hold(), Hold()
    server.script("/completion", Reply([*first[:20], held[0]]))
    server.script("/completion", Reply([*second[:20], held[1], *second[20:]]))
    run = begin(client, [requests_of(server)[0]] * 3, parallel=2)
    with pytest.raises(OptionError):
        run.cancel(9)
    run.cancel(2)  # not sent yet
    got: dict[int, int] = {}  # which of the two replies a sequence has, by its prompt's length
    while not (len(got) == 2 and all(one.reached.is_set() for one in held)):
        run.advance()
        rounds = [run.trace.rounds.row(i) for i in range(len(run.trace.rounds))]
        got = {r["seq_id"]: (10, 25).index(r["verify_width"]) for r in rounds if r["pos0"] == 0}
    went_first = server.of("/completion")[0]
    (stuck,) = (seq for seq, reply in got.items() if reply == 0)
    run.cancel(stuck)
    assert went_first.left.wait(60)
    held[1].release()
    assert finish(run) is None
    assert len(server.of("/completion")) == 2 and sums(run, 1 - stuck)[0] == 96
    assert run.trace.runs[run.run_id]["stops"][stuck] == "stopped"
    held[0].release()


def test_stopping_ends_everything_and_keeps_what_came(
    server: ScriptedServer, client: ServerClient, tmp_path: Any
) -> None:
    held = Hold()
    server.script("/completion", Reply([*stream(server.capture["requests"][0])[:20], held]))
    run = begin(client, requests_of(server))
    while not held.reached.is_set():
        run.advance()
    run.stop()
    run.stop()
    assert run.done and not run.advance() and sums(run, 0)[0] >= 15
    assert server.of("/completion")[0].left.wait(60) and len(server.of("/completion")) == 1
    assert not found(run)
    export_csv(run.trace, tmp_path / "out")
    held.release()


def test_a_run_ends_behind_a_client_that_is_closed(server: ScriptedServer) -> None:
    held = Hold()
    server.script("/completion", Reply([*stream(server.capture["requests"][0])[:20], held]))
    with ServerClient(server.url) as client:
        run = begin(client, requests_of(server))
        while not held.reached.is_set():
            run.advance()
    run.stop()
    assert run.done and "stops" in run.trace.runs[run.run_id] and sums(run, 0)[0] >= 15
    held.release()


def test_a_stopped_run_asks_the_server_for_nothing_more(
    server: ScriptedServer, client: ServerClient
) -> None:
    held = Hold()
    server.script("/completion", Reply([*stream(server.capture["requests"][0])[:20], held]))
    run = begin(client, requests_of(server)[:1])
    while not held.reached.is_set():
        run.advance()
    n_asked = len(server.received)
    run.stop()
    assert run.done and "stopped before the server's counters" in run.uncounted
    # a look at the slots may have been on its way
    later = [one for one in server.received[n_asked:] if one.path != "/slots"]
    assert {one.method for one in later} <= {"DELETE"}
    held.release()


def test_no_key_reaches_the_trace(tmp_path: Any) -> None:
    key = "sk-a-key-that-must-not-show"
    with ScriptedServer("mtp", key=key) as server, ServerClient(server.url, key) as client:
        run = begin(client, requests_of(server)[:1])
        assert finish(run) is None
        export_csv(run.trace, tmp_path / "out")
        written = b"".join(p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file())
        assert key.encode() not in written and b"uthorization" not in written
        server.key = "another"
        later = begin_without_facts(client, server)
        error = finish(later)
        assert isinstance(error, ApiKeyError) and key not in str(error)
        assert key not in repr(vars(later)) and key not in json.dumps(later.trace.runs[0])


def begin_without_facts(client: ServerClient, server: ScriptedServer) -> ServerRun:
    from engine.observe.rounds.observed_run import ServerFacts

    return ServerRun(client, ServerFacts(server.url), requests_of(server)[:1], TraceStore())


def test_a_run_leaves_no_thread(server: ScriptedServer) -> None:
    before = set(threading.enumerate())
    with ServerClient(server.url) as client:
        finish(begin(client, requests_of(server)[:1]))
    assert set(threading.enumerate()) <= before


def test_the_options_of_a_run_become_fields_of_the_request() -> None:
    sampler = SamplerOptions(temp=0.8, top_k=7, seed=11, logit_bias=((3, 1.5),))
    options = RunOptions(n_predict=9, ignore_eos=True, sampler=sampler)
    more = RequestOptions(("\n",), True, 1, 5, (("grammar", "x"), ("top_k", 8)))
    body = completion([1, 2], options, more).body
    told = {"stream", "timings_per_token", "return_progress", "cache_prompt"}
    assert all(body[name] is True for name in told)
    assert body["prompt"] == [1, 2] and body["n_predict"] == 9 and body["ignore_eos"] is True
    assert body["temperature"] == 0.8 and body["seed"] == 11 and body["logit_bias"] == [[3, 1.5]]
    assert body["stop"] == ["\n"] and body["id_slot"] == 1 and body["n_probs"] == 5
    assert body["grammar"] == "x" and body["top_k"] == 8, "what is asked for by name wins"


def test_text_that_no_request_can_carry_is_refused() -> None:
    with pytest.raises(OptionError, match="not UTF-8"):
        _ = completion("a\udcff", RunOptions()).raw
