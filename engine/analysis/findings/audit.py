"""Audit rules (engine.audit.run_audit), except wrong states; and an audit's result in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from engine.analysis.findings.memory import NAMES_STATES
from engine.analysis.findings.run_rows import Check, ExaminedRun
from engine.foreign import is_whole
from engine.trace.facts import AuditFacts, Finding, RunFacts

GOING_ON, NOT_AUDITED, STOPPED = "going on", "not audited", "stopped"
"""Verdict of an audit before it is finished, if there is none, and if it was stopped early."""


def audit_goes_on(facts: RunFacts) -> bool:
    """Whether a finished run is still being compared with plain decoding."""
    return facts.audit is not None and facts.audit.verdict == GOING_ON


def audit_text(facts: RunFacts) -> Iterator[str]:
    """A line on the run's audit, and one for each part that it did not judge; empty without an
    audit."""
    audit = facts.audit
    if audit is None:
        return
    if audit.verdict == NOT_AUDITED:
        yield audit_sentence(facts)
        return
    took = "" if audit.seconds is None else f" ({audit.seconds:.1f} s)"
    yield (
        f"audit: {audit.verdict}, {audit.n_tokens} of {audit.n_text} tokens compared with plain "
        f"decoding, {audit.n_drawn} sampled again, states of {audit.n_rounds_sampled} rounds{took}"
    )
    for reason in audit.not_judged:
        yield f"  not judged: {reason}"


def audit_sentence(facts: RunFacts) -> str:
    """The result in a few words, empty without an audit or while it goes on.

    Raises nothing, whatever the facts of an opened trace are.
    """
    audit = facts.audit
    if audit is None:
        return ""
    verdict = audit.verdict
    why = audit.not_judged[0].rstrip(".") if audit.not_judged else ""
    if verdict == "differs":
        wrong = [*audit.wrong, *audit.sampler]
        rounds = [one["round"] for one in wrong if is_whole(one.get("round"))]
        return f"Audit: wrong from round {min(rounds):,}" if rounds else "Audit: wrong"
    if verdict == "agrees":
        return f"Audit: {_judged(audit)}{f'; not judged: {why}' if why else ''}"
    if verdict == STOPPED:
        return "Audit stopped"
    if verdict == NOT_AUDITED:
        return f"Not audited because {why}" if why else "Not audited"
    return f"Audit without a verdict: {why}" if why and verdict != GOING_ON else ""


def _judged(audit: AuditFacts) -> str:
    """What agreed: the whole text or a part, and the rounds whose states were compared."""
    n, n_text, n_rounds = audit.n_tokens or 0, audit.n_text or 0, audit.n_rounds_sampled or 0
    if not n:
        return "every token follows the sampling rule; there was no time to decode the text again"
    sampled = n < n_text
    text = f"{n:,} tokens" if sampled else "text"
    rounds = f" and {n_rounds:,} round{'s' if n_rounds > 1 else ''}" if n_rounds else ""
    of = f" (a sample of {n_text:,} tokens)" if sampled else ""
    return f"{text}{rounds} equal to plain decoding{of}"


def _first(run: ExaminedRun, what: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The sequences whose first error is this one, with its record."""
    return ((one, one[what]) for one in run.audited if one["what"] == what)


def _before(run: ExaminedRun, seq: int, number: int) -> str:
    """The last rollback of a sequence before a round, in words."""
    rounds = run.rounds
    undone = (rounds["seq_id"] == seq) & (rounds["memory_rollback"] > 0)
    rows = (undone & (rounds["round"] < number)).nonzero()[0]
    policy = run.option("rollback") or "unknown"
    if not rows.size:
        return f"no rollback before it, policy {policy}"
    (path,) = rounds.texts("rollback_path", rows[-1:])
    depth, since = int(rounds["memory_rollback"][rows[-1]]), int(rounds["round"][rows[-1]])
    return f"the last rollback before it was of {depth} by {path} in round {since}, policy {policy}"


def _cells_wrong(run: ExaminedRun) -> Iterator[Finding]:
    for one, cells in _first(run, "cells"):
        if cells["n_cells"]:
            said = f"KV cells differ from those of plain decoding in {cells['n_cells']}"
        else:
            what = {"k": "keys", "v": "values"}[cells["kind"]]
            said = (
                f"KV cells hold other {what} than plain decoding at {cells['n']} positions, the "
                f"first {cells['pos']}, in attention layer {cells['cache_layer']}"
            )
        yield Finding(
            f"{said}, after round {one['round']}.",
            f"{_before(run, one['seq_id'], one['round'] + 1)}; {_consequence(one)}",
            one["round"],
            one["seq_id"],
        )


def _logits_wrong(run: ExaminedRun, *, is_repeated: bool) -> Iterator[Finding]:
    for one, logits in _first(run, "logits"):
        comes_again = logits.get("comes_again", True)
        if (comes_again is not False) != is_repeated:
            continue
        state = one.get("state")
        said = "although the state and the cells before them are right"
        if comes_again is None:
            hits = (hit for check in NAMES_STATES.values() for hit in check(run))
            mine = (hit for hit in hits if hit.seq_id in (one["seq_id"], None))
            if any((hit.round or 0) <= one["round"] for hit in mine):
                continue  # memory is known to be wrong
            said = "and cells were not compared"
        elif not comes_again:
            said = "and a second run, whose memory was read after every round, had others there"
        yield Finding(
            f"The logits for position {logits['pos']} in round {one['round']} differ from plain "
            f"decoding, {said}.",
            f"NMSE {logits['error']:.1e}, {logits['n_rows']} rows with more than rounding errors; "
            + (f"a state is wrong from round {state['round']} on; " if state else "")
            + _before(run, one["seq_id"], one["round"]),
            one["round"],
            one["seq_id"],
        )


def _text_wrong(run: ExaminedRun) -> Iterator[Finding]:
    for one, token in _first(run, "token"):
        yield Finding(
            f"The token at position {token['pos']} is not that of plain decoding, "
            f"{token['expected_id']}, although the logits are right.",
            _before(run, one["seq_id"], one["round"]),
            one["round"],
            one["seq_id"],
        )


def _consequence(one: dict[str, Any]) -> str:
    logits = one.get("logits")
    return f"logits wrong from round {logits['round']} on" if logits else "logits right"


_Says = Callable[[dict[str, Any]], tuple[str, str]]
"""Formats message and evidence of a note of engine.audit.sampler_check."""


def _sampler(run: ExaminedRun, what: str, says: _Says) -> Iterator[Finding]:
    """The notes of one kind."""
    for note in run.audit_notes:
        if note["what"] == what:
            yield Finding(*says(note), note["round"], note["seq_id"])


def _state(run: ExaminedRun, what: str, said: str) -> Iterator[Finding]:
    """Notes of one kind about the sampler's state."""
    how = "after the round, compared with a sampler that sampled only the text"
    if what == "random numbers":
        how = "after the round, from the seed and one number per token"
    return _sampler(run, what, lambda _: (said, how))


def _says_token(note: dict[str, Any]) -> tuple[str, str]:
    about = note.get("about") or ""
    said = f"The token at position {note.get('pos')} is not that of the rule for these logits"
    evidence = f"chosen {note.get('token_id')}, by the rule {note.get('expected_id')}"
    return f"{said}{': it is ' + about if about else ''}.", evidence


def _says_p(note: dict[str, Any]) -> tuple[str, str]:
    said = f"The rule judged token {note.get('token_id')} at position {note.get('pos')} by another "
    said += "probability than the text gives: penalties, grammar or the row were wrong."
    return said, f"{note.get('p')} instead of {note.get('plain')}"


def _says_length(note: dict[str, Any]) -> tuple[str, str]:
    said = f"Synthetic acceptance kept {note.get('n')} drafted tokens where its random number "
    return f"{said}keeps {note.get('n_expected')}.", "one random number of the sequence per round"


def _incomplete(run: ExaminedRun) -> Iterator[Finding]:
    if run.audit.not_judged and run.audit.verdict != NOT_AUDITED:
        evidence = "; ".join(run.audit.not_judged)
        yield Finding("The audit did not check everything.", evidence)


CHECKS: dict[str, Check] = {
    "cells-not-plain": _cells_wrong,
    "logits-not-plain": partial(_logits_wrong, is_repeated=True),
    "logits-not-repeated": partial(_logits_wrong, is_repeated=False),
    "wrong-acceptance": partial(_sampler, what="token", says=_says_token),
    "wrong-rule-probability": partial(_sampler, what="probability", says=_says_p),
    "wrong-synthetic-length": partial(_sampler, what="length", says=_says_length),
    "sampler-of-other-tokens": partial(
        _state, what="tokens", said="The sampler's state includes other tokens than the text."
    ),
    "penalties-of-other-tokens": partial(
        _state, what="penalties", said="The penalties use other tokens than prompt and text."
    ),
    "grammar-of-other-tokens": partial(
        _state, what="grammar", said="The grammar's state is not that of the text."
    ),
    "random-numbers-off": partial(
        _state,
        what="random numbers",
        said="The sampler used more or fewer random numbers than the text needs.",
    ),
    "text-not-plain": _text_wrong,
    "audit-incomplete": _incomplete,
}
