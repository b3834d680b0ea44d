"""Which tokens a filter finds, against a naive walk over the rows of the trace."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from app.panels.tokens.token_hits import find_hits, neighbour_hit, parse_filter
from app.trace_models.token_stream import RunStreams, TokenStream
from tests.support.trace_builder import TraceBuilder, sample_trace


def streams(builder: TraceBuilder) -> dict[int, TokenStream]:
    run = RunStreams(builder.run)
    while run.behind:
        run.poll()
    return run.by_seq


def naive(stream: TokenStream, wanted: Callable[[dict[str, Any]], bool]) -> list[int]:
    return [i for i in range(len(stream)) if wanted(stream.facts(i))]


def hits(stream: TokenStream, query: str) -> list[int]:
    return find_hits(parse_filter(query), stream).tolist()


def rounds_of(stream: TokenStream) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by round and sequence."""
    rounds = stream.store.rounds
    rows = [rounds.row(i) for i in range(len(rounds))]
    return {(row["round"], row["seq_id"]): row for row in rows}


SIGNS = {"<": operator.lt, ">=": operator.ge, "=": operator.eq, "!=": operator.ne}


@pytest.mark.parametrize("seq_id", [0, 1])
@pytest.mark.parametrize(
    ("name", "column", "number"),
    [("p", "target_p", 0.38), ("q", "draft_p", 0.5), ("rank", "target_rank", 2)],
)
@pytest.mark.parametrize("sign", SIGNS)
def test_figures_of_tokens(seq_id: int, name: str, column: str, number: float, sign: str) -> None:
    stream = streams(sample_trace(rounds=30, n_seqs=2))[seq_id]
    expected = naive(
        stream, lambda facts: facts[column] is not None and SIGNS[sign](facts[column], number)
    )
    assert hits(stream, f"{name}{sign}{number}") == expected
    assert 0 < len(naive(stream, lambda facts: facts[column] is not None)) < len(stream)


@pytest.mark.parametrize("kind", ["prompt", "target", "accepted", "rejected", "ignored", "bonus"])
def test_kinds(kind: str) -> None:
    stream = streams(sample_trace(rounds=40))[0]
    expected = naive(stream, lambda facts: facts["kind"] == kind)
    assert expected
    assert hits(stream, kind) == expected


def test_replayed_finds_the_tokens_that_were_decoded_again() -> None:
    builder = TraceBuilder()
    builder.prompt(["p"])
    builder.draft([" a", " b"], " c", [" x"], path="restore")
    assert hits(streams(builder)[0], "replayed") == [1, 2]


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("depth>1", lambda r: r["rollback_depth"] > 1),
        ("path:restore", lambda r: r["rollback_path"] == "restore"),
        ("path:refused", lambda r: r["rollback_path"] == "refused"),
        ("drafted=0", lambda r: r["num_draft_tokens"] == 0),
        ("round>=20", lambda r: r["round"] >= 20),
    ],
)
def test_what_is_true_of_rounds_finds_each_round_once(
    query: str, wanted: Callable[[dict[str, Any]], bool]
) -> None:
    stream = streams(sample_trace(rounds=60, n_seqs=2))[1]
    rounds = rounds_of(stream)

    def holds(facts: dict[str, Any]) -> bool:
        row = rounds.get((facts["round"], facts["seq_id"]))
        return row is not None and wanted(row)

    every = naive(stream, holds)
    first = [i for i in every if i == stream.round_span(stream.rounds[i])[0]]
    assert first
    assert hits(stream, query) == first
    with_kind = [i for i in every if stream.facts(i)["kind"] == "replacement"]
    assert hits(stream, f"{query} replacement") == with_kind


def test_sequences_and_drafters() -> None:
    by_seq = streams(sample_trace(rounds=5, n_seqs=2))
    assert hits(by_seq[0], "seq:1 accepted") == []
    assert hits(by_seq[1], "seq:1 accepted") == hits(by_seq[1], "accepted") != []
    assert hits(by_seq[0], "drafter:nobody") == []


def test_text_may_begin_in_one_token_and_end_in_another() -> None:
    builder = TraceBuilder()
    builder.prompt(["def", " qui", "ck"])
    builder.draft([" Quick", "sort"], " q", ["quick", " lazy"])
    stream = streams(builder)[0]
    texts = stream.texts
    assert [texts[i] for i in hits(stream, "quick")] == [" qui", " Quick", "quick"]
    assert [texts[i] for i in hits(stream, "Quick")] == [" Quick"]
    assert [texts[i] for i in hits(stream, "quick Quicksort")] == [" qui"]
    assert [texts[i] for i in hits(stream, "sort q")] == ["sort"], "ghosts do not tear the text"
    assert [texts[i] for i in hits(stream, "quick rejected")] == ["quick"]
    assert hits(stream, "quicksort lazy") == []


def test_a_character_of_several_tokens_is_found() -> None:
    builder = TraceBuilder()
    raw = "é推".encode()
    builder.prompt(["a", raw[:1], raw[1:3], raw[3:]])
    stream = streams(builder)[0]
    assert hits(stream, "é") == [1]
    assert hits(stream, "推") == [2]


def test_no_terms_and_no_tokens_find_nothing() -> None:
    stream = streams(sample_trace(rounds=3))[0]
    assert hits(stream, "") == []
    assert hits(TokenStream(stream.run, 9), "rejected") == []


def test_rounds_that_are_not_written_yet_satisfy_nothing() -> None:
    builder = TraceBuilder()
    builder.prompt(["a", "b"])
    stream = streams(builder)[0]
    assert hits(stream, "depth>=0") == []
    assert hits(stream, "path:none") == []
    builder.plain(" c")
    stream = streams(builder)[0]
    assert hits(stream, "depth>=0") == [2]


def test_neighbours_go_round_all_sequences() -> None:
    found = {0: np.array([3, 8]), 1: np.zeros(0, np.int64), 2: np.array([1])}
    assert neighbour_hit(found, None, +1) == (0, 3)
    assert neighbour_hit(found, None, -1) == (2, 1)
    assert neighbour_hit(found, (0, 3), +1) == (0, 8)
    assert neighbour_hit(found, (0, 5), -1) == (0, 3)
    assert neighbour_hit(found, (0, 8), +1) == (2, 1)
    assert neighbour_hit(found, (2, 1), +1) == (0, 3)
    assert neighbour_hit(found, (0, 3), -1) == (2, 1)
    assert neighbour_hit(found, (1, 4), -1) == (0, 8)
    assert neighbour_hit({0: np.zeros(0, np.int64)}, None, +1) is None
