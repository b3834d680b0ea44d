"""Figures of a model file, its contents and running costs, without loading it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.gguf.file import GgufFile, TensorInfo
from engine.gguf.outline import bytes_by_type, tokenizer_line
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES, read_config
from engine.model.loaded_size import draft_head_bytes, loaded_bytes
from engine.model.parts import CellSize
from engine.model.parts.attention import CompressedAttentionPart
from engine.model.tensors import check_tensors, unused_blocks
from engine.plain_text import counted, size_text

SMALL_MODEL = 64_000_000
"""Number of parameters below which per-operation overhead dominates."""


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One block: kind is that of its mixers (engine.model.parts), "mtp" or "unused mtp"; quant
    names its matrices' types."""

    index: int
    kind: str
    quant: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as described by its file; all sizes are bytes.

    weight_bytes: tensor data in the file. quant_mix: those bytes by type, largest first.
    loaded_bytes: weights in memory by compute mode, on a device that supports it. state_bytes: one
    snapshot of one sequence (recurrent states and convolution windows). log_bytes_per_token: what
    replaying one token needs instead of a snapshot (k, u, g, window). llama_cpp: how llama.cpp
    undoes tokens, and other notes. tokenizer: in one line. kv_bytes_per_token: one attention cell
    over the trunk; mtp_kv_bytes_per_token: of the MTP block; mtp_row_bytes: of the rows that
    draft-mtp keeps, per token. cell, mtp_cell: the number of key and
    value elements in them. window: if not 0, llama.cpp keeps at most this many tokens; block_rows:
    (tokens, elements) of block rows. draft_head_bytes: what draft-mtp copies of the output head in
    mode q8. has_llama_cpp_planes: whether llama.cpp rolls back with snapshot planes.
    """

    architecture: str
    name: str
    n_params: int
    weight_bytes: int
    n_ctx_train: int
    n_vocab: int
    layers: tuple[LayerInfo, ...]
    quant_mix: dict[str, int]
    loaded_bytes: dict[str, int]
    rollback: str
    llama_cpp: str
    state_bytes: int
    log_bytes_per_token: int
    kv_bytes_per_token: int
    mtp_kv_bytes_per_token: int
    mtp_row_bytes: int
    cell: tuple[int, int]
    mtp_cell: tuple[int, int]
    window: int
    block_rows: tuple[tuple[int, int], ...]
    draft_head_bytes: int
    has_llama_cpp_planes: bool
    tokenizer: str

    @property
    def is_small(self) -> bool:
        """Whether more threads or narrower weights would slow the model down."""
        return self.n_params < SMALL_MODEL

    def note_on_context(self, n_ctx: int) -> str:
        """A warning if a context of n_ctx tokens exceeds the trained one, else ""."""
        if n_ctx <= self.n_ctx_train:
            return ""
        return (
            f"A context of {n_ctx:,} tokens is longer than the {self.n_ctx_train:,} that the "
            "model was trained on; beyond that, its text may become meaningless."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that json can write."""
        return asdict(self)


def describe(file: GgufFile, device: str = "cpu", *, has_mtp_file: bool = False) -> ModelInfo:
    """Describe the model in `file` from its metadata and tensor directory alone.

    device: "cpu" or "cuda", where it will be loaded. has_mtp_file: whether an MTP block of another
    file replaces its own, which then takes no memory. Raises UnsupportedModelError or
    ModelFileError as loading would.
    """
    config = read_config(file)
    check_tensors(file, config)
    by_block: dict[int, list[TensorInfo]] = defaultdict(list)
    for name, tensor in file.tensors.items():
        if name.startswith("blk."):
            by_block[int(name.split(".")[1])].append(tensor)
    recurrent = config.n_recurrent
    states = [size for block in config.blocks for size in block.states().values()]
    state = sum(size.n_bytes for size in states)
    log = sum(size.entry_bytes for size in states)
    n_mtp = config.n_mtp + config.n_unused_mtp
    if has_mtp_file:
        config = replace(config, mtp=None, n_unused_mtp=n_mtp)
    unused = unused_blocks(config)
    loaded = {name: one for name, one in file.tensors.items() if not name.startswith(unused)}
    of_head = config.mtp.block.cells() if config.mtp else None
    family = FAMILIES[config.architecture]
    mixers = (mixer for block in config.blocks for mixer in block.mixers)
    compressed = [mixer for mixer in mixers if isinstance(mixer, CompressedAttentionPart)]
    return ModelInfo(
        architecture=config.architecture,
        name=config.name,
        n_params=sum(tensor.n_elements for tensor in file.tensors.values()),
        weight_bytes=sum(tensor.n_bytes for tensor in file.tensors.values()),
        n_ctx_train=config.n_ctx_train,
        n_vocab=config.n_vocab,
        layers=tuple(
            LayerInfo(
                index,
                _kind(config, index),
                _quantisation(by_block[index]),
                sum(tensor.n_bytes for tensor in by_block[index]),
            )
            for index in range(config.n_layer + n_mtp)
            if by_block[index]
        ),
        quant_mix=bytes_by_type(file.tensors.values()),
        loaded_bytes=loaded_bytes(loaded, device),
        rollback=_rollback(recurrent, state, log),
        llama_cpp="; ".join(
            [llama_cpp_rollback(family.peer_planes, state), *_llama_cpp_notes(config, n_mtp)]
        ),
        state_bytes=state,
        log_bytes_per_token=log,
        kv_bytes_per_token=sum(size.n_bytes for size in config.cells().values()),
        mtp_kv_bytes_per_token=of_head.n_bytes if of_head else 0,
        mtp_row_bytes=4 * config.n_handed if of_head else 0,
        cell=_numbers(config.cells().values()),
        mtp_cell=_numbers([of_head] if of_head else []),
        window=next((part.window for part in compressed), 0),
        block_rows=tuple(
            (part.ratio, part.head_dim + (part.index_dim if part.has_indexer else 0))
            for part in compressed
            if part.ratio
        ),
        draft_head_bytes=draft_head_bytes(loaded, device) if config.mtp else 0,
        has_llama_cpp_planes=bool(family.peer_planes),
        tokenizer=tokenizer_line(file),
    )


def _llama_cpp_notes(config: ModelConfig, n_mtp: int) -> list[str]:
    family = FAMILIES[config.architecture]
    notes = family.peer_notes(config) if family.peer_notes else []
    if config.mtp is not None and family.peer_drafts:
        notes.append(family.peer_drafts)
    if n_mtp > 1:
        notes.append(f"the trunk runs, but a draft context with {n_mtp} MTP blocks aborts")
    return notes


def _numbers(cells: Iterable[CellSize]) -> tuple[int, int]:
    """Key elements, with everything stored like a key, and value elements of a token."""
    found = list(cells)
    values = sum(size.n_heads * size.v_dim for size in found)
    return sum(size.n_bytes for size in found) // 4 - values, values


def _kind(config: ModelConfig, index: int) -> str:
    if index >= config.n_layer:
        return "mtp" if index < config.n_layer + config.n_mtp else "unused mtp"
    return config.blocks[index].kind


def _quantisation(tensors: Iterable[TensorInfo]) -> str:
    """Types of a block's matrices; F32 only where there is no other."""
    names = list(bytes_by_type(t for t in tensors if len(t.shape) > 1))
    shown = [name for name in names if name not in ("F32", "I32")] or ["F32"]
    return "+".join(shown)


def _rollback(recurrent: int, state_bytes: int, log_bytes: int) -> str:
    """How tokens can be rolled back, in one sentence."""
    if not recurrent:
        return "attention only: any tail can be removed"
    size = f"{size_text(state_bytes)} a snapshot"
    if log_bytes >= state_bytes:
        size += f", {size_text(log_bytes)} a token in the log of replay, which saves nothing"
    return f"partial seq_rm over snapshot planes ({counted(recurrent, 'recurrent layer')}, {size})"


def llama_cpp_rollback(planes: bool | None, state_bytes: int) -> str:
    """llama.cpp's rollback in one line. planes: see engine.model.families.Family. state_bytes: of
    one snapshot."""
    if planes is None:
        return "can remove any tail (KV cells only)"
    size = size_text(state_bytes)
    if not planes:
        return f"no partial rollback: a checkpoint of {size} per draft"
    return f"partial rollback: n_rs_seq + 1 planes of {size}, n_rs_seq < n_ubatch - 1"
