"""The filter language of the find bar.

A query is a list of terms, and a token has to satisfy all of them:

- a kind, such as `rejected` or `replayed`;
- a comparison, such as `depth>2` or `p<0.1`, with `<`, `<=`, `>`, `>=`, `=` or `!=`. FIELDS has
  the names; a figure that was not observed satisfies none;
- a choice, such as `path:restore` or `seq:1`. `path:restore` also finds the restores for whose
  depth no snapshot was left (`path:restore_depth`);
- anything else is text, and so is anything in double quotes. Words in a row are one text. Text
  in lower case is found in either case, and it may begin in one token and end in another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.trace.records import ROLLBACK_PATHS, TOKEN_KINDS

FIELDS = {
    "depth": ("rounds", "rollback_depth"),
    "drafted": ("rounds", "num_draft_tokens"),
    "emitted": ("rounds", "num_emitted"),
    "width": ("rounds", "verify_width"),
    "round": ("rounds", "round"),
    "seq": ("rounds", "seq_id"),
    "pos": ("tokens", "pos"),
    "index": ("tokens", "draft_index"),
    "p": ("tokens", "target_p"),
    "q": ("tokens", "draft_p"),
    "conf": ("tokens", "draft_conf"),
    "rank": ("tokens", "target_rank"),
    "entropy": ("tokens", "target_entropy"),
    "rule_p": ("tokens", "rule_p"),
    "rule_q": ("tokens", "rule_q"),
}
"""What can be compared with a number: name -> table and column."""
CHOICES = {"path": "rollback_path", "drafter": "drafter", "rule": "accept_rule"}
"""What else than `kind:` and the fields can be chosen with a colon: name -> column of rounds."""
OPERATORS = ("<=", ">=", "!=", "<", ">", "=")
_PART = re.compile(r'"([^"]*)("?)|(\S+)')
_COMPARISON = re.compile(r"(\w+)(<=|>=|!=|<|>|=)(\S+)")
_CHOICE = re.compile(r"(\w+):(\S+)")
_HELP = "Put text with such signs in double quotes."


class FilterError(ValueError):
    """A query that means nothing; the message is one sentence and a remedy."""


@dataclass(frozen=True, slots=True)
class KindTerm:
    """A token of this kind."""

    kind: str


@dataclass(frozen=True, slots=True)
class NumberTerm:
    """A figure of FIELDS compared with a number. sign: one of OPERATORS."""

    field: str
    sign: str
    number: float


@dataclass(frozen=True, slots=True)
class ChoiceTerm:
    """A text column of the round has one of these values. name: of CHOICES."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TextTerm:
    """The bytes of the tokens contain this; `folded`: in either case."""

    text: str

    @property
    def folded(self) -> bool:
        return self.text == self.text.lower()


Term = KindTerm | NumberTerm | ChoiceTerm | TextTerm


def is_of_round(term: Term) -> bool:
    """Whether a term is about the round, so that either all or none of its tokens satisfy it."""
    return isinstance(term, ChoiceTerm) or (
        isinstance(term, NumberTerm) and FIELDS[term.field][0] == "rounds"
    )


def parse_filter(query: str) -> tuple[Term, ...]:
    """The terms of a query, none for an empty one. Raises FilterError."""
    terms: list[Term] = []
    text_start: int | None = None
    end = 0

    def close_text(stop: int) -> None:
        nonlocal text_start
        if text_start is not None:
            terms.append(TextTerm(query[text_start:stop]))
            text_start = None

    for part in _PART.finditer(query):
        quoted, closed, word = part.groups()
        if quoted is not None:
            close_text(end)
            if not closed:
                raise FilterError(f"The quote before {quoted!r} is not closed. Add another.")
            if quoted:
                terms.append(TextTerm(quoted))
        else:
            term = _term(word)
            if term is not None:
                close_text(end)
                terms.append(term)
            elif text_start is None:
                text_start = part.start()
        end = part.end()
    close_text(end)
    return tuple(terms)


def _term(word: str) -> Term | None:
    """The term that a word means; None if it is text to search for."""
    if word in TOKEN_KINDS:
        return KindTerm(word)
    if found := _COMPARISON.fullmatch(word):
        return _comparison(*found.groups())
    if found := _CHOICE.fullmatch(word):
        return _choice(*found.groups())
    return None


def _comparison(name: str, sign: str, value: str) -> Term:
    if name not in FIELDS:
        raise FilterError(f"There is no figure {name!r}; known are {', '.join(FIELDS)}. {_HELP}")
    return NumberTerm(name, sign, _number(name, value))


def _choice(name: str, value: str) -> Term:
    if name == "kind":
        if value not in TOKEN_KINDS:
            raise FilterError(f"There is no kind {value!r}; known are {', '.join(TOKEN_KINDS)}.")
        return KindTerm(value)
    if name in FIELDS:
        return NumberTerm(name, "=", _number(name, value))
    if name not in CHOICES:
        known = ", ".join(f"{one}:" for one in ("kind", "seq", *CHOICES))
        raise FilterError(f"There is no choice {name + ':'!r}; known are {known}. {_HELP}")
    if name != "path":
        return ChoiceTerm(name, (value,))
    paths = tuple(path for path in ROLLBACK_PATHS if path in (value, f"{value}_depth"))
    if not paths:
        raise FilterError(f"There is no path {value!r}; known are {', '.join(ROLLBACK_PATHS)}.")
    return ChoiceTerm(name, paths)


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if number != number:
        raise FilterError(f"{name} is compared with a number, not with {value!r}.")
    return number
