"""The check of a run's sampler and acceptance, round by round.

Every sampler of the run has a plain counterpart: it samples from the same logits by the rules of
engine.decode.plain_acceptance and accepts only the text's tokens. Both do the same arithmetic on
the same numbers, so they must agree exactly. The plain one is never copied, and where a row depends
on the tokens before it, it reads one row at a time, as plain decoding does. Several rounds are
checked together, which takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decode.plain_acceptance import PLAIN_RULES
from engine.decode.round import Round
from engine.decode.sequences import DecodingSequence
from engine.draft.drafter import Draft
from engine.options import RunOptions
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import RowDistribution, Sampler, SamplerState
from engine.trace.prompt_reuse import n_common

_SAME_P = 1e-6
_MOST_ROUNDS, _MOST_BYTES = 16, 4 << 20
"""Most rounds, and bytes of their logits, that wait to be checked."""


class SamplerCheck:
    """Checks every sequence until its first difference, which is recorded in `notes`.

    A note has round, seq_id, what and, for a token: pos, token_id, expected_id and about, which
    says what would give the chosen token ("" = nothing that was tried). what: token, probability
    (that the rule used), length (of a synthetic draft), or the part of the sampler's state that
    does not follow from the text (Sampler.differs_from).
    """

    def __init__(
        self,
        make: Callable[[int], Sampler],
        seq_ids: Collection[int],
        options: RunOptions,
        end_tokens: Collection[int],
    ) -> None:
        """make: a sampler for a sequence, before its first token."""
        self._make, self._plain = make, {seq_id: make(seq_id) for seq_id in seq_ids}
        self._options, self._end_tokens = options, end_tokens
        self._rates = options.spec.synthetic
        self._luck: dict[int, np.random.Generator] = {}
        self.n_tokens = 0
        """Tokens that were sampled again."""
        self.notes: list[dict[str, Any]] = []
        self._waiting: list[tuple[Round, Tensor, SamplerState]] = []
        self._n_bytes = 0

    def judged(self, sequence: DecodingSequence, round_: Round) -> None:
        """A round has chosen its accepted tokens from its logits; the sampler is in its state after
        it."""
        if sequence.seq_id not in self._plain:
            return
        state, logits = sequence.sampler.state(), round_.logits
        assert logits is not None  # tokens were chosen from them
        self._waiting.append((round_, logits, state))
        self._n_bytes += logits.nbytes
        # a grammar advances
        if state.grammar or len(self._waiting) == _MOST_ROUNDS or self._n_bytes > _MOST_BYTES:
            self.settle()

    def settle(self) -> None:
        """Check the waiting rounds."""
        waiting, self._waiting, self._n_bytes = self._waiting, [], 0
        all_rows: RowDistribution | None = None
        if waiting and not any(plain.depends_on_text for plain in self._plain.values()):
            # all samplers of a run have the same options
            sampler = next(iter(self._plain.values()))
            all_rows = sampler.rows(torch.cat([logits for _, logits, _ in waiting]))
        first = 0
        for round_, logits, state in waiting:
            plain = self._plain.get(round_.seq_id)
            if plain is not None:
                rows = partial(_nth, all_rows, first) if all_rows else None
                found = self._difference(plain, state, round_, logits, rows)
                self.n_tokens += len(round_.accepted)
                if found:
                    self.notes.append({"round": round_.number, "seq_id": round_.seq_id, **found})
                    del self._plain[round_.seq_id]
            first += len(logits)

    def _difference(
        self,
        plain: Sampler,
        state: SamplerState,
        round_: Round,
        logits: Tensor,
        rows: RowDistribution | None,
    ) -> dict[str, Any]:
        """rows: of the logits, None if they depend on the text."""
        draft, tokens = round_.draft or Draft(), round_.accepted
        known = len(plain.accepted), plain.n_draws
        seen: list[Distribution] = []

        def row(i: int) -> Distribution:
            seen.append(rows(i) if rows else plain.rows(logits[i : i + 1])(0))
            return seen[i]

        if self._rates and not round_.is_prompt:
            n = self._n_by_luck(round_.seq_id, draft)
            if not round_.n_replays and n != len(tokens) - 1:
                return {"what": "length", "n": len(tokens) - 1, "n_expected": n}
            expected = list(tokens[:-1])
            for i, token in enumerate(expected):
                row(i)
                plain.accept(token)
            expected.append(plain.draw(row(len(expected))))
        elif self._options.spec.accept == "match" or round_.is_prompt:
            # a replay may have chosen one token more than drafted
            expected = PLAIN_RULES["match"](Draft(tokens[:-1]), row, plain, ())
        else:
            expected = PLAIN_RULES["rejection"](draft, row, plain, self._end_tokens)
        if expected != tokens:
            at = n_common(expected, tokens)
            return {
                "what": "token",
                "pos": round_.pos_next + at,
                "token_id": tokens[at] if at < len(tokens) else None,
                "expected_id": expected[at] if at < len(expected) else None,
                "about": self._about(
                    self._before(round_.seq_id, plain, *known), draft, logits, tokens, at
                ),
            }
        what = state.differs_from(plain.state())
        if what:
            return {"what": what}
        return {} if round_.n_replays or self._rates else _wrong_p(round_, seen)

    def _before(self, seq_id: int, plain: Sampler, n_accepted: int, n_draws: int) -> Sampler:
        """The plain sampler as it was after this many tokens and random numbers."""
        sampler = self._make(seq_id)
        for token in plain.accepted[:n_accepted]:
            sampler.accept(token)
        for _ in range(n_draws):
            sampler.uniform()
        return sampler

    def _n_by_luck(self, seq_id: int, draft: Draft) -> int:
        """Draft tokens that one random number of the sequence would keep."""
        seed = (self._options.sampler.seed, 1)
        luck = self._luck.setdefault(seq_id, np.random.default_rng(seed)).random()
        n = 0
        while n < min(len(draft.tokens), len(self._rates)):
            if draft.tokens[n] in self._end_tokens or luck >= self._rates[n]:
                break
            n += 1
        return n

    def _about(
        self, before: Sampler, draft: Draft, logits: Tensor, tokens: Sequence[int], at: int
    ) -> str:
        """What explains the wrong accepted token at index `at`."""
        if at >= len(tokens):
            return ""
        token, drafted = tokens[at], list(draft.tokens)
        is_drafted = drafted[at : at + 1] == [token]
        if self._options.spec.accept == "rejection" and not self._rates:
            return self._about_rejection(before, draft, logits, tokens, at)

        def drawn(seen: Sequence[int], i: int, n_used: int) -> int:
            """The token of row i after these tokens and n_used random numbers."""
            sampler = before.clone()
            for one in seen:
                sampler.accept(one)
            for _ in range(n_used):
                sampler.uniform()
            return sampler.draw(sampler.rows(logits)(i))

        seen = list(tokens[:at])
        for other in range(len(logits)):
            if other != at and drawn(seen, other, at) == token:
                return f"row {other} of the batch instead of row {at}"
        if drawn([*seen, *drafted], at, at) == token:
            return "the whole draft in the penalties' window, or in the grammar"
        for used, words in ((at + 1, "a random number too late"), (at - 1, "one too early")):
            if used >= 0 and drawn(seen, at, used) == token:
                return words
        if is_drafted and int(logits[at].argmax()) == token:
            return "the drafted token, the most probable one, without sampling"
        return "the drafted token, whatever token was sampled" if is_drafted else ""

    def _about_rejection(
        self, before: Sampler, draft: Draft, logits: Tensor, tokens: Sequence[int], at: int
    ) -> str:
        sampler = before.clone()
        rows: RowDistribution = sampler.rows(logits)
        for token in tokens[:at]:
            rows(len(sampler.accepted) - len(before.accepted))
            sampler.uniform()
            sampler.accept(token)
        token, p = tokens[at], rows(at)
        numbers = [sampler.uniform() for _ in range(2)]
        if draft.tokens[at : at + 1] == [token]:
            best = " which is the most probable one," if int(logits[at].argmax()) == token else ""
            return f"the drafted token,{best} kept where p / q rejects it"
        if at < len(draft.tokens) and p.at(numbers[1]) == token:
            return "a token sampled from p instead of the positive part of p - q"
        if p.at(numbers[0]) == token:
            return "a token sampled from p, without the rule"
        for other in range(len(logits)):
            if other != at and sampler.rows(logits)(other).at(numbers[0]) == token:
                return f"row {other} of the batch instead of row {at}"
        return ""


def _nth(rows: RowDistribution, first: int, i: int) -> Distribution:
    """Row i of those from `first` on."""
    return rows(first + i)


def _wrong_p(round_: Round, seen: Sequence[Distribution]) -> dict[str, Any]:
    """The first recorded probability that the rule cannot have used."""
    for token, i, p in zip(*round_.examined, round_.rule_p, strict=True):
        if i < len(seen) and abs(seen[i].of(token) - p) > _SAME_P:
            expected = seen[i].of(token)
            pos = round_.pos_next + i
            return {"what": "probability", "pos": pos, "token_id": token, "p": p, "plain": expected}
    return {}
