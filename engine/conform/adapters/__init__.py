"""Adapters of known packages, one module each, named here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.conform.subject import Kernel


@dataclass(frozen=True, slots=True)
class Engine:
    """A known package: what to import from it, and the versions tried.

    `kept` are modules imported from their files, `values` attributes of the stubs that replace the
    others; `language` is the stub that provides `triton` and `tl`. In the modules of
    `traced_ranges` a loop's index is used as a tensor, but is a Python number in Triton's
    interpreter. `packages` are those whose `__init__.py` is run, too.
    """

    package: str
    versions: tuple[str, ...]
    kept: tuple[str, ...]
    values: dict[str, Any]
    kernels: Sequence[Kernel]
    language: str = ""
    traced_ranges: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


NAMES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "fla": "fla",
    "fla-core": "fla",
    "flash-linear-attention": "fla",
    "flashinfer": "flashinfer",
    "flashinfer-python": "flashinfer",
    "causal-conv1d": "causal_conv1d",
    "mamba-ssm": "mamba_ssm",
    "causal_conv1d": "causal_conv1d",
    "mamba_ssm": "mamba_ssm",
    "draftscope": "own",
}


def engine(name: str) -> Engine:
    """The adapter's table of a known package."""
    module = importlib.import_module(f"engine.conform.adapters.{NAMES[name]}")
    table = module.ENGINE
    assert isinstance(table, Engine)
    return table
