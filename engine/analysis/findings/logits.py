"""Logits rules: wrong logits, the noise they are compared with, and the sampler's choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from engine.analysis.findings.run_rows import (
    Check,
    ExaminedRun,
    LaneErrors,
    by_sequence,
    observed,
    rounds_text,
)
from engine.analysis.noise_ceiling import rows_beyond
from engine.analysis.verdict import failed_checks, first_row
from engine.options import RunOptions, SamplerOptions
from engine.trace.facts import Finding
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import RunRef, round_keys, same_model

_KNOWN = ("temp", "top_k", "top_p", "min_p", "seed")
_ROUNDING = 1e-3


def _stale_in_lane(run: ExaminedRun) -> Iterator[Finding]:
    """Only rows after a rejection are wrong, while states and cells are always right."""
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
        yield Finding(
            "After a rejection, the logits are not those of the position, although the memory is "
            "right.",
            f"{rounds_text(rows['round'][wrong])}; NMSE {rows['nmse'][first]:.1e} at position "
            f"{rows['pos'][first]}, rank {rows['rank'][first]} for the target's choice",
            int(rows["round"][first]),
            seq,
        )


def _wrong_in_lane(run: ExaminedRun, *, of_another: bool) -> Iterator[Finding]:
    """Sequences whose logits are wrong before any state or cell, other than stale rows. of_another:
    only those equal to another row of the batch, else all others."""
    errors = LaneErrors.of(run)
    if errors is None:
        return
    rows = run.divergence
    stale = {hit.seq_id for hit in _stale_in_lane(run)}
    for seq, wrong in rows.by_sequence(errors.logits_are_wrong):
        first = wrong[0]
        mine, since = rows["seq_id"] == seq, rows["round"][first]
        states = (errors.state_is_wrong | errors.conv_is_wrong) & (rows["round"] < since)
        # a pass checks the cells that it takes
        cells = (rows["cells_differ"] > 0) & (rows["round"] <= since)
        if seq in stale or (mine & (states | cells)).any():
            continue
        number = int(rows["round"][first])
        noted = [r for r in run.facts.logit_rows or () if (r.seq_id, r.round) == (seq, number)]
        if not noted:
            continue  # within rounding
        origins = (r for r in run.state_origins if (r.seq_id, r.round) == (seq, number))
        if any(r.kind.startswith(("from ", "first ", "no ")) for r in origins):
            continue  # the pass started from a wrong state, or computed a wrong one
        of = next((r.of for r in noted if r.of is not None), None)
        said = f"The logits for position {rows['pos'][first]} in round {number} are wrong, but "
        said += "the pass started from right states and cells."
        if of is not None:
            said = f"Row {noted[0].row} of round {number} has the logits of row {of}."
        evidence = f"{rounds_text(rows['round'][wrong])}; NMSE {rows['nmse'][first]:.1e}"
        if (of is not None) == of_another:
            yield Finding(said, evidence, number, seq)


def _stale_in_run(run: ExaminedRun) -> Iterator[Finding]:
    """A correction token that the sampler could not have chosen there, and no other wrong token:
    otherwise more is wrong than the row of a rejection."""
    tokens = run.tokens
    impossible = _impossible(run)
    replacement = tokens.is_text("kind", "replacement")
    if (impossible & ~replacement).any():
        return
    for one in by_sequence(tokens, impossible):
        n = int((replacement & (tokens["seq_id"] == one.seq)).sum())
        yield one.hit(
            "The replacement of a rejected token is not the target's choice at its position.",
            f"{len(one.at)} of {n} replacements; "
            f"at position {one['pos']} rank {one['target_rank']}, p {one['target_p']:.3g}",
            counts=False,
        )


def _wrong_token(run: ExaminedRun) -> Iterator[Finding]:
    """Any other emitted token that the sampler could not have chosen there."""
    if run.lane and not run.facts.lane_free:
        return  # lanes are given their tokens
    tokens = run.tokens
    impossible = _impossible(run)
    if not (impossible & ~tokens.is_text("kind", "replacement")).any():
        return
    for one in by_sequence(tokens, impossible):
        kind = one.text("kind")
        what = "A drafted token was accepted" if kind == "accepted" else "A token was emitted"
        of_seq = tokens.is_text("kind", *EMITTED_KINDS) & (tokens["seq_id"] == one.seq)
        yield one.hit(
            f"{what} that the target cannot have chosen at its position.",
            f"{len(one.at)} of {int(of_seq.sum())} emitted tokens; the first, {kind}, at position "
            f"{one['pos']} with rank {one['target_rank']}, p {one['target_p']:.3g}",
            counts=False,
        )


def _non_finite(run: ExaminedRun) -> Iterator[Finding]:
    for row in run.facts.non_finite or ():
        yield Finding(
            f"The {row.where}'s logits contain {row.what}.",
            f"for the token at position {row.pos}; compute mode {run.facts.compute or ''}",
            row.round,
            row.seq_id,
        )


def _impossible(run: ExaminedRun) -> np.ndarray:
    """Emitted tokens excluded by top-k or min-p: bool [n], all False if this is unknown."""
    tokens = run.tokens
    impossible = np.zeros(tokens.n, bool)
    sampler = run.option("sampler")
    if sampler is None or not _is_plain(sampler):
        return impossible
    # with synthetic acceptance the target does not judge drafts
    kinds = set(EMITTED_KINDS) - ({"accepted"} if run.facts.synthetic else set())
    known = tokens.is_text("kind", *kinds) & observed(tokens["target_rank"])
    known &= ~np.isnan(tokens["target_p"])  # a rank among numbers
    if run.option("replay") == "verify":  # chosen by a replay's logits, not the recorded ones
        replayed = run.rounds["round"][run.rounds["replay_index"] > 0]
        known &= ~np.isin(tokens["round"], replayed)
    for place in RunRef(run.trace, run.run_id).forced:
        named = zip(("seq_id", "round", "token_id"), place, strict=True)
        known &= ~np.logical_and.reduce([tokens[name] == value for name, value in named])
    rows = np.flatnonzero(known)
    p, rank = tokens["target_p"][rows], tokens["target_rank"][rows]
    top_id, top_p = tokens["target_top_id"][rows], tokens["target_top_p"][rows]
    banned_ids = run.facts.banned_tokens or []
    banned = np.isin(top_id, banned_ids)
    # by rank, because two logits may look equal in p; for tokens further down only the best five
    # are known: assume that all banned ones are ahead
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
    """Whether the chain is top-k, top-p, min-p and temperature, with defaults for the rest."""
    plain = asdict(SamplerOptions())
    return all(name in _KNOWN or value == plain[name] for name, value in asdict(sampler).items())


def _near_ties(run: ExaminedRun) -> Iterator[Finding]:
    rows = run.divergence
    if run.bound is None or not (rows["nmse"] <= run.bound).all():
        return  # in a wrong lane a fork is not noise
    lanes = (ExaminedRun(run.trace, i) for i in run.noise_runs)
    noise = max(float(lane.divergence["max_abs"].max(initial=0)) for lane in lanes)
    # both logits may have moved by that much
    tie = (rows["top1_equal"] == 0) & (rows["top2_gap"] <= 2 * noise)
    for one in by_sequence(rows, tie):
        yield one.hit(
            f"The most probable token differs at {len(one.at)} of {rows.n} positions, all near "
            "ties.",
            f"at position {one['pos']} a gap of {one['top2_gap']:.1e} between the two highest "
            f"logits, noise changes a logit by up to {noise:.1e}",
        )


def _batches_differ(run: ExaminedRun) -> Iterator[Finding]:
    check = run.facts.noise_check
    failed = failed_checks(check)
    for seq in sorted({one.seq_id for one in failed}):
        mine = [one for one in failed if one.seq_id == seq]
        first = first_row(mine)
        yield Finding(
            "From an empty memory, batches give other logits than token by token.",
            "; ".join(
                f"{one.batches}: {one.beyond} of {one.rows} positions, NMSE up to "
                + ("not finite" if one.worst is None else f"{one.worst:.1e}")
                for one in mine
            )
            + f"; the first after position {first.pos}, row {first.row} of a batch of "
            f"{first.width}; rounding reaches {check.ceiling if check else 0:.0e}",
            seq_id=seq,
        )


def _noise_beyond_rounding(run: ExaminedRun) -> Iterator[Finding]:
    check = run.facts.noise_check
    if check is None or failed_checks(check):
        return
    rows = run.divergence
    beyond = rows_beyond(rows["nmse"], check.ceiling, check.share)
    if beyond.size:
        first = beyond[0]
        yield Finding(
            "The noise lane, which does not roll back, has larger errors than rounding explains.",
            f"{rounds_text(rows['round'][beyond])}; {len(beyond)} of {rows.n} positions, the first "
            f"{rows['pos'][first]} with NMSE {rows['nmse'][first]:.1e}; rounding reaches "
            f"{check.ceiling:.0e}; "
            + (
                "texts decoded in batches from an empty memory are right"
                if check.batches
                else "no text was decoded from an empty memory"
            ),
            int(rows["round"][first]),
            int(rows["seq_id"][first]),
        )


_NEVER = 2**62


def _not_restored(run: ExaminedRun) -> Iterator[Finding]:
    rounds = run.rounds
    wrong, draws = rounds["sampler_wrong"], rounds["sampler_draws"]
    astray = observed(wrong) & (wrong > 0)
    off = astray | (observed(draws) & (draws != 0))
    noted = {note["seq_id"]: note["round"] for note in run.audit_notes}
    for one in by_sequence(rounds, off):
        if noted.get(one.seq, _NEVER) <= one["round"]:
            continue  # the audit explains it
        says = [f"{one['sampler_wrong']} of its last tokens are not those of the text"]
        if not astray[one.at[0]]:
            says = []
        if observed(draws)[one.at[0]] and one["sampler_draws"]:
            says.append(f"{one['sampler_draws']:+} random numbers against one per token")
        yield one.hit(
            "The state of the sampler is not that of the text: it was not restored at a rollback.",
            f"after the first {'; '.join(says)}; depth {one['rollback_depth']}",
        )


def _grammar_failed(run: ExaminedRun) -> Iterator[Finding]:
    first = {row.seq_id: row for row in reversed(run.facts.grammar_errors or ())}
    for row in reversed(first.values()):
        yield Finding(
            f"The grammar ended the sequence: {row.why}.",
            f"before the token at position {row.pos}",
            row.round,
            row.seq_id,
        )


def _crosstalk(run: ExaminedRun) -> Iterator[Finding]:
    if run.option("kv") != "unified" or len(np.unique(run.rounds["seq_id"])) < 2:
        return
    yield from _in_lane(run) if run.lane else _between_runs(run)


def _in_lane(run: ExaminedRun) -> Iterator[Finding]:
    """Above the bound, while a lane that differs in the cells alone is within it."""
    errors = LaneErrors.of(run)
    twins = [ExaminedRun(run.trace, i) for i in run.lanes if _is_twin(run, i)]
    if errors is None or not twins:
        return
    rows = run.divergence
    for seq, wrong in rows.by_sequence(errors.logits_are_wrong):
        for twin in twins:
            others = LaneErrors.of(twin)
            if others is None or others.first_wrong(seq) is not None:
                continue
            first = wrong[0]
            yield Finding(
                "With unified KV, this sequence has other logits than with its own KV cells.",
                f"NMSE {rows['nmse'][first]:.1e} at position {rows['pos'][first]}, lane "
                f"{twin.lane!r} is within the bound",
                int(rows["round"][first]),
                seq,
            )
            break


def _between_runs(run: ExaminedRun) -> Iterator[Finding]:
    """Differs from a run of the same prompt with separate cells and otherwise equal settings."""
    mine = _texts(run)
    twins = [i for i in range(len(run.trace.runs)) if _is_twin(run, i)]
    found: set[int] = set()
    for other in twins:
        theirs = {
            prompt: (seq, tokens)
            for seq, (prompt, tokens, _) in _texts(ExaminedRun(run.trace, other)).items()
        }
        for seq, (prompt, tokens, rounds) in mine.items():
            if seq in found or prompt not in theirs:
                continue
            twin, expected = theirs[prompt]
            n = min(len(tokens), len(expected))
            differ = np.flatnonzero(tokens[:n] != expected[:n])
            if differ.size:
                found.add(seq)
                yield Finding(
                    f"With unified KV, this sequence continues differently from run {other}.",
                    f"same prompt as sequence {twin} of run {other}; token {differ[0]} after the "
                    f"prompt is {tokens[differ[0]]} instead of {expected[differ[0]]}",
                    int(rounds[differ[0]]),
                    seq,
                )


def _is_twin(run: ExaminedRun, other: int) -> bool:
    facts = run.trace.runs[other]
    options = facts.options
    return (
        other != run.run_id
        and ("lane" in facts) == bool(run.lane)
        and options is not None
        and options.kv == "per-seq"
        and same_model(facts.model, run.facts.model)
        and _but_cells(options) == _but_cells(run.facts.options)
    )


def _but_cells(options: RunOptions | None) -> dict[str, Any] | None:
    return asdict(options) | {"kv": None, "parallel": None} if options else None


def _texts(run: ExaminedRun) -> dict[int, tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """Per sequence its prompt, its emitted tokens and their rounds."""
    tokens = run.tokens
    prompts = {
        seq: tuple(tokens["token_id"][rows].tolist())
        for seq, rows in tokens.by_sequence(tokens.is_text("kind", "prompt"))
    }
    return {
        seq: (prompts.get(seq, ()), tokens["token_id"][rows], tokens["round"][rows])
        for seq, rows in tokens.by_sequence(tokens.is_text("kind", *EMITTED_KINDS))
    }


CHECKS: dict[str, Check] = {
    "stale-logits": lambda run: _stale_in_lane(run) if run.lane else _stale_in_run(run),
    "logits-of-another-row": partial(_wrong_in_lane, of_another=True),
    "logits-wrong": partial(_wrong_in_lane, of_another=False),
    "wrong-token": _wrong_token,
    "non-finite-logits": _non_finite,
    "noise-near-ties": _near_ties,
    "batch-differs": _batches_differ,
    "noise-beyond-rounding": _noise_beyond_rounding,
    "sampler-not-restored": _not_restored,
    "grammar-failed": _grammar_failed,
    "unified-kv-crosstalk": _crosstalk,
}
