"""Models of real size with random weights, for speed measurements.

Their tokens are meaningless. Matrices have standard deviation 1 / sqrt(columns), which keeps
activations near 1, and the tied embedding twice that, which gives logits of about 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from contextlib import closing
from pathlib import Path
from string import ascii_lowercase
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.utility import model_weight_count_rounded_notation

from engine.errors import OptionError
from engine.experiments.random_models.quant_mixes import (
    QUANTS,
    file_type,
    is_norm,
    n_experts,
    random_tensor,
    tensor_type,
)
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_file import (
    CONTROL_TOKENS,
    RANDOM_DRAFTERS,
    RandomFile,
    drafter_shapes,
)
from engine.files import written_whole
from engine.gguf.pretokenise import BYTE_CHARACTERS
from engine.gguf.tokenizer import TokenType
from engine.model.config import ModelConfig
from engine.model.parts import Shapes
from engine.model.tensors import block_shapes, global_shapes

_CANNOT_LACK = tuple(
    f"ssm_{one}" for one in ("conv1d.bias", "dt_norm.weight", "b_norm.weight", "c_norm.weight")
)
_ALSO = {"plamo2": ("attn_qkv.weight",)}
"""Tensors that llama.cpp requires, and those of an architecture."""
_PIECE = 1 << 24
"""Values generated at a time."""
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_random_model(
    path: Path, *, arch: str = "qwen35", size: str | None = None, quant: str = "q8_0"
) -> None:
    """Write a GGUF file, reproducibly; only a piece of a tensor is in memory at a time.

    arch: one of RANDOM_FAMILIES. size: one of its sizes, None for the first. quant: one of QUANTS.
    Raises OptionError for others and if the file cannot be written; never leaves a partial file.
    """
    size, file = _chosen(arch, size, quant)
    config = file.config()
    _write(path, file, config, f"Random {size} {quant}", quant, _shapes(config, file.shapes))


def write_random_drafter(
    path: Path, *, drafter: str, arch: str = "qwen35", size: str | None = None, quant: str = "q8_0"
) -> None:
    """Write a drafter for the model that `write_random_model` writes with this architecture and
    size; it uses that model's embedding and head.

    drafter: one of RANDOM_DRAFTERS. Raises as `write_random_model`.
    """
    _choose("drafter", drafter, RANDOM_DRAFTERS)
    size, target = _chosen(arch, size, quant)
    file, config = RANDOM_DRAFTERS[drafter](target), target.config()
    name, shapes = f"Random {drafter} for {size} {quant}", drafter_shapes(file, config.n_vocab)
    _write(path, file, config, name, quant, shapes)


def _chosen(arch: str, size: str | None, quant: str) -> tuple[str, RandomFile]:
    """The name of the size, and the model's file."""
    _choose("architecture", arch, RANDOM_FAMILIES)
    sizes = RANDOM_FAMILIES[arch]
    size = size or next(iter(sizes))
    _choose("size", size, sizes)
    _choose("quantisation", quant, QUANTS)
    return size, sizes[size]


def _choose(what: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise OptionError(f"The {what} {value!r} is unknown.", f"Choose from {', '.join(choices)}.")


def _write(
    path: Path, file: RandomFile, config: ModelConfig, name: str, quant: str, shapes: Shapes
) -> None:
    """config: of the model, or of the target of a drafter."""
    n_params, tied = sum(map(math.prod, shapes.values())), "output.weight" not in file.shapes
    kinds = {
        name: tensor_type(name, shape, config, quant, tied=tied) for name, shape in shapes.items()
    }
    rng = np.random.default_rng(0)
    with written_whole(path) as part, closing(GGUFWriter(part, file.arch)) as writer:
        file.add_keys(writer)
        writer.add_type("model")
        writer.add_name(name)
        writer.add_size_label(model_weight_count_rounded_notation(n_params))
        writer.add_file_type(file_type(quant))
        writer.add_quantization_version(2)
        _add_vocabulary(writer, config.n_vocab)
        for name, shape in shapes.items():
            kind = kinds[name]
            writer.add_tensor_info(name, shape, np.dtype(np.float32), _n_bytes(shape, kind), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape in shapes.items():
            pieces = _Pieces(rng, name, shape, kinds[name], n_experts(config))
            writer.write_tensor_data(pieces)  # type: ignore[arg-type]


def _shapes(config: ModelConfig, present: Container[str]) -> Shapes:
    """Shapes of all tensors. An MTP block has a norm of its own, Mamba the tensors that llama.cpp
    requires. present: optional tensors of the file."""
    shapes = global_shapes(config, present)
    for index in range(config.n_layer + config.n_mtp):
        norm = config.mtp.output_norm if config.mtp else ""
        names = (*_CANNOT_LACK, *_ALSO.get(config.architecture, ()))
        of_block = f"blk.{config.n_layer}.{norm}", *(f"blk.{index}.{name}" for name in names)
        shapes |= block_shapes(config, index, of_block)
    return shapes


def _n_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    length, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // length * size


class _Pieces:
    """A tensor generated while it is written, with the array attributes that GGUFWriter reads.

    name: determines its values. shape: numpy order. n_experts: of the model.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        name: str,
        shape: tuple[int, ...],
        kind: GGMLQuantizationType,
        n_experts: int,
    ) -> None:
        self._rng, self._name, self._shape, self._kind = rng, name, shape, kind
        self._n_experts = n_experts
        self.nbytes = _n_bytes(shape, kind)

    def tofile(self, file: BinaryIO) -> None:
        """Write one piece of the rows after the other."""
        if self._kind is GGMLQuantizationType.I32:
            # adjacent experts from a random start: different for each token
            first = self._rng.integers(self._n_experts, size=(self._shape[0], 1))
            ids = (first + np.arange(self._shape[1])) % self._n_experts
            file.write(ids.astype("<i4").tobytes())
            return
        if len(self._shape) == 1 or not self._name.endswith(".weight") or is_norm(self._name):
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
    if is_norm(name):
        return np.ones(shape, np.float32)
    if name.endswith("exp_probs_b.bias"):
        # small compared with scores between 0 and 1
        return rng.standard_normal(shape, dtype=np.float32) / 50
    if name.endswith("ssm_a"):
        # decay per token at a gate of 0: from almost none to most of the state
        return -np.exp(rng.uniform(np.log(0.03), np.log(3.0), shape)).astype(np.float32)
    return rng.standard_normal(shape, dtype=np.float32)


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
