"""llama.cpp as a lane: with a stand-in for the library, and with the library where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.batch import Span
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.compare.llama_library import missing
from engine.compare.llama_process import LlamaProcess
from engine.errors import OptionError, UnsupportedModelError
from engine.model.hybrid import HybridModel
from engine.options import Prompt
from engine.session import Session
from tests.support.clean import passed
from tests.support.comparisons import differences_of, finish, specs, verdicts
from tests.support.fake_llama import FakeContext, FakeLlama, use, without_packages
from tests.support.golden_runs import DATA, MTP_MODELS, options_of, prompt_of, session

MTP = MTP_MODELS[0]
installed = pytest.mark.skipif(bool(missing()), reason="no package with llama.cpp is installed")

PEER_LANE = LaneSpec.parse("peer")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    library = FakeLlama(session(MTP))
    use(monkeypatch, library)
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
    assert facts["compute"] == "llama.cpp 0.0-fake"
    assert facts["source"] == {"engine": "llama.cpp", "version": facts["compute"]}
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
        assert found[name].compute == "q8, activations rounded as in llama.cpp"


class RoundingLlama(FakeLlama):
    """Rounds as the library does, in the way of the file."""

    def __init__(self, name: str, *, reads: int = 0) -> None:
        """reads: what is added to the last but one token of a prompt, to be wrong on purpose."""
        super().__init__(session(name))
        self.reads, self.rounding = reads, session(name).model_as_llama_cpp()

    @property
    def model(self) -> HybridModel:
        return self.rounding

    def llama_decode(self, context: FakeContext, batch: SimpleNamespace) -> int:
        if batch.pos[0] == 0:
            i = batch.n_tokens - 2
            batch.token[i] = (batch.token[i] + self.reads) % self.session.config.n_vocab
        return super().llama_decode(context, batch)


@pytest.mark.parametrize("name", ["qwen35-h-v2x-mtp-q8_0", "qwen35-g-v2x-q4_k_m"])
@pytest.mark.parametrize(("reads", "verdict"), [(0, "agrees"), (1, "suspect")])
@pytest.mark.thinned(8)
def test_rounding_is_explained_and_a_wrong_token_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str, reads: int, verdict: str
) -> None:
    use(monkeypatch, RoundingLlama(name, reads=reads))
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
    without_packages(monkeypatch)
    with pytest.raises(OptionError, match="pip install xllamacpp"):
        compared(prompt_of(MTP))


def test_without_a_file(fake: FakeLlama) -> None:
    opened = session(MTP)
    bare = Session(opened.model, opened.info, opened.tokenizer, None, {})
    with pytest.raises(OptionError, match="was not loaded from a file"):
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
    decode = LlamaProcess.decode

    def misread(self: LlamaProcess, number: int, spans: Sequence[Span]) -> np.ndarray:
        if not spans[0].pos0:
            tokens = [*spans[0].tokens]
            tokens[-2] += 1
            spans = [replace(spans[0], tokens=tokens)]
        return decode(self, number, spans)

    monkeypatch.setattr(LlamaProcess, "decode", misread)
    options = options_of(10, n_max=3, n_ctx=256, ignore_eos=True)
    comparison = Comparison(session(name), prompt_of(name), options, [PEER_LANE], draft_accept=(1,))
    assert verdicts(finish(comparison))["peer"].verdict == "suspect"


@installed
def test_what_is_no_model_is_refused_by_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes((DATA / "qwen35-a-f32.gguf").read_bytes()[:4096])
    with pytest.raises(UnsupportedModelError, match=r"cannot load no\.gguf"):
        LlamaProcess(tmp_path / "no.gguf")
