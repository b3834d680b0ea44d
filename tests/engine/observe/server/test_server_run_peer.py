"""Runs of a real llama-server: the rounds are those of its log, the sums those of its counters."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import pytest

from engine.analysis.findings.check import recorded
from engine.analysis.findings.observed import CHECKS
from engine.observe.rounds.counters import DRAFTS, PREDICTED, counted, read_counters
from engine.observe.server.client import ServerClient
from engine.observe.server.request_options import completion
from engine.observe.server.server_run import ServerRun
from engine.options import RunOptions
from engine.sampling.options import SamplerOptions
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.llama_server import llama_server, logged_rounds

pytestmark = pytest.mark.peer

PROMPTS = (
    "def quicksort(arr):",
    "class Stack:\n    def __init__(self):",
    "import os\n\ndef read_file(path):",
    "def fibonacci(n):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
)
SERVERS = {
    "mtp": ("--spec-type", "draft-mtp", "--spec-draft-n-max", 3),
    "draft": ("--spec-type", "draft-simple", "-md", DEMO_DRAFT, "--spec-draft-n-max", 3),
    "ngram": ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 8),
    "ngram-simple": ("--spec-type", "ngram-simple"),
}


def told_findings(run: ServerRun) -> set[str]:
    """What was found wrong with the telling; of drafters that seldom draft there is more."""
    return {one.rule for one in recorded(run.trace)} & (set(CHECKS) - {"prompt-processed-again"})


def requests(temp: float) -> list:
    sampler = SamplerOptions(temp=temp, seed=11)
    return [completion(text, RunOptions(n_predict=64, sampler=sampler)) for text in PROMPTS]


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("name", SERVERS)
def test_rounds_are_those_of_the_log(name: str, n_slots: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ("-m", DEMO_TARGET, *SERVERS[name], "-np", n_slots, "-c", 1024 * n_slots)
    with llama_server(log, *words) as url, ServerClient(url) as client:
        facts = client.facts()
        for temp in (0.0, 0.8):
            begun = len(log.read_text(errors="replace"))
            run = ServerRun(client, facts, requests(temp), TraceStore(), parallel=n_slots)
            while run.advance():
                pass
            told = logged_rounds(log.read_text(errors="replace")[begun:])
            assert_same(told, _rounds(run, SERVERS[name][1]))
            assert not told_findings(run) and not run.uncounted
            counts = counted(run.trace, run.run_id)
            for counter, count in counts.items():
                assert run.counted.moved[counter] == count
            assert sum(len(one["tokens"]) for one in run.sequences) == counts[PREDICTED] > 2 * 64
            if name in ("mtp", "draft"):
                assert len(told) == len(PROMPTS) and counts[DRAFTS] > 50


def assert_same(
    told: list[list[tuple[int, int, bool]]], shown: list[list[tuple[int, int, str]]]
) -> None:
    """The same rounds, request by request in any order; a path where it can be known."""

    def figures(rounds: Sequence[tuple[int, int, bool | str]]) -> list[tuple[int, int]]:
        return [one[:2] for one in rounds]

    told, shown = sorted(told, key=figures), sorted(shown, key=figures)
    assert list(map(figures, told)) == list(map(figures, shown))
    pairs = [pair for a, b in zip(told, shown, strict=True) for pair in zip(a, b, strict=True)]
    known = [(log[2], row[2].startswith("restore")) for log, row in pairs if row[2]]
    assert all(a == b for a, b in known)
    assert len(pairs) - len(known) <= len(told)  # no more than the last of each


def _rounds(run: ServerRun, drafter: object) -> list[list[tuple[int, int, str]]]:
    """Accepted, drafted and path of each round with a draft, by sequence."""
    found: dict[int, list[tuple[int, int, str]]] = {}
    for i in range(len(run.trace.rounds)):
        row = run.trace.rounds.row(i)
        if row["num_draft_tokens"]:
            assert row["n_merged"] is None and row["drafter"] == drafter
            found.setdefault(row["seq_id"], []).append(
                (row["num_accepted_draft_tokens"], row["num_draft_tokens"], row["rollback_path"])
            )
    return list(found.values())


def test_the_log_adds_what_the_stream_withholds(tmp_path: Path) -> None:
    log = tmp_path / "full"
    words = ("-m", DEMO_TARGET, *SERVERS["mtp"], "-np", 2, "-c", 2048, "-lv", 5, "--log-file", log)
    with llama_server(tmp_path / "log", *words) as url, ServerClient(url) as client:
        facts = client.facts()
        for parallel in (1, 2):
            run = ServerRun(client, facts, requests(0.0), TraceStore(), parallel=parallel, log=log)
            while run.advance():
                pass
            assert not run.unread_log and not told_findings(run)
            rounds = [run.trace.rounds.row(i) for i in range(len(run.trace.rounds))]
            drafted = [row for row in rounds if row["num_draft_tokens"]]
            assert {row["drafter"] for row in drafted} == {"draft-mtp"}
            assert {row["n_rs_seq"] for row in rounds} == {3}
            assert all(row["verify_ms"] > 0 for row in drafted)
            tokens = [run.trace.tokens.row(i) for i in range(len(run.trace.tokens))]
            ghosts = sum(one["kind"] in ("rejected", "ignored") for one in tokens)
            undone = [row["num_draft_tokens"] - row["num_accepted_draft_tokens"] for row in drafted]
            assert ghosts == sum(undone) > 20


def test_a_lost_connection_is_found_again_and_nothing_is_missing(tmp_path: Path) -> None:
    words = ("-m", DEMO_TARGET, *SERVERS["mtp"], "-np", 1, "-c", 2048)
    with llama_server(tmp_path / "log", *words) as url, cutting_line(url, 60_000) as line:
        with ServerClient(line) as client:
            options = RunOptions(n_predict=400, ignore_eos=True)
            run = ServerRun(client, client.facts(), [completion("def f(", options)], TraceStore())
            while run.advance():
                pass
        counts = counted(run.trace, run.run_id)
        assert run.observed.raw is not None
        (raw,) = run.observed.raw.requests
        assert sum(len(piece) for _, piece in raw.pieces) > 2 * 60_000
        assert not told_findings(run) and counts[PREDICTED] == 400
        assert all(run.counted.moved[name] == count for name, count in counts.items())


@contextmanager
def cutting_line(url: str, n_bytes: int) -> Iterator[str]:
    """An address that leads to a server and breaks every connection after this many bytes."""
    listening = socket.create_server(("127.0.0.1", 0))
    target = ("127.0.0.1", urlsplit(url).port)

    def serve() -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=carry, args=(near,), daemon=True).start()

    def carry(near: socket.socket) -> None:
        with near, socket.create_connection(target) as far:
            room = n_bytes
            while room > 0:
                for ready in select.select([near, far], [], [])[0]:
                    piece = ready.recv(4096)
                    if not piece:
                        return
                    (far if ready is near else near).sendall(piece)
                    room -= len(piece)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def test_a_request_that_is_stopped_leaves_the_server_idle(tmp_path: Path) -> None:
    words = ("-m", DEMO_TARGET, *SERVERS["mtp"], "-c", 4096, "-np", 1)
    with llama_server(tmp_path / "log", *words) as url, ServerClient(url) as client:
        options = RunOptions(n_predict=3000, ignore_eos=True)
        run = ServerRun(client, client.facts(), [completion("def f(", options)], TraceStore())
        while len(run.trace.rounds) < 20:
            run.advance()
        run.stop()
        until = perf_counter() + 60
        while any(slot["is_processing"] for slot in client.slots() or ()):
            assert perf_counter() < until
        metrics = client.metrics()
        assert metrics is not None
        assert 20 <= read_counters(metrics[0]).values[PREDICTED] < 1500
