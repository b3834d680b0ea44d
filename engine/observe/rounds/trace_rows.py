"""Rows of the trace from observations: one row of `rounds` per verification, one of `tokens` per
token. What a server does not report stays empty."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from engine.analysis.acceptance.accept_rules import AcceptRule
from engine.observe.rounds.log_rounds import LogRound
from engine.observe.rounds.stream import Timings
from engine.observe.rounds.stream_rounds import ObservedRound, StreamedToken
from engine.observe.rounds.withheld_tokens import PlaneReach
from engine.trace.records import MISSING, N_TOP, PHASES, ColumnState
from engine.trace.timings import BY_STEP, answer_speeds, speeds
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.gguf.tokenizer import Tokenizer

_NOT_LOGGED = (None, None, None)
"""Values of a drafted token without logged probabilities."""
_MANY_VALUES = 1 << 18
"""Number of values written to a trace at once."""
LONGEST_TOKEN = 8192
"""Characters of one token in a trace: with escapes, more might not fit a field when reopened."""


def states(derived: str, observed: str) -> dict[str, ColumnState]:
    """How the named columns are known."""
    found: dict[str, ColumnState] = dict.fromkeys(derived.split(), "derived")
    return found | dict.fromkeys(observed.split(), "observed")


COLUMNS = {
    "rounds": states(
        "round t_ms pos0 num_target_tokens stop_kind rollback_depth memory_rollback rollback_path "
        "n_rs_seq replay_index verify_width accept_rule drafter n_merged",
        "num_draft_tokens num_accepted_draft_tokens num_emitted total_ms",
    ),
    "tokens": states("pos kind", "token_id text"),
}
"""States of the columns filled from a llama-server's stream; the others are absent."""
LOG_COLUMNS = {
    "rounds": states(
        "round rollback_depth memory_rollback stop_kind total_ms",
        "pos0 num_draft_tokens num_accepted_draft_tokens num_emitted rollback_path",
    ),
    "tokens": states("pos kind", "token_id"),
}
"""The same for a log alone."""


TokenColumns: TypeAlias = tuple[Sequence[int | None], Sequence[str | None]]
"""Ids and texts of tokens, None where not given; no texts if there are none."""
TokenRun: TypeAlias = tuple[int, int, int, str, Sequence[int | None], Sequence[str | None]]
"""Consecutive tokens of one kind: their round and sequence, position of the first, kind, ids and
texts as in `TokenColumns`."""


class PromptPart(Struct, frozen=True):
    """Tokens of a prompt processed together. pos0: position of the first. prompt_ms: their end,
    None if unknown."""

    pos0: int
    n_tokens: int
    prompt_ms: float | None
    before_ms: float


class ReadyRow(Struct):
    """A settled row of `rounds`. t_ms: its end, in the run's time, None without times. n_prompt:
    tokens of the sequence's prompt, 0 if unknown. prompt_ids: of the whole prompt, with its first
    part. emitted: tokens of unknown rounds, without a row of `rounds`. Without any of these: a
    prompt of which only the first token is known."""

    t_ms: float | None
    seq_id: int
    n_prompt: int
    round: ObservedRound | None = None
    part: PromptPart | None = None
    prompt_ids: Sequence[int] = ()
    emitted: TokenColumns = ((), ())


class RowWriter:
    """Numbers settled rows by round and writes them."""

    def __init__(
        self, writer: TraceWriter, reach: PlaneReach, vocabulary: Tokenizer | None = None
    ) -> None:
        self._writer, self._reach, self._vocabulary = writer, reach, vocabulary
        self._n_rounds = self.n_merged = self._n_plain = 0
        self.drafters: list[str] = []
        """The server's drafters, as far as known."""
        self.rule = AcceptRule()
        """How drafted tokens are accepted."""
        self.log_pieces: Mapping[int, bytes] = {}
        """Bytes of tokens from the server's log."""
        self._tokens_of: list[Any] = []
        self._rounds_of: list[Any] = []
        self._drafts: list[Any] = []
        """Pending; a round's row comes after those of its tokens."""
        self._plain: list[TokenRun] = []
        """Pending tokens of unknown rounds; they never come with others."""

    def write(self, ready: ReadyRow, begun_ms: float = 0.0) -> None:
        """Write a row and its tokens as the next round; they are in the trace after `flush`.
        begun_ms: the run's start on the row's clock."""
        t_ms = None if ready.t_ms is None else max(ready.t_ms - begun_ms, 0.0)
        ids = {"round": self._n_rounds, "seq_id": ready.seq_id}
        self._n_rounds += 1
        if ready.prompt_ids:
            self.flush()
            run = (ids["round"], ids["seq_id"], 0, "prompt", ready.prompt_ids, ())
            write_runs(self._writer, [run])
            if self._vocabulary is not None:
                self._writer.learn(ready.prompt_ids, self._vocabulary.piece)
        if ready.emitted[0]:
            self._emitted(ids, ready.n_prompt, *ready.emitted)
        elif ready.part is not None:
            self._part(ids, t_ms, ready, ready.part)
        elif ready.round is not None:
            self._round(ids, t_ms, ready, ready.round)
        else:
            self._append(**ids, num_emitted=1)
        if len(self._tokens_of) + len(self._rounds_of) + self._n_plain > _MANY_VALUES:
            self.flush()

    def flush(self) -> None:
        """Bring pending rows into the trace."""
        if self._plain:
            write_runs(self._writer, self._plain)
            self._plain, self._n_plain = [], 0
        if not (self._tokens_of or self._drafts or self._rounds_of):
            return
        self._writer.append_rows("tokens", _TOKEN, self._tokens_of)
        self._writer.append_rows("drafts", _DRAFT, self._drafts)
        self._writer.append_rows("rounds", _ROUND, self._rounds_of)
        for rows in (self._tokens_of, self._drafts, self._rounds_of):
            rows.clear()

    def fill_in(self) -> None:
        """Fill in what was learned after rows had been written: planes, and the drafter if the
        server has only one."""
        store = self._writer.store
        n = len(store.rounds)
        mine = np.flatnonzero(store.rounds.column("run_id", 0, n) == self._writer.run_id)
        if self._reach.n_rs_seq is not None:
            store.rounds.fill(mine, {"n_rs_seq": np.full(len(mine), self._reach.n_rs_seq)})
        if len(self.drafters) == 1:
            drafted = mine[store.rounds.column("num_draft_tokens", 0, n)[mine] > 0]
            code = store.text_pool.code(self.drafters[0])
            store.rounds.fill(drafted, {"drafter": np.full(len(drafted), code, np.int32)})

    def _append(self, **values: Any) -> None:
        self._rounds_of += map(values.get, _ROUND)

    def _emitted(
        self,
        ids: dict[str, int],
        first_pos: int,
        token_ids: Sequence[int | None],
        texts: Sequence[str | None],
    ) -> None:
        if self._tokens_of:
            self.flush()
        if texts.count(None) < len(texts):
            tokens = [
                self._known(StreamedToken(one, text, one is None and "\ufffd" not in (text or "")))
                for one, text in zip(token_ids, texts, strict=True)
            ]
            token_ids, texts = [one.token_id for one in tokens], list(map(self._text, tokens))
        where = ids["round"], ids["seq_id"], first_pos
        self._plain.append((*where, "unknown", token_ids, texts))
        self._n_plain += len(token_ids)

    def _part(
        self, ids: dict[str, int], t_ms: float | None, ready: ReadyRow, part: PromptPart
    ) -> None:
        first = ready.round
        if self._plain:
            self.flush()
        if first is not None:
            self._tokens(ids, ready.n_prompt, first, first.kinds())
        self._append(
            **ids,
            t_ms=t_ms,
            pos0=part.pos0,
            num_target_tokens=1 if first else 0,
            num_emitted=first.emitted if first else 0,
            stop_kind="target" if first else "",
            rollback_depth=0,
            memory_rollback=0,
            rollback_path="none",
            replay_index=0,
            n_rs_seq=self._reach.n_rs_seq,
            verify_width=part.n_tokens,
            total_ms=None if part.prompt_ms is None else part.prompt_ms - part.before_ms,
        )

    def _round(
        self, ids: dict[str, int], t_ms: float | None, ready: ReadyRow, one: ObservedRound
    ) -> None:
        is_one, is_placed, kinds = one.n_merged == 1, one.first > 0, one.kinds()
        if self._plain:
            self.flush()
        drafter = self._drafter(one)
        restored = one.path == "restore"
        self.n_merged += not is_one
        if is_placed:
            self._tokens(ids, ready.n_prompt, one, kinds)
        own, log = is_one or None, one.log
        is_end = one.is_cut and one.drafted and one.emitted <= one.accepted  # before any of its own
        stop = "end" if is_end else kinds[-1] if kinds else ""
        of_log = log and (log.checkpoint_bytes, log.n_max, *map(log.phases.get, PHASES))
        self._rounds_of += (
            ready.seq_id,
            ids["round"],
            t_ms,
            ready.n_prompt + one.first - 2 if is_placed else None,
            1 + (restored and one.judges_again) if one.path and is_one else None,
            "" if stop == "unknown" else stop,
            *(own and one.undone, own and one.undone),
            path_name(one.path, self._reach),
            self._reach.n_rs_seq,
            int(restored) if one.path and is_one else None,
            own and one.drafted + 1,
            self.rule.name if one.drafted else "",
            drafter,
            None if is_one else one.n_merged,
            *(one.drafted, one.accepted, one.emitted),
            one.name_ms - one.before_ms if is_placed and t_ms is not None else None,
            *(of_log or _NO_LOG),
        )
        if one.drafted and is_one and drafter:
            self._drafts += ids["round"], ids["seq_id"], drafter, one.drafted

    def _drafter(self, one: ObservedRound) -> str:
        """Whose draft was verified: from the log, or the server's only drafter."""
        if not one.drafted:
            return ""
        if one.log is not None and one.log.drafter:
            return one.log.drafter
        return self.drafters[0] if len(self.drafters) == 1 else ""

    def _tokens(
        self, ids: dict[str, int], n_prompt: int, one: ObservedRound, kinds: list[str]
    ) -> None:
        first_pos = n_prompt + one.first - 1
        tokens = one.tokens if self._vocabulary is None else tuple(map(self._known, one.tokens))
        if one.log is not None:
            known, pieces = self.log_pieces, self._writer.store.pieces
            if new := [t for tops in one.log.draft for t, _ in tops if t not in pieces]:
                self._writer.learn((token for token in new if token in known), known.__getitem__)
        n_kept, log, draws = kinds.count("accepted"), one.log, self.rule.draws
        where = ids.values()
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
            if i == n_kept and log is not None:
                self._undone_tokens(ids, first_pos, one, log, tokens)
            token_id, text, index = token.token_id, self._text(token), i if i < n_kept else None
            is_drafted = index is not None and log is not None
            drafted = _drafted(log, i, draws, token_id) if is_drafted else _NOT_LOGGED
            # tuples: many thousands are turned into columns at once
            self._tokens_of += (*where, first_pos + i, kind, token_id, text, index, *drafted)

    def _undone_tokens(
        self,
        ids: dict[str, int],
        first_pos: int,
        one: ObservedRound,
        log: LogRound,
        tokens: Sequence[StreamedToken],
    ) -> None:
        """Write drafted tokens that were not accepted, and replayed tokens, from the log."""
        draws = self.rule.draws
        for i in range(one.accepted, len(log.draft)):
            # for a sampling drafter only the candidates are logged
            token_id = None if draws else log.draft[i][0][0]
            kind = "rejected" if i == one.accepted else "ignored"
            more = _drafted(log, i, draws, token_id)
            self._tokens_of += (*ids.values(), first_pos + i, kind, token_id, None, i, *more)
        for i in range(one.accepted if log.restored else 0):
            token = tokens[i] if i < len(tokens) else StreamedToken()
            known = token.token_id, self._text(token), i, *_NOT_LOGGED
            self._tokens_of += (*ids.values(), first_pos + i, "replayed", *known)

    def _known(self, token: StreamedToken) -> StreamedToken:
        """The token with its id, if exactly one token of the vocabulary has its bytes. Running text
        is never tokenised again, because the result might differ."""
        if self._vocabulary is None or token.token_id is not None or not token.alone:
            return token
        found = self._vocabulary.ids_of_piece((token.text or "").encode())
        return replace(token, token_id=found[0]) if len(found) == 1 else token

    def _text(self, token: StreamedToken) -> str | None:
        """The text of a token's row: none if the id determines it."""
        if (text := token.text) is None:
            return None
        if len(text) > LONGEST_TOKEN:
            text = text[: LONGEST_TOKEN - 1] + "…"
        if token.token_id is None:
            return text
        pieces, piece = self._writer.store.pieces, text.encode()
        if token.alone and token.token_id not in pieces:
            pieces[token.token_id] = piece
        return None if pieces.get(token.token_id) == piece else text


_OF_DRAFT = "draft_index", "draft_p", "draft_top_id", "draft_top_p"
_DRAFT = ("round", "seq_id", "drafter", "num_draft_tokens")
_TOKEN = ("round", "seq_id", *COLUMNS["tokens"], *_OF_DRAFT)
"""Columns of a token's row."""
_OF_LOG = "checkpoint_bytes", "draft_n_max", *(f"{phase}_ms" for phase in PHASES)
_NO_LOG = (None,) * len(_OF_LOG)
_ROUND = ("seq_id", *COLUMNS["rounds"], *_OF_LOG)
"""Columns of a round's row."""


def write_runs(writer: TraceWriter, runs: Sequence[TokenRun]) -> None:
    """Write rows of `tokens`, run after run."""
    rounds, seq_ids, firsts, kinds, ids, texts = zip(*runs, strict=True)
    n_each = [*map(len, ids)]
    before = np.cumsum([0, *n_each[:-1]])
    codes = np.array(writer.store.text_pool.codes(kinds), np.int32)
    columns: dict[str, Any] = {
        "round": np.repeat(rounds, n_each),
        "seq_id": np.repeat(seq_ids, n_each),
        "pos": np.arange(sum(n_each)) + np.repeat(np.array(firsts) - before, n_each),
        "kind": np.repeat(codes, n_each),
        "token_id": np.concatenate([_whole(one) for one in ids]),
    }
    if any(texts):
        each = (of or [None] * n for of, n in zip(texts, n_each, strict=True))
        columns["text"] = [*chain.from_iterable(each)]
    writer.extend("tokens", columns)


def _whole(ids: Sequence[int | None]) -> np.ndarray:
    """Token ids, MISSING where one is not given."""
    if isinstance(ids, array):
        return np.frombuffer(ids, np.int32)
    return np.array([MISSING if one is None else one for one in ids], np.int64)


def path_name(path: str, reach: PlaneReach) -> str:
    """The trace's name of a path: restores beyond the planes have a name of their own."""
    return "restore_depth" if path == "restore" and reach.has_planes else path


def _drafted(
    log: LogRound | None, index: int, draws: bool, token_id: int | None
) -> tuple[Any, ...]:
    """Probability of a drafted token, and the best candidates with theirs. draws: whether the
    drafter samples; token_id: the sampled one."""
    if log is None or index >= len(log.draft):
        return _NOT_LOGGED
    tops = log.draft[index]
    p = tops[0][1] if not draws else next((p for token, p in tops if token == token_id), None)
    return p, *zip(*tops[:N_TOP], strict=True)


def told_figures(told: Sequence[Timings], has_rows: bool, has_times: bool) -> dict[str, Any]:
    """The server's counters under the names of `engine.trace.timings.summary`, of one sequence or
    of several together.

    has_rows: rounds are known as well; else figures that need them are None. has_times: for all
    sequences, so that the time in which any of them was generating is known.
    """
    n_cached, n_prompt, prompt_ms, n_predicted, drafted, accepted = map(
        sum, zip(*map(_SUMMED, told), strict=True)
    )
    figures: dict[str, Any] = {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        **_known(speeds("prompt", prompt_ms, n_prompt)),
        "predicted_n": n_predicted,
    }
    if drafted:
        figures |= {
            "draft_n": drafted,
            "draft_n_accepted": accepted,
            "draft_acceptance_rate": accepted / drafted,
        }
    if len(told) == 1:
        ms = figures["predicted_ms"] = told[0].predicted_ms
        figures |= _known(answer_speeds(ms, n_predicted, told[0].n_timed))
    if not has_rows:
        figures |= dict.fromkeys(_NEED_ROWS)
    if not has_times and len(told) > 1:  # times of concurrent requests do not add up
        figures |= dict.fromkeys(_NEED_TIMES)
    return figures


def with_others(figures: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of such figures and those of replies without timings, None if one lacks a summand."""
    found = dict(figures)
    for name in ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"):
        values = [n for one in others if (n := one.get(name)) is not None]
        if values:
            of_time = {"prompt_n": _OF_PROMPT, "predicted_n": _NEED_TIMES}
            found |= dict.fromkeys((*of_time.get(name, ()), *_NEED_ROWS))
            is_sum = len(values) == len(others)
            found[name] = sum(values) + figures.get(name, 0) if is_sum else None
    if found != figures:
        drafted, accepted = found.get("draft_n"), found.get("draft_n_accepted")
        found["draft_acceptance_rate"] = accepted / drafted if drafted else None
    return found


def _known(figures: dict[str, float]) -> dict[str, float | None]:
    return {name: value or None for name, value in figures.items()}


_SUMMED = attrgetter(
    *("cache_n", "prompt_n", "prompt_ms", "predicted_n", "draft_n", "draft_n_accepted")
)
_NEED_ROWS = (*BY_STEP, "rollback_depth_histogram")
_OF_PROMPT = ("prompt_ms", *speeds("prompt", 0.0, 0))
_NEED_TIMES = ("predicted_ms", *answer_speeds(0.0, 0, 0))
