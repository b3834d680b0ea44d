"""Sample-and-match verification, what the target thought of every examined token, and logits that
are no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from engine.draft.drafter import Draft
from engine.errors import NonFiniteError
from engine.machine.transfer import read, upload
from engine.sampling.grammar import AllowedTokens
from engine.sampling.sampler import RowDistribution, Sampler
from engine.trace.records import N_TOP
from kernels.rows.softmax_sums import LEAST, softmax_sums
from kernels.rows.top_k import top_k


@dataclass(slots=True)
class Acceptance:
    """What a rule made of a draft.

    tokens: the accepted list, the accepted prefix of the draft and one token of the target's own.
    judged_p, judged_q: probabilities of each examined draft token as the rule saw them, the
    target's and the drafter's (NaN where the rule does not look at it). own_p: the target's
    probabilities of its own tokens, the last of tokens; behind a replay that agreed these are two.
    own_row: row of the batch that the last of tokens was chosen from, None = the one at its
    position. allowed: what a grammar allowed, by row of the batch, as far as rows were looked at.
    """

    tokens: list[int]
    judged_p: list[float] = field(default_factory=list)
    judged_q: list[float] = field(default_factory=list)
    own_p: list[float] = field(default_factory=lambda: [math.nan])
    own_row: int | None = None
    allowed: Mapping[int, AllowedTokens] = field(default_factory=dict)


def match(
    draft: Draft, rows: RowDistribution, sampler: Sampler, end_tokens: Collection[int]
) -> Acceptance:
    """Sample every position; a drafted token is accepted if it is the one that was drawn.

    rows: the target's distributions at the positions of the verify batch, asked for in order.
    One random number is drawn per examined position, so the tokens are those of plain decoding.
    An end token inside the draft closes the list. Accepts 1 .. len(draft.tokens) + 1 tokens.
    """
    found = Acceptance([])
    for i, drafted in enumerate(draft.tokens):
        p = rows(i)
        token = sampler.draw(p)
        found.tokens.append(token)
        found.judged_p.append(p.of(drafted))
        found.judged_q.append(math.nan)
        if token != drafted or closes(i, token, draft, end_tokens):
            found.own_p = [p.of(token)]
            return found
    return with_bonus(found, rows, sampler)


def closes(i: int, token: int, draft: Draft, end_tokens: Collection[int]) -> bool:
    """Whether an accepted token ends the list before the end of its draft."""
    return token in end_tokens and i < len(draft.tokens) - 1


def with_bonus(found: Acceptance, rows: RowDistribution, sampler: Sampler) -> Acceptance:
    """Add the token that the target chooses behind a draft that was accepted whole."""
    p = rows(len(found.tokens))
    found.tokens.append(sampler.draw(p))
    found.own_p = [p.of(found.tokens[-1])]
    return found


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target's raw softmax at some positions, on the host.

    prob, rank: of the token asked about at each position, rank from 1. entropy in nats.
    top_ids, top_probs: the most probable tokens there.
    """

    prob: list[float]
    rank: list[int]
    entropy: list[float]
    top_ids: list[list[int]]
    top_probs: list[list[float]]

    def part(self, start: int, stop: int) -> TargetFacts:
        """The facts at positions start..stop."""
        return TargetFacts(
            self.prob[start:stop],
            self.rank[start:stop],
            self.entropy[start:stop],
            self.top_ids[start:stop],
            self.top_probs[start:stop],
        )


@dataclass(frozen=True, slots=True)
class FactsRequest:
    """The arguments of a `target_facts` call that is still to be made."""

    logits: torch.Tensor
    tokens: Sequence[int]
    rows: Sequence[int]


def target_facts(
    logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[int] | None = None
) -> TargetFacts:
    """Facts about `tokens`. logits: [n, n_vocab]. rows: where each token is asked about, one after
    the other if None."""
    rows = range(len(tokens)) if rows is None else rows
    top, ids = top_k(logits, min(N_TOP, logits.shape[1]))
    # relative to the largest; a banned or infinitely unlikely token stays finite and adds nothing
    sums = softmax_sums(logits, top[:, 0])
    on_host = read(ids, top, (top - top[:, :1]).clamp_min_(LEAST).exp_(), sums, sums[:, :1].log())
    top_ids, largest = on_host[0].tolist(), on_host[1].tolist()
    totals, dots = on_host[3][:, :1], on_host[3][:, 1]
    top_probs = (on_host[2] / totals).tolist()
    entropy = (on_host[4][:, 0] - dots / totals[:, 0]).tolist()
    facts = TargetFacts([], [], [], [], [])
    beyond = []  # only there a row is looked through again
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if token in top_ids[row]:
            place = top_ids[row].index(token)
            facts.prob.append(top_probs[row][place])
            facts.rank.append(1 + largest[row].index(largest[row][place]))  # the first equal one
        else:
            beyond.append(i)
            facts.prob.append(0.0)
            facts.rank.append(0)
        facts.entropy.append(entropy[row])
        facts.top_ids.append(top_ids[row])
        facts.top_probs.append(top_probs[row])
    if beyond:
        at, wanted = upload([[rows[i] for i in beyond], [tokens[i] for i in beyond]], logits.device)
        asked = logits[at, wanted]
        n_larger, weight = read(
            (logits[at] > asked.unsqueeze(1)).sum(1), (asked - top[at, 0]).clamp_min_(LEAST).exp_()
        )
        for i, n, w in zip(beyond, n_larger.tolist(), weight, strict=True):
            facts.rank[i] = 1 + n
            facts.prob[i] = float(w / totals[rows[i], 0])
    return facts


def all_target_facts(asked: Sequence[FactsRequest]) -> list[TargetFacts]:
    """`target_facts` of each, for all rows at once: the same values."""
    if not asked:
        return []
    # rows behind the last one asked about are not looked at
    used = [one.logits[: max(one.rows) + 1] for one in asked]
    starts = [0, *accumulate(map(len, used))]
    rows = [start + row for start, one in zip(starts, asked, strict=False) for row in one.rows]
    tokens = [token for one in asked for token in one.tokens]
    found = target_facts(used[0] if len(used) == 1 else torch.cat(used), tokens, rows)
    ends = list(accumulate(len(one.tokens) for one in asked))
    return [found.part(end - len(one.tokens), end) for one, end in zip(asked, ends, strict=True)]


TRUNK = "trunk"
OF_DRAFTER = {
    "draft-mtp": "MTP head",
    "draft-simple": "draft model",
    "draft-eagle3": "EAGLE-3 drafter",
    "draft-dflash": "DFlash drafter",
    "draft-dspark": "DSpark drafter",
}


def note_non_finite(
    facts: dict[str, Any], round_: int, seq_id: int, pos: int, where: str, largest: float
) -> NonFiniteError:
    """Note a row of logits under facts["non_finite"], the first of each sequence; the error that
    ends the run.

    pos: of the token that the row is to choose. largest: of the row, NaN if any logit is.
    """
    what = "NaN" if math.isnan(largest) else "infinity"
    rows = facts.setdefault("non_finite", [])
    if seq_id not in {row["seq_id"] for row in rows}:
        rows.append({"round": round_, "seq_id": seq_id, "pos": pos, "where": where, "what": what})
    return NonFiniteError(
        f"The {where}'s logits for position {pos} of sequence {seq_id}, in round {round_}, "
        f"contain {what}.",
        "Load the file anew or in another compute mode (--compute f32); --allow-non-finite goes on "
        "all the same.",
    )
