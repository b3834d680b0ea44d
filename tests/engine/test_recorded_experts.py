"""A mixture of experts in q8 is nothing but launches, good for whatever experts are chosen."""

from __future__ import annotations

import pytest
import torch

from engine.machine.graphs import RecordOnProcessor
from kernels.dispatch import uses_llvm
from kernels.linear.blocks import pack_blocks, stack_weights
from kernels.moe import Choice, experts, route
from kernels.moe.packed import PackedExperts, put_together
from tests.support.random_blocks import random_blocks

N_EXPERTS, WIDTH, D = 6, 256, 512


def layer() -> PackedExperts:
    def packed(type: str, n_out: int, n_in: int, seed: int):
        return pack_blocks(random_blocks(type, n_out, n_in, seed=seed), type, "q8")

    return put_together(
        (
            (
                stack_weights([packed("Q4_K", WIDTH, D, 3 * e + i) for i in range(2)]),
                packed("Q6_K", D, WIDTH, 3 * e + 2),
            )
            for e in range(N_EXPERTS)
        ),
        "q8",
    )


@pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")
@pytest.mark.parametrize("n_rows", [1, 16])
@torch.inference_mode()
@pytest.mark.thinned(4)
def test_replayed_with_other_choices(n_rows: int) -> None:
    mixture, x, logits = layer(), torch.randn(n_rows, D), torch.randn(n_rows, N_EXPERTS)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route(logits, None, Choice(2, "softmax"))
        return experts(x, weights, ids, mixture), ids

    (y, ids), replay = RecordOnProcessor()(compute)
    choices = set()
    for _ in range(4):
        x.normal_()
        logits.normal_()
        replay()
        expected, expected_ids = compute()
        assert torch.equal(ids, expected_ids)
        assert torch.equal(y, expected)
        choices.add(tuple(ids.flatten().tolist()))
    assert len(choices) > 1
