"""The decoding loop: one round for all slots.

draft -> checkpoint where snapshots do not reach -> verify in one batch -> accept -> roll back, or
restore and replay -> record. A round in which prompts wait decodes those instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

import torch

from engine.decode.forward import Forward
from engine.decode.rollback import Rollback, Undone
from engine.decode.sampler import Sampler
from engine.decode.slot import Slot
from engine.decode.verify import accept, target_facts
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, DraftRequest
from engine.memory.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import Prompt, RunOptions
from engine.trace.recorder import PhaseClock, Recorder, RoundFacts


class Scheduler:
    """Decodes prompts in as many slots as the memory has; waiting ones take freed slots."""

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
        self._memory, self._chain = memory, chain
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
        self._holders: dict[int, int] = {}
        self._forward = Forward(model, memory, options, recorder, self._holders.__getitem__)
        self._rollback = Rollback(self._forward, options, self._end_tokens)
        self._round = 0

    @property
    def running(self) -> list[Slot]:
        """Sequences that hold a slot and have not stopped."""
        return [s for s in self.sequences if s.index >= 0 and not s.stop]

    @torch.inference_mode()
    def step(self) -> bool:
        """Do one round. False when every sequence has stopped."""
        self._recorder.resume()
        if admitted := self._admit():
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
            self._holders[slot.index] = slot.seq_id
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
        ubatches = self._forward.split(spans)
        logits, hidden = self._forward.run(ubatches, self._round, "prompt", clock)
        rounds = []
        for slot in slots:
            n = slot.n_tokens = len(slot.prompt.tokens)
            slot.last = slot.sampler.pick(slot.sampler.candidates(logits[slot.index]), 0)
            slot.emit([slot.last], n, self._options, self._n_ctx, self._end_tokens)
            facts = RoundFacts(
                slot.seq_id, slot.index, 0, n, n, None, [slot.last], None, ["target"],
                target_facts(logits[slot.index], [slot.last]),
                valid_depth=self._valid_depth(slot.index),
            )  # fmt: skip
            rounds.append(facts)
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
        pending = {slot.index: self._pending(slot.index) for slot in slots}
        ubatches = self._forward.split(spans)
        saves = self._rollback.checkpoints(spans, ubatches)
        clock.stop("save")
        logits, hidden = self._forward.run(ubatches, self._round, "verify", clock)
        rounds = []
        for slot, span in zip(slots, spans, strict=True):
            seq, before = slot.index, slot.sampler.clone()
            accepted = self._accept(slot, span, logits[seq])
            valid_depth = self._valid_depth(seq)
            clock.stop("sample")
            save = saves.get(seq)
            undone = self._rollback.undo(
                span, accepted, hidden[seq], save, slot.sampler, before, self._round, clock
            )
            facts = self._close(slot, span, drafts.get(seq), accepted, undone, logits[seq])
            facts.rs_idx_before, facts.rs_idx_after = pending[seq], self._pending(seq)
            facts.valid_depth = valid_depth
            if save:
                facts.checkpoint_bytes = save.n_bytes
                facts.restored_bytes = save.n_bytes * undone.n_replays
            rounds.append(facts)
            clock.stop("sample")
            decoded = [span.tokens[0], *undone.accepted[:-1]]
            self._chain.observe(seq, span.pos0, decoded, undone.hidden)
            clock.stop("draft")
        self._recorder.round(self._round, rounds, self._memory, clock)

    def _draft(self, slots: list[Slot]) -> dict[int, Draft]:
        requests = [
            DraftRequest(slot.index, slot.n_tokens, slot.last, limit)
            for slot in slots
            if (limit := slot.draft_limit(self._options, self._n_ctx))
        ]
        return self._chain.draft(requests) if self._chain and requests else {}

    def _accept(self, slot: Slot, span: Span, logits: torch.Tensor) -> list[int]:
        drafted = span.tokens[1:]
        candidates = slot.sampler.candidates(logits)
        accepted = accept(drafted, partial(slot.sampler.pick, candidates), self._end_tokens)
        if "stale-logits" in self._options.faults and len(accepted) <= len(drafted):
            accepted[-1] = slot.sampler.pick(candidates, len(drafted))
        return accepted

    def _close(
        self,
        slot: Slot,
        span: Span,
        draft: Draft | None,
        accepted: list[int],
        undone: Undone,
        logits: torch.Tensor,
    ) -> RoundFacts:
        """Emit what was accepted and say what happened."""
        final, drafted = undone.accepted, span.tokens[1:]
        n_judged = min(len(drafted), len(accepted))
        rows = [logits[[*range(n_judged), len(accepted) - 1]]]
        asked = [*drafted[:n_judged], final[min(len(accepted), len(final)) - 1]]
        kinds = ["target" if draft is None else "replacement"]
        if draft is not None and len(accepted) > len(drafted):
            kinds = ["bonus"]
        if undone.extra is not None:
            rows.append(undone.extra)
            asked.append(final[-1])
            kinds.append("bonus")
        emitted = slot.emit(final, slot.n_tokens + 1, self._options, self._n_ctx, self._end_tokens)
        facts = RoundFacts(
            slot.seq_id, slot.index, span.pos0, span.pos0 + 1, len(span.tokens), draft,
            final[:emitted], len(final) - len(kinds), kinds, target_facts(torch.cat(rows), asked),
            rollback_depth=len(span.tokens) - len(accepted), rollback_path=undone.path,
            n_replays=undone.n_replays,
        )  # fmt: skip
        slot.n_tokens += len(final)
        slot.last = final[-1]
        return facts

    def _pending(self, seq: int) -> int | None:
        return self._memory.recurrent.pending(seq) if self._memory.recurrent else None

    def _valid_depth(self, seq: int) -> int | None:
        return self._memory.recurrent.valid_depth(seq) if self._memory.recurrent else None
