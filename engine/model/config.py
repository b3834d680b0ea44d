"""Model configuration: sizes, and the parts that blocks consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.model.parts import BlockParts, CellSize, MtpParts, TrunkPart
from engine.model.parts.feed_forward import MixturePart
from engine.model.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one model, read from a file by engine.model.families.

    blocks: the trunk. mtp: the block after it. n_ctx_train: trained context. rope: None if no layer
    rotates; block_rope: for layers that compress blocks of tokens. n_unused_mtp: further MTP blocks
    of the file, which are not run. output_norm: name of the tensor before the head, None without
    one. The embedding is multiplied by embedding_scale, logits are divided by logit_scale.
    """

    architecture: str
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    blocks: tuple[BlockParts, ...]
    mtp: MtpParts | None = None
    rope: RopeConfig | None = None
    block_rope: RopeConfig | None = None
    n_unused_mtp: int = 0
    output_norm: str | None = "output_norm.weight"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    trunk: TrunkPart = field(default_factory=TrunkPart)

    @property
    def n_layer(self) -> int:
        """Blocks of the trunk."""
        return len(self.blocks)

    @property
    def n_mtp(self) -> int:
        """MTP blocks, 0 or 1."""
        return int(self.mtp is not None)

    @property
    def n_handed(self) -> int:
        """Length of the row that the MTP block receives per token: the row after the final norm, or
        the raw streams of the trunk."""
        return self.trunk.n_handed * self.n_embd

    @property
    def all_blocks(self) -> tuple[BlockParts, ...]:
        """The trunk's blocks and the MTP block after them, as files number them."""
        return (*self.blocks, self.mtp.block) if self.mtp else self.blocks

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        """Per trunk layer, whether it keeps recurrent states."""
        return tuple(bool(block.states()) for block in self.blocks)

    @property
    def n_recurrent(self) -> int:
        """Trunk layers that keep recurrent states."""
        return sum(self.recurrent_layers)

    @property
    def ranks(self) -> bool:
        """Whether a trunk layer selects by rank, experts or blocks of tokens, so that rounding may
        flip a tie."""
        cells = self.cells().values()
        mixtures = (isinstance(block.ffn, MixturePart) for block in self.blocks)
        return any(mixtures) or any(size.further for size in cells)

    def cells(self) -> Mapping[int, CellSize]:
        """Attention layers of the trunk and the cell size of each."""
        sizes = ((i, block.cells()) for i, block in enumerate(self.blocks))
        return {i: size for i, size in sizes if size is not None}

    def mtp_cells(self) -> Mapping[int, CellSize]:
        """The same of the MTP block alone, as layer 0."""
        size = self.mtp.block.cells() if self.mtp else None
        return {} if size is None else {0: size}
