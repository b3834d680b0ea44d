"""mamba2: a model without attention; no token changes, whatever undoes what was drafted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import UnsupportedModelError
from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.model.families import MISSING, read_config
from engine.options import KV_MODES, ROLLBACK_POLICIES, SPLITS, Prompt
from engine.session import Session
from tests.support.golden_runs import decode, options_of, tokens_of

TOKENS = np.random.default_rng(3).integers(3, 250, 12).tolist()
PROMPTS = [Prompt(tuple(TOKENS * 2)), Prompt(tuple(TOKENS[:5] * 3))]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("mamba2") / "tiny.gguf"
    write_random_model(path, arch="mamba2", size="tiny", quant="f32")
    return Session.open(path, path)


@pytest.fixture(scope="module")
def plain(opened: Session) -> list[list[int]]:
    return [tokens_of(decode(opened, [prompt], options_of(12)))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.parametrize("kv", KV_MODES)
def test_no_token_changes(opened, plain, policy, kv):
    split = list(SPLITS)[list(ROLLBACK_POLICIES).index(policy) % len(SPLITS)]
    options = options_of(12, "draft-simple", rollback=policy, kv=kv, split=split, parallel=2)
    assert tokens_of(decode(opened, PROMPTS, options)) == plain


@pytest.mark.parametrize("arch", MISSING)
def test_a_refusal_names_the_part_that_is_missing(arch, tmp_path: Path):
    path = tmp_path / "other.gguf"
    write_random_model(path, arch="mamba2", size="tiny", quant="f32")
    data = path.read_bytes()
    name = arch.encode()
    old = (6).to_bytes(8, "little") + b"mamba2"
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, len(name).to_bytes(8, "little") + name) + bytes(64))
    # the data ends where it did, or before
    with (
        GgufFile.open(path) as file,
        pytest.raises(UnsupportedModelError, match="does not run here, which lacks") as caught,
    ):
        read_config(file)
    assert MISSING[arch] in caught.value.message
