"""The comparison of two runs with one drafter: all causes found, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.analysis.acceptance.counts import fisher_less
from engine.audit.recorded_drafts import Counts
from engine.errors import OptionError, UnsupportedModelError
from engine.gguf.binary import never
from engine.observe.drafter_diff.outcome_causes import (
    cell_causes,
    counting_cause,
    file_causes,
    rule_cause,
    sampler_cause,
    width_cause,
    with_limits,
    withheld_cause,
)
from engine.observe.drafter_diff.records import (
    CANDIDATES,
    FEW,
    NEAR_CHOICE,
    ROWS,
    RULE,
    STAGES,
    Cause,
    Missing,
    draft_causes,
    length_causes,
    n_common,
    n_equal,
    prompt_cause,
    same_contexts,
)
from engine.observe.drafter_diff.sides import LONGEST_TEXT, DraftSide, no_drafts, paired, sides_of
from engine.trace.run_ref import RunRef

if TYPE_CHECKING:
    from engine.observe.drafter_diff.stage_values import StageValues
    from engine.observe.rescoring.identity import Identity
    from engine.session import Session

_MOST_PAIRS = 8


@dataclass(frozen=True, slots=True)
class PairDiff:
    """One sequence of each run. counts: accepted and drafted tokens. chance: probability that
    acceptance rates differ this much by chance. n_contexts: contexts where both have a draft,
    n_equal: those with equal drafts as far as both go. causes: in order. missing: what could not be
    checked, and how to record it."""

    seq_a: int
    seq_b: int
    counts_a: Counts
    counts_b: Counts
    chance: float
    n_contexts: int
    n_equal: int
    causes: tuple[Cause, ...]
    missing: tuple[Missing, ...]


@dataclass(frozen=True, slots=True)
class DrafterDiff:
    """The result. has_model: drafts were made again with the model."""

    pairs: tuple[PairDiff, ...]
    has_model: bool

    @property
    def first(self) -> Cause | None:
        """The first cause of all pairs, for drafts preferably one that explains them; one that not
        all pairs have names its sequence."""
        causes = [(cause, pair) for pair in self.pairs for cause in pair.causes]
        first, pair = min(causes, key=_by_order, default=(None, None))
        if first is None or pair is None or len(self.pairs) == 1:
            return first
        alike = {
            (one.stage, one.side)
            for other in self.pairs
            for one in other.causes
            if other is not pair
        }
        seq_id = pair.seq_b if first.side == "B" else pair.seq_a
        where = "first in" if (first.stage, first.side) in alike else "only in"
        about = f"{first.about.rstrip('.')}, {where} sequence {seq_id}."
        return replace(first, about=about)


def _by_order(found: tuple[Cause, PairDiff]) -> tuple[bool, bool, int]:
    cause, _ = found
    return cause.rank > STAGES.index(CANDIDATES), not cause.explains, cause.rank


def lines_of(found: DrafterDiff) -> Iterator[str]:
    """The report, with the first cause in its first line."""
    first = found.first
    yield (
        f"first cause: {first.stage}{_of(first)}. {first.about}"
        if first
        else ("no cause found: drafts, acceptance rule and counts agree where both are recorded")
    )
    for pair in found.pairs:
        yield from _pair_lines(pair)


def _pair_lines(pair: PairDiff) -> Iterator[str]:
    yield (
        f"sequences {pair.seq_a} and {pair.seq_b}: A accepted {_share(pair.counts_a)}, B "
        f"{_share(pair.counts_b)}, p-value of the difference {pair.chance:.2g}"
    )
    yield f"  {pair.n_equal} of {pair.n_contexts} drafts after the same text are equal"
    for number, cause in enumerate(pair.causes, start=1):
        yield f"  {number}. {cause.stage}{_of(cause)}: {cause.about}"
        said = "; ".join(filter(None, (cause.place, cause.size)))
        if said:
            yield f"     {said}"
        if cause.recorded is not None and cause.mended is not None:
            yield (f"     accepted {_share(cause.recorded)}; without it {_share(cause.mended)}")
    for sentence in pair.missing:
        yield f"  missing: {sentence}"


def _of(cause: Cause) -> str:
    return f" of {cause.side}" if cause.side else ""


def _share(counts: Counts) -> str:
    accepted, drafted = counts
    rate = f" ({accepted / drafted:.3f})" if drafted else ""
    return f"{accepted} of {drafted}{rate}"


def drafter_diff(
    a: RunRef,
    b: RunRef,
    session: Session | None = None,
    cancelled: Callable[[], bool] = never,
    handed: Sequence[np.ndarray | None] = (None, None),
    values: Sequence[StageValues | None] = (None, None),
) -> DrafterDiff:
    """Compare two runs. session: the target with the drafter, to make drafts again. handed: per run
    the rows that its target gave the drafter, if known (LlamaSource); values: what its drafters
    computed, if watched. Raises OptionError for a run without rounds, and what the models' passes
    raise."""
    known: tuple[Identity, ...] = ()
    if session is not None:
        from engine.observe.rescoring.identity import identify
        from engine.observe.rescoring.rescore import check_same

        known = tuple(identify(session, run.facts) for run in (a, b))
        for one in known:
            if not one.is_requantised:
                check_same(one)
    of_model = session.tokenizer.piece if session else lambda i: b.store.pieces.get(i, b"")
    for name, run in zip("AB" if session else "A", (a, b), strict=False):
        _check_vocabulary(name, run, "the given model" if session else "B", of_model)
    sides = sides_of("A", a, session), sides_of("B", b, session)
    names = [side[0].drafters for side in sides]
    if any(names) and not all(names):  # not in every record
        for side in sides:
            side[:] = [replace(one, drafters=names[0] or names[1]) for one in side]
    if all(names) and not {*names[0]} & {*names[1]}:
        raise OptionError(
            f"A and B have different drafters: {', '.join(names[0])} and {', '.join(names[1])}.",
            "Record both with the same one; `draftscope acceptance A B` compares two.",
        )
    pairs = paired(sides[0][:_MOST_PAIRS], sides[1])
    watched: list[Cause | None] = [None, None]
    if session is not None and pairs and any(values):
        from engine.observe.drafter_diff.stage_values import values_cause

        watched = [
            values_cause(session, side, its) if its is not None else None
            for side, its in zip(pairs[0], values, strict=True)
        ]
    given = [*zip(handed, known, watched, strict=bool(known))]
    found = [_pair(*pair, sides, session, cancelled, given) for pair in pairs]
    return DrafterDiff(tuple(found), session is not None)


def _pair(
    a: DraftSide,
    b: DraftSide,
    sides: Sequence[Sequence[DraftSide]],
    session: Session | None,
    cancelled: Callable[[], bool],
    given: Sequence[tuple[np.ndarray | None, Identity, Cause | None]],
) -> PairDiff:
    """given: with a session, per side the rows handed over, whether its model is the session's, and
    the watched values."""
    causes: list[Cause] = []
    contexts = same_contexts(a, b)
    if (prompt := prompt_cause(a, b)) is not None:
        causes.append(prompt)
    causes += filter(None, [sampler_cause(a, b)])
    stated = {
        side.name: Cause(ROWS, side.name, f"{one.reason} {_REQUANTISED}")
        for side, (_, one, _) in zip((a, b), given, strict=False)
        if one.is_requantised
    }
    if prompt is None:
        files = [part.path for part in session.files.parts] if session else []
        for cause in file_causes(a, b, contexts, files):
            stated.setdefault(cause.side, cause)
    judged, n_else, stricter = list[str](), list[tuple[int, int]](), dict[str, str]()
    missing = [Missing(*no_drafts(side.name)) for side in (a, b) if not side.drafts]
    is_drafted = not missing
    if session is not None and is_drafted:
        # drafts after another text differ, right or wrong
        missing += [] if prompt is None else [_AFTER_OTHERS]
        from engine.observe.rescoring.identity import SAME, is_observed

        for side, all_of, its in zip((a, b), sides, given, strict=True):
            rows, identity, seen_first = its
            is_known = side.has_ids and side.prompt is not None and side.n_prompt < LONGEST_TEXT
            if side.looks_up or not is_known or side.name in stated:
                continue
            if prompt is not None and (side.draws or identity.verdict == SAME):
                continue
            if side.draws:
                missing.append(_DRAWN._replace(fact=_DRAWN.fact.format(side.name)))
                continue
            from engine.observe.drafter_diff.redraft import Redrafter

            others = [one for one in all_of if one is not side and one.prompt is not None]
            redrafter = Redrafter(session, side, cancelled, others)
            other = None if identity.verdict == SAME else redrafter.choices.other_model
            if other is not None and not is_observed(side.run.facts):
                raise UnsupportedModelError(*other)
            if other is not None:
                missing.append(other)
            if other is not None or prompt is not None:
                continue
            judged.append(side.name)
            found = redrafter.mended(seen_first) if seen_first else redrafter.cause()
            seen = None if rows is None else redrafter.rows_cause(rows)
            if seen is not None and found is not None and found.stage == ROWS:
                found, seen = replace(found, about=seen.about, place=seen.place), None
            if found is None:
                found = redrafter.ends_cause()
            choices = redrafter.choices
            stricter[side.name] = choices.stricter
            special = choices.greedy_rule()
            if special is None and (drawn := choices.other_draws()) is not None:
                special = choices.threshold_rule() or drawn
            rules = [special] if special else [choices.lossy_rule(), choices.stale_choice()]
            rules += [None if any(rules) else choices.threshold_rule()]
            causes += filter(None, (seen, found, *rules))
            n_else.append(choices.n_else)
    near = [one for one in causes if one.about == NEAR_CHOICE]
    have_some = len(n_else) == len((a, b)) and all(n for n, _ in n_else)
    if near and have_some and _chance(*n_else) > _UNLIKELY:  # another setting would have some
        missing.append(_CLOSE)
        causes = [one for one in causes if one not in near]
    for side, partner, all_of in ((a, b, sides[0]), (b, a, sides[1])) if is_drafted else ():
        if side.looks_up and side.prompt is not None:
            from engine.observe.drafter_diff.looked_up import LookedUp

            options = side.run.facts.options or partner.run.facts.options
            if options is None:
                missing.append(_SETTINGS._replace(fact=_SETTINGS.fact.format(side.name)))
            elif not options.spec.tree and (session or side.drafters != ["ngram-cache"]):
                judged.append(side.name)
                others = [one for one in all_of if one is not side]
                causes += filter(None, [LookedUp(side, options, cancelled, others).cause()])
    causes += stated.values()
    if prompt is None and (causes or n_common(a, b) < min(len(a.text), len(b.text))):
        causes += cell_causes(a, b)  # which may have no effect
    root = width_cause(a, b, contexts)
    if not is_drafted:
        pass
    elif len(judged) < 2 and not (stated or a.draws or b.draws):  # sampled ones differ by chance
        by_ids = list(draft_causes(a, b, contexts)) if root is None else []
        causes += [one for one in by_ids if not any(one.stage == known.stage for known in causes)]
    elif not a.looks_up and root is None:  # a lookup's draft lengths depend on what it finds
        equal = [pair for pair in contexts if n_equal(*pair) is None and pair[0].tokens]
        causes += length_causes(a, b, equal)
    causes = with_limits(a, b, causes) if prompt is None else causes
    causes += filter(None, [rule_cause(one, stricter.get(one.name, "")) for one in (a, b)])
    if not any(one.stage == RULE for one in causes):
        causes += filter(None, [withheld_cause(a, b, contexts)])
    causes += filter(None, [root, counting_cause(a, b), counting_cause(b, a)])
    if is_drafted:
        missing += _missing(a, b, contexts, session)
    if not (causes or contexts or len(judged) == 2):
        fact = missing[0]
        raise OptionError(f"A and B cannot be compared: {fact.fact}", fact.remedy)
    counts = a.counts, b.counts
    shares = [(min(n, drafted), drafted) for n, drafted in counts]
    chance, same = _chance(*shares), sum(n_equal(*pair) is None for pair in contexts)
    ordered = tuple(sorted(causes, key=lambda cause: cause.rank))
    head = a.seq_id, b.seq_id, *counts
    return PairDiff(*head, chance, len(contexts), same, ordered, tuple(missing))


def _check_vocabulary(name: str, run: RunRef, other: str, piece_of: Callable[[int], bytes]) -> None:
    """Raises OptionError if most tokens of a run have another text in the other vocabulary. A few
    may, such as those that only one engine renders."""
    both = [(i, own, piece_of(i)) for i, own in run.store.pieces.items() if own and piece_of(i)]
    differ = [one for one in both if one[1] != one[2]]
    if len(differ) > max(FEW, len(both) / 2):
        token, mine, theirs = differ[0]
        raise OptionError(
            f"{name} and {other} have different vocabularies: token {token} is {mine!r} in "
            f"{name} and {theirs!r} in {other}.",
            "Record both with the same model, and name its file.",
        )


def _chance(one: Counts, other: Counts) -> float:
    """Probability that acceptance rates differ this much by chance."""
    return min(1.0, 2 * min(fisher_less(*one, *other), fisher_less(*other, *one)))


_UNLIKELY = 0.05
_REQUANTISED = "The same number of parameters in another size: another quantisation."
_SETTINGS = Missing(
    "The lookup settings of {} are not known, so its drafts cannot be computed again.",
    "Compare it with a run of this engine with the same settings (`run` with its options).",
)
_CLOSE = Missing(
    "In A and B, the target's own tokens are often not its best choice: its highest logits are "
    "closer together than the rounding errors of the two.",
    "Compare runs in the same compute mode, or use a model with trained weights.",
)
_AFTER_OTHERS = Missing(
    "The prompts differ, so drafts were not computed again.",
    "Send both the same prompt to compare them.",
)
_DRAWN = Missing(
    "The drafter of {} samples its tokens, so they cannot be reproduced.",
    "Let it draft greedily: --spec-draft-sampling greedy, or temperature 0.",
)


_IDS = (
    "Record it with /completion (`draftscope observe URL -p TEXT --trace DIR`), or with a log of "
    "-lv 5."
)
_TOLD = "A llama-server log of -lv 5 with LLAMA_TRACE=1"


def _missing(
    a: DraftSide, b: DraftSide, contexts: Sequence[object], session: Session | None
) -> Iterator[Missing]:
    """Each missing fact that would have shown more."""
    for side in (a, b):
        source = side.run.facts.source
        remedy = f"{_TOLD} has them: add it with --log (observe or import)."
        if source and source.engine != "llama-server":
            remedy = f"{source.engine} does not report them; use a{_TOLD[1:]}."
        name = side.name
        lacks = any(len(draft.tokens) < draft.n_drafted for draft in side.drafts)
        if not side.ids:
            yield Missing(f"{name} has no token ids, so drafts cannot be compared.", _IDS)
        elif not side.has_ids:
            yield Missing(f"{name} has no ids of drafted tokens.", remedy)
        elif lacks and not side.draws:
            fact = f"{name} has no ids of rejected tokens, so only accepted ones are compared."
            yield Missing(fact, remedy)
        if side.prompt is None:
            yield Missing(
                f"The prompt's ids are not known in {name}.",
                "Give the model (--model), or send the prompt as ids.",
            )
    if not contexts:
        fact = "A and B never draft after the same text."
        yield Missing(fact, "Send both the same prompt at temperature 0.")
    elif len(contexts) < 2 * FEW:
        fact = f"Only {len(contexts)} drafts after the same text, too few to show a cause."
        yield Missing(fact, "Record longer answers (-n 200), at temperature 0.")
    if session is None:
        fact = "Without the model, drafts cannot be computed again."
        yield Missing(fact, "Give it with --model, and the drafter with -md.")
