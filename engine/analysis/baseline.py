"""The plain run that a run with drafts is measured against."""

from __future__ import annotations

import hashlib

import numpy as np

from engine.sampling.options import SamplerOptions
from engine.trace.facts import RunFacts
from engine.trace.run_columns import RunColumns
from engine.trace.run_ref import same_model
from engine.trace.store import TraceStore
from engine.trace.timings import timings


def find_baseline(store: TraceStore, run_id: int) -> int | None:
    """The newest other run without drafters on the same model, prompts, compute mode and sampler.

    Lanes of comparisons are left out: they are timed while other lanes decode too. None where
    there is no such run, or where it did not generate anything yet.
    """
    facts = store.runs.get(run_id)
    if facts is None or facts.options is None:
        return None
    prompts = _prompts(store, run_id)
    for other in sorted(store.runs, reverse=True):
        if other == run_id or not may_be_baseline(facts, store.runs[other]):
            continue
        if speed(store, other) and np.array_equal(prompts, _prompts(store, other)):
            return other
    return None


def may_be_baseline(facts: RunFacts, theirs: RunFacts) -> bool:
    """Whether a run is measured by another as far as facts tell: that is a plain one on the same
    model, with the same compute mode and sampler. Of the prompts `prompt_key` tells."""
    return (
        facts.options is not None
        and _is_plain(theirs)
        and same_model(facts.model, theirs.model)
        and _setting(facts) == _setting(theirs)
    )


def prompt_key(store: TraceStore, run_id: int) -> str:
    """Equal for runs whose prompts are, token for token; empty before there is a prompt."""
    prompts = _prompts(store, run_id)
    return hashlib.sha256(prompts.tobytes()).hexdigest() if len(prompts) else ""


def speed(store: TraceStore, run_id: int) -> float:
    """Tokens per second after the prompt, 0 where none were generated."""
    return float(timings(store, run_id)["predicted_per_second"])


def _is_plain(facts: RunFacts) -> bool:
    return facts.options is not None and not facts.options.spec.types and facts.lane is None


def _setting(facts: RunFacts) -> tuple[str | None, int, SamplerOptions] | None:
    options = facts.options
    return (facts.compute, options.parallel, options.sampler) if options else None


def _prompts(store: TraceStore, run_id: int) -> np.ndarray:
    """Sequence, position and token of every prompt token, int64 [n, 3] in order."""
    rows = RunColumns(store, "tokens", run_id)
    prompt = rows.is_text("kind", "prompt")
    found = np.stack([rows[name][prompt] for name in ("seq_id", "pos", "token_id")], axis=1)
    ordered: np.ndarray = found[np.lexsort((found[:, 1], found[:, 0]))]
    return ordered
