"""The decoding loop: one round for all slots.

draft -> checkpoint where planes do not reach -> verify in one batch -> accept -> roll back, or
restore and replay -> record. A round in which prompts wait decodes those instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import torch

from engine.decode.sampler import Sampler
from engine.decode.slot import Slot
from engine.decode.verify import accept, target_facts
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, DraftRequest
from engine.errors import RollbackRefusedError
from engine.memory.batch import Span, UBatch
from engine.memory.hybrid import Checkpoint, HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import Prompt, RunOptions
from engine.trace.recorder import PhaseClock, Recorder, RoundFacts


class Scheduler:
    """Decodes prompts in `n_slots` slots; waiting prompts take the place of finished ones."""

    def __init__(
        self,
        model: HybridModel,
        memory: HybridMemory,
        chain: DrafterChain,
        prompts: Sequence[Prompt],
        options: RunOptions,
        end_tokens: Collection[int],
        recorder: Recorder,
    ) -> None:
        self._model, self._memory, self._chain = model, memory, chain
        self._options, self._recorder = options, recorder
        self._n_ctx = memory.attention.n_ctx
        banned = end_tokens if options.ignore_eos else ()
        self._end_tokens = frozenset() if options.ignore_eos else frozenset(end_tokens)
        self.sequences = [
            Slot(seq_id, -1, prompt, Sampler(options.sampler, banned))
            for seq_id, prompt in enumerate(prompts)
        ]
        self._waiting = deque(self.sequences)
        self._free = list(range(memory.attention.n_seqs))
        self._round = 0

    @property
    def running(self) -> list[Slot]:
        """Sequences that hold a slot and have not stopped."""
        return [s for s in self.sequences if s.index >= 0 and not s.stop]

    @torch.inference_mode()
    def step(self) -> bool:
        """Do one round. False when every sequence has stopped."""
        self._recorder.resume()
        admitted = self._admit()
        if admitted:
            self._prompt_round(admitted)
        elif running := self.running:
            self._decode_round(running)
        self._release()
        self._round += 1
        return bool(self._waiting or self.running)

    def stop(self) -> None:
        """End what is running and drop what is waiting."""
        self._waiting.clear()
        for slot in self.sequences:
            slot.stop = slot.stop or "stopped"
        self._release()

    def _admit(self) -> list[Slot]:
        admitted = []
        while self._waiting and self._free:
            slot = self._waiting.popleft()
            slot.index = self._free.pop(0)
            admitted.append(slot)
        return admitted

    def _release(self) -> None:
        for slot in self.sequences:
            if slot.stop and slot.index >= 0:
                self._memory.clear(slot.index)
                self._chain.forget(slot.index)
                self._free.append(slot.index)
                slot.index = -1

    def _prompt_round(self, slots: list[Slot]) -> None:
        clock = PhaseClock()
        spans = [Span(s.index, 0, s.prompt.tokens, [len(s.prompt.tokens) - 1]) for s in slots]
        for slot in slots:
            self._recorder.prompt(self._round, slot.seq_id, 0, slot.prompt.tokens)
        clock.start()
        logits, hidden = self._forward(self._split(spans), "prompt", clock)
        rounds = []
        for slot in slots:
            n = len(slot.prompt.tokens)
            slot.n_tokens = n
            slot.last = slot.sampler.pick(slot.sampler.candidates(logits[slot.index]), 0)
            facts = target_facts(logits[slot.index], [slot.last])
            slot.emit([slot.last], n, self._options, self._n_ctx, self._end_tokens)
            rounds.append(
                RoundFacts(
                    slot.seq_id,
                    slot.index,
                    0,
                    n,
                    n,
                    None,
                    [slot.last],
                    None,
                    "target",
                    facts,
                    valid_depth=self._valid_depth(slot.index),
                )
            )
        clock.stop("sample")
        for slot in slots:
            self._chain.observe(slot.index, 0, slot.prompt.tokens, hidden[slot.index])
        clock.stop("draft")
        self._recorder.round(self._round, rounds, self._memory, clock)

    def _decode_round(self, slots: list[Slot]) -> None:
        clock = PhaseClock()
        clock.start()
        drafts = self._draft(slots)
        clock.stop("draft")
        spans = []
        for slot in slots:
            draft = drafts.get(slot.index)
            tokens = [slot.last, *(draft.tokens if draft else ())]
            spans.append(Span(slot.index, slot.n_tokens, tokens, range(len(tokens))))
        before = {slot.index: self._pending(slot.index) for slot in slots}
        ubatches = self._split(spans)
        saves = self._checkpoints(spans, ubatches)
        clock.stop("save")
        logits, hidden = self._forward(ubatches, "verify", clock)
        rounds = []
        for slot, span in zip(slots, spans, strict=True):
            facts, accepted = self._accept(slot, span, drafts.get(slot.index), logits[slot.index])
            facts.rs_idx_before = before[slot.index]
            facts.valid_depth = self._valid_depth(slot.index)
            clock.stop("sample")
            self._roll_back(facts, span, len(accepted), saves.get(slot.index), clock)
            facts.rs_idx_after = self._pending(slot.index)
            decoded = span.tokens[: len(accepted)]
            self._chain.observe(slot.index, span.pos0, decoded, hidden[slot.index][: len(decoded)])
            clock.stop("draft")
            slot.n_tokens += len(accepted)
            slot.last = accepted[-1]
            rounds.append(facts)
        self._recorder.round(self._round, rounds, self._memory, clock)

    def _draft(self, slots: list[Slot]) -> dict[int, Draft]:
        requests = [
            DraftRequest(slot.index, slot.n_tokens, slot.last, limit)
            for slot in slots
            if (limit := slot.draft_limit(self._options, self._n_ctx))
        ]
        return self._chain.draft(requests) if self._chain and requests else {}

    def _split(self, spans: list[Span]) -> list[UBatch]:
        return self._memory.split(spans, self._options.n_ubatch, self._options.split)

    def _checkpoints(self, spans: list[Span], ubatches: list[UBatch]) -> dict[int, Checkpoint]:
        """Copies for the sequences whose rollback may go deeper than their planes will reach."""
        recurrent = self._memory.recurrent
        if recurrent is None:
            return {}
        last = {}
        for ubatch in ubatches:
            last.update(dict.fromkeys(ubatch.seq_ids, ubatch.n_seq_tokens))
        return {
            span.seq: self._memory.save(span.seq)
            for span in spans
            if len(span.tokens) - 1 > recurrent.guaranteed_depth(last[span.seq])
        }

    def _accept(
        self, slot: Slot, span: Span, draft: Draft | None, logits: torch.Tensor
    ) -> tuple[RoundFacts, list[int]]:
        candidates = slot.sampler.candidates(logits)
        drafted = draft.tokens if draft else []
        accepted = accept(drafted, lambda i: slot.sampler.pick(candidates, i), self._end_tokens)
        n_judged = min(len(drafted), len(accepted))
        rows = [*range(n_judged), len(accepted) - 1]
        facts = target_facts(logits[rows], [*drafted[:n_judged], accepted[-1]])
        emitted = slot.emit(
            accepted, slot.n_tokens + 1, self._options, self._n_ctx, self._end_tokens
        )
        kind = "target" if draft is None else "replacement"
        if draft is not None and len(accepted) > len(drafted):
            kind = "bonus"
        return RoundFacts(
            slot.seq_id, slot.index, span.pos0, span.pos0 + 1, len(span.tokens), draft,
            accepted[:emitted], len(accepted) - 1, kind, facts,
        ), accepted  # fmt: skip

    def _roll_back(
        self,
        facts: RoundFacts,
        span: Span,
        n_kept: int,
        save: Checkpoint | None,
        clock: PhaseClock,
    ) -> None:
        """Undo the rejected tail: by partial removal, or restore and decode the rest again."""
        if save is not None:
            facts.checkpoint_bytes = facts.state_bytes_copied = save.n_bytes
        facts.rollback_depth = len(span.tokens) - n_kept
        if not facts.rollback_depth:
            return
        removed = self._memory.seq_rm(span.seq, span.pos0 + n_kept)
        clock.stop("rollback")
        if removed:
            facts.rollback_path = "seq_rm"
            return
        if save is None:
            raise RollbackRefusedError(
                f"Sequence {facts.seq_id}: a rollback of {facts.rollback_depth} tokens was refused "
                f"(truthful depth {facts.valid_depth}) and there is no checkpoint.",
                "Raise --n-rs-seq or choose --rollback checkpoint.",
            )
        facts.rollback_path = (
            "restore" if self._options.rollback == "checkpoint" else "restore_depth"
        )
        self._memory.restore(span.seq, save)
        facts.state_bytes_copied += save.n_bytes
        clock.stop("restore")
        replay = Span(span.seq, span.pos0, span.tokens[:n_kept], [])
        self._forward(self._split([replay]), "replay", clock)
        facts.replayed = True

    def _forward(
        self, ubatches: list[UBatch], purpose: str, clock: PhaseClock
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Decode a batch: wanted logits [n_outputs, n_vocab] and hidden [n, n_embd] by sequence."""
        phase = "replay" if purpose == "replay" else "verify"
        seq_ids = {s.index: s.seq_id for s in self.sequences if s.index >= 0}
        logits: dict[int, list[torch.Tensor]] = {}
        hidden: dict[int, list[torch.Tensor]] = {}
        for ubatch in ubatches:
            out = self._model.forward(ubatch, self._memory)
            rows = [row // ubatch.n_seq_tokens for row in ubatch.outputs.tolist()]
            for i, seq in enumerate(ubatch.seq_ids):
                hidden.setdefault(seq, []).append(out.hidden[i])
                if count := rows.count(i):
                    first = rows.index(i)
                    part = out.logits[first : first + count]
                    logits.setdefault(seq, []).append(part)
            ms = clock.stop(phase)
            self._recorder.ubatch(
                self._round, ubatch, [seq_ids[s] for s in ubatch.seq_ids], purpose, ms
            )
        return (
            {seq: torch.cat(parts) for seq, parts in logits.items()},
            {seq: torch.cat(parts) for seq, parts in hidden.items()},
        )

    def _pending(self, seq: int) -> int | None:
        return self._memory.recurrent.pending(seq) if self._memory.recurrent else None

    def _valid_depth(self, seq: int) -> int | None:
        return self._memory.recurrent.valid_depth(seq) if self._memory.recurrent else None
