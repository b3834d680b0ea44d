"""N-gram drafters: the shared base, with a searchable history per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.draft.drafter import Draft, Drafter, DraftRequest
from engine.option_fields import FormRow, NumberRange, option

if TYPE_CHECKING:
    from engine.model.layers import TargetRows

GROUP = "ngram"
"""Heading on the command line: speculation without a draft model."""
SIZE = NumberRange(1, 1024, "Choose a number from 1.")
_SIZE = array("i").itemsize


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """ngram-simple and ngram-map: look up size_n tokens, draft size_m.

    min_hits: look-ups of a key before ngram-map-k4v drafts; the others do not use it.
    """

    GROUP: ClassVar[str] = GROUP
    size_n: int = option(
        12,
        "--spec-{drafter}-size-n  length of the n-gram to look up",
        SIZE,
        FormRow("", 1, 1024, short="n"),
    )
    size_m: int = option(
        48, "--spec-{drafter}-size-m  longest draft", SIZE, FormRow("", 1, 1024, short="m")
    )
    min_hits: int = option(
        1, "--spec-{drafter}-min-hits  {hits}", SIZE, FormRow("", 1, 1024, short="hits")
    )


class NgramDrafter(Drafter, ABC):
    """Drafts from text seen before. The history of a sequence ends before `last`."""

    def __init__(self) -> None:
        self._histories: dict[int, History] = {}

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """Start from the prompt."""
        self._histories[seq] = History(prompt)

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Append what was decoded."""
        self._histories.setdefault(seq, History()).write(pos0, tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            draft = self._look_up(request.seq, self._histories[request.seq], request.last)
            draft.drafter = self.name
            drafts.append(draft)
        return drafts

    def forget(self, seq: int) -> None:
        self._histories.pop(seq, None)

    @abstractmethod
    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        """Draft a continuation of history + [last]; empty, with the reason, where none is found."""


def nothing(reason: str, *, match_pos: int | None = None, n_raw: int = 0) -> Draft:
    """An empty draft with its reason."""
    return Draft(match_pos=match_pos, n_raw=n_raw, reason=reason)


class History:
    """Token ids in order. Searches run over bytes: fast, and without an index to maintain."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = array("i", tokens)
        self._bytes = bytearray(self._tokens.tobytes())

    def __len__(self) -> int:
        return len(self._tokens)

    def write(self, pos0: int, tokens: Sequence[int]) -> None:
        """Write tokens at pos0, at most the length; everything from there on is replaced."""
        added = array("i", tokens)
        del self._tokens[pos0:]
        del self._bytes[pos0 * _SIZE :]
        self._tokens.extend(added)
        self._bytes.extend(added.tobytes())

    def part(self, start: int, stop: int | None = None) -> list[int]:
        """Tokens start..stop; a negative start counts from the end."""
        return self._tokens[start:stop].tolist()

    def holds(self, ngram: Sequence[int], start: int) -> bool:
        """Whether the n-gram is at `start`."""
        return self.part(start, start + len(ngram)) == list(ngram)

    def find_last(self, ngram: Sequence[int], low: int, high: int) -> int:
        """The largest start in low..high of the n-gram, -1 if there is none."""
        pattern = array("i", ngram).tobytes()
        end = (high + len(ngram)) * _SIZE
        while high >= low:
            at = self._bytes.rfind(pattern, low * _SIZE, end)
            if at < 0:
                return -1
            if at % _SIZE == 0:
                return at // _SIZE
            end = at + len(pattern) - 1  # ignore matches that do not start at a token
        return -1

    def find_all(self, ngram: Sequence[int], low: int, high: int) -> Iterator[int]:
        """All starts in low..high of the n-gram, ascending; they may overlap."""
        pattern = array("i", ngram).tobytes()
        # negative numbers would count from the end
        end = max(high + len(ngram), 0) * _SIZE
        at = low * _SIZE - 1
        while (at := self._bytes.find(pattern, at + 1, end)) >= 0:
            if at % _SIZE == 0:
                yield at // _SIZE
