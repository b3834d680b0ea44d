"""Rotary position embedding on a GPU; the table is made by torch, in f64, where the caller is."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from kernels.rows.cells import CellPlaces
from kernels.triton_setup import cdiv, jit, power_of_2

HEADS = 4


@jit(do_not_specialize_on_alignment=["n_tokens"])
def _rotate(
    x, cos, sin, y, weight, eps, cells, n_tokens, n_heads, head_dim, half,
    x_b, x_t, x_h, x_d, cos_b, cos_t, cos_d, sin_b, sin_t, sin_d,
    BH: tl.constexpr, BD: tl.constexpr, REST: tl.constexpr, END: tl.constexpr, BACK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: numbers of a head that is divided by its length and multiplied by a weight first.
    cells: keys, values, the streams and cells of the tokens, cells of a stream, query heads and
    those of keys, which go there as the values do, the last heads, as they are."""
    b, t = tl.program_id(2).to(tl.int64), tl.program_id(0)
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    j = tl.arange(0, BD)
    x += b * x_b + t * x_t + h * x_h
    if len(cells) > 0:
        keys, values, streams, numbers, n_cells, n_q, n_kv = cells
        i, kept, n_normed = b * n_tokens + t, h >= n_q, n_q + n_kv
        head = tl.load(streams + i) * n_kv + (h - n_q) % n_kv
        place = (head * n_cells + tl.load(numbers + i)) * head_dim
        as_they_are = h >= n_normed
        y += (i * n_q + h) * head_dim
        y = tl.where(kept, tl.where(as_they_are, values + place, keys + place), y)
    else:
        y += ((b * n_tokens + t) * n_heads + h) * head_dim
        n_normed = n_heads
    inside = (h < n_heads) & (j < half)[None, :]
    c = tl.load(cos + b * cos_b + t * cos_t + j * cos_d, j < half, 0.0)[None, :]
    s = tl.load(sin + b * sin_b + t * sin_t + j * sin_d, j < half, 0.0)[None, :]
    if BACK:
        s = -s
    # halves at the beginning of a head, or neighbours at its end
    at = (head_dim - 2 * half + 2 * j if END else j)[None, :]
    other = at + (1 if END else half)
    first = tl.load(x + at * x_d, inside, 0.0)
    second = tl.load(x + other * x_d, inside, 0.0)
    if WHOLE > 0:
        column = tl.arange(0, WHOLE)[None, :]
        values = tl.load(x + column * x_d, (h < n_heads) & (column < head_dim), 0.0)
        length = tl.sqrt(tl.sum(values * values, 1, keep_dims=True) + eps)
        length = tl.where(h < n_normed, length, 1.0)
        weight += h * head_dim
        has_weight = inside & (h < n_normed)
        first = first / length * tl.load(weight + at, has_weight, 1.0)
        second = second / length * tl.load(weight + other, has_weight, 1.0)
    turned, after = first * c - second * s, second * c + first * s
    if len(cells) > 0:
        turned = tl.where(as_they_are, first, turned)
        after = tl.where(as_they_are, second, after)
    tl.store(y + at, turned, inside)
    tl.store(y + other, after, inside)
    if REST > 0:
        r = tl.arange(0, REST)[None, :]
        beyond = (h < n_heads) & (r < head_dim - 2 * half)
        r += 0 if END else 2 * half
        others = tl.load(x + r * x_d, beyond, 0.0)
        if WHOLE > 0:
            others = others / length * tl.load(weight + r, beyond & (h < n_normed), 1.0)
        tl.store(y + r, others, beyond)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(x, cos, sin, end=False, back=False)


def rope_at_end(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    return _turned(x, cos, sin, end=True, back=back)


def norm_and_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(x, cos, sin, end=False, back=False, weight=weight.contiguous(), eps=eps)


def rope_into_cells(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, places: CellPlaces
) -> Tensor:
    weight = None if weight is None else weight.contiguous()
    return _turned(x, cos, sin, end=False, back=False, weight=weight, eps=eps, places=places)


def _turned(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    end: bool,
    back: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
    places: CellPlaces | None = None,
) -> Tensor:
    n_batch, n_tokens, n_heads, head_dim = x.shape
    cells: tuple[Tensor | int, ...] = ()
    n_left = n_heads
    if places is not None:
        _, n_kv, n_cells, _ = places[0].shape
        n_left = n_heads - 2 * n_kv
        cells = *places, n_cells, n_left, n_kv
    half = cos.shape[-1]
    rest = head_dim - 2 * half
    y = x.new_empty(n_batch, n_tokens, n_left, head_dim)
    _rotate[(n_tokens, cdiv(n_heads, HEADS), n_batch)](
        x, cos, sin, y, weight, eps, cells, n_tokens, n_heads, head_dim, half,
        *x.stride(), *cos.stride(), *sin.stride(),
        BH=HEADS, BD=power_of_2(half), REST=power_of_2(rest) if rest else 0, END=end, BACK=back,
        WHOLE=0 if weight is None else power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return y
