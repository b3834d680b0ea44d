"""Figures of a campaign, and what they may be."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.campaign import Campaign, Figures, added
from tests.torture.children import Outcome

THRESHOLDS = Path(__file__).parent / "thresholds.toml"


@dataclass
class Report:
    """What a campaign has come to. failures: a line for each kind of trouble, with its file."""

    campaign: Campaign
    seed: int
    seconds: float = 0.0
    figures: Figures = field(
        default_factory=lambda: {"cases": 0, "failures": 0, "slowest_s_max": 0}
    )
    failures: dict[str, str] = field(default_factory=dict)

    def count(self, outcome: Outcome) -> None:
        failed = bool(outcome.trouble)
        added(self.figures, {"cases": 1, "failures": failed, "slowest_s_max": outcome.seconds})
        added(self.figures, outcome.figures)

    def line(self) -> dict[str, float | str]:
        """One object for JSON."""
        figures = self.figures
        head = {"campaign": self.campaign.name, "seed": self.seed, "seconds": self.seconds}
        return head | {name: round(value, 4) for name, value in figures.items()}

    def broken(self) -> list[str]:
        """Thresholds that the figures do not keep, a sentence each."""
        limits = tomllib.loads(THRESHOLDS.read_text(encoding="utf-8"))
        name, found = self.campaign.name, []
        for figure, limit in {**limits["every"], **limits.get(name, {})}.items():
            part, _, whole = figure.partition("/")
            value, of = self.figures.get(part, 0.0), self.figures.get(whole, 0.0)
            if whole:
                value = value / of if of and of >= limit.get("from", 1) else math.nan
            value = round(value, 4)
            least, most = limit.get("least", -math.inf), limit.get("most", math.inf)
            if not math.isnan(value) and not least <= value <= most:
                found.append(f"{name}: {figure} is {value}, allowed is {json.dumps(limit)}.")
        return found
