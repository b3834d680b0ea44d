"""llama-bench: how fast llama.cpp decodes random tokens."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine.errors import PeerLibraryError
from engine.experiments.bench.against.programs import LONGEST_S, find_program, started
from engine.experiments.bench.against.tasks import PassWork


@dataclass(frozen=True, slots=True)
class LlamaBenchResult:
    """tokens_per_second: median of the repetitions. build: the commit and its number."""

    tokens_per_second: float
    build: str


class LlamaBench:
    """llama-bench of a build on one file. folder: see find_program, whose errors it raises."""

    def __init__(self, folder: Path | None, model: Path, n_threads: int) -> None:
        self._program = find_program(folder, "llama-bench")
        self._model, self._n_threads = model, n_threads

    def measure(self, work: PassWork) -> LlamaBenchResult:
        """Load the file, do the work once untimed, then timed; on the processor alone.

        Raises PeerLibraryError where the program ends in another way than with its figures.
        """
        words = ["-m", self._model, "-t", self._n_threads, "-dev", "none", "-o", "json"]
        words += ["-r", work.repeats, "-d", work.depth]
        if work.one_by_one:
            words += ["-p", 0, "-n", work.n_tokens]
        else:
            # with embeddings llama.cpp computes the output, logits included, of every token
            words += ["-p", work.n_tokens, "-n", 0, "-embd", int(work.all_logits)]
        with started(self._program, words, subprocess.PIPE) as program:
            try:
                out, _ = program.process.communicate(timeout=LONGEST_S)
            except subprocess.TimeoutExpired as error:
                raise PeerLibraryError(
                    f"llama-bench did not end within {LONGEST_S / 60:.0f} minutes.",
                    "Measure a smaller model.",
                ) from error
            try:
                (found,) = json.loads(out)
                return _result(found)
            except (ValueError, KeyError, TypeError) as error:
                if program.process.returncode:
                    raise program.ended() from error
                raise PeerLibraryError(
                    "llama-bench printed other figures than those known here.",
                    "Use a build of 2026.",
                ) from error


def _result(found: dict[str, Any]) -> LlamaBenchResult:
    speeds = [float(one) for one in found["samples_ts"]]
    return LlamaBenchResult(median(speeds), f"{found['build_commit']} ({found['build_number']})")
