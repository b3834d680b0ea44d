"""Whole rounds on a CUDA device of fake tensors: where everything is, and what the host waits for.

A fake device raises where devices are mixed and where a value is looked at. Triton cannot launch on
it, so the torch versions of the kernels run; a machine with CUDA runs tests marked `gpu` instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import OutOfMemoryError
from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.model.loader import load_model
from engine.options import RunOptions
from engine.session import Session
from tests.support.fake_cuda import DEVICE, fake_cuda, random_values
from tests.support.golden_files import golden_file
from tests.support.golden_runs import DATA, MTP_MODELS, options_of, prompt_of

NAME = MTP_MODELS[2]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels were imported for the CUDA device that is there"
)


@pytest.fixture
def fake(monkeypatch):
    """The fake device; what is read from it is random, so drafts fail at any token."""
    with fake_cuda(monkeypatch, random_values(5)) as seen:
        yield seen


def opened(compute: str, draft: str | None = None) -> Session:
    return Session.open(
        DATA / f"{NAME}.gguf", draft and DATA / f"{draft}.gguf", compute=compute, device="cuda"
    )


def rounds_of(run, seen, n: int = 3):
    """What was seen in each round after the prompt."""
    run.step()
    found = []
    for _ in range(n):
        seen.clear()
        assert run.step()
        found.append((seen.reads, seen.waits, len(seen.uploads)))
        assert seen.strays == []
    return found


def test_the_fake_device_notices(fake):
    there = torch.ones(4, 4, device=DEVICE)
    with pytest.raises(Exception, match="same device"):
        there + torch.ones(4, 4)
    for look in (lambda: there.sum().item(), lambda: bool(there[0, 0] > 0), there.tolist):
        with pytest.raises(Exception, match=r"_local_scalar_dense"):
            look()
    with pytest.raises(Exception, match=r"nonzero"):
        there.nonzero()
    there.cpu()
    assert len(fake.downloads) == 1
    there[torch.from_numpy(np.arange(2))]
    assert len(fake.strays) == 1


@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("compute", ["q8", "blocks"])
@pytest.mark.parametrize("size", ["tiny", "moe-tiny"])
@pytest.mark.thinned(8)
def test_weights_stay_as_their_file_has_them(fake, tmp_path, quant, compute, size):
    """Embedding and head, which are one matrix, included, and experts."""
    path = tmp_path / "model.gguf"
    write_random_model(path, arch="qwen35", size=size, quant=quant)
    with GgufFile.open(path) as file:
        model = load_model(file, compute=compute, device=DEVICE)
        in_file = sum(tensor.n_bytes for tensor in file.tensors.values())
    assert model.weight_bytes <= 1.05 * in_file


@pytest.mark.parametrize(
    ("compute", "policy"),
    [("f32", "planes"), ("bf16", "carry"), ("blocks", "replay")],  # a ring is in others
)
@pytest.mark.thinned(4)
def test_a_round_waits_for_the_tokens_and_nothing_else(fake, compute, policy):
    """The drafted tokens stay on the device and come with the record of the verified rows. Uploads
    are as many however many layers there are."""
    model = opened(compute)
    assert (model.device, model.compute) == (DEVICE, compute)
    run = model.start([prompt_of(NAME)], options_of(60, "draft-mtp", rollback=policy))
    found = rounds_of(run, fake, 5)
    assert {(reads, waits) for reads, waits, _ in found} == {(1, 0)}
    assert max(uploads for *_, uploads in found) <= 12
    assert fake.downloads == []
    depths = run.trace.rounds.column("rollback_depth")
    assert len(set(depths.tolist())) > 2, "drafts failed at several tokens"


def test_a_floor_is_looked_at_in_every_step(fake):
    """Which of the three draft steps there are depends on how sure the head was."""
    options = options_of(60, "draft-mtp", rollback="ring")
    options = replace(options, spec=replace(options.spec, p_min=1e-9))
    found = rounds_of(opened("f32").start([prompt_of(NAME)], options), fake)
    assert {reads for reads, *_ in found} == {4}


def test_several_sequences_and_a_draft_model(fake):
    """A draft model is read once for all sequences, and so is the record, whose made-up tokens are
    not those that were drafted: the facts look again."""
    model = opened("blocks", draft="qwen35-a-f32")
    options = options_of(60, "draft-simple", rollback="ring", parallel=2)
    found = rounds_of(model.start([prompt_of(NAME)] * 2, options), fake)
    assert {reads for reads, *_ in found} <= {1, 2}
    assert fake.downloads == []


@pytest.mark.repeats("test_a_floor_is_looked_at_in_every_step")
def test_sampling_at_a_temperature(fake):
    from engine.options import SamplerOptions

    sampler = SamplerOptions(temp=0.8, logit_bias=((3, 1.0),))
    options = options_of(60, "draft-mtp", rollback="ring", sampler=sampler, ignore_eos=True)
    run = opened("f32").start([prompt_of(NAME)], options)
    # one more where the record of a row does not know the drawn token
    assert {(reads, waits) for reads, waits, _ in rounds_of(run, fake)} <= {(3, 1), (4, 1)}
    assert fake.downloads == []


def test_checkpoints_on_the_device_do_not_come_to_the_host(fake):
    options = options_of(60, "draft-mtp", rollback="checkpoint", checkpoint_device="device")
    rounds_of(opened("f32").start([prompt_of(NAME)], options), fake)
    assert fake.downloads == []


def test_checkpoints_on_the_host_come_there(fake):
    options = options_of(60, "draft-mtp", rollback="checkpoint", checkpoint_device="host")
    model = opened("f32")
    rounds_of(model.start([prompt_of(NAME)], options), fake)
    assert len(fake.downloads) == 2 * len(model.model.recurrent_layers)


def test_a_model_without_room_is_refused_before_it_is_loaded(fake):
    """With figures of all that its runs would take; so is a run that the rest is too little for."""
    options = options_of(60, "draft-mtp", rollback="planes", n_ctx=4096)
    path = golden_file(f"{NAME}.gguf")
    fake.free = 1 << 20
    wanted = r"^cuda:0 \(Fake 8\) has 1 MiB free, and .* are needed: weights .*, KV .*, planes .*"
    with pytest.raises(OutOfMemoryError, match=wanted) as raised:
        Session.open(path, compute="blocks", device="cuda", options=options)
    assert not fake.uploads and "--device cpu" in str(raised.value.remedy)
    fake.free = 8 << 30
    model = opened("blocks")
    fake.free = 1 << 20
    with pytest.raises(OutOfMemoryError, match=r"needed: KV .*, state .*, planes "):
        model.start([prompt_of(NAME)], options)


def test_the_device_of_a_model_is_current_when_it_is_opened_and_in_every_round(fake):
    """Kernels, streams and pinned memory are those of a thread's current device: a round may be in
    another thread, and after one on another device."""
    run = opened("f32").start([prompt_of(NAME)], RunOptions(n_predict=4))
    for _ in range(2):
        assert fake.current == DEVICE
        fake.current = None
        assert run.step()
    assert fake.current == DEVICE


def test_the_run_says_where_it_was(fake):
    run = opened("f32").start([prompt_of(NAME)], RunOptions(n_predict=4))
    assert run.trace.runs[run.run_id]["device"] == "cuda:0"


def test_every_family_with_the_kernels_of_a_gpu(request):
    """families_on_cuda.py in a process where operations are chosen as on a GPU: a run of each
    family, with --all MTP blocks and drafters too."""
    pytest.importorskip("triton")
    here = Path(__file__)
    chosen = ["-p", "tests.support.as_on_cuda", "-p", "no:cacheprovider"]
    if request.config.getoption("all"):
        chosen += ["--all"]
    else:
        chosen += ["-k", "test_families or test_launches or longest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen, str(here.with_name("families_on_cuda.py"))],
        cwd=here.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"^[1-9]\d* passed", done.stdout, re.MULTILINE), done.stdout[-2000:]
