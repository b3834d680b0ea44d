"""The shape of a model, read from GGUF metadata and checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.limits import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_TAPS,
    REMEDY,
    count,
    real,
    uniform,
)
from engine.model.rope import RopeConfig

HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
ARCHITECTURES = (*HYBRIDS, "qwen3")
_MOE = ("qwen35moe", "qwen3next")


@dataclass(frozen=True, slots=True)
class SsmConfig:
    """Gated DeltaNet block: d_state is the key and the value head dimension.

    grouped: value head j reads key head j // (n_v_heads / n_k_heads), else j mod n_k_heads.
    """

    d_conv: int
    d_state: int
    n_k_heads: int
    n_v_heads: int
    grouped: bool

    @property
    def key_dim(self) -> int:
        """Channels of all query heads, equal to those of all key heads."""
        return self.n_k_heads * self.d_state

    @property
    def value_dim(self) -> int:
        """Channels of all value heads."""
        return self.n_v_heads * self.d_state

    @property
    def conv_dim(self) -> int:
        """Channels that pass the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of one layer's recurrent state S [n_v_heads, d_state, d_state]."""
        return self.n_v_heads * self.d_state * self.d_state

    @property
    def window_elements(self) -> int:
        """Elements of one layer's convolution window [d_conv - 1, conv_dim]."""
        return (self.d_conv - 1) * self.conv_dim

    @property
    def log_elements(self) -> int:
        """Elements of one token's replay log in one layer: k, u, g and a column of the window."""
        keys = self.n_k_heads * self.d_state
        return keys + self.value_dim + self.n_v_heads + self.conv_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts with one always-on shared expert; n_ff and n_ff_shared are widths."""

    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one model. n_layer counts the trunk only; MTP blocks follow it.

    recurrent_layers: per trunk layer, True = Gated DeltaNet, False = full attention.
    n_ff: dense feed-forward width, 0 for mixtures of experts. n_ctx_train: trained context.
    """

    architecture: str
    name: str
    n_layer: int
    n_mtp: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int
    head_dim: int
    eps: float
    recurrent_layers: tuple[bool, ...]
    n_ff: int
    rope: RopeConfig
    ssm: SsmConfig | None
    moe: MoeConfig | None

    @property
    def hybrid(self) -> bool:
        """Whether blocks are the hybrids' (gated attention), not plain qwen3."""
        return self.architecture in HYBRIDS

    @property
    def n_recurrent(self) -> int:
        """Recurrent layers in the trunk."""
        return sum(self.recurrent_layers)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Read and check the metadata of `file`; no tensor data is touched.

        Raises UnsupportedModelError for models outside the family or its supported forms,
        ModelFileError for missing, mistyped or impossible values.
        """
        arch = file.architecture
        if arch not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.path.name}: the architecture {arch or '(none)'!r} is not supported.",
                f"Open a model of one of these: {', '.join(ARCHITECTURES)}.",
            )
        blocks = count(file, f"{arch}.block_count", high=MAX_LAYERS)
        n_mtp = _mtp_blocks(file, arch, blocks)
        n_layer = blocks - n_mtp
        _refuse_mtp_only(file, n_layer)
        recurrent = _schedule(file, arch, blocks)
        attention = [i for i, flag in enumerate(recurrent) if not flag]
        n_embd = count(file, f"{arch}.embedding_length")
        n_head, n_head_kv, head_dim = _heads(file, arch, n_embd, blocks, attention)
        dense = arch not in _MOE
        return cls(
            architecture=arch,
            name=file.str_("general.name", "") or file.path.stem,
            n_layer=n_layer,
            n_mtp=n_mtp,
            n_embd=n_embd,
            n_vocab=_vocabulary(file, n_embd),
            n_ctx_train=count(file, f"{arch}.context_length", high=MAX_CONTEXT),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            eps=real(file, f"{arch}.attention.layer_norm_rms_epsilon", high=1.0),
            recurrent_layers=tuple(recurrent[:n_layer]),
            n_ff=uniform(file, f"{arch}.feed_forward_length", blocks, range(blocks))
            if dense
            else 0,
            rope=RopeConfig.from_gguf(file, head_dim),
            ssm=_ssm(file, arch) if any(recurrent[:n_layer]) else None,
            moe=None if dense else _moe(file, arch),
        )


def _mtp_blocks(file: GgufFile, arch: str, blocks: int) -> int:
    key = f"{arch}.nextn_predict_layers"
    n_mtp = count(file, key, 0, low=0)
    if n_mtp > (1 if arch in HYBRIDS else 0):
        raise UnsupportedModelError(
            f"{file.path.name}: {key} is {n_mtp}, and {arch} models run here with at most "
            f"{1 if arch in HYBRIDS else 0} MTP block.",
            "Convert the model with a single MTP block, or without any.",
        )
    if blocks <= n_mtp:
        raise ModelFileError(file.path, f"key {arch}.block_count", "no trunk layer is left", REMEDY)
    return n_mtp


def _refuse_mtp_only(file: GgufFile, n_layer: int) -> None:
    tensors = file.tensors
    if "blk.0.attn_norm.weight" not in tensors and f"blk.{n_layer}.nextn.eh_proj.weight" in tensors:
        raise UnsupportedModelError(
            f"{file.path.name}: the file holds only the MTP block of a model, not its trunk.",
            "Open the complete model; its own MTP block is used from there.",
        )


def _schedule(file: GgufFile, arch: str, blocks: int) -> list[bool]:
    """Per block: recurrent or not. The explicit array beats the interval; MTP blocks attend."""
    if arch not in HYBRIDS:
        return [False] * blocks
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


def _heads(
    file: GgufFile, arch: str, n_embd: int, blocks: int, attention: Sequence[int]
) -> tuple[int, int, int]:
    key = f"{arch}.attention"
    n_head = uniform(file, f"{key}.head_count", blocks, attention, high=MAX_HEADS)
    n_head_kv = uniform(file, f"{key}.head_count_kv", blocks, attention, n_head, high=MAX_HEADS)
    if n_head % n_head_kv:
        what = f"{n_head} heads cannot share {n_head_kv} key-value heads"
        raise ModelFileError(file.path, f"key {key}.head_count_kv", what, REMEDY)
    default = n_embd // n_head or None
    head_dim = count(file, f"{key}.key_length", default, high=MAX_HEAD_DIM)
    if count(file, f"{key}.value_length", head_dim, high=MAX_HEAD_DIM) != head_dim:
        raise UnsupportedModelError(
            f"{file.path.name}: attention keys and values differ in length.",
            "Open a model whose key_length and value_length are equal.",
        )
    return n_head, n_head_kv, head_dim


def _vocabulary(file: GgufFile, n_embd: int) -> int:
    name = "token_embd.weight"
    info = file.tensors.get(name)
    if info is None:
        raise ModelFileError(file.path, f"tensor {name}", "the tensor is missing", REMEDY)
    if len(info.shape) != 2 or info.shape[1] != n_embd:
        what = f"shape {list(info.shape)} does not end in the embedding length {n_embd}"
        raise ModelFileError(file.path, f"tensor {name}", what, REMEDY)
    rows = info.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        what = f"{rows} rows for {len(tokens)} vocabulary entries"
        raise ModelFileError(file.path, f"tensor {name}", what, REMEDY)
    return rows


def _ssm(file: GgufFile, arch: str) -> SsmConfig:
    ssm = SsmConfig(
        d_conv=count(file, f"{arch}.ssm.conv_kernel", low=2, high=MAX_TAPS),
        d_state=count(file, f"{arch}.ssm.state_size", high=MAX_HEAD_DIM),
        n_k_heads=count(file, f"{arch}.ssm.group_count", high=MAX_HEADS),
        n_v_heads=count(file, f"{arch}.ssm.time_step_rank", high=MAX_HEADS),
        grouped=arch == "qwen3next",
    )
    if ssm.n_v_heads % ssm.n_k_heads:
        what = f"{ssm.n_v_heads} value heads are no multiple of {ssm.n_k_heads} key heads"
        raise ModelFileError(file.path, f"key {arch}.ssm.time_step_rank", what, REMEDY)
    inner = count(file, f"{arch}.ssm.inner_size")
    if inner != ssm.value_dim:
        what = f"{inner} is not {ssm.n_v_heads} value heads of {ssm.d_state}"
        raise ModelFileError(file.path, f"key {arch}.ssm.inner_size", what, REMEDY)
    return ssm


def _moe(file: GgufFile, arch: str) -> MoeConfig:
    n_experts = count(file, f"{arch}.expert_count", high=MAX_HEADS)
    return MoeConfig(
        n_experts=n_experts,
        n_used=count(file, f"{arch}.expert_used_count", high=n_experts),
        n_ff=count(file, f"{arch}.expert_feed_forward_length"),
        n_ff_shared=count(file, f"{arch}.expert_shared_feed_forward_length"),
    )
