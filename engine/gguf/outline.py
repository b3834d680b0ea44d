"""Outline of any GGUF file, from its metadata and directory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from engine.errors import ModelFileError
from engine.gguf.binary import StringArray, shorten
from engine.gguf.directory import TensorInfo
from engine.gguf.file import GgufFile
from engine.gguf.metadata import TypedMetadata

_VOCABULARY = (
    "a vocabulary without tensors",
    "`draftscope tokenize` uses it; open the whole model to run it.",
)
_PROJECTOR = (
    "a projector for images or audio (mmproj)",
    "Open the model that it belongs to, for text only: images are not supported here.",
)
_LORA = (
    "a LoRA adapter",
    (
        "Adapters are not supported here: merge it into its model with llama.cpp's "
        "llama-export-lora, and open the result."
    ),
)
_IMATRIX = (
    "an importance matrix (imatrix)",
    "It is for llama-quantize --imatrix; open the model that it was measured on.",
)
_MTP = "the MTP block of a model, without its trunk"
_BLOCK = re.compile(r"blk\.\d")
_CONTROL = ("a control vector", "It is not supported here: open the model that it was made for.")

_EMBEDDING = (
    "an embedding model, which generates no text",
    "Open a model that generates text; llama-server --embeddings runs this one.",
)
_DIFFUSION = (
    "a model without causal attention, such as an encoder or a text diffusion model",
    "Open an autoregressive model: speculative decoding needs one.",
)
_FOREIGN = (
    "another kind of model, without token embeddings and blocks",
    "Open it in the program that it was made for, such as one that generates images or speech.",
)


def other_kind(file: GgufFile) -> tuple[str, str] | None:
    """The kind of a file that is not a model, with its article, and what to do with it; None for a
    model of any architecture."""
    kind = file.metadata.get("general.type")
    kind = kind if isinstance(kind, str) else ""
    arch = file.architecture
    if kind == "imatrix" or "imatrix.chunk_count" in file.metadata:
        return _IMATRIX
    if kind == "mmproj" or arch == "clip":
        return _PROJECTOR
    if kind == "adapter" or "adapter.type" in file.metadata:
        return _LORA
    if arch == "controlvector":
        return _CONTROL
    if file.get(".attention.causal") is False:
        return _EMBEDDING if file.get(".pooling_type") is not None else _DIFFUSION
    has_tokens = "tokenizer.ggml.tokens" in file.metadata or "token_embd.weight" in file.tensors
    is_part = "split.no" in file.metadata
    if file.tensors and not (has_tokens or is_part or any(map(_BLOCK.match, file.tensors))):
        return _FOREIGN
    return None if file.tensors else _VOCABULARY


def bytes_by_type(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    """Bytes by type name, largest share first."""
    totals: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        totals[tensor.type.name] += tensor.n_bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def tokenizer_line(file: TypedMetadata) -> str:
    """The tokenizer in one line, "none" if the file has none."""
    found = {
        name: file.metadata.get(f"tokenizer.ggml.{name}")
        for name in ("model", "pre", "bos_token_id", "eos_token_id")
    }
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if found["model"] is None and tokens is None:
        return "none"
    parts = [shorten(str(found["model"]))]
    if found["pre"] is not None:
        parts.append(f"splits as {shorten(str(found['pre']))}")
    parts.append(f"{len(tokens) if isinstance(tokens, (list, StringArray)) else 0:,} tokens")
    parts += [
        f"{name[:3].upper()} {found[name]}"
        for name in ("bos_token_id", "eos_token_id")
        if isinstance(found[name], int)
    ]
    parts.append(
        "chat template" if "tokenizer.chat_template" in file.metadata else "no chat template"
    )
    return ", ".join(parts)


def outline(file: GgufFile) -> dict[str, Any]:
    """Name, architecture, kind, sizes and tokenizer of a file, ready for JSON.

    sizes: whole numbers under the architecture's own keys, by key without the prefix.
    unknown_types: tensor types that cannot be decoded here, with the engine that writes them.
    """
    arch, tensors = file.architecture, file.tensors.values()
    other = other_kind(file)
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{arch}.") and type(value) is int
    }
    is_mtp = any(".nextn." in name for name in file.tensors) and not any(
        name.startswith("blk.0.") for name in file.tensors
    )
    n_parts = file.metadata.get("split.count", 1)
    types = {tensor.type for tensor in tensors if tensor.type.owner}
    return {
        "architecture": shorten(arch),
        "name": shorten(_text(file, "general.name")),
        "kind": other[0] if other else _MTP if is_mtp else "a model",
        "n_tensors": len(file.tensors),
        "n_params": sum(tensor.n_elements for tensor in tensors),
        "weight_bytes": sum(tensor.n_bytes for tensor in tensors),
        "quant_mix": bytes_by_type(tensors),
        "unknown_types": {one.name: one.owner for one in sorted(types)},
        "tokenizer": tokenizer_line(file),
        "sizes": own,
        "parts": n_parts if type(n_parts) is int else 1,
    }


def _text(file: GgufFile, key: str) -> str:
    try:
        return file.str_(key, "")
    except ModelFileError:
        return ""
