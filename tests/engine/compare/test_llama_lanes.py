"""Lanes that roll back in llama.cpp, over a double that keeps its rules."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import judge_lanes
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LLAMA_NOISE_LANE, LLAMA_PLAIN_LANE, LaneSpec
from engine.compare.lanes import LaneMode, with_mode_lanes
from engine.compare.memory_engine import play_script
from engine.compare.memory_script_parser import memory_scripts, parse_script, read_script
from engine.compare.rollback_check import play_scripts
from engine.errors import OptionError
from engine.options import Prompt, StateTypes
from engine.trace.export import export_csv
from engine.trace.facts import Finding
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from resources import ROLLBACK_SCRIPTS
from tests.support.comparisons import differences_of, finish, rounds_of, verdicts
from tests.support.fake_llama import FakeLlama, use
from tests.support.golden_runs import MTP_MODELS, options_of, prompt_of, session

MTP = MTP_MODELS[0]
PLANES, CHECKPOINT = "llama.cpp,rollback=planes", "llama.cpp,rollback=checkpoint"
WHOLE_BATCH = f"{PLANES},n_rs_seq=8,undo=batch"
SINGLE_STEPS = f"{PLANES},step=1"
SCRIPT = (0, 1, 2, 3)


def compared(fake: FakeLlama, *lanes: str, n: int = 24, prompts: int = 1) -> Comparison:
    tokens = prompt_of(MTP).tokens
    texts = [Prompt(tokens[i : i + 12]) for i in range(prompts)]
    options = options_of(n, n_max=3, n_ctx=128, parallel=2, ignore_eos=True)
    specs = [LaneSpec.parse(lane) for lane in lanes]
    return Comparison(fake.session, texts, options, specs, draft_accept=SCRIPT)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    library = FakeLlama(session(MTP))
    use(monkeypatch, library)
    return library


def found_in(comparison: Comparison, lane: str) -> list[Finding]:
    run_id = verdicts(comparison)[lane].run_id
    return [finding for finding in recorded(comparison.trace) if finding.run_id == run_id]


def slots_of(comparison: Comparison, lane: str) -> list[tuple[int, int, str, int]]:
    """Rows of the memory table: round, slot, state, age."""
    table = comparison.trace.memory
    run_id = verdicts(comparison)[lane].run_id
    rows = (table.row(i) for i in range(len(table)))
    return [(r["round"], r["slot"], r["state"], r["age"]) for r in rows if r["run_id"] == run_id]


def test_every_depth_is_exact_by_planes_and_checkpoints(fake: FakeLlama) -> None:
    lanes = (PLANES, CHECKPOINT, f"{CHECKPOINT},device")
    comparison = finish(compared(fake, *lanes))
    found = verdicts(comparison)
    assert list(found) == ["reference", "llama.cpp", "llama.cpp,rollback=noise", *lanes]
    assert found["llama.cpp"].verdict == "mode"
    plain = found["llama.cpp"].run_id
    for lane in lanes:
        verdict = found[lane]
        assert (verdict.verdict, verdict.n_positions) == ("exact", 24)
        assert (verdict.state_error, verdict.conv_error) == (0.0, 0.0)
        assert comparison.trace.runs[verdict.run_id]["lane_against"] == plain
        assert not found_in(comparison, lane)
        rounds = rounds_of(comparison, lane)
        depths = rounds["rollback_depth"][1:]  # after the prompt
        assert depths[:4].tolist() == [3, 2, 1, 0]
        path = "seq_rm" if lane == PLANES else "restore"
        assert rounds["path"][1:5].tolist() == [path] * 3 + ["none"]
    assert slots_of(comparison, PLANES)[:3] == [
        (1, 3, "pending", 3),
        (2, 2, "pending", 2),
        (3, 1, "pending", 1),
    ]
    assert {context.settings.n_rs_seq for context in fake.contexts} == {0, 3}
    assert fake.freed.count("model") == 1 and fake.freed.count("context") == len(fake.contexts)


def test_a_checkpoint_is_told_with_its_bytes(fake: FakeLlama) -> None:
    comparison = finish(compared(fake, CHECKPOINT, f"{CHECKPOINT},device"))
    table = comparison.trace.rounds
    for lane, size in ((CHECKPOINT, None), (f"{CHECKPOINT},device", 8)):
        mine = table.column("run_id") == verdicts(comparison)[lane].run_id
        saved = table.column("checkpoint_bytes")[mine][1:]
        restored = table.column("state_bytes_restored")[mine][1:4]
        assert len(set(saved.tolist())) == 1 and saved[0] > 0
        assert size in (None, saved[0])
        assert restored.tolist() == [saved[0]] * 3


@pytest.mark.parametrize(
    ("lane", "depth", "age", "wrong_from"), [(WHOLE_BATCH, 4, 8, 1), (SINGLE_STEPS, 3, 7, 2)]
)
def test_the_two_known_defects_are_named(
    fake: FakeLlama, lane: str, depth: int, age: int, wrong_from: int
) -> None:
    """Four tokens are undone or decoded one by one after a prompt in one batch: what is read is
    four positions too old."""
    comparison = finish(compared(fake, PLANES, lane))
    verdict = verdicts(comparison)[lane]
    assert (verdict.verdict, verdict.first_round) == ("suspect", wrong_from)
    (finding,) = found_in(comparison, lane)
    assert (finding.rule, finding.round) == ("stale-plane", 1)
    assert f"A rollback of {depth} tokens" in finding.message
    assert f"a state of {age} tokens ago" in finding.message
    assert slots_of(comparison, lane)[0] == (1, depth, "pending", age)
    assert not found_in(comparison, PLANES)


@pytest.mark.parametrize(("lane", "last"), [(WHOLE_BATCH, 4), (SINGLE_STEPS, 1)])
def test_a_build_that_refuses_them_stops_the_lane_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, lane: str, last: int
) -> None:
    use(monkeypatch, FakeLlama(session(MTP), refuses=True))
    comparison = finish(compared(FakeLlama(session(MTP)), PLANES, lane))
    found = verdicts(comparison)
    assert (found[PLANES].verdict, found[lane].verdict) == ("exact", "failed")
    assert f"after a batch of {last} with n_rs_seq" in found[lane].error
    assert not found_in(comparison, lane)


def test_an_architecture_without_planes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLlama(session(MTP), has_planes=False))
    comparison = finish(compared(FakeLlama(session(MTP)), PLANES, CHECKPOINT))
    found = verdicts(comparison)
    assert (found[PLANES].verdict, found[CHECKPOINT].verdict) == ("failed", "exact")
    assert "no snapshot planes for the architecture qwen35 (n_rs_seq is 0)" in found[PLANES].error


def test_a_restore_that_is_wrong_is_found_with_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLlama(session(MTP), drift=0.01))
    comparison = finish(compared(FakeLlama(session(MTP)), CHECKPOINT))
    verdict = verdicts(comparison)[CHECKPOINT]
    assert (verdict.verdict, verdict.first_round) == ("suspect", 1)
    assert verdict.state_error is not None and 1e-4 < verdict.state_error < 0.1
    (finding,) = found_in(comparison, CHECKPOINT)
    assert (finding.rule, finding.round) == ("state-wrong", 1)
    states = comparison.trace.states
    mine = states.column("run_id") == verdict.run_id
    layers = set(states.column("layer")[mine].tolist())
    assert layers == {i for i, flag in enumerate(session(MTP).config.recurrent_layers) if flag}


def test_planes_are_shown_on_request(fake: FakeLlama) -> None:
    lane = f"{PLANES},n_rs_seq=5,show-planes"
    comparison = finish(compared(fake, PLANES, lane))
    assert verdicts(comparison)[lane].verdict == "exact"
    rows = slots_of(comparison, lane)
    # a batch of four wrote planes 0 to 3, of which only the accepted tokens' can be known;
    # planes 4 and 5 are those of the prompt
    assert [row for row in rows if row[0] == 1] == [
        (1, 3, "pending", 3),
        (1, 4, "stale", 8),
        (1, 5, "stale", 9),
    ]
    assert [row for row in rows if row[0] == 4][:3] == [
        (4, 1, "fresh", 1),
        (4, 2, "fresh", 2),
        (4, 3, "fresh", 3),
    ]
    assert not found_in(comparison, lane)
    with pytest.raises(OptionError, match="can read the planes of only one sequence"):
        compared(fake, lane, prompts=2)


def test_sequences_side_by_side_share_a_batch(fake: FakeLlama) -> None:
    comparison = finish(compared(fake, PLANES, CHECKPOINT, prompts=3))
    for lane in (PLANES, CHECKPOINT):
        verdict = verdicts(comparison)[lane]
        # wider passes add in another order
        assert (verdict.verdict in ("exact", "within"), verdict.n_positions) == (True, 72)
        assert set(differences_of(comparison, lane)["seq_id"].tolist()) == {0, 1, 2}
        assert not found_in(comparison, lane)


@pytest.mark.parametrize(("rank", "verdict"), [(2.0, "within"), (4.0, "suspect")])
@pytest.mark.thinned(4)
def test_the_bound_is_three_times_the_noise(fake: FakeLlama, rank: float, verdict: str) -> None:
    fake.scales = {1: 1.01, 2: 1.01, 3: 1 + 0.01 * math.sqrt(rank)}
    found = verdicts(finish(compared(fake, PLANES)))
    assert found["llama.cpp,rollback=noise"].worst_nmse == pytest.approx(1e-4, rel=1e-3)
    assert found[PLANES].worst_nmse == pytest.approx(rank * 1e-4, rel=1e-3)
    assert found[PLANES].bound == pytest.approx(3e-4, rel=1e-3)
    assert found[PLANES].verdict == verdict


def test_the_trace_opens_again_with_the_same_verdicts(fake: FakeLlama, tmp_path: Path) -> None:
    comparison = finish(compared(fake, PLANES, SINGLE_STEPS))
    export_csv(comparison.trace, tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    before = verdicts(comparison)
    after = {one.lane: one for one in judge_lanes(trace, list(trace.runs))}
    assert {lane: (one.verdict, one.first_round) for lane, one in after.items()} == {
        lane: (one.verdict, one.first_round) for lane, one in before.items()
    }


def test_a_plain_lane_that_fails_stops_those_that_it_leads(fake: FakeLlama) -> None:
    fake.fails_at = 20
    found = verdicts(finish(compared(fake, PLANES)))
    assert found["reference"].verdict == "reference"
    for lane in ("llama.cpp", PLANES):
        assert found[lane].verdict == "failed" or "could not decode" in found[lane].error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("llama.cpp,rollback=ring", "rollback 'ring' is unknown"),
        ("llama.cpp,rollback=checkpoint,n_rs_seq=3", "'n_rs_seq' is not a setting of rollback="),
        ("llama.cpp,rollback=planes,n_rs_seq=0", "not a whole number of 1 or more"),
        ("llama.cpp,rollback=planes,n_rs_seq", "'n_rs_seq' is not a setting"),
        ("llama.cpp,rollback=planes,undo=all", "undo 'all' is unknown"),
        ("llama.cpp,device", "rollback '' is unknown"),
        ("llama.cpp,rollback=checkpoint,device=1", "'device=1' is not a setting"),
        ("llama.cpp,rollback=planes,rollback=planes", "given twice"),
    ],
)
def test_texts_that_are_no_lane(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        LaneSpec.parse(text)


def test_lanes_bring_the_plain_one_and_the_noise() -> None:
    specs = [LaneSpec.parse(text) for text in ("planes", PLANES, CHECKPOINT)]
    assert with_mode_lanes(specs, LaneMode("f32", StateTypes())) == [
        specs[0],
        LLAMA_PLAIN_LANE,
        LLAMA_NOISE_LANE,
        *specs[1:],
    ]
    # one that was asked for leads them, and is judged as a peer
    asked = [LaneSpec.parse(text) for text in (PLANES, "peer", LLAMA_NOISE_LANE.name)]
    names = [spec.name for spec in with_mode_lanes(asked, LaneMode("f32", StateTypes()))]
    assert names[:3] == ["peer", LLAMA_NOISE_LANE.name, PLANES]
    assert [name for name in names if name.startswith("noise,peer")] == names[3:]


def test_planes_need_wider_ubatches(fake: FakeLlama) -> None:
    options = options_of(8, n_max=3, n_ubatch=4)
    with pytest.raises(OptionError, match="3 planes need ubatches of more than 4 tokens"):
        Comparison(
            fake.session, prompt_of(MTP), options, [LaneSpec.parse(PLANES)], draft_accept=(1,)
        )


def test_scripts_of_reported_failures_are_right_and_see_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, FakeLlama(session(MTP)))
    scripts = memory_scripts(ROLLBACK_SCRIPTS)
    checked = list(play_scripts(session(MTP), scripts))
    assert len(checked) == 19 and {one.outcome for one in checked} == {"right"}
    use(monkeypatch, FakeLlama(session(MTP), drift=0.01))
    wrong = {one.scenario for one in play_scripts(session(MTP), scripts) if one.outcome == "WRONG"}
    assert wrong == {
        # those that restore a checkpoint
        "beyond-an-end-token",
        "checkpoint-and-slot-file",
        "deeper-than-n_rs_seq",
        "dirty-context",
        "partial-acceptance",
        "planes-and-checkpoint",
    }


def test_noise_raises_the_bounds_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored states that are off by less than what widths of a batch are off by."""
    script = read_script(ROLLBACK_SCRIPTS / "partial-acceptance.toml")
    outcomes = []
    for noise in (0.0, 1e-2):
        fake = FakeLlama(session(MTP), drift=2e-3)
        use(monkeypatch, fake)
        monkeypatch.setattr(
            "engine.compare.rollback_check._noise_of",
            lambda owner, noise=noise: {"error": noise, "nmse": noise},
        )
        outcomes += [one.outcome for one in play_scripts(session(MTP), [script])]
    assert outcomes == ["right", "WRONG", "right", "right"]


@pytest.mark.parametrize(
    ("fault", "seen_by"),
    [
        (None, ()),
        ("plane-off-by-one", ("prompt-of-n_max-and-one", "ubatch-borders")),
        ("no-conv-rollback", ("prompt-of-n_max-and-one", "ubatch-borders")),
        ("keep-stale-kv", ("checkpoint-and-slot-file",)),
    ],
)
@pytest.mark.thinned(4)
def test_scripts_see_planted_faults(fault: str | None, seen_by: tuple[str, ...]) -> None:
    """On this engine, whose memory can be made wrong."""
    seen = []
    for name in ("checkpoint-and-slot-file", "prompt-of-n_max-and-one", "ubatch-borders"):
        text = (ROLLBACK_SCRIPTS / f"{name}.toml").read_text()
        if fault:
            text = text.replace("context A", f"context A fault={fault}")
        script = parse_script(name, f"{name}.toml", text)
        play = play_script(session(MTP), script, "planes", TraceStore())
        while play.step():
            pass
        seen += [name] if play.failures else []
    assert tuple(seen) == seen_by
