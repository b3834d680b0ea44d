"""llama.cpp's programs as children: found, read, and gone whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.errors import OptionError, PeerLibraryError, ServerError
from engine.experiments.bench import llama_programs as programs
from engine.experiments.bench.against_llama_cpp import LlamaBench, PassWork, pass_works
from engine.experiments.bench.llama_programs import (
    SpeculativeWork,
    find_program,
    llama_server,
    started,
)
from tests.support.fake_llama_programs import FakePrograms

WORK = SpeculativeWork((1, 2, 3), 24, (1.0, 0.5), 96)
MODEL = Path("model.gguf")


@pytest.fixture
def fake(tmp_path: Path) -> FakePrograms:
    return FakePrograms(tmp_path / "built" / "bin")


def test_programs_are_found_in_a_build_around_it_and_on_path(
    fake: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake.folder / "llama-bench"
    assert find_program(fake.folder, "llama-bench") == path
    assert find_program(fake.folder.parent, "llama-bench") == path
    monkeypatch.setenv("PATH", str(fake.folder))
    assert find_program(None, "llama-bench") == path


def test_a_program_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match=f"There is no llama-bench in {tmp_path}"):
        find_program(tmp_path, "llama-bench")
    (tmp_path / "llama-bench").write_text("not a program")
    with pytest.raises(OptionError, match="There is no llama-bench in"):
        find_program(tmp_path, "llama-bench")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OptionError, match=r"There is no llama-server on \$PATH"):
        find_program(None, "llama-server")


def test_llama_bench_is_asked_for_the_same_work(fake: FakePrograms) -> None:
    bench = LlamaBench(fake.folder, MODEL, 3)
    for work in pass_works((4,), 512, depth=9):
        assert bench.measure(work) == (20.0, "abc1234 (7)")
    plain, verify, prompt = (
        dict(zip(words[::2], words[1::2], strict=True)) for words in fake.asked("llama-bench")
    )
    for words in (plain, verify, prompt):
        assert (words["-m"], words["-t"], words["-d"]) == ("model.gguf", "3", "9")
        assert (words["-dev"], words["-o"]) == ("none", "json")
    assert (plain["-p"], plain["-n"], plain["-r"]) == ("0", "32", "1")
    assert (verify["-p"], verify["-n"], verify["-embd"], verify["-r"]) == ("4", "0", "1", "5")
    assert (prompt["-p"], prompt["-n"], prompt["-embd"], prompt["-r"]) == ("512", "0", "0", "1")


def test_a_llama_bench_that_fails_has_the_last_word(fake: FakePrograms) -> None:
    fake.bench(out="", said="loading\nerror: failed to load model 'x.gguf'.\n", status=1)
    with pytest.raises(PeerLibraryError, match="llama-bench ended: error: failed to load model"):
        LlamaBench(fake.folder, MODEL, 1).measure(PassWork("", 4))


@pytest.mark.parametrize("out", ["", "| model |", "[]", '[{"samples_ts": []}]', "[3]"])
def test_figures_of_another_form_are_refused(fake: FakePrograms, out: str) -> None:
    fake.bench(out=out)
    with pytest.raises(PeerLibraryError, match="The output format of"):
        LlamaBench(fake.folder, MODEL, 1).measure(PassWork("", 4))


def test_a_llama_bench_that_hangs_is_ended(
    fake: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.experiments.bench.against_llama_cpp.LONGEST_S", 0.2)
    fake.bench(seconds=60.0)
    with pytest.raises(PeerLibraryError, match="did not end within 0 minutes"):
        LlamaBench(fake.folder, MODEL, 1).measure(PassWork("", 4))


def test_a_server_is_started_for_the_work_and_asked_once_it_is_ready(fake: FakePrograms) -> None:
    with llama_server(fake.folder, MODEL, WORK, 2) as server:
        result = server.ask([WORK.prompt], WORK.n_predict, ignore_eos=True)
    assert result.speed() == 5.0
    assert result.acceptance == pytest.approx(2 / 3)
    words, body = fake.asked("llama-server")
    told = dict(zip(words[::2], words[1::2], strict=True))
    assert told["--spec-synth-rates"] == "1.0,0.5"
    assert (told["--spec-type"], told["--spec-draft-n-max"]) == ("draft-mtp", "2")
    assert (told["-t"], told["-np"], told["-dev"]) == ("2", "1", "none")
    assert told["-c"] == "96"
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3], 24)
    assert (body["temperature"], body["ignore_eos"], body["cache_prompt"]) == (0, True, False)


def test_a_server_that_does_not_come_up_has_the_last_word(fake: FakePrograms) -> None:
    fake.server(said="error: unknown argument: --spec-synth-rates\n", status=1)
    with (
        pytest.raises(PeerLibraryError, match="llama-server ended: error: unknown argument"),
        llama_server(fake.folder, MODEL, WORK, 1),
    ):
        pass


@pytest.mark.parametrize("reply", [{}, [], {"timings": {}}, {"error": {"message": "no"}}])
def test_a_reply_without_timings_is_refused(fake: FakePrograms, reply: object) -> None:
    fake.server(reply=reply)
    with (
        llama_server(fake.folder, MODEL, WORK, 1) as server,
        pytest.raises(ServerError, match="did not answer a request"),
    ):
        server.ask([WORK.prompt], WORK.n_predict, ignore_eos=True)


def test_an_error_or_ctrl_c_leaves_no_process_behind(fake: FakePrograms) -> None:
    for error in (RuntimeError, KeyboardInterrupt):
        with (
            pytest.raises(error),
            started(find_program(Path("/bin"), "sleep"), [60], subprocess.DEVNULL) as program,
        ):
            raise error
        assert program.process.poll() is not None


def test_a_program_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_LEAVE_S", 0.2)
    script = tmp_path / "deaf"
    script.write_text("#!/bin/sh\ntrap '' TERM\necho on\nwhile :; do sleep 0.05; done\n")
    script.chmod(0o755)
    with started(script, [], subprocess.PIPE) as program:
        assert program.process.stdout is not None
        assert program.process.stdout.readline() == b"on\n"
    assert program.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="programs are watched on Linux")
@pytest.mark.parametrize("how", ["parent", "program", "body"])
@pytest.mark.thinned(4)
def test_nothing_that_a_program_started_is_left(tmp_path: Path, how: str) -> None:
    """Nor what has left its session and its parent. how: what ends."""
    script, pids = tmp_path / "wrapper", tmp_path / "pids"
    inner = f"echo $$ >> {pids}; exec sleep 600"
    script.write_text(
        f"#!/bin/sh\necho $$ >> {pids}\n(setsid sh -c '{inner}' &)\nsh -c '{inner}' &\nsleep 600\n"
    )
    script.chmod(0o755)
    code = (
        "import os, signal, subprocess, time\nfrom pathlib import Path\n"
        "from engine.experiments.bench.llama_programs import started\n"
        f"pids, how = Path({str(pids)!r}), {how!r}\n"
        f"with started(Path({str(script)!r}), [], subprocess.DEVNULL) as program:\n"
        "    while not pids.exists() or len(pids.read_text().splitlines()) < 3:\n"
        "        assert program.process.poll() is None\n"
        "        time.sleep(0.01)\n"
        "    if how == 'program':\n"
        "        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)\n"
        "        assert program.process.wait() == -signal.SIGKILL\n"
        "    if how == 'parent':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=how != "parent", timeout=300)
    left = [int(line) for line in pids.read_text().splitlines()]
    for _ in range(1200):
        left = [pid for pid in left if os.path.exists(f"/proc/{pid}")]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(left)} processes are left")
