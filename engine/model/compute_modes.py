"""Compute modes: the arithmetic of large matrix products, and whether the weight file is mapped.
Does not import torch."""

from __future__ import annotations

from pathlib import Path

from engine.machine.host_memory import fits_in_memory

COMPUTE_MODES = {
    "auto": "a fast mode for the machine; for small models one with exact weights, except on "
    "CPUs with only AVX2",
    "f32": "the reference",
    "bf16": "weights and activations in bfloat16, summed in f32",
    "int8": "8 bits for both, with a scale per row",
    "int8x2": "the same with 15-bit activations",
    "q8": "the file's quantised blocks times 8-bit activations, in integers as in llama.cpp",
    "blocks": "exact weights, dequantised from the file's blocks and summed in f32",
}
"""Every mode and what it is; engine.model.loader resolves auto."""

MMAP_ABOUT = (
    "map the model's files instead of copying the weights into memory: faster to open and shared "
    "with other programs, but writing to a file then changes the loaded model"
)
MMAP_AUTO = "copied if the file fits into memory"
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
