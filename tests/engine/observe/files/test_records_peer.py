"""What a real llama-server wrote into files: its streams and counters as runs, against its log."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine.observe.files.records import fill
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from resources import DEMO_TARGET
from tests.support.llama_server import llama_server, logged_rounds

pytestmark = pytest.mark.peer


def test_saved_streams_and_scrapes_have_the_rounds_of_the_servers_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ("-m", DEMO_TARGET, "--spec-type", "draft-mtp", "--spec-draft-n-max", 3, "-np", 1)
    streams = []
    with llama_server(log, *words) as url, httpx.Client(base_url=url, timeout=60) as client:
        before = client.get("/metrics").content
        for temperature in (0, 0.8):
            body = {
                "prompt": "def quicksort(arr):",
                "n_predict": 40,
                "temperature": temperature,
                "stream": True,
                "timings_per_token": True,
                "cache_prompt": False,
            }
            streams.append(client.post("/completion", json=body).content)
        after = client.get("/metrics").content
    logged = logged_rounds(log.read_text(errors="replace"))
    assert len(logged) == 2
    for stream, rounds in zip(streams, logged, strict=True):
        store = TraceStore()
        fill(store, stream, "stream")
        drafted = store.rounds.column("num_draft_tokens")
        accepted = store.rounds.column("num_accepted_draft_tokens")
        steps = drafted > 0
        told = list(zip(accepted[steps].tolist(), drafted[steps].tolist(), strict=True))
        assert told == [(a, d) for a, d, _ in rounds]
        assert not len(store.findings)
    store = TraceStore()
    fill(store, before, "scrapes", later=after)
    every = [row for rounds in logged for row in rounds]
    figures = summary(store, 0)
    assert figures["num_spec_steps"] == len(every)
    assert figures["draft_n"] == sum(d for _, d, _ in every)
    assert figures["draft_n_accepted"] == sum(a for a, _, _ in every)
    survivors = [sum(a > i for a, _, _ in every) for i in range(3)]
    while survivors and not survivors[-1]:
        survivors.pop()
    assert figures["num_accepted_tokens_per_pos"][: len(survivors)] == survivors
