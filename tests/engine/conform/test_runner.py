"""Kernels in child processes: a user's adapter, crashes, hangs, reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.conform import passes, replays, report, runner
from engine.conform.checks import check
from engine.conform.cost import cost_shape, least_bytes
from engine.conform.packages import Package
from engine.conform.subject import Kernel
from engine.errors import KernelPackageError
from engine.report.text import markdown
from resources import help_page

ADAPTER = '''
import os, time, torch

class Running:
    """Each sequence's state, and the states after the rows of the last pass."""

    def __init__(self, shape, memory):
        self.states, self.after = {}, {}
        self.width = shape.d_k - 1

    def load(self, sequence, state):
        self.states[sequence] = state

    def verify(self, rows):
        outs = []
        for s, part in zip(rows.sequences, rows.slices()):
            x = torch.cat([self.states[s], rows.x[part].T], 1)
            windows = x.unfold(1, self.width + 1, 1)
            y = (windows * rows.weight[:, None]).sum(-1).T + rows.bias
            outs.append(torch.nn.functional.silu(y))
            self.after[s] = [x[:, i + 1 : i + 1 + self.width] for i in range(len(y))]
        return torch.cat(outs)

    def accept(self, sequences, counts):
        for s, n in zip(sequences, counts):
            self.states[s] = self.after[s][n - 1]

    def decode(self, rows):
        BODY
        out = self.verify(rows)
        self.accept(rows.sequences, [1] * len(rows.sequences))
        return out

    def state(self, sequence):
        return self.states[sequence]

def adapter(shape, memory):
    return Running(shape, memory)

adapter.recurrences = ("conv",)
'''


def outcomes(tmp_path, body, checks, limit_s=30.0, text=ADAPTER):
    path = tmp_path / "my_kernel.py"
    path.write_text(text.replace("BODY", body))
    name, place, _ = runner.open_target(f"{path}:adapter")
    return list(
        runner.run(name, place, seed=1, device="cpu", checks=checks, limit_s=limit_s, at_once=1)
    )


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("verify(self, rows)", "verify(self, rows, more)", "missing 1 required positional"),
        ("def accept", "def take", "has no attribute 'accept'"),
    ],
)
def test_a_call_that_an_adapter_has_otherwise_is_named(tmp_path, here, there, words):
    (seen,) = outcomes(tmp_path, "pass", ("depths",), text=ADAPTER.replace(here, there))
    (fault,) = seen.faults
    assert (fault.cause, words in fault.detail) == ("signature", True), fault.detail
    assert fault.detail.endswith("; `draftscope help conform` has each call")


@pytest.mark.repeats("test_a_kernel_of_one_token_is_played_row_by_row")
def test_an_adapter_of_the_user_passes_all_checks(tmp_path):
    seen = outcomes(tmp_path, "pass", runner.CHECKS)
    assert {o.check for o in seen} == set(runner.CHECKS) - {"padding", "trees", "prompts"}
    assert all(o.passed for o in seen)


def test_the_cost_is_counted_in_bytes():
    kernels = {k.name: k for k in runner.kernels("draftscope", "")}
    slots, log = kernels["gated_delta_slots.torch"], kernels["gated_delta_log.torch"]
    shape = replace(cost_shape(slots, "gdn"), n_sequences=1, n_tokens=4)
    state, row, output = 32 * 128 * 128, 2 * 16 * 128 + 32 * 128 + 2 * 32, 32 * 128
    assert least_bytes(slots, shape) == 4 * (5 * state + 4 * (row + output))
    assert least_bytes(log, shape) == 4 * (state + 4 * (2 * row + output))
    (seen,) = runner.run(
        "draftscope",
        "",
        seed=1,
        device="cpu",
        only=["causal_conv_slots.torch"],
        checks=[runner.COST],
    )
    assert seen.passed
    assert seen.figures == {"bytes": 4 * 64 * 8192 * (8 + 3 + 7)}
    assert "36.0" in "\n".join(report.lines([seen], "draftscope"))
    assert 'tests="0"' in report.junit([seen], "", "")


def test_a_call_that_writes_to_its_inputs_is_seen_and_one_without_states_noted(tmp_path):
    text = ADAPTER.replace(
        "def verify(self, rows):", "def verify(self, rows):\n        rows.x.mul_(2)"
    )
    (seen,) = outcomes(tmp_path, "pass", ("depths",), text=text)
    assert not seen.passed
    text = ADAPTER.replace("return self.states[sequence]", "return None")
    (seen,) = outcomes(tmp_path, "pass", ("depths",), text=text)
    assert (seen.passed, [f.cause for f in seen.faults]) == (True, ["states-not-read"])


def test_a_kernel_that_dies_costs_its_check(tmp_path):
    seen = outcomes(tmp_path, "os.abort()", ("depths", "no-drafts", "lengths"))
    assert {o.check: o.passed for o in seen} == {
        "depths": True,
        "no-drafts": False,
        "lengths": True,
    }
    lost = next(o for o in seen if not o.passed)
    assert lost.faults[0].cause == "crash"
    text = markdown(report.report(seen, "my kernel", "my_kernel.py:adapter", "cpu"))
    assert "| adapter conv | ok |" in text
    suite = ElementTree.fromstring(report.junit(seen, "my kernel", "my_kernel.py:adapter"))
    assert suite.get("failures") == "1"
    assert [case.get("name") for case in suite if len(case)] == ["no-drafts"]
    # causes that differ between checks are not certain
    drift = replace(lost, check="depths", faults=(replace(lost.faults[0], cause="drift"),))
    stale = replace(lost, faults=(replace(lost.faults[0], cause="stale-column"),))
    words = "one or all true: stale-column (no-drafts); drift (depths)"
    assert any(words in line for line in report.lines([stale, drift], ""))
    vague = replace(lost, check="depths", faults=(replace(lost.faults[0], cause="wrong-output"),))
    # what is vague, or where it crashed, says nothing else
    for some in ([lost], [stale, vague], [lost, drift]):
        assert not any("not certain" in line for line in report.lines(some, ""))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(600)", "no computation for 10 s"),
        ("while True: pass", "more than 2 CPU seconds"),
    ],
)
def test_a_kernel_that_hangs_costs_its_check(tmp_path, body, words):
    seen = outcomes(tmp_path, body, ("no-drafts",), limit_s=2.0)
    assert [(f.cause, f.detail) for o in seen for f in o.faults] == [("hang", words)]


def test_the_time_of_others_is_not_that_of_a_check(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_MOST_ASLEEP", 1)
    body = "for _ in range(6): time.sleep(0.5); sum(range(10**6))"  # as on a busy machine
    (seen,) = outcomes(tmp_path, f"{body}\n", ("no-drafts",), limit_s=2.0)
    assert seen.passed and seen.seconds > 3.0


def test_a_check_that_a_busy_machine_does_not_end_is_not_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_MOST_BUSY", 0.1)
    monkeypatch.setattr(runner, "_MOST_ASLEEP", 0.1)
    body = "while True: sum(range(10**6))"
    first, last = outcomes(tmp_path, body, ("no-drafts", "lengths"), limit_s=30.0)
    assert (first.check, first.faults) == ("no-drafts", ())
    assert first.needs.startswith("machine busy, not checked: no answer for ")
    said = list(report.lines([first, last], ""))
    assert f"not checked: adapter conv no-drafts: {first.needs}" in said
    assert (said[1].split().count("ok"), report.judged([first, last])) == (1, [last])


def test_a_wrong_kernel_that_hangs_while_its_cause_is_sought_is_wrong(tmp_path):
    body = (
        "Running.n = getattr(Running, 'n', 0) + 1; time.sleep(600 * (Running.n > 1)); "
        "self.states = {s: -x for s, x in self.states.items()}"
    )
    (seen,) = outcomes(tmp_path, body, ("no-drafts",), limit_s=2.0)
    (fault,) = seen.faults
    assert fault.cause not in ("hang", "crash") and fault.error < float("inf")
    assert fault.detail.endswith("its cause was not found: no computation for 10 s")


def test_an_adapter_imports_from_its_folder(tmp_path):
    (tmp_path / "kernel_of_mine.py").write_text("def adapter(shape, memory): pass")
    (tmp_path / "adapter_of_mine.py").write_text("from kernel_of_mine import adapter")
    assert runner.own_kernel(f"{tmp_path}/adapter_of_mine.py:adapter").name == "adapter"


ARRAYS = """
import numpy as np

class Adapter:
    recurrences = "conv"

    def __init__(self, shape, memory):
        self.n, self.states = shape.d_k - 1, {}

    def load(self, sequence, state):
        self.states[sequence] = state.numpy().copy()

    def verify(self, rows):
        out, self.after = [], {}
        for s, part in zip(rows.sequences, rows.slices()):
            x, w = rows.x[part].numpy(), rows.weight.numpy()
            all_ = self.after[s] = np.concatenate([self.states[s], x.T], 1)
            y = [(all_[:, i : i + self.n + 1] * w).sum(1) for i in range(len(x))]
            out.append(np.stack(y) + rows.bias.numpy())
        out = np.concatenate(out)
        return out / (1 + np.exp(-out))

    def accept(self, sequences, counts):
        for s, n in zip(sequences, counts):
            self.states[s] = self.after[s][:, n : n + self.n]

    def decode(self, rows):
        out = self.verify(rows)
        self.accept(rows.sequences, [1] * len(rows.sequences))
        return out

    def state(self, sequence):
        return self.states[sequence]
"""


def test_an_adapter_may_give_arrays_and_name_one_recurrence(tmp_path):
    (tmp_path / "arrays.py").write_text(ARRAYS)
    kernel = runner.own_kernel(f"{tmp_path}/arrays.py:Adapter")
    assert kernel.recurrences == ("conv",)
    shape = passes.shapes(kernel, "conv", "cpu")[0]
    for name in ("rounds", "repeat", "batch"):
        assert not check(kernel, Package("", tmp_path, ""), shape, name, 1, "cpu", 5)


def test_the_adapter_of_the_help_page_passes(tmp_path):
    code = help_page("conform").split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 32
    path = tmp_path / "my_file.py"
    path.write_text(code)
    kernel = runner.own_kernel(f"{path}:Adapter")
    for recurrence in kernel.recurrences:
        shape = passes.shapes(kernel, recurrence, "cpu")[1]
        for name in filter(lambda name: runner.has_check(kernel, name), runner.CHECKS):
            assert not check(kernel, Package("", tmp_path, ""), shape, name, 1, "cpu", 5)


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        ("", "my_kernel.py:adapter", "has no attribute 'adapter'"),
        ("1 +", "my_kernel.py:adapter", "invalid syntax"),
        (
            "import sys\nsys.exit('no GPU')",
            "my_kernel.py:adapter",
            r"no GPU \(my_kernel.py, line 2",
        ),
        ("import os\nos.environ['NO']", "my_kernel.py:adapter", r"'NO' \(my_kernel.py, line 2"),
        ("", "my_kernel.py", "does not name an adapter"),
        ("def adapter(): pass\nadapter.recurrences = ('rwkv',)", "my_kernel.py:adapter", "rwkv"),
        (
            "class adapter: dtypes = ('fp32',)",
            "my_kernel.py:adapter",
            r"dtypes cannot be \('fp32',\)",
        ),
        (
            "class adapter: extras = 'bound'",
            "my_kernel.py:adapter",
            r"extras cannot be \('bound',\)",
        ),
        ("class adapter: ring = True", "my_kernel.py:adapter", "ring cannot be True"),
        ("class adapter:\n def log(self): pass", "my_kernel.py:adapter", "log cannot be <function"),
        ("", "elsewhere.py:adapter", "is not a file"),
        ("", "unknown-engine", "not a package with an adapter"),
        ("", "no/such/place", "no/such/place does not exist"),
    ],
)
def test_bad_targets_are_errors(tmp_path, monkeypatch, text, target, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_kernel.py").write_text(text)
    with pytest.raises(KernelPackageError, match=words):
        runner.open_target(target)


MAMBA = """
import torch
import torch.nn.functional as F

def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    slots = state_batch_indices.long()
    dt = F.softplus(dt + dt_bias)
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], 1)[:, :, None] for t in (B, C))
    new = state[slots].float() * torch.exp(dt[..., None] * A) + (dt * x)[..., None] * B
    state[slots] = new.to(state.dtype)
    out = (new * C).sum(-1) + D * x
    return out if z is None else out * F.silu(z)
"""


@pytest.fixture
def mamba_ssm(tmp_path):
    """A folder of mamba-ssm, made with the text of its kernel's file."""

    def made(text: str) -> str:
        folder = tmp_path / "mamba_ssm" / "ops" / "triton"
        folder.mkdir(parents=True)
        (tmp_path / "mamba_ssm" / "__init__.py").write_text('__version__ = "2.3.2.post1"\n')
        (folder / "selective_state_update.py").write_text(text)
        return str(tmp_path)

    return made


def test_a_kernel_of_one_token_is_played_row_by_row(mamba_ssm):
    name, place, version = runner.open_target(mamba_ssm(MAMBA))
    assert (name, version) == ("mamba_ssm", "2.3.2.post1")
    only = ["selective_state_update"]
    seen = list(runner.run(name, place, seed=2, device="cpu", at_once=1, only=only))
    assert len(seen) == len(runner.CHECKS) + 1 - 3  # no padding, trees, prompts
    assert all(outcome.passed for outcome in seen), [o.faults for o in seen if o.faults]


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("out", "z is left out"),
        ("out * torch.sigmoid(z)", "sigmoid is taken for silu of z"),
        ("out * F.silu(z.roll(1, 1))", "z of the head before"),
    ],
)
def test_mistakes_of_z_are_named(mamba_ssm, new, words):
    text = MAMBA.replace("else out * F.silu(z)", f"else {new}")
    name, place, _ = runner.open_target(mamba_ssm(text))
    only = ["selective_state_update"]
    (seen,) = runner.run(name, place, seed=1, device="cpu", checks=["depths"], only=only)
    (fault,) = seen.faults
    assert words in fault.detail
    assert fault.detail.endswith("right without z")


WRAPPED = """
import functools

def guarded(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@guarded
def selective_state_update"""


@pytest.mark.parametrize(
    ("old", "new", "cause", "words"),
    [
        ("state_batch_indices=None", "cache_indices=None", "signature", "'state_batch_indices'"),
        ("state_batch_indices=None", "state_batch_indices=None, *, cache", "signature", "'cache'"),
        ("F.softplus(dt + dt_bias)", "F.softplus(dt, bias=dt_bias)", "crash", "'bias'"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.thinned(12)
def test_a_changed_signature_names_the_argument(mamba_ssm, old, new, cause, words, wrapped):
    text = MAMBA.replace(old, new)
    if wrapped:
        text = text.replace("\ndef selective_state_update", WRAPPED, 1)
    name, place, _ = runner.open_target(mamba_ssm(text))
    only = ["selective_state_update"]
    (seen,) = runner.run(name, place, seed=1, device="cpu", checks=["repeat"], only=only)
    assert [fault.cause for fault in seen.faults] == [cause]
    assert words in seen.faults[0].detail


@pytest.mark.parametrize(("name", "taps"), [("padding", {3}), ("trees", {3, 4})])
def test_padding_has_one_layer_and_trees_all_numbers_of_taps(monkeypatch, name, taps):
    seen = []
    monkeypatch.setattr(
        replays, "check", lambda kernel, package, shape, *_, **__: seen.append(shape) or []
    )
    kernel = Kernel("kernel", ("conv",), None, padding=True, trees=True, extras=("layers",))
    for seed in range(3):
        list(replays.checked(kernel, Package("kernels", Path("."), ""), "conv", name, seed, "cpu"))
    assert {shape.d_k for shape in seen} >= taps
    assert name == "trees" or not any("layers" in shape.extras for shape in seen)


def test_prompts_have_large_heads_in_both_layouts(monkeypatch):
    seen = []
    monkeypatch.setattr(
        replays, "check", lambda kernel, package, shape, *_, **__: seen.append(shape) or []
    )
    kernel = Kernel("kernel", ("gdn",), None, chunk=64, extras=("v first",))
    list(replays.checked(kernel, Package("kernels", Path("."), ""), "gdn", "prompts", 1, "cpu"))
    assert {shape.extras for shape in seen if shape.d_k == 256} == {("v first",), ()}
