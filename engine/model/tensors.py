"""Which tensors a model consists of, and their shapes: the file is held to this before loading.

Shapes are numpy order (rows first). A shape's dimensions of size 1 may be missing in the file.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig, MoeConfig, SsmConfig

Shapes = dict[str, tuple[int, ...]]


def global_shapes(config: ModelConfig, present: Container[str]) -> Shapes:
    """Tensors outside the blocks. Without `output.weight` the head is the embedding."""
    table = (config.n_vocab, config.n_embd)
    shapes: Shapes = {"token_embd.weight": table, "output_norm.weight": (config.n_embd,)}
    return shapes | _optional({"output.weight": table}, present)


def block_shapes(config: ModelConfig, index: int, present: Container[str]) -> Shapes:
    """Tensors of block `index` under their full names, in the variant the file holds."""
    prefix = f"blk.{index}."
    within = _Within(prefix, present)
    is_mtp = index >= config.n_layer
    d = config.n_embd
    if config.ssm is not None and not is_mtp and config.recurrent_layers[index]:
        shapes = _delta_net(config, config.ssm, within)
    else:
        shapes = _attention(config, within)
    shapes["attn_norm.weight"] = (d,)
    shapes[ffn_norm_name(config)] = (d,)
    if config.moe is None:
        shapes |= _swiglu("", d, config.n_ff)
    else:
        shapes |= _mixture(config.moe, d, within)
    if is_mtp:
        shapes |= _mtp(config, within)
    return {prefix + name: shape for name, shape in shapes.items()}


def ffn_norm_name(config: ModelConfig) -> str:
    """Name of the norm before the feed-forward part, within a block."""
    return "post_attention_norm.weight" if config.hybrid else "ffn_norm.weight"


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Hold the tensor directory of `file` to `config`; no tensor data is read.

    Raises ModelFileError for the first missing or misshaped tensor, UnsupportedModelError for a
    block tensor that the model would silently be run without.
    """
    expected = global_shapes(config, file.tensors)
    for index in range(config.n_layer + config.n_mtp):
        expected |= block_shapes(config, index, file.tensors)
    for name, shape in expected.items():
        info = file.tensors.get(name)
        remedy = "The file is damaged or incomplete; download or convert the model again."
        if info is None:
            raise ModelFileError(file.path, f"tensor {name}", "the tensor is missing", remedy)
        if _core(info.shape) != _core(shape):
            what = f"shape {list(info.shape)} where {list(shape)} is needed"
            raise ModelFileError(file.path, f"tensor {name}", what, remedy)
    for name in file.tensors:
        if name.startswith("blk.") and name not in expected:
            raise UnsupportedModelError(
                f"{file.path.name}: the tensor {name} has no place in a {config.architecture} "
                "model as this engine runs it.",
                "Convert the model again with a current converter.",
            )


class _Within:
    """Membership of names inside one block."""

    def __init__(self, prefix: str, present: Container[str]) -> None:
        self._prefix = prefix
        self._present = present

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._present


def _attention(config: ModelConfig, present: Container[str]) -> Shapes:
    d, hd = config.n_embd, config.head_dim
    n_q = config.n_head * hd * (2 if config.hybrid else 1)
    n_kv = config.n_head_kv * hd
    rows = (
        {"attn_qkv": n_q + 2 * n_kv}
        if "attn_qkv.weight" in present
        else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    )
    return {
        **{f"{name}.weight": (n, d) for name, n in rows.items()},
        **_optional({f"{name}.bias": (n,) for name, n in rows.items()}, present),
        "attn_q_norm.weight": (hd,),
        "attn_k_norm.weight": (hd,),
        "attn_output.weight": (d, config.n_head * hd),
    }


def _delta_net(config: ModelConfig, ssm: SsmConfig, present: Container[str]) -> Shapes:
    d, n_v = config.n_embd, ssm.n_v_heads
    shapes: Shapes = {
        "ssm_conv1d.weight": (ssm.conv_dim, ssm.d_conv),
        "ssm_dt.bias": (n_v,),
        "ssm_a": (n_v,),
        "ssm_norm.weight": (ssm.d_state,),
        "ssm_out.weight": (d, ssm.value_dim),
    }
    if config.architecture == "qwen3next":
        shapes["ssm_ba.weight"] = (2 * n_v, d)
    else:
        shapes |= {"ssm_alpha.weight": (n_v, d), "ssm_beta.weight": (n_v, d)}
    if config.architecture == "qwen3next" and "ssm_in.weight" in present:
        return shapes | {"ssm_in.weight": (ssm.conv_dim + ssm.value_dim, d)}
    return shapes | {"attn_qkv.weight": (ssm.conv_dim, d), "attn_gate.weight": (ssm.value_dim, d)}


def _swiglu(suffix: str, d: int, width: int) -> Shapes:
    return {
        f"ffn_gate{suffix}.weight": (width, d),
        f"ffn_up{suffix}.weight": (width, d),
        f"ffn_down{suffix}.weight": (d, width),
    }


def _mixture(moe: MoeConfig, d: int, present: Container[str]) -> Shapes:
    n, width = moe.n_experts, moe.n_ff
    experts: Shapes = (
        {"ffn_gate_up_exps.weight": (n, 2 * width, d)}
        if "ffn_gate_up_exps.weight" in present
        else {"ffn_gate_exps.weight": (n, width, d), "ffn_up_exps.weight": (n, width, d)}
    )
    return {
        "ffn_gate_inp.weight": (n, d),
        **experts,
        "ffn_down_exps.weight": (n, d, width),
        "ffn_gate_inp_shexp.weight": (1, d),
        **_swiglu("_shexp", d, moe.n_ff_shared),
    }


def _mtp(config: ModelConfig, present: Container[str]) -> Shapes:
    d, table = config.n_embd, (config.n_vocab, config.n_embd)
    optional: Shapes = {
        "nextn.shared_head_norm.weight": (d,),
        "nextn.embed_tokens.weight": table,
        "nextn.shared_head_head.weight": table,
    }
    return {
        "nextn.eh_proj.weight": (d, 2 * d),
        "nextn.enorm.weight": (d,),
        "nextn.hnorm.weight": (d,),
        **_optional(optional, present),
    }


def _optional(shapes: Mapping[str, tuple[int, ...]], present: Container[str]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name in present}


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading and trailing ones, which rewriting a file may drop."""
    long = [i for i, n in enumerate(shape) if n != 1]
    return shape[long[0] : long[-1] + 1] if long else ()
