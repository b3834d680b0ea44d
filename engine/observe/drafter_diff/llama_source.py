"""llama.cpp's library as a source of drafts: target and drafter decode in a process of their own,
round by round as its server does (common/speculative.cpp of 0c1e570), through the C interface. The
rows that the target hands over are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from engine.batch import Span
from engine.compare import peer_lane
from engine.compare.llama_cpp import WHOLE
from engine.compare.llama_process import LlamaEngine
from engine.errors import OptionError, RollbackRefusedError
from engine.model.drafters.config import DRAFT_SIMPLE
from engine.model.hybrid import HybridModel
from engine.model.mixers import layout_of
from engine.model.tensors import DRAFT_MTP
from engine.observe.rounds.log_rounds import LogRound
from engine.observe.rounds.stream_rounds import ObservedRound, StreamedToken
from engine.observe.rounds.trace_rows import PromptPart, ReadyRow, RowWriter
from engine.observe.rounds.withheld_tokens import PlaneReach
from engine.options import Prompt, RunOptions
from engine.options.llama_cpp import LlamaSettings
from engine.sampling.sampler import Sampler
from engine.session import Session
from engine.trace.facts import SourceFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

_WIDTH = 512
_N_CANDIDATES = 10
"""Candidates of the drafter's probabilities: its sampler is top-k alone."""

_Top = tuple[tuple[int, float], ...]


class _Memory:
    """The single sequence of a context. saves: roll back with whole copies, if there are states and
    snapshots do not reach."""

    def __init__(self, engine: LlamaEngine, number: int, *, saves: bool) -> None:
        self.engine, self.number = engine, number
        self.tokens: list[int] = []
        self._saves, self._saved = saves, (0, b"")

    def save(self) -> None:
        if self._saves:
            self._saved = len(self.tokens), self.engine.save(self.number, 0, WHOLE)

    def decode(
        self, tokens: Sequence[int], n_outputs: int, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Logits float32 [n_outputs, n_vocab] of the last of at most _WIDTH tokens."""
        n = len(tokens)
        span = Span(0, len(self.tokens), list(tokens), range(n - n_outputs, n))
        self.tokens += tokens
        if rows is None:
            return self.engine.decode(self.number, [span])
        return self.engine.decode_mtp(self.number, span, rows)

    def back_to(self, n: int) -> str:
        """Roll back to n tokens. Returns how. Raises RollbackRefusedError."""
        if n == len(self.tokens):
            return "none"
        again, self.tokens = self.tokens[:n], self.tokens[:n]
        if self.engine.seq_rm(self.number, 0, n):
            return "seq_rm"
        at, blob = self._saved
        if not blob:
            raise RollbackRefusedError(
                f"llama.cpp refused to remove tokens after position {n - 1}.", "Use another build."
            )
        self.engine.load(self.number, 0, blob, WHOLE)
        self.tokens = again[:at]
        if again[at:]:
            self.decode(again[at:], 0)
        return "restore"


class _Drafter:
    """An MTP block, which reads rows of the target, or a draft model, which reads none."""

    def __init__(self, memory: _Memory, n_vocab: int, p_min: float, n_row: int) -> None:
        self._memory, self._n_vocab, self._p_min = memory, n_vocab, p_min
        self._row = np.zeros((1, n_row), np.float32) if n_row else None

    @property
    def reads_rows(self) -> bool:
        return self._row is not None

    def take(self, pos0: int, tokens: Sequence[int], rows: np.ndarray | None) -> None:
        """Decode the target's tokens from pos0 on, at most _WIDTH, with their rows: each entry
        reads the row of the previous position."""
        self._memory.back_to(pos0)
        before = None
        if rows is not None and self._row is not None:
            before = np.concatenate([self._row, rows[:-1]])
            self._row = rows[-1:]
        self._memory.decode(tokens, 0, before)

    def draft(self, token: int, n: int) -> list[_Top]:
        """Candidates of at most n tokens after the newest one, the drafted token first."""
        memory, row, found = self._memory, self._row, list[_Top]()
        memory.save()
        while len(found) < n:
            logits = memory.decode([token], 1, row)[0]
            if row is not None:
                row = memory.engine.nextn(memory.number, 1)
            top = _best(logits[: self._n_vocab])
            if top[0][1] < self._p_min:
                break
            found.append(top)
            token = top[0][0]
        return found


def _best(logits: np.ndarray) -> _Top:
    ids = np.argsort(-logits, kind="stable")[:_N_CANDIDATES]
    mass = np.exp(logits[ids].astype(np.float64) - logits[ids[0]])
    return tuple(zip(ids.tolist(), (mass / mass.sum()).tolist(), strict=True))


def decode_with_llama(
    session: Session,
    library: Path | None,
    prompt: Prompt,
    options: RunOptions,
    store: TraceStore,
    draft: Path | None = None,
) -> tuple[RunRef, np.ndarray | None]:
    """A run of a llama.cpp build, and float32 [n, n_embd]: for each position the row that the
    target gave the drafter for the next entry; None for a drafter without rows.

    library: as for find_build. options: drafter (draft-mtp, draft-simple), n_max, p_min, sampler,
    n_predict. draft: its file, None for the model's own MTP block. Raises OptionError for another
    drafter, and as LlamaEngine does.
    """
    (name,) = options.spec.types or ("none",)
    if name not in (DRAFT_MTP, DRAFT_SIMPLE) or (name == DRAFT_SIMPLE and draft is None):
        raise OptionError(
            f"llama.cpp as a library does not work with {name} here.",
            "Use --spec-type draft-mtp, draft-simple with -md, or llama-server.",
        )
    settings = LlamaSettings(load_mtp=name == DRAFT_MTP)
    engine = peer_lane.open_llama(session.unchanged_path(), library, settings)
    beside: LlamaEngine | None = None
    try:
        n_ctx = len(prompt.tokens) + options.n_predict + options.spec.n_max + 8
        threads = torch.get_num_threads()
        number, planes = engine.open_context(1, n_ctx, _WIDTH, options.spec.n_max, threads)
        target = _Memory(engine, number, saves=layout_of(session.config) is not None and not planes)
        if name == DRAFT_MTP:
            model = engine.add_model(draft) if draft else None
            number, _ = engine.open_context(
                1, n_ctx, _WIDTH, 0, threads, mtp_of=target.number, model=model
            )
            memory, n_row = _Memory(engine, number, saves=False), session.config.n_embd
        else:
            assert draft is not None
            beside = peer_lane.open_llama(draft, library, LlamaSettings())
            number, _ = beside.open_context(1, n_ctx, _WIDTH, 0, threads)
            its_model = session.drafts[name]
            assert isinstance(its_model, HybridModel)
            has_states = layout_of(its_model.config) is not None
            memory, n_row = _Memory(beside, number, saves=has_states), 0
        drafter = _Drafter(memory, session.config.n_vocab, options.spec.p_min, n_row)
        facts = {
            "options": asdict(options),
            "compute": engine.version(),
            "model": session.identity,
            "architecture": session.config.architecture,
            "n_ctx": n_ctx,
            "n_rs_seq": planes,
            "threads": threads,
        }
        writer = TraceWriter.begin(store, SourceFacts("llama.cpp", engine.version()), facts)
        handed = _decoded(session, target, drafter, prompt, options, writer)
    finally:
        for one in (engine, beside):
            if one is not None:
                one.close()
    return RunRef(store, writer.run_id), np.concatenate(handed) if handed else None


def _decoded(
    session: Session,
    target: _Memory,
    drafter: _Drafter,
    prompt: Prompt,
    options: RunOptions,
    writer: TraceWriter,
) -> list[np.ndarray]:
    """Write the rounds; returns the rows handed over."""
    eog, tokens, n_prompt = session.tokenizer.eog_ids, list(prompt.tokens), len(prompt.tokens)
    sampler = Sampler(options.sampler, eog if options.ignore_eos else (), prompt.tokens)
    rows, handed = RowWriter(writer, PlaneReach(), session.tokenizer), []
    rows.drafters = list(options.spec.types)

    def verified(batch: Sequence[int], n_outputs: int) -> tuple[torch.Tensor, np.ndarray | None]:
        logits = torch.from_numpy(target.decode(batch, n_outputs))
        if not drafter.reads_rows:
            return logits, None
        return logits, target.engine.nextn(target.number, len(batch))

    def take(pos0: int, kept: Sequence[int], of: np.ndarray | None) -> None:
        if of is not None:
            of = of[: len(kept)]
            handed.append(of)
        drafter.take(pos0, kept, of)

    for at in range(0, n_prompt, _WIDTH):
        part = tokens[at : at + _WIDTH]
        logits, own = verified(part, 1)
        take(at, part, own)
    chosen = [sampler.draw(sampler.rows(logits)(0))]
    none = ObservedRound(0.0, 0.0, 0, 0, 1, tuple(map(StreamedToken, chosen)), "none")
    whole = PromptPart(0, n_prompt, None, 0.0)
    rows.write(ReadyRow(None, 0, n_prompt, none, whole, prompt.tokens))
    emitted = chosen
    while (n_left := options.n_predict - len(emitted)) > 0 and emitted[-1] not in eog:
        pos = n_prompt + len(emitted) - 1
        tops = drafter.draft(emitted[-1], min(options.spec.n_max, n_left - 1))
        drafted = [top[0][0] for top in tops]
        target.save()
        logits, own = verified([emitted[-1], *drafted], 1 + len(drafted))
        choose, chosen = sampler.rows(logits), []
        for i, token in enumerate([*drafted, -1]):
            chosen.append(sampler.draw(choose(i)))
            if chosen[-1] != token or token in eog:
                break
        n_right = sum(a == b for a, b in zip(chosen, drafted, strict=False))
        path = target.back_to(pos + len(chosen))
        take(pos, [emitted[-1], *chosen[:-1]], own)
        log = LogRound(pos, len(drafted), n_right, path == "restore", rows.drafters[0], tuple(tops))
        streamed = tuple(map(StreamedToken, chosen))
        counts = len(drafted), n_right, len(emitted) + 1, streamed
        one = ObservedRound(0.0, 0.0, *counts, path, log=log, judges_again=False)
        writer.learn([token for top in tops for token, _ in top], session.tokenizer.piece)
        rows.write(ReadyRow(None, 0, n_prompt, one))
        emitted += chosen
    writer.learn(emitted, session.tokenizer.piece)
    rows.flush()
    rows.fill_in()
    writer.end(["end" if emitted[-1] in eog else "limit"])
    return handed
