"""Scenarios: what a file may say, and that the bundled ones show what they promise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.analysis.findings import cost
from engine.analysis.findings.check import RULES, recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE
from engine.compare.scenario import Scenario, find_scenario, read_scenario, scenarios
from engine.errors import OptionError
from engine.options import LANE_FAULTS, RunOptions, SpecOptions
from engine.session import Session
from resources import DEMO_TARGET, SCENARIOS
from tests.support.fake_llama import FakeLlama, use

NAMES = sorted(path.stem for path in SCENARIOS.glob("*.toml"))
HEAD = 'title = "t"\nabout = "a"\nprompts = ["x"]\n'


@cache
def demo() -> Session:
    return Session.open(DEMO_TARGET, compute="f32")


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Scenario]:
    def call(text: str) -> Scenario:
        (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
        return read_scenario(tmp_path / "mine.toml")

    return call


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(4)
def test_it_shows_what_it_promises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLlama(demo()))  # for lanes of llama.cpp
    monkeypatch.setattr(cost, "_DOMINATES", 0.0)  # the share itself is this machine's
    scenario = find_scenario(SCENARIOS, name)
    prompts, options = [demo().prompt(text) for text in scenario.prompts], scenario.options
    accepted = scenario.draft_accept or None
    if scenario.lanes:
        job = Comparison(demo(), prompts, options, scenario.lanes, draft_accept=accepted)
    else:
        job = demo().start(prompts, options)
    while job.step():
        pass
    found = recorded(job.trace)
    assert set(scenario.expects) <= {finding.rule for finding in found}
    # and nothing is accused next to it
    assert {f.rule for f in found if f.severity != "info"} <= set(scenario.expects)
    for finding in found:
        if finding.severity == "error":
            lane = job.trace.runs[finding.run_id]["lane"]
            assert any(word in lane for word in ("fault=", "undo=batch", "step=1"))
    assert max(job.trace.rounds.column("num_emitted")) >= 1


def test_the_bundled_ones_are_complete() -> None:
    bundled = scenarios(SCENARIOS)
    assert [scenario.name for scenario in bundled] == NAMES
    faults = {f for s in bundled for lane in s.lanes for f in lane.changes["faults"]}
    assert faults == set(LANE_FAULTS)
    for scenario in bundled:
        assert scenario.about.count(".") >= 2
        assert scenario.about.endswith(".") and not scenario.title.endswith(".")
        assert set(scenario.expects) <= set(RULES)
        assert scenario.symptom[-1:] in (".", "?") and len(scenario.symptom) < 90, "one sentence"
    assert len({scenario.symptom for scenario in bundled}) == len(bundled)


def test_a_file_is_read(read: Callable[[str], Scenario]) -> None:
    plain = read(HEAD)
    assert (plain.name, plain.title, plain.prompts) == ("mine", "t", ("x",))
    assert (plain.options, plain.lanes, plain.draft_accept, plain.expects) == (
        RunOptions(),
        (),
        (),
        (),
    )
    full = read(
        HEAD + 'lanes = ["planes,n_rs_seq=2"]\ndraft_accept = [0, 3]\nexpects = ["stale-plane"]\n'
        'options.sampler.temp = 1\noptions.n_rs_seq = 4\n[options.spec]\ntypes = ["draft-mtp"]\n'
    )
    assert full.options.spec == SpecOptions(types=("draft-mtp",))
    assert (full.options.sampler.temp, full.options.n_rs_seq) == (1.0, 4)
    assert full.lanes[0] == NOISE_LANE
    assert full.lanes[1].changes["n_rs_seq"] == 2
    assert (full.draft_accept, full.expects) == ((0, 3), ("stale-plane",))


BAD = {
    "no option": (HEAD + '[options]\nGROUP = "x"\n', r"mine\.toml: options\.GROUP is unknown"),
    "no TOML": ("title =", r"mine\.toml is not valid TOML"),
    "no prompt": ('title = "t"\nabout = "a"\nprompts = []\n', r"mine\.toml: prompts is empty"),
    "no title": ('about = "a"\nprompts = ["x"]\n', r"^mine\.toml has no title\."),
    "a key too many": (HEAD + "colour = 1\n", r"mine\.toml: colour is unknown; known are title,"),
    "an option too many": (HEAD + "options.spec.n = 1\n", r"options\.spec\.n is unknown"),
    "text for a number": (HEAD + 'options.n_predict = "9"\n', r"options\.n_predict is '9'"),
    "truth for a number": (HEAD + "options.n_predict = true\n", r"n_predict is True, not int"),
    "number for a list": (HEAD + "lanes = 3\n", r"mine\.toml: lanes is not a list"),
    "number for a text": (HEAD + "lanes = [3]\n", r"mine\.toml: lanes is 3, not str"),
    "value for a table": (HEAD + "options = 3\n", r"mine\.toml: options is not a table"),
    "too large": (HEAD + f"options.spec.p_min = {10**400}\n", r"spec\.p_min is far too large"),
    "out of range": (HEAD + "options.spec.n_max = 99\n", r"options\.spec is wrong: --spec-draft-n"),
    "a lane": (HEAD + 'lanes = ["gdn"]\n', r"lanes is wrong: .*'gdn' is not a rollback policy"),
    "a rule": (HEAD + 'expects = ["luck"]\n', r"expects names 'luck', which is not a rule"),
    "drafts, no lanes": (HEAD + "draft_accept = [1]\n", r"draft_accept needs lanes"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_file_is_named_with_its_key(read: Callable[[str], Scenario], case: str) -> None:
    text, message = BAD[case]
    with pytest.raises(OptionError, match=message):
        read(text)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(OptionError, match=r"no scenario 'luck'.*stale-logits"):
        find_scenario(SCENARIOS, "luck")
