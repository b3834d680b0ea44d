"""qwen35, qwen35moe, qwen3next: Gated DeltaNet and gated attention; qwen3: attention alone."""

from __future__ import annotations

import numpy as np

from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import common_sizes, heads, model_config
from engine.model.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_TAPS, REMEDY, count, uniform
from engine.model.parts import BlockParts, FeedForwardPart, MtpParts
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import MixturePart, SwigluPart
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.rope import RopeConfig


def read_qwen35(file: GgufFile) -> ModelConfig:
    """Dense Qwen3.5 and 3.6."""
    return _hybrid(file, mixture=False, legacy=False)


def read_qwen35moe(file: GgufFile) -> ModelConfig:
    """Qwen3.5 and 3.6 with a mixture of experts."""
    return _hybrid(file, mixture=True, legacy=False)


def read_qwen3next(file: GgufFile) -> ModelConfig:
    """Qwen3-Next, whose gates are one tensor."""
    return _hybrid(file, mixture=True, legacy=True)


def read_qwen3(file: GgufFile) -> ModelConfig:
    """Qwen3, without recurrent layers."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    attention = AttentionPart(*heads(file, sizes.n_embd, n, range(n)), gated=False)
    ffn = SwigluPart(uniform(file, "qwen3.feed_forward_length", n, range(n)))
    return model_config(
        file,
        sizes,
        blocks=(BlockParts((attention,), ffn, ffn_norm="ffn_norm.weight"),) * n,
        rope=RopeConfig.from_gguf(file, attention.head_dim),
    )


def _hybrid(file: GgufFile, *, mixture: bool, legacy: bool) -> ModelConfig:
    arch = file.architecture
    sizes = common_sizes(file, runs_mtp=True)
    recurrent = recurrent_schedule(file, sizes.n_blocks)
    attending = [i for i, flag in enumerate(recurrent) if not flag]
    n_head, n_head_kv, head_dim = heads(file, sizes.n_embd, sizes.n_blocks, attending)
    attention = AttentionPart(n_head, n_head_kv, head_dim, gated=True)
    delta_net = None
    if any(recurrent[: sizes.n_layer]):
        delta_net = read_delta_net(file, legacy=legacy)
    ffn: FeedForwardPart
    if mixture:
        ffn = read_mixture(file)
    else:
        blocks = range(sizes.n_blocks)
        ffn = SwigluPart(uniform(file, f"{arch}.feed_forward_length", sizes.n_blocks, blocks))
    return model_config(
        file,
        sizes,
        blocks=tuple(
            BlockParts((delta_net if flag and delta_net else attention,), ffn)
            for flag in recurrent[: sizes.n_layer]
        ),
        mtp=MtpParts(BlockParts((attention,), ffn)) if sizes.has_mtp else None,
        rope=RopeConfig.from_gguf(file, head_dim),
    )


def recurrent_schedule(file: GgufFile, blocks: int) -> list[bool]:
    """Per block: recurrent or not. The explicit array beats the interval; MTP blocks attend."""
    arch = file.architecture
    key = f"{arch}.attention.recurrent_layers"
    if key in file.metadata:
        values = file.metadata[key]
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biu":
            raise ModelFileError(file.path, f"key {key}", "not an array of flags", REMEDY)
        if len(values) != blocks:
            what = f"{len(values)} entries for {blocks} blocks"
            raise ModelFileError(file.path, f"key {key}", what, REMEDY)
        return [bool(value) for value in values]
    interval = count(file, f"{arch}.full_attention_interval", 4)
    return [(index + 1) % interval != 0 for index in range(blocks)]


def read_delta_net(file: GgufFile, *, legacy: bool, sigmoid_gate: bool = False) -> DeltaNetPart:
    """The `ssm` keys of a Gated DeltaNet. legacy: as Qwen3-Next has it."""
    arch = file.architecture
    part = DeltaNetPart(
        d_conv=count(file, f"{arch}.ssm.conv_kernel", low=2, high=MAX_TAPS),
        d_state=count(file, f"{arch}.ssm.state_size", high=MAX_HEAD_DIM),
        n_k_heads=count(file, f"{arch}.ssm.group_count", high=MAX_HEADS),
        n_v_heads=count(file, f"{arch}.ssm.time_step_rank", high=MAX_HEADS),
        grouped=legacy,
        joint_gates=legacy,
        sigmoid_gate=sigmoid_gate,
    )
    if part.n_v_heads % part.n_k_heads:
        what = f"{part.n_v_heads} value heads are no multiple of {part.n_k_heads} key heads"
        raise ModelFileError(file.path, f"key {arch}.ssm.time_step_rank", what, REMEDY)
    inner = count(file, f"{arch}.ssm.inner_size")
    if inner != part.value_dim:
        what = f"{inner} is not {part.n_v_heads} value heads of {part.d_state}"
        raise ModelFileError(file.path, f"key {arch}.ssm.inner_size", what, REMEDY)
    return part


def read_mixture(file: GgufFile) -> MixturePart:
    """The `expert` keys of a mixture with one shared expert."""
    arch = file.architecture
    n_experts = count(file, f"{arch}.expert_count", high=MAX_HEADS)
    return MixturePart(
        n_experts=n_experts,
        n_used=count(file, f"{arch}.expert_used_count", high=n_experts),
        n_ff=count(file, f"{arch}.expert_feed_forward_length"),
        n_ff_shared=count(file, f"{arch}.expert_shared_feed_forward_length"),
    )
