"""Logs and records of other engines with numbers, structure, lines and encodings altered."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from app.engine_thread.jobs.files import ReadTrace
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.commands import said_by
from tests.torture.log_steps import changed, draw, draw_copy, draw_huge, logs, unpacked

_KNOWN = {
    # file: rounds, tokens, drafted and accepted tokens
    "plain.log": (13, 25, 36, 12),
    "verbose-plain.log": (11, 20, 30, 9),
    "reprocess.log": (4, 7, 6, 3),
    "default.log": (0, 304, 306, 152),
    "old-build.log": (0, 57, 36, 36),
    "vllm.log": (0, None, 906, 581),
    "sglang.log": (0, None, None, None),
    "B1-mtpbench.txt": (0, 438, 357, 316),
    "slot-1-nothing.log": (242, 502, 720, 260),
    "light-log.json.gz": (741, 2400, 2207, 1659),
    "chunks.jsonl": (7, 18, 17, 11),
    "llama-mtp-reply.json": (0, 40, 63, 17),
    "vllm-spec.json": (0, 4, 129, 10),
    "sglang-spec.json": (0, 64, 69, 41),
    "all-zero.prom": (0, None, 2160, 0),
    "checkpoints.log": (17, 192, 193, 73),
    "lookups.log": (42, 256, 129, 113),
    "mtp.json.gz": (103, 232, 357, 106),
    "utf8.json.gz": (19, 104, 111, 65),
    "aiperf-record.json": (13, 29, 34, 16),
    "mlx-vlm-timings.json": (0, 29, 36, 16),
    "sglang-generate.json": (0, 29, 36, 16),
    "trtllm-perf-metrics.jsonl": (0, None, 34, 16),
    "vllm-detailed-stream.json": (13, 29, 34, 16),
    "vllm-metrics.prom": (0, None, 34, 16),
    "vllm-summary.json": (0, 29, 34, 16),
}
_COPIED = (".log", "bench.txt")
"""Logs keep their figures, however they are copied."""
_CPU_S, _CPU_S_PER_MIB = 4.0, 3.0
"""Processor time of a case; a base takes 0.3 s at most, and what is added to it less than 0.5 s
per MiB."""
_LARGEST = 64 << 20
_NAMES = ("capture", "log", "vllm-metrics", "vllm-stream", "llama-server")
_JOINED = "mtp.json.gz"


def _draw(random: np.random.Generator, number: int) -> Case:
    names = sorted(logs(), key=lambda name: (not name.endswith(".log"), name))
    names += [name for name in names if name.endswith(".log")]
    name = names[number % len(names)]
    n = 0 if number % 5 == 0 else int(random.choice([1, 1, 1, 2, 3]))
    if not n:  # a log and another one by turns
        known = sorted(name for name in _KNOWN if name.endswith(".log") == bool(number % 2))
        name = known[number // 10 % len(known)]
    hows = ("import", "import", "import", "window", "join")
    how = str(random.choice(hows)) if n else "import"
    steps = [draw(random) for _ in range(n)]
    if number % 5 == 2:
        of_slots = sorted(name for name in _KNOWN if name.endswith(".log"))
        name = of_slots[number // 5 % len(of_slots)]
        steps = [draw_huge(random) for _ in range(int(random.integers(1, 4)))]
    if number % 5 == 3:
        copied = sorted(name for name in _KNOWN if name.endswith(_COPIED))
        name, how = copied[number // 5 % len(copied)], "import"
        steps = [draw_copy(random)]
    return {"base": name, "how": how, "steps": steps}


def _play(case: Case, folder: Path) -> Figures:
    text = unpacked(case["base"])
    for step in case["steps"]:
        text = changed(text, step)[:_LARGEST]
    path = folder / case["base"].removesuffix(".gz")
    path.write_bytes(text)
    start = time.process_time()
    how = case["how"]
    figures = _read_as_window(path) if how == "window" else _imported(case, path, folder)
    spent = time.process_time() - start
    most = _CPU_S + _CPU_S_PER_MIB * len(text) / 2**20
    assert spent < most, f"{spent:.1f} s of processor time for {len(text)} bytes"
    return figures | {"cpu_s_max": spent, how: 1}


def _imported(case: Case, path: Path, folder: Path) -> Figures:
    words = ["import", str(path), "--json", "--trace", str(folder / "trace")]
    if case["how"] == "join":
        words[1:2] = [str(logs()[_JOINED]), "--log", str(path)]
    said = said_by(words)
    said.check()
    found = json.loads(said.out)["runs"] if said.out else []
    assert said.out or said.status, "it ends well without a word"
    assert bool(found) == (folder / "trace").exists()
    known = _KNOWN.get(case["base"])
    is_copied = case["base"].endswith(_COPIED) and len(case["steps"]) == 1
    if (
        known
        and case["how"] != "join"
        and (not case["steps"] or (is_copied and case["steps"][0]["how"] == "copy"))
    ):
        assert [_figures(run) for run in found] == [known], [_figures(run) for run in found]
        return {"untouched": 1, "imported": 1}
    return {"imported": bool(found), "refused": not found}


def _figures(run: dict[str, Any]) -> tuple[Any, ...]:
    summary = run["summary"]
    names = ("predicted_n", "draft_n", "draft_n_accepted")
    return run["rounds"], *(summary.get(name) for name in names)


def _read_as_window(path: Path) -> Figures:
    """As the window reads it, on a thread."""
    reading = ReadTrace(path)
    reading.start(lambda _: None)
    assert reading.join(60)
    failed = reading.failed
    assert failed is None or not failed.message.startswith("The engine failed"), failed
    return {"imported": failed is None, "refused": failed is not None}


def _prepare() -> None:
    said_by(["import", str(logs()["plain.log"])]).check(0)
    assert _KNOWN.keys() <= logs().keys()


CAMPAIGN = Campaign(
    "lognumbers",
    "A trace or a sentence, in little time and memory; what is not altered has its figures.",
    _draw,
    _play,
    _prepare,
    seconds=40.0,
    n_bytes=2**30,
    batch=20,
    n_least=20,
)
