"""The sampler chain and the random numbers of one sequence.

The order is llama.cpp's: logit bias, penalties, top-k, typical, top-p, min-p, temperature. Tokens
that a grammar forbids get -inf before top-k.

Speculation samples positions one by one with the same sampler, so a run draws as many random
numbers as plain decoding, in the same order. A temperature of 0 or less selects the most probable
token after bias and penalties; the filters are then ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.machine.device import read, upload
from engine.sampling.distribution import Distribution, softmax
from engine.sampling.grammar import BANNED, AllowedTokens, GrammarState, masked
from engine.sampling.options import SamplerOptions
from kernels.rows.record import on_host
from kernels.rows.reductions import top_k

RowDistribution = Callable[[int], Distribution]
"""The target's distribution at a row of a batch. With penalties or a grammar it depends on the
tokens accepted so far: rows must be requested in order, each before its token is accepted."""


class SamplerState(NamedTuple):
    """A sampler's state. random: of its generator. Other fields as in Sampler."""

    accepted: list[int]
    history: list[int]
    grammar: GrammarState | None
    random: Mapping[str, Any]

    def differs_from(self, plain: SamplerState) -> str:
        """What differs from a sampler that only sampled the text: tokens, penalties, grammar or
        random numbers; "" if nothing."""
        if self.accepted != plain.accepted:
            return "tokens"
        if self.history != plain.history:
            return "penalties"
        if self.grammar and plain.grammar and not self.grammar.is_as(plain.grammar):
            return "grammar"
        return "" if self.random == plain.random else "random numbers"


class Sampler:
    """Samples one sequence. The generator is seeded per sequence, as a server does per request.

    banned: token ids that are never chosen (--ignore-eos bans the end-of-generation tokens).
    history: a prompt that the penalties already consider. grammar: the constraint on the text.
    accepted: tokens chosen so far. n_draws: random numbers used for them.
    """

    def __init__(
        self,
        options: SamplerOptions,
        banned: Collection[int] = (),
        history: Sequence[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self._options = options
        self._bias = LogitBias(options.logit_bias, banned)
        self._penalties = Penalties(options, history)
        self._random = np.random.Generator(np.random.PCG64(options.seed))
        self.grammar = grammar
        self.accepted: list[int] = []
        self.n_draws = 0
        self._n_compared = 0
        self.allowed: dict[int, AllowedTokens] = {}
        """The grammar's allowed tokens, by row read since the latest `rows`."""
        self.non_finite: tuple[int, float] | None = None
        """The first row read since the latest `rows` whose largest logit is not finite, and that
        logit: NaN if any of the row is."""

    @property
    def depends_on_text(self) -> bool:
        """Whether distributions depend on previous tokens, not on logits alone."""
        return self.grammar is not None or self._penalties.active

    def clone(self) -> Sampler:
        """A sampler that will draw the same tokens."""
        other = Sampler(self._options)
        other._bias = self._bias
        other.copy_from(self)
        return other

    def copy_from(self, other: Sampler) -> None:
        """Take over the state of `other`."""
        self._random.bit_generator.state = other._random.bit_generator.state
        self._penalties.copy_from(other._penalties)
        self.grammar = other.grammar.clone() if other.grammar else None
        self.accepted, self.n_draws = other.accepted.copy(), other.n_draws
        self._n_compared = 0

    def follow(self, other: Sampler, *, keeps_random: bool) -> None:
        """Continue after the tokens of another sampler, which may have had other options;
        keeps_random: with its random numbers."""
        for token in other.accepted:
            self.accept(token)
        self.n_draws = len(self.accepted)
        if keeps_random:
            self._random.bit_generator.state = other._random.bit_generator.state
            self.n_draws = other.n_draws

    def state(self) -> SamplerState:
        """Its state; the grammar is shared and advances."""
        return SamplerState(
            self.accepted.copy(),
            self._penalties.history.copy(),
            self.grammar,
            self._random.bit_generator.state,
        )

    @property
    def takes_largest(self) -> bool:
        """Whether it selects the token of the largest logit, unless that is banned."""
        return self._options.temp <= 0 and self._bias.only_bans and not self.depends_on_text

    def rows(self, logits: Tensor, record: np.ndarray | None = None) -> RowDistribution:
        """The distributions at the rows of logits [n, n_vocab].

        Without penalties and a grammar all rows are copied to the host at once; with them one at a
        time. record: known facts of the rows (kernels.rows.record).
        """
        self.non_finite, self.allowed = None, {}
        if self.takes_largest:
            tokens, largest = self._best(logits, record)
            if self._bias.bans_none(tokens) and all(map(math.isfinite, largest)):
                return lambda row: Distribution.certain(tokens[row])
        logits = self._bias.apply(logits)
        if self.grammar:
            return partial(self._by_grammar, logits, self.grammar)
        if self._penalties.active:
            return lambda row: self._filter(row, *self._largest(self._penalties.apply(logits[row])))
        ids, values = self._largest(logits)
        return lambda row: self._filter(row, ids[row], values[row])

    def uniform(self) -> float:
        """The next random number, in [0, 1)."""
        self.n_draws += 1
        return float(self._random.random())

    def draw(self, distribution: Distribution) -> int:
        """Draw a token with one random number and accept it."""
        self.n_draws += 1
        token = distribution.at(self._random.random())
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Accept a chosen token, for penalties and grammar of the next position."""
        self._penalties.accept(token)
        self.accepted.append(token)
        if self.grammar:
            self.grammar.accept(token)

    def retract(self) -> None:
        """Take back the newest accepted token; its random number stays consumed."""
        self._penalties.retract()
        self.accepted.pop()
        self._n_compared = min(self._n_compared, len(self.accepted))
        self.n_draws -= 1
        if self.grammar:
            self.grammar.retract()

    def n_astray(self, tokens: Sequence[int]) -> int:
        """How many of the tokens chosen so far differ from these, the text's, or are missing. A
        text only grows: tokens found equal before are not compared again."""
        newest = slice(max(0, self._n_compared - 1), None)
        if len(self.accepted) == len(tokens) and self.accepted[newest] == tokens[newest]:
            self._n_compared = len(tokens)
            return 0
        n_other = sum(a != b for a, b in zip(self.accepted, tokens, strict=False))
        return n_other + abs(len(self.accepted) - len(tokens))

    def _by_grammar(self, logits: Tensor, grammar: GrammarState, row: int) -> Distribution:
        """The distribution at a row; only an end token if the grammar cannot continue."""
        allowed = self.allowed[row] = grammar.allowed()
        if grammar.error:
            return Distribution.certain(grammar.end_token)
        of_row = logits[row]
        if self._penalties.active:
            of_row = self._penalties.apply(of_row)
        ids, values = self._largest(masked(allowed, of_row))
        if values[0] == -math.inf:
            grammar.fail(BANNED)
            return Distribution.certain(grammar.end_token)
        kept = values > -math.inf
        return self._filter(row, ids[kept], values[kept])

    def _largest(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """top-k: ids and logits [..., k], largest first; the only transfer to the host."""
        k = logits.shape[-1]
        if self._options.temp <= 0:
            k = 1
        elif self._options.top_k:
            k = min(k, self._options.top_k)
        values, ids = top_k(logits, k)
        on_host = read(ids, values)
        return on_host[0], on_host[1]

    def _best(self, logits: Tensor, record: np.ndarray | None) -> tuple[list[int], list[float]]:
        """The token of the largest logit of each row, and that logit."""
        if record is None:
            ids, values = self._largest(logits)
            return ids.ravel().tolist(), values.ravel().tolist()
        known = on_host(record)
        return known.best.tolist(), known.values[:, 0].tolist()

    def _filter(self, row: int, ids: np.ndarray, values: np.ndarray) -> Distribution:
        options, is_finite = self._options, math.isfinite(values[0])
        if not is_finite and self.non_finite is None:
            self.non_finite = row, float(values[0])
        if options.temp <= 0 or not is_finite:
            return Distribution.certain(int(ids[0]))
        logits = values.astype(np.float64)
        for keep, parameter, off in (
            (typical, options.typical_p, 1.0),
            (top_p, options.top_p, 1.0),
            (min_p, options.min_p, 0.0),
        ):
            if parameter != off:
                kept = keep(logits, parameter)
                ids, logits = ids[kept], logits[kept]
        return Distribution.of_weights(ids, softmax(logits, options.temp))


# Filters: each takes the remaining logits, float64 [k], largest first, and returns which to keep,
# bool [k], at least one. Probabilities are a softmax over the remaining logits.


def typical(logits: np.ndarray, mass: float) -> np.ndarray:
    """The tokens whose surprise is nearest to the entropy, until their sum exceeds `mass`: locally
    typical sampling (arXiv 2202.00666)."""
    probs = softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = (probs[probs > 0] * surprise[probs > 0]).sum()
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(probs[order]), mass, side="right")) + 1
    kept = np.zeros(len(logits), bool)
    kept[order[:n_kept]] = True
    return kept


def top_p(logits: np.ndarray, mass: float) -> np.ndarray:
    """The most probable tokens until their sum reaches `mass` (arXiv 1904.09751)."""
    n_kept = int(np.searchsorted(np.cumsum(softmax(logits)), mass)) + 1
    return np.arange(len(logits)) < n_kept


def min_p(logits: np.ndarray, share: float) -> np.ndarray:
    """The tokens with at least this share of the best one's probability (arXiv 2407.01082)."""
    return np.exp(logits - logits[0]) >= share


class Penalties:
    """Penalties of one sequence, and the history they consider: the prompt and every token accepted
    since, of which the last n count. The repeat penalty is that of CTRL (arXiv 1909.05858) with
    llama.cpp's rule for negative logits.

    history: tokens so far; kept only while a penalty is active.
    """

    def __init__(self, options: SamplerOptions, history: Sequence[int] = ()) -> None:
        self._last_n = options.repeat_last_n
        self._repeat = options.repeat_penalty
        self._presence = options.presence_penalty
        self._frequency = options.frequency_penalty
        changed = (self._repeat, self._presence, self._frequency) != (1.0, 0.0, 0.0)
        self.active = changed and self._last_n != 0
        self.history = list(history) if self.active else []

    def accept(self, token: int) -> None:
        """Accept a chosen token."""
        if self.active:
            self.history.append(token)

    def retract(self) -> None:
        """Take back the newest token."""
        if self.active:
            self.history.pop()

    def copy_from(self, other: Penalties) -> None:
        """Copy the other's history."""
        self.history = other.history.copy()

    def apply(self, logits: Tensor) -> Tensor:
        """Penalised logits [n_vocab]; the given ones are not changed."""
        recent = self.history if self._last_n < 0 else self.history[-self._last_n :]
        counts = Counter(recent)
        both = torch.tensor([list(counts), list(counts.values())], dtype=torch.int64)
        ids, times = upload(both, logits.device).unbind()
        of_ids = logits[ids]
        of_ids = torch.where(of_ids > 0, of_ids / self._repeat, of_ids * self._repeat)
        of_ids -= times * self._frequency + self._presence
        return logits.index_copy(0, ids, of_ids)


class LogitBias:
    """Biases of one run.

    biases: token id and what is added to its logit; several of one token are summed. banned: token
    ids that get -inf, which is how llama.cpp ignores end tokens.
    """

    def __init__(self, biases: Sequence[tuple[int, float]], banned: Collection[int] = ()) -> None:
        entries = [*biases, *((token, -torch.inf) for token in sorted(banned))]
        self.only_bans = not biases
        """Whether only logits of banned tokens change."""
        self._banned = frozenset(banned)
        self._ids = torch.tensor([token for token, _ in entries], dtype=torch.int64)
        self._values = torch.tensor([bias for _, bias in entries])

    def bans_none(self, tokens: Sequence[int]) -> bool:
        """Whether none of these tokens is banned."""
        return self._banned.isdisjoint(tokens)

    def apply(self, logits: Tensor) -> Tensor:
        """Biased logits [n, n_vocab]; the given ones are not changed."""
        if not self._ids.numel():
            return logits
        if self._ids.device != logits.device:
            self._ids, self._values = self._ids.to(logits.device), self._values.to(logits)
        return logits.index_add(1, self._ids, self._values.expand(logits.shape[0], -1))
