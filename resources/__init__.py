"""Files that travel with the program: demo models, prompts, themes, icons."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
THEMES = ROOT / "themes"
ICONS = ROOT / "icons"
DEMO = ROOT / "demo"
SCENARIOS = ROOT / "scenarios"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt that the demo model continues well."""

    title: str
    text: str


DEMO_TARGET = DEMO / "demo-target.gguf"
DEMO_DRAFT = DEMO / "demo-draft.gguf"


def demo_prompts() -> list[DemoPrompt]:
    """The bundled prompts, the best first."""
    entries = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))
    return [DemoPrompt(entry["title"], entry["text"]) for entry in entries]
