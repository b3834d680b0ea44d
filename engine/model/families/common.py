"""Metadata keys that families share, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import StringArray
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.limits import (
    INCOMPLETE,
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    REMEDY,
    count,
    each,
    real,
    uniform,
)
from engine.model.parts import BlockParts, FeedForwardPart, MixerPart


class CommonSizes(NamedTuple):
    """Sizes in every file. n_blocks: trunk blocks and the n_mtp MTP blocks after them, of which the
    first is run. has_mtp: whether the file contains that one."""

    n_blocks: int
    n_mtp: int
    has_mtp: bool
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int

    @property
    def n_layer(self) -> int:
        """Blocks of the trunk."""
        return self.n_blocks - self.n_mtp


def common_sizes(file: GgufFile, *, runs_mtp: bool = False) -> CommonSizes:
    """Counts and widths. runs_mtp: whether the family's MTP blocks run here."""
    blocks = count(file, ".block_count", high=MAX_LAYERS)
    n_mtp = _mtp_blocks(file, blocks)
    n_embd = count(file, ".embedding_length")
    return CommonSizes(
        blocks,
        n_mtp,
        runs_mtp and n_mtp > 0 and has_block(file, blocks - n_mtp) and not has_fork_mtp(file),
        file.str_("general.name", "") or file.path.stem,
        n_embd,
        _vocabulary(file, n_embd),
        count(file, ".context_length", high=MAX_CONTEXT),
    )


def model_config(
    file: GgufFile,
    sizes: CommonSizes,
    *,
    blocks: tuple[BlockParts, ...],
    eps: float | None = None,
    **others: Any,
) -> ModelConfig:
    """A configuration of these sizes. blocks: of the trunk, and perhaps of what follows it. eps:
    of the file if None. others: fields of ModelConfig."""
    first = sizes.n_layer + sizes.has_mtp
    unused = [i for i in range(first, sizes.n_blocks) if has_block(file, i)]
    return ModelConfig(
        architecture=file.architecture,
        name=sizes.name,
        n_embd=sizes.n_embd,
        n_vocab=sizes.n_vocab,
        n_ctx_train=sizes.n_ctx_train,
        eps=rms_eps(file) if eps is None else eps,
        blocks=blocks[: sizes.n_layer],
        n_unused_mtp=max(unused, default=first - 1) + 1 - first,
        **others,
    )


def has_fork_mtp(file: GgufFile) -> bool:
    """Whether the MTP block has a fork's tensor names, with separate matrices for embedding and
    hidden row."""
    return any(name.endswith(".nextn.fc_hidden.weight") for name in file.tensors)


def hold_to_own_head(file: GgufFile) -> None:
    """Raise UnsupportedModelError for a trunk without an output matrix, if the embedding cannot be
    used instead."""
    if "output.weight" not in file.tensors and not is_mtp_file(file):
        raise UnsupportedModelError(
            f"{file.path.name}: {file.architecture} models have an output matrix of their own, and "
            "output.weight is missing.",
            INCOMPLETE,
        )


def is_mtp_file(file: GgufFile) -> bool:
    """Whether a file holds the MTP block of a model without its trunk, as the converter's --mtp
    writes it (llama.cpp's convert_hf_to_gguf.py)."""
    blocks, n_mtp = (file.int_(f".{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    has_head = f"blk.{blocks - n_mtp}.nextn.eh_proj.weight" in file.tensors
    return blocks > n_mtp and has_head and not has_block(file, 0)


def has_block(file: GgufFile, index: int) -> bool:
    """Whether a file has tensors of a block."""
    return any(name.startswith(f"blk.{index}.") for name in file.tensors)


def rms_eps(file: GgufFile) -> float:
    """Epsilon of RMS norms, added to the mean square."""
    return real(file, ".attention.layer_norm_rms_epsilon", high=1.0)


def heads(
    file: GgufFile, n_embd: int, blocks: int, attention: Sequence[int]
) -> tuple[int, int, int]:
    """Query heads, key-value heads and their dimension. attention: indices of attention blocks."""
    n_head = uniform(file, ".attention.head_count", blocks, attention, high=MAX_HEADS)
    n_head_kv = uniform(file, ".attention.head_count_kv", blocks, attention, n_head, high=MAX_HEADS)
    if n_head % n_head_kv:
        what = f"{n_head} heads cannot share {n_head_kv} key-value heads"
        raise file.wrong(".attention.head_count_kv", what)
    default = n_embd // n_head or None
    head_dim = count(file, ".attention.key_length", default, high=MAX_HEAD_DIM)
    if count(file, ".attention.value_length", head_dim, high=MAX_HEAD_DIM) != head_dim:
        raise UnsupportedModelError(
            f"{file.path.name}: attention keys and values differ in length.",
            "Open a model whose key_length and value_length are equal.",
        )
    return n_head, n_head_kv, head_dim


def attending_layers(file: GgufFile, blocks: int) -> list[int]:
    """Attention blocks: those with key-value heads."""
    return [
        i for i, n in enumerate(each(file, ".attention.head_count_kv", blocks, high=MAX_HEADS)) if n
    ]


def mixed_blocks(
    attention: MixerPart | None,
    other: MixerPart,
    attending: Sequence[int],
    ffns: Sequence[FeedForwardPart | None],
    **more: Any,
) -> tuple[BlockParts, ...]:
    """One block per feed-forward part: some with attention, the rest with another mixer. more:
    fields of BlockParts."""
    return tuple(
        BlockParts(
            (attention if attention and i in attending else other,),
            ffn,
            ffn_norm="ffn_norm.weight",
            **more,
        )
        for i, ffn in enumerate(ffns)
    )


def _mtp_blocks(file: GgufFile, blocks: int) -> int:
    n_mtp = count(file, ".nextn_predict_layers", 0, low=0)
    if blocks <= n_mtp:
        raise file.wrong(".block_count", "no trunk layer is left")
    return n_mtp


def _vocabulary(file: GgufFile, n_embd: int) -> int:
    """Rows of the embedding; an MTP file may lack it, and have a head or a token list instead."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    tables = ("token_embd.weight", "output.weight")
    name = next((name for name in tables if name in file.tensors), None)
    if name is None:
        if isinstance(tokens, (list, StringArray)) and is_mtp_file(file):
            return len(tokens)
        raise ModelFileError(file.path, f"tensor {tables[0]}", "the tensor is missing", REMEDY)
    info = file.tensors[name]
    if len(info.shape) != 2 or info.shape[1] != n_embd:
        what = f"shape {list(info.shape)} does not end in the embedding length {n_embd}"
        raise ModelFileError(file.path, f"tensor {name}", what, REMEDY)
    rows = info.shape[0]
    if isinstance(tokens, (list, StringArray)) and len(tokens) != rows:
        what = f"{rows} rows for {len(tokens)} vocabulary entries"
        raise ModelFileError(file.path, f"tensor {name}", what, REMEDY)
    return rows


def read_taps(file: GgufFile, key: str, most: int) -> tuple[int, ...]:
    """Layers of a target, 1..most of them; the target itself is not known yet. Raises
    ModelFileError."""
    layers = file.ints(key)
    if not 1 <= len(layers) <= most or not all(0 <= i <= MAX_LAYERS for i in layers):
        raise file.wrong(key, f"{layers[:8]} are not {most} layers of a target")
    return tuple(layers)
