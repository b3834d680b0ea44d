"""The rule about tokens that this engine has judged again (engine.observe.rescoring.rescore)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.analysis.findings.rule import ERROR, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed
from engine.trace.facts import ChangedTokenFacts, RescoredSequenceFacts

TEXT_CHANGED = "text-changed"


def _text_changed(run: ExaminedRun) -> Iterator[RuleHit]:
    """The first token of each sequence that is not what the target chooses there."""
    rescored = run.facts.rescored
    if rescored is None:
        return
    for sequence in rescored.sequences:
        changed = sequence.changed
        if changed is None:
            continue
        drafted = (run.rounds["num_draft_tokens"] > 0).any()
        yield RuleHit(
            changed.round,
            sequence.seq_id,
            ("Speculation changed the text: " if drafted else "The text is not the target's: ")
            + f"the token at position {changed.pos} is "
            + ("not what the target chooses" if sequence.greedy else "none that it can draw")
            + " there.",
            "; ".join(_evidence(run, sequence, changed, rescored.noise)),
        )


def _evidence(
    run: ExaminedRun,
    sequence: RescoredSequenceFacts,
    changed: ChangedTokenFacts,
    noise: float | None,
) -> Iterator[str]:
    yield (
        f"{sequence.n_changed} of {sequence.n_tokens} tokens; the first, "
        f"{changed.kind} {changed.token_id} of rank {changed.rank}, "
        f"p {changed.p:.3g}, for {changed.best_id}, p {changed.best_p:.3g}"
    )
    measured = f", noise moves such a gap by up to {noise:.2g}" if noise is not None else ""
    yield (
        f"its logit {changed.gap:.3g} below the best, top-2 gap {changed.top2_gap:.3g}{measured}"
    )
    rounds, seq_id, number = run.rounds, sequence.seq_id, changed.round
    mine = rounds["seq_id"] == seq_id
    undone = np.flatnonzero(mine & (rounds["rollback_depth"] > 0) & (rounds["round"] < number))
    if len(undone):
        last = undone[-1:]
        (path,) = rounds.texts("rollback_path", last)
        depth = f"depth {rounds['rollback_depth'][last[0]]}"
        by = f" by {path}" if path else ""
        yield f"after the rollback of round {rounds['round'][last[0]]}, {depth}{by}"
    else:
        yield "no rollback before it"
    width = rounds["verify_width"][mine & (rounds["round"] == number)]
    if len(width) and observed(width).all():
        yield f"chosen in a pass of width {width[0]}"


RULES = (
    Rule(
        TEXT_CHANGED,
        ERROR,
        "Text that is not the target's",
        "Decoded again by this engine on the same file, a token is not the target's choice, by "
        "more than the rounding of either engine explains: at temperature 0 another is more "
        "probable, else the request's sampler cannot draw it. A draft was accepted that should "
        "not have been, or the logits came from a wrong state.",
        "Repeat the request without speculation and compare the two (`draftscope triage`); look at "
        "the rollback before the round.",
        _text_changed,
    ),
)
