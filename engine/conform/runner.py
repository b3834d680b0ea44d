"""The runner: checks of a package's kernels, each kernel in a child process with a CPU time
limit."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.conform import adapters, packages
from engine.conform.cases import Recurrence, Shape
from engine.conform.checks import BOUNDS, CHECKS, Fault, check, has_check, met
from engine.conform.cost import measure
from engine.conform.fits import joined
from engine.conform.packages import Package
from engine.conform.replays import OF_EXTRAS, Steps, agreed, checked, rounds_of
from engine.conform.subject import AsTensors, Kernel
from engine.errors import KernelPackageError

COST = "cost"
_RECURRENCES: tuple[Recurrence, ...] = ("gdn", "kda", "mamba2", "conv")
_MOST_START_S, _MOST_END_S = 300.0, 10.0
_MOST_ASLEEP = 5  # times a check's limit in which it may compute nothing
_MOST_BUSY = 30  # times a check's limit that it may take if others use the processor
_POLL_S = 0.5
_Job = tuple[str, Recurrence, tuple[str, ...], str]  # kernel, checks, and device
_TOO_LONG = getattr(signal, "SIGPROF", 0)  # ends a process that computes too long; 0: cannot


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check of one kernel: its faults and its seconds. For COST, which cannot fail, `figures`
    (engine.conform.cost). `needs`: what the kernel lacks here, and then nothing was played and
    there is no check; or why this check could not be judged."""

    kernel: str
    recurrence: str
    check: str
    faults: tuple[Fault, ...]
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    needs: str = ""

    @property
    def passed(self) -> bool:
        return all(fault.note for fault in self.faults)


def open_target(target: str) -> tuple[str, str, str]:
    """The name of the adapter's module, the package's path, and the version.

    target is a known package's name, its wheel, source archive or folder, or FILE.py:FUNCTION or
    MODULE:FUNCTION, for which the first is empty. Raises KernelPackageError.
    """
    _, colon, function = target.rpartition(":")
    if colon and function.isidentifier():
        own_kernel(target)
        return "", target, ""
    first = re.split(r"-(?=\d)", Path(target).name)[0].replace("_", "-").lower()
    name = next((n for n in (target.lower(), first) if n in adapters.NAMES), None)
    if name is None and Path(target).is_dir():
        name = next((n for n in adapters.NAMES if (Path(target) / n).is_dir()), None)
    if name is None:
        if target.endswith(".py"):
            raise KernelPackageError(
                f"{target} does not name an adapter.", f"Give {target}:FUNCTION, or its class."
            )
        if Path(target).name != target and not Path(target).exists():
            raise KernelPackageError(
                f"{target} does not exist.", "Give a package's wheel, source archive or folder."
            )
        raise KernelPackageError(
            f"{target} is not a package with an adapter.",
            f"Known: {', '.join(adapters.NAMES)}; their wheels, source archives and folders; for "
            "another kernel give FILE.py:FUNCTION (see `draftscope help conform`).",
        )
    table = adapters.engine(name)
    if table.package == "kernels":
        return name, "", ""
    installed = target.lower() in adapters.NAMES and not Path(target).exists()
    package = packages.open_package(table.package if installed else target, table.package)
    package.check_holds(table.kept)
    return name, str(package.root), package.version


def own_kernel(target: str) -> Kernel:
    """The kernel described by a user's adapter: FUNCTION(shape, memory) returns a Subject.

    Attributes of the function: `recurrences` (default gdn), and those of subject.Kernel. Raises
    KernelPackageError naming what is missing.
    """
    place, _, name = target.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise KernelPackageError(f"{place} is not a file.", "Give the path of the adapter's file.")
    try:
        make = getattr(_imported(place), name)
    except (Exception, SystemExit) as error:
        words, at, called = met(error)
        raise KernelPackageError(
            f"{target} cannot be imported: {words}{'' if called else at}.",
            "Correct the adapter's file; `draftscope help conform` shows one.",
        ) from error
    kernel = Kernel(name, ("gdn",), lambda shape, memory, _: AsTensors(make(shape, memory)))
    known = {"recurrences": _RECURRENCES, "dtypes": tuple(BOUNDS), "extras": tuple(OF_EXTRAS)}
    for of in (one for one in Kernel.__dataclass_fields__ if one not in ("name", "make")):
        usual = getattr(kernel, of)
        given = getattr(make, of, usual)
        if isinstance(usual, tuple):
            each = given if isinstance(given, (list, tuple, set)) else [given]
            given = tuple(str(one).removeprefix("torch.") for one in each)
        if type(given) is not type(usual) or (of in known and not {*given} <= {*known[of]}):
            words = ", ".join(known.get(of, (f"{type(usual).__name__}, as {usual!r}",)))
            raise KernelPackageError(f"{target}: {of} cannot be {given!r}.", f"Known: {words}.")
        kernel = replace(kernel, **{of: given})
    return kernel


def _imported(place: str) -> ModuleType:
    """The adapter's module, which may import others from its folder."""
    folder = str(Path(place).parent.absolute()) if place.endswith(".py") else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    known = set(sys.modules)
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if packages.interpreted() and "triton" in sys.modules:
        new = (n for n in set(sys.modules) - known if n.split(".")[0] != "triton")
        packages.fit_interpreter([module, *map(sys.modules.__getitem__, new)])
    return module


def kernels(name: str, target: str) -> Sequence[Kernel]:
    """The kernels of a target that `open_target` has opened."""
    return adapters.engine(name).kernels if name else (own_kernel(target),)


def run(
    name: str,
    place: str,
    *,
    seed: int,
    device: str,
    only: Sequence[str] = (),
    checks: Sequence[str] = (*CHECKS, COST),
    limit_s: float = 120.0,
    at_once: int = 2,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Outcomes as they arrive; a check may be repeated if the others of its kernel show its cause.
    A kernel that crashes or hangs loses the check that it was in.

    limit_s: CPU time of a check, and the same again to name its fault.
    """
    waiting = []
    # prompts take longest, so they go first
    for kernel in sorted(kernels(name, place), key=lambda kernel: not kernel.chunk):
        played = tuple(c for c in checks if c == COST or has_check(kernel, c))
        needs = _needs(kernel, name, place, device)
        for recurrence in kernel.recurrences if not only or kernel.name in only else ():
            if needs:
                yield Outcome(kernel.name, recurrence, "", (), 0.0, needs=needs)
            elif played:
                where = "cpu" if kernel.host else device
                waiting.append((kernel.name, recurrence, played, where))
    selector = selectors.DefaultSelector()
    running: list[_Child] = []
    try:
        while (waiting or running) and not cancelled():
            while waiting and len(running) < at_once:
                child = _Child(name, place, waiting.pop(0), seed, limit_s)
                running.append(child)
                selector.register(child.output, selectors.EVENT_READ, child)
            for key, _ in selector.select(timeout=_POLL_S):
                key.data.read()
            for child in list(running):
                yield from child.outcomes()
                if child.over():
                    selector.unregister(child.output)
                    running.remove(child)
                    lost, rest = child.end()
                    if lost is not None:
                        yield lost
                    if rest:
                        waiting.insert(0, (child.kernel, child.recurrence, rest, child.device))
    finally:
        for child in running:
            child.end()
        selector.close()


def _needs(kernel: Kernel, name: str, place: str, device: str) -> str:
    """What a compiled kernel needs that is missing."""
    if not kernel.compiled:
        return ""
    if device != "cuda":
        return f"needs a CUDA device: {kernel.compiled}"
    package = adapters.engine(name).package
    spec = importlib.util.find_spec(package)
    found = spec.submodule_search_locations if spec else None
    if not found or Path(next(iter(found))).parent != Path(place):
        return f"needs {package} to be installed, not only its files: {kernel.compiled}"
    import torch

    here = torch.cuda.get_device_capability()[0]
    if here < kernel.capability:
        return f"needs compute capability {kernel.capability}.0: this device has {here}"
    return ""


class _Child:
    """A process that runs checks of one kernel and prints one line for each."""

    def __init__(self, name: str, place: str, job: _Job, seed: int, limit_s: float) -> None:
        kernel, recurrence, checks, device = job
        self.kernel, self.recurrence, self.left = kernel, recurrence, list(checks)
        self.device, self.seed, self.limit_s = device, seed, limit_s
        request = [name, place, kernel, recurrence, ",".join(checks), str(seed), device]
        environment = dict(os.environ)
        if device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.conform.runner", *request, str(limit_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._buffer, self._ended = b"", False
        self._most_s = max(_MOST_ASLEEP * limit_s, _MOST_START_S)  # until it has started
        self._unnamed: Fault | None = None
        self._since = self._polled = time.monotonic()
        self._asleep_s, self._computed = 0.0, _computed(self.process.pid)

    def read(self) -> None:
        data = self.output.read(2**20)
        self._ended = data == b""
        self._buffer += data or b""

    def outcomes(self) -> Iterator[Outcome]:
        """The checks that have ended since the last call."""
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._since, self._most_s = time.monotonic(), _MOST_ASLEEP * self.limit_s
            if not line:
                continue
            answer = json.loads(line)
            faults = tuple(map(_fault, answer["faults"]))
            if not answer["is_named"]:
                self._unnamed = faults[0]
                continue
            self.left = [one for one in self.left if one != answer["check"]]
            self._unnamed = None
            yield Outcome(
                self.kernel, self.recurrence, answer["check"], faults, answer["seconds"],
                answer["figures"],
            )  # fmt: skip

    def over(self) -> bool:
        """Whether the process has ended, or has printed and computed nothing for too long."""
        before, self._polled = self._polled, time.monotonic()
        was, self._computed = self._computed, _computed(self.process.pid)
        sleeps = self._computed is not None and self._computed == was
        # if this process had to wait longer, so had that one
        self._asleep_s = sleeps * (self._asleep_s + min(self._polled - before, 2 * _POLL_S))
        waits = self._polled - self._since > max(_MOST_BUSY * self.limit_s, self._most_s)
        return self._ended or waits or self._asleep_s > self._most_s

    def end(self) -> tuple[Outcome | None, tuple[str, ...]]:
        """The check that was lost with the process, if any, and those not started."""
        late, seconds = not self._ended, time.monotonic() - self._since
        asleep = late and self._asleep_s > self._most_s
        if late:
            self.process.kill()
        try:
            _, errors = self.process.communicate(timeout=_MOST_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
        code = self.process.returncode
        if not self.left:
            return None, ()
        lost, *rest = self.left
        words = errors.decode(errors="replace").strip().splitlines()
        ended = f"the process ended with exit status {code}"
        if code < 0:
            ended = f"the process ended with signal {signal.Signals(-code).name}"
        detail = (words[-1:] or [ended])[0][:300]
        if asleep:
            detail = f"no computation for {self._most_s:g} s"
        elif late:
            detail = f"machine busy, not checked: no answer for {seconds:.0f} s"
        elif code == -_TOO_LONG:
            detail = f"more than {self.limit_s:g} CPU seconds"
        if self._unnamed is not None:  # only its cause was lost
            unsought = f"its cause was not found: {detail}"
            fault = replace(self._unnamed, detail=joined(self._unnamed.detail, unsought))
        elif late and not asleep:
            unjudged = Outcome(self.kernel, self.recurrence, lost, (), seconds, needs=detail)
            return unjudged, tuple(rest)
        else:
            shape = Shape(self.recurrence, 1, 1, 16, 16, 1, 1)
            fault = Fault(
                self.kernel, lost, "hang" if asleep or code == -_TOO_LONG else "crash", detail,
                shape, self.seed, 0, 0, -1, float("inf"),
            )  # fmt: skip
        return Outcome(self.kernel, self.recurrence, lost, (fault,), seconds), tuple(rest)


def _computed(pid: int) -> int | None:
    """CPU time of a process in the system's ticks, None if unknown."""
    with suppress(OSError, ValueError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, after_name[11:13]))
    return None


def _fault(fields: dict[str, Any]) -> Fault:
    rows = {name: tuple(fields[name]) for name in ("row_errors", "depth_errors")}
    shape = fields["shape"]
    shape = Shape(**(shape | {"extras": tuple(shape.get("extras", ()))}))
    return Fault(**(fields | rows | {"shape": shape}))


def _limited(limit_s: float) -> None:
    """Let this process end after this much CPU time, if the system can do that."""
    if _TOO_LONG:
        signal.setitimer(signal.ITIMER_PROF, limit_s)


def _in_child(*request: Any) -> None:
    name, place, kernel, recurrence, checks, seed, device, limit_s = request
    import torch

    # the package's own output must not mix with the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    found = next(k for k in kernels(name, place) if k.name == kernel)
    with _imports(name, place, found, device) as package:
        answers.write("\n")  # a check's time limit starts here
        answers.flush()
        _limited(float(limit_s))

        def steps(one: str, sought: Collection[str]) -> Steps:
            if one == COST:
                return iter([(True, [])])
            return checked(found, package, recurrence, one, int(seed), device, sought)

        began = time.monotonic()
        for one, is_named, faults in agreed(checks.split(","), steps):
            line = {
                "check": one,
                "is_named": is_named,
                "faults": [asdict(f) for f in faults],
                "figures": measure(found, package, recurrence, device) if one == COST else {},
                "seconds": time.monotonic() - began,
            }
            answers.write(json.dumps(line) + "\n")
            answers.flush()
            _limited(float(limit_s))
            began = time.monotonic() if is_named else began


def play_again(target: str, fault: dict[str, Any], device: str) -> Iterator[str]:
    """Repeat the check that found a fault at its shape; lines about it, the first with the number
    of faults.

    fault: its fields, as `asdict` makes them. For engine.conform.report.
    """
    old = _fault(fault)
    name, place, version = open_target(target)
    found = next(k for k in kernels(name, place) if k.name == old.kernel)
    rounds = rounds_of(old.check, device)
    with _imports(name, place, found, device) as package:
        seen = check(found, package, old.shape, old.check, old.seed, device, rounds)
    yield f"{len(seen)} faults: {target} {version}".strip() + f", {old.kernel}, {old.check}"
    for one in seen:
        yield f"{one.cause}: {one.detail}"
        yield f"round {one.round}, sequence {one.sequence}, row {one.row}, error {one.error:.3g}"
        yield f"shape {one.shape.recurrence} {one.shape}"
        for title, errors in (("row", one.row_errors), ("depth", one.depth_errors)):
            if errors:
                yield f"error by {title}: {' '.join(f'{error:.2g}' for error in errors)}"


@contextmanager
def _imports(name: str, place: str, kernel: Kernel, device: str) -> Iterator[Package]:
    """The package of a target, with its adapter's imports; for a compiled kernel the installed one.
    On the CPU its empty tensors hold NaN."""
    import torch

    # use_deterministic_algorithms imports a compiler, half of a process's start
    torch.set_deterministic_debug_mode("warn" if device == "cpu" else "default")
    table = adapters.engine(name) if name else None
    package = Package(table.package if table else "", Path(place or "."), "")
    foreign = table is not None and table.package != "kernels" and not kernel.compiled
    with package.imports(table) if table and foreign else nullcontext():
        yield package


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("request", nargs=8)
    _in_child(*parser.parse_args().request)
