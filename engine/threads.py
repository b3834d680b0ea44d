"""CPU threads: how many a model gets, and the trial of them: passes of a small model timed with one
thread and with more, once per machine, model shape, compute mode and version; the fastest number is
kept for later, unless other work disturbed its trial.

Only where results are bit-equal with any number of threads: in `blocks` and `q8`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from engine.batch import Span
from engine.environment import version
from engine.errors import DraftscopeError
from engine.files import write_text
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.info import ModelInfo
from kernels.kernel_files import cache_folder
from kernels.processor import processor_name, target

ALL = torch.get_num_threads()
"""Before any change: torch counts cores, and obeys OMP_NUM_THREADS."""
_times: dict[int, float] = {}


def threads_for(info: ModelInfo) -> int:
    """One for a small model, whose operations may end before a second thread wakes up; for any
    other torch's default on this machine."""
    return 1 if info.is_small else ALL


def use_threads(
    n_threads: int | None, info: ModelInfo, times: Mapping[int, float] | None = None
) -> None:
    """Let torch and the kernels use this many threads from here on; None = `threads_for`.

    times: seconds of a pass by number of threads, if it was chosen by them.
    """
    _times.clear()
    _times.update(times or {})
    torch.set_num_threads(n_threads or threads_for(info))


def chosen_by() -> str:
    """The number of threads in use and the measurements it was chosen by; "" without any."""
    n = torch.get_num_threads()
    if n not in _times:
        return ""
    parts = (f"{1000 * seconds:.2f} with {n}" for n, seconds in sorted(_times.items()))
    return f"{n}, chosen by measurement (ms a token: {', '.join(parts)})"


@contextmanager
def temporary_threads(n_threads: int | None = None) -> Iterator[None]:
    """Use this many threads within the context, None = all, which loading any model can use."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads or ALL)
    try:
        yield
    finally:
        torch.set_num_threads(before)


MODES = ("blocks", "q8")
_BUDGET_S = 0.3
_ROUNDS = 12
_FEWEST = 4
"""Passes of each number that a choice needs: the first one records."""
_FASTER = 0.95
"""Share of the time with the rule's number: a smaller gain does not justify another number."""
_UNDISTURBED, _CONFIRMED = 8, 1.25
"""For a trial to be kept: passes per interruption, and the largest ratio of its two least times."""
_MOST_KEPT, _MOST_BYTES = 256, 1 << 20


def n_interrupted() -> int:
    """How often a thread of this process was preempted so far; 0 if the system does not count
    that."""
    try:
        import resource  # not on every system
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def choose_threads(n_threads: int | None, info: ModelInfo, model: HybridModel) -> None:
    """Let torch and the kernels use this many threads from here on; None: the fastest number, or
    `threads_for` for a large model."""
    use_threads(n_threads, info)
    candidates = _doubled(ALL)
    fixed = model.device.type == "cpu" and model.compute in MODES
    if n_threads or not (info.is_small and fixed and len(candidates) > 1):
        return
    key = _key(info, model.compute)
    times = _read().get(key)
    if times is None:
        times, is_quiet = timed(candidates, _passes(model), time.perf_counter)
        if is_quiet:
            _keep(key, times)
    use_threads(fastest(times, threads_for(info)), info, times)


def timed(
    candidates: Sequence[int],
    run: Callable[[int], None],
    now: Callable[[], float],
    switches: Callable[[], int] = n_interrupted,
) -> tuple[dict[int, float], bool]:
    """The least seconds of `run` with each number of threads, taken in turn, and whether to keep
    them; {} if the budget is used up before each had a few turns.

    A pass that waits for a preempted thread says nothing about the number. So times are kept only
    if hardly any pass was interrupted, and a second pass of each number confirms them.

    run: one pass with a number of threads. now: a clock in seconds. switches: see n_interrupted.
    """
    took: dict[int, list[float]] = {n: [] for n in candidates}
    start, n_before = now(), switches()
    for n in [*candidates] * _ROUNDS:
        before = now()
        if before - start > _BUDGET_S:
            break
        run(n)
        took[n].append(now() - before)
    turns = [sorted(one) for one in took.values()]
    if min(map(len, turns)) < _FEWEST:
        return {}, False
    n_switches = switches() - n_before
    is_quiet = n_switches * _UNDISTURBED <= sum(map(len, turns))
    is_quiet &= all(second <= _CONFIRMED * least for least, second, *_ in turns)
    return {n: one[0] for n, one in zip(candidates, turns, strict=True)}, is_quiet


def fastest(times: dict[int, float], rule: int) -> int:
    """The number to use: the rule's, unless another one is clearly faster."""
    best = min(times, key=lambda n: (times[n], n), default=rule)
    return best if times and times[best] < _FASTER * times.get(rule, math.inf) else rule


def _doubled(most: int) -> list[int]:
    """1, 2, 4 … and the most."""
    return sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})


def _passes(model: HybridModel) -> Callable[[int], None]:
    """One token after another, each with a number of threads."""
    memory = HybridMemory.for_model(model.config, 1, _ROUNDS * len(_doubled(ALL)), model.device)
    n_done = 0

    @torch.inference_mode()
    def run(n: int) -> None:
        nonlocal n_done
        torch.set_num_threads(n)
        (ubatch,) = memory.split([Span(0, n_done, [0], [0])], 1, "seq")
        model.forward(ubatch, memory)
        n_done += 1

    return run


# -- kept for the next time ----------------------------------------------------------------


def kept_file() -> Path:
    """Where the times are stored; without the file they are measured again."""
    return cache_folder() / "threads.json"


def _key(info: ModelInfo, compute: str) -> str:
    shape = {name: value for name, value in info.to_dict().items() if name != "name"}
    # "quiet" distinguishes them from those of earlier versions, which kept disturbed trials
    parts = ["quiet", version(), compute, ALL, processor_name(), target(), shape]
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()


def _read() -> dict[str, dict[int, float]]:
    """The stored times, newest last; empty if the file is missing or damaged."""
    try:
        with kept_file().open("rb") as file:
            entries = json.loads(file.read(_MOST_BYTES))["times"]
        found = {
            str(key): {int(n): float(seconds) for n, seconds in times.items()}
            for key, times in entries.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return {key: times for key, times in found.items() if _is_sound(times)}


def _is_sound(times: dict[int, float]) -> bool:
    return list(times) == _doubled(ALL) and all(0 < one < math.inf for one in times.values())


def _keep(key: str, times: dict[int, float]) -> None:
    entries = {**_read(), key: times}
    text = json.dumps({"version": 1, "times": dict([*entries.items()][-_MOST_KEPT:])})
    path = kept_file()
    with suppress(OSError, DraftscopeError):  # they are measured again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
