"""mamba and jamba: the first Mamba, alone or with attention and experts in between."""

from __future__ import annotations

from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import common_sizes, heads, model_config
from engine.model.families.mamba import attending_layers
from engine.model.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_TAPS, count, uniform
from engine.model.parts import BlockParts, FeedForwardPart
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import MixturePart, RouterPart, SwigluPart
from engine.model.parts.recurrent import MambaPart


def read_mamba(file: GgufFile) -> ModelConfig:
    """Mamba (arXiv 2312.00752): nothing but its blocks. Falcon Mamba norms steps, B and C."""
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

    def block(index: int) -> BlockParts:
        mixer = attention if attention and index in attending else mamba
        ffn: FeedForwardPart = mixture if mixture and routed[index] else SwigluPart(width)
        return BlockParts((mixer,), ffn, ffn_norm="ffn_norm.weight")

    return model_config(file, sizes, blocks=tuple(map(block, range(n))))


def _read_part(file: GgufFile, *, normed: bool) -> MambaPart:
    key = f"{file.architecture}.ssm"
    return MambaPart(
        d_conv=count(file, f"{key}.conv_kernel", low=2, high=MAX_TAPS),
        d_state=count(file, f"{key}.state_size", high=MAX_HEAD_DIM),
        d_inner=count(file, f"{key}.inner_size"),
        step_rank=count(file, f"{key}.time_step_rank"),
        normed=normed,
    )
