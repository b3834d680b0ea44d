"""Models of real size with random weights, to measure speed where no weights are at hand.

Their tokens mean nothing. Matrices have standard deviation 1 / sqrt(columns), which keeps every
activation near 1, and the tied embedding twice that, which gives logits of about 2.
"""

from __future__ import annotations

import math
from pathlib import Path
from string import ascii_lowercase
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.utility import model_weight_count_rounded_notation

from engine.bench.quant_mixes import QUANTS, file_type, tensor_type
from engine.bench.random_blocks import random_tensor
from engine.bench.random_sizes import CONFIGS, INTERVAL
from engine.errors import OptionError
from engine.files import written_whole
from engine.gguf.pretokenise import BYTE_CHARACTERS
from engine.gguf.tokenizer import TokenType
from engine.model.config import ModelConfig
from engine.model.parts import Shapes
from engine.model.parts.attention import AttentionPart
from engine.model.parts.delta_net import DeltaNetPart
from engine.model.parts.feed_forward import MixturePart, SwigluPart
from engine.model.tensors import block_shapes, global_shapes

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last tokens of every vocabulary."""
_PIECE = 1 << 24
"""Values that are made at a time."""
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_SIZES = tuple(CONFIGS)
"""Sizes that can be written; all have an MTP head and attention in every fourth layer."""


def write_random_model(path: Path, *, size: str = "0.65b", quant: str = "q8_0") -> None:
    """Write a GGUF file, the same one every time; memory holds a piece of a tensor.

    size: one of MODEL_SIZES. quant: one of QUANTS. Raises OptionError for others and where the file
    cannot be written; there is never half a file.
    """
    for value, choices, what in ((size, MODEL_SIZES, "size"), (quant, QUANTS, "quantisation")):
        if value not in choices:
            raise OptionError(
                f"The {what} {value!r} is unknown.", f"Choose from {', '.join(choices)}."
            )
    config = CONFIGS[size]
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
        writer.add_file_type(file_type(quant))
        writer.add_quantization_version(2)
        _add_sizes(writer, config)
        _add_vocabulary(writer, config.n_vocab)
        kinds = {name: tensor_type(name, shape, config, quant) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            kind = kinds[name]
            n_bytes = _n_bytes(shape, kind)
            writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(0)
        for name, shape in shapes.items():
            pieces = _Pieces(rng, name, shape, kinds[name])
            writer.write_tensor_data(pieces)  # type: ignore[arg-type]
    finally:
        writer.close()


def _shapes(config: ModelConfig) -> Shapes:
    head_norm = f"blk.{config.n_layer}.nextn.shared_head_norm.weight"
    shapes = global_shapes(config, ())
    for index in range(config.n_layer + config.n_mtp):
        shapes |= block_shapes(config, index, (head_norm,))
    return shapes


def _n_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    length, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // length * size


class _Pieces:
    """A tensor that is made while it is written; what GGUFWriter asks of an array.

    name: says which values it has. shape: numpy order.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        name: str,
        shape: tuple[int, ...],
        kind: GGMLQuantizationType,
    ) -> None:
        self._rng, self._name, self._shape, self._kind = rng, name, shape, kind
        self.nbytes = _n_bytes(shape, kind)

    def tofile(self, file: BinaryIO) -> None:
        """Write one piece of the rows after the other."""
        if len(self._shape) == 1:
            file.write(_vector(self._rng, self._name, self._shape).tobytes())
            return
        n_in = self._shape[-1]
        n_rows = math.prod(self._shape[:-1])
        std = 1.0 / math.sqrt(n_in)
        if self._name == "token_embd.weight":
            std *= 2.0
        step = max(1, _PIECE // n_in)
        for start in range(0, n_rows, step):
            rows = min(step, n_rows - start), n_in
            file.write(random_tensor(self._rng, rows, std, self._kind).tobytes())


def _vector(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        # decay per token at a gate of 0: from nearly none to most of the state
        return -np.exp(rng.uniform(np.log(0.03), np.log(3.0), shape)).astype(np.float32)
    return rng.standard_normal(shape, dtype=np.float32)


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
    writer.add_uint32(f"{config.architecture}.full_attention_interval", INTERVAL)
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
