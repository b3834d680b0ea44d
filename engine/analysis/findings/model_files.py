"""Rules about model files that changed while a run had their weights."""

from __future__ import annotations

from collections.abc import Iterator

from engine.analysis.findings.rule import ERROR, INFO, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun
from engine.gguf.part_file import WRITTEN
from engine.trace.facts import FileChangeFacts


def _mapped_changed(run: ExaminedRun) -> Iterator[RuleHit]:
    found = [one for one in _changes(run) if _is_harmful(one)]
    if found:
        yield RuleHit(
            found[0].round,
            None,
            f"The file {_names(found)} changed{_when(found[0])}: from here figures mean nothing.",
            "weights are mapped from the file",
        )


def _file_differs(run: ExaminedRun) -> Iterator[RuleHit]:
    found = [one for one in _changes(run) if not _is_harmful(one)]
    if found:
        yield RuleHit(
            found[0].round,
            None,
            f"The file {_names(found)} on the disk is no longer the one that this run used.",
            f"{found[0].change}{_when(found[0])}; the run's weights are those opened",
        )


def _changes(run: ExaminedRun) -> list[FileChangeFacts]:
    return run.facts.file_changes or []


def _is_harmful(one: FileChangeFacts) -> bool:
    return one.mapped and one.change == WRITTEN


def _names(found: list[FileChangeFacts]) -> str:
    return ", ".join(dict.fromkeys(one.file for one in found))


def _when(one: FileChangeFacts) -> str:
    for number, text in ((one.round, "at"), (one.after, "after")):
        if number is not None:
            return f" {text} round {number}"
    return ""


RULES = (
    Rule(
        "model-file-changed",
        ERROR,
        "Model file changed in use",
        "The file was written to while its weights were in use, mapped: they belong to no model.",
        "Open the model again when its file is complete; with --no-mmap weights are copied into "
        "memory, where nothing changes them.",
        _mapped_changed,
    ),
    Rule(
        "model-file-differs",
        INFO,
        "Model file is another one by now",
        "The file was written to or replaced after the run's weights had been read: the run is "
        "right, and it is one of the model as it was.",
        "Open the model again to use the file as it is now.",
        _file_differs,
    ),
)
