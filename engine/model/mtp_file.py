"""An MTP block in a file of its own, next to the trunk that it drafts for. No torch.

llama.cpp's converter writes such files with --mtp: the block with the model's keys, its number, and
embedding, head and final norm in a quantisation of their own. What the file lacks of these is the
trunk's.
"""

from __future__ import annotations

from collections.abc import Container

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families import read_any_config
from engine.model.limits import OTHER_TARGET
from engine.model.parts import Shapes, only_present
from engine.model.tensors import block_shapes, global_shapes, hold_to_shapes, unused_blocks

DRAFT_MTP = "draft-mtp"
"""The drafter that uses an MTP block."""


def has_mtp_block(file: GgufFile) -> bool:
    """Whether a model, or an MTP file, has a block that predicts tokens after the next."""
    return file.int_(f"{file.architecture}.nextn_predict_layers", 0) > 0


def leave_block(file: GgufFile) -> None:
    """Leave of a whole model what an MTP file has, so that it is one: given as a draft for
    draft-mtp, llama.cpp uses no more of it."""
    arch = file.architecture
    n_mtp = file.int_(f"{arch}.nextn_predict_layers", 0)
    trunk = {f"blk.{i}" for i in range(min(file.int_(f"{arch}.block_count", 0), 1 << 16) - n_mtp)}
    file.tensors = {
        name: one
        for name, one in file.tensors.items()
        if ".".join(name.split(".", 2)[:2]) not in trunk
    }


def outer_shapes(config: ModelConfig, present: Container[str]) -> Shapes:
    """Tensors of an MTP file outside the block, those that it has."""
    return only_present(global_shapes(config, present), present)


def read_mtp_file(file: GgufFile) -> ModelConfig:
    """The configuration of a file with an MTP block alone; that of its trunk is the one that it was
    made for. Raises UnsupportedModelError and ModelFileError."""
    config = read_any_config(file)
    shapes = outer_shapes(config, file.tensors) | block_shapes(config, config.n_layer, file.tensors)
    hold_to_shapes(
        file, shapes, f"the MTP block of a {config.architecture} model", unused_blocks(config)
    )
    return config


def check_mtp_file(file: GgufFile, target: ModelConfig) -> ModelConfig:
    """Hold an MTP file to the trunk in `target`; its configuration. No tensor data is read.

    Raises UnsupportedModelError for one of another trunk, and what read_mtp_file raises.
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
