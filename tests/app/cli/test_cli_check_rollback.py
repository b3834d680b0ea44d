"""`draftscope check-rollback` over a double of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.__main__ import main
from engine.errors import PeerLibraryError
from tests.support.fake_llama import FakeLlama, use, with_scripts
from tests.support.golden_runs import DATA, MTP_MODELS, session

MODEL = str(DATA / f"{MTP_MODELS[0]}.gguf")
SCRIPT = "checkpoint-and-slot-file"
SHORT = ("--depths", "2", "-n", "5")
# the scenario with lanes of every kind
DEPTHS = ("--only", "every depth")
BOTH = (*DEPTHS, "--only", SCRIPT)


@pytest.fixture(autouse=True)
def few_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_scripts(monkeypatch, SCRIPT)


def check(*args: str) -> int:
    return main(["check-rollback", MODEL, *SHORT, *args])


def test_known_defects_are_told_and_fail_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = FakeLlama(session(MTP_MODELS[0]))
    use(monkeypatch, fake)
    assert check("--trace", str(tmp_path / "trace"), "--llama-cpp-lib", "some/build") == 0
    assert fake.library == Path("some/build")
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.endswith(("right", "known defect"))]
    # four scenarios of three lanes, two beyond what is guaranteed, and a script twice
    assert len(rows) == 16
    assert sum(row.endswith("known defect") for row in rows) == 2
    assert "every depth, whole batch undone, 3 planes: stale-plane: A rollback of 3" in out
    assert "llama.cpp 0.0-fake: 16 lanes, 0 wrong, 2 with known defects" in out
    assert (tmp_path / "trace" / "findings.csv").is_file()
    assert check("--strict", *DEPTHS) == 1


def test_a_mended_build_refuses_and_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0]), refuses=True))
    assert check("--strict", "--json", *BOTH) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["wrong"], found["known"]) == (0, 0)
    outcomes = {(lane["policy"], lane["outcome"]) for lane in found["lanes"]}
    assert outcomes == {
        ("planes", "right"),
        ("checkpoint", "right"),
        ("checkpoint, device", "right"),
        ("whole batch undone", "refused"),
        ("tokens one by one", "refused"),
    }


def test_a_wrong_build_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0]), drift=0.01))
    assert check("--json", *BOTH) == 1
    found = json.loads(capsys.readouterr().out)
    scripts = [lane for lane in found["lanes"] if not lane["n_draft"]]
    assert [lane["outcome"] for lane in scripts] == ["WRONG", "WRONG"]
    assert "check A 0 12:18 = C 0 nmse<=1e-6: nmse is" in scripts[0]["about"]
    lanes = [lane for lane in found["lanes"] if lane["n_draft"]]
    wrong = {lane["policy"] for lane in lanes if lane["outcome"] == "WRONG"}
    assert wrong == {"checkpoint", "checkpoint, device"}
    first = next(lane for lane in found["lanes"] if lane["outcome"] == "WRONG")
    assert first["round"] == 1 and first["about"].startswith("state-wrong: ")
    assert first["worst_nmse"] > first["bound"]


def test_an_architecture_without_planes_passes_by_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0]), has_planes=False))
    assert check("--strict", "--json", *BOTH) == 0
    found = json.loads(capsys.readouterr().out)
    assert {lane["outcome"] for lane in found["lanes"]} == {"right", "no planes"}


FAMILY = (*DEPTHS, "--only", "two sequences")
FAMILIES = {
    "bailingmoe3-a-mtp-f32": True,
    "lfm2-a-tied-f32": True,
    "nemotron_h_moe-b-mtp-f32": True,
    "qwen3next-e-v2x-f32": False,
    "qwen4exp-b-qsa-f32": True,
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.thinned(4)
def test_states_of_every_family_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeLlama(session(name), has_planes=FAMILIES[name]))
    assert main(["check-rollback", str(DATA / f"{name}.gguf"), *SHORT, *FAMILY, "--json"]) == 0
    lanes = json.loads(capsys.readouterr().out)["lanes"]
    assert {lane["outcome"] for lane in lanes if lane["policy"].startswith("checkpoint")} == {
        "right"
    }
    traps = ("whole batch undone", "tokens one by one")
    known = {lane["policy"] for lane in lanes if lane["outcome"] == "known defect"}
    assert known == (set(traps) if FAMILIES[name] else set())
    kept = "conv_error" if name.startswith("lfm2") else "state_error"
    led = [lane for lane in lanes if lane["n_draft"] and lane["outcome"] == "right"]
    assert led and all(lane[kept] is not None for lane in led)


def test_states_in_another_format_are_not_judged_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeLlama(session(MTP_MODELS[0]))
    fake.n_layers_written = 77
    use(monkeypatch, fake)
    assert check("--json", *BOTH) == 0
    lanes = json.loads(capsys.readouterr().out)["lanes"]
    right = [lane for lane in lanes if lane["outcome"] != "WRONG"]
    assert {lane["outcome"] for lane in right} == {"not judged"}
    assert "is of 77 layers and not of 4" in right[0]["about"]


def test_a_library_that_ends_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeLlama(session(MTP_MODELS[0]))

    def ends(*_: object) -> int:
        raise PeerLibraryError("The llama.cpp library ended its process in decode.", "Look.")

    monkeypatch.setattr(fake, "llama_decode", ends)
    monkeypatch.setattr(fake, "llama_memory_seq_rm", ends)  # asked after its end
    use(monkeypatch, fake)
    assert check("--json") == 1
    lanes = json.loads(capsys.readouterr().out)["lanes"]
    assert {lane["outcome"] for lane in lanes} == {"FAILED"}
    assert lanes[0]["about"].startswith("The llama.cpp library ended its process in decode.")


@pytest.mark.parametrize("depths", ["0", "a", "65", "1,,2"])
def test_depths_that_are_none(depths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-rollback", MODEL, "--depths", depths]) == 2
    assert "is not a list of whole numbers" in capsys.readouterr().err


def test_scenarios_and_scripts_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeLlama(session(MTP_MODELS[0])))
    assert check("--only", "all rejected", "--json") == 0
    lanes = json.loads(capsys.readouterr().out)["lanes"]
    assert {lane["scenario"] for lane in lanes} == {"all rejected"}
    assert check("--only", "none of them") == 2
    assert "There is no scenario 'none of them'. Choose from every depth, all rejected" in (
        capsys.readouterr().err
    )


def test_nothing_is_printed_where_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert check("--llama-cpp-lib", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.out == "" and str(tmp_path) in said.err
