"""llama.cpp's library as a source of drafts: a double of it here, a real one where a build is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.compare.llama_process import LlamaEngine
from engine.errors import OptionError
from engine.observe.drafter_diff.diff import DrafterDiff, drafter_diff
from engine.observe.drafter_diff.llama_source import decode_with_llama
from engine.observe.drafter_diff.sides import sides_of
from engine.options import SamplerOptions
from engine.options.llama_cpp import LlamaSettings
from engine.session import Session
from engine.trace.records import N_TOP
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT
from tests.support.drafter_diff_campaign import opened
from tests.support.fake_llama import FakeLlama, LlamaHere
from tests.support.golden_runs import decode, options_of

BUILD = os.environ.get("DRAFTSCOPE_LLAMA_CPP", "")
FILES = {"mtp": None, "simple": DEMO_DRAFT}
Rows = Callable[[np.ndarray], np.ndarray]


def use_double(
    patch: pytest.MonkeyPatch, kind: str, handed: Rows = lambda rows: rows, **more: bool
) -> None:
    """Have the library's place taken by this engine's models, a double for each file."""

    def open_double(path: Path, library: Path | None, settings: LlamaSettings) -> LlamaEngine:
        is_draft = path == FILES[kind]
        session = Session.open(path, compute="f32") if is_draft else opened(kind)
        return LlamaHere(path, FakeLlama(session, handed=handed, **more), settings)

    patch.setattr("engine.compare.peer_lane.open_llama", open_double)


def compared(
    kind: str, library: Path | None = None, temp: float = 0.0, n: int = 48
) -> tuple[DrafterDiff, RunRef, np.ndarray | None]:
    """This engine's run of a text against the library's."""
    session = opened(kind)
    prompt = session.prompt("def quicksort(arr):")
    options = replace(options_of(n, f"draft-{kind}"), sampler=SamplerOptions(temp=temp, seed=3))
    run = decode(session, [prompt], options)
    ours = RunRef(run.trace, run.run_id)
    run_b, handed = decode_with_llama(session, library, prompt, options, TraceStore(), FILES[kind])
    return drafter_diff(ours, run_b, session, handed=(None, handed)), run_b, handed


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("has_planes", [True, False])
@pytest.mark.thinned(4)
def test_drafts_of_the_library_are_those_of_this_engine(
    monkeypatch: pytest.MonkeyPatch, kind: str, has_planes: bool, temp: float
) -> None:
    use_double(monkeypatch, kind, has_planes=has_planes)
    found, run, handed = compared(kind, temp=temp)
    (pair,) = found.pairs
    assert found.first is None, str(found.first)
    assert pair.n_equal == pair.n_contexts > 8
    assert pair.counts_a == pair.counts_b
    (side,) = sides_of("B", run)
    assert all(len(draft.tokens) == draft.n_drafted for draft in side.drafts)
    assert {len(top) for draft in side.drafts for top in draft.tops} == {N_TOP}
    if kind == "mtp":
        assert handed is not None
        # the newest token is not decoded, and the first row is handed over with the second token
        assert len(handed) == side.n_prompt + len(side.ids) - 1
    else:
        assert handed is None


@pytest.mark.parametrize(
    ("handed", "words"),
    [
        (np.zeros_like, "zeros"),
        (lambda rows: rows * 0.25, "0.25 times"),
        (lambda rows: np.concatenate([rows[:1], rows[:-1]]), "of the previous position"),
    ],
)
def test_rows_of_the_target_that_are_wrong_are_named_first(
    monkeypatch: pytest.MonkeyPatch, handed: Rows, words: str
) -> None:
    use_double(monkeypatch, "mtp", handed)
    first = compared("mtp", n=8)[0].first
    assert first is not None
    assert (first.stage, first.side) == ("target rows", "B")
    assert words in first.about


def test_other_drafters_are_refused() -> None:
    session = opened("mtp")
    for name in ("ngram-mod", "draft-simple"):
        with pytest.raises(OptionError, match="does not work"):
            decode_with_llama(session, None, session.prompt("a"), options_of(8, name), TraceStore())


@pytest.mark.peer
@pytest.mark.skipif(not BUILD, reason="DRAFTSCOPE_LLAMA_CPP names no build")
@pytest.mark.parametrize("kind", FILES)
def test_a_build_drafts_as_this_engine_does(kind: str) -> None:
    found, *_ = compared(kind, Path(BUILD))
    (pair,) = found.pairs
    assert found.first is None, str(found.first)
    assert pair.n_equal >= 0.9 * pair.n_contexts > 8
