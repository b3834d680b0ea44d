"""The arithmetic that large matrices can be multiplied in; torch is not needed for it."""

from __future__ import annotations

COMPUTE_MODES = {
    "auto": "what is fast there; for small models with exact weights",
    "f32": "the reference",
    "bf16": "weights and activations in bfloat16, summed in f32",
    "int8": "8 bits for both, with a scale per row",
    "int8x2": "the same with activations of 15 bits",
    "q8": "blocks of the file times activations of 8 bits, in integers as llama.cpp does",
    "blocks": "exact weights, read from the blocks of the file and summed in f32",
}
"""Every mode and what it is; engine.model.loader chooses for auto."""
