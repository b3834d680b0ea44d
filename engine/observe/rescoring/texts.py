"""The texts of a run as a model would read them, the requests they answer, and teacher forcing:
logits of a model along given texts, and how far rounding moves them.

A server's logits differ from ours: it rounds the inputs of products, keeps keys and values in half
precision, and adds in another order. So the text is decoded once more by models that round as the
run's engine does, with the jitter of a peer's noise lanes. Both of the two most probable tokens may
move by the largest change found, in opposite directions: a token whose logit is within twice that
of the best one is a near tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from engine.batch import Span
from engine.compare.lanes import JITTER, JITTER_ROUNDED
from engine.errors import DraftscopeError
from engine.gguf.binary import check_cancelled
from engine.long_work import ReportProgress
from engine.memory.hybrid import HybridMemory
from engine.memory.kv import AttentionKV
from engine.model.hybrid import HybridModel
from engine.model.memory import AttentionView
from engine.model.parts import CellKey
from engine.observe.rescoring.identity import is_observed
from engine.session import Session
from engine.trace.facts import RequestFacts, RunFacts
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_ref import rows_by_sequence
from engine.trace.store import TraceStore

_NAMES = {"temp": "temperature", "repetition_penalty": "repeat_penalty"}
"""Names of our sampler's options, and of vLLM's and SGLang's, that llama-server calls otherwise."""


def asked_of(facts: RunFacts, seq_id: int) -> RequestFacts:
    """The request of a sequence: its prompt or messages, and its settings as llama-server names
    them. facts: of its run, which may come from a file."""
    if (options := facts.options) is not None:
        sampler = asdict(options.sampler)
        settings = {_NAMES.get(name, name): value for name, value in sampler.items()}
        return RequestFacts(settings=settings | {"ignore_eos": options.ignore_eos})
    requests = facts.requests or []
    return _asked(requests[seq_id]) if seq_id < len(requests) else RequestFacts()


def _asked(request: RequestFacts) -> RequestFacts:
    """What was sent, and what the server reported of it."""
    prompt, messages = request.prompt, request.messages
    if prompt is not None and request.path.endswith("/responses"):
        prompt, messages = None, [{"role": "user", "content": prompt}]
    inner = request.settings.get("sampling_params")  # SGLang's
    sent = request.settings | (inner if isinstance(inner, dict) else {})
    settings = {_NAMES.get(name, name): value for name, value in sent.items()}
    settings |= request.generation_settings
    return RequestFacts(prompt=prompt, messages=messages, settings=settings)


@dataclass(frozen=True, slots=True)
class RescoredText:
    """One sequence as a model would read it.

    prompt: token ids. ids: of the tokens that follow it, in order; rows: the row of `tokens` of
    each; int64 [n] both. rejected_ids, rejected_rows: rejected draft tokens, and rejected_at: the
    index in ids of the position each was drafted for, ascending; int64 [m]. judged_rows, judged_at:
    the same of accepted and rejected draft tokens, one per position, whether or not their ids are
    known. asked: known facts of the request. gap: why no further tokens are known, one sentence;
    empty if the text is complete.
    """

    seq_id: int
    prompt: tuple[int, ...]
    ids: np.ndarray
    rows: np.ndarray
    rejected_ids: np.ndarray
    rejected_rows: np.ndarray
    rejected_at: np.ndarray
    judged_rows: np.ndarray
    judged_at: np.ndarray
    asked: RequestFacts
    gap: str = ""


_NO_ROWS = np.zeros(0, np.int64)


class TextReader:
    """Reads the texts of one run. Prompts and tokens that the trace has only as text are mapped to
    ids with a session's vocabulary."""

    def __init__(self, session: Session, store: TraceStore, run_id: int) -> None:
        self._session = session
        self._table, self._n = store.tokens, len(store.tokens)
        self._emitted = rows_by_sequence(store, run_id, EMITTED_KINDS)
        self._prompts = rows_by_sequence(store, run_id, ("prompt",))
        self._rejected = rows_by_sequence(store, run_id, ("rejected",))
        self._judged = rows_by_sequence(store, run_id, ("accepted", "rejected"))
        self._facts = store.runs[run_id]

    def texts(self) -> list[RescoredText]:
        """The sequences that emitted tokens."""
        return [self._text(seq_id, rows) for seq_id, rows in self._emitted.items()]

    def _column(self, name: str, rows: np.ndarray) -> np.ndarray:
        values: np.ndarray = self._table.column(name, 0, self._n)[rows]
        return values

    def _text(self, seq_id: int, rows: np.ndarray) -> RescoredText:
        asked = asked_of(self._facts, seq_id)
        pos, ids = self._column("pos", rows), self._ids(rows)
        first = int(pos[0])
        prompt, gap = self._prompt(seq_id, first, asked)
        n = 0 if gap else len(rows)
        if not (is_next := pos[:n] == first + np.arange(n)).all():
            n = int(is_next.argmin())
            gap = f"The token at position {first + n} is not in the trace."
        wrong = np.flatnonzero(~self._is_known(ids[:n]))
        if len(wrong):
            n = int(wrong[0])
            what = "is not known" if ids[n] == MISSING else f"{ids[n]} is outside the vocabulary"
            gap = f"The id of the token at position {first + n} {what}."
        rejected = self._rejected.get(seq_id, _NO_ROWS)
        at, refused = self._column("pos", rejected) - first, self._column("token_id", rejected)
        there = np.flatnonzero((at >= 0) & (at < n) & self._is_known(refused))
        there = there[np.argsort(at[there], kind="stable")]
        return RescoredText(
            seq_id,
            prompt,
            ids[:n],
            rows[:n],
            refused[there],
            rejected[there],
            at[there],
            *self._judged_places(seq_id, first, n),
            asked,
            gap,
        )

    def _judged_places(self, seq_id: int, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of draft tokens that were judged at the first n positions, and those positions."""
        rows = self._judged.get(seq_id, _NO_ROWS)
        rows = rows[self._column("draft_index", rows) >= 0]
        at, order = np.unique(self._column("pos", rows) - first, return_index=True)
        there = (at >= 0) & (at < n)
        return rows[order][there], at[there]

    def _is_known(self, ids: np.ndarray) -> np.ndarray:
        known: np.ndarray = (ids >= 0) & (ids < self._session.config.n_vocab)
        return known

    def _prompt(self, seq_id: int, n: int, asked: RequestFacts) -> tuple[tuple[int, ...], str]:
        """The n ids before the first emitted token, or why they are not known."""
        rows = self._prompts.get(seq_id, _NO_ROWS)
        ids, pos = self._column("token_id", rows), self._column("pos", rows)
        if n and len(ids) == n and np.array_equal(pos, np.arange(n)) and self._is_known(ids).all():
            return tuple(ids.tolist()), ""
        if len(ids) and int(pos[0]) > 0:
            what = f"Its first {pos[0]} prompt tokens came from the cache"
            return (), f"{what} and are not in the trace."
        try:
            text = asked.prompt
            if text is None and asked.messages and self._session.chat:
                text = self._session.chat.render(asked.messages)
        except DraftscopeError as error:
            return (), f"Its prompt is not known: {error.message}"
        if text is None:
            foreign = ids[ids >= self._session.config.n_vocab].tolist()
            what = f"has token {foreign[0]}, outside the vocabulary" if foreign else "is not known"
            return (), f"Its prompt {what}."
        found = self._session.prompt(text).tokens
        if n and len(found) != n:
            return (), (f"Its prompt has {len(found)} tokens in this vocabulary, {n} in the run.")
        return found, ""

    def _ids(self, rows: np.ndarray) -> np.ndarray:
        """Ids of tokens; a token known only by its text gets an id if exactly one token has that
        text. The whole text is never tokenized again: that could give other tokens."""
        ids = self._column("token_id", rows).copy()
        for i in np.flatnonzero(ids == MISSING).tolist():
            row = int(rows[i])
            (text,) = self._table.texts("text", row, row + 1)
            found = self._session.tokenizer.ids_of_piece(text.encode()) if text else ()
            if len(found) == 1:
                ids[i] = found[0]
        return ids


_LONGEST_PASS = 512
_MOST_LOGITS = 1 << 26
"""Most bytes of logits per pass: statistics over them take several times as much."""
_SEEDS = (1, 2, 3)
_ENOUGH = 4096
"""Positions after which no further texts are measured: by then the largest change has occurred."""
_FINE = 3
"""The seed jittered only as much as sums differ, as in engine.compare.peer_lane."""


class HalfCells(AttentionKV):
    """An attention cache whose keys and values are rounded to half precision, a server's
    default."""

    def update(
        self, layer: CellKey, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> AttentionView:
        """Write this ubatch's keys and values [n_seqs, n_seq_tokens, n_heads, dim]."""
        return super().update(layer, _rounded(k), v if v is None else _rounded(v))

    def places(self, layer: CellKey) -> None:
        """None: every write must be rounded."""


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    return rows.half().to(rows.dtype)


class Teacher:
    """Decodes texts of up to n_tokens tokens with several models that share vocabulary and layers.
    half: those with rounded attention cells."""

    def __init__(
        self, models: Sequence[HybridModel], n_tokens: int, half: Sequence[HybridModel] = ()
    ) -> None:
        self._models = [*models, *half]
        config = models[0].config
        self._memories = [
            HybridMemory.for_model(config, 1, n_tokens, model.device) for model in self._models
        ]
        for memory in self._memories[len(models) :]:
            cells = memory.attention
            memory.attention = HalfCells(cells.layers, 1, n_tokens, cells.device)
        self._n_pass = max(1, min(_LONGEST_PASS, _MOST_LOGITS // (4 * config.n_vocab)))

    @torch.inference_mode()
    def rows(
        self, tokens: Sequence[int], first: int = 0
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """For each part of a text: the index of its first row, and per model the logits [n,
        n_vocab] that follow the tokens from that index on. Rows before `first` are skipped."""
        for memory in self._memories:
            memory.clear(0)
        start = 0
        while start < len(tokens):
            n = _LONGEST_PASS if start + _LONGEST_PASS <= first else self._n_pass
            stop = min(start + n, len(tokens))
            wanted = range(min(max(first - start, 0), stop - start), stop - start)
            span = Span(0, start, tokens[start:stop], wanted)
            yield (
                start + wanted.start,
                [
                    self._decode(model, memory, span)
                    for model, memory in zip(self._models, self._memories, strict=True)
                ],
            )
            start = stop

    def _decode(self, model: HybridModel, memory: HybridMemory, span: Span) -> torch.Tensor:
        parts = [
            model.forward(ubatch, memory).logits
            for ubatch in memory.split([span], len(span.tokens), "equal")
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def noise_of_gaps(
    session: Session,
    facts: RunFacts,
    texts: Sequence[Sequence[int]],
    progress: ReportProgress,
    cancelled: Callable[[], bool],
) -> float:
    """How far rounding may change the gap between the two best logits, over all positions of the
    texts, or of the first few.

    facts: of the run whose tokens are judged. Raises Cancelled, and what loading a model raises.
    """
    n_before = np.cumsum([0, *map(len, texts)])
    texts = [text for text, n in zip(texts, n_before.tolist(), strict=False) if n < _ENOUGH]
    models, n_longest = _models_like(session, facts), max(map(len, texts))
    if is_observed(facts):
        teacher = Teacher([session.model], n_longest, half=models)
    else:
        teacher = Teacher([session.model, *models], n_longest)
    worst = 0.0
    total = sum(map(len, texts))
    done = 0
    for tokens in texts:
        for _, (mine, *others) in teacher.rows(tokens):
            check_cancelled(cancelled)
            best = torch.topk(mine, 2)
            for logits in others:
                moved = logits.to(mine.device).gather(1, best.indices) - best.values
                worst = max(worst, float(moved.abs().max()))
            done += len(mine)
            progress(done, total, "measuring the effect of rounding")
    return 2 * worst


def _models_like(session: Session, facts: RunFacts) -> list[HybridModel]:
    """Models with the arithmetic of the run's engine, with different small jitters."""
    if not is_observed(facts):
        compute = facts.compute or session.compute
        model = session.model_in(compute)
        jitters = [JITTER.get(model.compute, JITTER_ROUNDED)] * len(_SEEDS)
    else:
        model = session.model_as_llama_cpp()
        rounds = set(session.info.quant_mix) != {"F32"}
        fine = JITTER["f32"]
        jitters = [JITTER_ROUNDED if rounds and seed != _FINE else fine for seed in _SEEDS]
    return [model.jittered(amount, seed) for amount, seed in zip(jitters, _SEEDS, strict=True)]
