"""Attention of all kinds: sizes, tensors, cells."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.model.parts import CellSize, MixerPart, Shapes, StateSize, only_present


@dataclass(frozen=True, slots=True)
class AttentionPart(MixerPart):
    """Grouped-query attention.

    gated: the query projection has an output gate for every head after its queries. normed: queries
    and keys are normed per head; own_norms: with separate weights for each head. rope: which
    elements of a head are rotated as a pair, "halves" (x[j], x[j + n/2]) or "pairs" (x[2j], x[2j +
    1]), or "none". scale: of the products of queries and keys, 1 / sqrt(head_dim) if None. window:
    positions attended to, including the token's own; None for all. output_bias: the file may have a
    bias after the output projection.
    """

    n_head: int
    n_head_kv: int
    head_dim: int
    gated: bool
    normed: bool = True
    rope: str = "halves"
    scale: float | None = None
    window: int | None = None
    output_bias: bool = False
    own_norms: bool = False

    @property
    def kind(self) -> str:
        return "attention"

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        hd = self.head_dim
        n_q, n_kv = self.n_head * hd * (2 if self.gated else 1), self.n_head_kv * hd
        rows = (
            {"attn_qkv": n_q + 2 * n_kv}
            if "attn_qkv.weight" in present
            else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
        )
        biased = {**rows, "attn_output": n_embd} if self.output_bias else rows
        biases = {f"{name}.bias": (n,) for name, n in biased.items()}
        n_heads = {"q": (self.n_head,), "k": (self.n_head_kv,)} if self.own_norms else {}
        norms = {f"attn_{one}_norm.weight": (*n_heads.get(one, ()), hd) for one in "qk"}
        return {
            **{f"{name}.weight": (n, n_embd) for name, n in rows.items()},
            **only_present(biases, present),
            **(norms if self.normed else {}),
            "attn_output.weight": (n_embd, self.n_head * hd),
        }

    def cells(self) -> CellSize:
        return CellSize(self.n_head_kv, self.head_dim, self.head_dim, self.window)


INDEX_ROW = "index"
"""Name of the cell's further row with the token's indexer key, neither normed nor roped; with
pooled keys, key and gate side by side."""


@dataclass(frozen=True, slots=True)
class SparseAttentionPart(AttentionPart):
    """Attention whose queries see the blocks of tokens that an indexer selects, and the tail.

    ratio: tokens of a block; 0 for no selection, where the indexer's tensors are unused. n_blocks:
    how many are selected. n_index_head, index_dim: heads of the indexer's queries, and their
    length.
    """

    n_index_head: int = 1
    index_dim: int = 1
    ratio: int = 0
    n_blocks: int = 0

    @property
    def kind(self) -> str:
        return "sparse attention" if self.ratio else "attention"

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        return {
            **AttentionPart.shapes(self, n_embd, present),
            "indexer.q_proj.weight": (self.n_index_head * self.index_dim, n_embd),
            "indexer.k_proj.weight": (self.index_dim, n_embd),
            "indexer.q_norm.weight": (self.index_dim,),
            "indexer.k_norm.weight": (self.index_dim,),
        }

    def cells(self) -> CellSize:
        further = ((INDEX_ROW, self.index_dim),) if self.ratio else ()
        return AttentionPart.cells(self)._replace(further=further)


@dataclass(frozen=True, slots=True)
class LatentAttentionPart(MixerPart):
    """Attention of all heads to one latent row per token (DeepSeek-V2, arXiv 2405.04434), with the
    matrices between latent and heads absorbed into queries and outputs.

    n_latent: length of the latent. n_nope, n_rope: parts of a query head that are multiplied with
    the latent and with the key shared by all heads. v_dim: of a head's output. q_rank: width of the
    queries' own bottleneck, None without one. pairs: how the shared key is rotated, None if it is
    not. gate: sigmoid gates of the output, one per head or per element.
    """

    n_head: int
    n_latent: int
    n_nope: int
    n_rope: int
    v_dim: int
    q_rank: int | None = None
    pairs: Literal["neighbours", "halves"] | None = None
    gate: Literal["heads", "numbers"] | None = None

    kind: ClassVar[str] = "latent attention"

    @property
    def n_gates(self) -> int:
        """Rows of the output gate."""
        return {None: 0, "heads": self.n_head, "numbers": self.n_head * self.v_dim}[self.gate]

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        n_q, n_head = self.n_head * (self.n_nope + self.n_rope), self.n_head
        queries: Shapes = {"attn_q.weight": (n_q, n_embd)}
        if self.q_rank is not None:
            queries = {
                "attn_q_a.weight": (self.q_rank, n_embd),
                "attn_q_a_norm.weight": (self.q_rank,),
                "attn_q_b.weight": (n_q, self.q_rank),
            }
        return {
            **queries,
            "attn_kv_a_mqa.weight": (self.n_latent + self.n_rope, n_embd),
            "attn_kv_a_norm.weight": (self.n_latent,),
            "attn_k_b.weight": (n_head, self.n_latent, self.n_nope),
            "attn_v_b.weight": (n_head, self.v_dim, self.n_latent),
            "attn_output.weight": (n_embd, n_head * self.v_dim),
            **({"attn_gate.weight": (self.n_gates, n_embd)} if self.gate else {}),
        }

    def cells(self) -> CellSize:
        """See engine.model.parts.MixerPart: the latent is key and value, stored once."""
        return CellSize(1, self.n_latent + self.n_rope, 0, first_turned=self.n_latent)


@dataclass(frozen=True, slots=True)
class SparseLatentAttentionPart(LatentAttentionPart):
    """Latent attention whose queries see the pools of tokens that an indexer selects, and the tail.

    n_index_head, index_dim: its queries. ratio: tokens of a pool. n_pools: how many are selected.
    index_eps: of the keys' LayerNorm. chooses: whether its own indexer selects; otherwise the
    selection of the last layer that has one is used, and its own tensors, if any, are unused.
    """

    n_index_head: int = 1
    index_dim: int = 1
    ratio: int = 1
    n_pools: int = 1
    index_eps: float = 0.0
    chooses: bool = True

    kind: ClassVar[str] = "sparse latent attention"

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        n_head, dim = self.n_index_head, self.index_dim
        assert self.q_rank is not None  # the indexer's queries use the same bottleneck
        own: Shapes = {
            "indexer.attn_q_b.weight": (n_head * dim, self.q_rank),
            "indexer.attn_k.weight": (dim, n_embd),
            "indexer.k_norm.weight": (dim,),
            "indexer.k_norm.bias": (dim,),
            "indexer.proj.weight": (n_head, n_embd),
            "indexer_compressor_gate.weight": (dim, n_embd),
            "indexer_compressor_ape.weight": (self.ratio, dim),
        }
        return {
            **LatentAttentionPart.shapes(self, n_embd, present),
            **(own if self.chooses or "indexer.proj.weight" in present else {}),
        }

    def cells(self) -> CellSize:
        further = ((INDEX_ROW, 2 * self.index_dim),) if self.chooses else ()
        return LatentAttentionPart.cells(self)._replace(further=further)


@dataclass(frozen=True, slots=True)
class CompressedAttentionPart(MixerPart):
    """Attention of all heads to one row per token, which is key and value, and to rows of
    compressed blocks of tokens (DeepSeek-V4).

    n_rot: rotated elements at the end of a head. window: positions attended to, including the
    token's own. ratio: tokens of a block, 0 for none; overlapping blocks, those of ratio 4, have an
    indexer, which selects n_blocks of them with n_index_head heads of index_dim. n_groups,
    output_rank: groups of heads before the output, each with a bottleneck of this width.
    """

    n_head: int
    head_dim: int
    n_rot: int
    q_rank: int
    n_groups: int
    output_rank: int
    window: int
    ratio: int = 0
    n_index_head: int = 1
    index_dim: int = 1
    n_blocks: int = 0

    @property
    def kind(self) -> str:
        return RINGS[self.ratio][1] if self.ratio else "window attention"

    @property
    def has_indexer(self) -> bool:
        """Whether blocks overlap and are selected."""
        return self.ratio == OVERLAPPING

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        n_q, rank = self.n_head * self.head_dim, self.n_groups * self.output_rank
        shapes: Shapes = {
            "attn_q_a.weight": (self.q_rank, n_embd),
            "attn_q_a_norm.weight": (self.q_rank,),
            "attn_q_b.weight": (n_q, self.q_rank),
            "attn_kv.weight": (self.head_dim, n_embd),
            "attn_kv_a_norm.weight": (self.head_dim,),
            "attn_sinks.weight": (self.n_head,),
            "attn_output_a.weight": (rank, n_q // self.n_groups),
            "attn_output_b.weight": (n_embd, rank),
        }
        if self.ratio:
            shapes |= self._compressor("attn", self.head_dim, n_embd)
        if self.has_indexer:
            shapes |= self._compressor("indexer", self.index_dim, n_embd)
            n_index = self.n_index_head * self.index_dim
            shapes["indexer.proj.weight"] = (self.n_index_head, n_embd)
            shapes["indexer.attn_q_b.weight"] = (n_index, self.q_rank)
        return shapes

    def states(self) -> Mapping[str, StateSize]:
        """Rings of the compressors' last inputs, by llama.cpp's names."""
        if not self.ratio:
            return {}
        rings = {RINGS[self.ratio][0]: self._ring(self.head_dim)}
        return rings | {INDEX_RING: self._ring(self.index_dim)} if self.has_indexer else rings

    def cells(self) -> CellSize:
        further = ((INDEX_ROW, self.index_dim),) if self.has_indexer else ()
        n_heads = 2 if self.ratio else 1
        return CellSize(n_heads, self.head_dim, 0, self.window, further, None, self.ratio)

    def _overlap(self) -> int:
        return 2 if self.has_indexer else 1

    def _compressor(self, name: str, width: int, n_embd: int) -> Shapes:
        channels = self._overlap() * width
        return {
            f"{name}_compressor_kv.weight": (channels, n_embd),
            f"{name}_compressor_gate.weight": (channels, n_embd),
            f"{name}_compressor_ape.weight": (self.ratio, channels),
            f"{name}_compressor_norm.weight": (width,),
        }

    def _ring(self, width: int) -> StateSize:
        row = (2 * self._overlap() * width,)
        return StateSize((self._overlap() * self.ratio, *row), (row, (1,)), is_window=True)


OVERLAPPING = 4
"""The ratio of overlapping blocks."""
RINGS = {OVERLAPPING: ("csa ring", "CSA"), 128: ("hca ring", "HCA")}
"""Name of a layer's ring, and of its kind, by ratio; there are no other ratios."""
INDEX_RING = "lid ring"
"""Name of the indexer's ring."""
