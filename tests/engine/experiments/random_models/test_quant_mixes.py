"""Mixes of types against what llama.cpp's quantiser makes of the same model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import gguf
import pytest

from engine.experiments.random_models.quant_mixes import QUANTS, tensor_type
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_model import write_random_model

KDA = ("bailingmoe3", "kimi-linear", "kimi-k3", "glm5-next")
OURS = ("f32", "q4_k")


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.peer
@pytest.mark.parametrize(
    ("arch", "size"),
    [("qwen35", "tiny"), ("qwen35", "moe-tiny"), *((arch, "tiny") for arch in KDA)],
)
def test_types_are_those_of_llama_quantize(tmp_path: Path, arch: str, size: str) -> None:
    folder = os.environ.get("DRAFTSCOPE_LLAMA_CPP")
    if not folder:
        pytest.skip("DRAFTSCOPE_LLAMA_CPP names no folder with a build of llama.cpp")
    plain, theirs, ours = (tmp_path / f"{name}.gguf" for name in ("plain", "theirs", "ours"))
    write_random_model(plain, arch=arch, size=size, quant="f32")
    for mix in QUANTS:
        if mix in OURS or (mix, arch, size) == ("mxfp4", "qwen35", "tiny"):
            continue
        name = "mxfp4_moe" if mix == "mxfp4" else mix
        words = [Path(folder) / "llama-quantize", plain, theirs, name]
        subprocess.run([str(word) for word in words], check=True, capture_output=True)
        write_random_model(ours, arch=arch, size=size, quant=mix)
        assert types_of(ours) == types_of(theirs), mix
        said = [gguf.GGUFReader(path).fields["general.file_type"] for path in (ours, theirs)]
        assert said[0].contents() == said[1].contents(), mix


@pytest.mark.parametrize(
    ("block", "kind"),
    [(0, "Q6_K"), (3, "Q6_K"), (4, "Q4_K"), (5, "Q4_K"), (6, "Q6_K"), (7, "Q4_K"), (28, "Q6_K")],
)
def test_more_bits_in_the_first_the_last_and_every_third_block(block: int, kind: str) -> None:
    """33 blocks with the MTP head: four at the start, five at the end."""
    config = RANDOM_FAMILIES["qwen35"]["4b"].config()
    for name, n_in in (("ffn_down", 9216), ("attn_qkv", 2560), ("attn_v", 2560)):
        found = tensor_type(f"blk.{block}.{name}.weight", (2560, n_in), config, "q4_k_m")
        assert found.name == kind
