"""Which tensors a model consists of, and their shapes: the file is held to this before loading.

Shapes are numpy order (rows first). What a file may have in their place: TensorInfo.fits.
"""

from __future__ import annotations

from collections.abc import Container

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.parts import Shapes, only_present
from engine.model.rope import ROPE_FACTORS


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
    """Tensors of block `index` under their full names, in the variant the file holds."""
    prefix = f"blk.{index}."
    within = _Within(prefix, present)
    if config.mtp and index >= config.n_layer:
        shapes = config.mtp.shapes(config.n_embd, config.n_vocab, within)
    else:
        shapes = config.blocks[index].shapes(config.n_embd, within)
        shapes |= config.trunk.block_shapes(index, config.n_embd, within)
    return {prefix + name: shape for name, shape in shapes.items()}


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Hold the tensor directory of `file` to `config`; no tensor data is read.

    Raises ModelFileError for the first missing or misshaped tensor, UnsupportedModelError for one
    that the model would silently be run without.
    """
    expected = global_shapes(config, file.tensors)
    for index in range(config.n_layer + config.n_mtp):
        expected |= block_shapes(config, index, file.tensors)
    for name, shape in expected.items():
        info = file.tensors.get(name)
        remedy = "The file is damaged or incomplete; download or convert the model again."
        if info is None:
            raise ModelFileError(file.path, f"tensor {name}", "the tensor is missing", remedy)
        if not info.fits(shape):
            what = f"shape {list(info.shape)} where {list(shape)} is needed"
            raise ModelFileError(file.path, f"tensor {name}", what, remedy)
    for name in file.tensors:
        if name not in expected:
            raise UnsupportedModelError(
                f"{file.path.name}: the tensor {shorten(name)} has no place in a "
                f"{config.architecture} model as this engine runs it.",
                "Convert the model again with a current converter.",
            )


class _Within:
    """Membership of names inside one block."""

    def __init__(self, prefix: str, present: Container[str]) -> None:
        self._prefix = prefix
        self._present = present

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._present
