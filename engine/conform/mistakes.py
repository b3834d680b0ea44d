"""Mistakes of a row: formulas, strides of its inputs, and the layout of its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, product

import torch
from torch.nn.functional import softplus

from engine.conform.cases import Shape, instead, of_z, under_bound
from engine.conform.fits import blocks_of, fewest
from engine.conform.reference import HEAD_WEIGHTS, ROW_INPUTS, Row, Way, play, step, terms

_MOST_ROWS, _MOST_HEADS, _MOST_MAPPED = 8, 16, 3
_NEAR = ("the row before", "the row after", "the row two before", "the row two after")
_BESIDE = ("q", "k", "v"), ("x", "B", "C"), ("a", "b")  # as engines split a projection
# Inputs, and parts derived from one, that advance from row to row: name, and name of the part
_ADVANCED = tuple((x, x) for x in ("a", "dt", "b", "q", "k", "v", "x", "B", "C", "z"))
_ADVANCED += (("a", "decay"), ("b", "beta"), ("q", "read"), ("k", "key"))
# What corrections use of a row, apart from what is kept and written
_VIEWS = {"look": "key", "off": "beta", "fade": "decay"}
# Of Mamba-2, what one input makes together, each with where it is wrong if that alone is right
_PARTS = (
    {"decay": "in what is written", "beta": "in the decay"},
    {"value": "in D x", "skip": "in what is written"},
)
_OWN_DECAY = ("the decay is applied twice", "k is taken times the decay")


def in_parts(
    shape: Shape, rows: Sequence[Row], ways: Iterable[tuple[str, str, list[Row]]]
) -> Iterator[tuple[str, str, list[Row]]]:
    """Wrong rows, and for those that change several parts of a delta rule also variants with only
    the corrections, or only everything else, wrong; for Mamba-2 only one of what dt, or x, is
    used for."""
    right = [terms(shape, row) for row in rows]
    for cause, words, others in ways:
        yield cause, words, others
        if shape.recurrence == "conv":
            continue
        pairs = list(zip(right, (terms(shape, row) for row in others), strict=True))
        if shape.recurrence == "mamba2":
            for each in _PARTS:
                if all(any(not torch.equal(a[x], b[x]) for a, b in pairs) for x in each):
                    for x, where in each.items():
                        yield cause, f"{words}, {where}", [b | {x: a[x]} for a, b in pairs]
            continue
        changed = {
            x: of
            for x, of in _VIEWS.items()
            if not all(torch.equal(row[of], other[of]) for row, other in pairs)
        }
        if changed:
            if words.startswith(_OWN_DECAY):
                cause = "gate-order"  # a part also sees the row's own decay
            taken = [row | {x: other[of] for x, of in changed.items()} for row, other in pairs]
            yield cause, f"{words}, in what is taken off v", taken
            kept = [
                other | {"read": row["read"]} | {x: row[of] for x, of in changed.items()}
                for row, other in pairs
            ]
            yield cause, f"{words}, in what is kept and written", kept


def formulas(
    shape: Shape, rows: Sequence[Row], number: float = 0.0
) -> Iterator[tuple[str, str, list[Row]]]:
    """Cause, sentence and rows for each wrong formula of a row (reference.terms), or for each with
    a number of its own."""
    each = _conv if shape.recurrence == "conv" else partial(_formulas, shape)
    of_rows = [_numbered(shape, row, number) if number else each(row) for row in rows]
    for made in zip(*of_rows, strict=True):
        cause, words, _ = made[0]
        yield cause, words, [row | other for row, (_, _, other) in zip(rows, made, strict=True)]


def _conv(row: Row) -> list[tuple[str, str, Row]]:
    """Taps with other weights, or none."""
    n = row["weight"].shape[-1]
    weight = torch.cat([row["weight"], 0 * row["weight"][..., :1]], -1)
    none = {"bias": 0 * row["bias"]}
    made: list[tuple[str, str, Row]] = [
        ("wrong-term", "the bias is left out", none),
        ("wrong-term", "bias after activation", none | {"late": row["bias"]}),
    ]
    for at in product(range(n + 1), repeat=n):
        each = (f"tap {i} takes {f'weight {j}' if j < n else 'none'}" for i, j in enumerate(at))
        words = ", ".join(w for i, w in enumerate(each) if at[i] != i)
        made.append(("wrong-term", words, {"weight": weight[..., list(at)]}))
    return made


def _formulas(shape: Shape, row: Row) -> list[tuple[str, str, Row]]:
    mamba = shape.recurrence == "mamba2"
    right = terms(shape, row)
    beta, key, read = right["beta"], right["key"], right["read"]
    name = "dt" if mamba else "a"
    raw, bias, heads = row[name], row["dt_bias"], shape.n_heads
    rate = row["A"] if mamba else -torch.exp(row["A_log"]).view(-1, *[1] * (raw.dim() - 1))

    bounded = "lower_bound" in row
    one = {"A": -1 + 0 * rate} if mamba else {"A_log": 0 * row["A_log"]}
    others = {
        "dt_bias is left out": {"dt_bias": 0 * bias},
        "dt_bias is taken off": {"dt_bias": -bias},
        f"{name} is left out": {name: 0 * raw},
        "A is left out of the decay": one,
    }
    steps = instead("softplus", raw + bias) | {
        "dt_bias is added after softplus": softplus(raw) + bias,
        "softplus has 2 for e within": torch.log(1 + torch.exp2(raw + bias)),
        "softplus has base 2": torch.log2(1 + torch.exp(raw + bias)),
    }
    others |= {} if bounded else {words: {"step": dt} for words, dt in steps.items()}
    g = right["decay"].log().view((heads, -1) if raw.dim() > 1 else (heads,))
    made = [("gate-order", "gate last", right | {"last": g})]
    made.append(("gate-order", "the decay is left out", right | {"decay": right["decay"] ** 0}))
    made += [("wrong-gate", words, _anew(shape, row, other)) for words, other in others.items()]
    without_exp = {"A_log is taken without exp": -(-rate).log() * softplus(raw + bias)}
    logs = under_bound(row, raw, -rate) if bounded else without_exp
    logs |= {
        "A has the other sign": -g,
        "A divides, as where A_log has the other sign": g / rate**2,
        "the decay is a power of 2, not of e": g * math.log(2),
        "the decay's logarithm is taken as one to base 2": g / math.log(2),
        "the decay is applied twice": 2 * g,
    }
    wrong = {words: log.exp() for words, log in logs.items()} | {"the decay's exp is left out": g}
    if raw.dim() > 1:
        logs = {"mean logarithm": g.mean(1, keepdim=True), "of channel 0": g[:, :1]}
        means = {"mean": g.exp().mean(1, keepdim=True)} | {w: log.exp() for w, log in logs.items()}
        for words, one_ in means.items():
            wrong[f"all channels of a head decay alike: {words}"] = one_.expand_as(g)
    decays = ((words, {"decay": x.reshape(heads, -1, 1)}) for words, x in wrong.items())
    made += [("wrong-gate", words, right | other) for words, other in decays]
    if shape.recurrence == "kda" and shape.d_k == shape.d_v:
        along = right | {"decay": right["decay"].transpose(1, 2)}
        made.append(("wrong-gate", "the decay of a channel is applied along v", along))
    what = "dt" if mamba else "beta"
    betas = {f"{what} is left out{' of what is written' * mamba}": torch.ones_like(beta)}
    if not mamba:
        b, seen = row["b"][:, None], beta * (key * key).sum(1, keepdim=True)
        betas |= instead("sigmoid", b, " of beta") | {
            "beta is applied twice": beta**2,
            "beta is 1 - sigmoid": 1 - beta,
            "corrections see what their own row writes": beta / (1 + seen),
        }
    made += [("wrong-gate", words, right | {"beta": other}) for words, other in betas.items()]
    inputs = {"v is left out": {"value": 0 * right["value"]}}
    if mamba:
        inputs["B and C are exchanged"] = {"key": read, "read": key}
        inputs["D is added without x"] = {"skip": row["D"][:, None].expand_as(row["x"])}
        inputs["D x is left out"] = {"skip": 0 * row["x"]}
        inputs |= of_z(row["z"], right) if "z" in row else {}
    else:
        scale = shape.d_k**-0.5
        inputs["q and k are exchanged"] = {"key": read / scale, "read": key * scale}
        inputs["q is taken for k"] = {"key": read / scale}
        inputs["q, as it is scaled, is taken for k"] = {"key": read}
        inputs["k is taken for q"] = {"read": key * scale}
        inputs["k is scaled as q is"] = {"key": key * scale}
        scales = {
            "the scale is left out, or q divided by its root mean square": 1 / scale,
            "the scale is applied twice": scale,
            "q is divided by the root of d_v, not of d_k": (shape.d_k / shape.d_v) ** 0.5,
        }
        made += [("wrong-scale", w, right | {"read": read * x}) for w, x in scales.items()]
        made += _unlike_units(shape, row)
    scalars = {what: beta, "the decay": right["decay"][..., 0]}
    names = {"value": "vx"[mamba], "key": "kB"[mamba], "read": "qC"[mamba], "skip": "D x"}
    for (term, of), (factor, times) in product(names.items(), scalars.items()):
        if times.shape[1] in (1, right[term].shape[1]) and (mamba or term != "skip"):
            inputs[f"{of} is taken times {factor}"] = {term: right[term] * times}
    made += [("wrong-term", words, right | other) for words, other in inputs.items()]
    return made


def _unlike_units(shape: Shape, row: Row, number: float = 0.0) -> Iterator[tuple[str, str, Row]]:
    """q, k or both normalized otherwise than by their own length, or with a number in it."""
    each, right, per_group = dict[str, Row](), terms(shape, row), shape.n_heads // shape.n_groups
    of, scale = {"q": "read", "k": "key"}, {"q": shape.d_k**-0.5, "k": 1.0}
    lengths = {x: row[x].norm(dim=-1, keepdim=True) for x in of}
    for x, other in ("qk", "kq"):
        one, own, others = row[x], lengths[x], lengths[other]
        if number:
            with_eps = f"divided with an eps of {number:.4g}", one / (own**2 + number).sqrt()
            more = f"divided by the length and {number:.4g}", one / (own + number)
            each[x] = dict([with_eps, more])
            continue
        centred = one - one.mean(-1, keepdim=True)
        each[x] = {
            "not normalized": one,
            "normalized without the mean": centred / centred.norm(dim=-1, keepdim=True),
            "taken through softmax": torch.softmax(one, -1),
            "divided by the squared length": one / own**2,
            "divided by the length of the other": one / others,
            "divided by the length of q and k together": one / (own**2 + others**2).sqrt(),
            "divided by the root mean square": one / own * shape.d_k**0.5,
            "divided by the sum of the absolute values": one / one.abs().sum(-1, keepdim=True),
            "divided by the largest absolute value": one / one.abs().amax(-1, keepdim=True),
            "divided by the length over the heads": one / one.norm(dim=0, keepdim=True),
            "divided by the length of all heads together": one / one.norm(),
        }
    for names, words in product(("q", "k", "qk"), each["q"]):
        made = {of[x]: each[x][words] * scale[x] for x in names}
        units = {x: t.repeat_interleave(per_group, 0) for x, t in made.items()}
        are = "is" if len(names) == 1 else "are"
        yield "wrong-norm", f"{' and '.join(names)} {are} {words}", right | units


def _numbered(shape: Shape, row: Row, x: float) -> list[tuple[str, str, Row]]:
    """Mistakes of a row with a number of their own, for this positive value."""
    if shape.recurrence == "conv":
        words = f"the sigmoid of {x:.4g} times its input is taken"
        return [("wrong-term", words, {"slope": torch.tensor(x)})]
    mamba, right = shape.recurrence == "mamba2", terms(shape, row)
    what, raw = ("dt", "dt") if mamba else ("beta", "a")
    decay, beta = right["decay"], right["beta"]
    gates = {
        f"the decay's logarithm ends at -{x:.4g}": {"decay": decay.clamp(min=math.exp(-x))},
        f"the decay's logarithm is -{x:.4g} at most": {"decay": decay.clamp(max=math.exp(-x))},
        f"the decay is taken to the power of {x:.4g}": {"decay": decay**x},
        f"{what} is taken {x:.4g} times": {"beta": x * beta},
        f"{what} ends at {x:.4g}": {"beta": beta.clamp(max=x)},
        f"{what} is {x:.4g} at least": {"beta": beta.clamp(min=x)},
        f"dt_bias is taken {x:.4g} times": _anew(shape, row, {"dt_bias": x * row["dt_bias"]}),
    }
    if not mamba:
        slope = {"beta": torch.sigmoid(x * row["b"])[:, None]}
        gates[f"beta is the sigmoid of {x:.4g} times its input"] = slope
    y = row[raw] + row["dt_bias"]
    bent = {
        f"softplus is left out above {x:.4g}": softplus(y, threshold=x),
        f"softplus ends at {x:.4g}": softplus(y).clamp(max=x),
        f"softplus is {x:.4g} at least": softplus(y).clamp(min=x),
        f"softplus has a beta of {x:.4g}": softplus(y, x),
    }
    for words, dt in bent.items() if "lower_bound" not in row else ():
        gates[words] = _anew(shape, row, {"step": dt})
    made = [("wrong-gate", words, right | other) for words, other in gates.items()]
    for term, name in {"value": "vx"[mamba], "key": "kB"[mamba], "read": "qC"[mamba]}.items():
        scaled = right | {term: x * right[term]}
        made.append(("wrong-scale", f"{name} is taken {x:.4g} times", scaled))
    if "z" in row:
        gate = {"gate": row["z"] * torch.sigmoid(x * row["z"])}
        made.append(("wrong-term", f"the sigmoid of {x:.4g} times z is taken", right | gate))
    made += [] if mamba else _unlike_units(shape, row, x)
    return made


def _anew(shape: Shape, row: Row, other: Row) -> Row:
    """A row with other inputs, its terms computed again."""
    return terms(shape, {x: t for x, t in row.items() if x != "decay"} | other)


def strides(
    shape: Shape, batch: Sequence[Row], first: int, tokens: Sequence[Row]
) -> Iterator[tuple[str, str, list[Row]]]:
    """Cause, sentence and rows if one input of row r of a sequence, which begins at row `first` of
    the batch, is read at offset r * s for a wrong stride s, or at another offset of a concatenated
    layout (zeros follow the last row); a few rows are enough."""
    if len(tokens) > _MOST_ROWS:
        return
    heads, groups = shape.n_heads, shape.n_groups
    sizes = {n * d for n in (1, groups, heads) for d in (1, shape.d_k, shape.d_v)}
    places = {0} | sizes | {a + b for a in sizes for b in sizes}
    beside = (names for names in _BESIDE if batch[0].keys() >= set(names))
    wholes = {sum(batch[0][x].numel() for x in names) for names in beside}
    made = [terms(shape, row) for row in batch]
    each = {"q": heads // groups, "k": heads // groups}
    for name, key in _ADVANCED:
        if name not in batch[0]:
            continue
        repeated = 1 if name == key else each.get(name, 1)
        held = torch.stack([row[key][::repeated] for row in made])
        size = held[0].numel()
        cause = "gate-of-other-row" if name in ("a", "dt") else "other-row"
        layouts_of, begins = [(cause, held.flatten(), 0, size)], list[int]()
        for names in _BESIDE if name == key else ():
            if name in names and batch[0].keys() >= set(names):
                parts = [torch.stack([row[x].flatten() for row in made]) for x in names]
                begins = [0, *accumulate(p.shape[1] for p in parts)]
                whole, at = torch.cat(parts, 1).flatten(), begins[names.index(name)]
                layouts_of.append(("wrong-stride", whole, at, begins.pop()))
        for cause, flat, at, right in layouts_of:
            more = (len(tokens) * max(sizes | wholes),)  # ones for a decay, whose logarithm is 0
            flat = torch.cat([flat, flat.new_full(more, float(key == "decay"))])
            moved = [(at, s) for s in sorted(sizes | wholes)]
            if right > size and name in "qkvxBC":
                moved += [(place, right) for place in sorted(places)]
            for place, s in moved:
                starts = [place + first * right + r * s for r in range(len(tokens))]
                if (place, s) == (at, right) or starts[-1] + size > len(flat):
                    continue
                rows = []
                for row, start in zip(tokens, starts, strict=True):
                    part = flat[start : start + size].view(held[0].shape)
                    part = part.repeat_interleave(repeated, 0)
                    rows.append((row if name == key else terms(shape, row)) | {key: part})
                if place == at:
                    words = f"{name} of row r is read {s} r values on"
                    of_others = "wrong-stride" if s in wholes - sizes else cause
                    yield of_others, f"{words}, not {right} r", rows
                else:
                    of_others = "wrong-term" if place in begins else "wrong-stride"
                    yield of_others, f"{name} is read at {place} of a row, not {at}", rows


def layouts(shape: Shape, state: torch.Tensor) -> Iterator[Way]:
    """A state with another head's in its place, its transpose, or a block of channels at another's
    place."""
    conv = shape.recurrence == "conv"
    for made in _transposed(state):
        yield "wrong-stride", f"the transposed {'window' if conv else 'state'}", made
    if conv:
        return
    for words, at in heads_of(shape):
        yield "head-mapping", f"the state of {words}", state[at]
    for what, dim in (("key channels", 1), ("columns", 2)):
        whole = torch.cat([state, 0 * state.narrow(dim, 0, 1)], dim)
        for words, at in blocks_of(state.shape[dim]):
            yield "wrong-tile", f"{what} {words}, of the state", whole.index_select(dim, at)


def _transposed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read of x if its last two dimensions are exchanged in memory, or in the reading."""
    return x.mT.reshape(x.shape), x.reshape(x.mT.shape).mT


def turned(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Cause, sentence and rows if an input or a weight of two dimensions is read transposed."""
    names = [x for x, t in rows[0].items() if t.dim() == 2 and min(t.shape) > 1]
    for name, i in product(names, (0, 1)):
        others = [row | {name: _transposed(row[name])[i]} for row in rows]
        yield "wrong-stride", f"{name} is read transposed", others


def overwritten(shape: Shape, state: torch.Tensor, rows: Sequence[Row]) -> Iterator[Way]:
    """States of other heads, if those of earlier heads are overwritten already, after these
    rows."""
    for words, at in heads_of(shape) if shape.recurrence != "conv" else ():
        read, stored = state.clone(), state.clone()
        for head, other in enumerate(at.tolist()):
            read[head] = stored[other]
            stored[head] = play(shape, read, rows)[1][-1][head]
        yield "head-mapping", f"the state of {words}, as far as it is stored anew", read


def _moved(n: int, what: str) -> list[tuple[str, torch.Tensor]]:
    each = torch.arange(n)
    return [
        (f"the next {what}", each.roll(-1)),
        (f"the {what} before", each.roll(1)),
        (f"the last {what} first", each.flip(0)),
        (f"{what} 0", 0 * each),
    ]


def heads_of(shape: Shape) -> list[tuple[str, torch.Tensor]]:
    """Heads that each head may be mistaken for, with words."""
    heads, per_group = torch.arange(shape.n_heads), shape.n_heads // shape.n_groups
    return [
        ("its key head", heads // per_group),
        ("head h % groups", heads % shape.n_groups),
        *_moved(shape.n_heads, "head"),
        ("the group before", heads.roll(per_group)),
        ("the group after", heads.roll(-per_group)),
    ]


def channels_of(n: int) -> list[tuple[str, torch.Tensor]]:
    """Key channels, of n, that each may be mistaken for, with words."""
    pairs = (torch.arange(n) ^ 1).clamp(max=n - 1)
    return [*_moved(n, "channel"), ("the other channel of a pair", pairs)]


def of_other_heads(shape: Shape, rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Cause, sentence and rows if heads take one part of a row from other heads."""
    if shape.recurrence == "conv" or shape.n_heads == 1:
        return
    kind, per_group = shape.recurrence == "mamba2", shape.n_heads // shape.n_groups
    of_groups = torch.arange(shape.n_heads) % shape.n_groups * per_group
    gate, weights = ROW_INPUTS[shape.recurrence][0], HEAD_WEIGHTS[shape.recurrence]
    of_row = {gate: gate, "key": "kB"[kind], "read": "qC"[kind], "value": "vx"[kind]}
    of_row |= {"decay": "the decay", "beta": ("beta", "dt, in what is written,")[kind]}
    of_row |= {x: x for x in weights} | ({"gate": "z"} if "z" in rows[0] else {})
    single = [(x,) for x in of_row]
    each = [*single, weights, ("key", "read")]
    each += [(gate, "key"), ("key", "decay"), ("value", "beta"), ("decay", "beta")]  # in logs
    made = [terms(shape, row) for row in rows]
    for keys in each:
        what = " and ".join(dict.fromkeys(of_row[x] for x in keys))
        one = keys in single and shape.n_heads <= _MOST_HEADS
        ones = ((f"head {h}", 0 * of_groups + h) for h in range(1, shape.n_heads * one))
        for words, at in (*heads_of(shape), ("key head h % groups", of_groups), *ones):
            others = []
            for row in made:
                other = {x: row[x][at] for x in keys}
                anew = not {gate, *weights}.isdisjoint(keys)
                others.append((_anew(shape, row, other) if anew else row) | other)
            yield "head-mapping", f"{what} of {words}", others


def of_other_channels(shape: Shape, rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Cause, sentence and rows if a block of channels takes one part of a row from another block,
    or has none of it; q and k also before they are normalized."""
    made, kind = [terms(shape, row) for row in rows], shape.recurrence == "mamba2"
    of_row = {("key",): "kB"[kind], ("read",): "qC"[kind], ("value",): "vx"[kind]}
    of_row |= {("decay",): "the decay"} if shape.recurrence == "kda" else {}
    normed = ("q", "k", "qk") if not kind else ()
    parts: list[tuple[Sequence[str], str, Sequence[Row]]] = [
        *((of, f"{' and '.join(of)}, of the norm too", rows) for of in normed),
        *((of, what, made) for of, what in of_row.items()),
    ]
    for names, what, each in parts if shape.recurrence != "conv" else ():
        none = torch.full_like(each[0][names[0]][:, :1], float(names == ("decay",)))
        for words, at in blocks_of(each[0][names[0]].shape[1], 32):
            pairs = ((row, {x: torch.cat([row[x], none], 1)[:, at] for x in names}) for row in each)
            others = [_anew(shape, a, b) if each is rows else a | b for a, b in pairs]
            yield "wrong-tile", f"channels {words.replace('zeros', 'left out')}: {what}", others


def other_rows(first: int, n: int) -> list[tuple[str, list[int]]]:
    """Rows of a pass that may replace a sequence's n rows, which begin at `first`."""
    near = zip(_NEAR, (-1, 1, -2, 2), strict=True)
    mapped = product(range(n), repeat=n) if 1 < n <= _MOST_MAPPED else ()
    return [
        ("the first row", [first] * n),
        ("the last row", [first + n - 1] * n),
        *((f"row {j}", [first + j] * n) for j in range(1, n - 1)),
        *((x, [first + min(max(i + d, 0), n - 1) for i in range(n)]) for x, d in near),
        ("the row before in the pass", list(range(first - 1, first - 1 + n))),
        ("the row after in the pass", list(range(first + 1, first + 1 + n))),
        ("the rows in reverse order", list(range(first + n - 1, first - 1, -1))),
        ("the pass's first rows", list(range(n))),
        *((f"rows {', '.join(map(str, at))}", [first + i for i in at]) for at in mapped),
    ]


def row_by_row(
    shape: Shape, start: torch.Tensor, seen: torch.Tensor, tokens: Sequence[Row],
    parents: Sequence[int], ways: Sequence[tuple[str, str, list[Row]]],
    folds: Callable[[Sequence[Row]], Iterable[Way]] | None, bound: float,
) -> tuple[str, str] | None:  # fmt: skip
    """Cause and sentence if each head of each row has the right output or that of some way through
    the row, given the state that earlier rows left: for a tree, also after another row than its
    parent; for a log, also after a wrong fold of it and of these rows."""
    n = 1 if shape.recurrence == "conv" else shape.n_heads
    states, wrong = [start], torch.zeros(len(tokens), n, dtype=torch.bool)
    rest = list[torch.Tensor]()
    gives: dict[tuple[str, str], torch.Tensor] = {}
    limit = 4 * bound * max(1.0, float(seen.abs().max()))

    def errors(row: int, output: torch.Tensor) -> torch.Tensor:
        return (output.reshape(n, -1) - seen[row].reshape(n, -1)).abs().amax(1)

    for i, row in enumerate(tokens):
        parent = parents[i] if parents else i - 1
        before, words_of = states[parent + 1], f"row {i} follows {{}} and not row {parent}"
        output, after = step(shape, before, row)
        error = errors(i, output)
        wrong[i] = ~(error <= limit)
        rest.append(error[~wrong[i]])
        least = torch.full((n,), torch.inf, dtype=torch.float64)
        tree = [(f"row {p}", state) for p, state in enumerate(states, -1)] if parents else []
        tree += [("no row that has a state", 0 * start)] if parents else []
        of_parents = (("wrong-parent", words_of.format(p), state, row) for p, state in tree)
        inputs = ((cause, words, before, rows[i]) for cause, words, rows in ways)
        made_of = folds(tokens[:i]) if folds and i else ()
        after_row = f", after row {i} of the pass"
        of_folds = ((cause, words + after_row, state, row) for cause, words, state in made_of)
        others = chain(of_parents, inputs, of_folds) if wrong[i].any() else ()
        for cause, words, state, other in others:
            output, made = step(shape, state, other)
            error = errors(i, output)
            fit = (error <= limit) & wrong[i]
            if fit.any():
                gives.setdefault((cause, words), torch.zeros_like(wrong))[i] = fit
                nearer = fit & (error < least / 2)  # since one value may match by chance
                least = torch.where(nearer, error, least)
                after = torch.where(nearer.view(-1, *[1] * (made.dim() - 1)), made, after)
        if (least.isinf() & wrong[i]).any():
            return None
        states.append(after)
    right = torch.cat(rest)
    if len(right) and right.median() > limit / 8:  # nor are others right: within rounding
        return None
    return fewest(gives, wrong, ("rows", "heads"))
