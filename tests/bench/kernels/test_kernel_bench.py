"""The kernel benchmark: bytes and operations by arithmetic, and what it prints."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kernels.linear.with_torch import has_bf16
from tests.bench.kernels import __main__ as bench
from tests.bench.kernels import sizes as count
from tests.bench.kernels.cases import all_cases
from tests.bench.kernels.measure import KernelCase
from tests.bench.kernels.report import Limits, bound_and_share
from tests.bench.kernels.sizes import Sizes

CPU = torch.device("cpu")
TINY = Sizes(
    n_k_heads=2,
    n_v_heads=4,
    d_state=8,
    n_embd=16,
    n_ff=32,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    n_rot=4,
    n_cells=20,
    n_experts=4,
    n_used=2,
    n_ff_expert=16,
    tokens=(1, 3),
    batches=(1, 2),
    copied_bytes=1 << 12,
    matrix_side=8,
)


def cases(name: str) -> list[KernelCase]:
    return list(all_cases(TINY, CPU)[name]())


def tensor_bytes(values: object, seen: dict[int, int]) -> None:
    """Sizes of all tensors in nested tuples, by where they lie in memory."""
    if isinstance(values, torch.Tensor):
        seen[values.data_ptr()] = values.numel() * values.element_size()
    elif isinstance(values, tuple):
        for value in values:
            tensor_bytes(value, seen)


@pytest.mark.parametrize(
    "name",
    [
        "delta_rule",
        "delta_slots",
        "delta_log",
        "fold",
        "conv",
        "norm",
        "rope",
        "swiglu",
        "gates",
        "attention",
        "route",
    ],
)
def test_bytes_are_those_of_all_tensors_in_and_out(name):
    found = cases(name)
    assert found
    for case in found:
        seen: dict[int, int] = {}
        tensor_bytes(case.run.args, seen)
        result = case.run()
        tensor_bytes(result, seen)
        assert case.n_bytes == sum(seen.values()), case.shape


def test_bytes_of_products():
    by_shape = {case.shape: case for case in cases("linear")}
    assert set(by_shape) == {
        f"{mode} {n}x16x32" for mode in ("f32", "bf16", "int8", "int8x2") for n in (1, 3)
    }
    assert by_shape["f32 1x16x32"].n_bytes == 4 * (16 * 32 + 16 + 32)
    assert by_shape["int8 3x16x32"].n_bytes == 16 * 32 + 4 * 32 + 4 * 3 * (16 + 32)
    assert by_shape["f32 3x16x32"].n_operations == 2 * 3 * 16 * 32
    assert count.linear_bytes(340, 2, 320, 10) == 340 + 4 * 2 * 330


def test_bytes_of_experts_count_each_matrix_once():
    # 3 rows of x and y, weights and ids of 2 experts each
    assert count.expert_bytes(TINY, 1000, 3) == 1000 + 4 * (3 * (16 + 16) + 3 * 2) + 8 * 3 * 2
    # an expert has 3 matrices of 16x16, whole numbers also a scale for each of their rows
    expert = {"f32": 4 * 768, "bf16": 2 * 768, "int8": 768 + 4 * 48}
    expert["int8x2"] = expert["int8"]
    if not has_bf16():
        expert["bf16"] = expert["f32"]
    found = {case.shape.partition(" rows")[0]: case for case in cases("moe")}
    assert set(found) == {f"{mode} {n}" for mode in expert for n in (1, 3)}
    for mode, n_bytes in expert.items():
        assert found[f"{mode} 1"].n_bytes == count.expert_bytes(TINY, 2 * n_bytes, 1)
        several = {count.expert_bytes(TINY, n * n_bytes, 3) for n in (2, 3, 4)}
        assert found[f"{mode} 3"].n_bytes in several


@pytest.mark.repeats("the tests of the kernels")
def test_a_case_runs_the_same_work_as_its_law():
    for name in all_cases(TINY, CPU):
        for case in cases(name):
            result, law = case.run(), case.naive()
            first = [x[0] if isinstance(x, tuple) else x for x in (result, law)]
            close = 0.05 if case.rate == "bf16" else 1e-4
            torch.testing.assert_close(*first, rtol=close, atol=close * 10)


def test_too_many_tokens_are_left_out():
    few = replace(TINY, most_tokens=3)
    shapes = [case.shape for case in all_cases(few, CPU)["delta_rule"]()]
    assert shapes == ["B=1 T=1 K=1", "B=1 T=3 K=1", "B=1 T=3 K=3", "B=2 T=1 K=1"]


@pytest.mark.parametrize(
    ("n_bytes", "n_operations", "expected"),
    [(1000, 10, ("copy", 0.5)), (100, 800, ("matrix", 0.2))],
)
def test_the_share_is_of_the_longer_limit(n_bytes, n_operations, expected):
    limits = Limits(100.0, {"f32": 200.0})  # per second
    case = KernelCase("x", "", lambda: None, lambda: None, n_bytes, n_operations)
    assert bound_and_share(case, limits, 20.0) == pytest.approx(expected)


def test_json(capsys):
    assert bench.main(["--json", "--repeats", "1", "--only", "fold", "--only", "conv"], TINY) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kernels"] and printed["device"] and printed["threads"] >= 1
    assert set(printed["operations_per_second"]) == {"f32", "bf16"}
    rows = printed["rows"]
    assert [row["name"] for row in rows] == ["fold"] * 4 + ["conv"] * 2
    for row in rows:
        assert row["fla_ms"] is None and row["naive_ms"] > 0
        assert row["bound"] in ("copy", "matrix")
        rate = printed["bytes_per_second"], printed["operations_per_second"]["f32"]
        limits = row["n_bytes"] / rate[0], row["n_operations"] / rate[1]
        assert row["share"] == pytest.approx(1000 * max(limits) / row["ms"])


def test_table(capsys):
    assert bench.main(["--repeats", "1"], TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "kernel  shape  ms  MB  bound  share  naive ms  fla ms"
    assert lines[3].split() == head.split()
    names = {line.split()[0] for line in lines[4:]}
    assert names == set(all_cases(TINY, CPU))
    assert len({line.index("%") for line in lines[4:]}) == 1


def test_slow_laws_are_not_timed(capsys, monkeypatch):
    monkeypatch.setattr("tests.bench.kernels.report.NAIVE_STEPS", 4)
    bench.main(["--json", "--repeats", "1", "--only", "delta_rule"], TINY)
    rows = json.loads(capsys.readouterr().out)["rows"]
    timed = {row["shape"]: row["naive_ms"] is not None for row in rows}
    assert timed["B=1 T=1 K=1"] and not timed["B=1 T=3 K=1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "delta"],
            "--only delta: on cpu there are delta_rule, delta_slots, delta_log, fold",
        ),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "cuda"], "PyTorch sees no CUDA device; use --device cpu"),
    ],
)
def test_wrong_usage(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments, TINY)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
