"""Long logs, read by shapes of lines: the same as line by line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from engine.observe.files.line_logs import LineLogs
from engine.observe.files.log_run import fill_log
from engine.observe.rounds import log_reader
from engine.observe.rounds.log_reader import LogReader
from engine.observe.rounds.log_shapes import Burst, shape_of
from engine.observe.rounds.server_log import ServerLog
from engine.trace.store import TraceStore
from tests.bench.logs import KINDS
from tests.support.captures import load

OPEN = (
    "0.01.000.001 D slot process_toke: id  0 | task 2 | n_gen = 1, n_remaining = 9, "
    "next token:   220 'a"
)


def text_of(kind: str, n_lines: int) -> str:
    return "\n".join(islice(KINDS[kind](random.Random(7)), n_lines)) + "\n"


def facts(text: str, *, has_batches: bool = False) -> list[object]:
    """All that a log tells, of blocks of some hundred lines."""
    reader = LogReader(LineLogs(), has_batches=has_batches)
    for at in range(0, len(text), 1 << 15):
        reader.feed(text[at : at + (1 << 15)])
    reader.end()
    for request in reader.requests:
        request.unfold()
    return [
        (
            server.stream, server.unread, sorted(server.pieces.items()), server.drafters,
            server.n_rs_seq,
            server.build, server.is_whole, server.has_times, server.requests,
            [request.rounds for request in server.requests],
        )
        for server in reader.servers
        if server.requests or server.unread  # lines that say nothing are passed over
    ]  # fmt: skip


def runs(text: str) -> list[object]:
    store = TraceStore()
    fill_log(store, text.encode(), "x.log")
    return [
        (facts.summary, facts.requests, facts.observed_findings, facts.server, facts.prompt_reuse)
        for facts in store.runs.values()
    ] + [store.rounds.row(i) for i in range(min(len(store.rounds), 200))]


def by_line(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[str], list[object]], text: str
) -> list[object]:
    with monkeypatch.context() as context:
        context.setattr(log_reader, "_FEW_LINES", 1 << 30)
        return read(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(8)
def test_a_long_log_tells_the_same_as_its_lines_one_by_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in ("verbose", "filtered"):
        load("mtp")  # or the test is skipped
    text = text_of(kind, 4000)
    assert repr(facts(text)) == repr(by_line(monkeypatch, facts, text))
    assert runs(text) == by_line(monkeypatch, runs, text)


def _sums_of_others(chance: random.Random) -> Iterator[str]:
    """vLLM's lines of one or two engines and SGLang's of ranks, some with counts that do not agree,
    without rates, cut, or with numbers that cannot be."""
    engines, n_rates, has_own = (
        chance.randrange(1, 3),
        chance.randrange(1, 4),
        chance.random() < 0.7,
    )
    odd = chance.choice([0, 0, 0.003])
    while True:
        at = chance.randrange(9)
        engine = f"Engine 00{chance.randrange(engines)}: "
        yield (
            f"vllm-1 | INFO 05-01 12:00:0{at} [loggers.py:271] {engine}Avg prompt "
            f"throughput: {at}.5 tokens/s, Avg generation throughput: 9.5 tokens/s"
        )
        steps = chance.randrange(30)
        rates = sorted((chance.randrange(steps + 1) for _ in range(n_rates)), reverse=True)
        accepted, drafted = sum(rates), steps * n_rates + chance.choice([0] * 30 + [1, -9])
        kind = "System efficiency: 0.5, " if chance.random() < odd else ""
        shown = ", ".join(f"{one / max(steps, 1):.3f}" for one in rates if chance.random() >= odd)
        mean = f"{1 + accepted / max(steps, 1):.2f}" if chance.random() < 0.99 else "3.21"
        yield (
            f"vllm-1 | INFO 05-01 12:00:0{at} [metrics.py:101] "
            f"{engine if has_own else ''}SpecDecoding metrics: {kind}Mean "
            f"acceptance length: {mean}, "
            f"Accepted: {accepted} tokens, Drafted: {max(drafted, 0)} tokens, "
            f"Per-position acceptance rate: {shown}, "
            f"Avg Draft acceptance rate: {100 * accepted / max(drafted, 1):.1f}%"
        )
        rate = chance.choice([1.5, 9e20]) if chance.random() < odd else 0.25
        rank = f" DP{chance.randrange(2)}" if has_own else ""
        yield (
            f"sglang-1 | [2026-06-02 10:11:1{chance.randrange(9)}{rank}] Decode batch, accept len: "
            f"{chance.uniform(1, 4):.2f}, accept rate: {rate}, #queue-req: 0"
        )
        if chance.random() < 0.02:
            yield "llama-1 | slot print_timing: id  0 | task 1 | eval time = 9.00 ms / 5 tokens"


@pytest.mark.parametrize("seed", range(8))
def test_intervals_are_taken_together_as_line_by_line(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several engines in one log, however many become one."""
    chance = random.Random(seed)
    monkeypatch.setattr("engine.observe.files.intervals.MOST_INTERVALS", chance.randrange(5, 40))
    text = "\n".join(islice(_sums_of_others(chance), 2000)) + "\n"
    found = runs(text)
    assert found == by_line(monkeypatch, runs, text) and len(found) >= 2


@pytest.mark.parametrize("seed", range(6))
def test_what_is_unusual_in_a_long_log_is_seen_too(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers out of range, lines that are cut, lost, doubled or of another server."""
    chance = random.Random(seed)
    lines = text_of(chance.choice(["light", "default", "compose", "old"]), 3000).split("\n")
    for _ in range(40):
        at = chance.randrange(len(lines))
        line = lines[at]
        lines[at] = chance.choice(
            [
                line.replace("1", "9" * chance.randrange(1, 30)),
                line[: chance.randrange(len(line) + 1)],
                f"{line}\n{line}",
                "",
                f"[5340{chance.randrange(3)}] {line}",
                line.replace(" draft tokens", " draft tokens (restore checkpoint)"),
                line.replace("task ", "task 7"),
                "0.00.000.001 I srv  llama_server: initializing ...",
                json.dumps({"log": line}),
                OPEN,
                line.replace(" = ", " = many "),
            ]
        )
    text = "\n".join(lines)
    assert repr(facts(text, has_batches=bool(seed % 2))) == repr(by_line(monkeypatch, facts, text))


WORDS = (
    *("alpha", "beta", "slot", "draft", "cache", "task", "accepted", "I", "D", "0.01.002.003 I"),
    *("srv ", "que:", "main:", "{", "}", "update_slots:", "metrics:", "id", "statistics", "12"),
    *(
        "llama_decode:",
        "4.5",
        "[53402]",
        "|",
        "é",
        "pred=",
        "\x1b[0m",
        "throughput:",
        "eval time =",
    ),
    *("system", "build:", "Engine 001:", "n_gen =", "'a'", "INFO [ x ]"),
)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 12])
@pytest.mark.thinned(8)
def test_lines_that_are_passed_over_would_have_said_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lines between those of a server, each of a shape of its own."""
    chance = random.Random(seed)
    kinds = ["light", "default", "compose", "old", "vllm", "sglang"]
    mixed: list[str] = []
    for line in text_of(kinds[seed % len(kinds)], 1500).split("\n"):
        mixed.append(line)
        for _ in range(chance.randrange(4)):
            words = " ".join(chance.choices(WORDS, k=chance.randrange(2, 9)))
            head = line[: chance.randrange(24)] if chance.random() < 0.5 else ""
            stamp = "0.09.111.222 W " if chance.random() < 0.3 else ""
            mixed.append(f"{head}{stamp}{words}")
    text = "\n".join(mixed)
    passed = repr(facts(text))
    n_quiet = 0

    def is_quiet(self: LogReader, shape: bytes, line: str) -> bool:
        nonlocal n_quiet
        n_quiet += REALLY(self, shape, line)
        return False

    monkeypatch.setattr(LogReader, "_is_quiet", is_quiet)
    assert repr(facts(text)) == passed and n_quiet > 20


REALLY = LogReader._is_quiet


def test_shapes_differ_where_anything_but_a_number_does() -> None:
    lines = ["a 1/ 3 b", "a 22/456 b", "a 22/ 456 b", "", "12", "x", "a 1/ 3 é", "a 9/ 8 é"]
    block = Burst("\n".join([*lines, ""]).encode())
    assert [block.line(i) for i in range(block.n_lines)] == lines
    shapes = ["a 0/ 0 b", "a 0/0 b", "a 0/ 0 b", "", "0", "x", "a 0/ 0 é", "a 0/ 0 é"]
    assert [shape_of(one).decode() for one in lines] == shapes
    assert block.shape_of.tolist() == [list(dict.fromkeys(shapes)).index(one) for one in shapes]
    assert len(set(block.hashes)) == len(set(shapes))


def _words(n: int) -> list[str]:
    letters = "abcdefghijklmnop"
    return [" " + "".join(letters[i >> k & 15] for k in (0, 4, 8)) for i in range(n)]


@pytest.mark.parametrize("before", ["", "No parser found."])
def test_lines_that_differ_in_the_text_of_a_token_are_read_by_columns(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a long log is not read line by line: few of its lines are looked at as a whole. Also
    after a message that has no end."""
    head, lines = "0.{:02}.{:03}.000 D ", []
    for i, word in enumerate(_words(2000)):
        time = head.format(i // 1000, i % 1000)
        lines.append(
            f"{time}{before and before.join(['', time])}slot process_toke: id  0 | task 2 | "
            f"n_gen = {i + 1}, n_remaining = 9, next token: {i + 300:5} '{word}'"
        )
        chunk = f'{{"content":"{word}","draft_n":9}}'
        lines.append(f"{time}srv    operator(): http: streamed chunk: data: {chunk}")
    text = "\n".join([*lines, ""])
    n_placed = 0
    place = LogReader._place

    def counted(self: LogReader, line: str, shape: bytes | None = None) -> ServerLog | None:
        nonlocal n_placed
        n_placed += 1
        return place(self, line, shape)

    monkeypatch.setattr(LogReader, "_place", counted)
    found = facts(text)
    assert n_placed < len(lines) / 4
    assert repr(found) == repr(by_line(monkeypatch, facts, text))
    assert not before or repr(found) == repr(facts(re.sub(r".*found\.", "", text)))


@pytest.mark.parametrize("last", ["\n'", "'", ""])
def test_candidates_and_tokens_with_line_ends_are_read_by_columns(
    last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a filter has taken the rest of the text away. Numbers of lines stay right."""
    lines, n_gen = [], 0
    for i, word in enumerate(_words(1500)):
        head, end = f"0.{i // 500:02}.{i % 500:03}.000 D ", last if i % 2 else "'"
        for rank in range(3):
            lines.append(f"{head}spec        draft:  - seq_id 0, draft candidate   {rank}, "
                         f"pos   0:   {i + 300 + rank} (   0.5) 'é{word}{end}")  # fmt: skip
        n_gen += 1 + (i == 1200)  # one is missing
        lines.append(f"{head}slot handle_last_: id  0 | task 2 | generate_draft: id=0, "
                     f"#tokens={i + 9}, #draft=1, pos_next={i + 9}")  # fmt: skip
        end = end or "'"
        lines.append(f"{head}slot process_toke: id  0 | task 2 | n_gen = {n_gen}, "
                     f"n_remaining = 9, next token: {i + 300:5} 'é{word}{end}")  # fmt: skip
        lines.append(f"{head}slot   operator(): id  0 | task 2 | accepted  1/ 1 draft tokens")
    text = "\n".join([*lines, ""])
    n_placed = 0
    place = LogReader._place

    def counted(self: LogReader, line: str, shape: bytes | None = None) -> ServerLog | None:
        nonlocal n_placed
        n_placed += 1
        return place(self, line, shape)

    monkeypatch.setattr(LogReader, "_place", counted)
    found = facts(text)
    assert n_placed < len(lines) / 4
    assert "log-lines-missing" in repr(found)
    assert repr(found) == repr(by_line(monkeypatch, facts, text))
    assert runs(text) == by_line(monkeypatch, runs, text)


def test_what_a_model_writes_is_not_an_entry() -> None:
    sums = "draft acceptance = 0.5 (   30 accepted /    60 generated)"
    line = '0.01.000.001 D srv    operator(): http: streamed chunk: data: {{"content":"{}"}}\n'
    for n in (1, 200):
        assert not facts(line.format(sums) * n)


def test_lines_that_are_no_json_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"log": line}) for line in text_of("default", 3000).splitlines()]
    for i in range(1500, 2000, 100):
        lines[i:i] = ["x", "y 12", *["x"] * 30, '{"log":', *["y 7"] * 20]
    text = "\n".join([*lines, ""])
    n_placed = 0
    place = LogReader._place

    def counted(self: LogReader, line: str, shape: bytes | None = None) -> ServerLog | None:
        nonlocal n_placed
        n_placed += line in ("x", "y 7")
        return place(self, line, shape)

    found = facts(text)
    assert repr(found) == repr(by_line(monkeypatch, facts, text))
    monkeypatch.setattr(LogReader, "_place", counted)
    facts(text)
    assert n_placed == 15


@pytest.mark.parametrize("ports", [("",), ("[53409] ", "[53410] ")])
def test_texts_of_digits_and_quotes_are_read_as_line_by_line(
    ports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        "a",
        "7",
        "x86",
        "it's",
        "jsat'",
        "'",
        "'\n",
        "v'\nw",
        "a 1 'b 2",
        "\n",
        "):\n",
        "é\n\n",
    ]
    chance, lines = random.Random(3), []
    for n in range(900):
        port, slot = chance.choice(ports), chance.randrange(2)
        head = f"{port}0.{n // 60:02}.{n % 1000:03}.000 D "
        kind = n % 3
        text = chance.choice(texts).replace("\n", f"\n{port}")
        if kind < 2:
            lines.append(f"{head}spec        draft:  - seq_id {slot}, draft candidate   {kind}, "
                         f"pos   0:   {n % 97} (   0.5{n % 10}) '{text}'")  # fmt: skip
        else:
            lines.append(f"{head}slot process_toke: id  {slot} | task {slot} | n_gen = {n // 3}, "
                         f"n_remaining = 9, next token:   {n % 97} '{text}'")  # fmt: skip
        lines += [f"{head}que  yield_to_que: done yielding to queue"] * (n % 2)
    text = "\n".join(lines) + "\n"
    assert repr(facts(text)) == repr(by_line(monkeypatch, facts, text))
