"""Plausible bugs of the code that rolls back, one patch each: do the findings name them?

A mutation is looked at in a lane of a comparison, in a plain run, or in a run that goes on from a
prompt cache.

Not among them: an idle sequence whose state is not moved along with its cell. With filler, which
makes all drafts of a round equally long, no sequence of a lane lies idle between two others; the
memory script of the active gap shows that bug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from engine.analysis.findings.check import recorded
from engine.audit.run_audit import audit_of
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode import acceptance, held_sequences
from engine.decode.acceptance import Judge, with_bonus
from engine.decode.forward import Forward
from engine.decode.held_sequences import HeldSequences, PromptCache, PromptReuse
from engine.decode.round import Round
from engine.decode.verify_loop import Rollback, VerifyLoop
from engine.memory import planes as plane_memory
from engine.memory.hybrid import HybridMemory
from engine.memory.kv import AttentionKV
from engine.memory.planes import CarryMemory, PlaneMemory, PlanesMemory
from engine.memory.recurrent import RecurrentCheckpoint, SnapshotPolicy
from engine.memory.replay import ReplayMemory
from engine.memory.ring import RingMemory
from engine.memory.state_file import SequenceCheckpoint
from engine.model.layers import join_rows
from engine.model.recurrence import StateKey
from engine.model.recurrent_states import MatrixState
from engine.options import CacheOptions, Prompt, RunOptions, SpecOptions
from engine.trace.facts import Finding
from tests.support.golden_runs import SAMPLED, decode, options_of, prompt_of, session, tokens_of

MODEL = "qwen35-c-v2x-mtp-f32"
Patch = pytest.MonkeyPatch
LANE, RUN, CACHED = "lane", "run", "cached run"


@dataclass(frozen=True)
class Mutation:
    """One bug. apply: switches it on. where: LANE, RUN or CACHED. setting: the lane's text, or the
    policy of a run. finds: the rule that names it. n_seqs: sequences side by side."""

    name: str
    apply: Callable[[Patch], None]
    where: str
    setting: str
    finds: str
    n_seqs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


def outcome(mutation: Mutation) -> tuple[list[Finding], str]:
    """What the findings say in its setting, and the verdict on the lane, or whether a run has the
    text of plain decoding."""
    if mutation.where == LANE:
        return _lane(mutation)
    tokens = prompt_of(MODEL).tokens
    prompts = [Prompt(tokens[: 14 - 3 * i]) for i in range(mutation.n_seqs)]
    options = options_of(30, "draft-mtp", n_max=4, rollback=mutation.setting, ignore_eos=True)
    options = replace(options, parallel=mutation.n_seqs, **mutation.options)
    if mutation.where == CACHED:
        return _cached(options)
    opened = session(MODEL)
    run = opened.start(prompts, options, audit=audit_of(opened, prompts, options))
    while run.step():
        pass
    return recorded(run.trace), _text(tokens_of(run), prompts, options)


def _lane(mutation: Mutation) -> tuple[list[Finding], str]:
    tokens = prompt_of(MODEL).tokens
    prompts = [Prompt(tokens[: 14 - 3 * i]) for i in range(mutation.n_seqs)]
    options = options_of(16, n_max=4, parallel=mutation.n_seqs, ignore_eos=True)
    options = replace(options, **mutation.options)
    script = None if options.spec.types else [1, 0, 3, 2, 4]
    comparison = Comparison(
        session(MODEL),
        prompts,
        options,
        [NOISE_LANE, LaneSpec.parse(mutation.setting)],
        draft_accept=script,
    )
    while comparison.step():
        pass
    verdict = comparison.results()[-1]
    return [f for f in recorded(comparison.trace) if f.run_id == verdict.run_id], verdict.verdict


def _cached(options: RunOptions) -> tuple[list[Finding], str]:
    opened, tokens = session(MODEL), prompt_of(MODEL).tokens
    cache = PromptCache(CacheOptions(checkpoint_min_step=5))
    options = replace(options, n_predict=4, n_ctx=96, n_ubatch=8)
    first = opened.start([Prompt(tokens[:24])], options, None, cache)
    while first.step():
        pass
    other = (first.emitted[0][0] + 1) % opened.config.n_vocab
    prompt = Prompt((*tokens[:24], other, *tokens[25:30]))
    run = opened.start([prompt], options, None, cache)
    while run.step():
        pass
    return recorded(run.trace), _text(tokens_of(run), [prompt], options)


def _text(tokens: list[list[int]], prompts: Sequence[Prompt], options: RunOptions) -> str:
    with pytest.MonkeyPatch.context() as clean:
        for undo in _UNDO:
            clean.setattr(*undo)
        plain = replace(options, spec=SpecOptions(), rollback="checkpoint", parallel=1)
        expected = tokens_of(decode(session(MODEL), list(prompts), plain))
    return "same text" if tokens == expected else "wrong text"


_UNDO: list[tuple[Any, str, Any]] = []
"""The originals of what the mutation in force has patched."""


def mutate(patch: Patch, mutation: Mutation) -> None:
    """Switch one on until the patch is undone."""
    _UNDO.clear()
    mutation.apply(patch)


def _wrap(patch: Patch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    original = owner.__dict__[name]
    _UNDO.append((owner, name, original))
    patch.setattr(owner, name, make(original))


# -- the recurrent state -------------------------------------------------------------------


def _cursor_after_a_wrap(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def move(self: RingMemory, seq: int, depth: int) -> None:
            held = self._held[seq]
            wraps = held[-1] % self._n_lanes < depth < len(held) - 1
            original(self, seq, depth)
            if wraps:
                self._count(self._n_refs, held[-1:], -1)
                del held[-1:]

        return move

    _wrap(patch, RingMemory, "_move_cursor", make)


def _fold_without_the_last(patch: Patch) -> None:
    _fold_less(patch, windows=False)


def _fold_less(patch: Patch, *, windows: bool) -> None:
    def make(original: Any) -> Any:
        def to_fold(self: ReplayMemory, key: StateKey) -> Any:
            n, n_read = original(self, key)
            if self.layout.states[key].is_window is not windows:
                return n, n_read
            return max(n - 1, 0) if isinstance(n, int) else (n - 1).clamp_min(0), n_read

        return to_fold

    _wrap(patch, ReplayMemory, "_to_fold", make)


def _stale_log_entry(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def advance(self: ReplayMemory, key: StateKey, inputs: Any) -> Any:
            before = [rows[:, :1].clone() for rows in self._logs[key]]
            out = original(self, key, inputs)
            if self._plan.n_kept > 1:
                for rows, old in zip(self._logs[key], before, strict=True):
                    rows[:, :1] = old
            return out

        return advance

    _wrap(patch, ReplayMemory, "advance", make)


def _window_too_early(patch: Patch) -> None:
    _fold_less(patch, windows=True)


def _one_layer_not_rolled_back(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def read(self: RingMemory, key: StateKey) -> Any:
            slots = list(original(self, key))
            if key.layer != self.layout.layers[1] or self.layout.states[key].is_window:
                return slots
            both = zip(self._held, self._newest_written, strict=True)
            newest = {held[-1]: slot for held, slot in both if held}
            return [newest.get(slot, slot) for slot in slots]

        return read

    _wrap(patch, RingMemory, "_read", make)


def _a_leak(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def pick(planes: torch.Tensor, rows: Any) -> torch.Tensor:
            taken = original(planes, rows)
            if (
                isinstance(rows, tuple)
                and isinstance(rows[0], int)
                and rows[0]
                and planes.dim() == 5
            ):
                return taken * 0.999 + planes[0, rows[1]] * 0.001
            return taken

        return pick

    _wrap(patch, plane_memory, "_pick", make)


def _planes_in_reverse(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def into(self: MatrixState, inputs: Any, start: Any, slots: Any, **others: Any) -> Any:
            slots = list(slots)
            return original(self, inputs, start, [*slots[:1], *slots[:0:-1]], **others)

        return into

    _wrap(patch, MatrixState, "into", make)


def _rows_of_another_sequence(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def rows(self: PlaneMemory, slot: Any, read: Any) -> Any:
            if not any(read):
                return original(self, slot, read)
            first = read[0] * self.n_seqs + slot.sources[0]
            own = zip(read[:-1], slot.sources[:-1], strict=True)
            return self._row_numbers([*(p * self.n_seqs + c for p, c in own), first])

        return rows

    _wrap(patch, PlaneMemory, "_rows", make)


def _window_of_another_sequence(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def read(self: RingMemory, key: StateKey) -> Any:
            slots = list(original(self, key))
            # only where a rollback is pending, so that prompts are right
            swaps = self.layout.states[key].is_window and any(self._pending)
            return slots[::-1] if swaps else slots

        return read

    _wrap(patch, RingMemory, "_read", make)


def _one_more_than_planes(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def depth(self: PlanesMemory, seq: int) -> int:
            found = int(original(self, seq))
            return found + (found == self.n_rs_seq > 0)

        return depth

    _wrap(patch, PlanesMemory, "valid_depth", make)

    def clamp(original: Any) -> Any:
        def move(self: PlaneMemory, seq: int, depth: int) -> None:
            original(self, seq, depth)
            self._pending[seq] = min(self._pending[seq], self.n_rs_seq)

        return move

    _wrap(patch, PlaneMemory, "_move_cursor", clamp)


def _one_more_than_the_ring(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def depth(self: RingMemory, seq: int) -> int:
            return len(self._held[seq])

        return depth

    _wrap(patch, RingMemory, "valid_depth", make)


def _index_not_consumed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def commit(self: SnapshotPolicy) -> None:
            before = self._pending[:]
            original(self)
            if isinstance(self, CarryMemory):
                self._pending = before

        return commit

    _wrap(patch, SnapshotPolicy, "commit", make)


def _wrong_plane_carried(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def rows(self: PlaneMemory, slot: Any, read: Any, n_carried: Any, n: int) -> Any:
            return original(self, slot, [min(p + 1, self.n_rs_seq) for p in read], n_carried, n)

        return rows

    _wrap(patch, PlaneMemory, "_carried_rows", make)


def _a_plane_dropped(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def rows(self: PlaneMemory, slot: Any, read: Any, n_carried: Any, n: int) -> Any:
            return original(self, slot, read, [max(0, k - 1) for k in n_carried], n)

        return rows

    _wrap(patch, PlaneMemory, "_carried_rows", make)


# -- checkpoints ---------------------------------------------------------------------------


def _older_checkpoint(patch: Patch) -> None:
    latest: dict[int, RecurrentCheckpoint] = {}

    def make(original: Any) -> Any:
        def restore(self: SnapshotPolicy, seq: int, checkpoint: RecurrentCheckpoint) -> None:
            older = latest.get(seq, checkpoint)
            latest[seq] = checkpoint
            original(self, seq, replace(older, pos=checkpoint.pos))

        return restore

    _wrap(patch, SnapshotPolicy, "restore", make)


def _checkpoint_not_copied(patch: Patch) -> None:
    def make(_: Any) -> Any:
        def save(self: SnapshotPolicy, seq: int, device: Any = None) -> RecurrentCheckpoint:
            return RecurrentCheckpoint(self.seq_pos_max(seq), self.live(seq))

        return save

    _wrap(patch, SnapshotPolicy, "save", make)


def _position_off_after_restore(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def restore(self: SnapshotPolicy, seq: int, checkpoint: RecurrentCheckpoint) -> None:
            original(self, seq, replace(checkpoint, pos=checkpoint.pos - 1))

        return restore

    _wrap(patch, SnapshotPolicy, "restore", make)


def _cells_above_the_checkpoint(patch: Patch) -> None:
    def make(_: Any) -> Any:
        def restore(self: HybridMemory, seq: int, checkpoint: SequenceCheckpoint) -> None:
            assert self.recurrent and checkpoint.recurrent
            self.recurrent.restore(seq, checkpoint.recurrent)

        return restore

    _wrap(patch, HybridMemory, "restore", make)


def _sampler_not_restored(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def again(self: Judge, round_: Round) -> Any:
            round_.before = self._samplers[round_.seq_id].clone()
            return original(self, round_)

        return again

    _wrap(patch, Judge, "accept_again", make)


# -- attention cells, positions, acceptance ------------------------------------------------


def _cells_missing(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def seq_rm(self: AttentionKV, seq: int, p0: int, p1: int = -1) -> bool:
            return bool(original(self, seq, p0 - (p0 > 1 and p1 < 0), p1))

        return seq_rm

    _wrap(patch, AttentionKV, "seq_rm", make)


def _cells_not_removed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def seq_rm(self: AttentionKV, seq: int, p0: int, p1: int = -1) -> bool:
            return p0 > 0 or bool(original(self, seq, p0, p1))

        return seq_rm

    _wrap(patch, AttentionKV, "seq_rm", make)


def _state_not_rolled_back(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def seq_rm(self: SnapshotPolicy, seq: int, p0: int, p1: int = -1) -> bool:
            return p0 > 0 or bool(original(self, seq, p0, p1))

        return seq_rm

    _wrap(patch, SnapshotPolicy, "seq_rm", make)


def _filler_kept(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def undo(self: Rollback, round_: Round, span: Any, *rest: Any) -> Any:
            n = len(span.tokens) - span.n_padding
            short = replace(span, tokens=span.tokens[:n], n_padding=0)
            return original(self, round_, short, *rest)

        return undo

    _wrap(patch, Rollback, "undo", make)


def _hidden_row_not_rewound(patch: Patch) -> None:
    verified: dict[int, Any] = {}

    def make_run(original: Any) -> Any:
        def run(self: Forward, ubatches: Any, number: int, purpose: str, *rest: Any) -> Any:
            logits, of_tokens = original(self, ubatches, number, purpose, *rest)
            if purpose == "verify":
                verified.update(of_tokens)
            return logits, of_tokens

        return run

    def make(original: Any) -> Any:
        def run(self: VerifyLoop, *args: Any) -> Any:
            for round_ in original(self, *args):
                kept, rows = round_.of_tokens, verified[round_.seq]
                if len(round_.accepted) < len(rows):
                    round_.of_tokens = join_rows([kept[: len(kept) - 1], rows[-1:]])
                yield round_

        return run

    _wrap(patch, Forward, "run", make_run)
    _wrap(patch, VerifyLoop, "run", make)


def _wrong_draft_accepted(patch: Patch) -> None:
    def match(draft: Any, rows_: Any, sampler: Any, end_tokens: Any) -> Any:
        if len(draft.tokens) < 3:
            return original(draft, rows_, sampler, end_tokens)
        for i, token in enumerate(draft.tokens[:2]):
            rows_(i)
            sampler.accept(token)
        return with_bonus(draft.tokens[:2], rows_, sampler)

    original = acceptance.RULES["match"]
    _UNDO.append((acceptance, "RULES", dict(acceptance.RULES)))
    patch.setitem(acceptance.RULES, "match", match)


def _cached_token_too_many(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def reuse(self: HeldSequences, seq: int, tokens: Sequence[int]) -> PromptReuse:
            n_tokens, checkpoint = original(self, seq, tokens)
            return n_tokens + (n_tokens > 0), checkpoint

        return reuse

    _wrap(patch, HeldSequences, "reuse", make)


def _common_prefix_too_long(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def n_common(a: Sequence[int], b: Sequence[int]) -> int:
            n = int(original(a, b))
            return n + (0 < n < min(len(a), len(b)))

        return n_common

    _wrap(patch, held_sequences, "n_common", make)


_LANES = {
    "ring cursor one too far after a wrap": (_cursor_after_a_wrap, "ring", "wrong-snapshot-index"),
    "one layer not rolled back": (_one_layer_not_rolled_back, "ring", "wrong-snapshot-read"),
    "one more than the ring holds": (_one_more_than_the_ring, "ring,n_rs_seq=2", "state-empty"),
    "fold skips the last token": (_fold_without_the_last, "replay", "wrong-fold"),
    "stale log entry": (_stale_log_entry, "replay", "token-missing-in-state"),
    "window off by one at the read": (_window_too_early, "replay", "wrong-fold"),
    # as small as what a shorter type costs
    "0.1 % leak of the rejected state": (_a_leak, "planes", "drift-with-rejections"),
    "planes written in reverse": (_planes_in_reverse, "planes", "wrong-snapshot-index"),
    "n_rs_seq + 1 accepted": (_one_more_than_planes, "planes,n_rs_seq=2", "plane-off-by-one"),
    "pending index not consumed": (_index_not_consumed, "carry,n_rs_seq=8", "pending-not-consumed"),
    "wrong plane carried": (_wrong_plane_carried, "carry,ubatch=2", "state-too-old"),
    "carry drops a plane": (_a_plane_dropped, "carry,ubatch=2", "state-empty"),
    "older checkpoint restored": (_older_checkpoint, "checkpoint", "wrong-checkpoint-restored"),
    "checkpoint shared, not copied": (
        _checkpoint_not_copied,
        "checkpoint",
        "wrong-checkpoint-restored",
    ),
    "position off by one after a restore": (
        _position_off_after_restore,
        "checkpoint",
        "position-gap",
    ),
    "cells above the checkpoint kept": (
        _cells_above_the_checkpoint,
        "checkpoint",
        "duplicate-kv-cells",
    ),
    "cells missing in a lane": (_cells_missing, "planes", "missing-kv-cells"),
}
_RUNS = {
    "cells missing": (_cells_missing, "ring", "missing-kv-cells"),
    "cells of rejected tokens kept": (_cells_not_removed, "planes", "attention-ahead"),
    "state not rolled back": (_state_not_rolled_back, "planes", "recurrent-position"),
    "hidden row not rewound": (_hidden_row_not_rewound, "planes", "wrong-hidden-row"),
    "hidden row not rewound after a restore": (
        _hidden_row_not_rewound,
        "checkpoint",
        "wrong-hidden-row",
    ),
    "wrong draft accepted": (_wrong_draft_accepted, "planes", "random-numbers-off"),
}
_CACHES = {
    "cache resumes one token late": (_cached_token_too_many, "checkpoint", "cache-mismatch"),
    "cache keeps one token too many": (_cached_token_too_many, "ring", "cache-mismatch"),
    "common prefix one too long": (_common_prefix_too_long, "planes", "cache-mismatch"),
}
_UNEQUAL = {"spec": SpecOptions(("draft-mtp",), n_max=4, p_min=0.8)}
_SAMPLED = {"sampler": SAMPLED, "replay": "verify"}

MUTATIONS = (
    *(Mutation(name, *bug[:1], LANE, *bug[1:]) for name, bug in _LANES.items()),
    Mutation(
        "rows of another sequence",
        _rows_of_another_sequence,
        LANE,
        "planes",
        "state-of-another-sequence",
        2,
    ),
    Mutation(
        "window of another sequence",
        _window_of_another_sequence,
        LANE,
        "ring",
        "state-of-another-sequence",
        2,
    ),
    *(Mutation(name, *bug[:1], RUN, *bug[1:]) for name, bug in _RUNS.items()),
    Mutation("filler not rolled back", _filler_kept, RUN, "planes", "rollback-end", 3, _UNEQUAL),
    Mutation(
        "sampler not restored",
        _sampler_not_restored,
        RUN,
        "checkpoint",
        "wrong-acceptance",
        1,
        _SAMPLED,
    ),
    *(Mutation(name, *bug[:1], CACHED, *bug[1:]) for name, bug in _CACHES.items()),
)
