"""A session as one page, read back by an HTML parser: nothing that a trace says becomes markup or
script, and the data are those of the trace."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.trace_models.session_page import session_page, write_session_page
from engine.errors import OptionError
from engine.report import session_data
from engine.report.session_data import NOT_OBSERVED, SHOWN_STATES, chosen_runs, ring_images
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import theme_roles
from tests.support.lane_traces import faulty_comparison
from tests.support.trace_builder import TraceBuilder, sample_trace

pytest.importorskip("bokeh")

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    '" onload="alert(1)',
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt;\u2028\u202e",
)


class Page(HTMLParser):
    """Elements in order with their attributes, and the texts of scripts."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        start, end = page.rindex(b"<script>") + len(b"<script>"), page.rindex(b"</script>")
        self.feed((page[:start] + page[end:]).decode("utf-8"))
        # Bokeh's, over which this parser takes 10 s
        self.scripts[-1] = page[start:end].decode("utf-8")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def policy(self) -> str:
        (found,) = (
            attrs["content"]
            for tag, attrs in self.elements
            if tag == "meta" and "http-equiv" in attrs
        )
        assert found is not None
        return found

    def block(self, name: str) -> Any:
        """A block of JSON."""
        scripts = [attrs for tag, attrs in self.elements if tag == "script"]
        (text,) = (
            text
            for text, attrs in zip(self.scripts, scripts, strict=True)
            if attrs.get("id") == name and attrs["type"] == "application/json"
        )
        return json.loads(text)


def page_of(store: TraceStore, title: str = "a") -> Page:
    return Page(session_page(list(chosen_runs(store)), title))


def values(column: Any, n: int) -> list[Any]:
    """A packed column."""
    if isinstance(column, list):
        return column
    return [column["all"]] * n if "all" in column else [column["of"][i] for i in column["at"]]


def hostile_trace() -> TraceStore:
    builder = TraceBuilder()
    builder.prompt(HOSTILE)
    builder.draft(HOSTILE[:2], HOSTILE[2], HOSTILE[3:])
    facts = builder.store.runs[0]
    facts |= {"model": {"name": HOSTILE[0]}, "device": HOSTILE[4], "error": HOSTILE[1]}
    builder.store.findings.append(
        run_id=0,
        rule=HOSTILE[3],
        severity="error",
        message=HOSTILE[0],
        evidence=HOSTILE[1],
        suggestion=HOSTILE[4],
    )
    return builder.store


def test_hostile_texts_stay_texts() -> None:
    builder = TraceBuilder()
    builder.prompt("abcdef")
    builder.draft("ab", "c", "def")
    harmless, page = page_of(builder.store), page_of(hostile_trace(), HOSTILE[0])
    assert page.elements == harmless.elements or [e[0] for e in page.elements] == [
        e[0] for e in harmless.elements
    ]
    for _, attrs in page.elements:
        assert not any(name.startswith("on") for name in attrs)
        assert not {"src", "href", "style", "action"} & set(attrs)
    data = page.block("data")
    pieces = data["pieces"]
    shown = [pieces[i] for i in data["runs"][0]["tokens"]["piece"]]
    assert shown[: len(HOSTILE) - 1] == list(HOSTILE[:-1])
    assert shown[len(HOSTILE) - 1] == "&lt;b&gt;⟨2028⟩⟨U+202E⟩"  # made visible
    (finding,) = data["runs"][0]["findings"]
    assert finding["message"] == HOSTILE[0] and finding["rule"] == HOSTILE[3]


def test_the_policy_admits_the_two_scripts_and_nothing_else() -> None:
    page = page_of(sample_trace(rounds=5).store)
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules
    kinds = [attrs.get("type") for tag, attrs in page.elements if tag == "script"]
    code = [text for text, kind in zip(page.scripts, kinds, strict=True) if kind is None]
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in code
    }
    assert len(code) == 2 and set(rules["script-src"].split()) == hashes
    own = code[0]
    for word in ("innerHTML", "insertAdjacent", "document.write", "eval(", "setAttribute"):
        assert word not in own
    assert not any(text.count("\r") for text in code)  # a browser would hash it otherwise


def test_the_data_are_those_of_the_trace() -> None:
    store = sample_trace(rounds=40, n_seqs=2).store
    page = page_of(store)
    (run,) = page.block("data")["runs"]
    kinds, pieces = page.block("data")["kinds"], page.block("data")["pieces"]
    rounds, tokens = run["rounds"], run["tokens"]
    assert rounds["n"] == len(store.rounds)
    for name in ("round", "seq_id", "num_draft_tokens", "rollback_depth"):
        assert values(rounds[name], rounds["n"]) == store.rounds.column(name).tolist()
    assert values(rounds["rollback_path"], rounds["n"]) == store.rounds.texts("rollback_path")
    assert "verify_ms" not in rounds  # nothing was timed
    n_again = store.tokens.texts("kind").count("replayed")
    assert n_again and len(tokens["again"]) == n_again
    assert tokens["n"] == len(store.tokens) - n_again
    shown = [kinds[i] for i in values(tokens["kind"], tokens["n"])]
    for seq_id in (0, 1):
        mine = np.array(values(tokens["seq_id"], tokens["n"])) == seq_id
        text = "".join(
            pieces[piece]
            for piece, kind, here in zip(tokens["piece"], shown, mine, strict=True)
            if here and kind not in ("rejected", "ignored")
        )
        table = store.tokens
        wanted = (table.column("seq_id") == seq_id) & ~np.isin(
            table.texts("kind"), ("rejected", "ignored", "replayed")
        )
        assert text == "".join(
            store.pieces[one].decode().replace("\t", "    ")
            for one in table.column("token_id")[wanted].tolist()
        )
    memory = store.memory
    for seq_id, first, image in ring_images(RunRef(store, 0)):
        for row in np.flatnonzero(memory.column("seq_id") == seq_id).tolist():
            one = memory.row(row)
            assert SHOWN_STATES[image[one["slot"], one["round"] - first]] == one["state"]
        assert (image != NOT_OBSERVED).sum() == (memory.column("seq_id") == seq_id).sum()
    assert [ring["seq"] for ring in run["ring"]] == [0, 1]


def test_lanes_have_their_verdict_and_the_places_beyond_it() -> None:
    builder = faulty_comparison()
    store = builder.store
    lanes = [run for run in page_of(store).block("data")["runs"] if run["divergence"]]
    assert {run["lane"] for run in lanes} < {facts.lane for facts in store.runs.values()}
    wrong = [run["divergence"] for run in lanes if run["divergence"]["verdict"] == "suspect"]
    assert wrong
    for found in wrong:
        errors = values(found["nmse"], found["n"])
        assert found["beyond"] == [
            i for i, nmse in enumerate(errors) if nmse is None or nmse > found["bound"]
        ]


def test_runs_are_chosen_and_too_many_tokens_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = sample_trace(rounds=3).store
    TraceBuilder(store).prompt("ab")
    TraceBuilder(store)  # has no row
    deleted = TraceBuilder(store)
    deleted.prompt("ab")
    deleted.plain("c")
    store.runs[3]["library"] = {"deleted": True}
    assert [run.run_id for run in chosen_runs(store)] == [0, 1, 2]
    assert [run["id"] for run in page_of(store).block("data")["runs"]] == [0]
    assert [run.run_id for run in chosen_runs(store, [3])] == [3]
    with pytest.raises(OptionError, match="no run 7"):
        list(chosen_runs(store, [7]))
    monkeypatch.setattr(session_data, "MOST_TOKENS", 10)
    with pytest.raises(OptionError, match="a page can hold only 10"):
        write_session_page([RunRef(store, 0)], "a", tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_both_themes_have_all_colours() -> None:
    assert theme_roles("light").keys() == theme_roles("dark").keys()
    assert all(colour.startswith("#") for colour in theme_roles("dark").values())


@pytest.mark.parametrize("m", [16_000, 50_000])
@pytest.mark.thinned(4)
def test_ten_thousand_rounds_fit_in_five_megabytes(m: int) -> None:
    """With the candidates of every token, which a run as long as the other one leaves out."""
    store, n = TraceStore(), 10_000
    run_id = store.begin_run({"model": {"name": "long"}})
    store.pieces.update({i: f" piece{i}".encode() for i in range(2000)})
    random = np.random.default_rng(0)
    drafted, accepted = np.full(n, 4), random.integers(0, 5, n)
    columns: dict[str, Any] = {
        name: random.random(n) * 10
        for name in ("draft_ms", "verify_ms", "sample_ms", "rollback_ms", "t_ms")
    }
    numbers = {
        name: random.integers(0, 10**6, n)
        for name in ("pos0", "kv_cells_used", "state_bytes_written", "memory_bytes_held")
    }
    store.rounds.extend(
        {
            "run_id": np.full(n, run_id),
            "round": np.arange(n),
            "seq_id": np.zeros(n, int),
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_emitted": accepted + 1,
            "rollback_depth": drafted - accepted,
            "rollback_path": ["seq_rm"] * n,
            "n_rs_seq": drafted,
            **columns,
            **numbers,
        }
    )
    kinds = np.array(["accepted", "rejected", "ignored", "replacement"])
    store.tokens.extend(
        {
            "run_id": np.full(m, run_id),
            "round": np.arange(m) * n // m,
            "seq_id": np.zeros(m, int),
            "pos": np.arange(m),
            "kind": kinds[random.integers(0, 4, m)].tolist(),
            "token_id": random.integers(0, 2000, m),
            "draft_p": random.random(m),
            "target_p": random.random(m),
            "target_entropy": random.random(m),
            "target_rank": random.integers(1, 400, m),
            "target_top_id": random.integers(0, 2000, (m, 5)),
            "target_top_p": random.random((m, 5)),
            "draft_top_id": random.integers(0, 2000, (m, 5)),
            "draft_top_p": random.random((m, 5)),
        }
    )
    for slot in range(5):
        store.memory.extend(
            {
                "run_id": np.full(n, run_id),
                "round": np.arange(n),
                "seq_id": np.zeros(n, int),
                "slot": np.full(n, slot),
                "state": ["live" if slot == 0 else "carried"] * n,
            }
        )
    page = session_page([RunRef(store, run_id)], "long")
    assert len(page) <= 5_000_000
    assert (b'"target_top":' in page) == (m == 16_000)
