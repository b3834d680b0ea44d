"""Memory of a model's weights once loaded, estimated from the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.gguf.file import TensorInfo
from engine.model.parts.recurrent import TABLE
from kernels.processor import multiplies_bf16

MODES = ("f32", "bf16", "int8", "int8x2", "q8", "blocks")
"""Compute modes whose memory is estimated."""

LEAST_VOCABULARY = 2**15
LEAST_GAIN = 1.5
"""Smallest head, bytes, for which a two-bit copy pays."""
_Q2_K = 256, 84
# also the 16-bit types without blocks, in rows of whole groups
_F32, _HALVES, _GROUP = 4, ("F16", "BF16"), 32
# types with products over blocks (kernels.linear.block_linear, which would import torch)
_BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
# and with integer products (kernels.linear.integer_blocks)
_GPU_BLOCKS = (*_BLOCKS, "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "IQ4_XS")
_CPU_BLOCKS = (
    *(*_GPU_BLOCKS, "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
    *("TQ2_0", "TQ1_0", "NVFP4"),
)
_IN_BLOCKS: dict[tuple[str, str], Sequence[str]] = {
    **{("cpu", mode): _BLOCKS for mode in MODES if mode != "f32"},
    **{("cuda", "blocks"): _BLOCKS, ("cuda", "q8"): _GPU_BLOCKS, ("cpu", "q8"): _CPU_BLOCKS},
}
# parts of names of tensors that engine.model keeps as f32 in every mode
_KEPT = (
    "ssm_conv1d",
    "shortconv.conv.",
    "attn_k_b.",
    "attn_v_b.",
    ".ssm_a",
    ".ssm_d",
    "ssm_x.",
    "ssm_dt.",
    "ssm_beta.",
    "ssm_ba.",
    "ffn_gate_inp",
    "ple_conv1d.",
    "indexer",
    "compressor_ape.",
    "_fn.",
    "_norm",
    "hnorm",
)
_IDS = "ffn_gate_tid2eid.weight"
_EMBEDDINGS = ("token_embd.weight", "nextn.embed_tokens.weight")


def loaded_bytes(
    tensors: Mapping[str, TensorInfo], device: str, *, shares_head: bool = False
) -> dict[str, int]:
    """Bytes by compute mode for a whole model on a device, "cpu" or "cuda".

    shares_head: uses another model's head, not counted, if it has none of its own.

    int8 may need a little more if a matrix's sides are not multiples of sixteen.
    """
    has_head = shares_head or "output.weight" in tensors
    return {mode: _bytes_in(tensors, (device, mode), has_head) for mode in MODES}


def note_on_type(type: str) -> str:
    """How mode q8 converts matrices of a GGML type that cannot stay as they are."""
    if type in (*_GPU_BLOCKS, *_HALVES, "F32", "I32"):
        return ""
    return "bf16 on a GPU in mode q8" if type in _CPU_BLOCKS else "f32 in mode q8"


def draft_head_bytes(tensors: Mapping[str, TensorInfo], device: str) -> int:
    """Size of the two-bit copy of the output head that draft-mtp makes in mode q8, 0 if it makes
    none (engine.model.mtp.DraftHead)."""
    heads = [name for name in tensors if name.endswith("nextn.shared_head_head.weight")]
    names = [*heads, "output.weight", "token_embd.weight"]
    head = next((tensors[name] for name in names if name in tensors), None)
    if head is None or head.type.name in _HALVES or not _stays(tensors, head, (device, "q8")):
        return 0
    if len(head.shape) != 2:
        return 0
    n_vocab, width = head.shape
    copy = n_vocab * width // _Q2_K[0] * _Q2_K[1]
    is_made = n_vocab >= LEAST_VOCABULARY and width % _Q2_K[0] == 0
    return copy if is_made and head.n_bytes >= LEAST_GAIN * copy else 0


def _bytes_in(tensors: Mapping[str, TensorInfo], where: tuple[str, str], has_head: bool) -> int:
    device, mode = where
    on_gpu = device != "cpu"
    # without bfloat16 products the CPU stores the rounded values in 4 bytes
    if mode == "bf16":
        is_narrow = on_gpu or multiplies_bf16()
    else:
        is_narrow = on_gpu and mode in ("q8", "blocks")
    # a layer's experts stay in blocks together or not at all
    experts = {name: t for name, t in tensors.items() if "_exps.weight" in name}
    expanded = {_block(name) for name, t in experts.items() if not _stays(tensors, t, where)}
    total = 0
    for name, tensor in tensors.items():
        if name == TABLE:  # it stays in the file
            total += tensor.n_bytes if device != "cpu" else 0
            continue
        if name.endswith((".scale", ".input_scale")):  # included in the matrix
            continue
        if name.endswith(_IDS):
            total += 8 * tensor.n_elements
            continue
        stays = _stays(tensors, tensor, where) and not (
            name in experts and _block(name) in expanded
        )
        if name.endswith(_EMBEDDINGS):
            is_other = mode not in ("f32", "q8") or _is_scaled(tensors, tensor)
            stays = _stays(tensors, tensor, (device, "blocks" if is_other else mode))
            total += tensor.n_bytes if stays else tensor.n_elements * _F32
        elif len(tensor.shape) > 1 and not any(part in name for part in _KEPT):
            steps = _steps(tensors, name) if mode not in ("f32", "blocks") else 0
            rows = tensor.n_elements // tensor.shape[-1]
            total += _packed(tensor, mode, stays, is_narrow) * (rows - steps) // rows
            total += _F32 * rows * (stays and _is_scaled(tensors, tensor))
            total += steps * tensor.shape[-1] * _F32
        else:
            total += tensor.n_elements * _F32
    if not has_head:
        table = tensors["token_embd.weight"]
        # without packing, the head is the embedding itself
        is_packed = is_narrow and not _stays(tensors, table, where)
        if mode.startswith("int8") or (is_packed and not _stays(tensors, table, (device, "f32"))):
            total += _packed(table, mode, False, is_narrow)
    return total


def _steps(tensors: Mapping[str, TensorInfo], name: str) -> int:
    """Rows of a matrix that stay f32: the step sizes of Mamba-2, one per head."""
    block, _, rest = name.rpartition("ssm_in.")
    has_steps = rest and f"{block}ssm_d" in tensors and f"{block}ssm_x.weight" not in tensors
    return tensors[f"{block}ssm_dt.bias"].n_elements if has_steps else 0


def _block(name: str) -> str:
    """The prefix that a block's tensor names share."""
    return name.split(".ffn_")[0]


def _stays(tensors: Mapping[str, TensorInfo], tensor: TensorInfo, where: tuple[str, str]) -> bool:
    device, mode = where
    if _is_scaled(tensors, tensor):
        return where == ("cpu", "q8") and tensor.type.name in _CPU_BLOCKS
    if tensor.type.name in _HALVES and len(tensor.shape) == 2:
        is_whole = device == "cpu" and tensor.shape[1] % _GROUP == 0
        return is_whole and mode in ("f32", "blocks", "q8")
    return tensor.type.name in _IN_BLOCKS.get(where, ())


def _is_scaled(tensors: Mapping[str, TensorInfo], tensor: TensorInfo) -> bool:
    return tensor.name.removesuffix(".weight") + ".scale" in tensors


def _packed(tensor: TensorInfo, mode: str, stays: bool, is_narrow: bool) -> int:
    if mode.startswith("int8"):
        return tensor.n_elements + _F32 * (tensor.n_elements // tensor.shape[-1])  # and scales
    if stays:
        return tensor.n_bytes
    return tensor.n_elements * (2 if is_narrow else _F32)
