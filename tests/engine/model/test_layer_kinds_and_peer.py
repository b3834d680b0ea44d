"""What is known of a file of each family: kinds of layers, rollback in llama.cpp, replay."""

from __future__ import annotations

import numpy as np
import pytest

from app.panels.model.model_map import LAYER_KINDS
from engine.gguf.file import GgufFile
from engine.model.info import ModelInfo, describe, llama_cpp_rollback
from tests.support.golden_files import golden_file, second_set

KINDS = {
    "nemotron_h": "SFSASF",
    "nemotron_h_moe": "SFSAFM",
    "deepseek4": "WDEM",
    "kimi-linear": "KKKL",
    "bailingmoe3": "KKKLM",
    "kimi-k3": "KKKLK",
    "lfm2": "CCACA",
    "lfm2moe": "CCAC",
    "granitehybrid": "SSAS",
    "falcon-h1": "HHH",
    "qwen4exp": "GGGB",
    "qwen4exp-c-mtp-f32": "GBGM",
    "glm5-next-a-f32": "KPKP",
    "glm5-next-b-mtp-f32": "KPKM",
}
"""By file, or by architecture where its files are alike."""


def info_of(name: str) -> ModelInfo:
    with GgufFile.open(golden_file(f"{name}.gguf")) as file:
        return describe(file)


@pytest.mark.parametrize("name", second_set())
def test_every_kind_of_layer_has_a_letter(name):
    info = info_of(name)
    letters = "".join(LAYER_KINDS[layer.kind][0] for layer in info.layers)
    assert letters == KINDS.get(name, KINDS.get(info.architecture))


def test_letters_are_not_shared():
    letters = [letter for letter, _, _ in LAYER_KINDS.values()]
    assert len(set(letters)) == len(letters)


REFUSED = ("kimi-linear", "granitehybrid", "falcon-h1")
"""Families whose tails llama.cpp refused to remove when the golden data were made."""


@pytest.mark.parametrize("name", second_set())
def test_what_llama_cpp_would_do(name):
    info = info_of(name)
    refuses = info.llama_cpp.startswith("no partial rollback")
    assert refuses == (info.architecture in REFUSED)
    assert "saves nothing" not in info.rollback


def test_a_window_of_one_row_is_no_smaller_than_a_log_of_it(variant):
    def one_row(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("shortconv.conv.weight")]:
            tensors[name] = np.ascontiguousarray(tensors[name][:, -2:])

    with GgufFile.open(variant("lfm2-a-tied-f32", {"lfm2.shortconv.l_cache": 2}, one_row)) as file:
        told = describe(file).rollback
    assert told.endswith(
        "768 B a snapshot, 768 B a token in the log of replay, which saves nothing)"
    )


def test_its_words():
    assert llama_cpp_rollback(None, 0) == "can remove any tail (KV cells only)"
    assert "planes of 1.5 MiB" in llama_cpp_rollback(True, 3 << 19)
    assert "checkpoint of 2 KiB" in llama_cpp_rollback(False, 2048)
