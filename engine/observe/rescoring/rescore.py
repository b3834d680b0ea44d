"""Re-scoring: the tokens of a run of any engine, judged by this one on the same file.

Prompt and emitted tokens are decoded once: the logits at a token's position give the target's
probability and rank of it, and whether the request's sampler could have chosen it. If it could not,
and neither noise nor a lossy acceptance rule explains that, speculation has changed the text. The
acceptance that the rule predicts is counted by draft position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from engine.analysis.acceptance.accept_rules import AcceptRule, rule_of
from engine.analysis.acceptance.breakdown import Judged, TokenShare
from engine.analysis.findings.check import record_findings
from engine.decode.recorder import TargetFacts, target_facts
from engine.errors import OptionError, UnsupportedModelError
from engine.gguf.binary import check_cancelled, never
from engine.long_work import ReportProgress
from engine.observe.rescoring.identity import DIFFERENT, UNKNOWN, Identity, by_text, identify
from engine.observe.rescoring.request_sampler import (
    EmittedJudge,
    NotJudgedError,
    RequestSampling,
    request_sampling,
)
from engine.observe.rescoring.texts import RescoredText, Teacher, TextReader, noise_of_gaps
from engine.sampling.distribution import Distribution
from engine.session import Session
from engine.trace.facts import ChangedToken, RescoredSequence
from engine.trace.records import MISSING, N_TOP, ColumnState
from engine.trace.run_ref import RunRef
from engine.trace.store import Table, TraceStore
from engine.trace.writer import TraceWriter, this_engine

_COLUMNS = ("target_p", "target_rank", "target_entropy", "target_top_id", "target_top_p")
"""The columns of `tokens` that are filled."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """The result, fact `rescored` of the run. compute: of our engine. noise: of the gap between two
    logits, None if no token was in doubt. identity: whether it is the same model. rule: acceptance
    rule; is_rule_known: whether anything names it, else `match` is assumed. acceptance: by draft
    position, of judged tokens; expected: what the rule predicts, None if its inputs are not all
    known; for `rejection` the sum of min(p, q)."""

    run_id: int
    by: str
    compute: str
    model: dict[str, Any]
    identity: Identity
    noise: float | None
    sequences: tuple[RescoredSequence, ...]
    rule: str = ""
    is_rule_known: bool = False
    acceptance: tuple[TokenShare, ...] = ()

    @property
    def n_tokens(self) -> int:
        return sum(one.n_tokens for one in self.sequences)

    @property
    def n_first(self) -> int:
        """Tokens of rank 1."""
        return sum(one.n_first for one in self.sequences)

    @property
    def n_changed(self) -> int:
        """Tokens that the target does not choose."""
        return sum(one.n_changed for one in self.sequences)


class NothingToRescoreError(OptionError):
    """No token of a run can be re-scored."""


class SameModelUnknownError(OptionError):
    """Whether a run is of the opened model is not known: the user must decide."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """The scores of one text. emitted, rejected: facts of its tokens. gaps, top2_gaps, shorts: as
    in ChangedToken, [n]; shorts is None if the tokens cannot be judged, for the reason in `why`.
    leeway: what a lossy rule allows of each of the shorts. drawn: the sampler's distribution at
    each place of text.judged_at, empty if unknown."""

    text: RescoredText
    emitted: TargetFacts
    rejected: TargetFacts
    gaps: list[float]
    top2_gaps: list[float]
    shorts: list[float] | None
    sampling: RequestSampling | None
    why: str
    leeway: np.ndarray
    drawn: list[Distribution]

    def of_model(self, noise: float | None) -> list[float]:
        """The shorts that show whether it is the same model: 0 where noise explains them; tokens
        that a lossy rule explains are left out."""
        pairs = zip(self.shorts or (), self.is_changed(noise), strict=True)
        within = noise or 0.0
        return [short if is_one else 0.0 for short, is_one in pairs if is_one or short <= within]

    def is_changed(self, noise: float | None) -> np.ndarray:
        """Which tokens neither the sampler nor a lossy rule can have chosen, bool [n]."""
        shorts = np.array(self.shorts or (), float)
        return ~(shorts <= self.leeway[: len(shorts)] + (noise or 0.0))


def rescore(
    session: Session,
    store: TraceStore,
    run_id: int,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] = never,
    *,
    identity: Identity | None = None,
    assume_same: bool = False,
    rule: AcceptRule | None = None,
) -> Rescored:
    """Fill the empty target columns of a run's tokens, and judge every token.

    identity: known result of whether the run is of this model; None: decided by its facts and its
    text. assume_same: assume so if that is not known. rule: of acceptance, None: as the run's facts
    name it. Call it in the thread that writes the store. Raises UnsupportedModelError for another
    model, SameModelUnknownError, NothingToRescoreError, Cancelled; nothing is written then.
    """
    facts, report = store.runs[run_id], progress or (lambda *_: None)
    identity = identity or identify(session, facts)
    check_same(identity)
    texts = TextReader(session, store, run_id).texts()
    known = [text for text in texts if len(text.ids)]
    if not known:
        why = texts[0].gap if texts else "The run has emitted no token."
        raise NothingToRescoreError(
            f"No token of run {run_id} can be re-scored. {why}",
            "Choose another run or model, or record its prompt (`draftscope observe URL -p TEXT`).",
        )
    known_rule = rule or rule_of(facts)
    rule = known_rule or AcceptRule()
    scores = _score(session, store, known, rule, report, cancelled)
    noise = None
    if doubted := [one for one in scores if any(not short <= 0 for short in one.shorts or ())]:
        whole = [[*one.text.prompt, *one.text.ids.tolist()] for one in doubted]
        noise = noise_of_gaps(session, facts, whole, report, cancelled)
    if identity.verdict == UNKNOWN:
        identity = by_text([short for one in scores for short in one.of_model(noise)])
        check_same(identity)
    found = {one.text.seq_id: _sequence(store, one, noise) for one in scores}
    if identity.verdict == UNKNOWN and not assume_same:
        raise SameModelUnknownError(
            f"Whether run {run_id} is of {session.identity['name']} is not known: "
            f"{identity.reason}{_first_changed(session, found.values())}",
            "If it is the same, use --assume-same; else choose another model.",
        )
    for text in texts:
        found.setdefault(text.seq_id, RescoredSequence(text.seq_id, gap=text.gap))
    result = Rescored(
        run_id,
        f"{this_engine().engine} {this_engine().version}",
        session.compute,
        session.identity,
        identity,
        noise,
        tuple(found.values()),
        rule.text,
        known_rule is not None,
        _acceptance(RunRef(store, run_id), scores, rule),
    )
    _write(store, run_id, result, scores, session, rule)
    return result


def _first_changed(session: Session, sequences: Iterable[RescoredSequence]) -> str:
    """A sentence on the first token that the model does not choose, with a space in front."""
    for one in sequences:
        if token := one.changed:
            piece = session.tokenizer.piece(token.token_id).decode("utf-8", "replace")
            return (
                f" The first is {piece!r} at position {token.pos} of sequence {one.seq_id}, "
                f"round {token.round}, of rank {token.rank:,}."
            )
    return ""


def check_same(identity: Identity) -> None:
    """Raises UnsupportedModelError for another model."""
    if identity.verdict == DIFFERENT:
        raise UnsupportedModelError(
            f"The run used another model: {identity.reason}", "Open the model file of the run."
        )


def _score(
    session: Session,
    store: TraceStore,
    texts: Sequence[RescoredText],
    rule: AcceptRule,
    report: ReportProgress,
    cancelled: Callable[[], bool],
) -> list[_Scores]:
    """Decode every text once."""
    lengths = [len(text.prompt) + len(text.ids) for text in texts]
    teacher, found = Teacher([session.model], max(lengths)), []
    of_rule = list(map(store.text_pool.find, _OF_RULE))
    for text, before in zip(texts, np.cumsum([0, *lengths]).tolist(), strict=False):

        def look(row: int, before: int = before) -> None:
            check_cancelled(cancelled)
            report(before + row, sum(lengths), "re-scoring")

        is_of_rule = np.isin(store.tokens.column("kind")[text.rows], of_rule)
        leeway = np.where(is_of_rule, rule.leeway, 0.0)
        found.append(_score_text(session, teacher, text, leeway, look))
    return found


_OF_RULE = ("accepted", "unknown")
"""Kinds of tokens that a rule may have accepted."""


def _score_text(
    session: Session,
    teacher: Teacher,
    text: RescoredText,
    leeway: np.ndarray,
    look: Callable[[int], None],
) -> _Scores:
    n_prompt, ids = len(text.prompt), text.ids.tolist()
    sampling, why = None, ""
    more = session.tokenizer.eog_ids, session.config.n_vocab
    try:
        sampling = request_sampling(text.asked.settings, *more)
    except NotJudgedError as error:
        why = str(error)
    judge = EmittedJudge(sampling, text.prompt) if sampling else None
    drawing = EmittedJudge(sampling, text.prompt) if sampling else None
    drawn: list[Distribution] = []
    emitted: list[TargetFacts] = []
    rejected: list[TargetFacts] = []
    gaps: list[float] = []
    top2_gaps: list[float] = []
    shorts: list[float] = []
    for row, (logits,) in teacher.rows([*text.prompt, *ids[:-1]], n_prompt - 1):
        look(row + len(logits))
        if not len(logits):
            continue
        start = row - (n_prompt - 1)
        stop = start + len(logits)
        tokens = ids[start:stop]
        emitted.append(target_facts(logits, tokens))
        first, last = np.searchsorted(text.rejected_at, (start, stop)).tolist()
        refused = text.rejected_ids[first:last].tolist()
        at = (text.rejected_at[first:last] - start).tolist()
        rejected.append(target_facts(logits, refused, at))
        best = torch.topk(logits, 2).values
        wanted = torch.tensor(tokens, device=logits.device).unsqueeze(1)
        gaps += (best[:, 0] - logits.gather(1, wanted)[:, 0]).tolist()
        top2_gaps += (best[:, 0] - best[:, 1]).tolist()
        if judge and drawing:
            shorts += judge.shortfalls(logits, tokens)
            first, last = np.searchsorted(text.judged_at, (start, stop)).tolist()
            places = (text.judged_at[first:last] - start).tolist()
            drawn += drawing.distributions(logits, tokens, places)
    return _Scores(
        text,
        _joined(emitted),
        _joined(rejected),
        gaps,
        top2_gaps,
        shorts if judge else None,
        sampling,
        why,
        leeway,
        drawn,
    )


def _joined(parts: Sequence[TargetFacts]) -> TargetFacts:
    names = TargetFacts.__dataclass_fields__
    return TargetFacts(*([one for part in parts for one in getattr(part, name)] for name in names))


def _sequence(store: TraceStore, scores: _Scores, noise: float | None) -> RescoredSequence:
    ranks, shorts = scores.emitted.rank, scores.shorts or []
    doubtful = [i for i, short in enumerate(shorts) if not short <= 0]
    changed = np.flatnonzero(scores.is_changed(noise)).tolist()
    n_near = sum(shorts[i] <= (noise or 0.0) for i in doubtful)
    return RescoredSequence(
        scores.text.seq_id,
        len(ranks),
        sum(rank == 1 for rank in ranks),
        scores.sampling[0].temp <= 0 if scores.sampling else None,
        scores.why,
        n_near,
        len(doubtful) - len(changed) - n_near,
        len(changed),
        _changed(store, scores, changed[0], shorts[changed[0]]) if changed else None,
        scores.text.gap,
    )


def _changed(store: TraceStore, scores: _Scores, i: int, short: float) -> ChangedToken:
    facts, row = scores.emitted, store.tokens.row(int(scores.text.rows[i]))
    return ChangedToken(
        row["round"],
        row["pos"],
        int(scores.text.ids[i]),
        row["kind"],
        facts.rank[i],
        facts.prob[i],
        facts.top_ids[i][0],
        facts.top_probs[i][0],
        scores.gaps[i],
        scores.top2_gaps[i],
        short,
    )


def _acceptance(run: RunRef, scores: Sequence[_Scores], rule: AcceptRule) -> tuple[TokenShare, ...]:
    """Accepted tokens of those judged, by draft position. If not all can be predicted, only those
    with known candidates: a log with only some of the rounds does not select them by outcome."""
    judged, tokens = Judged.of(run), run.store.tokens
    rows = np.concatenate([one.text.judged_rows for one in scores])
    chances = np.concatenate([_chances(run.store, one, rule) for one in scores], 1)
    at = (tokens.column(name)[rows].tolist() for name in ("seq_id", "pos"))
    number = {place: i for i, place in enumerate(zip(*at, strict=True))}
    places = zip(judged.seq.tolist(), judged.pos.tolist(), strict=True)
    of = np.array([number.get(place, -1) for place in places], np.int64)
    found = np.full((2, len(of)), np.nan)
    found[:, of >= 0] = chances[:, of[of >= 0]]
    is_told = np.zeros(len(of), bool)
    is_told[of >= 0] = np.isfinite(tokens.column("draft_top_p")[rows[of[of >= 0]], 0])
    if np.isnan(found[0]).any() and is_told.any():
        found, judged = found[:, is_told], Judged(*(one[is_told] for one in judged))
    shares = []
    for i in range(int(judged.place.max(initial=-1)) + 1):
        mine = judged.place == i
        least, most = (float(one[mine].mean()) if mine.any() else np.nan for one in found)
        known = (None, None) if np.isnan(least) else (least, most)
        shares.append(TokenShare(int(mine.sum()), int(judged.accepted[mine].sum()), *known))
    return tuple(shares)


def _chances(store: TraceStore, scores: _Scores, rule: AcceptRule) -> np.ndarray:
    """Least and greatest probability that the rule accepts the draft at each judged place, [2, m];
    NaN if unknown. For a sampling drafter the mean over all drafts that it may draw."""
    rows, tokens = scores.text.judged_rows, store.tokens
    found = np.full((2, len(rows)), np.nan)
    if not scores.drawn:
        return found
    p, q = _of_rule(store, scores, rule)
    place = tokens.column("draft_index")[rows]
    of_rows = [*scores.text.rows.tolist(), *scores.text.rejected_rows.tolist()]
    known = dict(zip(of_rows, scores.emitted.ratios + scores.rejected.ratios, strict=True))
    found[:] = rule.chance(p, q, place, np.array([known.get(i, np.nan) for i in rows.tolist()]))
    if not rule.draws:
        return found
    ids, probs = (tokens.column(name)[rows] for name in ("draft_top_id", "draft_top_p"))
    before = rule.carried(p, q, place)
    for i, drawn in enumerate(scores.drawn):
        there = ids[i] != MISSING
        if not there.any() or not np.isfinite(probs[i][there]).all():
            continue
        of_target = np.array([drawn.of(int(token)) for token in ids[i][there]])
        found[:, i] = rule.expected(of_target, probs[i][there].astype(float), before[i])
    return found


def _of_rule(store: TraceStore, scores: _Scores, rule: AcceptRule) -> tuple[np.ndarray, np.ndarray]:
    """p and q of the drafted token at each judged place, [m], NaN if unknown."""
    rows, tokens = scores.text.judged_rows, store.tokens
    ids = tokens.column("token_id")[rows].tolist()
    pairs = zip(ids, scores.drawn, strict=True)
    p = np.array([np.nan if token == MISSING else drawn.of(token) for token, drawn in pairs])
    q = tokens.column("draft_p")[rows] if rule.draws else np.full(len(rows), np.nan)
    # sampled drafts of the trace's own engine have q
    own = tokens.column("rule_q")[rows]
    return p, np.where(np.isnan(own), q, own)


def _write(
    store: TraceStore,
    run_id: int,
    result: Rescored,
    scores: Sequence[_Scores],
    session: Session,
    rule: AcceptRule,
) -> None:
    """Fill the rows, add the result to the run's facts, and apply the rules."""
    session.files.check()  # the result is void if weights were overwritten meanwhile
    writer, tokens = TraceWriter(store, run_id), store.tokens
    derived = set(_COLUMNS)
    for one in scores:
        text = one.text
        derived &= {name for name in _COLUMNS if not _is_observed(tokens, name, text.rows)}
        writer.learn(text.ids.tolist(), session.tokenizer.piece)
        tokens.fill(text.rows, {"token_id": text.ids})
        for rows, facts in ((text.rows, one.emitted), (text.rejected_rows, one.rejected)):
            for top in facts.top_ids:
                writer.learn(top, session.tokenizer.piece)
            tokens.fill(rows, _columns(facts))
        if one.drawn and not _is_observed(tokens, "rule_p", text.judged_rows):
            of_rule = zip(("rule_p", "rule_q"), _of_rule(store, one, rule), strict=True)
            tokens.fill(text.judged_rows, dict(of_rule))
            derived |= {"rule_p", "rule_q"}
    states = dict(writer.facts.columns or {})
    more: dict[str, ColumnState] = dict.fromkeys(sorted(derived), "derived")
    states["tokens"] = states.get("tokens", {}) | more
    writer.set_facts(columns=states, rescored=asdict(result))
    if result.is_rule_known:
        writer.set_facts(accept_rule=result.rule)
    record_findings(store, [run_id])


def _is_observed(table: Table, name: str, rows: np.ndarray) -> bool:
    values = table.column(name)[rows]
    is_real = values.dtype.kind == "f"
    return bool((~np.isnan(values) if is_real else values != MISSING).any())


def _columns(facts: TargetFacts) -> dict[str, np.ndarray | list[Any]]:
    n = len(facts.rank)
    top_ids = np.full((n, N_TOP), MISSING, np.int32)
    top_p = np.full((n, N_TOP), np.nan, np.float32)
    for i, (ids, probs) in enumerate(zip(facts.top_ids, facts.top_probs, strict=True)):
        top_ids[i, : len(ids)], top_p[i, : len(probs)] = ids, probs
    values = (facts.prob, facts.rank, facts.entropy, top_ids, top_p)
    return dict(zip(_COLUMNS, values, strict=True))
