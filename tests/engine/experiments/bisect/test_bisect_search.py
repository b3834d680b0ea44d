"""The search for what broke, on made-up histories whose faults are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from engine.compare.rollback_outcomes import FAILED, KNOWN, RIGHT, WRONG
from engine.errors import BisectError, OptionError
from engine.experiments.bisect import search as report
from engine.experiments.bisect.builds import SkippedError
from engine.experiments.bisect.history import Revision, RevisionHistory
from engine.experiments.bisect.search import Search

Outcome = Callable[[int], dict[str, str]]


def history(parents: list[tuple[int, ...]]) -> RevisionHistory:
    return RevisionHistory(
        [Revision(f"{i:040x}", f"change {i}", one) for i, one in enumerate(parents)]
    )


def row(n: int) -> RevisionHistory:
    return history([(i - 1,) if i else () for i in range(n)])


class Builds:
    """Builds and judges by a function of the revision's index. judged: in order."""

    def __init__(self, outcome: Outcome, broken: frozenset[int] = frozenset()) -> None:
        self.outcome, self.broken = outcome, broken
        self.judged: list[int] = []

    def build(self, revision: Revision) -> Path:
        i = int(revision.key, 16)
        if i in self.broken:
            raise SkippedError("does not build: a.cpp:1: error: x")
        return Path(str(i))

    def judge(self, build: Path, wanted: Collection[str]) -> dict[str, tuple[str, str]]:
        self.judged.append(int(str(build)))
        outcomes = self.outcome(int(str(build))).items()
        return {check: (said, "") for check, said in outcomes if not wanted or check in wanted}


def searched(
    where: RevisionHistory, builds: Builds, state: Path | None = None, **options: object
) -> Search:
    search = Search(where, builds.build, builds.judge, state=state, **options)  # type: ignore[arg-type]
    for _ in search.run():
        pass
    return search


def since(*faults: int) -> Outcome:
    """A check for each fault, that fails from it on."""
    return lambda i: {f"check {f}": WRONG if i >= f else RIGHT for f in faults}


def found(search: Search) -> list[list[int]]:
    return [[int(one.key, 16) for one in fault.suspects] for fault in search.faults]


def test_every_fault_gets_its_commit_in_few_steps() -> None:
    builds = Builds(since(3, 17, 18, 900))
    search = searched(row(1000), builds)
    assert found(search) == [[3], [17], [18], [900]]
    assert all(fault.is_sure for fault in search.faults)
    assert [list(fault.checks) for fault in search.faults] == [
        [f"check {f}"] for f in (3, 17, 18, 900)
    ]
    assert len(set(builds.judged)) <= 4 * 10 + 4
    judged_twice = {i for i in builds.judged if builds.judged.count(i) > 1}
    assert {2, 3, 16, 17, 18, 899, 900} <= judged_twice


@pytest.mark.parametrize("seed", range(40))
def test_against_every_commit_judged(seed: int) -> None:
    """Random histories with merges, and some that do not build: what is accused is the only first
    one to fail, or one of suspects that hold it."""
    draw = random.Random(seed)
    n = draw.randrange(2, 60)
    parents: list[tuple[int, ...]] = [()]
    for i in range(1, n - 1):
        wide = max(0, i - 4)
        parents.append(tuple({draw.randrange(wide, i) for _ in range(draw.choice((1, 1, 2)))}))
    heads = set(range(n - 1)) - {p for one in parents for p in one}
    parents.append(tuple(sorted(heads)))
    where = history(parents)
    fault = draw.randrange(1, n)
    failing = {i for i in range(n) if where.ancestors[i] >> fault & 1}
    if n - 1 not in failing:
        fault, failing = n - 1, {n - 1}
    broken = frozenset(i for i in range(1, n - 1) if draw.random() < 0.25)
    builds = Builds(lambda i: {"it": WRONG if i in failing else RIGHT}, broken)
    search = searched(where, builds)
    [suspects] = found(search)
    assert fault in suspects
    if fault not in broken:
        assert suspects[-1] == fault
        assert all(i in broken for i in suspects[:-1])
    assert search.faults[0].is_sure == (len(suspects) == 1)
    assert not broken & set(builds.judged)


def test_a_range_that_does_not_build_is_left_quickly() -> None:
    broken = frozenset(range(20, 480))
    builds = Builds(since(490), broken)
    search = searched(row(500), builds)
    assert found(search) == [[490]]
    assert sum(bool(one.skipped) for one in search.verdicts.values()) <= 18


def test_suspects_that_cannot_be_judged_are_named_together() -> None:
    builds = Builds(since(30), frozenset(range(28, 34)))
    search = searched(row(40), builds)
    assert found(search) == [[*range(28, 35)]]
    [fault] = search.faults
    assert not fault.is_sure and fault.doubt == "6 before it could not be tested"
    text = "\n".join(report.lines(search))
    assert "one of 7 revisions up to 000000000 change 34" in text
    gives_up = searched(row(400), Builds(since(300), frozenset(range(1, 399))), most_skips=5)
    assert len(found(gives_up)[0]) == 399
    assert len(gives_up.verdicts) == 7  # both ends, and no probes after the last one


def test_what_the_user_leaves_out_is_never_built() -> None:
    builds = Builds(since(3))
    search = searched(row(8), builds, skip={3, 4})
    assert found(search) == [[3, 4, 5]]
    assert not {3, 4} & set(builds.judged)


def test_a_fault_mended_and_made_again_is_found_twice() -> None:
    builds = Builds(lambda i: {"it": WRONG if 4 <= i < 16 or i >= 26 else RIGHT})
    search = searched(row(33), builds)
    assert found(search) == [[26]]
    outcome: Outcome = lambda i: {"it": WRONG if 4 <= i < 20 or i == 32 else RIGHT}  # noqa: E731
    twice = searched(row(33), Builds(outcome))
    assert found(twice) == [[4], [32]]
    for fault in twice.faults:
        assert fault.is_sure and fault.mended is not None
        earlier, later = (int(one.key, 16) for one in fault.mended)
        assert 4 <= earlier < 20 <= later < 32
    assert "fixed and broken again" in "\n".join(report.lines(twice))
    assert found(searched(row(33), Builds(outcome), n_probes=0)) == [[4]]


def test_ends_that_do_not_differ_are_refused() -> None:
    for outcome, words in (
        (since(100), "pass the same checks"),
        (since(0), "fail the same 1 check, first 'check 0'"),
    ):
        with pytest.raises(BisectError, match=words):
            searched(row(9), Builds(outcome))
    with pytest.raises(BisectError, match="The good commit 000000000 does not build"):
        searched(row(9), Builds(since(3), frozenset([0])))
    with pytest.raises(BisectError, match="The bad commit 000000000 does not build"):
        searched(row(9), Builds(since(3), frozenset([8])))


def test_a_known_defect_counts_from_where_it_was_none() -> None:
    """What fails at both ends alike counts for nothing; what gets worse is a fault."""

    def outcome(i: int) -> dict[str, str]:
        return {
            "always": KNOWN,
            "worse": KNOWN if i < 5 else WRONG,
            "dies": RIGHT if i < 7 else FAILED,
            "unread": "not judged",
            "mended": WRONG if i < 2 else RIGHT,
        }

    search = searched(row(12), Builds(outcome))
    assert [(list(f.checks), found(search)[i]) for i, f in enumerate(search.faults)] == [
        (["worse"], [5]),
        (["dies"], [7]),
    ]
    assert search.mended == ["mended"]


def test_it_goes_on_after_its_end_and_keeps_what_it_needs(tmp_path: Path) -> None:
    state, where, builds = tmp_path / "state.json", row(64), Builds(since(40))
    search = Search(where, builds.build, builds.judge, state=state)
    steps = search.run()
    for _ in range(5):
        next(steps)
    steps.close()
    first = list(builds.judged)
    kept: list[list[int]] = []
    again = searched(
        where, builds, state, forget=lambda some: kept.append([int(one.key, 16) for one in some])
    )
    assert again.n_known == 5 and found(again) == [[40]]
    assert not set(first) & set(builds.judged[5:-4])
    assert {39, 40} <= set(kept[-1]) and len(set(kept[-1])) <= 3
    n = len(builds.judged)
    assert found(searched(where, builds, state)) == [[40]]
    assert builds.judged[n:] == [40, 39]  # once more, and nothing else
    state.write_text("{", encoding="utf-8")
    with pytest.raises(OptionError, match="is not the state of a search"):
        searched(where, builds, state)


def test_what_was_skipped_can_be_tried_again(tmp_path: Path) -> None:
    state, where = tmp_path / "state.json", row(16)
    assert found(searched(where, Builds(since(9), frozenset([8, 9])), state)) == [[8, 9, 10]]
    assert found(searched(where, Builds(since(9)), state)) == [[8, 9, 10]]
    assert found(searched(where, Builds(since(9)), state, retry_skipped=True)) == [[9]]


def test_a_judge_that_is_not_sure_is_said() -> None:
    times: dict[int, int] = {}

    def outcome(i: int) -> dict[str, str]:
        times[i] = times.get(i, 0) + 1
        return {"it": WRONG if i >= 8 or (i == 5 and times[i] == 1) else RIGHT}

    search = searched(row(11), Builds(outcome))
    fault, real = search.faults
    assert found(search) == [[5], [8]]
    assert fault.doubt.endswith("was tested twice, with different outcomes")
    assert real.is_sure and not fault.is_sure
