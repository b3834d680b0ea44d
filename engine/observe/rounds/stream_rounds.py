"""Rounds derived from the counters of a stream.

The server increments `draft_n` when it drafts, `draft_n_accepted` and `predicted_ms` when a
verification is complete, all before the round's first token is sent; then `predicted_n` rises by
one per token. So chunks with the same `predicted_ms` belong to one round, and differences of the
counters are its figures. A chunk may contain several tokens: those that end inside a character have
no chunk of their own.

Nearly all events of a kept stream are additions: they add text to an answer and nothing else. They
are parsed by their type, in a third of the usual time, many at a time.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.foreign import LONGEST_DRAFT, Count, Size, are_whole
from engine.observe.rounds.log_rounds import LogRound
from engine.observe.rounds.stream import MOST_ANSWERS, Chunk, Timings, message
from engine.observe.rounds.withheld_tokens import (
    Chunks,
    Merged,
    NoShareError,
    PlaneReach,
    only_share,
    possible_shares,
)

_MOST_HELD = 32
_MOST_OPEN = 1 << 12
"""Consecutive rounds that share held-back tokens."""


class _Choice(Struct, forbid_unknown_fields=True, gc=False):
    delta: dict[Literal["content", "reasoning_content", "reasoning", "role"], str | None] | None = (
        None
    )
    text: str | None = None
    index: Annotated[int, Meta(ge=0, lt=MOST_ANSWERS)] = 0
    token_ids: tuple[Count, ...] | None = None
    logprobs: None = None
    finish_reason: None = None
    stop_reason: None = None


class Addition(Struct, forbid_unknown_fields=True, gc=False):
    """An event of /v1/completions or /v1/chat/completions that only adds text, or one of
    /completion or ollama, without `choices` and id. Used are `index`, `content` and `tokens`;
    values equal in other events of its stream are not kept."""

    id: str = ""
    choices: tuple[_Choice] | None = None
    created: Size = 0
    model: str = ""
    object: str = ""
    system_fingerprint: str | None = None
    usage: None = None
    timings: Timings | None = None
    content: str = ""
    stop: bool = False
    tokens: tuple[Count, ...] = ()
    tokens_predicted: Count | None = None
    tokens_evaluated: Count | None = None
    index: Annotated[int, Meta(ge=0, lt=MOST_ANSWERS)] = 0
    id_slot: int = 0
    created_at: str = ""
    response: str = ""
    message: dict[Literal["role", "content", "thinking"], str] | None = None
    done: bool = True

    @property
    def token_id(self) -> int | None:
        """Of the last token, in an event of /completion."""
        return self.tokens[-1] if self.tokens and self.tokens_predicted is not None else None

    @property
    def chunk(self) -> Chunk:
        """The same as from any event."""
        return Chunk(
            self.index,
            self.content,
            self.token_id,
            self.tokens,
            timings=self.timings,
            count=self.tokens_predicted,
        )


_DECODER, _ENCODER = msgspec.json.Decoder(Addition), msgspec.json.Encoder()
_DIGITS = b"0123456789"
_LONGEST = 1 << 11
"""Characters of an event."""


def additions(texts: Iterable[str]) -> Iterator[tuple[str, Addition | None]]:
    """Events of a stream, with runs of additions to one answer except for the first and last of
    each run, which hold the common values; None for other events. texts: one per event."""
    nothing: Any = None
    text = one = nothing
    follows = False  # of the kind of the event before
    for after in chain(texts, [""]):
        found = _addition(after)
        goes_on = one is not None and found is not None and one[1] == found[1]
        if text is not None:
            yield text, one[0] if follows and goes_on else None
        text, one, follows = after, found, goes_on


def _addition(text: str) -> tuple[Addition, tuple[Any, ...]] | None:
    """An event, and what it has in common with the next one of its answer: everything but digits
    and the added text, so that duplicate keys occur in none of them if not in the first and
    last."""
    if len(text) > _LONGEST or text[:1] == '"':
        return None  # a reply in one piece, or a text
    try:
        found = _DECODER.decode(data := text.encode())
    except (msgspec.MsgspecError, ValueError):
        return None
    choices, timings = found.choices, found.timings
    stream: tuple[Any, ...]
    """Identifies a stream: its id, or the time of the prompt."""
    if found.stop or bool(found.id) == (choices is None):
        return None
    if choices is not None:
        if found.content or found.tokens or found.tokens_predicted is not None:
            return None
        (one,), stream = choices, (found.id,)
        found.content = (one.text or "") if one.delta is None else message(one.delta)
        found.index, found.tokens, found.choices = one.index, one.token_ids or (), None
    elif not found.done and found.created_at:
        stream, said = (), found.message or {}
        found.content = found.response or said.get("thinking", "") + said.get("content", "")
    elif timings is None or None in (found.tokens_predicted, found.tokens_evaluated):
        return None
    else:
        stream = timings.cache_n, timings.prompt_n, timings.prompt_ms
    if not (added := found.content):
        return None
    found.id = found.model = found.object = found.created_at = found.response = ""
    found.message = None
    is_plain = "\\" not in text or "\\u" not in text
    quoted = _ENCODER.encode(added) if is_plain else json.dumps(added).encode()
    return found, (*stream, found.index, data.replace(quoted, b"", 1).translate(None, _DIGITS))


def packed(value: Any) -> Any:
    """A reply of llama-server with its ids as an array, an eighth of their size."""
    ids = value.get("tokens") if isinstance(value, dict) and "timings" in value else None
    if isinstance(ids, list) and len(ids) > 64 and are_whole(ids):
        value["tokens"] = array("i", ids)
    return value


class ContradictionError(ValueError):
    """The counters cannot be those of rounds. The message is a sentence without its end."""


class StreamedToken(Struct, frozen=True, gc=False):
    """An output token. token_id, text: None if not given. alone: the text is this token's only."""

    token_id: int | None = None
    text: str | None = None
    alone: bool = False


class ObservedRound(Struct):
    """One verification, or several whose figures only arrived as sums.

    name_ms: the server's predicted_ms at its end. before_ms: that of the previous round. first:
    number of its first token, from 1; 0 without tokens and times of its own. path: none, seq_rm,
    restore or "" if unknown. n_merged: minimum number of rounds. is_cut: the answer ended inside
    it. is_certain: False if hidden tokens could be divided otherwise. log: its round in the
    server's log. judges_again: after a restore the accepted tokens are verified again, which gives
    one more.
    """

    name_ms: float
    before_ms: float
    drafted: int
    accepted: int
    first: int
    tokens: tuple[StreamedToken, ...]
    path: str
    n_merged: int = 1
    is_cut: bool = False
    is_certain: bool = True
    log: LogRound | None = None
    judges_again: bool = True

    @property
    def emitted(self) -> int:
        return len(self.tokens)

    @property
    def undone(self) -> int:
        """Drafted tokens that were not accepted."""
        return self.drafted - self.accepted

    def kinds(self) -> list[str]:
        """Per token: accepted, bonus, replacement, target or unknown."""
        if self.n_merged > 1 or not self.is_certain:
            return ["unknown"] * self.emitted
        if not self.drafted:
            return ["target"] * self.emitted
        own = "bonus" if self.accepted == self.drafted else "replacement"
        kinds = ["accepted"] * self.accepted + [own, "target"]
        # a log may contain more tokens than a round can have
        return (kinds + ["unknown"] * (self.emitted - len(kinds)))[: self.emitted]


class StreamRounds:
    """The rounds of one answer of a stream.

    A round is returned once nothing that may follow can change its figures, the rest at the end.
    """

    def __init__(self, reach: PlaneReach) -> None:
        """reach: knowledge about the server, shared by its answers."""
        self._reach = reach
        self.told = Timings(0, 0, 0.0, 0, 0.0, 0, 0)
        """The latest counters."""
        self._group: Chunks | None = None
        self._open: list[Chunks] = []
        self._segments: list[tuple[list[Chunks], int, int]] = []
        """Groups that share hidden tokens among themselves only, and the tokens before and at their
        end."""
        self._closed = 1  # the first token is sampled from the prompt
        self._lengths: set[int] = set()
        self._tried: object = None
        self._tokens: list[StreamedToken] = []
        self._n_dropped = 0
        self._is_text_whole = True

    @property
    def open_ms(self) -> float:
        """End of the earliest round still to be returned, on the server's clock."""
        groups = self._segments[0][0] if self._segments else self._open
        if groups:
            return groups[0].name_ms
        return self._group.name_ms if self._group else 0.0

    def add(self, chunk: Chunk) -> list[ObservedRound]:
        """Add a chunk with tokens, or the last one; returns rounds that are settled now, in order.
        Raises ContradictionError, and must not be used afterwards."""
        now, before = chunk.timings, self.told
        assert now is not None
        n_new = now.predicted_n - before.predicted_n
        drafted = now.draft_n - before.draft_n
        accepted = now.draft_n_accepted - before.draft_n_accepted
        later = now.predicted_ms - before.predicted_ms
        _check(n_new, drafted, accepted, later, is_first=not before.predicted_n)
        if not self._reach.hold_back(max(n_new - 1, 0)):
            raise ContradictionError(f"predicted_n rose by {n_new:,} at once")
        self.told = now
        if not n_new:
            if chunk.text and self._tokens:  # more of a token that had a chunk
                last = self._tokens[-1]
                self._tokens[-1] = StreamedToken(last.token_id, (last.text or "") + chunk.text)
                self._is_text_whole = True
            return []
        self._tokens += [StreamedToken()] * (n_new - 1)
        alone = n_new == 1 and self._is_text_whole and bool(chunk.text)
        text = None if chunk.last else chunk.text
        self._tokens.append(StreamedToken(chunk.token_id, text, alone))
        self._is_text_whole = bool(chunk.text)
        found: list[ObservedRound] = []
        if not before.predicted_n:
            found.append(ObservedRound(0.0, 0.0, 0, 0, 1, self._take(1), ""))
            self._group = Chunks(0.0, 0.0, 0, 0, 0, 1, 1)
            n_new -= 1
            if not n_new:
                self._group.name_ms = now.predicted_ms
                return found
        assert self._group is not None
        if now.predicted_ms == self._group.name_ms:
            self._group.last_seen = now.predicted_n
            return found
        return found + self._next(now, n_new, drafted, accepted)

    def go_on(self, additions: Sequence[Addition], at: int) -> tuple[int, list[ObservedRound]]:
        """Add consecutive additions of one token each: the rest of the previous chunk's round and,
        if it withholds nothing, the first one of the next. Returns where others begin, and rounds
        that are settled now."""
        now, group, begin = self.told, self._group, at
        found: list[ObservedRound] = []
        if group is None or group.name_ms != now.predicted_ms:
            return at, found
        for one in islice(additions, begin, None):
            more = one.timings
            if more is None or more.predicted_n != now.predicted_n + 1:
                break
            drafted = more.draft_n - now.draft_n
            accepted = more.draft_n_accepted - now.draft_n_accepted
            if (later := more.predicted_ms - now.predicted_ms) > 0:
                is_valid = 0 <= accepted <= drafted <= LONGEST_DRAFT
                if not (is_valid and self._is_plain(group, now.predicted_n)):
                    break
                found = self._next(more, 1, drafted, accepted)
            elif later or drafted or accepted:
                break
            self._tokens.append(StreamedToken(one.token_id, one.content, self._is_text_whole))
            self._is_text_whole, now, at = True, more, at + 1
            if found:
                break
            group.last_seen = more.predicted_n
        self.told = now
        self._reach.hold_back(0, at - begin)
        return at, found

    def _is_plain(self, group: Chunks, stop: int) -> bool:
        """Whether a group that ends with token `stop` is one round, and all before it are known."""
        if self._open or self._segments or group.gap or group.last_seen < 2:
            return False
        n_own = stop - self._closed - group.accepted
        return n_own == 1 or (n_own == 2 and group.undone > 0)

    def _next(self, now: Timings, n_new: int, drafted: int, accepted: int) -> list[ObservedRound]:
        """Begin a group with a chunk of new tokens; returns rounds that are settled now."""
        assert self._group is not None
        self._push_group()
        at = now.predicted_n
        if n_new == 1:
            self._close(at - 1)
        self._group = Chunks(
            now.predicted_ms, self._group.name_ms, drafted, accepted, n_new - 1, at, at
        )
        return self._settle()

    def end(self, *, is_whole: bool) -> list[ObservedRound]:
        """End of the answer: returns the open rounds. is_whole: the last one was not cut."""
        if self._group is None:
            return []
        self._group.is_cut = not is_whole
        self._push_group()
        self._group = None
        self._close(self.told.predicted_n)
        return self._settle(for_good=True)

    def _push_group(self) -> None:
        if self._group is not None and self._group.last_seen > 1:
            self._open.append(self._group)
            if len(self._open) > _MOST_OPEN:
                raise ContradictionError(f"{_MOST_OPEN:,} rounds in a row withhold tokens")

    def _close(self, stop: int) -> None:
        """Nothing is hidden after token `stop`: the open groups share what comes before."""
        groups, start = self._open, self._closed
        self._open, self._closed = [], max(stop, 1)
        if not groups:
            return
        self._segments.append((groups, start, stop))
        group = groups[0]
        if len(groups) == 1 and not group.gap and not group.is_cut:
            self._lengths.add(group.drafted)
            if group.undone:
                path = {1: "seq_rm", 2: "restore"}.get(stop - start - group.accepted, "")
                self._reach.learn(path, group.undone)

    def _settle(self, *, for_good: bool = False) -> list[ObservedRound]:
        """The rounds that nothing can change, or all closed ones."""
        found: list[ObservedRound] = []
        while self._segments:
            (groups, start, stop), reach, lengths = self._segments[0], self._reach, self._lengths
            if (share := only_share(groups, stop - start, reach)) is not None:
                del self._segments[0]
                found.append(self._round(groups[0], [share]))
                continue
            must = for_good or len(self._segments) >= _MOST_HELD
            known = (start, reach.deepest_removal, reach.shallowest_restore, len(lengths))
            if known == self._tried and not must:
                break
            self._tried = known
            try:
                shares = possible_shares(groups, start, stop, reach, lengths)
            except NoShareError as error:
                raise ContradictionError(str(error)) from None
            unsure = [len({s.n_tokens for s in one}) > 1 for one in shares if len(one) > 1]
            if unsure and not must and (any(unsure) or len(lengths) < 2):
                break  # more rounds could determine these
            del self._segments[0]
            found += [
                self._round(group, options) for group, options in zip(groups, shares, strict=True)
            ]
        return found

    def _round(self, group: Chunks, options: list[Merged]) -> ObservedRound:
        first, share, is_only = self._n_dropped + 1, options[0], len(options) == 1
        is_certain = is_only or len({(one.n_tokens, one.n_merged) for one in options}) == 1
        path = share.path if is_only else ""
        if group.undone and self._reach.is_contradictory:
            path = ""  # the server does not behave as assumed
        return ObservedRound(
            group.name_ms,
            group.before_ms,
            group.drafted,
            group.accepted,
            first,
            self._take(share.n_tokens),
            path,
            share.n_merged,
            group.is_cut,
            is_certain,
        )

    def _take(self, n_tokens: int) -> tuple[StreamedToken, ...]:
        taken = tuple(self._tokens[:n_tokens])
        del self._tokens[:n_tokens]
        self._n_dropped += n_tokens
        return taken


def _check(n_new: int, drafted: int, accepted: int, later: float, *, is_first: bool) -> None:
    """Raises ContradictionError if counters cannot rise this way. is_first: before any token."""
    if n_new < 0 or drafted < 0 or accepted < 0 or later < 0:
        names = "predicted_n", "draft_n", "draft_n_accepted", "predicted_ms"
        every = zip(names, (n_new, drafted, accepted, later), strict=True)
        what, grown = next((what, grown) for what, grown in every if grown < 0)
        raise ContradictionError(f"{what} decreased by {-grown:g}")
    if drafted > LONGEST_DRAFT:
        raise ContradictionError(f"draft_n rose by {drafted:,} at once")
    if accepted > drafted:
        raise ContradictionError(
            f"draft_n_accepted rose by {accepted} where draft_n rose by {drafted}"
        )
    if drafted and (not n_new or not later):
        raise ContradictionError(f"draft_n rose by {drafted} without a new round")
    if drafted and is_first and n_new == 1:
        raise ContradictionError(f"{drafted} tokens were drafted before the first one")
