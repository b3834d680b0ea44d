"""Mixture of experts on a GPU: routing, and products grouped by expert that the host never sees.

The choices are sorted by expert, and every expert's run of them is cut into tiles of BM rows. How
many tiles there are only the device knows; the host launches as many as there could be at most,
and each finds its expert and its rows from where the runs end.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels import moe
from kernels.dispatch import torch_version
from kernels.moe import Choice
from kernels.moe.packed import SWIGLU, Activation, Matrices, PackedExperts
from kernels.pointwise.with_triton import softplus, tanh
from kernels.triton_setup import cdiv, jit, power_of_2

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# of a tile, the least to fill a tensor core
MIN_ROWS = 16
FEW_CHOICES = 128
"""Choices of experts that one program sorts."""
KINDS = ("swiglu", "clamped_swiglu", "situ", "relu2")


@jit
def _route(
    logits, bias, weights, ids, n_experts, stride, scale,
    SCORES: tl.constexpr, BIASED: tl.constexpr, NORMALISED: tl.constexpr,
    N_GROUPS: tl.constexpr, N_GROUPS_USED: tl.constexpr,
    N_USED: tl.constexpr, BU: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e, used = tl.arange(0, BE), tl.arange(0, BU)
    known = e < n_experts
    values = tl.load(logits + row * stride + e, known, float("-inf"))
    if SCORES == "softmax":
        p = tl.exp(values - tl.max(values, 0))
        p = p / tl.sum(p, 0)
    elif SCORES == "sigmoid":
        p = tl.sigmoid(values)
    else:
        p = tl.sqrt(softplus(values))
    p = tl.where(known, p, 0.0)
    sums = p
    if BIASED:
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
        chosen = chosen / tl.maximum(tl.sum(chosen, 0), 0.00006103515625)
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
def _tile(ends, n_experts, tile, BM: tl.constexpr, BE: tl.constexpr):
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
def _open(
    x, matrices, order, ends, hidden, n_experts, n_used, n_in, width, x_stride,
    first_number, second_number,
    KIND: tl.constexpr, BOUNDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The activation of gate x and up x, or of up x, for the rows of a tile and BN columns, in
    sorted order. first_number, second_number: of its formula; BOUNDED: whether it has a limit."""
    GATED: tl.constexpr = KIND != "relu2"
    expert, first, end = _tile(ends, n_experts, tl.program_id(1), BM, BE)
    if first >= end:
        return
    place = first + tl.arange(0, BM)
    inside = place < end
    source = tl.load(order + place, inside, 0) // n_used
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x += source[:, None] * x_stride + k[None, :]
    matrices += expert.to(tl.int64) * (2 if GATED else 1) * width * n_in
    gates = matrices + n.to(tl.int64)[None, :] * n_in + k[:, None]
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for at in range(0, n_in, BK):
        known = k < n_in - at
        rows = tl.load(x + at, inside[:, None] & known[None, :], 0.0)
        rows = rows.to(matrices.dtype.element_ty)
        used = (n < width)[None, :] & known[:, None]
        part = tl.load(gates + at, used, 0.0)
        gate = tl.dot(rows, part, gate, input_precision="ieee")
        if GATED:
            part = tl.load(gates + width * n_in + at, used, 0.0)
            up = tl.dot(rows, part, up, input_precision="ieee")
    if KIND == "situ":
        if BOUNDED:
            up = tanh(up / second_number) * second_number
        opened = tanh(gate / first_number) * first_number * tl.sigmoid(gate) * up
    elif KIND == "clamped_swiglu":
        gate = tl.where(gate > first_number, first_number, gate)
        up = tl.where(up > first_number, first_number, up)
        opened = gate * tl.sigmoid(gate) * tl.where(up < -first_number, -first_number, up)
    elif KIND == "swiglu":
        opened = gate * tl.sigmoid(gate)
        if BOUNDED:
            opened = tl.where(opened > first_number, first_number, opened)
            up = tl.where(up > first_number, first_number, up)
            up = tl.where(up < -first_number, -first_number, up)
        opened *= up
    else:
        opened = tl.maximum(gate, 0.0) * gate
    address = hidden + place.to(tl.int64)[:, None] * width + n[None, :]
    kept = inside[:, None] & (n < width)[None, :]
    tl.store(address, opened.to(hidden.dtype.element_ty), kept)


@jit
def _close(
    hidden, matrices, order, ends, lines, n_experts, width, n_out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """down of the rows of a tile and BN columns, back in the order of rows and choices."""
    expert, first, end = _tile(ends, n_experts, tl.program_id(1), BM, BE)
    if first >= end:
        return
    place = first + tl.arange(0, BM)
    inside = place < end
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    hidden += place.to(tl.int64)[:, None] * width + k[None, :]
    matrices += expert.to(tl.int64) * n_out * width
    matrices += n.to(tl.int64)[None, :] * width + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, width, BK):
        known = k < width - at
        rows = tl.load(hidden + at, inside[:, None] & known[None, :], 0.0)
        part = tl.load(matrices + at, (n < n_out)[None, :] & known[:, None], 0.0)
        total = tl.dot(rows, part, total, input_precision="ieee")
    line = tl.load(order + place, inside, 0)
    kept = inside[:, None] & (n < n_out)[None, :]
    tl.store(lines + line[:, None] * n_out + n[None, :], total, kept)


@jit
def _combine(lines, weights, y, d, stride, N_USED: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(N_USED):
        line = tl.load(lines + (row * N_USED + i) * d + c, c < d, 0.0)
        total += tl.load(weights + row * stride + i) * line
    tl.store(y + row * d + c, total, c < d)


def route(logits: torch.Tensor, n_used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route."""
    return route_biased(logits, None, Choice(n_used, "softmax"))


def route_biased(
    logits: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route_biased. Groups whose sides are no powers of two are left to torch."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    (n_rows, n_experts), n_used = logits.shape, choice.n_used
    wide = power_of_2(n_experts)
    if choice.n_groups > 1 and (
        wide != n_experts or wide % choice.n_groups or wide == choice.n_groups
    ):
        return torch_version(moe.route_biased)(logits, bias, choice)
    weights = logits.new_empty(n_rows, n_used)
    ids = torch.empty(n_rows, n_used, dtype=torch.int64, device=logits.device)
    _route[(n_rows,)](
        logits, logits if bias is None else bias, weights, ids, n_experts, logits.stride(0),
        float(choice.scale),
        SCORES=choice.scores, BIASED=bias is not None, NORMALISED=choice.normalised,
        N_GROUPS=choice.n_groups, N_GROUPS_USED=choice.n_groups_used,
        N_USED=n_used, BU=power_of_2(n_used), BE=wide, num_warps=4,
    )  # fmt: skip
    return weights, ids


def _in_order(ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of choices by expert, int64 [n], and where those of each expert end."""
    n_choices = ids.numel()
    if n_choices > FEW_CHOICES:
        in_order, order = torch.sort(ids.flatten(), stable=True)
        every = torch.arange(n_experts, device=ids.device)
        return order, torch.searchsorted(in_order, every, right=True)
    order, ends = ids.new_empty(n_choices), ids.new_empty(n_experts)
    _sort[(1,)](
        ids.contiguous(), order, ends, n_choices, n_experts,
        BC=max(power_of_2(n_choices), 16), BE=power_of_2(n_experts), num_warps=4,
    )  # fmt: skip
    return order, ends


def pack(
    example: torch.Tensor, matrices: Matrices, mode: str, activation: Activation = SWIGLU
) -> PackedExperts:
    """See kernels.moe.pack_experts. data: gate above up [E, 2f, d] (or up alone), down [E, d, f].

    example: one of the matrices, for its device. While they are put side by side a layer is held
    twice. Raises ValueError for int8 and for an activation that has no kernel.
    """
    if mode not in DTYPES:
        raise ValueError("int8 experts are for processors: choose f32 or bf16 on a GPU")
    if activation.kind not in KINDS:
        raise ValueError(f"experts with {activation.name} have no kernel for a GPU")
    dtype = DTYPES[mode]
    pairs = [(gate_up.to(dtype), down.to(dtype)) for gate_up, down in matrices]
    gate_up, down = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    n_experts, n_embd, width = down.shape
    shape, n_bytes = (n_experts, width, n_embd), gate_up.nbytes + down.nbytes
    return PackedExperts(mode, shape, n_bytes, (gate_up, down), activation)


def experts_invariant(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """See kernels.moe.experts with `invariant`: tiles of one size, a row at any place of them."""
    return experts(x, weights, ids, packed, tile_sides(1, packed.shape[0], packed.mode))


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: PackedExperts,
    sides: dict[str, int] | None = None,
) -> torch.Tensor:
    """See kernels.moe.experts. sides: of a tile, None for those that suit the rows."""
    gate_up, down = packed.data
    n_experts, width, d = packed.shape
    n_rows, n_used = ids.shape
    n_choices = n_rows * n_used
    if x.stride(1) != 1:
        x = x.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()

    order, ends = _in_order(ids, n_experts)
    sides = sides or tile_sides(n_choices, n_experts, packed.mode)
    # no expert has more than one tile that is not full
    n_tiles = min(n_choices, n_experts) + n_choices // sides["BM"]
    options = {**sides, "BE": power_of_2(n_experts), "num_warps": 4}
    activation = packed.activation
    first, second = (*map(float, activation.numbers), 0.0, 0.0)[:2]
    # the limit of SwiGLU is its only number, that of SiTU its second, where 0 means none
    bounded = second > 0 if activation.kind == "situ" else bool(activation.numbers)
    hidden = torch.empty(n_choices, width, dtype=gate_up.dtype, device=x.device)
    _open[(cdiv(width, sides["BN"]), n_tiles)](
        x, gate_up, order, ends, hidden, n_experts, n_used, d, width, x.stride(0),
        first, second, KIND=activation.kind, BOUNDED=bounded, **options,
    )  # fmt: skip
    lines = torch.empty(n_choices, d, dtype=torch.float32, device=x.device)
    _close[(cdiv(d, sides["BN"]), n_tiles)](
        hidden, down, order, ends, lines, n_experts, width, d, **options
    )
    y = torch.empty(n_rows, d, dtype=torch.float32, device=x.device)
    side = min(power_of_2(d), 1024)
    _combine[(cdiv(d, side), n_rows)](
        lines, weights, y, d, weights.stride(0), N_USED=n_used, BD=side, num_warps=4
    )
    return y


def tile_sides(n_choices: int, n_experts: int, mode: str) -> dict[str, int]:
    """BM, BN, BK of a tile: about as many rows as an expert gets, and no more registers and
    shared memory than there are."""
    most, columns, deep, flat = (64, 64, 64, 32) if mode == "bf16" else (32, 32, 32, 16)
    rows = min(max(power_of_2(cdiv(n_choices, n_experts)), MIN_ROWS), most)
    return {"BM": rows, "BN": columns, "BK": deep if rows == MIN_ROWS else flat}
