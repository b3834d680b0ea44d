"""Tokens that the target emitted, judged by its own distributions: another model's text, a lossy or
a greedy rule, a sampler that is not rolled back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.audit.draft_models import candidates
from engine.draft.model_drafter import N_CANDIDATES
from engine.observe.drafter_diff.records import FEW, NEAR_CHOICE, RULE, Cause, Missing, place_of
from engine.observe.drafter_diff.sides import DraftSide
from engine.observe.drafter_diff.target_rows import PASS
from engine.observe.drafter_diff.wrong_drafts import EXACT_TIE, SHARES_TIE, TIE, gap, least
from engine.observe.rescoring.request_sampler import EmittedJudge, NotJudgedError, request_sampling
from engine.options import RunOptions, SamplerOptions
from engine.sampling.sampler import Sampler
from engine.session import Session

_SHARE, _SHARE_AFTER, _LEAST_LIKELY = 0.05, 0.25, -6.0
"""Shares of accepted tokens, if the run rounds differently, and of those after a rejection, that
must be wrong; logarithm of a probability."""
_OFF: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temp": 1.0,
}
"""Options of a sampler, with their neutral values."""
_SMALL, _MOST_SIGMAS, _NEXT_TO = 1e-9, 4.0, 1e-3
_CLEARLY = 0.8
"""Fraction of the best token's probability below which rounding cannot explain a choice."""
_LEAST_OWN, _NEAR_OWN, _FEW_OWN = 0.8, 0.95, 8
"""Shares of the target's own tokens that must be its choice, or of all that must be among its best,
for the text to be this model's; and how many must be known."""


class TargetChoices:
    """For each emitted token of a side, whether the target may have chosen it: at temperature 0 the
    most probable one within rounding, else a probable one. hidden: the target's rows of the text,
    f32 [n, 1, n_embd] or [n, n_embd]. share: of tokens that must be wrong; is_exact: the run rounds
    as this session does."""

    def __init__(
        self,
        session: Session,
        side: DraftSide,
        hidden: torch.Tensor,
        share: float,
        is_exact: bool = False,
    ) -> None:
        self._share, n = share, side.n_prompt
        self._session, self._hidden, self._is_exact = session, hidden, is_exact
        is_greedy = float(side.setting.get("temperature", 0.0) or 0.0) <= 0
        found: list[bool] = []
        near, judges, self._shares = list[bool](), list[EmittedJudge](), list[tuple[float, float]]()
        tops = self._find(side)
        drafted = self._drafted
        self._of_drafted: dict[int, float] = {}
        self._facts: dict[int, Mapping[str, float]] = {}
        is_judged, tie = True, EXACT_TIE if is_exact else TIE
        try:
            more = session.tokenizer.eog_ids, session.config.n_vocab
            sampling = request_sampling(side.asked.settings, *more)
            if is_greedy or (side.rule is not None and side.rule.is_lossless):
                judges = [EmittedJudge(sampling, side.text[:n]) for _ in range(2)]
        except NotJudgedError:  # a grammar, for example, may have chosen any
            is_judged = "temperature" not in side.setting
        for start in range(n - 1, len(side.text) - 1, PASS):
            stop = min(start + PASS, len(side.text) - 1)
            logits = session.model.logits_of(hidden[start:stop])
            tokens = side.text[start + 1 : stop + 1]
            rows, short = candidates(logits), [0.0] * len(tokens)
            if judges:
                short = judges[0].shortfalls(logits, tokens)
            if judges and not is_greedy:
                drawn = judges[1].distributions(logits, tokens, range(len(tokens)))
                for at, (one, token) in enumerate(zip(drawn, tokens, strict=True), start + 1 - n):
                    self._shares.append((one.of(token), float(one.probs.max())))
                    if at in drafted:
                        self._of_drafted[at] = one.of(drafted[at])
            for at in (at for at in drafted if start + 1 - n <= at < stop + 1 - n):
                its = logits[at + n - 1 - start], drafted[at], side.text[at + n - 1]
                self._facts[at] = _facts(*its, session.tokenizer.piece, tops.get(at, {}))
            for row, token, lack in zip(rows, tokens, short, strict=True):
                near.append(token in [*row][:N_CANDIDATES])
                if judges:
                    found.append(lack <= least(row, tie))
                elif not is_judged:
                    found.append(True)
                else:
                    found.append(not gap(row, token, tie)[1] if is_greedy else token in row)
        self._is_near = sum(near) >= _NEAR_OWN * len(found)
        self._chosen, self._near = found, near

    def _find(self, side: DraftSide) -> dict[int, Mapping[int, float]]:
        """Record the drafted tokens of a side by index of the emitted token in their place, the
        tokens after accepted ones, and the judged ones. Returns candidates by index."""
        self._side, drafts, n = side, side.drafts, side.n_prompt - 1
        self._drafted = {d.pos0 + i - n: t for d in drafts for i, t in enumerate(d.tokens)}
        self._steps = {d.pos0 + i - n: i for d in drafts for i in range(d.n_accepted)}
        self._ends = {d.pos0 + d.n_accepted - n: d.n_accepted == d.n_drafted for d in drafts}
        self._kept = dict.fromkeys(sorted(self._steps), True)
        self._kept |= {at: False for at, is_whole in self._ends.items() if not is_whole}
        return {d.pos0 + i - n: top for d in drafts for i, top in enumerate(d.tops)}

    @property
    def other_model(self) -> Missing | None:
        """The message if the text is not the target's; None if it may be."""
        _, own = self._own_tokens()
        if len(own) - sum(own) < FEW or sum(own) >= _LEAST_OWN * len(own) or self._is_near:
            return None
        return Missing(
            f"The text of {self._side.name} was not generated by this model: only {sum(own)} of "
            f"{len(own)} of the target's own tokens are its choice.",
            "Give the model file of that run.",
        )

    @property
    def n_else(self) -> tuple[int, int]:
        """Tokens, neither drafted nor after a draft, that are not the target's choice; all such
        tokens."""
        _, others = self._own_tokens()
        return len(others) - others.count(True), len(others)

    @property
    def is_near_choice(self) -> bool:
        """Whether the target's own tokens are often not its choice, but among its best."""
        n_else, n_others = self.n_else
        return n_else >= max(FEW, self._share * n_others) and self._is_near

    def stale_choice(self) -> Cause | None:
        """Whether the target's tokens after a rejection, or all of its own, are not its choice."""
        after, others = self._own_tokens()
        n_else, n_others = self.n_else
        if self.is_near_choice:
            place = f"position {self._side.n_prompt + self._chosen.index(False)}"
            size = f"{n_else} of {n_others} tokens, neither drafted nor after a draft"
            return Cause(RULE, self._side.name, NEAR_CHOICE, place, size)
        for what, own in after.items() if len(others) >= _FEW_OWN else ():
            wrong = [place for place, chosen in own.items() if not chosen]
            if len(wrong) < max(FEW, _SHARE_AFTER * len(own)):
                continue
            how = "are not the target's choice: its logits are of another row, or its sampler"
            how += " was not rolled back"
            if sum(self._near[at] for at in wrong) >= _NEAR_OWN * len(wrong):
                how = "are often not the target's choice, but another of its best: its sampler has"
                how += " other settings than recorded, or a temperature"
            about = f"Tokens after {what} {how}."
            place = f"position {self._side.n_prompt + wrong[0]}"
            return Cause(RULE, self._side.name, about, place, f"{len(wrong)} of {len(own)}")
        return None

    def _own_tokens(self) -> tuple[dict[str, dict[int, bool]], list[bool]]:
        """For tokens that were not drafted, whether the target may have chosen them: those after a
        rejection and after a fully accepted draft, by index, and the others, including accepted
        ones if they are few; all as others if those are few, too."""
        after: dict[str, dict[int, bool]] = {}
        own = {i: chosen for i, chosen in enumerate(self._chosen) if i not in self._steps}
        for i, is_whole in self._ends.items():
            if i in own:
                what = "a fully accepted draft" if is_whole else "a rejection"
                after.setdefault(what, {})[i] = own[i]
        others = [chosen for i, chosen in own.items() if i not in self._ends]
        if len(others) < _FEW_OWN:
            others += [chosen for i, chosen in enumerate(self._chosen) if i in self._steps]
        return (after, others) if len(others) >= _FEW_OWN else ({}, [*own.values()])

    def lossy_rule(self) -> Cause | None:
        """Whether drafted tokens were accepted that the target does not choose."""
        places = sorted(i for i in self._steps if i < len(self._chosen))
        wrong = [i for i in places if not self._chosen[i]]
        is_clear = any(self._facts[i]["ratio"] < _CLEARLY for i in wrong if i in self._facts)
        if len(wrong) < (FEW - 2 * is_clear if self._is_exact else max(FEW, _SHARE * len(places))):
            return None
        pos = self._side.n_prompt + wrong[0]
        first = next(d for d in self._side.drafts if d.pos0 < pos <= d.pos0 + d.n_accepted)
        accepted, n_drafted = self._side.counts
        about = "Drafted tokens are accepted that are not the target's choice: a lossy rule"
        step = min(self._steps[i] for i in wrong)
        n_before = sum(self._steps[i] < step for i in places)
        share = len(wrong) / (len(places) - n_before)
        if step and n_before * share >= FEW:
            about += f", from drafted token {step} of a draft on (the first is 0)"
        ways = parted([(self._facts[at], kept) for at, kept, own in self._judged() if not own])
        if ways:
            about += f", which accepts those {' or those '.join(ways)}."
        elif ranks := [-self._facts[i]["rank"] for i in wrong if i in self._facts]:
            about += f", here all among the target's {max(ranks):.0f} best."
        place = f"round {first.round} at position {pos}"
        size = f"{len(wrong)} of {len(places)} accepted tokens"
        counts = (accepted, n_drafted), (accepted - len(wrong), n_drafted)
        return Cause(RULE, self._side.name, about, place, size, *counts)

    @property
    def stricter(self) -> str:
        """The only tokens of the target's own that are accepted, in words; empty if unknown."""
        own = [(self._facts[at], kept) for at, kept, is_own in self._judged() if is_own]
        return " or those ".join(parted(own))

    def _judged(self) -> list[tuple[int, bool, bool]]:
        """Drafted tokens that were judged: index, whether accepted, and whether the target has the
        same token."""
        emitted = self._side.text[self._side.n_prompt :]
        return [
            (at, kept, self._chosen[at] if kept else self._drafted[at] == emitted[at])
            for at, kept in self._kept.items()
            if at in self._facts
        ]

    def greedy_rule(self) -> Cause | None:
        """Whether at a temperature all tokens of rounds with drafts are the target's best."""
        shares = [self._shares[i] for i in self._kept if 0 <= i < len(self._shares)]
        likely = sum(math.log(best) for _, best in shares)
        if likely > _LEAST_LIKELY or any(share < best - SHARES_TIE for share, best in shares):
            return None
        about = (
            "Although there is a temperature, drafted tokens are accepted exactly if they are "
            "the target's most probable ones, without sampling."
        )
        size = f"{len(shares)} of {len(shares)} tokens, a chance of one in e^{-likely:.0f}"
        return Cause(RULE, self._side.name, about, place_of(self._side.drafts[0]), size)

    def other_draws(self) -> Cause | None:
        """Whether a run of this engine emitted other tokens than its sampler gives with its random
        numbers: where in a round, and which part of the sampler is missing there."""
        side, options, n = self._side, self._side.run.facts.options, self._side.n_prompt
        if not self._is_exact or options is None or options.spec.accept != "match":
            return None
        own = options.sampler
        if own.temp <= 0 or options.spec.synthetic or own.json_schema or own.grammar_file:
            return None
        wrong, accepted = self._wrong_draws(options, own), {*self._steps}
        rejected = {place for place, is_whole in self._ends.items() if not is_whole}
        where = {
            "Accepted drafted tokens": accepted,
            "Tokens after a rejection": rejected,
            "Tokens after a fully accepted draft": {*self._ends} - rejected,
            "Verified tokens, accepted or after a rejection,": accepted | rejected,
            "Tokens since the first rejection": range(min(rejected, default=0) + 1, len(side.text)),
        }
        # a sampler continuing from another text differs from the first token on
        which = next((one for one, places in where.items() if {*places}.issuperset(wrong)), "")
        if not wrong or not which:
            return None
        about = f"{which} are not those that the sampler draws with its random numbers"
        others = {name: replace(own, **{name: value}) for name, value in _OFF.items()}
        for name in (name for name, other in others.items() if other != own):
            if not wrong & self._wrong_draws(options, others[name]):
                about += f": those that it draws without {name}"
                break
        else:
            if wrong <= accepted:
                is_best = all(share >= best for share, best in map(self._shares.__getitem__, wrong))
                about += ": a lossy rule" + ", which accepts the most probable ones" * is_best
            elif "since" in which:
                about += ": the sampler, or its penalties, are not rolled back"
        size = f"{len(wrong)} of {len(self._chosen)} tokens"
        return Cause(RULE, side.name, f"{about}.", f"position {n + min(wrong)}", size)

    def _wrong_draws(self, options: RunOptions, sampling: SamplerOptions) -> set[int]:
        """Emitted tokens, by index, that a sampler does not give after the previous ones with its
        random number, nor with an adjacent one."""
        side, session, n = self._side, self._session, self._side.n_prompt
        banned = session.tokenizer.eog_ids if options.ignore_eos else ()
        sampler, found = Sampler(sampling, banned, side.text[:n]), set[int]()
        for start in range(n - 1, len(side.text) - 1, PASS):
            stop = min(start + PASS, len(side.text) - 1)
            logits = session.model.logits_of(self._hidden[start:stop])
            for i, token in enumerate(side.text[start + 1 : stop + 1]):
                row, number = sampler.rows(logits[i : i + 1])(0), sampler.uniform()
                near = (max(0.0, number - _NEXT_TO), number, min(number + _NEXT_TO, 1 - _NEXT_TO))
                if token not in [row.at(one) for one in near]:
                    found.add(start + 1 - n + i)
                sampler.accept(token)
        return found

    def threshold_rule(self) -> Cause | None:
        """Whether at a temperature drafted tokens are accepted if their probability is above a
        bound, or more often than it says. Only for drafts that were not sampled."""
        known = self._of_drafted
        judged = [(known[at], kept) for at, kept in self._kept.items() if at in known]
        n_taken = sum(kept for _, kept in judged)
        about = "" if self._side.draws or n_taken < FEW else lossy_words(judged)
        if not about:
            return None
        expected = sum(p for p, _ in judged)
        size = f"{n_taken} of {len(judged)} judged tokens, {expected:.0f} expected"
        return Cause(RULE, self._side.name, about, place_of(self._side.drafts[0]), size)


_SURE_WAY = 1000
"""In how many ways as many tokens might be accepted, for a separating number to prove the
reason."""
_PARTS = {
    "rank": "among the target's {:.0f} best",
    "share": "with a target probability of {:.2g} or more",
    "ratio": "with at least {:.2g} times the probability of the target's best",
    "clear": "where the target's best has a probability of {:.2g} or more",
    "own": "with a draft probability of {:.2g} or more",
    "blank": "that are only white space",
    "again": "equal to the previous token",
}
"""Known numbers of a drafted token, and the end of a sentence with the least of them, or
without."""


def _facts(
    logits: torch.Tensor,
    token: int,
    before: int,
    piece: Callable[[int], bytes],
    top: Mapping[int, float],
) -> Mapping[str, float]:
    """Numbers of a drafted token, by the names of _PARTS. logits: of the target in its place; top:
    the drafter's for the best ones, as far as known."""
    shares = torch.softmax(logits.float(), -1)
    own, best = float(shares[token]), float(shares.max())
    known = {"own": top[token]} if token in top else {}
    return known | {
        "rank": -1.0 - int((logits > logits[token]).sum()),
        "share": own,
        "ratio": own / best,
        "clear": best,
        "blank": float(not piece(token).strip()),
        "again": float(token == before),
    }


def parted(tokens: Sequence[tuple[Mapping[str, float], bool]]) -> list[str]:
    """Numbers that separate the accepted tokens from all others, in words. tokens: the numbers of
    each, and whether it was accepted."""
    kept, left = ([one for one, is_kept in tokens if is_kept is which] for which in (True, False))
    n_ways = math.comb(len(tokens), len(kept))
    if min(len(kept), len(left)) < FEW or n_ways < _SURE_WAY:
        return []
    found = []
    for name, words in _PARTS.items():
        if any(name not in one for one, _ in tokens):
            continue
        low, high = min(one[name] for one in kept), max(one[name] for one in left)
        if low > high:
            found.append(words.format(abs(low)))
        elif max(one[name] for one in kept) < (least := min(one[name] for one in left)):
            found.append(f"not {words.format(abs(least))}")
    return found


def lossy_words(judged: Sequence[tuple[float, bool]]) -> str:
    """Evidence that drafted tokens are not accepted by sampling, from the target's probability of
    each and whether it was accepted. Empty without any."""
    taken, left = ([p for p, kept in judged if kept is which] for which in (True, False))
    # the probability that some bound separates accepted tokens from the others
    probs = np.sort([p for p, _ in judged]).clip(_SMALL, 1 - _SMALL)
    below, above = np.log(1 - probs), np.log(probs)
    parted = [below[:k].sum() + above[k:].sum() for k in range(len(probs) + 1)]
    is_parted = len(left) >= FEW and min(taken) >= max(left)
    if is_parted and np.exp(parted).sum() < math.exp(_LEAST_LIKELY):
        return (
            "Although there is a temperature, a drafted token is accepted if its target "
            f"probability is {min(taken):.2g} or more: a threshold, no sampling."
        )
    sigma = math.sqrt(float((probs * (1 - probs)).sum()))
    if len(taken) - float(probs.sum()) > max(FEW, _MOST_SIGMAS * sigma):
        return (
            "Drafted tokens are accepted more often than by their target probabilities: a lossy "
            "rule."
        )
    return ""
