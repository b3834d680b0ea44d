"""The reference: recurrences in f64, one token at a time, with every state that a rollback may
restore."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu, softplus

from engine.conform.cases import WEIGHTS, Rows, Shape, log_decay, normed

_MOST_PASSES = 5
# Inputs of a row, its gate first
ROW_INPUTS = {
    "gdn": ("a", "b", "q", "k", "v"),
    "kda": ("a", "b", "q", "k", "v"),
    "mamba2": ("dt", "x", "B", "C", "z"),
    "conv": ("x",),
}
# Weights per head
HEAD_WEIGHTS = {
    "gdn": ("A_log", "dt_bias"),
    "kda": ("A_log", "dt_bias"),
    "mamba2": ("A", "dt_bias", "D"),
}
Row = dict[str, torch.Tensor]
Way = tuple[str, str, torch.Tensor]  # a mistake: its cause, its sentence, and its result


def terms(shape: Shape, row: Row) -> Row:
    """A row with what it does to a state of each head, where that is not given: `decay`
    [heads, 1, 1] ([heads, d_k, 1] of KDA), `key` and `read` [heads, d_k] (of the output), `value`
    [heads, d_v], `beta` [heads, 1], and `skip` [heads, d_v], what is added to the output, which
    is multiplied by `gate` [heads, d_v] where there is one (and by mistake added to: `late`)."""
    if shape.recurrence == "conv" or "decay" in row:
        return row
    per_group = shape.n_heads // shape.n_groups
    if shape.recurrence == "mamba2":
        dt = row.get("step", softplus(row["dt"] + row["dt_bias"]))
        key, read = (row[n].repeat_interleave(per_group, 0) for n in "BC")
        skip = row["D"][:, None] * row["x"]
        made = {"value": row["x"], "beta": dt[:, None], "skip": skip}
        made |= {"gate": silu(row["z"])} if "z" in row else {}
        decay = torch.exp(row["A"] * dt)[:, None, None]
    else:
        read, key = (normed(row[n]).repeat_interleave(per_group, 0) for n in "qk")
        read = read * shape.d_k**-0.5
        skip = torch.zeros_like(row["v"])
        made = {"value": row["v"], "beta": torch.sigmoid(row["b"])[:, None], "skip": skip}
        decay = torch.exp(log_decay(row)).view(shape.n_heads, -1, 1)
    return row | {"key": key, "read": read, "decay": decay} | made


def step(shape: Shape, state: torch.Tensor, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: its output and the state after it, in f64.

    Delta rules: state [heads, d_k, d_v] (Yang et al. 2024, arXiv 2412.06464; KDA: arXiv
    2510.26692). Mamba-2: the same layout, d_k the state size (Dao and Gu 2024, arXiv 2405.21060).
    Convolutions: state [channels, taps - 1], the oldest input first. By mistake a row may have
    another `slope` (of SiLU's sigmoid), or decay `last`.
    """
    if shape.recurrence == "conv":
        window = torch.cat([state, row["x"].unsqueeze(-1)], -1)
        y = (window * row["weight"]).sum(-1) + row["bias"]
        return y * torch.sigmoid(row.get("slope", 1.0) * y) + row.get("late", 0.0), window[:, 1:]
    row = terms(shape, row)
    decay, last = row["decay"], "last" in row
    seen = state if last else decay * state
    faded = row["fade"] * state if "fade" in row and not last else seen
    write = row["key"][:, :, None] * correction(shape, faded, row)[:, None, :]
    after = decay * (state + write) if last else seen + write
    output = (row["read"][:, :, None] * after).sum(1) + row["skip"]
    return output * row.get("gate", 1.0) + row.get("late", 0.0), after


def correction(shape: Shape, decayed: torch.Tensor, row: Row) -> torch.Tensor:
    """What a row writes along its key, [heads, d_v]; a delta rule subtracts what the state has
    along it (by mistake along another vector, `look`, with another beta, `off`, or of a state with
    another decay, `fade`)."""
    wrote = row["beta"] * row["value"]
    if shape.recurrence == "mamba2":
        return wrote
    look, off = row.get("look", row["key"]), row.get("off", row["beta"])
    return wrote - off * (look[:, :, None] * decayed).sum(1)


def token(rows: Rows, index: int) -> Row:
    """The index-th row with the weights, in f64 on the CPU."""
    n = sum(rows.lengths)
    names = ("x", "dt", "B", "C", "z", "q", "k", "v", "a", "b")
    return {
        k: (t[index] if k in names and t.shape[0] == n else t).double().cpu()
        for k, t in rows.tensors.items()
        if k in (*names, *WEIGHTS)
    }


class Reference:
    """States of all sequences under plain decoding of the accepted tokens.

    `committed[s]` holds the state after each commit, the newest last; `tokens[s]` the accepted rows
    of each; `passes[s]` the states after each row of each of the last passes, and `rows[s]` those
    rows. `former[s]`: states that may be left of the sequence that had its slot before.
    """

    def __init__(self, shape: Shape, first: Sequence[torch.Tensor]) -> None:
        self.shape = shape
        self.committed = [[state.double().cpu()] for state in first]
        self.tokens: list[list[list[Row]]] = [[] for _ in first]
        self.passes: list[list[list[torch.Tensor]]] = [[] for _ in first]
        self.rows: list[list[list[Row]]] = [[] for _ in first]
        self.former: dict[int, list[Way]] = {}

    def begin(self, sequence: int, state: torch.Tensor) -> None:
        """Let another sequence have the slot from now on, with this state."""
        of, start = "the sequence that had this slot before", state.double().cpu()
        states = (self.passes[sequence] or [self.committed[sequence]])[-1]
        rows = [row for commit in self.tokens[sequence] for row in commit]
        self.former[sequence] = [
            ("other-sequence", f"the state after row {count} of {of}", one)
            for count, one in enumerate(states, 1)
        ]
        for n in range(1, 1 + len(rows)):
            made = play(self.shape, start, rows[-n:])[1][-1]
            words = f"the last {n} rows of {of} are in it"
            self.former[sequence].append(("other-sequence", words, made))
        self.committed[sequence] = [start]
        self.tokens[sequence], self.passes[sequence], self.rows[sequence] = [], [], []

    def state(self, sequence: int) -> torch.Tensor:
        """The state after all accepted tokens."""
        return self.committed[sequence][-1]

    def depths(self, sequence: int) -> list[torch.Tensor]:
        """The states after each row of the last pass."""
        return self.passes[sequence][-1]

    def verify(self, rows: Rows) -> torch.Tensor:
        """Outputs [tokens, …] of these rows, without padding's; the states after them are kept in
        `passes`."""
        outputs = []
        for i, (sequence, part) in enumerate(zip(rows.sequences, rows.slices(), strict=True)):
            if sequence < 0:
                continue
            tokens = [token(rows, i) for i in range(part.start, part.stop)]
            parents = rows.parents[i] if rows.parents else ()
            made, states = play(self.shape, self.state(sequence), tokens, parents=parents)
            self.passes[sequence] = [*self.passes[sequence][-_MOST_PASSES:], states]
            self.rows[sequence] = [*self.rows[sequence][-_MOST_PASSES:], tokens]
            outputs += made
        return torch.stack(outputs)

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the first `counts` tokens of the last pass."""
        for sequence, count in zip(sequences, counts, strict=True):
            self.committed[sequence].append(self.depths(sequence)[count - 1])
            self.tokens[sequence].append(self.rows[sequence][-1][:count])


def play(
    shape: Shape, state: torch.Tensor, tokens: Sequence[Row], parents: Sequence[int] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and states of tokens from a state on, each after the previous one or its parent."""
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for i, row in enumerate(tokens):
        parent = parents[i] if parents else i - 1
        output, after = step(shape, states[parent] if parent >= 0 else state, row)
        outputs.append(output)
        states.append(after)
    return outputs, states


def linear(shape: Shape, rows: Sequence[Row]) -> torch.Tensor:
    """The effect of rows on a change of the state before them, [heads, d_k, d_k]: a factor on its
    left."""
    none = torch.zeros(shape.n_heads, shape.d_k, dtype=torch.float64)
    alone = [terms(shape, row) | {"value": none, "skip": none, "gate": none} for row in rows]
    same = torch.eye(shape.d_k, dtype=torch.float64).expand(shape.n_heads, -1, -1)
    return play(shape, same, alone)[1][-1] if alone else same
