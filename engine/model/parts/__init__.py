"""Parts of a model's blocks, as sizes: no tensors. Does not import torch.

A part knows its tensors and what it keeps per sequence. Its computation is in the module that the
tables of engine.model.mixers, feed_forward and trunks name for it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from engine.model.parts.feed_forward import DensePart, MixturePart

_N_BYTES = 4
"""Bytes per element: states and attention cells are float32 in every compute mode."""

Shapes = dict[str, tuple[int, ...]]
"""Tensors by name; shapes in numpy order, rows first."""


class StateSize(NamedTuple):
    """One recurrent state of a sequence. entry: shapes of one token's rows in a replay log.
    is_window: whether it consists of the last input rows only."""

    shape: tuple[int, ...]
    entry: tuple[tuple[int, ...], ...]
    is_window: bool = False

    @property
    def n_bytes(self) -> int:
        """Bytes of the state."""
        return _N_BYTES * math.prod(self.shape)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's log entry."""
        return _N_BYTES * sum(map(math.prod, self.entry))


class CellSize(NamedTuple):
    """What a layer keeps per token in attention memory, float32.

    n_heads: heads of keys and values. k_dim, v_dim: their lengths; v_dim 0 means that only keys are
    stored, and values, if any, are the first columns of the keys (latent attention). window: how
    many of the newest positions a token attends to, including its own; None for all. ratio: if not
    0, the last head is replaced by the row of a block of this many tokens, which belongs to the
    cell of the last of them, and which tokens outside the window attend to. further: names and
    lengths of further rows (StateKey), which are single-head keys. first_turned: first rotated
    column of a key; None if keys cannot be rotated to other positions.
    """

    n_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    further: tuple[tuple[str, int], ...] = ()
    first_turned: int | None = 0
    ratio: int = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of one cell."""
        own = self.n_heads * (self.k_dim + self.v_dim)
        return _N_BYTES * (own + sum(dim for _, dim in self.further))


class StateKey(NamedTuple):
    """One state of a trunk layer, or one of its rows in addition to keys and values."""

    layer: int
    name: str


CellKey = int | StateKey
"""Owner of rows in the cells: an attention layer, or further rows of one."""


class MixerPart:
    """The token-mixing half of a block."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """Its name in a map of layers."""
        raise NotImplementedError

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """Its tensors, named within the block, in the file's variant."""
        raise NotImplementedError

    def states(self) -> Mapping[str, StateSize]:
        """The recurrent states it keeps, by name."""
        return {}

    def cells(self) -> CellSize | None:
        """The attention cells it keeps."""
        return None


FeedForwardPart: TypeAlias = "DensePart | MixturePart"
"""The feed-forward half of a block; shapes(n_embd, present): as in MixerPart."""


@dataclass(frozen=True, slots=True)
class BlockParts:
    """One block: x += mixers(norm x), then x += ffn(norm x), each times residual_scale.

    mixers: on the same input, with added results; may be empty. mixer_norm, ffn_norm: names of the
    norms' tensors within the block, None if the trunk applies them. added_norms: names of output
    norms of mixers and ffn, if any. before: what is added to the trunk's streams before the mixers,
    with hyper-connections only.
    """

    mixers: tuple[MixerPart, ...]
    ffn: FeedForwardPart | None
    mixer_norm: str | None = "attn_norm.weight"
    ffn_norm: str | None = "post_attention_norm.weight"
    residual_scale: float = 1.0
    added_norms: tuple[str, ...] = ()
    before: MixerPart | None = None

    @property
    def keepers(self) -> tuple[MixerPart, ...]:
        """All parts that may keep something per sequence."""
        return self.mixers if self.before is None else (self.before, *self.mixers)

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """Tensors of the block, named within it."""
        found: Shapes = {}
        for part in self.keepers:
            found |= part.shapes(n_embd, present)
        if self.mixers and self.mixer_norm:
            found[self.mixer_norm] = (n_embd,)
        if self.ffn is not None:
            found |= self.ffn.shapes(n_embd, present)
            if self.ffn_norm:
                found[self.ffn_norm] = (n_embd,)
        return found | dict.fromkeys(self.added_norms, (n_embd,))

    def states(self) -> dict[str, StateSize]:
        """All recurrent states of the block, by name."""
        return {name: size for part in self.keepers for name, size in part.states().items()}

    def cells(self) -> CellSize | None:
        """The attention cells of the block; at most one of its mixers attends."""
        return next((cells for mixer in self.mixers if (cells := mixer.cells())), None)

    @property
    def kind(self) -> str:
        """The block's name in a map of layers."""
        return " + ".join(mixer.kind for mixer in self.mixers) or "feed-forward"


@dataclass(frozen=True, slots=True)
class TrunkPart:
    """How the blocks of the trunk are joined: by default each adds to one residual stream; its
    norms are those that BlockParts names."""

    @property
    def tapped(self) -> bool:
        """Whether drafters can read the input of a layer: the stream, or the mean of several."""
        return True

    @property
    def n_handed(self) -> int:
        """Streams of a token that the MTP block gets raw; 1 if it gets the row after the final
        norm."""
        return 1

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """Tensors outside the blocks, under their full names."""
        return {}

    def block_shapes(self, index: int, n_embd: int, present: Container[str]) -> Shapes:
        """Tensors of trunk block `index` other than those of its parts, named within the block."""
        return {}

    def mtp_shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """The same for the MTP block, in addition to those of MtpParts or instead of them."""
        return {}


@dataclass(frozen=True, slots=True)
class MtpParts:
    """The MTP (nextn) block. output_norm: name of its final norm within the block; if the file
    lacks it, the trunk's is used. centred_eps: eps of a norm that first subtracts the mean; None
    for one like the trunk's."""

    block: BlockParts
    output_norm: str = "nextn.shared_head_norm.weight"
    centred_eps: float | None = None

    def shapes(self, n_embd: int, n_vocab: int, present: Container[str]) -> Shapes:
        """Tensors of the block, named within it."""
        table = (n_vocab, n_embd)
        optional: Shapes = {
            self.output_norm: (n_embd,),
            "nextn.embed_tokens.weight": table,
            "nextn.shared_head_head.weight": table,
        }
        return {
            **self.block.shapes(n_embd, present),
            "nextn.eh_proj.weight": (n_embd, 2 * n_embd),
            "nextn.enorm.weight": (n_embd,),
            "nextn.hnorm.weight": (n_embd,),
            **only_present(optional, present),
        }


def only_present(shapes: Mapping[str, tuple[int, ...]], present: Container[str]) -> Shapes:
    """Those tensors that the file contains."""
    return {name: shape for name, shape in shapes.items() if name in present}
