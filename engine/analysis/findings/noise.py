"""Rules about noise lanes: what they measure has to be rounding, for others are judged by it."""

from __future__ import annotations

from collections.abc import Iterator

from engine.analysis.findings.rule import ERROR, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, rounds_text
from engine.analysis.noise_ceiling import rows_beyond
from engine.analysis.verdict import failed_checks, first_row


def _batches_differ(run: ExaminedRun) -> Iterator[RuleHit]:
    check = run.facts.noise_check
    failed = failed_checks(check)
    for seq in sorted({one.seq_id for one in failed}):
        mine = [one for one in failed if one.seq_id == seq]
        first = first_row(mine)
        yield RuleHit(
            None,
            seq,
            "Decoded afresh in batches, the text has other logits than token by token.",
            "; ".join(
                f"{one.batches}: {one.beyond} of {one.rows} positions, NMSE up to "
                + ("not finite" if one.worst is None else f"{one.worst:.1e}")
                for one in mine
            )
            + f"; the first after position {first.pos}, row {first.row} of a batch of "
            f"{first.width}; rounding reaches {check.ceiling if check else 0:.0e}",
        )


def _noise_beyond_rounding(run: ExaminedRun) -> Iterator[RuleHit]:
    check = run.facts.noise_check
    if check is None or failed_checks(check):
        return
    rows = run.divergence
    beyond = rows_beyond(rows["nmse"], check.ceiling, check.share)
    if beyond.size:
        first = beyond[0]
        yield RuleHit(
            int(rows["round"][first]),
            int(rows["seq_id"][first]),
            "The noise lane, which rolls nothing back, has other logits than rounding explains.",
            f"{rounds_text(rows['round'][beyond])}; {len(beyond)} of {rows.n} positions, the first "
            f"{rows['pos'][first]} with NMSE {rows['nmse'][first]:.1e}; rounding reaches "
            f"{check.ceiling:.0e}; "
            + (
                "texts decoded afresh in batches are right"
                if check.batches
                else "no text was decoded afresh"
            ),
        )


RULES = (
    Rule(
        "batch-differs",
        ERROR,
        "Batches differ from single tokens",
        "An empty memory, with nothing restored, copied or rolled back, gives other logits for "
        "several tokens at once than one after another. So a token sees what it must not, or "
        "misses what it should: a mask or a convolution window that reaches a later token, one "
        "gate or position for a whole batch, rows of two sequences exchanged.",
        "Compare the kernels for one token and for several, layer by layer. What differs in the "
        "first row of a batch comes from a later token, in the others from an earlier one.",
        _batches_differ,
    ),
    Rule(
        "noise-beyond-rounding",
        ERROR,
        "Noise beyond rounding",
        "The noise lane starts every round from a copied state and never rolls back, so that it "
        "differs from the reference by rounding alone. It differs by more than rounding ever did, "
        "and other lanes share its code: what puts a state into a memory, or how a verify batch "
        "of several sequences is laid out.",
        "Look at how a state is put back (windows, positions, cells), then at what a row of a "
        "verify batch reads.",
        _noise_beyond_rounding,
    ),
)
