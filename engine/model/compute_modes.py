"""Compute modes: the arithmetic of large matrix products, and whether the weight file is mapped.
Does not import torch."""

from __future__ import annotations

from pathlib import Path

from engine.machine.host_memory import fits_in_memory

COMPUTE_MODES = {
    "auto": "what is fast there; for small models with exact weights, but not on AVX2 alone",
    "f32": "the reference",
    "bf16": "weights and activations in bfloat16, summed in f32",
    "int8": "8 bits for both, with a scale per row",
    "int8x2": "the same with activations of 15 bits",
    "q8": "blocks of the file times activations of 8 bits, in integers as llama.cpp does",
    "blocks": "exact weights, read from the blocks of the file and summed in f32",
}
"""Every mode and what it is; engine.model.loader resolves auto."""

MMAP_ABOUT = (
    "map the model's files instead of copying weights into memory: faster to open and shared with "
    "other programs, but what is written to a file changes the model in use"
)
MMAP_AUTO = "copied where memory has room for the file"
MMAP_CHOICES = {"auto": (None, MMAP_AUTO), "no": (False, "copied"), "yes": (True, "mapped")}
"""Names for a form: the value for engine.session.Session.open, and its meaning."""

# of NVIDIA and AMD, and of either under Windows
_GPUS = "/dev/nvidiactl", "/dev/kfd", "/dev/dxg"


def copies_blocks(compute: str, device: str, mmap: bool | None, n_bytes: int) -> bool:
    """Whether a file's blocks will be copied into memory as they are, as far as this is known
    before torch is imported: see engine.model.loader.resolve_compute and reader_for."""
    on_cpu = device == "cpu" or (device == "auto" and not any(Path(one).exists() for one in _GPUS))
    in_blocks = on_cpu and compute in ("auto", "q8", "blocks")
    return in_blocks and not mmap and (mmap is False or fits_in_memory(n_bytes))
