"""Files that travel with the program: demo models, prompts, help, themes, icons."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
THEMES = ROOT / "themes"
ICONS = ROOT / "icons"
DESKTOP = ROOT / "desktop"
DEMO = ROOT / "demo"
PROMPTS = ROOT / "prompts"
SCENARIOS = ROOT / "scenarios"
MEMORY_SCRIPTS = SCENARIOS / "memory"
ROLLBACK_SCRIPTS = SCENARIOS / "rollback"
HELP = ROOT / "help"
COMMANDS = ROOT / "commands"
SESSION_PAGE = ROOT / "session_page"
DEMO_SWEEP = ROOT / "sweeps" / "demo.toml"


DEMO_TARGET = DEMO / "demo-target.gguf"
DEMO_DRAFT = DEMO / "demo-draft.gguf"
DEMO_EAGLE3 = DEMO / "demo-eagle3.gguf"


# prompts of the benchmarks: instructions, Python, and what the demo model was trained to continue
SUITES = {
    "general": PROMPTS / "suite.json",
    "python": PROMPTS / "python.json",
    "demo": DEMO / "prompts.json",
}
MATCHES = {"general": PROMPTS / "match.json", "python": PROMPTS / "match_python.json"}
CONVERSATIONS = {"general": PROMPTS / "w1.json", "python": PROMPTS / "w1_python.json"}


def theme_roles(name: str) -> dict[str, str]:
    """The colours of a theme by role, "group.name" as in its file, the names of its base given."""
    tables = tomllib.loads((THEMES / f"{name}.toml").read_text(encoding="utf-8"))
    base: dict[str, str] = tables.pop("base")
    del tables["name"]
    return {
        f"{group}.{key}": base.get(value, value)
        for group, entries in tables.items()
        for key, value in entries.items()
    }


def demo_prompts() -> list[str]:
    """The bundled prompts, which the demo model continues well, the best first."""
    return [text for _, text in titled_prompts()]


def titled_prompts() -> list[tuple[str, str]]:
    """The same, each after its title."""
    entries = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))
    return [(entry["name"], entry["text"]) for entry in entries]


def help_topics() -> dict[str, str]:
    """The titles of the pages of help, by topic."""
    return {
        path.stem: help_page(path.stem).partition("\n")[0][2:] for path in sorted(HELP.glob("*.md"))
    }


def help_page(topic: str) -> str:
    """A page of help: Markdown that begins with its title as a heading, without comments."""
    text = (HELP / f"{topic}.md").read_text(encoding="utf-8")
    return re.sub(r"<!--.*?-->\n", "", text, flags=re.DOTALL)
