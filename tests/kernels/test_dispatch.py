"""The choice of an implementation."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import VARIABLE, operation, pick, torch_version

MODULE = "tests.support.recorded_kernel"
LLVM_MODULE = "tests.support.llvm_kernel"


def naive(x: torch.Tensor) -> str:
    return "naive"


def implementation(x: torch.Tensor, *, more: int = 0) -> str:
    """The torch version."""
    return "torch"


class OnCuda:
    """As much of a CUDA tensor as the choice looks at."""

    is_cuda = True


@pytest.fixture
def machine(monkeypatch) -> Callable[..., None]:
    """What this machine appears to have."""

    def set_up(
        *, cuda: bool = False, triton: bool = True, llvm: bool = True, interpreted: bool = False
    ) -> None:
        monkeypatch.setattr(dispatch, "_has_cuda", lambda: cuda)
        monkeypatch.setattr(dispatch, "has_triton", lambda: triton)
        monkeypatch.setattr(dispatch, "has_llvm", lambda: llvm)
        monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        monkeypatch.delenv(VARIABLE, raising=False)

    set_up()
    return set_up


@pytest.mark.parametrize("value", ["naive", "torch"])
def test_the_variable_names_the_implementation(machine, monkeypatch, value):
    machine(cuda=True)
    monkeypatch.setenv(VARIABLE, value)
    assert pick(naive, implementation, MODULE)(OnCuda()) == value


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize(("cuda", "triton"), [(False, True), (True, False)])
def test_without_cuda_or_triton_the_torch_version_itself_is_the_default(
    machine, monkeypatch, value, cuda, triton
):
    machine(cuda=cuda, triton=triton)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert pick(naive, implementation, MODULE) is implementation


def test_the_device_of_the_first_tensor_decides(machine):
    machine(cuda=True)
    run = pick(naive, implementation, MODULE)
    assert run(OnCuda()) == "triton"
    assert run(torch.ones(1)) == "torch"
    assert run.__doc__ == "The torch version."
    assert pick(naive, implementation)(OnCuda()) == "torch"


def test_triton_is_imported_at_the_first_call_that_needs_it(machine, monkeypatch):
    machine(cuda=True)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    run = pick(naive, implementation, MODULE)
    run(torch.ones(1))
    assert MODULE not in sys.modules
    run(OnCuda(), more=3)
    assert sys.modules[MODULE].calls == [3]


@pytest.mark.parametrize(("cuda", "interpreted"), [(True, False), (False, True)])
def test_triton_can_be_asked_for(machine, monkeypatch, cuda, interpreted):
    machine(cuda=cuda, interpreted=interpreted)
    monkeypatch.setenv(VARIABLE, "triton")
    assert pick(naive, implementation, MODULE)(torch.ones(1)) == "triton"
    assert pick(naive, implementation)(torch.ones(1)) == "torch"


def test_what_needs_gradients_runs_in_torch(machine, monkeypatch):
    machine(interpreted=True)
    monkeypatch.setenv(VARIABLE, "triton")
    run, leaf = pick(naive, implementation, MODULE), torch.ones(1, requires_grad=True)
    assert run(leaf) == "torch"
    with torch.no_grad():
        assert run(leaf) == "triton"


@pytest.mark.parametrize(
    ("triton", "message"),
    [(True, r"=triton needs a CUDA device: use torch, or"), (False, "needs the package triton")],
)
def test_triton_on_a_machine_that_cannot_run_it_is_refused(machine, monkeypatch, triton, message):
    machine(triton=triton)
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ValueError, match=message):
        pick(naive, implementation, MODULE)


def test_an_unknown_name_is_refused_with_the_choices(machine, monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match=r"DRAFTSCOPE_KERNELS=cuda .*naive, torch, llvm, triton"):
        pick(naive, implementation)


@pytest.mark.parametrize("value", [None, "", "llvm"])
def test_float32_on_the_processor_runs_through_llvm(machine, monkeypatch, value):
    machine(cuda=True)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    run = pick(naive, implementation, MODULE, LLVM_MODULE)
    assert run(torch.ones(1)) == "llvm"
    assert run(torch.ones(1, dtype=torch.float64)) == "torch"
    assert run(torch.ones(1, requires_grad=True)) == "torch"
    assert run(OnCuda()) == ("torch" if value == "llvm" else "triton")


@pytest.mark.parametrize("value", [None, "torch"])
def test_without_llvm_torch_runs_on_the_processor(machine, monkeypatch, value):
    machine(llvm=value is not None)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert pick(naive, implementation, None, LLVM_MODULE) is implementation


def test_llvm_that_is_not_there_is_refused(machine, monkeypatch):
    machine(llvm=False)
    monkeypatch.setenv(VARIABLE, "llvm")
    with pytest.raises(ValueError, match="=llvm needs the package llvmlite and"):
        pick(naive, implementation)


def whole(x: torch.Tensor, *, invariant: bool = False) -> str:
    """The torch version."""
    return "torch, invariant" if invariant else "torch"


def whole_naive(x: torch.Tensor) -> str:
    return "naive"


def whole_with_llvm(x: torch.Tensor) -> str:
    return "llvm"


@pytest.mark.parametrize(
    ("value", "usual", "steady"),
    [
        (None, "llvm", "llvm"),
        ("llvm", "llvm", "llvm"),
        ("torch", "torch", "torch, invariant"),
        ("naive", "naive", "torch, invariant"),
    ],
)
def test_an_operation_finds_its_versions_by_name(machine, monkeypatch, value, usual, steady):
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    run, x = operation(llvm=__name__)(whole), torch.ones(1)
    assert (run(x), run(x, invariant=True), run.__doc__) == (usual, steady, whole.__doc__)
    assert torch_version(run)(x) == "torch"


def test_an_operation_on_any_type(machine):
    whole_numbers = torch.ones(1, dtype=torch.int64)
    assert operation(llvm=__name__)(whole)(whole_numbers) == "torch"
    assert operation(llvm=__name__, any_type=True)(whole)(whole_numbers) == "llvm"


def test_every_operation_has_the_versions_that_it_speaks_of():
    root, n_found = Path(dispatch.__file__).parent, 0
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for call in node.decorator_list:
                if not ast.unparse(call).startswith("operation("):
                    continue
                n_found += 1
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                if given.get("llvm") == "__name__":
                    assert f"def {node.name}_with_llvm(" in text, f"{path}: {node.name}"
                if "triton" in given:
                    on_gpu = (path.parent / "with_triton.py").read_text(encoding="utf-8")
                    assert f"def {node.name}(" in on_gpu, f"{path}: {node.name}"
    assert n_found > 40
