"""The result of tuning as rows of settings and figures: real runs, and the simulated settings
beside them, told apart by the setting `figures`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

KIND, VERSION = "draftscope tune", 1
MEASURED, ESTIMATED = "measured", "estimated"


class ResultRow(NamedTuple):
    """settings: by their keys in the plan of a sweep. figures: by name of sweep.schema.FIGURES."""

    settings: dict[str, Any]
    figures: dict[str, float | None]

    @property
    def key(self) -> str:
        """Names the settings."""
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def result_rows(data: Mapping[str, Any]) -> list[ResultRow]:
    """The rows of engine.experiments.tune.tune.Tuned.data."""
    measured = [
        ResultRow(
            _settings(one["setting"], MEASURED),
            {
                "predicted_per_second": one["tokens_per_second"],
                "predicted_per_second_low": one["low"],
                "predicted_per_second_high": one["high"],
                "draft_acceptance_rate": (one["costs"] or {}).get("acceptance"),
                "memory_bytes": one["undo_bytes"],
            },
        )
        for one in data["confirmed"]
    ]
    estimated = [
        ResultRow(
            _settings(one["setting"], ESTIMATED),
            {
                "predicted_per_second": one["tokens_per_second"],
                "draft_acceptance_rate": one["acceptance"],
            },
        )
        for one in data["estimates"]
    ]
    return [*measured, *estimated]


def _settings(setting: Mapping[str, Any] | None, figures: str) -> dict[str, Any]:
    if setting is None:
        return {"figures": figures, "spec-type": "none"}
    return {
        "figures": figures,
        "spec-type": setting["drafter"],
        "spec-draft-n-max": setting["n_max"],
        "spec-draft-p-min": setting["p_min"],
    }
