"""The sizes of an EAGLE-3 drafter (Li et al. 2025, arXiv 2503.01840), read and checked before
anything is allocated."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.families.common import heads, read_taps, rms_eps
from engine.model.limits import MAX_CONTEXT, REMEDY, count
from engine.model.parts import CellSize, Shapes, only_present
from engine.model.parts.attention import AttentionPart
from engine.model.rope import ROPE_FACTORS, RopeConfig

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

    @property
    def drafter(self) -> str:
        return "draft-eagle3"

    @property
    def reads_behind_norm(self) -> bool:
        """As the reference reads it."""
        return True

    @property
    def unused(self) -> tuple[str, ...]:
        return ()

    @property
    def n_kept(self) -> int:
        """A feature row, fused."""
        return self.n_embd

    @property
    def ties_head(self) -> bool:
        """The target's head serves."""
        return False

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
    if (n_blocks := count(file, f"{arch}.block_count")) != 1:
        raise UnsupportedModelError(
            f"{file.path.name}: {arch}.block_count is {n_blocks}, and EAGLE-3 drafters have one "
            "block.",
            "Choose an EAGLE-3 drafter of one block.",
        )
    n_embd = count(file, f"{arch}.embedding_length")
    n_head, n_head_kv, head_dim = heads(file, n_embd, 1, range(1))
    key = f"{arch}.target_layers"
    taps = read_taps(file, key, N_TAPS)
    if len(taps) != N_TAPS:
        what = f"{len(taps)} layers where {N_TAPS} are needed"
        raise ModelFileError(file.path, f"key {key}", what, REMEDY)
    return Eagle3Config(
        name=file.str_("general.name", "") or file.path.stem,
        n_embd=n_embd,
        n_target=count(file, f"{arch}.target_hidden_size"),
        n_ff=count(file, f"{arch}.feed_forward_length"),
        n_ctx_train=count(file, f"{arch}.context_length", high=MAX_CONTEXT),
        eps=rms_eps(file),
        attention=AttentionPart(
            n_head, n_head_kv, head_dim, gated=False, normed=False, rope="pairs"
        ),
        rope=RopeConfig.from_gguf(file, head_dim),
        taps=taps,
        norm_before_residual=file.bool_(f"{arch}.norm_before_residual", False),
        norm_before_fc=file.bool_(f"{arch}.norm_before_fc", False),
    )
