"""What the processor can do, as far as kernels and the libraries below them may use it.

DRAFTSCOPE_CPU=avx2 limits both to what every x86 processor with AVX2 has: results and tests of such
a processor can then be obtained on a newer one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version

VARIABLE = "DRAFTSCOPE_CPU"
CHOICES = ("avx2",)


# the first with AVX2, and what it has in LLVM's names
_HASWELL = "haswell"
_ITS_FEATURES = (
    "64bit avx avx2 bmi bmi2 cmov crc32 cx16 cx8 f16c fma fsgsbase fxsr invpcid lzcnt mmx movbe "
    "pclmul popcnt rdrnd sahf sse sse2 sse3 sse4.1 sse4.2 ssse3 xsave xsaveopt"
)
# LLVM would join words with its insertq, which waits until AVX's instructions are through
_SLOW = ("sse4a",)
_NEEDED = ("avx2", "bmi2", "f16c", "fma")
# They have vectors of 512 bits, and compute each as two of 256
_HALVING = ("znver4",)
# what tells one kind of processor from others in Linux's list
_TELLING = "vendor_id", "cpu family", "model", "stepping", "flags"
# Each library asks the processor itself, when it is loaded or first used
_LIBRARIES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}


def limit_libraries() -> None:
    """Pass the limit on to torch and numpy; a variable that the user has set stays as it is.

    Called when `kernels` is imported: torch asks at its first product, numpy when it is loaded,
    so numpy is limited only where `kernels` comes first. Raises ValueError for another value
    of DRAFTSCOPE_CPU than those in CHOICES.
    """
    if _limit():
        for name, value in _LIBRARIES.items():
            os.environ.setdefault(name, value)


def target() -> tuple[str, Mapping[str, bool]]:
    """The processor to compile for as LLVM names it, and which of its features there are. Raises
    ValueError where it cannot do what is asked for."""
    return _target(_limit())


def has_feature(name: str) -> bool:
    """Whether kernels may use the instructions that LLVM calls `name`; no question of the kind
    is asked anywhere else."""
    return target()[1].get(name, False)


def vnni_bits() -> int:
    """Bits of the vectors whose products of bytes this processor adds to 32 bits: 512, 256, or 0
    where it has no such instruction."""
    if all(has_feature(name) for name in ("avx512vnni", "avx512bw", "avx512vl")):
        return 512
    return 256 if has_feature("avxvnni") else 0


def multiplies_bf16() -> bool:
    """Whether oneDNN, and torch with it, multiplies packed bfloat16 matrices here."""
    avx512 = all(has_feature(name) for name in ("avx512bw", "avx512dq", "avx512vl"))
    return avx512 or has_feature("avxneconvert") or has_feature("bf16")  # newer AVX2, and Arm


def halves_512_bits() -> bool:
    """Whether vectors of 512 bits are computed in two halves here, so that they save instructions
    but no time in which products are computed."""
    return target()[0] in _HALVING


def reads_ahead_into_second_cache() -> bool:
    """Whether prefetching is faster into the second cache than into the nearest one, which waits
    for few lines at a time. False for AMD's processors, where it was not measured."""
    name, _ = _here()
    return bool(name) and not name.startswith("zn")


def processor_name() -> str:
    """The processor as its maker calls it, else its architecture."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


@functools.cache
def _cpu_info() -> Mapping[str, str]:
    """What Linux reports of the first processor; empty on other systems."""
    found = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                break
            key, _, value = line.partition(":")
            found[key.strip()] = value.strip()
    return found


def _limit() -> str:
    limit = os.environ.get(VARIABLE, "")
    if limit and limit not in CHOICES:
        raise ValueError(
            f"{VARIABLE}={limit} is not one of {', '.join(CHOICES)}: unset it, or use one"
        )
    return limit


@functools.cache
def _target(limit: str) -> tuple[str, Mapping[str, bool]]:
    name, found = _here()
    if not name:
        return "", {}
    features = {**found, **dict.fromkeys(_SLOW, False)}
    if not limit:
        return name, features
    if missing := [name for name in _NEEDED if not features.get(name)]:
        raise ValueError(f"{VARIABLE}={limit}: this processor has no {missing[0]}: unset it")
    its = _ITS_FEATURES.split()
    return _HASWELL, {name: has and name in its for name, has in features.items()}


@functools.cache
def _here() -> tuple[str, Mapping[str, bool]]:
    """This processor's name and features according to LLVM, which is loaded only if no answer for
    such a processor is kept; empty without LLVM."""
    if importlib.util.find_spec("llvmlite") is None:
        return "", {}
    from kernels.kernel_files import kept

    about = [version("llvmlite"), *map(_cpu_info().get, _TELLING)]
    key = hashlib.sha256(repr(about).encode()).hexdigest()
    name, features = json.loads(_asked() if None in about else kept(key, _asked))
    return name, features


def _asked() -> bytes:
    from llvmlite import binding

    return json.dumps([binding.get_host_cpu_name(), binding.get_host_cpu_features()]).encode()
