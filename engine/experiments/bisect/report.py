"""Reports of a search: lines for a terminal, Markdown for an issue, an object for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from engine.experiments.bisect.search import Fault, Search, Step, Verdict, seconds
from engine.trace.typed_json import strict_json

_MOST_NAMED = 12


def step_line(step: Step) -> str:
    """What a step came to."""
    verdict = step.verdict
    said = verdict.skipped or outcome_text(verdict)
    times = f"built {verdict.build_s:.0f} s, judged {verdict.judge_s:.0f} s"
    left = "once more" if step.again else f"{step.n_left} left"
    return f"{step.revision.short}  {said}  ({left}; {times})"


def outcome_text(verdict: Verdict) -> str:
    """The outcomes of a revision's checks, with the number of each."""
    outcomes = [outcome for outcome, _ in verdict.checks.values()]
    return ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))


def lines(search: Search) -> Iterator[str]:
    """What was found, a paragraph for each fault."""
    yield summary(search)
    for fault in search.faults:
        yield ""
        yield from _fault_lines(fault)
    if search.mended:
        yield ""
        yield f"fail at the good end and pass at the bad one: {_named(search.mended)}"


def summary(search: Search) -> str:
    """A sentence on how much was judged."""
    verdicts = search.verdicts
    n_skipped = sum(bool(one.skipped) for one in verdicts.values())
    skipped = f", {n_skipped} of them skipped" if n_skipped else ""
    n_sure = sum(fault.is_sure for fault in search.faults)
    return (
        f"{len(verdicts)} of {len(search.history)} revisions looked at{skipped}, "
        f"{seconds(verdicts) / 60:.1f} min: {n_sure} of {len(search.faults)} faults have their "
        "revision"
    )


def progress(search: Search, now: str) -> Iterator[str]:
    """A few lines on how far a search is. now: what it does, empty at its end."""
    ends = search.history.revisions
    yield f"Bisect {ends[0].short} to {ends[-1].short}: {now or 'finished'}"
    if not now:
        yield from lines(search)
        return
    for i in sorted(search.verdicts)[:_MOST_NAMED]:
        verdict = search.verdicts[i]
        yield f"{ends[i].short}  {verdict.skipped or outcome_text(verdict)}"


def markdown(search: Search, title: str, again: str) -> str:
    """The same as Markdown. again: the command that was given."""
    text = [f"### {title}", "", summary(search) + "."]
    for fault in search.faults:
        first, *rest = _fault_lines(fault)
        text += ["", f"**{first}**", "", *(f"- {line.strip()}" for line in rest)]
    if search.mended:
        text += ["", f"Fail at the good end and pass at the bad one: {_named(search.mended)}."]
    text += ["", "| revision | title | outcome |", "|---|---|---|"]
    for i in sorted(search.verdicts):
        revision, verdict = search.history.revisions[i], search.verdicts[i]
        said = verdict.skipped or outcome_text(verdict)
        text.append(f"| {revision.short} | {_cell(revision.title)} | {_cell(said)} |")
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


def _fault_lines(fault: Fault) -> Iterator[str]:
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
        yield "  cannot be judged itself; its change alone fails on the one before"
    if fault.mended is not None:
        earlier, later = (one.short for one in fault.mended)
        yield f"  mended and made again: {earlier} fails, and {later} after it passes"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
