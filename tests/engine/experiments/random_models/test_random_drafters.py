"""Drafters of random weights: whole, of every kind, and for the target next to them."""

from __future__ import annotations

import pytest

from engine.draft.draft_files import check_same_vocabulary
from engine.errors import OptionError
from engine.experiments.random_models.random_file import RANDOM_DRAFTERS
from engine.experiments.random_models.random_model import write_random_drafter, write_random_model
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.model.drafters.config import drafter_of
from engine.model.drafters.loading import load_drafter
from engine.model.loader import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    write_random_model(folder / "target.gguf", size="tiny")
    return folder


@pytest.mark.parametrize(
    ("kind", "quant"),
    [("dflash", "q8_0"), ("dflash2", "q4_k_m"), ("dspark", "f32"), ("eagle3", "q4_k_m")],
)
def test_it_is_a_drafter_of_its_target(folder, kind, quant):
    path = folder / f"{kind}.gguf"
    write_random_drafter(path, drafter=kind, size="tiny", quant=quant)
    with GgufFile.open(folder / "target.gguf") as target, GgufFile.open(path) as file:
        check_same_vocabulary(Tokenizer.from_gguf(target), Tokenizer.from_gguf(file))
        model = load_model(target, compute="blocks")
        loaded = load_drafter(file, model)
        assert loaded.config.drafter == drafter_of(file)
        if kind != "eagle3":
            assert bool(loaded.config.selector) is (kind == "dflash2")
            assert loaded.config.confident is (kind == "dspark")
        types = {info.type.name for info in file.tensors.values() if len(info.shape) > 1}
        assert (quant == "f32") is (types == {"F32"})


def test_the_same_bytes_every_time(folder):
    for name in ("a", "b"):
        write_random_drafter(folder / name, drafter="dspark", size="tiny")
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


def test_unknown_choices_are_refused(folder):
    with pytest.raises(OptionError, match="drafter 'medusa' is unknown"):
        write_random_drafter(folder / "x", drafter="medusa")
    assert "dflash2" in RANDOM_DRAFTERS
