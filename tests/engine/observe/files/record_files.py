"""The records that other engines wrote, and what an import makes of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.observe.files.records import fill
from engine.trace.store import TraceStore

RECORDS = Path(__file__).parents[3] / "data" / "records"
STEPS = (3, 1, 0, 2, 3, 3, 0, 1, 0, 2, 0, 1)
"""What every file tells of: accepted tokens of 12 verifications, 29 tokens generated."""
EVERY = {
    "aiperf-record.json": "aiperf",
    "aiperf-summary.csv": "aiperf",
    "aiperf-summary.json": "aiperf",
    "benchmark.txt": "benchmark",
    "lmstudio-prediction.json": "lm-studio",
    "mlx-vlm-timings.json": "mlx-vlm",
    "sglang-generate.json": "sglang",
    "sglang-openai.json": "sglang",
    "trtllm-choice.json": "tensorrt-llm",
    "trtllm-iterations.json": "tensorrt-llm",
    "trtllm-perf-metrics.jsonl": "tensorrt-llm",
    "vllm-detailed-stream.json": "vllm",
    "vllm-metrics.prom": "prometheus",
    "vllm-summary.json": "vllm",
}
DRAFTS = "vllm:spec_decode_num_drafts_total"


def filled(file: str, data: bytes | None = None, name: str | None = None) -> TraceStore:
    store = TraceStore()
    assert fill(store, (RECORDS / file).read_bytes() if data is None else data, file, name) == [0]
    return store


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def words(text: str) -> list[str]:
    return [word.strip(".,;:") for word in text.split()]


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in pairs:
        if isinstance(one, (dict, list)):
            yield from numbers(one, (*path, key))
        elif isinstance(one, (int, float)) and not isinstance(one, bool):
            yield (*path, key)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
