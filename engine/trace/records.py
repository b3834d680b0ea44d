"""The schema of the trace: one table per grain, one column per fact.

The same names are the header rows of the CSV files. Names follow vLLM and AIPerf where they
have one. A value that was not observed is stored as MISSING (integers) or NaN (reals) and is
an empty field in CSV, never 0. Times are milliseconds, sizes are bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from engine.draft.drafter import N_TOP as N_TOP
from engine.foreign import COUNT, LARGEST, LONGEST_DRAFT, LONGEST_MS

REFERENCE, NOISE, PEER, POLICY = "reference", "noise", "peer", "policy"
PEER_NOISE = "peer noise"
"""Lanes that a peer lane is judged by."""

SCHEMA_VERSION = 4
"""Raised where a column changes its meaning."""
READ_VERSIONS = (3, SCHEMA_VERSION)
"""Traces of other versions are not read. In version 3 every token has an id."""
SCHEMA_MINOR = 5
"""Raised where tables or columns join, which name it in `since`; it goes on from version to
version. Older traces open with those empty, and in newer ones what this program does not know is
kept and written back."""
MISSING = int(np.iinfo(np.int32).min)
ColumnState = Literal["observed", "derived", "absent"]
COLUMN_STATES: tuple[str, ...] = get_args(ColumnState)
"""What a run may say of a column in its fact `columns`: read off the engine, computed from other
observations, or unknown to this source."""

TOKEN_KINDS = (
    "prompt",
    "target",
    "accepted",
    "rejected",
    "ignored",
    "replacement",
    "bonus",
    "replayed",
    "unknown",
    "side",
)
EMITTED_KINDS = ("target", "accepted", "replacement", "bonus", "unknown")
"""unknown: emitted, by another engine that did not tell in what part of which round."""
GHOST_KINDS = ("rejected", "ignored", "side")
SLOT_STATES = ("free", "live", "fresh", "carried", "stale", "pending")
ROLLBACK_PATHS = ("none", "seq_rm", "restore", "restore_depth", "refused")
SEVERITIES = ("info", "warning", "error")

_MOST_ROUNDS = 10**9
_MOST_SEQUENCES = 2**16
_MOST_SLOTS = _MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Column:
    """One column. kind: "int" (int64), "real" (float64), "text" (interned code), "tops".

    A "tops" column holds [n, N_TOP] float32 or int32 and becomes N_TOP columns in CSV,
    `<name>_1` … `<name>_N`. A trace that is read has to keep to the rest: least, most: numbers
    that are observed, NaN left out. required: no row without a value. choices: texts, where not
    any will do. since: minor version of the schema that the column came with.
    """

    name: str
    kind: str
    about: str
    least: float = -math.inf
    most: float = math.inf
    required: bool = False
    choices: tuple[str, ...] = ()
    since: int = 0

    @property
    def unit(self) -> str:
        """ms, bytes or tokens, by the ending of the name; empty for numbers without one."""
        endings = {"_ms": "ms", "_bytes": "bytes", "_tokens": "tokens"}
        return next((unit for end, unit in endings.items() if self.name.endswith(end)), "")

    @property
    def is_whole(self) -> bool:
        """Whether a "tops" column holds int32 and not float32."""
        return self.name.endswith(("_id", "_forbidden"))


def _count(
    name: str,
    about: str,
    most: int = COUNT,
    least: int = 0,
    *,
    kind: str = "int",
    required: bool = False,
    since: int = 0,
) -> Column:
    return Column(name, kind, about, least, most, required, since=since)


def _bytes(name: str, about: str) -> Column:
    return _count(name, about, LARGEST)


def _ms(name: str, about: str, since: int = 0) -> Column:
    return Column(name, "real", about, 0.0, LONGEST_MS, since=since)


def _probability(name: str, about: str, kind: str = "real", since: int = 0) -> Column:
    return Column(
        name, kind, about, 0.0, 1.001, since=since
    )  # sums of float32 end a little next to 1


def _forbidden(name: str) -> Column:
    about = "1 for each of them that the grammar forbids here, empty without a grammar"
    return Column(name, "tops", about, 0, 1, since=4)


def _choice(name: str, about: str, choices: tuple[str, ...]) -> Column:
    return Column(name, "text", about, choices=choices)


_RUN = _count("run_id", "run this row belongs to", required=True)
_ROUND = _count("round", "round", _MOST_ROUNDS, required=True)
_SEQUENCE = _count("seq_id", "sequence", _MOST_SEQUENCES - 1, required=True)
_LANE = Column("lane", "text", "lane")

ROUNDS = (
    _RUN,
    _count(
        "round",
        "scheduler round, from 0; a sequence begins with one per prompt part",
        _MOST_ROUNDS,
        required=True,
    ),
    _SEQUENCE,
    _ms("t_ms", "end of the round, in the run's own time: pauses do not count"),
    _count("pos0", "position of the first token of the batch"),
    Column("drafter", "text", "drafter whose draft was verified, empty without a draft"),
    Column("accept_rule", "text", "rule that judged the draft: match or rejection; else empty"),
    _count(
        "num_draft_tokens",
        "tokens drafted, after trimming; of a tree on the judged branch, none for a prompt part",
        LONGEST_DRAFT,
    ),
    _count("num_accepted_draft_tokens", "drafted tokens that the target confirmed", LONGEST_DRAFT),
    _count(
        "num_target_tokens",
        "the target's own tokens after them, emitted or not: 1, "
        "0 after a prompt part that is not the last, 2 after a verified replay",
        LONGEST_DRAFT,
    ),
    _count("num_emitted", "tokens added to the output"),
    Column("stop_kind", "text", "replacement, bonus, target or end; empty: nothing was chosen"),
    _count(
        "rollback_depth", "drafted tokens undone; in memory, padding comes on top", LONGEST_DRAFT
    ),
    _count("memory_rollback", "tokens undone in memory: rollback_depth and the padding"),
    _choice(
        "rollback_path", "none, seq_rm, restore, restore_depth or refused", ("", *ROLLBACK_PATHS)
    ),
    _count("n_rs_seq", "snapshot planes beyond the live state", LONGEST_DRAFT),
    _count("valid_depth", "deepest truthful rollback after the verify batch", least=-COUNT),
    _count("rs_idx_before", "pending plane that the verify batch read"),
    _count("rs_idx_after", "pending plane after the rollback, of a tree on the judged branch"),
    _count("replay_index", "restores and replays needed in this round"),
    _count("verify_width", "its tokens in the batch, of a tree on all branches, without padding"),
    Column("ubatch_ids", "text", "ubatches of this round, space separated"),
    _count(
        "attention_pos_max", "last position that the attention cells hold, -1 without any", least=-1
    ),
    _count("recurrent_pos_max", "last position of the recurrent state, -1 without any", least=-1),
    _count("kv_cells_used", "attention cells in use by this sequence"),
    _count("kv_cells_duplicate", "cells beyond one per position"),
    _bytes("state_bytes_written", "recurrent state that forward passes stored"),
    _bytes("state_bytes_copied", "stored state copied unchanged to another place"),
    _bytes("state_bytes_restored", "state put back from checkpoints"),
    _bytes("checkpoint_bytes", "size of the checkpoint taken this round"),
    _count("cache_wrong", "prompt tokens taken from the cache that cells hold otherwise", since=2),
    _count(
        "sampler_wrong",
        "tokens that the sampler goes on after and that are not the text's, or are missing",
        since=4,
    ),
    _count(
        "sampler_draws",
        "random numbers it has used beyond one per token; empty where the rule uses others",
        least=-COUNT,
        since=4,
    ),
    _bytes("memory_bytes_held", "storage of attention cells and recurrent states"),
    _ms("draft_ms", "drafting, and keeping the drafter in step"),
    _ms("verify_ms", "forward passes of the target"),
    _ms("sample_ms", "sampling and acceptance"),
    _ms("save_ms", "checkpoint save"),
    _ms("rollback_ms", "partial removal"),
    _ms("restore_ms", "checkpoint restore"),
    _ms("replay_ms", "decoding accepted tokens again"),
    _ms(
        "total_ms",
        "the whole round: its phases and what lies between them, or where phases are unknown",
        since=3,
    ),
    _count("n_merged", "rounds summed in this row, at least; empty: one", least=2, since=3),
    _count(
        "draft_n_max",
        "longest draft by the rule of adaptive depth; empty without one",
        LONGEST_DRAFT,
        since=5,
    ),
)

TOKENS = (
    _RUN,
    _ROUND,
    _SEQUENCE,
    _count("pos", "position the token has, or would have had", required=True),
    _choice("kind", "one of TOKEN_KINDS", TOKEN_KINDS),
    _count("token_id", "id in the target's vocabulary; empty where another engine hid it"),
    Column("text", "text", "text of a token without an id, or that its id does not tell", since=3),
    _count("draft_index", "index inside the draft or its judged branch, from 0", LONGEST_DRAFT),
    _count("draft_node", "of a tree: number of the token, from 0", since=5),
    _count(
        "draft_parent",
        "draft_node of the token before it, -1: it follows the newest token",
        least=-1,
        since=5,
    ),
    _probability("draft_p", "drafter's confidence in the drafted token"),
    _probability(
        "draft_conf",
        "what the drafter's confidence head gave the drafted token; empty without such a head",
        since=4,
    ),
    _probability("target_p", "target's raw softmax probability of this token here"),
    _probability(
        "rule_p", "target's probability of it after bias, penalties, filters, temperature"
    ),
    _probability("rule_q", "drafter's probability of it as rejection used it; empty for match"),
    _count("target_rank", "rank of this token among the target's logits, from 1", least=1),
    Column("target_entropy", "real", "entropy of the target's raw softmax here, nats"),
    _count("target_top_id", "target's most probable tokens", kind="tops"),
    _probability("target_top_p", "their raw softmax probabilities", "tops"),
    _forbidden("target_top_forbidden"),
    _count("draft_top_id", "drafter's most probable tokens", kind="tops"),
    _probability("draft_top_p", "their probabilities", "tops"),
    _forbidden("draft_top_forbidden"),
)

DRAFTS = (
    _RUN,
    _ROUND,
    _SEQUENCE,
    Column("drafter", "text", "drafter that was asked"),
    _count("match_pos", "position in the history where the looked-up n-gram starts"),
    _count("num_raw", "tokens found before trimming"),
    _count("num_draft_tokens", "tokens drafted, after trimming", LONGEST_DRAFT),
    Column("reason", "text", "why the draft is empty or shorter than possible"),
    _count(
        "num_wrong_rows",
        "rows of the target paired by the drafter that are of other places",
        since=2,
    ),
    _count(
        "num_wrong_tokens",
        "tokens paired with such rows by the drafter that are not the text's",
        since=4,
    ),
    _count(
        "block_length",
        "rows of the block that was drafted in one pass, the newest token and masks",
        LONGEST_DRAFT + 1,
        least=1,
        since=4,
    ),
    _probability(
        "confidence",
        "mean of draft_conf over the drafted tokens, of draft_p where there is no confidence head",
        since=4,
    ),
    _ms("draft_ms", "drafting, a part of the call for all sequences"),
)

UBATCHES = (
    _RUN,
    _ROUND,
    _count("ubatch", "number of the ubatch within the run"),
    _count("n_seqs", "sequences side by side", _MOST_SEQUENCES),
    _count("n_seq_tokens", "tokens of each, padding included"),
    Column("seq_ids", "text", "sequences, space separated"),
    _count("n_padding", "filler tokens that make drafts equally long, all sequences"),
    Column("purpose", "text", "prompt, verify or replay"),
    Column("reason", "text", "why the split ended here"),
    _count(
        "pos_gap",
        "positions left out after what memory held, below 0: held already",
        least=-COUNT,
        since=2,
    ),
    _ms("ms", "forward pass"),
)

MEMORY = (
    _RUN,
    _ROUND,
    _SEQUENCE,
    _count(
        "slot", "snapshot plane; 0 is the live state after a batch", _MOST_SLOTS - 1, required=True
    ),
    _choice("state", "one of SLOT_STATES", SLOT_STATES),
    _count("age", "tokens between this state and the newest one written", least=-COUNT),
)

DIVERGENCE = (
    _RUN,
    _LANE,
    _count("round", "round in which these logits were computed", _MOST_ROUNDS, required=True),
    _SEQUENCE,
    _count("pos", "position of the token that these logits choose", required=True),
    _count("token_id", "token that the reference lane chose there", required=True),
    Column("max_abs", "real", "largest logit difference against the reference lane"),
    Column("nmse", "real", "mean squared difference of the logits over their mean square"),
    Column("kl", "real", "KL(reference || lane), nats"),
    _count("top1_equal", "1 where both lanes have the same most probable token", 1),
    _count("rank", "rank of the chosen token among the lane's logits, from 1", least=1),
    Column("top2_gap", "real", "reference's largest logit minus its second largest"),
    Column("state_error", "real", "worst layer's relative error of S, last row of a round only"),
    Column("conv_error", "real", "the same of the convolution window"),
    _count("cells_differ", "cells in one lane only, or beyond one per position; as above"),
)

STATES = (
    _RUN,
    _LANE,
    _count("round", "round after which the states are compared", _MOST_ROUNDS, required=True),
    _SEQUENCE,
    _count("pos", "last position that the states hold", required=True),
    _count("layer", "recurrent layer, by its index in the model", _MOST_LAYERS - 1, required=True),
    Column("state_error", "real", "relative error of S against the reference lane"),
    Column("conv_error", "real", "the same of the convolution window"),
)

FINDINGS = (
    _RUN,
    _count("round", "first round that the rule found, empty for a whole run", _MOST_ROUNDS),
    _count("seq_id", "sequence, empty for a whole run", _MOST_SEQUENCES - 1),
    Column("rule", "text", "rule that fired"),
    _choice("severity", "info, warning or error", SEVERITIES),
    Column("message", "text", "one sentence"),
    Column("evidence", "text", "the numbers after it"),
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

PHASES = ("draft", "verify", "sample", "save", "rollback", "restore", "replay")
