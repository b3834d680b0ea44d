"""Run options. Names and defaults are llama.cpp's wherever it has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from engine.draft.registry import DRAFTERS
from engine.errors import OptionError
from engine.memory.cells import MAX_SEQS
from engine.memory.options import STATE_TYPES, CacheOptions, StateTypes
from engine.memory.policies import POLICIES as ROLLBACK_POLICIES
from engine.model.compute_modes import COMPUTE_MODES
from engine.option_fields import FormRow, NumberRange, check, option, part
from engine.options.faults import FAULTS, LANE_FAULTS, MEMORY_FAULTS
from engine.options.speculation import ACCEPT_RULES, SpecOptions
from engine.sampling.options import SamplerOptions

__all__ = [
    "ACCEPT_RULES",
    "CHECKPOINT_DEVICES",
    "COMPUTE_MODES",
    "DRAFTERS",
    "FAULTS",
    "KV_MODES",
    "LANE_FAULTS",
    "MAX_REPLAYS",
    "MEMORY_FAULTS",
    "REPLAY_MODES",
    "ROLLBACK_POLICIES",
    "SPLITS",
    "STATE_TYPES",
    "CacheOptions",
    "Prompt",
    "RunOptions",
    "SamplerOptions",
    "SpecOptions",
    "StateTypes",
]

SPLITS = ("equal", "seq")
KV_MODES = ("per-seq", "unified")
CHECKPOINT_DEVICES = ("host", "device")
REPLAY_MODES = ("trust", "verify")
MAX_REPLAYS = 8
"""Attempts to replay accepted tokens by verifying them; after these they are trusted."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that determines the tokens and the cost of one run. Fields are described by their
    help; in addition:

    n_rs_seq: None = the longest draft of a drafter with a model, and 0 without one: looked-up
    drafts may have dozens of tokens, and that many planes would cost more memory than they save
    time. A draft longer than n_rs_seq is preceded by a checkpoint, as in llama.cpp.
    allow_non_finite: tokens chosen from non-finite logits are meaningless.
    """

    GROUP: ClassVar[str] = "memory"
    parallel: int = option(
        1,
        "--parallel  sequences decoded in parallel; further prompts wait",
        NumberRange(1, 64, "Use 1 to 64."),
        FormRow("parallel", 0, 64, special="all sequences", start=0),
        group="slots",
    )
    n_predict: int = option(
        256,
        "-n, --n-predict  tokens per sequence, -1 = no limit",
        FormRow("tokens", -1, 100_000, special="no limit"),
        group="decoding",
    )
    n_ctx: int = option(
        0,
        "-c, --ctx-size  KV cells per sequence, 0 = the trained context, at most 4096",
        NumberRange(0, 2**20, "Use 0 for the model's own context."),
        FormRow("context", 0, 2**20, special="automatic"),
        group="sizes",
    )
    n_batch: int = option(
        2048,
        "-b, --batch-size  limit of prompt and verified tokens in one round",
        NumberRange(1, math.inf, "Use a batch of at least one token."),
        FormRow("n_batch", 1, 1 << 16),
        group="sizes",
    )
    n_ubatch: int = option(
        512,
        "-ub, --ubatch-size  limit of tokens in one forward pass",
        NumberRange(1, math.inf, "Use a batch of at least one token."),
        FormRow("n_ubatch", 1, 1 << 16),
        group="sizes",
    )
    sampler: SamplerOptions = part(SamplerOptions)
    spec: SpecOptions = part(SpecOptions)
    rollback: str = option(
        "planes",
        "--rollback POLICY  how rejected tokens are removed from the recurrent state: {choices}",
        FormRow("rollback"),
        group="rollback",
        choices=ROLLBACK_POLICIES,
    )
    n_rs_seq: int | None = option(
        None,
        "--n-rs-seq  limit of tokens that can be rolled back without a checkpoint (default: "
        "--spec-draft-n-max with a draft-* drafter, else 0)",
        NumberRange(0, 64, "Choose 0 to 64 snapshot planes."),
        FormRow("n_rs_seq", -1, 64, special="automatic"),
    )
    replay: str = option(
        "trust",
        "--replay HOW  what to do with accepted tokens after a restore: trust decodes them "
        "again, verify also samples them again with the restored sampler, as llama.cpp does; "
        "with --spec-accept rejection always trust",
        FormRow("replay"),
        choices=REPLAY_MODES,
    )
    checkpoint_device: str = option(
        "host",
        "--checkpoint-device PLACE  where checkpoints are kept: {either}",
        FormRow("checkpoint"),
        choices=CHECKPOINT_DEVICES,
    )
    state_types: StateTypes = part(StateTypes)
    split: str = option(
        "equal", "--split RULE  how a batch is split: {either}", FormRow("split"), choices=SPLITS
    )
    kv: str = option(
        "per-seq", "--kv MODE  layout of the KV cells: {either}", FormRow("KV"), choices=KV_MODES
    )
    faults: tuple[str, ...] = option(
        (),
        "--fault NAME  switch on a known bug of other engines, to study it; the output may be "
        "wrong. Repeatable: {choices}",
        FormRow("fault"),
        group="faults",
        choices=FAULTS,
        repeats=True,
    )
    ignore_eos: bool = option(
        False,
        "--ignore-eos  never choose an end-of-generation token",
        FormRow("ignore end of text"),
        group="decoding",
    )
    allow_non_finite: bool = option(
        False,
        "--allow-non-finite  continue if the model's logits are NaN or infinite; otherwise the "
        "run ends there",
        FormRow("continue after NaN"),
        group="decoding",
    )
    batch_invariant: bool = option(
        False,
        "--batch-invariant  compute logits whose bits do not depend on the other tokens and "
        "sequences in the batch; slower",
        FormRow("batch-invariant"),
    )

    def __post_init__(self) -> None:
        check(self)
        if self.n_predict != -1 and self.n_predict < 1:
            raise OptionError("-n is 0 or below -1.", "Use -1 for no limit.")
        if self.ignore_eos and self.sampler.has_grammar:
            raise OptionError(
                "--ignore-eos bans the end-of-generation tokens that a grammar needs.",
                "Leave one of them out.",
            )
        if (n := self.spec.n_branches) > 1 and self.parallel * n > MAX_SEQS:
            raise OptionError(
                f"--spec-tree needs {n} branches for each of {self.parallel} sequences, more than "
                f"the {MAX_SEQS} sequences that the memory can hold.",
                "Choose smaller widths or a lower --parallel.",
            )

    @property
    def snapshots(self) -> int:
        """Snapshot planes beyond the live state that a run with these drafters keeps."""
        if not self.spec.types:
            return 0
        longest = self.spec.n_max if self.spec.has_model else 0
        if self.spec.verify_max is not None:
            longest = min(longest, self.spec.verify_max)
        return self.snapshots_for(longest)

    def snapshots_for(self, n_draft: int) -> int:
        """Snapshot planes beyond the live state to undo drafts of n_draft tokens."""
        if not ROLLBACK_POLICIES[self.rollback].keeps_snapshots:
            return 0
        return n_draft if self.n_rs_seq is None else self.n_rs_seq

    @property
    def plain(self) -> RunOptions:
        """These options for one sequence, without anything that belongs to speculation."""
        return replace(
            self,
            parallel=1,
            spec=SpecOptions(),
            rollback="checkpoint",
            n_rs_seq=None,
            split="equal",
            kv="per-seq",
            faults=(),
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence to continue, already tokenised. text: for display. message_starts: indices of
    the first tokens of user messages, as far as known: good places for context checkpoints.
    n_written: tokens at its end that replace an answer: no context checkpoint is made in them."""

    tokens: tuple[int, ...]
    text: str = ""
    message_starts: tuple[int, ...] = ()
    n_written: int = 0
