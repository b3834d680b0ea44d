"""Drafter files that can be opened with a target, by architecture. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile
from engine.gguf.outline import other_kind
from engine.model.drafters.config import (
    DrafterConfig,
    DrafterInfo,
    describe_drafter,
    describe_mtp_file,
)
from engine.model.drafters.dflash_config import read_dflash
from engine.model.drafters.eagle3_config import read_eagle3
from engine.model.families import FAMILIES
from engine.model.families.common import is_mtp_file
from engine.model.info import ModelInfo, describe
from engine.model.mtp_file import DRAFT_MTP

DRAFT_SIMPLE = "draft-simple"
"""The drafter that uses a model which can be run by itself."""


def _eagle3() -> Callable[..., Any]:
    from engine.model.drafters.eagle3 import make_eagle3

    return make_eagle3


def _dflash() -> Callable[..., Any]:
    from engine.model.drafters.dflash import make_dflash

    return make_dflash


KINDS: dict[str, tuple[Callable[[GgufFile], DrafterConfig], Callable[[], Callable[..., Any]]]] = {
    "eagle3": (read_eagle3, _eagle3),
    "dflash": (read_dflash, _dflash),
}
"""By architecture what reads a configuration from a file, raising as
engine.model.families.read_config does, and what gives the function that makes it of its weights, as
engine.model.drafters.loading calls that."""


def drafter_of(file: GgufFile) -> str:
    """Name of the drafter that the model in `file` is for. Raises UnsupportedModelError, and what
    reading its configuration raises."""
    arch = file.architecture
    if arch in KINDS:
        return KINDS[arch][0](file).drafter
    if arch in FAMILIES:
        return DRAFT_MTP if is_mtp_file(file) else DRAFT_SIMPLE
    if other := other_kind(file):
        raise UnsupportedModelError(f"{file.path.name} is {other[0]}.", other[1])
    raise UnsupportedModelError(
        f"{file.path.name}: nothing of the architecture {shorten(arch or '(none)')!r} drafts here.",
        "Use a smaller model of the target's vocabulary, an MTP block in a file of its own, or one "
        f"of these: {', '.join(KINDS)}.",
    )


def describe_draft(file: GgufFile) -> tuple[str, ModelInfo | DrafterInfo]:
    """The drafter that uses `file`, and its figures. Raises as `drafter_of`."""
    drafter = drafter_of(file)
    if drafter == DRAFT_SIMPLE:
        return drafter, describe(file)
    if drafter == DRAFT_MTP:
        return drafter, describe_mtp_file(file)
    return drafter, describe_drafter(file, KINDS[file.architecture][0](file))
