"""Held sequences: slot contents that stay in memory after a sequence ends, for later prompts of
this run or the next (llama.cpp's `--cache-prompt`).

A new prompt reuses its common prefix with the old text: from the live state, rolled back as far as
snapshots reach; else from a context checkpoint; else nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.draft.drafter import Drafter
from engine.draft.registry import model_drafters
from engine.memory.hybrid import HybridMemory
from engine.memory.recurrent import RecurrentTraffic
from engine.memory.state_file import SequenceCheckpoint
from engine.options import CacheOptions, Prompt, RunOptions
from engine.trace.prompt_reuse import (
    ProcessedPart,
    PromptReuseRecord,
    ReuseSource,
    SavedCheckpoint,
    WhyProcessed,
    n_common,
)

N_BEFORE_END = 4
"""Distance from the end of a prompt to its last checkpoint, tokens: what a chat template appends
there changes as soon as the answer becomes part of the history."""


def cuts(n_prompt: int, n_ubatch: int, message_starts: Sequence[int] = ()) -> list[int]:
    """Positions, ascending, at which a prompt of n_prompt tokens is split to save a checkpoint.

    As in llama.cpp: the starts of user messages, and N_BEFORE_END tokens before the end, with and
    without n_ubatch more.
    """
    end = n_prompt - N_BEFORE_END
    return sorted({at for at in (end - n_ubatch, end, *message_starts) if 0 < at < n_prompt})


class ContextCheckpoints:
    """Context checkpoints of one sequence by tokens covered (llama.cpp's `--ctx-checkpoints`):
    copies of the recurrent state, which unlike attention cells cannot be truncated. Speculative
    checkpoints are others; they live for one round."""

    def __init__(self, options: CacheOptions) -> None:
        self._n_max, self._min_step = options.ctx_checkpoints, options.checkpoint_min_step
        self._by_length: dict[int, SequenceCheckpoint] = {}
        self._earlier: set[int] = set()
        self.evicted: set[int] = set()
        """Token counts of evicted checkpoints, as long as the text still contains those tokens."""

    @property
    def is_off(self) -> bool:
        """Whether context checkpoints are disabled."""
        return not self._n_max

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Tokens covered and bytes of each checkpoint, ascending."""
        return [(n, self._by_length[n].n_bytes) for n in self.lengths]

    @property
    def lengths(self) -> list[int]:
        """Tokens covered by each checkpoint, ascending."""
        return sorted(self._by_length)

    def newest(self, n_tokens: int) -> SequenceCheckpoint | None:
        """The longest checkpoint that covers at most n_tokens, or None."""
        length = max((n for n in self._by_length if n <= n_tokens), default=0)
        return self._by_length.get(length)

    def begin(self, n_tokens: int) -> list[int]:
        """Start a prompt that shares n_tokens with the text so far: checkpoints that cover more are
        invalid and erased. Returns the tokens that these covered."""
        erased = [n for n in self.lengths if n > n_tokens]
        self._by_length = {n: one for n, one in self._by_length.items() if n <= n_tokens}
        self._earlier = set(self._by_length)
        self.evicted = {n for n in self.evicted if n <= n_tokens}
        return erased

    def wants(
        self, n_done: int, n_prompt: int, n_ubatch: int, message_starts: Sequence[int]
    ) -> bool:
        """Whether to save the state after n_done tokens of a prompt, before more is decoded."""
        if not self._n_max or not 0 < n_done < n_prompt or n_done in self._by_length:
            return False
        if n_done >= n_prompt - N_BEFORE_END - n_ubatch or n_done == max(message_starts, default=0):
            return True
        return n_done - max(self._by_length, default=0) > self._min_step

    def add(self, checkpoint: SequenceCheckpoint) -> int | None:
        """Add a checkpoint. If the list is full, it evicts one that an earlier prompt left too
        close after another, else the oldest. Returns the tokens that the evicted one covered."""
        length, evicted = checkpoint.pos_max + 1, None
        if len(self._by_length) == self._n_max and length not in self._by_length:
            evicted = self._least()
            del self._by_length[evicted]
            self.evicted.add(evicted)
        self._by_length[length] = checkpoint
        self.evicted.discard(length)
        return evicted

    def _least(self) -> int:
        lengths = self.lengths
        for before, length in zip([0, *lengths], lengths, strict=False):
            if length in self._earlier and length - before < self._min_step:
                return length
        return lengths[0]


PromptReuse = tuple[int, SequenceCheckpoint | None]
"""Reused tokens of a new prompt, and the checkpoint to restore; None if truncation is enough."""


class HeldSequences:
    """Tokens and context checkpoints of every sequence of a memory.

    n_ubatch: most tokens of a forward pass. device: where checkpoints are stored, None = next to
    the states. faults: see engine.options.FAULTS.
    """

    def __init__(
        self,
        memory: HybridMemory,
        options: CacheOptions,
        n_ubatch: int,
        device: torch.device | None,
        faults: Collection[str] = (),
    ) -> None:
        self.memory = memory
        n_seqs = memory.attention.n_seqs
        self.tokens: list[list[int]] = [[] for _ in range(n_seqs)]
        self.checkpoints = [ContextCheckpoints(options) for _ in range(n_seqs)]
        self._n_ubatch, self._device = n_ubatch, device
        self._makes_any = memory.recurrent is not None and options.ctx_checkpoints > 0
        self._faults = frozenset(faults)
        self.records: dict[int, PromptReuseRecord] = {}
        """What the newest prompt of each sequence reused."""

    def best(self, free: Sequence[int], tokens: Sequence[int]) -> int:
        """The free sequence that can reuse most of a prompt; ties go to the first."""
        return max(free, key=lambda seq: self.reuse(seq, tokens)[0])

    def reuse(self, seq: int, tokens: Sequence[int]) -> PromptReuse:
        """What a prompt could reuse of a sequence; changes nothing. The last token of the prompt is
        always decoded again, because logits are not kept."""
        held, recurrent = self.tokens[seq], self.memory.recurrent
        n = min(n_common(held, tokens), len(tokens) - 1)
        depth = len(held) - n
        if depth == 0 or recurrent is None or depth <= recurrent.valid_depth(seq):
            return n, None
        checkpoint = self.checkpoints[seq].newest(n)
        return checkpoint.pos_max + 1 if checkpoint else 0, checkpoint

    def resume(self, seq: int, tokens: Sequence[int], seq_id: int = 0) -> PromptReuse:
        """Prepare a sequence for a prompt: keep the reusable part and remove the rest.

        What was reused is in `records`. seq_id: of the prompt, for its record.
        """
        held, kept = self.tokens[seq], self.checkpoints[seq]
        recurrent, n_common_ = self.memory.recurrent, n_common(held, tokens)
        found, usable = self.reuse(seq, tokens), list[int]()
        if found[1] and "checkpoint-invalidated" in self._faults:
            found, usable = (0, None), [n for n in kept.lengths if n <= n_common_]
            kept.begin(0)
        n_tokens, checkpoint = found
        depth = len(held) - min(n_common_, len(tokens) - 1)
        record = PromptReuseRecord(
            seq_id,
            seq,
            len(tokens),
            len(held),
            n_common_,
            n_tokens,
            self._source(found, depth),
            self._parts(seq, found, n_common_, len(tokens), is_erased=bool(usable)),
            depth,
            recurrent.valid_depth(seq) if recurrent else None,
            checkpoint.pos_max + 1 if checkpoint else None,
            usable=usable,
        )
        if checkpoint:
            self.memory.restore(seq, checkpoint)
        else:
            self.memory.seq_rm(seq, n_tokens)
            if recurrent and "rollback-twice" in self._faults and 0 < depth < n_tokens:
                recurrent.seq_rm(seq, n_tokens - depth)
        record.erased = kept.begin(n_common_) + usable
        record.held = kept.sizes
        record.cell_tokens = self.memory.attention.seq_pos_max(seq) + 1
        if recurrent:
            record.state_tokens = recurrent.seq_pos_max(seq) + 1
        self.records[seq] = record
        self.tokens[seq] = list(tokens[:n_tokens])
        return found

    def _source(self, found: PromptReuse, depth: int) -> ReuseSource:
        n_tokens, checkpoint = found
        if not n_tokens:
            return ReuseSource.NOTHING
        if checkpoint:
            return ReuseSource.CHECKPOINT
        if not depth:
            return ReuseSource.LIVE
        return ReuseSource.ROLLBACK if self.memory.recurrent else ReuseSource.CELLS

    def _parts(
        self, seq: int, found: PromptReuse, n_common_: int, n_prompt: int, *, is_erased: bool
    ) -> list[ProcessedPart]:
        """The parts of a prompt that must be processed, in order."""
        n_reused, checkpoint = found
        kept, n_held = self.checkpoints[seq], len(self.tokens[seq])
        parts, n = [], min(n_common_, n_prompt - 1)
        if n_reused < n:
            why = WhyProcessed.NO_CHECKPOINT
            if is_erased:
                why = WhyProcessed.ERASED
            elif any(n_reused < at <= n for at in kept.evicted):
                why = WhyProcessed.EVICTED
            elif checkpoint:
                why = WhyProcessed.BEHIND_CHECKPOINT
            elif kept.is_off:
                why = WhyProcessed.OFF
            parts.append(ProcessedPart(n_reused, n, why))
        why = WhyProcessed.NEW if n_common_ == n_held else WhyProcessed.DIFFERS
        if n_common_ >= n_prompt:
            why = WhyProcessed.LAST
        elif not n_held:
            why = WhyProcessed.FIRST
        return [*parts, ProcessedPart(n, n_prompt, why)]

    def observe(self, seq: int, tokens: Sequence[int]) -> None:
        """Note that these tokens were appended to a sequence's memory."""
        self.tokens[seq].extend(tokens)

    def part_end(self, prompt: Prompt, n_done: int) -> int:
        """End of the part of a prompt that starts at token n_done: the next checkpoint position,
        else the end of the prompt."""
        n_all, n_prompt = len(prompt.tokens), len(prompt.tokens) - prompt.n_written
        if not self._makes_any:
            return n_all
        places = cuts(n_prompt, self._n_ubatch, prompt.message_starts)
        return next((at for at in places if at > n_done), n_all)

    def checkpoint(self, seq: int, prompt: Prompt, n_done: int) -> int:
        """Save the state after n_done tokens of a prompt if a checkpoint is due; returns its
        bytes."""
        kept = self.checkpoints[seq]
        if not self._makes_any or not kept.wants(
            n_done, len(prompt.tokens) - prompt.n_written, self._n_ubatch, prompt.message_starts
        ):
            return 0
        save = self.memory.save(seq, self._device)
        if "checkpoint-boundary" in self._faults:
            save = _one_token_on(save)
        evicted = kept.add(save)
        if record := self.records.get(seq):
            record.created.append(SavedCheckpoint(save.pos_max + 1, n_done, save.n_bytes))
            record.evicted += [] if evicted is None else [evicted]
            record.held = kept.sizes
        return save.n_bytes


def _one_token_on(save: SequenceCheckpoint) -> SequenceCheckpoint:
    """The same state labelled as one token longer (a planted fault)."""
    assert save.recurrent is not None  # attention has nothing to save
    recurrent = replace(save.recurrent, pos=save.recurrent.pos + 1)
    return replace(save, pos_max=save.pos_max + 1, recurrent=recurrent)


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Memory and drafters that outlive a run. key: models, options and sizes they were made for.
    drafters: the stateful ones, by name."""

    key: tuple[object, ...]
    held: HeldSequences
    drafters: Mapping[str, Drafter]

    @property
    def memory(self) -> HybridMemory:
        """The target's memory."""
        return self.held.memory


class PromptCache:
    """What one run leaves in memory for the next. Pass it to Session.start for each run; a run with
    another key finds it empty.

    A run takes the memory out and puts it back at its end. So two runs never share one, and a
    failed run, whose memory cannot be trusted, does not return it.
    """

    def __init__(self, options: CacheOptions | None = None) -> None:
        self.options = options or CacheOptions()
        self._cached: CachedRun | None = None

    def take(self, key: tuple[object, ...]) -> CachedRun | None:
        """The cached run if it has this key, else None; either way the cache is empty
        afterwards."""
        cached, self._cached = self._cached, None
        if cached is None or cached.key != key:
            return None
        if recurrent := cached.memory.recurrent:
            recurrent.traffic = RecurrentTraffic()  # every run counts its own traffic
        return cached

    def keep(
        self,
        key: tuple[object, ...],
        memory: HybridMemory,
        drafters: Sequence[Drafter],
        options: RunOptions,
    ) -> CachedRun:
        """A cached run around a new memory, which the caller returns with `put` at the end of the
        run."""
        device = torch.device("cpu") if options.checkpoint_device == "host" else None
        n_ubatch = min(options.n_ubatch, options.n_batch)
        held = HeldSequences(memory, self.options, n_ubatch, device, options.faults)
        own = {drafter.name: drafter for drafter in drafters if drafter.name in model_drafters()}
        return CachedRun(key, held, own)

    def put(self, cached: CachedRun) -> None:
        """Return the memory of a finished run for the next one."""
        self._cached = cached
