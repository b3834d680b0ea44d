"""plamo2: PFN's hybrid of Mamba-2 and attention, where what a block adds is normed."""

from __future__ import annotations

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import common_sizes, heads, model_config
from engine.model.families.mamba import attending_layers
from engine.model.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_TAPS, REMEDY, count, uniform
from engine.model.parts import BlockParts
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import SwigluPart
from engine.model.parts.recurrent import LowRankMamba2Part
from engine.model.rope import RopeConfig


def read_plamo2(file: GgufFile) -> ModelConfig:
    """PLaMo 2: attention with a norm of its own for every head, or Mamba-2 of one group."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    attending = attending_layers(file, n)
    mamba, attention = _read_part(file, sizes.n_embd), None
    if attending:
        attention = AttentionPart(
            *heads(file, sizes.n_embd, n, attending), gated=False, own_norms=True
        )
    ffn = SwigluPart(uniform(file, "plamo2.feed_forward_length", n, range(n)), joint=True)
    blocks = (
        BlockParts(
            (attention if attention and i in attending else mamba,),
            ffn,
            ffn_norm="ffn_norm.weight",
            added_norms=("post_attention_norm", "post_ffw_norm"),
        )
        for i in range(n)
    )
    rope = RopeConfig.from_gguf(file, attention.head_dim) if attention else None
    return model_config(file, sizes, blocks=tuple(blocks), rope=rope)


def plamo2_notes(config: ModelConfig) -> list[str]:
    """See engine.model.families.Family.peer_notes."""
    if config.blocks[0].cells() or not config.cells():
        return []
    hangs = (
        "0c1e57098 never ends its first pass where attention.head_count begins with 0, as the "
        "converter writes it"
    )
    return [hangs]


def _read_part(file: GgufFile, n_embd: int) -> LowRankMamba2Part:
    inner = count(file, "plamo2.ssm.inner_size")
    n_heads = count(file, "plamo2.ssm.time_step_rank", high=MAX_HEADS)
    if inner % n_heads:
        what = f"{inner} channels cannot be divided by {n_heads}"
        raise ModelFileError(file.path, "key plamo2.ssm.time_step_rank", what, REMEDY)
    if count(file, "plamo2.ssm.group_count", low=0, high=MAX_HEADS):
        raise UnsupportedModelError(
            f"{file.path.name}: plamo2.ssm.group_count is not 0, and B and C of PLaMo 2 are the "
            "same for all heads.",
            "Convert the model again with llama.cpp's converter, which writes 0.",
        )
    return LowRankMamba2Part(
        d_conv=count(file, "plamo2.ssm.conv_kernel", low=2, high=MAX_TAPS),
        d_state=count(file, "plamo2.ssm.state_size", high=MAX_HEAD_DIM),
        n_heads=n_heads,
        head_dim=inner // n_heads,
        n_groups=1,
        normed=False,
        # not in the file: so the model defines it
        step_rank=max(64, n_embd // 16),
    )
