"""The page of a session in a real Chromium, by Playwright: nothing of a trace is run, keys and
clicks choose the same place everywhere, nothing is fetched. Skipped without `playwright` or a
Chromium, which DRAFTSCOPE_CHROMIUM names where it is not on the path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.trace_models.session_page import session_page
from engine.report.session_data import chosen_runs
from engine.trace.store import TraceStore
from tests.support.lane_traces import faulty_comparison
from tests.support.trace_builder import TraceBuilder, sample_trace

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("bokeh")
PROGRAM = os.environ.get("DRAFTSCOPE_CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium")
HOSTILE = (
    "</script><script>window.ran=1</script>",
    "<img src=x onerror=window.ran=1>",
    "<b>bold</b>",
)
Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    """Opens the page of a trace; at its end nothing has failed and nothing was asked for."""
    problems: list[str] = []
    contexts = []

    def open_page(
        store: TraceStore, title: str = "a", scheme: str = "light", place: str = ""
    ) -> Any:
        path = tmp_path / "page.html"
        path.write_bytes(session_page(list(chosen_runs(store)), title))
        context = browser.new_context(color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda one: one.type == "error" and problems.append(one.text))
        page.on(
            "request",
            lambda one: one.url.startswith(("file:", "data:", "blob:")) or problems.append(one.url),
        )
        page.goto(path.as_uri() + place)
        page.wait_for_selector("#plot-depth canvas", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def test_hostile_texts_are_shown_and_not_run(opened: Opened) -> None:
    builder = TraceBuilder()
    builder.prompt(HOSTILE)
    builder.draft(HOSTILE[:1], HOSTILE[1], HOSTILE[2:])
    builder.store.runs[0]["device"] = HOSTILE[1]
    builder.store.findings.append(
        run_id=0, rule=HOSTILE[0], severity="error", message=HOSTILE[1], suggestion=HOSTILE[2]
    )
    page = opened(builder.store, HOSTILE[0])
    assert page.evaluate("window.ran") is None
    text = page.locator("#text").text_content()
    assert text == "".join((*HOSTILE, HOSTILE[0], HOSTILE[2], HOSTILE[1]))
    assert page.locator("#text b, #text img, #findings img, #settings img").count() == 0
    assert HOSTILE[1] in page.locator("#findings").text_content()
    assert page.locator("h1").text_content() == HOSTILE[0]
    page.keyboard.press("]")
    page.keyboard.press("]")
    assert HOSTILE[2] in page.locator("#step").text_content()


def test_a_place_is_chosen_by_keys_and_clicks(opened: Opened) -> None:
    page = opened(sample_trace(rounds=30).store)
    where = page.locator("#where")
    page.keyboard.press("]")
    first = where.text_content()
    page.keyboard.press("]")
    assert where.text_content() != first
    page.keyboard.press("[")
    assert where.text_content() == first
    page.keyboard.press("n")
    assert page.locator("#text .token").get_attribute("class").split()[0] == "rejected"
    assert page.locator("#step tr.chosen").count() == 1
    chosen = where.text_content()
    page.keyboard.press("n")
    assert page.locator("#text .token").count() == 1
    page.keyboard.press("Shift+N")
    assert where.text_content() == chosen
    page.locator("#text .accepted").nth(8).click()
    assert where.text_content() != chosen
    assert page.url.rpartition("round=")[2] in where.text_content()
    shown = page.locator("#text .rejected").first
    assert shown.is_visible()
    page.keyboard.press("g")
    assert not shown.is_visible()
    page.keyboard.press("i")
    assert not page.locator("#right").is_visible()
    box = page.locator("#plot-depth canvas").first.bounding_box()
    page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 0.4 * box["height"])
    before = where.text_content()
    page.wait_for_function(
        "text => document.getElementById('where').textContent !== ''", arg=before
    )
    assert page.locator("#text .chosen").count() > 0


def test_a_link_and_a_divergence_lead_to_their_round(opened: Opened) -> None:
    store = faulty_comparison().store
    page = opened(store, place="#run=1&seq=0&round=3")
    assert page.locator("#where").text_content().startswith("Round 3, sequence 0")
    page.keyboard.press("x")
    found = page.locator("#where").text_content()
    assert found.startswith("Round ") and page.locator("#lanes tr").count() > 2
    page.locator("#lanes tr.goes").first.click()
    assert page.locator("#where").text_content()


def test_lanes_are_those_of_the_comparison_on_show(opened: Opened) -> None:
    store = faulty_comparison().store
    builder = TraceBuilder(store)
    builder.prompt(["a"])
    builder.draft(["b"], "c", ["d"])
    page = opened(store, place="#run=4&seq=0")
    assert page.locator("#run option:checked").text_content().startswith("run 4")
    assert not page.locator("#card-divergence").is_visible()
    page.locator("#run").select_option(label="run 0, checkpoint")
    assert page.locator("#card-divergence").is_visible()
    assert page.locator("#lanes tr.goes").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_readers_theme_and_the_other_one(opened: Opened, scheme: str) -> None:
    page = opened(sample_trace(rounds=8).store, scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_text_is_whole_when_it_is_long(opened: Opened) -> None:
    """Laid out in parts: nothing is lost or joined between them, line ends least of all."""
    builder = TraceBuilder()
    builder.prompt(["a", "\n"])
    for i in range(3000):
        builder.draft([f" w{i}", "\n" if i % 3 else ";"], ".")
    page = opened(builder.store)
    page.wait_for_function("document.querySelectorAll('#text span').length === 9002")
    text = page.locator("#text").text_content()
    wanted = "".join(f" w{i}{'⏎' if i % 3 else ';'}." for i in range(3000))
    assert "".join(text.split()) == "".join(("a" + wanted).split())
