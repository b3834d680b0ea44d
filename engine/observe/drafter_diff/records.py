"""Causes in the records of two runs alone: prompts, settings, drafts at the same contexts, counts.
No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import NamedTuple
from unicodedata import normalize

from engine.audit.recorded_drafts import OUTCOMES, Counts, RecordedDraft, outcomes, sums
from engine.draft.spec import OUT_OF_STEP
from engine.observe.drafter_diff.sides import DraftSide
from engine.trace.prompt_reuse import n_common as n_alike

(TEXT, TOKENS, SPECIAL, POSITIONS, ROWS, BLOCK, STATE, CANDIDATES, RULE, COUNTING, UNEXPLAINED) = (
    STAGES
) = (
    "text",
    "tokens",
    "special tokens",
    "positions",
    "target rows",
    "block",
    "drafter state",
    "candidates",
    "acceptance rule",
    "counting",
    "unexplained",
)
"""Stages at which drafts or their acceptance may differ, in causal order."""

NEAR_CHOICE = (
    "The target's own tokens are often not its best choice, but another one of its best: its "
    "sampler has other settings than recorded."
)
FEW = 3
"""Least number of drafts, or rounds, that must show a cause."""
_SHARE = 0.05
_SURE = 0.99
_SHOWS_LENGTH = 8
"""Drafts, most of which have the maximal length, that show n_max."""
_OTHER_N_MAX = "The longest draft of A has {} tokens, of B {}: another n_max."
_SPECIAL = re.compile(rb"<\|[^<>]{1,64}\|?>|</?s>|<(?:bos|eos|unk|pad|mask|/?think|\w*_of_\w+)>|")
_SHOWN = 32

Drafts = Sequence[RecordedDraft]
Pairs = Sequence[tuple[RecordedDraft, RecordedDraft]]
"""Drafts of two sides after the same text."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why drafts or their acceptance differ.

    stage: one of STAGES. side: "A", "B", or "" if it is unknown which one is right. about: a
    sentence. place: its first occurrence. size: how often. recorded, mended: accepted and drafted
    tokens over the same contexts, with the cause and without; None if that cannot be replayed.
    explains: whether it was observed, or gives the recorded drafts.
    """

    stage: str
    side: str
    about: str
    place: str = ""
    size: str = ""
    recorded: Counts | None = None
    mended: Counts | None = None
    explains: bool = True

    @property
    def rank(self) -> int:
        """Index of its stage in causal order."""
        return STAGES.index(self.stage)


def place_of(draft: RecordedDraft) -> str:
    """A draft in messages."""
    return f"round {draft.round} at position {draft.pos0}"


def counted(
    side: DraftSide, about: str, place: str, size: str, recorded: Counts, mended: Counts
) -> Cause:
    """A cause in the counts of a side."""
    return Cause(COUNTING, side.name, f"It counts {about}.", place, size, recorded, mended)


class Missing(NamedTuple):
    """A missing fact that would have shown more, and how to record it: a sentence each."""

    fact: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fact} {self.remedy}"


# -- what was asked ----------------------------------------------------------------------------


def prompt_cause(a: DraftSide, b: DraftSide) -> Cause | None:
    """Where the prompts differ: text, tokenisation, or special tokens."""
    if a.prompt is None or b.prompt is None:
        return _by_request(a, b)
    if a.prompt == b.prompt:
        return None
    at = n_alike(a.prompt, b.prompt)
    place = f"prompt token {at}: A has {_at(a, at)}, B has {_at(b, at)}"
    plain = [[i for i in side.prompt or () if not _is_special(side, i)] for side in (a, b)]
    size = f"{len(a.prompt)} and {len(b.prompt)} tokens"
    if not all(side.session or side.piece(i) for side in (a, b) for i in side.prompt or ()):
        asked = [side.asked.prompt for side in (a, b)]
        same = asked[0] is not None and asked[0] == asked[1]
        if (said := _one_more(a, b)) is not None:
            return Cause(SPECIAL, "", f"{said}.", place, size)
        about = "The same text has other tokens" if same else "The prompts have other tokens"
        about += "; their texts are not known without the model (--model)."
        return Cause(TOKENS if same else TEXT, "", about, place, size)
    if plain[0] == plain[1]:
        less, more = "AB" if len(a.prompt) < len(b.prompt) else "BA"
        said = f"{less} does not have special tokens that {more} has"
        if len(a.prompt) == len(b.prompt):
            said = "the special tokens of the two prompts differ"
        return Cause(SPECIAL, "", f"The texts are equal; {said}.", place, size)
    texts = [b"".join(side.piece(i) for i in side.prompt or ()) for side in (a, b)]
    if texts[0] != texts[1]:
        return Cause(TEXT, "", _text_words(a, b, texts), place, size)
    for side, other in ((a, b), (b, a)):
        if any(
            _is_special(side, token) for token in {*(side.prompt or ())} - {*(other.prompt or ())}
        ):
            about = (
                f"{other.name} has the text of a special token as ordinary tokens, {side.name} "
                "has the special token."
            )
            return Cause(SPECIAL, other.name, about, place, size)
    return Cause(TOKENS, "", "The same text is tokenised differently.", place, size)


def _by_request(a: DraftSide, b: DraftSide) -> Cause | None:
    """The same if the ids of a prompt are not known."""
    texts = [_prompt_text(side) for side in (a, b)]
    if texts[0] is not None and texts[1] is not None and texts[0] != texts[1]:
        at = n_alike(texts[0], texts[1])
        bare = [_SPECIAL.sub(b"", text.encode("utf-8", "replace")) for text in texts if text]
        stage = SPECIAL if len(bare) == 2 and bare[0] == bare[1] else TEXT
        shown = [repr((text or "")[at : at + _SHOWN]) for text in texts]
        place = f"character {at}: A continues with {shown[0]}, B with {shown[1]}"
        return Cause(stage, "", "The prompts differ.", place)
    chats = [side.asked.messages for side in (a, b)]
    if all(chats) and chats[0] != chats[1]:
        return Cause(TEXT, "", "The messages of the two requests differ.")
    if a.n_prompt == b.n_prompt:
        return None
    size = f"{a.n_prompt} and {b.n_prompt} tokens"
    if all(chats):
        about = "The messages are equal, but the chat template turned them into another prompt."
        return Cause(TEXT, "", about, "", size)
    about = "The prompts have different numbers of tokens; the ids are not known on both sides."
    if abs(a.n_prompt - b.n_prompt) == 1:
        about = f"{_one_more(a, b)}; ids are not known on both sides."
        return Cause(SPECIAL, "", about, "", size)
    return Cause(TOKENS, "", about, "", size)


def _prompt_text(side: DraftSide) -> str | None:
    """A prompt as sent, or the text of its tokens if all are known."""
    pieces = [side.piece(i) for i in side.prompt or ()]
    if side.asked.prompt is not None or not pieces or not all(pieces):
        return side.asked.prompt
    return b"".join(pieces).decode("utf-8", "replace")


def _one_more(a: DraftSide, b: DraftSide) -> str | None:
    """The sentence for a prompt with one more token at an end, as far as ids are known; else
    None."""
    less, more = sorted((a, b), key=lambda side: side.n_prompt)
    both = less.prompt, more.prompt
    if None not in both and both[0] not in ((both[1] or [])[1:], (both[1] or [])[:-1]):
        return None
    return (
        f"The prompt of {more.name} has one more token, as if a special token were added at its "
        "start (add_bos_token) or end (add_eos_token)"
    )


def _text_words(a: DraftSide, b: DraftSide, texts: Sequence[bytes]) -> str:
    at = n_alike(*texts)
    shown = [repr(text[at : at + _SHOWN].decode("utf-8", "replace")) for text in texts]
    if a.asked.messages and a.asked.messages == b.asked.messages:
        what = "The messages are equal, but the chat template turned them into another prompt"
    elif texts[0].split() == texts[1].split():
        what = "The prompts differ only in white space"
    elif len({normalize("NFKC", one.decode("utf-8", "replace")) for one in texts}) == 1:
        what = "The prompts are the same text in two Unicode forms (such as NFC and NFD)"
    elif len({one.lower() for one in texts}) == 1:
        what = "The prompts differ only in upper and lower case"
    elif texts[0].endswith(texts[1]) or texts[1].endswith(texts[0]):
        what = "One prompt is the end of the other: its start is cut off, or text was put in front"
    elif at == min(map(len, texts)):
        what = "One prompt continues where the other ends, as with another generation prompt"
    elif at + n_alike(texts[0][::-1], texts[1][::-1]) >= min(map(len, texts)):
        less, more = "AB" if len(texts[0]) < len(texts[1]) else "BA"
        what = f"A part in the middle of the prompt of {more} is missing in {less}"
    elif any(_SPECIAL.sub(b"", one) != one for one in texts):
        what = "The prompts differ, in their text or in the chat template"
    else:
        what = "The prompts have different texts"
    return f"{what}: after {at} bytes A continues with {shown[0]}, B with {shown[1]}."


def _is_special(side: DraftSide, token: int) -> bool:
    session = side.session
    if session is not None and 0 <= token < session.config.n_vocab:
        return session.tokenizer.is_control(token) or not side.piece(token)
    return _SPECIAL.fullmatch(side.piece(token)) is not None


def _at(side: DraftSide, at: int) -> str:
    prompt = side.prompt or ()
    return side.shown(prompt[at]) if at < len(prompt) else "its end"


# -- drafts at the same contexts ---------------------------------------------------------------


def n_common(a: DraftSide, b: DraftSide) -> int:
    """Length of the common prefix in tokens. An unknown prompt counts as equal if it has the same
    length."""
    if a.n_prompt == b.n_prompt and None in (a.prompt, b.prompt):
        return a.n_prompt + n_alike(a.text[a.n_prompt :], b.text[b.n_prompt :])
    return n_alike(a.text, b.text)


def same_contexts(a: DraftSide, b: DraftSide) -> list[tuple[RecordedDraft, RecordedDraft]]:
    """Drafts that both made after the same tokens."""
    n_same = n_common(a, b)
    mine = {draft.pos0: draft for draft in a.drafts if draft.pos0 < n_same}
    return [(mine[draft.pos0], draft) for draft in b.drafts if draft.pos0 in mine]


def n_equal(one: RecordedDraft, other: RecordedDraft) -> int | None:
    """Length of the common prefix of two drafts; None if no further tokens are known and none
    differs."""
    n = n_alike(one.tokens, other.tokens)
    return n if n < min(len(one.tokens), len(other.tokens)) else None


def draft_causes(a: DraftSide, b: DraftSide, pairs: Pairs) -> Iterator[Cause]:
    """Causes shown by the ids of drafts at the same contexts, without a model."""
    known = [pair for pair in pairs if pair[0].tokens and pair[1].tokens]
    differ = [pair for pair in known if n_equal(*pair) is not None]
    yield from length_causes(a, b, [pair for pair in known if n_equal(*pair) is None])
    if len(differ) < FEW or len(differ) < _SHARE * len(known):
        return
    recorded = [sums(pair[i] for pair in known) for i in (0, 1)]
    low = 0 if recorded[0][0] * recorded[1][1] < recorded[1][0] * recorded[0][1] else 1
    side = (a, b)[low]
    stage, about = signature(side, differ, known, low)
    size = f"{len(differ)} of {len(known)} drafts after the same text differ"
    counts = recorded[low], recorded[1 - low]
    yield Cause(stage, side.name, about, place_of(differ[0][low]), size, *counts)


def signature(side: DraftSide, differ: Pairs, known: Pairs, low: int) -> tuple[str, str]:
    """Stage and sentence by the relation of wrong drafts to the other's. low: index in a pair."""
    mine, theirs = [pair[low] for pair in differ], [pair[1 - low] for pair in differ]
    n = len(differ)
    ids = {token for draft in mine for token in draft.tokens}
    if len(ids) == 1 and len({token for draft in theirs for token in draft.tokens}) > 1:
        token = side.shown(ids.pop())
        return ROWS, f"All its drafts consist only of token {token}: rows or logits are NaN."
    for how, pairs in (
        (" from the second token on: one token ahead", zip(mine, theirs, strict=True)),
        (", one token late", zip(theirs, mine, strict=True)),
    ):
        if sum(starmap(_is_moved, pairs)) > 0.8 * n:
            return STATE, f"Its drafts are the other's{how}."
    if about := _by_rank(mine, theirs):
        return CANDIDATES, about
    places = [n_equal(*pair) or 0 for pair in zip(mine, theirs, strict=True)]
    drafts = zip(mine, theirs, places, strict=True)
    named = one_for_one([(other.tokens[at], one.tokens[at]) for one, other, at in drafts])
    if not side.looks_up and named:
        about = "Each id of the other is always one other id here: a wrong map of draft ids (d2t)."
        return CANDIDATES, about
    before = {draft.round: last for last, draft in pairwise(side.drafts)}
    groups = Counter[tuple[bool, bool]]()
    for pair in known:
        last = before.get(pair[low].round)
        partial = last is not None and last.n_accepted < last.n_drafted
        groups[partial, n_equal(*pair) is not None] += 1
    n_after, n_else = (groups[which, True] + groups[which, False] for which in (True, False))
    if n_after and n_else and groups[False, True] <= 0.05 * n_else and groups[True, True] >= FEW:
        return ROWS, "Only drafts after a rejection differ: stale rows or a state not rolled back."
    if all((n_equal(*pair) or 0) > 0 for pair in differ):
        in_blocks = any("flash" in one or "spark" in one for one in side.drafters)
        about = "First tokens are equal, later ones differ: wrong inputs of later steps or rows."
        return BLOCK if in_blocks else ROWS, about
    about = "Drafts after the same text differ; without the model, the cause is not known."
    return UNEXPLAINED, about


def _is_moved(one: RecordedDraft, other: RecordedDraft) -> bool:
    n = min(len(one.tokens), len(other.tokens) - 1)
    return n > 0 and one.tokens[:n] == other.tokens[1 : n + 1]


def _by_rank(mine: Drafts, theirs: Drafts) -> str:
    """Whether the first different token is among the other's candidates."""
    ranks = []
    for one, other in zip(mine, theirs, strict=True):
        at = n_equal(one, other) or 0
        if at < len(other.tops) and len(other.tops[at]) > 1:
            ids = [*other.tops[at]]
            ranks.append(ids.index(one.tokens[at]) + 1 if one.tokens[at] in ids else 0)
    if len(ranks) < FEW or sum(rank > 1 for rank in ranks) < 0.9 * len(ranks):
        return ""
    if len(set(ranks)) == 1:
        return f"It drafts the candidate of rank {ranks[0]} instead of the best one."
    return "It drafts other candidates than the best one, as if it sampled them at a temperature."


def one_for_one(pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """For each id of right drafts the one drafted instead; empty if that is not always the same
    one, or too few show it."""
    names = dict(pairs)
    changed = sum(own != token for own, token in names.items())
    is_map = all(names[own] == token for own, token in pairs) and len(pairs) > 2 * len(names)
    return names if is_map and changed >= FEW else {}


def length_causes(a: DraftSide, b: DraftSide, pairs: Pairs) -> Iterator[Cause]:
    """Drafts that are equal as far as both go, but of different length."""
    if any(miscounting(side) or overcounting(side) for side in (a, b)):
        return
    beyond = a.n_beyond, b.n_beyond
    lengths = [Counter(d.n_drafted - side.n_beyond for d in side.drafts) for side in (a, b)]
    longest = [max(found) for found in lengths]
    # near the end the token limit may shorten a draft
    end = min(len(a.text) - longest[0], len(b.text) - longest[1]) - 2
    yield from _dropped(a, b, end)
    whole = [
        (one, other)
        for one, other in pairs
        if a.has_lengths and b.has_lengths
        if one.n_drafted - beyond[0] != other.n_drafted - beyond[1] and one.pos0 < end
    ]
    n_full = [found[n] for found, n in zip(lengths, longest, strict=True)]
    is_set = not (a.looks_up or b.looks_up) and all(
        2 * n > found.total() >= _SHOWS_LENGTH for n, found in zip(n_full, lengths, strict=True)
    )
    if len(whole) < max(FEW, _SHARE * len(pairs)):
        if is_set and longest[0] != longest[1]:
            about = _OTHER_N_MAX.format(*longest)
            yield Cause(CANDIDATES, "", about, "", f"{n_full[0]} and {n_full[1]} have that length")
        return
    if longest[0] != longest[1]:
        about = _OTHER_N_MAX.format(*longest)
    else:
        short = [sum(pair[i].n_drafted < pair[1 - i].n_drafted for pair in whole) for i in (0, 1)]
        which = 0 if short[0] >= short[1] else 1
        cut = [(pair[1 - which], pair[which].n_drafted) for pair in whole]
        shown = [(d.tops[at], d.tokens[at]) for d, at in cut if at < len(d.tops)]
        below = [top[token] for top, token in shown if token in top]
        floor = f" (probability {max(below):.2f} at most)" if below else ""
        about = (
            f"{'AB'[which]} ends drafts before less probable tokens{floor} that {'BA'[which]} "
            "drafts: another p_min."
        )
        both = [{pair[which].pos0 for pair in some} for some in (whole, pairs)]
        if ends := _after((a, b)[which], *both):
            about = f"{'AB'[which]} drafts fewer tokens than {'BA'[which]}, only after {ends}."
        elif below and max(below) >= _SURE:
            about = (
                f"{'AB'[which]} ends drafts before tokens that {'BA'[which]} drafts, even likely."
            )
    recorded = sums(pair[1] for pair in whole), sums(pair[0] for pair in whole)
    size = f"{len(whole)} of {len(pairs)} otherwise equal drafts have different lengths"
    yield Cause(CANDIDATES, "", about, place_of(whole[0][1]), size, *recorded)


def miscounting(side: DraftSide) -> list[RecordedDraft]:
    """Drafts with more recorded tokens than counted, or fewer if all are recorded."""
    found = [
        draft
        for draft in side.drafts
        if len(draft.tokens) > draft.n_drafted
        or (side.knows_all and len(draft.tokens) < draft.n_drafted)
    ]
    return found if len(found) >= FEW else []


def overcounting(side: DraftSide) -> bool:
    """Whether drafts count more accepted tokens than their next rounds have advanced."""
    steps = [(draft.n_accepted, side.advance(draft)) for draft in side.drafts]
    return sum(most is not None and n > most for n, most in steps) >= FEW


def _dropped(a: DraftSide, b: DraftSide, end: int) -> Iterator[Cause]:
    """Rounds in which one has no draft and the other a short one."""
    stop = min(n_common(a, b), end)
    for side, other in ((a, b), (b, a)):
        none = [d for d in other.drafts if d.pos0 < stop and d.pos0 in {*side.plain}]
        # with equal lengths and no ids, a record may have assumed them for all rounds
        is_shown = len({d.n_drafted for d in other.drafts}) > 1 or any(d.tokens for d in none)
        idle = (
            [] if any(at < stop for at in other.plain) else [at for at in side.plain if at < stop]
        )
        if len(none) < FEW <= len(idle) and side.always_drafts:
            until = f", up to position {idle[-1]}" * (idle[-1] < side.drafts[0].pos0)
            about = f"{side.name} drafts nothing in some rounds{until}, {other.name} does in all."
            where = f"position {idle[0]}", f"{len(idle)} rounds"
            yield Cause(CANDIDATES, side.name, about, *where)
        if side.looks_up or len(none) < FEW or not is_shown:
            continue
        lost, start = max(draft.n_drafted for draft in none), none[0].pos0
        in_vain = [d for d in other.drafts if d.pos0 < stop and not d.n_accepted]
        if none == in_vain and all(d.n_accepted for d in side.drafts) and not side.has_rejected:
            about = "no drafted tokens of rounds in which none was accepted"
            counts = side.counts, (side.counts[0], side.counts[1] + sums(none)[1])
            size = f"{len(none)} rounds, all those in which {other.name} had none accepted"
            yield counted(side, about, f"position {start}", size, *counts)
            continue
        about = f"{side.name} drafts nothing where {other.name} does"
        rest = range(side.drafts[0].pos0 + 1, stop)
        if ends := _after(side, {*side.plain} & {*rest}, rest):
            about += f", only after {ends}."
            yield Cause(CANDIDATES, side.name, about, f"position {start}", f"{len(none)} rounds")
            continue
        since = all(draft.pos0 < start for draft in side.drafts)
        is_apart, is_non_finite = {*OUT_OF_STEP} & side.reasons, "non-finite" in side.reasons
        if is_apart or is_non_finite or (since and len(none) >= 2 * FEW):
            stage, cause = ROWS, "the rows or logits are NaN, or its context is full"
            if is_apart:
                stage, cause = STATE, f"its state does not match the text ({min(is_apart)})"
            elif is_non_finite:
                cause = "the rows that it reads or its logits are NaN or infinite"
            elif side.knows_all:  # this engine records non-finite values
                stage, cause = STATE, "its context is full, or its limits allow no further drafts"
            about = f"{about}, from position {start} on" * since or about
            size = f"{len(none)} rounds"
            yield Cause(stage, side.name, f"{about}: {cause}.", f"position {start}", size)
            continue
        sure = [[*top.values()][:1] for d in none for top in d.tops[:1]]
        if sure and (floor := max(map(sum, sure))) < _SURE:
            about += f", if the first token's probability is at most {floor:.2f}: another p_min"
        if lost < min(draft.n_drafted for draft in side.drafts):
            about = f"{side.name} discards drafts of fewer than {lost + 1} tokens: another n_min"
        size = f"{len(none)} rounds after the same text"
        yield Cause(CANDIDATES, "", f"{about}.", f"position {none[0].pos0}", size)


def _after(side: DraftSide, wrong: set[int], among: Collection[int]) -> str:
    """The outcome of drafts after which alone, and always, the next round, if it is among these, is
    a wrong one; empty without one. Rounds by position."""
    before = {draft.pos0: outcomes(draft) for draft in side.drafts}
    rounds = [*pairwise(sorted({*side.plain, *before}))]
    for end, words in OUTCOMES.items():
        after = {at for last, at in rounds if at in among and end in before.get(last, ())}
        if len(wrong) >= _SHOWS_LENGTH and wrong == after:
            return words
    return ""
