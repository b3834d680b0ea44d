"""The frame of the campaigns finds every fault that is planted, and makes its case small."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np

from engine.gguf.file import GgufFile
from engine.model.drafters.config import KINDS
from engine.model.families import FAMILIES
from tests.torture import report
from tests.torture.campaigns.endure import _slope
from tests.torture.children import Outcome
from tests.torture.corpus import load
from tests.torture.gguf_parts import base_file, bases, drafter_bases, parts_of
from tests.torture.gguf_steps import draw, write
from tests.torture.listed import NAMES, campaign
from tests.torture.planted import CAMPAIGN, FAULTS
from tests.torture.smallest import smallest

ROOT = Path(__file__).resolve().parents[2]


def test_every_planted_fault_is_found_and_made_small(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.torture.planted", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    line, failures, broken = json.loads(done.stdout)
    assert (line["cases"], line["failures"]) == (2 * len(FAULTS), len(FAULTS))
    assert broken == [f'planted: failures is {len(FAULTS)}, allowed is {{"most": 0}}.']
    entries = [load(path) for path in (tmp_path / "corpus").iterdir()]
    assert {entry.cases[0]["steps"][0] for entry in entries} == set(FAULTS)
    assert all(
        entry.cases == [{"steps": entry.cases[0]["steps"][:1], "settings": {}}] for entry in entries
    )
    assert {entry.seed[1] for entry in entries} == set(range(1, 2 * len(FAULTS), 2))
    told = [line.split("\n")[0] for line in failures]
    assert told == [
        "ValueError in tests/torture/planted.py, _play: planted",
        "the process ended by signal 6",
        "the process ended by an exit",
        "no end within its time",
        told[4],
        "left running: sleep",
        told[6],
    ]
    assert "MemoryError" in told[4]
    assert told[6].startswith("it did not answer for ")


def test_a_case_is_made_as_small_as_it_can_be() -> None:
    case = {"steps": list(range(40)), "settings": {"a": 1, "b": [2, 3]}, "base": "x"}

    def fails(smaller: dict) -> bool:
        return {7, 31} <= set(smaller["steps"]) and 3 in smaller["settings"].get("b", [])

    assert smallest(case, fails, 10) == {"steps": [7, 31], "settings": {"b": [3]}, "base": "x"}


def test_the_same_seed_draws_the_same_case() -> None:
    assert CAMPAIGN.case(1, 3) == CAMPAIGN.case(1, 3)


def test_every_architecture_has_a_file_that_is_damaged() -> None:
    """One that is new to the program is damaged as well."""
    found, drafters = set(), set()
    for name in [*bases(), *drafter_bases()]:
        with GgufFile.open(base_file(name)) as file:
            found.add(file.architecture)
            if file.architecture in KINDS:
                drafters.add(KINDS[file.architecture](file).drafter)
    assert found == FAMILIES.keys() | KINDS.keys()
    assert drafters == {"draft-eagle3", "draft-dflash", "draft-dspark"}
    assert set(drafter_bases().values()) <= set(bases())


def test_a_model_taken_apart_is_written_as_it_was() -> None:
    for name in [*bases(), *drafter_bases()]:
        assert parts_of(name).bytes() == base_file(name).read_bytes()


def test_steps_of_a_model_file_survive_json(tmp_path: Path) -> None:
    parts = parts_of("lfm2-a-tied-f32")
    for seed in range(25):
        steps = [draw(np.random.default_rng((seed, i)), parts) for i in range(3)]
        again = json.loads(json.dumps(steps))
        folders = [tmp_path / f"{seed}-{i}" for i in range(2)]
        for folder, given in zip(folders, (steps, again), strict=True):
            folder.mkdir()
            write(parts, given, folder)
        one, other = ([p for p in sorted(f.iterdir()) if p.is_file()] for f in folders)
        assert [p.stat().st_size for p in one] == [p.stat().st_size for p in other]
        small = [(a, b) for a, b in zip(one, other, strict=True) if a.stat().st_size < 1 << 24]
        assert all(a.read_bytes() == b.read_bytes() for a, b in small)


def test_a_share_is_judged_where_there_are_enough(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "thresholds.toml"
    text = '[every]\nfailures = { most = 0 }\n[planted]\n"a/b" = { least = 0.5, from = 4 }\n'
    path.write_text(text)
    monkeypatch.setattr(report, "THRESHOLDS", path)
    found = report.Report(CAMPAIGN, 1)
    assert found.broken() == []
    for n in range(1, 5):
        found.count(Outcome({"a": n == 1, "b": 1}))
        assert bool(found.broken()) == (n == 4)
    assert found.broken() == ['planted: a/b is 0.25, allowed is {"least": 0.5, "from": 4}.']
    found.count(Outcome({"a": 2, "b": 1}))
    assert found.broken() == []


def test_every_threshold_is_of_a_campaign() -> None:
    limits = tomllib.loads(report.THRESHOLDS.read_text())
    assert limits.keys() - {"every"} <= set(NAMES)
    for name, figures in limits.items():
        for figure, limit in figures.items():
            # cases that are always played are enough to judge it
            assert "/cases" not in figure or limit["from"] <= campaign(name).n_least


def test_a_slope_is_what_grows_with_every_round() -> None:
    assert _slope([5.0 + 3 * i for i in range(12)]) == 3
    assert _slope([0.0] * 9 + [9000.0] * 2) == 0
