"""Known mistakes of engines, each switched on in copies of the drafters, the rule or the records.

A bug that patches is a context in which a run is made; one of the records changes what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.options import Prompt, RunOptions
from engine.session import Session
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef
from tests.support.drafter_patches import (
    Patch,
    added_twice,
    at_most_one,
    before_norm,
    counts_undecoded,
    cut_head,
    drawn,
    flipped,
    never_the_last,
    next_layers,
    next_row,
    no_prompt,
    not_rolled_back,
    one_token,
    other_mask,
    reversed_layers,
    rolled_rows,
    second_best,
    stale_last,
    stays,
    too_far,
    unmapped,
    whole_block,
    zero_rows,
)


@dataclass(frozen=True)
class Bug:
    """stage: that is to be named; words: that its sentence has. kinds: drafters that can have it.

    patch: makes it; prompt, options: change what is asked; edit: changes the run afterwards.
    """

    stage: str
    words: str
    kinds: tuple[str, ...]
    patch: Callable[[Patch, Session], None] | None = None
    prompt: Callable[[Session, Prompt], Prompt] | None = None
    good_prompt: Callable[[Session, Prompt], Prompt] | None = None
    options: Callable[[RunOptions], RunOptions] | None = None
    edit: Callable[[RunRef], None] | None = None


# -- prompts -----------------------------------------------------------------------------------


def _control(session: Session) -> int:
    n = session.tokenizer.n_vocab
    return next(i for i in range(n) if session.tokenizer.is_control(i))


def with_first(session: Session, prompt: Prompt) -> Prompt:
    """The prompt after a control token, as an engine that adds one has it."""
    return Prompt((_control(session), *prompt.tokens), prompt.text)


def _special_as_text(session: Session, prompt: Prompt) -> Prompt:
    text = session.tokenizer.piece(_control(session)).decode()
    cut = session.tokenizer.encode(text, parse_special=False)
    return Prompt((*cut, *prompt.tokens), prompt.text)


def _other_template(session: Session, prompt: Prompt) -> Prompt:
    more = session.tokenizer.encode("# answer\n")
    return Prompt((*prompt.tokens, *more), prompt.text)


def _other_text(session: Session, prompt: Prompt) -> Prompt:
    return session.prompt("x = 1\n" + session.tokenizer.decode(prompt.tokens))


def _other_cut(session: Session, prompt: Prompt) -> Prompt:
    text = session.tokenizer.decode(prompt.tokens)
    ids = [i for letter in text for i in session.tokenizer.encode(letter)]
    return Prompt(tuple(ids), prompt.text)


def counts_of(run: RunRef) -> tuple[np.ndarray, np.ndarray]:
    """Accepted and drafted tokens of rounds, to be changed."""
    rounds = run.store.rounds
    names = "num_accepted_draft_tokens", "num_draft_tokens"
    accepted, drafted = (rounds._arrays[name][: len(rounds)] for name in names)
    return accepted, drafted


def count(run: RunRef, accepted: np.ndarray, drafted: np.ndarray) -> None:
    """Counters of a request that are the sums of these."""
    told = {"draft_n": int(drafted.sum()), "draft_n_accepted": int(accepted.sum())}
    run.facts["requests"] = [{"seq_ids": [0], "told": told}]


def _bonus_counts(run: RunRef) -> None:
    accepted, drafted = counts_of(run)
    accepted[(drafted > accepted) & (accepted >= 0)] += 1


def _replays_count(run: RunRef) -> None:
    accepted, drafted = counts_of(run)
    accepted, drafted = accepted[drafted > 0], drafted[drafted > 0]
    again = (accepted + 1) * (accepted < drafted)
    count(run, accepted + again, drafted + again)


def without_tops(run: RunRef) -> None:
    """A run as a log without candidates has it."""
    tokens = run.store.tokens
    for name in ("draft_top_id", "draft_top_p", "draft_p", "draft_conf"):
        if (array := tokens._arrays.get(name)) is None:
            continue  # a look-up has none
        array[: len(tokens)] = MISSING if name.endswith("_id") else float("nan")


def without_rejected(run: RunRef) -> None:
    """A run as a stream has it: ids of rejected tokens are not known."""
    without_tops(run)
    tokens = run.store.tokens
    kinds = tokens.texts("kind")
    array = tokens._arrays["token_id"]
    for row, kind in enumerate(kinds):
        if kind in ("rejected", "ignored"):
            array[row] = MISSING


def _spec(**changed: Any) -> Callable[[RunOptions], RunOptions]:
    return lambda options: replace(options, spec=replace(options.spec, **changed))


_ROW = ("mtp", "eagle3")
_BLOCKS = ("dflash", "dspark")
_MODEL = ("mtp", "simple", "eagle3")

BUGS: dict[str, Bug] = {
    "different text": Bug("text", "text", _MODEL, prompt=_other_text),
    "other template": Bug("text", "generation prompt", _MODEL, prompt=_other_template),
    "no first token": Bug("special tokens", "not have special", _MODEL, prompt=with_first),
    "special token as text": Bug(
        "special tokens", "ordinary", _MODEL, prompt=_special_as_text, good_prompt=with_first
    ),
    "other cut": Bug("tokens", "tokenised differently", _MODEL, prompt=_other_cut),
    "one position too far": Bug("positions", "too far", ("eagle3", "eagle3-d2t"), too_far),
    "before the norm": Bug("target rows", "before the target's final norm", ("mtp",), before_norm),
    "rolled rows": Bug("target rows", "rotated by one", _ROW, rolled_rows),
    "zero rows": Bug("target rows", "zeros", (*_ROW, "dflash", "dflash2", "dspark"), zero_rows),
    "next layers": Bug("target rows", "layers one on", ("eagle3-d2t", "dflash"), next_layers(1)),
    "layers before": Bug("target rows", "layers one before", ("eagle3",), next_layers(-1)),
    "reversed layers": Bug(
        "target rows", "Rows of layers", ("eagle3", "dflash", "dflash2"), reversed_layers
    ),
    "stale row": Bug("target rows", "last token of the verify batch", _ROW, stale_last),
    "row not updated": Bug("target rows", "previous round", _ROW, stays(False)),
    "NaN": Bug("target rows", "NaN", _ROW, one_token),
    "undecoded token": Bug("drafter state", "treated as decoded", ("simple",), counts_undecoded),
    "not rolled back": Bug("drafter state", "stay", ("simple",), not_rolled_back),
    "prompt not seen": Bug("drafter state", "prompt", _BLOCKS, no_prompt()),
    "other mask": Bug("block", "Masks are token 0", (*_BLOCKS, "dflash2"), other_mask),
    "whole block": Bug("block", "rows, not", ("dflash",), whole_block),
    "flipped mask": Bug("block", "later rows", (*_BLOCKS, "dflash2"), flipped),
    "next row": Bug("block", "from row", ("dspark", "dflash"), next_row),
    "unmapped ids": Bug("candidates", "not applied", ("eagle3-d2t", "dflash-d2t"), unmapped),
    "ids added twice": Bug("candidates", "twice", ("eagle3-d2t", "dflash-d2t"), added_twice),
    "second best": Bug("candidates", "rank 2", _MODEL, second_best),
    "cut head": Bug("candidates", "head lacks them", _MODEL, cut_head),
    "drawn candidates": Bug("candidates", "drawn", _MODEL, drawn),
    "p_min": Bug("candidates", "p_min", _MODEL, options=_spec(p_min=0.7)),
    "n_max": Bug("candidates", "n_max", _MODEL, options=_spec(n_max=6)),
    "never the last": Bug("acceptance rule", "last token", _MODEL, never_the_last),
    "at most one": Bug("acceptance rule", "at most 1", _MODEL, at_most_one),
    "bonus counts": Bug("counting", "own token", _MODEL, edit=_bonus_counts),
    "replays count": Bug("counting", "replays", _MODEL, edit=_replays_count),
}
