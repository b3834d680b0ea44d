"""How weights are loaded: the arithmetic that large matrices are multiplied in, and whether their
file is mapped; torch is not needed for it."""

from __future__ import annotations

COMPUTE_MODES = {
    "auto": "what is fast there; for small models with exact weights, but not on AVX2 alone",
    "f32": "the reference",
    "bf16": "weights and activations in bfloat16, summed in f32",
    "int8": "8 bits for both, with a scale per row",
    "int8x2": "the same with activations of 15 bits",
    "q8": "blocks of the file times activations of 8 bits, in integers as llama.cpp does",
    "blocks": "exact weights, read from the blocks of the file and summed in f32",
}
"""Every mode and what it is; engine.model.loader chooses for auto."""

MMAP_ABOUT = (
    "map the model's files instead of copying weights into memory: faster to open and shared with "
    "other programs, but what is written to a file changes the model in use"
)
MMAP_AUTO = "copied where memory has room for the file"
MMAP_CHOICES = {"auto": (None, MMAP_AUTO), "no": (False, "copied"), "yes": (True, "mapped")}
"""Names for a form: the value that engine.session.Session.open takes, and what it means."""
