"""info, tokenize and logits on real files."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

DATA = ROOT / "tests" / "data"
HYBRID = DATA / "qwen35-h-v2x-mtp-q8_0.gguf"


def test_info_tells_layers_sizes_and_rollback(cli: Cli) -> None:
    outcome = cli("info", HYBRID)
    assert outcome.status == 0
    assert re.search("^  0-2 +delta net +Q8_0 ", outcome.out, re.MULTILINE)
    assert "4        mtp" in outcome.out
    assert "partial seq_rm over snapshot planes (3 recurrent layers" in outcome.out
    assert "tokenizer.ggml.tokens = [384 values]" in outcome.out


def test_info_as_json_scales_memory_with_the_options(cli: Cli) -> None:
    small = cli("info", HYBRID, "--json").json
    large = cli("info", "--json", "--parallel", 4, "--spec-draft-n-max", 7, "-c", 100, HYBRID).json
    # 3 recurrent layers, 4 heads of 32 x 32 and a window of 3 x 256, float32
    one = 4 * 3 * (4 * 32 * 32 + 3 * 256)
    assert small["state_bytes"] == one
    assert small["memory"]["policies"]["planes"]["snapshots"] == 3 * one
    assert large["memory"]["policies"]["planes"]["snapshots"] == 4 * 7 * one
    assert large["memory"]["policies"]["checkpoint"]["snapshots"] == 0
    assert large["memory"]["n_ctx"] == 100
    # 4 attention cells' worth: 2 blocks (trunk and MTP) of 2 x 2 heads x 32, float32
    assert large["memory"]["policies"]["planes"]["kv"] == 4 * 100 * 2 * (2 * 2 * 32 * 4)
    assert [layer["kind"] for layer in small["layers"]] == [*["delta net"] * 3, "attention", "mtp"]
    assert small["metadata"]["tokenizer.ggml.tokens"]["length"] == 384
    assert small["file"]["name"] == HYBRID.name


def test_info_counts_weights_as_they_are_loaded(cli: Cli) -> None:
    stored = cli("info", HYBRID, "--json").json
    assert stored["memory"]["policies"]["ring"]["weights"] == stored["weight_bytes"]
    loaded = cli("info", HYBRID, "--json", "--compute", "int8").json
    assert loaded["memory"]["compute"] == "int8"
    assert loaded["memory"]["policies"]["ring"]["weights"] == loaded["loaded_bytes"]["int8"]
    assert "  loaded         f32 " in cli("info", HYBRID).out
    assert cli("info", HYBRID, "--compute", "auto").status == 2


def test_info_of_the_demo(cli: Cli) -> None:
    assert cli("info", "--demo", "--json").json["architecture"] == "qwen35"


def test_tokenize_prints_ids_then_pieces(cli: Cli) -> None:
    outcome = cli("tokenize", HYBRID, "a b\n")
    ids, *lines = outcome.out.splitlines()
    assert [int(line.split(maxsplit=1)[0]) for line in lines] == [int(i) for i in ids.split(",")]
    assert "".join(line[10:] for line in lines) == r"a b\n"


@pytest.mark.parametrize("special", [True, False])
def test_tokenize_agrees_with_llama_cpp(cli: Cli, special: bool) -> None:
    path = ROOT.parent / "shared" / "golden" / "vocab" / "tiny_vectors.json"
    if not path.exists():
        pytest.skip("the golden vectors are not here")
    files = json.loads(path.read_text(encoding="utf-8"))
    vectors = next(entry["vectors"] for entry in files if entry["pre"] == "qwen35")
    field = "ids_parse_special" if special else "ids"
    for entry in vectors:
        if not entry["text"]:
            continue
        flag = [] if special else ["--no-special"]
        outcome = cli("tokenize", HYBRID, *flag, "--json", "--", entry["text"])
        assert outcome.json["tokens"] == entry[field], entry["text"]


def test_no_special_reads_control_tokens_as_text(cli: Cli) -> None:
    one = cli("tokenize", "--demo", "<|im_end|>", "--json").json["tokens"]
    many = cli("tokenize", "--demo", "--no-special", "<|im_end|>", "--json").json["tokens"]
    assert len(one) == 1 < len(many)


def test_tokenize_reads_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größe\r\n".encode())))
    outcome = cli("tokenize", "--demo", "-", "--json")
    assert bytes.fromhex("".join(outcome.json["hex"])) == "größe\r\n".encode()


def test_a_prompt_comes_through_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f(\n")))
    assert cli("run", "--demo", "-f", "-", "-n", 1).out.startswith("def f(")


def test_tokenize_refuses_input_that_is_no_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    outcome = cli("tokenize", "--demo", "-")
    assert outcome.status == 2
    assert "Standard input: line 1 is not UTF-8 text. Convert it" in outcome.err


@pytest.mark.parametrize("ubatch", [512, 7])
def test_logits_are_llama_cpps(cli: Cli, tmp_path: Path, ubatch: int) -> None:
    golden = np.load(HYBRID.with_suffix(".npz"))
    ids = ",".join(map(str, golden["tokens"].tolist()))
    out = tmp_path / "logits.npz"
    words = ["--tokens", ids, "--out", out, "--compute", "f32", "-ub", ubatch, "--threads", 1]
    outcome = cli("logits", HYBRID, *words, "--json")
    assert outcome.json["shape"] == [56, 384]
    with np.load(out) as file:
        assert file.files == ["logits"]
        logits = file["logits"]
    assert logits.dtype == np.float32
    error = np.abs(logits[golden["rows"]] - golden["logits_deq"])
    assert error.max() < 1e-3
    assert np.median(error) < 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["logits.npz"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1,2", "--out", "no/such/folder/x.npz"], "cannot be written: No such file"),
        (["--tokens", "1,384", "--out", "x.npz"], "Token id 384 is outside the vocabulary of 384"),
        (["--tokens", "1;2", "--out", "x.npz"], "'1;2' is not a token id"),
        (["--tokens", " ", "--out", "x.npz"], "no token id is given"),
        (["--tokens", "1", "--out", "x.npz", "--compute", "f8"], "f8"),
        (["--tokens", "1", "--out", "."], "is a folder"),
        (["--tokens", "1"], "--out"),
    ],
)
def test_logits_usage(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("logits", HYBRID, *words)
    assert outcome.status == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []
