"""Large models have run once when a session is open; small ones start at once."""

from __future__ import annotations

import pytest

from engine import warm_up as warm_up_module
from engine.session import Session
from engine.warm_up import WIDTHS, warm_up
from kernels.dispatch import uses_llvm
from kernels.llvm import program
from tests.support.golden_runs import DATA, session

NAME = "qwen35-c-v2x-mtp-f32"


@pytest.mark.parametrize("is_plain", [False, True])
def test_widths_that_run_through_trunk_and_head(
    monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    model = session(NAME).model
    assert model.head is not None
    seen: list[tuple[str, int, int]] = []
    for name, part in (("trunk", model), ("head", model.head)):
        forward = part.forward

        def spy(ubatch, *others, name=name, forward=forward):
            seen.append((name, ubatch.n_seq_tokens, len(ubatch.outputs)))
            return forward(ubatch, *others)

        monkeypatch.setattr(part, "forward", spy)
    warm_up(model, is_plain=is_plain)
    parts = [("trunk", WIDTHS[0]), ("trunk", 1)]
    if not is_plain:
        parts = [(name, n) for n in WIDTHS for name in ("trunk", "head")]
    assert seen == [(name, n, min(n, WIDTHS[-1])) for name, n in parts]


@pytest.mark.skipif(not uses_llvm(), reason="kernels for the processor are not in use")
def test_it_starts_no_kernel_and_leaves_none_to_be_compiled(monkeypatch):
    model = session(NAME).model
    begun, later = set(), set()

    def spy(seen, is_started):
        def call(self, *args, **kwargs):
            # a recording notes kernels, too, and starts them then
            assert is_started or program._watching.watch is not None
            seen.add(id(self))

        return call

    for seen, is_started, decode in (
        (begun, False, warm_up),
        (later, True, warm_up_module._decode),
    ):
        for name in ("__call__", "alone"):
            monkeypatch.setattr(program.Program, name, spy(seen, is_started))
        decode(model)
    assert later and later == begun


@pytest.mark.parametrize("name", ["qwen35-a-f32", "qwen3-f-f32"])
def test_models_without_a_head_or_states(name: str) -> None:
    warm_up(session(name).model)


@pytest.mark.parametrize(("n_params", "n_models"), [(1, 2), (1 << 40, 0)])
def test_large_models_are_warm(
    monkeypatch: pytest.MonkeyPatch, n_params: int, n_models: int
) -> None:
    warmed: list[object] = []
    monkeypatch.setattr("engine.warm_up.warm_up", lambda model, is_plain: warmed.append(model))
    monkeypatch.setattr("engine.warm_up.SMALL_MODEL", n_params)
    path = DATA / "qwen35-a-f32.gguf"
    phases: list[str] = []
    opened = Session.open(
        path, path, compute="f32", progress=lambda done, total, phase: phases.append(phase)
    )
    assert phases.count("running once") == n_models
    assert len(warmed) == n_models
    opened.model_in("bf16")
    assert len(warmed) == n_models + (n_models > 0)
