"""Metadata of a random file, the configuration that a reader makes of it, and drafters for such
models.

Drafters have neither embedding nor head; they use the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from engine.gguf.directory import TensorInfo, tensor_type
from engine.gguf.file import GgufFile
from engine.gguf.metadata import TypedMetadata
from engine.model.config import ModelConfig
from engine.model.drafters.config import ARCHITECTURE as EAGLE3
from engine.model.drafters.config import read_eagle3
from engine.model.drafters.dflash_config import ARCHITECTURE as DFLASH
from engine.model.drafters.dflash_config import MARKOV, SELECTOR, read_dflash
from engine.model.families import read_config
from engine.model.parts import Shapes

Keys = dict[str, Any]
N_CTX = 4096
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last tokens of every vocabulary."""
_ELEMENTS = {
    "int32": GGUFValueType.INT32,
    "uint64": GGUFValueType.UINT64,
    "float32": GGUFValueType.FLOAT32,
    "bool": GGUFValueType.BOOL,
}


@dataclass(frozen=True, slots=True)
class RandomFile:
    """keys: metadata, those of the architecture without its prefix; arrays are numpy's. shapes: of
    tensors that readers look up by name; the others follow from the configuration."""

    arch: str
    keys: Keys
    shapes: Shapes

    def described(self) -> GgufFile:
        """The file as a reader sees it, without tensor data."""
        return _Described(self)

    def config(self) -> ModelConfig:
        """The model's configuration; its name is empty."""
        return read_config(self.described())

    def full_keys(self) -> Keys:
        """The keys as they are in the file."""
        return {
            key if key.startswith("tokenizer.") else f"{self.arch}.{key}": value
            for key, value in self.keys.items()
        }

    def add_keys(self, writer: GGUFWriter) -> None:
        """Write the keys."""
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        for key, value in self.full_keys().items():
            if isinstance(value, np.ndarray):
                kind = _ELEMENTS[value.dtype.name]
                writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kind)
            else:
                add[type(value)](key, value)


class _Described(GgufFile):
    """Metadata and directory of a file that does not exist."""

    def __init__(self, file: RandomFile) -> None:
        keys = {"general.architecture": file.arch, **file.full_keys()}
        TypedMetadata.__init__(self, Path(), keys)
        self.tensors = {
            name: TensorInfo(name, shape, tensor_type(0), math.prod(shape), 0, 0, 0)
            for name, shape in file.shapes.items()
        }


def model_file(
    arch: str, n_vocab: int, keys: Keys, *, tied: bool = True, also: Iterable[str] = ()
) -> RandomFile:
    """A model. tied: its output matrix is the embedding. also: names of tensors that determine its
    blocks."""
    n_embd = keys["embedding_length"]
    tables = ("token_embd.weight",) if tied else ("token_embd.weight", "output.weight")
    norms = (f"blk.{i}.attn_norm.weight" for i in range(keys["block_count"]))
    shapes: Shapes = dict.fromkeys(tables, (n_vocab, n_embd))
    return RandomFile(arch, keys, shapes | dict.fromkeys((*norms, *also), (n_embd,)))


def sizes(n_blocks: int, n_embd: int, eps: float = 1e-6) -> Keys:
    """Keys of every file. n_blocks: including MTP."""
    return {
        "block_count": n_blocks,
        "context_length": N_CTX,
        "embedding_length": n_embd,
        "attention.layer_norm_rms_epsilon": eps,
    }


def heads(
    n_head: int,
    n_head_kv: int | Sequence[int],
    width: int,
    n_rot: int,
    theta: float = 1e4,
    value_width: int | None = None,
) -> Keys:
    """Attention heads and rotation. n_head_kv: for all blocks, or per block."""
    return {
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv if isinstance(n_head_kv, int) else ints(n_head_kv),
        "attention.key_length": width,
        "attention.value_length": value_width or width,
        "rope.freq_base": theta,
        "rope.dimension_count": n_rot,
    }


def experts(n: int, n_used: int, width: int) -> Keys:
    """Routed experts of one width."""
    return {"expert_count": n, "expert_used_count": n_used, "expert_feed_forward_length": width}


def ssm(d_conv: int, inner: int, d_state: int, rank: int, n_groups: int | None = None) -> Keys:
    """A recurrence with a preceding convolution. rank: of its time steps, or its heads."""
    groups = {} if n_groups is None else {"ssm.group_count": n_groups}
    return groups | {
        "ssm.conv_kernel": d_conv,
        "ssm.inner_size": inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": rank,
    }


def streams(n_blocks: int) -> Keys:
    """Four streams, and gates with limits."""
    limits = np.full(n_blocks, 7.0, np.float32)
    return {
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
    }


def ints(values: Iterable[int]) -> np.ndarray:
    """An array as files have it: int32 [n]."""
    return np.array(list(values), np.int32)


_N_TAPS = 5
_MASK = "tokenizer.ggml.mask_token_id"
_N_STREAM_LAYERS = 3
_LARGE = 1024
"""Minimum width of a large target; smaller ones are for tests."""
_OF_MODELS = (
    "attention.compress_rope",
    "attention.indexer",
    "embedding_length_out",
    "hash_layer_count",
    "nextn_predict_layers",
    "vocab_size",
)
"""Keys of a deepseek4 model that its drafter's layers do not use."""


def _eagle3(target: RandomFile) -> RandomFile:
    """An EAGLE-3 drafter as wide as the target."""
    config = target.config()
    n_embd, middle = config.n_embd, config.n_layer // 2
    keys = {
        **_layers(config, 1),
        "target_layers": ints((min(2, middle), middle, max(middle, config.n_layer - 3))),
        "target_hidden_size": n_embd,
    }
    return RandomFile(EAGLE3, keys, {})


def _layers(config: ModelConfig, n_layer: int) -> Keys:
    """Plain layers for a target; the mask is a control token."""
    width = 128 if config.n_embd >= _LARGE else 64
    n_head = config.n_embd // width
    return {
        **sizes(n_layer, config.n_embd),
        "feed_forward_length": 3 * config.n_embd,
        **heads(n_head, max(1, n_head // 4), width, width, 1e7),
        _MASK: config.n_vocab - len(CONTROL_TOKENS),
    }


def _block(target: RandomFile, size: int, own: Keys, also: Shapes) -> RandomFile:
    """A drafter with blocks of this size. own: further keys. also: shapes of tensors that determine
    its kind."""
    config = target.config()
    n_layer, last = 5 if config.n_embd >= _LARGE else 2, config.n_layer - 1
    keys = {
        **_layers(config, n_layer),
        "target_layers": ints(
            sorted({1 + i * (last - 1) // (_N_TAPS - 1) for i in range(_N_TAPS)})
        ),
        "block_size": size,
        **own,
    }
    shape = keys["attention.head_count_kv"] * keys["attention.key_length"], config.n_embd
    values: Shapes = {f"blk.{i}.attn_v.weight": shape for i in range(n_layer)}
    return RandomFile(DFLASH, keys, values | also)


def _dflash2(target: RandomFile) -> RandomFile:
    """A drafter with two convolution taps and 16 candidates."""
    n_embd, rank = target.keys["embedding_length"], _rank(target)
    own = {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": rank,
        "selector_top_k": 16,
    }
    return _block(target, 8, own, {SELECTOR: (rank, n_embd)})


def _dspark(target: RandomFile) -> RandomFile:
    """A drafter whose block rows all draft; for deepseek4 in three layers of its own kind."""
    own = {"sample_from_anchor": True, "has_confidence_head": True}
    also: Shapes = {MARKOV: (target.config().n_vocab, _rank(target)), "conf_proj.bias": (1,)}
    plain = _block(target, 7, own, also)
    if target.arch != "deepseek4":
        return plain
    layers = {k: v for k, v in target.keys.items() if not k.startswith(_OF_MODELS)}
    layers |= {
        "block_count": _N_STREAM_LAYERS,
        "attention.compress_ratios": ints([0] * _N_STREAM_LAYERS),
        **streams(_N_STREAM_LAYERS),
    }
    of_block = {name: plain.keys[name] for name in (_MASK, "target_layers", "block_size", *own)}
    return RandomFile(DFLASH, layers | of_block, also)


def _rank(target: RandomFile) -> int:
    return 256 if target.keys["embedding_length"] >= _LARGE else 32


def drafter_shapes(drafter: RandomFile, n_vocab: int) -> Shapes:
    """Shapes of all tensors of a drafter. n_vocab: of the target."""
    file = drafter.described()
    config = read_eagle3(file) if drafter.arch == EAGLE3 else read_dflash(file)
    return config.shapes((), n_vocab, n_vocab) | drafter.shapes


RANDOM_DRAFTERS: Mapping[str, Callable[[RandomFile], RandomFile]] = {
    "eagle3": _eagle3,
    "dflash": lambda target: _block(target, 16, {}, {}),
    "dflash2": _dflash2,
    "dspark": _dspark,
}
"""By name of the kind."""
