"""The results file of `bench suite`, `sweep` and `tune`: one SQLite database, a row per finished
job.

    results.sqlite     table `facts`: kind, title, plan, number of planned jobs; `detail KEY`: what
                       a job has beyond its figures, as JSON
                       table `descriptions`: machines and models as JSON, each once
                       table `results`: one row per job, done or failed
    traces/KEY/        the exported trace of the job with this key

The file is known by its application id, its version and the exact text of its tables, so that
nothing else (a view, a generated column, a trigger) is ever read.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import TraceFileError

RESULTS_FILE = "results.sqlite"
TRACES = "traces"
APPLICATION_ID = 0x44535731  # "DSW1"
VERSION = 1
SUITE, SWEEP, TUNE = "suite", "sweep", "tune"
"""What a file is of; earlier versions did not write it."""
DONE, FAILED = "done", "failed"
KEY = re.compile(r"[0-9a-f]{16}")

FIGURES: dict[str, str] = {
    "predicted_per_second": "generated tokens per second, all sequences together",
    "predicted_per_second_low": "the slowest of the repeated runs",
    "predicted_per_second_high": "the fastest of the repeated runs",
    "prompt_per_second": "prompt tokens per second",
    "prompt_n": "prompt tokens",
    "prompt_ms": "forward passes over the prompts, milliseconds",
    "predicted_n": "generated tokens",
    "predicted_ms": "time in which any sequence was generating, milliseconds",
    "draft_n": "drafted tokens",
    "draft_n_accepted": "drafted tokens that were accepted",
    "draft_acceptance_rate": "accepted / drafted",
    "mean_acceptance_length": "tokens per step, the target's own included",
    "num_spec_steps": "rounds that verified a draft",
    "draft_ms": "drafting, milliseconds",
    "verify_ms": "forward passes of the target after the prompts, milliseconds",
    "num_restores": "checkpoints put back",
    "weight_bytes": "weights of the target as loaded",
    "memory_bytes": "attention cells and recurrent states",
    "snapshot_bytes": "one snapshot of the recurrent states",
    "n_rs_seq": "snapshots kept beyond the live state",
    "num_findings": "warnings and errors among the findings",
    "wall_s": "the run from its first round to its last, seconds",
}
"""Numbers of a finished job; null where a run has none. Names are those of a run's summary."""

_FIGURE_COLUMNS = "".join(f", {name} REAL" for name in FIGURES)

TABLES = {
    "facts": "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT)",
    "descriptions": "CREATE TABLE descriptions (id INTEGER PRIMARY KEY, text TEXT UNIQUE)",
    "results": (
        "CREATE TABLE results (key TEXT PRIMARY KEY, number INTEGER, status TEXT, error TEXT, "
        "finished TEXT, settings TEXT, output TEXT, has_trace INTEGER, machine INTEGER, "
        f"model INTEGER{_FIGURE_COLUMNS})"
    ),
}
"""The statement that makes each table, as SQLite keeps it."""


def results_file(path: Path) -> Path:
    """The file that a path means: itself, or the one in a folder."""
    return path / RESULTS_FILE if path.is_dir() else path


def trace_folder(results: Path, key: str) -> Path:
    """Where the trace of a job is, next to its results file."""
    return results.parent / TRACES / key


def not_ours(path: Path) -> TraceFileError:
    """The file is something else."""
    return TraceFileError(
        f"{path} is not a result file of `draftscope bench suite`, `sweep` or `tune`.",
        "Name the folder that --out named, or the results.sqlite in it.",
    )
