"""nemotron_h and nemotron_h_moe: each block is Mamba-2, attention without rope, or a feed-forward
part."""

from __future__ import annotations

from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import common_sizes, heads, model_config
from engine.model.families.mamba import read_mamba2
from engine.model.limits import MAX_HEADS, MAX_WIDTH, count, each, real
from engine.model.parts import BlockParts, FeedForwardPart, MtpParts
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import DensePart, LatentPart, MixturePart, RouterPart


def read_nemotron(file: GgufFile, *, runs_mtp: bool) -> ModelConfig:
    """Dense feed-forward parts or mixtures of experts, and perhaps an MTP block."""
    sizes = common_sizes(file, runs_mtp=runs_mtp)
    n, n_layer = sizes.n_blocks, sizes.n_layer
    kv = each(file, ".attention.head_count_kv", n, high=MAX_HEADS)
    widths = each(file, ".feed_forward_length", n)
    recurrent = [not kv[i] and not widths[i] for i in range(n_layer)]
    attending = [i for i in range(n_layer) if not widths[i] and kv[i]]
    attention = mamba = None
    if any(recurrent):
        mamba = read_mamba2(file)
    if attending or sizes.has_mtp:
        of_head = [n_layer] * sizes.has_mtp
        attention = AttentionPart(
            *heads(file, sizes.n_embd, n, attending + of_head),
            gated=False,
            normed=False,
            rope="none",
            output_bias=True,
        )
    centred_eps = real(file, ".attention.layer_norm_epsilon", high=1.0)
    blocks = []
    for i in range(n_layer):
        mixer = mamba if recurrent[i] else attention if not widths[i] else None
        if mixer:
            blocks.append(BlockParts((mixer,), None))
        else:
            ffn = _feed_forward(file, i, n, widths)
            blocks.append(BlockParts((), ffn, ffn_norm="attn_norm.weight"))
    mtp = None
    if sizes.has_mtp and attention:
        ffn = _feed_forward(file, n_layer, n, widths)
        block = BlockParts((attention,), ffn, ffn_norm="post_attention_norm.weight")
        mtp = MtpParts(block, centred_eps=centred_eps)
    return model_config(
        file,
        sizes,
        eps=real(file, ".attention.layer_norm_rms_epsilon", centred_eps, high=1.0),
        blocks=tuple(blocks),
        mtp=mtp,
    )


def _feed_forward(file: GgufFile, index: int, blocks: int, widths: list[int]) -> FeedForwardPart:
    """The feed-forward part of a block; its sizes may be its own."""
    n_experts = count(file, ".expert_count", 0, low=0, high=MAX_HEADS)
    if not n_experts:
        return DensePart(widths[index], activation="relu2")
    # the MTP block routes like the trunk's first block
    n_used = each(file, ".expert_used_count", blocks, high=n_experts)
    used = n_used[index] or next((n for n in n_used if n), 0)
    if not used:
        raise file.wrong(".expert_used_count", "no block uses an expert")
    key = ".expert_feed_forward_length"
    width = each(file, key, blocks, 0)[index] or widths[index] // used
    if not width:
        raise file.wrong(key, f"experts of block {index} have no width")
    latent = count(file, ".moe_latent_size", 0, low=0, high=MAX_WIDTH)
    within = f"blk.{index}.ffn_latent_down.weight" in file.tensors
    return MixturePart(
        n_experts,
        used,
        width,
        count(file, ".expert_shared_feed_forward_length", 0, low=0, high=MAX_WIDTH),
        shared_gate=False,
        router=RouterPart(
            normalised=file.bool_(".expert_weights_norm", False), scale=expert_scale(file)
        ),
        activation="relu2",
        latent=LatentPart(latent, "ffn_latent_down.weight", "ffn_latent_up.weight")
        if latent and within
        else None,
    )


def expert_scale(file: GgufFile) -> float:
    """Factor of the chosen experts' weights; 0 or a missing key means 1."""
    key = ".expert_weights_scale"
    return real(file, key) if file.float_(key, 0.0) else 1.0
