"""What every drafter file has in common that goes with a target, and its figures. No torch.

Such a file holds a drafter alone: it reads rows of the target (engine.model.taps) and may share the
target's embedding and head. What it is decides its architecture (engine.model.drafters.kinds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.drafters.dflash_config import DFlashConfig
from engine.model.drafters.eagle3_config import Eagle3Config
from engine.model.limits import OTHER_TARGET, REMEDY
from engine.model.loaded_size import draft_head_bytes, loaded_bytes
from engine.model.mtp_file import DRAFT_MTP, read_mtp_file
from engine.model.parts import Shapes
from engine.model.rope import ROPE_FACTORS
from engine.model.tensors import hold_to_shapes, unused_blocks

D2T = "d2t"
"""Tensor with the target's id of every row of the head, int64."""
_NOT_KEPT = (D2T, ROPE_FACTORS)


DrafterConfig = DFlashConfig | Eagle3Config
"""Sizes of one drafter, read from its file."""


def check_taps(config: ModelConfig, layers: Sequence[int], who: str) -> None:
    """Raise UnsupportedModelError where the model of `config` cannot hand these rows to `who`."""
    if not config.trunk.tapped:
        raise UnsupportedModelError(
            f"{who} reads the row that enters a layer, and in {config.name} ({config.architecture})"
            " several streams do, of which no reference makes one row.",
            OTHER_TARGET,
        )
    outside = [i for i in layers if not 0 <= i <= config.n_layer]
    if outside:
        last = "mean of its streams" if config.trunk.n_handed > 1 else "row after its final norm"
        raise UnsupportedModelError(
            f"{who} reads the input of layer {outside[0]}, and {config.name} has layers "
            f"0..{config.n_layer - 1}, with {config.n_layer} for the {last}.",
            OTHER_TARGET,
        )


def n_drafted(file: GgufFile, n_vocab: int) -> int:
    """Ids that the drafter in `file` can draft, of n_vocab. Raises ModelFileError."""
    info = file.tensors.get(D2T)
    if info is None:
        return n_vocab
    if info.type.name != "I64" or len(info.shape) != 1 or not 1 <= info.shape[0] <= n_vocab:
        what = (
            f"{info.type.name} of shape {list(info.shape)} where up to {n_vocab} numbers of type "
            "I64 are needed"
        )
        raise ModelFileError(file.path, f"tensor {D2T}", what, REMEDY)
    return info.shape[0]


def check_drafter(file: GgufFile, config: DrafterConfig, target: ModelConfig) -> Shapes:
    """Hold a drafter to its target and to its own tensors; their shapes. No data is read.

    Raises UnsupportedModelError for a drafter of another target or a tensor without a place,
    ModelFileError for a missing or misshaped one.
    """
    name, tensors = file.path.name, file.tensors
    if config.n_target != target.n_embd:
        raise UnsupportedModelError(
            f"{name} reads rows of {config.n_target} numbers, and those of {target.name} have "
            f"{target.n_embd}.",
            OTHER_TARGET,
        )
    reads_last = (target.trunk.n_handed == 1) == config.reads_behind_norm
    if target.n_layer in config.taps and not reads_last:
        raise UnsupportedModelError(
            f"{name} reads the input of layer {target.n_layer}, and {target.name} has layers "
            f"0..{target.n_layer - 1}.",
            OTHER_TARGET,
        )
    check_taps(target, config.taps, name)
    shapes = config.shapes(tensors, target.n_vocab, n_drafted(file, target.n_vocab))
    for tensor in ("token_embd.weight", "output.weight"):
        if config.n_embd != target.n_embd and tensor not in shapes:
            raise UnsupportedModelError(
                f"{name} has no {tensor}, and that of {target.name} is {target.n_embd} numbers "
                f"wide where {config.n_embd} are needed.",
                OTHER_TARGET,
            )
    if D2T in tensors and "output.weight" not in shapes:
        raise ModelFileError(
            file.path,
            f"tensor {D2T}",
            "there is no head of the drafter's own to go with it",
            REMEDY,
        )
    own = {D2T: tensors[D2T].shape} if D2T in tensors else {}
    hold_to_shapes(file, shapes | own, "this drafter", config.unused)
    return shapes


def describe_drafter(file: GgufFile, config: DrafterConfig) -> DrafterInfo:
    """Figures of a drafter, from metadata and directory alone."""
    tensors = file.tensors.values()
    unused = config.unused
    own = {
        name: info
        for name, info in file.tensors.items()
        if name not in _NOT_KEPT and not name.startswith(unused)
    }
    cells = sum(size.n_bytes for size in config.cells().values())
    return DrafterInfo(
        drafter=config.drafter,
        name=config.name,
        n_params=sum(info.n_elements for info in own.values()),
        weight_bytes=sum(info.n_bytes for info in tensors),
        loaded_bytes=loaded_bytes(own, shares_head=True),
        cell_bytes=cells + 4 * config.n_kept,
        n_target=config.n_target,
        taps=config.taps,
        unused=tuple(one for one in unused if any(name.startswith(one) for name in file.tensors)),
    )


def describe_mtp_file(file: GgufFile) -> DrafterInfo:
    """Figures of an MTP file, from metadata and directory alone. Raises as read_mtp_file."""
    config = read_mtp_file(file)
    unused = unused_blocks(config)
    own = {name: info for name, info in file.tensors.items() if not name.startswith(unused)}
    cells = config.mtp.block.cells() if config.mtp else None
    return DrafterInfo(
        drafter=DRAFT_MTP,
        name=config.name,
        n_params=sum(info.n_elements for info in own.values()),
        weight_bytes=sum(info.n_bytes for info in file.tensors.values()),
        loaded_bytes=loaded_bytes(own, shares_head="token_embd.weight" not in own),
        cell_bytes=cells.n_bytes if cells else 0,
        n_target=config.n_embd,
        taps=(),
        draft_head_bytes=draft_head_bytes(own),
    )


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter as described by its file; sizes in bytes.

    loaded_bytes: its own weights in memory by compute mode. cell_bytes: of what it keeps of every
    token. taps: as DrafterConfig has them; none for an MTP block, which reads the row after the
    final norm. draft_head_bytes: as ModelInfo has them. unused: how names of tensors in the file
    begin that it drafts without.
    """

    drafter: str
    name: str
    n_params: int
    weight_bytes: int
    loaded_bytes: dict[str, int]
    cell_bytes: int
    n_target: int
    taps: tuple[int, ...]
    draft_head_bytes: int = 0
    unused: tuple[str, ...] = ()

    def n_bytes(self, n_seqs: int, n_ctx: int, compute: str) -> int:
        """What it takes for n_seqs sequences of n_ctx cells. compute: mode of the weights, empty
        for their size in the file."""
        weights = self.loaded_bytes[compute] if compute else self.weight_bytes
        weights += self.draft_head_bytes if compute == "q8" else 0
        return weights + n_seqs * n_ctx * self.cell_bytes
