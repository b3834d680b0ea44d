"""State of one server process, built from the messages of its log: requests and rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np

from engine.foreign import COUNT, LONGEST_DRAFT, OutOfRangeError
from engine.observe.rounds.log_prompts import LoggedPrompt, PromptLog
from engine.observe.rounds.log_rounds import (
    MOST_RANKS,
    UNKNOWN_TOKEN,
    Counts,
    LogClock,
    LogRequest,
    LogRound,
    Slot,
    Tops,
)

Said: TypeAlias = tuple[int, int | None, str]
"""Line number of a message, its time in microseconds and its kind."""
MOST_DRAFTERS = 64
_MOST_SPEEDS = 1000
"""Per request; a server logs one every three seconds."""


_BARE_SUMS: dict[str, Callable[..., None]] = {
    "prompt_time": LogRequest.on_prompt_sums,
    "eval_time": LogRequest.on_answer_sums,
    "sums": LogRequest.on_draft_sums,
}


class ServerState:
    """State of one process of a server. requests: in the order in which their tasks began. on_NAME:
    applies a message by its name in log_words; each raises OutOfRangeError before it changes
    anything, and returns False if the message is not accepted. joins: called with each request."""

    def __init__(self, joins: Callable[[LogRequest], None]) -> None:
        self.requests: list[LogRequest] = []
        self.pieces: dict[int, bytes] = {}
        """Bytes of drafted or emitted tokens, if they are whole characters."""
        self.is_light = True
        self.first_missing = ""
        self.draws = False
        """Whether an accepted token was not its drafter's best: drafts are sampled, so only
        accepted tokens are known."""
        self.slots: dict[int, Slot] = {}
        self.last_us: int | None = None
        """Time of the newest message of a slot."""
        self.says_drafts = False
        """Whether a request with drafts ended with a line about them; others have none."""
        self.n_rounds = 0
        self._joins = joins
        self._candidates: list[tuple[Any, ...]] = []
        """Candidates that belong to no round yet."""
        self._prompts = PromptLog()
        self._current: LogRequest | None = None
        self._impls: list[tuple[str, int, int]] = []
        self.clock = LogClock()
        self.totals: dict[str, Counts] = {}
        """By drafter its drafts, their tokens, accepted ones, and shares, so far."""
        self.n_undrafted = 0
        """Rounds without a line on the number of drafted tokens."""
        self.n_candidates = 0
        """Number of drafters' candidates."""
        self._says_at_once = False
        """Whether rounds are logged before their tokens; later lines about them repeat."""
        self._begins_rounds = False
        """Whether a line marks the start of a round."""

    def light_rows(self, rounds: np.ndarray) -> list[tuple[Slot, np.ndarray]] | None:
        """Light-form rounds grouped by slot; each has slot, task, accepted of 1 or more drafted
        tokens, and time in microseconds (-1 without). None if one does not simply follow another
        round of a request."""
        number, task, _, _, us = rounds.T
        if not self.is_light or self.clock.is_at_work:
            return None
        last = -1 if self.last_us is None else self.last_us
        if us[0] < last or (us[1:] < us[:-1]).any():
            return None
        found = []
        for key in sorted(set((number << 32 | task).tolist())):
            slot = self.slots.get(key >> 32)
            if slot is None or slot.request.task != key & COUNT or slot.replay:
                return None
            if slot.n_max is not None or slot.request.is_broken:
                return None
            found.append((slot, (number == key >> 32).nonzero()[0]))
        return found

    def take_light(self, rounds: np.ndarray, found: list[tuple[Slot, np.ndarray]]) -> None:
        """Apply such rounds."""
        number, us = rounds[:, 0], rounds[:, 4]
        for slot, rows in found:
            if len(rows) > 1:
                batch = rounds[rows[:-1], 2:]
                slot.request.batches.append((len(slot.request.rounds), batch))
                self.n_rounds += len(batch)
            *_, n_accepted, n_drafted, at = rounds[rows[-1]].tolist()
            one = LogRound(None, n_drafted, n_accepted, is_complete=True)
            one.end_us = None if at < 0 else at
            self._add_round(slot, one)
        self.last_us = None if us[-1] < 0 else int(us[-1])
        self._says_at_once, self._current = True, self.slots[int(number[-1])].request

    def slot(self, number: int, task: int) -> Slot:
        """The slot, working on a task."""
        slot = self.slots.get(number)
        if slot is None or slot.request.task != task:
            n_max = None if slot is None else slot.n_max
            if slot is not None:
                slot.request.is_over = True
            slot = self.slots[number] = Slot(self._request(number, task), n_max=n_max)
        self._current = slot.request
        return slot

    def _request(self, number: int, task: int) -> LogRequest:
        request = LogRequest(number, task)
        self._joins(request)
        self.requests.append(request)
        return request

    def works_on(self, slot: Slot, us: int | None) -> None:
        """A message of a slot arrived at this time."""
        self.last_us, self._current = us, slot.request

    def on_token(self, slot: Slot, said: Said, number: int, id_: int, text: str) -> None:
        """A token was sampled."""
        line, us, _ = said
        if self.is_light:
            self.is_light = False
            for earlier in self.requests:
                earlier.unfold()
        request, token = slot.request, (id_, text)
        self._learn(id_, text)
        if number <= request.last_n:
            return  # a line that was copied twice
        n_missing, before = number - request.last_n - 1, request.last_n
        request.last_n = number
        if n_missing:
            request.n_missing += n_missing
            self.first_missing = self.first_missing or (
                f"before line {line}: n_gen is {number:,} after {before:,}"
            )
        if number == 1:
            request.first, request.first_us = token, us
        elif not (self._says_at_once or self._begins_rounds):
            slot.early.append((number, token, us))
        elif slot.round is not None:
            one = slot.round
            if n_missing and one.first_n is None:
                n_missing -= not before  # the prompt's
                for other in islice(reversed(request.rounds), 1, None):  # some may be missing
                    n_missing -= other.accepted + 1 + other.restored - len(other.tokens)
                    if other.tokens:
                        break
            if not 0 < n_missing <= one.accepted + one.restored - len(one.tokens):
                n_missing = 0
            one.first_n = one.first_n or number - n_missing
            one.tokens += [UNKNOWN_TOKEN] * n_missing
            at = len(one.tokens)
            if at < min(one.accepted, len(one.draft)) and not one.restored:
                self.draws |= one.draft[at][0][0] != id_
            one.tokens.append(token)
            if one.end_us is None and us is not None:
                one.end_us = us
                self.clock.ends(one, us)

    def on_speed(self, slot: Slot, said: Said, n: int, speed: float, recent: float | None) -> None:
        """The speed of a request so far."""
        _, us, _ = said
        speeds = slot.request.speeds
        if len(speeds) >= _MOST_SPEEDS:  # of a long answer every second, then every fourth, …
            del speeds[1::2]
        speeds.append((None if us is None else us / 1e3, n, speed, recent))

    def on_accepted(self, slot: Slot, said: Said, accepted: int, drafted: int) -> None:
        """A round was verified. kind: "restores", or "again" if other lines repeat it."""
        _, us, kind = said
        if not drafted:  # some builds log this for all rounds: known only if the draft has a line
            if slot.round is None or slot.round.is_complete or self.is_light:
                self.n_undrafted += accepted > 0
                return
            drafted = slot.round.drafted
        if accepted > drafted:
            raise OutOfRangeError(f"{accepted:,} is more than {drafted:,}")
        if kind == "again":
            if self._says_at_once:
                return
        else:
            self._says_at_once = True
        restores = kind == "restores"
        if slot.replay and not restores:
            slot.replay = False  # the counts are those of the replay
            if slot.round is not None:
                slot.round.is_complete, slot.round.end_us = True, us
                self.clock.ends(slot.round, us)
            return
        if slot.round is None or slot.round.is_complete or self.is_light:
            self._add_round(slot, LogRound(None, drafted))
        one = slot.round
        assert one is not None
        if slot.early and kind == "again":
            self._take_early(slot, one, drafted)
        one.drafted, one.accepted, one.restored, one.end_us = drafted, accepted, restores, us
        self.clock.ends(one, us)
        slot.replay, one.is_complete = restores, not restores

    def on_added(self, slot: Slot, said: Said, n: int, drafted: int) -> None:
        """Tokens of a round join the answer; newer servers log nothing else if a round ends the
        answer."""
        if not n or slot.round is None or slot.round.is_complete or self.is_light:
            return
        self.on_accepted(slot, said, n - 1, drafted)

    def _take_early(self, slot: Slot, one: LogRound, drafted: int) -> None:
        """Assign earlier tokens to a round that is logged after them, and each token before its
        draft to a round without one."""
        plain, mine = slot.early[: slot.n_plain], slot.early[slot.n_plain :]
        slot.early, slot.n_plain = [], 0
        before = []
        for number, token, us in plain:
            before.append(LogRound(None, 0, tokens=[token], end_us=us, is_complete=True))
            before[-1].first_n = number
        slot.request.rounds[-1:-1] = before
        self.n_rounds += len(before)
        one.tokens = [token for _, token, _ in mine]
        one.first_n = mine[0][0] if mine else None
        self._place_candidates()
        self._take_candidates_of(slot, one, drafted)

    def _add_round(self, slot: Slot, one: LogRound) -> None:
        slot.round, one.n_max = one, slot.n_max
        self.n_rounds += 1
        slot.request.rounds.append(one)

    def on_generated(self, slot: Slot, _said: Said, history: int, drafted: int, pos: int) -> None:
        """A draft is complete: a round begins, unless one is replayed."""
        self._begins_rounds = True
        if not slot.replay:
            self._begin(slot, history, drafted, pos)
        self.clock.joins(slot.round)

    def on_decoded(self, slot: Slot, _said: Said, pos: int) -> None:
        """A round without a draft."""
        self._begins_rounds = True
        one = LogRound(pos, 0, is_complete=True)
        self._add_round(slot, one)
        self.clock.joins(one)

    def on_adapted(self, *args: Any) -> bool:
        """Adaptive depth has chosen another longest draft for a slot: the message's, its
        sequence's, or the previous line's. Until the first change the replaced value applied."""
        *slots, _, number, before, after = args
        if number is None and self._current is not None:
            number = self._current.slot
        slot = slots[0] if slots else self.slots.get(-1 if number is None else number)
        if slot is None:
            return False
        if slot.n_max is None:
            for request in self.requests:
                if request.slot == slot.request.slot:
                    request.unfold()
                    for one in request.rounds:
                        one.n_max = before
        slot.n_max = after
        return True

    def on_saved(self, slot: Slot, said: Said, mib: float) -> None:
        """A checkpoint was saved before a round."""
        _, us, _ = said
        slot.checkpoint_bytes = round(mib * 2**20)
        self.clock.mark(us, "saved")

    def on_restoring(self, slot: Slot, _said: Said, n_bytes: int) -> None:
        """A round's checkpoint is restored."""
        if slot.round is not None:
            slot.round.checkpoint_bytes = n_bytes

    def on_mark(self, *args: Any) -> None:
        """A phase starts or ends, of a slot or of the server."""
        _, us, kind = args[-1]
        if kind == "draft" and len(args) > 1 and (slot := args[0]).early:
            slot.n_plain = len(slot.early)
        self.clock.mark(us, kind)

    def on_prompt(self, slot: Slot, _said: Said, n: int) -> None:
        """A prompt arrived."""
        slot.request.n_prompt = self._prompt(slot).n_prompt = n

    def on_common(self, slot: Slot, _said: Said, *counts: int | None) -> None:
        """What a prompt has in common with its slot's contents, which had to be modified."""
        prompt = self._prompt(slot)
        prompt.n_common, prompt.n_held, pos_min, n_swa = counts
        prompt.pos_min, prompt.n_swa = -1 if pos_min is None else pos_min, n_swa or 0

    def on_forced(self, slot: Slot, *_args: Any) -> None:
        """The whole prompt is processed."""
        self._prompt(slot).is_forced = True

    def on_cache(self, _said: Said, n_held: int, n_common: int) -> None:
        """ik_llama.cpp's message on what the newest prompt has in common with its slot."""
        request = self._current
        slot = None if request is None or request.is_over else self.slots.get(request.slot)
        if slot is not None:
            prompt = self._prompt(slot)
            prompt.n_held, prompt.n_common = n_held, n_common

    def on_cached(self, slot: Slot, _said: Said, n: int | None, m: int | None = None) -> None:
        """Reused tokens of the prompt; later parts of it repeat the message."""
        request, prompt = slot.request, self._prompt(slot)
        known = m or 0 if n is None else n
        request.n_cached = known if request.n_cached is None else request.n_cached
        prompt.cached = known if prompt.cached is None else prompt.cached

    def on_checkpoint(self, slot: Slot, _said: Said, *figures: Any) -> None:
        """A context checkpoint is created, restored, erased or evicted ("erasing")."""
        self._prompts.checkpoint(self._prompt(slot), *figures)

    def on_looked_back(self, slot: Slot, _said: Said, *places: int) -> None:
        """A context checkpoint is compared with the position to return to."""
        self._prompt(slot).look_back(*places)

    def on_selected(self, number: int, _said: Said, *chosen: Any) -> None:
        """A slot was chosen for the next request."""
        self._prompts.selected(number, *chosen)

    def on_released(
        self, slot: Slot, _said: Said, n_tokens: int | None, truncated: int | None = None
    ) -> None:
        """A slot has finished its request."""
        slot.request.is_over = slot.request.is_released = True
        if n_tokens is not None:
            self._prompts.released(self._prompt(slot), n_tokens, is_whole=truncated == 0)

    def _again(self, slot: Slot) -> None:
        """A task with other sums is another one of the same number, after a restart or from another
        log."""
        slot.request.is_over = True
        request = self._request(slot.request.slot, slot.request.task)
        slot.request, slot.round, slot.replay = request, None, False
        self._current = request

    def on_prompt_time(self, slot: Slot, said: Said, ms: float, n: int) -> None:
        """Sums of a prompt."""
        before = slot.request.prompt_ms
        is_other = before is not None and (said[1] is None or before != ms)
        if is_other and slot.request.predicted is not None:
            self._again(slot)
        self._prompt(slot)
        slot.request.on_prompt_sums(ms, n)

    def on_eval_time(self, slot: Slot, _said: Said, *sums: Any) -> None:
        """Sums of an answer."""
        if slot.request.predicted_ms not in (None, sums[0]):
            self._again(slot)
        self._prompt(slot)
        slot.request.on_answer_sums(*sums)

    def on_sums(self, slot: Slot, _said: Said, *sums: Any) -> None:
        """Sums of a request's drafts."""
        self.says_drafts |= sums[1] is not None
        known = slot.request.accepted, slot.request.drafted
        if None not in (*known, *sums[1:3]) and known != sums[1:3]:
            self._again(slot)
        slot.request.on_draft_sums(*sums)

    def on_bare(self, said: Said, *sums: Any) -> bool:
        """Sums without a slot: of the slot in the previous line, or of a request not logged
        otherwise."""
        _, _, kind = said
        self.says_drafts |= kind == "sums" and sums[1] is not None
        request, take = self._current, _BARE_SUMS[kind]
        if kind == "sums" and request is not None and request is self.requests[-1]:
            before = self.requests[-2] if len(self.requests) > 1 else request
            is_empty = request.prompt_ms is None and request.predicted is None
            if is_empty and not request.has_rows and before.slot < 0 and before.drafted is None:
                # the log starts after the line that names the request
                before.slot, before.task, request = request.slot, request.task, before
        is_new = request is None or (
            request.prompt_ms is not None or request.predicted is not None
            if kind == "prompt_time"
            else request.predicted is not None
            if kind == "eval_time"
            else request.drafted is not None and sums[1] is not None
        )
        if is_new or request is None:
            if sums[1] is None:
                return False
            request = LogRequest(-1, -1)
            take(request, *sums)
            self._joins(request)
            self.requests.append(request)
            self._current = request
            return True
        if not request.is_broken:
            take(request, *sums)
        return not request.is_broken

    def on_statistics(
        self, _said: Said, name: str, drafts: int, tokens: int, accepted: int, shares: str | None
    ) -> None:
        """Sums of a drafter over all requests so far, logged after those of one."""
        now = drafts, tokens, accepted, shares or ""
        if len(self.totals) < MOST_DRAFTERS or name in self.totals:
            if (one := self._current) is not None:
                is_alone = (one.drafted, one.accepted) == (tokens, accepted)  # of another start
                one.statistics[name] = now, None if is_alone else self.totals.get(name)
            self.totals[name] = now

    def on_impl(self, said: Said, name: str, size: int, n: int) -> None:
        """A drafter has drafted."""
        _, us, _ = said
        self.clock.mark(us, "drafted")
        self._impls.append((name, size, n))
        del self._impls[:-64]

    def on_candidate(
        self, _said: Said, number: int | None, rank: int, at: int, token: int, p: float, text: str
    ) -> None:
        """A drafter's candidate, of the slot in the previous line unless it names one."""
        self.take_candidates(number, rank, at, (((token, min(p, 1.0)),),), (text,), 0)

    def take_candidates(
        self, number: int | None, rank: int, at: int, tops: Tops, texts: Sequence[str], first: int
    ) -> None:
        """Several candidates, from a rank and a position on. texts: of all of them in order, from
        the first on."""
        if number is None:
            number = self._current.slot if self._current is not None else -1
        self._candidates.append((number, rank, at, tops, texts, first))

    def _prompt(self, slot: Slot) -> LoggedPrompt:
        """The logged prompt of a slot's request."""
        request = slot.request
        if request.prompt is None:
            request.prompt = self._prompts.begin(request.slot)
        return request.prompt

    def _begin(self, slot: Slot, history: int, drafted: int, pos: int) -> None:
        self._place_candidates()
        one = LogRound(pos, drafted)
        self._add_round(slot, one)
        one.checkpoint_bytes, slot.checkpoint_bytes = slot.checkpoint_bytes, None
        for i, (name, size, n) in enumerate(self._impls):
            # a draft may be cut after the drafter, never lengthened
            if size == history and n >= drafted:
                one.drafter = name
                del self._impls[i]
                break
        self._take_candidates_of(slot, one, drafted)

    @staticmethod
    def _take_candidates_of(slot: Slot, one: LogRound, drafted: int) -> None:
        """Assign candidates to a round."""
        tops = slot.take_tops(drafted)
        if tops and "ngram" not in one.drafter:
            one.draft = tops

    def _place_candidates(self) -> None:
        """Assign the candidates since the last call to their slots."""
        new, self._candidates = self._candidates, []
        pieces = self.pieces
        for number, rank, at, tops, texts, first in new:
            self.n_candidates += sum(map(len, tops))
            slot = self.slots.get(number)
            if slot is None or rank >= MOST_RANKS or at >= LONGEST_DRAFT:
                continue
            slot.add_tops(rank, at, tops)
            for i, (token, _) in enumerate(chain.from_iterable(tops), first):
                if token not in pieces:
                    self._learn(token, texts[i])

    def _learn(self, token_id: int, text: str) -> None:
        if text and token_id not in self.pieces and "\ufffd" not in text:
            self.pieces[token_id] = text.encode("utf-8", "replace")
