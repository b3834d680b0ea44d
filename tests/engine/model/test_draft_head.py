"""Candidates for drafts: named by a copy in two bits, judged by the head's own rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.gguf.file import GgufFile
from engine.model import loaded_size
from engine.model import mtp as draft_head
from engine.model.info import describe
from engine.model.layers import OutputHead
from engine.model.mtp import N_CANDIDATES, DraftHead
from engine.model.weights import Projection
from engine.options import Prompt
from engine.session import Session
from kernels.dispatch import uses_llvm
from kernels.linear.blocks import pack_blocks
from resources import DEMO_TARGET
from tests.support.golden_runs import decode, options_of, tokens_of, tokens_table
from tests.support.random_blocks import random_blocks

N_VOCAB, WIDTH = 33_000, 256

pytestmark = pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")


def head(type: str, mode: str = "q8", n_vocab: int = N_VOCAB, scale: float = 1.0) -> OutputHead:
    blocks = random_blocks(type, n_vocab, WIDTH, seed=5)
    projection = Projection(pack_blocks(blocks, type, mode))
    return OutputHead(torch.ones(WIDTH), projection, n_vocab, 1e-6, scale)


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("type", ["Q8_0", "Q6_K", "Q4_K"])
def test_candidates_have_the_logits_of_the_head(type: str, scale: float) -> None:
    output = head(type, scale=scale)
    candidates, random = DraftHead(output), torch.Generator().manual_seed(2)
    found = 0
    for _ in range(20):
        x = torch.randn(1, 3, WIDTH, generator=random)
        logits, ids, hidden = candidates(x, torch.tensor([1]))
        full = output(x, torch.tensor([1]), invariant=False)
        assert torch.equal(hidden, full.hidden)
        assert ids.shape == logits.shape == (1, N_CANDIDATES)
        assert len(set(ids[0].tolist())) == N_CANDIDATES
        assert torch.equal(logits, full.logits.gather(-1, ids))
        best = full.logits.topk(10).indices[0].tolist()
        assert best[0] in ids
        found += len(set(best) & set(ids[0].tolist()))
    assert found >= 190


def test_heads_that_it_does_not_pay_for() -> None:
    assert DraftHead.fits(head("Q6_K"))
    assert not DraftHead.fits(head("Q2_K")), "as small as the copy"
    assert not DraftHead.fits(head("Q6_K", "blocks")), "rows are not integers"
    assert not DraftHead.fits(head("Q6_K", n_vocab=4096)), "read in no time"


def test_a_run_with_candidates_writes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draft_head, loaded_size):
        monkeypatch.setattr(module, "LEAST_VOCABULARY", 0)
    drafts, texts, called = {}, [], list[torch.Tensor]()
    original = DraftHead.__call__

    def watched(self: DraftHead, x: torch.Tensor, outputs: torch.Tensor) -> draft_head.Candidates:
        called.append(x)
        return original(self, x, outputs)

    monkeypatch.setattr(DraftHead, "__call__", watched)
    for name in ("full", "auto"):
        session = Session.open(DEMO_TARGET, compute="q8")
        options = options_of(80, "draft-mtp", rollback="planes")
        options = replace(options, spec=replace(options.spec, draft_head=name))
        run = decode(
            session, [Prompt(tuple(session.tokenizer.encode("def quicksort(arr):")))], options
        )
        assert bool(called) is (name == "auto")
        found = tokens_table(run)
        columns = found["kind"], found["token_id"], np.nan_to_num(found["draft_p"])
        drafts[name] = list(zip(*columns, strict=True))
        texts.append(tokens_of(run))
    assert texts[0] == texts[1]
    made = session.model.head.draft_head
    with GgufFile.open(DEMO_TARGET) as file:
        assert describe(file).draft_head_bytes == made._copy.nbytes > 0
    alike = sum(a == b for a, b in zip(drafts["auto"], drafts["full"], strict=False))
    assert alike >= 0.95 * len(drafts["full"])
