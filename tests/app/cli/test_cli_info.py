"""info of files of every kind, and -md with files that draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resources import DEMO_DRAFT, DEMO_TARGET
from tests.app.cli.conftest import ROOT, Outcome
from tests.support.gguf_writer import Tensor, build
from tests.support.rewrite_gguf import rewrite
from tests.support.shared_cases import case

Cli = Callable[..., Outcome]

DATA = ROOT / "tests" / "data"
MTP = DATA / "qwen35-c-v2x-mtp-f32.gguf"
LATENT = DATA / "bailingmoe3-a-mtp-f32.gguf"
QUICK = ("--threads", 1)
WEIGHT = Tensor.of("blk.0.attn_q.weight", np.ones((2, 32)))
TOKENS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.bos_token_id": 1,
}


def write(path: Path, keys: dict[str, Any], tensors: list[Tensor] | None = None) -> Path:
    path.write_bytes(build(keys.items(), tensors or []))
    return path


@pytest.mark.parametrize(
    ("keys", "kind", "words"),
    [
        ({"general.architecture": "clip", "general.type": "mmproj"}, "mmproj", "Open the model"),
        ({"general.architecture": "clip", "clip.vision.block_count": 3}, "mmproj", "Open"),
        (
            {"general.architecture": "qwen35", "general.type": "adapter", "adapter.type": "lora"},
            "LoRA",
            "llama-export-lora",
        ),
        ({"general.type": "imatrix", "imatrix.chunk_count": 9}, "imatrix", "--imatrix"),
        ({"general.architecture": "controlvector"}, "control vector", "not supported"),
        ({"general.architecture": "gemma4", "gemma4.block_count": 7}, "a model", "observe"),
        (
            {"general.architecture": "b", "b.attention.causal": False, "b.pooling_type": 1},
            "embedding",
            "generates",
        ),
        (
            {"general.architecture": "dream", "dream.attention.causal": False},
            "diffusion",
            "autoregressive",
        ),
        ({}, "a model", "observe"),
    ],
)
def test_info_of_files_that_do_not_run_here(
    keys: dict[str, Any], kind: str, words: str, cli: Cli, tmp_path: Path
) -> None:
    path = write(tmp_path / "some.gguf", {**keys, **TOKENS}, [WEIGHT])
    outcome = cli("info", path)
    assert outcome.status == 0 and not outcome.err
    assert kind in outcome.out
    lines = outcome.out.splitlines()
    assert lines[2].startswith("  runs here      no: some.gguf")
    assert lines[3].startswith("  what to do     ") and words in lines[3]
    assert "llama, 3 tokens, BOS 1, no chat template" in outcome.out
    assert "64 in 1 tensors" in outcome.out
    found = cli("info", path, "--json").json
    assert found["tokenizer"].startswith("llama, 3 tokens")
    assert found["quant_mix"] == {"F32": 256}
    assert found["problem"] and found["remedy"]
    assert found["metadata"]["tokenizer.ggml.tokens"] == ["a", "b", "c"]
    refused = cli("run", path, "-p", "a")
    assert refused.status == 1
    assert found["problem"] in refused.err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("double_blocks.0.img_attn.qkv.weight", "another kind of model"),
        ("blk.7.nextn.eh_proj.weight", "the MTP block of a model"),
        ("blk.0.nextn.eh_proj.weight", "a model\n"),
    ],
)
def test_info_of_other_tensors(name: str, kind: str, cli: Cli, tmp_path: Path) -> None:
    tensor = Tensor.of(name, np.ones((2, 32)))
    path = write(tmp_path / "some.gguf", {"general.architecture": "flux"}, [tensor])
    assert f"  what           {kind}" in cli("info", path).out


def test_info_of_a_vocabulary_alone(cli: Cli, tmp_path: Path) -> None:
    path = rewrite(MTP, tmp_path / "vocab.gguf", None, dict.clear)
    outcome = cli("info", path)
    assert outcome.status == 0
    assert "a vocabulary without tensors" in outcome.out
    assert cli("tokenize", path, "ab").status == 0


def test_info_of_one_part_of_several(cli: Cli, tmp_path: Path) -> None:
    keys = {"general.architecture": "qwen35", "split.count": 3, "split.tensors.count": 3}
    for number in (1, 2):
        name = tmp_path / f"a-{number + 1:05}-of-00003.gguf"
        write(name, {**keys, "split.no": number}, [WEIGHT])
        outcome = cli("info", name)
        assert outcome.status == 0
        assert f"this is part {number + 1} of 3" in outcome.out
        assert "Open a-00001-of-00003.gguf instead" in outcome.out
    first = write(tmp_path / "a-00001-of-00003.gguf", {**keys, "split.no": 0}, [WEIGHT])
    (tmp_path / "a-00002-of-00003.gguf").unlink()
    outcome = cli("info", first)
    assert "a-00002-of-00003.gguf is missing" in outcome.out


@pytest.mark.parametrize(
    ("number", "name", "owner"),
    [
        (42, "Q2_0", "a newer llama.cpp"),
        (144, "IQ4_KS", "ik_llama.cpp"),
        (212, "Q4_K_R4", "ik_llama.cpp"),
        (31, "Q4_0_4_4", "an old llama.cpp"),
        (142, "PQ2_0", "PrismML"),
        (900, "type 900", "a newer llama.cpp or a fork"),
    ],
)
def test_types_that_cannot_be_decoded_are_named_with_their_owner(
    number: int, name: str, owner: str, cli: Cli, tmp_path: Path
) -> None:
    keys = {"general.architecture": "qwen3", **TOKENS}
    odd = Tensor("blk.0.ffn_up.weight", (32, 2), bytes(50), number)
    path = write(tmp_path / "odd.gguf", keys, [odd, WEIGHT])
    found = cli("info", path, "--json").json
    assert found["unknown_types"].keys() == {name}
    assert owner in found["unknown_types"][name]
    assert found["quant_mix"] == {"F32": 256, name: 64}
    assert f"{name:<12}         64 B  of {owner}" in cli("info", path).out


def test_a_model_with_such_a_type_is_refused_with_a_remedy(cli: Cli, tmp_path: Path) -> None:
    raw = bytearray(MTP.read_bytes())
    at = raw.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    assert raw[at : at + 4] == bytes(4)
    raw[at] = 144
    path = tmp_path / "ks.gguf"
    path.write_bytes(raw)
    outcome = cli("run", path, "-p", "a")
    assert outcome.status == 1
    assert "the tensor blk.0.ffn_up.weight has IQ4_KS of ik_llama.cpp" in outcome.err
    assert "llama-quantize" in outcome.err


def test_info_of_a_damaged_file_is_an_error(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(MTP.read_bytes()[:5000])
    outcome = cli("info", path)
    assert outcome.status == 1 and not outcome.out


@pytest.mark.parametrize(
    ("file", "types", "refused"),
    [
        (LATENT, ("-ctk", "q8_0"), True),
        (LATENT, ("-ctk", "q8_0", "-ctv", "q8_0"), False),
        (LATENT, (), False),
        (MTP, ("-ctk", "q8_0"), False),
    ],
)
def test_info_says_what_cells_llama_server_refuses(
    file: Path, types: tuple[str, ...], refused: bool, cli: Cli
) -> None:
    sentence = "refuses different types of K and V cells"
    assert (sentence in cli("info", file, *types).out) == refused
    server = cli("info", file, "--json", *types).json["memory"]["llama_server"]
    assert (sentence in server.get("refused", "")) == refused


def test_info_says_whether_it_fits(cli: Cli) -> None:
    found = cli("info", MTP, "--json", "-c", 3000, "-np", 3, "-ctk", "q8_0", "-ctv", "q4_0").json
    server, here = found["memory"]["llama_server"], found["memory"]["draftscope"]
    assert server["n_ctx"] == 1024 and here["n_ctx"] == 3000
    assert server["sizes"]["KV"] == 3 * 1024 * (2 * 32 // 32) * (34 + 18)
    assert here["sizes"]["MTP KV"] == 3 * 3000 * 4 * 2 * 2 * 32
    assert here["sizes"]["MTP rows"] == 3 * 3000 * 4 * 64
    assert here["total"] == sum(here["sizes"].values())
    assert found["memory"]["available"] > 0
    text = cli("info", MTP, "--spec-type", "none", "-ctxcp", 2).out
    assert "MTP KV" not in text
    assert "fits here" in text and "fits in llama-server" in text
    assert cli("info", MTP, "-ctk", "q9").status == 2


# -- MTP blocks in files of their own --------------------------------------------------------


@pytest.fixture
def trunk_and_block() -> tuple[Path, Path]:
    folder = case("01-mtp-file-beside-trunk")
    return folder / "trunk.gguf", folder / "mtp-only.gguf"


def counts(report: dict[str, Any]) -> list[Any]:
    (sequence,) = report["sequences"]
    timings = sequence["timings"]
    return [sequence["tokens"], timings["draft_n"], timings["draft_n_accepted"]]


def test_trunk_and_mtp_file_draft_as_the_joined_file(
    trunk_and_block: tuple[Path, Path], cli: Cli
) -> None:
    trunk, block = trunk_and_block
    words = ["-p", "hello", "-n", 40, "--json", *QUICK]
    apart = cli("run", trunk, "-md", block, "--spec-type", "draft-mtp", *words).json
    joined = cli("run", MTP, "--spec-type", "draft-mtp", *words).json
    assert counts(apart) == counts(joined)
    assert counts(apart)[1] > 0
    alone = cli("run", trunk, "-md", block, *words).json
    assert alone["options"]["spec"]["types"] == ["draft-mtp"]


def test_info_of_an_mtp_file_and_of_a_trunk_with_it(
    trunk_and_block: tuple[Path, Path], cli: Cli
) -> None:
    trunk, block = trunk_and_block
    out = cli("info", block).out
    assert "for draft-mtp" in out
    assert "the hidden state after the final norm of a target with n_embd = 64" in out
    sizes = cli("info", trunk, "-md", block, "--json").json["memory"]["draftscope"]["sizes"]
    own = cli("info", block, "--json").json
    of_token = own["cell_bytes"] + own["row_bytes"]
    assert own["row_bytes"] == 4 * 64
    assert sizes["MTP head"] == own["weight_bytes"] + 4096 * of_token


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.gguf", "no such file"),
        (".", "this is a folder"),
        ("text.gguf", "not a GGUF file"),
        ("lora.gguf", "is a LoRA adapter"),
        ("gpt.gguf", "nothing of the architecture 'gptneox' drafts here"),
    ],
)
@pytest.mark.parametrize("kind", ["draft-mtp", "ngram-mod", "none"])
def test_a_file_of_md_that_cannot_draft_is_an_error(
    name: str, words: str, kind: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    lora = {"general.architecture": "qwen35", "general.type": "adapter"}
    write(tmp_path / "lora.gguf", lora, [WEIGHT])
    write(tmp_path / "gpt.gguf", {"general.architecture": "gptneox"}, [WEIGHT])
    outcome = cli("run", MTP, "-md", tmp_path / name, "--spec-type", kind, "-p", "a", "-n", 2)
    assert outcome.status == 1
    assert words in outcome.err
    assert not outcome.out


def test_a_file_of_md_that_no_drafter_uses_is_an_error(cli: Cli) -> None:
    words = ["--spec-type", "draft-mtp", "-p", "a", "-n", 2]
    outcome = cli("run", DEMO_TARGET, "-md", DEMO_DRAFT, *words)
    assert outcome.status == 2
    assert "is for draft-simple, which is not among --spec-type draft-mtp" in outcome.err
    assert "Add draft-simple to --spec-type" in outcome.err
