"""Configuration of drafter files: what they share, their figures, and which drafter a file is for;
the sizes of an EAGLE-3 drafter (Li et al. 2025, arXiv 2503.01840). Does not import torch.

Such a file holds a drafter alone: it reads rows of the target (engine.model.layers.TargetRows) and
may share the target's embedding and head. The architecture defines its kind (KINDS). Sizes are read
and checked before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile
from engine.gguf.outline import other_kind
from engine.model.config import ModelConfig
from engine.model.drafters.dflash_config import DFlashConfig, read_dflash
from engine.model.families import DRAFTERS, FAMILIES
from engine.model.families.common import heads, is_mtp_file, read_taps, rms_eps
from engine.model.info import ModelInfo, describe
from engine.model.limits import MAX_CONTEXT, OTHER_TARGET, REMEDY, count
from engine.model.loaded_size import draft_head_bytes, loaded_bytes
from engine.model.parts import CellSize, Shapes, only_present
from engine.model.parts.attention import AttentionPart
from engine.model.rope import ROPE_FACTORS, RopeConfig
from engine.model.tensors import DRAFT_MTP, hold_to_shapes, read_mtp_file, unused_blocks

ARCHITECTURE = "eagle3"
N_TAPS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """One block whose attention takes a token's embedding joined with a feature row of the target.

    n_target: width of the target's rows. taps: layers of the target whose rows it reads side by
    side, in order. attention: of the block, on rows of 2 * n_embd.
    norm_before_residual: the residual is the feature row after its norm. norm_before_fc: the
    target's rows are normed side by side before they are fused.
    """

    name: str
    n_embd: int
    n_target: int
    n_ff: int
    n_ctx_train: int
    eps: float
    attention: AttentionPart
    rope: RopeConfig
    taps: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool

    drafter: ClassVar[str] = "draft-eagle3"
    reads_behind_norm: ClassVar[bool] = True
    """Whether tap n_layer is the row after the final norm, as in the reference implementation."""
    unused: ClassVar[tuple[str, ...]] = ()
    ties_head: ClassVar[bool] = False
    """Uses the target's head."""

    @property
    def n_kept(self) -> int:
        """Length of a fused feature row."""
        return self.n_embd

    def cells(self) -> dict[int, CellSize]:
        return {0: self.attention.cells()}

    def shapes(self, present: Container[str], n_vocab: int, n_drafted: int) -> Shapes:
        d, hd = self.n_embd, self.attention.head_dim
        n_q, n_kv = self.attention.n_head * hd, self.attention.n_head_kv * hd
        fused = N_TAPS * self.n_target
        shapes: Shapes = {
            "fc.weight": (d, fused),
            "blk.0.attn_norm.weight": (d,),
            "blk.0.attn_norm_2.weight": (d,),
            "blk.0.attn_q.weight": (n_q, 2 * d),
            "blk.0.attn_k.weight": (n_kv, 2 * d),
            "blk.0.attn_v.weight": (n_kv, 2 * d),
            "blk.0.attn_output.weight": (d, n_q),
            "blk.0.ffn_norm.weight": (d,),
            "blk.0.ffn_gate.weight": (self.n_ff, d),
            "blk.0.ffn_up.weight": (self.n_ff, d),
            "blk.0.ffn_down.weight": (d, self.n_ff),
            "output_norm.weight": (d,),
        }
        if self.norm_before_fc:
            shapes["enc.output_norm.weight"] = (fused,)
        optional: Shapes = {
            "output.weight": (n_drafted, d),
            "token_embd.weight": (n_vocab, d),
            ROPE_FACTORS: (self.rope.n_rot // 2,),
        }
        return shapes | only_present(optional, present)


def read_eagle3(file: GgufFile) -> Eagle3Config:
    """Raises UnsupportedModelError for forms that do not run here, ModelFileError for missing,
    mistyped or impossible values."""
    arch = ARCHITECTURE
    if (n_blocks := count(file, ".block_count")) != 1:
        raise UnsupportedModelError(
            f"{file.path.name}: {arch}.block_count is {n_blocks}, and EAGLE-3 drafters have one "
            "block.",
            "Choose an EAGLE-3 drafter of one block.",
        )
    n_embd = count(file, ".embedding_length")
    n_head, n_head_kv, head_dim = heads(file, n_embd, 1, range(1))
    key = ".target_layers"
    taps = read_taps(file, key, N_TAPS)
    if len(taps) != N_TAPS:
        raise file.wrong(key, f"{len(taps)} layers where {N_TAPS} are needed")
    return Eagle3Config(
        name=file.str_("general.name", "") or file.path.stem,
        n_embd=n_embd,
        n_target=count(file, ".target_hidden_size"),
        n_ff=count(file, ".feed_forward_length"),
        n_ctx_train=count(file, ".context_length", high=MAX_CONTEXT),
        eps=rms_eps(file),
        attention=AttentionPart(
            n_head, n_head_kv, head_dim, gated=False, normed=False, rope="pairs"
        ),
        rope=RopeConfig.from_gguf(file, head_dim),
        taps=taps,
        norm_before_residual=file.bool_(".norm_before_residual", False),
        norm_before_fc=file.bool_(".norm_before_fc", False),
    )


D2T = "d2t"
"""Tensor with the target's id of every row of the head, int64."""
_NOT_KEPT = (D2T, ROPE_FACTORS)


DrafterConfig = DFlashConfig | Eagle3Config
"""Sizes of one drafter, read from its file."""


def check_taps(config: ModelConfig, layers: Sequence[int], who: str) -> None:
    """Raise UnsupportedModelError if the model of `config` cannot supply these rows to `who`."""
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
    """Number of ids that the drafter in `file` can draft, of n_vocab. Raises ModelFileError."""
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
    """Check a drafter against its target and its own tensors; returns their shapes. Reads no data.

    Raises UnsupportedModelError for a drafter of another target or an unexpected tensor,
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
            file.path, f"tensor {D2T}", "the drafter has no output head for it", REMEDY
        )
    own = {D2T: tensors[D2T].shape} if D2T in tensors else {}
    hold_to_shapes(file, shapes | own, "this drafter", config.unused)
    return shapes


def describe_drafter(file: GgufFile, config: DrafterConfig, device: str = "cpu") -> DrafterInfo:
    """Figures of a drafter on a device, from metadata and directory alone."""
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
        loaded_bytes=loaded_bytes(own, device, shares_head=True),
        cell_bytes=cells,
        row_bytes=4 * config.n_kept,
        n_target=config.n_target,
        taps=config.taps,
        unused=tuple(one for one in unused if any(name.startswith(one) for name in file.tensors)),
    )


def describe_mtp_file(file: GgufFile, device: str = "cpu") -> DrafterInfo:
    """Figures of an MTP file, from metadata and directory alone. Raises as read_mtp_file."""
    config = read_mtp_file(file)
    unused = unused_blocks(config)
    own = {name: info for name, info in file.tensors.items() if not name.startswith(unused)}
    return DrafterInfo(
        drafter=DRAFT_MTP,
        name=config.name,
        n_params=sum(info.n_elements for info in own.values()),
        weight_bytes=sum(info.n_bytes for info in file.tensors.values()),
        loaded_bytes=loaded_bytes(own, device, shares_head="token_embd.weight" not in own),
        cell_bytes=sum(size.n_bytes for size in config.mtp_cells().values()),
        row_bytes=4 * config.n_handed,
        n_target=config.n_embd,
        taps=(),
        draft_head_bytes=draft_head_bytes(own, device),
    )


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter as described by its file; sizes in bytes.

    loaded_bytes: its own weights in memory by compute mode. cell_bytes: a cell of its attention;
    row_bytes: what it keeps of a token's target rows (engine.draft.row_drafter). taps: see
    DrafterConfig; none for an MTP block, which reads the row after the final norm.
    draft_head_bytes: see ModelInfo. unused: name prefixes of tensors that it does not use.
    """

    drafter: str
    name: str
    n_params: int
    weight_bytes: int
    loaded_bytes: dict[str, int]
    cell_bytes: int
    row_bytes: int
    n_target: int
    taps: tuple[int, ...]
    draft_head_bytes: int = 0
    unused: tuple[str, ...] = ()

    def n_bytes(self, n_seqs: int, n_ctx: int, compute: str) -> int:
        """Memory for n_seqs sequences of n_ctx cells. compute: mode of the weights, empty for their
        size in the file."""
        weights = self.loaded_bytes[compute] if compute else self.weight_bytes
        weights += self.draft_head_bytes if compute == "q8" else 0
        return weights + n_seqs * n_ctx * (self.cell_bytes + self.row_bytes)


DRAFT_SIMPLE = "draft-simple"
"""The drafter that uses a standalone model."""


KINDS: dict[str, Callable[[GgufFile], DrafterConfig]] = dict(
    zip(DRAFTERS, (read_eagle3, read_dflash), strict=True)
)
"""By architecture the function that reads its configuration, raising like
engine.model.families.read_config."""


def drafter_of(file: GgufFile) -> str:
    """Name of the drafter for the model in `file`. Raises UnsupportedModelError, and what reading
    its configuration raises."""
    arch = file.architecture
    if arch in KINDS:
        return KINDS[arch](file).drafter
    if other := other_kind(file):
        raise UnsupportedModelError(f"{file.path.name} is {other[0]}.", other[1])
    if arch in FAMILIES:
        return DRAFT_MTP if is_mtp_file(file) else DRAFT_SIMPLE
    raise UnsupportedModelError(
        f"{file.path.name}: nothing of the architecture {shorten(arch or '(none)')!r} drafts here.",
        "Use a smaller model with the target's vocabulary, an MTP block in a separate file, or "
        f"one of these: {', '.join(KINDS)}.",
    )


def describe_draft(file: GgufFile, device: str = "cpu") -> tuple[str, ModelInfo | DrafterInfo]:
    """The drafter that uses `file`, and its figures on a device. Raises as `drafter_of`."""
    drafter = drafter_of(file)
    if drafter == DRAFT_SIMPLE:
        return drafter, describe(file, device)
    if drafter == DRAFT_MTP:
        return drafter, describe_mtp_file(file, device)
    return drafter, describe_drafter(file, KINDS[file.architecture](file), device)
