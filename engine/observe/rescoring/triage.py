"""Triage: where the texts of two runs of the same prompts differ first, and whether that is a near
tie.

With and without speculation, two builds, two servers. After equal tokens a correct engine chooses
the same next token, unless rounding flips two close ones. With the model at hand the tokens at the
first mismatch are judged by it; otherwise by the target probabilities in the traces there, and
without those the gap is unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engine.observe.rescoring.request_sampler import NotJudgedError, request_sampling
from engine.observe.rescoring.texts import asked_of
from engine.sampling.options import SamplerOptions
from engine.trace.facts import RequestFacts
from engine.trace.prompt_reuse import n_common
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import RunColumns, RunRef, rows_by_sequence, same_model

SAME, NEAR_TIE, DRAWN, DIFFERENT, UNKNOWN = "same", "near tie", "drawn", "different", "unknown"
FORCED = "forced"
"""Verdicts on two texts. near tie: they differ where noise may flip the two tokens. drawn: at a
temperature both can be sampled, so it proves nothing. different: one of the tokens is not the
target's. unknown: the gap between the two tokens is not known. forced: a fork was given one of
them."""

_MOST_TOKENS = 2**31
_SHOWN = 24
"""Characters."""


@dataclass(frozen=True, slots=True)
class PartingToken:
    """A text's token at the first mismatch. token_id, text: None and "" after the text's end.
    round: that emitted it, None if unknown; after_round: the last earlier one with a rollback.
    short: by how much better logits would have to be smaller for it to be chosen, None if
    unknown."""

    token_id: int | None
    text: str
    round: int | None
    after_round: int | None
    short: float | None = None


@dataclass(frozen=True, slots=True)
class TextPair:
    """One sequence of each run. n_same: length of the common prefix in tokens; pos: position of the
    first mismatch, None without one. a, b: the tokens there. gap: of the two tokens' logits, noise:
    how far rounding may change it; None if unknown. reason: the verdict as a sentence."""

    seq_a: int
    seq_b: int
    n_same: int
    verdict: str
    reason: str
    pos: int | None = None
    a: PartingToken | None = None
    b: PartingToken | None = None
    gap: float | None = None
    noise: float | None = None


@dataclass(frozen=True, slots=True)
class Triage:
    """The comparison of two runs. alone_a, alone_b: sequences whose prompt the other run does not
    have."""

    run_a: int
    run_b: int
    pairs: tuple[TextPair, ...]
    alone_a: tuple[int, ...]
    alone_b: tuple[int, ...]

    @property
    def verdict(self) -> str:
        """The worst of all pairs; unknown without any."""
        order = (DIFFERENT, UNKNOWN, DRAWN, NEAR_TIE, FORCED, SAME)
        found = {pair.verdict for pair in self.pairs}
        return next((verdict for verdict in order if verdict in found), UNKNOWN)

    @property
    def worst(self) -> TextPair | None:
        """The first pair of that verdict."""
        return next((pair for pair in self.pairs if pair.verdict == self.verdict), None)

    @property
    def reason(self) -> str:
        """The verdict as a sentence, with its sequence if there are several."""
        worst = self.worst
        if worst is None:
            return "They have no prompt in common."
        if len(self.pairs) == 1:
            return worst.reason
        if worst.verdict == SAME:
            return f"The common parts of all {len(self.pairs)} sequences are equal."
        return f"Sequence {worst.seq_a}: {worst.reason[:1].lower()}{worst.reason[1:]}"


def triage(a: RunRef, b: RunRef) -> Triage:
    """Compare two runs, of one trace or of two. Uses the results of re-scoring that they hold
    (engine.observe.rescoring.rescore)."""
    pairs, alone_a, left = [], [], _texts_of(b)
    for mine in _texts_of(a):
        if (its := mine.partner(left)) is None:
            alone_a.append(mine.seq_id)
            continue
        left.remove(its)
        pairs.append(_compare(mine, its))
    alone_b = (one.seq_id for one in left)
    return Triage(a.run_id, b.run_id, tuple(pairs), tuple(alone_a), tuple(alone_b))


def _texts_of(run: RunRef) -> list[_Text]:
    """The sequences of a run that emitted tokens."""
    emitted, prompts = (
        rows_by_sequence(run.store, run.run_id, kinds) for kinds in (EMITTED_KINDS, ("prompt",))
    )
    texts = {
        seq_id: request.text
        for request in run.facts.requests or ()
        for seq_id in request.seq_ids
        if request.text and seq_id not in emitted
    }
    return [
        _Text(run, seq_id, emitted.get(seq_id), prompts.get(seq_id), texts.get(seq_id))
        for seq_id in (*emitted, *texts)
    ]


class _Text:
    """A sequence of one of the runs. emitted, prompt: rows of `tokens`, None without any; text: for
    a sequence without tokens."""

    def __init__(
        self,
        run: RunRef,
        seq_id: int,
        emitted: np.ndarray | None,
        prompt: np.ndarray | None,
        text: str | None,
    ) -> None:
        self.seq_id, self.emitted = seq_id, emitted
        self._run, self._facts, self._tokens = run, run.facts, run.store.tokens
        self._prompt, self._own_text = prompt, text
        self.asked = asked_of(run.facts, seq_id)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of `tokens` of the emitted ones, in order."""
        return [] if self.emitted is None else list(map(self._tokens.row, self.emitted.tolist()))

    def is_forced(self, row: dict[str, Any]) -> bool:
        """Whether a fork was given this token."""
        return (row["seq_id"], row["round"], row["token_id"]) in self._run.forced

    def text(self) -> str:
        """The emitted text, empty if a token's text is not known."""
        if self._own_text is not None:
            return self._own_text
        pieces = list(map(self.label, self.rows()))
        return b"".join(pieces).decode("utf-8", "replace") if all(pieces) else ""

    def partner(self, left: Sequence[_Text]) -> _Text | None:
        """The remaining sequence with the same prompt, first of those with the same sampler; None
        without one."""
        same = [one for one in left if one.has_prompt_of(self)]
        alike = [one for one in same if _sampled(one.asked) == _sampled(self.asked)]
        return next(iter([*alike, *same]), None)

    def has_prompt_of(self, other: _Text) -> bool:
        """Whether prompts are equal: by ids if both have them, else by text; if neither can be
        compared, by length. Different ids may stand for the same text with another model's
        tokenizer."""
        for mine, its in (
            (self._prompt_ids(), other._prompt_ids()),
            (_prompt_text(self.asked), _prompt_text(other.asked)),
        ):
            if mine is not None and its is not None:
                said = self._prompt_bytes()
                return mine == its or (said != b"" and said == other._prompt_bytes())
        begins = self._first_pos(), other._first_pos()
        return None in begins or begins[0] == begins[1]

    def _prompt_bytes(self) -> bytes:
        """The text of the prompt, empty if a token's is not known."""
        pieces = [self._run.store.pieces.get(one, b"") for one in self._prompt_ids() or ()]
        return b"".join(pieces) if all(pieces) else b""

    def _first_pos(self) -> int | None:
        """The position of the first emitted token, None if no token is known."""
        return None if self.emitted is None else int(self._tokens.column("pos")[self.emitted[0]])

    def _prompt_ids(self) -> list[int] | None:
        if self._prompt is None or len(self._prompt) != self._first_pos():
            return None
        ids: list[int] = self._tokens.column("token_id")[self._prompt].tolist()
        return ids

    def label(self, row: dict[str, Any]) -> bytes:
        """The bytes of a token."""
        token_id = row["token_id"]
        piece = self._run.store.pieces.get(token_id) if token_id is not None else None
        return row["text"].encode() if piece is None else piece

    def parting(self, row: dict[str, Any] | None, short: float | None) -> PartingToken:
        """The token at the mismatch; row is None after the end of the text."""
        if row is None:
            return PartingToken(None, "", None, None)
        rounds = RunColumns(self._run.store, "rounds", self._run.run_id, self.seq_id)
        before = rounds["round"][(rounds["rollback_depth"] > 0) & (rounds["round"] < row["round"])]
        return PartingToken(
            row["token_id"],
            self.label(row).decode("utf-8", "replace"),
            row["round"] if rounds.n else None,
            int(before[-1]) if len(before) else None,
            short,
        )

    def has_other_model(self, other: _Text) -> bool:
        """Whether the two runs are known to be of different models."""
        one, another = self._facts.model, other._facts.model
        if one is None or another is None:
            return False
        known = bool(one.get("sha256") and another.get("sha256"))
        return known and not same_model(one, another)

    def ended_by_itself(self) -> bool:
        """Whether the text ended with an end token."""
        return (self._facts.stops or [])[self.seq_id : self.seq_id + 1] == ["end"]

    @property
    def noise(self) -> float | None:
        """How far rounding may change a gap, by re-scoring."""
        return self._facts.rescored.noise if self._facts.rescored else None

    def is_choice(self, pos: int) -> bool | None:
        """Whether re-scoring found the token at a position to be the sampler's choice; None if it
        did not judge it, or an earlier token is not a choice."""
        rescored = self._facts.rescored
        for one in rescored.sequences if rescored else ():
            if one.seq_id != self.seq_id:
                continue
            if one.changed:
                return None if one.changed.pos < pos else one.changed.pos > pos
            return None if one.greedy is None else True
        return None

    def sampler(self) -> SamplerOptions | None:
        """Its sampler, None if unknown."""
        try:
            return request_sampling(self.asked.settings, (), _MOST_TOKENS)[0]
        except NotJudgedError:
            return None


def _sampled(asked: RequestFacts) -> tuple[Any, ...]:
    return tuple(asked.settings.get(name) for name in ("temperature", "seed"))


def _prompt_text(asked: RequestFacts) -> str | None:
    if asked.prompt is not None or not asked.messages:
        return asked.prompt
    return json.dumps(asked.messages, sort_keys=True)


def _is_same(a: _Text, row_a: dict[str, Any], b: _Text, row_b: dict[str, Any]) -> bool | None:
    """Whether two tokens are equal, None if unknown."""
    ids = row_a["token_id"], row_b["token_id"]
    if None not in ids and not a.has_other_model(b):  # their ids may stand for other texts
        return bool(ids[0] == ids[1])
    one, other = a.label(row_a), b.label(row_b)
    return one == other if one and other else None


def _compare_texts(a: _Text, b: _Text) -> TextPair:
    """Compare two sequences, one of which has no tokens."""
    texts, pair = (a.text(), b.text()), partial(TextPair, a.seq_id, b.seq_id, 0)
    n = n_common(*texts)
    shown = tuple(text[n : n + _SHOWN] for text in texts)
    if not all(texts):
        return pair(UNKNOWN, "Neither tokens nor text of one of them are known.")
    if not any(shown):
        return pair(SAME, f"All {n:,} common characters are equal.")
    reason = f"After {n:,} equal characters, one has {shown[0]!r}, the other {shown[1]!r}"
    if any(sampler is not None and sampler.temp > 0 for sampler in (a.sampler(), b.sampler())):
        return pair(DRAWN, f"{reason}; at this temperature, both can be sampled.")
    return pair(UNKNOWN, f"{reason}; without tokens, this cannot be checked.")


def _compare(a: _Text, b: _Text) -> TextPair:
    if a.emitted is None or b.emitted is None:
        return _compare_texts(a, b)
    rows_a, rows_b = a.rows(), b.rows()
    n = min(len(rows_a), len(rows_b))
    for i in range(n):
        same = _is_same(a, rows_a[i], b, rows_b[i])
        if same is None:
            reason = f"After {i} equal tokens, one token has neither an id nor a text."
            return TextPair(a.seq_id, b.seq_id, i, UNKNOWN, reason, rows_a[i]["pos"])
        if not same:
            return _parted(a, rows_a[i], b, rows_b[i], i)
    for rows, shorter in ((rows_a, b), (rows_b, a)):
        if len(rows) > n and shorter.ended_by_itself():
            ends = (rows[n] if shorter is b else None), (rows[n] if shorter is a else None)
            reason = f"After {n} equal tokens, only one text ends; the margin of that is not known."
            both = a.parting(ends[0], None), b.parting(ends[1], None)
            return TextPair(a.seq_id, b.seq_id, n, UNKNOWN, reason, rows[n]["pos"], *both)
    reason = f"All {n} common tokens are equal."
    return TextPair(a.seq_id, b.seq_id, n, SAME, reason)


def _parted(
    a: _Text, row_a: dict[str, Any], b: _Text, row_b: dict[str, Any], n_same: int
) -> TextPair:
    log_a, log_b = _log_p(row_a, row_b), _log_p(row_b, row_a)
    best = max((p for p in (_best(row_a), _best(row_b)) if p is not None), default=None)
    shorts = [None if best is None or p is None else best - p for p in (log_a, log_b)]
    gap = None if log_a is None or log_b is None else abs(log_a - log_b)
    noise = max((one for one in (a.noise, b.noise) if one is not None), default=None)
    samplers = [a.sampler(), b.sampler()]
    right = [a.is_choice(row_a["pos"]), b.is_choice(row_b["pos"])]
    for i, (sampler, short) in enumerate(zip(samplers, shorts, strict=True)):
        if right[i] is None and sampler and _is_argmax(sampler):
            right[i] = None if noise is None or short is None else short <= noise
    verdict, reason = _verdict(samplers, right, gap, noise)
    if a.is_forced(row_a) or b.is_forced(row_b):
        verdict, reason = FORCED, "The token was given to the fork (--force)."
    if a.has_other_model(b):
        verdict, reason = UNKNOWN, "The models differ, so the texts may differ too."
    reason = f"Token {n_same + 1} differs. {reason}"
    both = a.parting(row_a, shorts[0]), b.parting(row_b, shorts[1])
    return TextPair(a.seq_id, b.seq_id, n_same, verdict, reason, row_a["pos"], *both, gap, noise)


def _verdict(
    samplers: Sequence[SamplerOptions | None],
    right: Sequence[bool | None],
    gap: float | None,
    noise: float | None,
) -> tuple[str, str]:
    """Verdict and reason. right: per run, whether its token is the sampler's choice."""
    if False in right:
        which = "That of the second run" if right[0] is not False else "That of the first run"
        subject = "Neither" if right[0] is right[1] else which
        not_ = "" if subject == "Neither" else "not "
        return DIFFERENT, (f"{subject} is {not_}the target's choice, beyond rounding.")
    if any(sampler is None for sampler in samplers):
        return UNKNOWN, "The sampler settings of the two are not known."
    if any(sampler.temp > 0 for sampler in samplers if sampler):
        return DRAWN, "At this temperature, both can have been sampled."
    apart = "" if gap is None else f"The two logits differ by {gap:.2g}"
    if None not in right:
        moved = "" if noise is None else f", rounding changes that by up to {noise:.2g}"
        return NEAR_TIE, f"{apart}{moved}." if apart else "Rounding decides between the two."
    return UNKNOWN, (
        f"{apart}; the effect of rounding is not measured: re-score with the model."
        if apart
        else "The difference of the two logits is not known: re-score with the model."
    )


def _is_argmax(sampler: SamplerOptions) -> bool:
    """Whether the sampler is greedy: penalties and biases off, too."""
    plain = SamplerOptions(repeat_last_n=sampler.repeat_last_n)
    names = ("repeat_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    return sampler.temp <= 0 and all(getattr(sampler, n) == getattr(plain, n) for n in names)


def _log_p(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The target's log-probability of a row's token, from the row or from the top candidates of the
    other one at the same position."""
    p = row["target_p"]
    if p is None:
        tops = dict(zip(other["target_top_id"], other["target_top_p"], strict=True))
        p = tops.get(row["token_id"]) if row["token_id"] is not None else None
    return math.log(p) if p else None


def _best(row: dict[str, Any]) -> float | None:
    p = row["target_top_p"][0]
    return math.log(p) if p else None
