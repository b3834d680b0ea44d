"""Operations that only copy, count or round, number by number: every version has their bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.rows.ngrams import NgramHash


def take_rows_naive(table: Tensor, numbers: Tensor) -> Tensor:
    rows = torch.empty(numbers.numel(), *table.shape[1:], dtype=table.dtype)
    for i, number in enumerate(numbers.flatten().tolist()):
        rows[i] = table[number]
    return rows.view(*numbers.shape, *table.shape[1:])


def take_columns_naive(panels: Tensor, numbers: Tensor) -> Tensor:
    return take_rows_naive(panels.transpose(1, 2).flatten(0, 1), numbers)


def put_rows_naive(table: Tensor, numbers: Tensor, rows: Tensor) -> None:
    flat = rows.reshape(numbers.numel(), *table.shape[1:])
    for i, number in enumerate(numbers.flatten().tolist()):
        table[number] = flat[i]


def copy_rows_naive(target: Tensor, source: Tensor) -> None:
    for place in torch.cartesian_prod(*(torch.arange(n) for n in source.shape)).view(
        -1, source.dim()
    ):
        target[tuple(place)] = source[tuple(place)]


def join_naive(parts: Sequence[Tensor]) -> Tensor:
    columns = [column for part in parts for column in part.unbind(-1)]
    return torch.stack(columns, -1)


def write_cells_naive(storage: Tensor, rows: Tensor, streams: Tensor, cells: Tensor) -> None:
    """Cells one by one."""
    n_tokens = rows.shape[1]
    for i, (stream, cell) in enumerate(zip(streams.tolist(), cells.tolist(), strict=True)):
        storage[stream, :, cell] = rows[i // n_tokens, i % n_tokens]


def recent_tokens_naive(tokens: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    n, contexts = window.shape[1] + 1, []
    history = [
        [*(int(x) for x in old.flatten()), *(int(x) + 1 for x in new)]
        for old, new in zip(window, tokens, strict=True)
    ]
    for line in history:
        ends = range(n - 1, len(line))
        contexts.append([[line[end - back] - 1 for back in range(n)] for end in ends])
    return torch.tensor(contexts), torch.tensor(history, dtype=torch.float32)[..., None]


def hash_rows_naive(context: Tensor, hashing: NgramHash) -> Tensor:
    rows = [_rows(line, hashing) for line in context.flatten(0, -2).tolist()]
    return torch.tensor(rows).view(*context.shape[:-1], -1)


def _rows(context: list[int], hashing: NgramHash) -> list[int]:
    tokens = list(context)
    for back in range(1, len(tokens)):
        if tokens[back] in (-1, hashing.end_id):
            tokens[back:] = [hashing.end_id] * len(tokens[back:])
    found: list[int] = []
    heads = hashing.n_heads
    for n in range(2, len(tokens) + 1):
        mixed = 0
        for token, factor in zip(tokens[:n], hashing.multipliers, strict=False):
            mixed ^= token * factor % 2**64
        ranges = list(zip(hashing.sizes, hashing.offsets, strict=True))[(n - 2) * heads :]
        found.extend(mixed % size + offset for size, offset in ranges[:heads])
    return found


def add_at_places_naive(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    added = [table[p % len(table)] for p in positions.flatten().tolist()]
    return x + torch.stack(added).view(x.shape)


def fold_ring_naive(
    ring: Tensor, x: Tensor, places: Tensor, n_tokens: Tensor, out: Tensor
) -> Tensor:
    for b, n in enumerate(n_tokens.tolist()):
        held = ring[b].clone()
        for t in range(n):
            held[int(places[b, t, 0])] = x[b, t]
        out[b] = held
    return out


def fold_window_naive(window: Tensor, columns: Tensor, n_tokens: Tensor, out: Tensor) -> Tensor:
    width = window.shape[1]
    for b, n in enumerate(n_tokens.tolist()):
        out[b] = torch.cat((window[b], columns[b, :n]))[n : n + width].clone()
    return out


def argmax_naive(x: Tensor) -> Tensor:
    """The largest value, looked for from the front."""
    places = [max(range(len(row)), key=row.__getitem__) for row in x.reshape(-1, x.shape[-1])]
    return torch.tensor(places, device=x.device).view(x.shape[:-1])


def rounded_naive(x: Tensor, type: str) -> Tensor:
    one = {"bf16": _bf16, "f16": _f16}[type]
    numbers = [one(number) for number in x.flatten().tolist()]
    return torch.tensor(numbers, dtype=torch.float32).view(x.shape)


def round_in_place_naive(x: Tensor, type: str) -> None:
    x.copy_(rounded_naive(x, type))


def round_rows_naive(table: Tensor, numbers: Tensor, type: str) -> None:
    for number in numbers.flatten().tolist():
        round_in_place_naive(table[number], type)


def _bf16(number: float) -> float:
    """The upper half of the bits, one more where the lower half is more than half of it."""
    if math.isnan(number):
        return number
    (bits,) = struct.unpack("I", struct.pack("f", number))
    upper, lower = divmod(bits, 1 << 16)
    upper += lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1)
    found: float = struct.unpack("f", struct.pack("I", upper << 16))[0]
    return found


def _f16(number: float) -> float:
    try:
        found: float = struct.unpack("e", struct.pack("e", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return found
