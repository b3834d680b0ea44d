"""Mixture of experts on a GPU: routing, and products grouped by expert that the host never sees.

The choices are sorted by expert, and every expert's run of them is cut into tiles of BM rows. How
many tiles there are only the device knows; the host launches as many as there could be at most,
and each finds its expert and its rows from where the runs end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels import moe
from kernels.dispatch import torch_version
from kernels.linear.block_linear.with_triton import decode
from kernels.linear.integer_blocks.rows_with_triton import sum_in_pairs
from kernels.linear.integer_blocks.with_triton import products
from kernels.linear.packed import BlockData, PackedWeight
from kernels.moe import NOTHING, Added, Choice
from kernels.moe.packed import SWIGLU, Activation, Matrices, PackedExperts
from kernels.pointwise.with_triton import EXPRESSIONS, softplus
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# of a tile, the least to fill a tensor core
MIN_ROWS = 16
FEW_CHOICES = 128
"""Choices of experts that one program sorts."""
MOST_ROUTED = 2
"""Rows whose experts the last program of a router's product chooses, one after the other; of more,
each is a program (not measured: kernels.linear.integer_blocks.rows_with_triton, MOST_NORMED)."""
_GATED = EXPRESSIONS["output_gate"]


@jit
def _route(logits, then, stride, KEPT: tl.constexpr):
    _route_row(logits, then, tl.program_id(0).to(tl.int64), stride, KEPT)


@jit
def _route_row(logits, then, row, stride, KEPT: tl.constexpr):
    """A row of `_routing`; its logits may have been stored by other programs of the launch."""
    bias, weights, ids, n_experts, scale = then
    SCORES: tl.constexpr = KEPT[0]
    NORMALISED: tl.constexpr = KEPT[1]
    N_GROUPS: tl.constexpr = KEPT[2]
    N_GROUPS_USED: tl.constexpr = KEPT[3]
    N_USED: tl.constexpr = KEPT[4]
    BU: tl.constexpr = KEPT[5]
    BE: tl.constexpr = KEPT[6]
    e, used = tl.arange(0, BE), tl.arange(0, BU)
    known = e < n_experts
    values = tl.load(logits + row * stride + e, known, float("-inf"), cache_modifier=".cg")
    if SCORES == "softmax":
        p = tl.exp(values - tl.max(values, 0))
        p = p / sum_in_pairs(p)
    elif SCORES == "sigmoid":
        p = tl.sigmoid(values)
    else:
        p = tl.sqrt(softplus(values))
    p = tl.where(known, p, 0.0)
    sums = p
    if bias is not None:
        sums += tl.load(bias + e, known, 0.0)
    sums = tl.where(known, sums, float("-inf"))
    if N_GROUPS > 1:
        # groups are as many and as large as powers of two
        SIZE: tl.constexpr = BE // N_GROUPS
        group, place = tl.arange(0, N_GROUPS), tl.arange(0, SIZE)[None, :]
        members = tl.reshape(sums, (N_GROUPS, SIZE))
        best = tl.max(members, 1)
        first = tl.min(tl.where(members == best[:, None], place, SIZE), 1)
        best += tl.max(tl.where(place == first[:, None], float("-inf"), members), 1)
        left = tl.full((N_GROUPS,), 1, tl.int32)
        for _ in tl.static_range(N_GROUPS_USED):
            largest = tl.max(best, 0)
            index = tl.min(tl.where(best == largest, group, N_GROUPS - 1), 0)
            left = tl.where(group == index, 0, left)
            best = tl.where(group == index, float("-inf"), best)
        members = tl.where(left[:, None] > 0, float("-inf"), members)
        sums = tl.reshape(members, (BE,))
    chosen = tl.zeros((BU,), tl.float32)
    order = tl.zeros((BU,), tl.int32)
    taken = tl.zeros((BE,), tl.int32)
    for i in tl.static_range(N_USED):
        largest = tl.max(tl.where(taken > 0, float("-inf"), sums), 0)
        # of equal ones the lowest; among NaN none is the largest, yet it must be an expert
        index = tl.min(tl.where((sums == largest) & (taken == 0), e, BE), 0)
        index = tl.minimum(index, n_experts - 1)
        chosen = tl.where(used == i, tl.sum(tl.where(e == index, p, 0.0), 0), chosen)
        order = tl.where(used == i, index, order)
        taken = tl.where(e == index, 1, taken)
    if NORMALISED:
        chosen = chosen / tl.maximum(sum_in_pairs(chosen), 0.00006103515625)
    # maxima leave NaN out, this does not
    chosen = chosen * scale + tl.sum(p, 0) * 0.0
    tl.store(weights + row * N_USED + used, chosen, used < N_USED)
    tl.store(ids + row * N_USED + used, order.to(tl.int64), used < N_USED)


@jit
def _sort(ids, order, ends, n_choices, n_experts, BC: tl.constexpr, BE: tl.constexpr):
    """order: the choices by expert, those of one in their order. ends: where its choices end."""
    i = tl.arange(0, BC)
    mine = tl.load(ids + i, i < n_choices, BE)
    other = tl.trans(tl.broadcast_to(mine[:, None], (BC, BC)))
    earlier = (other < mine[:, None]) | ((other == mine[:, None]) & (i[None, :] < i[:, None]))
    place = tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + place, i.to(tl.int64), i < n_choices)
    for first in range(0, n_experts, 32):
        e = first + tl.arange(0, 32)
        n_before = tl.sum((mine[None, :] <= e[:, None]).to(tl.int32), 1)
        tl.store(ends + e, n_before.to(tl.int64), e < n_experts)


@jit
def tile_of(ends, n_experts, tile, BM: tl.constexpr, BE: tl.constexpr):
    """Expert, first row and end of the rows of a tile; none where there is no such tile."""
    e = tl.arange(0, BE)
    stop = tl.load(ends + e, e < n_experts, 0).to(tl.int32)
    start = tl.load(ends + e - 1, (e > 0) & (e < n_experts), 0).to(tl.int32)
    tiles = (stop - start + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    # the expert whose tiles hold this one
    mine = (tile >= last - tiles) & (tile < last)
    expert = tl.sum(tl.where(mine, e, 0), 0)
    first = tl.sum(tl.where(mine, start + (tile - last + tiles) * BM, 0), 0)
    end = tl.sum(tl.where(mine, stop, 0), 0)
    return expert, first, end


@jit
def _factors(matrices, row_size, n, k, at, n_rows, n_in, TYPE: tl.constexpr, BN: tl.constexpr):
    """Of BN rows of a matrix the numbers from `at` on, [k, BN]: as they are, or decoded from the 32
    that a block or a part of one has. row_size: in numbers, of blocks in words of 16 bits."""
    known = k < n_in - at
    if TYPE is None:
        rows = matrices + n.to(tl.int64)[None, :] * row_size + k[:, None]
        factors = tl.load(rows + at, (n < n_rows)[None, :] & known[:, None], 0.0)
    else:
        group, pair = at // 32 + tl.arange(0, 1)[None, :, None], tl.arange(0, 16)[None, None, :]
        rows = matrices + n.to(tl.int64)[:, None, None] * row_size
        inside = (n < n_rows)[:, None, None] & (group < n_in // 32)
        even, odd = decode(rows, group, pair, inside, TYPE)
        factors = tl.trans(tl.reshape(tl.join(even, odd), (BN, 32)))
    return factors


@jit
def _open(
    x, matrices, order, ends, hidden, n_experts, n_used, n_in, width, x_stride, numbers,
    TYPES: tl.constexpr, EXPRESSION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The activation of gate x and up x, or of up x, for the rows of a tile and BN columns, in
    sorted order. matrices: of gate and up the first expert's, and the sizes of one and of a row."""
    expert, first, end = tile_of(ends, n_experts, tl.program_id(0), BM, BE)
    if first >= end:
        return
    place = first + tl.arange(0, BM)
    inside = place < end
    source = tl.load(order + place, inside, 0) // n_used
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x += source[:, None] * x_stride + k[None, :]
    gates, size, row_size = matrices[0]
    gates += expert.to(tl.int64) * size
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for at in range(0, n_in, BK):
        rows = tl.load(x + at, inside[:, None] & (k < n_in - at)[None, :], 0.0)
        rows = rows.to(hidden.dtype.element_ty)
        part = _factors(gates, row_size, n, k, at, width, n_in, TYPES[0], BN)
        gate = tl.dot(rows, part, gate, input_precision="ieee")
        if len(TYPES) == 2:
            ups, up_size, up_row = matrices[1]
            ups += expert.to(tl.int64) * up_size
            part = _factors(ups, up_row, n, k, at, width, n_in, TYPES[1], BN)
            up = tl.dot(rows, part, up, input_precision="ieee")
    opened = EXPRESSION(gate, up, *numbers) if len(TYPES) == 2 else EXPRESSION(gate)
    address = hidden + place.to(tl.int64)[:, None] * width + n[None, :]
    kept = inside[:, None] & (n < width)[None, :]
    tl.store(address, opened.to(hidden.dtype.element_ty), kept)


@jit
def _close(
    hidden, matrices, size, row_size, order, ends, lines, n_experts, width, n_out,
    TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """down of the rows of a tile and BN columns, back in the order of rows and choices."""
    expert, first, end = tile_of(ends, n_experts, tl.program_id(0), BM, BE)
    if first >= end:
        return
    place = first + tl.arange(0, BM)
    inside = place < end
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    hidden += place.to(tl.int64)[:, None] * width + k[None, :]
    matrices += expert.to(tl.int64) * size
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, width, BK):
        rows = tl.load(hidden + at, inside[:, None] & (k < width - at)[None, :], 0.0)
        part = _factors(matrices, row_size, n, k, at, n_out, width, TYPE, BN)
        total = tl.dot(rows, part, total, input_precision="ieee")
    line = tl.load(order + place, inside, 0)
    kept = inside[:, None] & (n < n_out)[None, :]
    tl.store(lines + line[:, None] * n_out + n[None, :], total, kept)


@jit
def added_to(total, added, row, column, inside):
    """Sums over experts, and what a layer adds to them (`places_of`)."""
    shared, shared_row, gate, gate_row, residual, residual_row = added
    if shared is not None:
        other = tl.load(shared + row * shared_row + column, inside, 0.0)
        if gate is not None:
            other = _GATED(other, tl.load(gate + row * gate_row))
        total += other
    if residual is not None:
        total = tl.load(residual + row * residual_row + column, inside, 0.0) + total
    return total


@jit
def _combine(lines, weights, y, added, d, stride, N_USED: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(N_USED):
        line = tl.load(lines + (row * N_USED + i) * d + c, c < d, 0.0)
        total += tl.load(weights + row * stride + i) * line
    tl.store(y + row * d + c, added_to(total, added, row, c, c < d), c < d)


def route(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """See kernels.moe.route. Groups whose sides are no powers of two are left to torch."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    routing = _routing(logits.shape[0], logits.shape[1], bias, choice, logits.device)
    if routing is None:
        return torch_version(moe.route)(logits, bias, choice)
    _, (_, weights, ids, *_), kept = routing
    _route[(len(logits),)](logits, routing[1], logits.stride(0), KEPT=kept, num_warps=4)
    return weights, ids


def route_product(
    x: Tensor,
    packed: PackedWeight,
    n_experts: int,
    bias: Tensor | None,
    choice: Choice,
    *,
    invariant: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    routing = _routing(len(x), n_experts, bias, choice, x.device)
    if routing is None or len(x) > MOST_ROUTED:
        return None
    found = products(x, [packed], invariant=invariant, finish=routing)
    _, (_, weights, ids, *_), _ = routing
    return None if found is None else (found[0], weights, ids)


def _routing(
    n_rows: int, n_experts: int, bias: Tensor | None, choice: Choice, device: torch.device
) -> tuple[object, tuple[Any, ...], tuple[object, ...]] | None:
    """What chooses the experts of a row (Finish): of the tensors the second and the third are the
    weights and ids. None for groups whose sides are no powers of two."""
    n_used, n_groups, wide = choice.n_used, choice.n_groups, power_of_2(n_experts)
    if n_groups > 1 and (wide != n_experts or wide % n_groups or wide == n_groups):
        return None
    weights = torch.empty(n_rows, n_used, device=device)
    ids = torch.empty(n_rows, n_used, dtype=torch.int64, device=device)
    kept = choice.scores, choice.normalised, n_groups, choice.n_groups_used, n_used
    then = bias, weights, ids, n_experts, float(choice.scale)
    return _route_row, then, (*kept, power_of_2(n_used), wide)


def in_order(ids: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """The numbers of choices by expert, int64 [n], and where those of each expert end."""
    n_choices = ids.numel()
    if n_choices > FEW_CHOICES:
        by_expert, order = torch.sort(ids.flatten(), stable=True)
        every = torch.arange(n_experts, device=ids.device)
        return order, torch.searchsorted(by_expert, every, right=True)
    order, ends = ids.new_empty(n_choices), ids.new_empty(n_experts)
    _sort[(1,)](
        ids.contiguous(), order, ends, n_choices, n_experts,
        BC=max(power_of_2(n_choices), 16), BE=power_of_2(n_experts), num_warps=4,
    )  # fmt: skip
    return order, ends


def pack(
    example: Tensor, matrices: Matrices, mode: str, activation: Activation = SWIGLU
) -> PackedExperts:
    """See kernels.moe.pack_experts. data: gate above up [E, 2f, d] (or up alone), down [E, d, f].

    example: one of the matrices, for its device. While they are put side by side a layer is held
    twice. Raises ValueError for int8 and for an activation that has no kernel.
    """
    if mode not in DTYPES:
        raise ValueError("int8 experts are for processors: choose f32 or bf16 on a GPU")
    if activation.kind not in EXPRESSIONS:
        raise ValueError(f"experts with {activation.name} have no kernel for a GPU")
    dtype = DTYPES[mode]
    pairs = [(gate_up.to(dtype), down.to(dtype)) for gate_up, down in matrices]
    gate_up, down = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    n_experts, n_embd, width = down.shape
    shape, n_bytes = (n_experts, width, n_embd), gate_up.nbytes + down.nbytes
    return PackedExperts(mode, shape, n_bytes, (gate_up, down), activation)


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: PackedExperts,
    added: Added = NOTHING,
    *,
    invariant: bool = False,
) -> Tensor:
    """See kernels.moe.experts. invariant: tiles of one size, a row at any place of them; else those
    that suit the rows."""
    n_experts, width, d = packed.shape
    n_rows, n_used = ids.shape
    n_choices = n_rows * n_used
    if x.stride(1) != 1:
        x = x.contiguous()
    *first, down = packed.data
    if not isinstance(down, BlockData) and packed.activation.gated:
        first = list(first[0].chunk(2, 1))
    *opening, (closing, down_type) = map(_matrices, (*first, down))

    order, ends = in_order(ids, n_experts)
    sides = tile_sides(1 if invariant else n_choices, n_experts, packed.mode)
    # no expert has more than one tile that is not full
    n_tiles = min(n_choices, n_experts) + n_choices // sides["BM"]
    options = {**sides, "BE": power_of_2(n_experts), "num_warps": 4}
    dtype = DTYPES.get(packed.mode, torch.float32)
    hidden = torch.empty(n_choices, width, dtype=dtype, device=x.device)
    _open[(n_tiles, cdiv(width, sides["BN"]))](
        x, tuple(part for part, _ in opening), order, ends, hidden, n_experts, n_used, d, width,
        x.stride(0), tuple(map(float, packed.activation.numbers)),
        TYPES=tuple(type for _, type in opening), EXPRESSION=EXPRESSIONS[packed.activation.kind],
        **options,
    )  # fmt: skip
    lines = torch.empty(n_choices, d, dtype=torch.float32, device=x.device)
    _close[(n_tiles, cdiv(d, sides["BN"]))](
        hidden, *closing, order, ends, lines, n_experts, width, d, TYPE=down_type, **options
    )
    return combine(lines, weights, added)


def _matrices(part: Tensor | BlockData) -> tuple[tuple[Tensor, int, int], str | None]:
    """The matrices of all experts with the sizes of one and of a row, and their GGML type."""
    data = part.bytes.view(torch.int16) if isinstance(part, BlockData) else part
    type = part.type if isinstance(part, BlockData) else None
    return (data, data.stride(0), data.stride(1)), type


def combine(lines: Tensor, weights: Tensor, added: Added) -> Tensor:
    """The sum of the lines f32 [n * k, d] of each row's experts times weights [n, k], in their
    order, and what is added."""
    (n_rows, n_used), d = weights.shape, lines.shape[1]
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    y = lines.new_empty(n_rows, d)
    side = min(power_of_2(d), 1024)
    _combine[(n_rows, cdiv(d, side))](
        lines, weights, y, places_of(added), d, weights.stride(0),
        N_USED=n_used, BD=side, num_warps=4,
    )  # fmt: skip
    return y


def places_of(added: Added) -> tuple[Tensor | int | None, ...]:
    """What is added, each with the distance of its rows, for `added_to`."""
    shared, gate, residual = added
    given = shared, gate, None if residual is None else residual.x
    rows = [None if x is None else as_rows(x) for x in given]
    return tuple(each for x in rows for each in (x, 0 if x is None else x.stride(0)))


def tile_sides(n_choices: int, n_experts: int, mode: str) -> dict[str, int]:
    """BM, BN, BK of a tile: about as many rows as an expert gets, and no more registers and
    shared memory than there are. Of blocks BK is the 32 numbers that are decoded at once."""
    most, columns, deep, flat = (64, 64, 64, 32) if mode == "bf16" else (32, 32, 32, 16)
    rows = min(max(power_of_2(cdiv(n_choices, n_experts)), MIN_ROWS), most)
    depth = 32 if mode == "blocks" else deep if rows == MIN_ROWS else flat
    return {"BM": rows, "BN": columns, "BK": depth}
