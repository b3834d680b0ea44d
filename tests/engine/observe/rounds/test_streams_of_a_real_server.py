"""Rounds derived from streams of a real llama-server are those of its own log, token by token."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.analysis.findings.check import find
from engine.observe.rounds.observed_request import ObservedRequest
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.trace.records import EMITTED_KINDS
from engine.trace.store import TraceStore
from tests.support.captures import ids_of, rounds_of
from tests.support.llama_server import llama_server

pytestmark = pytest.mark.peer

DEMO = Path(__file__).parents[4] / "resources" / "demo"
DRAFTERS = {
    "draft-mtp": ("--spec-type", "draft-mtp", "--spec-draft-n-max", 3),
    "draft-simple": (
        *("--spec-type", "draft-simple", "--spec-draft-n-max", 3),
        *("-md", DEMO / "demo-draft.gguf"),
    ),
    "ngram-simple": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", 3, "--spec-ngram-simple-size-m", 6),
    ),
    "ngram-mod": (
        *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 8),
        *("--spec-ngram-mod-n-min", 2, "--spec-ngram-mod-n-max", 12),
    ),
}
PROMPTS = (
    "def quicksort(arr):",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push",
    "# 汉字 é \nimport sys\n",
    "class TestParser(unittest.TestCase):\n\n    def test_empty(self):\n",
)


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rounds_are_those_of_the_log(drafter: str, n_slots: int, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    words = ("-m", DEMO / "demo-target.gguf", "-np", n_slots, "-c", 1024 * n_slots, "-lv", 5)
    words = (*words, "--log-file", log, "--log-prefix", "--log-timestamps")
    with llama_server(tmp_path / "out", *words, *DRAFTERS[drafter]) as url:
        plain = _Asked(url)
        for temperature in (0.0, 0.8):
            if n_slots == 1:
                for prompt in PROMPTS:
                    plain.ask([prompt], temperature)
            else:
                plain.ask(PROMPTS, temperature)
    text = log.read_text(encoding="utf-8", errors="replace")
    streamed, joined = plain.told(""), plain.told(text)
    assert not find(streamed) or {f.rule for f in find(streamed)} <= {"drafter-mute"}
    assert not any("log" in f.rule for f in find(joined)), [f.message for f in find(joined)]
    names = ("num_draft_tokens", "num_accepted_draft_tokens", "num_emitted", "rollback_path")
    for seq_id in range(2 * len(PROMPTS)):
        mine, logs = (rounds_of(store, seq_id, "n_merged", *names) for store in (streamed, joined))
        timed = rounds_of(joined, seq_id, "num_draft_tokens", "verify_ms")
        assert all(ms is not None for n, ms in timed if n), "each was found in the log"
        if any(row[0] for row in mine):  # rounds that only the log tells apart
            sums = [[sum(r[i] or 0 for r in rows) for i in (1, 2, 3)] for rows in (mine, logs)]
            assert sums[0] == sums[1]
            continue
        assert len(mine) == len(logs)
        for a, b in zip(mine, logs, strict=True):
            assert a[:4] == b[:4]
            # without a seq_rm as well the stream cannot know that a restore was one of planes
            assert a[4] in ("", b[4]) or (a[4], b[4]) == ("restore", "restore_depth")
        known = zip(
            ids_of(streamed, seq_id, *EMITTED_KINDS),
            ids_of(joined, seq_id, *EMITTED_KINDS),
            strict=True,
        )
        assert all(a is None or a == b for a, b in known)


class _Asked:
    """Requests to a server and what came back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._now = 0.0
        self._events: list[tuple[int, str, Any]] = []
        self._n = 0

    def ask(self, prompts: tuple[str, ...] | list[str], temperature: float) -> None:
        """These prompts at once."""
        threads = [threading.Thread(target=self._one, args=(p, temperature)) for p in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def told(self, log: str) -> TraceStore:
        """All of it as a run, joined with the log if there is one."""
        store = TraceStore()
        run = ObservedRun(store, "ask", ServerFacts(self._url))
        if log:
            run.log(log)
            run.log_ended()
        requests: dict[int, ObservedRequest] = {}
        for at, (number, what, value) in enumerate(self._events):
            if what == "sent":
                requests[number] = run.request("/completion", value, at)
                requests[number].head(200, {"content-type": "text/event-stream"}, at)
            elif what == "data":
                requests[number].data(value, at)
            else:
                requests[number].done(at)
        run.end()
        return store

    def _one(self, prompt: str, temperature: float) -> None:
        body = {
            "prompt": prompt,
            "n_predict": 60,
            "temperature": temperature,
            "seed": 7,
            "stream": True,
            "timings_per_token": True,
            "return_progress": True,
            "cache_prompt": False,
        }
        with self._lock:
            number, self._n = self._n, self._n + 1
            self._events.append((number, "sent", body))
        with httpx.stream(
            "POST", f"{self._url}/completion", json=body, trust_env=False, timeout=60
        ) as reply:
            for piece in reply.iter_raw():
                with self._lock:
                    self._events.append((number, "data", piece))
        with self._lock:
            self._events.append((number, "done", None))
