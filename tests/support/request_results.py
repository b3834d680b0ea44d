"""Requests as a suite measures them, with figures made up by the test."""

from __future__ import annotations

from typing import Any

from engine.experiments.bench.request import RequestResult


def made_up(prompt: str, configuration: str, **figures: Any) -> RequestResult:
    values: dict[str, Any] = {
        "cache_n": 0,
        "prompt_n": 5,
        "prompt_ms": 10.0,
        "predicted_n": 11,
        "predicted_ms": 100.0,
        "draft_n": 0,
        "draft_n_accepted": 0,
        "num_spec_steps": 0,
        "num_rounds": 10,
        "draft_ms": 0.0,
        "verify_ms": 90.0,
        "num_restores": 0,
        "duplicate_cells": 0,
        "wall_s": 0.1,
        "stop": "limit",
        "tokens": (1, 2, 3),
        "text": "abc",
        **figures,
    }
    speed = 1000 * (values["predicted_n"] - 1) / values["predicted_ms"]
    return RequestResult(prompt, configuration, **{"predicted_per_second": speed, **values})
