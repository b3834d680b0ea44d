"""Tensor shapes of a model, against which a file is checked before loading; and MTP blocks in files
of their own, next to their trunk. Does not import torch.

Shapes are numpy order (rows first). Allowed variants: TensorInfo.fits.

llama.cpp's converter writes MTP files with --mtp: the block under the model's keys and its number,
with embedding, head and final norm in a quantisation of their own. Missing ones are the trunk's.
"""

from __future__ import annotations

from collections.abc import Container

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile, TensorInfo
from engine.model.config import ModelConfig
from engine.model.families import read_any_config
from engine.model.limits import INCOMPLETE, NOT_HERE, OTHER_TARGET, REMEDY
from engine.model.parts import Shapes, only_present
from engine.model.parts.recurrent import TABLE
from engine.model.rope import LEAVES_FACTORS, ROPE_FACTORS


def global_shapes(config: ModelConfig, present: Container[str]) -> Shapes:
    """Tensors outside the blocks. Without `output.weight` the head is the embedding."""
    table = (config.n_vocab, config.n_embd)
    shapes: Shapes = {"token_embd.weight": table}
    if config.output_norm:
        shapes[config.output_norm] = (config.n_embd,)
    shapes |= config.trunk.shapes(config.n_embd, present)
    if config.rope and config.rope.factors:
        shapes[ROPE_FACTORS] = (config.rope.n_rot // 2,)
    return shapes | only_present({"output.weight": table}, present)


def block_shapes(config: ModelConfig, index: int, present: Container[str]) -> Shapes:
    """Tensors of block `index` under their full names, in the file's variant."""
    prefix = f"blk.{index}."
    within = _Within(prefix, present)
    if config.mtp and index >= config.n_layer:
        shapes = config.mtp.shapes(config.n_embd, config.n_vocab, within)
        shapes |= config.trunk.mtp_shapes(config.n_embd, within)
    else:
        shapes = config.blocks[index].shapes(config.n_embd, within)
        shapes |= config.trunk.block_shapes(index, config.n_embd, within)
    return {prefix + name: shape for name, shape in shapes.items()}


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Check the tensor directory of `file` against `config`; reads no tensor data. Raises like
    hold_to_shapes."""
    expected = global_shapes(config, file.tensors)
    for index in range(config.n_layer + config.n_mtp):
        expected |= block_shapes(config, index, file.tensors)
    unused = unused_blocks(config)
    for block in unused:
        has_any = any(name.startswith(block) for name in file.tensors)
        heads = (f"{block}nextn.{name}.weight" for name in ("eh_proj", "fc_hidden"))
        if has_any and not any(name in file.tensors for name in heads):
            what = f"{block[:-1]} would be an MTP block, and is another"
            key = f"key {config.architecture}.nextn_predict_layers"
            raise ModelFileError(file.path, key, what, REMEDY)
    if config.architecture in LEAVES_FACTORS and not (config.rope and config.rope.factors):
        unused += (ROPE_FACTORS,)
    hold_to_shapes(file, expected, f"a {config.architecture} model", unused)


def unused_blocks(config: ModelConfig) -> tuple[str, ...]:
    """Name prefixes of tensors of MTP blocks that are not run."""
    first = config.n_layer + config.n_mtp
    return tuple(f"blk.{i}." for i in range(first, first + config.n_unused_mtp))


def hold_to_shapes(
    file: GgufFile, expected: Shapes, what: str, unused: tuple[str, ...] = ()
) -> None:
    """Raise for the first tensor that is missing, misshaped, of an unknown type or unexpected.

    what: the model, with its article. unused: prefixes of names to ignore. ModelFileError for the
    first two; UnsupportedModelError for a tensor that would silently be ignored, and for a type
    that cannot be decoded here.
    """
    for name, info in file.tensors.items():
        if info.type.owner and not name.startswith(unused):
            raise UnsupportedModelError(
                f"{file.path.name}: the tensor {shorten(name)} has {info.type.name} of "
                f"{info.type.owner}, which cannot be dequantised here.",
                info.type.remedy,
            )
    for name, shape in expected.items():
        if (found := file.tensors.get(name)) is None:
            raise ModelFileError(file.path, f"tensor {name}", "the tensor is missing", INCOMPLETE)
        if not found.fits(shape):
            wrong = f"shape {list(found.shape)} where {list(shape)} is needed"
            raise ModelFileError(file.path, f"tensor {name}", wrong, INCOMPLETE)
    for name, info in file.tensors.items():
        if name in expected or name.startswith(unused):
            continue
        if not _is_scale(file, info, expected):
            raise UnsupportedModelError(
                f"{file.path.name}: the tensor {shorten(name)} is not used by {what} in this "
                "engine.",
                NOT_HERE,
            )


def _is_scale(file: GgufFile, info: TensorInfo, expected: Shapes) -> bool:
    """Whether a tensor is the scale of a matrix or of its input; the latter is used only by kernels
    that quantise activations. Raises ModelFileError for a wrong shape or type."""
    stem, _, kind = info.name.rpartition(".")
    shape = expected.get(f"{stem}.weight", ())
    is_table = f"{stem}.weight" == TABLE  # its rows stay as stored
    if kind not in ("scale", "input_scale") or len(shape) < 2 or is_table:
        return False
    sizes = {1, shape[0]} if "_exps" in stem and len(shape) == 3 else {1}
    if info.type.name != "F32" or info.n_elements not in sizes:
        needed = " or ".join(map(str, sorted(sizes)))
        wrong = f"{info.n_elements} of {info.type.name} where {needed} of F32 are needed"
        raise ModelFileError(file.path, f"tensor {shorten(info.name)}", wrong, REMEDY)
    return True


class _Within:
    """Membership of names inside one block."""

    def __init__(self, prefix: str, present: Container[str]) -> None:
        self._prefix = prefix
        self._present = present

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._present


DRAFT_MTP = "draft-mtp"
"""The drafter that uses an MTP block."""


def has_mtp_block(file: GgufFile) -> bool:
    """Whether a model, or an MTP file, has a block that predicts tokens after the next."""
    return file.int_(".nextn_predict_layers", 0) > 0


def leave_block(file: GgufFile) -> None:
    """Drop the trunk's blocks of a whole model, which makes it an MTP file: as a draft for
    draft-mtp, llama.cpp uses no more of it."""
    n_mtp = file.int_(".nextn_predict_layers", 0)
    trunk = {f"blk.{i}" for i in range(min(file.int_(".block_count", 0), 1 << 16) - n_mtp)}
    file.tensors = {
        name: one
        for name, one in file.tensors.items()
        if ".".join(name.split(".", 2)[:2]) not in trunk
    }


def outer_shapes(config: ModelConfig, present: Container[str]) -> Shapes:
    """Tensors of an MTP file outside the block, those that it has."""
    return only_present(global_shapes(config, present), present)


def read_mtp_file(file: GgufFile) -> ModelConfig:
    """The configuration of a file with an MTP block alone, with the trunk it was made for. Raises
    UnsupportedModelError and ModelFileError."""
    config = read_any_config(file)
    shapes = outer_shapes(config, file.tensors) | block_shapes(config, config.n_layer, file.tensors)
    hold_to_shapes(
        file, shapes, f"the MTP block of a {config.architecture} model", unused_blocks(config)
    )
    return config


def check_mtp_file(file: GgufFile, target: ModelConfig) -> ModelConfig:
    """Check an MTP file against the trunk in `target`; returns its configuration. Reads no tensor
    data.

    Raises UnsupportedModelError for another trunk, and what read_mtp_file raises.
    """
    config = read_mtp_file(file)
    for what, ours, theirs in (
        ("architecture", target.architecture, config.architecture),
        ("embedding length", target.n_embd, config.n_embd),
        ("number of tokens", target.n_vocab, config.n_vocab),
        ("number of streams", target.trunk.n_handed, config.trunk.n_handed),
    ):
        if ours != theirs:
            raise UnsupportedModelError(
                f"{file.path.name} is the MTP block of another model: its {what} is {theirs}, that "
                f"of {target.name} {ours}.",
                OTHER_TARGET,
            )
    return config
