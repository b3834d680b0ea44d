"""Inputs of a kernel under test: its shape, the weights, and the rows of a verify pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F

Recurrence = Literal["gdn", "kda", "mamba2", "conv"]
loads = [0]  # how many Triton's interpreter has done for all cases


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a case. Convolutions: n_heads channels and d_k taps; d_v and n_groups are 1.
    `extras`: those of Kernel.extras that it has."""

    recurrence: Recurrence
    n_heads: int
    n_groups: int
    d_k: int
    d_v: int
    n_tokens: int  # of the widest verify pass
    n_sequences: int
    state_dtype: str = "float32"
    extras: tuple[str, ...] = ()

    def without(self, extra: str) -> Shape:
        """The shape without one extra."""
        return replace(self, extras=tuple(x for x in self.extras if x != extra))

    @property
    def state(self) -> tuple[int, ...]:
        """Sizes of one sequence's state in the reference's layout."""
        if self.recurrence == "conv":
            return (self.n_heads, self.d_k - 1)
        return (self.n_heads, self.d_k, self.d_v)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of stored states."""
        dtype = getattr(torch, self.state_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def smaller(self) -> list[Shape]:
        """The shapes with one size halved, the most useful first."""
        sizes = {"n_tokens": 2, "n_sequences": 1, "n_heads": self.n_groups, "d_v": 16, "d_k": 16}
        if self.recurrence == "conv":  # few channels would match many taps by chance
            sizes = {"n_tokens": 2, "n_sequences": 1, "n_heads": 4}
        half = {name: getattr(self, name) // 2 for name in sizes}
        return [replace(self, **{x: half[x]}) for x, least in sizes.items() if half[x] >= least]

    def __str__(self) -> str:
        sizes = {k: v for k, v in asdict(self).items() if isinstance(v, int)}
        words = " ".join(f"{k}={v}" for k, v in sizes.items()) + f" {self.state_dtype}"
        return ", ".join((words, *self.extras))


class Rows:
    """The rows of one pass, sequence after sequence: every tensor is [tokens, …], float32.

    Delta rules: `q`, `k` [tokens, groups, d_k] as projected, `q_normed` and `k_normed` with unit
    length, `v` [tokens, heads, d_v], `a` ([tokens, heads] or, per channel, [tokens, heads, d_k])
    and `b` [tokens, heads] before their gates, `g` and `beta` after them; weights `A_log` [heads],
    `dt_bias` as a row of a, and `lower_bound` [1] of shapes that have one. Mamba-2: `x` [tokens,
    heads, d_v], `dt` [tokens, heads], `B`, `C` [tokens, groups, d_k], `z` as x in shapes that have
    it; weights `A` (negative), `D`, `dt_bias` [heads]. Convolutions: `x` [tokens, channels];
    weights `weight` [channels, taps] and `bias`. Sequence -1 is padding. `parents`: of a tree of
    drafts, the row of the same sequence that each row follows, -1 for the first; empty where each
    row follows the one before it.
    """

    def __init__(
        self,
        sequences: Sequence[int],
        lengths: Sequence[int],
        tensors: dict[str, torch.Tensor],
        parents: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sequences = list(sequences)
        self.lengths = list(lengths)
        self.tensors = tensors
        self.parents = parents

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise AttributeError(f"rows have no {name!r}, but {', '.join(self.tensors)}") from None

    @property
    def starts(self) -> torch.Tensor:
        """First row of each sequence and the number of rows: int32 [sequences + 1]."""
        total = [0, *accumulate(self.lengths)]
        device = next(iter(self.tensors.values())).device
        return torch.tensor(total, dtype=torch.int32, device=device)

    @property
    def mixed(self) -> torch.Tensor:
        """q, k and v of each row side by side, as a projection leaves them: [tokens, channels]."""
        return torch.cat([t.flatten(1) for t in (self.q, self.k, self.v)], 1)

    @property
    def bound(self) -> float | None:
        """The lower bound of KDA's gate, if any."""
        return float(self.lower_bound) if "lower_bound" in self.tensors else None

    def wide(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Mamba-2's dt [tokens, heads, d_v], A [heads, d_v, d_k] and D [heads, d_v] in the form of
        kernels, per channel with strides of 0; and dt_bias, as D, with z, by name."""
        heads, d_v = self.x.shape[1:]
        A = self.A.view(heads, 1, 1).expand(heads, d_v, self.B.shape[2])
        D, dt_bias = (x.view(heads, 1).expand(heads, d_v) for x in (self.D, self.dt_bias))
        options = {"dt_bias": dt_bias, "dt_softplus": True, "z": self.tensors.get("z")}
        return self.dt.unsqueeze(-1).expand(-1, heads, d_v), A, D, options

    def beside(self, *names: str) -> list[torch.Tensor]:
        """Inputs as views of one tensor that holds them side by side, as engines split a
        projection: row strides are larger than rows."""
        each = [self.tensors[name] for name in names]
        whole = torch.cat([t.flatten(1) for t in each], 1)
        parts = whole.split([t[0].numel() for t in each], 1)
        return [part.view(t.shape) for part, t in zip(parts, each, strict=True)]

    def slices(self) -> list[slice]:
        """The rows of each sequence."""
        ends = self.starts.tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    def one(self, index: int, some: slice = slice(None)) -> Rows:
        """The rows of the index-th sequence, or some of them."""
        part = range(sum(self.lengths))[self.slices()[index]][some]
        at = slice(part.start, part.stop)
        tensors = {k: t if k in WEIGHTS else t[at].contiguous() for k, t in self.tensors.items()}
        return Rows([self.sequences[index]], [len(part)], tensors)

    def at(self, tokens: torch.Tensor | slice, starts: torch.Tensor) -> Rows:
        """These rows as sequences with these starts [sequences + 1]."""
        tensors = {k: t if k in WEIGHTS else t[tokens] for k, t in self.tensors.items()}
        return Rows(range(len(starts) - 1), starts.diff().tolist(), tensors)


_RARE, _LARGE = 0.25, 30.0  # large inputs: their share, and their size
WEIGHTS = ("A_log", "A", "D", "dt_bias", "lower_bound", "weight", "bias")  # tensors that rows share
_FUNCTIONS = ("silu", "sigmoid", "softplus", "tanh", "relu", "gelu", "mish", "elu", "hardswish")


class Source:
    """Draws weights, first states and rows of one shape from a seed, on the CPU; rows are float32
    rounded to `rows_dtype`.

    long: gates let a state last for a hundred rows; large: some gates are far from 0, so that a
    delta rule's decay is e^-large or 1, and some q and k are zero; replaced: inputs and weights
    with one constant value each; copies: all sequences have the same states and rows, except q
    (Mamba-2: C).
    """

    def __init__(
        self, shape: Shape, seed: int, device: str = "cpu", rows_dtype: str = "float32",
        *, long: bool = False, large: float = 0.0, replaced: dict[str, float] | None = None,
        copies: bool = False,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.device = device
        self.rows_dtype = getattr(torch, rows_dtype)
        self.random = torch.Generator().manual_seed(seed)
        self.replaced, self.large, self.copies = replaced or {}, large, copies
        self.weights = self._filled(self._weights())
        if long and "lower_bound" in self.weights:
            self.weights["dt_bias"] -= 5.0
        elif long and "A_log" in self.weights:
            self.weights["A_log"] -= 3.0
        elif long and "A" in self.weights:
            self.weights["A"] /= 20
        self.sizes: dict[str, torch.Tensor] = {}
        if "A_log" in self.weights:
            rate = torch.exp(self.weights["A_log"])
            self.sizes["a"] = large / rate.view(-1, *[1] * (self.weights["dt_bias"].dim() - 1))
        self._first: torch.Tensor | None = None

    def _filled(self, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in drawn.keys() & self.replaced.keys():
            drawn[name] = torch.full_like(drawn[name], self.replaced[name])
        return drawn

    def _drawn(self, n: int, **sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Inputs of n rows with these sizes."""
        drawn = {name: self._row(n, *size) for name, size in sizes.items()}
        for name in sorted(drawn.keys() & {"a", "b", "dt"}) if self.large else ():
            x = drawn[name]
            rare = torch.rand(x.shape, generator=self.random) < _RARE
            drawn[name] = torch.where(rare, self.sizes.get(name, _LARGE) * x.sign(), x)
        for name in sorted(drawn.keys() & {"q", "k"}) if self.large else ():
            drawn[name][torch.rand(n, generator=self.random) < _RARE] = 0.0
        return self._filled(drawn)

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.random)

    def _row(self, *sizes: int) -> torch.Tensor:
        return self._normal(*sizes).to(self.rows_dtype).float()

    def _weights(self) -> dict[str, torch.Tensor]:
        s = self.shape
        if s.recurrence == "conv":
            return {"weight": self._normal(s.n_heads, s.d_k) * 0.5, "bias": self._normal(s.n_heads)}
        if s.recurrence == "mamba2":
            return {
                "A": -torch.exp(self._normal(s.n_heads) * 0.5),
                "D": self._normal(s.n_heads),
                "dt_bias": self._normal(s.n_heads) * 0.5,
            }
        per_channel = (s.n_heads, s.d_k) if s.recurrence == "kda" else (s.n_heads,)
        bound = {"lower_bound": torch.tensor([-5.0])} if "lower bound" in s.extras else {}
        made = {"A_log": self._normal(s.n_heads) * 0.5, "dt_bias": self._normal(*per_channel) * 0.5}
        return made | bound

    def state(self) -> torch.Tensor:
        """A first state, rounded to the stored dtype."""
        if self._first is None or not self.copies:
            self._first = self._normal(*self.shape.state).mul(0.3).to(self.shape.dtype).float()
        return self._first

    def rows(
        self,
        sequences: Sequence[int],
        lengths: Sequence[int],
        parents: Sequence[Sequence[int]] = (),
    ) -> Rows:
        """New rows of these sequences."""
        s, n, many = self.shape, sum(lengths), 1
        if self.copies:
            n, many = lengths[0], len(lengths)
        if s.recurrence == "conv":
            drawn = self._drawn(n, x=(s.n_heads,))
        elif s.recurrence == "mamba2":
            group, read = (s.n_groups, s.d_k), "C"
            drawn = self._drawn(n, x=(s.n_heads, s.d_v), dt=(s.n_heads,), B=group, C=group)
            if "z" in s.extras:  # far from 0, as outputs times nothing show nothing
                z = self._row(n, s.n_heads, s.d_v)
                drawn["z"] = z.sign() * z.abs().clamp(1, 2)
        else:
            group, read, gates = (s.n_groups, s.d_k), "q", tuple(self.weights["dt_bias"].shape)
            v, b = (s.n_heads, s.d_v), (s.n_heads,)
            drawn = self._drawn(n, q=group, k=group, v=v, a=gates, b=b)
        if self.copies:
            drawn = {x: t.repeat(many, *[1] * (t.dim() - 1)) for x, t in drawn.items()}
            drawn[read] = self._row(n * many, *group)
        if s.recurrence in ("gdn", "kda"):
            drawn |= {
                "g": log_decay(drawn | self.weights),
                "beta": torch.sigmoid(drawn["b"]),
                "q_normed": normed(drawn["q"]),
                "k_normed": normed(drawn["k"]),
            }
        tensors = {k: t.to(self.device) for k, t in (drawn | self.weights).items()}
        return Rows(sequences, lengths, tensors, parents)


def log_decay(row: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logarithm of a delta rule's decay from its input a: of softplus (or by mistake another
    `step`), or with a lower bound."""
    x, A_log = row["a"] + row["dt_bias"], row["A_log"]
    rate = torch.exp(A_log).view(-1, *[1] * (row["dt_bias"].dim() - 1))
    if "lower_bound" in row:
        return row["lower_bound"] * torch.sigmoid(rate * x)
    return -rate * row.get("step", F.softplus(x))


def normed(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x divided by its norm as in these kernels, with eps inside the root."""
    return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()


def instead(right: str, y: torch.Tensor, where: str = "") -> dict[str, torch.Tensor]:
    """Results of other functions of y, or of the right one applied twice, with words."""
    made = {name: getattr(F, name)(y) for name in _FUNCTIONS if name != right}
    made |= {"exp": y.exp(), "gelu by tanh": F.gelu(y, approximate="tanh")}
    of, own = f"{right}{where}", getattr(F, right)
    others = {f"{of} is left out": y, f"{of} is taken twice": own(own(y))}
    return others | {f"{name} is taken for {of}": other for name, other in made.items()}


def under_bound(
    row: dict[str, torch.Tensor], raw: torch.Tensor, A: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Wrong logarithms of a decay with a lower bound, with words."""
    bias, bound, sigmoid = row["dt_bias"], row["lower_bound"], torch.sigmoid
    x = raw + bias
    others = instead("sigmoid", A * x, " under the lower bound")
    return {words: bound * other for words, other in others.items()} | {
        "softplus is taken, without the lower bound": -A * F.softplus(x),
        "A_log is taken without exp, under the lower bound": bound * sigmoid(A.log() * x),
        "A multiplies the sigmoid, not its input": bound * A * sigmoid(x),
        "A divides the sigmoid's input": bound * sigmoid(x / A),
        "dt_bias is added after A": bound * sigmoid(A * raw + bias),
        "the sigmoid's input has the other sign": bound * sigmoid(-A * x),
        "the lower bound is left out": -sigmoid(A * x),
        "the lower bound has the other sign": -bound * sigmoid(A * x),
        "softplus is cut at the lower bound": (-A * F.softplus(x)).clamp(min=float(bound)),
    }


def of_z(z: torch.Tensor, right: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """What differs in a row's terms if its z is used wrongly, with words; right: its terms."""
    gate, skip = right["gate"], right["skip"]
    gates = instead("silu", z, " of z") | {
        "z is left out": 1 + 0 * z,
        "z is taken twice": gate * gate,
        "z is taken without its sign": F.silu(z.abs()),
        "z is divided by": 1 / gate,
        "z has the other sign": F.silu(-z),
    }
    return {words: {"gate": other} for words, other in gates.items()} | {
        "D x is added after z": {"skip": 0 * skip, "late": skip},
        "z is taken for D x alone": {"skip": skip * gate, "gate": 1 + 0 * z},
    }
