"""Replays of a fault's check under changes, which show its cause if the first play does not."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product

import torch

from engine.conform.cases import Recurrence, Shape
from engine.conform.causes import Situation
from engine.conform.checks import CHECKS, VAGUE, Fault, Player, check, copied, errors_of, limited
from engine.conform.decays import ALIKE
from engine.conform.fits import joined, place
from engine.conform.packages import Package, interpreted
from engine.conform.passes import SCRIPTS, Pass, shapes, with_extras
from engine.conform.reference import ROW_INPUTS, terms, token
from engine.conform.subject import Kernel

# Causes of errors in one extra of a shape alone (Kernel.extras), if no other is found
OF_EXTRAS = {
    "layers": "other-layer",
    "track slots": "stale-column",
    "aligned blocks": "stale-column",
    "lower bound": "wrong-gate",
    "z": "wrong-term",
    "v first": "wrong-stride",
    "far slots": "wrong-stride",
}
# Extras that decide the cause, whatever else was found, and their descriptions
_WORDS_OF_EXTRAS = {
    "layers": ", the other of which has its heads turned",
    "far slots": ", whose places 32 bits do not count to",
}
_OF_ROWS = ("gate-of-other-row", "other-row")  # that need more rows to distinguish
_ROUNDS = {"rounds": 6, "drift": 12}
_ROUNDS_ON_DEVICE = {"rounds": 60, "drift": 1000}
_MOST_SHRINK = 12000  # Player.work
_MANY = 50  # sequences: above 48, from which some kernels take other blocks
_ROWS = 6  # of a pass that shows which of its rows are wrong
# Causes that may be those of a wrong count, or of another sequence's
_COUNTED = (
    "stale-column",
    "window-not-rolled-back",
    "state-not-committed",
    "lost-fold",
    "state-lost",
    "unused-memory",
)
# Causes that another sequence's data may look like
_OF_OTHERS = ("gate-order", "gate-of-other-row", "wrong-gate", "wrong-chunk", "other-row")
# Causes that a short last chunk may have
_OF_CHUNKS = ("state-lost", "state-not-committed", "wrong-gate", "wrong-term", "other-row")
# Causes that zeros read in place of data look like
_OF_ZEROS = ("gate-order", "wrong-gate", "wrong-term", "wrong-scale", "wrong-norm", "lost-fold")
# Inputs and weights by the cause of a wrong value made from them, and values to try
_INPUTS = {
    "wrong-gate": ("a", "dt", "b", "dt_bias", "A_log", "A"),
    "wrong-norm": ("q", "k"),
    "wrong-term": ("v", "x", "B", "C", "D", "weight", "bias"),
}
_VALUES = (-4.0, 4.0, 0.5)
_MOST = 10000  # Player.work of each further search
_MOST_SEEN = 256  # key channels of a head whose state is solved for
_LEFT, NO_OUTPUT = "rows accepted leave the state after", "no output is written"
_MOVED = "of the pass is that of row"  # an output in the place of another one
Changed = Callable[[Pass, int], Pass | None]  # of a pass and its number
Step = tuple[bool, list[Fault]]  # whether they have causes, and the faults
Steps = Iterator[Step]
_WRITTEN = ("null-slot-written", "padding-written", "other-sequence-written")


def smallest(fault: Fault, again: Callable[[Shape], list[Fault]]) -> Fault:
    """The fault at the smallest shape that still shows it, halving one size at a time."""
    while fault.cause not in ("crash", "drift"):
        for shape in fault.shape.smaller():
            same = [f for f in again(shape) if f.symptom == fault.symptom]
            if same:
                fault = same[0]
                break
        else:
            break
    return fault


def placed(player: Player, fault: Fault) -> Fault:
    """The fault with what further plays show: with zeros in place of NaN, with every number of
    accepted rows, and with other passes and shapes."""
    for further in (_filled, _seen, _by_count, elsewhere):
        with limited(_MOST), suppress(Exception):  # of a play that the check had not
            fault = further(player, fault)
    return fault


def _filled(player: Player, fault: Fault) -> Fault:
    """The origin of NaN: the cause if unwritten memory is zeros, be it in a later pass, or
    otherwise the input that must have other values for all to be finite; and where it is first read
    or made."""
    of_log = fault.cause == "wrong-wrap" and fault.error == math.inf and any(fault.symptom[:2])
    if fault.cause != "unused-memory" and not of_log:
        return fault
    places = _places(player, fault)
    fault = replace(fault, detail=joined(fault.detail, *places))
    other = replace(player, blank=True)
    for found in other.script(fault.check, fault.round + 8):
        if found.round > fault.round:  # zeros do no harm before
            cause = found.cause if found.cause not in VAGUE else fault.cause
            words = f"with zeros there round {found.round} is wrong: {found.detail}"
            return replace(fault, cause=cause, detail=joined(fault.detail, words))
        words = joined(found.detail, "from memory that was never written", *places)
        if found.cause == "state-lost" and found.row_errors:
            cause = "wrong-chunk" if player.kernel.chunk else "stale-column"
            return replace(fault, cause=cause, detail=words)
        moved = found.cause == "lost-fold" or ALIKE in found.detail
        if moved and player.kernel.ring and fault.round:
            # rows of earlier passes were found: this one is at another place
            return replace(fault, cause="wrong-wrap", detail=words.replace(ALIKE, ""))
        # zeros do not show what is read, nor do columns if all have NaN
        some = "columns" in fault.detail
        if found.cause in _OF_ZEROS or (found.cause == "wrong-tile" and not some):
            return replace(fault, detail=words)
        if found.cause not in (*VAGUE[:3], "state-lost", "null-slot-written"):
            return replace(fault, cause=found.cause, detail=words)
        if found.error == math.inf:
            return _computed(player, fault)
        if found.cause in VAGUE:
            return replace(fault, detail=joined(fault.detail, words))
    return fault


def _places(player: Player, fault: Fault) -> list[str]:
    """Where kernels in Triton's interpreter first read, or make, NaN."""
    if not interpreted():
        return []
    from engine.conform.interpreter_with_triton import watched

    with watched() as places:
        player.script(fault.check, fault.round + 1)
    return places


def _computed(player: Player, fault: Fault) -> Fault:
    """The input that must have other values for no NaN or infinity to be computed."""
    known = (*player.start()[0].weights, *ROW_INPUTS[player.shape.recurrence])
    for cause, names in _INPUTS.items():
        here = [x for x in names if x in known]
        for some, value in product(dict.fromkeys([*((x,) for x in here), (*here,)]), _VALUES):
            other = replace(player, named=False, blank=True, replaced=dict.fromkeys(some, value))
            faults = other.script(fault.check, fault.round + 1)
            if all(f.error < math.inf for f in faults):
                words = f"finite where {' and '.join(f'{name} is {value:g}' for name in some)}"
                return replace(fault, cause=cause, detail=joined(fault.detail, words))
    cause = "wrong-output" if fault.row_errors else "wrong-state"
    cause = cause if fault.cause == "unused-memory" else fault.cause
    words = "NaN is computed: zeros in memory that was never written change nothing"
    return replace(fault, cause=cause, detail=joined(fault.detail, words))


def _seen(player: Player, fault: Fault) -> Fault:
    """Outputs without a known mistake are named by the state that they see: reading is linear in q
    (Mamba-2: C), so sequences that differ only in it show all of it."""
    shape, check = player.shape, fault.check
    vague = fault.cause in VAGUE and NO_OUTPUT not in fault.detail
    vague = (vague or "times what" in fault.detail) and shape.d_k <= _MOST_SEEN
    if not fault.row_errors or not vague or shape.recurrence == "conv":
        return fault
    m = shape.d_k + 8
    until = 1 + [x >= min(player.bound, fault.error) for x in fault.row_errors].index(True)
    other = replace(player, shape=replace(shape, n_sequences=m), copies=True)
    for empty in player.starts(check):
        source, subject, reference = other.start(empty, check)
        passes = SCRIPTS[check](shape, random.Random(f"{check} {player.seed}"), player.kernel)
        alone = (one.only(fault.sequence) for one in islice(passes, fault.round + 1))
        for index, one in enumerate(filter(None, alone)):
            if player.kernel.chunk and index == fault.round:  # later ones are not seen
                many = (min(until, *one.lengths),)
                one = replace(one, lengths=many, accepted=many)
            every, parents = range(m), one.parents * m
            rows = source.rows(every, one.lengths * m, parents)
            outputs = other.outputs(one, rows, subject)
            wanted, n = reference.verify(rows), one.lengths[0]
            tokens = [token(rows, i) for i in range(n)]
            each = [terms(shape, token(rows, i)) for i in range(m * n)]
            reads, skips = (torch.stack([t[x] for t in each]) for x in ("read", "skip"))
            if "z" in shape.extras:
                outputs = outputs / torch.nn.functional.silu(rows.z)
            seen = (outputs.double().cpu() - skips).unflatten(0, (m, n)).permute(1, 2, 0, 3)
            read = reads.unflatten(0, (m, n)).permute(1, 2, 0, 3)
            states = torch.linalg.lstsq(read, seen, driver="gelsd").solution
            bound = 4 * player.bound * max(1.0, float(wanted.abs().max()))
            if not (read @ states - seen).abs().max() <= bound:
                return fault  # not linear in q
            off = (states - torch.stack(reference.depths(0))).abs().flatten(1).amax(1)
            if off.max() > 4 * bound:
                row, tree = int((off > 4 * bound).nonzero()[0]), parents[0] if parents else ()
                here = Situation(player.kernel, reference, 0, tokens, tree, sought=player.sought)
                cause, words = here.explain_state(states[row], row + 1, 4 * player.bound)
                if cause in ("wrong-state", "drift"):
                    return fault
                if cause == "wrong-gate" and 0 < player.kernel.chunk <= row:
                    cause = "wrong-chunk"  # first chunks are right, so the formula is
                words = words.removesuffix(", in the state alone: outputs are right")
                where = place(shape, states[row], reference.depths(0)[row], 4 * player.bound)
                of = f"in the state that the output of row {row} sees"
                return replace(fault, cause=cause, detail=joined(words, of, where))
            if one.drafts or one.reset:
                subject.accept(every, one.accepted * m)
            reference.accept(every, one.accepted * m)
    return fault


def _by_count(player: Player, fault: Fault) -> Fault:
    """The state that each number of accepted rows leaves, if a single sequence shows it."""
    # for a wrong output, no state of the pass is known
    known = fault.cause in _COUNTED and fault.check != "trees" and not fault.row_errors
    if not known or player.kernel.chunk:
        return fault
    t = max(3, player.shape.n_tokens)
    player = replace(player, shape=replace(player.shape, n_tokens=t, n_sequences=1))
    left: list[int | None] = []
    for count in range(1, t + 1):
        source, subject, reference = player.start()
        rows = source.rows([0], [t])
        subject.verify(rows)
        reference.verify(rows)
        subject.accept([0], [count])
        state = copied(subject.state(0))
        if state is None:
            return fault
        depths = torch.stack([reference.state(0), *reference.depths(0)])
        errors = errors_of(state.expand_as(depths), depths)
        if player.bound < min(errors) < math.inf:
            return fault
        left.append(errors.index(min(errors)) if min(errors) < math.inf else None)
    wrong = [row for count, row in enumerate(left, 1) if row != count]
    if not wrong:
        return fault
    cause = fault.cause
    if player.shape.recurrence == "conv" and left[-1] == t:  # right if nothing is rejected
        cause = "window-not-rolled-back"
    elif cause in ("unused-memory", "state-not-committed", "state-lost"):
        empty = "state-not-committed" if 0 in wrong else "unused-memory"
        cause = "stale-column" if any(wrong) else empty
    each = ", ".join("none (NaN)" if row is None else str(row) for row in left)
    return replace(fault, cause=cause, detail=f"{fault.detail}; 1 to {t} {_LEFT} {each}")


def elsewhere(player: Player, fault: Fault) -> Fault:
    """A fault that several mistakes share is named by the first change of its passes, or of its
    shape, that makes them right."""
    shape, n, t = player.shape, player.shape.n_sequences, player.shape.n_tokens
    c, vague = player.kernel.chunk, fault.cause in VAGUE[:3]
    stale = fault.cause in ("stale-column", "window-not-rolled-back", "state-not-committed")
    by_length, unwritten = (*_WRITTEN, "other-sequence"), ("other-sequence", "wrong-stride")
    log = player.kernel.ring or player.kernel.log
    some_heads = "heads " in fault.detail and fault.cause != "head-mapping"
    whole = {k: 2 ** (getattr(shape, k) - 1).bit_length() for k in ("d_k", "d_v")}
    may_be_long = not c and _LEFT not in fault.detail  # else a count is wrong in long passes, too
    same: Changed = lambda p, _: p  # noqa: E731
    full: Changed = lambda p, _: p.full(t)  # noqa: E731
    conv = shape.recurrence == "conv"  # its channels have places instead of heads
    counted = vague or fault.cause in _COUNTED
    of_others = n > 1 and (counted or (fault.cause in _OF_OTHERS and _MOVED not in fault.detail))
    alone: Changed = lambda p, _: p.only(fault.sequence)  # noqa: E731
    apart = "no other sequence is in its passes", alone, shape
    at_begin = fault.check == "subsets" and (counted or fault.cause == "other-sequence")
    ways: tuple[tuple[bool, str, str, Changed, Shape], ...] = (
        (at_begin, "other-sequence" if vague else fault.cause,
         "no sequence begins in another one's slot", lambda p, _: replace(p, anew=()), shape),
        (c > 0 and (vague or fault.cause in _OF_CHUNKS), "wrong-chunk",
         "all prompts have whole chunks", lambda p, _: p.chunked(c), shape),
        (n > 1 and (vague or fault.cause == "other-sequence"), "other-sequence", *apart),
        (may_be_long and (stale or vague or fault.cause in by_length), "wrong-stride",
         f"every pass has {t} rows", full, shape),
        (stale or vague, "lost-fold" if log else "stale-column",
         "the count is set to 1 by a step without drafts", lambda p, _: p.counted(), shape),
        (of_others, "other-sequence", *apart),
        (of_others, "other-sequence",
         "all sequences are in its passes, in their order", lambda p, _: p.whole(n), shape),
        ((vague or some_heads) and shape.n_groups < shape.n_heads, "head-mapping",
         "no heads share a key", same, replace(shape, n_groups=shape.n_heads)),
        (vague and shape.n_heads > 1, ("head-mapping", "wrong-stride")[conv],
         f"there is one {('head', 'channel')[conv]}", same, replace(shape, n_heads=1, n_groups=1)),
        ((vague or c > 0) and replace(shape, **whole) != shape, "wrong-tile",
         "the size of a head is a power of two", same, replace(shape, **whole)),
    )  # fmt: skip
    if (vague or fault.cause == "wrong-tile") and player.kernel.ring and fault.round:
        words = f"{fault.detail}; right while the log holds no rows"
        return replace(fault, cause="wrong-wrap", detail=words)
    if NO_OUTPUT in fault.detail and n > 1:  # it may be at another place, of a later row
        for found in _wrong(player, fault, lambda p, _: p.ascending(), shape, named=True):
            if _MOVED in found.detail:
                return replace(fault, cause=found.cause, detail=found.detail)
    for may_be, cause, words, changed, other in ways:
        few = changed is alone or shape.n_heads > other.n_heads
        may_be = may_be and (not player.sought or cause in player.sought)
        if may_be and not _wrong(player, fault, changed, other, seeds=8 if few else 2):
            short: Changed = lambda p, _: replace(p, drafts=True)  # noqa: E731
            of_length = cause == "wrong-stride" and other == shape
            if of_length and not _wrong(player, fault, short, other):
                continue  # it is also right if steps without drafts are passes of one row
            if of_length and stale and fault.row_errors:
                # the passes that stored the state have all rows, the one that reads it does not
                stored: Changed = lambda p, i: p.full(t) if i < fault.round else p  # noqa: E731
                if _wrong(player, fault, stored, other, 1):
                    cause, words = fault.cause, f"the pass that reads it has {t} rows"
            kept = fault.cause in ("stale-column", "window-not-rolled-back", "state-lost")
            kept = kept and cause == "other-sequence" and "all" not in words
            lost = NO_OUTPUT in fault.detail and cause in unwritten
            # what is right in passes of one length, too, is cut by other sequences' lengths
            cut = lost and changed is alone and not _wrong(player, fault, full, shape)
            if kept or (lost and not cut):
                cause = fault.cause
            if (cause, fault.cause) == ("stale-column", "state-not-committed"):
                words += f", where {fault.cause} looks the same"  # no pass distinguishes them
            return replace(fault, cause=cause, detail=joined(fault.detail, f"right where {words}"))
    if fault.cause == "other-sequence" and n > 1:  # it is also wrong alone: named by chance
        found = next(iter(_wrong(player, fault, alone, shape, named=True)), fault)
        if found.cause not in VAGUE:
            found = _by_count(player, found)
            return replace(fault, cause=found.cause, detail=found.detail)
    return fault


def _wrong(
    player: Player,
    fault: Fault,
    changed: Changed,
    shape: Shape,
    more: int = 3,
    named: bool = False,
    seeds: int = 2,
) -> list[Fault]:
    """The faults of a check's passes, up to some after the faulty one, with changes; for several
    seeds, as few values may be right by chance (more seeds for a single head or sequence; one for
    prompts, which are slow)."""
    for seed in range(player.seed, player.seed + (1 if player.kernel.chunk else seeds)):
        other = replace(player, shape=shape, seed=seed, named=named)
        if found := other.script(fault.check, fault.round + more, changed, player.seed):
            return found
    return []


def agreed(
    names: Sequence[str], steps: Callable[[str, Collection[str]], Steps]
) -> Iterator[tuple[str, *Step]]:
    """The steps of each check of a kernel; those with differing causes are repeated once if one
    cause explains all: a mistake is tried before solved-for factors, then what most name; steps: of
    a check, given the causes to look for, empty: all."""
    of = list[Fault]()
    for name in names:
        faults = list[Fault]()
        for is_named, faults in steps(name, ()):
            yield name, is_named, faults
        sure = name in SCRIPTS and not {f.cause for f in faults[:1]} & {*VAGUE, "crash"}
        of += [f for f in faults[:1] if sure and not f.note]
    exact = {f.cause for f in of if "times what" not in f.detail}
    causes = Counter(f.cause for f in of).most_common()
    for cause, _ in sorted(causes, key=lambda one: one[0] not in exact) if causes[1:] else ():
        others = [f.check for f in of if f.cause != cause]
        ends = [(name, True, [*steps(name, {cause})][-1][1]) for name in others]
        if all(f.cause == cause for *_, faults in ends for f in faults[:1]):
            yield from ends
            return


def rounds_of(check: str, device: str) -> int:
    return (_ROUNDS if device == "cpu" else _ROUNDS_ON_DEVICE).get(check, 1000)


def checked(
    kernel: Kernel, package: Package, recurrence: Recurrence, name: str, seed: int, device: str,
    sought: Collection[str] = (),
) -> Steps:  # fmt: skip
    """Whether causes are named, and the faults: first as found, if there are any, as naming takes
    many more passes of a wrong kernel."""
    sizes = shapes(kernel, recurrence, device)
    shape = sizes[(CHECKS.index(name) + seed) % len(sizes)]
    if name in ("no-drafts", "rounds"):  # few other checks have steps without drafts
        shape = with_extras(kernel, shape)
    if name == "padding":  # slot -1 of a single layer is in no other
        shape = shape.without("layers")
    least = kernel.d or max(16, kernel.least_d)
    little = replace(sizes[0], n_heads=1, n_groups=1, d_k=least, d_v=least)
    if name == "drift":  # many rounds, so the smallest state
        shape = sizes[0] if recurrence == "conv" else little
    if kernel.chunk and name != "prompts":  # bits: two heads, a whole chunk and a row are enough
        shape, shared = sizes[0], sizes[0].n_heads // sizes[0].n_groups
        shape = replace(shape, n_heads=2, n_groups=2 // shared, n_tokens=kernel.chunk + 1)
    if name == "trees":  # with two rows there is only one tree
        shape = sizes[min(1, len(sizes) - 1)]
        shape = replace(shape, n_tokens=max(4, shape.n_tokens))
    rounds, tried = rounds_of(name, device), set()
    faults: list[Fault] = []
    plays = [(shape, rounds)]
    if name == "prompts":  # they have other code for large heads; a single pass is enough
        both = dict.fromkeys((sizes[1], sizes[1].without("v first")))  # one per layout
        plays = [(sizes[0], rounds), *((one, 1) for one in both)]
    if name == "depths" and recurrence != "conv":  # with many sequences launches may differ
        # heads share keys here without extras, which may have other code
        many = replace(sizes[0], d_k=least, d_v=least, n_tokens=2, n_sequences=_MANY)
        plays.append((many, 2))  # the second reads after all rows, in plain blocks
    if name == "trees" and recurrence == "conv":  # each number of taps has its own code
        plays.append((replace(shape, d_k=4), rounds))
    for one, times in plays:
        faults = faults or check(kernel, package, one, name, seed, device, times, sought=sought)
        tried.add(one)
    if faults:
        yield False, faults
    needed = []
    for extra in faults[0].shape.extras if faults else ():  # those without which it is right
        plain = faults[0].shape.without(extra)
        if more := check(kernel, package, plain, name, seed, device, rounds, sought=sought):
            faults = more
        else:
            needed.append(extra)

    def again(smaller: Shape) -> list[Fault]:
        if recurrence != "conv":
            smaller = replace(smaller, d_k=kernel.d or max(smaller.d_k, kernel.least_d))
        if kernel.square or kernel.d:
            smaller = replace(smaller, d_v=smaller.d_k)
        if smaller in tried:
            return []
        tried.add(smaller)
        return check(kernel, package, smaller, name, seed, device, min(rounds, 20), named=False)

    for fault in faults[:1]:
        with limited(_MOST_SHRINK):
            small = smallest(fault, again)
        # a small shape may be more specific if the cause is vague, and more rows show which are
        # wrong
        other = small.shape if fault.cause in VAGUE else fault.shape
        if fault.cause in _OF_ROWS and not (kernel.ring or kernel.chunk):
            other = replace(other, n_tokens=max(_ROWS, other.n_tokens))
        if other.n_heads == 1 and recurrence != "conv" and not kernel.chunk:
            other = replace(other, n_heads=2, n_groups=2)  # one head has few values of each kind
        # with large gates, or zero q or k, different mistakes look the same
        large = name not in ("subsets", "prompts")
        more = faults
        if other != fault.shape or not large:
            at = kernel, package, other, name, seed, device, min(rounds, 20)
            more = check(*at, large=large, sought=sought)
            vague = *VAGUE, "crash", "padding-written"
            fault = next((f for f in more if f.cause not in vague), fault)
        fault = replace(small, cause=fault.cause, detail=fault.detail)
        # if none, it needs the large inputs of checks without given states
        again_ = kernel, package, fault.shape, seed, device
        fault = placed(Player(*again_, sought=sought, late=not more), fault)
        for extra in needed:
            unsure = fault.cause in VAGUE and NO_OUTPUT not in fault.detail
            sure = unsure or extra in _WORDS_OF_EXTRAS
            cause = OF_EXTRAS[extra] if sure else fault.cause
            words = joined(fault.detail, f"right without {extra}{_WORDS_OF_EXTRAS.get(extra, '')}")
            fault = replace(fault, cause=cause, detail=words)
        faults = [fault]
    if not (faults or package.name or Player.states) and name in SCRIPTS:
        about = "states-not-read", "`state` gave None for all of them"
        faults = [Fault(kernel.name, name, *about, shape, seed, 0, 0, -1, 0.0, note=True)]
    yield True, faults
