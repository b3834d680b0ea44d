"""The table of what every family does on a GPU, rehearsed on the processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

import pytest

from tests.bench import gpu_table
from tests.bench.gpu_table import main, play_row
from tests.support.gpu_cells import CELLS

NAME = "lfm2-a-tied-f32"
SOON = 1e6


def test_one_family_does_all(tmp_path, capsys, pytestconfig):
    """A third of the cells, with --all every one."""
    written, chosen = tmp_path / "table.json", list(CELLS)
    words = ["--device", "cpu", "--model", NAME, "--json", str(written)]
    if not pytestconfig.getoption("all"):
        chosen = chosen[::3]
        words += [word for name in chosen for word in ("--only", name)]
    assert main(words) == 0
    heads, row, facts = capsys.readouterr().out.splitlines()
    assert heads.split() == chosen
    name, *ms = row.split()
    assert name == NAME and all(int(one) >= 0 for one in ms)
    assert f"cells {len(chosen)}, failed 0" in facts
    found = json.loads(written.read_text())
    assert found["rows"][NAME].keys() == set(chosen)
    assert all(cell["passes"] > 0 and not cell["error"] for cell in found["rows"][NAME].values())
    assert {"card", "driver", "torch", "triton", "processor", "date"} <= found.keys()


PLAYER = """
import json, os, sys, time
for cell in sys.argv[3:]:
    if cell == "dies":
        os.abort()
    if cell == "hangs":
        open("hanging", "w").close()
        time.sleep(1e4)
    error = "wrong" if cell == "fails" else ""
    print(json.dumps({"ms": 1.0, "passes": 2, "error": error}), flush=True)
    if error:
        break
"""


class WhenItHangs(Thread):
    """A timer of a player that is known to hang, however slow this machine is."""

    def __init__(self, _seconds: float, call: Callable[[], None]) -> None:
        super().__init__()
        self._call, self._over = call, Event()

    def run(self) -> None:
        place = gpu_table._ROOT / "hanging"
        while not self._over.wait(0.01):
            if place.exists():
                place.unlink()
                self._call()
                return

    def cancel(self) -> None:
        self._over.set()
        self.join()


def test_a_crash_and_a_hang_cost_their_cell(tmp_path, monkeypatch):
    (tmp_path / "player.py").write_text(PLAYER)
    monkeypatch.setattr(gpu_table, "_ROOT", tmp_path)
    monkeypatch.setattr(gpu_table, "_PLAYER", "player")
    monkeypatch.setattr(gpu_table, "Timer", WhenItHangs)
    cells = ["a", "dies", "b", "fails", "hangs", "c"]
    found = play_row(NAME, "cpu", cells, 3.0, monotonic() + SOON)
    assert [name for name, cell in found.items() if cell.error] == ["dies", "fails", "hangs"]
    assert "exit status -6" in found["dies"].error
    assert found["hangs"].error.startswith("no end within 3 s")
    assert found["c"].passes == 2 and found["c"].ms == 1.0


def test_what_is_not_played_is_no_success():
    found = play_row(NAME, "cpu", ["logits"], 1.0, monotonic() - 1)
    assert found["logits"].ms is None
    assert "not played" in found["logits"].error


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    wrong = gpu_table.Cell(5.0, 1, "AssertionError: other tokens")
    monkeypatch.setattr(gpu_table, "play_row", lambda *_: {"logits": wrong})
    assert main(["--device", "cpu", "--model", NAME, "--only", "logits"]) == 1
    said = capsys.readouterr().out
    assert "FAIL" in said and f"{NAME}, logits: AssertionError: other tokens" in said


def test_a_device_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--device", "cuda:77"])
    assert left.value.code == 2
    assert "--device cuda:77" in capsys.readouterr().err
