"""Models with weights that are no numbers: the run says where it shows first, and ends there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.findings.check import find, recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE
from engine.errors import NonFiniteError
from engine.options import Prompt, SamplerOptions
from engine.session import Session
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.golden_runs import DATA, decode, options_of, prompt_of, session, tokens_of
from tests.support.rewrite_gguf import Tensors, rewrite

MTP = "qwen35-c-v2x-mtp-f32"
N = 40


@cache
def plain() -> list[int]:
    return tokens_of(decode(session(MTP), [prompt_of(MTP)], options_of(N, ignore_eos=True)))[0]


@cache
def first_new() -> tuple[int, int]:
    """A token that the prompt lacks and its first place in the text, some tokens after it."""
    known = {*prompt_of(MTP).tokens, *plain()[:4]}
    i, token = next((i, t) for i, t in enumerate(plain()) if t not in known)
    return token, len(prompt_of(MTP).tokens) + i


def to_the_end(step: Callable[[], bool]) -> None:
    while step():
        pass


def damaged(tmp_path: Path, name: str, value: float, row: int | None = None) -> Session:
    def edit(tensors: Tensors) -> None:
        (whole,) = (t for n, t in tensors.items() if n.endswith(name))
        whole[... if row is None else row] = value

    path = rewrite(DATA / f"{MTP}.gguf", tmp_path / "damaged.gguf", edit=edit)
    return Session.open(path, compute="f32")


@pytest.mark.parametrize("look", ["step", "advance"])
@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_run_ends_at_the_first_row(tmp_path, value: float, temp: float, look: str) -> None:
    opened = damaged(tmp_path, "output_norm.weight", value)
    trace = TraceStore()
    options = options_of(N, sampler=SamplerOptions(temp=temp))
    prompts = [prompt_of(MTP), Prompt(prompt_of(MTP).tokens[:3])]
    run = opened.start(prompts, options, trace)
    with pytest.raises(NonFiniteError, match=r"trunk's logits for position \d+ of sequence 0"):
        to_the_end(getattr(run, look))
    assert run.done
    assert trace.runs[0]["stops"] == ["error", "stopped"]
    (finding,) = recorded(trace)
    assert (finding.rule, finding.severity) == ("non-finite-logits", "error")
    assert (finding.round, finding.seq_id) == (0, 0)
    assert f"position {len(prompts[0].tokens)};" in finding.evidence
    assert "trunk" in finding.message


def test_the_row_is_named_where_it_comes_up_in_the_middle(tmp_path) -> None:
    token, pos = first_new()
    opened = damaged(tmp_path, "token_embd.weight", np.nan, token)
    run = opened.start([prompt_of(MTP)], options_of(N, ignore_eos=True))
    with pytest.raises(NonFiniteError):
        to_the_end(run.advance)
    # all that was chosen before is there, and nothing that was not
    n = pos - len(prompt_of(MTP).tokens) + 1
    assert run.emitted == [plain()[:n]]
    (finding,) = recorded(run.trace)
    assert (finding.round, finding.seq_id) == (n, 0)
    assert f"position {pos + 1};" in finding.evidence


@pytest.mark.parametrize("p_min", [0.0, 0.1])
def test_the_head_is_told_from_the_trunk(tmp_path, p_min: float) -> None:
    opened = damaged(tmp_path, "nextn.enorm.weight", np.nan)
    options = options_of(N, "draft-mtp", ignore_eos=True)
    options = replace(options, spec=replace(options.spec, p_min=p_min))
    run = opened.start([prompt_of(MTP)], options)
    with pytest.raises(NonFiniteError, match="MTP head"):
        to_the_end(run.step)
    (finding,) = recorded(run.trace)
    assert (finding.rule, finding.round, finding.seq_id) == ("non-finite-logits", 1, 0)
    assert run.trace.drafts.texts("reason") == ["non-finite"]


def test_going_on_is_an_option(tmp_path) -> None:
    opened = damaged(tmp_path, "nextn.enorm.weight", np.nan)
    options = partial(options_of, N, "draft-mtp", ignore_eos=True, allow_non_finite=True)
    run = decode(opened, [prompt_of(MTP)], options())
    assert tokens_of(run) == [plain()]
    assert [f.rule for f in recorded(run.trace) if f.severity == "error"] == ["non-finite-logits"]
    for sampler in (SamplerOptions(), SamplerOptions(temp=0.8)):
        trunk = damaged(tmp_path, "output_norm.weight", np.nan)
        run = decode(trunk, [prompt_of(MTP)], options(sampler=sampler))
        assert len(tokens_of(run)[0]) == N
        assert recorded(run.trace)[0].rule == "non-finite-logits"
        assert run.results()[0].stop == "limit"


def test_a_comparison_ends_too_and_an_opened_trace_says_the_same(tmp_path) -> None:
    opened = damaged(tmp_path, "output_norm.weight", np.nan)
    options = options_of(N, "draft-mtp", ignore_eos=True)
    comparison = Comparison(opened, prompt_of(MTP), options, [NOISE_LANE])
    with pytest.raises(NonFiniteError):
        to_the_end(comparison.step)
    assert comparison.done
    assert [f.rule for f in recorded(comparison.trace)] == ["non-finite-logits"]
    export_csv(comparison.trace, tmp_path / "out")
    again = open_trace(tmp_path / "out")
    assert find(again) == recorded(comparison.trace)


def test_facts_of_another_make_are_no_trouble() -> None:
    trace = TraceStore()
    for facts in (7, [7], [{"round": "1"}], [{"round": 1, "seq_id": 0, "pos": None}]):
        trace.begin_run({"non_finite": facts})
    assert find(trace) == []
