"""Sweep jobs on an existing Ray cluster, one at a time per node.

Ray is an optional dependency, imported on demand. Every node needs the same version of Draftscope.
A worker reserves all processors of its node, and all GPUs unless the jobs run on the CPU, so that a
measurement shares the machine with nothing that Ray knows of.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.environment import version
from engine.errors import OptionError
from engine.experiments.results.writer import JobResult
from engine.experiments.sweep.plan import DEVICE, SweepJob
from engine.experiments.sweep.sweep import TraceOf, own_folder, pack_trace

_LOOK_S = 2.0
_ATTEMPTS = 3
"""Attempts per job if it ends its process or its node disappears."""
_CHUNK = 64 << 20


class OnRay:
    """An executor (engine.experiments.sweep.sweep) on the cluster at an address, or "auto".

    ship: model files go through Ray's object store, once per node, instead of lying at the same
    path everywhere.
    """

    def __init__(self, address: str, *, ship: bool = False) -> None:
        """Raises OptionError without the package ray."""
        self._address, self._ship = address, ship
        self._ray = _import_ray()

    def __call__(
        self, jobs: Sequence[SweepJob], trace_of: TraceOf
    ) -> Generator[tuple[SweepJob, JobResult], None, None]:
        """Raises OptionError if no cluster answers."""
        if not jobs:
            return
        ray = self._ray
        try:
            ray.init(address=self._address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise OptionError(
                f"No Ray cluster answers at {self._address[:80]} "
                f"({(str(error).splitlines() or [''])[0][:120]}).",
                "Start one with `ray start --head`, or correct --ray.",
            ) from error
        try:
            cluster = _Cluster(ray, jobs, trace_of, self._ship)
            try:
                yield from cluster.results()
            finally:
                cluster.close()
        finally:
            ray.shutdown()  # ends our workers too, busy or not


class _Cluster:
    def __init__(
        self, ray: ModuleType, jobs: Sequence[SweepJob], trace_of: TraceOf, ship: bool
    ) -> None:
        self._ray, self._trace_of, self._ship = ray, trace_of, ship
        self._waiting = deque(jobs)
        self._attempts: dict[str, int] = {}
        self._workers: dict[str, Any] = {}  # by node
        self._running: dict[Any, tuple[str, SweepJob]] = {}  # node and job of each call
        self._files: dict[Path, list[Any]] = {}
        self._uses_gpu = any(job.setting(DEVICE) != "cpu" for job in jobs)

    def results(self) -> Generator[tuple[SweepJob, JobResult], None, None]:
        while self._waiting or self._running:
            self._look_at_nodes()
            for node in self._idle()[: len(self._waiting)]:
                self._begin(node, self._waiting.popleft())
            if not self._running:
                continue
            ended, _ = self._ray.wait(list(self._running), timeout=_LOOK_S)
            for call in ended:
                node, job = self._running.pop(call)
                result = self._result(call, node, job)
                if result is not None:
                    yield job, result

    def close(self) -> None:
        """Have idle workers remove their files; those of busy ones are removed by the next
        workers."""
        idle = [self._workers[node].close.remote() for node in self._idle()]
        if idle:
            self._ray.wait(idle, num_returns=len(idle), timeout=_LOOK_S)

    def _idle(self) -> list[str]:
        """Nodes whose worker has no job."""
        busy = {node for node, _ in self._running.values()}
        return [node for node in self._workers if node not in busy]

    def _result(self, call: Any, node: str, job: SweepJob) -> JobResult | None:
        """The result of a job; None if it will be tried again."""
        errors = self._ray.exceptions
        try:
            result = self._ray.get(call)
            assert isinstance(result, JobResult)
            return replace(result, machine={**result.machine, "node": node[:12]})
        except errors.RayActorError as error:
            self._workers.pop(node, None)
            self._attempts[job.key] = self._attempts.get(job.key, 0) + 1
            if self._attempts[job.key] < _ATTEMPTS:
                self._waiting.appendleft(job)
                return None
            why = (str(error).splitlines() or [""])[0]
            return JobResult(f"The worker ended {_ATTEMPTS} times while it ran the job: {why}")
        except errors.RayError as error:
            return JobResult((str(error).splitlines() or [type(error).__name__])[0])

    def _begin(self, node: str, job: SweepJob) -> None:
        files = [self._shipped(path) for path in job.files] if self._ship else []
        run = self._workers[node].run
        call = run.remote(job, self._trace_of(job) is not None, version(), files)
        self._running[call] = node, job

    def _look_at_nodes(self) -> None:
        """Start a worker on every new node."""
        strategies = self._ray.util.scheduling_strategies
        for about in self._ray.nodes():
            node_id, resources = about["NodeID"], about["Resources"]
            if not about["Alive"] or node_id in self._workers or not resources.get("CPU"):
                continue
            actor = self._ray.remote(_RayWorker).options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0) if self._uses_gpu else 0,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            self._workers[node_id] = actor.remote()

    def _shipped(self, path: Path) -> tuple[str, list[Any]]:
        """A file's name and its parts in the object store."""
        if path not in self._files:
            with path.open("rb") as file:
                parts = iter(lambda: file.read(_CHUNK), b"")
                self._files[path] = [self._ray.put(part) for part in parts]
        return path.name, self._files[path]


class _RayWorker:
    """Lives on a node and runs jobs sent to it."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._kept: dict[str, Path] = {}

    @cached_property
    def _folder(self) -> Path:
        """For shipped files and a trace to be sent, created on first use."""
        return own_folder()

    def run(
        self,
        job: SweepJob,
        with_trace: bool,
        driver_version: str,
        files: Sequence[tuple[str, list[Any]]],
    ) -> JobResult:
        """Run a job; its trace is returned with the result."""
        if version() != driver_version:
            return JobResult(
                f"Draftscope is {version()} on this node and {driver_version} where the sweep was "
                "started. Install the same version."
            )
        if self._worker is None:
            from engine.experiments.sweep.worker import SweepWorker

            self._worker = SweepWorker()
        folder = self._folder / "trace" if with_trace else None
        here = [self._fetched(name, parts) for name, parts in files]
        result: JobResult = self._worker.run(job, folder, here)
        if folder is not None and result.has_trace:
            return replace(result, trace=pack_trace(folder))
        return result

    def _fetched(self, name: str, parts: Sequence[Any]) -> Path:
        """The path of a shipped file, written on first use."""
        import ray

        key = parts[0].hex() if parts else name
        if key not in self._kept:
            folder = self._folder / str(len(self._kept))
            folder.mkdir()
            with (folder / name).open("wb") as file:
                for part in parts:
                    file.write(ray.get(part))
            self._kept[key] = folder / name
        return self._kept[key]

    def close(self) -> None:
        """Remove all written files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _import_ray() -> ModuleType:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise OptionError(
            f"--ray needs the Python package ray ({error}).", "Install draftscope[sweep]."
        ) from error
    return ray
