"""The restated rules choose what the engine's rules choose, and see what these may get wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LaneSpec
from engine.decode import acceptance
from engine.decode.plain_acceptance import PLAIN_RULES
from engine.draft.drafter import Draft
from engine.options import SamplerOptions
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import Sampler
from tests.support.golden_runs import SAMPLED, options_of, prompt_of, session

N_VOCAB, END = 12, (3,)


def drafts(rng: np.random.Generator) -> Draft:
    tokens = rng.integers(0, N_VOCAB, rng.integers(0, 5)).tolist()
    if rng.random() < 0.5:
        return Draft(tokens)
    q = [Distribution.of_weights(np.arange(N_VOCAB), rng.random(N_VOCAB)) for _ in tokens]
    return Draft([one.at(rng.random()) for one in q], q=q)


@pytest.mark.parametrize("rule", PLAIN_RULES)
@pytest.mark.parametrize("temp", [0.0, 1.5])
def test_both_ways_of_writing_a_rule_agree(rule: str, temp: float) -> None:
    options = SamplerOptions(temp=temp, repeat_penalty=1.3, repeat_last_n=4)
    engines, plain = (Sampler(options, history=[1, 2, 3]) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(200):
        draft, logits = drafts(rng), torch.tensor(rng.normal(size=(5, N_VOCAB)) * 2).float()
        found = acceptance.RULES[rule](draft, engines.rows(logits), engines, END)
        assert found == PLAIN_RULES[rule](draft, plain.rows(logits), plain, END)
        assert engines.uniform() == plain.uniform()


def _keeps_the_most_probable(draft: Draft, rows, sampler: Sampler, end_tokens) -> list[int]:
    """match, but a drafted token is kept if it is the target's most probable one."""
    found: list[int] = []
    for i, drafted in enumerate(draft.tokens):
        p = rows(i)
        token = drafted if p.ids[0] == drafted else p.at(sampler.uniform())
        sampler.accept(token)
        found.append(token)
        if token != drafted:
            return found
    return [*found, sampler.draw(rows(len(found)))]


def test_a_wrong_rule_makes_a_free_lane_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(acceptance.RULES, "match", _keeps_the_most_probable)
    name = "qwen35-c-v2x-mtp-f32"
    comparison = Comparison(
        session(name),
        prompt_of(name),
        options_of(12, "draft-mtp", sampler=SAMPLED, ignore_eos=True),
        [LaneSpec.parse("planes,free")],
    )
    while comparison.step():
        pass
    assert comparison.results()[-1].verdict == "suspect"
