"""SGLang's adapters on a package of its names: commits take the padding of their pass, windows of a
chain overlap."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from engine.conform.adapters.sglang import _Conv
from engine.conform.adapters.sglang_replay import Fold
from engine.conform.cases import Shape, Source
from engine.conform.subject import Memory

SHAPE = Shape("kda", 2, 1, 16, 16, 3, 2, extras=("track slots",))


def test_a_fold_has_the_padding_of_its_pass_which_no_slot_keeps():
    committed = []

    def fused(**given):
        return torch.zeros_like(given["v"])

    def fold(*given):
        committed.append([x.tolist() for x in given if getattr(x, "ndim", 0) == 1])

    package = SimpleNamespace(
        module=lambda name: SimpleNamespace(
            fused_sigmoid_gating_delta_rule_update=fused, commit_kda_replayssm_spec_all_layers=fold
        )
    )
    memory = Memory("cpu")
    subject, source = Fold(SHAPE, memory, package), Source(SHAPE, 1)
    subject.verify(source.rows([1, -1, -1], [3, 2, 2]))
    subject.accept([1], [2])
    subject.verify(source.rows([1, 0], [3, 2]))
    subject.accept([1, 0], [3, 2])
    padded, others = committed
    assert padded[:2] == [[2, -1, -1], [2, 1, 1]]
    assert (padded[2][1:], padded[3][1:]) == ([0, 0], [-1, -1])
    assert others[:2] == [[2, 1], [3, 2]]


def test_windows_of_following_rows_overlap_where_there_are_no_trees():
    def update(x, pool, *given, intermediate_conv_window, **options):
        held.append(intermediate_conv_window)
        return torch.zeros_like(x)

    held = []
    package = SimpleNamespace(module=lambda name: SimpleNamespace(causal_conv1d_update=update))
    shape = Shape("conv", 6, 1, 4, 1, 3, 2)
    subject, source = _Conv(shape, Memory("cpu"), package), Source(shape, 1)
    for tree in ([], [(-1, 0, 0)]):
        subject.verify(source.rows([1], [3], tree))
        held[-1][1, 0, :, 1:] = 7.0
    assert [bool((x[1, 1, :, :-1] == 7).all()) for x in held] == [True, False]
    assert held[0].shape == held[1].shape == (3, 3, 6, 3)
