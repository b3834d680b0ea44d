"""Adapters of kernels that need a GPU, on doubles that have the kernels' published signatures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from engine.conform import passes, runner
from engine.conform.adapters import causal_conv1d, flashinfer
from engine.conform.cases import Shape
from engine.conform.checks import CHECKS, check, has_check
from engine.conform.packages import Package
from kernels.recurrence.delta_rule import naive
from kernels.recurrence.ssd import naive as ssd


class Double(Package):
    """A package whose modules are given."""

    def __init__(self, name, **modules):
        super().__init__(name, Path("."), "")
        self.modules = modules

    def module(self, name):
        return SimpleNamespace(**self.modules[name.removeprefix(f"{self.name}.").replace(".", "_")])


def unit(x):
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def gates(A_log, a, dt_bias):
    rise = F.softplus(a.float() + dt_bias)
    return -A_log.exp().view(-1, *[1] * (dt_bias.dim() - 1)) * rise


def gdn(q, k, v, A_log, a, dt_bias, b, states):
    """Outputs and the states after every row; states are [sequences, heads, d_v, d_k]."""
    beta = torch.sigmoid(b.float())
    rows = unit(q), unit(k), v.float(), gates(A_log, a, dt_bias), beta
    o, kept = naive.gated_delta_rule(
        *rows, states.float().transpose(-1, -2), grouped=True, n_snapshots=q.shape[1]
    )
    return o.to(q.dtype), kept.flip(1).transpose(-1, -2)


def gated_delta_rule_mtp(
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None,
    intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None,
    use_qk_l2norm=True, output_state_indices=None, cache_replayssm=False, replayssm_rawv=None,
    replayssm_rawk=None, replayssm_g=None, replayssm_beta=None,
):  # fmt: skip
    assert q.dtype == torch.bfloat16 and initial_state.dtype == torch.float32 and q.shape[1] > 1
    at = initial_state_indices.long()
    o, states = gdn(q, k, v, A_log, a, dt_bias, b, initial_state[at])
    n, t = q.shape[:2]
    if cache_replayssm:
        assert disable_state_update and t >= 3
        replayssm_rawv[at] = v.transpose(1, 2)
        replayssm_rawk[at] = k.transpose(1, 2)
        replayssm_g[at] = gates(A_log, a, dt_bias).transpose(1, 2)
        replayssm_beta[at] = torch.sigmoid(b.float()).transpose(1, 2)
    elif ssm_state_indices is not None:
        assert ssm_state_indices.shape == (n, t) and not disable_state_update
        initial_state[ssm_state_indices.long()] = states
    else:
        assert disable_state_update
        intermediate_states_buffer[:n, :t] = states
    return o, initial_state


def gated_delta_rule_decode_pretranspose(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True,
    initial_state=None, initial_state_indices=None, output_state_indices=None,
    intermediate_states_buffer=None, disable_state_update=False, backend="auto",
):  # fmt: skip
    n, t = q.shape[:2]
    assert t == 1 or initial_state.dtype == torch.bfloat16
    assert (t > 1) == disable_state_update == (intermediate_states_buffer is not None)
    at = initial_state_indices.long()
    o, states = gdn(q, k, v, A_log, a, dt_bias, b, initial_state[at])
    if disable_state_update:
        intermediate_states_buffer[:n, :t] = states.to(initial_state)
    else:
        initial_state[at] = states[:, -1].to(initial_state)
    return o, initial_state


def gated_delta_rule_replayssm_commit(
    checkpoint_state, rawv_cache, rawk_cache, g_cache, beta_cache, state_indices, accept_lens, *,
    track_state_indices=None, track_steps=None, use_qk_l2norm=True, null_block_id=-1,
    backend="auto",
):  # fmt: skip
    for slot, n in zip(state_indices.tolist(), accept_lens.tolist(), strict=True):
        k = unit(rawk_cache[0, slot, :, :n].transpose(0, 1))[None]
        v, g, beta = (
            x[0, slot, :, :n].transpose(0, 1)[None].float()
            for x in (rawv_cache, g_cache, beta_cache)
        )
        first = checkpoint_state[0, slot].transpose(-1, -2)[None]
        last = naive.gated_delta_rule(k, k, v, g, beta, first, grouped=True)[1][0, 0]
        checkpoint_state[0, slot] = last.transpose(-1, -2)


def recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False,
    lower_bound=None, cu_seqlens=None, ssm_state_indices=None, num_spec_tokens=None,
    num_accepted_tokens=None, output=None, initial_state_source=None, initial_state_indices=None,
    beta_is_logit=False, seq_order=None, prefill_workspace=None, state_checkpoints=None,
    checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, checkpoint_state_indices=None, *,
    disable_state_update=False, correction_cache=None, kg_cache=None, backend="auto",
):  # fmt: skip
    assert use_gate_in_kernel and beta_is_logit and initial_state.dtype == torch.bfloat16
    assert all(x.dtype == torch.bfloat16 for x in (q, k, v, g, beta))
    t = 1 + (num_spec_tokens or 0)
    blocks = ssm_state_indices.long().view(-1, t)
    n = len(blocks)
    rows = [x.reshape(n, t, *x.shape[2:]) for x in (q, k, v, g, beta)]
    if num_spec_tokens:
        assert cu_seqlens.tolist() == list(range(0, n * t + 1, t))
    taken = torch.ones(n).long() if num_accepted_tokens is None else num_accepted_tokens.long()
    first = initial_state[blocks.gather(1, taken[:, None] - 1)[:, 0]]
    o, states = gdn(*rows[:3], A_log, rows[3], dt_bias, rows[4], first)
    initial_state[blocks] = states.to(initial_state)
    return o.reshape(v.shape), None


def selective_state_update(
    state, x, dt, A, B, C, D, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None,
    pad_slot_id=-1, state_scale=None, out=None, disable_state_update=False,
    intermediate_states_buffer=None, intermediate_state_indices=None,
    intermediate_state_scales=None, rand_seed=None, philox_rounds=10, cache_steps=0,
    algorithm="auto", dst_state_batch_indices=None, cu_seqlens=None, num_accepted_tokens=None,
    backend="auto",
):  # fmt: skip
    t = x.shape[1]
    assert cache_steps == t and dt.stride()[2:] == (1, 0) and A.stride() == (1, 0, 0)
    assert D.stride() == dt_bias.stride() == (1, 0) and out.is_contiguous()
    assert x.dtype == B.dtype == C.dtype == out.dtype == torch.bfloat16
    at = state_batch_indices.long()
    step = F.softplus(dt[..., 0] + dt_bias[:, 0])
    o, kept = ssd.ssd(
        x.float(), step, step * A[:, 0, 0], B.float(), C.float(), D[:, 0], state[at].float(),
        n_snapshots=t,
    )  # fmt: skip
    out.copy_(o)
    if disable_state_update:
        intermediate_states_buffer[intermediate_state_indices.long(), :t] = kept.flip(1).to(state)
    else:
        state[at] = kept[:, 0].to(state)


def chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None,
    state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0,
    use_cp="auto", state_indices=None, _cp_chunk_len=None, backend="auto", max_seqlen=None,
):  # fmt: skip
    assert q.is_contiguous() and q.dtype == torch.bfloat16 and g.dtype == torch.float32
    outputs, states = [], []
    for i, (a, b) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        rows = (x[None, a:b] for x in (unit(q), unit(k), v.float(), g.log(), beta))
        first = torch.zeros(1, v.shape[1], 128, 128)
        if initial_state is not None:
            first = initial_state[i : i + 1].transpose(-1, -2)
        o, kept = naive.gated_delta_rule(*rows, first, grouped=True)
        outputs.append(o[0])
        states.append(kept[0, 0].transpose(-1, -2))
    return torch.cat(outputs).to(q.dtype), torch.stack(states)


FLASHINFER = Double(
    "flashinfer",
    gdn_decode={
        f.__name__: f
        for f in (
            gated_delta_rule_mtp,
            gated_delta_rule_decode_pretranspose,
            gated_delta_rule_replayssm_commit,
        )
    },
    kda={"recurrent_kda": recurrent_kda},
    mamba_selective_state_update={"selective_state_update": selective_state_update},
    gdn_prefill={"chunk_gated_delta_rule": chunk_gated_delta_rule},
)


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    assert conv_state_indices.dtype == cache_seqlens.dtype == torch.int32
    out = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        ring, width = conv_state[slot], weight.shape[1] - 1
        at = torch.arange(int(cache_seqlens[i]) - width, int(cache_seqlens[i]) + x.shape[2])
        ring[:, at[width:] % ring.shape[1]] = x[i]
        rows = ring[:, at % ring.shape[1]]
        out[i] = F.silu(F.conv1d(rows, weight[:, None], bias, groups=len(rows)))
    return out


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
    final_states_out=None, activation=None,
):  # fmt: skip
    assert x.stride(1) == 1 and x.stride(2) % 8 == 0
    assert initial_states is None or initial_states.stride(1) == 1
    width = weight.shape[1] - 1
    first = x.new_zeros(*x.shape[:2], width) if initial_states is None else initial_states
    rows = torch.cat((first, x), 2)
    out = F.silu(F.conv1d(rows, weight[:, None], bias, groups=x.shape[1]))
    return out, rows[..., -width:]


CONV = Double(
    "causal_conv1d",
    causal_conv1d_interface={
        "causal_conv1d_update": causal_conv1d_update,
        "causal_conv1d_fn": causal_conv1d_fn,
    },
)
COMPILED = [
    (kernel, package)
    for engine, package in ((flashinfer.ENGINE, FLASHINFER), (causal_conv1d.ENGINE, CONV))
    for kernel in engine.kernels
    if kernel.compiled
]


@pytest.mark.parametrize(("kernel", "package"), COMPILED, ids=lambda x: x.name)
def test_the_calls_fit_the_published_signatures(kernel, package):
    shape = passes.shapes(kernel, kernel.recurrences[0], "cpu")[0]
    if kernel.chunk:
        kernel = replace(kernel, chunk=5)
    for name in [name for name in CHECKS if has_check(kernel, name)]:
        found = check(kernel, package, shape, name, 1, "cpu", 4)
        assert not [fault for fault in found if not fault.note], name


def test_a_fault_of_a_compiled_kernel_is_found(monkeypatch):
    def stale(**known):
        known["num_accepted_tokens"] = torch.ones_like(known["num_accepted_tokens"])
        return recurrent_kda(**known)

    monkeypatch.setitem(FLASHINFER.modules["kda"], "recurrent_kda", stale)
    kernel = next(k for k, _ in COMPILED if k.name == "recurrent_kda")
    shape = Shape("kda", 1, 1, 128, 128, 3, 2, "bfloat16")
    assert check(kernel, FLASHINFER, shape, "depths", 1, "cpu", 4)[0].cause == "stale-column"


def test_what_needs_a_gpu_is_named_and_not_played(tmp_path):
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text('__version__ = "1.7.0"\n')
    name, place, _ = runner.open_target(str(tmp_path))
    (seen,) = runner.run(name, place, seed=1, device="cpu", only=["causal_conv1d_update"])
    assert seen.needs.startswith("needs a CUDA device: ")
    (seen,) = runner.run(name, place, seed=1, device="cuda", only=["causal_conv1d_update"])
    assert "to be installed" in seen.needs
    from engine.conform import report

    assert "not checked: causal_conv1d_update conv: needs" in "\n".join(report.lines([seen], place))
    assert 'skipped="1"' in report.junit([seen], "", "")
    assert not report.judged([seen])
