"""What a run of tokens leaves behind when no states are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeltaLog(NamedTuple):
    """Rows from which the state after any prefix of a run of tokens can be rebuilt.

    k: [B, T, H_k, d_k]. u: [B, T, H_v, d_v], u_t = beta_t (v_t - (e^(g_t) S_(t-1))^T k_t).
    g: [B, T, H_v]. k and g are the very tensors that the kernel was given.
    """

    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor
