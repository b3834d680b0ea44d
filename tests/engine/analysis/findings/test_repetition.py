"""A text in a loop: found where it begins, and nowhere in texts that go on."""

from __future__ import annotations

import numpy as np
import pytest

from engine.trace.facts import Finding
from engine.trace.store import TraceStore
from tests.support.golden_runs import MTP_MODELS, decode, options_of, prompt_of, session
from tests.support.round_rows import SPEC, add_draft, add_round, found, new_run

RULE = "degenerate-repetition"
SPACE, NEWLINE = 900, 901


def of_text(ids: list[int], *, per_round: int = 4, drafters: bool = True) -> list[Finding]:
    """What is said of a run that emitted these tokens, 4 a round, half of the drafts rejected
    before token 100 and none after it."""
    store = TraceStore()
    new_run(store, options={} if drafters else {"spec": SPEC | {"types": []}})
    store.pieces.update({SPACE: b"    ", NEWLINE: b"\n"})
    add_round(store, 0)
    for number, start in enumerate(range(0, len(ids), per_round), 1):
        part = ids[start : start + per_round]
        drafted = 2 * (len(part) - 1) if start < 100 else len(part) - 1
        add_draft(store, number, drafted, len(part) - 1, num_emitted=len(part))
        for i, one in enumerate(part):
            store.tokens.append(
                run_id=0, seq_id=0, round=number, pos=start + i, token_id=one, kind="accepted"
            )
    return found(store, RULE)


def varied(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, n).tolist()


@pytest.mark.parametrize("period", [1, 3, 20, 32])
def test_an_n_gram_over_and_over(period: int) -> None:
    text = [*varied(102), *(varied(period, 2) * (200 // period))]
    (finding,) = of_text(text)
    assert finding.round == (102 + period) // 4 + 1
    assert (
        f"From round {finding.round} on the text repeats the same {period} token" in finding.message
    )
    assert f"({len(text) - 102 - period} tokens)" in finding.message
    # three of every six before, all of three after it
    assert "in the loop: acceptance 1.000" in finding.evidence
    assert "Before that: acceptance 0.5" in finding.message and finding.seq_id == 0


def test_white_space_of_several_kinds() -> None:
    blanks = np.where(np.random.default_rng(3).random(100) < 0.3, NEWLINE, SPACE).tolist()
    (finding,) = of_text([*varied(100), *blanks])
    assert finding.round == 26 and "the text repeats white space" in finding.message


def test_a_text_that_gets_out_of_it() -> None:
    (finding,) = of_text([*varied(40), *([7, 8] * 50), *varied(40, 5)])
    assert "From round 11 to 35 the text repeats the same 2 tokens" in finding.message


@pytest.mark.parametrize(
    "text",
    [
        varied(400),
        [i for _ in range(30) for i in [*varied(2, 9), _, SPACE, NEWLINE]],  # lines that count
        [*varied(50), *([0, 1] * 30), *varied(50, 4)],  # a list of 30 zeros
        [*varied(50), *(varied(33, 6) * 3), *varied(50, 4)],  # a block of code three times
        [SPACE] * 50,
    ],
    ids=["varied", "table", "zeros", "blocks", "short"],
)
def test_healthy_texts(text: list[int]) -> None:
    assert of_text(text) == []


def test_nothing_is_said_without_drafters_or_of_a_few_rounds() -> None:
    text = [*varied(20), *([7] * 200)]
    assert of_text(text) and not of_text(text, drafters=False)
    assert not of_text(text, per_round=50)


def test_real_runs() -> None:
    """A model with random weights falls into a loop; one that draws its tokens does not."""
    name = MTP_MODELS[0]
    options = options_of(200, "draft-mtp", ignore_eos=True)
    run = decode(session(name), [prompt_of(name)], options)
    (tokens,) = run.emitted
    findings = found(run.trace, RULE)
    loops = [p for p in range(1, 33) if tokens[-64 - p :] == (tokens[-64 - p :][:p] * 99)[: 64 + p]]
    assert bool(findings) == bool(loops)
