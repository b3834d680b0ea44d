"""The judge of a sequence that chooses its own tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from engine.decode.acceptance_rules import RULES, SyntheticAcceptance, keep
from engine.decode.rollback import VerifyAgain
from engine.decode.sequences import DecodingSequence
from engine.decode.verify import Acceptance, match
from engine.draft.drafter import Draft
from engine.options import RunOptions
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import Sampler


class SequenceJudge:
    """Judges one draft by the sequence's sampler and the rule of the options.

    Tokens that were accepted by rejection are never judged again: they are decided, with random
    numbers and a q that belong to the draft, and to draw them again could only change their
    distribution.

    check: called before tokens are put out; may raise.
    """

    def __init__(
        self,
        sequence: DecodingSequence,
        options: RunOptions,
        n_ctx: int,
        end_tokens: Collection[int],
        synthetic: SyntheticAcceptance | None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._sequence, self._options, self._n_ctx = sequence, options, n_ctx
        self._end_tokens, self._synthetic = end_tokens, synthetic
        self._check = check
        self._draft = Draft()
        self._before: Sampler | None = None
        self._forgets = "sampler-not-restored" in options.faults

    @property
    def again(self) -> VerifyAgain | None:
        """Verifies a replay where the options ask for it."""
        verifies = self._options.replay == "verify" and self._options.spec.accept == "match"
        return self._verify_again if verifies else None

    def accept(self, draft: Draft, logits: torch.Tensor) -> Acceptance:
        """See engine.decode.verify_loop.Judge."""
        self._draft = draft
        if draft.tokens and self.again:  # only drafts are replayed
            self._before = self._sequence.sampler.clone()
        sampler, n_drafted = self._sequence.sampler, len(draft.tokens)
        rows = sampler.rows(logits)
        if self._synthetic:
            accepted = self._synthetic.accept(
                self._sequence.seq_id, draft, rows, sampler, self._end_tokens
            )
        else:
            accepted = RULES[self._options.spec.accept](draft, rows, sampler, self._end_tokens)
        if "stale-logits" in self._options.faults and len(accepted.tokens) <= n_drafted:
            sampler.retract()
            stale = match(Draft(), lambda _: rows(n_drafted), sampler, ())
            accepted.tokens[-1:], accepted.own_p = stale.tokens, stale.own_p
            accepted.own_row = n_drafted
        if self._forgets and len(accepted.tokens) <= n_drafted:
            sampler.retract()
            for token in draft.tokens[len(accepted.tokens) - 1 :]:
                sampler.uniform()
                sampler.accept(token)
        accepted.allowed = sampler.allowed
        return accepted

    def emit(self, tokens: list[int]) -> int:
        """See engine.decode.verify_loop.Judge."""
        if self._check:
            self._check()
        sequence = self._sequence
        return sequence.emit(
            tokens, sequence.n_tokens + 1, self._options, self._n_ctx, self._end_tokens
        )

    def _verify_again(self, tokens: list[int], logits: torch.Tensor) -> Acceptance:
        sampler, drafted = self._sequence.sampler, self._draft.tokens
        if not self._forgets:
            assert self._before is not None  # what is verified again was judged before
            sampler.copy_from(self._before)
        rows = sampler.rows(logits)
        seen: dict[int, Distribution] = {}

        def row(i: int) -> Distribution:
            seen[i] = rows(i)
            return seen[i]

        if self._synthetic:
            found = keep(Draft(tokens), len(tokens), row, sampler)
        else:
            found = match(Draft(tokens), row, sampler, self._end_tokens)
        # what was drafted is still judged, and not the tokens that the replay took for a draft
        own = min(len(found.tokens), len(tokens)) - 1

        def p(i: int, token: int) -> float:
            return seen[i].of(token) if i in seen else math.nan

        found.judged_p = [p(i, token) for i, token in enumerate(drafted[: own + 1])]
        found.judged_q = [math.nan] * len(found.judged_p)
        found.own_p = [p(i, found.tokens[i]) for i in range(own, len(found.tokens))]
        found.allowed = sampler.allowed
        return found
