"""Demo models to GGUF (Q8_0 matrices, F32 for the rest) and back into the trainable form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from tests.demo_training.model import EPS, THETA, DemoModel
from tests.demo_training.tokenizer import EOT, SPECIALS, entries, merges

DESCRIPTION = "tiny demonstration model: Python sources, generated stories and functions"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def tensors(model: DemoModel) -> dict[str, np.ndarray]:
    """GGUF name -> float32 array in numpy order."""
    result = {}
    for name, value in model.state_dict().items():
        array = value.detach().numpy().astype(np.float32)
        if name.endswith("log_decay"):
            name, array = name.replace("log_decay", "ssm_a"), -np.exp(array)
        result[name] = array
    return result


def load(model: DemoModel, path: Path) -> None:
    """Give `model` the weights of the file at `path`, of the same shape, as Q8_0 keeps them."""
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = str(tensor.name)
        if name.endswith("ssm_a"):
            name, value = name.replace("ssm_a", "log_decay"), torch.log(-value)
        state[name] = value
    model.load_state_dict(state)


def _is_quantised(name: str, array: np.ndarray) -> bool:
    return array.ndim == 2 and "conv1d" not in name


def save(model: DemoModel, tokenizer: Tokenizer, path: Path) -> None:
    """Write `model` with its tokenizer to `path`."""
    c = model.c
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name(c.name)
    writer.add_description(DESCRIPTION)
    writer.add_block_count(c.n_layer + c.n_mtp)
    writer.add_context_length(c.n_ctx)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(c.n_ff)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(c.n_rot)
    # three streams share the n_rot / 2 pairs; text has one position, so the split is a formality
    pairs = c.n_rot // 2
    writer.add_rope_dimension_sections([-(-pairs // 3), -(-(pairs - 1) // 3), pairs // 3, 0])
    writer.add_ssm_conv_kernel(c.d_conv)
    writer.add_ssm_state_size(c.d_state)
    writer.add_ssm_group_count(c.n_k_heads)
    writer.add_ssm_time_step_rank(c.n_v_heads)
    writer.add_ssm_inner_size(c.n_v_heads * c.d_state)
    writer.add_uint32("qwen35.full_attention_interval", c.interval)
    if c.n_mtp:
        writer.add_uint32("qwen35.nextn_predict_layers", c.n_mtp)
    writer.add_array("qwen35.attention.recurrent_layers", list(c.recurrent))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(entries(tokenizer))
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([normal] * EOT + [control] * len(SPECIALS))
    writer.add_token_merges(merges(tokenizer))
    writer.add_eos_token_id(EOT)
    writer.add_pad_token_id(EOT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    write_tensors(writer, tensors(model))


def write_tensors(writer: gguf.GGUFWriter, arrays: Mapping[str, np.ndarray]) -> None:
    """Write everything: matrices as Q8_0, the rest as F32, by name."""
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, array in sorted(arrays.items()):
        if _is_quantised(name, array):
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
