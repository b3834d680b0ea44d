"""Whether a server's model is the file at hand: the five questions."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from engine.gguf.file import GgufFile
from engine.observe.rescoring.identity import (
    DIFFERENT,
    LIKELY,
    SAME,
    UNKNOWN,
    by_figures,
    by_path,
    by_text,
    figures_of,
    identify,
)
from engine.session import Session
from engine.trace.facts import RunFacts
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.observed_texts import META, PROMPT, observed_run

HERE = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.open(DEMO_TARGET, compute="f32")


class Server:
    """Answers as a llama-server with some model does."""

    address = HERE

    def __init__(self, session: Session, path: str = "/elsewhere/model.gguf") -> None:
        self._session, self.asked = session, []
        self.replies: dict[str, Any] = {
            "/props": {"model_path": path},
            "/v1/models": {"data": [{"meta": META}]},
            "/slots": [{"id": 0, "is_processing": True}, {"id": 1, "is_processing": False}],
        }
        self.off = 0.0

    def ask(self, path: str, body: Mapping[str, Any] | None) -> Any:
        self.asked.append((path, body))
        if path == "/tokenize":
            return self.replies.get(path, {"tokens": self._session.tokenizer.encode(PROMPT)})
        if path != "/completion":
            return self.replies[path]
        row = self._session.logits(body["prompt"])[-1].astype(np.float64)
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        tops = [
            {"id": int(i), "logprob": math.log(max(1e-9, p[i] - self.off))}
            for i in np.argsort(-p)[: body["n_probs"]]
        ]
        return {"completion_probabilities": [{"top_logprobs": tops}]}


def test_the_figures_of_the_bundled_model_are_those_that_its_server_tells() -> None:
    with GgufFile.open(DEMO_TARGET) as file:
        assert figures_of(file) == META


@pytest.mark.parametrize("name", META)
def test_any_other_figure_is_another_model(name) -> None:
    with GgufFile.open(DEMO_TARGET) as file:
        found = by_figures(META | {name: 7}, file)
        assert found.verdict == DIFFERENT and "It has 7 " in found.reason
        assert found.is_requantised == (name == "size")
        assert by_figures({}, file).verdict == by_figures(META, file).verdict == UNKNOWN


def test_the_same_file_on_this_machine_is_known_by_path_or_by_bytes(tmp_path) -> None:
    copy, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    shutil.copy(DEMO_TARGET, copy)
    other.write_bytes(copy.read_bytes()[:-1] + b"\0")
    with GgufFile.open(DEMO_TARGET) as file:
        assert by_path(str(DEMO_TARGET), HERE, file).verdict == SAME
        assert by_path(str(copy), "http://localhost:1", file).verdict == SAME
        assert by_path(str(copy), "http://192.0.2.1:1", file).verdict == UNKNOWN
        assert by_path(str(tmp_path / "gone"), HERE, file).verdict == UNKNOWN
        assert by_path("a\0b", HERE, file).verdict == UNKNOWN
        assert by_path(None, HERE, file).verdict == UNKNOWN
        assert by_path(str(DEMO_DRAFT), HERE, file).verdict == UNKNOWN
        if copy.read_bytes() != other.read_bytes():
            assert by_path(str(other), HERE, file).verdict == UNKNOWN


def test_other_token_ids_are_another_model(session) -> None:
    server = Server(session)
    assert identify(session, observed_run().facts, server).verdict == UNKNOWN
    server.replies["/tokenize"] = {"tokens": [1, 2, 3]}
    found = identify(session, observed_run().facts, server)
    assert found.verdict == DIFFERENT and "tokenises the text differently" in found.reason
    assert "/completion" not in dict(server.asked)


def test_probabilities_are_asked_for_only_with_permission_in_an_idle_slot(session) -> None:
    server = Server(session)
    assert identify(session, observed_run().facts, server, may_probe=True).verdict == LIKELY
    probes = [body for path, body in server.asked if path == "/completion"]
    n = len(session.tokenizer.encode(PROMPT))
    assert [len(body["prompt"]) for body in probes] == [n // 3, 2 * n // 3, n]
    assert all(body["id_slot"] == 1 and body["cache_prompt"] is False for body in probes)
    server.off = 0.06
    found = identify(session, observed_run().facts, server, may_probe=True)
    assert found.verdict == DIFFERENT and "differs by 0.06" in found.reason
    server.replies["/slots"] = [{"id": 0, "is_processing": True}]
    found = identify(session, observed_run().facts, server, may_probe=True)
    assert found.verdict == UNKNOWN and "idle" in found.reason


def test_what_a_text_tells() -> None:
    assert by_text([0.0] * 50).verdict == LIKELY
    assert by_text([0.0] * 99 + [0.5]).verdict == LIKELY  # more than half as probable
    assert by_text([0.0] * 99 + [2.0]).verdict == UNKNOWN
    assert by_text([0.0] * 95 + [0.5] * 5).verdict == UNKNOWN
    assert by_text([0.0] * 8 + [5.0] * 92).verdict == DIFFERENT
    assert by_text([5.0]).verdict == by_text([]).verdict == UNKNOWN


def test_a_run_of_our_own_names_its_file(session) -> None:
    assert identify(session, RunFacts({"model": session.identity})).verdict == SAME
    with_draft = session.identity | {"draft": {"name": "d", "size": 1, "sha256": ""}}
    assert identify(session, RunFacts({"model": with_draft})).verdict == SAME
    other = session.identity | {"sha256": "0", "content": "0"}
    assert identify(session, RunFacts({"model": other})).verdict == DIFFERENT
    alike = {"architecture": "qwen35", "compute": session.compute}
    for n_bytes, verdict in ((0, UNKNOWN), (1, DIFFERENT)):
        of_size = {"model": other, "weight_bytes": session.model.weight_bytes + n_bytes, **alike}
        assert identify(session, RunFacts(of_size)).verdict == verdict
    assert identify(session, RunFacts({})).verdict == DIFFERENT


def test_a_copy_is_told_by_its_content_or_not_at_all(tmp_path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(DEMO_TARGET, copy)
    opened = Session.open(copy)
    theirs = opened.identity | {"name": "first.gguf", "content": None}
    assert identify(opened, RunFacts({"model": theirs})).verdict == UNKNOWN
    theirs["content"] = hashlib.sha256(copy.read_bytes()).hexdigest()
    assert identify(opened, RunFacts({"model": theirs})).verdict == DIFFERENT
    assert opened.identity["content"]  # it was found for that
    theirs["content"] = opened.identity["content"]
    assert identify(opened, RunFacts({"model": theirs})).verdict == SAME
