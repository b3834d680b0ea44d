"""Parser of memory scripts: TOML scenarios, checked before anything is allocated.

FORMAT is the whole language, as `draftscope memory --help-all` prints it. Files of earlier versions
(.memory) are plain text, with title, about and policies as statements.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from engine.compare.memory_script import (
    EXACT,
    MODELS,
    Action,
    CompareRanges,
    ContextSpec,
    DecodeTokens,
    ExpectFacts,
    MeasureBound,
    MemoryScript,
    PositionRange,
    SequenceOperation,
    Statement,
    TokenPart,
    Tokens,
)
from engine.compare.scenario import filled, wrong
from engine.errors import OptionError
from engine.files import user_text
from engine.options import MEMORY_FAULTS, ROLLBACK_POLICIES

FORMAT = Path(__file__).with_name("memory_script.txt").read_text(encoding="utf-8").rstrip()

_MOST_BYTES, _MOST_CONTEXTS, _MOST_TOKENS = 1 << 16, 32, 1 << 14
_REMEDY = "Correct that line; `draftscope memory --help-all` describes the syntax."
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_ITEM = re.compile(r"([A-Za-z][\w-]*)(?:\[(-?\d*):(-?\d*)\])?(?:\+(\d+))?|(\d+)")
_COMPARED = re.compile(r"([a-z_0-9]+)(<=|>=|=|<|>)(\S+)")
FACTS = ("pos", "valid", "pending", "cells", "duplicates", "cell")
MEASURES = ("nmse", "max_abs", "relative", "error")
_PATTERN = "pattern"


def memory_scripts(folder: Path) -> tuple[MemoryScript, ...]:
    """All scripts of a folder by name. Raises OptionError for a file that is wrong."""
    return tuple(read_script(path) for path in sorted(folder.glob("*.toml")))


def read_script(path: Path) -> MemoryScript:
    """One script. Raises OptionError, naming file and line."""
    return parse_script(path.stem, path.name, user_text(path, _MOST_BYTES))


@dataclass(frozen=True, slots=True)
class _ScriptFile:
    """The keys of a file."""

    title: str
    steps: str
    about: str = ""
    policies: tuple[str, ...] = tuple(ROLLBACK_POLICIES)


def parse_script(name: str, file: str, text: str) -> MemoryScript:
    """Parse a script: TOML if `file` ends in .toml, else the format of earlier versions. Raises
    OptionError, naming `file` and the line."""
    parser, first = _ScriptParser(), 1
    if file.endswith(".toml"):
        text, first = parser.read_keys(text, Path(file))
    for number, whole in enumerate(text.splitlines(), first):
        line = _without_comment(whole)
        if line:
            try:
                parser.read(number, line)
            except _Wrong as wrong:
                raise OptionError(f"{file}, line {number}: {wrong}.", _REMEDY) from None
    if not parser.statements:
        raise OptionError(f"{file} does nothing.", "Write a context and what happens in it.")
    policies = parser.policies
    return MemoryScript(
        name,
        parser.title or name,
        " ".join(parser.about),
        policies,
        tuple(replace(one, policies=one.policies & set(policies)) for one in parser.statements),
    )


def _without_comment(line: str) -> str:
    text, quote, rest = line.rpartition('"')  # a text may contain the sign
    return (text + quote + re.sub(r"(^|\s)#.*", "", rest)).strip()


class _Wrong(Exception):  # noqa: N818 - the words of an OptionError
    """An error in a line."""


class _ScriptParser:
    def __init__(self) -> None:
        self._has_keys = False
        self.title, self.about = "", list[str]()
        self.policies: tuple[str, ...] = tuple(ROLLBACK_POLICIES)
        self.statements: list[Statement] = []
        self._tokens: dict[str, Tokens] = {}
        self._contexts: dict[str, ContextSpec] = {}
        self._made: dict[str, frozenset[str]] = {}
        self._for = frozenset(ROLLBACK_POLICIES)
        self._block = self._for, MODELS
        self._n_tokens = 0

    def read_keys(self, text: str, path: Path) -> tuple[str, int]:
        """Read title, about and policies from TOML. Returns the steps and the number of their first
        line. Raises OptionError."""
        self._has_keys, text = True, text.replace("\r\n", "\n")
        file = filled(_ScriptFile, text, path)
        self.title, self.about = file.title, [file.about]
        try:
            self.policies = _policies(" ".join(file.policies))
        except _Wrong as error:
            raise wrong(path, "policies", f"is wrong: {error}") from None
        start = re.search(
            rf"^[ \t]*steps[ \t]*=[ \t]*'''\n?(?={re.escape(file.steps)}''')", text, re.M
        )
        if start is None:
            raise wrong(path, "steps", "is not a text between ''' and '''")
        return file.steps, text.count("\n", 0, start.end()) + 1

    def read(self, number: int, line: str) -> None:
        text, (policies, models) = line, self._block
        if line.startswith("["):
            guard, closed, line = line[1:].partition("]")
            if not closed:
                raise _Wrong("the list of policies has no closing bracket")
            every = guard.strip() == "all"
            guard = guard.replace(",", " ")
            models = frozenset(MODELS & set(guard.split())) or MODELS
            names = " ".join(word for word in guard.split() if word not in MODELS)
            every |= not names and models != MODELS
            policies = frozenset(ROLLBACK_POLICIES if every else _policies(names))
            if not line.strip():
                self._block = policies, models
                return
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word in ("title", "about", "policies") and self._has_keys:
            raise _Wrong(f"{word} is a key of the file, to be set before the steps")
        if word == "title":
            self.title = rest
        elif word == "about":
            self.about.append(rest)
        elif word == "policies":
            if self.statements:
                raise _Wrong("policies come before the first context")
            self.policies = _policies(rest)
        elif word == "tokens":
            self._define(rest)
        else:
            self._for = policies & set(self.policies)
            action = self._action(word, rest)
            self.statements.append(Statement(number, text, policies, action, models))

    def _action(self, word: str, rest: str) -> Action:
        words = rest.split()
        if word == "context":
            return self._context(words)
        if word in ("decode", "replay"):
            return self._decode(rest, word == "replay")
        if word == "check":
            return self._check(rest)
        context, numbers = self._whose(words)
        if word in ("save", "load", "checkpoint", "restore"):
            return self._copy(word, context, numbers)
        if word == "expect":
            facts = tuple(map(_fact, numbers[1:]))
            if not facts:
                raise _Wrong("expect names no fact")
            return ExpectFacts(context.name, _seq(context, numbers[:1]), facts)
        return _operation(word, context, numbers)

    def _whose(self, words: list[str]) -> tuple[ContextSpec, list[str]]:
        if not words:
            raise _Wrong("a context is missing")
        if words[0] not in self._contexts:
            known = ", ".join(self._contexts) or "none"
            raise _Wrong(f"there is no context {words[0]!r} (known: {known})")
        self._must_be_there(f"context {words[0]}")
        return self._contexts[words[0]], words[1:]

    def _must_be_there(self, what: str) -> None:
        missing = self._for - self._made.get(what, frozenset())
        if missing:
            raise _Wrong(f"there is no {what} under {', '.join(sorted(missing))}")

    def _define(self, rest: str) -> None:
        name, _, value = (part.strip() for part in rest.partition("="))
        if not _NAME.fullmatch(name) or name == _PATTERN:
            raise _Wrong(f"{name!r} cannot be the name of tokens")
        if len(value) > 2 and value[0] == value[-1] == '"':
            self._tokens[name] = (TokenPart(text=value[1:-1]),)
        else:
            self._tokens[name] = self._expression(value)

    def _expression(self, text: str) -> Tokens:
        parts: list[TokenPart] = []
        for word in text.split():
            found = _ITEM.fullmatch(word)
            if found is None:
                raise _Wrong(f"{word!r} is not a token, name or pattern")
            name, start, stop, shift, number = found.groups()
            if number is not None:
                if parts and not parts[-1].is_changed:
                    parts[-1] = TokenPart(ids=(*parts[-1].ids, _number(number)))
                else:
                    parts.append(TokenPart(ids=(_number(number),)))
                continue
            first, last = (_number(edge) if edge else None for edge in (start, stop))
            parts.extend(
                self._named(name, first, last, _number(shift or "0"), cut=start is not None)
            )
        if not parts:
            raise _Wrong("tokens are missing")
        if sum(part.n_most for part in parts) > _MOST_TOKENS:
            raise _Wrong(f"there are more than {_MOST_TOKENS} tokens")
        return tuple(parts)

    def _named(
        self, name: str, first: int | None, last: int | None, shift: int, *, cut: bool
    ) -> Tokens:
        if name == _PATTERN:
            if first is None or last is None or not 0 <= first < last:
                raise _Wrong("the pattern needs positions, such as pattern[16:56]")
            return (TokenPart(is_pattern=True, start=first, stop=last, shift=shift),)
        if name not in self._tokens:
            raise _Wrong(f"there are no tokens {name!r}")
        parts = self._tokens[name]
        if not cut:
            return tuple(replace(part, shift=part.shift + shift) for part in parts)
        if len(parts) > 1 or parts[0].is_pattern or not parts[0].start is parts[0].stop is None:
            raise _Wrong(f"{name!r} is composed of parts and cannot be sliced")
        return (replace(parts[0], start=first, stop=last, shift=parts[0].shift + shift),)

    def _context(self, words: list[str]) -> ContextSpec:
        name = words[0] if words else ""
        if not _NAME.fullmatch(name):
            raise _Wrong(f"{name!r} cannot be the name of a context")
        if name in self._contexts:
            raise _Wrong(f"there is a context {name!r} already")
        if len(self._contexts) == _MOST_CONTEXTS:
            raise _Wrong(f"there are more than {_MOST_CONTEXTS} contexts")
        values: dict[str, int | str] = {}
        for word in words[1:]:
            key, _, value = word.partition("=")
            values[key] = _setting(key, value)
        self._made[f"context {name}"] = self._for
        self._contexts[name] = ContextSpec(name, **values)  # type: ignore[arg-type]
        return self._contexts[name]

    def _decode(self, rest: str, one_by_one: bool) -> DecodeTokens:
        name, _, parts = rest.partition(" ")
        context, _ = self._whose([name] if name else [])
        batch: dict[int, Tokens] = {}
        for part in parts.split(","):
            number, colon, tokens = part.partition(":")
            if not colon:
                raise _Wrong("each sequence is written as `0: tokens`")
            seq = _seq(context, number.split())
            if seq in batch:
                raise _Wrong(f"sequence {seq} is given twice")
            batch[seq] = self._expression(tokens)
            self._n_tokens += sum(part.n_most for part in batch[seq])
        if self._n_tokens > _MOST_TOKENS:
            raise _Wrong(f"more than {_MOST_TOKENS} tokens have been decoded here")
        return DecodeTokens(context.name, tuple(batch.items()), one_by_one)

    def _copy(self, word: str, context: ContextSpec, words: list[str]) -> SequenceOperation:
        if len(words) != 2 or not _NAME.fullmatch(words[1]):
            raise _Wrong(f"{word} takes a context, a sequence and a name")
        label, partial = words[1], word in ("checkpoint", "restore")
        what = f"checkpoint {label} of {context.name}" if partial else f"sequence saved as {label}"
        if word in ("save", "checkpoint"):
            self._made[what] = self._made.get(what, frozenset()) | self._for
        else:
            self._must_be_there(what)
        return SequenceOperation(context.name, word, (_seq(context, words[:1]),), label=label)

    def _check(self, rest: str) -> CompareRanges:
        sides = re.split(r" = ", rest)
        if len(sides) != 2:
            raise _Wrong("a check is written as `check A 0 6:9 = B 0 6:9 exact`")
        context, words = self._whose(sides[0].split())
        left = _place(context, words)
        if left is None:
            raise _Wrong("the left side is a context, a sequence and positions if logits are meant")
        other, words = self._whose(sides[1].split())
        if not words:
            raise _Wrong("a check needs a bound, such as exact or nmse<=1e-6")
        right = _place(other, words[:-1])
        if right is None:
            _seq(other, [str(left.seq)])
            right = replace(left, context=other.name)
        elif right.stop == 0:
            right = replace(left, context=other.name, seq=right.seq)
        for_states = left.stop == 0
        if left.stop - left.start != right.stop - right.start:
            raise _Wrong("both sides of a check need equally many positions")
        return CompareRanges(left, right, _bound(words[-1], for_states=for_states), for_states)


def _place(context: ContextSpec, words: list[str]) -> PositionRange | None:
    if len(words) == 1:
        return PositionRange(context.name, _seq(context, words))
    if len(words) != 2:
        return None
    start, colon, stop = words[1].partition(":")
    first = _number(start)
    last = _number(stop) if colon else first + 1
    if not 0 <= first < last:
        raise _Wrong(f"{words[1]!r} are no positions")
    if last - first > _MOST_TOKENS:
        raise _Wrong(f"there are more than {_MOST_TOKENS} positions")
    return PositionRange(context.name, _seq(context, words[:1]), first, last)


def _bound(word: str, *, for_states: bool) -> MeasureBound:
    if word == "exact":
        return MeasureBound("error") if for_states else EXACT
    if word == "top1" and not for_states:
        return MeasureBound("top1")
    found = _COMPARED.fullmatch(word)
    measures = MEASURES[3:] if for_states else MEASURES[:3]
    if found is None or found[1] not in measures or found[2] not in ("<=", ">"):
        raise _Wrong(f"{word!r} is not a bound on {', '.join(measures)}")
    try:
        limit = float(found[3])
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise _Wrong(f"{found[3]!r} is not a number")
    return MeasureBound(found[1], found[2], limit)


_ARITY = {
    "seq_rm": (2, 3),
    "seq_cp": (2, 2),
    "seq_keep": (1, 1),
    "seq_add": (4, 4),
    "clear": (0, 1),
}


def _operation(word: str, context: ContextSpec, words: list[str]) -> SequenceOperation:
    if word not in _ARITY:
        raise _Wrong(f"{word!r} is not a statement")
    refused = word == "seq_rm" and words[-1:] == ["refused"]
    words = words[:-1] if refused else words
    fewest, most = _ARITY[word]
    if not fewest <= len(words) <= most:
        count = str(fewest) if fewest == most else f"{fewest} or {most}"
        raise _Wrong(f"{word} takes {count} numbers after the context")
    numbers = tuple(map(_number, words))
    for seq in numbers[: 2 if word == "seq_cp" else 1]:
        _seq(context, [str(seq)])
    return SequenceOperation(context.name, word, numbers, not refused)


def _fact(word: str) -> tuple[str, str, int]:
    found = _COMPARED.fullmatch(word)
    if found is None or found[1] not in FACTS:
        raise _Wrong(f"{word!r} is not a fact about {', '.join(FACTS)}")
    return found[1], found[2], _number(found[3])


_LIMITS = {
    "n_seqs": range(1, 65),
    "n_rs_seq": range(257),
    "n_ctx": range(1, (1 << 16) + 1),
    "n_ubatch": range(1, 4097),
    "keep": range(257),
}
_CHOICES = {
    "kv": ("per-seq", "unified"),
    "split": ("equal", "seq"),
    "policy": ROLLBACK_POLICIES,
    "fault": MEMORY_FAULTS,
}


def _setting(key: str, value: str) -> int | str:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise _Wrong(f"{key} is {value!r}, not one of {', '.join(_CHOICES[key])}")
        return value
    if key not in _LIMITS:
        known = ", ".join(field.name for field in fields(ContextSpec)[1:])
        raise _Wrong(f"a context has no {key!r}; known are {known}")
    number, allowed = _number(value), _LIMITS[key]
    if number not in allowed:
        raise _Wrong(f"{key} is {number}, outside {allowed.start}..{allowed[-1]}")
    return number


def _policies(text: str) -> tuple[str, ...]:
    names = text.replace(",", " ").split()
    for name in names:
        if name not in ROLLBACK_POLICIES:
            raise _Wrong(f"{name!r} is not a policy; known are {', '.join(ROLLBACK_POLICIES)}")
    if not names:
        raise _Wrong("no policy is named")
    return tuple(name for name in ROLLBACK_POLICIES if name in names)


def _seq(context: ContextSpec, words: list[str]) -> int:
    if len(words) != 1:
        raise _Wrong("a sequence is one number")
    seq = _number(words[0])
    if not 0 <= seq < context.n_seqs:
        raise _Wrong(f"context {context.name} has sequences 0..{context.n_seqs - 1}, not {seq}")
    return seq


def _number(word: str) -> int:
    digits = word.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise _Wrong(f"{word!r} is not a whole number")
    return int(word)
