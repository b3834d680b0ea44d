"""Compressed attention rows (DeepSeek-V4): inputs of a block of tokens become one row, and the last
inputs of a sequence lie in a ring whose slots go by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import operation, torch_version
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import exp, run, start, stepped, vectors
from kernels.llvm.values import I64


class Compressor(NamedTuple):
    """ratio: tokens of a block. width: numbers of a row. overlaps: a row is made of its block and
    the one before it, of which each gives half of the channels of its tokens."""

    ratio: int
    width: int
    overlaps: bool

    @property
    def n_slots(self) -> int:
        """Tokens that a row is made of, and rows of a ring."""
        return self.ratio * (2 if self.overlaps else 1)

    @property
    def n_channels(self) -> int:
        """Values of a token, and as many scores."""
        return self.width * (2 if self.overlaps else 1)


@operation(llvm=__name__)
def add_at_places(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """x + table[positions mod len(table)].

    x: f32 [B, T, C], any strides; table: f32 [n, C]; positions: int64 [B, T], not looked at by the
    host. Returns [B, T, C].
    """
    return x + table[positions % len(table)]


@operation(llvm=__name__, any_type=True)
def first_of_block(positions: Tensor, ratio: int) -> Tensor:
    """positions // ratio * ratio, int64."""
    return positions // ratio * ratio


@operation(llvm=__name__, any_type=True)
def ring_places(positions: Tensor, n_slots: int) -> Tensor:
    """Slots of a ring that tokens at positions int64 [B, T] belong to, f32 [B, T, 1]."""
    return (positions % n_slots).to(torch.float32)[..., None]


@operation(llvm=__name__)
def compress(x: Tensor, positions: Tensor, ring: Tensor, part: Compressor) -> Tensor:
    """The row of the block that ends at a token; zeros at tokens that end none.

    x: f32 [B, T, 2 n_channels], per token values and then scores, at consecutive positions int64
    [B, T]; ring: f32 [B, n_slots, 2 n_channels], the tokens before them by position mod n_slots. A
    row is the sum of its tokens' values by the softmax over them of the scores, channel by channel;
    the first block has none before it. Returns [B, T, width]. A token has the same bits whatever
    comes with it, but for the naive version.
    """
    (n_batch, n_tokens), span, ratio = x.shape[:2], part.n_slots, part.ratio
    first = positions[:, :1]
    slots = torch.arange(span, device=x.device)
    before = (first + slots) % span
    history = torch.cat((ring.gather(1, before[..., None].expand(-1, -1, ring.shape[2])), x), 1)
    # at most this many blocks end in the tokens; the last of them may be beyond
    n_ends = -(-n_tokens // ratio)
    ends = (ratio - 1 - first) % ratio + ratio * torch.arange(n_ends, device=x.device)
    sequence = torch.arange(n_batch, device=x.device)[:, None]
    tokens = (ends[..., None] + 1 + slots).clamp(max=n_tokens + span - 1)
    held = history[sequence[..., None], tokens]  # oldest first
    values, scores = held.chunk(2, -1)
    if part.overlaps:
        d = part.width
        values, scores = (
            torch.cat((h[:, :, :ratio, :d], h[:, :, ratio:, d:]), 2) for h in (values, scores)
        )
        is_first = ((first + ends < ratio)[..., None] & (slots < ratio))[..., None]
        scores = scores.masked_fill(is_first, -torch.inf)
        values = values.masked_fill(is_first, 0.0)
    weights = torch.exp(scores - scores.amax(2, keepdim=True))
    total, weight = torch.zeros_like(values[:, :, 0]), torch.zeros_like(values[:, :, 0])
    for i in range(span):  # in one order, whatever else ends here
        total = total + weights[:, :, i] * values[:, :, i]
        weight = weight + weights[:, :, i]
    y = x.new_zeros(n_batch, n_tokens + 1, part.width)
    y[sequence, ends.clamp(max=n_tokens)] = total / weight
    return y[:, :n_tokens]


@operation(llvm=__name__)
def compress_slots(
    x: Tensor, positions: Tensor, pool: Tensor, read: Tensor, write: Tensor, part: Compressor
) -> Tensor:
    """compress from and to rings in a pool f32 [n_rows, n_slots, 2 n_channels], each contiguous.

    read: int64 [B], the row with the ring of sequence b. write: int64 [B, n], 1 <= n <= T; row
    write[b, i] receives the ring i tokens before the last one. What b writes no other b' reads or
    writes; one of its rows may be read[b]. The host looks at no number.
    """
    rings, n = pool[read], x.shape[1]
    y = torch_version(compress)(x, positions, rings, part)
    for back, numbers in enumerate(write.unbind(1)):
        pool[numbers] = write_ring(rings, x, positions, n - back, torch.empty_like(rings))
    return y


@operation(llvm=__name__)
def fold_ring(ring: Tensor, x: Tensor, places: Tensor, n_tokens: Tensor, out: Tensor) -> Tensor:
    """Rings after some of the tokens that follow them.

    ring: f32 [B, n_slots, C]; x: [B, T, C]; places: [B, T, 1] of ring_places; n_tokens: int64 [B],
    0 .. T, to which the host does not look. out: filled and returned; may be `ring` itself.
    """
    at = (n_tokens - 1).clamp(min=0)[:, None]
    last = places[..., 0].gather(1, at)[:, 0].to(torch.int64)
    n_slots = ring.shape[1]
    slots = torch.arange(n_slots, device=ring.device)
    token = n_tokens[:, None] - 1 - (last[:, None] - slots) % n_slots
    new = x.gather(1, token.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
    return out.copy_(torch.where((token >= 0)[..., None], new, ring))


# Row by row.


def compress_naive(x: Tensor, positions: Tensor, ring: Tensor, part: Compressor) -> Tensor:
    y = x.new_zeros(*x.shape[:2], part.width)
    for b in range(len(x)):
        held = ring[b].clone()
        for t, position in enumerate(positions[b].tolist()):
            held[position % part.n_slots] = x[b, t]
            if position % part.ratio == part.ratio - 1:
                y[b, t] = _row(held, position, part)
    return y


def _row(ring: Tensor, position: int, part: Compressor) -> Tensor:
    def of(block: int, columns: slice) -> list[tuple[Tensor, Tensor]]:
        tokens = range(block * part.ratio, (block + 1) * part.ratio)
        halves = (ring[token % part.n_slots].chunk(2) for token in tokens)
        return [(values[columns], scores[columns]) for values, scores in halves]

    block, d = position // part.ratio, part.width
    found = of(block, slice(part.n_channels - d, None))
    if part.overlaps and block:
        found = of(block - 1, slice(d)) + found
    values, scores = (torch.stack(numbers) for numbers in zip(*found, strict=True))
    weights = torch.exp(scores - scores.amax(0))
    return (weights * values).sum(0) / weights.sum(0)


def compress_slots_naive(
    x: Tensor, positions: Tensor, pool: Tensor, read: Tensor, write: Tensor, part: Compressor
) -> Tensor:
    rings = torch.stack([pool[i] for i in read.tolist()])
    y = compress_naive(x, positions, rings, part)
    for b, numbers in enumerate(write.tolist()):
        for back, number in reversed(list(enumerate(numbers))):
            ring = rings[b].clone()
            for t in range(x.shape[1] - back):
                ring[int(positions[b, t]) % part.n_slots] = x[b, t]
            pool[number] = ring
    return y


# All slots at once.


def write_ring(ring: Tensor, x: Tensor, positions: Tensor, n_tokens: int, out: Tensor) -> Tensor:
    """Fills `out`, which may be `ring` itself, with the rings f32 [B, n_slots, C] after the first
    n_tokens of x [B, T, C] at consecutive positions int64 [B, T], to which the host does not look.
    """
    out.copy_(ring)
    kept = slice(max(0, n_tokens - ring.shape[1]), n_tokens)
    slots = positions[:, kept] % ring.shape[1]
    return out.scatter_(1, slots[..., None].expand(-1, -1, x.shape[2]), x[:, kept])


# On a CPU: rings are read where they are.


def add_at_places_with_llvm(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    y, width = x.new_empty(*x.shape), x.shape[-1]
    program = _add_program(len(table), width)
    run(program, y.numel() // width, width, (x,), table, positions, y)
    return y


@kernel(7)
def _add_program(code: Code, args: Sequence[Value], row: Value, n: int, width: int) -> None:
    """A task is one row. Arguments: x in RowPlaces, the table, positions, the sums."""
    table, positions, y = args[4:]
    source, target = start(args[:4], row), y + row * (4 * width)
    place = code.load(positions + row * 8, I64) % n
    for at, count in vectors(code, width):
        added = code.load_first(table + place * (4 * width) + at, F32X16, count)
        total = code.load_first(source + at, F32X16, count) + added
        code.store_first(total, target + at, count)


def first_of_block_with_llvm(positions: Tensor, ratio: int) -> Tensor:
    first, positions = torch.empty_like(positions), positions.contiguous()
    program = _of_positions(ratio, False)
    program.alone(positions.numel(), positions.data_ptr(), first.data_ptr())
    return first


def ring_places_with_llvm(positions: Tensor, n_slots: int) -> Tensor:
    places, positions = torch.empty(*positions.shape, 1), positions.contiguous()
    program = _of_positions(n_slots, True)
    program.alone(positions.numel(), positions.data_ptr(), places.data_ptr())
    return places


@kernel(2)
def _of_positions(code: Code, args: Sequence[Value], token: Value, n: int, is_place: bool) -> None:
    """A task is one token. Arguments: positions; of each the number within n as f32, or the
    first of its n."""
    positions, out = args
    position = code.load(positions + token * 8, I64)
    if is_place:
        code.store((position % n).to_float(signed=True), out + token * 4)
    else:
        code.store(position // n * n, out + token * 8)


def compress_with_llvm(x: Tensor, positions: Tensor, ring: Tensor, part: Compressor) -> Tensor:
    return _compress_llvm(x, positions, ring, None, part)


def compress_slots_with_llvm(
    x: Tensor, positions: Tensor, pool: Tensor, read: Tensor, write: Tensor, part: Compressor
) -> Tensor:
    """See compress_slots. Raises ValueError for rings with gaps."""
    x, positions = x.contiguous(), positions.contiguous()
    y = _compress_llvm(x, positions, pool, read, part)
    (n_seqs, n_new), width = write.shape, 2 * part.n_channels
    if not pool[:1].is_contiguous():
        raise ValueError("the numbers of a ring do not lie side by side")
    program, rings = _keep_program(part.n_slots, width), stepped(pool, 1)
    tokens = x.shape[1], n_new, x, positions
    run(program, n_seqs * part.n_slots, width * n_new, *tokens, *rings, read, write)
    return y


def _compress_llvm(
    x: Tensor, positions: Tensor, ring: Tensor, read: Tensor | None, part: Compressor
) -> Tensor:
    """read: numbers of the rings that are those of the sequences; None for 0, 1, …"""
    n_seqs, n_tokens = x.shape[:2]
    y = x.new_empty(n_seqs, n_tokens, part.width)
    if not ring[:1].is_contiguous():
        ring = ring.contiguous()
    program, width = _compress_program(part, read is not None), 2 * x.shape[2]
    rings, n_tasks = stepped(ring, 1), n_seqs * n_tokens
    run(program, n_tasks, width, n_tokens, x, positions, *rings, read, y)
    return y


@kernel(7)
def _compress_program(
    code: Code, args: Sequence[Value], task: Value, part: Compressor, numbered: bool
) -> None:
    """A task is one token. Arguments: tokens, x, positions; rings, the bytes of one, their numbers
    if they are not those of the sequences; the rows."""
    n_tokens, x, positions, rings, ring_bytes, numbers, y = args
    span, ratio, d = part.n_slots, part.ratio, part.width
    row_bytes, scores = 8 * part.n_channels, 4 * part.n_channels
    newer = 4 * (part.n_channels - d)
    b, t = task // n_tokens, task % n_tokens
    position = code.load(positions + task * 8, I64)
    target = y + task * (4 * d)
    ends = (position % ratio).equal(ratio - 1)
    number = code.load(numbers + b * 8, I64) if numbered else b
    ring, own = rings + number * ring_bytes, x + b * n_tokens * row_bytes
    # the first block has none before it
    skipped = code.choose(position.less(ratio), code.integer(span - ratio), code.integer(0))

    def token(i: Value) -> Value:
        """Address of the i-th of the span tokens, oldest first, at the channels it gives."""
        back = code.integer(span - 1) - i
        at = t - back
        # not looked at where it would be before the first token
        slot = ring + (position + span - back) % span * row_bytes
        place = code.choose(at.less(0), slot, own + at * row_bytes)
        return place + code.choose(i.less(span - ratio), code.integer(0), code.integer(newer))

    for at, count in vectors(code, d):
        with code.when(ends):
            best = code.variable(code.constant(F32X16, -float("inf")))
            with code.loop(skipped, code.integer(span)) as i:
                score = code.load_first(token(i) + scores + at, F32X16, count)
                best.set(code.larger(score, best.value))
            zero = code.constant(F32X16, 0.0)
            total, weight = code.variable(zero), code.variable(zero)
            with code.loop(skipped, code.integer(span)) as i:
                place = token(i) + at
                score = code.load_first(place + scores, F32X16, count)
                one = exp(code, score - best.value)
                weight.set(weight.value + one)
                value = code.load_first(place, F32X16, count)
                total.set(code.fma(one, value, total.value))
            code.store_first(total.value / weight.value, target + at, count)
        with code.when(ends ^ 1):
            code.store_first(code.constant(F32X16, 0.0), target + at, count)


@kernel(8)
def _keep_program(code: Code, args: Sequence[Value], task: Value, n_slots: int, width: int) -> None:
    """A task is one slot of a sequence's rings. Arguments: tokens, rings to write of each; x,
    positions; the pool, the bytes of a ring, numbers of rings that are read and written."""
    n_tokens, n_new, x, positions, pool, ring_bytes, read, write = args
    b, slot = task // n_slots, task % n_slots
    place = slot * (4 * width)
    old = pool + code.load(read + b * 8, I64) * ring_bytes + place
    own = x + b * n_tokens * (4 * width)
    for at, count in vectors(code, width):
        # before anything is written, as this may be one of the rings that are
        before = code.load_first(old + at, F32X16, count)
        with code.loop(0, n_new) as back:
            newest = n_tokens - back - 1
            position = code.load(positions + (b * n_tokens + newest) * 8, I64)
            token = newest - (position + n_slots - slot) % n_slots
            to = code.load(write + (b * n_new + back) * 8, I64)
            target = pool + to * ring_bytes + place + at
            is_old = token.less(0)
            with code.when(is_old):
                code.store_first(before, target, count)
            with code.when(is_old ^ 1):
                row = own + token * (4 * width) + at
                code.store_first(code.load_first(row, F32X16, count), target, count)


def fold_ring_with_llvm(
    ring: Tensor, x: Tensor, places: Tensor, n_tokens: Tensor, out: Tensor
) -> Tensor:
    """See fold_ring. Raises ValueError for rings to fill with gaps."""
    n_seqs, n_slots, width = ring.shape
    if not ring[:1].is_contiguous():
        ring = ring.contiguous()
    if x.stride(2) != 1 or x.stride(1) != width:
        x = x.contiguous()
    if places.stride(1) != 1:
        places = places.contiguous()
    if not out[:1].is_contiguous():
        raise ValueError("the numbers of a ring do not lie side by side")
    given = [number for one in (ring, x, places, out) for number in stepped(one, 1)]
    run(_fold_program(n_slots, width), n_seqs * n_slots, width, *given, n_tokens)
    return out


@kernel(9)
def _fold_program(code: Code, args: Sequence[Value], task: Value, n_slots: int, width: int) -> None:
    """A task is one slot of a ring. Arguments: rings, rows, slots and results, each with the
    bytes of a sequence; how many of the rows count."""
    ring, ring_bytes, x, x_bytes, places, place_bytes, out, out_bytes, counts = args
    b, slot = task // n_slots, task % n_slots
    n, place = code.load(counts + b * 8, I64), slot * (4 * width)
    at_last = code.larger(n - 1, code.integer(0))
    newest = code.load(places + b * place_bytes + at_last * 4, F32).to_integer(I64)
    token = n - 1 - (newest + n_slots - slot) % n_slots
    # of no rows there may be no slot to look at
    token = code.choose(n.less(1), n - 1, token)
    old = ring + b * ring_bytes + place
    source = code.choose(token.less(0), old, x + b * x_bytes + token * (4 * width))
    for at, count in vectors(code, width):
        row = code.load_first(source + at, F32X16, count)
        code.store_first(row, out + b * out_bytes + place + at, count)
