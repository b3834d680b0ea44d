"""Rows of the trace become streams: order, kinds, replays, ghosts, several runs."""

from __future__ import annotations

from array import array

import pytest

from app.panels.tokens.token_scroll import NOWHERE, next_rejection, next_shown, place_of
from app.trace_models.run_rows import Position
from app.trace_models.token_stream import GHOSTS, KIND, RunStreams, TokenStream
from engine.trace.records import TOKEN_KINDS
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.token_text import NEWLINE_MARK
from tests.support.trace_builder import TraceBuilder, sample_trace

ALL: frozenset[int] = frozenset()


def read(builder: TraceBuilder) -> RunStreams:
    run = RunStreams(builder.run)
    while run.behind:
        run.poll()
    return run


def kinds(stream: TokenStream) -> list[str]:
    return [TOKEN_KINDS[kind] for kind in stream.kinds]


@pytest.fixture
def stream() -> TokenStream:
    """prompt | plain | 1 accepted, 1 rejected, 1 ignored, replacement | 2 accepted, bonus"""
    builder = TraceBuilder()
    builder.prompt(["def", " f"])
    builder.plain("(")
    builder.draft([" x"], "):", [",", " y"])
    builder.draft(["\n   ", " return"], " x")
    return read(builder).by_seq[0]


def test_tokens_come_in_reading_order(stream: TokenStream) -> None:
    assert kinds(stream) == [
        "prompt",
        "prompt",
        "target",
        "accepted",
        "rejected",
        "ignored",
        "replacement",
        "accepted",
        "accepted",
        "bonus",
    ]
    assert stream.texts == [
        "def",
        " f",
        "(",
        " x",
        ",",
        " y",
        "):",
        f"{NEWLINE_MARK}\n   ",
        " return",
        " x",
    ]
    assert stream.rounds == array("q", [0, 0, 1, 2, 2, 2, 2, 3, 3, 3])
    assert stream.facts(4)["draft_p"] == pytest.approx(0.44)
    assert [stream.position(i) for i in range(10)] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]


def test_the_text_leaves_ghosts_out(stream: TokenStream) -> None:
    assert stream.text() == "def f( x):\n    return x"
    assert stream.text(prompt=False) == "( x):\n    return x"
    assert stream.text(4, 7) == "):"
    assert stream.text(4, 6) == ", y"


def test_line_feeds_are_marked_only_where_a_style_needs_them() -> None:
    builder = TraceBuilder()
    builder.prompt(["\n"])
    builder.plain("\n")
    builder.draft(["\n"], "x", ["\n  "])
    assert read(builder).by_seq[0].texts == [
        "\n",
        "\n",
        f"{NEWLINE_MARK}\n",
        f"{NEWLINE_MARK}  ",
        "x",
    ]


def test_a_replay_marks_the_tokens_it_repeats() -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    builder.draft(["b", "c"], "d", ["x"], path="restore")
    stream = read(builder).by_seq[0]
    assert stream.texts == ["a", "b", "c", "x", "d"]
    assert list(stream.replayed) == [0, 1, 1, 0, 0]


def test_a_replay_that_repeats_nothing_is_shown_as_it_is() -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    builder.draft(["b"], "d")
    builder.store.tokens.append(
        run_id=0,
        round=1,
        seq_id=0,
        pos=1,
        kind="replayed",
        token_id=0,  # "b" is there
    )
    stream = read(builder).by_seq[0]
    assert kinds(stream) == ["prompt", "accepted", "bonus", "replayed"]
    assert stream.texts == ["a", "b", "d", "a"]
    assert not any(stream.replayed)


def test_reading_as_it_grows_gives_the_same_as_reading_at_the_end() -> None:
    builder = sample_trace(rounds=40, n_seqs=2)
    table = builder.store.tokens
    growing = TraceStore()
    growing.pieces.update(builder.store.pieces)
    run = RunStreams(RunRef(growing, builder.run_id))
    for i in range(len(table)):
        row = table.row(i)
        growing.tokens.append(**{k: v for k, v in row.items() if not isinstance(v, list)})
        if i % 3 == 0:
            assert run.poll()
    run.poll()
    whole = read(builder)
    assert sorted(run.by_seq) == [0, 1]
    for seq_id, expected in whole.by_seq.items():
        found = run.by_seq[seq_id]
        for column in ("texts", "kinds", "replayed", "rounds", "rows"):
            assert getattr(found, column) == getattr(expected, column), column
    assert any(whole.by_seq[0].replayed)


def test_other_runs_stay_out() -> None:
    first = TraceBuilder()
    first.prompt(["one"])
    second = TraceBuilder(first.store)
    second.prompt(["two"])
    first.plain(" more")
    assert read(first).by_seq[0].texts == ["one", " more"]
    assert read(second).by_seq[0].texts == ["two"]
    assert not RunStreams(RunRef(first.store, 5)).poll()


def test_a_token_without_bytes_shows_its_id() -> None:
    store = TraceStore()
    store.begin_run({})
    store.tokens.append(run_id=0, round=0, seq_id=0, pos=0, kind="prompt", token_id=99)
    run = RunStreams(RunRef(store, 0))
    run.poll()
    assert run.by_seq[0].texts == ["⟨#99⟩"]


def test_walking_over_tokens(stream: TokenStream) -> None:
    assert next_shown(stream, 4, +1, ALL) == 4
    assert next_shown(stream, 4, +1, GHOSTS) == 6
    assert next_shown(stream, 5, -1, GHOSTS) == 3
    assert next_shown(stream, 10, +1, ALL) == NOWHERE
    assert next_shown(stream, -1, -1, ALL) == NOWHERE


def test_walking_over_rejections() -> None:
    builder = TraceBuilder()
    builder.prompt(["p"])
    builder.draft([], "a", ["x"])
    builder.draft(["b"], "c")
    builder.draft(["d"], "e", ["y", "z"])
    stream = read(builder).by_seq[0]
    first, second = (i for i, kind in enumerate(stream.kinds) if kind == KIND["rejected"])
    assert next_rejection(stream, NOWHERE, +1, ALL) == first
    assert next_rejection(stream, first, +1, ALL) == second
    assert next_rejection(stream, second, +1, ALL) == NOWHERE
    assert next_rejection(stream, NOWHERE, -1, ALL) == second
    assert next_rejection(stream, second, -1, ALL) == first
    # hidden ghosts: their replacements stand for them
    assert stream.texts[next_rejection(stream, NOWHERE, +1, GHOSTS)] == "a"
    replaced = next_rejection(stream, first, +1, GHOSTS)
    assert stream.texts[replaced] == "e"
    assert stream.texts[next_rejection(stream, replaced, -1, GHOSTS)] == "a"
    # and where an engine reports none
    stream.kinds = stream.kinds.replace(bytes((KIND["rejected"],)), bytes((KIND["unknown"],)))
    found = next_rejection(stream, NOWHERE, +1, ALL)
    assert stream.texts[found] == "a"
    assert stream.texts[next_rejection(stream, found, +1, ALL)] == "e"
    assert next_rejection(stream, found, -1, ALL) == NOWHERE


def test_finding_a_position(stream: TokenStream) -> None:
    assert place_of(stream, Position(stream.run, 0, 2, 4), ALL) == 6, "that was emitted"
    assert place_of(stream, Position(stream.run, 0, 2, 4, stream.rows[4]), ALL) == 4
    assert place_of(stream, Position(stream.run, 0, 2, 4), GHOSTS) == 6
    assert place_of(stream, Position(stream.run, 0, 3, None), ALL) == 7
    assert place_of(stream, Position(stream.run, 0, 3, 99), ALL) == 7
    assert place_of(stream, Position(stream.run, 0, 9, None), ALL) == NOWHERE
