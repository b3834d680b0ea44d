"""Models of real size with random weights, to measure speed where no weights are at hand.

Their tokens mean nothing. Matrices have standard deviation 1 / sqrt(columns), which keeps every
activation near 1, and the tied embedding twice that, which gives logits of about 2.
"""

from __future__ import annotations

import math
from pathlib import Path
from string import ascii_lowercase

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.utility import model_weight_count_rounded_notation

from engine.bench.random_blocks import random_tensor
from engine.errors import OptionError
from engine.files import written_whole
from engine.gguf.pretokenise import BYTE_CHARACTERS
from engine.gguf.tokenizer import TokenType
from engine.model.config import ModelConfig
from engine.model.parts import BlockParts, MtpParts, Shapes
from engine.model.parts.attention import AttentionPart
from engine.model.parts.delta_net import DeltaNetPart
from engine.model.parts.feed_forward import MixturePart, SwigluPart
from engine.model.rope import RopeConfig
from engine.model.tensors import block_shapes, global_shapes

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last tokens of every vocabulary."""
_INTERVAL = 4
_N_CTX = 4096


def _config(
    n_layer: int,
    n_embd: int,
    ffn: SwigluPart | MixturePart,
    n_vocab: int,
    heads: tuple[int, int, int],
    sections: tuple[int, int, int, int],
    ssm: tuple[int, int],
) -> ModelConfig:
    """heads: attention's, those of keys and values, their dimension. ssm: d_state, heads."""
    d_state, n_heads = ssm
    attention = BlockParts((AttentionPart(*heads, gated=True),), ffn)
    delta_net = BlockParts((DeltaNetPart(4, d_state, n_heads, n_heads),), ffn)
    return ModelConfig(
        architecture="qwen35" if isinstance(ffn, SwigluPart) else "qwen35moe",
        name="",
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=_N_CTX,
        eps=1e-6,
        blocks=tuple(delta_net if (i + 1) % _INTERVAL else attention for i in range(n_layer)),
        mtp=MtpParts(attention),
        rope=RopeConfig(heads[2] // 4, 1e7, sections, n_ctx_orig=_N_CTX),
    )


_LARGE = 151_936, (8, 2, 256), (11, 11, 10, 0), (128, 16)
_TINY = 512, (4, 2, 64), (3, 3, 2, 0), (32, 8)

_CONFIGS = {
    "0.65b": _config(24, 1024, SwigluPart(3584), *_LARGE),
    "moe-1b": _config(16, 1024, MixturePart(32, 8, 512, 512), *_LARGE),
    "tiny": _config(4, 256, SwigluPart(256), *_TINY),
    "moe-tiny": _config(4, 256, MixturePart(8, 2, 256, 256), *_TINY),
}
"""Shapes by the name of their size."""


_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_k": LlamaFileType.MOSTLY_Q4_K_M,
}
QUANTS = tuple(_FILE_TYPES)
"""How weights are stored; q4_k keeps the sensitive matrices in Q6_K."""
MODEL_SIZES = tuple(_CONFIGS)
"""Sizes that can be written; all have an MTP head and attention in every fourth layer."""


def write_random_model(path: Path, *, size: str = "0.65b", quant: str = "q8_0") -> None:
    """Write a GGUF file, the same one every time; memory holds one tensor at a time.

    size: one of MODEL_SIZES. quant: one of QUANTS. Raises OptionError for others and where the file
    cannot be written; there is never half a file.
    """
    for value, choices, what in ((size, MODEL_SIZES, "size"), (quant, QUANTS, "quantisation")):
        if value not in choices:
            raise OptionError(
                f"The {what} {value!r} is unknown.", f"Choose from {', '.join(choices)}."
            )
    config = _CONFIGS[size]
    with written_whole(path) as part:
        _write(part, config, f"Random {size} {quant}", quant)


def _write(path: Path, config: ModelConfig, name: str, quant: str) -> None:
    shapes = _shapes(config)
    writer = GGUFWriter(path, config.architecture)
    try:
        n_params = sum(math.prod(shape) for shape in shapes.values())
        writer.add_type("model")
        writer.add_name(name)
        writer.add_size_label(model_weight_count_rounded_notation(n_params))
        writer.add_file_type(_FILE_TYPES[quant])
        writer.add_quantization_version(2)
        _add_sizes(writer, config)
        _add_vocabulary(writer, config.n_vocab)
        kinds = {name: _kind(name, shape, quant) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            kind = kinds[name]
            n_bytes = _n_bytes(shape, kind)
            writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(0)
        for name, shape in shapes.items():
            writer.write_tensor_data(_values(rng, name, shape, kinds[name]))
    finally:
        writer.close()


def _shapes(config: ModelConfig) -> Shapes:
    head_norm = f"blk.{config.n_layer}.nextn.shared_head_norm.weight"
    shapes = global_shapes(config, ())
    for index in range(config.n_layer + config.n_mtp):
        shapes |= block_shapes(config, index, (head_norm,))
    return shapes


def _kind(name: str, shape: tuple[int, ...], quant: str) -> GGMLQuantizationType:
    """Type of a tensor, chosen as llama.cpp's quantiser does."""
    if quant == "f32" or len(shape) == 1 or "conv1d" in name or "ffn_gate_inp" in name:
        return GGMLQuantizationType.F32
    if quant == "bf16":
        return GGMLQuantizationType.BF16
    if quant == "q8_0":
        return GGMLQuantizationType.Q8_0
    halved = "ffn_down" in name and int(name.split(".")[1]) % 2 == 0
    sensitive = halved or "attn_v" in name or name == "token_embd.weight"
    return GGMLQuantizationType.Q6_K if sensitive else GGMLQuantizationType.Q4_K


def _n_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    length, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // length * size


def _values(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        # decay per token at a gate of 0: from nearly none to most of the state
        return -np.exp(rng.uniform(np.log(0.03), np.log(3.0), shape)).astype(np.float32)
    std = 1.0 if len(shape) == 1 else 1.0 / math.sqrt(shape[-1])
    if name == "token_embd.weight":
        std *= 2.0
    return random_tensor(rng, shape, std, kind)


def _add_sizes(writer: GGUFWriter, config: ModelConfig) -> None:
    mixers = [mixer for block in config.blocks for mixer in block.mixers]
    attention = next(part for part in mixers if isinstance(part, AttentionPart))
    delta_net = next(part for part in mixers if isinstance(part, DeltaNetPart))
    ffn, rope = config.blocks[0].ffn, config.rope
    assert rope is not None
    assert rope.sections is not None
    writer.add_block_count(len(config.all_blocks))
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    if isinstance(ffn, SwigluPart):
        writer.add_feed_forward_length(ffn.width)
    elif isinstance(ffn, MixturePart):
        writer.add_expert_count(ffn.n_experts)
        writer.add_expert_used_count(ffn.n_used)
        writer.add_expert_feed_forward_length(ffn.n_ff)
        writer.add_expert_shared_feed_forward_length(ffn.n_ff_shared)
    writer.add_head_count(attention.n_head)
    writer.add_head_count_kv(attention.n_head_kv)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(rope.freq_base)
    writer.add_rope_dimension_count(rope.n_rot)
    writer.add_rope_dimension_sections(rope.sections)
    writer.add_nextn_predict_layers(config.n_mtp)
    writer.add_ssm_conv_kernel(delta_net.d_conv)
    writer.add_ssm_state_size(delta_net.d_state)
    writer.add_ssm_group_count(delta_net.n_k_heads)
    writer.add_ssm_time_step_rank(delta_net.n_v_heads)
    writer.add_ssm_inner_size(delta_net.value_dim)
    writer.add_uint32(f"{config.architecture}.full_attention_interval", _INTERVAL)
    recurrent = [*config.recurrent_layers, *[False] * config.n_mtp]
    writer.add_key_value(
        f"{config.architecture}.attention.recurrent_layers",
        recurrent,
        GGUFValueType.ARRAY,
        GGUFValueType.BOOL,
    )


def _add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    tokens, merges = made_up_vocabulary(n_vocab)
    n_control = len(CONTROL_TOKENS)
    kinds = [TokenType.NORMAL] * (n_vocab - n_control) + [TokenType.CONTROL] * n_control
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(_CHAT_TEMPLATE)


def made_up_vocabulary(n: int) -> tuple[list[str], list[str]]:
    """n tokens and the merges that lead to them, "left right", in rank order.

    All single bytes, then aa, ab, … zz, aaa, aab, …, then CONTROL_TOKENS. n > 259.
    """
    tokens = list(BYTE_CHARACTERS)
    merges: list[str] = []
    n_words = n - len(CONTROL_TOKENS)
    words = iter(ascii_lowercase)
    while len(tokens) < n_words:
        longer = [(word, letter) for word in words for letter in ascii_lowercase]
        longer = longer[: n_words - len(tokens)]
        merges += [f"{word} {letter}" for word, letter in longer]
        tokens += [word + letter for word, letter in longer]
        words = iter([word + letter for word, letter in longer])
    return [*tokens, *CONTROL_TOKENS], merges
