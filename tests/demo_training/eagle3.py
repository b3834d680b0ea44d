"""An EAGLE-3 drafter for the demo target as a trainable torch module.

Its parameters are named like the tensors of its file. Embedding and head are the target's and are
not trained; the target itself runs in the engine, which hands over the rows of the tapped layers.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor, nn

from kernels.norm import rms_norm
from kernels.rope import apply_rope, rope_table
from tests.demo_training.export import write_tensors
from tests.demo_training.model import EPS, THETA, Weight, linear, product

TAPS = (2, 5, 8)
"""Two layers inside the target and the row after its final norm."""
N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF = 4, 2, 64, 768
_TOKENIZER = "tokenizer."


class _Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.attn_norm, self.attn_norm_2, self.ffn_norm = Weight(d), Weight(d), Weight(d)
        self.attn_q = linear(2 * d, N_HEAD * HEAD_DIM)
        self.attn_k = linear(2 * d, N_HEAD_KV * HEAD_DIM)
        self.attn_v = linear(2 * d, N_HEAD_KV * HEAD_DIM)
        self.attn_output = linear(N_HEAD * HEAD_DIM, d, zero=True)
        self.ffn_gate, self.ffn_up = linear(d, N_FF), linear(d, N_FF)
        self.ffn_down = linear(N_FF, d, zero=True)


class Eagle3Net(nn.Module):
    """table: the target's embedding [n_vocab, n_embd], which is its head as well."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        d = table.shape[1]
        self.fc = linear(len(TAPS) * d, d)
        with torch.no_grad():  # begins as the row after the target's final norm
            self.fc.weight.mul_(0.2)[:, -d:] = torch.eye(d)
        self.blk = nn.ModuleList([_Block(d)])
        self.output_norm = Weight(d)
        self._table = [table]  # no parameter

    @property
    def block(self) -> _Block:
        """The one block."""
        block = self.blk[0]
        assert isinstance(block, _Block)
        return block

    def chain(self, rows: Tensor, ids: Tensor, n_steps: int) -> list[Tensor]:
        """Logits of a draft of n_steps tokens from every position, as drafting makes them.

        rows: [B, L, 3 * n_embd] of the target. ids: [B, L]. Step j of the result is [B, T, n_vocab]
        with T = L - n_steps - 1: from position a, given the text up to a + 1 + j, the token after
        it. A step sees the pairs up to a as the target's rows make them, and its own steps since.
        """
        block, table = self.block, self._table[0]
        n_rows = rows.shape[1] - n_steps - 1
        feature = self.fc(rows[:, :n_rows])
        visible = torch.ones(n_rows, n_rows, dtype=torch.bool).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(n_steps):
            tokens = ids[:, 1 + step : 1 + step + n_rows]
            token = rms_norm(table[tokens], block.attn_norm.weight, EPS)
            normed = rms_norm(feature, block.attn_norm_2.weight, EPS)
            x = torch.cat([token, normed], -1)
            q, k, v = self._turned(x, step)
            keys.append(k)
            values.append(v)
            z = feature + block.attn_output(_attend(q, keys, values, visible))
            y = rms_norm(z, block.ffn_norm.weight, EPS)
            z = z + block.ffn_down(nn.functional.silu(block.ffn_gate(y)) * block.ffn_up(y))
            feature = z
            found.append(product(rms_norm(z, self.output_norm.weight, EPS), table))
        return found

    def _turned(self, x: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, n_head, T, head_dim] of a step."""
        block, (n_seqs, n_rows, _) = self.block, x.shape
        q, k, v = (
            project(x).view(n_seqs, n_rows, -1, HEAD_DIM)
            for project in (block.attn_q, block.attn_k, block.attn_v)
        )
        positions = torch.arange(step, step + n_rows).expand(n_seqs, -1)
        inv_freq = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = rope_table(positions, HEAD_DIM, inv_freq, 1.0)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        repeats = N_HEAD // N_HEAD_KV
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor) -> Tensor:
    """The first keys for all positions up to one's own, later ones each for its own position."""
    scores = (q @ keys[0].mT).masked_fill(~visible, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
    weights = torch.softmax(torch.cat([scores, *own], -1) / HEAD_DIM**0.5, -1)
    n = scores.shape[-1]
    out = weights[..., :n] @ values[0]
    for i, v in enumerate(values[1:]):
        out = out + weights[..., n + i, None] * v
    return out.transpose(1, 2).flatten(2)


def _neighbours_turn(rows: np.ndarray) -> np.ndarray:
    """Rows of query or key heads whose halves turn, in the order of files: neighbours do."""
    heads = rows.reshape(-1, HEAD_DIM, rows.shape[1])
    halves = heads.reshape(len(heads), 2, HEAD_DIM // 2, -1)
    return halves.transpose(0, 2, 1, 3).reshape(rows.shape)


def _halves_turn(rows: np.ndarray) -> np.ndarray:
    """The other way: rows of a file as the net has them."""
    heads = rows.reshape(-1, HEAD_DIM // 2, 2, rows.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(rows.shape)


def load(net: Eagle3Net, path: Path) -> None:
    """Give `net` the weights of the drafter at `path`, as Q8_0 keeps them."""
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            array = _halves_turn(array)
        state[str(tensor.name)] = torch.from_numpy(array.copy())
    net.load_state_dict(state)


def save(net: Eagle3Net, target: Path, path: Path) -> None:
    """Write the drafter, Q8_0 and F32, with the tokenizer of the target's file."""
    d, arch = net.output_norm.weight.shape[0], "eagle3"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Draftscope demo EAGLE-3 drafter")
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_array(f"{arch}.target_layers", list(TAPS))
    writer.add_uint32(f"{arch}.target_hidden_size", d)
    for field in gguf.GGUFReader(target).fields.values():
        if field.name.startswith(_TOKENIZER) and "chat_template" not in field.name:
            writer.add_key_value(field.name, field.contents(), *field.types)
    arrays = {}
    for name, value in net.state_dict().items():
        array = value.detach().numpy().astype(np.float32)
        is_turned = "attn_q." in name or "attn_k." in name
        arrays[name] = _neighbours_turn(array) if is_turned else array
    write_tensors(writer, arrays)
