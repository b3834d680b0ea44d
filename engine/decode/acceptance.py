"""Acceptance rules: how many drafted tokens are kept, and which token the target adds.

`match` samples at every position, so the output equals plain decoding. `reject` preserves the
target's distribution rather than the exact tokens of plain decoding (Leviathan et al. 2023, arXiv
2211.17192): p is the target's distribution after the whole sampler chain, q the distribution the
drafter sampled from. q must not depend on the sampled token, so a draft must not be discarded
because of its tokens. Synthetic acceptance accepts drafted tokens at a given rate, for benchmarks:
it shows the speed that a drafter of that quality would give. Its output text is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from engine.decode.round import Round
from engine.decode.sequences import DecodingSequence, SlotAssignment
from engine.draft.drafter import Draft
from engine.options import RunOptions
from engine.sampling.distribution import Distribution
from engine.sampling.grammar import GrammarState, is_allowed
from engine.sampling.sampler import RowDistribution, Sampler
from engine.trace.facts import RunFacts

AcceptanceRule = Callable[[Draft, RowDistribution, Sampler, Collection[int]], list[int]]
"""A rule that returns the accepted list: the accepted prefix of the draft plus one token of the
target, 1 .. len(draft.tokens) + 1 tokens, each already accepted by the sampler. Rows of the verify
batch are requested in order. An end token inside the draft ends the list."""
REASON = "grammar"
"""Why a draft was cut (see engine.draft.spec.COMMON_REASONS) and why a sequence stopped."""


def match(
    draft: Draft, rows: RowDistribution, sampler: Sampler, end_tokens: Collection[int]
) -> list[int]:
    """Sample at every position; accept a drafted token if the sampler drew the same one.

    One random number is drawn per examined position, so the tokens equal plain decoding.
    """
    accepted: list[int] = []
    for i, drafted in enumerate(draft.tokens):
        token = sampler.draw(rows(i))
        accepted.append(token)
        if token != drafted or closes(i, token, draft, end_tokens):
            return accepted
    return with_bonus(accepted, rows, sampler)


def reject(
    draft: Draft, rows: RowDistribution, sampler: Sampler, end_tokens: Collection[int]
) -> list[int]:
    """Accept each drafted token with probability min(1, p / q).

    The first rejected token is replaced by a sample from `residual`; if the whole draft is
    accepted, the target samples one bonus token. A draft without q counts as certain of its tokens.
    At temperature 0 the result equals that of `match`.
    """
    accepted: list[int] = []
    for i, drafted in enumerate(draft.tokens):
        p, q = rows(i), draft.q[i] if draft.q else Distribution.certain(drafted)
        if sampler.uniform() * q.of(drafted) < p.of(drafted):
            accepted.append(drafted)
            sampler.accept(drafted)
            if not closes(i, drafted, draft, end_tokens):
                continue
        else:
            accepted.append(sampler.draw(residual(p, q)))
        return accepted
    return with_bonus(accepted, rows, sampler)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The normalised positive part of p - q, which the correction token is sampled from."""
    missing = p.probs - np.array([q.of(token) for token in p.ids])
    # p equals q: only rounding can reject here, and then p itself is the right distribution
    return Distribution.of_weights(p.ids, np.maximum(missing, 0)) if (missing > 0).any() else p


def keep(draft: Draft, n: int, rows: RowDistribution, sampler: Sampler) -> list[int]:
    """The first n drafted tokens, plus one that the target samples after them."""
    for token in draft.tokens[:n]:
        sampler.accept(token)
    return with_bonus(draft.tokens[:n], rows, sampler)


def closes(i: int, token: int, draft: Draft, end_tokens: Collection[int]) -> bool:
    """Whether an accepted token ends the list before the end of its draft."""
    return token in end_tokens and i < len(draft.tokens) - 1


def with_bonus(accepted: list[int], rows: RowDistribution, sampler: Sampler) -> list[int]:
    """Add the bonus token that the target samples after a fully accepted draft."""
    return [*accepted, sampler.draw(rows(len(accepted)))]


_NO_DRAFT = Draft()
RULES: dict[str, AcceptanceRule] = {"match": match, "rejection": reject}
"""The keys are those of engine.options.ACCEPT_RULES."""


_STREAM = 1  # added to the seed, so that its random numbers differ from the sampler's


class SyntheticAcceptance:
    """Synthetic acceptance, with a random generator per sequence, seeded like its sampler.

    One random number decides each round, so runs with different draft lengths see the same luck and
    can be compared. rates: from engine.options.acceptance_rates.
    """

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        self._rates, self._seed = rates, seed
        self._random: dict[int, np.random.Generator] = {}

    def follow(self, other: SyntheticAcceptance) -> None:
        """Continue another instance's random numbers if both use the same seed."""
        if other._seed == self._seed:
            self._random = other._random

    def accept(
        self,
        seq_id: int,
        draft: Draft,
        rows: RowDistribution,
        sampler: Sampler,
        end_tokens: Collection[int],
    ) -> list[int]:
        """An AcceptanceRule that decides by chance. It never accepts an end token."""
        if seq_id not in self._random:
            self._random[seq_id] = _luck(self._seed)
        n, luck = 0, self._random[seq_id].random()
        for token, rate in zip(draft.tokens, self._rates, strict=False):
            if token in end_tokens or luck >= rate:
                break
            n += 1
        return keep(draft, n, rows, sampler)


def accepted_by_chance(rates: Sequence[float], seed: int, n: int) -> np.ndarray:
    """How many tokens of a full draft SyntheticAcceptance accepts in each of the first n rounds of
    a sequence, int64 [n]."""
    luck = _luck(seed).random(n)
    found: np.ndarray = (luck[:, None] < np.array(rates)).sum(1)
    return found


def _luck(seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, _STREAM))


class Judge:
    """Applies the acceptance rule of the run's options, with the sampler of each sequence.

    samplers: by seq_id. Tokens accepted by rejection sampling are not judged again in a replay:
    they were decided with the random numbers and the q of their draft, and a second draw would
    change their distribution.
    """

    def __init__(
        self, samplers: Sequence[Sampler], options: RunOptions, end_tokens: Collection[int]
    ) -> None:
        self._samplers, self._options, self._end_tokens = samplers, options, end_tokens
        rates = options.spec.synthetic
        self._synthetic = SyntheticAcceptance(rates, options.sampler.seed) if rates else None
        self._forgets = "sampler-not-restored" in options.faults
        is_match = options.spec.accept == "match"
        self.judges_replays = is_match and options.replay == "verify"
        self.draws_by_token = is_match and not rates
        """Whether the sampler draws one random number for each accepted token."""
        self.forced: dict[int, int] = {}
        """By seq_id: a token that replaces the last one chosen in a round."""

    def follow(self, other: Judge) -> None:
        """Continue from another judge's state."""
        if self._synthetic and other._synthetic:
            self._synthetic.follow(other._synthetic)

    def accept(self, round_: Round) -> None:
        """Judge the draft of a round by its logits, or choose the first token after a prompt."""
        draft, sampler = round_.draft or _NO_DRAFT, self._samplers[round_.seq_id]
        if draft.tokens and self.judges_replays:  # only drafts are replayed
            round_.before = sampler.clone()
        seen, row = self._rows(round_)
        if self._synthetic and not round_.is_prompt:
            accepted = self._synthetic.accept(round_.seq_id, draft, row, sampler, self._end_tokens)
        else:
            accepted = RULES[self._options.spec.accept](draft, row, sampler, self._end_tokens)
        is_rejected, stale_row = len(accepted) <= len(draft.tokens), None
        if is_rejected and "stale-logits" in self._options.faults:
            sampler.retract()
            stale_row = len(draft.tokens)
            accepted[-1] = sampler.draw(row(stale_row))
        if is_rejected and self._forgets:
            sampler.retract()
            for token in draft.tokens[len(accepted) - 1 :]:
                sampler.uniform()
                sampler.accept(token)
        self._force(round_.seq_id, accepted)
        round_.accepted, round_.n_own, round_.own_row = accepted, 1, stale_row
        self._note(round_, seen)

    def branch(self, round_: Round, drafts: Sequence[Draft], logits: Sequence[torch.Tensor]) -> int:
        """The branch of a tree to judge: the first of those from which the sampler will accept most
        tokens. logits: of each branch, [>= its tokens, n_vocab]. Changes no sampler state."""
        sampler = self._samplers[round_.seq_id].clone()
        left, depth = list(range(len(drafts))), 0
        while any(len(drafts[i].tokens) > depth for i in left):
            row = logits[left[0]][depth : depth + 1]
            token = sampler.draw(sampler.rows(row)(0))
            agree = [i for i in left if drafts[i].tokens[depth : depth + 1] == [token]]
            if not agree or token in self._end_tokens:
                return (agree or left)[0]
            left, depth = agree, depth + 1
        return left[0]

    def accept_again(self, round_: Round) -> None:
        """Judge the accepted tokens again as if they were a draft, by the logits of their replay,
        [len(accepted) + 1, n_vocab]. The sampler starts from its state before the round."""
        sampler, replayed = self._samplers[round_.seq_id], Draft(round_.accepted)
        if not self._forgets:
            assert round_.before is not None  # a replay verifies what has been judged before
            sampler.copy_from(round_.before)
        seen, row = self._rows(round_)
        n = len(replayed.tokens)
        if self._synthetic:
            accepted = keep(replayed, n, row, sampler)
        else:
            accepted = match(replayed, row, sampler, self._end_tokens)
        self._force(round_.seq_id, accepted)
        round_.accepted, round_.n_own, round_.own_row = accepted, 1 + (len(accepted) > n), None
        self._note(round_, seen)

    def _force(self, seq_id: int, accepted: list[int]) -> None:
        """Replace the last accepted token by the forced one; its random number stays used."""
        token = self.forced.get(seq_id)
        if token is None:
            return
        sampler = self._samplers[seq_id]
        sampler.retract()
        sampler.accept(token)
        sampler.n_draws += 1
        accepted[-1] = token

    def _rows(self, round_: Round) -> tuple[dict[int, Distribution], RowDistribution]:
        """Distributions by row of the round's logits, and a function that fills them on demand."""
        assert round_.logits is not None  # the rule compares with these
        rows = self._samplers[round_.seq_id].rows(round_.logits, round_.record)
        seen: dict[int, Distribution] = {}

        def row(i: int) -> Distribution:
            seen[i] = rows(i)
            return seen[i]

        return seen, row

    def _note(self, round_: Round, seen: Mapping[int, Distribution]) -> None:
        """Note p and q as the rule saw them, for the draft but not for tokens of a replay.
        Synthetic acceptance looks at neither."""
        round_.allowed = self._samplers[round_.seq_id].allowed
        if round_.draft is None and round_.own_row is None and len(round_.accepted) == 1:
            round_.rule_p = [seen[0].of(round_.accepted[0])]
            return
        tokens, rows = round_.examined
        n = round_.n_judged
        if round_.own_row is not None:
            rows = [*rows[:-1], round_.own_row]
        round_.rule_p = [
            seen[row].of(token) if row in seen and (i >= n or not self._synthetic) else math.nan
            for i, (token, row) in enumerate(zip(tokens, rows, strict=True))
        ]
        if round_.draft and self._options.spec.accept == "rejection" and not self._synthetic:
            q = round_.draft.q
            round_.rule_q = [q[i].of(tokens[i]) if q else 1.0 for i in range(n)]


def cut_draft(slots: SlotAssignment, index: int, draft: Draft) -> None:
    """Cut the draft of a slot's sequence before the first token that its grammar forbids."""
    grammar = slots.sequences[slots.holders[index]].sampler.grammar
    if grammar:
        cut_at_forbidden(draft, grammar)


def cut_at_forbidden(draft: Draft, grammar: GrammarState) -> None:
    """Cut a draft before the first token that the grammar forbids.

    Where tokens are sampled, a forbidden one is never drafted, so the draft is distributed over the
    allowed tokens only: each q is renormalised over them.
    """
    if not draft.q:
        draft.cut(grammar.n_fitting(draft.tokens), REASON)
        return
    at = grammar.clone()
    for i, token in enumerate(draft.tokens):
        allowed = at.allowed()
        if at.error or not is_allowed(allowed, token):
            draft.cut(i, REASON)
            return
        q = draft.q[i]
        kept = np.array([is_allowed(allowed, one) for one in q.ids.tolist()], bool)
        draft.q[i] = Distribution.of_weights(q.ids[kept], q.probs[kept])
        at.accept(token)


def note_grammar_error(facts: RunFacts, round_: int, sequence: DecodingSequence) -> None:
    """Note in the fact `grammar_errors` why the grammar ended a sequence, if it did."""
    grammar = sequence.sampler.grammar
    if grammar and grammar.error:
        pos = len(sequence.prompt.tokens) + len(sequence.emitted)  # position of the missing token
        where = {"round": round_, "seq_id": sequence.seq_id, "pos": pos}
        facts.add_to("grammar_errors", where | {"why": grammar.error})
