"""Drafted runs and the plain decoding that they must agree with."""

from __future__ import annotations

from dataclasses import replace

from engine.analysis.findings.check import recorded
from engine.options import Prompt, RunOptions, SpecOptions
from engine.run import Run
from engine.session import Session
from engine.trace.prompt_reuse import n_common
from engine.trace.store import TraceStore

TRUE = (
    "concurrency-lost",
    "n-min-never-met",
    "drafter-mute",
    "prompt-processed-again",
    "acceptance-zero",  # of a drafter with random weights
)
"""Findings above info that are true of settings that are played."""


def ended(session: Session, prompts: list[Prompt], options: RunOptions) -> Run:
    """A run, at its end. Raises AssertionError where a finding accuses it."""
    run = session.start(prompts, options)
    while run.step():
        pass
    accused(run.trace)
    return run


def plain(session: Session, prompt: Prompt, options: RunOptions) -> tuple[list[int], str]:
    """Tokens of plain decoding, and why they end."""
    alone = replace(
        options,
        spec=SpecOptions(),
        parallel=1,
        rollback="checkpoint",
        n_rs_seq=None,
        split="equal",
        kv="per-seq",
        n_ubatch=512,
        n_batch=2048,
    )
    (result,) = ended(session, [prompt], alone).results()
    return result.tokens, result.stop


def keeps_tokens(options: RunOptions) -> bool:
    """Whether drafting must not change any token."""
    return options.spec.accept == "match" or options.sampler.temp <= 0


def equal(run: Run, expected: list[tuple[list[int], str]]) -> None:
    """Raises AssertionError unless the run has these tokens and ends."""
    for result, (tokens, stop) in zip(run.results(), expected, strict=True):
        n = n_common(result.tokens, tokens)
        assert result.tokens == tokens, (
            f"prompt {result.seq_id}: {n} tokens are equal, of {len(result.tokens)} and of "
            f"{len(tokens)} of plain decoding"
        )
        assert result.stop == stop, f"prompt {result.seq_id} ends by {result.stop}, not {stop}"


def accused(trace: TraceStore) -> None:
    """Raises AssertionError for a finding above info that is none of TRUE."""
    for finding in recorded(trace):
        assert finding.severity == "info" or finding.rule in TRUE, (
            f"{finding.rule}: {finding.message} {finding.evidence}"
        )
