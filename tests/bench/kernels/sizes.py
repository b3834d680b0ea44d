"""The sizes that are measured, and the bytes and operations that each kernel cannot do without.

Bytes count every input that must be read and every output that must be written once, in f32
unless said otherwise; what a version reads or writes beyond that lowers its share.
"""

from __future__ import annotations

from dataclasses import dataclass

F32 = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Layer sizes, those of a model of 0.8 B unless given."""

    n_k_heads: int = 16
    n_v_heads: int = 16
    d_state: int = 128
    n_embd: int = 1024
    n_ff: int = 3584
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 256
    n_rot: int = 64
    n_cells: int = 4096
    n_experts: int = 32
    n_used: int = 4
    n_ff_expert: int = 512
    tokens: tuple[int, ...] = (1, 4, 8, 512)
    batches: tuple[int, ...] = (1, 8, 32, 128)
    copied_bytes: int = 1 << 28
    matrix_side: int = 1024
    most_tokens: int = 1 << 14
    """Of all sequences together; larger cases are left out."""

    @property
    def conv_channels(self) -> int:
        return self.d_state * (2 * self.n_k_heads + self.n_v_heads)

    def evicted_bytes(self, device_type: str) -> int:
        """More than the caches hold; on a GPU also more than the host needs to start a call."""
        return self.copied_bytes * 4 if device_type == "cuda" else self.copied_bytes // 4


def delta_bytes(sizes: Sizes, n_batch: int, n_tokens: int, n_states: int, log: bool = False) -> int:
    """q, k, v, g, beta and one state in; the outputs, n_states states and, of a log, u out."""
    state = sizes.n_v_heads * sizes.d_state**2
    keys = 2 * sizes.n_k_heads * sizes.d_state
    values = (3 if log else 2) * sizes.n_v_heads * sizes.d_state
    token = keys + values + 2 * sizes.n_v_heads
    return F32 * n_batch * ((1 + n_states) * state + n_tokens * token)


def delta_operations(sizes: Sizes, n_batch: int, n_tokens: int) -> int:
    """Per number of the state: decay, two sums of products, one product added."""
    return 7 * n_batch * n_tokens * sizes.n_v_heads * sizes.d_state**2


def fold_bytes(sizes: Sizes, n_batch: int, n_tokens: int) -> int:
    """A state in and out, and the rows k, u, g."""
    state = sizes.n_v_heads * sizes.d_state**2
    token = sizes.d_state * (sizes.n_k_heads + sizes.n_v_heads) + sizes.n_v_heads
    return F32 * n_batch * (2 * state + n_tokens * token)


def conv_bytes(channels: int, n_batch: int, n_tokens: int, n_taps: int) -> int:
    """x, window and weight in; y and the history out."""
    rows = 3 * n_tokens + 2 * (n_taps - 1)
    return F32 * channels * (n_batch * rows + n_taps)


def norm_bytes(n_rows: int, d: int, weights: int, gates: int = 0) -> int:
    """x, `weights` vectors and `gates` further matrices in; y out."""
    return F32 * (n_rows * d * (2 + gates) + weights * d)


def rope_bytes(n_tokens: int, n_heads: int, head_dim: int, n_rot: int) -> int:
    """x and both tables in; y out."""
    return F32 * n_tokens * (2 * n_heads * head_dim + n_rot)


def linear_bytes(weight_bytes: int, n_rows: int, n_in: int, n_out: int) -> int:
    """The weight as it is stored and x in; y out."""
    return weight_bytes + F32 * n_rows * (n_in + n_out)


def attention_bytes(sizes: Sizes, n_tokens: int) -> int:
    """Queries, all keys and values of one sequence and the mask (a byte each) in; y out."""
    queries = 2 * n_tokens * sizes.n_heads * sizes.head_dim
    cells = 2 * sizes.n_cells * sizes.n_kv_heads * sizes.head_dim
    return F32 * (queries + cells) + n_tokens * sizes.n_cells


def expert_bytes(sizes: Sizes, weight_bytes: int, n_rows: int) -> int:
    """The chosen experts' matrices as they are stored, x, weights and ids (8 bytes); y out."""
    rows = n_rows * (2 * sizes.n_embd + sizes.n_used)
    return weight_bytes + F32 * rows + 8 * n_rows * sizes.n_used


def route_bytes(sizes: Sizes, n_rows: int) -> int:
    """Logits in; weights and ids (8 bytes) out."""
    return n_rows * (F32 * sizes.n_experts + (F32 + 8) * sizes.n_used)
