"""Lines of the list of runs as a tree: models, their scenarios, comparisons with their lanes, and
runs with those that were forked from them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from app.trace_models.run_facts import RunRow
from app.trace_models.run_notes import notes_of
from engine.analysis.findings.run_rows import lane_kind
from engine.trace.records import PEER, POLICY, REFERENCE
from engine.trace.run_ref import RunRef

OPEN, FOLDED = "▾", "▸"


@dataclass(frozen=True, slots=True)
class RunLine:
    """key: what it is known by. title: of a folder, or what a run is called here. row: figures of
    a run, of a comparison those of the lane that it shows; None for a folder. is_open: whether the
    lines below it are listed, None where there are none."""

    key: Hashable
    depth: int
    title: str
    row: RunRow | None = None
    is_open: bool | None = None


class RunTree:
    """Which lines are folded: comparisons are until they are opened, all else is open."""

    def __init__(self) -> None:
        self._toggled: set[Hashable] = set()

    def toggle(self, line: RunLine) -> None:
        """Open or fold a line."""
        self._toggled ^= {line.key}

    def lines(
        self, rows: Sequence[RunRow], found: Collection[RunRef], *, with_models: bool, whole: bool
    ) -> list[RunLine]:
        """Lines of the rows that were found. rows: in order of starting, those of a model after one
        another. with_models: models are folders. whole: nothing is folded."""
        tree = _Tree(self._toggled, found, whole)
        by_model: dict[str, list[RunRow]] = {}
        for row in rows:
            by_model.setdefault(row.model, []).append(row)
        if not with_models:
            return [line for of_model in by_model.values() for line in tree.of_model(of_model, 0)]
        lines: list[RunLine] = []
        for model, of_model in by_model.items():
            lines += tree.folder(("model", model), 0, model, list(tree.of_model(of_model, 1)))
        return lines


class _Tree:
    def __init__(
        self, toggled: Collection[Hashable], found: Collection[RunRef], whole: bool
    ) -> None:
        self._toggled, self._found, self._whole = toggled, found, whole

    def _is_open(self, key: Hashable, usual: bool) -> bool:
        return self._whole or usual is not (key in self._toggled)

    def folder(
        self, key: Hashable, depth: int, title: str, below: list[RunLine]
    ) -> Iterator[RunLine]:
        """A folder and what is in it; nothing where nothing is."""
        if below:
            is_open = self._is_open(key, True)
            yield RunLine(key, depth, title, is_open=is_open)
            if is_open:
                yield from below

    def of_model(self, rows: Sequence[RunRow], depth: int) -> Iterator[RunLine]:
        """Runs and comparisons in order; those of a scenario where its first one is."""
        groups, forks = _grouped(rows)
        by_scenario: dict[RunRef | str, list[list[RunRow]]] = {}
        for group in groups:
            first = group[0].run
            by_scenario.setdefault(notes_of(first.facts).scenario or first, []).append(group)
        for title, some in by_scenario.items():
            if isinstance(title, RunRef):
                yield from self._group(some[0], forks, depth)
                continue
            below = [line for one in some for line in self._group(one, forks, depth + 1)]
            yield from self.folder(("scenario", rows[0].model, title), depth, title, below)

    def _group(
        self, group: list[RunRow], forks: dict[RunRef, list[RunRow]], depth: int
    ) -> Iterator[RunLine]:
        first = group[0]
        if len(group) == 1 and first.run.facts.lane != REFERENCE:
            yield from self._run(first, forks, depth)
            return
        lanes = [row for row in group if row.run in self._found]
        if not lanes:
            return
        policies = [one for one in group if lane_kind(one.run.facts) in (POLICY, PEER)]
        row = next(iter(policies), first)  # as run_to_show has it
        names = [one.run.facts.lane or "" for one in policies]
        what = f"compare {', '.join(names) or 'lanes'}"
        marks = tuple(dict.fromkeys(mark for one in group for mark in one.marks))
        stop = next((one.stop for one in group if not one.ended), row.stop)
        is_open = self._is_open(("lanes", first.run), False)
        whole = replace(row, drafter=what, marks=marks, stop=stop)
        yield RunLine(("lanes", first.run), depth, called(row), whole, is_open)
        for lane in lanes if is_open else ():
            yield RunLine(lane.run, depth + 1, lane.name, lane)

    def _run(self, row: RunRow, forks: dict[RunRef, list[RunRow]], depth: int) -> Iterator[RunLine]:
        is_listed = row.run in self._found
        below = [
            line
            for fork in forks.get(row.run, ())
            for line in self._run(fork, forks, depth + is_listed)
        ]
        if is_listed:
            is_open = self._is_open(row.run, True) if below else None
            yield RunLine(row.run, depth, called(row), row, is_open)
            if not is_open:
                return
        yield from below


def called(row: RunRow) -> str:
    """What the user calls a run, else its number."""
    return row.name or str(row.number)


def _grouped(rows: Sequence[RunRow]) -> tuple[list[list[RunRow]], dict[RunRef, list[RunRow]]]:
    """Runs that are listed by themselves, lanes of one comparison together; forks by the run that
    they go on from, where that one is there."""
    known = {row.run for row in rows}
    groups: list[list[RunRow]] = []
    forks: dict[RunRef, list[RunRow]] = {}
    for row in rows:
        facts = row.run.facts
        parent = None if facts.fork is None else row.run.sibling(facts.fork.parent)
        before = groups[-1][-1].run if groups else None
        goes_on = (
            before is not None and before.store is row.run.store and before.facts.lane is not None
        )
        if parent in known and parent is not None and parent.run_id < row.run.run_id:
            forks.setdefault(parent, []).append(row)
        elif facts.lane not in (None, REFERENCE) and goes_on:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups, forks
