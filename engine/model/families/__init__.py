"""The model families: one entry per architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.errors import UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile
from engine.gguf.outline import other_kind
from engine.model.config import ModelConfig
from engine.model.families import deepseek4, kda, lfm2, mamba, nemotron, qwen
from engine.model.families.common import is_mtp_file


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. read: reads its configuration from a file's metadata, without tensor data.

    peer_planes: whether llama.cpp rolls its recurrent states back with snapshot planes; if False,
    it restores a checkpoint. None without recurrent layers. peer_notes: other facts about llama.cpp
    and such a model. peer_drafts: errors of its MTP block that make it draft other tokens; empty if
    none is known.
    """

    read: Callable[[GgufFile], ModelConfig]
    peer_planes: bool | None
    peer_notes: Callable[[ModelConfig], list[str]] | None = None
    peer_drafts: str = ""


FAMILIES = {
    "qwen35": Family(partial(qwen.read_hybrid, mixture=False), peer_planes=True),
    "qwen35moe": Family(partial(qwen.read_hybrid, mixture=True), peer_planes=True),
    "qwen3next": Family(partial(qwen.read_hybrid, mixture=True, legacy=True), peer_planes=False),
    "qwen3": Family(qwen.read_qwen3, peer_planes=None),
    "qwen4exp": Family(qwen.read_qwen4exp, peer_planes=True, peer_notes=qwen.qwen4exp_notes),
    "nemotron_h": Family(partial(nemotron.read_nemotron, runs_mtp=False), peer_planes=True),
    "nemotron_h_moe": Family(partial(nemotron.read_nemotron, runs_mtp=True), peer_planes=True),
    "granitehybrid": Family(mamba.read_granite_hybrid, peer_planes=False),
    "mamba": Family(mamba.read_mamba, peer_planes=False),
    "mamba2": Family(mamba.read_mamba2_alone, peer_planes=False),
    "jamba": Family(mamba.read_jamba, peer_planes=False),
    "plamo2": Family(mamba.read_plamo2, peer_planes=False, peer_notes=mamba.plamo2_notes),
    "falcon-h1": Family(mamba.read_falcon_h1, peer_planes=False),
    "kimi-linear": Family(kda.read_kimi_linear, peer_planes=False),
    "bailingmoe3": Family(kda.read_bailingmoe3, peer_planes=True),
    "kimi-k3": Family(kda.read_kimi_k3, peer_planes=True),
    "glm5-next": Family(
        deepseek4.read_glm5_next, peer_planes=True, peer_notes=deepseek4.glm5_next_notes
    ),
    "deepseek4": Family(
        deepseek4.read_deepseek4,
        peer_planes=True,
        peer_notes=deepseek4.deepseek4_notes,
        peer_drafts="0c1e57098 may hand the MTP block rows of the trunk that were overwritten, "
        "b11549 hands the right ones",
    ),
    "lfm2": Family(lfm2.read_lfm2, peer_planes=True),
    "lfm2moe": Family(lfm2.read_lfm2moe, peer_planes=True),
}


DRAFTERS = "eagle3", "dflash"
"""Architectures of files that hold a drafter alone."""
_RWKV = "RWKV's time mixing"
MISSING = {"rwkv6": _RWKV, "rwkv6qwen2": _RWKV, "rwkv7": _RWKV, "arwkv7": _RWKV}
"""Recurrent architectures of llama.cpp that do not run here, and the missing part."""


def read_config(file: GgufFile) -> ModelConfig:
    """Read and check the metadata of `file`.

    Raises UnsupportedModelError for models outside FAMILIES or the forms that run here and for a
    drafter or MTP block alone, ModelFileError for missing, mistyped or impossible values.
    """
    name, is_drafter = file.path.name, file.architecture in DRAFTERS
    config = None if is_drafter else read_any_config(file)
    if config is None or is_mtp_file(file):
        what, of = ("a drafter", "target") if is_drafter else ("the MTP block of a model", "trunk")
        raise UnsupportedModelError(
            f"{name}: the file holds only {what}, not its {of}.",
            f"Open the {of} together with this file: drop both on the window, or draftscope "
            f"{of.upper()} -md {name}.",
        )
    return config


def read_any_config(file: GgufFile) -> ModelConfig:
    """The same, also for a file with an MTP block alone, whose trunk is in another file."""
    arch = file.architecture
    if other := other_kind(file):
        raise UnsupportedModelError(f"{file.path.name} is {other[0]}.", other[1])
    if "blk.0.nextn.eh_proj.weight" in file.tensors:
        raise UnsupportedModelError(
            f"{file.path.name}: its MTP block has the number 0, though it comes after the blocks "
            "of its trunk. llama.cpp does not open such a file either.",
            "Convert the model with llama.cpp's convert_hf_to_gguf.py --mtp, which leaves the "
            "block its number.",
        )
    if arch not in FAMILIES:
        lacks = f", which lacks {MISSING[arch]}" if arch in MISSING else ""
        what = "its trunk, with this file as --spec-draft-model," if is_mtp_file(file) else "it"
        raise UnsupportedModelError(
            f"{file.path.name}: the architecture {shorten(arch or '(none)')!r} does not run "
            f"here{lacks}.",
            f"Open a model of one of these, or run {what} in llama-server and inspect that with "
            f"`draftscope observe`: {', '.join(FAMILIES)}.",
        )
    return FAMILIES[arch].read(file)
