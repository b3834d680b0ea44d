"""The schema of the trace: one table per grain, one column per fact.

The same names are the header rows of the CSV files. Names follow vLLM and AIPerf where they
have one. A value that was not observed is stored as MISSING (integers) or NaN (reals) and is
an empty field in CSV, never 0. Times are milliseconds, sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SCHEMA_VERSION = 3
MISSING = int(np.iinfo(np.int32).min)
N_TOP = 5
"""Alternatives kept per position on each side (target and draft)."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. kind: "int" (int64), "real" (float64), "text" (interned code), "tops".

    A "tops" column holds [n, N_TOP] float32 or int32 and becomes N_TOP columns in CSV,
    `<name>_1` … `<name>_N`.
    """

    name: str
    kind: str
    about: str


def _ints(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "int", "") for name in names)


ROUNDS = (
    Column("run_id", "int", "run this row belongs to"),
    Column("round", "int", "scheduler round, from 0; a sequence begins with one per prompt part"),
    Column("seq_id", "int", "sequence"),
    Column("t_ms", "real", "end of the round, in the run's own time: pauses do not count"),
    Column("pos0", "int", "position of the first token of the batch"),
    Column("drafter", "text", "drafter whose draft was verified, empty without a draft"),
    Column("accept_rule", "text", "rule that judged the draft: match or rejection; else empty"),
    Column("num_draft_tokens", "int", "tokens drafted, after trimming; none for a prompt part"),
    Column("num_accepted_draft_tokens", "int", "drafted tokens that the target confirmed"),
    Column(
        "num_target_tokens",
        "int",
        "the target's own tokens behind them, emitted or not: 1, "
        "0 behind a prompt part that is not the last, 2 behind a verified replay",
    ),
    Column("num_emitted", "int", "tokens added to the output"),
    Column("stop_kind", "text", "replacement, bonus, target or end; empty: nothing was chosen"),
    Column("rollback_depth", "int", "drafted tokens undone; in memory, padding comes on top"),
    Column("memory_rollback", "int", "tokens undone in memory: rollback_depth and the padding"),
    Column("rollback_path", "text", "none, seq_rm, restore, restore_depth or refused"),
    Column("n_rs_seq", "int", "snapshot planes beyond the live state"),
    Column("valid_depth", "int", "deepest truthful rollback after the verify batch"),
    Column("rs_idx_before", "int", "pending plane that the verify batch read"),
    Column("rs_idx_after", "int", "pending plane after the rollback"),
    Column("replay_index", "int", "restores and replays needed in this round"),
    Column("verify_width", "int", "tokens of this sequence in the batch, without padding"),
    Column("ubatch_ids", "text", "ubatches of this round, space separated"),
    Column("attention_pos_max", "int", "last position that the attention cells hold"),
    Column("recurrent_pos_max", "int", "last position of the recurrent state"),
    Column("kv_cells_used", "int", "attention cells in use by this sequence"),
    Column("kv_cells_duplicate", "int", "cells beyond one per position"),
    Column("state_bytes_written", "int", "recurrent state that forward passes stored"),
    Column("state_bytes_copied", "int", "stored state copied unchanged to another place"),
    Column("state_bytes_restored", "int", "state put back from checkpoints"),
    Column("checkpoint_bytes", "int", "size of the checkpoint taken this round"),
    Column("cache_wrong", "int", "prompt tokens taken from the cache that cells hold otherwise"),
    Column("memory_bytes_held", "int", "storage of attention cells and recurrent states"),
    Column("draft_ms", "real", "drafting, and keeping the drafter in step"),
    Column("verify_ms", "real", "forward passes of the target"),
    Column("sample_ms", "real", "sampling and acceptance"),
    Column("save_ms", "real", "checkpoint save"),
    Column("rollback_ms", "real", "partial removal"),
    Column("restore_ms", "real", "checkpoint restore"),
    Column("replay_ms", "real", "decoding accepted tokens again"),
)

TOKENS = (
    Column("run_id", "int", "run"),
    Column("round", "int", "round"),
    Column("seq_id", "int", "sequence"),
    Column("pos", "int", "position the token has, or would have had"),
    Column("kind", "text", "one of TOKEN_KINDS"),
    Column("token_id", "int", "id in the target's vocabulary"),
    Column("draft_index", "int", "index inside the draft, from 0"),
    Column("draft_p", "real", "drafter's confidence in the drafted token"),
    Column("target_p", "real", "target's raw softmax probability of this token here"),
    Column(
        "rule_p", "real", "target's probability of it after bias, penalties, filters, temperature"
    ),
    Column("rule_q", "real", "drafter's probability of it as rejection used it; empty for match"),
    Column("target_rank", "int", "rank of this token among the target's logits, from 1"),
    Column("target_entropy", "real", "entropy of the target's raw softmax here, nats"),
    Column("target_top_id", "tops", "target's most probable tokens"),
    Column("target_top_p", "tops", "their raw softmax probabilities"),
    Column("draft_top_id", "tops", "drafter's most probable tokens"),
    Column("draft_top_p", "tops", "their probabilities"),
)

DRAFTS = (
    Column("run_id", "int", "run"),
    Column("round", "int", "round"),
    Column("seq_id", "int", "sequence"),
    Column("drafter", "text", "drafter that was asked"),
    Column("match_pos", "int", "position in the history where the looked-up n-gram starts"),
    Column("num_raw", "int", "tokens found before trimming"),
    Column("num_draft_tokens", "int", "tokens drafted, after trimming"),
    Column("reason", "text", "why the draft is empty or shorter than possible, see DRAFT_REASONS"),
    Column("num_wrong_rows", "int", "hidden rows paired by the MTP head that are of other places"),
    Column("draft_ms", "real", "drafting, a part of the call for all sequences"),
)

UBATCHES = (
    Column("run_id", "int", "run"),
    Column("round", "int", "round"),
    Column("ubatch", "int", "number of the ubatch within the run"),
    Column("n_seqs", "int", "sequences side by side"),
    Column("n_seq_tokens", "int", "tokens of each, padding included"),
    Column("seq_ids", "text", "sequences, space separated"),
    Column("n_padding", "int", "filler tokens that make drafts equally long, all sequences"),
    Column("purpose", "text", "prompt, verify or replay"),
    Column("reason", "text", "why the split ended here"),
    Column("pos_gap", "int", "positions left out behind what memory held, below 0: held already"),
    Column("ms", "real", "forward pass"),
)

MEMORY = (
    Column("run_id", "int", "run"),
    Column("round", "int", "round"),
    Column("seq_id", "int", "sequence"),
    Column("slot", "int", "snapshot plane; 0 is the live state after a batch"),
    Column("state", "text", "one of SLOT_STATES"),
    Column("age", "int", "tokens between this state and the newest one written"),
)

DIVERGENCE = (
    *_ints("run_id"),
    Column("lane", "text", "lane"),
    Column("round", "int", "round in which these logits were computed"),
    Column("seq_id", "int", "sequence"),
    Column("pos", "int", "position of the token that these logits choose"),
    Column("token_id", "int", "token that the reference lane chose there"),
    Column("max_abs", "real", "largest logit difference against the reference lane"),
    Column("nmse", "real", "mean squared difference of the logits over their mean square"),
    Column("kl", "real", "KL(reference || lane), nats"),
    Column("top1_equal", "int", "1 where both lanes have the same most probable token"),
    Column("rank", "int", "rank of the chosen token among the lane's logits, from 1"),
    Column("top2_gap", "real", "reference's largest logit minus its second largest"),
    Column("state_error", "real", "worst layer's relative error of S, last row of a round only"),
    Column("conv_error", "real", "the same of the convolution window"),
    Column("cells_differ", "int", "cells in one lane only, or beyond one per position; as above"),
)

STATES = (
    *_ints("run_id"),
    Column("lane", "text", "lane"),
    Column("round", "int", "round behind which the states are compared"),
    Column("seq_id", "int", "sequence"),
    Column("pos", "int", "last position that the states hold"),
    Column("layer", "int", "recurrent layer, by its index in the model"),
    Column("state_error", "real", "relative error of S against the reference lane"),
    Column("conv_error", "real", "the same of the convolution window"),
)

FINDINGS = (
    *_ints("run_id"),
    Column("round", "int", "first round that the rule found, empty for a whole run"),
    Column("seq_id", "int", "sequence, empty for a whole run"),
    Column("rule", "text", "rule that fired"),
    Column("severity", "text", "info, warning or error"),
    Column("message", "text", "one sentence"),
    Column("evidence", "text", "the numbers behind it"),
    Column("suggestion", "text", "what to do about it"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "rounds": ROUNDS,
    "tokens": TOKENS,
    "drafts": DRAFTS,
    "ubatches": UBATCHES,
    "memory": MEMORY,
    "divergence": DIVERGENCE,
    "states": STATES,
    "findings": FINDINGS,
}

TOKEN_KINDS = (
    "prompt",
    "target",
    "accepted",
    "rejected",
    "ignored",
    "replacement",
    "bonus",
    "replayed",
)
EMITTED_KINDS = ("target", "accepted", "replacement", "bonus")
GHOST_KINDS = ("rejected", "ignored")
SLOT_STATES = ("free", "live", "fresh", "carried", "stale", "pending")
ROLLBACK_PATHS = ("none", "seq_rm", "restore", "restore_depth", "refused")
DRAFT_REASONS = {
    "too-short-history": "fewer tokens than the n-gram and its continuation take",
    "no-match": "the n-gram has not occurred before",
    "copy<n": "fewer tokens follow the match than the n-gram has",
    "history-end": "the history ends before a whole draft",
    "muted": "no token of the last draft after this key was accepted",
    "accepted-before": "no longer than what was accepted of the last draft after this key",
    "min-hits": "the key was looked up too few times",
    "ambiguous": "no continuation of the key dominates",
    "pool-miss": "the pool does not know the next token",
    "low-count": "too few observations, or none dominates",
    "p_min": "the next token was less probable than p_min",
    "n_min": "shorter than n_min, thrown away",
    "non-finite": "the drafter's logits are not finite",
    "n_max": "drafts of no token were asked for",
    "limit": "context or token limit leave no more room",
}
"""Why a draft is empty or shorter than its drafter's longest; empty for a full draft."""
PHASES = ("draft", "verify", "sample", "save", "rollback", "restore", "replay")
