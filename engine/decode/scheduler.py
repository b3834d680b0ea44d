"""The scheduler: the decoding loop, one round for all slots at a time.

draft -> verify together (engine.decode.verify_loop) -> decode a part of newly admitted prompts ->
record. With a prompt cache, a prompt reuses what its slot still holds and saves context
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from engine.batch import GreedyTokens, Span
from engine.decode.acceptance import Judge, cut_draft, note_grammar_error
from engine.decode.failure import note_failure, note_non_finite
from engine.decode.forward import Forward
from engine.decode.held_sequences import HeldSequences
from engine.decode.recorder import Recorder
from engine.decode.round import PhaseClock, Round, RoundObserver, WatchRound
from engine.decode.sequences import DecodingSequence, SlotAssignment, sampler_for
from engine.decode.verify_loop import VerifyLoop, valid_depth
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, awaited
from engine.machine.clock import clock_paused
from engine.machine.device import inference_mode, make_current
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.layers import TargetRows
from engine.options import Prompt, RunOptions
from engine.sampling.grammar import Grammar


def drafts_may_stay(device: torch.device) -> bool:
    """Whether drafts stay on the device until they are verified, so that the host need not wait."""
    return device.type == "cuda"


MOST_AHEAD, AHEAD_MS = 32, 10.0
"""Most tokens decoded at once, and how long that may take, ms: no output is seen meanwhile."""


class Scheduler:
    """Decodes prompts in slots, which are the first sequences of the memory; waiting prompts take
    freed slots. The other memory sequences are for branches of tree drafts."""

    def __init__(
        self,
        model: HybridModel,
        memory: HybridMemory,
        chain: DrafterChain,
        prompts: Sequence[Prompt],
        options: RunOptions,
        end_tokens: Collection[int],
        recorder: Recorder,
        n_slots: int,
        watch: WatchRound | None = None,
        held: HeldSequences | None = None,
        grammar: Grammar | None = None,
        observer: RoundObserver | None = None,
    ) -> None:
        self._model, self._watch, self._held = model, watch, held
        self._observer, self._recorder, self._all_end_tokens = observer, recorder, end_tokens
        self.sequences = [
            DecodingSequence(seq_id, -1, prompt, sampler_for(prompt, options, end_tokens, grammar))
            for seq_id, prompt in enumerate(prompts)
        ]
        choose = held.best if held else None
        self._slots = SlotAssignment(self.sequences, n_slots, choose)
        self._n_slots = n_slots
        self._use(options, memory, chain, grammar)
        self._round = 0
        if observer:
            observer.begin(self.sequences, memory, self._end_tokens)
        self.may_wait = False
        self.before_round: list[Callable[[int], None]] = []
        """Callbacks before each round, called in order with its number."""

    def _use(
        self,
        options: RunOptions,
        memory: HybridMemory,
        chain: DrafterChain,
        grammar: Grammar | None,
    ) -> None:
        """Decode with these from the next round on."""
        self._options, self._memory, self._chain = options, memory, chain
        self._n_ctx = memory.attention.n_ctx
        self._end_tokens = frozenset() if options.ignore_eos else frozenset(self._all_end_tokens)
        chain.trim = partial(cut_draft, self._slots) if grammar else None
        samplers = [sequence.sampler for sequence in self.sequences]
        by_record = all(sampler.takes_largest for sampler in samplers)
        with_record = by_record or self.device.type == "cpu"  # where it costs next to nothing
        self._forward = Forward(
            self._model,
            memory,
            options,
            self._recorder,
            self._slots.holders.__getitem__,
            chain.decoded,
            chain.taps,
            self._n_slots,
            with_record=with_record,
        )
        # verification must not depend on the drafted tokens
        stays = by_record and options.spec.verify_max is None and not options.faults
        stays = stays and drafts_may_stay(self.device)
        chain.stay_on(self.device if stays else None)
        self._is_plain = by_record and not (chain.every or options.faults)
        self._judge = Judge(samplers, options, self._end_tokens)
        again = self._judge.accept_again if self._judge.judges_replays else None
        judge = self._judge
        self._loop = VerifyLoop(self._forward, options, judge.accept, again, judge.branch)

    @inference_mode
    def go_on_with(
        self,
        options: RunOptions,
        memory: HybridMemory,
        chain: DrafterChain,
        grammar: Grammar | None,
    ) -> None:
        """Switch to other options between two rounds.

        memory: the current one, or one that takes over the state of every sequence. chain: its
        drafters must already hold the text. Samplers whose options change are rebuilt and replay
        the chosen tokens; random numbers continue unless the seed changes.
        """
        before, judge = self._options, self._judge
        if memory is not self._memory:
            for sequence in self._slots.running:
                if sequence.n_tokens:
                    memory.put(sequence.index, self._memory.state(sequence.index))
        if (options.sampler, options.ignore_eos) != (before.sampler, before.ignore_eos):
            for sequence in self.sequences:
                sampler = sampler_for(sequence.prompt, options, self._all_end_tokens, grammar)
                keeps_random = options.sampler.seed == before.sampler.seed
                sampler.follow(sequence.sampler, keeps_random=keeps_random)
                sequence.sampler = sampler
        self._use(options, memory, chain, grammar)
        self._judge.follow(judge)

    @property
    def weights(self) -> list[object]:
        """Target and draft models in use; they are read-only."""
        of_drafters = [one for drafter in self._chain.every for one in vars(drafter).values()]
        models = [one for one in of_drafters if type(one).__module__.startswith("engine.model.")]
        return [self._model, *models]

    @property
    def of_this_run(self) -> list[object]:
        """Objects that belong to this run alone and are not copied by a fork: recorder and
        observers."""
        return [self._recorder, self._observer, self._watch, self.before_round]

    @property
    def parts(self) -> tuple[RunOptions, HybridMemory, DrafterChain]:
        """Options, memory and drafters in use."""
        return self._options, self._memory, self._chain

    def restart(self, recorder: Recorder) -> None:
        """Continue as a copy that records to another run. Call `go_on_with` next."""
        self._recorder, self.before_round, self.may_wait = recorder, [], False

    def force_newest(self, seq_id: int, token: int) -> None:
        """Replace the last token that a sequence chooses in the next round."""
        self._judge.forced = {seq_id: token}

    @inference_mode
    def step(self) -> bool:
        """Do one round. Returns False when every sequence has stopped."""
        make_current(self.device)
        if not self.may_wait:
            self._recorder.resume()
        for call in [*self.before_round]:
            call(self._round)
        self._slots.admit()
        running = self._slots.running
        clock = PhaseClock()
        clock.start()
        rounds = self._decode_round([s for s in running if not s.in_prompt], clock)
        n_left = self._options.n_batch - sum(len(round_.tokens) for round_ in rounds)
        rounds += self._prompt_round([s for s in running if s.in_prompt], n_left, clock)
        if rounds:
            rounds.sort(key=lambda round_: round_.seq_id)
            self._recorder.round(rounds, self._memory, clock)
            if self._observer:
                held = [s for s in running if not s.in_prompt]
                with clock_paused():
                    self._observer.closed(self._round, self._memory, held)
            self._round += 1
        self._release()
        return self._slots.is_busy

    @inference_mode
    def settle(self, *, may_wait: bool = False) -> None:
        """Write the rows that were held back. may_wait: later rows are held back until the next
        call; otherwise they are written at once."""
        self.may_wait = may_wait
        self._recorder.resume(may_wait=may_wait)

    @inference_mode
    def close(self) -> None:
        """Write the rows that were held back, at the end of the run."""
        self._recorder.close()

    @property
    def bytes_waiting(self) -> int:
        """Bytes of logits kept for rows that are held back."""
        return self._recorder.bytes_waiting

    def cancel(self, seq_id: int) -> None:
        """End one sequence between two rounds, whether it waits, is in its prompt or decodes."""
        self._slots.cancel(seq_id)
        self._release()

    def stop(self) -> None:
        """End running sequences and drop waiting ones."""
        self._slots.stop()
        self._release()

    @property
    def device(self) -> torch.device:
        return self._memory.attention.device

    def note_failure(self, error: BaseException) -> None:
        """Note what memory and drafters hold when an error ends the run."""
        held = [
            (one.seq_id, one.index, one.n_tokens, self._chain.held(one.index))
            for one in self._slots.running
        ]
        note_failure(self._recorder.facts, error, self._memory, self._round, held)

    def _release(self) -> None:
        for index in self._slots.release():
            if not self._held:
                self._memory.clear(index)
                self._chain.forget(index)

    def _prompt_round(
        self, sequences: list[DecodingSequence], n_left: int, clock: PhaseClock
    ) -> list[Round]:
        """Decode up to n_left prompt tokens, first come first served."""
        rounds: list[Round] = []
        spans = []
        for sequence in sequences:
            if n_left <= 0:
                break
            n_known, wrong = sequence.n_tokens, None
            n_restored, n_saved = self._resume(sequence, clock)
            seq, prompt, n_done = sequence.index, sequence.prompt.tokens, sequence.n_tokens
            if self._held and n_known == 0:
                wrong = self._memory.attention.others_than(seq, prompt[:n_done])
            end = self._held.part_end(sequence.prompt, n_done) if self._held else len(prompt)
            tokens = prompt[n_done : min(end, n_done + n_left)]
            is_last = n_done + len(tokens) == len(prompt)
            spans.append(Span(seq, n_done, tokens, [len(tokens) - 1] if is_last else []))
            rounds.append(
                Round(
                    self._round,
                    sequence.seq_id,
                    seq,
                    n_done,
                    tokens,
                    is_prompt=True,
                    cache_wrong=wrong,
                    checkpoint_bytes=n_saved,
                    restored_bytes=n_restored,
                )
            )
            text = prompt[n_known : n_done + len(tokens)]
            self._recorder.prompt(self._round, sequence.seq_id, n_known, text)
            n_left -= len(tokens)
        if not rounds:
            return []
        ubatches = self._forward.split(spans)
        logits, of_tokens = self._forward.run(ubatches, self._round, "prompt", clock)
        for sequence, round_ in zip(sequences, rounds, strict=False):
            seq = round_.seq
            sequence.n_tokens += len(round_.tokens)
            if not sequence.in_prompt:
                round_.logits, round_.record = logits[seq], self._forward.records.get(seq)
                self._judge.accept(round_)
                self._emit(sequence, round_)
                sequence.last = round_.accepted[0]
            round_.valid_depth = valid_depth(self._memory, seq)
            if self._observer and round_.accepted:
                with clock_paused():
                    self._observer.judged(sequence, round_)
            note_grammar_error(self._recorder.facts, self._round, sequence)
            if self._watch and round_.accepted:
                self._watch(round_)
            clock.stop("sample", [seq])
            self._observe(round_, round_.tokens, of_tokens[seq])
            if not sequence.in_prompt:
                self._chain.begin(seq, sequence.prompt.tokens)
            clock.stop("draft", [seq])
        return rounds

    def _resume(self, sequence: DecodingSequence, clock: PhaseClock) -> tuple[int, int]:
        """Before a part of a prompt: restore what the slot holds, or save a checkpoint. Returns the
        bytes restored and saved."""
        if not self._held:
            return 0, 0
        seq, n_restored = sequence.index, 0
        if sequence.n_tokens == 0:
            n_tokens, checkpoint = self._held.resume(seq, sequence.prompt.tokens, sequence.seq_id)
            sequence.n_tokens = n_tokens
            n_restored = checkpoint.n_bytes if checkpoint else 0
            clock.stop("restore" if n_restored else "rollback", [seq])
            self._chain.resume(seq, n_tokens)
            self._held.records[seq].drafters = self._chain.held(seq)
            clock.stop("draft", [seq])
        n_saved = self._held.checkpoint(seq, sequence.prompt, sequence.n_tokens)
        clock.stop("save", [seq])
        self._held.records[seq].note(self._recorder.facts)
        return n_restored, n_saved

    def _emit(self, sequence: DecodingSequence, round_: Round) -> int:
        """Emit accepted tokens and return how many. Raises NonFiniteError before emitting any."""
        here = self._recorder.facts, self._options, self._round, sequence
        note_non_finite(*here, round_.pos_next, "", sequence.sampler.non_finite)
        return sequence.emit(
            round_.accepted, round_.pos_next, self._options, self._n_ctx, self._end_tokens
        )

    def _observe(self, round_: Round, tokens: Sequence[int], rows: TargetRows) -> None:
        if self._held:
            self._held.observe(round_.seq, tokens)
        self._chain.observe(round_.seq, round_.pos0, tokens, rows)

    def _decode_round(self, sequences: list[DecodingSequence], clock: PhaseClock) -> list[Round]:
        """Draft for all sequences, verify, and update the drafters."""
        if not sequences:
            return []
        drafts = self._draft(sequences)
        clock.stop("draft", [sequence.index for sequence in sequences])
        unverified = self._cut(drafts)
        rounds = []
        for sequence in sequences:
            draft = drafts.get(sequence.index)
            rounds.append(
                Round(
                    self._round,
                    sequence.seq_id,
                    sequence.index,
                    sequence.n_tokens,
                    [sequence.last, *(draft.tokens if draft else ())],
                    draft,
                    unverified.get(sequence.index),
                )
            )
        self._forward.ahead = self._ahead(sequences)
        are_pending = bool(awaited(drafts.values()))
        for round_ in self._loop.run(rounds, clock):
            if are_pending:
                self._note_drafts()
                are_pending = False
            self._follow(self.sequences[round_.seq_id], round_, clock)
        self._forward.ahead = None
        return rounds

    @property
    def is_ahead(self) -> bool:
        """Whether the model has decoded more tokens than rounds were made from."""
        return self._memory.is_ahead

    def _ahead(self, sequences: list[DecodingSequence]) -> GreedyTokens | None:
        """How many tokens may be decoded at once and which tokens end a text; None if something
        reads the state in between."""
        looks = bool(self._watch or self._held or self.before_round or self._judge.forced)
        if not (self._is_plain and self.may_wait) or looks or self.is_ahead:
            return None
        if len(sequences) != 1 or len(self._slots.running) != 1:
            return None
        (sequence,) = sequences
        n = min(MOST_AHEAD, int(AHEAD_MS / max(self._forward.ms, 1e-3)))
        n = min(n, self._n_ctx - 1 - sequence.n_tokens)
        if self._observer:
            n = min(n, self._observer.n_unseen + 1)
        if self._options.n_predict >= 0:
            n = min(n, self._options.n_predict - len(sequence.emitted))
        return (n, self._all_end_tokens) if n > 1 else None

    def _cut(self, drafts: dict[int, Draft]) -> dict[int, Draft]:
        """Cut drafts to verify_max tokens and drop empty ones; returns the cut-off parts."""
        most = self._options.spec.verify_max
        rest: dict[int, Draft] = {}
        if most is None:
            return rest
        for seq, draft in list(drafts.items()):
            if (cut := draft.split(most)) is not None:
                rest[seq] = cut
            if not draft.tokens:
                del drafts[seq]
        return rest

    def _draft(self, sequences: list[DecodingSequence]) -> dict[int, Draft]:
        if not self._chain:
            return {}
        limits = self._chain.longest, self._options, self._n_ctx
        requests = [asked for one in sequences if (asked := one.draft_request(*limits))]
        if not requests:
            return {}
        drafts = self._chain.draft(requests)
        if not awaited(drafts.values()):
            self._note_drafts()
        return drafts

    def _note_drafts(self) -> None:
        """Record the drafters' answers."""
        self._recorder.drafts(self._round, self._chain.asked, self._slots.holders)
        here = self._recorder.facts, self._options, self._round
        for seq, draft in self._chain.asked:
            one = self.sequences[self._slots.holders[seq]]
            note_non_finite(*here, one, one.n_tokens + 1, draft.drafter, draft.non_finite)

    def _follow(self, sequence: DecodingSequence, round_: Round, clock: PhaseClock) -> None:
        """Emit what a verified sequence accepted, and update everything that follows its text."""
        round_.n_emitted = self._emit(sequence, round_)
        note_grammar_error(self._recorder.facts, self._round, sequence)
        if not sequence.stop:
            sampler = sequence.sampler
            round_.sampler_wrong = sampler.n_astray(sequence.emitted)
            if self._judge.draws_by_token:
                round_.sampler_draws = sampler.n_draws - len(sampler.accepted)
        if self._watch:
            self._watch(round_)
        clock.stop("sample", [round_.seq])
        if self._observer:
            with clock_paused():
                self._observer.judged(sequence, round_)
        sequence.n_tokens += len(round_.accepted)
        sequence.last = round_.accepted[-1]
        if round_.draft is not None:
            self._chain.accept(round_.seq, round_.n_accepted)
        assert round_.of_tokens is not None  # it has been verified
        self._observe(round_, round_.decoded, round_.of_tokens)
        round_.of_tokens = None  # the round may be kept until its rows are written
        clock.stop("draft", [round_.seq])
