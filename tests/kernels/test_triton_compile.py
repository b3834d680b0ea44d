"""Every Triton kernel as the GPU will get it: compiled for four generations, without a GPU.

With the Triton that the `test` extra installs, the one that torch pins. To compile with another:
pip install --no-deps --target FOLDER triton==VERSION
PYTHONPATH=FOLDER python -m pytest tests/kernels/test_triton_compile.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.nvidia.compiler import get_ptxas

from kernels.attention import with_triton as attention
from kernels.linear import with_triton as heads
from kernels.linear.block_linear import TYPES
from kernels.linear.block_linear import with_triton as blocks_op
from kernels.linear.block_parts import Residual
from kernels.linear.blocks import pack_blocks, stack_weights
from kernels.linear.integer_blocks import GPU_TYPES as INTEGER_TYPES
from kernels.linear.integer_blocks import with_triton as integers_op
from kernels.linear.integer_blocks.rows_with_triton import MOST_NORMED, operation_rows
from kernels.linear.packed import BlockData, PackedWeight
from kernels.moe import Choice, experts, pack_expert_blocks
from kernels.moe import with_triton as moe
from kernels.moe.packed import (
    RELU2,
    SWIGLU,
    clamped_swiglu_activation,
    situ_activation,
    swiglu_within,
)
from kernels.norm import with_triton as norm
from kernels.pointwise import with_triton as pointwise
from kernels.recurrence import UpdateLog
from kernels.recurrence import with_triton as recurrence
from kernels.recurrence.delta_rule import with_triton as delta
from kernels.recurrence.ssd import with_triton as ssd
from kernels.rope import with_triton as rope
from kernels.rows import with_triton as streams
from kernels.rows.streams import N_GATES
from tests.support import ssd_inputs
from tests.support.delta_inputs import make
from tests.support.delta_pool import scattered
from tests.support.random_blocks import random_blocks
from tests.support.triton_compiler import SHARED, Compiled, compiling, in_turn

# bytes that may be spilled: on Blackwell, the experts' products in bf16, of tiles of many rows, and
# prompts whose keys have 256 gates each
SPILLED = {("_close", 100): 16, ("_pass", 100): 64, ("_pass", 120): 64}


@pytest.fixture(params=SHARED, ids="sm_{}".format)
def compiled(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Iterator[list[Compiled]]:
    """What the launches of a test were compiled to; afterwards, that nothing was spilled."""
    try:
        get_ptxas(request.param)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no assembler: {error}")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    with compiling(request.param, monkeypatch, capsys) as done:
        yield done
    assert done
    for kernel in done:
        assert f".target sm_{request.param}" in kernel.ptx
        assert kernel.n_bytes > 0
        assert kernel.n_spilled <= SPILLED.get((kernel.name, request.param), 0), kernel.name
        assert 0 < kernel.n_registers <= 255
        assert kernel.n_shared <= SHARED[request.param]


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@in_turn("sizes", [(1, 1, 1), (4, 4, 1), (16, 8, 1), (1, 1, 32), (4, 4, 32)])
@pytest.mark.thinned(12)
def test_the_delta_rule(compiled, sizes, kda):
    n_tokens, n_snapshots, n_batch = sizes
    inputs = make(16, 128, n_tokens, n_batch, repeat=2, kda=kda)
    delta.gated_delta_rule(*inputs, grouped=True, n_snapshots=n_snapshots)
    (kernel,) = compiled
    assert kernel.name == "_recurrence"
    # four numbers of a row in one access, both ways
    assert "ld.global.v4" in kernel.ptx
    assert "st.global.v4" in kernel.ptx


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@in_turn("sizes", [(4, 4, 2), (16, 8, 1)])
@pytest.mark.thinned(6)
def test_the_delta_rule_between_rows_of_a_pool(compiled, sizes, kda):
    n_tokens, n, n_batch = sizes
    inputs = make(16, 128, n_tokens, n_batch, repeat=2, kda=kda)
    pool = scattered(inputs.state, n, over=0)
    rows, gates = (pool.rows, pool.read, pool.write), torch.ones(32 * 128)
    delta.gated_delta_slots(*inputs[:5], *rows, grouped=True)
    raw = 1e-6, gates, gates, -5.0 if kda else None
    delta.gated_delta_slots(*inputs[:5], *rows, grouped=True, raw=raw)
    assert [kernel.name for kernel in compiled] == ["_recurrence"] * 2
    for kernel in compiled:
        assert "ld.global.v4" in kernel.ptx
        assert "st.global.v4" in kernel.ptx
        # room for 14 programs of one warp side by side in a multiprocessor at least
        assert kernel.n_registers <= 144


@in_turn("numbers", [(3, 10, 40)])
def test_any_number_of_rows_of_a_pool_is_one_kernel(compiled, numbers):
    inputs = make(2, 64, 40, 2)
    for n in numbers:
        pool = scattered(inputs.state, n, over=None)
        delta.gated_delta_slots(*inputs[:5], pool.rows, pool.read, pool.write, grouped=True)
    assert [kernel.name for kernel in compiled] == ["_recurrence"]


@in_turn("widths", [(256, 64), (64, 256)])
@pytest.mark.thinned(4)
def test_the_delta_rule_of_prompts(compiled, widths):
    """Widths with a gate for each channel, which need most registers, and with one for a head."""
    channels, heads = (
        make(2, d, 500, 1, repeat=2, kda=kda) for d, kda in zip(widths, (True, False), strict=True)
    )
    delta.gated_delta_rule(*channels, grouped=True)
    delta.gated_delta_log(*channels, grouped=False)
    delta.gated_delta_log(*heads, grouped=True)
    assert [kernel.name for kernel in compiled] == ["_solve", "_pass"] * 3
    # plain f32: nothing rounded for the tensor cores
    assert not any("mma" in kernel.ptx for kernel in compiled)


@in_turn("d", [256, 16])
@pytest.mark.thinned(4)
def test_attention(compiled, d):
    """More rows of queries are more programs, so one number of tokens stands for all."""
    q, k, v = torch.ones(1, 4, 8, d), torch.ones(1, 2, 4096, d), torch.ones(1, 2, 4096, d)
    attention.attend(q, k, v, torch.ones(1, 4, 4096, dtype=torch.bool), 0.1, None)
    # cells with the heads of a token side by side, as a cache stores them
    attention.attend(
        q,
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)),
        torch.ones(1, 4, 4096, dtype=torch.bool),
        0.1,
        None,
    )
    reads = [pack_blocks(random_blocks("Q4_K", 4, 256), "Q4_K", "q8")]
    x = q.flatten(2)
    attention.attend_rows(
        q, k, v, torch.ones(1, 4, 4096, dtype=torch.bool), x, reads, invariant=False
    )
    assert {kernel.name for kernel in compiled} == {"_split", "_combine"}
    assert not any("mma" in kernel.ptx for kernel in compiled)
    # room for two programs side by side at least
    assert all(kernel.n_registers <= 200 for kernel in compiled)
    assert all(kernel.n_shared <= 48 << 10 for kernel in compiled)


@in_turn("d", [80, 576, 128])
def test_attention_of_each_query_by_itself(compiled, d):
    q, k = torch.ones(1, 4, 8, d), torch.ones(1, 2, 4096, d)
    mask, sinks = torch.ones(1, 4, 4096, dtype=torch.bool), torch.ones(8)
    attention.attend_invariant(q, k, k[..., : min(d, 512)], mask, 0.1, sinks)
    assert [kernel.name for kernel in compiled] == ["_split_alone", "_combine"]


@in_turn("n_tokens", [2, 2])
def test_no_product_is_fused_with_a_sum(compiled, n_tokens):
    """See kernels/triton_setup.py."""
    delta.gated_delta_rule(*make(2, 64, n_tokens, 1), grouped=True)
    assert "fma.rn" not in compiled[0].ptx


@pytest.mark.parametrize("kda", [False, True], ids=["head", "channel"])
@in_turn("n_tokens", [1, 4])
@pytest.mark.thinned(6)
def test_the_log_and_its_fold(compiled, n_tokens, kda):
    inputs = make(16, 128, n_tokens, 2, repeat=2, kda=kda)
    _, log = delta.gated_delta_log(*inputs, grouped=False)
    delta.fold(inputs.state, log, n_tokens, grouped=False)
    delta.fold(inputs.state, UpdateLog(*log), torch.tensor([1, 0]), grouped=False)
    assert [kernel.name for kernel in compiled] == ["_recurrence", "_fold", "_fold"]


@pytest.mark.parametrize("compiled", [80, 100], indirect=True)
@pytest.mark.thinned(4)
def test_state_space_duality(compiled):
    inputs = ssd_inputs.make(4, n_batch=2, n_groups=1, share=32, p=64, n=128)
    ssd.ssd(*inputs, n_snapshots=4)
    _, log = ssd.ssd_log(*inputs)
    delta.fold(inputs.state, log, 4, grouped=True)
    delta.fold(inputs.state, log, torch.tensor([1, 0]), grouped=True)
    pool = scattered(inputs.state, 2, over=0)
    ssd.ssd_slots(*inputs[:6], pool.rows, pool.read, pool.write)
    gates = torch.ones(32), torch.ones(32)
    ssd.ssd_slots(*inputs[:6], pool.rows, pool.read, pool.write, raw=gates)
    names = ["_recurrence", "_recurrence", "_fold", "_fold", "_recurrence", "_recurrence"]
    assert [kernel.name for kernel in compiled] == names
    assert "ld.global.v4" in compiled[0].ptx and "st.global.v4" in compiled[0].ptx


@pytest.mark.parametrize("compiled", [90, 120], indirect=True)
@pytest.mark.thinned(4)
def test_the_selective_scan(compiled):
    x, low = torch.ones(2, 4, 2048), torch.ones(2, 4, 16)
    inputs = x, x, torch.ones(16, 2048), low, low, torch.ones(2048)
    slots = torch.ones(4, 2, 16, 2048)
    for n in (1, 4):
        recurrence.scan_into(*inputs, slots[0], slots=list(slots[:n].unbind(0)))
    table = torch.zeros(2, 3, dtype=torch.int64)
    recurrence.scan_slots(*inputs, slots.flatten(0, 1), table[:, 0], table[:, 1:])
    assert [kernel.name for kernel in compiled] == ["_scan"] * 3


@in_turn("n", [256, 16])
@pytest.mark.thinned(4)
def test_state_space_duality_of_prompts(compiled, n):
    inputs = ssd_inputs.make(500, n_groups=1, share=32, p=64, n=n)
    ssd.ssd(*inputs)
    ssd.ssd_log(*inputs)
    assert [kernel.name for kernel in compiled] == ["_grams", "_pass", "_pass"]
    assert not any("mma" in kernel.ptx for kernel in compiled)


@in_turn("type_and_rows", list(zip(TYPES, itertools.cycle([1, 8, 16]))))
@pytest.mark.thinned(8)
def test_products_with_blocks(compiled, type_and_rows):
    type_name, n_rows = type_and_rows
    blocks = random_blocks(type_name, 8, 1024)
    for dtype in (torch.float32, torch.bfloat16):
        blocks_op.block_linear(torch.ones(n_rows, 1024, dtype=dtype), blocks, type_name)
    assert [kernel.name for kernel in compiled] == ["_product"] * 2


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@in_turn("sizes", [(1, 256), (512, 32)])
@pytest.mark.thinned(8)
def test_mixture_of_experts(compiled, sizes, mode):
    n_tokens, n_experts = sizes
    weights, ids = moe.route(torch.ones(n_tokens, n_experts), None, Choice(8, "softmax"))
    pairs = [(torch.ones(256, 128), torch.ones(128, 128))] * n_experts
    packed = moe.pack(pairs[0][0], pairs, mode)
    moe.experts(torch.ones(n_tokens, 128), weights, ids, packed)
    moe.route(
        torch.ones(n_tokens, n_experts),
        torch.ones(n_experts),
        Choice(8, n_groups=4, n_groups_used=2),
    )
    sorts = ["_sort"] * (8 * n_tokens <= moe.FEW_CHOICES)
    names = ["_route", *sorts, "_open", "_close", "_combine", "_route"]
    assert [kernel.name for kernel in compiled] == names
    if mode == "bf16":
        assert all("mma" in kernel.ptx for kernel in compiled if kernel.name in ("_open", "_close"))


@in_turn("types", [("Q4_K", "Q6_K"), ("Q5_1", "MXFP4")])
@pytest.mark.thinned(4)
def test_experts_in_blocks(compiled, types, monkeypatch):
    """As 8B-A1B has them: a token, and more, whose experts are shared."""
    monkeypatch.setattr("kernels.moe.runs_triton", lambda x: True)

    def parts(first, last):
        sizes = [(first, 768, 2048)] * 2 + [(last, 2048, 768)]
        rows = [len(random_blocks(type_name, 1, n_in)[0]) for type_name, _, n_in in sizes]
        return [
            BlockData(torch.zeros(64, n_out, n_bytes, dtype=torch.uint8), type_name)
            for (type_name, n_out, _), n_bytes in zip(sizes, rows, strict=True)
        ]

    packed = pack_expert_blocks(parts(*types), "q8")
    for n in (1, 64):
        x, weights = torch.ones(n, 2048), torch.ones(n, 4)
        residual = Residual(x, (x[0], 1e-6, packed.reads))
        experts(x, weights, weights.long(), packed, added=(x, weights[:, :1], residual))
    names = [kernel.name for kernel in compiled if kernel.name != "_quantise"]
    assert names == ["_open", "_close_row", "_open", "_close", "_combine"]
    assert all(kernel.n_registers <= 128 for kernel in compiled)
    exact = pack_expert_blocks(parts("Q4_K", "Q6_K"), "blocks")
    for n in (1, 512):
        x, weights = torch.ones(n, 2048), torch.ones(n, 4)
        experts(x, weights, weights.long(), exact)


@in_turn("sizes", [(256, 1), (64, 2)])
@pytest.mark.thinned(4)
def test_a_router_that_chooses(compiled, sizes):
    n_experts, n_rows = sizes
    packed = PackedWeight("f32", (n_experts + 1, 2048), 0, torch.ones(n_experts + 1, 2048))
    choice, bias = Choice(8, n_groups=4, n_groups_used=2), torch.ones(n_experts)
    moe.route_product(torch.ones(n_rows, 2048), packed, n_experts, bias, choice, invariant=False)
    (kernel,) = compiled
    assert kernel.name == "_product" and kernel.n_registers <= 128


@in_turn("types", [("Q8_0", "Q4_0"), ("Q5_K", "Q5_K")])
@pytest.mark.thinned(4)
def test_products_of_columns(compiled, types):
    def packed(type_name, n_out, n_in):
        return pack_blocks(random_blocks(type_name, n_out, n_in), type_name, "q8")

    columns = [(256 * i, packed(type_name, 64, 256)) for i, type_name in enumerate(types)]
    first = packed("Q4_K", 512, 2048)
    assert integers_op.products_of_columns(torch.ones(1, 2048), [first], columns)
    assert [kernel.name for kernel in compiled] == ["_quantise", "_product", "_product"]
    assert all(kernel.n_registers <= 128 for kernel in compiled)


@in_turn("n_vocab", [512, 248_320])
@pytest.mark.thinned(4)
def test_records_of_rows(compiled, n_vocab):
    logits = torch.ones(1, n_vocab).expand(4, n_vocab)
    streams.row_record(logits, 10, torch.ones(4, dtype=torch.int64))
    assert [kernel.name for kernel in compiled] == ["_row_record"]


@in_turn("type_and_rows", list(zip(INTEGER_TYPES, itertools.cycle([1, 4, 8]))))
@pytest.mark.thinned(16)
def test_integer_products(compiled, type_and_rows):
    type_name, n_rows = type_and_rows
    n_in = 2560
    blocks = torch.zeros(18432, len(random_blocks(type_name, 1, n_in)[0]), dtype=torch.uint8)
    integers_op.integer_linear(torch.ones(n_rows, n_in), blocks, type_name)
    quantise, product = compiled
    assert (quantise.name, product.name) == ("_quantise", "_product")
    assert "fma.rn" not in quantise.ptx
    assert "dp4a.s32.s32" in product.ptx
    # room for 12 programs of one warp side by side in a multiprocessor at least
    assert product.n_registers <= 168 and product.n_shared <= 8 << 10


@in_turn("sizes", [(1024, 4), (2560, 1), (4096, 4)])
@pytest.mark.thinned(6)
def test_products_with_what_is_done_to_their_rows(compiled, sizes):
    """The layers of models of 0.65 to 8 billion: a norm that rounds, products of two types and of
    gates in one launch, a gated norm that rounds, SwiGLU, and a residual."""

    n_in, n_rows = sizes

    def packed(type_name, n_out):
        row = random_blocks(type_name, 1, n_in)
        return pack_blocks(torch.zeros(n_out, row.shape[1], dtype=torch.uint8), type_name, "q8")

    joined = stack_weights([packed("Q5_K", 8192), packed("Q4_K", 4096)])
    gates, x = PackedWeight("f32", (64, n_in), 0, torch.ones(64, n_in)), torch.ones(1, n_rows, n_in)
    normed = norm.rms_norm_rows(x, torch.ones(n_in), 1e-6, [joined, gates])
    integers_op.products(normed, [joined, gates])
    opened = integers_op.opened(normed, packed("Q4_K", 18432), "swiglu", (), reads=[joined])
    assert opened.integers
    heads = torch.ones(1, n_rows, 32, 128)
    out = norm.gated_rms_norm_rows(
        heads, heads, torch.ones(128), 1e-6, sigmoid=False, reads=[joined]
    )
    assert out.integers
    integers_op.products(normed, [packed("Q6_K", n_in)], residual=Residual(x))
    then = Residual(x, (torch.ones(n_in), 1e-6, [joined, gates]))
    integers_op.products(normed, [packed("Q6_K", n_in)], residual=then)
    assert operation_rows("output_gate", (x, x), [joined])
    names = [kernel.name for kernel in compiled]
    closing = ["_product"] * (1 + (n_rows * n_in <= MOST_NORMED or n_rows == 1))
    assert names == ["_norm_rows", "_product", "_opened", "_norm", *closing, "_quantise"]
    for kernel in compiled:
        if "atom." in kernel.ptx:
            # what is counted comes after what was stored
            before, after = kernel.ptx.split("atom.")
            assert before.rstrip().count("bar.") >= 1 and after.split()[0].count("acq_rel")
            assert "ld.global.cg" in after
    # room for 10 programs of one warp side by side in a multiprocessor at least
    assert all(kernel.n_registers <= 200 for kernel in compiled if kernel.name != "_norm")
    # and for all of a product's, 16 at most, where the last one norms rows
    assert compiled[len(names) - 2].n_registers <= 128


@in_turn("type_name", [*TYPES[:4]])
def test_expanding_a_matrix(compiled, type_name, monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b, out=None, out_dtype=None: a.float() @ b.float())
    blocks = torch.zeros(64, len(random_blocks(type_name, 1, 2560)[0]), dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        blocks_op.expanded_product(torch.ones(65, 2560), blocks, type_name, dtype)
    assert [kernel.name for kernel in compiled] == ["_expand"] * 2


@in_turn(
    "activation",
    [swiglu_within(1.0), situ_activation(4.0, 25.0), RELU2, SWIGLU, clamped_swiglu_activation(7.0)],
)
@pytest.mark.thinned(10)
def test_activations_of_experts(compiled, activation):
    n_opened = 256 if activation.gated else 128
    pairs = [(torch.ones(n_opened, 128), torch.ones(128, 128))] * 4
    packed = moe.pack(pairs[0][0], pairs, "f32", activation)
    weights, ids = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int64)
    moe.experts(torch.ones(1, 128), weights, ids, packed)
    assert [kernel.name for kernel in compiled] == ["_sort", "_open", "_close", "_combine"]


@in_turn("n_tokens", [1, 5])
@pytest.mark.thinned(4)
def test_convolution_norms_rope_and_swiglu(compiled, n_tokens):
    recurrence.causal_conv(
        torch.ones(2, n_tokens, 6144), torch.ones(6144, 4), torch.ones(2, 3, 6144)
    )
    table = torch.zeros(2, n_tokens, dtype=torch.int64)
    recurrence.causal_conv_slots(
        torch.ones(2, n_tokens, 6144),
        torch.ones(6144, 4),
        torch.ones(9, 3, 6144),
        table[:, 0],
        table,
        None,
    )
    thirds = torch.ones(2, n_tokens, 3 * 2048).chunk(3, -1)
    recurrence.causal_conv_slots(
        thirds[0],
        torch.ones(2048, 3),
        torch.ones(9, 2, 2048),
        table[:, 0],
        table,
        None,
        activate=False,
        gate=thirds[1],
    )
    x, d = torch.ones(n_tokens, 2560), torch.ones(2560)
    norm.rms_norm(x, d, 1e-6)
    norm.l2_norm(torch.ones(n_tokens, 32, 128), 1e-6)
    norm.gated_rms_norm(x, x, d, 1e-6)
    table = torch.ones(1, n_tokens, 32)
    rope.apply_rope(torch.ones(1, n_tokens, 16, 256), table, table)
    rope.rope_at_end(torch.ones(1, n_tokens, 16, 256), table, table, back=True)
    rope.norm_and_rope(torch.ones(1, n_tokens, 16, 256), torch.ones(16, 256), 1e-6, table, table)
    cells, numbers = torch.ones(1, 4, 512, 256), torch.zeros(n_tokens, dtype=torch.int64)
    rope.rope_into_cells(
        torch.ones(1, n_tokens, 24, 256),
        d.expand(20, -1)[:, :256],
        1e-6,
        table,
        table,
        (cells, cells, numbers, numbers),
    )
    streams.write_cells_each(
        ((cells, cells[:, :1, :n_tokens].transpose(1, 2)),) * 2, numbers, numbers
    )
    pointwise.swiglu(x, x)
    norm.group_rms_norm(
        torch.ones(n_tokens, 8, 640), torch.ones(n_tokens, 8, 640), d.view(-1, 640), 1e-5
    )
    pointwise.relu2(x)
    names = [kernel.name for kernel in compiled]
    assert names == ["_conv"] * 3 + ["_norm_rows", "_norm", "_norm"] + ["_rotate"] * 4 + [
        "_write_cells",
        "_swiglu",
        "_norm",
        "_relu2",
    ]


@in_turn("n_tokens", [1, 8])
@pytest.mark.thinned(4)
def test_parts_of_kimi_delta_and_latent_attention(compiled, n_tokens):
    x, channels = torch.ones(1, n_tokens, 2048), torch.ones(2048)
    pointwise.situ(x, x, 4.0, 25.0)
    pointwise.geglu(x, x)
    recurrence.channel_gates(x, channels, channels, torch.ones(1, n_tokens, 16), -5.0)
    recurrence.channel_gates(x, channels, channels, torch.ones(1, n_tokens, 16))
    heads.head_linear(torch.ones(1, n_tokens, 16, 128), torch.ones(16, 128, 512))
    qk, gates = torch.ones(1, n_tokens, 32, 128), torch.ones(1, n_tokens, 32)
    recurrence.normed_and_gated(qk, 1e-6, gates, channels[:32], channels[:32], gates)
    pointwise.step_gates(gates, channels[:32], channels[:32])
    names = [kernel.name for kernel in compiled]
    gated = "_normed_and_gated"
    assert names == ["_situ", "_geglu", gated, gated, "_head_linear", gated, "_step_gates"]


@in_turn("n_tokens", [1, 8])
@pytest.mark.thinned(4)
def test_mixed_streams(compiled, n_tokens):
    x, m = torch.ones(1, n_tokens, 4, 1024), torch.ones(1, n_tokens, N_GATES)
    gates = streams.stream_gates(m, torch.ones(3), torch.ones(N_GATES), 20, 1e-6)
    streams.stream_gates(m[..., :4], torch.ones(1), torch.ones(4), 20, 1e-6)
    y = streams.weigh_streams(x, gates)
    streams.advance_streams(x, y, gates)
    pointwise.clamped_swiglu(y, y, 7.0)
    assert [kernel.name for kernel in compiled] == [
        *["_stream_gates"] * 2,
        "_weigh_streams",
        "_advance_streams",
        "_clamped_swiglu",
    ]
