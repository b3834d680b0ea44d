"""Rules about the logits that tokens were chosen from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from engine.analysis.findings.rule import ERROR, INFO, LOGITS, TOKENS, LaneErrors, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun, observed, round_keys, rounds_text
from engine.options import SamplerOptions
from engine.trace.records import EMITTED_KINDS

_KNOWN = ("temp", "top_k", "top_p", "min_p", "seed")
_ROUNDING = 1e-3


def _stale_logits(run: ExaminedRun) -> Iterator[RuleHit]:
    return _stale_in_lane(run) if run.lane else _stale_in_run(run)


def _stale_in_lane(run: ExaminedRun) -> Iterator[RuleHit]:
    """Only rows after a rejection are wrong, and states and cells are right all the time."""
    errors = LaneErrors.of(run)
    if errors is None:
        return
    rows = run.divergence
    keys = round_keys(rows)
    last_of_round = np.append(np.diff(keys) != 0, True)[: rows.n]
    rejected = round_keys(run.rounds)[run.rounds["rollback_depth"] > 0]
    behind_rejection = last_of_round & np.isin(keys, rejected)
    for seq, wrong in rows.by_sequence(errors.logits_are_wrong):
        of_seq = rows["seq_id"] == seq
        other = errors.state_is_wrong | errors.conv_is_wrong | (rows["cells_differ"] > 0)
        if (other & of_seq).any() or not behind_rejection[wrong].all():
            continue
        first = wrong[0]
        yield RuleHit(
            int(rows["round"][first]),
            seq,
            "After a rejection the logits are not those of the position, though the memory is "
            "right.",
            f"{rounds_text(rows['round'][wrong])}; NMSE {rows['nmse'][first]:.1e} at position "
            f"{rows['pos'][first]}, rank {rows['rank'][first]} for the target's choice",
        )


def _wrong_in_lane(run: ExaminedRun) -> Iterator[tuple[RuleHit, bool]]:
    """Sequences whose logits are wrong before any state and cell is, but for stale ones, and
    whether they are those of another row of the batch."""
    errors = LaneErrors.of(run)
    if errors is None:
        return
    rows = run.divergence
    stale = {hit.seq_id for hit in _stale_in_lane(run)}
    for seq, wrong in rows.by_sequence(errors.logits_are_wrong):
        first = wrong[0]
        mine, since = rows["seq_id"] == seq, rows["round"][first]
        states = (errors.state_is_wrong | errors.conv_is_wrong) & (rows["round"] < since)
        # a pass looks at the cells that it takes
        cells = (rows["cells_differ"] > 0) & (rows["round"] <= since)
        if seq in stale or (mine & (states | cells)).any():
            continue
        number = int(rows["round"][first])
        noted = [r for r in run.facts.logit_rows or () if (r.seq_id, r.round) == (seq, number)]
        if not noted:
            continue  # no more than rounding may come to
        origins = (r for r in run.state_origins if (r.seq_id, r.round) == (seq, number))
        if any(r.kind.startswith(("from ", "first ", "no ")) for r in origins):
            continue  # the pass started from a wrong state, or computed it wrong
        of = next((r.of for r in noted if r.of is not None), None)
        said = f"The logits for position {rows['pos'][first]} in round {number} are wrong, though "
        said += "the pass started from right states and cells."
        if of is not None:
            said = f"Row {noted[0].row} of round {number} has the logits of row {of}."
        evidence = f"{rounds_text(rows['round'][wrong])}; NMSE {rows['nmse'][first]:.1e}"
        yield RuleHit(number, seq, said, evidence), of is not None


def _logits_wrong(run: ExaminedRun) -> Iterator[RuleHit]:
    return (hit for hit, of_another in _wrong_in_lane(run) if not of_another)


def _of_another_row(run: ExaminedRun) -> Iterator[RuleHit]:
    return (hit for hit, of_another in _wrong_in_lane(run) if of_another)


def _stale_in_run(run: ExaminedRun) -> Iterator[RuleHit]:
    """A replacement that the sampler could not have chosen where it is, and nothing else:
    with other tokens of that sort, more is wrong than the row of a rejection."""
    tokens = run.tokens
    impossible = _impossible(run)
    replacement = tokens.is_text("kind", "replacement")
    if (impossible & ~replacement).any():
        return
    for seq, rows in tokens.by_sequence(impossible):
        first = rows[0]
        yield RuleHit(
            int(tokens["round"][first]),
            seq,
            "The replacement of a rejected token is not the target's choice at its position.",
            f"{len(rows)} of {int((replacement & (tokens['seq_id'] == seq)).sum())} replacements; "
            f"at position {tokens['pos'][first]} rank {tokens['target_rank'][first]}, "
            f"p {tokens['target_p'][first]:.3g}",
        )


def _wrong_token(run: ExaminedRun) -> Iterator[RuleHit]:
    """Any other emitted token that the sampler could not have chosen where it is."""
    if run.lane and not run.facts.lane_free:
        return  # lanes are given their tokens
    tokens = run.tokens
    impossible = _impossible(run)
    if not (impossible & ~tokens.is_text("kind", "replacement")).any():
        return
    for seq, rows in tokens.by_sequence(impossible):
        first = rows[0]
        (kind,) = tokens.texts("kind", rows[:1])
        what = "A drafted token was accepted" if kind == "accepted" else "A token was emitted"
        of_seq = tokens.is_text("kind", *EMITTED_KINDS) & (tokens["seq_id"] == seq)
        yield RuleHit(
            int(tokens["round"][first]),
            seq,
            f"{what} that the target cannot have chosen at its position.",
            f"{len(rows)} of {int(of_seq.sum())} emitted tokens; the first, {kind}, at position "
            f"{tokens['pos'][first]} with rank {tokens['target_rank'][first]}, "
            f"p {tokens['target_p'][first]:.3g}",
        )


def _non_finite(run: ExaminedRun) -> Iterator[RuleHit]:
    for row in run.facts.non_finite or ():
        yield RuleHit(
            row.round,
            row.seq_id,
            f"The {row.where}'s logits contain {row.what}.",
            f"for the token at position {row.pos}; compute mode {run.facts.compute or ''}",
        )


def _impossible(run: ExaminedRun) -> np.ndarray:
    """Emitted tokens outside what top-k and min-p leave: bool [n], none if nothing can be said."""
    tokens = run.tokens
    impossible = np.zeros(tokens.n, bool)
    sampler = run.option("sampler")
    if sampler is None or not _is_plain(sampler):
        return impossible
    # by synthetic acceptance the target has no say in a draft
    kinds = set(EMITTED_KINDS) - ({"accepted"} if run.facts.synthetic else set())
    known = tokens.is_text("kind", *kinds) & observed(tokens["target_rank"])
    known &= ~np.isnan(tokens["target_p"])  # a rank among numbers
    if run.option("replay") == "verify":  # chosen from a replay's logits, recorded are the first
        replayed = run.rounds["round"][run.rounds["replay_index"] > 0]
        known &= ~np.isin(tokens["round"], replayed)
    rows = np.flatnonzero(known)
    p, rank = tokens["target_p"][rows], tokens["target_rank"][rows]
    top_id, top_p = tokens["target_top_id"][rows], tokens["target_top_p"][rows]
    banned_ids = run.facts.banned_tokens or []
    banned = np.isin(top_id, banned_ids)
    # by place and not by p, in which two logits may look equal;
    # of tokens further down only the best five are known: assume that all banned ones are ahead
    ahead = (banned & (np.arange(top_id.shape[1]) < rank[:, None] - 1)).sum(1)
    ahead = np.where(rank > top_id.shape[1], len(banned_ids), ahead)
    if sampler.temp <= 0:
        wrong = rank - ahead > 1
    else:
        best = np.where(banned, 0.0, top_p).max(1)
        wrong = p < sampler.min_p * best * (1 - _ROUNDING)
        if sampler.top_k:
            wrong |= rank - ahead > sampler.top_k
    impossible[rows] = wrong
    return impossible


def _is_plain(sampler: SamplerOptions) -> bool:
    """Whether the chain is top-k, top-p, min-p and temperature, and all else at its default."""
    plain = asdict(SamplerOptions())
    return all(name in _KNOWN or value == plain[name] for name, value in asdict(sampler).items())


def _near_ties(run: ExaminedRun) -> Iterator[RuleHit]:
    rows = run.divergence
    if run.bound is None or not (rows["nmse"] <= run.bound).all():
        return  # in a lane that is wrong a fork is not noise
    lanes = (ExaminedRun(run.trace, i) for i in run.noise_runs)
    noise = max(float(lane.divergence["max_abs"].max(initial=0)) for lane in lanes)
    # either of the two logits may have moved by as much
    tie = (rows["top1_equal"] == 0) & (rows["top2_gap"] <= 2 * noise)
    for seq, chosen in rows.by_sequence(tie):
        first = chosen[0]
        yield RuleHit(
            int(rows["round"][first]),
            seq,
            f"The most probable token differs at {len(chosen)} of {rows.n} positions, near ties.",
            f"{rounds_text(rows['round'][chosen])}; at position {rows['pos'][first]} a gap of "
            f"{rows['top2_gap'][first]:.1e} between the two best logits, noise moves a logit by "
            f"up to {noise:.1e}",
        )


RULES = (
    Rule(
        "stale-logits",
        ERROR,
        "Stale logits",
        "The token after a rejection was chosen from the last row of the rejected batch instead "
        "of the row at which the draft was rejected.",
        "Sample from the logits at the index of the first mismatch, and read them before the "
        "batch is decoded again.",
        _stale_logits,
        LOGITS,
    ),
    Rule(
        "logits-of-another-row",
        ERROR,
        "Logits of another row",
        "A token was judged by the logits of another token of the same batch: the row is off by "
        "one, or outputs are gathered in another order.",
        "Row i of a verify batch judges drafted token i, and the row after the last accepted one "
        "gives the target's own token.",
        _of_another_row,
        LOGITS,
    ),
    Rule(
        "logits-wrong",
        ERROR,
        "Logits wrong over a right memory",
        "States and cells were right before the pass, and what it gave is not: its mask, its "
        "positions, its gates or the cells that it looks at are wrong for a batch like this.",
        "Look at what a batch of several tokens or sequences does that one of a single token does "
        "not; with unified cells at the mask between sequences.",
        _logits_wrong,
        LOGITS,
    ),
    Rule(
        "wrong-token",
        ERROR,
        "Token that the target does not choose",
        "Under these sampler options no token of its rank or probability can be drawn. A drafted "
        "token was accepted without being the target's choice, or a token was read off the row of "
        "another position.",
        "Compare each drafted token with what is sampled from the row before it, row i for the "
        "draft's token i, and stop at the first that differs.",
        _wrong_token,
        TOKENS,
    ),
    Rule(
        "non-finite-logits",
        ERROR,
        "Logits that are not finite",
        "A weight is NaN or infinite, or a sum overflowed in this compute mode. No token can be "
        "chosen by such logits, and none after it means anything.",
        "Load the file anew, compare with --compute f32, and look for the first layer with "
        "`draftscope logits`.",
        _non_finite,
        LOGITS,
    ),
    Rule(
        "noise-near-ties",
        INFO,
        "Forks at near ties",
        "Kernels add in another order for another width of the batch. Where two tokens are "
        "almost equally probable that is enough to swap them: noise, not a wrong state.",
        "Nothing to repair; judge lanes by logits, not by equal text.",
        _near_ties,
    ),
)
