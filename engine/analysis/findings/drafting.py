"""Rules about drafts: none at all, settings that do not suit the text, figures that mislead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from engine.analysis.findings.rule import DRAFTS, INFO, TOKENS, WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed, round_keys, rounds_text
from engine.draft.registry import DRAFTERS, model_drafters
from engine.draft.spec import AHEAD, BEHIND, OUT_OF_STEP
from engine.options import SpecOptions

_MIN_ROUNDS = 8
_LONG_SILENCE = 32
_MIN_STEPS = 32
_FULL = 0.7
_UNSURE, _UNSURE_SHARE, _UNSURE_RIGHT = 0.5, 0.2, 0.35
_DEFAULT = SpecOptions()
EAGLE3 = "draft-eagle3"
_BLOCKS = ("draft-dflash", "draft-dspark")


def _never_drafted(run: ExaminedRun) -> Iterator[tuple[int, np.ndarray]]:
    """Sequences that went on for some rounds without any draft, and those rows of `rounds`."""
    drafted = run.rounds["num_draft_tokens"]
    for seq, rows in run.rounds.by_sequence(run.is_later):
        if len(rows) >= _MIN_ROUNDS and (drafted[rows] == 0).all():
            yield seq, rows


def _n_min_never_met(run: ExaminedRun) -> Iterator[RuleHit]:
    n_min = run.option("spec", "n_min")
    if not run.drafts or not n_min:
        return
    for seq, rows in _never_drafted(run):
        rounds = run.rounds["round"][rows]
        yield RuleHit(
            int(rounds[0]),
            seq,
            f"No draft reached n_min = {n_min}: nothing was ever verified.",
            f"{rounds_text(rounds)}; n_max {run.option('spec', 'n_max')}, p_min "
            f"{run.option('spec', 'p_min')}, drafters {_names(run)}",
        )


def _drafter_mute(run: ExaminedRun) -> Iterator[RuleHit]:
    if not run.drafts:
        return
    rounds = run.rounds
    n_min = run.option("spec", "n_min")
    named = {seq for seq, _ in _never_drafted(run)} if n_min else set()
    looks_up = not set(run.drafters).intersection(model_drafters())
    if run.facts.options is None and not (rounds["num_draft_tokens"] > 0).any():
        return  # another engine's: never-drafts
    for seq, rows in rounds.by_sequence(run.is_later):
        silent = rounds["num_draft_tokens"][rows] == 0
        edges = np.diff(np.concatenate(([0], silent.astype(np.int8), [0])))
        starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        long = np.flatnonzero(stops - starts >= _LONG_SILENCE)
        if looks_up and not silent.all():
            continue  # what recurs rarely is found rarely
        if seq in named or not long.size or seq in run.asked["seq_id"][_out_of_step(run)]:
            continue
        longest = long[np.argmax((stops - starts)[long])]
        yield RuleHit(
            int(rounds["round"][rows[starts[long[0]]]]),
            seq,
            f"No drafter proposed anything for {stops[longest] - starts[longest]} rounds in a row.",
            f"{int(silent.sum())} of {len(rows)} rounds without a draft; drafters {_names(run)}"
            f"{_bounds(run)}{_why_not(run, seq)}",
        )


def _bounds(run: ExaminedRun) -> str:
    """What drafts have to keep to, as far as it is known."""
    values = {name: run.option("spec", name) for name in ("p_min", "n_min")}
    return "".join(f", {name} {value}" for name, value in values.items() if value is not None)


def _why_not(run: ExaminedRun, seq: int) -> str:
    """The reasons that the drafters gave, the most frequent first."""
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


def _defaults_surprise(run: ExaminedRun) -> Iterator[RuleHit]:
    if not run.drafts:
        return
    short, low = _n_max_is_short(run), _p_min_is_low(run)
    if not short and not low:
        return
    ways = ["raise --spec-draft-n-max" if short else "", "raise --spec-draft-p-min" if low else ""]
    yield RuleHit(
        None,
        None,
        " ".join(filter(None, (short, low))),
        f"n_max {run.option('spec', 'n_max')}, n_min {run.option('spec', 'n_min')}, p_min "
        f"{run.option('spec', 'p_min')} in effect; drafters {_names(run)}",
        f"{' and '.join(filter(None, ways))}.".capitalize(),
    )


def _n_max_is_short(run: ExaminedRun) -> str:
    drafted, accepted = run.rounds["num_draft_tokens"], run.rounds["num_accepted_draft_tokens"]
    steps = run.is_later & (drafted > 0)
    n = int(steps.sum())
    full = int((steps & (drafted == _DEFAULT.n_max) & (accepted == drafted)).sum())
    if run.option("spec", "n_max") != _DEFAULT.n_max or n < _MIN_STEPS or full < _FULL * n:
        return ""
    return f"n_max is {_DEFAULT.n_max}, the default, and {full} of {n} drafts were accepted whole."


def _p_min_is_low(run: ExaminedRun) -> str:
    tokens = run.tokens
    right, judged = tokens.is_text("kind", "accepted"), tokens.is_text("kind", "rejected")
    # a confidence head's word is what p_min is compared with, where there is one
    head = tokens["draft_conf"]
    sure = np.where(np.isnan(head), tokens["draft_p"], head)
    drafted = (right | judged | tokens.is_text("kind", "ignored")) & ~np.isnan(sure)
    looked_up = run.rounds.is_text("drafter", *(set(DRAFTERS) - set(model_drafters())))
    drafted &= ~np.isin(
        round_keys(tokens), round_keys(run.rounds)[looked_up]
    )  # p_min is not for it
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


def _acceptance_counting(run: ExaminedRun) -> Iterator[RuleHit]:
    """Emitted = accepted + 1 in every round, + 2 where a verified replay added a token. Rows whose
    path is unknown may have had either."""
    rounds = run.rounds
    drafted, accepted = rounds["num_draft_tokens"], rounds["num_accepted_draft_tokens"]
    depth, emitted = rounds["rollback_depth"], rounds["num_emitted"]
    counted = (drafted > 0) & observed(accepted) & observed(emitted)
    # the last round of a sequence may be cut short by a stop
    last = rounds.n - 1 - np.unique(rounds["seq_id"][::-1], return_index=True)[1]
    counted[last] = False
    restored = rounds.is_text("rollback_path", "restore", "restore_depth")
    own = 1 + (restored & rounds.is_text("stop_kind", "bonus", "target"))
    counted &= ~rounds.is_text("rollback_path", "")
    wrong = counted & (emitted - accepted != own)
    wrong |= counted & ~restored & observed(depth) & (drafted - accepted != depth)
    for seq, rows in rounds.by_sequence(wrong):
        first = rows[0]
        of_seq = (rounds["seq_id"] == seq) & run.is_later & observed(accepted)
        yield RuleHit(
            int(rounds["round"][first]),
            seq,
            f"{accepted[first]} tokens count as accepted in a round that drafted {drafted[first]}, "
            f"emitted {emitted[first]} and undid {depth[first]}.",
            f"{rounds_text(rounds['round'][rows])}; predicted - 1 = {emitted[of_seq].sum()}, "
            f"accepted + rounds = {accepted[of_seq].sum()} + {int(of_seq.sum())}",
        )


def _wrong_hidden_row(run: ExaminedRun) -> Iterator[RuleHit]:
    others = ~run.asked.is_text("drafter", EAGLE3, *_BLOCKS)
    said = "The MTP head paired {} of its tokens with hidden rows of other places."
    yield from _wrong_pairs(run, "num_wrong_rows", others, said)


def _wrong_context_row(run: ExaminedRun) -> Iterator[RuleHit]:
    mine = run.asked.is_text("drafter", *_BLOCKS)
    said = "The block drafter's context took {} rows that the target computed at other places."
    yield from _wrong_pairs(run, "num_wrong_rows", mine, said)


def _eagle3_boundary(run: ExaminedRun) -> Iterator[RuleHit]:
    mine = run.asked.is_text("drafter", EAGLE3)
    said = "The EAGLE-3 drafter paired {} of its tokens with feature rows of other places."
    yield from _wrong_pairs(run, "num_wrong_rows", mine, said)


def _eagle3_stale_row(run: ExaminedRun) -> Iterator[RuleHit]:
    mine = run.asked.is_text("drafter", EAGLE3) & ~_out_of_step(run) & ~_from_before(run)
    said = "The EAGLE-3 drafter's memory took {} tokens that are not the text's."
    yield from _wrong_pairs(run, "num_wrong_tokens", mine, said)


def _wrong_pairs(run: ExaminedRun, column: str, mine: np.ndarray, said: str) -> Iterator[RuleHit]:
    """Sequences whose drafter had pairs that `column` counts, in the rows `mine` of `drafts`."""
    asked = run.asked
    judged = run.is_later & (run.rounds["num_draft_tokens"] > 0)
    accepted = run.rounds["num_accepted_draft_tokens"][judged].sum()
    drafted = run.rounds["num_draft_tokens"][judged].sum()
    for seq, rows in asked.by_sequence(mine & (asked[column] > 0)):
        yield RuleHit(
            int(asked["round"][rows[0]]),
            seq,
            said.format(asked[column][rows[0]]),
            f"{rounds_text(asked['round'][rows])}; {accepted} of {drafted} drafted "
            "tokens of the run accepted",
        )


def _out_of_step(run: ExaminedRun, *reasons: str) -> np.ndarray:
    """Rows of `drafts` in which a drafter's state was not that of the text."""
    return run.asked.is_text("reason", *(reasons or OUT_OF_STEP))


def _has_been_out_of_step(run: ExaminedRun) -> np.ndarray:
    """Rows of `drafts` of sequences with such rows."""
    seqs = run.asked["seq_id"]
    return np.isin(seqs, seqs[_out_of_step(run)])


def _from_before(run: ExaminedRun) -> np.ndarray:
    """Rows of `drafts` of sequences in whose first round the drafter's state was wrong: it had
    what was there before them."""
    asked, found = run.asked, np.zeros(run.asked.n, bool)
    is_first_text = "prompt_cache" not in run.facts
    for seq, rows in asked.by_sequence(np.ones(asked.n, bool)):
        of_seq = run.rounds["round"][run.rounds["seq_id"] == seq]
        begins = is_first_text and of_seq.size and of_seq[0] == run.rounds["round"][0]
        first = rows[asked["round"][rows] == asked["round"][rows[0]]]
        if (asked["num_wrong_tokens"][first] > 0).any() and not begins:
            found[rows] = True
    return found


def _drafter_out_of_step(run: ExaminedRun, reason: str, what: str) -> Iterator[RuleHit]:
    mine = _out_of_step(run, reason) & ~_from_before(run)
    where = "ahead of" if reason == AHEAD else "behind"
    yield from _counted(run, mine, what, f"A drafter's state is {{}} tokens {where} the text.")


def _drafter_of_other_text(run: ExaminedRun) -> Iterator[RuleHit]:
    said = "A drafter's state is {} tokens off the text: it is that of the text before in its slot."
    yield from _counted(run, _from_before(run), "other-text", said)


def _drafter_not_rewound(run: ExaminedRun) -> Iterator[RuleHit]:
    mine = ~(_has_been_out_of_step(run) | _from_before(run) | run.asked.is_text("drafter", EAGLE3))
    said = "A drafter's memory holds {} tokens beyond the text."
    yield from _counted(run, mine, "rejected-kept", said)


def _counted(run: ExaminedRun, mine: np.ndarray, what: str, said: str) -> Iterator[RuleHit]:
    """What a drafter's own checks counted in the rows `mine` of `drafts`, and what the audit found
    in other sequences."""
    hits = list(_wrong_pairs(run, "num_wrong_tokens", mine, said))
    yield from hits
    named = {hit.seq_id for hit in hits}
    yield from (hit for hit in _audited(run, what) if hit.seq_id not in named)


_SAID = {
    "ahead": "{} was ahead of the text.",
    "behind": "{} lagged the text.",
    "rejected-kept": "{} kept what it had drafted in its memory.",
    "shifted": "{} paired tokens with the target's rows of other places.",
    "wrong-layers": "{} read other layers of the target than its own.",
    "other-text": "{} drafted from the text of another sequence.",
    "differs": "{} drafted other tokens than the text gives.",
}
"""By what the audit of drafts finds (engine.audit.drafts)."""


def _audited(run: ExaminedRun, what: str) -> Iterator[RuleHit]:
    """What the audit found, the first drafter of each sequence. Where it knows the cause in one
    sequence, drafts of the same drafter that only differ elsewhere are a consequence."""
    rows = run.audited_drafts
    known = {row["drafter"] for row in rows if row["what"] in _SAID and row["what"] != "differs"}
    seen = set()
    for row in rows:
        is_known = what == "differs" and row["drafter"] in known
        if row["what"] == what and row["seq_id"] not in seen and not is_known:
            seen.add(row["seq_id"])
            said = _SAID[what].format(row["drafter"])
            yield RuleHit(row.get("round"), row["seq_id"], said, row["evidence"])


def _audit_rule(
    check: Callable[[ExaminedRun], Iterator[RuleHit]],
    rule_id: str,
    title: str,
    means: str,
    suggestion: str,
) -> Rule:
    """A rule about a drafter's state."""
    means = f"{means} The text stays right, and fewer drafts are accepted."
    return Rule(rule_id, WARNING, title, means, suggestion, check)


def _names(run: ExaminedRun) -> str:
    return ", ".join(run.drafters) or "given by the caller"


RULES = (
    Rule(
        "n-min-never-met",
        WARNING,
        "n_min never met",
        "A draft shorter than n_min is thrown away. If all are, speculation costs time and does "
        "nothing.",
        "Lower --spec-draft-n-min, or lower p_min so that drafts get longer.",
        _n_min_never_met,
    ),
    Rule(
        "drafter-mute",
        WARNING,
        "Drafter mute",
        "No draft for many rounds: confidence below p_min, no n-gram match, or a drafter that "
        "gave up after rejections.",
        "Lower p_min or n_min, or choose a drafter that suits the text.",
        _drafter_mute,
    ),
    Rule(
        "defaults-surprise",
        INFO,
        "Defaults that may surprise",
        "The defaults of llama.cpp fell from 16 to 3 (n_max) and from 0.75 to 0 (p_min, silently).",
        "Raise --spec-draft-n-max where drafts are accepted whole, --spec-draft-p-min where unsure "
        "tokens are rejected.",
        _defaults_surprise,
    ),
    Rule(
        "wrong-hidden-row",
        WARNING,
        "Wrong hidden row for the MTP head",
        "The head pairs a token with the target's hidden row of the position before. After a "
        "rejection that is the row of the last accepted token, not of the batch's last one. The "
        "text stays right, and fewer drafts are accepted.",
        "After acceptance keep row k of the verify batch for k accepted tokens, and the rows of "
        "the replay after a restore.",
        _wrong_hidden_row,
        DRAFTS,
    ),
    Rule(
        "wrong-context-row",
        WARNING,
        "Wrong row in a block drafter's context",
        "A DFlash or DSpark drafter keeps the target's rows of every decoded token. After a "
        "rejection these are the first rows of the verify batch, not its last ones. The text stays "
        "right, and fewer drafts are accepted.",
        "After acceptance keep rows 0 to k of the verify batch for k accepted tokens, and the rows "
        "of the replay after a restore.",
        _wrong_context_row,
        DRAFTS,
    ),
    Rule(
        "drafter-not-rewound",
        WARNING,
        "Rejected tokens in a drafter's memory",
        "What a drafter decodes while it drafts has to leave its memory again where it was "
        "rejected. Cells or states of rejected tokens that stay are read by every later draft. The "
        "text stays right, and fewer drafts are accepted.",
        "After each round remove the drafter's positions beyond the accepted tokens (seq_rm), and "
        "roll its recurrent state back.",
        _drafter_not_rewound,
        DRAFTS,
    ),
    _audit_rule(
        partial(_drafter_out_of_step, reason=AHEAD, what="ahead"),
        "drafter-ahead",
        "Drafter ahead of the text",
        "The drafter counts a token as decoded that it has not decoded, or that was rejected, or "
        "drafts at later positions than the text has.",
        "Set the drafter's length to the accepted tokens after each round, not to what it has "
        "drafted.",
    ),
    _audit_rule(
        partial(_drafter_out_of_step, reason=BEHIND, what="behind"),
        "drafter-behind",
        "Drafter lags the text",
        "A token of the text is missing in the drafter's memory, or is decoded twice, or the draft "
        "goes on from an older token than the newest.",
        "Decode every accepted token once in the drafter, and draft from the newest one.",
    ),
    _audit_rule(
        partial(_audited, what="shifted"),
        "drafter-rows-shifted",
        "Tokens and rows of a drafter shifted",
        "The drafter pairs each token with a row of the target, of the position before (MTP, "
        "EAGLE-3) or of its own (DFlash). Here tokens or rows of other positions are taken.",
        "Pair the token at position p with the target's row of p - 1 in every batch, the first "
        "token of a batch with the last kept row of the one before.",
    ),
    _audit_rule(
        partial(_audited, what="wrong-layers"),
        "drafter-wrong-layers",
        "Drafter reads other layers",
        "EAGLE-3 and DFlash read rows of certain layers of the target in a certain order.",
        "Take the layers of the drafter's file in its order.",
    ),
    _audit_rule(
        _drafter_of_other_text,
        "drafter-of-other-text",
        "Drafter has another sequence's text",
        "The drafter's memory of a slot still has the text of another sequence, or its rows.",
        "Clear the drafter's sequence when its slot is given to another prompt.",
    ),
    _audit_rule(
        partial(_audited, what="differs"),
        "draft-not-reproduced",
        "Drafts that the text does not give",
        "Drafts were made again with a new memory from the text alone, and came out differently by "
        "more than rounding explains: the drafter's state was wrong.",
        "Look at the first round named, and at what the drafter kept from the round before.",
    ),
    Rule(
        "eagle3-boundary-row",
        WARNING,
        "Wrong feature row between two batches",
        "The drafter pairs a token with the feature row of the position before. Between two "
        "batches, parts of a prompt or steps that it did not draft for, that row is kept from the "
        "older one; read after it was overwritten, it is the newer one's last (llama.cpp "
        "0c1e57098). The text stays right, and fewer drafts are accepted.",
        "Copy the kept row before the batch's own last row takes its place.",
        _eagle3_boundary,
        DRAFTS,
    ),
    Rule(
        "eagle3-stale-row",
        WARNING,
        "Rejected token in the drafter's memory",
        "The cell after the last accepted token holds the rejected one until it is written "
        "anew. If the next round is drafted by another drafter, or by none, and the cell is taken "
        "for a right one, it stays for good (llama.cpp 0c1e57098). The text stays right, and "
        "fewer drafts are accepted.",
        "Cut the drafter's memory below that cell at acceptance, and write it with the next batch.",
        _eagle3_stale_row,
        DRAFTS,
    ),
    Rule(
        "acceptance-counting",
        WARNING,
        "Acceptance counted wrongly",
        "Replacement and bonus tokens are the target's own. Counting a replayed correction as "
        "accepted makes checkpoints look better than partial rollback.",
        "On a replay count the list less two, and recompute rates from the rounds.",
        _acceptance_counting,
        TOKENS,
    ),
)
