"""What all tests share."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable

# before torch is imported: the tests' models are too small to gain from a second thread
os.environ.setdefault("OMP_NUM_THREADS", "1")

# before numpy and torch too: DRAFTSCOPE_CPU limits them where it can
import pytest
from hypothesis import HealthCheck, settings

import kernels  # noqa: F401
from tests.support.all_pairs import rows_of_all_pairs

# a busy machine is slow at everything; only the results of a test count
settings.register_profile(
    "any", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("all", settings.get_profile("any"), max_examples=100)
settings.load_profile("all" if "--all" in sys.argv else "any")

# what the program keeps between two starts belongs to no test
os.environ["DRAFTSCOPE_DATA_DIR"] = _data = tempfile.mkdtemp(prefix="draftscope-tests-")
atexit.register(shutil.rmtree, _data, ignore_errors=True)

# but all processes of a run take the kernels that one of them has compiled
if "DRAFTSCOPE_KERNEL_CACHE" not in os.environ:
    os.environ["DRAFTSCOPE_KERNEL_CACHE"] = _kernels = tempfile.mkdtemp(
        prefix="draftscope-kernels-"
    )
    atexit.register(shutil.rmtree, _kernels, ignore_errors=True)

_LONG = (
    "test_triton_compile.py",
    "test_triton_interpreter.py",
    "test_torture_corpus.py",
    "test_app_bench.py",
    "test_family_runs.py",
    "test_scenario.py",
    "test_rollback_runs.py",
    "test_clean_campaign.py",
    "test_comparison.py",
    "test_torture_frame.py",
    "test_foreign_traces.py",
    "test_layouts.py",
    "test_servers.py",
    "test_cli_check_rollback.py",
    "test_cli_changing_files.py",
    "test_family_faults.py",
    "test_policies.py",
    "test_grammar_runs.py",
    "test_rounds_on_cuda.py",
)


MANY_PAIRS = 8
"""Cases of two parameters from which on every other one is left out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="all mixes of parameters, not only those of all pairs"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of three parameters and more, any two values meet, and of tests with many long cases some
    are left out. The files that take longest come first, so that no process is left with one at
    the end."""
    if not config.getoption("all"):
        surplus = set(_beyond_pairs(items))
        surplus.update(_thinned([item for item in items if item not in surplus]))
        config.hook.pytest_deselected(items=[item for item in items if item in surplus])
        items[:] = [item for item in items if item not in surplus]
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(_LONG)))


def _thinned(items: list[pytest.Item]) -> Iterable[pytest.Item]:
    """What is left out of tests whose cases are many, long and much alike, and those that repeat
    what others show. A value that several cases share stays in one of them."""
    tests = defaultdict[object, list[pytest.Function]](list)
    for item in items:
        if item.get_closest_marker("repeats"):
            yield item
        elif isinstance(item, pytest.Function) and item.get_closest_marker("thinned"):
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("thinned")
        assert mark is not None
        values = [{(k, _key(v)) for k, v in case.callspec.params.items()} for case in cases]
        shared = Counter(value for some in values for value in some)
        missing = {value for value, n in shared.items() if n > 1}
        for some in values[:: mark.args[0]]:
            missing -= some
        for turn, (case, some) in enumerate(zip(cases, values, strict=True)):
            if turn % mark.args[0] and not missing & some:
                yield case
            missing -= some


def _key(value: object) -> object:
    """The same of equal values; of those without a hash, of one object alone."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _beyond_pairs(items: list[pytest.Item]) -> Iterable[pytest.Item]:
    """The cases of tests whose parameters have met in others of their cases, two by two; of two
    parameters with many cases, every other pair, as the fields of a chessboard."""
    tests = defaultdict[object, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        marks = [mark for mark in cases[0].iter_markers("parametrize") if len(mark.args[1]) > 1]
        if len(marks) < 2 or (cases[0].get_closest_marker("thinned") and len(marks) < 3):
            continue
        joint = [
            [name.strip() for name in mark.args[0].split(",")]
            if isinstance(mark.args[0], str)
            else mark.args[0]
            for mark in marks
        ]
        # a value is the same object in all cases, and need not be hashable
        rows = [
            [tuple(id(case.callspec.params[name]) for name in names) for names in joint]
            for case in cases
        ]
        if len(marks) > 2:
            kept = set(rows_of_all_pairs(rows))
        elif len(rows) < MANY_PAIRS:
            continue
        else:
            seen = [
                {value: i for i, value in enumerate(dict.fromkeys(some))}
                for some in zip(*rows, strict=True)
            ]
            kept = {
                i
                for i, row in enumerate(rows)
                if sum(places[value] for places, value in zip(seen, row, strict=True)) % 2 == 0
            }
        yield from (case for row, case in enumerate(cases) if row not in kept)


def pytest_collectstart() -> None:
    """What is imported stays: no search for garbage has to walk through it."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor later; and what a test makes is mostly needed until it ends. No test has a distributed
    tensor, for which the first `assert_close` would import for seconds."""
    if comparison := sys.modules.get("torch.testing._comparison"):
        vars(comparison)["_HAS_DTENSOR"] = False
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)
