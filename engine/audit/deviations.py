"""Deviations: hypotheses about a wrong drafter state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

AHEAD, BEHIND, KEPT, SHIFTED = "ahead", "behind", "rejected-kept", "shifted"
TAKEN_BACK = "tokens that were rejected right before"
LAYERS, OTHER, DIFFERS = "wrong-layers", "other-text", "differs"
"""Kinds of a wrong drafter state; DIFFERS: no hypothesis reproduces the recorded drafts."""

JUDGED, NOT_JUDGED = "judged", "not-judged"
"""Nothing is wrong, or that cannot be decided."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A hypothesis about the entries in a drafter's memory, as compared with the right ones: those
    of the text in order, the newest one last.

    n_kept: drafted entries left after each round, None = all; counts: as if they were the text's.
    token_shift, row_shift: entries have the token, the row at this distance in positions;
    round_shift: the same for tokens decoded in rounds. batch: which row of its batch every token
    has, or "rolled" or "late". skips: the first entry of each round is missing; closes: the others
    move up. loses: the last but one is missing. again: the one before the first is written again.
    undecoded: the last token of a fully accepted draft is missing. place, step: the newest and the
    drafted entries, or only these, are moved by this many positions; stride: distance of drafted
    positions. off: drafted entries are moved by the number of previous "rounds", or of their
    "drafted tokens" or "rejected tokens", or by the TAKEN_BACK; the newest one place times as far.
    newest: distance of its token, token: its id, guessed:
    the "rejected" or the "last" one of the previous draft, if that was rejected; takes_back: its
    entry is replaced later. steady: all drafted tokens are paired with one row. drift: positions by
    which entries move in each round; restarts: positions of each round begin at 0. lacks: positions
    of missing entries; window: entries further back are missing, 0 = none; overcuts: a rollback
    removes the last cell of the text, too. own: entries of accepted tokens stay as drafting wrote
    them. forgets: memory is cleared before every draft; frozen: nothing is written after the
    prompt. drops: the first token of every draft is left out, -1: the newest one is put before it.
    best: a step continues from the best token of the previous one, whatever was drafted. late: the
    tokens of a round are written one round later. early: the first token comes from the row before
    the newest, if a pass has several. only: for a memory with states, kept entries stay in its
    "attention" or its "states" alone, or only that is cleared. spares: the newest entry has its own
    token and row. places: positions of the newest token where it applies, None = all. other:
    another text is "instead" of the beginning, "before" this one, "next to" it at the same
    positions, leaves a "gap", or "rows".
    """

    what: str
    about: str
    n_kept: int | None = 0
    counts: bool = False
    token_shift: int = 0
    row_shift: int = 0
    round_shift: int = 0
    batch: str = ""
    skips: bool = False
    closes: bool = False
    loses: bool = False
    again: bool = False
    undecoded: bool = False
    place: int = 0
    step: int = 0
    newest: int = 0
    token: int | None = None
    guessed: str = ""
    takes_back: bool = False
    steady: bool = False
    drift: int = 0
    restarts: bool = False
    stride: int = 1
    off: str = ""
    lacks: Collection[int] = ()
    window: int = 0
    overcuts: bool = False
    own: bool = False
    forgets: bool = False
    frozen: bool = False
    drops: int = 0
    best: bool = False
    late: bool = False
    early: bool = False
    only: str = ""
    spares: bool = False
    places: Collection[int] | None = None
    other: str = ""

    @property
    def is_of_rows(self) -> bool:
        """Whether it changes nothing for a drafter without target rows."""
        is_other = self.other == "rows" or self.own
        return bool(self.row_shift or self.batch or self.steady or is_other)

    def acts(self, pos0: int) -> bool:
        """Whether it applies when the newest token has this position."""
        return self.places is None or pos0 in self.places


CLEAN = Deviation(JUDGED, "")
DEVIATIONS = (
    Deviation(AHEAD, "one drafted token is treated as part of the text", n_kept=1, counts=True),
    Deviation(AHEAD, "two drafted tokens are treated as part of the text", n_kept=2, counts=True),
    Deviation(AHEAD, "the last token of a draft is treated as decoded, but is not", undecoded=True),
    Deviation(AHEAD, "the first token that it has to decode in each round is missing", skips=True),
    Deviation(AHEAD, "the same, and the others replace it", skips=True, closes=True),
    Deviation(AHEAD, "positions in its memory run ahead by one in each round", drift=1),
    Deviation(AHEAD, "drafts are made one position too far", place=1, step=1),
    Deviation(AHEAD, "drafted tokens are decoded one position too far", step=1),
    Deviation(BEHIND, "drafts are made one position too early", place=-1, step=-1),
    Deviation(BEHIND, "drafted tokens are decoded one position too early", step=-1),
    Deviation(AHEAD, "all drafted tokens are decoded in one position", stride=0),
    Deviation(AHEAD, "drafted tokens are decoded two positions apart", stride=2),
    Deviation(AHEAD, "drafts are made two positions too far", place=2, step=2),
    Deviation(AHEAD, "the newest token is decoded one position too far", place=1),
    Deviation(BEHIND, "drafts are made two positions too early", place=-2, step=-2),
    Deviation(BEHIND, "the newest token is decoded one position too early", place=-1),
    Deviation(BEHIND, "positions in its memory advance by one too few in each round", drift=-1),
    Deviation(BEHIND, "one token decoded in each round is missing", loses=True),
    Deviation(BEHIND, "one token is decoded twice in each round", again=True),
    Deviation(BEHIND, "drafts start from the token before the newest", newest=-1),
    Deviation(BEHIND, "drafts start from the token before the newest", newest=-1, takes_back=True),
    Deviation(KEPT, "all drafted tokens stay in memory", n_kept=None),
    Deviation(KEPT, "one drafted token of each round stays in memory", n_kept=1),
    Deviation(SHIFTED, "rows of the previous position", row_shift=-1),
    Deviation(SHIFTED, "rows of the next position", row_shift=1),
    Deviation(SHIFTED, "rows of two positions earlier", row_shift=-2),
    Deviation(SHIFTED, "rows of two positions after", row_shift=2),
    Deviation(SHIFTED, "rows of each batch, rotated by one", batch="rolled"),
    Deviation(SHIFTED, "rows of each batch, in reverse order", batch="reversed"),
    Deviation(SHIFTED, "the last row of its batch for every token", batch="last"),
    Deviation(SHIFTED, "the first row of its batch for every token", batch="first"),
    Deviation(SHIFTED, "one and the same row for all drafted tokens", steady=True),
    Deviation(SHIFTED, "tokens of the previous position", token_shift=-1),
    Deviation(SHIFTED, "tokens of one position after", token_shift=1),
    Deviation(SHIFTED, "tokens of one position after, since the prompt", round_shift=1),
)
OF_ENGINES = (
    Deviation(KEPT, "accepted tokens keep its own entries, not the target's rows", own=True),
    Deviation(AHEAD, "the first token of each draft is dropped: one token ahead", drops=1),
    Deviation(BEHIND, "drafts start with the newest token again: one token late", drops=-1),
    Deviation(BEHIND, "its memory is emptied before every draft", forgets=True),
    Deviation(
        BEHIND, "its attention is emptied before every draft", forgets=True, only="attention"
    ),
    Deviation(BEHIND, "a rollback also removes the last accepted token", overcuts=True),
    Deviation(BEHIND, "the tokens of a round get into its memory one round late", late=True),
    Deviation(BEHIND, "first tokens are of the row before the newest, if new", early=True),
    *(
        Deviation(
            KEPT, f"a rollback leaves {what} in its {only}, nowhere else", n_kept=n, only=only
        )
        for only in ("attention", "states")
        for n, what in ((1, "the first rejected token"), (64, "rejected tokens"))
    ),
    *DEVIATIONS,
    *(
        Deviation(
            KEPT,
            f"drafts continue from the {which} token of the last draft, not the target's own",
            guessed=which,
            takes_back=noticed,
        )
        for which in ("rejected", "last")
        for noticed in (False, True)
    ),
    *(
        Deviation(AHEAD, f"{what} too far by one for each of its {n}", off=n, place=place)
        for place, what in enumerate(("drafted tokens are decoded", "drafts are made"))
        for n in ("rejected tokens", "drafted tokens", "rounds", TAKEN_BACK)
    ),
    *(
        replace(one, about=f"{one.about}, except for the newest", spares=True)
        for one in DEVIATIONS
        if one.token_shift or one.row_shift
    ),
    Deviation(SHIFTED, "rows of each batch one position late, the first one again", batch="late"),
    Deviation(BEHIND, "positions written by a pass start at 0 again", restarts=True),
    Deviation(BEHIND, "it has not seen the tokens decoded after the prompt", frozen=True),
)
"""The deviations above, and those possible in other engines."""
