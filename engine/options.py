"""What a run is asked to do. Names and defaults are llama.cpp's wherever it has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import OptionError

COMPUTE_MODES = ("auto", "f32", "bf16", "int8")
DRAFTERS = ("draft-simple", "draft-mtp")
ROLLBACK_POLICIES = ("planes", "carry", "ring", "replay", "checkpoint")
SPLITS = ("equal", "seq")
KV_MODES = ("per-seq", "unified")
CHECKPOINT_DEVICES = ("host", "device")
REPLAY_MODES = ("trust", "verify")
MAX_REPLAYS = 8
"""Attempts to replay accepted tokens by verifying them, after which they are trusted."""
FAULTS = ("keep-stale-kv", "stale-logits", "stale-plane", "no-conv-rollback", "plane-off-by-one")


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """The sampler chain: top-k, top-p, min-p, then temperature; temp <= 0 is greedy."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 42

    def __post_init__(self) -> None:
        _require(self.top_k >= 0, "--top-k is negative", "Use 0 to switch it off.")
        _require(0.0 < self.top_p <= 1.0, "--top-p is outside (0, 1]", "Use 1 to switch it off.")
        _require(0.0 <= self.min_p <= 1.0, "--min-p is outside [0, 1]", "Use 0 to switch it off.")
        _require(self.seed >= 0, "--seed is negative", "Use a whole number from 0.")


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Speculation: drafters in use and the limits on a draft.

    p_min is a floor on each drafted token's own confidence, not on their product;
    a draft shorter than n_min is thrown away.
    """

    types: tuple[str, ...] = ()
    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0

    def __post_init__(self) -> None:
        for name in self.types:
            _require(
                name in DRAFTERS,
                f"--spec-type {name} is not a drafter",
                f"Choose from none, {', '.join(DRAFTERS)}.",
            )
        _require(
            1 <= self.n_max <= 64, "--spec-draft-n-max is outside 1..64", "Choose a length from 1."
        )
        _require(
            0 <= self.n_min <= self.n_max,
            "--spec-draft-n-min is negative or above --spec-draft-n-max",
            "Lower it.",
        )
        _require(
            0.0 <= self.p_min <= 1.0,
            "--spec-draft-p-min is outside [0, 1]",
            "Use 0 to switch it off.",
        )


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that decides the tokens and the cost of one run.

    parallel: sequences decoded side by side. n_predict: tokens to emit per sequence, -1 = until
    the end token or a full context.
    n_ctx: cells per sequence, 0 = the trained context, at most 4096.
    n_ubatch: most tokens in one forward pass. n_rs_seq: snapshot planes beyond the live state,
    None = as many as the longest draft. checkpoint_device: where checkpoints are kept.
    replay: "trust" decodes accepted tokens again after a restore, "verify" samples them again.
    faults: bugs of the field switched on to be looked at (FAULTS).
    """

    parallel: int = 1
    n_predict: int = 128
    n_ctx: int = 0
    n_ubatch: int = 512
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    spec: SpecOptions = field(default_factory=SpecOptions)
    rollback: str = "planes"
    n_rs_seq: int | None = None
    split: str = "equal"
    kv: str = "per-seq"
    checkpoint_device: str = "host"
    replay: str = "trust"
    faults: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(1 <= self.parallel <= 64, "--parallel is outside 1..64", "Use at least 1.")
        _require(
            self.n_predict == -1 or self.n_predict >= 1,
            "-n is 0 or below -1",
            "Use -1 for no limit.",
        )
        _require(
            0 <= self.n_ctx <= 2**20,
            "-c is outside 0..1048576",
            "Use 0 for the model's own context.",
        )
        _require(self.n_ubatch >= 1, "-ub is below 1", "Use a batch of at least one token.")
        for value, choices, option in (
            (self.rollback, ROLLBACK_POLICIES, "--rollback"),
            (self.split, SPLITS, "--split"),
            (self.kv, KV_MODES, "--kv"),
            (self.checkpoint_device, CHECKPOINT_DEVICES, "--checkpoint-device"),
            (self.replay, REPLAY_MODES, "--replay"),
        ):
            _require(
                value in choices,
                f"{option} {value} is unknown",
                f"Choose from {', '.join(choices)}.",
            )
        _require(
            self.n_rs_seq is None or 0 <= self.n_rs_seq <= 64,
            "--n-rs-seq is outside 0..64",
            "Choose 0 to 64 snapshot planes.",
        )
        for fault in self.faults:
            _require(
                fault in FAULTS, f"--fault {fault} is unknown", f"Choose from {', '.join(FAULTS)}."
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence to continue, already tokenised. `text` is what a reader sees for it."""

    tokens: tuple[int, ...]
    text: str = ""


def _require(holds: bool, what: str, remedy: str) -> None:
    if not holds:
        raise OptionError(f"{what}.", remedy)
