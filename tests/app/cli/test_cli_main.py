"""The entry point: what is a subcommand, exit statuses, one-line errors, and no Qt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.common import SUBCOMMANDS
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]
Python = Callable[..., "subprocess.CompletedProcess[str]"]


def test_no_subcommand_imports_qt(python: Python) -> None:
    modules = [f"app.cli.{name.replace('-', '_')}" for name in SUBCOMMANDS]
    done = python(
        f"import sys, importlib\n"
        f"for name in {modules!r} + ['engine.session', 'app.__main__']:\n"
        f"    importlib.import_module(name)\n"
        f"qt = [m for m in sys.modules if m.startswith(('PySide6', 'shiboken', 'pyqtgraph'))]\n"
        f"assert 'torch' in sys.modules\n"
        f"assert not qt, qt"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["logits", "--help"],
        ["info", "--demo"],
        ["tokenize", "--demo", "a"],
        ["demo-path"],
        ["run", "--demo"],
        ["no-such-thing"],
        ["run", "pyproject.toml", "-p", "a"],
        ["logits", "none", "--tokens", "1", "--out", "x"],
        [
            "run",
            "resources/demo/demo-target.gguf",
            "-md",
            "tests/data/qwen35-a-f32.gguf",
            "-p",
            "a",
            "--spec-type",
            "draft-simple",
        ],
    ],
    ids=" ".join,
)
def test_quick_commands_import_neither_torch_nor_qt(python: Python, argv: list[str]) -> None:
    done = python(
        f"import sys\nfrom app.__main__ import main\nstatus = main({argv!r})\n"
        f"heavy = [m for m in ('torch', 'PySide6', 'pyqtgraph') if m in sys.modules]\n"
        f"assert not heavy, heavy"
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_every_subcommand(cli: Cli) -> None:
    outcome = cli("--help")
    assert outcome.status == 0
    for name in SUBCOMMANDS:
        assert name in outcome.out
        shown = cli(name, "--help")
        assert shown.status == 0
        assert shown.out.startswith(f"usage: draftscope {name}")
        assert "--demo" in shown.out
        assert "--json" in shown.out


def test_version_is_the_projects(cli: Cli) -> None:
    declared = [
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "version =" in line
    ]
    for words in (["--version"], ["run", "--version"]):
        outcome = cli(*words)
        assert outcome.status == 0
        assert f'"{outcome.out.split()[1]}"' in declared[0]


def test_python_m_app_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app", "demo-path"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == [str(DEMO_TARGET), str(DEMO_DRAFT)]


def test_demo_path_as_json(cli: Cli) -> None:
    assert cli("demo-path", "--json").json == {"target": str(DEMO_TARGET), "draft": str(DEMO_DRAFT)}
    assert cli("demo-path", "--demo").status == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["inof", "model.gguf"], 2, "inof is neither a file nor a subcommand"),
        (["--no-such-option"], 2, "unrecognized arguments"),
        (["info"], 2, "No model is given"),
        (["info", "a.gguf", "-m", "b.gguf"], 2, "More than one model"),
        (["info", "no-such.gguf"], 1, "no-such.gguf"),
        (["info", "--demo", "--parallel", "0"], 2, "'0' is not a whole number from 1"),
        (["--demo", str(DEMO_TARGET)], 2, "Both a model and --demo"),
    ],
)
def test_usage_errors_are_told_apart_from_failures(
    cli: Cli, words: list[str], status: int, message: str
) -> None:
    outcome = cli(*words)
    assert outcome.status == status
    assert message in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err


def test_an_engine_error_is_one_line_with_its_remedy(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all")
    outcome = cli("info", tmp_path / "text.gguf")
    assert outcome.status == 1
    assert outcome.err.startswith("draftscope: error: text.gguf")
    assert outcome.err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="pipes as on POSIX")
def test_a_reader_that_leaves_is_no_error_to_shout_about() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "app", "info", "--demo"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="SIGINT as on POSIX")
def test_ctrl_c_exports_what_was_recorded(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "app",
            "run",
            "--demo",
            "-p",
            "def f",
            "-n",
            "100000",
            "--ignore-eos",
            "--threads",
            "1",
            "--trace",
            str(tmp_path / "out"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts background jobs with the signal ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(8)  # the prompt and the first token are out
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "trace written to" in err
    assert len((tmp_path / "out" / "rounds.csv").read_text().splitlines()) > 1
