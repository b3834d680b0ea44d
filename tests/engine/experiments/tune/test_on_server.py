"""Settings of a server, measured on a program that computes how long it would have taken."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from app.__main__ import main
from engine.errors import ApiKeyError, OptionError, PeerLibraryError, ServerError
from engine.experiments.bench.llama_programs import free_port, served, started
from engine.experiments.bench.request import PLAIN
from engine.experiments.bench.server_speed import TimedServer
from engine.experiments.tune.advice import verdict
from engine.experiments.tune.confirm import Confirmed
from engine.experiments.tune.lengths import at_best, recorded
from engine.experiments.tune.on_server import ServerPlan, tune_server
from tests.support.fake_llama_server import drawn_rounds, round_ms, tokens_per_round

PROGRAM = Path(__file__).parents[3] / "support" / "fake_llama_server.py"


def command(*words: object) -> str:
    return " ".join(map(str, [sys.executable, PROGRAM, *words]))


def plan(*words: object, **more: object) -> ServerPlan:
    known = {"drafters": ("draft-mtp",), "n_predict": 16} | more
    return ServerPlan(["a", "b"], command(*words), **known)  # type: ignore[arg-type]


def best_length(rate: float, width_ms: float, lengths: tuple[int, ...]) -> int:
    return max(lengths, key=lambda n: tokens_per_round(rate, n) / (20.0 + width_ms * n))


@pytest.mark.parametrize(("rate", "width_ms"), [(0.8, 1.0), (0.5, 3.0)])
@pytest.mark.thinned(4)
def test_the_fastest_length_is_recommended(rate: float, width_ms: float) -> None:
    asked = plan("--rate", rate, "--width-ms", width_ms)
    found = tune_server(asked)
    best = best_length(rate, width_ms, tuple(asked.lengths))
    chosen = next(one for one in found.confirmed if one.name == found.verdict.chosen)
    expected = 1e3 * tokens_per_round(rate, best) / (20.0 + width_ms * best)
    assert chosen.median >= 0.97 * expected
    assert found.flags is not None
    assert found.flags[1].startswith("--spec-type draft-mtp --spec-draft-n-max ")
    assert all(one.same == one.n_prompts == 12 for one in found.confirmed)


@pytest.mark.parametrize(
    ("rate", "fade", "width_ms", "jump_at", "jump_ms"),
    [
        (0.9, 1.0, 0.3, 9, 25.0),  # a kernel for few rows ends at 8
        (0.85, 0.9, 1.5, 99, 0.0),
        (0.95, 1.0, 0.1, 99, 0.0),
        (0.6, 0.8, 4.0, 4, 10.0),
    ],
)
@pytest.mark.thinned(4)
def test_a_recorded_run_says_which_lengths_are_worth_measuring(
    rate: float, fade: float, width_ms: float, jump_at: int, jump_ms: float
) -> None:
    lengths = tuple(range(1, 17))
    words = ["--rate", rate, "--fade", fade, "--width-ms", width_ms]
    words += ["--jump-at", jump_at, "--jump-ms", jump_ms]
    found = tune_server(plan(*words, lengths=lengths, floors=(), n_predict=400, pairs=2))
    speeds = {
        n: 1e3 * tokens_per_round(rate, n, fade) / round_ms(n, width_ms, jump_at, jump_ms)
        for n in (0, *lengths)
    }
    measured = max(one.median for one in found.confirmed)
    assert measured >= 0.97 * max(speeds.values())
    assert len(found.screened) <= 12, f"of 16 lengths {len(found.screened) - 1} were measured"


def test_no_length_is_faster_than_it_is_said_to_be_at_best() -> None:
    dice = random.Random(1)
    answers = [[(8, k) for k in drawn_rounds(0.8, 1.0, 8, 4000, dice)]]
    rounds = recorded(answers)
    assert rounds is not None
    for jump_at in (3, 6, 99):
        speeds = {
            n: 1e3 * tokens_per_round(0.8, n) / round_ms(n, 2.0, jump_at, 9.0) for n in range(9)
        }
        for known in ((0, 8), (0, 4, 8), range(9)):
            most = at_best(rounds, {n: speeds[n] for n in known}, range(9))
            assert all(most[n] >= 0.98 * speeds[n] for n in range(9))
            assert all(most[n] == speeds[n] for n in known)
    assert recorded([[(8, 3)] * 5]) is None


def test_where_drafts_do_not_pay_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        [
            *("tune", "--server", command("--rate", 0.1, "--width-ms", 8)),
            *("--spec-type", "draft-mtp", "--lengths", "1,2", "-n", "64", "--limit", "2"),
        ]
    )
    out, said = capsys.readouterr()
    assert "2 prompts, 64 tokens each" in said
    assert status == 0
    assert "do not speculate" in out
    assert "flags for llama-server: --spec-type none" in out
    assert "acceptance 0.1" in out


def test_it_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    kept, starts = tmp_path / "kept.jsonl", tmp_path / "starts"
    asked = plan("--started", starts, lengths=(1, 2), floors=(), kept=kept)
    first = tune_server(asked)
    n_starts = len(starts.read_text().splitlines())
    again = tune_server(asked)
    assert len(starts.read_text().splitlines()) == n_starts, "nothing is measured again"
    assert [one.speeds for one in again.confirmed] == [one.speeds for one in first.confirmed]
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join(lines[:-3]) + '\n{"pair": 5, "na')  # killed while writing
    again = tune_server(asked)
    assert [one.speeds[:4] for one in again.confirmed] == [o.speeds[:4] for o in first.confirmed]
    assert len(starts.read_text().splitlines()) > n_starts
    with pytest.raises(OptionError, match="another command"):
        tune_server(plan("--rate", 0.5, kept=kept))


def test_rates_of_synthetic_acceptance_are_as_long_as_the_draft(tmp_path: Path) -> None:
    starts = tmp_path / "started"
    asked = plan("--started", starts, lengths=(1, 3), rates=(0.8, 0.6, 0.4))
    tune_server(asked)
    assert {line.split()[2] for line in starts.read_text().splitlines()} == {"0"}, "no floors"


def test_servers_that_run_are_compared() -> None:
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    more = ["--spec-type", "draft-mtp", "--rate", 0.9]
    program = Path(sys.executable)
    with (
        started(program, [PROGRAM, "--port", ports[0]], subprocess.DEVNULL),
        started(program, [PROGRAM, "--port", ports[1], *more], subprocess.DEVNULL),
    ):
        running = {PLAIN: urls[0], "mtp": urls[1]}
        found = tune_server(ServerPlan(["a"], running=running, n_predict=16))
    with pytest.raises(
        OptionError, match="None of the servers has the name plain"
    ):  # none is asked
        tune_server(ServerPlan(["a"], running={"mtp": urls[1]}, n_predict=16))
    assert found.verdict.chosen == "mtp"
    assert found.flags is None


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="program 'nowhere"):
        tune_server(ServerPlan(["a"], "nowhere -m x", drafters=("draft-mtp",)))
    with pytest.raises(OptionError, match="quotation"):
        tune_server(ServerPlan(["a"], "python 'x", drafters=("draft-mtp",)))
    with pytest.raises(OptionError, match="2 values for drafts of 3 tokens"):
        tune_server(plan(lengths=(1, 3), rates=(0.8, 0.6)))
    with pytest.raises(PeerLibraryError, match="unrecognized arguments"):
        tune_server(plan("--unknown"))
    with pytest.raises(ServerError, match="did not answer"):
        TimedServer("http://127.0.0.1:9").ask(["a"], 16, ignore_eos=False)
    with pytest.raises(ServerError, match="not the address"):
        TimedServer("ftp://x")
    assert main(["tune", "--server", "x", "--running", "plain=http://x"]) == 2


@pytest.mark.parametrize("written", ["W=1 {}", "sh -c 'exec {} {{flags}} --port {{port}}'", "{}"])
def test_commands_with_variables_and_quotes_are_started_with_the_flags(
    tmp_path: Path, written: str
) -> None:
    starts = tmp_path / "starts"
    known = {"drafters": ("draft-simple",), "lengths": (2,), "floors": (), "n_predict": 16}
    asked = written.format(command("--started", starts))
    files = {"draft-simple": "a b.gguf"} if written == "{}" else {}
    tune_server(ServerPlan(["a"], asked, pairs=1, files=files, **known))  # type: ignore[arg-type]
    drafting = "draft-simple 2 0 a b.gguf" if files else "draft-simple 2 0"
    assert {*starts.read_text().splitlines()} == {"none 0 0", drafting}


@pytest.mark.parametrize("flag", ["--spec-draft-n-max", "--spec-draft-p-min", "--spec-synth-rates"])
def test_a_command_has_no_flags_that_settings_change(tmp_path: Path, flag: str) -> None:
    """None is started, though plain decoding, which comes first, has no such flag."""
    starts, kept = tmp_path / "starts", tmp_path / "kept"
    with pytest.raises(OptionError, match=f"has {flag}, which the settings change"):
        tune_server(plan("--started", starts, flag, 1, kept=kept))
    assert not starts.exists()
    few = {"lengths": (1,), "floors": (), "pairs": 1}
    assert tune_server(plan("--started", starts, kept=kept, **few)).confirmed, "nothing was kept"


def test_servers_get_the_key_that_they_ask_for() -> None:
    few = {"lengths": (1,), "floors": (), "pairs": 1}
    assert tune_server(plan("--api-key", "abc", **few)).confirmed
    with pytest.raises(ApiKeyError, match="does not accept the API key"):
        tune_server(plan("--api-key", "abc", key="other", **few))


def test_two_models_are_not_compared() -> None:
    ports = free_port(), free_port()
    program, words = Path(sys.executable), [PROGRAM, "--n-params"]
    with (
        started(program, [*words, 27 * 10**9, "--port", ports[0]], subprocess.DEVNULL),
        started(program, [*words, 10**9, "--port", ports[1]], subprocess.DEVNULL),
    ):
        names = dict(zip((PLAIN, "small"), ports, strict=True))
        running = {name: f"http://127.0.0.1:{port}" for name, port in names.items()}
        with pytest.raises(OptionError, match=": 27,000,000,000 and 1,000,000,000 parameters"):
            tune_server(ServerPlan(["a"], running=running, n_predict=16))


def test_a_model_called_after_an_engine_is_none() -> None:
    asked = plan("--text", "/models/vllm/x.gguf", lengths=(1,), floors=(), pairs=1)
    started_as = replace(asked, command=f"env {asked.command} --text llama-server")
    assert tune_server(started_as).flags == ("llama-server", "--spec-type none", ())


@pytest.mark.parametrize("slow", [("--wait-s", 60), ("--event-s", 0.1)])
def test_an_answer_is_waited_for_until_the_time_is_over(slow: tuple[str, float]) -> None:
    port = free_port()
    words = [PROGRAM, *slow, "--port", port]
    with served(Path(sys.executable), words, port, 60.0, "") as server:
        server.until = time.monotonic() + 0.5
        with pytest.raises(ServerError, match="did not answer a request within the time limit"):
            server.ask(["a"], 16, ignore_eos=True)
        assert time.monotonic() < server.until + 20  # all events would take 200 s


def test_a_slow_server_is_given_up_after_twice_the_time() -> None:
    with pytest.raises(ServerError, match="Give it more time with --budget"):
        tune_server(plan("--event-s", 0.1, most_s=3.0))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are listed")
@pytest.mark.parametrize(("n_fast", "n_pairs"), [(16, 2), (10, 0)])
def test_the_pairs_measured_when_the_time_ends_give_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n_fast: int, n_pairs: int
) -> None:
    """9 requests come before the pairs, 2 with their servers, 2 of each pair."""
    requests, kept = tmp_path / "requests", tmp_path / "kept"
    slow = command("--requests", requests, "--slow-after", n_fast, "--wait-s", 60, "--rate", 0.9)
    words = ["--lengths", "3", "-n", "16", "--limit", "2", "--spec-type", "draft-simple"]
    words += ["--spec-synth-rates", "0.9,0.8,0.7"]
    assert main(["tune", "--server", slow, *words, "--budget", "4", "--keep", str(kept)]) == 1
    out, _ = capsys.readouterr()
    about = f"plain and draft-simple, n_max 3: time ran out after {n_pairs} of 6 pairs"
    assert about in out
    assert "do not speculate" not in out
    assert "flags of the fastest so far for llama-server: --spec-type draft-simple" in out
    assert ("in alternation:" in out) is (n_pairs > 0)
    assert not _running(str(requests))


def test_a_verdict_so_far_is_what_pairs_show() -> None:
    plain, fast = Confirmed(PLAIN, (10.0,) * 7, 0, 0, ()), Confirmed("x", (12.0,) * 7, 0, 0, ())
    once = {PLAIN: 10.0, "x": 9.0}
    assert verdict([plain, fast], 12, once).chosen == "x", "seven equal signs show it"
    few = [replace(one, speeds=one.speeds[:3]) for one in (plain, fast)]
    open_ = verdict(few, 12, once)
    assert (open_.chosen, open_.fastest) == ("", "x")
    assert "after 3 of 12 pairs; so far x has 1.20 times" in open_.lines[-1]
    assert "p 0.250" in open_.lines[0]
    alone = verdict([], 12, once)
    assert (alone.chosen, alone.fastest) == ("", PLAIN)
    assert alone.lines == [alone.undecided]


def _running(word: str) -> list[str]:
    """Processes with this among their words."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found += [one.parent.name] if word.encode() in one.read_bytes() else []
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="servers end with their parent on Linux")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.thinned(4)
def test_no_server_outlives_an_ended_tune(tmp_path: Path, how: signal.Signals) -> None:
    starts = tmp_path / "starts"
    asked = command("--started", starts)
    words = ["tune", "--server", asked, "--spec-type", "draft-mtp", "--prompts", "demo"]
    running = subprocess.Popen(
        [sys.executable, "-m", "app", *words],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert running.stderr is not None
    running.stderr.readline()  # the first server is up
    running.send_signal(how)
    running.wait()
    running.stderr.close()
    for _ in range(100):
        if not (left := _running(str(starts))):
            break
        time.sleep(0.05)
    assert not left
