"""kimi-linear and kimi-k3: Kimi Delta Attention and latent attention without positions."""

from __future__ import annotations

from dataclasses import replace

from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import CommonSizes, common_sizes, hold_to_own_head, model_config
from engine.model.families.kda import (
    dense_width,
    lower_bound,
    n_dense,
    read_blocks,
    read_kda,
    read_latent_attention,
    read_mixture,
)
from engine.model.limits import MAX_LAYERS, count, real
from engine.model.parts import BlockParts, ResidualStream, TrunkPart
from engine.model.parts.feed_forward import LatentPart, SituPart, SwigluPart
from engine.model.parts.trunks import CrossLayerResidual

_DECAY = "ssm_f_a.weight", "ssm_f_b.weight"


def read_kimi_linear(file: GgufFile) -> ModelConfig:
    """Kimi Linear (arXiv 2510.26692)."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    kda = read_kda(file, n, decay=_DECAY, gate=("ssm_g_a.weight", "ssm_g_b.weight"))
    attention = read_latent_attention(file, n)
    dense, mixture = SwigluPart(dense_width(file, n)), read_mixture(file, n, normalised=True)
    leading = n_dense(file)
    blocks = read_blocks(file, n, kda, attention, lambda i: dense if i < leading else mixture)
    return _config(file, sizes, blocks, ResidualStream())


def read_kimi_k3(file: GgufFile) -> ModelConfig:
    """Kimi K3: SiTU in place of SwiGLU, experts on a latent row, residuals across layers."""
    arch = file.architecture
    sizes = common_sizes(file)
    n = sizes.n_blocks
    bound = lower_bound(file, required=False)
    kda = read_kda(file, n, decay=_DECAY, gate=("ssm_g.weight",), flat_a=True, bound=bound)
    gated = any(name.endswith(".attn_gate.weight") for name in file.tensors)
    attention = read_latent_attention(file, n, gate="numbers" if gated else None)
    situ = SituPart(
        real(file, f"{arch}.activation.situ_beta"),
        # 0 or less: the other half passes as it is
        max(file.float_(f"{arch}.activation.situ_linear_beta"), 0.0),
    )
    dense = SwigluPart(dense_width(file, n), situ)
    mixture = replace(
        read_mixture(
            file,
            n,
            normalised=file.bool_(f"{arch}.expert_weights_norm", False),
            latent=_latent(file),
        ),
        gating=situ,
        shared_gating=situ,
    )
    leading = n_dense(file)
    blocks = read_blocks(file, n, kda, attention, lambda i: dense if i < leading else mixture)
    group = count(file, f"{arch}.attn_res.block_size", low=0, high=MAX_LAYERS)
    return _config(file, sizes, blocks, CrossLayerResidual(group) if group else ResidualStream())


def _latent(file: GgufFile) -> LatentPart | None:
    width = count(file, f"{file.architecture}.expert_latent_length", 0, low=0)
    if not width:
        return None
    normed = any(name.endswith(".ffn_routed_norm.weight") for name in file.tensors)
    norm = "ffn_routed_norm.weight" if normed else None
    return LatentPart(width, "ffn_routed_down.weight", "ffn_routed_up.weight", norm)


def _config(
    file: GgufFile, sizes: CommonSizes, blocks: list[BlockParts], trunk: TrunkPart
) -> ModelConfig:
    hold_to_own_head(file)
    return model_config(file, sizes, blocks=tuple(blocks), trunk=trunk)
