"""The Mamba families and their shared keys: granitehybrid, falcon-h1, mamba2, plamo2 with Mamba-2;
mamba and jamba with Mamba-1."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import (
    attending_layers,
    common_sizes,
    heads,
    mixed_blocks,
    model_config,
)
from engine.model.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_TAPS, MAX_WIDTH, count, real, uniform
from engine.model.parts import BlockParts, FeedForwardPart
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import DensePart, MixturePart, RouterPart
from engine.model.parts.recurrent import LowRankMamba2Part, Mamba2Part, MambaPart
from engine.model.rope import RopeConfig


def read_mamba2(file: GgufFile, *, normed: bool = True) -> Mamba2Part:
    """The `ssm` keys. normed: whether the mixer has its norm."""
    inner = count(file, ".ssm.inner_size")
    n_heads = count(file, ".ssm.time_step_rank", high=MAX_HEADS)
    n_groups = count(file, ".ssm.group_count", high=MAX_HEADS)
    for key, n in (("time_step_rank", n_heads), ("group_count", n_groups)):
        if inner % n:
            raise file.wrong(f".ssm.{key}", f"{inner} channels cannot be divided by {n}")
    if n_heads % n_groups:
        raise file.wrong(".ssm.group_count", f"{n_heads} heads cannot share {n_groups} groups")
    return Mamba2Part(
        d_conv=count(file, ".ssm.conv_kernel", low=2, high=MAX_TAPS),
        d_state=count(file, ".ssm.state_size", high=MAX_HEAD_DIM),
        n_heads=n_heads,
        head_dim=inner // n_heads,
        n_groups=n_groups,
        normed=normed,
    )


def read_mamba2_alone(file: GgufFile) -> ModelConfig:
    """Mamba-2 (arXiv 2405.21060): Mamba blocks only."""
    sizes = common_sizes(file)
    block = BlockParts((read_mamba2(file),), None)
    return model_config(file, sizes, blocks=(block,) * sizes.n_blocks)


def read_falcon_h1(file: GgufFile) -> ModelConfig:
    """Falcon-H1: attention and Mamba-2 side by side in every block."""
    sizes = common_sizes(file)
    blocks = range(sizes.n_blocks)
    normed = any(f"blk.{i}.ssm_norm.weight" in file.tensors for i in blocks)
    attention = AttentionPart(
        *heads(file, sizes.n_embd, sizes.n_blocks, blocks),
        gated=False,
        normed=False,
        output_bias=True,
    )
    mixers = attention, read_mamba2(file, normed=normed)
    ffn = DensePart(uniform(file, "falcon-h1.feed_forward_length", sizes.n_blocks, blocks))
    # converters write the second norm without a suffix
    plain = "blk.0.ffn_norm.weight" not in file.tensors
    block = BlockParts(mixers, ffn, ffn_norm="ffn_norm" if plain else "ffn_norm.weight")
    return model_config(
        file,
        sizes,
        blocks=(block,) * sizes.n_blocks,
        rope=RopeConfig.from_gguf(file, attention.head_dim),
    )


def read_granite_hybrid(file: GgufFile) -> ModelConfig:
    """Granite 4: Mamba-2 or attention, dense or a mixture, everything scaled."""
    sizes = common_sizes(file)
    attending = attending_layers(file, sizes.n_blocks)
    mamba, attention = read_mamba2(file), None
    if mamba.d_inner != 2 * sizes.n_embd:
        what = f"{mamba.d_inner} is not twice the embedding length {sizes.n_embd}"
        raise file.wrong(".ssm.inner_size", what)
    if attending:
        attention = AttentionPart(
            *heads(file, sizes.n_embd, sizes.n_blocks, attending),
            gated=False,
            normed=False,
            # the key means that the model was trained with rope
            rope="pairs" if file.bool_(".rope.scaling.finetuned", True) else "none",
            scale=_scale(file, ".attention.scale"),
            output_bias=True,
        )
    residual_scale = _scale(file, ".residual_scale") or 1.0
    ffn = _granite_ffn(file, sizes.n_blocks)
    rotated = attention if attention and attention.rope != "none" else None
    return model_config(
        file,
        sizes,
        blocks=mixed_blocks(
            attention, mamba, attending, [ffn] * sizes.n_blocks, residual_scale=residual_scale
        ),
        rope=RopeConfig.from_gguf(file, rotated.head_dim) if rotated else None,
        embedding_scale=_scale(file, ".embedding_scale") or 1.0,
        logit_scale=_scale(file, ".logit_scale") or 1.0,
    )


def _granite_ffn(file: GgufFile, blocks: int) -> FeedForwardPart:
    width = uniform(file, ".feed_forward_length", blocks, range(blocks))
    n_experts = count(file, ".expert_count", 0, low=0, high=MAX_HEADS)
    if not n_experts:
        return DensePart(width)
    shared = count(file, ".expert_shared_feed_forward_length", 0, low=0, high=MAX_WIDTH)
    n_used = count(file, ".expert_used_count", high=n_experts)
    return MixturePart(n_experts, n_used, width, shared, shared_gate=False)


def _scale(file: GgufFile, key: str) -> float | None:
    """A positive factor; None where it is missing or 0."""
    return real(file, key) if file.float_(key, 0.0) else None


def read_mamba(file: GgufFile) -> ModelConfig:
    """Mamba (arXiv 2312.00752): Mamba blocks only. Falcon Mamba norms steps, B and C."""
    sizes = common_sizes(file)
    part = _read_part(file, normed=file.bool_("mamba.ssm.dt_b_c_rms", False))
    return model_config(file, sizes, blocks=(BlockParts((part,), None),) * sizes.n_blocks)


def read_jamba(file: GgufFile) -> ModelConfig:
    """Jamba (arXiv 2403.19887): Mamba or attention without rope, dense or a mixture."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    mamba, attending = _read_part(file, normed=True), attending_layers(file, n)
    attention = None
    if attending:
        attention = AttentionPart(
            *heads(file, sizes.n_embd, n, attending), gated=False, normed=False, rope="none"
        )
    width = uniform(file, "jamba.feed_forward_length", n, range(n))
    routed = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(n)]
    mixture = None
    if any(routed):
        n_experts = count(file, "jamba.expert_count", high=MAX_HEADS)
        mixture = MixturePart(
            n_experts,
            count(file, "jamba.expert_used_count", high=n_experts),
            width,
            n_ff_shared=0,
            shared_gate=False,
            router=RouterPart("softmax", biased=False, normalised=False),
        )

    ffns = [mixture if mixture and is_routed else DensePart(width) for is_routed in routed]
    return model_config(file, sizes, blocks=mixed_blocks(attention, mamba, attending, ffns))


def _read_part(file: GgufFile, *, normed: bool) -> MambaPart:
    return MambaPart(
        d_conv=count(file, ".ssm.conv_kernel", low=2, high=MAX_TAPS),
        d_state=count(file, ".ssm.state_size", high=MAX_HEAD_DIM),
        d_inner=count(file, ".ssm.inner_size"),
        step_rank=count(file, ".ssm.time_step_rank"),
        normed=normed,
    )


def read_plamo2(file: GgufFile) -> ModelConfig:
    """PLaMo 2: attention with a norm per head, or Mamba-2 of one group."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    attending = attending_layers(file, n)
    mamba, attention = _read_plamo2_part(file, sizes.n_embd), None
    if attending:
        attention = AttentionPart(
            *heads(file, sizes.n_embd, n, attending), gated=False, own_norms=True
        )
    ffn = DensePart(uniform(file, "plamo2.feed_forward_length", n, range(n)), joint=True)
    added = "post_attention_norm", "post_ffw_norm"
    return model_config(
        file,
        sizes,
        blocks=mixed_blocks(attention, mamba, attending, [ffn] * n, added_norms=added),
        rope=RopeConfig.from_gguf(file, attention.head_dim) if attention else None,
    )


def plamo2_notes(config: ModelConfig) -> list[str]:
    if config.blocks[0].cells() or not config.cells():
        return []
    hangs = (
        "0c1e57098 never ends its first pass where attention.head_count begins with 0, as the "
        "converter writes it"
    )
    return [hangs]


def _read_plamo2_part(file: GgufFile, n_embd: int) -> LowRankMamba2Part:
    inner = count(file, "plamo2.ssm.inner_size")
    n_heads = count(file, "plamo2.ssm.time_step_rank", high=MAX_HEADS)
    if inner % n_heads:
        what = f"{inner} channels cannot be divided by {n_heads}"
        raise file.wrong("plamo2.ssm.time_step_rank", what)
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
        # not in the file: defined by the model
        step_rank=max(64, n_embd // 16),
    )
