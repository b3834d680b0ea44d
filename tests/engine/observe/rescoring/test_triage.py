"""Two runs of one prompt: where they part and whether rounding explains it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.observe.rescoring.rescore import rescore
from engine.observe.rescoring.triage import SAME, UNKNOWN, TextPair, Triage, triage
from engine.options import RunOptions
from engine.session import Session
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.observed_texts import (
    CAPTURED_TARGET,
    GREEDY,
    N_PROMPT,
    PROMPT,
    emitted_ids,
    observed_run,
    with_token,
)

IDS = emitted_ids()
PLAIN = [(0, 0, [token]) for token in IDS]


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.open(CAPTURED_TARGET, compute="f32")


@pytest.fixture(scope="module")
def logits(session: Session) -> np.ndarray:
    return session.logits([*session.prompt(PROMPT).tokens, *IDS])[N_PROMPT - 1 : -1]


def judged(session: Session, *runs: RunRef) -> Triage:
    for run in runs:
        rescore(session, run.store, run.run_id, assume_same=True)
    return triage(*runs)


def test_equal_texts_are_the_same_whatever_their_rounds() -> None:
    found = triage(observed_run(PLAIN), observed_run())
    (pair,) = found.pairs
    assert (found.verdict, pair.n_same, pair.pos) == ("same", len(IDS), None)
    shorter = triage(observed_run(PLAIN[:9]), observed_run())
    assert (shorter.verdict, shorter.pairs[0].n_same) == ("same", 9)


def test_of_several_sequences_the_reason_names_the_one_that_it_is_of() -> None:
    same, other = TextPair(0, 0, 4, SAME, "Equal."), TextPair(1, 1, 2, UNKNOWN, "One text ends.")

    def reason(*pairs: TextPair) -> str:
        return Triage(0, 1, pairs, (), ()).reason

    assert reason(same) == "Equal."
    assert reason(same, same) == "The common parts of all 2 sequences are equal."
    assert reason(same, other) == "Sequence 1: one text ends."
    assert reason() == "They have no prompt in common."


def test_the_first_token_that_differs_is_named_with_both_rounds(session) -> None:
    found = triage(observed_run(PLAIN), observed_run(with_token(GREEDY, 20, 700)))
    (pair,) = found.pairs
    assert (found.verdict, pair.n_same, pair.pos) == ("unknown", 20, N_PROMPT + 20)
    assert pair.a is not None and pair.b is not None
    assert (pair.a.token_id, pair.a.round, pair.a.after_round) == (IDS[20], 20, None)
    assert (pair.b.token_id, pair.b.round, pair.b.after_round) == (700, 11, 10)
    assert pair.gap is None and "re-score" in pair.reason


def test_the_model_tells_whose_token_is_wrong_and_by_how_much(session, logits) -> None:
    plain, other = observed_run(PLAIN), observed_run(with_token(GREEDY, 20, 700))
    for first, second, name in ((plain, other, "second"), (other, plain, "first")):
        found = judged(session, first, second)
        (pair,) = found.pairs
        assert found.verdict == "different" and f"of the {name} run is not" in pair.reason
        assert pair.gap == pytest.approx(float(logits[20].max() - logits[20, 700]), rel=1e-3)
        assert pair.noise is not None and pair.noise < pair.gap


def test_a_near_tie_explains_two_texts(session, logits) -> None:
    two = np.sort(logits, axis=1)[:, -2:]
    place = int((two[:, 1] - two[:, 0]).argmin())
    second = int(np.argsort(logits[place])[-2])
    parted = [(0, 0, [token]) for token in [*IDS[:place], second]]
    found = judged(session, observed_run(PLAIN), observed_run(parted))
    (pair,) = found.pairs
    assert (found.verdict, pair.n_same) == ("near tie", place)
    assert pair.gap == pytest.approx(two[place, 1] - two[place, 0], abs=1e-3)
    assert pair.noise is not None and pair.gap <= pair.noise


def test_at_a_temperature_two_texts_say_nothing_unless_one_cannot_be_drawn(session, logits) -> None:
    settings = {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
    order = np.argsort(-logits[0])
    for rank, verdict in ((2, "drawn"), (9, "different")):
        runs = [observed_run([(0, 0, [int(order[i])])], settings=settings) for i in (0, rank - 1)]
        assert judged(session, *runs).verdict == verdict


def test_sequences_of_other_prompts_stay_alone() -> None:
    found = triage(observed_run(PLAIN), observed_run(PLAIN, prompt="while True:"))
    assert found.pairs == () and (found.alone_a, found.alone_b) == ((0,), (0,))
    assert found.verdict == "unknown"


def test_tokens_without_ids_are_compared_by_their_text(session) -> None:
    texts = {i: session.tokenizer.decode([IDS[i]]) for i in range(5)}
    run = observed_run(PLAIN)
    run.store.pieces.update({token: session.tokenizer.piece(token) for token in IDS})
    assert triage(run, observed_run(texts=texts)).verdict == "same"
    other = triage(run, observed_run(texts=texts | {3: "nothing"}))
    assert (other.pairs[0].n_same, other.verdict) == (3, "unknown")
    hidden = triage(run, observed_run(texts=texts | {2: ""}))
    assert hidden.pairs[0].n_same == 2 and "neither an id nor a text" in hidden.pairs[0].reason


def test_a_run_of_our_own_tells_the_gap_by_its_own_probabilities(session, logits) -> None:
    store = TraceStore()
    options = RunOptions(n_predict=len(IDS))
    run = session.start([session.prompt(PROMPT)], options, store)
    while run.step():
        pass
    own = RunRef(store, 0)
    assert triage(own, observed_run()).verdict == "same"
    second = int(np.argsort(logits[20])[-2])
    found = triage(own, observed_run(with_token(GREEDY, 20, second)))
    (pair,) = found.pairs
    gap = float(logits[20].max() - logits[20, second])
    assert pair.gap == pytest.approx(gap, rel=1e-3) and found.verdict == "unknown"
    assert "not measured" in pair.reason and pair.a is not None and pair.a.short == 0


def told_by(model: str, first_id: int, words: list[str]) -> RunRef:
    """A run of a model whose vocabulary begins at an id: "say" and then these words."""
    store = TraceStore()
    facts = {"model": {"name": model, "size": 1, "sha256": model, "modified_ns": 0}}
    run_id = store.begin_run(facts | {"stops": ["limit"]})
    for i, word in enumerate(["say", *words]):
        store.pieces[first_id + i] = word.encode()
        kind, at = (
            ("target", {"run_id": run_id, "seq_id": 0, "round": i})
            if i
            else ("prompt", {"run_id": run_id, "seq_id": 0, "round": 0})
        )
        store.tokens.append(**at, pos=i, kind=kind, token_id=first_id + i)
    return RunRef(store, run_id)


def test_two_models_are_compared_by_what_they_say() -> None:
    one = told_by("q4", 0, [" a", " b"])
    assert triage(one, told_by("q8", 50, [" a", " b"])).verdict == "same"
    found = triage(one, told_by("q8", 50, [" a", " c"]))
    (pair,) = found.pairs
    assert (found.verdict, pair.n_same) == ("unknown", 1)
    assert "models differ" in pair.reason
