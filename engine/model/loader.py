"""Loading of a GGUF file into a model, tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from engine.errors import OptionError
from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from engine.long_work import ReportProgress, report_part
from engine.machine.device import CPU, make_current, run_on
from engine.machine.host_memory import fits_in_memory, use_huge_pages_soon
from engine.model.compute_modes import COMPUTE_MODES
from engine.model.config import ModelConfig
from engine.model.families import read_config
from engine.model.hybrid import HybridModel
from engine.model.info import SMALL_MODEL
from engine.model.layers import OutputHead, RopeTables, StreamReader
from engine.model.mtp import MtpHead
from engine.model.parts import Shapes
from engine.model.parts.recurrent import TABLE
from engine.model.tensors import (
    block_shapes,
    check_mtp_file,
    check_tensors,
    global_shapes,
    outer_shapes,
)
from engine.model.trunks import make_mtp_block, make_trunk
from engine.model.trunks.hyper_connections import make_reader
from engine.model.weights import Embedding, Projection, Weights
from kernels.dispatch import uses_llvm
from kernels.linear.blocks import stays_in_blocks
from kernels.processor import has_feature

# weights up to this size may fit processor caches; above it memory bandwidth matters
_CACHED = 64 << 20


def resolve_compute(
    name: str, n_params: int, device: torch.device = CPU, types: Collection[str] = ()
) -> str:
    """The compute mode meant by `name` for a model of `n_params` parameters in these GGML types.

    "auto" keeps blocks if any of the types can stay in them and products run on a CUDA device or
    through LLVM: as "blocks", whose weights are exact, for a small model (but not on a processor
    with AVX2 and without AVX-512, where they are slower for every number of rows) and on a
    processor without AVX2; as "q8" otherwise. Else it is bf16 for a large model on a CUDA device or
    on a processor that multiplies it in hardware, and f32 in all other cases. Raises OptionError
    for an unknown name, and for int8 on a CUDA device.
    """
    if name not in COMPUTE_MODES:
        modes = ", ".join(COMPUTE_MODES)
        raise OptionError(f"The compute mode {name!r} is unknown.", f"Choose from {modes}.")
    on_cuda = device.type == "cuda"
    if on_cuda and name.startswith("int8"):
        raise OptionError(
            f"--compute {name} works only on the CPU, not on {device}.",
            "Use q8, blocks, bf16 or f32, or --device cpu.",
        )
    if name != "auto":
        return name
    is_small = n_params < SMALL_MODEL
    quick = "blocks" if on_cuda or uses_llvm() else None
    exact_is_quick = is_small and (on_cuda or has_feature("avx512f"))
    if quick and not exact_is_quick and (on_cuda or has_feature("avx2")):
        quick = "q8"
    if quick and any(stays_in_blocks(type, quick, device) for type in types):
        return quick
    if is_small and not on_cuda:
        return "f32"
    in_hardware = n_params >= SMALL_MODEL if on_cuda else has_feature("avx512bf16")
    return "bf16" if in_hardware else "f32"


def load_model(
    file: GgufFile,
    *,
    compute: str = "f32",
    device: torch.device = CPU,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
    as_llama_cpp: bool = False,
    mmap: bool | None = None,
    mtp: GgufFile | None = None,
) -> HybridModel:
    """Load the model in `file` to `device`; tensors are checked against the metadata first.

    mtp: a file with an MTP block that replaces the model's own, in the same mode. mmap: see
    reader_for. as_llama_cpp: matrix products round as llama.cpp's do
    (engine.model.weights.Weights). Raises UnsupportedModelError, ModelFileError, OptionError,
    OutOfMemoryError, and Cancelled between tensors.
    """
    make_current(device)
    config = read_config(file)
    check_tensors(file, config)
    tensors = file.tensors.values()
    types = {tensor.type.name for tensor in tensors}
    mode = resolve_compute(compute, sum(t.n_elements for t in tensors), device, types)
    total = file.n_bytes + (mtp.n_bytes if mtp else 0)
    report = report_part(progress, 0, total) if mtp else progress
    source = of_head = _Source(file, reader_for(file, mmap, device, report, cancelled), config)
    if mtp is not None:
        report = report_part(progress, file.n_bytes, total)
        reader = reader_for(mtp, mmap, device, report, cancelled)
        of_head = _Source(mtp, reader, check_mtp_file(mtp, config))
    loading = torch.inference_mode()(_Loading(source, of_head, mode, device, as_llama_cpp).model)
    model = run_on(device, loading, f"The weights of {file.path.name} as {mode}")
    if device.type == "cpu" and model.weight_bytes >= _CACHED:
        loaded = weakref.ref(model)
        use_huge_pages_soon(lambda: loaded() is not None)
    return model


def reader_for(
    file: GgufFile,
    mmap: bool | None,
    device: torch.device,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> TensorReader:
    """A reader of weights for a device.

    mmap: True: weights that stay as stored are the mapped file, which must not be modified while
    the model is in use; False: copies. None: copies if memory has room for the whole file; else row
    tables are mapped if the rest fits; else everything is mapped.
    """
    if mmap is None:
        tables = sum(tensor.n_bytes for name, tensor in file.tensors.items() if name == TABLE)
        with_tables = not fits_in_memory(file.n_bytes)
        mmap = with_tables and not fits_in_memory(file.n_bytes - tables)
    else:
        with_tables = mmap
    in_place = device.type == "cpu"
    return TensorReader(
        file,
        progress,
        cancelled,
        mapped=mmap and in_place,
        tables_mapped=with_tables,
        in_place=in_place,
    )


class _Source(NamedTuple):
    """A file, its tensors, and what is built from them."""

    file: GgufFile
    reader: TensorReader
    config: ModelConfig


class _Loading:
    """Builds the parts of one model in file order and adds up their memory. of_head: the file of
    the MTP block, the model's own or another."""

    def __init__(
        self, source: _Source, of_head: _Source, mode: str, device: torch.device, as_llama_cpp: bool
    ) -> None:
        self._source, self._of_head = source, of_head
        self._mode, self._device = mode, device
        self._weights = partial(Weights, compute=mode, device=device, as_llama_cpp=as_llama_cpp)
        self._taken: list[Weights] = []

    def model(self) -> HybridModel:
        file, _, config = self._source
        weights = self._take(self._source, global_shapes(config, file.tensors))
        embedding = weights.table("token_embd.weight")
        # pack the shared matrix before others take memory
        is_tied = "output.weight" not in weights
        projection = weights.head(embedding) if is_tied else None
        rope = RopeTables(config.rope, self._device)
        trunk = make_trunk(config, weights, partial(self._of_block, self._source))
        projection = projection or weights.head(embedding)
        norm = weights.keep(config.output_norm) if config.output_norm else None
        reader = make_reader(config, weights)
        output = _output(config, norm, projection, reader)
        files, head = file.files, None
        if self._of_head is not self._source:
            config = replace(config, mtp=self._of_head.config.mtp)
            files += self._of_head.file.files
            embedding_, output_, rope_ = self._outside_block(embedding, output, rope)
            head = self._head(embedding_, output_, rope_)
        elif config.mtp:
            head = self._head(embedding, output, rope)
        n_bytes = sum(taken.n_bytes for taken in self._taken)
        parts = embedding, trunk, output, rope, head
        return HybridModel(config, self._mode, *parts, n_bytes, files)

    def _take(self, source: _Source, shapes: Shapes, prefix: str = "") -> Weights:
        self._taken.append(self._weights(source.reader, shapes, prefix=prefix))
        return self._taken[-1]

    def _of_block(self, source: _Source, index: int) -> Weights:
        shapes = block_shapes(source.config, index, source.file.tensors)
        return self._take(source, shapes, f"blk.{index}.")

    def _outside_block(
        self, embedding: Embedding, output: OutputHead, rope: RopeTables
    ) -> tuple[Embedding, OutputHead, RopeTables]:
        """Embedding, output and rope of an MTP file; the trunk's for those that it lacks."""
        file, _, config = self._of_head
        weights = self._take(self._of_head, outer_shapes(config, file.tensors))
        norm, projection, reader = output.norm, output.projection, output.reader
        if "token_embd.weight" in weights:
            embedding = weights.table("token_embd.weight")
            projection = weights.head(embedding)
        elif "output.weight" in weights:
            projection = weights.project("output.weight")
        if config.output_norm and config.output_norm in weights:
            norm = weights.keep(config.output_norm)
        if config.rope != self._source.config.rope:
            rope = RopeTables(config.rope, self._device)
        if all(name in weights for name in config.trunk.shapes(config.n_embd, ())):
            reader = make_reader(config, weights)
        return embedding, _output(config, norm, projection, reader), rope

    def _head(self, embedding: Embedding, output: OutputHead, rope: RopeTables) -> MtpHead:
        """The MTP head; it uses the given tables and norm where its block has none of its own."""
        config, parts = self._of_head.config, self._of_head.config.mtp
        assert parts is not None
        weights = self._of_block(self._of_head, config.n_layer)
        block = make_mtp_block(parts, weights, config)
        norm, table, reader = output.norm, output.projection, output.reader
        eps, centred = config.eps, False
        if "nextn.embed_tokens.weight" in weights:
            embedding = weights.table("nextn.embed_tokens.weight")
        if parts.output_norm in weights:
            norm, centred = weights.keep(parts.output_norm), parts.centred_eps is not None
            eps = parts.centred_eps or config.eps
        if "nextn.shared_head_head.weight" in weights:
            table = weights.project("nextn.shared_head_head.weight")
        if "nextn.hc_head_norm.weight" in weights:
            reader = make_reader(config, weights, "nextn.hc_head")
        own = OutputHead(
            norm, table, config.n_vocab, eps, config.logit_scale, centred=centred, reader=reader
        )
        return MtpHead(weights, embedding, block, own, rope, config.eps, config.trunk.n_handed)


def _output(
    config: ModelConfig,
    norm: torch.Tensor | None,
    projection: Projection,
    reader: StreamReader | None,
) -> OutputHead:
    vocabulary = config.n_vocab, config.eps, config.logit_scale
    return OutputHead(norm, projection, *vocabulary, reader=reader)
