"""The table of what is seen and named, for the help page: python -m tests.torture.mutants_table

It is written between the two marks of resources/help/what-it-sees.md.
"""

from __future__ import annotations

from collections import Counter

from resources import HELP
from tests.support.mutations import CACHED, LANE, MUTATIONS
from tests.torture.mutants_list import MUTANTS

PAGE = HELP / "what-it-sees.md"
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
_COMMANDS = {
    "compare": "`compare`",
    "run": "`run --audit`",
    "memory": "`memory --all`",
    "text": "the text alone",
    "error": "an error",
}


def table() -> str:
    """A row for each kind of mutation, Markdown."""
    rows = [(m.kind, m.seen, m.named) for m in MUTANTS]
    rows += [
        (
            "cache" if m.where == CACHED else m.setting.split(",")[0],
            "compare" if m.where == LANE else "run",
            m.finds,
        )
        for m in MUTATIONS
    ]
    lines = ["| in | bugs | seen by | not seen | named |", "| --- | --- | --- | --- | --- |"]
    for kind in sorted({row[0] for row in rows}):
        mine = [row for row in rows if row[0] == kind]
        seen = Counter(seen for _, seen, _ in mine if seen)
        named = Counter(rule for _, _, rule in mine if rule)
        by = ", ".join(f"{_COMMANDS[how]} {n}" for how, n in seen.most_common())
        names = ", ".join(f"`{rule}` {n}" for rule, n in named.most_common())
        lines.append(f"| {kind} | {len(mine)} | {by} | {len(mine) - seen.total()} | {names} |")
    n_seen, n_named = (sum(bool(row[i]) for row in rows) for i in (1, 2))
    lines.append(f"| all | {len(rows)} | {n_seen} | {len(rows) - n_seen} | {n_named} |")
    weak: dict[tuple[str, str], list[str]] = {}
    for m in sorted(MUTANTS, key=lambda m: (m.named, m.kind, m.name)):
        if m.weak:
            weak.setdefault((m.named, m.weak), []).append(f"{m.name} ({m.kind})")
    lines += ["", "Here the finding says that something is wrong, but not what:", ""]
    lines += [
        f"- `{rule}`: {'; '.join(bugs)}. {why[0].upper()}{why[1:]}."
        for (rule, why), bugs in weak.items()
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table of now."""
    before, rest = page.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}{table()}{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
