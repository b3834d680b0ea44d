"""A sweep goes on where it stopped: killed, failed, asked again, or of another plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from engine.errors import Cancelled, DraftscopeError, OptionError, TraceFileError
from engine.experiments.results.reader import read_results
from engine.experiments.results.table import RESULTS_FILE
from engine.experiments.results.writer import JobResult
from engine.experiments.sweep.plan import SweepJob
from engine.experiments.sweep.sweep import Sweep, TraceOf, one_by_one
from engine.experiments.sweep.worker import SweepWorker
from tests.support.sweeps import CountingWorker, instantly, plan_of, result_of

ROOT = Path(__file__).resolve().parents[4]


def begun(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_twenty_four_jobs_killed_twice_are_twenty_four_rows(tmp_path: Path) -> None:
    plan, out, log = plan_of(tmp_path, 3, 8), tmp_path / "out", tmp_path / "log"
    words = [sys.executable, "-m", "tests.support.sweeps", str(plan.path), str(out), str(log)]
    for least in (5, 13):
        process = subprocess.Popen([*words, str(least)], cwd=ROOT)
        while len(begun(log)) < least and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert least - 2 <= read_results(out).n < 24
    assert subprocess.run(words, cwd=ROOT).returncode == 0
    results = read_results(out)
    assert results.columns["number"].tolist() == list(range(1, 25))
    assert results.done.tolist() == [n % 7 != 0 for n in range(1, 25)]
    # only what was under way when the process was killed was started again
    assert sorted(set(begun(log))) == list(range(1, 25))
    assert len(begun(log)) <= 24 + 4


def test_failures_are_rows_and_only_asked_for_again(tmp_path: Path) -> None:
    plan, out = plan_of(tmp_path, 2, 7), tmp_path / "out"
    with Sweep(plan, out) as sweep:
        steps = [(sweep.n_done, *step) for step in sweep.run(instantly)]
    assert [n_done for n_done, *_ in steps] == list(range(1, 15))
    assert [left_s is None for *_, left_s in steps] == [False] * 13 + [True]
    assert read_results(out).columns["error"][6] == "Job 7 failed."
    with Sweep(plan, out) as sweep:
        assert (sweep.n_done, sweep.pending) == (14, [])
        assert list(sweep.run(instantly)) == []
    with Sweep(plan, out, retry_failed=True) as sweep:
        assert [job.number for job in sweep.pending] == [7, 14]

        def well(jobs, trace_of):  # type: ignore[no-untyped-def]
            yield from ((job, JobResult(output="1")) for job in jobs)

        list(sweep.run(well))
    results = read_results(out)
    assert (results.n, bool(results.done.all())) == (14, True)


def test_a_longer_plan_keeps_what_was_found(tmp_path: Path) -> None:
    with Sweep(plan_of(tmp_path, 1, 3), tmp_path / "out") as sweep:
        list(sweep.run(instantly))
    with Sweep(plan_of(tmp_path, 2, 3), tmp_path / "out") as sweep:
        assert (sweep.n_done, sweep.total) == (3, 6)
        assert sweep.varying == {"spec-draft-n-max", "seed"}


def test_a_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    def of_another_file(jobs, trace_of):  # type: ignore[no-untyped-def]
        yield jobs[0], JobResult(model={"name": "demo-target.gguf", "size": 3, "sha256": "a"})

    plan, out = plan_of(tmp_path, 1, 2), tmp_path / "out"
    with Sweep(plan, out) as sweep:
        list(sweep.run(of_another_file))
    with pytest.raises(OptionError, match=r"demo-target\.gguf has changed since the first results"):
        Sweep(plan, out)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    plan, out = plan_of(tmp_path, 1, 1), tmp_path / "out"
    with Sweep(plan, out), pytest.raises(OptionError, match="Another command is writing"):
        Sweep(plan, out)
    Sweep(plan, out).__exit__()


@pytest.mark.parametrize("content", [b"something else", b"SQLite format 3\0" + bytes(200)])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / RESULTS_FILE).write_bytes(content)
    with pytest.raises(TraceFileError, match="is not a result file"):
        Sweep(plan_of(tmp_path, 1, 1), out)
    assert (out / RESULTS_FILE).read_bytes() == content


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        Sweep(plan_of(tmp_path, 1, 1), tmp_path / "file")


class FullWorker:
    """Finds no room for the trace of the second job, until there is a file that says so."""

    def run(self, job: SweepJob, trace: Path | None) -> JobResult:
        assert trace is not None
        if job.number == 2 and not (trace.parents[1] / "room").exists():
            return JobResult(unwritable="a cannot be written: No space left on device.")
        return result_of(job)


def test_a_full_disk_ends_a_sweep_that_goes_on_once_there_is_room(tmp_path: Path) -> None:
    plan, out = plan_of(tmp_path, 1, 3), tmp_path / "out"
    execute = partial(one_by_one, make_worker=FullWorker)
    with (
        Sweep(plan, out) as sweep,
        pytest.raises(DraftscopeError, match=r"No space left on device\. Free some space") as full,
    ):
        list(sweep.run(execute))
    assert not isinstance(full.value, OptionError), "no option is to blame for a full disk"
    assert read_results(out / RESULTS_FILE).n == 1, "the second job is to do"
    (out / "room").touch()
    with Sweep(plan, out) as sweep:
        assert sweep.n_done == 1
        list(sweep.run(execute))
    assert read_results(out / RESULTS_FILE).done.all()


def test_a_row_that_finds_no_room_ends_a_sweep_that_goes_on(tmp_path: Path) -> None:
    plan, out = plan_of(tmp_path, 1, 3), tmp_path / "out"
    with Sweep(plan, out, traces=False) as sweep:
        n_pages = sweep._writer._file.execute("PRAGMA page_count").fetchone()[0]
        sweep._writer._file.execute(f"PRAGMA max_page_count = {n_pages}")
        with pytest.raises(DraftscopeError, match="database or disk is full") as full:
            list(sweep.run(instantly_with_long_facts))
    assert not isinstance(full.value, OptionError), "no option is to blame for a full disk"
    with Sweep(plan, out, traces=False) as sweep:
        assert sweep.n_done == 0
        list(sweep.run(instantly_with_long_facts))
    assert read_results(out / RESULTS_FILE).done.all()


def instantly_with_long_facts(
    jobs: Sequence[SweepJob], _: TraceOf
) -> Generator[tuple[SweepJob, JobResult], None, None]:
    """More than a page for each row."""
    for job in jobs:
        yield job, replace(result_of(job), machine={"node": f"{job.number}" * 9000})


class DyingWorker:
    """Ends its process at the second job."""

    def run(self, job: SweepJob, trace: Path | None) -> JobResult:
        if job.number == 2:
            os._exit(7)
        return result_of(job)


def test_a_job_that_ends_its_process_is_a_row_like_any_other(tmp_path: Path) -> None:
    jobs = plan_of(tmp_path, 1, 3).jobs
    results = list(one_by_one(jobs, lambda job: None, DyingWorker))
    assert [job.number for job, _ in results] == [1, 2, 3]
    assert [result.error for _, result in results] == [
        "",
        "The process that ran the job ended with status 7. Check the memory needed.",
        "",
    ]


def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    jobs = plan_of(tmp_path, 1, 3).jobs
    worker = partial(CountingWorker, tmp_path / "log")
    results = one_by_one(jobs, lambda job: None, worker)
    next(results)
    results.close()
    assert begun(tmp_path / "log") == [1]


def test_a_job_under_way_is_ended_with_its_process_when_cancelled(tmp_path: Path) -> None:
    (job, *_), log = plan_of(tmp_path, 1, 2).jobs, tmp_path / "log"
    began = time.monotonic()
    with pytest.raises(Cancelled):
        for _ in one_by_one([job], lambda _: None, partial(SleepingWorker, log), log.exists):
            pass
    assert time.monotonic() - began < 60
    pid = int(log.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class SleepingWorker(SweepWorker):
    """Notes its process, then takes ten minutes."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def run(self, job: SweepJob, trace: Path | None, files: Sequence[Path] = ()) -> JobResult:
        (new := self._log.with_suffix(".new")).write_text(str(os.getpid()))
        new.rename(self._log)
        time.sleep(600)
        return JobResult()
