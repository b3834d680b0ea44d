"""A round as text: a line about one judged token, and the whole round as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from app.panels.inspector.step import Step, TraceRow
from app.panels.inspector.step_facts import outcome, step_facts
from app.panels.inspector.step_table import COLUMNS, cell_text, figure
from app.trace_models.number_text import NOT_OBSERVED

_HOLD = "\N{NO-BREAK SPACE}"
_WORDS = {
    "draft_p": "draft q",
    "target_p": "target p",
    "target_best": "argmax p",
    "target_entropy": "entropy",
}
"""Where the title of the column does not stand by itself."""
_UNITS = {"target_entropy": "nats"}
_QUOTED = ("token", "target")


def step_line(step: Step, token: TraceRow, names: Sequence[str]) -> str:
    """These columns of `StepTable` in one line, those that mean nothing for the token left out.

    A figure stays with its word where the line breaks; the argmax and its p are one part.
    """
    parts: list[str] = []
    for name, title, _ in _told(step, token, names):
        text = cell_text(step, token, name)
        if name in _QUOTED and text != NOT_OBSERVED:
            text = f"“{text}”"
        if name == "target_best" and "target" in names:
            if text != NOT_OBSERVED:
                parts[-1] += f" p{_HOLD}{text}"
            continue
        parts.append(_HOLD.join((title.replace(" ", _HOLD), _with_unit(name, text))))
    return " · ".join(parts)


def step_line_tip(step: Step, token: TraceRow, names: Sequence[str]) -> str:
    """What the parts of `step_line` mean, a line each, with all digits of the probabilities."""
    lines = []
    for name, title, tip in _told(step, token, names):
        value = figure(token, name)
        digits = f" {_with_unit(name, f'{value:.9g}')}" if isinstance(value, float) else ""
        lines.append(f"{title}{digits}: {tip}")
    return "\n".join(lines)


def _told(step: Step, token: TraceRow, names: Sequence[str]) -> list[tuple[str, str, str]]:
    return [
        (name, _WORDS.get(name, title), tip)
        for name, title, tip, _ in COLUMNS
        if name in names and cell_text(step, token, name)
    ]


def _with_unit(name: str, text: str) -> str:
    has_unit = name in _UNITS and text != NOT_OBSERVED
    return f"{text}{_HOLD}{_UNITS[name]}" if has_unit else text


_ESCAPED = str.maketrans({"|": "\\|", "`": "\\`", "\\": "\\\\", "*": "\\*", "<": "&lt;"})


def step_markdown(step: Step) -> str:
    """Title, outcome, the judged tokens as a table, and the facts as a list per section."""
    lines = [f"### {step.title}", "", outcome(step).translate(_ESCAPED), ""]
    if step.tokens:
        lines.append(_row([column.title for column in COLUMNS]))
        lines.append(_row([":--" if column.is_text else "--:" for column in COLUMNS]))
        for token in step.tokens:
            cells = [cell_text(step, token, column.name) for column in COLUMNS]
            lines.append(_row([cell.translate(_ESCAPED) for cell in cells]))
        lines.append("")
    for fact in step_facts(step):
        if fact.is_heading:
            if lines[-1]:
                lines.append("")
            lines += [f"**{fact.label}**", ""]
        else:
            lines.append(f"- {fact.label}: {fact.value}".translate(_ESCAPED))
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
