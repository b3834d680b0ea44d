"""Fresh streams of a real llama-server judged again by this engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import pytest

from engine.observe.rescoring.identity import DIFFERENT, LIKELY, SAME, by_probe, identify
from engine.observe.rescoring.rescore import rescore
from engine.observe.rescoring.triage import triage
from engine.observe.rounds.observed_run import ObservedRun
from engine.observe.server.client import ServerClient
from engine.session import Session
from engine.trace.facts import RunFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_TARGET
from tests.support.llama_server import llama_server

pytestmark = pytest.mark.peer

MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", 3)
GREEDY = {"temperature": 0, "n_predict": 120, "cache_prompt": False}
PENALISED = GREEDY | {"repeat_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": [[220, -1.5]]}
DRAWN = {"temperature": 0.8, "seed": 3, "n_predict": 120, "cache_prompt": False}
PROMPTS = ("def quicksort(arr):", "import os\n\ndef read_file(path):")


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with llama_server(log, "-m", DEMO_TARGET, *MTP, "-c", 1024, "-np", 1) as url:
        yield url


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with llama_server(log, "-m", DEMO_TARGET, "-c", 1024, "-np", 1) as url:
        yield url


def observed(url: str, *settings: dict[str, Any], log: Path | None = None) -> RunRef:
    """Every prompt with each of the settings, one after the other. log: the server's."""
    store, start = TraceStore(), perf_counter()

    def now() -> float:
        return 1e3 * (perf_counter() - start)

    with ServerClient(url) as client:
        run = ObservedRun(store, "ask", client.facts(), patience_ms=1e9)
    if log is not None:
        run.listen_to_log()
    for own in settings:
        for prompt in PROMPTS:
            body = {"prompt": prompt, "stream": True, "timings_per_token": True, **own}
            request = run.request("/completion", body, now())
            with httpx.stream("POST", f"{url}/completion", json=body, timeout=60) as reply:
                request.head(reply.status_code, dict(reply.headers), now())
                for piece in reply.iter_raw():
                    request.data(piece, now())
            request.done(now())
    if log is not None:
        run.log(log.read_text(errors="replace"))
        run.log_ended()
    run.end()
    return RunRef(store, run.run_id)


@pytest.mark.parametrize("compute", ["f32", "blocks", "int8"])
def test_no_token_of_a_right_server_is_called_wrong(speculating: str, compute: str) -> None:
    session = Session.open(DEMO_TARGET, compute=compute)
    run = observed(speculating, GREEDY, PENALISED, DRAWN)
    result = rescore(session, run.store, run.run_id)
    # some end by themselves
    assert [60 <= one.n_tokens <= 120 for one in result.sequences] == [True] * 6
    assert [one.greedy for one in result.sequences] == [True] * 4 + [False] * 2
    assert result.n_changed == 0, result
    assert not len(run.store.findings)


def test_a_running_server_is_known_by_its_file_and_by_what_it_computes(
    speculating: str, tmp_path: Path
) -> None:
    session = Session.open(DEMO_TARGET, compute="f32")
    with ServerClient(speculating) as client:
        facts = RunFacts(json.loads(json.dumps(observed(speculating, GREEDY).facts)))
        assert identify(session, facts, client).verdict == SAME
        tokens = session.tokenizer.encode(PROMPTS[1])
        assert by_probe(client.ask, tokens, session).verdict == LIKELY
        other = Session.open(_trained_on(tmp_path), compute="f32")
        assert by_probe(client.ask, tokens, other).verdict == DIFFERENT


def _trained_on(folder: Path) -> Path:
    """The bundled model with other weights in the middle of the file."""
    raw = bytearray(DEMO_TARGET.read_bytes())
    start, stop = len(raw) * 4 // 10, len(raw) * 6 // 10
    raw[start:stop] = bytes(byte ^ 16 if i % 2 else byte for i, byte in enumerate(raw[start:stop]))
    path = folder / "other.gguf"
    path.write_bytes(raw)
    return path


def test_texts_with_and_without_speculation_are_the_same_or_part_at_a_near_tie(
    speculating: str, plain: str
) -> None:
    runs = [observed(url, GREEDY) for url in (plain, speculating)]
    session = Session.open(DEMO_TARGET, compute="f32")
    for run in runs:
        rescore(session, run.store, run.run_id)
    found = triage(*runs)
    assert len(found.pairs) == len(PROMPTS) and found.verdict in ("same", "near tie")


@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
def test_acceptance_is_as_expected_of_the_rule_that_the_log_shows(
    sampling: str, tmp_path: Path
) -> None:
    log, settings = tmp_path / "log", [DRAWN | {"temperature": 1.0, "seed": i} for i in range(8)]
    words = ["-m", DEMO_TARGET, *MTP, "-c", 1024, "-lv", 5, "--spec-draft-sampling", sampling]
    with llama_server(log, *words) as url:
        run = observed(url, *settings, log=log)
    result = rescore(Session.open(DEMO_TARGET, compute="f32"), run.store, run.run_id)
    draws = sampling == "probabilistic"
    assert (result.rule, result.is_rule_known) == ("rejection" if draws else "match", draws)
    assert result.n_changed == 0 and len(result.acceptance) == 3
    for share in result.acceptance:
        assert share.expected is not None and share.most is not None and share.n > 100
        # four standard deviations of the count
        spread = 4 * (share.expected * (1 - share.expected) / share.n) ** 0.5
        assert share.expected - spread <= share.accepted / share.n <= share.most + spread
