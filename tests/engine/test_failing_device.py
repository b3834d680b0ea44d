"""Runs whose device has no memory left, or fails: a sentence, the trace, a session that goes on."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import torch

from engine import warm_up
from engine.decode import recorder
from engine.decode.scheduler import Scheduler
from engine.errors import DeviceLostError, OutOfMemoryError
from engine.machine.device import meaning_of
from engine.memory.hybrid import HybridMemory, LentMemories
from engine.model.hybrid import HybridModel
from engine.session import Session
from tests.support.golden_files import golden_file
from tests.support.golden_runs import MTP_MODELS, decode, options_of, prompt_of, session

NAME = MTP_MODELS[0]
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
FULL = [
    torch.AcceleratorError("CUDA error: out of memory\nCompile with"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with"),
    RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
]


def failing(monkeypatch, error: Exception, n: int = 2):
    """A run whose pass number n raises."""
    forward, left = HybridModel.forward, [n]

    def fail(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise type(error)(*error.args)  # one that no frame of this test holds
        return forward(*args, **kwargs)

    monkeypatch.setattr(HybridModel, "forward", fail)
    return session(NAME).start([prompt_of(NAME)], options_of(20, "draft-mtp"))


def test_memory_that_is_not_there(monkeypatch):
    run = failing(monkeypatch, NO_MEMORY)
    assert run.step()
    with pytest.raises(OutOfMemoryError, match=r"take more memory than cpu has\.") as raised:
        run.step()
    assert "Lower -c" in str(raised.value.remedy)
    # the frames of the failed pass hold its tensors
    assert raised.value.__context__ is None and raised.value.__cause__ is None
    assert run.done and not run.step()
    assert len(run.emitted[0]) == 1
    monkeypatch.undo()
    again = decode(session(NAME), [prompt_of(NAME)], options_of(20, "draft-mtp"))
    assert len(again.emitted[0]) == 20


def test_what_a_failed_run_held_is_free_at_once(monkeypatch):
    """Its memory and drafters', without a search for garbage: the next run may need the room."""
    made = []
    for name in ("for_model", "for_layers"):
        make = getattr(HybridMemory, name)

        def noted(*args, make=make, **kwargs):
            made.append(make(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(HybridMemory, name, noted)
    monkeypatch.setattr(Session, "_memories", lambda *_: LentMemories())  # as on a GPU
    run = failing(monkeypatch, NO_MEMORY)
    made[:] = map(weakref.ref, made)
    gc.collect()
    gc.disable()
    try:
        assert run.step()
        with suppress(OutOfMemoryError):
            run.step()
        del run
        assert made and not any(memory() for memory in made)
    finally:
        gc.enable()


@pytest.mark.parametrize("error", LOST, ids=["torch", "triton"])
def test_a_device_that_fails(monkeypatch, error):
    run = failing(monkeypatch, error)

    def stop(_):
        raise RuntimeError("CUDA error: nothing can be done with it")

    assert run.step()
    monkeypatch.setattr(Scheduler, "stop", stop)
    with pytest.raises(DeviceLostError) as raised:
        run.step()
    message = str(raised.value)
    assert str(error).split("\n")[0] in message and "Compile with" not in message
    assert run.done and len(run.trace.tokens.column("token_id")) > 0


@pytest.mark.parametrize("reads", [True, False], ids=["known", "on-the-device"])
def test_rows_that_wait_for_a_device_that_fails(monkeypatch, reads):
    """Of a pause between looks: those that need nothing more of it are written, and the run ends as
    others do."""
    run, facts_of, passes = failing(monkeypatch, LOST[0], 6), recorder.all_target_facts, [0]
    forward = HybridModel.forward

    def counted(*args, **kwargs):
        passes[0] += 1
        return forward(*args, **kwargs)

    def read(questions):
        if passes[0] > 5 and not reads:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return facts_of(questions)

    monkeypatch.setattr(HybridModel, "forward", counted)
    monkeypatch.setattr(recorder, "all_target_facts", read)
    with pytest.raises(DeviceLostError, match="cpu failed: CUDA error"):
        run.advance(60)
    facts = run.trace.runs[run.run_id]
    assert run.done and facts["stops"] == ["stopped"]
    assert (len(run.trace.rounds.column("round")) > 1) is reads


def test_a_memory_that_does_not_fit(monkeypatch):
    def refuse(*args, **kwargs):
        raise NO_MEMORY

    opened = session(NAME)
    monkeypatch.setattr(HybridMemory, "for_model", refuse)
    with pytest.raises(OutOfMemoryError, match="take more memory"):
        # a size that no other test has left on the shelf
        opened.start([prompt_of(NAME)], options_of(20, n_ctx=77, rollback="planes"))


@pytest.mark.parametrize("error", FULL, ids=["context", "library", "kernel"])
def test_a_full_device_has_not_failed(error):
    """Libraries and kernels take memory next to torch's, and say in their own words that there is
    none left."""
    assert isinstance(meaning_of(error, torch.device("cpu")), OutOfMemoryError)


def test_what_opening_and_drafting_need_may_not_fit(monkeypatch, tmp_path):
    """The passes of a large model that is opened, and the memory of drafters."""

    def refuse(*args, **kwargs):
        raise NO_MEMORY

    monkeypatch.setattr(warm_up, "SMALL_MODEL", 1)
    monkeypatch.setattr(warm_up, "warm_up", refuse)
    with pytest.raises(OutOfMemoryError, match="take more memory") as raised:
        Session.open(golden_file(f"{NAME}.gguf"))
    assert raised.value.__context__ is None
    monkeypatch.undo()
    opened = session(NAME)
    monkeypatch.setattr(HybridMemory, "for_layers", refuse)
    with pytest.raises(OutOfMemoryError, match="take more memory"):
        opened.start([prompt_of(NAME)], options_of(20, "draft-mtp", n_ctx=79))


def test_how_much_is_free_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 80 << 20))
    meaning = meaning_of(NO_MEMORY, torch.device("cuda", 1))
    assert "than cuda:1 has: 3 of 80 MiB are free." in str(meaning)


def test_other_errors_mean_what_they_say():
    for error in (RuntimeError("shapes differ"), ValueError("CUDA"), KeyboardInterrupt()):
        assert meaning_of(error, torch.device("cpu")) is None
