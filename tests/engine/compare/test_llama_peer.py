"""llama.cpp itself, against what was measured of it: which removals it accepts, what its planes
hold, what its states are, and that its lanes are clean where it guarantees them.

The tables are in inprocess.json.gz; figures are of llama.cpp 0c1e570.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from engine.analysis.findings.check import recorded
from engine.batch import Span
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LaneSpec
from engine.compare.llama_cpp import PARTIAL, WHOLE
from engine.compare.llama_memory import LlamaScriptEngine
from engine.compare.llama_process import LlamaProcess
from engine.compare.memory_player import MemoryPlay
from engine.compare.memory_script_parser import memory_scripts
from engine.compare.peer_lane import StateHistory
from engine.compare.rollback_check import check_rollback
from engine.compare.rollback_outcomes import KNOWN
from engine.compare.scenario import find_scenario
from engine.compare.state_blob import decode_state, relative_errors
from engine.errors import ContextFullError, OptionError, PeerLibraryError
from engine.model.mixers import layout_of
from engine.options import Prompt
from engine.session import Session
from resources import DEMO_TARGET, MEMORY_SCRIPTS, ROLLBACK_SCRIPTS, SCENARIOS
from tests.support.comparisons import finish, verdicts
from tests.support.golden_runs import golden, options_of
from tests.support.golden_runs import session as golden_session
from tests.support.observed_texts import CAPTURED_TARGET

BUILD = os.environ.get("DRAFTSCOPE_LLAMA_CPP", "")
CAPTURES = Path(__file__).parents[3].parent / "shared" / "captures"
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not BUILD, reason="DRAFTSCOPE_LLAMA_CPP names no build"),
]
N_PROMPT = 12
TABLES = (
    "demo-target-3",
    "demo-target-8",
    "qwen35-a-f32-3",
    "qwen35-a-f32-8",
    "qwen35-b-v2x-tied-f32-3",
    "qwen35-c-v2x-mtp-f32-3",
    "qwen35-g-v2x-q4_k_m-3",
    "qwen35-h-v2x-mtp-q8_0-3",
    "qwen35moe-d-v2x-mtp-f32-3",
)
PLANES, CHECKPOINT = "llama.cpp,rollback=planes", "llama.cpp,rollback=checkpoint"


@cache
def measured() -> dict[str, Any]:
    path = CAPTURES / "inprocess.json.gz"
    if not path.is_file():
        pytest.skip("the captures are not there")
    with gzip.open(path, "rt") as file:
        runs: dict[str, Any] = json.load(file)["runs"]
    return runs


@cache
def session_of(name: str) -> Session:
    if "demo" in name:
        return Session.open(CAPTURED_TARGET, compute="f32")
    return golden_session(name)


@cache
def tokens_of(name: str) -> list[int]:
    if "demo" in name:
        text = (
            "def quicksort(arr):\n    if len(arr) <= 1:\n        return arr\n    pivot = arr[0]\n"
        )
        return list(session_of(name).prompt(text * 4).tokens)
    found: list[int] = golden(name)["tokens"].tolist()
    return found


class Opened:
    """A context with n_rs_seq planes, and the states of every position decoded one by one."""

    def __init__(self, name: str, n_rs_seq: int) -> None:
        session = session_of(name)
        assert session.path is not None
        self.tokens = tokens_of(name)
        self.engine = LlamaProcess(session.path, Path(BUILD))
        self.n_layers = self.engine.n_layers
        self.layout = layout_of(session.config)
        plain, _ = self.engine.open_context(1, 256, 64, 0, 1)
        self.number, found = self.engine.open_context(1, 256, 64, n_rs_seq, 1)
        assert found == n_rs_seq
        self.history = StateHistory(200)
        self.rows = []
        for pos in range(N_PROMPT + 20):
            span = Span(0, pos, [self.tokens[pos]], [0])
            self.rows.append(self.engine.decode(plain, [span])[0])
            self.history.add(self.state(plain))

    def state(self, number: int):
        assert self.layout is not None
        return decode_state(self.engine.save(number, 0, PARTIAL), self.layout, self.n_layers)

    def decode(self, pos: int, n: int) -> np.ndarray:
        span = Span(0, pos, self.tokens[pos : pos + n], range(n))
        return self.engine.decode(self.number, [span])

    def begin(self, batch: int, singles: int) -> int:
        """The prompt, a batch, and single tokens: the last position."""
        self.engine.seq_rm(self.number, 0, -1)
        self.decode(0, N_PROMPT)
        self.decode(N_PROMPT, batch)
        for i in range(singles):
            self.decode(N_PROMPT + batch + i, 1)
        return N_PROMPT + batch + singles - 1


@pytest.fixture(scope="module", params=TABLES)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Opened, dict[str, Any]]]:
    name, _, n_rs_seq = request.param.rpartition("-")
    table = measured()[request.param]
    found = Opened(name, int(n_rs_seq))
    yield found, table
    found.engine.close()


def test_removals_land_where_they_were_measured(opened: tuple[Opened, dict[str, Any]]) -> None:
    llama, table = opened
    for trap in table["traps"]:
        last = llama.begin(trap["batch"], trap["singles"])
        p0 = last - trap["undo"] + 1
        assert llama.engine.seq_rm(llama.number, 0, p0) == trap["accepted"]
        if not trap["accepted"]:
            continue
        assert llama.engine.seq_rm(llama.number, 0, p0 - 1) == trap["second_removal"]
        state = llama.state(llama.number)
        assert (state.pos, p0) == (trap["wanted"], trap["pos"])
        found = llama.history.positions_of(state)
        assert found == {"state": trap["S_is_of"], "window": trap["R_is_of"]}
        wrong, right = llama.decode(p0, 1)[0], llama.rows[p0]
        nmse = float(np.mean((wrong - right) ** 2) / np.mean(right**2))
        limit = 5e-3 if "q4_k" in table["model"] else 1e-4
        assert (nmse > limit) == (trap["S_is_of"] != trap["wanted"])


def test_planes_hold_what_was_measured(opened: tuple[Opened, dict[str, Any]]) -> None:
    llama, table = opened
    for key, planes in table["planes"].items():
        batch, singles = (int(word) for word in key.replace(",", "").split() if word.isdigit())
        last = llama.begin(batch, singles)
        whole = llama.engine.save(llama.number, 0, WHOLE)
        for plane in planes:
            depth = plane["plane"]
            if depth:
                assert llama.engine.seq_rm(llama.number, 0, last - depth + 1)
            found = llama.history.positions_of(llama.state(llama.number))
            assert found == {"state": plane["S_is_of"], "window": plane["R_is_of"]}
            llama.engine.load(llama.number, 0, whole, WHOLE)


@pytest.mark.parametrize(
    "name",
    ["qwen35-a-f32", "qwen35-c-v2x-mtp-f32", "qwen35moe-d-v2x-mtp-f32", "qwen3next-e-v2x-f32"],
)
def test_states_are_those_of_the_golden_arrays(name: str) -> None:
    """After the prompt: S and window of every layer, in our order."""
    data, session = golden(name), session_of(name)
    assert session.path is not None
    layout = layout_of(session.config)
    assert layout is not None
    engine = LlamaProcess(session.path, Path(BUILD))
    number, _ = engine.open_context(1, 256, 64, 0, 1)
    tokens = data["tokens"].tolist()
    memory = session.make_memory(options_of(1), 1, 256, 0)
    for ubatch in memory.split([Span(0, 0, tokens, [])], 512, "equal"):
        session.model.forward(ubatch, memory)
    engine.decode(number, [Span(0, 0, tokens, [len(tokens) - 1])])
    state = decode_state(engine.save(number, 0, PARTIAL), layout, engine.n_layers)
    engine.close()
    assert memory.recurrent is not None
    ours = memory.recurrent.live(0)
    for key, theirs in state.states.items():
        assert relative_errors({key: ours[key]}, {key: theirs})[key] < 3e-6


CLEAN = (
    ("demo-target", 3),
    ("demo-target", 8),
    ("qwen35-a-f32", 3),
    ("qwen35-a-f32", 8),
    ("qwen35-b-v2x-tied-f32", 3),
    ("qwen35-c-v2x-mtp-f32", 3),
    ("qwen35-g-v2x-q4_k_m", 3),
    ("qwen35-h-v2x-mtp-q8_0", 3),
    ("qwen35moe-d-v2x-mtp-f32", 3),
    ("qwen3next-e-v2x-f32", 3),
    ("qwen3-f-f32", 3),
)


@pytest.mark.parametrize(("name", "n_max"), CLEAN)
def test_lanes_are_clean_at_every_depth(name: str, n_max: int) -> None:
    lanes = [PLANES, CHECKPOINT, f"{CHECKPOINT},device"]
    options = options_of(80, n_max=n_max, n_ctx=256, ignore_eos=True)
    script = (*range(n_max + 1), 0, n_max, 1, 0, 0, 2)
    prompt = Prompt(tuple(tokens_of(name)[:N_PROMPT]))
    comparison = finish(
        Comparison(
            session_of(name),
            prompt,
            options,
            [LaneSpec.parse(lane) for lane in lanes],
            draft_accept=script,
            llama_library=Path(BUILD),
        )
    )
    found = verdicts(comparison)
    if name == "qwen3next-e-v2x-f32":
        refused = found.pop(PLANES)
        assert "no snapshot planes for the architecture qwen3next" in refused.error
    table = measured()[f"{name}-{n_max}"]["lanes"]
    worst = max(lane["nmse"] for lane in table)
    for lane in lanes:
        if lane in found:
            verdict = found[lane]
            assert verdict.verdict in ("exact", "within"), lane
            assert verdict.n_positions == 80
            assert verdict.worst_nmse <= 10 * worst, lane
            assert worst or verdict.verdict == "exact"
    errors = [finding for finding in recorded(comparison.trace) if finding.severity == "error"]
    assert not errors


@pytest.mark.parametrize("name", ["demo-target", "qwen35-a-f32", "qwen35-g-v2x-q4_k_m"])
def test_the_known_defects_are_named_at_their_round(name: str) -> None:
    lanes = [PLANES, f"{PLANES},n_rs_seq=8,undo=batch", f"{PLANES},step=1"]
    options = options_of(40, n_max=3, n_ctx=256, ignore_eos=True)
    prompt = Prompt(tuple(tokens_of(name)[:N_PROMPT]))
    comparison = finish(
        Comparison(
            session_of(name),
            prompt,
            options,
            [LaneSpec.parse(lane) for lane in lanes],
            draft_accept=(3, 2, 1, 0),
            llama_library=Path(BUILD),
        )
    )
    runs = comparison.trace.runs
    errors = [finding for finding in recorded(comparison.trace) if finding.severity == "error"]
    named = {(runs[one.run_id]["lane"], one.rule, one.round) for one in errors}
    # the first draft is right as a whole, the second is the first to be undone
    assert named == {(lanes[1], "stale-plane", 2), (lanes[2], "stale-plane", 2)}
    assert {lane: verdicts(comparison)[lane].verdict for lane in lanes[1:]} == {
        lanes[1]: "suspect",
        lanes[2]: "suspect",
    }


@pytest.mark.parametrize("name", ["llama-whole-batch", "llama-single-steps"])
def test_scenarios_show_it_in_the_library(name: str) -> None:
    scenario = find_scenario(SCENARIOS, name)
    opened = session_of("demo-target")
    job = Comparison(
        opened,
        [opened.prompt(text) for text in scenario.prompts],
        scenario.options,
        scenario.lanes,
        draft_accept=scenario.draft_accept or None,
        llama_library=Path(BUILD),
    )
    errors = [one for one in recorded(finish(job).trace) if one.severity == "error"]
    (finding,) = errors
    assert (finding.rule, finding.round) == ("stale-plane", 2)
    assert job.trace.runs[finding.run_id]["lane"] == scenario.lanes[-1].name


@pytest.mark.parametrize(
    "name",
    [
        "bailingmoe3-a-mtp-f32",
        "lfm2-a-tied-f32",
        # another split of a batch tips a tie of its experts
        "lfm2moe-b-f32",
        "nemotron_h_moe-b-mtp-f32",
        "qwen35-h-v2x-mtp-q8_0",
        "qwen4exp-b-qsa-f32",
    ],
)
def test_the_check_finds_the_known_defects_and_nothing_else(name: str) -> None:
    lanes = list(
        check_rollback(session_of(name), memory_scripts(ROLLBACK_SCRIPTS), Path(BUILD), (3,), 16)
    )
    assert not [lane for lane in lanes if lane.is_wrong]
    known = [(lane.policy, lane.round) for lane in lanes if lane.outcome == KNOWN]
    assert known == [("whole batch undone", 1), ("tokens one by one", 1)]


def test_a_library_that_ends_its_process_is_a_sentence() -> None:
    engine = LlamaProcess(DEMO_TARGET, Path(BUILD))
    number, _ = engine.open_context(1, 64, 3, 3, 1)  # an assertion of llama.cpp wants five
    with pytest.raises(PeerLibraryError, match=r"in decode: llama-batch\.cpp:\d+: GGML_ASSERT"):
        engine.decode(number, [Span(0, 0, [1, 2], [0, 1])])
    with pytest.raises(PeerLibraryError, match="process has ended"):
        engine.version()
    engine.close()


def test_what_the_library_refuses_is_a_sentence() -> None:
    engine = LlamaProcess(DEMO_TARGET, Path(BUILD))
    number, _ = engine.open_context(1, 64, 32, 0, 1)
    with pytest.raises(ContextFullError, match="position 5 of sequence 0, position 0 of"):
        engine.decode(number, [Span(0, 5, [1], [0]), Span(7, 0, [1], [0])])
    with pytest.raises(PeerLibraryError, match="restoring sequence 0"):
        engine.load(number, 0, engine.save(number, 0, PARTIAL)[:20], PARTIAL)
    engine.close()


@pytest.mark.parametrize("name", ["qwen35-a-f32", "demo-target"])
def test_memory_scripts_show_what_the_library_should_refuse(name: str) -> None:
    session = session_of(name)
    assert session.path is not None
    failed, refused = {}, []
    for script in memory_scripts(MEMORY_SCRIPTS):
        engine = LlamaProcess(session.path, Path(BUILD))
        try:
            play = MemoryPlay(script, "planes", LlamaScriptEngine(session, engine))
            while play.step():
                pass
            play.stop()
            failed[script.name] = [one.message for one in play.failures]
        except OptionError as error:
            refused.append(str(error))
        engine.close()
    wrong = {name: messages for name, messages in failed.items() if messages}
    assert wrong == {
        # a copy made while a rollback is pending reads plane 0: seq_cp leaves the index after
        "10-forks": [ANY, ANY],
        "11-forks-of-forks": [ANY, ANY],
        "6-active-gap": ["the removal was not refused"],
        "8-depth-bookkeeping": ["the removal was not refused"],
    }
    assert len(failed) == 10
    assert all("which llama.cpp does not support" in one for one in refused)


def test_the_driver_and_ctypes_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node of a traced graph, logits and states, bit by bit."""
    spans = [Span(0, 0, [1, 2, 3, 4, 5], range(5)), Span(1, 0, [9, 8], [1])]
    found = []
    for path in (os.environ["PATH"], ""):
        monkeypatch.setenv("PATH", path)
        engine = LlamaProcess(DEMO_TARGET, Path(BUILD))
        traced, planes = engine.open_context(2, 64, 32, 3, 1, traced=True)
        plain, _ = engine.open_context(2, 64, 32, 3, 1)
        logits, nodes = engine.trace(traced, spans, 100)
        assert np.array_equal(logits, engine.decode(plain, spans)) and planes == 3
        assert engine.seq_rm(plain, 0, 3) and engine.positions(plain, 0) == (2, 2)
        states = engine.save(plain, 0, PARTIAL)
        engine.close_context(traced)
        with pytest.raises(OptionError, match="closed"):
            engine.positions(traced, 0)
        found.append((logits, nodes, states, engine.n_bytes, engine.build_facts()))
        engine.close()
    driver, fallback = found
    assert np.array_equal(driver[0], fallback[0]) and driver[2:] == fallback[2:]
    assert len(driver[1]) > 100
    for mine, other in zip(driver[1], fallback[1], strict=True):
        assert (mine.name, mine.op, mine.shape, mine.stride) == (
            *(other.name, other.op, other.shape, other.stride),
        )
        assert np.array_equal(mine.values, other.values, equal_nan=True)
        assert mine.values.size <= 100
    # the two sequences may be in ubatches of their own
    norms = [node.norm for node in driver[1] if node.name == "result_output"]
    exact = float(np.linalg.norm(driver[0].astype(np.float64)))
    assert np.linalg.norm(norms) == pytest.approx(exact, rel=1e-6)
