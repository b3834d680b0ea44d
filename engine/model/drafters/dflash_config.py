"""The sizes of a drafter of the DFlash family, read and checked before anything is allocated.

One architecture, `dflash`, holds three drafters: DFlash itself, DFlash2 (a convolution in the block
and a selector of candidates) and DSpark (a Markov head after the block), whose layers may be those
of DeepSeek-V4.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import ClassVar

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import heads, read_taps, rms_eps
from engine.model.families.deepseek4 import read_mixtures, read_sinkhorn, read_window_attention
from engine.model.limits import MAX_CONTEXT, MAX_LAYERS, MAX_TAPS, MAX_WIDTH, REMEDY, count, real
from engine.model.parts import BlockParts, CellSize, Shapes, only_present
from engine.model.rope import ROPE_FACTORS, RopeConfig
from engine.model.tensors import block_shapes

ARCHITECTURE = "dflash"
SELECTOR, MARKOV, CONFIDENCE = "selector_hidden.weight", "markov_w1.weight", "conf_proj.weight"
POST_NORMS = "post_attention_norm.weight", "post_ffw_norm.weight"
OUT_SCALE = "layer_output_scale.weight"
"""Set in blocks with Gemma's layout: output norms, and a factor of each block's output."""
LILICORR = "lilicorr."
_GELU = "gelu", "gelu_pytorch_tanh"
MAX_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes of one drafter.

    taps: target layers whose inputs are read, in order. windows: per layer, how many tokens back it
    attends; None for all. causal: block rows do not attend to later ones. scale: of query-key
    products. anchor: row 0 of a block drafts too, and every row predicts the token after its own.
    conv, selector: of DFlash2; the latter: rank of the neighbour score, candidates per row, and
    scale and bound of the logits, 0 for none. markov: rank of DSpark's head, 0 without one.
    gelu: replaces SiLU in the feed-forward part.
    streams: DeepSeek-V4 layers without blocks of tokens, replacing those that the other sizes
    describe.
    """

    name: str
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    eps: float
    rope: RopeConfig
    taps: tuple[int, ...]
    n_ctx_train: int
    block_size: int
    mask_token: int
    causal: bool
    windows: tuple[int | None, ...]
    scale: float
    value_scale: float
    embedding_scale: float
    anchor: bool
    markov: int
    confident: bool
    conv: tuple[int, int] | None
    selector: tuple[int, int, float, float] | None
    gelu: bool = False
    streams: ModelConfig | None = None

    reads_behind_norm: ClassVar[bool] = False
    """Tap n_layer is only available as the mean of several streams."""
    unused: ClassVar[tuple[str, ...]] = (LILICORR,)
    """LiLiCorr (arXiv 2608.20530) reselects among the candidates of a block; without it the block
    drafts its own choice."""
    n_kept: ClassVar[int] = 0
    """Elements kept per token in addition to its cells."""
    ties_head: ClassVar[bool] = True
    """Uses its embedding as head, if it has no head of its own."""

    @property
    def drafter(self) -> str:
        """Name of the drafter that uses it (engine.draft.registry)."""
        return "draft-dspark" if self.markov else "draft-dflash"

    @property
    def n_target(self) -> int:
        """Width of the target's rows, which is the drafter's own."""
        return self.n_embd

    @property
    def n_layer(self) -> int:
        """Blocks of the drafter."""
        return len(self.windows)

    @property
    def longest(self) -> int:
        """Most tokens that a block drafts."""
        return self.block_size if self.anchor else self.block_size - 1

    def block_length(self, n_max: int) -> int:
        """Rows of a block that drafts n_max tokens."""
        return n_max if self.anchor else n_max + 1

    def cells(self) -> dict[int, CellSize]:
        """Cell size of each layer."""
        if self.streams:
            return dict(self.streams.cells())
        d = self.head_dim
        sizes = (CellSize(self.n_heads_kv, d, d, window) for window in self.windows)
        return dict(enumerate(sizes))

    def shapes(self, present: Container[str], n_vocab: int, n_drafted: int) -> Shapes:
        """All tensors under their full names, in the file's variant, except d2t. n_vocab: ids of
        the target. n_drafted: ids that can be drafted."""
        d, r = self.n_embd, self.markov
        shapes: Shapes = {
            "fc.weight": (d, len(self.taps) * d),
            "enc.output_norm.weight": (d,),
            "output_norm.weight": (d,),
        }
        if self.streams:
            shapes |= self.streams.trunk.shapes(d, present)
        for layer in range(self.n_layer):
            if self.streams:
                shapes |= block_shapes(self.streams, layer, present)
                continue
            prefix = f"blk.{layer}."
            inside = {prefix + name: shape for name, shape in self._of_block().items()}
            shapes |= inside | only_present(self._optional_of_block(prefix), present)
        optional: Shapes = {
            "token_embd.weight": (n_vocab, d),
            "output.weight": (n_drafted, d),
            ROPE_FACTORS: (self.head_dim // 2,),
        }
        shapes |= only_present(optional, present)
        if self.selector:
            rank = self.selector[0]
            shapes["selector_predecessor.weight"] = (n_vocab, rank)
            shapes["selector_successor.weight"] = (n_vocab, rank)
            shapes[SELECTOR] = (rank, d)
        if r:
            shapes |= {MARKOV: (n_vocab, r), "markov_w2.weight": (n_drafted, r)}
        if self.confident:
            shapes |= {CONFIDENCE: (1, d + r)}
            shapes |= only_present({"conf_proj.bias": (1,)}, present)
        return shapes

    def _optional_of_block(self, prefix: str) -> Shapes:
        n_kv = self.n_heads_kv * self.head_dim
        return {
            f"{prefix}attn_v.weight": (n_kv, self.n_embd),
            f"{prefix}attn_sinks.weight": (self.n_heads,),
            **{prefix + name: (self.n_embd,) for name in POST_NORMS},
            prefix + OUT_SCALE: (1,),
        }

    def _of_block(self) -> Shapes:
        d, n_q, n_kv = self.n_embd, self.n_heads * self.head_dim, self.n_heads_kv * self.head_dim
        shapes: Shapes = {
            "attn_norm.weight": (d,),
            "attn_q.weight": (n_q, d),
            "attn_k.weight": (n_kv, d),
            "attn_q_norm.weight": (self.head_dim,),
            "attn_k_norm.weight": (self.head_dim,),
            "attn_output.weight": (d, n_q),
            "ffn_norm.weight": (d,),
            "ffn_gate.weight": (self.n_ff, d),
            "ffn_up.weight": (self.n_ff, d),
            "ffn_down.weight": (d, self.n_ff),
        }
        if self.conv:
            n_taps, n_groups = self.conv
            for name in ("attn", "ffn"):
                shapes[f"{name}_conv_base"] = (2, n_taps, d)
                shapes[f"{name}_conv_proj.weight"] = (2 * n_taps * n_groups, d)
        return shapes


def _read_streams(file: GgufFile, n_layer: int, n_embd: int) -> ModelConfig | None:
    """The DeepSeek-V4 layers, if the file states a number of streams."""
    arch = ARCHITECTURE
    if not count(file, ".hyper_connection.count", 0, low=0):
        return None
    if any(file.ints(".attention.compress_ratios", [])):
        raise UnsupportedModelError(
            f"{file.path.name}: {arch}.attention.compress_ratios has a ratio, and drafters keep no "
            "blocks of tokens, here and in llama.cpp.",
            "Choose a drafter whose layers use only a window.",
        )
    attention, rope = read_window_attention(file, n_layer, n_embd)
    return ModelConfig(
        architecture=arch,
        name="",
        n_embd=n_embd,
        n_vocab=0,  # no layer routes by token id
        n_ctx_train=count(file, ".context_length", high=MAX_CONTEXT),
        eps=rms_eps(file),
        blocks=tuple(
            BlockParts((attention,), mixture, ffn_norm="ffn_norm.weight")
            for mixture in read_mixtures(file, [False] * n_layer, 0)
        ),
        rope=replace(rope, scaling="none", factor=1.0),
        trunk=read_sinkhorn(file, has_head=True),
    )


def read_dflash(file: GgufFile) -> DFlashConfig:
    """Raises UnsupportedModelError for forms that do not run here, ModelFileError for missing,
    mistyped or impossible values."""
    present = file.tensors
    n_layer = count(file, ".block_count", high=MAX_LAYERS)
    n_embd = count(file, ".embedding_length")
    n_heads, n_heads_kv, head_dim = heads(file, n_embd, n_layer, range(n_layer))
    block_size = count(file, ".block_size", 16, low=2, high=MAX_BLOCK)
    markov = _columns(file, MARKOV) if MARKOV in present else 0
    selector = SELECTOR in present
    if selector and markov:
        raise UnsupportedModelError(
            f"{file.path.name}: a selector and a Markov head in one file are not known.",
            "Choose a DFlash drafter with one of the two.",
        )
    confident = bool(markov) and file.bool_(".has_confidence_head", True)
    streams = _read_streams(file, n_layer, n_embd)
    if streams and selector:
        raise UnsupportedModelError(
            f"{file.path.name}: a selector after layers of several streams is not known.",
            "Choose a DFlash2 drafter without hyper-connections.",
        )
    rope = streams.rope if streams and streams.rope else RopeConfig.from_gguf(file, head_dim)
    if streams or len(file.ints(".rope.dimension_sections", [])):
        rope = replace(rope, factors=())  # sections are those of M-RoPE targets
    return DFlashConfig(
        name=file.str_("general.name", "") or file.path.stem,
        n_embd=n_embd,
        n_ff=0 if streams else count(file, ".feed_forward_length"),
        n_heads=n_heads,
        n_heads_kv=n_heads_kv,
        head_dim=head_dim,
        eps=rms_eps(file),
        rope=rope,
        taps=read_taps(file, ".target_layers", MAX_TAPS),
        n_ctx_train=count(file, ".context_length", high=MAX_CONTEXT),
        block_size=block_size,
        mask_token=count(file, "tokenizer.ggml.mask_token_id", low=0, high=MAX_WIDTH),
        causal=file.bool_(".attention.causal", False),
        windows=(None,) * n_layer if streams else _windows(file, n_layer),
        scale=real(file, ".attention.scale", head_dim**-0.5),
        value_scale=real(file, ".attention.value_scale", 1.0),
        embedding_scale=1.0 if streams else real(file, ".embedding_scale", 1.0),
        anchor=bool(markov) and file.bool_(".sample_from_anchor", True),
        markov=markov,
        confident=confident,
        conv=_conv(file, n_embd) if selector else None,
        selector=_selector(file) if selector else None,
        gelu=_is_gelu(file),
        streams=streams,
    )


def _windows(file: GgufFile, n_layer: int) -> tuple[int | None, ...]:
    key = ".attention.sliding_window"
    if file.get(key) is None:
        return (None,) * n_layer
    window = count(file, key, high=MAX_CONTEXT)
    which = file.ints(f"{key}_pattern", [])
    if len(which) != n_layer:
        raise file.wrong(f"{key}_pattern", f"{len(which)} values for {n_layer} layers")
    return tuple(window if windowed else None for windowed in which)


def _conv(file: GgufFile, n_embd: int) -> tuple[int, int]:
    """Block rows covered, and number of channel groups, each of which shares a weight."""
    key = ".conv_group_size"
    group = count(file, key, high=n_embd)
    if n_embd % group:
        raise file.wrong(key, f"{group} channels of {n_embd} are no whole number of groups")
    return (count(file, ".conv_kernel_size", high=MAX_TAPS), n_embd // group)


def _selector(file: GgufFile) -> tuple[int, int, float, float]:
    return (
        count(file, ".selector_rank"),
        count(file, ".selector_top_k", high=256),
        real(file, ".logit_scale", 1.0),
        _softcap(file),
    )


def _softcap(file: GgufFile) -> float:
    key = ".final_logit_softcapping"
    value = file.float_(key, 0.0)
    if not (math.isfinite(value) and value >= 0):
        raise file.wrong(key, f"{value} is not a bound")
    return value


def _columns(file: GgufFile, name: str) -> int:
    shape = file.tensors[name].shape
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_WIDTH:
        what = f"shape {list(shape)} is not a table"
        raise ModelFileError(file.path, f"tensor {name}", what, REMEDY)
    return shape[1]


def _is_gelu(file: GgufFile) -> bool:
    activation = file.str_(".hidden_activation", "silu")
    if activation not in ("silu", *_GELU):
        raise UnsupportedModelError(
            f"{file.path.name}: its feed-forward part uses {shorten(activation)!r}; silu and gelu "
            "run here, as in llama.cpp.",
            "Choose a drafter with one of these.",
        )
    return activation in _GELU
