"""Wrong decays in parts of a recurrence, and wrongly folded logs: the result of each mistake, to
compare with a kernel's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, product

import torch

from engine.conform.cases import Shape
from engine.conform.fits import blocks_of
from engine.conform.mistakes import formulas, heads_of, in_parts, of_other_channels, of_other_heads
from engine.conform.reference import Row, Way, correction, linear, play, step, terms

# Where a wrong decay is used: corrections, outputs, and kept states (alone: Log.decays)
_VIEWS = {
    "corrections": (0,),
    "outputs": (1,),
    "outputs and corrections": (0, 1),
    "outputs, corrections and states": (0, 1, 2),
}
_BETA_OF_BLOCK = "with the beta at their place in the block that wrote it"
ALIKE = "; wrong-wrap looks the same"
_BLOCK = 16  # rows per block of chunked kernels
_MOST_ROWS = 4  # of which each may be wrong alone
_MOST_FOLDED = 24  # any of which may be missing together, or repeated
# Whether row j's write (-1: the state before the rows) is affected as seen from row i
Side = Callable[[int, int], bool]
_SIDES: dict[str, Side] = {
    "the state before them": lambda i, j: j < 0,
    "what earlier rows wrote": lambda i, j: j >= 0,
    "the state before them and what earlier rows wrote": lambda i, j: True,
    "what the row before them wrote": lambda i, j: 0 <= j == i - 1,
}
_BLOCKS: dict[str, Side] = {
    f"what rows of earlier blocks of {_BLOCK} wrote": lambda i, j: 0 <= j < i // _BLOCK * _BLOCK,
    f"what rows of their block of {_BLOCK} wrote": lambda i, j: j >= i // _BLOCK * _BLOCK,
}
_LATER = {"the next row writes": 0, "later rows write": 1}  # the factor of those after it
Factor = Callable[[int, int], torch.Tensor | float]
Played = tuple[list[torch.Tensor], list[torch.Tensor]]


def _without(right: Factor, over: Factor, a: int, b: int) -> tuple[str, str, Factor]:
    """The mistake in which the decay of rows a to b - 1 is left out."""
    words = f"{{}} without the decay of rows {a} to {b - 1}"
    return "gate-order", words, lambda i, j: right(i, j) / over(max(a, j + 1), min(b, i + 1))


def _sides(n: int) -> dict[str, Side]:
    """What a wrong factor may be of, among n rows."""
    of: Callable[[int], Side] = lambda a: lambda i, j: a <= j < a + _BLOCK <= i  # noqa: E731
    parts = range(0, n - _BLOCK, _BLOCK)
    one = {f"what rows {a} to {a + _BLOCK - 1} wrote": of(a) for a in parts}
    return _SIDES | (_BLOCKS if n > _BLOCK else {}) | one


def _betas(rows: Sequence[Row], right: Factor) -> Iterator[tuple[str, str, Side, Factor]]:
    """The same for corrections, which may take a part times another beta than their own row's."""
    beta = [row["beta"][:, :, None] for row in rows]

    def of(row: Callable[[int, int], int]) -> Factor:
        return lambda i, j: right(i, j) * beta[max(0, row(i, j) if j >= 0 else i)] / beta[i]

    ways: list[tuple[str, str, Factor]] = [
        ("wrong-gate", "without beta", lambda i, j: right(i, j) / beta[i]),
        ("wrong-gate", "with beta twice", lambda i, j: right(i, j) * beta[i]),
        ("other-row", "with the beta of the row that wrote it", of(lambda i, j: j)),
        ("other-row", "with the beta of the row before", of(lambda i, j: i - 1)),
        ("other-row", _BETA_OF_BLOCK, of(lambda i, j: j // _BLOCK * _BLOCK + i % _BLOCK)),
    ]
    for (about, side), (cause, words, factor) in product(_sides(len(rows)).items(), ways):
        yield cause, f"{about} {words}", side, factor


def _factors(
    rows: Sequence[Row], others: Sequence[Row] = (), first: int = 0
) -> tuple[Factor, list[tuple[str, str, Side, Factor]]]:
    """The factor of row j's write as seen from row i (j = -1: the state before the rows); and wrong
    factors, each with its cause, its sentence and where it applies. others: as many rows of another
    sequence, which may be used instead; first: how many rows are known, as in a log."""
    up, others_up = ([torch.zeros_like(rows[0]["decay"])] for _ in range(2))
    for all_, sums in ((rows, up), (others, others_up)):
        for row in all_:
            sums.append(sums[-1] + row["decay"].log())
    n = len(rows)

    @cache
    def over(a: int, b: int) -> torch.Tensor:
        """The decay of rows a to b - 1."""
        return torch.exp(up[min(b, n)] - up[max(a, 0)]) if b > a else torch.ones_like(up[0])

    def shifted(since: int, until: int) -> Factor:
        return lambda i, j: over(j + 1 + since, i + 1 + until)

    def base(power: float) -> Factor:
        return lambda i, j: right(i, j) ** power

    right = shifted(0, 0)
    ways: list[tuple[str, str, Factor]] = [
        ("gate-order", "{} without its decay", lambda i, j: 1.0),
        ("wrong-term", "nothing of {}", lambda i, j: float(j == i)),
        ("gate-order", "{} without the last row's decay", shifted(0, -1)),
        ("gate-order", "{} with the last row's alone", lambda i, j: over(max(i, j + 1), i + 1)),
        ("gate-order", "{} with decays to the row before", lambda i, j: (up[i] - up[j + 1]).exp()),
        ("gate-order", "{} with the next row's decay too", shifted(0, 1)),
        ("gate-order", "{} with its own row's decay too", shifted(-1, 0)),
        ("gate-order", "{} without the first decay", shifted(1, 0)),
        ("gate-order", "{} with the decay of rows before it, not after", lambda i, j: over(0, j)),
        ("gate-order", "{} with the decay of all rows", lambda i, j: over(0, i + 1)),
        ("wrong-gate", "{} with its decay twice", base(2)),
        ("wrong-gate", "{} with 2 for e in its decay", base(math.log(2))),
        ("wrong-gate", "{} with e for 2 in its decay", base(1 / math.log(2))),
    ]
    if len(others) == n:
        words = "{} with the decay of the pass's first rows"
        of_others: Factor = lambda i, j: torch.exp(others_up[i + 1] - others_up[j + 1])  # noqa: E731
        ways.append(("other-sequence", words, of_others))
    sides, parts = _sides(n), range(0, n - _BLOCK, _BLOCK)
    # a chunk's decays are stored relative to the first row of a block
    for a, many, more in product(parts, parts, (0, 1)):
        ways.append(_without(right, over, a + more, a + more + many + _BLOCK))
    for s in (-_BLOCK, _BLOCK) if n > _BLOCK else ():
        when = f"{abs(s)} rows {'later' if s > 0 else 'earlier'}"
        ways.append(("gate-of-other-row", f"{{}} with the decay from {when}", shifted(s, 0)))
        ways.append(("gate-of-other-row", f"{{}} with the decay to {when}", shifted(0, s)))
    if first:
        sides = sides | {f"what the first {first} rows wrote": lambda _, j: 0 <= j < first}
        ways.append(_without(right, over, 0, first))
        words = f"{{}} with the decay of rows 0 to {first - 1} alone"
        ways.append(("gate-order", words, lambda _, j: over(j + 1, first)))
    found = [
        (cause, words.format(about), side, factor)
        for about, side in sides.items()
        for cause, words, factor in ways
    ]
    own: Side = lambda i, j: j == i  # noqa: E731
    found.append(("wrong-term", "nothing of what their own row wrote", own, lambda i, j: 0.0))
    return right, found


def decays(
    shape: Shape,
    state: torch.Tensor,
    rows: Sequence[Row],
    last: bool,
    first: int = 0,
    others: Sequence[Row] = (),
    chunk: Sequence[Row] = (),
) -> Iterator[tuple[str, str, Played]]:
    """Cause, sentence and outputs of a few rows, or (last) their last state, if a part of the
    recurrence sees the state before the rows, or writes of rows, with a wrong decay, from row
    `first` on, or too many of the chunk's rows; others: rows of another sequence."""
    if shape.recurrence == "conv":
        return
    known, rows = Log(shape, state, rows[:first]), [terms(shape, row) for row in rows]
    right, wrong = _factors(rows, [terms(shape, row) for row in others], first)

    def viewed(views: Sequence[int], side: Side, factor: Factor) -> Played:
        """Results of the rows that are not known yet if some views are wrong."""
        outputs, writes, after = list(known.outputs), list(known.writes), known.states[-1]

        def seen(view: int, i: int, right_one: torch.Tensor) -> torch.Tensor:
            for j in range(-1, len(writes)) if view in views else ():
                if side(i, j):
                    part = writes[j] if j >= 0 else state
                    right_one = right_one + (factor(i, j) - right(i, j)) * part
            return right_one

        for i, row in enumerate(rows[first:], first):
            before = row["decay"] * after
            value = correction(shape, seen(0, i, before), row)
            writes.append(row["key"][:, :, None] * value[:, None, :])
            after = before + writes[-1]
            if not last:
                output = (row["read"][:, :, None] * seen(1, i, after)).sum(1) + row["skip"]
                outputs.append(output * row.get("gate", 1.0))
        return outputs, [seen(2, len(rows) - 1, after)] if last else []

    for cause, words, side, factor in wrong:
        for who, views in _VIEWS.items():
            if not last or 1 not in views or 2 in views:
                yield cause, f"{who} see {words}", viewed(views, side, factor)
    for cause, words, side, factor in () if shape.recurrence == "mamba2" else _betas(rows, right):
        yield cause, f"corrections see {words}", viewed((0,), side, factor)
    if not first and shape.recurrence != "mamba2":
        yield from _inverted(shape, state, rows, last)
    if chunk and not last:
        yield from _ahead(shape, state, chunk, len(rows))


def _inverted(
    shape: Shape, state: torch.Tensor, rows: Sequence[Row], last: bool
) -> Iterator[tuple[str, str, Played]]:
    """The same if a block (of few rows: one value) is wrong in the inverse matrix for a chunk's
    corrections: that of the identity plus what each row subtracts of the others' writes."""
    names = "key", "read", "value", "beta", "decay"
    key, read, value, beta, decay = (torch.stack([row[x] for row in rows], 1) for x in names)
    up = decay[..., 0].log().clamp(min=-1e3).cumsum(1).expand_as(key)  # [heads, rows, d_k]
    between = torch.exp((up[:, :, None] - up[:, None]).clamp(max=0)) * key[:, None]
    off = torch.einsum("hic,hijc->hij", beta * key, between).tril(-1)
    sees = torch.einsum("hic,hijc->hij", read, between).tril()
    faded, one = torch.exp(up), torch.eye(len(rows), dtype=key.dtype)
    alone = beta * (value - (faded * key) @ state)  # what rows would write independently
    right = torch.linalg.inv(one + off)

    def named(words: str, inverse: torch.Tensor) -> tuple[str, str, Played]:
        wrote = inverse @ alone
        after = [faded[:, -1, :, None] * state + between[:, -1].mT @ wrote]
        seen = ((faded * read) @ state + sees @ wrote).transpose(0, 1)
        return "wrong-term", words, ([], after) if last else (list(seen), [])

    for size in (_BLOCK, 2 * _BLOCK) if len(rows) > _BLOCK else (1,):
        starts = range(0, len(rows), size)
        for b, a in ((b, a) for b, a in product(starts, starts) if a <= b):
            at, of = slice(b, b + size), slice(a, a + size)
            own, block = one[at, of], right[:, at, of]
            others = {"are left out": own + 0 * block, "have the other sign": 2 * own - block}
            others["have the first power of what they are made of"] = own - off[:, at, of]
            if a < b:
                others["lack what is between"] = (
                    -right[:, at, at] @ off[:, at, of] @ right[:, of, of]
                )
            for what, other in others.items():
                words = f"of the chunk's inverse, rows {b} to {b + size - 1}, columns {a} to "
                words, wrong = f"{words}{a + size - 1} {what}", right.clone()
                wrong[:, at, of] = other
                yield named(words, wrong)
                for c in (slice(c, c + size) for c in starts if c > b):
                    above = slice(a, c.start)
                    wrong[:, c, of] = -right[:, c, c] @ off[:, c, above] @ wrong[:, above, of]
                yield named(f"{words}, and so in those below", wrong)


def _ahead(
    shape: Shape, state: torch.Tensor, rows: Sequence[Row], count: int
) -> Iterator[tuple[str, str, Played]]:
    """Cause, sentence and outputs of the first rows if they see the writes of later ones."""
    log = Log(shape, state, rows)
    for (words, every), faded in product(_LATER.items(), (True, False)):
        seen, outputs = torch.zeros_like(state), list[torch.Tensor]()
        for row, output, write in reversed(
            list(zip(log.rows, log.outputs, log.writes, strict=True))
        ):
            more = (row["read"][:, :, None] * seen).sum(1) * row.get("gate", 1.0)
            outputs.insert(0, output + more)
            seen = (every * seen + write) / (row["decay"] if faded else 1.0)
        sentence = f"outputs see what {words} too{', without a decay' * (not faded)}"
        yield "wrong-term", sentence, (outputs[:count], [])


class Log:
    """Rows of a log, oldest first, with the states before and after them and their writes."""

    def __init__(self, shape: Shape, state: torch.Tensor, rows: Sequence[Row]) -> None:
        self.shape = shape
        self.rows = [terms(shape, row) for row in rows]
        self.outputs, states = play(shape, state, self.rows)
        self.states = [state, *states]
        self.writes = self._writes(self.rows)

    def _writes(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """The writes of the rows with these rows' keys, values and beta."""
        made = []
        for before, right, row in zip(self.states, self.rows, rows, strict=False):
            own = right | {x: row[x] for x in ("value", "beta")}
            value = correction(self.shape, right["decay"] * before, own)
            made.append(row["key"][:, :, None] * value[:, None, :])
        return made

    def kept(self, part: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """What remains of a part, by default of the state before, after the rows from `first`
        on."""
        part = self.states[0] if part is None else part
        for row in self.rows[first:]:
            part = row["decay"] * part
        return part

    def folded(self, start: int, rows: Sequence[int], stored: bool) -> torch.Tensor:
        """The state from before row `start`, with these rows after it; stored: their writes are
        used, else recomputed."""
        state = self.states[start]
        for i in rows:
            state = self.after(state, i, stored)
        return state

    def after(self, state: torch.Tensor, row: int, stored: bool) -> torch.Tensor:
        """A state after one more row."""
        if stored:
            return self.rows[row]["decay"] * state + self.writes[row]
        return step(self.shape, state, self.rows[row])[1]

    def cursors(self, ring: int) -> Iterator[Way]:
        """Cause, sentence and last state if other rows than the accepted ones are taken."""
        n = len(self.rows)
        most = n if n <= _MOST_FOLDED else 1
        for stored in (True, False):
            for i in range(n - 1, -1, -1):
                for j in range(i + 1, min(n, i + most) + 1):
                    words = f"{j - i} accepted rows missing, {n - j} before the newest"
                    yield "lost-fold", words, self.folded(i, range(j, n), stored)
                    words = f"{j - i} accepted rows are taken twice, {n - j} before the newest"
                    yield "double-fold", words, self.folded(j, range(i, n), stored)
                if i >= ring:
                    rows = [*range(i - ring, i), i - ring, *range(i + 1, n)]
                    words = f"row {i + 1} was overwritten in a log of {ring}"
                    yield "wrong-wrap", words, self.folded(i - ring, rows, stored)

    def passes(self, lengths: Sequence[int]) -> Iterator[Way]:
        """The same if passes of these lengths each wrote their rows from the first place on, or
        stored cumulated decays of their rows instead of each row's own."""
        held: dict[int, int] = {}
        decays_: list[torch.Tensor] = []
        for i, n in enumerate(lengths):
            begin = sum(lengths[:i])
            held |= {place: begin + place for place in range(n)}
            each = [row["decay"] for row in self.rows[begin : begin + n]]
            decays_ += torch.stack(each).cumprod(0) if each else []
        words = "each pass wrote its rows over the oldest ones of the log"
        for stored in (True, False):
            yield "wrong-wrap", words, self.folded(0, list(held.values()), stored)
        both = self.states[0], self.states[0]
        for row, decay, write in zip(self.rows, decays_, self.writes, strict=False):
            wrong = row | {"decay": decay}
            both = decay * both[0] + write, step(self.shape, both[1], wrong)[1]
        for state in both:
            yield "wrong-gate", "rows of the log have the decay of all rows of their pass", state

    def stretches(self, ring: int, first: int, rejected: Sequence[Row]) -> Iterator[Way]:
        """The same if the log is read from another start, to another end; first: the place of the
        oldest row; rejected: rows after the newest that were not accepted."""
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
                            f"places of the log from {place} on, not {(first + done) % ring}, "
                            f"{twice} of them folded already"
                        )
                        moved = place != (first + done) % ring
                        again = twice and (not moved or twice == len(read))
                        if again and moved:
                            words += ALIKE
                        yield "double-fold" if again else "wrong-wrap", words, state

    def places(self, ring: int, first: int, rejected: Sequence[Row]) -> Iterator[Way]:
        """The same if one part of a row in the log is read at another place than the rest: its
        decay, its key, its write (or the inputs of that)."""
        n = len(self.rows)
        whole = Log(self.shape, self.states[0], [*self.rows, *rejected])
        held: dict[int, int] = {(first + i) % ring: i for i in range(n + len(rejected))}
        right = [(first + i) % ring for i in range(n)]
        moved = {
            "at the place of its number, not from the log's base on": [*range(n)],
            "a place too late": [(x + 1) % ring for x in right],
            "a place too early": [(x - 1) % ring for x in right],
            "in reverse order": right[::-1],
        }
        values = [
            {"wrote": correction(self.shape, row["decay"] * state, row)} | row
            for row, state in zip(whole.rows, whole.states, strict=False)
        ]
        for words, at in moved.items():
            others = [held.get(x) for x in at]
            for names in map(str.split, ("decay", "key", "value", "beta", "value beta", "wrote")):
                state = self.states[0]
                for i, j in enumerate(others):
                    read = values[j] if j is not None else {x: 0 * values[i][x] for x in names}
                    row = values[i] | {x: read[x] for x in names}
                    if names[0] in ("value", "beta"):
                        state = step(self.shape, state, row)[1]
                    else:
                        write = row["key"][:, :, None] * row["wrote"][:, None, :]
                        state = row["decay"] * state + write
                what = " and ".join(names).replace("wrote", "what it wrote")
                yield "wrong-wrap", f"of each row of the log, {what} is read {words}", state

    def decays(self, after: Sequence[Row] = ()) -> Iterator[Way]:
        """Cause, sentence and last state if the decays of the folded rows are wrong, followed by
        right rows."""
        last, end = len(self.rows) - 1, self.states[-1]
        right, wrong = _factors(self.rows)
        change = linear(self.shape, after)
        for row in after:
            end = step(self.shape, end, row)[1]
        for cause, words, side, factor in wrong:
            more = torch.zeros_like(end)
            for j, part in enumerate((self.states[0], *self.writes), -1):
                if side(last, j):
                    more = more + (factor(last, j) - right(last, j)) * part
            cause = "lost-fold" if words.startswith("nothing") else cause
            yield cause, f"the fold takes {words}", end + change @ more

    def kept_with(
        self, batch: Sequence[Row], first: int, begin: int, chunk: int = 0
    ) -> Iterator[Way]:
        """Cause, sentence and last state if the state before, or all, is kept with the decay of as
        many rows (or a chunk's, or those of that chunk) up to another row of the pass, or of
        another head; these rows are the batch's from `first` on, and their sequence starts at
        `begin`."""
        n, each = len(self.rows), [terms(self.shape, row)["decay"] for row in batch]
        own, last = torch.stack(each[first : first + n]).prod(0), first + n - 1
        others = [
            ("head-mapping", f"the decay of {words}", own[at]) for words, at in heads_of(self.shape)
        ]
        for words, at in blocks_of(own.shape[1]):
            if at.max() < own.shape[1]:
                others.append(("wrong-tile", f"the decays of channels where {words}", own[:, at]))
        for end in (end for end in range(len(each)) if end != last):
            cause = "wrong-chunk" if end > last else "gate-of-other-row"
            cause = cause if end >= begin else "other-sequence"
            for many in dict.fromkeys((n, chunk or n, (end - begin) % (chunk or n) + 1)):
                other = torch.stack(each[max(0, end + 1 - many) : end + 1]).prod(0)
                words = f"the decay up to row {end} of the pass, not {last}"
                others.append((cause, words, other))
        state, kept = self.states[-1], self.states[0]
        for cause, words, other in others:
            all_ = torch.where(own > 0, other / own * state, state)
            yield cause, f"the state before is kept with {words}", state + (other - own) * kept
            yield cause, f"the state before and what rows wrote are kept with {words}", all_

    def stored(self, rows: Sequence[Row]) -> torch.Tensor:
        """The last state if these rows are folded with the stored writes."""
        state = self.states[0]
        for row, write in zip(rows, self._writes(rows), strict=True):
            state = row["decay"] * state + write
        return state

    def formulas(self) -> Iterator[Way]:
        """Cause, sentence and last state if a fold uses wrong formulas: for the writes, and for
        everything."""
        few = 1 < len(self.rows) <= _MOST_ROWS
        each = (of(self.shape, self.rows) for of in (formulas, of_other_heads, of_other_channels))
        for cause, words, rows in in_parts(self.shape, self.rows, chain(*each)):
            writes = self._writes(rows)
            yield cause, words, play(self.shape, self.states[0], rows)[1][-1]
            yield cause, words, self.stored(rows)
            for i in range(len(rows)) if few else ():
                alone = f"{words}, in row {i} alone"
                after = [rows[i], *self.rows[i + 1 :]]
                yield cause, alone, play(self.shape, self.states[i], after)[1][-1]
                more = rows[i]["decay"] * self.states[i] + writes[i] - self.states[i + 1]
                yield cause, alone, self.states[-1] + self.kept(more, i + 1)
