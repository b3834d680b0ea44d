"""The entry point: what is a subcommand, exit statuses, one-line errors, and no Qt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.cli.parser import SUBCOMMANDS, module_of
from engine.errors import OptionError
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]
Python = Callable[..., "subprocess.CompletedProcess[str]"]


def test_no_subcommand_imports_qt(python: Python) -> None:
    modules = [module_of(name) for name in SUBCOMMANDS]
    done = python(
        f"import sys, importlib\n"
        f"from app.__main__ import shorten_torch\n"
        f"shorten_torch()\n"
        f"for name in {modules!r} + ['engine.session']:\n"
        f"    importlib.import_module(name)\n"
        f"from app.__main__ import main\n"
        f"assert main(['compare', '--demo', '-p', 'x', '-n', '3']) == 0\n"
        f"import gc\n"
        f"assert gc.get_threshold()[0] == 20_000\n"
        f"qt = [m for m in sys.modules if m.startswith(('PySide6', 'shiboken', 'pyqtgraph'))]\n"
        f"assert 'torch' in sys.modules\n"
        f"assert not hasattr(sys.modules['torch._meta_registrations'], 'register_meta')\n"
        f"import torch\n"
        f"from app.__main__ import _UNUSED\n"
        f"unused = list(filter(_UNUSED.fullmatch, sys.modules))\n"
        f"assert len(unused) == 25, unused\n"
        f"for name in unused:\n"
        f"    assert '__builtins__' not in vars(sys.modules[name]), name\n"
        f"assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()\n"
        f"assert torch.optim.SGD.__name__ == 'SGD'\n"
        f"assert torch.vmap(lambda x: 2 * x)(torch.ones(2)).tolist() == [2.0, 2.0]\n"
        f"import os\n"
        f"assert 'GOMP_SPINCOUNT' not in os.environ\n"
        f"assert not qt, qt"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["pathlib", "app.cli.parser", "engine.long_work"])
def test_ctrl_c_during_the_first_imports_is_quiet(python: Python, module: str) -> None:
    done = python(
        f"import sys\n"
        f"class Pressed:\n"
        f"    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        f"            raise KeyboardInterrupt\n"
        f"sys.modules.pop({module!r}, None)\n"
        f"sys.meta_path.insert(0, Pressed())\n"
        f"import app.__main__"
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_quick_commands_import_neither_torch_nor_qt(python: Python) -> None:
    commands = [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["run", "--help-all"],
        ["run", "--draft-max", "3"],
        ["help"],
        ["help", "rollback"],
        ["logits", "--help"],
        ["info", "--demo"],
        ["tokenize", "--demo", "a"],
        ["demo-path"],
        ["run", "--demo"],
        ["no-such-thing"],
        ["run", "pyproject.toml", "-p", "a"],
        ["compare", "--list-scenarios"],
        ["compare", "--demo", "-p", "x", "--lane", "gdn"],
        ["bench", "--demo", "--spec-type", "x"],
        ["match", "--demo", "--spec-type", "x"],
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
    ]
    done = python(
        f"import sys\nfrom app.__main__ import main\nfor argv in {commands!r}:\n    main(argv)\n"
        f"    heavy = [m for m in ('torch', 'PySide6', 'pyqtgraph') if m in sys.modules]\n"
        f"    assert not heavy, (argv, heavy)"
    )
    assert done.returncode == 0, done.stderr


WITHOUT_A_MODEL = (
    *("observe", "import", "export", "rescore", "triage", "check-rollback", "conform", "help"),
    "acceptance",
)
"""Subcommands that take no model of their own."""


def test_help_lists_every_subcommand(cli: Cli) -> None:
    outcome = cli("--help")
    assert outcome.status == 0
    for name in SUBCOMMANDS:
        assert name in outcome.out
        shown = cli(name, "--help")
        assert shown.status == 0
        assert shown.out.startswith(f"usage: draftscope {name}")
        if name not in WITHOUT_A_MODEL:
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
    bundled = [str(path) for path in (DEMO_TARGET, DEMO_DRAFT, DEMO_EAGLE3)]
    assert done.stdout.splitlines() == bundled


def test_demo_path_as_json(cli: Cli) -> None:
    paths = {"target": DEMO_TARGET, "draft": DEMO_DRAFT, "eagle3": DEMO_EAGLE3}
    assert cli("demo-path", "--json").json == {name: str(path) for name, path in paths.items()}
    assert cli("demo-path", "--demo").status == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["inof", "model.gguf"], 2, "inof is neither a file nor a subcommand"),
        (["--no-such-option"], 2, "unrecognized arguments"),
        (["info"], 2, "No model is given"),
        (["info", "a.gguf", "-m", "b.gguf"], 2, "More than one model"),
        (["info", "no-such.gguf"], 1, "no-such.gguf"),
        (["info", "--demo", "--parallel", "0"], 2, "'0' is not a whole number of 1 or more"),
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


AWKWARD = "a\n\x1b[31mb\x9b\udcff"


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error", AWKWARD),
        OptionError(f"{AWKWARD} is wrong.", "Name another."),
    ],
)
def test_the_name_of_a_file_tells_a_terminal_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def open_file(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("engine.gguf.file.GgufFile.open", open_file)
    said = cli("info", "--demo").err
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()
    assert r"a\n\x1b[31mb\x9b\udcff" in said


@pytest.mark.parametrize("variable", ["DRAFTSCOPE_CPU", "DRAFTSCOPE_KERNELS"])
def test_a_variable_that_cannot_be_is_one_line(python: Python, variable: str) -> None:
    code = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('app', run_name='__main__')"
    done = python(code.format(["run", "--demo", "-p", "a", "-n", "1"]), **{variable: "none"})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"error: {variable}=none is not one of " in done.stderr


def test_memory_that_runs_out_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_file(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("engine.gguf.file.GgufFile.open", open_file)
    outcome = cli("info", "--demo")
    assert outcome.status == 1
    assert outcome.err.startswith("draftscope: error: There is not enough memory for this.")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "take more memory than cpu has."),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "cpu failed: CUDA error"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "take more memory than cpu has."),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't"), "take more"),
    ],
)
@pytest.mark.parametrize(
    "words", [["bench", "forward", "--demo", "--steps", "1"], ["fidelity", "--demo"]]
)
def test_a_device_that_fails_outside_a_run_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str, words: list[str]
) -> None:
    def forward(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("engine.model.hybrid.HybridModel.forward", forward)
    outcome = cli(*words)
    assert outcome.status == 1
    assert outcome.err.startswith("draftscope: error: ") and said in outcome.err
    assert "Traceback" not in outcome.err


# signals


def allow_signals() -> None:
    """A shell starts background jobs with some of them ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


POSIX = pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")


@POSIX
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_exports_what_was_recorded(tmp_path: Path, name: str, status: int) -> None:
    words = ["-p", "def f", "-n", "100000", "--ignore-eos", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "run", DEMO_DRAFT, *words, "--trace", str(tmp_path / "out")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=allow_signals,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(8)  # the prompt and the first token are out
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    assert "Traceback" not in err
    assert err.endswith("draftscope: interrupted\n")
    rounds = (tmp_path / "out" / "rounds.csv").read_text().splitlines()
    assert len(rounds) > 1
    (run,) = json.loads((tmp_path / "out" / "session.json").read_text())["runs"].values()
    assert run["stops"] == ["stopped"]


def signalled(code: str, *numbers: int) -> subprocess.CompletedProcess[str]:
    """Run code that prints a line when it waits, and send it the signals one after another."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=allow_signals,
    )
    try:
        assert process.stdout is not None
        for number in numbers:
            process.stdout.readline()
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess([], process.returncode, out, err)


@POSIX
def test_a_second_signal_ends_at_once() -> None:
    code = (
        "import time\nfrom pathlib import Path\n"
        "from app.cli.recorded import record\nfrom engine.trace.store import TraceStore\n"
        "def advance():\n    print('waits', flush=True); time.sleep(0.5); return True\n"
        "class Job:\n    trace, done, emitted = TraceStore(), False, []\n"
        "    def stop(self):\n        print('stops', flush=True); time.sleep(600)\n"
        "record(Job(), advance, Path('never-written'))\n"
    )
    done = signalled(code, signal.SIGTERM, signal.SIGINT)
    assert done.returncode == -signal.SIGINT
    assert not (ROOT / "never-written").exists()


@POSIX
def test_a_closed_terminal_is_a_signal_too() -> None:
    code = (
        "import time\nfrom app.cli.output import Interrupted\n"
        "from app.cli.recorded import record\nfrom engine.trace.store import TraceStore\n"
        "def advance():\n    print('waits', flush=True); time.sleep(0.2); return True\n"
        "class Job:\n    trace, done, emitted = TraceStore(), False, []\n"
        "    def stop(self):\n        pass\n"
        "try:\n    record(Job(), advance, None)\n"
        "except Interrupted as ending:\n    raise SystemExit(ending.status)\n"
    )
    assert signalled(code, signal.SIGHUP).returncode == 129


@POSIX
def test_a_signal_while_words_are_read_ends_as_any_other(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def format_usage(_: object) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "usage"

    monkeypatch.setattr("argparse.ArgumentParser.format_usage", format_usage)
    outcome = cli("info", "--demo")
    assert (outcome.status, outcome.err) == (143, "draftscope: interrupted\n")


@POSIX
def test_what_is_ignored_stays_ignored() -> None:
    code = (
        "import signal, time\nfrom app.cli.output import Interrupted, interrupt, on_signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "try:\n    with on_signal(interrupt):\n"
        "        print('waits', flush=True); time.sleep(0.5)\n"
        "        print('waits', flush=True); time.sleep(600)\n"
        "except Interrupted as ending:\n    raise SystemExit(ending.status)\n"
    )
    assert signalled(code, signal.SIGHUP, signal.SIGTERM).returncode == 143


@POSIX
def test_a_signal_where_nothing_can_be_raised_comes_again() -> None:
    code = (
        "import time, weakref\nfrom app.cli.output import Interrupted, interrupt, on_signal\n"
        "class Taken: pass\n"
        "def away():\n    print('waits', flush=True); time.sleep(600)\n"
        "try:\n    with on_signal(interrupt):\n"
        "        taken = Taken(); weakref.finalize(taken, away); del taken\n"
        "        time.sleep(600)\n"
        "except Interrupted as ending:\n    raise SystemExit(ending.status)\n"
    )
    done = signalled(code, signal.SIGTERM)
    assert (done.returncode, done.stderr) == (143, "")


def test_a_trace_folder_that_cannot_be_is_refused_before_anything_is_loaded(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / ("x" * 250), tmp_path / ("x" * 300), tmp_path / "file" / "below"):
        for command in ("run", "compare"):
            outcome = cli(command, "no-such.gguf", "-p", "a", "--trace", folder)
            assert outcome.status == 2
            assert outcome.err.startswith("draftscope: error: --trace ")
            assert outcome.err.count("\n") == 1
    before = sorted(tmp_path.rglob("*"))
    assert cli("run", "no-such.gguf", "-p", "a", "--trace", tmp_path / "a" / "b").status == 1
    assert sorted(tmp_path.rglob("*")) == before  # trying leaves nothing after

    def deny(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", deny)
    outcome = cli("run", "no-such.gguf", "-p", "a", "--trace", tmp_path / "a")
    assert (outcome.status, "Permission denied" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fidelity", "no-such.gguf", "-n", "2147483647"], "-n is above 4096"),
        (["bench", "no-such.gguf", "--repeat", "2147483647"], "2147483647 is above 1000"),
        (
            ["bench", "rollback", "--rollback", "ring", "--layers", "2147483647"],
            "--layers is above 1024",
        ),
        (
            ["bench", "rollback", "--rollback", "ring", "--conv-dim", "2147483647"],
            "--conv-dim is above",
        ),
    ],
)
def test_counts_that_would_take_for_ever_are_refused(
    cli: Cli, words: list[str], message: str
) -> None:
    outcome = cli(*words)
    assert (outcome.status, message in outcome.err) == (2, True)


def test_a_process_ends_with_its_status_its_output_and_what_others_asked_for() -> None:
    script = (
        "import sys; from app.__main__ import program\n"
        "import atexit; sys.argv[1:] = {words!r}\n"
        "status = program()\n"
        "atexit.register(lambda: print('the last word', status))\n"
        "sys.exit(status)"
    )
    for words, status in ((["demo-path"], 0), (["tokenize", "no.gguf", "a"], 1)):
        done = subprocess.run(
            [sys.executable, "-c", script.format(words=words)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status
        assert f"the last word {status}\n" in done.stdout
        assert ("error" in done.stderr) == bool(status)
