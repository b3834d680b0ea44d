"""MTP blocks in files of their own, against the same block inside the model's file."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from engine.draft.draft_files import check_draft
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.model.drafters.config import describe_draft, drafter_of
from engine.model.families import read_config
from engine.model.info import describe
from engine.model.loader import load_model
from engine.model.tensors import check_mtp_file
from resources import DEMO_EAGLE3
from tests.support.naive_memory import NaiveMemory, ubatch_of
from tests.support.rewrite_gguf import DROP

DENSE = "qwen35-c-v2x-mtp-f32"
MODELS = {
    DENSE: 4,
    "qwen35moe-d-v2x-mtp-f32": 4,
    "bailingmoe3-a-mtp-f32": 4,
    "nemotron_h_moe-b-mtp-f32": 5,
    "glm5-next-b-mtp-f32": 3,
    "qwen4exp-c-mtp-f32": 3,
    "deepseek4-a-mtp-f32": 3,
}
NEXT = "qwen3next-e-v2x-f32"
TOKENS = [5, 17, 230, 41, 3, 99]
OUTSIDE = (
    *("token_embd.weight", "output.weight", "output_norm.weight"),
    # the last gates of deepseek4, as the converter writes them
    *(f"output_hc_{name}.weight" for name in ("fn", "base", "scale")),
)
Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0


def _without_block(index):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"blk.{index}.")]:
            del tensors[name]

    return edit


def _block_alone(index, *, outside=OUTSIDE, change=None):
    def edit(tensors):
        for name in list(tensors):
            if not name.startswith(f"blk.{index}.") and name not in outside:
                del tensors[name]
        if change:
            change(tensors)

    return edit


def _loaded(path, mtp=None, **options):
    with GgufFile.open(path) as file:
        if mtp is None:
            return load_model(file, **options)
        with GgufFile.open(mtp) as other:
            return load_model(file, mtp=other, **options)


def _drafts(model):
    """Logits of the trunk and of the head that follows it."""
    hidden = model.forward(ubatch_of(TOKENS), NaiveMemory.for_model(model.config))
    before = torch.cat((torch.zeros_like(hidden.hidden[:, :1]), hidden.hidden[:, :-1]), 1)
    return hidden.logits, model.head.forward(ubatch_of(TOKENS), before, NaiveMemory()).logits


def _equal(one, other):
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _per_block(path):
    """Metadata with an entry for each block, and not by chance as many of another kind."""
    with GgufFile.open(path) as file:
        arch = file.architecture
        n = file.int_(f"{arch}.block_count")
        return {
            key: value.tolist()
            for key, value in file.metadata.items()
            if key.startswith(f"{arch}.")
            and not key.startswith((f"{arch}.rope.", f"{arch}.ple."))
            and getattr(value, "shape", None) == (n,)
        }


def _trunk(variant, name, index):
    keys = {"{arch}.nextn_predict_layers": DROP, "{arch}.block_count": index}
    keys |= {key: value[:-1] for key, value in _per_block(variant(name, to="copy")).items()}
    return variant(name, keys, _without_block(index), to="trunk")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(4)
def test_trunk_and_file_are_the_joined_model(name, golden, variant):
    index = MODELS[name]
    trunk = _trunk(variant, name, index)
    mtp = variant(name, edit=_block_alone(index), to="mtp")
    joined = golden(name)
    model = _loaded(trunk, mtp)
    _equal(_drafts(model), _drafts(joined))
    with GgufFile.open(mtp) as file, GgufFile.open(trunk) as target:
        drafter, info = describe_draft(file)
        assert drafter == drafter_of(file) == "draft-mtp"
        assert check_mtp_file(file, read_config(target)).mtp == joined.config.mtp
        own = describe(target, has_mtp_file=True)
    # nothing of the trunk's is loaded twice but embedding, head and norm
    assert model.weight_bytes == own.loaded_bytes["f32"] + info.loaded_bytes["f32"]
    assert own.mtp_kv_bytes_per_token == 0 < info.cell_bytes
    assert _loaded(trunk).head is None


def test_qwen3next(golden, variant):
    """The golden file has no MTP block, so that one is made of its last block."""
    rng = np.random.default_rng(0)

    def add(tensors):
        width = tensors["output_norm.weight"].size
        for name in [name for name in tensors if name.startswith("blk.3.")]:
            tensors[name.replace("blk.3.", "blk.4.")] = tensors[name]
        tensors["blk.4.nextn.eh_proj.weight"] = rng.normal(0, 0.1, (width, 2 * width))
        for name in ("enorm", "hnorm", "shared_head_norm"):
            tensors[f"blk.4.nextn.{name}.weight"] = np.ones(width)
        for name in [name for name in tensors if ".nextn." in name]:
            tensors[name] = tensors[name].astype(np.float32)

    def alone(tensors):
        tensors.update(made)
        _block_alone(4)(tensors)

    made = {}
    keys = {"{arch}.nextn_predict_layers": 1, "{arch}.block_count": 5}
    joined = variant(NEXT, keys, lambda tensors: (add(tensors), made.update(tensors)), to="joined")
    mtp = variant(NEXT, keys, alone, to="mtp")
    trunk = golden(NEXT)
    got = _drafts(_loaded(variant(NEXT, to="copy"), mtp))
    _equal(got, _drafts(_loaded(joined)))
    torch.testing.assert_close(got[0], _trunk_logits(trunk), rtol=0, atol=0)


def _trunk_logits(model):
    return model.forward(ubatch_of(TOKENS), NaiveMemory.for_model(model.config)).logits


@pytest.mark.parametrize("kind", [Q4_0, Q8_0])
def test_tables_in_a_quantisation_of_their_own(kind, variant):
    """Equal to a joined file whose block has the decoded tables as its own."""
    block = {f"blk.4.{name}.weight": kind for name in ("ffn_gate", "ffn_up", "nextn.eh_proj")}
    types = {**dict.fromkeys(OUTSIDE[:2], kind), **block}
    mtp = variant(DENSE, edit=_block_alone(4), quantise=types, to="mtp")

    def decoded(tensors):
        for name in types:
            numbers = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
            new = {
                "token_embd.weight": "blk.4.nextn.embed_tokens.weight",
                "output.weight": "blk.4.nextn.shared_head_head.weight",
            }
            tensors[new.get(name, name)] = numbers

    joined = variant(DENSE, edit=decoded, to="joined")
    _equal(_drafts(_loaded(_trunk(variant, DENSE, 4), mtp)), _drafts(_loaded(joined)))
    model = _loaded(_trunk(variant, DENSE, 4), mtp, compute="q8")
    with GgufFile.open(mtp) as file, GgufFile.open(_trunk(variant, DENSE, 4)) as target:
        sizes = describe_draft(file)[1].loaded_bytes, describe(target, has_mtp_file=True)
    assert model.weight_bytes == sizes[0]["q8"] + sizes[1].loaded_bytes["q8"]


def test_the_file_wins_over_a_block_in_the_model(golden, variant):
    def zero(tensors):
        tensors["blk.4.nextn.eh_proj.weight"][:] = 0

    worthless = variant(DENSE, edit=zero, to="zero")
    mtp = variant(DENSE, edit=_block_alone(4), to="mtp")
    _equal(_drafts(_loaded(worthless, mtp)), _drafts(golden(DENSE)))
    assert _drafts(_loaded(worthless))[1].ne(_drafts(golden(DENSE))[1]).any()


def test_what_the_file_lacks_is_the_trunks(golden, variant):
    mtp = variant(DENSE, edit=_block_alone(4, outside=()), to="mtp")
    _equal(_drafts(_loaded(_trunk(variant, DENSE, 4), mtp)), _drafts(golden(DENSE)))
    with GgufFile.open(mtp) as file, GgufFile.open(_trunk(variant, DENSE, 4)) as target:
        check_draft(target, Tokenizer.from_gguf(target), file)


@pytest.mark.parametrize("n_blocks", [np.uint32(1), np.uint32(5)])
def test_a_block_with_another_number_is_named(n_blocks, variant):
    def renumber(tensors):
        for name in [name for name in tensors if name.startswith("blk.4.")]:
            tensors[name.replace("blk.4.", "blk.0.")] = tensors.pop(name)

    keys = {"{arch}.block_count": n_blocks}
    mtp = variant(DENSE, keys, _block_alone(4, change=renumber), to="mtp")
    with (
        GgufFile.open(mtp) as file,
        GgufFile.open(_trunk(variant, DENSE, 4)) as target,
        pytest.raises(UnsupportedModelError, match=r"MTP block has the number 0.*--mtp"),
    ):
        check_draft(target, Tokenizer.from_gguf(target), file)


def test_scales_in_an_mtp_file(variant):
    names = ["blk.4.nextn.eh_proj", "blk.4.attn_q", "blk.4.ffn_down", "output", "token_embd"]

    def scales(tensors):
        for i, name in enumerate(names):
            tensors[f"{name}.scale"] = np.full(1, 0.7 + i, np.float32)
            tensors[f"{name}.input_scale"] = np.full(1, 3, np.float32)

    def multiplied(tensors):
        for i, name in enumerate(names):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * np.float32(0.7 + i)

    trunk = _trunk(variant, DENSE, 4)
    ours = variant(DENSE, edit=_block_alone(4, change=scales), to="scales")
    theirs = variant(DENSE, edit=_block_alone(4, change=multiplied), to="multiplied")
    _equal(_drafts(_loaded(trunk, ours)), _drafts(_loaded(trunk, theirs)))
    for mode in ("q8", "int8"):
        model = _loaded(trunk, ours, compute=mode)
        with GgufFile.open(ours) as file, GgufFile.open(trunk) as target:
            sizes = describe_draft(file)[1].loaded_bytes, describe(target, has_mtp_file=True)
        assert model.weight_bytes == sizes[0][mode] + sizes[1].loaded_bytes[mode]


def test_a_tied_file_uses_its_own_embedding_as_head(variant):
    def moved(tensors):
        tensors["token_embd.weight"] = tensors.pop("token_embd.weight")[::-1]

    mtp = variant(DENSE, edit=_block_alone(4, outside=OUTSIDE[::2], change=moved), to="mtp")

    def own(tensors):
        table = tensors["token_embd.weight"][::-1]
        for name in ("embed_tokens", "shared_head_head"):
            tensors[f"blk.4.nextn.{name}.weight"] = table

    joined = variant(DENSE, edit=own, to="joined")
    _equal(_drafts(_loaded(_trunk(variant, DENSE, 4), mtp)), _drafts(_loaded(joined)))


def test_an_mtp_file_is_no_model(variant):
    with (
        GgufFile.open(variant(DENSE, edit=_block_alone(4))) as file,
        pytest.raises(UnsupportedModelError, match="only the MTP block") as caught,
    ):
        load_model(file)
    assert "-md qwen35-c-v2x-mtp-f32-variant.gguf" in caught.value.remedy


def test_a_drafter_is_no_model():
    with (
        GgufFile.open(DEMO_EAGLE3) as file,
        pytest.raises(UnsupportedModelError, match="only a drafter, not its target") as caught,
    ):
        load_model(file)
    assert "TARGET -md demo-eagle3.gguf" in caught.value.remedy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "qwen35moe"}, "architecture is qwen35,"),
        ({"n_embd": 128}, "embedding length"),
        ({"n_vocab": 12}, "number of tokens"),
    ],
)
def test_a_file_for_another_trunk_is_refused(change, words, golden, variant):
    mtp = variant(DENSE, edit=_block_alone(4))
    target = replace(golden(DENSE).config, **change)
    with GgufFile.open(mtp) as file, pytest.raises(UnsupportedModelError, match=words):
        check_mtp_file(file, target)


def test_a_file_without_one_of_its_tensors_is_refused(variant):
    def less(tensors):
        del tensors["blk.4.nextn.hnorm.weight"]

    mtp = variant(DENSE, edit=_block_alone(4, change=less))
    with GgufFile.open(mtp) as file, pytest.raises(ModelFileError, match=r"nextn\.hnorm"):
        describe_draft(file)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen35moe-d-v2x-mtp-f32"])
def test_of_two_mtp_blocks_the_first_drafts(name, golden, variant):
    """The second is not looked at: its tensors may even have other shapes."""
    index = MODELS[name]
    keys = {"{arch}.nextn_predict_layers": 2, "{arch}.block_count": index + 2}
    per_block = _per_block(variant(name, to="copy"))
    keys |= {key: [*value, value[-1]] for key, value in per_block.items()}

    def second(tensors):
        for tensor in [tensor for tensor in tensors if tensor.startswith(f"blk.{index}.")]:
            tensors[tensor.replace(f"blk.{index}.", f"blk.{index + 1}.")] = np.zeros(3, np.float32)

    path = variant(name, keys, second)
    _equal(_drafts(_loaded(path)), _drafts(golden(name)))
    with GgufFile.open(path) as file:
        info = describe(file)
    assert [layer.kind for layer in info.layers][-2:] == ["mtp", "unused mtp"]
    assert "2 MTP blocks aborts" in info.llama_cpp


def test_a_count_of_mtp_blocks_without_their_tensors_is_a_trunk(golden, variant):
    model = _loaded(variant(DENSE, edit=_without_block(4)))
    assert model.head is None and model.config.n_unused_mtp == 0  # not one of another kind
    torch.testing.assert_close(_trunk_logits(model), _trunk_logits(golden(DENSE)), rtol=0, atol=0)


def test_a_block_with_the_names_of_a_fork(golden, variant):
    """The trunk runs without it; alone it is refused."""

    def renamed(tensors):
        tensors["blk.3.nextn.fc_hidden.weight"] = tensors.pop("blk.3.nextn.eh_proj.weight")

    name = "qwen4exp-c-mtp-f32"
    path = variant(name, edit=renamed)
    model = _loaded(path)
    assert model.head is None and model.config.n_unused_mtp == 1
    torch.testing.assert_close(_trunk_logits(model), _trunk_logits(golden(name)), rtol=0, atol=0)
    with GgufFile.open(path) as file:
        assert describe(file).layers[-1].kind == "unused mtp"
    alone = variant(name, edit=_block_alone(3, change=renamed), to="mtp")
    with GgufFile.open(alone) as file, pytest.raises(UnsupportedModelError, match="of a fork"):
        read_config(file)


def test_a_whole_model_is_left_with_its_block(golden, variant):
    name = "qwen35-c-v2x-mtp-f32"
    path, index = variant(name, to="whole"), MODELS[name]
    with GgufFile.open(path) as target, GgufFile.open(path) as draft:
        tokenizer = Tokenizer.from_gguf(target)
        check_draft(target, tokenizer, draft)
        assert drafter_of(draft) == "draft-simple"
        check_draft(target, tokenizer, draft, by_mtp=True)
        assert drafter_of(draft) == "draft-mtp" and "blk.0.attn_norm.weight" not in draft.tensors
        with GgufFile.open(_trunk(variant, name, index)) as trunk:
            _equal(_drafts(load_model(trunk, mtp=draft)), _drafts(golden(name)))
