"""Text cut into pieces alternative by alternative, from the standard library's tables."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Callable, Iterator
from itertools import groupby

SPACE = {*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029}
SPACE |= {0x202F, 0x205F, 0x3000}
# Scripts.txt of Unicode, as far as the planes that tests look at
HAN = [(0x2E80, 0x2E99), (0x2E9B, 0x2EF3), (0x2F00, 0x2FD5), (0x3005, 0x3005), (0x3007, 0x3007)]
HAN += [(0x3021, 0x3029), (0x3038, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFA6D)]
HAN += [(0xFA70, 0xFAD9), (0x16FE2, 0x16FE3), (0x16FF0, 0x16FF6), (0x20000, 0x323AF)]
EAST_ASIAN = [("\u4e00", "\u9fa5"), ("\u3040", "\u309f"), ("\u30a0", "\u30ff")]
ENDINGS = ("s", "t", "re", "ve", "m", "ll", "d")
UPPER, LOWER = {"Lu", "Lt", "Lm", "Lo", "M"}, {"Ll", "Lm", "Lo", "M"}


def naive_pieces(text: str, pre: str) -> Iterator[str]:
    """The split of a text by the pattern of that name."""
    if pre == "refact":
        for piece in _digits_alone(text):
            yield from _split(piece, "granite-docling")
    elif pre == "deepseek-v3":
        for part in _isolated(text, lambda c: unicodedata.category(c)[0] == "N", 3):
            for piece in _isolated(part, lambda c: any(a <= c <= b for a, b in EAST_ASIAN)):
                yield from _deepseek(piece)
    else:
        yield from _split(text, pre)


def _split(text: str, pre: str) -> Iterator[str]:
    at, known = 0, _Text(text, pre)
    while at < len(text):
        end = _SPLITS.get(pre, _words)(known, at)
        assert end > at
        yield text[at:end]
        at = end


def _digits_alone(text: str) -> Iterator[str]:
    return _isolated(text, lambda c: unicodedata.category(c)[0] == "N", 1)


def _isolated(text: str, wanted: Callable[[str], bool], most: int = 1 << 30) -> Iterator[str]:
    """Runs of wanted characters, up to `most` of them, and what is between."""
    for is_wanted, group in groupby(text, wanted):
        run = "".join(group)
        step = most if is_wanted else len(run)
        yield from (run[at : at + step] for at in range(0, len(run), step))


def _deepseek(text: str) -> Iterator[str]:
    """What no alternative matches is a piece of its own, up to what one does."""
    t, at, left = _Text(text, "qwen35"), 0, ""
    if all(unicodedata.category(c)[0] == "N" for c in text):
        yield text
        return
    while at < len(text):
        end = _deepseek_word(t, at)
        if end == at:
            left += text[at]
            at += 1
            continue
        yield from ([left] if left else [])
        yield text[at:end]
        at, left = end, ""
    yield from ([left] if left else [])


def _deepseek_word(t: _Text, at: int) -> int:
    text = t.text
    if text[at] in string.punctuation:
        stop = t.run(at + 1, lambda i: text[i] in string.ascii_letters)
        if stop > at + 1:
            return stop
    first = at + 1 if text[at] not in "\r\n" and t.kinds[at] not in {"L", "P", "S"} else at
    for start in (first, at):
        stop = t.of(start, {"L", "M"})
        if stop > start:
            return stop
    start = at + 1 if text[at] == " " else at
    stop = t.of(start, {"P", "S"})
    if stop > start:
        return t.run(stop, lambda i: text[i] in "\r\n")
    return t.spaces(at) if t.kinds[at] == "space" else at


class _Text:
    """A text, and of each character its class."""

    def __init__(self, text: str, pre: str) -> None:
        self.text = text
        self.kinds = ["space" if ord(c) in SPACE else unicodedata.category(c)[0] for c in text]
        self.word = {"L", "M"} if pre == "qwen35" else {"L"}
        self.n_digits = 1 if pre in ("qwen2", "qwen35", "bailingmoe2") else 3

    def run(self, at: int, wanted: Callable[[int], bool], most: int = 1 << 30) -> int:
        """Where a run of characters from `at` on ends."""
        stop = at
        while stop < len(self.text) and stop < at + most and wanted(stop):
            stop += 1
        return stop

    def of(self, at: int, kinds: set[str]) -> int:
        return self.run(at, lambda i: self.kinds[i] in kinds)

    def ending(self, at: int, *, any_case: bool = True) -> int:
        """After an apostrophe and an ending, or `at`."""
        for ending in ENDINGS if self.text[at : at + 1] == "'" else ():
            found = self.text[at + 1 : at + 1 + len(ending)]
            if found == ending or (any_case and found.lower() == ending):
                return at + 1 + len(ending)
        return at

    def signs(self, at: int) -> int:
        """After one space at most, and characters of no other class."""
        start = at + 1 if self.text[at] == " " else at
        stop = self.run(start, lambda i: self.kinds[i] not in {"space", "N", *self.word})
        return stop if stop > start else at

    def spaces(self, at: int, *, breaks: bool = True) -> int:
        """Up to the last line break; else all but the last space, which belongs to a word."""
        stop = self.of(at, {"space"})
        last_break = max(self.text.rfind("\r", at, stop), self.text.rfind("\n", at, stop))
        if breaks and last_break >= 0:
            return last_break + 1
        return stop if stop == len(self.text) or stop == at + 1 else stop - 1


def _words(t: _Text, at: int) -> int:
    end = t.ending(at)
    if end == at:
        glued = t.text[at] not in "\r\n" and t.kinds[at] not in ("L", "N")
        for first in (at + 1, at) if glued else (at,):  # the optional character, else without
            stop = t.of(first, t.word)
            if stop > first:
                return stop
    return end if end > at else _digits_signs_spaces(t, at)


def _digits_signs_spaces(t: _Text, at: int) -> int:
    end = t.run(at, lambda i: t.kinds[i] == "N", t.n_digits)
    if end == at:
        end = t.signs(at)
        end = t.run(end, lambda i: t.text[i] in "\r\n") if end > at else at
    return end if end > at else t.spaces(at)


def _gpt2(t: _Text, at: int) -> int:
    end = t.ending(at, any_case=False)
    first = at + 1 if t.text[at] == " " else at
    for kind in ("L", "N"):
        if end == at and t.of(first, {kind}) > first:
            end = t.of(first, {kind})
    if end == at:
        end = t.signs(at)
    return end if end > at else t.spaces(at, breaks=False)


def _kimi(t: _Text, at: int) -> int:
    def han(i: int) -> bool:
        return any(low <= ord(t.text[i]) <= high for low, high in HAN)

    def of(i: int, kinds: set[str]) -> bool:
        category = unicodedata.category(t.text[i])
        return not han(i) and (category in kinds or category[0] in kinds)

    end = t.run(at, han)
    if end > at:
        return end
    glued = t.text[at] not in "\r\n" and t.kinds[at] not in ("L", "N")
    firsts = (at + 1, at) if glued else (at,)
    for first in firsts:  # capitals, then at least one that is none
        middle = t.run(first, lambda i: of(i, UPPER))
        while middle >= first:
            if middle < len(t.text) and of(middle, LOWER):
                stop = t.run(middle, lambda i: of(i, LOWER))
                return _folded_ending(t, stop)
            middle -= 1
    for first in firsts:
        middle = t.run(first, lambda i: of(i, UPPER))
        if middle > first:
            return _folded_ending(t, t.run(middle, lambda i: of(i, LOWER)))
    return _digits_signs_spaces(t, at)


def _folded_ending(t: _Text, at: int) -> int:
    """As `ending`, and the long s counts as one."""
    return at + 2 if t.text[at : at + 2] == "'\u017f" else t.ending(at)


_SPLITS = {"kimi-k2": _kimi, **dict.fromkeys(("granite-docling", "gpt-2", "mpt", "olmo"), _gpt2)}
"""By `pre`; the others go by words."""
