"""A made-up run that fills every table as the engine would, as many rounds at a time as wanted.

Everything follows from the number of a round, so a trace may grow in pieces of any size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.trace.records import MISSING, N_TOP
from engine.trace.store import TraceStore

N_MAX = 3
N_PROMPT = 16
_PERIOD = 1024
"""Rounds after which drafts repeat."""
_WORDS = (
    "def",
    "return",
    "if",
    "else",
    "for",
    "in",
    "while",
    "self",
    "None",
    "True",
    "import",
    "from",
    "class",
    "value",
    "index",
    "result",
    "left",
    "right",
    "total",
    "count",
    "name",
    "items",
    "key",
    "print",
    "range",
    "len",
    "append",
    "sorted",
    "not",
    "and",
    "is",
    "or",
    "lambda",
)
_SIGNS = ("(", ")", ":", ",", " =", " ==", " +", "\n    ", "\n        ", "\n", ".", "[", "]", " 0")
_PIECES = tuple(f"{space}{word}" for word in _WORDS for space in (" ", "", "_")) + _SIGNS * 3


class SyntheticRun:
    """Registers a run of `n_seqs` sequences in a store; `add` writes its next rounds."""

    def __init__(self, store: TraceStore, n_seqs: int = 1, seed: int = 0) -> None:
        self.store, self.n_seqs = store, n_seqs
        draw = np.random.default_rng(seed)
        self._drafted = draw.choice([0, 1, N_MAX], (_PERIOD, n_seqs), p=[0.05, 0.1, 0.85])
        self._accepted = np.minimum(draw.integers(0, N_MAX + 2, (_PERIOD, n_seqs)), self._drafted)
        emitted = np.cumsum(self._accepted + 1, axis=0)
        self._before = np.vstack([np.zeros(n_seqs, int), emitted])
        self._words = draw.integers(0, len(_PIECES), 8191)
        self.run_id = store.begin_run(
            {
                "options": {"parallel": n_seqs, "spec": {"types": ["draft-mtp"], "n_max": N_MAX}},
                "compute": "f32",
                "architecture": "qwen35",
                "n_rs_seq": N_MAX,
                "model": {"name": "synthetic", "size": 1, "sha256": "0" * 64},
            }
        )
        store.pieces.update({i: piece.encode() for i, piece in enumerate(_PIECES)})
        self.n_rounds = 0
        self._prompt()

    @property
    def n_emitted(self) -> int:
        """Tokens emitted so far, all sequences."""
        return int(self._emitted_before(np.array(self.n_rounds - 1)).sum())

    def add(self, n_rounds: int) -> None:
        """Write the next n_rounds rounds, a row per sequence in each."""
        rounds = np.arange(self.n_rounds, self.n_rounds + n_rounds)
        drafted = self._drafted[(rounds - 1) % _PERIOD].ravel()
        accepted = self._accepted[(rounds - 1) % _PERIOD].ravel()
        pos = (N_PROMPT + self._emitted_before(rounds - 1)).ravel()
        number, seq = np.repeat(rounds, self.n_seqs), np.tile(np.arange(self.n_seqs), n_rounds)
        self._ubatches(rounds, drafted.reshape(-1, self.n_seqs))
        self._drafts(number, seq, drafted)
        self._tokens(number, seq, drafted, accepted, pos)
        self._slots(number, seq)
        self._rounds(number, seq, drafted, accepted, pos)
        self.n_rounds += n_rounds

    def _emitted_before(self, steps: np.ndarray) -> np.ndarray:
        """Tokens of each sequence before a step, [..., n_seqs]."""
        whole, part = np.divmod(steps, _PERIOD)
        before: np.ndarray = self._before[part] + whole[..., None] * self._before[-1]
        return before

    def _prompt(self) -> None:
        n = N_PROMPT * self.n_seqs
        seq = np.repeat(np.arange(self.n_seqs), N_PROMPT)
        pos = np.tile(np.arange(N_PROMPT), self.n_seqs)
        self.store.tokens.extend(
            self._base(np.zeros(n, int), seq)
            | {"pos": pos, "kind": ["prompt"] * n, "token_id": self._token(pos + seq)}
        )
        every, none = np.arange(self.n_seqs), np.full(self.n_seqs, MISSING)
        zero = np.zeros(self.n_seqs, int)
        self._ubatches(np.zeros(1, int), np.full((1, self.n_seqs), N_PROMPT - 1))
        self._slots(zero, every)
        self._rounds(zero, every, none, none, zero)
        self.n_rounds = 1

    def _base(self, number: np.ndarray, seq: np.ndarray) -> dict[str, Any]:
        return {"run_id": np.full(len(number), self.run_id), "round": number, "seq_id": seq}

    def _token(self, at: np.ndarray) -> np.ndarray:
        token: np.ndarray = self._words[at % len(self._words)]
        return token

    def _ubatches(self, rounds: np.ndarray, drafted: np.ndarray) -> None:
        n, width = len(rounds), drafted.max(axis=1) + 1
        self.store.ubatches.extend(
            {
                "run_id": np.full(n, self.run_id),
                "round": rounds,
                "ubatch": rounds,
                "n_seqs": np.full(n, self.n_seqs),
                "n_seq_tokens": width,
                "seq_ids": [" ".join(map(str, range(self.n_seqs)))] * n,
                "n_padding": (width[:, None] - 1 - drafted).sum(axis=1),
                "purpose": ["verify" if r else "prompt" for r in rounds.tolist()],
                "reason": ["all tokens"] * n,
                "ms": 5.0 + 0.4 * width,
            }
        )

    def _drafts(self, number: np.ndarray, seq: np.ndarray, drafted: np.ndarray) -> None:
        n = len(number)
        self.store.drafts.extend(
            self._base(number, seq)
            | {
                "drafter": ["draft-mtp"] * n,
                "num_raw": np.full(n, N_MAX),
                "num_draft_tokens": drafted,
                "draft_ms": 0.4 + 0.9 * drafted,
                "reason": ["" if d == N_MAX else "p_min" for d in drafted.tolist()],
            }
        )

    def _tokens(
        self,
        number: np.ndarray,
        seq: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        pos: np.ndarray,
    ) -> None:
        each = drafted + 1
        last = np.repeat(each - 1, each)
        index = np.arange(len(last)) - np.repeat(np.cumsum(each) - each, each)
        own, taken = index == last, np.repeat(accepted, each)
        right = index < taken
        judged = own | (index <= taken)
        whole = np.repeat(accepted == drafted, each)
        kind = np.select(
            [own & np.repeat(drafted == 0, each), own & whole, own, right, index == taken],
            ["target", "bonus", "replacement", "accepted", "rejected"],
            "ignored",
        )
        at = np.repeat(pos, each) + np.where(own, taken, index)
        sure = 0.35 + (at * 37 % 61) / 100
        ids = self._token(at * 3 + np.repeat(seq, each) + ~(right | own))
        ranks = np.arange(N_TOP)
        tops = ((ids[:, None] + ranks) % len(_PIECES)).astype(np.int32)
        shares = (sure[:, None] * 0.4**ranks).astype(np.float32)
        self.store.tokens.extend(
            self._base(np.repeat(number, each), np.repeat(seq, each))
            | {
                "pos": at,
                "kind": kind.tolist(),
                "token_id": ids,
                "draft_index": np.where(own, MISSING, index),
                "draft_p": np.where(own, np.nan, sure),
                "target_p": np.where(judged, np.where(right | own, sure, 0.1), np.nan),
                "target_rank": np.where(judged, np.where(right | own, 1, 3), MISSING),
                "target_entropy": np.where(judged, 2 - 2 * sure, np.nan),
                "target_top_id": np.where(judged[:, None], tops, MISSING),
                "target_top_p": np.where(judged[:, None], shares, np.nan),
                "draft_top_id": np.where(own[:, None], MISSING, tops),
                "draft_top_p": np.where(own[:, None], np.nan, shares),
            }
        )

    def _slots(self, number: np.ndarray, seq: np.ndarray) -> None:
        n, n_slots = len(number), N_MAX + 1
        states = np.array(["live", "fresh", "fresh", "carried"])
        self.store.memory.extend(
            self._base(np.repeat(number, n_slots), np.repeat(seq, n_slots))
            | {
                "slot": np.tile(np.arange(n_slots), n),
                "state": np.tile(states, n).tolist(),
                "age": np.tile(np.arange(n_slots), n),
            }
        )

    def _rounds(
        self,
        number: np.ndarray,
        seq: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        pos: np.ndarray,
    ) -> None:
        n, prompt = len(number), number == 0
        steps, right = np.maximum(drafted, 0), np.maximum(accepted, 0)
        undone = steps - right
        held = np.where(prompt, N_PROMPT, pos + right + 1)
        stop = np.select([steps == 0, undone == 0], ["target", "bonus"], "replacement")
        share = self.n_seqs
        self.store.rounds.extend(
            self._base(number, seq)
            | {
                "t_ms": 12.0 * (number + 1),
                "pos0": pos,
                "drafter": ["draft-mtp" if d > 0 else "" for d in drafted.tolist()],
                "accept_rule": ["match" if d > 0 else "" for d in drafted.tolist()],
                "num_draft_tokens": drafted,
                "num_accepted_draft_tokens": accepted,
                "num_target_tokens": np.ones(n, int),
                "num_emitted": np.where(prompt, 0, right + 1),
                "stop_kind": stop.tolist(),
                "rollback_depth": undone,
                "memory_rollback": undone,
                "rollback_path": ["seq_rm" if u else "none" for u in undone.tolist()],
                "n_rs_seq": np.full(n, N_MAX),
                "valid_depth": np.full(n, N_MAX),
                "rs_idx_after": undone,
                "verify_width": np.where(prompt, N_PROMPT, steps + 1),
                "ubatch_ids": [str(r) for r in number.tolist()],
                "attention_pos_max": held - 1,
                "recurrent_pos_max": held - 1,
                "kv_cells_used": held,
                "kv_cells_duplicate": np.zeros(n, int),
                "memory_bytes_held": np.full(n, 1 << 21),
                "draft_ms": (0.4 + 0.9 * steps) / share,
                "verify_ms": (5.0 + 0.4 * steps) / share,
                "sample_ms": np.full(n, 0.7),
                "save_ms": np.zeros(n),
                "rollback_ms": np.where(undone > 0, 0.1, 0.0),
                "restore_ms": np.zeros(n),
                "replay_ms": np.zeros(n),
            }
        )


def trace_of(n_rows: int, n_seqs: int = 2) -> TraceStore:
    """A store with one synthetic run and at least n_rows rows in all tables together."""
    store = TraceStore()
    run = SyntheticRun(store, n_seqs)
    per_round = 10 * n_seqs
    while store.size() < n_rows:
        run.add(max(1, (n_rows - store.size()) // per_round))
    return store
