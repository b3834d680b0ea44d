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

from engine.analysis.findings.check import recorded
from engine.audit.run_audit import audit_of
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode.held_sequences import PromptCache
from engine.options import CacheOptions, Prompt, RunOptions, SpecOptions
from engine.trace.facts import Finding
from tests.support.golden_runs import SAMPLED, decode, options_of, prompt_of, session, tokens_of
from tests.support.mutation_patches import (
    UNDO,
    Patch,
    a_leak,
    a_plane_dropped,
    cached_token_too_many,
    cells_above_the_checkpoint,
    cells_missing,
    cells_not_removed,
    checkpoint_not_copied,
    common_prefix_too_long,
    cursor_after_a_wrap,
    filler_kept,
    fold_without_the_last,
    hidden_row_not_rewound,
    index_not_consumed,
    older_checkpoint,
    one_layer_not_rolled_back,
    one_more_than_planes,
    one_more_than_the_ring,
    planes_in_reverse,
    position_off_after_restore,
    rows_of_another_sequence,
    sampler_not_restored,
    stale_log_entry,
    state_not_rolled_back,
    window_of_another_sequence,
    window_too_early,
    wrong_draft_accepted,
    wrong_plane_carried,
)

MODEL = "qwen35-c-v2x-mtp-f32"
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
        for undo in UNDO:
            clean.setattr(*undo)
        plain = replace(options, spec=SpecOptions(), rollback="checkpoint", parallel=1)
        expected = tokens_of(decode(session(MODEL), list(prompts), plain))
    return "same text" if tokens == expected else "wrong text"


def mutate(patch: Patch, mutation: Mutation) -> None:
    """Switch one on until the patch is undone."""
    UNDO.clear()
    mutation.apply(patch)


_LANES = {
    "ring cursor one too far after a wrap": (cursor_after_a_wrap, "ring", "wrong-snapshot-index"),
    "one layer not rolled back": (one_layer_not_rolled_back, "ring", "wrong-snapshot-read"),
    "one more than the ring holds": (one_more_than_the_ring, "ring,n_rs_seq=2", "state-empty"),
    "fold skips the last token": (fold_without_the_last, "replay", "wrong-fold"),
    "stale log entry": (stale_log_entry, "replay", "token-missing-in-state"),
    "window off by one at the read": (window_too_early, "replay", "wrong-fold"),
    # as small as what a shorter type costs
    "0.1 % leak of the rejected state": (a_leak, "planes", "drift-with-rejections"),
    "planes written in reverse": (planes_in_reverse, "planes", "wrong-snapshot-index"),
    "n_rs_seq + 1 accepted": (one_more_than_planes, "planes,n_rs_seq=2", "plane-off-by-one"),
    "pending index not consumed": (index_not_consumed, "carry,n_rs_seq=8", "pending-not-consumed"),
    "wrong plane carried": (wrong_plane_carried, "carry,ubatch=2", "state-too-old"),
    "carry drops a plane": (a_plane_dropped, "carry,ubatch=2", "state-empty"),
    "older checkpoint restored": (older_checkpoint, "checkpoint", "wrong-checkpoint-restored"),
    "checkpoint shared, not copied": (
        checkpoint_not_copied,
        "checkpoint",
        "wrong-checkpoint-restored",
    ),
    "position off by one after a restore": (
        position_off_after_restore,
        "checkpoint",
        "position-gap",
    ),
    "cells above the checkpoint kept": (
        cells_above_the_checkpoint,
        "checkpoint",
        "duplicate-kv-cells",
    ),
    "cells missing in a lane": (cells_missing, "planes", "missing-kv-cells"),
}
_RUNS = {
    "cells missing": (cells_missing, "ring", "missing-kv-cells"),
    "cells of rejected tokens kept": (cells_not_removed, "planes", "attention-ahead"),
    "state not rolled back": (state_not_rolled_back, "planes", "recurrent-position"),
    "hidden row not rewound": (hidden_row_not_rewound, "planes", "wrong-hidden-row"),
    "hidden row not rewound after a restore": (
        hidden_row_not_rewound,
        "checkpoint",
        "wrong-hidden-row",
    ),
    "wrong draft accepted": (wrong_draft_accepted, "planes", "random-numbers-off"),
}
_CACHES = {
    "cache resumes one token late": (cached_token_too_many, "checkpoint", "cache-mismatch"),
    "cache keeps one token too many": (cached_token_too_many, "ring", "cache-mismatch"),
    "common prefix one too long": (common_prefix_too_long, "planes", "cache-mismatch"),
}
_UNEQUAL = {"spec": SpecOptions(("draft-mtp",), n_max=4, p_min=0.8)}
_SAMPLED = {"sampler": SAMPLED, "replay": "verify"}

MUTATIONS = (
    *(Mutation(name, *bug[:1], LANE, *bug[1:]) for name, bug in _LANES.items()),
    Mutation(
        "rows of another sequence",
        rows_of_another_sequence,
        LANE,
        "planes",
        "state-of-another-sequence",
        2,
    ),
    Mutation(
        "window of another sequence",
        window_of_another_sequence,
        LANE,
        "ring",
        "state-of-another-sequence",
        2,
    ),
    *(Mutation(name, *bug[:1], RUN, *bug[1:]) for name, bug in _RUNS.items()),
    Mutation("filler not rolled back", filler_kept, RUN, "planes", "rollback-end", 3, _UNEQUAL),
    Mutation(
        "sampler not restored",
        sampler_not_restored,
        RUN,
        "checkpoint",
        "wrong-acceptance",
        1,
        _SAMPLED,
    ),
    *(Mutation(name, *bug[:1], CACHED, *bug[1:]) for name, bug in _CACHES.items()),
)
