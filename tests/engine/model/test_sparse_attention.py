"""Block-sparse attention: which cells a query sees, against blocks counted one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from engine.memory.hybrid import HybridMemory
from engine.model.families import read_config
from engine.model.layers import RopeTables
from engine.model.memory import RopeAndMemory
from engine.model.mixers.attention import SparseAttention
from engine.model.parts import StateKey
from engine.model.parts.attention import INDEX_ROW
from engine.model.tensors import block_shapes
from engine.model.weights import Weights
from tests.support.golden_files import golden_file
from tests.support.naive_memory import NaiveMemory, ubatch_of

LAYER = 3


def layer_with(ratio: int, n_blocks: int) -> tuple[SparseAttention, object]:
    with GgufFile.open(golden_file("qwen4exp-b-qsa-f32.gguf")) as file:
        config = read_config(file)
        block = config.blocks[LAYER]
        part = dataclasses.replace(block.mixers[0], ratio=ratio, n_blocks=n_blocks)
        blocks = list(config.blocks)
        blocks[LAYER] = dataclasses.replace(block, mixers=(part,))
        config = dataclasses.replace(config, blocks=tuple(blocks))
        shapes = block_shapes(config, LAYER, file.tensors)
        weights = Weights(TensorReader(file), shapes, "f32", f"blk.{LAYER}.")
        return SparseAttention(part, weights, config, LAYER), config


def scores_by_hand(layer: SparseAttention, config, x: torch.Tensor, ratio: int) -> torch.Tensor:
    """Of every token [T] and every whole block, from raw keys of the whole text at once."""
    tables = RopeTables(config.rope)
    tables.reach(len(x))
    q, k = layer._index(x).split_with_sizes(layer._index_sizes, -1)
    n_heads, d = layer._part.n_index_head, layer._part.index_dim
    n_rot = config.rope.n_rot

    def turned(row: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
        row = row / (row.square().mean() + config.eps).sqrt() * weight
        cos, sin = (t[0, 0] for t in tables.at(torch.tensor([[position]])))
        first, second = row[: n_rot // 2], row[n_rot // 2 : n_rot]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, row[n_rot:]))

    of_q, of_k = layer._index_norms
    n = len(x) // ratio
    keys = [turned(k[b * ratio : (b + 1) * ratio].mean(0), of_k, b * ratio) for b in range(n)]
    scores = torch.zeros(len(x), n)
    for p in range(len(x)):
        for head in q[p].view(n_heads, d):
            query = turned(head, of_q, p)
            for b in range(n):
                scores[p, b] += max(0.0, float(query @ keys[b]))
    return scores


@pytest.mark.parametrize(("ratio", "n_blocks"), [(4, 2), (3, 1), (1, 5), (8, 100)])
@pytest.mark.parametrize("width", [29, 1, 6])
def test_a_query_sees_the_best_blocks_and_the_tail(ratio, n_blocks, width):
    torch.manual_seed(1)
    layer, config = layer_with(ratio, n_blocks)
    x = torch.randn(29, config.n_embd)
    scores = scores_by_hand(layer, config, x, ratio)
    memory, tables = NaiveMemory.for_model(config), RopeTables(config.rope)
    tables.reach(29)
    for at in range(0, 29, width):
        ubatch = ubatch_of([0] * min(width, 29 - at), at)
        memory.begin(ubatch)
        part = x[at : at + width][None]
        positions = torch.from_numpy(ubatch.positions)
        around = RopeAndMemory(*tables.at(positions), memory, tables.table)
        key = torch.zeros(1, part.shape[1], config.cells()[LAYER].n_heads, 32)
        cells = memory.attention.update(LAYER, key, key)
        seen = layer._visible(part, cells, around)
        memory.commit()
        for t in range(part.shape[1]):
            p = at + t
            whole = (p + 1) // ratio
            best = scores[p, :whole].topk(min(n_blocks, whole)).indices.tolist()
            wanted = {i for b in best for i in range(b * ratio, (b + 1) * ratio)}
            wanted |= set(range(whole * ratio, p + 1))
            assert set(seen[0, t].nonzero().flatten().tolist()) == wanted


def test_the_indexers_keys_are_rows_of_the_cells():
    _, config = layer_with(4, 2)
    memory = HybridMemory.for_model(config, 2, 32, torch.device("cpu"))
    size = config.cells()[LAYER]
    row = StateKey(LAYER, INDEX_ROW)
    assert memory.attention.layers[row].k_dim == 16
    assert size.n_bytes == 4 * (2 * (32 + 32) + 16)
    _, dense = layer_with(0, 0)
    assert dense.cells()[LAYER].further == ()
