"""A round as Markdown, for an issue or a chat."""

from __future__ import annotations

from app.models.step import Step
from app.models.step_facts import outcome, step_facts
from app.models.step_table import COLUMNS, cell_text

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
