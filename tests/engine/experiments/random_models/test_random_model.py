"""Models of random weights: complete next to converted ones, sane in scale, always the same."""

from __future__ import annotations

import tracemalloc
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import DraftscopeError, OptionError
from engine.experiments.random_models import random_model
from engine.experiments.random_models.quant_mixes import (
    BLOCK_TYPES,
    QUANTS,
    random_tensor,
    tensor_type,
)
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_file import CONTROL_TOKENS
from engine.experiments.random_models.random_model import made_up_vocabulary, write_random_model
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.model.families import FAMILIES
from engine.model.hybrid import HybridModel
from engine.model.loader import load_model
from tests.support.golden_files import golden_file, second_set
from tests.support.naive_memory import NaiveMemory, ubatch_of

DATA = Path(__file__).parents[3] / "data"
CONVERTED = {
    "tiny": DATA / "qwen35-h-v2x-mtp-q8_0.gguf",
    "moe-tiny": DATA / "qwen35moe-d-v2x-mtp-f32.gguf",
}
N_VOCAB = 512
KDA = ("bailingmoe3", "kimi-linear", "kimi-k3", "glm5-next")
TYPES: dict[object, set[str]] = {
    "f32": {"F32"},
    "bf16": {"BF16"},
    "f16": {"F16"},
    "q8_0": {"Q8_0"},
    "q4_k": {"Q4_K", "Q6_K"},
    "q4_k_m": {"Q4_K", "Q6_K"},
    "q5_k_m": {"Q5_K", "Q6_K"},
    "q3_k_m": {"Q3_K", "Q4_K", "Q5_K", "Q6_K"},
    "q2_k": {"Q2_K", "Q3_K", "Q6_K"},
    "q6_k": {"Q6_K"},
    "mxfp4": {"MXFP4", "Q8_0"},
    "nvfp4": {"NVFP4", "Q8_0"},
    "iq2_xxs": {"IQ2_XXS", "Q2_K", "Q5_K"},
    "iq1_s": {"IQ1_S", "IQ2_XXS", "Q2_K", "Q5_K"},
    # eight experts are few, so attention next to them has more bits
    ("moe-tiny", "q4_k_m"): {"Q4_K", "Q5_K", "Q6_K", "Q8_0"},
    ("moe-tiny", "q5_k_m"): {"Q5_K", "Q6_K", "Q8_0"},
    ("moe-tiny", "q3_k_m"): {"Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"},
    ("moe-tiny", "q2_k"): {"Q2_K", "Q3_K", "Q5_K", "Q6_K", "Q8_0"},
    ("moe-tiny", "q6_k"): {"Q6_K", "Q8_0"},
    ("moe-tiny", "iq4_xs"): {"IQ4_XS", "Q5_K", "Q6_K", "Q8_0"},
    ("moe-tiny", "iq4_nl"): {"IQ4_NL", "Q5_K", "Q6_K", "Q8_0"},
    ("moe-tiny", "iq3_s"): {"IQ3_S", "Q5_K", "Q6_K", "Q8_0"},
    ("moe-tiny", "iq2_xxs"): {"IQ2_XXS", "Q4_K", "Q5_K"},
    ("moe-tiny", "iq1_s"): {"IQ1_S", "Q4_K", "Q5_K"},
    ("moe-tiny", "tq2_0"): {"TQ2_0", "Q6_K", "Q8_0"},
    **{("moe-tiny", q): {q.upper(), "Q6_K", "Q8_0"} for q in ("q4_0", "q4_1", "q5_0", "q5_1")},
}
"""Types of the matrices of a file, by mix, or by size and mix where they differ."""
EVERY_FILE = pytest.mark.parametrize(
    ("size", "quant"), [(size, quant) for size in CONVERTED for quant in QUANTS]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    for size in CONVERTED:
        for quant in QUANTS:
            write_random_model(folder / f"{size}-{quant}.gguf", size=size, quant=quant)
    return folder


@cache
def read(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


def load(path: Path) -> HybridModel:
    with GgufFile.open(path) as file:
        return load_model(file)


@EVERY_FILE
@pytest.mark.thinned(8)
def test_it_has_the_keys_and_tensors_of_a_converted_model(
    folder: Path, size: str, quant: str
) -> None:
    """llama.cpp wrote the other file: what it asks for is there, in the same types."""
    own, other = map(read, (folder / f"{size}-{quant}.gguf", CONVERTED[size]))
    kinds = [{key: field.types for key, field in file.fields.items()} for file in (own, other)]
    kinds[1].setdefault("general.quantization_version", [gguf.GGUFValueType.UINT32])
    assert kinds[0] == kinds[1]
    names = [{tensor.name for tensor in file.tensors} for file in (own, other)]
    assert names[0] == names[1] - {"output.weight"}  # tied
    n_dims = [{tensor.name: len(tensor.shape) for tensor in file.tensors} for file in (own, other)]
    assert all(n_dims[1][name] == n for name, n in n_dims[0].items())
    if (size, quant) in (("tiny", "q8_0"), ("moe-tiny", "f32")):
        types = {tensor.name: tensor.tensor_type for tensor in other.tensors}
        assert all(tensor.tensor_type == types[tensor.name] for tensor in own.tensors)


@EVERY_FILE
def test_routers_and_vectors_are_never_rounded(folder: Path, size: str, quant: str) -> None:
    """As llama.cpp's quantiser leaves them; every other matrix is of the type asked for."""
    wanted = TYPES.get((size, quant), TYPES.get(quant, {quant.upper(), "Q6_K"}))
    found = set()
    for tensor in read(folder / f"{size}-{quant}.gguf").tensors:
        words = ("ffn_gate_inp", "conv1d")
        if len(tensor.shape) == 1 or any(word in tensor.name for word in words):
            assert tensor.tensor_type.name == "F32"
        else:
            found.add(tensor.tensor_type.name)
    assert found == wanted


@EVERY_FILE
@pytest.mark.thinned(8)
def test_logits_are_finite_and_of_a_sane_size(folder: Path, size: str, quant: str) -> None:
    model = load(folder / f"{size}-{quant}.gguf")
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, 48).tolist()
    out = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config))
    assert out.logits.isfinite().all()
    assert 1.5 < float(out.logits.std()) < 2.5
    assert out.logits.argmax(1).unique().numel() > 24  # no token that always wins
    assert model.head is not None
    hidden = torch.cat((torch.zeros(1, 1, model.config.n_embd), out.hidden[:, :-1]), 1)
    guess = model.head.forward(ubatch_of(tokens), hidden, NaiveMemory()).logits
    assert guess.isfinite().all()
    assert 1.5 < float(guess.std()) < 2.5


def test_its_tokenizer_goes_back_and_forth(folder: Path) -> None:
    with GgufFile.open(folder / "tiny-q8_0.gguf") as file:
        tokenizer = Tokenizer.from_gguf(file)
    text = "def café():\n    return 'aba' 水"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert tokenizer.encode("<|im_end|>") == [N_VOCAB - 1]
    assert tokenizer.eog_ids == {N_VOCAB - 3, N_VOCAB - 1}


def test_a_vocabulary_of_real_size_is_consistent() -> None:
    tokens, merges = made_up_vocabulary(151_936)
    assert len(tokens) == len(set(tokens)) == 151_936
    assert tuple(tokens[-3:]) == CONTROL_TOKENS
    rank = {token: i for i, token in enumerate(tokens)}
    assert len(merges) == 151_936 - 256 - 3
    for merge in merges:
        left, right = merge.split(" ")
        assert max(rank[left], rank[right]) < rank[left + right]


@pytest.mark.parametrize("kind", ["F32", "BF16", *(kind.name for kind in BLOCK_TYPES)])
def test_random_blocks_have_the_standard_deviation_asked_for(kind: str) -> None:
    """Read back by the gguf package, which knows nothing of how they were made."""
    quant = gguf.GGMLQuantizationType[kind]
    data = random_tensor(np.random.default_rng(0), (64, 1024), 0.03, quant)
    values = gguf.quants.dequantize(data.view(np.uint8) if kind == "BF16" else data, quant)
    assert values.shape == (64, 1024)
    assert values.std() == pytest.approx(0.03, rel=0.02)
    assert abs(values.mean()) < 0.001
    by_column = values.reshape(-1, 256).std(0)  # no place in a block is left out
    assert by_column.min() > 0.02 and by_column.max() < 0.04


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="128 are not whole Q4_K blocks of 256"):
        random_tensor(np.random.default_rng(0), (4, 128), 1.0, gguf.GGMLQuantizationType.Q4_K)


def test_the_same_bytes_every_time(folder: Path, tmp_path: Path) -> None:
    write_random_model(tmp_path / "again.gguf", size="tiny", quant="q4_k")
    assert (tmp_path / "again.gguf").read_bytes() == (folder / "tiny-q4_k.gguf").read_bytes()


def test_memory_holds_a_piece_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path / "warm.gguf", size="tiny")  # imports and caches
    monkeypatch.setattr(random_model, "_PIECE", 4096)
    tracemalloc.start()
    write_random_model(tmp_path / "tiny.gguf", size="tiny", quant="f32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (tmp_path / "tiny.gguf").stat().st_size / 20


@pytest.mark.parametrize("words", [{"size": "7b"}, {"quant": "q9_k"}])
def test_an_unknown_size_or_quantisation_is_refused(tmp_path: Path, words: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="is unknown"):
        write_random_model(tmp_path / "x.gguf", **words)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    (tmp_path / "old.gguf").write_bytes(b"old")
    with pytest.raises(DraftscopeError, match="No space left on device"):
        write_random_model(tmp_path / "old.gguf", size="tiny")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


OPTIONAL = {"attention.q_lora_rank", "attention.value_length"}


@pytest.mark.parametrize(
    "name", [name for name in second_set() if "kimi" in name or "bail" in name]
)
def test_keys_and_tensors_are_those_of_another_file(name, tmp_path):
    arch = name.split("-a-")[0]
    path = tmp_path / "tiny.gguf"
    write_random_model(path, arch=arch, size="tiny", quant="f32")
    own, other = (gguf.GGUFReader(one) for one in (path, golden_file(f"{name}.gguf")))
    kinds = [
        {
            key.removeprefix(f"{arch}."): field.types
            for key, field in file.fields.items()
            if key.startswith(f"{arch}.")
        }
        for file in (own, other)
    ]
    assert kinds[0].keys() ^ kinds[1].keys() <= OPTIONAL
    assert all(kinds[1][key] == kinds[0][key] for key in kinds[0].keys() & kinds[1].keys())
    names = [
        {tensor.name.split(".", 2)[-1] for tensor in file.tensors if "attn_q" not in tensor.name}
        for file in (own, other)
    ]
    assert names[0] ^ names[1] <= {"weight", "output.weight"}


@pytest.mark.parametrize("arch", KDA)
def test_logits_of_each_family_are_finite(arch, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_model(path, arch=arch, size="tiny", quant="q8_0")
    with GgufFile.open(path) as file:
        model = load_model(file)
    tokens = np.random.default_rng(1).integers(0, 512, 48).tolist()
    logits = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config)).logits
    assert logits.isfinite().all()
    assert 0.5 < float(logits.std()) < 5
    assert logits.argmax(1).unique().numel() > 12


@pytest.mark.parametrize("arch", RANDOM_FAMILIES)
def test_every_size_is_of_a_family_that_opens(arch):
    for file in RANDOM_FAMILIES[arch].values():
        assert file.config().architecture in FAMILIES


def test_rows_that_are_no_whole_blocks_have_shorter_ones():
    config = RANDOM_FAMILIES["kimi-linear"]["0.7b"].config()
    kinds = [
        tensor_type("blk.3.attn_k_b.weight", (8, 512, n_in), config, mix).name
        for mix in ("q4_k_m", "q5_k_m", "iq4_xs", "q8_0")
        for n_in in (128, 256)
    ]
    assert kinds == ["Q5_0", "Q4_K", "Q5_1", "Q5_K", "IQ4_NL", "IQ4_XS", "Q8_0", "Q8_0"]


@pytest.mark.parametrize("words", [{"arch": "llama"}, {"arch": "kimi-k3", "size": "0.65b"}])
def test_what_is_not_there_is_refused(tmp_path, words):
    with pytest.raises(OptionError, match="is unknown"):
        write_random_model(tmp_path / "x.gguf", **words)
