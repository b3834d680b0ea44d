"""The round of one sequence: what was drafted, verified, accepted and undone in it; its phase
clock, and who looks at it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import Span
from engine.machine.clock import run_clock
from engine.trace.records import PHASES

if TYPE_CHECKING:
    from engine.decode.sequences import DecodingSequence
    from engine.draft.drafter import Draft
    from engine.memory.hybrid import HybridMemory
    from engine.model.layers import TargetRows
    from engine.sampling.grammar import AllowedTokens
    from engine.sampling.sampler import Sampler
    from engine.trace.store import TraceStore


@dataclass(slots=True)
class Round:
    """One round of one sequence, filled step by step; the recorder writes it to the trace.

    Fields without a word here are columns of the rounds table (engine.trace.records).

    Draft: number: of the round; seq: memory sequence; tokens: what the target decodes from pos0
    on, without filler: the newest token and the draft, or a part of a prompt. unverified: drafted
    tokens after the draft that the target is not shown. tree: what was drafted where that was a
    tree; once it is verified, draft is the branch that the target chose by, through the nodes of
    path, and n_rows the tokens of all branches.
    Verify: logits: float32 [>= len(accepted), n_vocab], row i chooses accepted[i] and judges
    drafted token i; None if nothing is chosen. record: what is known of these rows
    (kernels.rows.record), None if the pass had none. of_tokens: the target's rows of the tokens
    that stay decoded, [len(accepted), n_embd].
    Judge: accepted: the accepted prefix of the draft and n_own tokens of the target's own, one, or
    two after a replay that agreed. own_row: row of the logits that the last of them was chosen
    from, None = the one at its position. rule_p, rule_q: the target's and the drafter's
    probabilities of each token of `examined` as the rule saw them, NaN or missing where it did not
    look. allowed: what a grammar allowed, by row of the logits. before: the sampler as it was
    before it chose, where it may have to choose again. n_emitted: how many of the accepted tokens,
    from the first, are output; None: all.
    Undo: n_replays: restores done. restored_bytes: put back from checkpoints.
    Record: fact: where the target's softmax at the places of `examined` begins in what was worked
    out of several rounds together.
    """

    number: int
    seq_id: int
    seq: int
    pos0: int
    tokens: Sequence[int]
    draft: Draft | None = None
    unverified: Draft | None = None
    tree: Draft | None = None
    path: Sequence[int] = ()
    n_rows: int = 0
    is_prompt: bool = False
    cache_wrong: int | None = None

    logits: torch.Tensor | None = None
    record: np.ndarray | None = None
    of_tokens: TargetRows | None = None
    rs_idx_before: int | None = None
    valid_depth: int | None = None

    accepted: list[int] = field(default_factory=list)
    n_own: int = 0
    own_row: int | None = None
    rule_p: Sequence[float] = ()
    rule_q: Sequence[float] = ()
    allowed: Mapping[int, AllowedTokens] = field(default_factory=dict)
    accept_rule: str = ""
    before: Sampler | None = None
    n_emitted: int | None = None
    sampler_wrong: int | None = None
    sampler_draws: int | None = None

    rollback_path: str = "none"
    rollback_depth: int = 0
    memory_rollback: int = 0
    rs_idx_after: int | None = None
    n_replays: int = 0
    checkpoint_bytes: int = 0
    restored_bytes: int = 0

    fact: int | None = None

    @property
    def drafted(self) -> Sequence[int]:
        """The drafted tokens that are verified."""
        return self.draft.tokens if self.draft else ()

    @property
    def span(self) -> Span:
        """Its part of a batch: every token has logits, of a whole prompt the last one."""
        n = len(self.tokens)
        return Span(self.seq, self.pos0, self.tokens, [n - 1] if self.is_prompt else range(n))

    @property
    def decoded(self) -> list[int]:
        """The tokens from pos0 on that stay decoded."""
        return list(self.tokens) if self.is_prompt else [self.tokens[0], *self.accepted[:-1]]

    @property
    def pos_next(self) -> int:
        """Position of the first accepted token."""
        return self.pos0 + (len(self.tokens) if self.is_prompt else 1)

    @property
    def n_accepted(self) -> int:
        """Drafted tokens that the target confirmed."""
        return len(self.accepted) - self.n_own

    @property
    def n_kept(self) -> int:
        """Tokens of a verified batch that stay in memory."""
        return self.n_accepted + 1

    @property
    def emitted(self) -> Sequence[int]:
        """The accepted tokens that are output."""
        return self.accepted[: self.n_emitted]

    @property
    def own_kinds(self) -> Sequence[str]:
        """Kinds of the target's own tokens, of engine.trace.records.TOKEN_KINDS."""
        if self.draft is None:
            return ["target"] * self.n_own
        first = "bonus" if self.n_accepted >= len(self.drafted) else "replacement"
        return [first, *["bonus"] * (self.n_own - 1)][: self.n_own]

    @property
    def n_judged(self) -> int:
        """Drafted tokens that were judged: the confirmed ones, and one that was not."""
        return min(len(self.drafted), self.n_accepted + 1)

    @property
    def examined(self) -> tuple[Sequence[int], Sequence[int]]:
        """Each judged draft token and then each token of the target's own; their logits' rows."""
        n_all, drafted = len(self.accepted), self.drafted
        n_accepted = n_all - self.n_own
        n = min(len(drafted), n_accepted + 1)
        rows = [*range(n), *range(n_accepted, n_all)]
        return [*drafted[:n], *self.accepted[n_accepted:]], rows

    @property
    def rows(self) -> torch.Tensor:
        """Logits [len(accepted), n_vocab] that each accepted token was chosen from."""
        n, row = len(self.accepted), self.own_row
        assert self.logits is not None  # tokens were chosen from them
        if row is None:
            return self.logits[:n]
        return torch.cat((self.logits[: n - 1], self.logits[row : row + 1]))


_PLACES = {phase: i for i, phase in enumerate(PHASES)}


def _no_time() -> list[float]:
    return [0.0] * len(PHASES)


@dataclass(slots=True)
class PhaseClock:
    """Milliseconds spent per phase of a round, by all sequences together or by single ones."""

    _common: list[float] = field(default_factory=_no_time)
    _own: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(_no_time))
    _since: float = 0.0

    def start(self) -> None:
        """Begin timing."""
        self._since = run_clock()

    def stop(self, phase: str, seqs: Sequence[int] = ()) -> float:
        """Book the time since `start` under a phase and begin anew; returns its milliseconds.

        seqs: memory sequences that it was spent on, an equal part for each entry; none = all.
        """
        now = run_clock()
        ms = (now - self._since) * 1e3
        place = _PLACES[phase]
        if not seqs:
            self._common[place] += ms
        for seq in seqs:
            self._own[seq][place] += ms / len(seqs)
        self._since = now
        return ms

    def move(self, ms: float, source: str, target: str, seqs: Sequence[int]) -> None:
        """Book time of these sequences to another phase."""
        for seq in seqs:
            self._own[seq][_PLACES[source]] -= ms / len(seqs)
            self._own[seq][_PLACES[target]] += ms / len(seqs)

    def phases(self, seq: int, n_seqs: int) -> list[float]:
        """Milliseconds of PHASES: of this sequence alone, plus its n-th part (n_seqs) of the time
        that all sequences spent together."""
        common = [ms / n_seqs for ms in self._common] if n_seqs > 1 else self._common
        own = self._own.get(seq)
        return [a + b for a, b in zip(common, own, strict=True)] if own else common


WatchRound = Callable[[Round], None]
"""Called with each round that has emitted tokens: round_.emitted, chosen from round_.rows."""


class RoundObserver:
    """Looks at every round of a run, and changes nothing."""

    def begin(
        self,
        sequences: Sequence[DecodingSequence],
        memory: HybridMemory,
        end_tokens: Collection[int],
    ) -> None:
        """The run is about to start. end_tokens: those that end a text."""

    def judged(self, sequence: DecodingSequence, round_: Round) -> None:
        """A sequence has chosen round_.accepted. Except after a prompt, its n_tokens and last are
        still those from before."""

    def closed(
        self, number: int, memory: HybridMemory, running: Sequence[DecodingSequence]
    ) -> None:
        """The round is over. running: sequences with tokens in memory, those that have just
        stopped included."""

    @property
    def n_unseen(self) -> int:
        """Of how many rounds from the next one on it does not look at the memory, where no sequence
        ends."""
        return 0

    def steps(self, trace: TraceStore, run_id: int) -> Generator[None]:
        """A check of the run once it has all its tokens, in small parts. What it found is in the
        run's facts at its end, also if it is closed before."""
        yield from ()
