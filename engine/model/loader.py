"""From a GGUF file to a model in memory, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import OptionError
from engine.gguf.file import GgufFile
from engine.gguf.reader import Progress, TensorReader
from engine.model.attention import Attention
from engine.model.config import ModelConfig
from engine.model.delta_net import DeltaNet
from engine.model.hybrid import HybridModel
from engine.model.info import SMALL_MODEL
from engine.model.layers import (
    Block,
    DenseFeedForward,
    FeedForward,
    Mixer,
    OutputHead,
    RopeTables,
)
from engine.model.moe import MixtureOfExperts
from engine.model.mtp import MtpHead
from engine.model.tensors import block_shapes, check_tensors, ffn_norm_name, global_shapes
from engine.model.weights import Weights
from engine.options import COMPUTE_MODES


def resolve_compute(name: str, n_params: int) -> str:
    """The compute mode meant by `name` for a model of `n_params` parameters.

    "auto" is bf16 where the processor multiplies it in hardware and the model is large enough
    to gain from that, else f32. Raises OptionError for an unknown name.
    """
    if name not in COMPUTE_MODES:
        modes = ", ".join(COMPUTE_MODES)
        raise OptionError(f"The compute mode {name!r} is unknown.", f"Choose from {modes}.")
    if name != "auto":
        return name
    return "bf16" if n_params >= SMALL_MODEL and _has_bf16() else "f32"


def load_model(
    file: GgufFile,
    *,
    compute: str = "f32",
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> HybridModel:
    """Load the model in `file`; every tensor is checked against the metadata beforehand.

    Raises UnsupportedModelError, ModelFileError, OptionError, and Cancelled between tensors.
    """
    config = ModelConfig.from_gguf(file)
    check_tensors(file, config)
    mode = resolve_compute(compute, sum(t.n_elements for t in file.tensors.values()))
    reader = TensorReader(file, progress, cancelled)
    with torch.inference_mode():
        return _Loading(file, reader, config, mode).model()


class _Loading:
    """Builds the parts of one model in file order and adds up their memory."""

    def __init__(
        self, file: GgufFile, reader: TensorReader, config: ModelConfig, mode: str
    ) -> None:
        self._file = file
        self._reader = reader
        self._config = config
        self._mode = mode

    def model(self) -> HybridModel:
        config = self._config
        shapes = global_shapes(config, self._file.tensors)
        weights = Weights(self._reader, shapes, self._mode)
        embedding = weights.keep("token_embd.weight")
        rope = RopeTables(config.rope)
        blocks, n_bytes = [], 0
        for index in range(config.n_layer):
            block, inside = self._block(index)
            blocks.append(block)
            n_bytes += inside.n_bytes
        tied = "output.weight" not in weights
        table = weights.stack([embedding]) if tied else weights.project("output.weight")
        if tied and self._mode == "f32":
            weights.n_bytes -= embedding.nbytes  # shared with the embedding
        norm = weights.keep("output_norm.weight")
        output = OutputHead(norm, table, config.n_vocab, config.eps)
        head = None
        if config.n_mtp:
            head, inside = self._head(embedding, output, rope)
            n_bytes += inside.n_bytes
        return HybridModel(
            config, self._mode, embedding, blocks, output, rope, head, weights.n_bytes + n_bytes
        )

    def _block(self, index: int) -> tuple[Block, Weights]:
        """Block `index`; an MTP block counts its attention from layer 0 of its own memory."""
        config = self._config
        is_mtp = index >= config.n_layer
        shapes = block_shapes(config, index, self._file.tensors)
        weights = Weights(self._reader, shapes, self._mode, f"blk.{index}.")
        mixer: Mixer
        if config.ssm is not None and not is_mtp and config.recurrent_layers[index]:
            mixer = DeltaNet(weights, config, config.ssm, index)
        else:
            mixer = Attention(weights, config, 0 if is_mtp else index)
        ffn: FeedForward
        if config.moe is None:
            ffn = DenseFeedForward(weights, config.n_ff)
        else:
            ffn = MixtureOfExperts(weights, config.moe)
        mixer_norm = weights.keep("attn_norm.weight")
        ffn_norm = weights.keep(ffn_norm_name(config))
        return Block(mixer, ffn, mixer_norm, ffn_norm, config.eps), weights

    def _head(
        self, embedding: torch.Tensor, output: OutputHead, rope: RopeTables
    ) -> tuple[MtpHead, Weights]:
        """The MTP head; where the file gives it no table or norm of its own, the trunk's serve."""
        config = self._config
        block, weights = self._block(config.n_layer)
        norm, table = output.norm, output.projection
        if "nextn.embed_tokens.weight" in weights:
            embedding = weights.keep("nextn.embed_tokens.weight")
        if "nextn.shared_head_norm.weight" in weights:
            norm = weights.keep("nextn.shared_head_norm.weight")
        if "nextn.shared_head_head.weight" in weights:
            table = weights.project("nextn.shared_head_head.weight")
        own = OutputHead(norm, table, config.n_vocab, config.eps)
        return MtpHead(weights, embedding, block, own, rope, config.eps), weights


def _has_bf16() -> bool:
    """Whether this processor multiplies bf16 in hardware, as far as torch can tell."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported is not None and supported())
