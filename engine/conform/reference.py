"""The recurrences in f64, one token at a time, with every state that a rollback may return to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.conform.cases import Rows, Shape, normed

_MOST_PASSES = 4
# Orders of operations that a kernel may have by mistake
VARIANTS = {
    "gdn": ("gate-after-delta", "gate-last", "output-before-update", "no-gate"),
    "kda": ("gate-after-delta", "gate-last", "output-before-update", "no-gate"),
    "mamba2": ("gate-last", "output-before-update", "no-gate"),
    "conv": (),
}


def gate(shape: Shape, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a row's state is multiplied by: [heads, 1, 1], or [heads, d_k, 1] of KDA."""
    if shape.recurrence == "mamba2":
        dt = torch.nn.functional.softplus(row["dt"] + row["dt_bias"])
        return torch.exp(row["A"] * dt)[:, None, None]
    decay = torch.nn.functional.softplus(row["a"] + row["dt_bias"])
    g = -torch.exp(row["A_log"]).view(-1, *[1] * (decay.dim() - 1)) * decay
    return torch.exp(g).view(shape.n_heads, -1, 1)


def step(
    shape: Shape, state: torch.Tensor, row: dict[str, torch.Tensor], variant: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: its output and the state after it, in f64.

    Delta rules: state [heads, d_k, d_v] (Yang et al. 2024, arXiv 2412.06464; KDA: arXiv
    2510.26692). Mamba-2: the same layout, d_k the state size (Dao and Gu 2024, arXiv 2405.21060).
    Convolutions: state [channels, taps - 1], the oldest input first.
    """
    if shape.recurrence == "conv":
        window = torch.cat([state, row["x"].unsqueeze(-1)], -1)
        y = (window * row["weight"]).sum(-1) + row["bias"]
        return y * torch.sigmoid(y), window[:, 1:]
    per_group = shape.n_heads // shape.n_groups
    decay = gate(shape, row) ** (variant != "no-gate")
    if shape.recurrence == "mamba2":
        dt = torch.nn.functional.softplus(row["dt"] + row["dt_bias"])
        B, C = (row[n].repeat_interleave(per_group, 0) for n in "BC")
        write = (dt[:, None] * B)[:, :, None] * row["x"][:, None, :]
        after = decay * (state + write) if variant == "gate-last" else decay * state + write
        read = decay * state if variant == "output-before-update" else after
        y = (C[:, :, None] * read).sum(1) + row["D"][:, None] * row["x"]
        return y, after
    q, k = (normed(row[n]).repeat_interleave(per_group, 0) for n in "qk")
    beta = torch.sigmoid(row["b"])[:, None]
    decayed = state if variant in ("gate-after-delta", "gate-last") else decay * state
    write = k[:, :, None] * (beta * (row["v"] - (k[:, :, None] * decayed).sum(1)))[:, None, :]
    if variant == "gate-last":
        after = decay * (state + write)
    else:
        after = decay * state + write
    read = decay * state if variant == "output-before-update" else after
    return (q[:, :, None] * read).sum(1) * shape.d_k**-0.5, after


def token(rows: Rows, index: int) -> dict[str, torch.Tensor]:
    """The index-th row with the weights, in f64 on the CPU."""
    n = sum(rows.lengths)
    names = ("x", "dt", "B", "C", "q", "k", "v", "a", "b")
    return {
        k: (t[index] if k in names and t.shape[0] == n else t).double().cpu()
        for k, t in rows.tensors.items()
        if k in names or k in ("A_log", "A", "D", "dt_bias", "weight", "bias")
    }


class Reference:
    """States of all sequences under plain decoding of what was accepted.

    `committed[s]` holds the state after each commit, the newest last; `tokens[s]` the accepted rows
    of each of them; `passes[s]` the states after each row of each of the last passes.
    """

    def __init__(self, shape: Shape, first: Sequence[torch.Tensor]) -> None:
        self.shape = shape
        self.committed = [[state.double().cpu()] for state in first]
        self.tokens: list[list[list[dict[str, torch.Tensor]]]] = [[] for _ in first]
        self.passes: list[list[list[torch.Tensor]]] = [[] for _ in first]
        self._rows: list[list[dict[str, torch.Tensor]]] = [[] for _ in first]

    def state(self, sequence: int) -> torch.Tensor:
        """The state after all accepted tokens."""
        return self.committed[sequence][-1]

    def depths(self, sequence: int) -> list[torch.Tensor]:
        """The states after each row of the last pass."""
        return self.passes[sequence][-1]

    def verify(self, rows: Rows) -> torch.Tensor:
        """Outputs [tokens, …] of these rows, without those of padding; the states after them are
        kept in `passes`."""
        outputs = []
        for i, (sequence, part) in enumerate(zip(rows.sequences, rows.slices(), strict=True)):
            if sequence < 0:
                continue
            tokens = [token(rows, i) for i in range(part.start, part.stop)]
            parents = rows.parents[i] if rows.parents else ()
            made, states = play(self.shape, self.state(sequence), tokens, parents=parents)
            self.passes[sequence] = [*self.passes[sequence][-_MOST_PASSES:], states]
            self._rows[sequence] = tokens
            outputs += made
        return torch.stack(outputs)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the first `counts` tokens of the last pass."""
        for sequence, count in zip(sequences, counts, strict=True):
            self.committed[sequence].append(self.depths(sequence)[count - 1])
            self.tokens[sequence].append(self._rows[sequence][:count])


def play(
    shape: Shape,
    state: torch.Tensor,
    tokens: Sequence[dict[str, torch.Tensor]],
    variant: str = "",
    parents: Sequence[int] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and states of tokens from a state on, each after the one before it or its parent."""
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for i, row in enumerate(tokens):
        parent = parents[i] if parents else i - 1
        output, after = step(shape, states[parent] if parent >= 0 else state, row, variant)
        outputs.append(output)
        states.append(after)
    return outputs, states
