"""Rules about what the sampler knows: tokens chosen so far, random numbers, the grammar."""

from __future__ import annotations

from collections.abc import Iterator

from engine.analysis.findings.rule import ERROR, SAMPLER, WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed, rounds_text

_NEVER = 2**62


def _not_restored(run: ExaminedRun) -> Iterator[RuleHit]:
    rounds = run.rounds
    wrong, draws = rounds["sampler_wrong"], rounds["sampler_draws"]
    astray = observed(wrong) & (wrong > 0)
    off = astray | (observed(draws) & (draws != 0))
    noted = {note["seq_id"]: note["round"] for note in run.audit_notes}
    for seq, rows in rounds.by_sequence(off):
        first = rows[0]
        if noted.get(seq, _NEVER) <= rounds["round"][first]:
            continue  # the audit says what it is
        says = [f"{wrong[first]} tokens that it goes on after are not those of the text"]
        if not astray[first]:
            says = []
        if observed(draws)[first] and draws[first]:
            says.append(f"{draws[first]:+} random numbers against one per token")
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            "The state of the sampler is not that of the text: it was not put back at a rollback.",
            f"{rounds_text(rounds['round'][rows])}; after the first {'; '.join(says)}; depth "
            f"{rounds['rollback_depth'][first]}",
        )


def _grammar_failed(run: ExaminedRun) -> Iterator[RuleHit]:
    first = {row.seq_id: row for row in reversed(run.facts.grammar_errors or ())}
    for row in reversed(first.values()):
        yield RuleHit(
            row.round,
            row.seq_id,
            f"The grammar ended the sequence: {row.why}.",
            f"before the token at position {row.pos}",
        )


RULES = (
    Rule(
        "sampler-not-restored",
        ERROR,
        "Sampler not restored",
        "Grammar, penalties and random numbers belong to the tokens that were chosen. An engine "
        "that runs them over a draft and does not take them back where it is rejected masks and "
        "draws every later token by a text that was never put out.",
        "Save the sampler's state before a draft is judged, or roll it back by as many tokens as "
        "the target; a grammar's matcher too.",
        _not_restored,
        SAMPLER,
    ),
    Rule(
        "grammar-failed",
        WARNING,
        "Grammar that could not go on",
        "The grammar refused a token that had been chosen, ran into a limit, or left nothing that "
        "may be chosen. The text up to there fits it, but is incomplete.",
        "Simplify the grammar, or take the bias off the tokens that it needs.",
        _grammar_failed,
    ),
)
