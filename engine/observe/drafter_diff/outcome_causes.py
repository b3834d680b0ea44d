"""Causes in the outcomes of drafts, by the records of two runs alone: the rule, the sampler and the
counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from operator import eq, ne
from pathlib import Path
from typing import Any

from engine.audit.recorded_drafts import Counts, RecordedDraft, added, sums
from engine.gguf.file import GgufFile
from engine.model.limits import real
from engine.observe.drafter_diff.records import (
    BLOCK,
    CANDIDATES,
    COUNTING,
    FEW,
    POSITIONS,
    RULE,
    STATE,
    Cause,
    Pairs,
    counted,
    miscounting,
    n_common,
    place_of,
)
from engine.observe.drafter_diff.sides import DraftSide
from engine.observe.drafter_diff.wrong_drafts import whens
from engine.observe.rescoring.request_sampler import SAMPLING, is_set_alike

_SHARE = 0.05
_SHOWS_RULE = 5
"""Rounds that show a rule if ids of rejected tokens do not."""
_FLOAT_CELLS = "f32", "f16", "bf16"
_START = "the start of the server, by its log"
_OF_FILES = {
    "freq_base": (POSITIONS, "has the RoPE base", " (--rope-freq-base)"),
    "freq_scale": (POSITIONS, "has the RoPE scale", " (--rope-freq-scale, --rope-scaling)"),
    "file_size": (BLOCK, "has weights of", ", or another quantisation"),
}
"""A log's values about models: the stage that is wrong if a file has another value, and words."""
_SPREAD = ("top_k", "top_p", "min_p", "top_n_sigma", "dynatemp_range", "samplers", "seed")
"""Settings that never exclude the best token."""


def _confirmed(side: DraftSide) -> list[tuple[RecordedDraft, int]]:
    """Drafts except the last, with the number of tokens that the text confirms, if known: never
    more than the next round has advanced."""
    judged = []
    for draft in side.drafts[:-1]:
        n, most = side.n_confirmed(draft), side.advance(draft)
        if n is None and most is not None and draft.n_accepted > most:
            n = most
        judged += [(draft, n)] if n is not None else []
    return judged


def rule_cause(side: DraftSide, stricter: str = "") -> Cause | None:
    """Whether fewer drafted tokens were accepted than the text confirms. stricter: the only ones
    accepted, in words, if known."""
    known = _confirmed(side)
    short = [(draft, n) for draft, n in known if draft.n_accepted < n != side.advance(draft)]
    if len(short) < FEW or len(short) < _SHARE * len(known):
        return None
    if side.run.facts.synthetic or side.run.facts.draft_accept:
        about = "Drafted tokens are accepted synthetically or by a script, not by the target."
    elif side.draws:  # residual probabilities exclude tokens with p < q
        about = (
            "Replacements are sampled from p, not from the residual p - q: some were just rejected."
        )
    else:
        rounds = [((n, d.n_drafted), (d.n_accepted, d.n_drafted)) for d, n in known]
        way = _way_of(rounds, as_counted=True)
        how = f", which gives {way}" if way else f", which accepts only those {stricter}"
        how *= bool(way or stricter)
        about = "Drafted tokens are rejected although the target chose the same ones: a stricter "
        about += f"rule{how}."
    size, recorded = f"{len(short)} of {len(known)} rounds", sums(draft for draft, _ in known)
    mended = sum(n for _, n in known), recorded[1]
    return Cause(RULE, side.name, about, place_of(short[0][0]), size, recorded, mended)


def sampler_cause(a: DraftSide, b: DraftSide) -> Cause | None:
    """Whether the two were sampled differently, and their texts differ."""
    settings, at = (a.setting, b.setting), n_common(a, b)
    temps = [float(one.get("temperature", 0.0) or 0.0) for one in settings]
    parts = at < min(len(a.text), len(b.text))
    # what keeps the best token does not show in a greedy text
    idle = {*_SPREAD} if parts else {*SAMPLING}
    if max(temps) > 0:
        # one seed gives two texts in two engines
        engines = {one.engine if (one := side.run.facts.source) else "" for side in (a, b)}
        idle = set() if parts and len(engines) == 1 else {"seed"}
    off = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if not any(one.get(name, value) != value for one in settings for name, value in off.items()):
        idle.add("repeat_last_n")
    names = [
        name
        for name in SAMPLING
        if name not in idle and name in settings[0] and name in settings[1]
        if not is_set_alike(name, settings[0][name], settings[1][name])
    ]
    # at temperature 0 all lossless rules accept the best token
    lossless = all(side.rule is not None and side.rule.is_lossless for side in (a, b))
    counts = not (all(settings) and max(temps) <= 0 and lossless)
    rules = [side.rule.text if side.rule and counts else "" for side in (a, b)]
    shown = [(n, *(_short(one[n]) for one in settings)) for n in names]
    said = [f"{name} {mine} in A, {theirs} in B" for name, mine, theirs in shown]
    if all(rules) and rules[0] != rules[1]:
        said.append(f"rule {rules[0]} in A, {rules[1]} in B")
    if not said:
        return None
    place = f"the texts differ from position {at} on" if parts else ""
    return Cause(RULE, "", f"The sampler or the rule differs: {'; '.join(said)}.", place)


def _short(value: Any) -> str:
    is_none = value is None or value in ("", ())
    return f"{value:.6g}" if isinstance(value, float) else f"{'none' if is_none else value!s:.60}"


def _logged(value: Any) -> Any:
    """A setting as a log rounds it, to two decimals."""
    return round(value, 2) if isinstance(value, float) else value


def file_causes(
    a: DraftSide, b: DraftSide, pairs: Sequence[tuple[RecordedDraft, ...]], files: Sequence[Path]
) -> Iterator[Cause]:
    """For a server whose log reports them: ropes or weights that differ from the model files at
    hand, or from its own, if drafts differ. pairs: drafts after the same text. files: those at
    hand."""
    n, starts = min(len(a.starts), len(b.starts)), (a.starts, b.starts)
    alike = all(one.tokens == two.tokens for one, two in pairs) and starts[0][:n] == starts[1][:n]
    here = [figures for path in files if (figures := _of_file(path))]
    for (side, other), name in product(((a, b), (b, a)), _OF_FILES):
        stage, what, how = _OF_FILES[name]
        said, theirs = {*_launch(side).get(name, ())}, {*_launch(other).get(name, ())}
        own = {one[name] for one in here} or {*_launch(side).get(f"{name}_train", said)}
        others, lacks = sorted(said - own), sorted(own - said)
        if said == theirs or (alike and pairs) or not others:
            continue
        if lacks or stage == POSITIONS:  # a file at hand may not be needed
            about = (
                f"One of its models {what} {others[0]}, the given files "
                f"{' or '.join(lacks or own)}: another file{how}."
            )
            yield Cause(stage, side.name, about, _START)


def _of_file(path: Path) -> dict[str, str]:
    """A log's values about one model file, by the names of _OF_FILES; empty if there are
    several."""
    with GgufFile.open(path, part_alone=True) as file:
        if file.int_("split.count", 1) > 1:
            return {}
        size = sum(tensor.n_bytes for tensor in file.tensors.values())
        base, factor = (
            real(file, f".rope.{name}", default)
            for name, default in (("freq_base", 10000.0), ("scaling.factor", 1.0))
        )
    n, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return {
        "freq_base": f"{base:.1f}",
        "freq_scale": f"{1 / factor:g}",
        "file_size": f"{n:.2f} {unit}",
    }


def cell_causes(a: DraftSide, b: DraftSide) -> Iterator[Cause]:
    """For a server whose log reports them: key and value types that round more than the other's."""
    for side, other in ((a, b), (b, a)):
        mine, theirs = _launch(side), _launch(other)
        cells, other_cells = (
            {one for name in "kv" for one in said.get(name, ())} for said in (mine, theirs)
        )
        rounded = sorted(cells - other_cells - {*_FLOAT_CELLS})
        if rounded:
            about = (
                f"Its KV cells hold keys and values as {', '.join(rounded)}, the other's as "
                f"{', '.join(sorted(other_cells)) or 'f32'} (-ctk, -ctv, -ctkd, -ctvd)."
            )
            yield Cause(STATE, side.name, about, _START)


def with_limits(a: DraftSide, b: DraftSide, causes: Sequence[Cause]) -> list[Cause]:
    """Causes together with differing draft settings, if both are known: merged with the cause that
    drafts show, or as one more."""
    limits, found = (a.limits, b.limits), [*causes]
    both = [name for name in limits[0] if name in limits[1]]
    differ = [name for name in both if _logged(limits[0][name]) != _logged(limits[1][name])]
    said = "; ".join(
        f"{name} {_short(limits[0][name])} in A, {_short(limits[1][name])} in B" for name in differ
    )
    shown = [i for i, one in enumerate(found) if one.stage == CANDIDATES]
    for i in shown if said else ():
        if not found[i].side:
            said_else = {*both} - ({*differ} if len(differ) == 1 else set())
            is_other = any(f"another {name}" in found[i].about for name in said_else)
            about = "Drafts end differently." if is_other else found[i].about
            found[i] = replace(found[i], about=f"{about} Settings: {said}.")
    n_same = n_common(a, b)
    at = sorted(place for place in {*a.starts} & {*b.starts} if place < n_same)
    known = [{one.pos0: (one.tokens, one.n_drafted) for one in side.drafts} for side in (a, b)]
    wrong = [place for place in at if known[0].get(place) != known[1].get(place)]
    alone = {place for place in {*a.starts} ^ {*b.starts} if place < n_same}
    n_apart = (len(wrong) + len(alone)) * bool(wrong)  # one difference of rounds lasts long
    if said and not shown and (n_apart >= FEW or not all(known)):
        about = f"Drafts are made with other settings: {said}."
        size = f"{len(wrong)} of {len(at)} rounds after the same text have other drafts"
        where = (f"position {wrong[0]}", size) if wrong else ()
        found.append(Cause(CANDIDATES, "", about, *where))
    return found


def _launch(side: DraftSide) -> Mapping[str, Sequence[str]]:
    server = side.run.facts.server
    return server.launch if server is not None else {}


def counting_cause(side: DraftSide, other: DraftSide) -> Cause | None:
    """Whether accepted tokens are counted that the text does not confirm, or counters disagree with
    the rounds, or with the other's for the same text."""
    judged = _confirmed(side)
    wrong = [
        (draft, n)
        for draft, n in judged
        if draft.n_accepted > n or draft.n_accepted < n == side.advance(draft)
    ]
    rounds = [(_true(side, draft), (draft.n_accepted, draft.n_drafted)) for draft in side.drafts]
    counts, true = side.counts, added(true for true, _ in rounds)
    again = [two for one, two in pairwise(side.drafts) if one.pos0 == two.pos0]
    if len(again) >= FEW:
        about = "replays of accepted tokens after a restore as separate rounds"
        true = sums(one for one in side.drafts if not any(one is two for two in again))
        size = f"{len(again)} of {len(rounds)} rounds"
        return counted(side, about, place_of(again[0]), size, counts, true)
    if beyond := miscounting(side):
        more = all(one.n_drafted > len(one.tokens) for one in beyond)
        about = f"{'more' if more else 'fewer'} drafted tokens than its rounds have"
        about, size = _way_of(rounds) or about, f"{len(beyond)} of {len(rounds)} rounds"
        return counted(side, about, place_of(beyond[0]), size, counts, true)
    if len(wrong) >= FEW and len(wrong) >= _SHARE * len(judged):
        counts = sums(draft for draft, _ in judged)
        true = sum(min(n, draft.n_drafted) for draft, n in judged), counts[1]
        about, size = _miscounted(rounds), f"{len(wrong)} of {len(judged)} rounds"
        return counted(side, about, place_of(wrong[0][0]), size, counts, true)
    n_apart = sum(true != own for true, own in rounds) * (not side.knows_all)
    if n_apart >= FEW and (way := _way_of(rounds)):  # the text advances by other numbers of tokens
        size = f"{n_apart} of {len(rounds)} rounds"
        return counted(side, way, place_of(side.drafts[0]), size, counts, true)
    return _by_counters(side, other)


def _true(side: DraftSide, draft: RecordedDraft) -> Counts:
    """Accepted and drafted tokens of a round by the text and ids, else by its counts."""
    accepted = side.advance(draft)
    n = len(draft.tokens) if side.knows_all else max(draft.n_drafted, len(draft.tokens))
    return min(draft.n_accepted, n) if accepted is None else accepted, n


def _numbers(counts: Counts, its: str) -> dict[str, int]:
    """Possible values of a round's number with these counts. its: the token that may be counted as
    another accepted, or drafted one."""
    a, d = counts
    cut, whole = int(a < d), int(a == d)
    of = {"the accepted ones": a, "the drafted ones": d, "the rejected ones": d - a}
    more = {
        f"{its} of a round": 1,
        f"{its} after a rejection": cut,
        f"{its} after a full acceptance": whole,
        "one where none was accepted": int(a == 0),
        "replayed tokens after a rejection again": a * cut,
        "replayed tokens after a rejection and the target's own again": (a + 1) * cut,
        "those of fully accepted drafts again": a * whole,
        "the accepted ones again": a,
        "the drafted ones again": d,
        "the rejected ones": d - a,
    }
    less = {
        "one": 1,
        "one after a rejection": cut,
        "the last one of fully accepted drafts": whole,
        "those before a rejection": a * cut,
        "those of fully accepted drafts": a * whole,
        "those of rounds in which none was accepted": d * (a == 0),
        "the accepted ones": a,
    }
    found = of | {"none": 0, "drafts, not their tokens": min(d, 1)}
    found["only the accepted ones and the first rejected one"] = min(a + 1, d)
    found |= {f"at most {n} accepted token{'s' * (n > 1)} of a round": min(a, n) for n in _FEW}
    for which, n in of.items():
        found |= {f"{which} and {its}": n + k for its, k in more.items()}
        found |= {f"{which} but {its}": max(0, n - k) for its, k in less.items()}
    return found


_FEW, _REQUEST = range(1, 5), "totals of the request"
_OF_ROUNDS: dict[str, Callable[[list[int], list[int]], list[int]]] = {
    "those of the previous round": lambda right, own: [*own[:1], *right[:-1]],
    "those of the next round": lambda right, own: [*right[1:], *own[-1:]],
    "the sums of all rounds so far": lambda right, _: [*accumulate(right)],
}
_MOSTLY, _BOTH = 0.9, {"accepted": "the target's own token", "drafted": "the newest token"}


def _agree(expected: Sequence[Any], own: Sequence[Any], share: float = _MOSTLY) -> bool:
    return sum(map(eq, expected, own)) >= share * len(own)


def _way_of(rounds: Sequence[tuple[Counts, Counts]], *, as_counted: bool = False) -> str:
    """How rounds, as they were and as counted, are miscounted, everywhere or after some alone;
    empty if nothing fits. as_counted: the counts are the outcomes."""
    wrong = [i for i, (one, other) in enumerate(rounds) if one != other]
    if not wrong:
        return ""
    true, own = zip(*rounds, strict=True)
    drafts = [
        RecordedDraft(i, i, [], [], n, 0, 0.0, n_drafted)
        for i, (n, n_drafted) in enumerate(own if as_counted else true)
    ]
    ways = list[dict[str, list[int]]]()
    for i, (its, more) in enumerate(_BOTH.items()):
        tables = [_numbers(one, more) for one in true]
        right, counted = ([one[i] for one in some] for some in (true, own))
        found = {f"the {its} ones": right} if right == counted else {}
        if right != counted:
            found |= {which: [one[which] for one in tables] for which in tables[0]}
            found |= {which: change(right, counted) for which, change in _OF_ROUNDS.items()}
        ways.append(
            {
                which: values
                for which, values in found.items()
                if _agree([values[k] for k in wrong], [counted[k] for k in wrong])
            }
        )
    for words, places in [("", {*range(len(true))}), *whens(drafts, {*wrong})]:
        fits, share = dict[str, int](), 1 if words else _MOSTLY
        for (accepted, xs), (drafted, ys) in product(*(one.items() for one in ways)):
            both = [*zip(xs, ys, strict=True)]
            expected = [both[i] if i in places else one for i, one in enumerate(true)]
            if _agree(expected, own, share) and sum(map(ne, expected, true)) >= FEW:
                said = f"as accepted tokens {accepted}" * (accepted != "the accepted ones")
                more = f"as drafted tokens {drafted}" * (drafted != "the drafted ones")
                fits[" and ".join(filter(None, (said, more)))] = sum(map(eq, expected, own))
        if most := max(fits.values(), default=0):
            return ", or ".join([one for one, n in fits.items() if n == most][:3]) + words
    return ""


def _way_of_sums(rounds: Sequence[Counts], theirs: Counts, tie: int) -> str:
    """The same for sums of rounds, which differ by a few tokens at most; the first two
    possibilities."""
    said = list[str]()
    for (its, more), own, total in zip(_BOTH.items(), added(rounds), theirs, strict=True):
        tables = [_numbers(one, more) for one in rounds]
        sums_ = {which: sum(one[which] for one in tables) for which in tables[0]}
        fits = [which for which, n in sums_.items() if abs(n - total) <= tie]
        if own != total and not fits:
            return ""
        said += [f"as {its} tokens {' or '.join(fits[:2])}"] * (own != total)
    return " and ".join(said)


def _miscounted(rounds: Sequence[tuple[Counts, Counts]]) -> str:
    """The miscounting of rounds whose accepted tokens are not those of their drafts."""
    about = "tokens that it did not draft as accepted drafted tokens"
    if all(own[0] <= true[0] for true, own in rounds):
        about = "fewer accepted tokens than its rounds advance by"
    return _way_of(rounds) or about


def _by_counters(side: DraftSide, other: DraftSide) -> Cause | None:
    for one in side.run.facts.observed_findings or ():
        if one.rule == "counters-contradict" and one.seq_id == side.seq_id:
            return Cause(COUNTING, side.name, one.message, "", one.evidence)
    names = "draft_n_accepted", "draft_n", "num_spec_steps"
    stated = [side.counters.get(name) for name in names[: 2 + (not side.drafts)]]
    if not all(isinstance(one, int | float) and one >= 0 for one in stated):
        return None
    theirs, steps = (int(stated[0] or 0), int(stated[1] or 0)), int(stated[-1] or 0)
    if not side.drafts:
        return _by_length(side, theirs, steps) or _by_rounds(side, other, theirs, steps)
    accepted, drafted = side.counts
    beyond = theirs[0] - accepted, theirs[1] - drafted
    if max(map(abs, beyond)) < FEW or max(map(abs, beyond)) < 0.02 * max(drafted, 1):
        return None
    rounds = [(draft.n_accepted, draft.n_drafted) for draft in side.drafts]
    what = _way_of_sums(rounds, theirs, 1) or "other tokens than its rounds have"
    about, place = f"Its counters count {what}.", "totals at the end of the request"
    size = f"{theirs[0]} of {theirs[1]} by its counters, {accepted} of {drafted} by its rounds"
    return Cause(COUNTING, side.name, about, place, size, theirs, side.counts)


def _by_length(side: DraftSide, theirs: Counts, steps: int) -> Cause | None:
    """Whether sums have more accepted tokens than possible, by the length of the answer: a step
    emits one more than it accepts, except the last one, which a limit may cut."""
    accepted, drafted = theirs
    most = len(side.ids) - 1 - steps + (-(-drafted // steps) if steps else 0)
    if accepted < most + FEW or not steps:
        return None
    own = "the target's own token of a round as an accepted one" * (accepted <= most + steps)
    about = own or "more accepted tokens than its answer can contain"
    size = f"{accepted} accepted in {steps} rounds, {len(side.ids)} tokens in the answer"
    mended = min(most, accepted - steps * bool(own)), drafted
    return counted(side, about, _REQUEST, size, theirs, mended)


def _by_rounds(side: DraftSide, other: DraftSide, theirs: Counts, steps: int) -> Cause | None:
    """Whether sums are those of the other's rounds of the same text, counted in another way."""
    accepted, drafted = theirs
    rounds = [(draft.n_accepted, draft.n_drafted) for draft in other.drafts]
    longest = max(n for _, n in rounds)  # SGLang's assumption for each
    n_rounds = sum(start >= other.n_prompt for start in other.starts)
    if side.text == other.text and (steps, accepted) == (n_rounds + 1, other.counts[0]):
        about = "one round more than its answer has, as if the prompt's pass were counted"
        size = f"{steps} rounds by its totals, {other.name} has {n_rounds} for the same text"
        mended = accepted, min(drafted, n_rounds * longest)
        return counted(side, about, _REQUEST, size, theirs, mended)
    if steps != len(rounds) or side.text != other.text or theirs == other.counts:
        return None
    for lengths in ([n for _, n in rounds], [longest] * len(rounds)):
        counts = [*zip((n for n, _ in rounds), lengths, strict=True)]
        if added(counts) == theirs:
            return None
        if way := _way_of_sums(counts, theirs, 0):
            size = f"{accepted} of {drafted}, {other.name} {other.counts[0]} of {sum(lengths)}"
            return counted(side, way, _REQUEST, size, theirs, added(counts))
    return None


def withheld_cause(a: DraftSide, b: DraftSide, pairs: Pairs) -> Cause | None:
    """Whether one that does not report its rejected tokens continues as the other drafts, but
    accepts less of it; never more."""
    for side, which in ((a, 0), (b, 1)):
        known = [
            (pair[which], n)
            for pair in pairs
            if (n := side.n_confirmed(pair[1 - which])) is not None
            and side.advance(pair[which]) in (None, pair[which].n_accepted)
            and len(pair[which].tokens) <= pair[which].n_accepted
        ]
        short = [(own, n) for own, n in known if own.n_accepted < min(n, own.n_drafted)]
        more = sum(own.n_accepted > n for own, n in known)
        if more or len(short) < _SHOWS_RULE or len(short) < 2 * _SHARE * len(known):
            continue
        other = "BA"[which]
        about = (
            f"It accepts fewer tokens than {other} drafts right at the same places: a stricter "
            "rule, or other drafts; ids of rejected tokens would show which."
        )
        recorded, n_drafted = sums(own for own, _ in known), sum(own.n_drafted for own, _ in known)
        mended = sum(max(own.n_accepted, min(n, own.n_drafted)) for own, n in known), n_drafted
        size = f"{len(short)} of {len(known)} rounds after the same text"
        return Cause(RULE, side.name, about, place_of(short[0][0]), size, recorded, mended, False)
    return None


def width_cause(a: DraftSide, b: DraftSide, pairs: Pairs) -> Cause | None:
    """Whether one counts more drafted tokens than the other has at the same contexts: the draft's
    root, too, so that no draft is accepted whole, or for lookups as many as there is room for in
    every round."""
    for side, which in ((a, 0), (b, 1)):
        both = [(pair[which], pair[1 - which]) for pair in pairs if not side.knows_all]
        whole = [x for x in both if x[1].n_accepted == x[1].n_drafted == x[0].n_accepted]
        fewer = [(own, one) for own, one in both if one.n_drafted < own.n_drafted]
        has_whole = any(draft.n_accepted >= draft.n_drafted for draft in side.drafts)
        is_steady = len({own.n_drafted for own in side.drafts}) == 1
        can_tell = side.looks_up and side.has_lengths and not side.has_rejected
        if {own.n_drafted - one.n_drafted for own, one in whole} == {1} and not has_whole:
            about, shown = "the newest token of a round, the draft's root, as a drafted one", whole
            counts = side.counts, (side.counts[0], side.counts[1] - len(side.drafts))
            size = f"{len(side.drafts)} rounds, {len(whole)} of which the other accepted fully"
        elif can_tell and is_steady:
            about, shown = ("as drafted the limit of a round, not the tokens found", fewer)
            counts = sums(own for own, _ in both), sums(one for _, one in both)
            size = f"the same in each round, but {len(fewer)} of {len(both)} drafts are shorter"
        else:
            continue
        if len(shown) >= _SHOWS_RULE:
            return counted(side, about, place_of(shown[0][0]), size, *counts)
    return None
