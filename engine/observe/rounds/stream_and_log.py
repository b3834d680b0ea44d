"""Join of a stream's rounds with those of the server's log: the stream gives prompt, settings and
times, the log the drafts, the paths and tokens that the stream holds back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from msgspec.structs import replace

from engine.observe.rounds.log_prompts import LoggedPrompt
from engine.observe.rounds.log_reader import LogReader
from engine.observe.rounds.log_rounds import UNKNOWN_TOKEN, LogRequest, LogRound
from engine.observe.rounds.stream import Timings
from engine.observe.rounds.stream_rounds import ObservedRound, StreamedToken

_MOST_LOOKED_AT = 256
_ENOUGH = 4
"""Rounds of a stream before its request is searched for in a growing log."""


_JOINED = LogRound(None, 0, is_complete=True)


class AnotherRunError(ValueError):
    """The log contradicts the stream. The message is a clause without its end."""


class LogJoin:
    """One answer of a stream and its request in a log."""

    def __init__(self, log: LogReader, taken: set[int]) -> None:
        """taken: numbers of the log's requests assigned to other answers; shared by all."""
        self._log, self._taken = log, taken
        self._request: LogRequest | None = None
        self.waiting: list[ObservedRound] = []
        """Rounds of the stream that the log does not have yet."""
        self._next = 0

    def joined(self, told: Timings, *, is_over: bool) -> list[ObservedRound]:
        """The rounds known from both by now. told: the stream's counters so far. is_over: the
        stream has ended.

        Raises AnotherRunError, and then returns nothing more.
        """
        if self._request is None and not self._find(told, is_over):
            return []
        found: list[ObservedRound] = []
        while self.waiting:
            # those that share tokens; None if more of them may follow
            n_rows = next((i or 1 for i, one in enumerate(self.waiting) if _is_plain(one)), None)
            if n_rows is None and not is_over:
                break
            rows = self.waiting[: n_rows or len(self.waiting)]
            known = self._join(rows)
            if known is None:
                break
            found += known
            del self.waiting[: len(rows)]
        return found

    def give_up(self) -> list[ObservedRound]:
        """The waiting rounds, from the stream alone."""
        waiting, self.waiting = self.waiting, []
        return waiting

    @property
    def prompt(self) -> LoggedPrompt | None:
        """The logged prompt."""
        return self._request.prompt if self._request is not None else None

    @property
    def is_found(self) -> bool:
        """Whether the log has the request."""
        return self._request is not None

    def take_sums(self, told: Timings) -> None:
        """Reserve the logged request of an answer with sums only."""
        for i, request in self._free():
            if _has_sums(request, told):
                self._taken.add(i)
                self._request = request
                return

    def _free(self) -> Iterator[tuple[int, LogRequest]]:
        """The log's newest requests that no answer has taken."""
        n = len(self._log.requests)
        for i in range(max(n - _MOST_LOOKED_AT, 0), n):
            if i not in self._taken:
                yield i, self._log.requests[i]

    def _find(self, told: Timings, is_over: bool) -> bool:
        if not self.waiting or (len(self.waiting) < _ENOUGH and not is_over):
            return False
        found = [i for i, request in self._free() if self._may_be(request, told)]
        if len(found) > 1 and not is_over:
            return False  # equal so far
        if is_over:
            found.sort(key=lambda i: not _has_sums(self._log.requests[i], told))
        for i in found[:1]:
            self._taken.add(i)
            self._request = self._log.requests[i]
        return bool(found)

    def _may_be(self, request: LogRequest, told: Timings) -> bool:
        if self._log.is_light:
            drafted = [(r.drafted, r.accepted) for r in self.waiting if _is_plain(r) and r.drafted]
            logged = [(r.drafted, r.accepted) for r in request.rounds]
            return bool(logged) and all(a == b for a, b in zip(drafted, logged, strict=False))
        if request.first is None or request.n_prompt not in (None, told.cache_n + told.prompt_n):
            return False
        streamed = [token.token_id for row in self.waiting for token in row.tokens]
        if all(token is None for token in streamed[1:]):
            return self._agrees_in_counts(request, told)
        return _agree(streamed, request.ids)

    def _agrees_in_counts(self, request: LogRequest, told: Timings) -> bool:
        """Whether a stream's first rounds match a request by counts, for a stream without ids."""
        rows = list(takewhile(_is_plain, self.waiting[1:]))
        logged = [r for i, r in enumerate(request.rounds) if request.is_closed(i)]
        pairs = list(zip(rows, logged, strict=False))
        if not pairs:
            return _has_sums(request, told)
        return all(
            (row.drafted, row.accepted) == (part.drafted, part.accepted) for row, part in pairs
        )

    def _join(self, rows: list[ObservedRound]) -> list[ObservedRound] | None:
        """Rows that share tokens, completed from the log; None if it does not have them yet."""
        request = self._request
        assert request is not None
        if (row := rows[0]).first == 1:
            known = [] if request.first is None else [request.first]
            return [replace(row, tokens=_filled(row.tokens, known))] if known else [row]
        parts = self._parts(rows, request)
        if parts is None:
            return None
        if self._log.is_light and len(parts) != len(rows):
            return rows  # its rounds have no tokens to distinguish them by
        drafted, accepted = sum(r.drafted for r in rows), sum(r.accepted for r in rows)
        logged = sum(p.drafted for p in parts), sum(p.accepted for p in parts)
        if logged != (drafted, accepted):
            raise AnotherRunError(
                f"from token {rows[0].first} on, the stream has {accepted} of {drafted} drafted "
                f"tokens accepted, the log {logged[1]} of {logged[0]}"
            )
        for at in range(self._next, self._next + len(parts)):
            request.rounds[at] = _JOINED  # a log has no end: free what was used
        self._next += len(parts)
        if self._log.is_light or (len(rows) == 1 and len(parts) == 1):
            return list(map(_told, rows, parts))
        return _told_apart(rows, parts)

    def _parts(self, rows: list[ObservedRound], request: LogRequest) -> list[LogRound] | None:
        """The log's rounds for these rows; [] if the log does not determine them."""
        is_light = self._log.is_light
        wanted = sum(r.drafted if is_light else r.emitted for r in rows)
        parts: list[LogRound] = []
        so_far = 0
        while so_far < wanted:
            at = self._next + len(parts)
            if at >= len(request.rounds) or not request.is_closed(at):
                if not request.is_over:
                    return None
                if at >= len(request.rounds):
                    raise AnotherRunError(f"the log ends before token {rows[-1].first}")
            part = request.rounds[at]
            parts.append(part)
            so_far += part.drafted if is_light else len(part.tokens)
        is_cut = rows[-1].is_cut
        if so_far != wanted and not is_cut:
            raise AnotherRunError(
                f"after token {rows[0].first}, rounds of the log end at other tokens than those "
                "of the stream"
            )
        return parts


def _has_sums(request: LogRequest, told: Timings) -> bool:
    """Whether a logged request ended with these counters."""
    sums = request.predicted, request.drafted or 0, request.accepted or 0
    return sums == (told.predicted_n, told.draft_n, told.draft_n_accepted)


def _is_plain(row: ObservedRound) -> bool:
    return row.is_certain and row.n_merged == 1


def _agree(streamed: Sequence[int | None], logged: Sequence[int]) -> bool:
    """Whether known ids are equal up to the shorter length."""
    pairs = zip(streamed, logged, strict=False)
    return all(a is None or a == b or b == UNKNOWN_TOKEN[0] for a, b in pairs)


def path_of(part: LogRound) -> str:
    """The rollback path of a logged round."""
    if part.restored:
        return "restore"
    return "seq_rm" if part.drafted > part.accepted else "none"


def _filled(
    tokens: tuple[StreamedToken, ...], logged: Sequence[tuple[int, str]]
) -> tuple[StreamedToken, ...]:
    """Tokens with ids from the log. Raises AnotherRunError if ids differ."""
    if not _agree([token.token_id for token in tokens], [token for token, _ in logged]):
        raise AnotherRunError(f"the log has other ids than {[t.token_id for t in tokens]}")
    return tuple(
        token
        if token.token_id is not None or i >= len(logged) or logged[i] == UNKNOWN_TOKEN
        else replace(token, token_id=logged[i][0])
        for i, token in enumerate(tokens)
    )


def _told(row: ObservedRound, part: LogRound) -> ObservedRound:
    return replace(
        row, tokens=_filled(row.tokens, part.tokens), path=path_of(part), is_certain=True, log=part
    )


def _told_apart(rows: list[ObservedRound], parts: list[LogRound]) -> list[ObservedRound]:
    """The separate rounds of merged rows. They end with rows where tokens end together, else as
    long before the next known end as the log says."""
    tokens = [token for row in rows for token in row.tokens]
    ends = {row.first + row.emitted - 1: row.name_ms for row in rows}
    first, names, number = rows[0].first, [], rows[0].first - 1
    for part in parts:
        number += len(part.tokens)
        names.append(ends.get(number))
    names[-1] = rows[-1].name_ms
    for i in range(len(parts) - 2, -1, -1):
        after, here = parts[i + 1].end_us, parts[i].end_us
        if names[i] is None:
            if after is None or here is None:
                return rows
            names[i] = max((names[i + 1] or 0.0) - (after - here) / 1e3, rows[0].before_ms)
    found: list[ObservedRound] = []
    before = rows[0].before_ms
    for part, name in zip(parts, names, strict=True):
        at = first - rows[0].first
        mine = tuple(tokens[at : at + len(part.tokens)])
        assert name is not None
        is_last = part is parts[-1]
        found.append(
            ObservedRound(
                max(name, before),
                before,
                part.drafted,
                part.accepted,
                first,
                _filled(mine, part.tokens),
                path_of(part),
                is_cut=is_last and rows[-1].is_cut,
                log=part,
            )
        )
        first, before = first + len(mine), max(name, before)
    return found
