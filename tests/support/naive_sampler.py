"""The sampler chain once more, in plain Python over dictionaries of token -> logit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.options import SamplerOptions

Logits = dict[int, float]


def probabilities(logits: Logits) -> dict[int, float]:
    best = max(logits.values())
    weights = {token: math.exp(logit - best) for token, logit in logits.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def biased(logits: Logits, biases: Sequence[tuple[int, float]]) -> Logits:
    out = dict(logits)
    for token, bias in biases:
        if token in out:
            out[token] += bias
    return out


def penalised(logits: Logits, history: Sequence[int], options: SamplerOptions) -> Logits:
    n = len(history) if options.repeat_last_n == -1 else options.repeat_last_n
    recent = list(history)[max(0, len(history) - n) :]
    out = dict(logits)
    for token in set(recent) & set(out):
        logit = out[token]
        logit = logit * options.repeat_penalty if logit <= 0 else logit / options.repeat_penalty
        logit -= recent.count(token) * options.frequency_penalty
        out[token] = logit - options.presence_penalty
    return out


def top_k(logits: Logits, k: int) -> Logits:
    ranked = sorted(logits, key=lambda token: -logits[token])
    return {token: logits[token] for token in (ranked[:k] if k else ranked)}


def typical(logits: Logits, mass: float) -> Logits:
    if mass >= 1:
        return logits
    probs = probabilities(logits)
    entropy = -sum(p * math.log(p) for p in probs.values() if p > 0)
    ranked = sorted(probs, key=lambda t: abs(-math.log(probs[t] or 1e-300) - entropy))
    kept, total = [], 0.0
    for token in ranked:
        kept.append(token)
        total += probs[token]
        if total > mass:
            break
    return {token: logits[token] for token in kept}


def top_p(logits: Logits, mass: float) -> Logits:
    if mass >= 1:
        return logits
    probs = probabilities(logits)
    kept, total = [], 0.0
    for token in sorted(probs, key=lambda t: -probs[t]):
        kept.append(token)
        total += probs[token]
        if total >= mass:
            break
    return {token: logits[token] for token in kept}


def min_p(logits: Logits, share: float) -> Logits:
    probs = probabilities(logits)
    best = max(probs.values())
    return {token: logits[token] for token, p in probs.items() if p >= share * best}


def chain(
    row: Sequence[float], history: Sequence[int], options: SamplerOptions
) -> dict[int, float]:
    """Token -> probability, by the whole chain in llama.cpp's order."""
    logits = dict(enumerate(row))
    for name in ORDER[:2] if options.temp <= 0 else ORDER:
        logits = step(name, logits, history, options)
    if options.temp <= 0:
        return {max(logits, key=lambda token: logits[token]): 1.0}
    return probabilities(logits)


ORDER = ("bias", "penalties", "top-k", "typical", "top-p", "min-p", "temperature")


def step(name: str, logits: Logits, history: Sequence[int], options: SamplerOptions) -> Logits:
    match name:
        case "bias":
            return biased(logits, options.logit_bias)
        case "penalties":
            return penalised(logits, history, options)
        case "top-k":
            return top_k(logits, options.top_k)
        case "typical":
            return typical(logits, options.typical_p)
        case "top-p":
            return top_p(logits, options.top_p)
        case "min-p":
            return min_p(logits, options.min_p)
        case _:
            return {token: logit / options.temp for token, logit in logits.items()}
