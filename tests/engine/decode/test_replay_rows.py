"""Replays that disagree with the first verification: the trace tells what counted in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import UBatch
from engine.memory.hybrid import HybridMemory
from engine.options import SamplerOptions
from engine.run import Run
from engine.trace.records import EMITTED_KINDS, GHOST_KINDS
from tests.support.golden_runs import MTP_MODELS, options_of, prompt_of, session
from tests.support.noisy_logits import with_logits

MTP = MTP_MODELS[0]
GREEDY, HOT = SamplerOptions(), SamplerOptions(temp=1.5, seed=3)


class WidthNoise:
    """Logits that depend on how many tokens share the pass. logits: those last computed after
    each position."""

    def __init__(self, patch: pytest.MonkeyPatch, scale: float) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        forward = type(session(MTP).model).forward

        def noisy(model, ubatch: UBatch, memory: HybridMemory, **wanted: Any):
            out = forward(model, ubatch, memory, **wanted)
            positions = ubatch.positions.reshape(-1)[ubatch.outputs].tolist()
            rows = []
            for pos, row in zip(positions, out.logits, strict=True):
                seed = torch.Generator().manual_seed(1000 * ubatch.n_seq_tokens + pos)
                rows.append(row + scale * torch.randn(row.shape, generator=seed))
                self.logits[pos] = rows[-1]
            return with_logits(out, torch.stack(rows)) if rows else out

        patch.setattr(type(session(MTP).model), "forward", noisy)


def rounds_of(run: Run, n: int) -> Iterator[tuple[dict, list[dict], list[int]]]:
    """Round by round: its row, its token rows, and the tokens that it emitted."""
    run.step()
    for number in range(1, n):
        before = len(run.emitted[0])
        run.step()
        tokens, rounds = run.trace.tokens, run.trace.rounds
        mine = np.flatnonzero(tokens.column("round") == number).tolist()
        row = rounds.row(int(np.flatnonzero(rounds.column("round") == number)[0]))
        yield row, [tokens.row(i) for i in mine], list(run.emitted[0][before:])


@pytest.mark.parametrize("scale", [2.0, 8.0])
@pytest.mark.parametrize("sampler", [GREEDY, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accept", ["sampled", "synthetic"])
@pytest.mark.parametrize("memory", [("checkpoint", None), ("planes", 2)], ids=str)
@pytest.mark.thinned(4)
def test_rows_tell_the_verification_that_counted(
    monkeypatch: pytest.MonkeyPatch,
    memory: tuple[str, int | None],
    sampler: SamplerOptions,
    scale: float,
    accept: str,
) -> None:
    noise = WidthNoise(monkeypatch, scale)
    options = options_of(400, "draft-mtp", n_max=8, ignore_eos=True, sampler=sampler)
    policy, n_rs_seq = memory
    options = replace(options, rollback=policy, n_rs_seq=n_rs_seq, replay="verify")
    banned = torch.tensor(sorted(session(MTP).tokenizer.eog_ids))
    if accept == "synthetic":
        options = replace(options, spec=replace(options.spec, synth_len=3.0))
    run = session(MTP).start([prompt_of(MTP)], options)
    n_changed = n_shorter = 0
    for row, rows, final in rounds_of(run, 25):
        emitted = [r for r in rows if r["kind"] in EMITTED_KINDS]
        # each position once, in order, with the tokens that were put out
        first = row["pos0"] + 1
        assert sorted(r["pos"] for r in emitted) == list(range(first, first + len(final)))
        by_pos = sorted(emitted, key=lambda r: r["pos"])
        assert [r["token_id"] for r in by_pos] == final
        # undone: drafted tokens that are not at the start of the list, before the target's own
        draft = [r["token_id"] for r in rows if r["draft_index"] is not None]
        draft = draft[: row["num_draft_tokens"]]
        kept = final[: len(final) - row["num_target_tokens"]]
        n_same = next(
            (i for i, (a, b) in enumerate(zip(draft, kept, strict=False)) if a != b), len(kept)
        )
        assert n_same == len(kept) == row["num_accepted_draft_tokens"]
        assert row["rollback_depth"] == row["num_draft_tokens"] - n_same
        assert row["attention_pos_max"] == row["recurrent_pos_max"] == row["pos0"] + len(final) - 1
        assert row["num_emitted"] == len(final)
        # facts: of the logits that were computed last after the position before
        for r in rows:
            if r["target_p"] is None:
                assert r["kind"] in (*GHOST_KINDS, "replayed")
                continue
            logits = noise.logits[r["pos"] - 1]
            p = torch.softmax(logits.double(), 0)[r["token_id"]].item()
            assert r["target_p"] == pytest.approx(p, rel=1e-4, abs=1e-12), r
            assert r["target_rank"] == 1 + int((logits > logits[r["token_id"]]).sum())
            if accept == "sampled" and sampler is GREEDY and r["kind"] in EMITTED_KINDS:
                allowed = logits.index_fill(0, banned, -torch.inf)
                assert (int(allowed.argmax()), r["rule_p"]) == (r["token_id"], 1.0)
        n_changed += row["replay_index"] > 1
        n_shorter += row["replay_index"] > 0 and row["num_target_tokens"] == 1
    if accept == "sampled":
        # else nothing was shown
        assert (n_changed if policy == "checkpoint" else n_shorter) > 0 or scale < 8
