"""The sampler of a request, and by how much logits would have to differ for it to choose an emitted
token."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.errors import OptionError
from engine.observe.server.request_options import PER_REQUEST
from engine.sampling.distribution import Distribution
from engine.sampling.options import SamplerOptions
from engine.sampling.sampler import LogitBias, Penalties, Sampler

_FIELDS = {
    name: path[-1]
    for path, name in PER_REQUEST.items()
    if path[0] == "sampler" and name not in ("seed", "logit_bias")
}
"""llama-server's names of numeric settings, and ours."""

_ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p"]
_ORDER += ["top_p", "min_p", "xtc", "temperature"]
_OFF: dict[str, tuple[Any, ...]] = {
    "grammar": ("", None),
    "json_schema": (None,),
    "response_format": (None, {"type": "text"}),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "mirostat": (0,),
    "lora": ([], None),
    "samplers": (_ORDER, None),
    "tools": ([], None),
}
"""Settings that change what may be chosen and are not supported here, with the values that switch
them off."""
_OTHERS = "top_n_sigma", "adaptive_target", "logit_bias", "ignore_eos", "seed"
SAMPLING = (*_FIELDS, *_OFF, *_OTHERS)
"""Settings of a request that decide which tokens its sampler chooses."""
_ANY = 1 << 31
_HALVINGS = 12
_MOST_BISECTED = 64
"""Most tokens of a text that are bisected; a text with more is another model's."""


RequestSampling = tuple[SamplerOptions, Collection[int]]
"""What a sequence was sampled with, and token ids that were never chosen."""


class NotJudgedError(Exception):
    """A request's settings cannot be computed here. The message is a sentence."""


def request_sampling(
    settings: Mapping[str, Any], end_tokens: Collection[int], n_vocab: int
) -> RequestSampling:
    """Read the settings of a request as llama-server names them, which may come from a file.

    end_tokens, n_vocab: of the vocabulary. Missing settings have the server's defaults. Raises
    NotJudgedError.
    """
    if not isinstance(settings.get("temperature"), int | float):
        raise NotJudgedError("The settings of the request are not known.")
    for name, values in _OFF.items():
        if name in settings and settings[name] not in values:
            raise NotJudgedError(f"The request's {name} also affects which tokens can be chosen.")
    for name in ("top_n_sigma", "adaptive_target"):
        if isinstance(value := settings.get(name), int | float) and value >= 0:
            raise NotJudgedError(f"The request's {name} also affects which tokens can be chosen.")
    named = {ours: settings[name] for name, ours in _FIELDS.items() if name in settings}
    try:
        if not all(_is_number(value) for value in named.values()):
            raise NotJudgedError("The settings of the request are not numbers.")
        for name in ("top_k", "repeat_last_n"):
            if name in named:
                named[name] = int(named[name])
        # the server treats values out of range as off
        for name in ("top_p", "typical_p"):
            if name in named and not 0 < named[name] < 1:
                named[name] = 1.0
        for name in ("top_k", "min_p"):
            if name in named:
                named[name] = max(0, named[name])
        options = SamplerOptions(**named, logit_bias=_biases(settings.get("logit_bias"), n_vocab))
    except (OptionError, OverflowError) as error:
        raise NotJudgedError(f"The settings of the request are invalid: {error}") from None
    banned = end_tokens if settings.get("ignore_eos") is True else ()
    return options, banned


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _biases(entries: Any, n_vocab: int) -> tuple[tuple[int, float], ...]:
    """Token ids and biases; false and null ban the token."""
    found = []
    for entry in entries if isinstance(entries, list | tuple) else ():
        token, bias = (
            (entry.get("token"), entry.get("bias"))
            if isinstance(entry, dict)
            else entry
            if isinstance(entry, list | tuple) and len(entry) == 2
            else (None, None)
        )
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < n_vocab:
            raise NotJudgedError("The request's logit_bias has keys that are not tokens.")
        found.append((token, float(bias or 0) if _is_number(bias) else -math.inf))
    return tuple(found)


def is_set_alike(name: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting are the same one; servers keep numbers in single precision
    and biases in a form of their own."""
    off = _OFF.get(name, ())
    if one in off and other in off:
        return True
    if name == "logit_bias":
        try:
            one, other = (sorted(_biases(value, _ANY)) for value in (one, other))
        except NotJudgedError:
            return bool(one == other)
    try:
        if name == "top_k":  # from 0 down: all
            one, other = max(0, one), max(0, other)
        return math.isclose(float(one), float(other), rel_tol=1e-6, abs_tol=1e-9)
    except (TypeError, ValueError):
        return bool(one == other)


class EmittedJudge:
    """Judges the tokens of one sequence, in order. history: the prompt, for penalties."""

    def __init__(self, sampling: RequestSampling, history: Sequence[int]) -> None:
        options, banned = sampling
        self._is_greedy = options.temp <= 0
        self._bias = LogitBias(options.logit_bias, banned)
        self._penalties = Penalties(options, history)
        chain = replace(
            options, logit_bias=(), repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
        )
        self._chain = Sampler(chain)
        self._keeps_best = options.typical_p >= 1
        self._n_bisected = 0

    def shortfalls(self, logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
        """By how much the logits [n, n_vocab] of better tokens would have to be lower for the
        sampler to be able to choose each of these n tokens: 0 if it can. An upper bound for tokens
        after the first _MOST_BISECTED that it cannot choose."""
        logits = self._bias.apply(logits)
        if not self._penalties.active and self._keeps_best:
            at = torch.tensor(tokens, device=logits.device).unsqueeze(1)
            gaps = (logits.amax(1) - logits.gather(1, at)[:, 0]).tolist()
            if self._is_greedy:
                return list(gaps)
            return [
                self._shortfall(row, token) if gap else 0.0
                for row, token, gap in zip(logits, tokens, gaps, strict=True)
            ]
        found = []
        for row, token in zip(logits, tokens, strict=True):
            row = self._penalties.apply(row) if self._penalties.active else row
            found.append(self._shortfall(row, token))
            self._penalties.accept(token)
        return found

    def distributions(
        self, logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[int]
    ) -> list[Distribution]:
        """The distributions that the sampler draws from at some rows, ascending, of logits [n,
        n_vocab]; tokens: the n tokens emitted."""
        logits = self._bias.apply(logits)
        if not self._penalties.active:
            draw = self._chain.rows(logits[list(rows)]) if rows else None
            return [draw(i) for i in range(len(rows))] if draw else []
        found, wanted = [], set(rows)
        for row, token in enumerate(tokens):
            if row in wanted:
                moved = self._penalties.apply(logits[row])
                found.append(self._chain.rows(moved.unsqueeze(0))(0))
            self._penalties.accept(token)
        return found

    def _shortfall(self, row: torch.Tensor, token: int) -> float:
        gap = float(row.amax() - row[token])
        if self._is_greedy or not math.isfinite(gap):
            return gap if gap == gap else math.inf
        low, high = 0.0, gap
        if self._may_choose(row, token, low):
            return 0.0
        self._n_bisected += 1
        if self._n_bisected > _MOST_BISECTED:
            return high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._may_choose(row, token, middle):
                high = middle
            else:
                low = middle
        return high

    def _may_choose(self, row: torch.Tensor, token: int, amount: float) -> bool:
        """Whether the token may be chosen if the logits of all better ones are lower by an
        amount."""
        moved = torch.where(row > row[token], row - amount, row) if amount else row
        return self._chain.rows(moved.unsqueeze(0))(0).of(token) > 0
