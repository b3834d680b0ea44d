"""What a file of random weights says of itself, and the config that a reader makes of that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from engine.gguf.directory import TensorInfo
from engine.gguf.file import GgufFile
from engine.gguf.metadata import TypedMetadata
from engine.gguf.tensor_types import tensor_type
from engine.model.config import ModelConfig
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
    """keys: metadata, those of the architecture without it in front; arrays are numpy's. shapes:
    of the tensors that readers look for by name, the others follow from the config."""

    arch: str
    keys: Keys
    shapes: Shapes

    def described(self) -> GgufFile:
        """The file as a reader sees it, without what is in its tensors."""
        return _Described(self)

    def config(self) -> ModelConfig:
        """Of a model; its name is empty."""
        return read_config(self.described())

    def full_keys(self) -> Keys:
        """The keys as they are in the file."""
        return {
            key if key.startswith("tokenizer.") else f"{self.arch}.{key}": value
            for key, value in self.keys.items()
        }

    def add_keys(self, writer: GGUFWriter) -> None:
        """Write them."""
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        for key, value in self.full_keys().items():
            if isinstance(value, np.ndarray):
                kind = _ELEMENTS[value.dtype.name]
                writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kind)
            else:
                add[type(value)](key, value)


class _Described(GgufFile):
    """Metadata and directory of a file that is not there."""

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
    """A model. tied: its output matrix is the embedding. also: names of tensors that say what its
    blocks are."""
    n_embd = keys["embedding_length"]
    tables = ("token_embd.weight",) if tied else ("token_embd.weight", "output.weight")
    norms = (f"blk.{i}.attn_norm.weight" for i in range(keys["block_count"]))
    shapes: Shapes = dict.fromkeys(tables, (n_vocab, n_embd))
    return RandomFile(arch, keys, shapes | dict.fromkeys((*norms, *also), (n_embd,)))


def sizes(n_blocks: int, n_embd: int, eps: float = 1e-6) -> Keys:
    """What every file says. n_blocks: with those of MTP."""
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
    """Heads of attention and their rotation. n_head_kv: of all blocks, or of each."""
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
    """A recurrence with a convolution before it. rank: of its time steps, or its heads."""
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
    """An array of a file: int32 [n]."""
    return np.array(list(values), np.int32)
