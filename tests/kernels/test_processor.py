"""What the processor may be used for, and the limit on it."""

from __future__ import annotations

import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

from kernels import processor
from kernels.llvm import F32X16, Code, object_cache, program
from kernels.processor import VARIABLE, has_feature, limit_libraries, target

NEWER = ("avx512f", "avx512vnni", "avx512bf16", "avxvnni", "amx-int8")

ASK = """
import kernels, numpy, torch
from kernels.linear import integers, with_torch
from numpy._core._multiarray_umath import __cpu_features__ as of_numpy
print(torch.backends.cpu.get_cpu_capability(), integers.fbgemm_levels(), with_torch.has_bf16(),
      integers.has_vnni(), of_numpy.get("X86_V4", False))
"""


@pytest.fixture
def limited(monkeypatch):
    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor has no AVX2 to be limited to")
    monkeypatch.setenv(VARIABLE, "avx2")


def assembly() -> str:
    """Of a kernel that multiplies sixteen numbers at once."""

    def body(code: Code, args, first, last):
        (address,) = args
        x = code.load(address, F32X16)
        code.store(code.fma(x, x, x), address)

    parsed = llvm.parse_assembly(str(program._module(body, 1, None)))
    return object_cache._machine().emit_assembly(parsed)


def test_unlimited_it_is_the_processor_itself(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    here = dict(llvm.get_host_cpu_features())
    assert target() == (llvm.get_host_cpu_name(), {**here, "sse4a": False})
    assert [has_feature(name) for name in NEWER] == [here.get(name, False) for name in NEWER]
    assert ("zmm" in assembly()) == here.get("avx512f", False)


@pytest.mark.parametrize(
    ("has", "bits"),
    [
        ({"avx2"}, 0),
        ({"avx512vnni", "avx512vl"}, 0),
        ({"avxvnni"}, 256),
        ({"avx512vnni", "avx512vl", "avx512bw", "avxvnni"}, 512),
    ],
)
def test_products_of_bytes_in_the_longest_vectors_that_have_them(has, bits, monkeypatch):
    monkeypatch.setattr(processor, "has_feature", has.__contains__)
    assert processor.vnni_bits() == bits


def test_limited_it_has_nothing_newer_than_avx2(limited):
    assert target()[0] == "haswell"
    assert has_feature("avx2") and has_feature("fma")
    assert not any(has_feature(name) for name in NEWER)
    assert processor.vnni_bits() == 0
    code = assembly()
    assert "vfmadd" in code and "ymm" in code and "zmm" not in code


def test_libraries_are_limited_too(limited):
    names = processor._LIBRARIES
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["AVX2", "64", "False", "False", "False"]


def test_what_the_user_has_set_for_a_library_stays(limited, monkeypatch):
    for name in processor._LIBRARIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    limit_libraries()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "SSE41"
    assert os.environ["ATEN_CPU_CAPABILITY"] == "avx2"


def test_unlimited_libraries_are_left_alone(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = dict(os.environ)
    limit_libraries()
    assert dict(os.environ) == before


def test_an_unknown_limit_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "sse9")
    for ask in (limit_libraries, target):
        with pytest.raises(ValueError, match="DRAFTSCOPE_CPU=sse9 is not one of avx2"):
            ask()


def test_a_limit_above_the_processor_is_refused(monkeypatch):
    """Else it would end at an instruction that it does not know."""
    monkeypatch.setenv(VARIABLE, "avx2")
    monkeypatch.setattr(processor, "_here", lambda: ("old", {"sse4.2": True, "avx2": False}))
    processor._target.cache_clear()
    try:
        with pytest.raises(ValueError, match="has no avx2"):
            target()
    finally:
        processor._target.cache_clear()
