"""--batch-invariant: the logits after a token do not depend on what is decoded with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import COMPUTE_MODES, ROLLBACK_POLICIES
from engine.run import Run
from engine.session import Session
from engine.trace.records import EMITTED_KINDS
from kernels.dispatch import uses_llvm
from resources import DEMO_TARGET
from tests.support.golden_runs import DATA, decode, golden, options_of, prompt_of, tokens_of

NAMES = (
    "qwen35-a-f32",
    "qwen35moe-d-v2x-mtp-f32",
    "qwen3next-e-v2x-f32",
    "qwen3-f-f32",
    "qwen4exp-b-qsa-f32",
)
MODES = tuple(mode for mode in COMPUTE_MODES if mode not in ("auto", "q8"))
Q8_0, Q4_K_M = "qwen35-h-v2x-mtp-q8_0", "qwen35-g-v2x-q4_k_m"
GLM5, DEEPSEEK4 = "glm5-next-b-mtp-f32", "deepseek4-a-mtp-f32"
CASES = [
    *((name, mode) for name in NAMES for mode in MODES),
    (Q8_0, "q8"),
    (Q4_K_M, "q8"),
    (GLM5, "f32"),
    (DEEPSEEK4, "f32"),
]
N_TOKENS = 34
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def opened(name: str, compute: str = "f32") -> Session:
    return Session.open(DEMO_TARGET if name == "demo" else DATA / f"{name}.gguf", compute=compute)


@cache
def model(name: str, mode: str) -> HybridModel:
    return opened(name).model_in(mode)


@cache
def texts(name: str) -> list[list[int]]:
    """Three sequences; the first is the one that is looked at."""
    if name == "demo":
        random = torch.Generator().manual_seed(1)
        n_vocab = opened(name).config.n_vocab
        return torch.randint(n_vocab, (3, N_TOKENS), generator=random).tolist()
    tokens = golden(name)["tokens"].tolist()[:N_TOKENS]
    return [tokens, tokens[::-1], tokens[7:] + tokens[:7]]


def memory_of(name: str, n_seqs: int, **others: Any) -> HybridMemory:
    config = opened(name).config
    return HybridMemory.for_model(config, n_seqs, 300, CPU, **{"batch_invariant": True, **others})


def logits_in(
    name: str, mode: str, cuts: Sequence[int], n_seqs: int = 1, n_ubatch: int = 512, **others: Any
) -> torch.Tensor:
    """Logits of all tokens of the first sequence, decoded in portions that end at `cuts`."""
    memory, rows = memory_of(name, n_seqs, **others), []
    for start, stop in zip((0, *cuts), (*cuts, N_TOKENS), strict=True):
        spans = [
            Span(i, start, text[start:stop], range(stop - start))
            for i, text in enumerate(texts(name)[:n_seqs])
        ]
        for ubatch in memory.split(spans, n_ubatch, "equal"):
            out = model(name, mode).forward(ubatch, memory).logits
            sizes = [
                sum(1 for r in ubatch.outputs if int(r) // ubatch.n_seq_tokens == i)
                for i in range(ubatch.n_seqs)
            ]
            parts = out.split(sizes)
            rows += [part for seq, part in zip(ubatch.seq_ids, parts, strict=True) if seq == 0]
    return torch.cat(rows)


@cache
def _alone(name: str, mode: str, n_threads: int) -> torch.Tensor:
    return logits_in(name, mode, range(1, N_TOKENS))


def alone(name: str, mode: str) -> torch.Tensor:
    """Logits of the same tokens decoded one by one, with as many threads as now."""
    return _alone(name, mode, torch.get_num_threads())


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.thinned(16)
def test_every_verify_width_gives_the_same_bits(name: str, mode: str) -> None:
    for width, n_seqs in ((2, 1), (3, 3), (4, 1), (8, 3), (16, 1), (N_TOKENS, 3)):
        cuts = range(width, N_TOKENS, width)
        assert torch.equal(logits_in(name, mode, cuts, n_seqs), alone(name, mode)), width


@pytest.mark.parametrize("mode", [*MODES, "q8"])
@pytest.mark.thinned(6)
def test_the_demo_model(mode: str) -> None:
    for cuts, n_seqs in (((16, 20, 24, 28, 32), 3), (range(3, N_TOKENS, 3), 1)):
        assert torch.equal(logits_in("demo", mode, cuts, n_seqs), alone("demo", mode))


def test_two_threads() -> None:
    torch.set_num_threads(2)
    name, mode = "qwen35-a-f32", "f32"
    assert torch.equal(logits_in(name, mode, (3,), 3), logits_in(name, mode, range(1, 6)))


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(CASES),
    st.sets(st.integers(1, N_TOKENS - 1), max_size=8),
    st.integers(1, 3),
    st.integers(3, 20),
    st.sampled_from(list(ROLLBACK_POLICIES)),
    st.booleans(),
)
def test_any_split_gives_the_same_bits(
    case: tuple[str, str], cuts: set[int], n_seqs: int, n_ubatch: int, policy: str, unified: bool
) -> None:
    name, mode = case
    logits = logits_in(
        name, mode, sorted(cuts), n_seqs, n_ubatch, policy=policy, n_rs_seq=3, unified=unified
    )
    assert torch.equal(logits, alone(name, mode))


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("policy", ["planes", "carry", "ring", "replay"])
@pytest.mark.parametrize("name", ["qwen35-a-f32", "qwen3next-e-v2x-f32"])
def test_rollbacks_leave_no_trace(name: str, policy: str, unified: bool) -> None:
    """Wrong drafts of both sequences are verified and taken back, after which cells of the
    sequences lie among each other; then the text goes on."""
    memory = memory_of(name, 2, policy=policy, n_rs_seq=4, unified=unified)
    target, rows, at = model(name, "f32"), [], 0
    order = [0, 1]
    for n_kept, n_wrong in ((6, 0), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1)):
        spans = []
        for seq in order:
            text = texts(name)[seq]
            spans.append(Span(seq, at, [*text[at : at + n_kept], *text[:n_wrong]], range(n_kept)))
        for ubatch in memory.split(spans, 512, "equal"):
            logits = target.forward(ubatch, memory).logits
            rows.append(logits.chunk(2)[ubatch.seq_ids.index(0)])
        at += n_kept
        assert memory.seq_rm(1, at) and memory.seq_rm(0, at)
        # anyone who comes first now fills the holes below the other's cells
        order.reverse()
    assert torch.equal(torch.cat(rows), alone(name, "f32")[:at])


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.parametrize(
    ("name", "mode"), [("qwen35moe-d-v2x-mtp-f32", "f32"), (Q8_0, "q8")], ids=["f32", "q8"]
)
@pytest.mark.thinned(8)
def test_a_speculative_run_has_the_logits_of_a_plain_one(name: str, mode: str, policy: str) -> None:
    session, prompts = opened(name, mode), [prompt_of(name), prompt_of(name)]
    plain = decode(session, prompts[:1], options_of(30, batch_invariant=True))
    options = options_of(
        30, "draft-mtp", "ngram-simple", rollback=policy, parallel=2, batch_invariant=True
    )
    run = decode(session, prompts, options)
    assert tokens_of(run) == tokens_of(plain) * 2
    for seq_id in (0, 1):
        assert emitted_p(run, seq_id) == emitted_p(plain, 0)


def emitted_p(run: Run, seq_id: int) -> list[float]:
    """The target's probability of every token of the text, as recorded."""
    table = run.trace.tokens
    wanted = np.isin(table.texts("kind"), EMITTED_KINDS) & (table.column("seq_id") == seq_id)
    return table.column("target_p")[wanted].tolist()


@pytest.mark.parametrize("name", ["qwen35-a-f32", "qwen3-f-f32"])
def test_the_normal_mode_does_so_for_few_tokens_only(name: str) -> None:
    """Up to eight rows share a product whose order of sums is that of one row; more do not."""
    one_by_one = logits_in(name, "f32", range(1, N_TOKENS), batch_invariant=False)
    if uses_llvm():
        by_eight = logits_in(name, "f32", range(8, N_TOKENS, 8), batch_invariant=False)
        assert torch.equal(by_eight, one_by_one)
    together = logits_in(name, "f32", [], batch_invariant=False)
    assert not torch.equal(together, one_by_one)
    torch.testing.assert_close(together, alone(name, "f32"), rtol=1e-3, atol=1e-3)
