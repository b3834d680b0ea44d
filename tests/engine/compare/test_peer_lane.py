"""llama.cpp as a lane: with a stand-in for the library, and with the library where it is."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, PEER_LANE
from engine.compare.llama_cpp import LlamaCpp
from engine.errors import OptionError, UnsupportedModelError
from engine.memory.hybrid import HybridMemory
from engine.options import Prompt
from engine.session import Session
from tests.support.clean import passed
from tests.support.comparisons import differences_of, finish, specs, verdicts
from tests.support.golden_runs import DATA, MTP_MODELS, options_of, prompt_of, session

MTP = MTP_MODELS[0]
installed = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


class FakeLlama:
    """The C interface over this engine's own model, so that its lane has to be exact.

    scale: what logits are multiplied by, to be wrong on purpose. decoded: (seq, positions) of
    every call.
    """

    __version__ = "0.0-fake"

    def __init__(self, scale: float = 1.0, loads: bool = True) -> None:
        self.scale, self.loads = scale, loads
        self.decoded: list[tuple[int, list[int]]] = []
        self.freed: list[str] = []
        self.fails_at = -1
        self.llama_log_callback = lambda function=None: function

    def llama_log_set(self, callback, data) -> None:
        self.log = callback

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path: bytes, settings: SimpleNamespace):
        assert settings.n_gpu_layers == 0
        if not self.loads:
            self.log(2, b"a warning\n", None)
            self.log(4, b"unknown architecture\n", None)
            return None
        return path.decode()

    def llama_model_size(self, model) -> int:
        return 77

    def llama_model_get_vocab(self, model):
        return model

    def llama_vocab_n_tokens(self, vocab) -> int:
        return session(MTP).config.n_vocab

    def llama_init_from_model(self, model, settings: SimpleNamespace):
        self.settings = settings
        n_ctx = settings.n_ctx // settings.n_seq_max
        self.memory = HybridMemory.for_model(
            session(MTP).config, settings.n_seq_max, n_ctx, torch.device("cpu")
        )
        return self

    def llama_batch_init(self, n: int, embd: int, n_seq_max: int) -> SimpleNamespace:
        return SimpleNamespace(
            n_tokens=0,
            token=[0] * n,
            pos=[0] * n,
            n_seq_id=[0] * n,
            seq_id=[[0] * n_seq_max for _ in range(n)],
            logits=[0] * n,
        )

    def llama_decode(self, context, batch: SimpleNamespace) -> int:
        n = batch.n_tokens
        positions, seqs = batch.pos[:n], {row[0] for row in batch.seq_id[:n]}
        assert batch.n_seq_id[:n] == [1] * n and len(seqs) == 1
        assert positions == list(range(positions[0], positions[0] + n))
        if positions[0] == self.fails_at:
            return 1
        (seq,) = seqs
        self.decoded.append((seq, positions))
        span = Span(seq, positions[0], batch.token[:n], np.flatnonzero(batch.logits[:n]).tolist())
        for ubatch in self.memory.split([span], 512, "equal"):
            self.out = session(MTP).model.forward(ubatch, self.memory).logits
        return 0

    def llama_get_logits_ith(self, context, i: int):
        row = (self.out[i] * self.scale).contiguous().numpy()
        self.kept = np.ascontiguousarray(row)
        return self.kept.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_get_memory(self, context):
        return self.memory

    def llama_memory_seq_rm(self, memory, seq: int, p0: int, p1: int) -> bool:
        return memory.seq_rm(seq, p0, p1)

    def llama_batch_free(self, batch) -> None:
        self.freed.append("batch")

    def llama_free(self, context) -> None:
        self.freed.append("context")

    def llama_model_free(self, model) -> None:
        self.freed.append("model")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    library = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    return library


def compared(*prompts: Prompt, n_ubatch: int = 512, n_max: int = 3) -> Comparison:
    options = options_of(20, n_max=n_max, n_ubatch=n_ubatch, parallel=2, ignore_eos=True)
    lanes = [NOISE_LANE, PEER_LANE]
    return Comparison(session(MTP), prompts, options, lanes, draft_accept=(0, 2))


def test_a_peer_with_the_same_kernels_is_exact(fake: FakeLlama) -> None:
    tokens = prompt_of(MTP).tokens
    prompts = [Prompt(tokens[:20]), Prompt(tokens[4:12]), Prompt(tokens[7:14])]
    comparison = finish(compared(*prompts, n_ubatch=16))
    verdict = verdicts(comparison)["peer"]
    assert (verdict.verdict, verdict.worst_nmse, verdict.n_positions) == ("exact", 0.0, 60)
    rows = differences_of(comparison, "peer")
    for seq_id, (prompt, emitted) in enumerate(zip(prompts, comparison.emitted, strict=True)):
        mine = rows["seq_id"] == seq_id
        assert rows["pos"][mine].tolist() == list(
            range(len(prompt.tokens), len(prompt.tokens) + 20)
        )
        assert rows["token_id"][mine].tolist() == emitted
    # prompts in ubatches, everything else by itself; nothing that was rejected
    assert [p for s, p in fake.decoded if s == 0][:3] == [[*range(16)], [*range(16, 20)], [20]]
    assert fake.settings.n_seq_max == 2 and fake.settings.type_k == fake.settings.type_v == 0
    assert fake.freed == ["batch", "context", "model"]
    facts = comparison.trace.runs[verdict.run_id]
    assert facts["compute"] == "llama-cpp-python 0.0-fake"
    assert facts["weight_bytes"] == 77
    rounds = comparison.trace.rounds
    mine = np.flatnonzero(rounds.column("run_id") == verdict.run_id)
    recorded = rounds.row(int(mine[-1]))
    assert recorded["kv_cells_used"] is None and recorded["memory_bytes_held"] is None


CONTROLS = ("noise,peer=1", "noise,peer=2", "noise,peer=3")


@pytest.mark.parametrize(("scale", "verdict"), [(1 + 1e-5, "agrees"), (1.01, "suspect")])
def test_lanes_that_add_in_another_order_judge_it(
    fake: FakeLlama, scale: float, verdict: str
) -> None:
    fake.scale = scale
    comparison = finish(compared(prompt_of(MTP)))
    found = verdicts(comparison)
    assert list(found) == ["reference", "noise", "peer", *CONTROLS]
    worst = [found[name].worst_nmse for name in CONTROLS]
    assert len(set(worst)) == 3 and 0 < max(worst) < 1e-7
    assert found["peer"].bound == max(1e-9, 10 * max(worst))
    assert found["peer"].verdict == verdict
    for name in CONTROLS:
        assert (found[name].verdict, found[name].bound) == ("within", found["peer"].bound)
        assert comparison.trace.runs[found[name].run_id]["lane_kind"] == "peer noise"
        assert found[name].compute == "f32, activations rounded as in llama.cpp"


class RoundingLlama(FakeLlama):
    """Rounds as the library does, in the way of the file."""

    def __init__(self, name: str, *, reads: int = 0) -> None:
        """reads: what is added to the last but one token of a prompt, to be wrong on purpose."""
        super().__init__()
        self.opened, self.reads = session(name), reads
        self.model = self.opened.model_as_llama_cpp()

    def llama_vocab_n_tokens(self, vocab) -> int:
        return self.opened.config.n_vocab

    def llama_init_from_model(self, model, settings: SimpleNamespace):
        self.settings = settings
        self.memory = HybridMemory.for_model(
            self.opened.config, settings.n_seq_max, settings.n_ctx, torch.device("cpu")
        )
        return self

    def llama_decode(self, context, batch: SimpleNamespace) -> int:
        tokens = batch.token[: batch.n_tokens]
        if batch.pos[0] == 0:
            tokens[-2] = (tokens[-2] + self.reads) % self.opened.config.n_vocab
        outputs = np.flatnonzero(batch.logits[: len(tokens)]).tolist()
        span = Span(batch.seq_id[0][0], batch.pos[0], tokens, outputs)
        (ubatch,) = self.memory.split([span], 512, "equal")
        self.out = self.model.forward(ubatch, self.memory).logits
        return 0


@pytest.mark.parametrize("name", ["qwen35-h-v2x-mtp-q8_0", "qwen35-g-v2x-q4_k_m"])
@pytest.mark.parametrize(("reads", "verdict"), [(0, "agrees"), (1, "suspect")])
def test_rounding_is_explained_and_a_wrong_token_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str, reads: int, verdict: str
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", RoundingLlama(name, reads=reads))
    options = options_of(20, n_max=3, n_ctx=128, ignore_eos=True)
    lanes = specs("checkpoint", "peer")
    comparison = Comparison(session(name), prompt_of(name), options, lanes, draft_accept=(1,))
    found = verdicts(finish(comparison))
    assert found["peer"].verdict == verdict
    assert found["peer"].worst_nmse > 1e-4
    controls = [found[name].worst_nmse for name in CONTROLS]
    assert found["peer"].bound == 10 * max(controls)
    # the rounding of a peer explains nothing in our own lanes
    assert found["checkpoint"].bound == found["noise"].bound < 1e-6


def test_a_peer_that_fails_stops_alone(fake: FakeLlama) -> None:
    fake.fails_at = len(prompt_of(MTP).tokens) + 5
    noise, peer, *controls = finish(compared(prompt_of(MTP))).results()[1:]
    assert (passed(noise.verdict), peer.verdict) == ("passed", "failed")
    assert all(passed(control.verdict) == "passed" for control in controls)
    assert "llama.cpp could not decode position" in peer.error


def test_a_file_that_llama_cpp_cannot_load(fake: FakeLlama) -> None:
    fake.loads = False
    with pytest.raises(UnsupportedModelError, match=f"{MTP}.gguf: unknown architecture\\. Leave"):
        compared(prompt_of(MTP))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(OptionError, match=r"pip install 'llama-cpp-python>=0\.3'"):
        compared(prompt_of(MTP))


def test_without_a_file(fake: FakeLlama) -> None:
    opened = session(MTP)
    bare = Session(opened.model, opened.info, opened.tokenizer, None, {})
    with pytest.raises(OptionError, match="no file to open"):
        Comparison(bare, prompt_of(MTP), options_of(4, "draft-mtp"), [PEER_LANE])


@installed
@pytest.mark.parametrize("name", ["qwen35-c-v2x-mtp-f32", "qwen3next-e-v2x-f32", "qwen3-f-f32"])
def test_llama_cpp_agrees_on_float_files(name: str) -> None:
    options = options_of(40, n_max=3, n_ctx=256, ignore_eos=True)
    comparison = finish(
        Comparison(session(name), prompt_of(name), options, [PEER_LANE], draft_accept=(1,))
    )
    verdict = verdicts(comparison)["peer"]
    assert (verdict.verdict, verdict.n_forks, verdict.n_positions) == ("agrees", 0, 40)
    assert verdict.worst_nmse < 1e-9 and verdict.bound < 1e-7


@installed
def test_llama_cpp_agrees_on_quantised_files_and_sequences() -> None:
    name = "qwen35-h-v2x-mtp-q8_0"
    tokens = prompt_of(name).tokens
    options = options_of(20, "draft-mtp", n_ctx=256, parallel=2, ignore_eos=True)
    prompts = [Prompt(tokens[:9]), Prompt(tokens[2:15]), Prompt(tokens[3:8])]
    verdict = verdicts(finish(Comparison(session(name), prompts, options, [PEER_LANE])))["peer"]
    assert (verdict.verdict, verdict.n_positions) == ("agrees", 60)
    assert 1e-6 < verdict.worst_nmse <= verdict.bound < 0.3


@installed
@pytest.mark.parametrize("name", ["qwen35-h-v2x-mtp-q8_0", "qwen35-a-f32"])
def test_llama_cpp_with_another_token_is_suspect(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    decode = LlamaCpp.decode

    def misread(self: LlamaCpp, seq: int, pos0: int, tokens: Sequence[int]) -> torch.Tensor:
        if not pos0:
            tokens = [*tokens[:-2], tokens[-2] + 1, tokens[-1]]
        return decode(self, seq, pos0, tokens)

    monkeypatch.setattr(LlamaCpp, "decode", misread)
    options = options_of(10, n_max=3, n_ctx=256, ignore_eos=True)
    comparison = Comparison(session(name), prompt_of(name), options, [PEER_LANE], draft_accept=(1,))
    assert verdicts(finish(comparison))["peer"].verdict == "suspect"


@installed
def test_what_is_no_model_is_refused_by_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes((DATA / "qwen35-a-f32.gguf").read_bytes()[:4096])
    with pytest.raises(UnsupportedModelError, match=r"cannot load no\.gguf"):
        LlamaCpp(tmp_path / "no.gguf", 1, 64, 64)
