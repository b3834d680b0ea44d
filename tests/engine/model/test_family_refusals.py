"""Files of the further families that are damaged or impossible: one sentence, and cheap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from engine.errors import ModelFileError, UnsupportedModelError
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.model.families import MISSING, read_config
from engine.model.loader import load_model
from engine.model.tensors import check_tensors
from tests.support.gguf_refusal import flat
from tests.support.golden_files import golden_file, second_set
from tests.support.golden_runs import MODELS
from tests.support.rewrite_gguf import DROP, rewrite

NEMOTRON, LFM2 = "nemotron_h_moe-b-mtp-f32", "lfm2-a-tied-f32"
GRANITE, FALCON, LFM2MOE = "granitehybrid-a-f32", "falcon-h1-a-f32", "lfm2moe-b-f32"
HUGE = 1 << 40
KEYS = [
    *[
        (NEMOTRON, f"ssm.{key}", value)
        for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
        for value in (DROP, 0, -1, HUGE, "many")
    ],
    (NEMOTRON, "ssm.conv_kernel", 1),
    (NEMOTRON, "ssm.inner_size", 65),
    (NEMOTRON, "ssm.time_step_rank", 3),
    (NEMOTRON, "ssm.group_count", 3),
    (NEMOTRON, "attention.head_count_kv", [0, 0, 2]),
    (NEMOTRON, "attention.head_count_kv", [0, 0, 0, -2, 0, 2]),
    (NEMOTRON, "attention.head_count_kv", [0, 0, 0, 3, 0, 3]),
    (NEMOTRON, "attention.head_count_kv", DROP),
    (NEMOTRON, "feed_forward_length", [0, 24]),
    (NEMOTRON, "feed_forward_length", [0, HUGE, 0, 0, 24, 24]),
    (NEMOTRON, "feed_forward_length", "wide"),
    (NEMOTRON, "attention.layer_norm_epsilon", DROP),
    (NEMOTRON, "attention.layer_norm_epsilon", 0.0),
    (NEMOTRON, "expert_used_count", 7),
    (NEMOTRON, "expert_used_count", 0),
    (NEMOTRON, "expert_count", HUGE),
    (NEMOTRON, "expert_weights_scale", -1.0),
    (NEMOTRON, "expert_feed_forward_length", [24, 24]),
    (NEMOTRON, "moe_latent_size", HUGE),
    (LFM2, "shortconv.l_cache", DROP),
    (LFM2, "shortconv.l_cache", 1),
    (LFM2, "shortconv.l_cache", HUGE),
    (LFM2, "attention.sliding_window", -1),
    (LFM2, "attention.head_count_kv", [2, 2]),
    (GRANITE, "ssm.inner_size", 64),
    (GRANITE, "attention.scale", float("nan")),
    (GRANITE, "logit_scale", float("inf")),
    (GRANITE, "residual_scale", -1.0),
    (GRANITE, "expert_count", HUGE),
    (FALCON, "ssm.group_count", 16),
    (FALCON, "attention.head_count_kv", 0),
    (LFM2MOE, "expert_gating_func", DROP),
    (LFM2MOE, "expert_gating_func", 3),
    (LFM2MOE, "expert_count", 0),
    (LFM2MOE, "leading_dense_block_count", 9),
    ("plamo2", "ssm.group_count", 1),
    ("plamo2", "ssm.time_step_rank", 0),
    ("plamo2", "ssm.time_step_rank", 5),
    ("plamo2", "attention.head_count", 0),
    ("plamo2", "attention.head_count", 3),
    ("plamo2", "feed_forward_length", DROP),
    ("plamo2", "rope.dimension_count", 63),
    ("mamba", "ssm.time_step_rank", 0),
    ("jamba", "attention.head_count", 0),
    ("mamba2", "ssm.time_step_rank", 0),
]
TENSORS = [
    (NEMOTRON, "blk.0.ssm_in.weight"),
    (NEMOTRON, "blk.0.ssm_norm.weight"),
    (NEMOTRON, "blk.0.ssm_d"),
    (NEMOTRON, "blk.1.exp_probs_b.bias"),
    (NEMOTRON, "blk.3.attn_output.weight"),
    (LFM2, "blk.0.shortconv.conv.weight"),
    (LFM2, "token_embd_norm.weight"),
    (LFM2, "blk.2.attn_q_norm.weight"),
    (FALCON, "blk.0.ffn_norm"),
    ("plamo2", "blk.0.ssm_b_norm"),
    ("plamo2", "blk.0.ssm_x.weight"),
    ("plamo2", "blk.1.attn_k_norm.weight"),
    ("plamo2", "blk.1.post_ffw_norm"),
    ("plamo2", "blk.0.ffn_up.weight"),
    ("mamba", "blk.0.ssm_x.weight"),
    ("jamba", "blk.1.ffn_gate_exps.weight"),
    ("mamba2", "blk.0.ssm_norm.weight"),
]


def refused(base: str, folder, keys=None, edit=None) -> str:
    """The message; one sentence that names the file, and a remedy. base: a golden file, or the
    architecture of a random one."""
    source = golden_file(f"{base}.gguf")
    if base in RANDOM_FAMILIES:
        source = folder / "random.gguf"
        write_random_model(source, arch=base, size="tiny", quant="f32")
    if not source.exists():
        pytest.skip(f"{source.name} is not here")
    path = rewrite(source, folder / "bad.gguf", keys, edit)
    with (
        GgufFile.open(path) as file,
        flat(),
        pytest.raises((ModelFileError, UnsupportedModelError)) as caught,
    ):
        check_tensors(file, read_config(file))
    for sentence in (caught.value.message, caught.value.remedy):
        assert sentence.endswith(".") and sentence.isprintable() and len(sentence) < 400
    assert caught.value.message.startswith("bad.gguf: ")
    return caught.value.message


@pytest.mark.parametrize(("base", "key", "value"), KEYS, ids=lambda part: str(part)[:24])
def test_a_key_that_is_missing_or_impossible(base, key, value, tmp_path):
    message = refused(base, tmp_path, {f"{{arch}}.{key}": value})
    # of sizes that are possible by themselves, another one or the tensors tell
    assert key in message or "ssm.time_step_rank" in message or "tensor blk." in message


@pytest.mark.parametrize(("base", "name"), TENSORS)
@pytest.mark.thinned(4)
def test_a_tensor_that_is_missing_or_of_another_shape(base, name, tmp_path):
    def without(tensors):
        del tensors[name]

    def longer(tensors):
        tensors[name] = np.concatenate([tensors[name], tensors[name]])

    for edit in (without, longer):
        assert name in refused(base, tmp_path, edit=edit)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (NEMOTRON, "blk.0.ssm_dt_norm.weight"),
        (NEMOTRON, "blk.1.exp_probs_b.weight"),
        (NEMOTRON, "output_norm.bias"),
        (LFM2, "blk.0.shortconv.conv.bias"),
        (LFM2, "output_norm.weight"),
        (LFM2, "rope_freqs.weight"),
        ("kimi-k3-a-f32", "rope_factors_long.weight"),
        ("qwen4exp-b-qsa-f32", "output_norm.weight"),
        ("qwen4exp-b-qsa-f32", "blk.0.attn_norm.weight"),
    ],
)
def test_a_tensor_without_a_place_is_not_ignored(base, name, tmp_path):
    def edit(tensors):
        tensors[name] = np.ones(4, np.float32)

    assert f"the tensor {name} is not used by" in refused(base, tmp_path, edit=edit)


@pytest.mark.parametrize("name", [*MODELS, *second_set()])
def test_every_tensor_is_read(name):
    told = []
    with GgufFile.open(golden_file(f"{name}.gguf")) as file:
        load_model(file, progress=lambda done, total, phase: told.append((done, total)))
    done, total = told[-1]
    assert done == total > 0


def test_a_model_that_embeds_texts_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    write_random_model(tmp_path / "a.gguf", arch="lfm2", size="tiny", quant="f32")
    rewrite(tmp_path / "a.gguf", path, {"lfm2.attention.causal": False})
    with (
        GgufFile.open(path) as file,
        pytest.raises(UnsupportedModelError, match="without causal attention") as caught,
    ):
        read_config(file)
    assert caught.value.message.count(". ") == 0


@pytest.mark.parametrize("arch", MISSING)
def test_a_refusal_names_the_part_that_is_missing(arch, tmp_path):
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


def test_an_mtp_block_of_another_family_is_run_next_to_its_trunk(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "mtp.gguf", "step35")
    for key, value in (("block_count", 3), ("nextn_predict_layers", 1)):
        writer.add_uint32(f"step35.{key}", value)
    writer.add_tensor("blk.2.nextn.eh_proj.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with (
        GgufFile.open(tmp_path / "mtp.gguf") as file,
        pytest.raises(UnsupportedModelError) as raised,
    ):
        read_config(file)
    assert "with this file as --spec-draft-model" in raised.value.remedy
