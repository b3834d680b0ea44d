"""The search: ends first, then halves, until every broken check has its commit.

Verdicts are saved after each step, and a search starts with those of earlier ones on the same
builds and judge. A reported commit and its parents are judged twice.

Reports of a search: lines for a terminal, Markdown for an issue, an object for JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import BisectError, OptionError
from engine.experiments.bisect.builds import RANKS, Checks, Judge, SkippedError
from engine.experiments.bisect.first_wrong import FirstWrong
from engine.experiments.bisect.history import Revision, RevisionHistory
from engine.files import file_bytes, written_whole
from engine.plain_text import counted
from engine.report.parts import ReportTable
from engine.report.text import table_lines
from engine.trace.typed_json import strict_json

_MOST_BYTES = 64 << 20
_REMEDY = "Remove it, and search again."
_ABSENT = ("", "the test has no such check")


class RevisionVerdict(msgspec.Struct):
    """Verdict on a revision: its checks (outcome, text) or why it has none. Times are seconds."""

    checks: dict[str, tuple[str, str]] = {}
    skipped: str = ""
    build_s: float = 0.0
    judge_s: float = 0.0


class Regression(msgspec.Struct):
    """The cause of broken checks. suspects: one revision, or several if those in between could not
    be judged, the last of them failing. checks: outcome and text at the last suspect. doubt: why it
    is uncertain; mended: the first fails, and the second after it passes; alone_on: base on which
    the change of the unjudgeable suspect fails alone."""

    suspects: list[Revision]
    checks: dict[str, tuple[str, str]]
    parents: list[Revision]
    doubt: str = ""
    mended: tuple[Revision, Revision] | None = None
    alone_on: Revision | None = None
    first_wrong: FirstWrong | None = None

    @property
    def is_sure(self) -> bool:
        """Whether it is one revision, confirmed."""
        return len(self.suspects) == 1 and not self.doubt


Trace = Callable[[Collection[str], Path, Path], FirstWrong | None]
"""Finds the first wrong operation from checks, a good and a bad build."""


class Search:
    """A search in a history. state: file of verdicts, None = not saved. skip: never built.
    retry_skipped: retry what could not be judged before. most_skips: suspects that may be skipped
    before giving up. n_probes: judged after each fault, to see whether it was fixed in between.
    trace: None = without. forget: called with the revisions that are still needed. alone: builds a
    revision (the second) with the change of another, None = not tried.

    Raises OptionError for an unreadable state.
    """

    def __init__(
        self,
        history: RevisionHistory,
        build: Callable[[Revision], Path],
        judge: Judge,
        *,
        state: Path | None = None,
        skip: Collection[int] = (),
        retry_skipped: bool = False,
        most_skips: int = 32,
        n_probes: int = 2,
        forget: Callable[[Iterable[Revision]], object] | None = None,
        trace: Trace | None = None,
        alone: Callable[[Revision, Revision], Path] | None = None,
    ) -> None:
        self.history, self._build, self._judge = history, build, judge
        self._state, self._trace, self._alone = state, trace, alone
        self._forget = forget or (lambda kept: None)
        self._most_skips, self._n_probes = most_skips, n_probes
        known = {} if state is None else _read(state)
        self._known = {
            key: one for key, one in known.items() if not (retry_skipped and one.skipped)
        }
        places = {revision.key: i for i, revision in enumerate(history.revisions)}
        self.verdicts = {places[key]: one for key, one in self._known.items() if key in places}
        for i in skip:
            self.verdicts.setdefault(i, RevisionVerdict(skipped="left out by --skip"))
        self._wanted: list[str] = []
        """Checks for builds between the ends."""
        self.n_known = len(self.verdicts)
        self.begin: Callable[[Revision], object] = lambda revision: None
        """Called before a revision is built and judged."""
        self.faults: list[Regression] = []
        self.mended: list[str] = []
        """Checks that fail at the good end and pass at the bad one."""

    def run(self) -> Iterator[str]:
        """Judge until all is found; yields a line per step. Raises BisectError if the ends do not
        differ or cannot be judged, OptionError if the state cannot be written."""
        last = len(self.history) - 1
        for end in (0, last):
            yield from self._judged(end, last)
            if why := self.verdicts[end].skipped:
                raise BisectError(
                    f"The {'bad' if end else 'good'} commit {self._short(end)} {why.rstrip('.')}.",
                    "Choose another commit, or correct the problem.",
                )
        waiting = self._wanted = self._broken()
        while waiting:
            check = waiting[0]
            while (i := self._next(check)) is not None:
                yield from self._judged(i, len(self.history.suspects(self._fails(check))))
                self._forget(self._needed(waiting))
            suspects = self.history.suspects(self._fails(check))
            mine = [c for c in waiting if self.history.suspects(self._fails(c)) == suspects]
            fault = self._fault(suspects, mine)
            self.faults.append(fault)
            self._judge_alone(fault, suspects)
            yield from self._judge_again(fault)
            self._find_first_wrong(fault)
            yield from self._probe(fault)
            waiting = [
                c
                for c in waiting  # again, if a probe has shown a fix in between
                if c not in mine or self.history.suspects(self._fails(c)) != suspects
            ]
        self._forget(self.needed())
        self.faults.sort(key=lambda fault: self._place(fault.suspects[0]))

    def needed(self) -> list[Revision]:
        """Revisions whose builds show the reported faults."""
        return [one for fault in self.faults for one in (*fault.suspects[-1:], *fault.parents)]

    # -- what is known ---------------------------------------------------------------------

    def _broken(self) -> list[str]:
        first, last = self.verdicts[0].checks, self.verdicts[len(self.history) - 1].checks
        before = {check: RANKS.get(outcome) for check, (outcome, _) in first.items()}
        after = {check: RANKS.get(outcome) for check, (outcome, _) in last.items()}
        pairs = [
            (check, a, b)
            for check in after
            if (a := before.get(check)) is not None and (b := after[check]) is not None
        ]
        self.mended = [check for check, a, b in pairs if a > b]
        if broken := [check for check, a, b in pairs if a < b]:
            return broken
        names = f"{self._short(0)} and {self._short(-1)}"
        failing = [check for check, a, b in pairs if a == b and b]
        if failing:
            raise BisectError(
                f"{names} fail the same {counted(len(failing), 'check')}, first {failing[0]!r}.",
                "Choose an older good commit, or another test.",
            )
        raise BisectError(
            f"{names} pass the same checks: the bad commit does not fail this test.",
            "Choose a newer bad commit, or a test that shows the fault.",
        )

    def _fails(self, check: str) -> dict[int, bool | None]:
        """For every judged revision, whether it fails a check that the good end passes, None if
        unknown."""
        allowed = RANKS[self.verdicts[0].checks[check][0]]
        found: dict[int, bool | None] = {}
        for i, verdict in self.verdicts.items():
            if verdict.skipped or check in verdict.checks:
                rank = RANKS.get(verdict.checks.get(check, ("", ""))[0])
                found[i] = None if rank is None else rank > allowed
        return found

    def _is_worse(self, check: str, checks: Checks) -> bool:
        """Whether a check fails that the good end passes."""
        rank = RANKS.get(checks.get(check, _ABSENT)[0])
        return rank is not None and rank > RANKS[self.verdicts[0].checks[check][0]]

    def _next(self, check: str) -> int | None:
        fails = self._fails(check)
        skips = sum(fails.get(i, True) is None for i in self.history.suspects(fails))
        return None if skips >= self._most_skips else self.history.next_to_judge(fails)

    def _needed(self, checks: Sequence[str]) -> list[Revision]:
        """Revisions whose builds may be needed to show a fault: the newest pass, and failing
        suspects."""
        found = set()
        for check in checks:
            fails = self._fails(check)
            passing = [i for i, failed in fails.items() if failed is False]
            older = 0
            for i in passing:
                older |= self.history.ancestors[i] & ~(1 << i)
            found |= {i for i in passing if not older >> i & 1}
            found |= {i for i in self.history.suspects(fails) if fails.get(i)}
        return [*(self.history.revisions[i] for i in sorted(found)), *self.needed()]

    # -- steps -----------------------------------------------------------------------------

    def _judged(self, i: int, n_left: int) -> Iterator[str]:
        known = self.verdicts.get(i, RevisionVerdict())
        if known.skipped and not self._is_left_out(i):
            return
        missing = [check for check in self._wanted if check not in known.checks]
        if known.checks and not missing:
            return
        revision = self.history.revisions[i]
        verdict = self._new_verdict(revision)
        if not verdict.skipped:
            verdict.checks = known.checks | dict.fromkeys(missing, _ABSENT) | verdict.checks
        self.verdicts[i] = self._known[revision.key] = verdict
        self._write()
        yield _step_line(revision, verdict, f"{n_left} left")

    def _is_left_out(self, i: int) -> bool:
        """Whether only the user skipped it, which is not allowed for the ends."""
        last = len(self.history) - 1
        return i in (0, last) and self.history.revisions[i].key not in self._known

    def _new_verdict(self, revision: Revision) -> RevisionVerdict:
        self.begin(revision)
        began = time.monotonic()
        try:
            build = self._build(revision)
        except SkippedError as why:
            return RevisionVerdict(skipped=str(why), build_s=time.monotonic() - began)
        built = time.monotonic()
        try:
            checks = dict(self._judge(build, self._wanted))
        except SkippedError as why:
            now = time.monotonic()
            return RevisionVerdict(skipped=str(why), build_s=built - began, judge_s=now - built)
        return RevisionVerdict(checks, build_s=built - began, judge_s=time.monotonic() - built)

    def _fault(self, suspects: Sequence[int], checks: Sequence[str]) -> Regression:
        """Its current description. The last suspect has been seen to fail."""
        revisions, bad = self.history.revisions, suspects[-1]
        said: Checks = self.verdicts[bad].checks
        n_before = len(suspects) - 1
        return Regression(
            [revisions[i] for i in suspects],
            {check: said[check] for check in checks},
            [revisions[i] for i in revisions[bad].parents],
            f"{n_before} before it could not be tested" if n_before else "",
        )

    def _probe(self, fault: Regression) -> Iterator[str]:
        """Judge a few revisions after it, and note where it was fixed, by any verdict."""
        bad = self._place(fault.suspects[-1])
        check = next(iter(fault.checks))
        after = [
            i for i in range(bad + 1, len(self.history) - 1) if self.history.ancestors[i] >> bad & 1
        ]
        part = len(after) / (self._n_probes + 1)
        for k in range(1, self._n_probes + 1) if after else ():
            near = after[max(0, int((k - 0.5) * part)) : int((k + 0.5) * part) + 1]
            if not any(i in self.verdicts for i in near):
                yield from self._judged(after[int(k * part)], 1)
        if between := self.history.mended_between(self._fails(check)):
            revisions = self.history.revisions
            fault.mended = revisions[between[0]], revisions[between[1]]

    def _judge_alone(self, fault: Regression, suspects: Sequence[int]) -> None:
        """Judge the suspects' changes, each alone on the last pass; the one that fails is the
        cause."""
        if self._alone is None or not 1 < len(suspects) <= self._most_skips:
            return
        base = self.history.revisions[self.history.revisions[suspects[0]].parents[0]]
        failing = []
        for i in suspects:
            suspect = self.history.revisions[i]
            with suppress(SkippedError):
                if i == suspects[-1] or suspect.key in self._known:  # otherwise excluded by --skip
                    checks = self._judge(self._alone(suspect, base), list(fault.checks))
                    if any(self._is_worse(check, checks) for check in fault.checks):
                        failing.append(suspect)
        if len(failing) == 1:
            fault.suspects, fault.doubt = failing, ""
            fault.alone_on, fault.parents = base, [base]

    def _judge_again(self, fault: Regression) -> Iterator[str]:
        """Judge the result and its parents again."""
        if fault.doubt or fault.alone_on:
            return
        revisions, checks = self.history.revisions, list(fault.checks)
        bad = self._place(fault.suspects[0])
        parents = revisions[bad].parents
        for i in parents:  # a merge's parents were assumed to pass because descendants do
            yield from self._judged(i, 1)
            if self._fails(checks[0])[i]:
                fault.doubt = f"its parent {self._short(i)} fails too"
        passing = [i for i in parents if self._fails(checks[0])[i] is False]
        for i in (bad, *passing) if not fault.doubt else ():
            again = self._new_verdict(revisions[i])
            yield _step_line(revisions[i], again, "once more")
            kept, self.verdicts[i] = self.verdicts[i], again
            if any(self._fails(check)[i] is not (i == bad) for check in checks):
                fault.doubt = f"{self._short(i)} was tested twice, with different outcomes"
            self.verdicts[i] = kept

    def _find_first_wrong(self, fault: Regression) -> None:
        if self._trace is None or not fault.is_sure or not fault.parents:
            return
        with suppress(SkippedError):
            good = self._build(fault.parents[0])
            if self._alone and fault.alone_on:
                bad = self._alone(fault.suspects[0], fault.alone_on)
            else:
                bad = self._build(fault.suspects[0])
            fault.first_wrong = self._trace(list(fault.checks), good, bad)

    def _short(self, i: int) -> str:
        return self.history.revisions[i].short

    def _place(self, revision: Revision) -> int:
        return self.history.revisions.index(revision)

    def _write(self) -> None:
        if self._state is not None:
            self._state.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self._state) as part:
                part.write_bytes(msgspec.json.encode(self._known))


def _read(state: Path) -> dict[str, RevisionVerdict]:
    if not state.is_file():
        return {}
    try:
        return msgspec.json.decode(file_bytes(state, _MOST_BYTES), type=dict[str, RevisionVerdict])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{state} is not the state of a search: {error}.", _REMEDY) from error


def seconds(verdicts: Mapping[int, RevisionVerdict]) -> float:
    """Total time of building and judging."""
    return sum(one.build_s + one.judge_s for one in verdicts.values())


_MOST_NAMED = 12


def _step_line(revision: Revision, verdict: RevisionVerdict, left: str) -> str:
    """Result of a step. left: suspects before it, or that it is a confirmation."""
    said = verdict.skipped or outcome_text(verdict)
    times = f"built {verdict.build_s:.0f} s, judged {verdict.judge_s:.0f} s"
    return f"{revision.short}  {said}  ({left}; {times})"


def outcome_text(verdict: RevisionVerdict) -> str:
    """The outcomes of a revision's checks, with the number of each."""
    outcomes = [outcome for outcome, _ in verdict.checks.values()]
    return ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))


def lines(search: Search) -> Iterator[str]:
    """The results, one paragraph per fault."""
    yield summary(search)
    for fault in search.faults:
        yield ""
        yield from _fault_lines(fault)
    if search.mended:
        yield ""
        yield f"fail in the good commit and pass in the bad one: {_named(search.mended)}"


def summary(search: Search) -> str:
    """A sentence on the amount of work."""
    verdicts = search.verdicts
    n_skipped = sum(bool(one.skipped) for one in verdicts.values())
    skipped = f", {n_skipped} of them skipped" if n_skipped else ""
    n_sure = sum(fault.is_sure for fault in search.faults)
    return (
        f"{len(verdicts)} of {len(search.history)} revisions tested{skipped}, "
        f"{seconds(verdicts) / 60:.1f} min: {n_sure} of {len(search.faults)} faults were located"
    )


def progress(search: Search, now: str) -> Iterator[str]:
    """A few lines on the progress of a search. now: the current step, empty at its end."""
    ends = search.history.revisions
    yield f"Bisect {ends[0].short} to {ends[-1].short}: {now or 'finished'}"
    if not now:
        yield from lines(search)
        return
    for i in sorted(search.verdicts)[:_MOST_NAMED]:
        verdict = search.verdicts[i]
        yield f"{ends[i].short}  {verdict.skipped or outcome_text(verdict)}"


def markdown(search: Search, title: str, again: str) -> str:
    """The same as Markdown. again: the command line."""
    text = [f"### {title}", "", summary(search) + "."]
    for fault in search.faults:
        first, *rest = _fault_lines(fault)
        text += ["", f"**{first}**", "", *(f"- {line.strip()}" for line in rest)]
    if search.mended:
        text += ["", f"Fail in the good commit and pass in the bad one: {_named(search.mended)}."]
    rows = [
        (revision.short, revision.title, verdict.skipped or outcome_text(verdict))
        for i, verdict in sorted(search.verdicts.items())
        for revision in [search.history.revisions[i]]
    ]
    text += ["", *table_lines(ReportTable(("revision", "title", "outcome"), rows))]
    return "\n".join([*text, "", f"Again: `{again}`", ""])


def as_json(search: Search) -> dict[str, Any]:
    """The same as one object."""
    return {
        "kind": "draftscope bisect",
        "version": 1,
        "revisions": len(search.history),
        "seconds": seconds(search.verdicts),
        "faults": [
            strict_json(msgspec.to_builtins(fault)) | {"is_sure": fault.is_sure}
            for fault in search.faults
        ],
        "mended": search.mended,
        "judged": [
            {"revision": msgspec.to_builtins(search.history.revisions[i])}
            | msgspec.to_builtins(search.verdicts[i])
            for i in sorted(search.verdicts)
        ],
    }


def _fault_lines(fault: Regression) -> Iterator[str]:
    last = fault.suspects[-1]
    if len(fault.suspects) == 1:
        yield last.name
    else:
        yield f"one of {len(fault.suspects)} revisions up to {last.name}"
        yield f"  {_named([one.short for one in fault.suspects])}"
    by_words: dict[tuple[str, str], list[str]] = {}
    for check, words in fault.checks.items():
        by_words.setdefault(words, []).append(check)
    for (outcome, about), checks in by_words.items():
        yield f"  {'; '.join(checks)}: {outcome}" + (f", {about}" if about else "")
    if fault.first_wrong:
        yield f"  first wrong value: {fault.first_wrong.text}"
    if len(fault.suspects) == 1:
        before = _named([one.short for one in fault.parents])
        yield f"  right in {before}" if not fault.doubt else f"  doubt: {fault.doubt}"
    else:
        yield f"  doubt: {fault.doubt}"
    if fault.alone_on is not None:
        yield "  cannot be tested itself; its change alone fails on top of the previous one"
    if fault.mended is not None:
        earlier, later = (one.short for one in fault.mended)
        yield f"  fixed and broken again: {earlier} fails, and {later} after it passes"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
