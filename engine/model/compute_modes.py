"""The arithmetic that large matrices can be multiplied in; torch is not needed for it."""

from __future__ import annotations

COMPUTE_MODES = {
    "auto": "f32 for small models, else what the device is fastest with",
    "f32": "weights and activations in float32: the reference",
    "bf16": "weights and activations in bfloat16, summed in float32",
    "int8": "weights and activations in 8 bits, a scale per row",
    "int8x2": "activations of 15 bits",
    "blocks": "exact weights, read from the blocks of the file and summed in f32",
}
"""Every mode and what it is; engine.model.loader chooses for auto."""
