"""The decoding loop: one round for all slots.

draft -> checkpoint where snapshots do not reach -> verify side by side -> accept -> roll back, or
restore and replay -> a part of the prompts that have newly got a slot -> record. With a prompt
cache, a prompt goes on from what its slot still holds, and leaves context checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from engine.batch import Span
from engine.decode.batching import verify_batches
from engine.decode.facts import prompt_facts, verified_facts
from engine.decode.forward import Forward
from engine.decode.held_sequences import HeldSequences
from engine.decode.non_finite import OF_DRAFTER, TRUNK, note_non_finite
from engine.decode.recorder import PhaseClock, Recorder
from engine.decode.rollback import Rollback, Undone
from engine.decode.round_facts import RoundFacts
from engine.decode.rules import RULES
from engine.decode.slot import Slot
from engine.decode.slots import Slots
from engine.decode.synthetic import SyntheticAcceptance
from engine.decode.verify import Acceptance, match
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, DraftRequest
from engine.memory.hybrid import Checkpoint, HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import Prompt, RunOptions
from engine.sampling.sampler import Sampler

Watch = Callable[[int, int, int, Sequence[int], torch.Tensor], None]
"""Called with round, seq_id, position of the first token, the tokens that were emitted, and the
logits [len(tokens), n_vocab] that chose them."""


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
        watch: Watch | None = None,
        held: HeldSequences | None = None,
    ) -> None:
        self._memory, self._chain, self._watch, self._held = memory, chain, watch, held
        self._options, self._recorder = options, recorder
        self._n_ctx = memory.attention.n_ctx
        banned = end_tokens if options.ignore_eos else ()
        self._end_tokens = frozenset() if options.ignore_eos else frozenset(end_tokens)
        self.sequences = [
            Slot(seq_id, -1, prompt, Sampler(options.sampler, banned, prompt.tokens))
            for seq_id, prompt in enumerate(prompts)
        ]
        choose = held.best if held else None
        self._slots = Slots(self.sequences, memory.attention.n_seqs, choose)
        holder = self._slots.holders.__getitem__
        self._forward = Forward(model, memory, options, recorder, holder, chain.decoded)
        self._rollback = Rollback(self._forward, options, self._end_tokens)
        rates = options.spec.synthetic
        self._synthetic = SyntheticAcceptance(rates, options.sampler.seed) if rates else None
        self._round = 0
        self.may_wait = False
        """Whether the rows of the next rounds may wait until `settle`."""

    @torch.inference_mode()
    def step(self) -> bool:
        """Do one round. False when every sequence has stopped."""
        self._recorder.resume(may_wait=self.may_wait)
        self._slots.admit()
        running = self._slots.running
        clock = PhaseClock()
        clock.start()
        rounds = self._decode_round([s for s in running if not s.in_prompt], clock)
        n_left = self._options.n_batch - sum(facts.verify_width for facts in rounds)
        rounds += self._prompt_round([s for s in running if s.in_prompt], n_left, clock)
        if rounds:
            rounds.sort(key=lambda facts: facts.seq_id)
            self._recorder.round(self._round, rounds, self._memory, clock)
            self._round += 1
        self._release()
        return self._slots.is_busy

    @torch.inference_mode()
    def settle(self) -> None:
        """Write the rows that wait; later ones do not."""
        self.may_wait = False
        self._recorder.resume()

    def cancel(self, seq_id: int) -> None:
        """End one sequence between two rounds, whether it waits, is in its prompt or decodes."""
        self._slots.cancel(seq_id)
        self._release()

    def stop(self) -> None:
        """End what is running and drop what is waiting."""
        self._slots.stop()
        self._release()

    def _release(self) -> None:
        for index in self._slots.release():
            if not self._held:
                self._memory.clear(index)
                self._chain.forget(index)

    def _prompt_round(self, slots: list[Slot], n_left: int, clock: PhaseClock) -> list[RoundFacts]:
        """Decode n_left more prompt tokens, the first come first."""
        parts: list[tuple[Slot, Span]] = []
        restored, saved, wrong = {}, {}, {}
        for slot in slots:
            if n_left <= 0:
                break
            n_known = slot.n_tokens
            restored[slot.index], saved[slot.index] = self._resume(slot, clock)
            prompt, n_done = slot.prompt.tokens, slot.n_tokens
            if self._held and n_known == 0:
                cells = self._memory.attention
                wrong[slot.index] = cells.others_than(slot.index, prompt[:n_done])
            end = self._held.part_end(slot.prompt, n_done) if self._held else len(prompt)
            tokens = prompt[n_done : min(end, n_done + n_left)]
            is_last = n_done + len(tokens) == len(prompt)
            outputs = [len(tokens) - 1] if is_last else []
            parts.append((slot, Span(slot.index, n_done, tokens, outputs)))
            text = prompt[n_known : n_done + len(tokens)]
            self._recorder.prompt(self._round, slot.seq_id, n_known, text)
            n_left -= len(tokens)
        if not parts:
            return []
        ubatches = self._forward.split([span for _, span in parts])
        logits, hidden = self._forward.run(ubatches, self._round, "prompt", clock)
        rounds = []
        for slot, span in parts:
            seq, first = slot.index, None
            slot.n_tokens += len(span.tokens)
            if not slot.in_prompt:
                first = match(Draft(), slot.sampler.rows(logits[seq]), slot.sampler, ())
                self._check_finite(slot, slot.n_tokens)
                slot.last = first.tokens[0]
                slot.emit(first.tokens, slot.n_tokens, self._options, self._n_ctx, self._end_tokens)
            facts = prompt_facts(slot, span, first, logits.get(seq))
            facts.valid_depth = self._valid_depth(seq)
            facts.restored_bytes, facts.checkpoint_bytes = restored[seq], saved[seq]
            facts.cache_wrong = wrong.get(seq)
            rounds.append(facts)
            if self._watch and first:
                self._watch(self._round, slot.seq_id, slot.n_tokens, first.tokens, logits[seq])
            clock.stop("sample", [seq])
            self._observe(seq, span.pos0, span.tokens, hidden[seq])
            if not slot.in_prompt:
                self._chain.begin(seq, slot.prompt.tokens)
            clock.stop("draft", [seq])
        return rounds

    def _resume(self, slot: Slot, clock: PhaseClock) -> tuple[int, int]:
        """Before a part of a prompt: use what the slot holds, or save what it is to hold. Bytes
        restored and saved."""
        if not self._held:
            return 0, 0
        seq, n_restored = slot.index, 0
        if slot.n_tokens == 0:
            found = self._held.resume(seq, slot.prompt.tokens)
            slot.n_tokens = found.n_tokens
            n_restored = found.checkpoint.n_bytes if found.checkpoint else 0
            clock.stop("restore" if n_restored else "rollback", [seq])
            self._chain.resume(seq, found.n_tokens)
            clock.stop("draft", [seq])
        n_saved = self._held.checkpoint(seq, slot.prompt, slot.n_tokens)
        clock.stop("save", [seq])
        return n_restored, n_saved

    def _observe(self, seq: int, pos0: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        if self._held:
            self._held.observe(seq, tokens)
        self._chain.observe(seq, pos0, tokens, hidden)

    def _decode_round(self, slots: list[Slot], clock: PhaseClock) -> list[RoundFacts]:
        """Draft for all of the slots, verify and roll back batch by batch."""
        if not slots:
            return []
        drafts = self._draft(slots)
        clock.stop("draft", [slot.index for slot in slots])
        spans = []
        for slot in slots:
            draft = drafts.get(slot.index)
            tokens = [slot.last, *(draft.tokens if draft else ())]
            spans.append(Span(slot.index, slot.n_tokens, tokens, range(len(tokens))))
        holders = {slot.index: slot for slot in slots}
        rounds = []
        for batch in verify_batches(self._forward, spans, self._options.split):
            seqs = [span.seq for span in batch.spans]
            pending = {seq: self._pending(seq) for seq in seqs}
            saves = self._rollback.checkpoints(batch.spans, batch.ubatches)
            clock.stop("save", seqs)
            logits, hidden = self._forward.run(batch.ubatches, self._round, "verify", clock)
            for span in batch.spans:
                seq = span.seq
                facts = self._judge(
                    holders[seq],
                    span,
                    drafts.get(seq),
                    logits[seq],
                    hidden[seq],
                    saves.get(seq),
                    clock,
                )
                facts.rs_idx_before = pending[seq]
                rounds.append(facts)
        return rounds

    def _draft(self, slots: list[Slot]) -> dict[int, Draft]:
        requests = [
            DraftRequest(slot.index, slot.n_tokens, slot.last, limit)
            for slot in slots
            if (limit := slot.draft_limit(self._chain.longest, self._options, self._n_ctx))
        ]
        if not self._chain or not requests:
            return {}
        drafts = self._chain.draft(requests)
        self._recorder.drafts(self._round, self._chain.asked, self._slots.holders)
        by_index = {slot.index: slot for slot in slots}
        for answer in self._chain.asked:
            if found := answer.draft.non_finite:
                slot, name = by_index[answer.seq], answer.draft.drafter
                where = OF_DRAFTER.get(name, name)
                self._note_non_finite(slot, slot.n_tokens + 1, where, found)
        return drafts

    def _check_finite(self, slot: Slot, first_pos: int) -> None:
        """first_pos: of the token that row 0 of the logits chooses."""
        if found := slot.sampler.non_finite:
            self._note_non_finite(slot, first_pos, TRUNK, found)

    def _note_non_finite(
        self, slot: Slot, first_pos: int, where: str, found: tuple[int, float]
    ) -> None:
        row, largest = found
        error = note_non_finite(
            self._recorder.facts, self._round, slot.seq_id, first_pos + row, where, largest
        )
        if not self._options.allow_non_finite:
            slot.stop = "error"
            raise error

    def _judge(
        self,
        slot: Slot,
        span: Span,
        draft: Draft | None,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        save: Checkpoint | None,
        clock: PhaseClock,
    ) -> RoundFacts:
        """Accept, roll back, emit, and say what happened."""
        seq, before = slot.index, slot.sampler.clone()
        accepted = self._accept(slot, draft or Draft(), logits)
        valid_depth = self._valid_depth(seq)
        clock.stop("sample", [seq])
        undone = self._rollback.undo(
            span, accepted, hidden, save, slot.sampler, before, self._round, clock
        )
        self._check_finite(slot, span.pos0 + 1)
        final = undone.accepted
        n_emitted = slot.emit(
            final, slot.n_tokens + 1, self._options, self._n_ctx, self._end_tokens
        )
        facts = verified_facts(slot, span, draft, accepted, undone, n_emitted, logits)
        facts.accept_rule = self._options.spec.accept if draft else ""
        facts.valid_depth, facts.rs_idx_after = valid_depth, self._pending(seq)
        if save:
            facts.checkpoint_bytes = save.n_bytes
            facts.restored_bytes = save.n_bytes * undone.n_replays
        if self._watch:
            n_drafted = len(draft.tokens) if draft else 0
            read = logits[self._rows_read(n_drafted, accepted.tokens, undone)]
            rows = torch.cat([read, *([] if undone.extra is None else [undone.extra])])
            self._watch(
                self._round, slot.seq_id, span.pos0 + 1, final[:n_emitted], rows[:n_emitted]
            )
        slot.n_tokens += len(final)
        slot.last = final[-1]
        clock.stop("sample", [seq])
        if draft is not None:
            self._chain.accept(seq, facts.n_accepted or 0)
        self._observe(seq, span.pos0, [span.tokens[0], *final[:-1]], undone.hidden)
        clock.stop("draft", [seq])
        return facts

    def _accept(self, slot: Slot, draft: Draft, logits: torch.Tensor) -> Acceptance:
        sampler, n_drafted = slot.sampler, len(draft.tokens)
        rows = sampler.rows(logits)
        if self._synthetic:
            accepted = self._synthetic.accept(slot.seq_id, draft, rows, sampler, self._end_tokens)
        else:
            accepted = RULES[self._options.spec.accept](draft, rows, sampler, self._end_tokens)
        if "stale-logits" in self._options.faults and len(accepted.tokens) <= n_drafted:
            sampler.retract()
            stale = match(Draft(), lambda _: rows(n_drafted), sampler, ())
            accepted.tokens[-1:], accepted.own_p = stale.tokens, stale.own_p
        return accepted

    def _rows_read(self, n_drafted: int, accepted: list[int], undone: Undone) -> list[int]:
        """Rows of the verify batch that chose the tokens; a replay's own token is not there."""
        rows = list(range(len(undone.accepted) - (undone.extra is not None)))
        if "stale-logits" in self._options.faults and len(rows) == len(accepted) <= n_drafted:
            rows[-1] = n_drafted
        return rows

    def _pending(self, seq: int) -> int | None:
        return self._memory.recurrent.pending(seq) if self._memory.recurrent else None

    def _valid_depth(self, seq: int) -> int | None:
        return self._memory.recurrent.valid_depth(seq) if self._memory.recurrent else None
