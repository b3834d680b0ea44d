"""Drafting rules: no drafts at all, unsuitable settings, misleading figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from engine.analysis.findings.run_rows import Check, ExaminedRun, FoundRows, by_sequence, observed
from engine.draft.registry import DRAFTERS, model_drafters
from engine.draft.spec import AHEAD, BEHIND, OUT_OF_STEP
from engine.options import SpecOptions
from engine.trace.facts import Finding
from engine.trace.run_ref import round_keys

_MIN_ROUNDS = 8
_LONG_SILENCE = 32
_MIN_STEPS = 32
_FULL = 0.7
_UNSURE, _UNSURE_SHARE, _UNSURE_RIGHT = 0.5, 0.2, 0.35
_DEFAULT = SpecOptions()
EAGLE3 = "draft-eagle3"
_BLOCKS = ("draft-dflash", "draft-dspark")


def _never_drafted(run: ExaminedRun) -> Iterator[tuple[int, np.ndarray]]:
    """Sequences without any draft for some rounds, and those rows of `rounds`."""
    drafted = run.rounds["num_draft_tokens"]
    for seq, rows in run.rounds.by_sequence(run.is_later):
        if len(rows) >= _MIN_ROUNDS and (drafted[rows] == 0).all():
            yield seq, rows


def _n_min_never_met(run: ExaminedRun) -> Iterator[Finding]:
    n_min = run.option("spec", "n_min")
    if not run.drafts or not n_min:
        return
    for seq, rows in _never_drafted(run):
        yield FoundRows(run.rounds, seq, rows).hit(
            f"No draft reached n_min = {n_min}, so no draft was verified.",
            f"n_max {run.option('spec', 'n_max')}, p_min "
            f"{run.option('spec', 'p_min')}, drafters {_names(run)}",
        )


def _drafter_mute(run: ExaminedRun) -> Iterator[Finding]:
    if not run.drafts:
        return
    rounds = run.rounds
    n_min = run.option("spec", "n_min")
    named = {seq for seq, _ in _never_drafted(run)} if n_min else set()
    looks_up = not set(run.drafters).intersection(model_drafters())
    if run.facts.options is None and not (rounds["num_draft_tokens"] > 0).any():
        return  # for another engine see never-drafts
    for seq, rows in rounds.by_sequence(run.is_later):
        silent = rounds["num_draft_tokens"][rows] == 0
        edges = np.diff(np.concatenate(([0], silent.astype(np.int8), [0])))
        starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        long = np.flatnonzero(stops - starts >= _LONG_SILENCE)
        if looks_up and not silent.all():
            continue  # what rarely recurs is rarely found
        if seq in named or not long.size or seq in run.asked["seq_id"][_out_of_step(run)]:
            continue
        longest = long[np.argmax((stops - starts)[long])]
        yield Finding(
            f"No drafter drafted anything for {stops[longest] - starts[longest]} rounds in a row.",
            f"{int(silent.sum())} of {len(rows)} rounds without a draft; drafters {_names(run)}"
            f"{_bounds(run)}{_why_not(run, seq)}",
            int(rounds["round"][rows[starts[long[0]]]]),
            seq,
        )


def _bounds(run: ExaminedRun) -> str:
    """The limits on drafts, as far as known."""
    values = {name: run.option("spec", name) for name in ("p_min", "n_min")}
    return "".join(f", {name} {value}" for name, value in values.items() if value is not None)


def _why_not(run: ExaminedRun, seq: int) -> str:
    """The reasons given by the drafters, most frequent first."""
    asked = run.asked
    empty = (asked["seq_id"] == seq) & (asked["num_draft_tokens"] == 0)
    pool = run.trace.text_pool
    said = Counter(
        zip(pool.decode(asked["drafter"][empty]), pool.decode(asked["reason"][empty]), strict=True)
    )
    return "".join(
        f"; {name}: {reason or 'none given'}, {n} times"
        for (name, reason), n in said.most_common(3)
    )


def _defaults_surprise(run: ExaminedRun) -> Iterator[Finding]:
    if not run.drafts:
        return
    short, low = _n_max_is_short(run), _p_min_is_low(run)
    if not short and not low:
        return
    ways = ["raise --spec-draft-n-max" if short else "", "raise --spec-draft-p-min" if low else ""]
    yield Finding(
        " ".join(filter(None, (short, low))),
        f"n_max {run.option('spec', 'n_max')}, n_min {run.option('spec', 'n_min')}, p_min "
        f"{run.option('spec', 'p_min')} in effect; drafters {_names(run)}",
        suggestion=f"{' and '.join(filter(None, ways))}.".capitalize(),
    )


def _n_max_is_short(run: ExaminedRun) -> str:
    drafted, accepted = run.rounds["num_draft_tokens"], run.rounds["num_accepted_draft_tokens"]
    steps = run.is_later & (drafted > 0)
    n = int(steps.sum())
    full = int((steps & (drafted == _DEFAULT.n_max) & (accepted == drafted)).sum())
    if run.option("spec", "n_max") != _DEFAULT.n_max or n < _MIN_STEPS or full < _FULL * n:
        return ""
    return f"n_max is {_DEFAULT.n_max}, the default, and {full} of {n} drafts were fully accepted."


def _p_min_is_low(run: ExaminedRun) -> str:
    tokens = run.tokens
    right, judged = tokens.is_text("kind", "accepted"), tokens.is_text("kind", "rejected")
    # p_min applies to the confidence head's output if there is one
    head = tokens["draft_conf"]
    sure = np.where(np.isnan(head), tokens["draft_p"], head)
    drafted = (right | judged | tokens.is_text("kind", "ignored")) & ~np.isnan(sure)
    looked_up = run.rounds.is_text("drafter", *(set(DRAFTERS) - set(model_drafters())))
    # p_min does not apply to it
    drafted &= ~np.isin(round_keys(tokens), round_keys(run.rounds)[looked_up])
    headless = run.rounds.is_text("drafter", "draft-dspark")
    drafted &= ~(np.isnan(head) & np.isin(round_keys(tokens), round_keys(run.rounds)[headless]))
    unsure = drafted & (sure < _UNSURE)
    n_drafted, n_unsure = int(drafted.sum()), int(unsure.sum())
    n_judged, n_right = int((unsure & (right | judged)).sum()), int((unsure & right).sum())
    if (
        run.option("spec", "p_min") != _DEFAULT.p_min
        or n_judged < _MIN_STEPS
        or n_unsure < _UNSURE_SHARE * n_drafted
        or n_right > _UNSURE_RIGHT * n_judged
    ):
        return ""
    return (
        f"p_min is {_DEFAULT.p_min:g}, the default: {n_unsure} of {n_drafted} drafted tokens had "
        f"a confidence below {_UNSURE:g}, and {n_right} of the {n_judged} judged were accepted."
    )


def _acceptance_counting(run: ExaminedRun) -> Iterator[Finding]:
    """Emitted = accepted + 1 in every round, + 2 if a verified replay added a token. Rows with an
    unknown path may have either."""
    rounds = run.rounds
    drafted, accepted = rounds["num_draft_tokens"], rounds["num_accepted_draft_tokens"]
    depth, emitted = rounds["rollback_depth"], rounds["num_emitted"]
    counted = (drafted > 0) & observed(accepted) & observed(emitted)
    # a stop may cut the last round of a sequence short
    last = rounds.n - 1 - np.unique(rounds["seq_id"][::-1], return_index=True)[1]
    counted[last] = False
    restored = rounds.is_text("rollback_path", "restore", "restore_depth")
    own = 1 + (restored & rounds.is_text("stop_kind", "bonus", "target"))
    counted &= ~rounds.is_text("rollback_path", "")
    wrong = counted & (emitted - accepted != own)
    wrong |= counted & ~restored & observed(depth) & (drafted - accepted != depth)
    for one in by_sequence(rounds, wrong):
        of_seq = (rounds["seq_id"] == one.seq) & run.is_later & observed(accepted)
        yield one.hit(
            f"{one['num_accepted_draft_tokens']} tokens count as accepted in a round that drafted "
            f"{one['num_draft_tokens']}, emitted {one['num_emitted']} and rolled back "
            f"{one['rollback_depth']}.",
            f"predicted - 1 = {emitted[of_seq].sum()}, "
            f"accepted + rounds = {accepted[of_seq].sum()} + {int(of_seq.sum())}",
        )


def _wrong_hidden_row(run: ExaminedRun) -> Iterator[Finding]:
    others = ~run.asked.is_text("drafter", EAGLE3, *_BLOCKS)
    said = "The MTP head paired {} of its tokens with hidden states of other positions."
    yield from _wrong_pairs(run, "num_wrong_rows", others, said)


def _wrong_context_row(run: ExaminedRun) -> Iterator[Finding]:
    mine = run.asked.is_text("drafter", *_BLOCKS)
    said = "The block drafter's context has {} rows that the target computed at other positions."
    yield from _wrong_pairs(run, "num_wrong_rows", mine, said)


def _eagle3_boundary(run: ExaminedRun) -> Iterator[Finding]:
    mine = run.asked.is_text("drafter", EAGLE3)
    said = "The EAGLE-3 drafter paired {} of its tokens with feature rows of other positions."
    yield from _wrong_pairs(run, "num_wrong_rows", mine, said)


def _eagle3_stale_row(run: ExaminedRun) -> Iterator[Finding]:
    mine = run.asked.is_text("drafter", EAGLE3) & ~_out_of_step(run) & ~_from_before(run)
    said = "The EAGLE-3 drafter's memory has {} tokens that are not in the text."
    yield from _wrong_pairs(run, "num_wrong_tokens", mine, said)


def _wrong_pairs(run: ExaminedRun, column: str, mine: np.ndarray, said: str) -> Iterator[Finding]:
    """Sequences whose drafter had wrong pairs counted in `column`, among rows `mine` of
    `drafts`."""
    asked = run.asked
    judged = run.is_later & (run.rounds["num_draft_tokens"] > 0)
    accepted = run.rounds["num_accepted_draft_tokens"][judged].sum()
    drafted = run.rounds["num_draft_tokens"][judged].sum()
    for one in by_sequence(asked, mine & (asked[column] > 0)):
        evidence = f"{accepted} of {drafted} drafted tokens of the run accepted"
        yield one.hit(said.format(one[column]), evidence)


def _out_of_step(run: ExaminedRun, *reasons: str) -> np.ndarray:
    """Rows of `drafts` in which a drafter's state did not match the text."""
    return run.asked.is_text("reason", *(reasons or OUT_OF_STEP))


def _has_been_out_of_step(run: ExaminedRun) -> np.ndarray:
    """Rows of `drafts` of sequences with such rows."""
    seqs = run.asked["seq_id"]
    return np.isin(seqs, seqs[_out_of_step(run)])


def _from_before(run: ExaminedRun) -> np.ndarray:
    """Rows of `drafts` of sequences whose drafter state was wrong in the first round: left over
    from an earlier sequence."""
    asked, found = run.asked, np.zeros(run.asked.n, bool)
    if not (asked["num_wrong_tokens"] > 0).any():
        return found
    is_first_text = "prompt_cache" not in run.facts
    for seq, rows in asked.by_sequence(np.ones(asked.n, bool)):
        of_seq = run.rounds["round"][run.rounds["seq_id"] == seq]
        begins = is_first_text and of_seq.size and of_seq[0] == run.rounds["round"][0]
        first = rows[asked["round"][rows] == asked["round"][rows[0]]]
        if (asked["num_wrong_tokens"][first] > 0).any() and not begins:
            found[rows] = True
    return found


def _drafter_out_of_step(run: ExaminedRun, reason: str, what: str) -> Iterator[Finding]:
    mine = _out_of_step(run, reason) & ~_from_before(run)
    where = "ahead of" if reason == AHEAD else "behind"
    yield from _counted(run, mine, what, f"A drafter's state is {{}} tokens {where} the text.")


def _drafter_of_other_text(run: ExaminedRun) -> Iterator[Finding]:
    said = "A drafter's state is {} tokens off the text: it is of the slot's previous text."
    yield from _counted(run, _from_before(run), "other-text", said)


def _drafter_not_rewound(run: ExaminedRun) -> Iterator[Finding]:
    mine = ~(_has_been_out_of_step(run) | _from_before(run) | run.asked.is_text("drafter", EAGLE3))
    said = "A drafter's memory holds {} tokens beyond the text."
    yield from _counted(run, mine, "rejected-kept", said)


def _counted(run: ExaminedRun, mine: np.ndarray, what: str, said: str) -> Iterator[Finding]:
    """Results of the drafter's own checks in the rows `mine` of `drafts`, and the audit's for other
    sequences."""
    hits = list(_wrong_pairs(run, "num_wrong_tokens", mine, said))
    yield from hits
    named = {hit.seq_id for hit in hits}
    yield from (hit for hit in _audited(run, what) if hit.seq_id not in named)


_SAID = {
    "ahead": "{} was ahead of the text.",
    "behind": "{} was late by some tokens of the text.",
    "rejected-kept": "{} kept drafted tokens in its memory.",
    "shifted": "{} paired tokens with the target's rows of other positions.",
    "wrong-layers": "{} read the wrong layers of the target.",
    "other-text": "{} drafted from the text of another sequence.",
    "differs": "{} drafted other tokens than can be reproduced from the text.",
}
"""Texts by result of the audit of drafts (engine.audit.drafts)."""


def _audited(run: ExaminedRun, what: str) -> Iterator[Finding]:
    """The audit's results, the first drafter of each sequence. If the cause is known in one
    sequence, unexplained differences of the same drafter elsewhere are consequences."""
    rows = run.audited_drafts
    known = {row["drafter"] for row in rows if row["what"] in _SAID and row["what"] != "differs"}
    seen = set()
    for row in rows:
        is_known = what == "differs" and row["drafter"] in known
        if row["what"] == what and row["seq_id"] not in seen and not is_known:
            seen.add(row["seq_id"])
            said = _SAID[what].format(row["drafter"])
            yield Finding(said, row["evidence"], row.get("round"), row["seq_id"])


def _names(run: ExaminedRun) -> str:
    return ", ".join(run.drafters) or "given by the caller"


CHECKS: dict[str, Check] = {
    "n-min-never-met": _n_min_never_met,
    "drafter-mute": _drafter_mute,
    "defaults-surprise": _defaults_surprise,
    "wrong-hidden-row": _wrong_hidden_row,
    "wrong-context-row": _wrong_context_row,
    "drafter-not-rewound": _drafter_not_rewound,
    "drafter-ahead": partial(_drafter_out_of_step, reason=AHEAD, what="ahead"),
    "drafter-behind": partial(_drafter_out_of_step, reason=BEHIND, what="behind"),
    "drafter-rows-shifted": partial(_audited, what="shifted"),
    "drafter-wrong-layers": partial(_audited, what="wrong-layers"),
    "drafter-of-other-text": _drafter_of_other_text,
    "draft-not-reproduced": partial(_audited, what="differs"),
    "eagle3-boundary-row": _eagle3_boundary,
    "eagle3-stale-row": _eagle3_stale_row,
    "acceptance-counting": _acceptance_counting,
}
