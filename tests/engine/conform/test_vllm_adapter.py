"""vLLM's adapter on a package of its names: passes go by the package's own index rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.conform import runner
from engine.conform.adapters.vllm import _Recovered
from engine.conform.cases import Shape, Source
from engine.conform.subject import Memory

BUILDER = """
from types import SimpleNamespace
from torch.nn.functional import pad
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

class GDNAttentionMetadataBuilder(AttentionMetadataBuilder[int]):
    def build(self, prefix, batch, accepted, drafts):
        blocks = mamba_get_block_table_tensor(
            batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        starts = batch.query_start_loc
        masks = RULE
        some, others = bool(masks.any()), bool((~masks).any())
        lengths = starts.diff()
        of_drafts = masks.repeat_interleave(lengths)
        return SimpleNamespace(
            spec_state_indices_tensor=blocks[masks] if some else None,
            non_spec_state_indices_tensor=blocks[~masks, 0] if others else None,
            num_accepted_tokens=accepted[masks] if some else None,
            spec_token_indx=of_drafts.nonzero().flatten(),
            non_spec_token_indx=(~of_drafts).nonzero().flatten(),
            spec_query_start_loc=pad(lengths[masks].cumsum(0), (1, 0)),
            non_spec_query_start_loc=pad(lengths[~masks].cumsum(0), (1, 0)),
        )
"""
UTILS = """
import torch

def mamba_get_block_table_tensor(table, seq_lens, spec, mode):
    if mode == "none":
        return table
    first = (FIRST) // spec.block_size
    return table.gather(1, (first[:, None] + torch.arange(1 + spec.num_speculative_blocks)).long())
"""
KERNEL = """
import torch
from torch.nn.functional import normalize

def fused_recurrent_gated_delta_rule(
    q, k, v, g, beta, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices,
    num_accepted_tokens, use_qk_l2norm_in_kernel,
):
    assert use_qk_l2norm_in_kernel
    q, k, v, g, beta = (t[0] for t in (q, k, v, g, beta))
    q, k = (normalize(t, dim=-1).repeat_interleave(v.shape[1] // t.shape[1], 1) for t in (q, k))
    outputs = []
    for i, blocks in enumerate(ssm_state_indices):
        column = 0 if num_accepted_tokens is None else num_accepted_tokens[i] - 1
        state = initial_state[blocks[column]].float()
        for j, row in enumerate(range(cu_seqlens[i], cu_seqlens[i + 1])):
            state = state * g[row].exp()[:, None, None]
            off = beta[row][:, None] * (v[row] - (state * k[row][:, None]).sum(-1))
            state = state + off[:, :, None] * k[row][:, None]
            outputs.append((state * q[row][:, None]).sum(-1) * scale)
            initial_state[blocks[j]] = state.to(initial_state)
    return torch.stack(outputs)[None], initial_state
"""


@pytest.mark.parametrize(
    ("rule", "check", "causes"),
    [
        ("drafts >= 0", "no-drafts,lengths", []),
        ("drafts >= 0", "depths", []),  # of aligned blocks
        ("drafts >= 0; FIRST_IS_LATE", "depths", ["stale-column"]),
        ("drafts >= 0; accepted = accepted.clamp(max=MOST_DRAFTS)", "depths", ["stale-column"]),
        ("drafts > 0", "no-drafts", ["stale-column"]),
        ("drafts >= 0; starts = LAST_IS_EARLY", "lengths", ["unused-memory"]),
        ("drafts >= 0; accepted = accepted.sort().values", "lengths", ["stale-column"]),
        (
            "drafts >= 0; blocks[masks] = blocks[: masks.sum()].clone()",
            "lengths",
            ["other-sequence"],
        ),
    ],
)
def test_the_next_column_is_that_of_the_packages_rule(tmp_path, rule, check, causes):
    rule, late, _ = rule.partition("; FIRST_IS_LATE")
    rule = rule.replace("LAST_IS_EARLY", "starts - (starts == starts[-1]).int()")
    most = "self.vllm_config.speculative_config.num_speculative_tokens"
    rule = rule.replace("MOST_DRAFTS", most)
    first = "seq_lens" if late else "seq_lens - 1"
    for place, text in (
        ("v1/attention/backends/gdn_attn.py", BUILDER.replace("RULE", rule)),
        ("v1/attention/backends/utils.py", UTILS.replace("FIRST", first)),
        ("third_party/flash_linear_attention/ops/fused_recurrent.py", KERNEL),
    ):
        (tmp_path / "vllm" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / place).write_text(text)
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.33.0"\n')
    name, place, _ = runner.open_target(str(tmp_path))
    only, checks = ["fused_recurrent_gated_delta_rule"], check.split(",")
    seen = runner.run(name, place, seed=1, device="cpu", only=only, checks=checks)
    assert [fault.cause for one in seen for fault in one.faults] == causes


def test_a_window_that_a_commit_moves_too_far_is_named_with_its_row():
    adapter = _Recovered.__new__(_Recovered)
    adapter.memory = Memory("cpu")
    adapter.windows = torch.arange(40).view(1, 4, 5, 2)
    before, after = adapter.windows[-1].clone(), adapter.windows[-1]
    adapter._check_windows(before, [(1, 2, 1), (1, 1, 3)])
    after[1, :3], after[2, :3] = before[1, 2:5], before[1, 1:4]
    words = "the window after row 0 of the pass holds inputs +1 from the right ones"
    assert list(adapter.memory.changed()) == [("window-not-rolled-back", words)]
    after[2, :3], after[3] = before[1, :3], 0
    words = "the window of block 3, which no row is for, holds other values"
    assert list(adapter.memory.changed()) == [("null-slot-written", words)]


def test_requests_of_a_pass_are_numbered_next_to_ones_without_drafts():
    calls = []
    context = SimpleNamespace(commit=lambda *given, **_: calls.append(given))
    module = SimpleNamespace(
        KDARecoverSSMRecords=lambda *logs: logs,
        KDARecoverSSMCommitContext=SimpleNamespace(create=lambda *_, **__: context),
    )
    shape = Shape("kda", 1, 1, 16, 16, 2, 3)
    package = SimpleNamespace(module=lambda _: module)
    adapter = _Recovered(shape, Memory("cpu"), package)
    for sequences, counts in (([2, 0], [2, 1]), ([0, 1, 2], [1, 2, 1])):
        adapter.rows = Source(shape, 1).rows([*sequences, -1], [2] * len(sequences) + [1])
        adapter.accept(sequences, counts)
    (of_some, _, _, numbers), (of_all, _, _, none) = calls
    assert numbers.tolist() == [2, 0, 3]
    assert of_some.tolist() == [1, 1, 2, 1]
    assert of_all.tolist() == [1, 2, 1, 1]
    assert none is None
