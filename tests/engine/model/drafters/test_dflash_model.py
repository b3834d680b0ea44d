"""The DFlash family's mathematics and files: golden blocks, lattices and confidences; what does not
fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import UBatch
from engine.errors import DraftscopeError
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.drafters import dflash as block_attention
from engine.model.drafters.config import describe_draft
from engine.model.drafters.loading import LoadedDrafter, load_drafter
from kernels import attention
from tests.support.golden_drafters import TARGETS, drafter_file, drafters, golden_drafter, spread
from tests.support.golden_runs import session
from tests.support.rewrite_gguf import rewrite

FAMILY = [*drafters("dflash"), *drafters("dspark")]
HERE = pytest.mark.skipif(not FAMILY, reason="the golden drafters are not there")
WINDOWED, SELECTING, SURE = "dflash-b-swa-d2t", "dflash2-a", "dspark-a-anchor"
CPU = torch.device("cpu")


def loaded(name: str) -> LoadedDrafter:
    with GgufFile.open(drafter_file(f"{name}.gguf")) as file:
        return load_drafter(file, session(TARGETS[name]).model)


def pass_of(tokens, pos0, seq=0):
    positions = pos0 + np.arange(len(tokens))
    none = np.zeros(0, np.int64)
    return UBatch(np.array([tokens], np.int64), positions[None].astype(np.int64), (seq,), none)


def close(found, golden):
    """Whether logits are golden, and minus infinity in the same places."""
    golden = torch.from_numpy(golden)
    assert torch.equal(torch.isinf(found), torch.isinf(golden))
    torch.testing.assert_close(found, golden, rtol=0, atol=2e-4)


@pytest.mark.skipif(not FAMILY, reason="the golden drafters are not there")
def test_attention_may_lay_its_output_out_as_it_likes(monkeypatch):
    """Torch on a GPU has the heads of all tokens side by side."""

    def attend(*args, **kwargs):
        return attention.attend(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(block_attention, "attend", attend)
    test_blocks_are_golden(FAMILY[0])


@pytest.mark.parametrize("name", FAMILY)
def test_blocks_are_golden(name):
    golden, drafter = golden_drafter(name), loaded(name)
    model, config = drafter.model, drafter.config
    rows, tokens = torch.from_numpy(golden["features"]).flatten(1), golden["tokens"].tolist()
    context = model.fused(rows)
    torch.testing.assert_close(context, torch.from_numpy(golden["g"]), rtol=0, atol=1e-4)
    memory = HybridMemory.for_layers(config.cells(), 1, 256, CPU, ahead=not config.causal)
    m, done = config.block_length(golden["draft_ids"].shape[1]), 0
    first = 0 if config.anchor else 1
    for s, start in enumerate(golden["starts"].tolist()):
        if start < done:
            memory.seq_rm(0, start)
            done = start
        if start > done:
            there = pass_of(tokens[done:start], done)
            model.inject(there, rows[None, done:start], memory)
            done = start
        block = pass_of([tokens[start]] + [config.mask_token] * (m - 1), start)
        out = model.block(block, memory)
        memory.seq_rm(0, start)
        hidden = torch.from_numpy(golden["block_hidden"][s])
        torch.testing.assert_close(out.hidden[0], hidden, rtol=0, atol=2e-4)
        base = model.logits(out.hidden)
        base = model.selector.base(base) if model.selector else base
        close(spread(drafter.vocabulary, base)[0], golden["base_logits"][s])
        if model.selector:
            ids = walk(model, out, tokens[start], golden, s)
        else:
            columns = spread(drafter.vocabulary, out.logits)[0, first:]
            ids = columns.argmax(-1).tolist()
            if config.markov:
                close(columns, golden["draft_logits"][s, first:])
        if config.confident:
            sure = torch.sigmoid(out.confidence)[0, first:]
            conf = torch.from_numpy(golden["conf"][s, first:])
            torch.testing.assert_close(sure, conf, rtol=0, atol=1e-5)
        assert ids == golden["draft_ids"][s].tolist()


def walk(model, out, last, golden, s) -> list[int]:
    """DFlash2's drafts; on the way the whole lattice is compared."""
    all_ids, all_scores = model.selector.lattice(
        out.logits, out.hidden, torch.tensor([last]), invariant=False
    )
    chosen, drafts = 0, []
    for row, (ids, scores) in enumerate(zip(all_ids[0], all_scores[0], strict=True)):
        golden_row, n = golden["lattice"][s, row + 1], len(ids)
        theirs = golden_row[:n].astype(np.int64).tolist()
        assert sorted(theirs) == sorted(ids.tolist())
        before = golden["lattice"][s, row, :n].astype(np.int64).tolist() if row else None
        table = golden_row[n:].reshape(n, n)
        for i in range(n):
            j = before.index(int(all_ids[0, row - 1, i])) if before else i
            ours = {int(t): float(x) for t, x in zip(ids, scores[i], strict=True)}
            assert [ours[t] for t in theirs] == pytest.approx(table[j].tolist(), abs=2e-4)
        chosen_scores = torch.from_numpy(golden["chosen_scores"][s, row])
        torch.testing.assert_close(scores[chosen], chosen_scores, rtol=0, atol=2e-4)
        chosen = int(scores[chosen].argmax())
        drafts.append(int(ids[chosen]))
    return drafts


@pytest.mark.parametrize("name", FAMILY)
def test_weights_take_what_was_estimated(name):
    drafter = loaded(name)
    assert drafter.weight_bytes == drafter.info.loaded_bytes["f32"]
    with GgufFile.open(drafter_file(f"{name}.gguf")) as file:
        assert describe_draft(file) == (drafter.config.drafter, drafter.info)


def _without(name):
    return lambda tensors: tensors.pop(name)


def _with(name, array):
    return lambda tensors: tensors.update({name: array})


@HERE
@pytest.mark.parametrize(
    ("base", "keys", "tensors", "message"),
    [
        (WINDOWED, {"dflash.embedding_length": 32}, None, "reads rows of 32 numbers, and those"),
        (WINDOWED, {"dflash.target_layers": [1, 4]}, None, "reads the input of layer 4, and"),
        (WINDOWED, {"dflash.target_layers": [1, 9]}, None, "reads the input of layer 9, and"),
        (WINDOWED, {"dflash.target_layers": [1]}, None, r"fc.weight: shape \[64, 128\] where"),
        (WINDOWED, {"dflash.block_size": 1}, None, "block_size: 1 is outside 2..1024"),
        (WINDOWED, {"dflash.attention.sliding_window_pattern": [True]}, None, "1 values for 3"),
        (WINDOWED, {"tokenizer.ggml.mask_token_id": 384}, None, "token 384 is outside the 384"),
        (WINDOWED, {"dflash.hidden_activation": "relu2"}, None, "uses 'relu2'; silu and"),
        (WINDOWED, {"dflash.hyper_connection.count": 4}, None, "2 key-value heads, where"),
        (WINDOWED, {}, _without("blk.1.attn_k.weight"), "blk.1.attn_k.weight: the tensor is miss"),
        (WINDOWED, {}, _with("d2t", np.arange(1, 221) * 2), "outside the target's ids 0..383"),
        (WINDOWED, {}, _with("blk.0.post_norm.weight", np.ones(64, "f4")), "is not used by"),
        (SELECTING, {"dflash.conv_group_size": 10}, None, "10 channels of 64 are no whole number"),
        (SELECTING, {}, _without("selector_successor.weight"), "selector_successor.weight: the te"),
        (SELECTING, {}, _without("blk.0.ffn_conv_base"), "blk.0.ffn_conv_base: the tensor is mis"),
        (SURE, {}, _without("conf_proj.weight"), "conf_proj.weight: the tensor is missing"),
        (SURE, {}, _with("markov_w2.weight", np.zeros((9, 8), "f4")), r"shape \[9, 8\] where"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_sentence(tmp_path, base, keys, tensors, message):
    path = rewrite(drafter_file(f"{base}.gguf"), tmp_path / "x.gguf", keys, tensors)
    target = session(TARGETS[base]).model
    with GgufFile.open(path) as file, pytest.raises(DraftscopeError, match=message) as refusal:
        load_drafter(file, target)
    assert refusal.value.message.count(". ") == 0


@HERE
def test_it_drafts_without_a_corrector_of_candidates(tmp_path):
    path = rewrite(
        drafter_file(f"{WINDOWED}.gguf"),
        tmp_path / "x.gguf",
        edit=_with("lilicorr.pass_proj.weight", np.ones((8, 64), "f4")),
    )
    with GgufFile.open(path) as file:
        drafter = load_drafter(file, session(TARGETS[WINDOWED]).model)
    assert drafter.info.unused == ("lilicorr.",)
    assert drafter.weight_bytes == loaded(WINDOWED).weight_bytes == drafter.info.loaded_bytes["f32"]
    assert loaded(WINDOWED).info.unused == ()
