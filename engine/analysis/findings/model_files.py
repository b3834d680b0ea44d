"""Rules about model files that changed while a run had their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.analysis.findings.rule import ERROR, INFO, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun
from engine.gguf.model_files import CHANGES
from engine.gguf.part_file import WRITTEN


def _mapped_changed(run: ExaminedRun) -> Iterator[RuleHit]:
    found = [one for one in _changes(run) if _is_harmful(one)]
    if found:
        yield RuleHit(
            _round(found[0], "round"),
            None,
            f"The file {_names(found)} changed{_when(found[0])}: from here figures mean nothing.",
            "weights are mapped from the file",
        )


def _file_differs(run: ExaminedRun) -> Iterator[RuleHit]:
    found = [one for one in _changes(run) if not _is_harmful(one)]
    if found:
        yield RuleHit(
            _round(found[0], "round"),
            None,
            f"The file {_names(found)} on the disk is no longer the one that this run used.",
            f"{found[0].get('change')}{_when(found[0])}; the run's weights are those opened",
        )


def _changes(run: ExaminedRun) -> list[dict[str, Any]]:
    """What the run's facts say; a trace that was opened may say anything."""
    found = run.facts.get(CHANGES)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _is_harmful(one: dict[str, Any]) -> bool:
    return bool(one.get("mapped")) and one.get("change") == WRITTEN


def _names(found: list[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(str(one.get("file")) for one in found))


def _when(one: dict[str, Any]) -> str:
    for name, text in (("round", "at"), ("after", "after")):
        if (number := _round(one, name)) is not None:
            return f" {text} round {number}"
    return ""


def _round(one: dict[str, Any], name: str) -> int | None:
    number = one.get(name)
    return number if type(number) is int else None


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
