"""Acceptance rules of servers, by name.

q is the probability with which the drafter sampled the token, 1 if it took its best one. llama.cpp
#27694, vLLM #46781 and #45229 (open), SGLang's target-only sampling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.errors import OptionError
from engine.foreign import LONGEST_DRAFT
from engine.trace.facts import RunFacts

MATCH, REJECTION, BLOCK, SYNTHETIC = "match", "rejection", "block", "synthetic"
THRESHOLD, RELAXED = "threshold", "relaxed"
ABOUT = {
    MATCH: "the token that the target samples, accepted with probability p (llama-server, greedy)",
    REJECTION: "min(1, p/q) (llama-server --spec-draft-sampling probabilistic, vLLM)",
    BLOCK: "block verification, accepts at least as many as `rejection` (vLLM, SGLang)",
    SYNTHETIC: "synthetic[:R1,R2,…]: at fixed rates, whatever the target's tokens (vLLM, "
    "llama-server --spec-synth-rates)",
    THRESHOLD: "threshold:SINGLE,ACC: p of at least SINGLE, else p/ACC (SGLang)",
    RELAXED: "relaxed:RATIO: greedy, p of at least RATIO times that of the best token (vLLM)",
}
_DEFAULTS: dict[str, tuple[float, ...]] = {THRESHOLD: (1.0, 1.0), RELAXED: (1.0,)}
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class AcceptRule:
    """A rule with its values: RATIO of `relaxed`, SINGLE and ACC of `threshold`; for `synthetic`
    the probability that each number of tokens is accepted, from 1 on, if known."""

    name: str = MATCH
    values: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str) -> AcceptRule:
        """Parse `NAME` or `NAME:VALUE,VALUE`. Raises OptionError."""
        name, _, rest = text.partition(":")
        defaults = _DEFAULTS.get(name, ())
        try:
            given = tuple(float(one) for one in rest.split(",")) if rest else ()
        except ValueError:
            given = (math.nan,)
        is_right = len(given) <= len(defaults) and all(0 < one <= 1 for one in given)
        if name == SYNTHETIC:
            falls = all(0 <= b <= a <= 1 for a, b in pairwise((1.0, *given)))
            is_right = falls and len(given) <= LONGEST_DRAFT
        if name not in ABOUT or not is_right:
            raise OptionError(
                f"{text[:60]!r} is not an acceptance rule.",
                f"Name one of {', '.join(ABOUT)}; values are above 0 and at most 1.",
            )
        return cls(name, (*given, *defaults[len(given) :]))

    @property
    def text(self) -> str:
        """The rule in the syntax of `read`."""
        return self.name + ":" * bool(self.values) + ",".join(f"{one:g}" for one in self.values)

    @property
    def draws(self) -> bool:
        """Whether the drafter samples its tokens, so that q matters."""
        return self.name in (REJECTION, BLOCK)

    @property
    def is_lossless(self) -> bool:
        """Whether the text keeps the target's distribution."""
        if self.name == SYNTHETIC:
            return False
        return all(one >= 1 for one in self.values)

    @property
    def leeway(self) -> float:
        """How far the logit of an accepted token may be below the target's choice; 0 for exact
        rules."""
        if self.name == SYNTHETIC:
            return math.inf
        return -math.log(self.values[0]) if self.name == RELAXED else 0.0

    def chance(
        self,
        p: np.ndarray,
        q: np.ndarray,
        place: np.ndarray | None = None,
        ratio: np.ndarray | None = None,
    ) -> np.ndarray:
        """Acceptance probability of a token whose predecessors in the draft were accepted, [n], NaN
        if unknown. p: of the target's sampler; q: of the drafter, NaN for tokens not sampled; place
        in the draft; ratio of the target's p to that of its best token, before any sampler. For
        `block` that of `rejection`."""
        if self.name == SYNTHETIC:
            return self._by_place(place, len(p))
        if self.name == RELAXED:
            if ratio is None:
                return np.full(len(p), np.nan)
            return np.where(np.isnan(ratio), np.nan, 1.0 * (ratio >= self.values[0]))
        if self.name == THRESHOLD:
            single, acc = self.values
            return np.where(p >= single, 1.0, np.minimum(1.0, p / acc))
        drawn = np.nan_to_num(q, nan=1.0)
        return np.asarray(np.minimum(1.0, p / np.maximum(drawn, _TINY)))

    def _by_place(self, place: np.ndarray | None, n: int) -> np.ndarray:
        """For `synthetic`, whose rates are of all tokens up to a place."""
        rates = np.array((1.0, *self.values))
        if place is None or len(rates) == 1:
            return np.full(n, np.nan)
        known = np.append(rates[1:] / np.maximum(rates[:-1], _TINY), np.nan)
        return known[np.minimum(place, len(known) - 1)]

    def carried(self, p: np.ndarray, q: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Factor of the acceptance probability left over by earlier tokens, [n], for tokens of
        drafts in order; NaN if one of them is unknown. 1 for all rules but `block`: there w is the
        product of p/q, capped at 1 after each token, and the next token is accepted with the sum of
        min(p, q / w) over the vocabulary (Sun et al. 2024, arXiv 2403.10444: that of min(w p, q)
        over all drafts, of which a share w has come so far)."""
        found = np.ones(len(p))
        if self.name == BLOCK:
            for i in np.flatnonzero(place > 0).tolist():
                follows = i and place[i] == place[i - 1] + 1
                ratio = p[i - 1] / max(q[i - 1], _TINY) if follows else np.nan
                found[i] = min(1.0, found[i - 1] * ratio) if ratio == ratio else np.nan
        return found

    @staticmethod
    def expected(p: np.ndarray, q: np.ndarray, before: float = 1.0) -> tuple[float, float]:
        """Bounds of the probability that a sampled token is accepted. p, q: of the known tokens,
        [k]; all others share the rest. before: from `carried`."""
        is_known = before == before
        w = max(before, _TINY) if is_known else 1.0
        least = float(np.minimum(p, q / w).sum())
        rest = min(1.0 - float(p.sum()), (1.0 - float(q.sum())) / w) if is_known else 1.0
        return least, min(1.0, least + max(0.0, rest))


def rule_of(facts: RunFacts) -> AcceptRule | None:
    """The rule of a run, from its facts, else its options; None if neither names one."""
    named = facts.accept_rule
    if named is None and facts.options is not None and facts.options.spec.types:
        with suppress(OptionError):  # from a file
            if rates := facts.options.spec.synthetic:
                return AcceptRule(SYNTHETIC, rates)
    if named is None and facts.options is not None:
        named = facts.options.spec.accept
    try:
        return None if named is None else AcceptRule.read(named)
    except OptionError:  # from a file
        return None


_SAID = re.compile(
    r"(?P<llama>spec[-_]draft[-_]sampling[= '\",:]{1,8}probabilistic)"
    r"|rejection_sample_method[= '\",:]{1,8}(?P<vllm>\w{1,20})"
    r"|draft_sample_method[= '\",:]{1,8}(?P<draft>\w{1,20})"
    r"|relax_ratio[= '\",:]{1,8}(?P<ratio>[\d.]{1,12})"
    r"|accept[-_]threshold[-_](?P<which>single|acc)[= '\",:]{1,8}(?P<value>[\d.]{1,12})"
    r"|spec[-_]synth[-_]rates[= '\",:]{1,8}(?P<rates>[\d.,]{1,1024})"
    r"|(?P<sglang>speculative[-_]use[-_]rejection[-_]sampling(?![= '\":]{1,4}False))",
    re.IGNORECASE,
)


def rule_said(text: str) -> AcceptRule | None:
    """The rule named by a server's command line or settings line; None if it names none."""
    found = dict(_pairs(text))
    if "single" in found or "acc" in found:
        values = tuple(_share(found.get(name, "1")) for name in ("single", "acc"))
        if min(values) < 1:
            return AcceptRule(THRESHOLD, values)
    if "ratio" in found:
        return AcceptRule(RELAXED, (_share(found["ratio"]),))
    if rates := found.get("rates", "").strip(","):
        with suppress(OptionError):
            return AcceptRule.read(f"{SYNTHETIC}:{rates}")
        return AcceptRule(SYNTHETIC)
    method = found.get("vllm", "")
    if method in (BLOCK, SYNTHETIC):
        return AcceptRule(method)
    if "llama" in found or "sglang" in found or found.get("draft") == "probabilistic":
        return AcceptRule(REJECTION)
    return AcceptRule() if found else None


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for one in _SAID.finditer(text):
        if one["which"]:
            yield one["which"].lower(), one["value"]
            continue
        yield from ((k, v.lower()) for k, v in one.groupdict().items() if v and k != "value")


def _share(text: str) -> float:
    """A number above 0 and at most 1, 1 for anything else."""
    value = float(text) if re.fullmatch(r"\d{1,4}(?:\.\d{0,8})?|\.\d{1,8}", text) else 1.0
    return value if 0 < value <= 1 else 1.0
