"""The way to the window: what is handed to it, and what stops it before Qt would abort."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.trace.export import export_csv
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]
Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls of run_window, with a stand-in for the window."""
    calls: list[object] = []

    def run_window(models: list[Path], drafts: list[Path], demo: bool, traces: list[Path]) -> int:
        calls.append((models, drafts, demo, *traces))
        return 0

    gui = types.ModuleType("app.window.gui")
    gui.run_window = run_window  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "app.window.gui", gui)
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    return calls


def test_what_the_window_is_given(cli: Cli, opened: list[object]) -> None:
    assert cli().status == 0
    assert cli("--demo").status == 0
    assert cli(DEMO_TARGET).status == 0
    assert cli(DEMO_TARGET, "-md", DEMO_DRAFT, "-md", DEMO_DRAFT).status == 0
    assert cli("-m", DEMO_TARGET).status == 0
    assert opened == [
        ([], [], False),
        ([], [], True),
        ([DEMO_TARGET], [], False),
        ([DEMO_TARGET], [DEMO_DRAFT, DEMO_DRAFT], False),
        ([DEMO_TARGET], [], False),
    ]


def test_a_text_is_left_to_the_readers_of_traces(
    cli: Cli, opened: list[object], tmp_path: Path
) -> None:
    har, model = tmp_path / "page.har", tmp_path / "sha256-1"
    har.write_text('{"log": {"version": "1.2", "entries": []}}')
    model.symlink_to(DEMO_TARGET)
    other = tmp_path / "x.safetensors"
    other.write_bytes(b"\x40" + b"\0" * 7 + b"{}")
    assert cli("--demo", har).status == cli(model).status == cli(other).status == 0
    assert opened == [([], [], True, har), ([model], [], False), ([other], [], False)]


def test_a_file_named_like_a_subcommand_opens_by_its_path(
    cli: Cli, opened: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "info").touch()
    monkeypatch.chdir(tmp_path)
    assert cli("./info").status == 0
    assert opened == [([], [], False, Path("info"))]


def test_a_folder_is_an_exported_trace_with_a_model_or_without(
    cli: Cli, opened: list[object], tmp_path: Path
) -> None:
    export_csv(TraceStore(), folder := tmp_path / "trace")
    (tmp_path / "empty").mkdir()
    assert cli(folder).status == 0
    assert cli(folder / "session.json").status == 0
    assert cli(folder, DEMO_TARGET, folder / "rounds.csv").status == 0
    assert cli(folder, "--demo").status == 0
    shown = [], [], False, folder
    assert opened == [shown, shown, ([DEMO_TARGET], *shown[1:]), ([], [], True, folder)]
    assert cli(tmp_path / "empty").status == cli(DEMO_TARGET, tmp_path / "empty").status == 2
    assert "session.json is missing" in cli(tmp_path / "empty").err


START = "from app.__main__ import main; raise SystemExit(main(['--demo']))"


def test_without_a_display_there_is_one_clear_line(python: Python) -> None:
    done = python(START, DISPLAY=None, WAYLAND_DISPLAY=None, QT_QPA_PLATFORM=None)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "neither DISPLAY nor WAYLAND_DISPLAY is set" in done.stderr
    assert "subcommand" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="display servers of Linux")
@pytest.mark.parametrize(
    "environment",
    [
        {"DISPLAY": ":4711"},
        {"WAYLAND_DISPLAY": "wayland-4711"},
        {"WAYLAND_DISPLAY": "wayland-4711", "XDG_RUNTIME_DIR": "/nonexistent"},
        {"DISPLAY": ":4711", "WAYLAND_DISPLAY": "wayland-4711"},
        {"QT_QPA_PLATFORM": "xcb"},
    ],
    ids=str,
)
@pytest.mark.thinned(4)
def test_a_display_that_does_not_answer_is_no_abort(
    python: Python, environment: dict[str, str]
) -> None:
    unset = dict.fromkeys(("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM", "XDG_RUNTIME_DIR"))
    done = python(START, **(unset | environment))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    # without the display server's libraries the missing one is named instead
    assert "display server answers" in done.stderr or "apt-get install" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared objects of Linux")
@pytest.mark.parametrize("library", ["libEGL.so.1", "libxkbcommon.so.0", "libxcb-cursor.so.0"])
def test_a_missing_system_library_names_the_packages(
    python: Python, tmp_path: Path, library: str
) -> None:
    (tmp_path / library).write_bytes(b"")  # found first, and no library
    done = python(
        START,
        LD_LIBRARY_PATH=str(tmp_path),
        DISPLAY=":4711",
        WAYLAND_DISPLAY=None,
        QT_QPA_PLATFORM=None,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert library.partition(".so")[0] in done.stderr
    assert "apt-get install libegl1" in done.stderr


def test_qt_missing_altogether_names_the_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "PySide6"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    outcome = cli("--demo")
    assert outcome.status == 1
    assert "The Python package PySide6 is missing" in outcome.err


def test_what_another_engine_wrote_is_opened_like_a_trace(
    cli: Cli, opened: list[object], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"num_spec_steps": 2, "mean_acceptance_length": 1.5, "engine": "vllm"}')
    assert cli(record).status == 0
    assert opened == [([], [], False, record)]
