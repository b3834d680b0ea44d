"""Model files with anything wrong in them: a sentence, or a model that runs as it should."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from app.__main__ import main
from engine.errors import DraftscopeError, NonFiniteError
from engine.options import Prompt, RunOptions, SpecOptions
from engine.session import Session
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.gguf_parts import base_file, bases, drafter_bases, mixes, parts_of
from tests.torture.gguf_steps import draw, write
from tests.torture.settings import COMPUTE

_CPU_S = 2.0
_TEXT = "def f(x):\n    return x  # ünicode\n"
_SAYS = "draftscope: error: "


def _draw(random: np.random.Generator, number: int) -> Case:
    """Three of eight files are whole: two of them a mix of types, and one a base."""
    names = [*bases(), *drafter_bases()]
    compute = str(random.choice(COMPUTE))
    if number % 4 == 0:
        quants = mixes()
        return {"base": quants[number // 4 % len(quants)], "steps": [], "compute": compute}
    if number % 8 == 2:
        return {"base": names[number // 8 % len(names)], "steps": [], "compute": compute}
    base = names[number % len(names)]
    n = int(random.choice([1, 1, 1, 2, 2, 3, 5]))
    steps = [draw(random, parts_of(base)) for _ in range(n)]
    return {"base": base, "steps": steps, "compute": "f32"}


def _play(case: Case, folder: Path) -> Figures:
    path = write(parts_of(case["base"]), case["steps"], folder)
    figures = dict.fromkeys(("refused", "refused_in_run", "ran", "non_finite_said"), 0.0)
    with _timed(figures, "head_cpu_s_max"):
        _command("info", str(path))
        _command("info", str(path), "--json")
    with _timed(figures, "tokenise_cpu_s_max"):
        _command("tokenize", str(path), _TEXT)
    try:
        with _timed(figures, "open_cpu_s_max"):
            session = _opened(case["base"], path, case["compute"])
    except DraftscopeError as error:
        _sentences(error)
        if not case["steps"]:
            raise AssertionError("a whole file is refused") from error
        return {**figures, "refused": 1}
    with _timed(figures, "run_cpu_s_max"):
        figures |= _run(session)
    assert case["steps"] or figures["ran"], "a whole file does not run"
    return {**figures, "whole": not case["steps"]}


def _opened(base: str, path: Path, compute: str = "f32") -> Session:
    """A model by itself, what only drafts next to its target."""
    target = drafter_bases().get(base)
    if target is not None:
        return Session.open(base_file(target), path, compute=compute)
    return Session.open(path, compute=compute)


def _run(session: Session) -> Figures:
    """Plain decoding and a drafted run: the same tokens, or a sentence."""
    try:
        n_vocab = session.config.n_vocab
        prompt = Prompt(tuple(i % n_vocab for i in (5, 17, 3, 5, 17, 3)))
        options = RunOptions(n_predict=8, n_ctx=64, ignore_eos=True)
        logits = session.logits(prompt.tokens)
        plain = _tokens(session, prompt, options)
        spec = SpecOptions(("ngram-simple", *session.drafters), n_max=3)
        assert _tokens(session, prompt, replace(options, spec=spec)) == plain
    except NonFiniteError as error:
        _sentences(error)
        return {"non_finite_said": 1}
    except DraftscopeError as error:
        _sentences(error)
        return {"refused_in_run": 1}
    assert np.isfinite(logits[-1]).all(), "logits that are not finite chose tokens, and no one said"
    return {"ran": 1}


def _tokens(session: Session, prompt: Prompt, options: RunOptions) -> list[int]:
    run = session.start([prompt], options)
    while run.step():
        pass
    return run.results()[0].tokens


def _command(*words: str) -> None:
    """A subcommand in this process: an error is one sentence and its remedy in one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    said = err.getvalue()
    assert status in (0, 1, 2), status
    assert bool(said) == bool(status), said
    if status:
        assert said.startswith(_SAYS) and said.count("\n") == 1, said
        assert "Traceback" not in said, said


def _sentences(error: DraftscopeError) -> None:
    for text in (error.message, error.remedy):
        assert text.isprintable() and text.endswith((".", "?")) and len(text) < 500, text


@contextlib.contextmanager
def _timed(figures: Figures, name: str) -> Iterator[None]:
    start = time.thread_time()
    yield
    figures[name] = time.thread_time() - start
    if name != "run_cpu_s_max":  # a run compiles kernels for shapes that no one has had before
        assert figures[name] < _CPU_S, f"{name} is {figures[name]:.1f}"


def _prepare() -> None:
    """Every base is opened and runs once, so that children find what it needs."""
    for name in [*bases(), *drafter_bases()]:
        parts_of(name)
        _run(_opened(name, base_file(name)))


CAMPAIGN = Campaign(
    "gguf",
    "A typed error or a correct run, opened within 2 s and 256 MiB; what is not finite is said.",
    _draw,
    _play,
    _prepare,
    share=3.0,
    n_least=64,
)
