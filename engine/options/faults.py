"""Faults: known bugs that can be switched on to study them, and why one has no effect: the settings
it needs, and whether a run has them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.draft.registry import DRAFTERS

if TYPE_CHECKING:
    from engine.options import RunOptions


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """about: what goes wrong. policies: those with the faulty step, empty for all. shown_by: a lane
    of a comparison that shows it, with the fault added. in_sampler: it acts where tokens are
    sampled, not in lanes that are given their tokens. drafter: the one with the faulty step; such a
    fault spoils only drafts, and shows in runs. in_cache: it acts where a prompt reuses what an
    earlier one left in memory, as in conversations."""

    about: str
    policies: tuple[str, ...] = ()
    shown_by: str = "planes"
    drafter: str = ""
    in_sampler: bool = False
    in_cache: bool = False


_TABLES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
FAULTS = msgspec.convert(_TABLES, dict[str, FaultSpec])

LANE_FAULTS = {
    name: fault for name, fault in FAULTS.items() if not fault.drafter and not fault.in_cache
}
"""Faults that show in a comparison."""

MEMORY_FAULTS = {name: fault for name, fault in LANE_FAULTS.items() if not fault.in_sampler}
"""Those of them that also act in lanes that are given their tokens."""


def why_idle(
    fault: str,
    options: RunOptions,
    n_draft: int | None = None,
    *,
    is_led: bool = False,
    has_cache: bool = False,
) -> str:
    """Why a fault has no effect in a run of a hybrid model with these options, and what to change;
    empty if it has one.

    n_draft: tokens of the longest draft; None = the longest that the options' drafters may make.
    is_led: its tokens are given by another lane. has_cache: it continues from an earlier run's
    memory.
    """
    if FAULTS[fault].in_cache:
        return _why_nothing_is_taken_up(fault, options, has_cache=has_cache)
    if n_draft is None:
        n_draft, n_snapshots = options.spec.longest, options.snapshots
    else:
        n_snapshots = options.snapshots if options.spec.types else options.snapshots_for(n_draft)
    if not n_draft:
        return "nothing is drafted, so nothing is rolled back; choose a drafter (--spec-type)"
    if drafter := FAULTS[fault].drafter:
        return _why_drafts_are_right(fault, drafter, options.spec.types)
    n_pass = min(options.n_ubatch, options.n_batch)
    if FAULTS[fault].in_sampler and is_led:
        return "a lane with given tokens has no sampler; let it sample (`free`)"
    if fault in ("stale-logits", "sampler-not-restored"):
        return ""
    if fault == "keep-stale-kv":
        return _why_nothing_is_restored(options, n_draft, n_snapshots, n_pass)
    policies = FAULTS[fault].policies
    if fault == "bf16-snapshots" and n_draft > n_snapshots:
        return ""  # a checkpoint is restored
    if options.rollback not in policies:
        return f"--rollback {options.rollback} is not affected by this bug; {_choose(policies)}"
    if not n_snapshots:
        return "no snapshots are kept, so every rollback restores a checkpoint; raise --n-rs-seq"
    if fault == "stale-plane" and not _may_be_stale(options, n_draft, n_snapshots, n_pass):
        least = min(n_draft, n_snapshots)
        return (
            "every verify batch writes all the planes that its rollback can read; lower -ub to "
            f"{least} or less"
        )
    elsewhere = ("stale-plane", "bf16-snapshots")  # a checkpoint is restored then
    if options.rollback == "planes" and n_pass == 1 and fault not in elsewhere:
        return "a forward pass of one token writes no plane to roll back to; raise -ub"
    return ""


def notes_on(
    options: RunOptions,
    n_draft: int | None = None,
    *,
    is_led: bool = False,
    has_cache: bool = False,
) -> list[str]:
    """A sentence for each fault of these options that has no effect; see `why_idle`."""
    found = (
        (f, why_idle(f, options, n_draft, is_led=is_led, has_cache=has_cache))
        for f in options.faults
    )
    return [f"Fault {fault} cannot act: {why}." for fault, why in found if why]


def _why_nothing_is_taken_up(fault: str, options: RunOptions, *, has_cache: bool) -> str:
    spec = FAULTS[fault]
    if not has_cache:
        return "a single run reuses no prompt; run a conversation (--turns)"
    if spec.drafter and spec.drafter not in options.spec.types:
        return f"{spec.drafter} is not among the drafters; add it to --spec-type"
    if spec.policies and options.rollback not in spec.policies:
        return (
            f"--rollback {options.rollback} is not affected by this bug; {_choose(spec.policies)}"
        )
    if spec.policies and not options.snapshots:
        return (
            "no snapshots are kept, so no prompt rolls the recurrent state back; raise --n-rs-seq"
        )
    return ""


def _why_drafts_are_right(fault: str, drafter: str, types: Sequence[str]) -> str:
    if drafter not in types:
        return f"{drafter} is not among the drafters; add it to --spec-type"
    before = list(DRAFTERS)[: list(DRAFTERS).index(drafter)]
    if fault == "eagle3-stale-row" and not set(before) & set(types):
        return (
            f"{drafter} drafts in every round and removes the rejected token itself; add a "
            "drafter that comes before it, such as ngram-mod"
        )
    return ""


def _choose(policies: Sequence[str]) -> str:
    *others, last = policies
    return f"choose {', '.join(others)} or {last}" if others else f"choose {last}"


def _why_nothing_is_restored(
    options: RunOptions, n_draft: int, n_snapshots: int, n_pass: int
) -> str:
    if options.rollback == "checkpoint" or n_draft > n_snapshots:
        return ""
    if options.rollback == "planes" and _may_be_stale(options, n_draft, n_snapshots, n_pass):
        return ""  # the state that the fault stale-plane would read is restored instead
    return (
        f"no draft is longer than the {n_snapshots} tokens that snapshots can roll back "
        f"(n_rs_seq), so no checkpoint is ever restored; lower --n-rs-seq to {n_draft - 1} or "
        "choose --rollback checkpoint"
    )


def _may_be_stale(options: RunOptions, n_draft: int, n_snapshots: int, n_pass: int) -> bool:
    """Whether the last pass of a verify batch may write fewer planes than a rollback may undo.

    If the batch has one token more than fits a pass, the last pass has one token; the equal split
    keeps as many tokens together as snapshots reach, if they fit a pass.
    """
    if options.split == "seq":
        return n_draft >= n_pass
    return min(n_draft, n_snapshots) >= n_pass
