"""Drafters of a target of several streams: rows that they read, DSpark's layers of DeepSeek-V4
against their definition, and runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Span, UBatch
from engine.errors import DraftscopeError
from engine.experiments.random_models.random_model import write_random_drafter, write_random_model
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.loading import load_drafter
from engine.model.trunks.hyper_connections import StreamBlock
from engine.options import KV_MODES, ROLLBACK_POLICIES, SPLITS, Prompt
from engine.session import Session
from tests.support.golden_files import second_set
from tests.support.golden_runs import decode, golden, options_of, session, tokens_of
from tests.support.naive_streams import block
from tests.support.rewrite_gguf import rewrite

KINDS = "dspark", "eagle3", "dflash"
TOKENS = np.random.default_rng(3).integers(3, 250, 12).tolist()
PROMPTS = [Prompt(tuple(TOKENS * 2)), Prompt(tuple(TOKENS[:5] * 3))]
GOLDEN = "deepseek4-a-mtp-f32"
NONE = np.zeros(0, np.int64)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_random_model(folder / "target.gguf", arch="deepseek4", size="tiny", quant="f32")
    for kind in KINDS:
        path = folder / f"{kind}.gguf"
        write_random_drafter(path, drafter=kind, arch="deepseek4", size="tiny", quant="f32")
    return folder


def _taps(model, tokens: list[int], width: int, layers: tuple[int, ...]) -> list[torch.Tensor]:
    memory = HybridMemory.for_model(model.config, 1, 256, model.device)
    found = []
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        (ubatch,) = memory.split([Span(0, start, part, [])], width, "seq")
        rows = model.forward(ubatch, memory, taps=layers).rows[0]
        found.append(torch.stack([rows.taps[i] for i in layers], 1))
    return torch.cat(found)


@pytest.mark.skipif(GOLDEN not in second_set(), reason="no golden file")
def test_the_last_row_is_the_mean_of_the_streams_that_llama_cpp_hands_over():
    data, model = golden(GOLDEN), session(GOLDEN).model
    n = int(data["mtp_rows"].max()) + 1
    found = _taps(model, data["mtp_tokens"][:n].tolist(), 256, (model.config.n_layer,))[:, 0]
    mean = torch.from_numpy(data["mtp_h"]).unflatten(1, (4, -1)).mean(1)
    torch.testing.assert_close(found[data["mtp_rows"]], mean, rtol=0, atol=1e-4)


def test_rows_are_means_of_what_enters_a_layer(files, monkeypatch):
    model = Session.open(files / "target.gguf").model
    layers, entered, run = tuple(range(model.config.n_layer + 1)), [], StreamBlock.__call__

    def record(self, streams, around):
        entered.append(streams[0].mean(1))
        return run(self, streams, around)

    one_by_one = _taps(model, TOKENS, 1, layers)
    monkeypatch.setattr(StreamBlock, "__call__", record)
    found = _taps(model, TOKENS, len(TOKENS), layers)
    monkeypatch.undo()
    torch.testing.assert_close(found[:, :-1], torch.stack(entered, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(one_by_one, found, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [16, 3])
def test_blocks_are_those_of_the_definition(files, tmp_path, window):
    keys = {"dflash.attention.sliding_window": np.uint32(window)}
    path, n, m = rewrite(files / "dspark.gguf", tmp_path / "x.gguf", keys), 23, 5
    target = Session.open(files / "target.gguf", compute="f32").model
    with GgufFile.open(path) as file:
        loaded = load_drafter(file, target)
        tensors = {
            name: torch.from_numpy(file.raw(name).view(np.float32).copy()).double().view(info.shape)
            for name, info in file.tensors.items()
        }
        meta = {k.removeprefix("dflash."): v for k, v in file.metadata.items()}
    model, config = loaded.model, loaded.config
    assert loaded.weight_bytes == loaded.info.loaded_bytes["f32"]
    rows = torch.randn(n, len(config.taps) * config.n_embd)
    tokens = [7, *[config.mask_token] * (m - 1)]
    memory = HybridMemory.for_layers(config.cells(), 1, 64, torch.device("cpu"), ahead=True)
    context = UBatch(np.zeros((1, n), np.int64), np.arange(n)[None], (0,), NONE)
    model.inject(context, rows[None], memory)
    there = UBatch(np.array([tokens]), n + np.arange(m)[None], (0,), NONE)
    found = model.block(there, memory)
    n_vocab = target.config.n_vocab
    table = target.embedding(torch.arange(n_vocab)[None])[0].double()
    last, law = block(tensors, meta, rows.double(), tokens, table)
    torch.testing.assert_close(found.hidden[0].double(), law, rtol=0, atol=2e-4)
    # DSpark: a bias by the token before, and confidences of the rows before their norm
    head = target.projection(law.float()[None], invariant=False)[0].double()
    before = tokens[0]
    for row in range(m):
        known = tensors["markov_w1.weight"][before]
        logits = head[row] + tensors["markov_w2.weight"] @ known
        torch.testing.assert_close(found.logits[0, row].double(), logits, rtol=0, atol=1e-3)
        sure = tensors["conf_proj.weight"].flatten() @ torch.cat((last[row], known))
        sure = sure + tensors["conf_proj.bias"][0]
        torch.testing.assert_close(found.confidence[0, row].double(), sure, rtol=0, atol=1e-3)
        before = int(logits.argmax())


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(8)
def test_no_token_changes(files, kind, policy):
    opened = Session.open(files / "target.gguf", files / f"{kind}.gguf")
    at = list(ROLLBACK_POLICIES).index(policy)
    kv, split = list(KV_MODES)[at % len(KV_MODES)], list(SPLITS)[at % len(SPLITS)]
    plain = [tokens_of(decode(opened, [prompt], options_of(8)))[0] for prompt in PROMPTS]
    options = options_of(8, f"draft-{kind}", rollback=policy, kv=kv, split=split, parallel=2)
    assert tokens_of(decode(opened, PROMPTS, options)) == plain


@pytest.mark.parametrize(
    ("base", "keys", "message"),
    [
        ("eagle3", {"eagle3.target_layers": [1, 2, 4]}, "reads the input of layer 4, and"),
        ("eagle3", {"eagle3.target_layers": [1, 2, 5]}, "4 for the mean of its streams"),
        ("dspark", {"dflash.hyper_connection.count": np.uint32(2)}, "count is 2, and streams"),
        ("dspark", {"dflash.expert_gating_func": np.uint32(1)}, "a router that dflash does not"),
        ("dspark", {"dflash.attention.head_count_kv": np.uint32(2)}, "2 key-value heads, where"),
        ("dspark", {"dflash.attention.compress_ratios": [0, 4, 0]}, "compress_ratios has a ratio"),
    ],
)
def test_what_is_refused(files, tmp_path, base, keys, message):
    path = rewrite(files / f"{base}.gguf", tmp_path / "x.gguf", keys)
    target = Session.open(files / "target.gguf").model
    with GgufFile.open(path) as file, pytest.raises(DraftscopeError, match=message):
        load_drafter(file, target)
