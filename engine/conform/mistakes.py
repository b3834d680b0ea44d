"""Mistakes in the formulas of a recurrence, in the decays that its parts see, and in the rows that
a log folds: what each would give, to compare with what a kernel gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import softplus

from engine.conform.cases import Shape
from engine.conform.reference import Row, correction, play, step, terms

# Who sees a wrong decay: corrections, outputs, and the states that are kept
_VIEWS = {
    "corrections": (0,),
    "outputs": (1,),
    "kept states": (2,),
    "outputs and corrections": (0, 1),
    "outputs, corrections and states": (0, 1, 2),
}
_MOST_ROWS = 8
_EARLIER = "what earlier rows wrote"
_START = "the state before them"
Played = tuple[list[torch.Tensor], list[torch.Tensor]]


def formulas(shape: Shape, rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Cause, sentence and rows under each wrong formula of what a row does (reference.terms)."""
    of_rows = [_conv(row) if shape.recurrence == "conv" else _formulas(shape, row) for row in rows]
    for made in zip(*of_rows, strict=True):
        cause, words, _ = made[0]
        yield cause, words, [row | other for row, (_, _, other) in zip(rows, made, strict=True)]


def _conv(row: Row) -> list[tuple[str, str, Row]]:
    weight = row["weight"]
    return [
        ("wrong-term", "the taps are in reverse order", {"weight": weight.flip(-1)}),
        ("wrong-term", "the taps are one too early", {"weight": weight.roll(-1, -1)}),
        ("wrong-term", "the taps are one too late", {"weight": weight.roll(1, -1)}),
        ("wrong-term", "the bias is left out", {"bias": 0 * row["bias"]}),
    ]


def _formulas(shape: Shape, row: Row) -> list[tuple[str, str, Row]]:
    mamba = shape.recurrence == "mamba2"
    right = terms(shape, row)
    beta, key, read = right["beta"], right["key"], right["read"]
    raw, bias = row["dt" if mamba else "a"], row["dt_bias"]
    rate = row["A"] if mamba else -torch.exp(row["A_log"]).view(-1, *[1] * (raw.dim() - 1))
    gates: list[tuple[str, torch.Tensor]] = [
        ("softplus is left out", raw + bias),
        ("dt_bias is left out", softplus(raw)),
        ("dt_bias is added after softplus", softplus(raw) + bias),
    ]

    def decay(g: torch.Tensor) -> Row:
        return right | {"decay": torch.exp(g).view(shape.n_heads, -1, 1)}

    made = []
    for words, dt in gates:
        if mamba:
            made += [("wrong-gate", words, decay(rate * dt) | {"beta": dt[:, None]})]
            made += [("wrong-gate", f"{words}, in what is written", right | {"beta": dt[:, None]})]
            words += ", in the decay"
        made.append(("wrong-gate", words, decay(rate * dt)))
    dt, log = softplus(raw + bias), (-rate).log()
    g = rate * dt
    made += [
        ("gate-order", "the decay is left out", decay(0 * g)),
        ("wrong-gate", "A is left out of the decay", decay(-dt)),
        ("wrong-gate", "A_log is taken without exp", decay(-log * dt)),
        ("wrong-gate", "A has the other sign", decay(-g)),
        ("wrong-gate", "the decay is a power of 2, not of e", decay(g * math.log(2))),
        (
            "wrong-gate",
            "the logarithm of the decay is taken as one to base 2",
            decay(g / math.log(2)),
        ),
        ("wrong-gate", "the decay is applied twice", decay(2 * g)),
        (
            "wrong-gate",
            "the decay's exp is left out",
            right | {"decay": g.view(shape.n_heads, -1, 1)},
        ),
    ]
    if shape.recurrence == "kda" and shape.d_k == shape.d_v:
        along = right | {"decay": right["decay"].transpose(1, 2)}
        made.append(("wrong-gate", "the decay of a channel is applied along v", along))
    what = "dt" if mamba else "beta"
    betas = {f"{what} is left out of what is written": torch.ones_like(beta)}
    if not mamba:
        betas["the sigmoid of beta is left out"] = row["b"][:, None]
        betas["beta is applied twice"] = beta**2
    made += [("wrong-gate", words, right | {"beta": other}) for words, other in betas.items()]
    inputs = {"v is left out": {"value": 0 * right["value"]}}
    if mamba:
        inputs["B and C are exchanged"] = {"key": read, "read": key}
        inputs["D is added without x"] = {"skip": row["D"][:, None].expand_as(row["x"])}
    else:
        scale = shape.d_k**-0.5
        inputs["q and k are exchanged"] = {"key": read / scale, "read": key * scale}
        inputs["k is scaled as q is"] = {"key": key * scale}
    made += [("wrong-term", words, right | other) for words, other in inputs.items()]
    if not mamba:
        per_group = shape.n_heads // shape.n_groups
        q, k = (row[n].repeat_interleave(per_group, 0) for n in "qk")
        of_q, of_k = (x.norm(dim=-1, keepdim=True) for x in (q, k))
        norms = {
            "k is not normalized": {"key": k},
            "q is not normalized": {"read": q * scale},
            "q and k are not normalized": {"key": k, "read": q * scale},
            "k is divided by the length of q": {"key": k / of_q},
            "q is divided by the length of k": {"read": q / of_k * scale},
        }
        made += [("wrong-norm", words, right | other) for words, other in norms.items()]
    return made


def strides(
    shape: Shape, batch: Sequence[Row], first: int, tokens: Sequence[Row]
) -> Iterator[tuple[str, str, list[Row]]]:
    """Cause, sentence and rows where one input of row r of a sequence, whose rows begin at `first`
    of the batch, is read r * s values on for a wrong stride s; a few rows show it."""
    if len(tokens) > _MOST_ROWS:
        return
    heads, groups = shape.n_heads, shape.n_groups
    sizes = {n * d for n in (1, groups, heads) for d in (1, shape.d_k, shape.d_v)}
    made = [terms(shape, row) for row in batch]
    each = {"q": heads // groups, "k": heads // groups}
    for name, key in (
        *((x, x) for x in ("a", "dt", "b", "q", "k", "v", "x", "B", "C")),
        *(("a", "decay"), ("b", "beta"), ("q", "read"), ("k", "key")),
    ):
        if name not in batch[0]:
            continue
        repeated = 1 if name == key else each.get(name, 1)
        held = torch.stack([row[key][::repeated] for row in made])
        size = held[0].numel()
        for s in sorted(sizes - {size}):
            starts = [first * size + r * s for r in range(len(tokens))]
            if starts[-1] + size > held.numel():
                continue
            rows = []
            for row, start in zip(tokens, starts, strict=True):
                part = held.flatten()[start : start + size].view(held[0].shape)
                part = part.repeat_interleave(repeated, 0)
                rows.append((row if name == key else terms(shape, row)) | {key: part})
            cause = "gate-of-other-row" if name in ("a", "dt") else "other-row"
            yield cause, f"{name} of row r is read {s} r values on, not {size} r", rows


def layouts(shape: Shape, state: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """A state in whose place another head's or its transpose is read or written."""
    if shape.recurrence == "conv":
        return
    n, k, v = state.shape
    yield "wrong-stride", "the transposed state", state.transpose(1, 2).reshape(n, k, v)
    yield "wrong-stride", "the transposed state", state.reshape(n, v, k).transpose(1, 2)
    heads = torch.arange(n)
    for words, at in (
        ("its key head", heads // (n // shape.n_groups)),
        ("head h % groups", heads % shape.n_groups),
        ("the first head", 0 * heads),
        ("the next head", heads.roll(-1)),
        ("the head before", heads.roll(1)),
        ("the last head first", heads.flip(0)),
    ):
        yield "head-mapping", f"the state of {words}", state[at]


Factor = Callable[[int, int], torch.Tensor | float]


def _factors(rows: Sequence[Row]) -> tuple[Factor, list[tuple[str, str, tuple[bool, ...], Factor]]]:
    """How much of what row j wrote row i sees (j = -1: of the state before the rows); and wrong
    ways, each with its cause, its sentence and whether it is about the state before, what rows
    wrote, or both."""
    up = [torch.ones_like(rows[0]["decay"])]
    for row in rows:
        up.append(up[-1] * row["decay"])

    def right(i: int, j: int) -> torch.Tensor:
        return up[i + 1] / up[j + 1]

    def short(i: int, j: int) -> torch.Tensor | float:
        return up[i] / up[j + 1] if j < i else 1.0

    def base(power: float) -> Factor:
        return lambda i, j: right(i, j) ** power

    start, earlier, both = (True,), (False,), (True, False)
    orders = [
        (f"{_START} without its decay", start, lambda i, j: 1.0),
        (f"{_START} without the last row's decay", start, short),
        (f"nothing of {_START}", start, lambda i, j: 0.0),
        (f"{_EARLIER} without its decay", earlier, lambda i, j: 1.0),
        (f"{_EARLIER} with its own row's decay too", earlier, lambda i, j: up[i + 1] / up[j]),
        (f"{_EARLIER} without the last row's decay", earlier, short),
        (f"nothing of {_EARLIER}", earlier, lambda i, j: float(j == i)),
        (f"{_START} and {_EARLIER} without the last row's decay", both, short),
    ]  # fmt: skip
    bases = [
        (f"{words} with {wrong} in its decay", sides, base(power))
        for wrong, power in (("2 for e", math.log(2)), ("e for 2", 1 / math.log(2)))
        for words, sides in (
            (_START, start),
            (_EARLIER, earlier),
            (f"{_START} and {_EARLIER}", both),
        )
    ]
    return right, [
        *(("gate-order", *way) for way in orders),
        *(("wrong-gate", *way) for way in bases),
    ]


def decays(
    shape: Shape, state: torch.Tensor, rows: Sequence[Row], last: bool
) -> Iterator[tuple[str, str, Played]]:
    """Cause, sentence and outputs of a few rows, or (last) their last state in place of them, where
    a part of the recurrence sees the state before the rows, or what rows wrote, with another decay
    or beta than it should."""
    if shape.recurrence == "conv":
        return
    rows = [terms(shape, row) for row in rows]
    right, wrong = _factors(rows)
    ways = [
        (cause, f"{who} see {words}", views, sides, factor)
        for cause, words, sides, factor in wrong
        for who, views in _VIEWS.items()
        if not last or 1 not in views or 2 in views
    ]
    if shape.recurrence != "mamba2":
        betas = [row["beta"][:, :, None] for row in rows]

        def plain(i: int, j: int) -> torch.Tensor:
            return right(i, j) / betas[i]

        def other(i: int, j: int) -> torch.Tensor:
            return plain(i, j) * betas[j]

        words = f"corrections take {_EARLIER} with the beta of the row that wrote"
        ways += [
            ("wrong-gate", f"corrections take {_START} without beta", (0,), (True,), plain),
            ("wrong-gate", f"corrections take {_EARLIER} without beta", (0,), (False,), plain),
            ("other-row", words, (0,), (False,), other),
        ]
    for cause, sentence, views, sides, factor in ways:
        pairs = [
            [factor if view in views and side in sides else right for side in (True, False)]
            for view in range(3)
        ]
        yield cause, sentence, _viewed(shape, state, rows, pairs, last)


def _viewed(
    shape: Shape,
    state: torch.Tensor,
    rows: Sequence[Row],
    pairs: Sequence[Sequence[Factor]],
    last: bool,
) -> Played:
    """Outputs of rows, or the last state alone; pairs: how corrections, outputs and kept states see
    the state before, and what rows wrote."""
    outputs: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []

    def seen(view: int, i: int) -> torch.Tensor:
        before, wrote = pairs[view]
        total = before(i, -1) * state
        for j, write in enumerate(writes):
            total = total + wrote(i, j) * write
        return total

    for i, row in enumerate(rows):
        writes.append(row["key"][:, :, None] * correction(shape, seen(0, i), row)[:, None, :])
        if not last:
            outputs.append((row["read"][:, :, None] * seen(1, i)).sum(1) + row["skip"])
    return outputs, [seen(2, len(rows) - 1)] if last else []


class Log:
    """Rows of a log, oldest first, with the states before and after them and what each wrote."""

    def __init__(self, shape: Shape, state: torch.Tensor, rows: Sequence[Row]) -> None:
        self.shape = shape
        self.rows = [terms(shape, row) for row in rows]
        self.states = [state, *play(shape, state, self.rows)[1]]
        self.writes = self._writes(self.rows)

    def _writes(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """What the rows wrote, along the keys that these rows have."""
        made = []
        for before, right, row in zip(self.states, self.rows, rows, strict=False):
            value = correction(self.shape, right["decay"] * before, right)
            made.append(row["key"][:, :, None] * value[:, None, :])
        return made

    def folded(self, start: int, rows: Sequence[int], stored: bool) -> torch.Tensor:
        """The state from the one before row `start` on, with these rows after it; stored: what they
        wrote is kept, else it is computed anew."""
        state = self.states[start]
        for i in rows:
            state = self.after(state, i, stored)
        return state

    def after(self, state: torch.Tensor, row: int, stored: bool) -> torch.Tensor:
        """A state with one more row."""
        if stored:
            return self.rows[row]["decay"] * state + self.writes[row]
        return step(self.shape, state, self.rows[row])[1]

    def cursors(self, ring: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Cause, sentence and last state where other rows are folded than were accepted."""
        n = len(self.rows)
        for stored in (True, False):
            for i in range(n - 1, -1, -1):
                for j in range(i + 1, n + 1):
                    words = f"{j - i} accepted rows missing, {n - j} before the newest"
                    yield "lost-fold", words, self.folded(i, range(j, n), stored)
                    words = f"{j - i} rows of the log are folded twice"
                    yield "double-fold", words, self.folded(j, range(i, n), stored)
                if i >= ring:
                    rows = [*range(i - ring, i), i - ring, *range(i + 1, n)]
                    words = f"row {i + 1} was overwritten in a log of {ring}"
                    yield "wrong-wrap", words, self.folded(i - ring, rows, stored)

    def overwritten(self, lengths: Sequence[int]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The same where passes of these lengths each wrote their rows from the first place on."""
        held: dict[int, int] = {}
        for i, n in enumerate(lengths):
            held |= {place: sum(lengths[:i]) + place for place in range(n)}
        words = "each pass wrote its rows over the oldest ones of the log"
        for stored in (True, False):
            yield "wrong-wrap", words, self.folded(0, list(held.values()), stored)

    def stretches(
        self, ring: int, first: int, rejected: Sequence[Row]
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The same where the log is read from another place on, to another end; first: the place
        of the oldest row; rejected: rows after the newest, which were not accepted."""
        n = len(self.rows)
        whole = Log(self.shape, self.states[0], [*self.rows, *rejected])
        held: dict[int, int] = {(first + i) % ring: i for i in range(n + len(rejected))}
        for done in range(n, max(-1, n - ring - 1), -1):
            for place in range(ring):
                for stored in (True, False):
                    state, read = self.states[done], []
                    for step_ in range(ring):
                        row = held.get((place + step_) % ring)
                        if row is not None:
                            state = whole.after(state, row, stored)
                            read.append(row)
                        twice = sum(row < done for row in read)
                        words = (
                            f"the state after {done - n} rows (0: the newest) and then {step_ + 1} "
                            f"places of the log from {place} on, {twice} of them folded already"
                        )
                        yield "double-fold" if twice else "wrong-wrap", words, state

    def decays(self, after: Sequence[Row] = ()) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Cause, sentence and last state where the decays of what is folded are others, and right
        rows come after."""
        last = len(self.rows) - 1
        right, wrong = _factors(self.rows)
        for cause, words, sides, factor in wrong:
            state = torch.zeros_like(self.states[0])
            for j, part in enumerate((self.states[0], *self.writes), -1):
                state = state + (factor if (j < 0) in sides else right)(last, j) * part
            for row in after:
                state = step(self.shape, state, row)[1]
            yield cause, f"the fold takes {words}", state

    def kept_with(
        self, batch: Sequence[Row], first: int
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Cause, sentence and last state where the state before is kept with the decay of as many
        rows up to another one of the pass, where these rows are the batch's from `first` on."""
        n, each = len(self.rows), [terms(self.shape, row)["decay"] for row in batch]
        own, last = torch.stack(each[first : first + n]).prod(0), first + n - 1
        for end in (end for end in range(len(each)) if end != last):
            other = torch.stack(each[max(0, end + 1 - n) : end + 1]).prod(0)
            cause = "gate-of-other-row" if end >= first else "other-sequence"
            words = f"the state before is kept with the decay up to row {end} of the pass"
            yield cause, f"{words}, not {last}", self.states[-1] + (other - own) * self.states[0]

    def formulas(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Cause, sentence and last state where a fold has wrong formulas: of what the rows wrote,
        and of all that they do."""
        for cause, words, rows in formulas(self.shape, self.rows):
            yield cause, words, play(self.shape, self.states[0], rows)[1][-1]
            state = self.states[0]
            for row, write in zip(rows, self._writes(rows), strict=True):
                state = row["decay"] * state + write
            yield cause, words, state
