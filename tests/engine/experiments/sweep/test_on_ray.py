"""A sweep on a cluster: one job a node, workers that die, another version, no Ray; and on a real
cluster of two nodes where DRAFTSCOPE_TEST_RAY is set (it takes about a minute to start)."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from engine.errors import OptionError
from engine.experiments.results.reader import read_results
from engine.experiments.results.writer import JobResult
from engine.experiments.sweep import on_ray
from engine.experiments.sweep.on_ray import OnRay
from engine.experiments.sweep.plan import SweepJob
from engine.experiments.sweep.sweep import Sweep, own_folder, pack_trace, unpack_trace
from tests.support.fake_ray import FakeRay
from tests.support.sweeps import plan_of, result_of

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay({"a": 8.0, "b": 2.0, "no processors": 0.0})
    monkeypatch.setattr(on_ray, "_import_ray", lambda: fake)

    def run(self: Any, job: SweepJob, *_: Any) -> JobResult:
        return result_of(job)

    monkeypatch.setattr(on_ray._RayWorker, "run", run)
    return fake


def test_every_job_runs_once_and_one_at_a_time_on_each_node(
    cluster: FakeRay, tmp_path: Path
) -> None:
    with Sweep(plan_of(tmp_path, 3, 8), tmp_path / "out") as sweep:
        assert len(list(sweep.run(OnRay("auto")))) == 24
    results = read_results(tmp_path / "out")
    assert results.columns["number"].tolist() == list(range(1, 25))
    assert cluster.busiest == 1
    assert {name: one["num_cpus"] for name, one in cluster.options.items()} == {"a": 8, "b": 2}
    assert {results.machine(i)["node"] for i in range(24)} == {"a", "b"}
    assert sorted(cluster.closed) == ["a", "b"]
    assert not cluster.is_connected


def test_a_job_whose_worker_died_is_begun_again(cluster: FakeRay, tmp_path: Path) -> None:
    cluster.deaths = {"a": 1, "b": 1}
    results = list(OnRay("auto")(plan_of(tmp_path, 1, 6).jobs, lambda job: None))
    assert sorted(job.number for job, _ in results) == [1, 2, 3, 4, 5, 6]
    assert not any(result.error for _, result in results)


def test_a_job_that_always_ends_its_worker_is_a_failure(cluster: FakeRay, tmp_path: Path) -> None:
    cluster.cpus = {"a": 1.0}
    cluster.deaths = {"a": 3}
    results = list(OnRay("auto")(plan_of(tmp_path, 1, 2).jobs, lambda job: None))
    assert [(job.number, result.error) for job, result in results] == [
        (1, "The worker ended 3 times while it ran the job: The actor died"),
        (2, ""),
    ]


def test_another_version_on_a_node_is_the_result(tmp_path: Path) -> None:
    (job,) = plan_of(tmp_path, 1, 1).jobs
    result = on_ray._RayWorker().run(job, False, "0.0.0", [])
    assert "on this node and 0.0.0 where the sweep was started" in result.error


def test_no_cluster_and_no_ray(
    cluster: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = plan_of(tmp_path, 1, 1).jobs
    with pytest.raises(OptionError, match=r"No Ray cluster answers at nowhere \(no one\)"):
        list(OnRay("nowhere")(jobs, lambda job: None))
    monkeypatch.undo()
    plain = builtins.__import__

    def without_ray(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("ray"):
            raise ImportError("No module named 'ray'")
        return plain(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(OptionError, match=r"Install draftscope\[sweep\]"):
        OnRay("auto")


def test_a_trace_travels_and_nothing_else_is_written(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "session.json").write_text("{}")
    files = pack_trace(tmp_path / "trace")
    unpack_trace({**files, "../escaped.csv": files["session.json"]}, tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["session.json"]
    assert not (tmp_path / "escaped.csv").exists()


@pytest.mark.skipif(os.name != "posix", reason="asks whether a process lives")
def test_what_killed_workers_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, foreign = tmp_path / f"draftscope-sweep-{ended.pid}-x", tmp_path / "draftscope-sweep-no"
    left.mkdir()
    foreign.mkdir()
    first, second = own_folder(), own_folder()
    assert sorted(tmp_path.iterdir()) == sorted([foreign, first, second])


@pytest.mark.slow
@pytest.mark.skipif("DRAFTSCOPE_TEST_RAY" not in os.environ, reason="starts a Ray cluster")
def test_two_nodes_of_a_real_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "plan.toml").write_text(
        '[settings]\nmodel = "demo"\nprompt = "def f(x):"\nn-predict = 8\ndevice = "cpu"\n'
        "[grid]\nseed = [1, 2, 3, 4, 5, 6]\n"
    )
    # in a process of its own: Ray leaves threads and warnings after
    code = (
        "import sys\nfrom ray.cluster_utils import Cluster\nfrom app.__main__ import main\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1})\n"
        "cluster.add_node(num_cpus=1)\n"
        "words = ['sweep', sys.argv[1], '--out', sys.argv[2], '--ray', cluster.address]\n"
        "status = main([*words, '--ship'])\ncluster.shutdown()\nsys.exit(status)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "plan.toml"), str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "out")
    assert (results.n, bool(results.done.all())) == (6, True)
    assert all(results.trace(i) for i in range(6))
