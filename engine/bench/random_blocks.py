"""Random weights made directly in GGML's storage formats, without quantising anything.

Layouts of the blocks are those of ggml-common.h. The values are uniform within a block instead
of normal, which makes no difference to speed or to the scale of what a matrix puts out.
"""

from __future__ import annotations

import math

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Quant = GGMLQuantizationType


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], std: float, kind: GGMLQuantizationType
) -> np.ndarray:
    """Values of mean 0 and this standard deviation, stored as F32, BF16, Q8_0, Q4_K or Q6_K.

    F32: float32 of `shape`. BF16: its upper halves, uint16 of `shape`. Otherwise uint8 [..., bytes
    of a row]; the last dimension of `shape` is a multiple of the block length.
    """
    if kind in (Quant.F32, Quant.BF16):
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(std)
        if kind == Quant.F32:
            return values
        # cut off instead of rounded: as random as before
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    length, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % length:
        raise ValueError(f"rows of {shape[-1]} are not whole {kind.name} blocks of {length}")
    n_blocks = math.prod(shape) // length
    blocks = rng.integers(0, 256, (n_blocks, size), dtype=np.uint8)
    _FILL[kind](rng, blocks, std)
    return blocks.reshape(*shape[:-1], -1)


def _fill_q8_0(rng: np.random.Generator, blocks: np.ndarray, std: float) -> None:
    # half scale, 32 signed bytes: -128..127 is off centre, so -128 becomes 0
    quants = blocks[:, 2:].view(np.int8)
    quants[quants == -128] = 0
    blocks[:, :2] = _half(std / math.sqrt(127 * 128 / 3))


def _fill_q4_k(rng: np.random.Generator, blocks: np.ndarray, std: float) -> None:
    # half scale d, half scale m, 8 sub-blocks of 6-bit scale and 6-bit minimum, 256 nibbles q:
    # d scale q - m minimum. Equal scale and minimum with m = 7.5 d centre the nibbles.
    scales = rng.integers(32, 64, (len(blocks), 8), dtype=np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
    blocks[:, 12:16] = (high & 15) | (high & 15) << 4
    d = std / (_rms(np.arange(32, 64)) * _rms(np.arange(16) - 7.5))
    blocks[:, :2] = _half(d)
    blocks[:, 2:4] = _half(7.5 * d)


def _fill_q6_k(rng: np.random.Generator, blocks: np.ndarray, std: float) -> None:
    # 256 quants of 6 bits in 192 bytes, 16 signed byte scales, half scale d: d scale (q - 32);
    # scales of either sign make up for quants that are off centre
    scales = rng.integers(16, 32, (len(blocks), 16), dtype=np.int8)
    scales *= 2 * rng.integers(0, 2, scales.shape, dtype=np.int8) - 1
    blocks[:, 192:208] = scales.view(np.uint8)
    d = std / (_rms(np.arange(16, 32)) * _rms(np.arange(64) - 32))
    blocks[:, 208:] = _half(d)


_FILL = {Quant.Q8_0: _fill_q8_0, Quant.Q4_K: _fill_q4_k, Quant.Q6_K: _fill_q6_k}


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))


def _half(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).astype("<f2").tobytes(), np.uint8)
