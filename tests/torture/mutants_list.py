"""More plausible bugs of the code that rolls back, beside those of tests.support.mutations.

Each is a few words of the program replaced by others. Where nothing can notice one, the reason is
given here; it counts as not observable.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY, _DECODE = "engine.memory", "engine.decode"
_POLICY = f"{_MEMORY}.recurrent:SnapshotPolicy"
_PLANES = f"{_MEMORY}.planes:PlaneMemory"
_RING = f"{_MEMORY}.ring:RingMemory"
_REPLAY = f"{_MEMORY}.replay:ReplayMemory"
_HYBRID = f"{_MEMORY}.hybrid:HybridMemory"
_UNDO = f"{_DECODE}.rollback:Rollback"
_HELD = f"{_DECODE}.held_sequences:HeldSequences"
_KEPT = f"{_MEMORY}.context_checkpoints:ContextCheckpoints"


@dataclass(frozen=True)
class Reworded:
    """place, old, new: as tests.torture.reworded takes them. policies: lanes and runs in which it
    acts, tried in turn until something notices. unseen: why nothing can notice it."""

    name: str
    place: str
    old: str
    new: str
    policies: tuple[str, ...]
    unseen: str = ""


REWORDED = (
    # positions
    Reworded(
        "undoes one too few", f"{_POLICY}.seq_rm", "pos - (p0 - 1)", "pos - p0", ("planes", "ring")
    ),
    Reworded(
        "undoes one too many",
        f"{_POLICY}.seq_rm",
        "self._move_cursor(seq, depth)",
        "self._move_cursor(seq, min(depth + 1, self.valid_depth(seq)))",
        ("ring", "replay"),
    ),
    Reworded(
        "position one too high",
        f"{_POLICY}.seq_rm",
        "self._pos[seq] = p0 - 1",
        "self._pos[seq] = p0",
        ("planes", "replay"),
    ),
    Reworded(
        "position not moved back",
        f"{_POLICY}.seq_rm",
        "self._pos[seq] = p0 - 1",
        "pass",
        ("planes", "ring"),
    ),
    Reworded(
        "rollback pending for ever",
        f"{_POLICY}.commit",
        "self._pos[seq], self._pending[seq] = last, 0",
        "self._pos[seq] = last",
        ("planes", "carry", "replay"),
    ),
    Reworded(
        "rollback of the sequence before in a slot",
        f"{_POLICY}._clear",
        "self._pos[seq], self._pending[seq] = -1, 0",
        "self._pos[seq] = -1",
        ("planes", "carry", "replay"),
    ),
    Reworded(
        "beyond what is valid",
        f"{_POLICY}.seq_rm",
        "if depth > self.valid_depth(seq):",
        "if depth > self.n_rs_seq:",
        ("planes,ubatch=2", "carry,ubatch=2", "planes,n_rs_seq=2"),
    ),
    # checkpoints
    Reworded(
        "restored without its windows",
        f"{_POLICY}.restore",
        "checkpoint.states)",
        "{k: s * (not self.layout.states[k].is_window) for k, s in checkpoint.states.items()})",
        ("checkpoint",),
    ),
    Reworded(
        "restored one position too far",
        f"{_POLICY}.restore",
        "checkpoint.pos,",
        "checkpoint.pos + 1,",
        ("checkpoint",),
        "The memory's position is the lesser one of its parts, so the cells' counts until the "
        "replay behind the restore sets the states' again.",
    ),
    Reworded(
        "one cell above the checkpoint kept",
        f"{_HYBRID}.restore",
        "checkpoint.pos_max + 1",
        "checkpoint.pos_max + 2",
        ("checkpoint",),
    ),
    Reworded(
        "one cell of the checkpoint removed",
        f"{_HYBRID}.restore",
        "checkpoint.pos_max + 1",
        "checkpoint.pos_max",
        ("checkpoint",),
    ),
    Reworded(
        "no checkpoint for the deepest rollback",
        f"{_UNDO}.checkpoints",
        "len(span.tokens) - 1 >",
        "len(span.tokens) - 2 >",
        ("planes,n_rs_seq=2", "checkpoint"),
    ),
    Reworded(
        "checkpoint behind the batch",
        f"{_UNDO}._restore",
        "self._memory.restore(span.seq, save)",
        "save and self._memory.seq_rm(span.seq, span.pos0)",
        ("checkpoint",),
    ),
    Reworded(
        "replays the replaced token too",
        f"{_UNDO}._replay",
        "*outcome.accepted[:-1]]",
        "*outcome.accepted]",
        ("checkpoint",),
    ),
    Reworded(
        "replays one token too few",
        f"{_UNDO}._replay",
        "*outcome.accepted[:-1]]",
        "*outcome.accepted[:-2]]",
        ("checkpoint",),
    ),
    Reworded(
        "replays another first token",
        f"{_UNDO}._replay",
        "[span.tokens[0], *outcome",
        "[span.tokens[-1], *outcome",
        ("checkpoint",),
    ),
    Reworded(
        "a replay is never compared",
        f"{_UNDO}._replay_verified",
        "if len(found.tokens) == len(tokens):",
        "if True:",
        ("checkpoint,replay=verify,free",),
        "A replay verifies what was accepted in passes of other widths, and those give equal bits "
        "here: no replay disagrees, so the branch is never left.",
    ),
    # how far back
    Reworded(
        "removes from one token further on",
        f"{_UNDO}.undo",
        "span.pos0 + n_kept)",
        "span.pos0 + n_kept + 1)",
        ("planes", "ring"),
    ),
    Reworded(
        "removes an accepted token",
        f"{_UNDO}.undo",
        "span.pos0 + n_kept)",
        "span.pos0 + max(1, n_kept - 1))",
        ("planes", "replay"),
    ),
    Reworded(
        "one rejected token is nothing",
        f"{_UNDO}.undo",
        "if n_kept == len(span.tokens):",
        "if n_kept >= len(span.tokens) - 1:",
        ("planes", "ring"),
    ),
    # planes
    Reworded(
        "every plane is called fresh",
        f"{_PLANES}._commit",
        "self._depth[seq] = step.depths[row]",
        "self._depth[seq] = self.n_rs_seq",
        ("planes,ubatch=2", "planes,n_rs_seq=2", "carry"),
    ),
    Reworded(
        "a new sequence starts from what lay there",
        f"{_PLANES}._collect",
        "planes[0, step.zero] = 0.0",
        "pass",
        ("planes", "carry", "checkpoint"),
    ),
    Reworded(
        "an idle state moves without its rollback",
        f"{_PLANES}._moves",
        "idx = self._pending[min(owners)]",
        "idx = 0",
        ("planes", "carry"),
        "No sequence of a run lies idle between others with a rollback pending: filler makes all "
        "drafts of a round equally long. The memory script of the active gap shows it.",
    ),
    Reworded(
        "planes carried from one further back",
        f"{_PLANES}._carried_rows",
        "(p + i) * self.n_seqs + source",
        "(min(p + i + 1, self.n_rs_seq)) * self.n_seqs + source",
        ("carry,ubatch=6", "carry,n_rs_seq=8"),
        "It acts where sequences with uneven rollbacks share a pass. Such a pass holds the whole "
        "batch of each of them, so no rollback reaches the planes that it carried.",
    ),
    Reworded(
        "carry forgets the rollback before",
        f"{_MEMORY}.planes:CarryMemory.valid_depth",
        "self._depth[seq] - self._pending[seq]",
        "self._depth[seq]",
        ("carry,ubatch=2", "carry"),
        "A round undoes once, and the pass behind it consumes that: no second rollback is asked "
        "for while one is pending. Memory scripts show it.",
    ),
    Reworded(
        "carry promises what is rolled back",
        f"{_MEMORY}.planes:CarryMemory.guaranteed_depth",
        "max(0, self._depth[seq] - self._pending[seq])",
        "self._depth[seq]",
        ("carry,n_rs_seq=8", "carry,ubatch=2", "carry"),
        "A round undoes tokens of its own batch alone, and behind that batch the planes are true "
        "so far back, whatever was promised beyond.",
    ),
    Reworded(
        "a pass promises one plane more",
        f"{_MEMORY}.planes:PlanesMemory.guaranteed_depth",
        "self._n_planes) - 1",
        "self._n_planes)",
        ("planes,n_rs_seq=2", "planes"),
    ),
    # ring
    Reworded(
        "an overwritten slot is held",
        f"{_RING}._choose",
        "self._n_lanes - n_new)",
        "self._n_lanes)",
        ("ring,n_rs_seq=2", "ring"),
    ),
    Reworded(
        "the ring promises one too many",
        f"{_RING}.guaranteed_depth",
        "+ n_last - 1)",
        "+ n_last)",
        ("ring,n_rs_seq=2", "ring"),
        "The bound is that of n_rs_seq wherever anything is held: the ring of a running sequence "
        "is full behind its prompt.",
    ),
    Reworded(
        "the cursor goes back one less",
        f"{_RING}._move_cursor",
        "del held[-depth:]",
        "del held[-max(1, depth - 1):]",
        ("ring",),
    ),
    Reworded(
        "the newest slot stays",
        f"{_RING}._move_cursor",
        "del held[-depth:]",
        "del held[-depth - 1 : -1]",
        ("ring",),
    ),
    Reworded(
        "slots of a rollback stay counted",
        f"{_RING}._move_cursor",
        "self._count(self._n_refs, held[-depth:], -1)",
        "pass",
        ("ring",),
    ),
    # replay
    Reworded(
        "the fold takes the rejected tokens",
        f"{_REPLAY}._cursor",
        "self._n_logged[seq] - self._pending[seq]",
        "self._n_logged[seq]",
        ("replay",),
    ),
    Reworded(
        "one logged token is not counted",
        f"{_REPLAY}._commit",
        "self._n_logged[seq] = plan.n_kept",
        "self._n_logged[seq] = max(1, plan.n_kept - 1)",
        ("replay",),
    ),
    Reworded(
        "a new row is not cleared",
        f"{_REPLAY}.advance",
        "bases[plan.new] = 0.0",
        "pass",
        ("replay",),
    ),
    Reworded(
        "the log of the sequence before in a slot",
        f"{_REPLAY}._forget",
        "self._row[seq], self._n_logged[seq] = -1, 0",
        "self._row[seq] = -1",
        ("replay",),
    ),
    Reworded(
        "uneven cursors fold the fewest",
        f"{_REPLAY}._fold_of",
        "max(counts))\n",
        "min(counts))\n",
        ("replay",),
    ),
    Reworded(
        "tokens too early for the log come last",
        f"{_REPLAY}.advance",
        "slice(plan.n_early)",
        "slice(max(1, plan.n_early - 1))",
        ("replay",),
    ),
    # attention cells
    Reworded(
        "one rejected cell stays",
        f"{_MEMORY}.kv:AttentionKV.seq_rm",
        "holding(each, p0, p1)",
        "holding(each, p0 + (p0 > 0), p1)",
        ("planes", "checkpoint"),
    ),
    Reworded(
        "the cells before those are freed",
        f"{_MEMORY}.kv_cells:CellTable.release",
        "self._owners[stream, cells] &=",
        "self._owners[stream, np.maximum(cells - 1, 0)] &=",
        ("planes",),
    ),
    Reworded(
        "cells are found one too low",
        f"{_MEMORY}.kv_cells:CellTable.take",
        "self._pos[stream, where] = pos",
        "self._pos[stream, where] = np.maximum(pos - (pos > 20), 0)",
        ("planes",),
    ),
    # acceptance
    Reworded(
        "the bonus of the row before",
        f"{_DECODE}.verify:with_bonus",
        "p = rows(len(found.tokens))",
        "p = rows(max(0, len(found.tokens) - 1))",
        ("planes",),
    ),
    Reworded(
        "a rejected token is emitted",
        f"{_DECODE}.verify:match",
        "found.tokens.append(token)",
        "found.tokens.append(drafted)",
        ("planes",),
    ),
    Reworded(
        "the rest of a draft is not looked at",
        f"{_DECODE}.verify:match",
        "if token != drafted or",
        "if (token != drafted and i == 0) or",
        ("planes",),
    ),
    # what is read, kept and removed
    Reworded(
        "the ring starts from its oldest state",
        f"{_RING}._begin",
        "read = [self._held[seq][-1] if",
        "read = [self._held[seq][0] if",
        ("ring",),
    ),
    Reworded(
        "the next pass reads the newest plane",
        f"{_PLANES}._begin",
        "read = [self._pending[seq] for seq in seqs]",
        "read = [0 for seq in seqs]",
        ("planes", "carry"),
    ),
    Reworded(
        "the fold reads one logged token too few",
        f"{_REPLAY}._fold_of",
        "return _Fold(counts[0], counts[0])",
        "return _Fold(max(0, counts[0] - 1), max(0, counts[0] - 1))",
        ("replay",),
    ),
    Reworded(
        "cells stay where the state went back",
        f"{_HYBRID}.seq_rm",
        "return self.attention.seq_rm(seq, p0, p1)",
        "return p0 > 0 or self.attention.seq_rm(seq, p0, p1)",
        ("planes", "ring"),
    ),
    Reworded(
        "the cell at the first position stays",
        f"{_MEMORY}.kv_cells:CellTable.holding",
        "self._pos[stream, :end] >= p0",
        "self._pos[stream, :end] > p0",
        ("replay", "checkpoint"),
    ),
    Reworded(
        "the states are not restored",
        f"{_HYBRID}.restore",
        "self.recurrent.restore(seq, checkpoint.recurrent)",
        "pass",
        ("checkpoint",),
    ),
    Reworded(
        "a restored state is one plane further",
        f"{_PLANES}._put",
        "planes[0, cell] = states[key]",
        "planes[-1, cell] = states[key]",
        ("planes,n_rs_seq=2", "carry,n_rs_seq=2"),
    ),
    Reworded(
        "the last accepted token goes as well",
        f"{_DECODE}.rollback:RollbackOutcome.n_kept",
        "len(self.acceptance.own_p) + 1",
        "len(self.acceptance.own_p)",
        ("planes", "ring"),
    ),
    Reworded(
        "the slot believes that the whole prompt is in memory",
        f"{_HELD}.resume",
        "self.tokens[seq] = list(tokens[: found.n_tokens])",
        "self.tokens[seq] = list(tokens)",
        ("planes",),
    ),
    Reworded(
        "the window of the log is not folded",
        f"{_REPLAY}._to_fold",
        "return self._plan.windows if",
        "return _Fold(0, 0) if",
        ("replay",),
    ),
    # the prompt cache
    Reworded(
        "snapshots of the cache reach one further",
        f"{_HELD}.reuse",
        "depth <= recurrent.valid_depth(seq)",
        "depth <= recurrent.valid_depth(seq) + 1",
        ("planes", "ring"),
    ),
    Reworded(
        "the whole prompt is in the cache",
        f"{_HELD}.reuse",
        "min(n_common(held, tokens), len(tokens) - 1)",
        "n_common(held, tokens)",
        ("planes",),
    ),
    Reworded(
        "checkpoints of another text are kept",
        f"{_KEPT}.begin",
        "for n, one in self._by_length.items() if n <= n_tokens}",
        "for n, one in self._by_length.items()}",
        ("planes", "checkpoint"),
    ),
    Reworded(
        "a context checkpoint of the text behind",
        f"{_KEPT}.newest",
        "if n <= n_tokens)",
        "if n <= n_tokens + 3)",
        ("planes", "checkpoint"),
    ),
    Reworded(
        "an older context checkpoint than needed",
        f"{_KEPT}.newest",
        "length = max(",
        "length = min(",
        ("planes", "checkpoint"),
        "The output is right; it costs prompt tokens processed again, which `cache_n` tells.",
    ),
    Reworded(
        "the draft model keeps a guess too many",
        "engine.draft.draft_simple:DraftSimple.observe",
        "progress.n_decoded + n_true)",
        "progress.n_decoded + n_true + 1)",
        ("planes",),
        "It spoils drafts alone: the target judges every token, so only acceptance falls.",
    ),
)
