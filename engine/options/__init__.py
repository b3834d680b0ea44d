"""What a run is asked to do. Names and defaults are llama.cpp's wherever it has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import OptionError
from engine.options.acceptance_rates import acceptance_rates
from engine.options.ngram_options import LOOKUP_CACHE_N_MAX, NgramModOptions, NgramSizes

COMPUTE_MODES = ("auto", "f32", "bf16", "int8", "int8x2", "blocks")
MODEL_DRAFTERS = ("draft-simple", "draft-mtp")
DRAFTERS = (
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
    *MODEL_DRAFTERS,
)
"""All drafters, in the order in which a chain asks them."""
ROLLBACK_POLICIES = ("planes", "carry", "ring", "replay", "checkpoint")
SPLITS = ("equal", "seq")
KV_MODES = ("per-seq", "unified")
CHECKPOINT_DEVICES = ("host", "device")
REPLAY_MODES = ("trust", "verify")
ACCEPT_RULES = ("match", "rejection")
MAX_REPLAYS = 8
"""Attempts to replay accepted tokens by verifying them, after which they are trusted."""
FAULTS = ("keep-stale-kv", "stale-logits", "stale-plane", "no-conv-rollback", "plane-off-by-one")


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """The sampler chain, in the order of engine.sampling.sampler; temp <= 0 is greedy.

    repeat_last_n: newest tokens, of the prompt too, that the three penalties look at; 0 = none,
    -1 = all. logit_bias: token ids and what is added to their logits.
    """

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 42
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require(0.0 < self.typical_p <= 1.0, "--typical is outside (0, 1]", "Use 1 for off.")
        _require(self.repeat_penalty > 0.0, "--repeat-penalty is not positive", "Use 1 for off.")
        _require(
            self.repeat_last_n >= -1,
            "--repeat-last-n is below -1",
            "Use 0 for off, -1 for the whole context.",
        )
        _require(self.top_k >= 0, "--top-k is negative", "Use 0 to switch it off.")
        _require(0.0 < self.top_p <= 1.0, "--top-p is outside (0, 1]", "Use 1 to switch it off.")
        _require(0.0 <= self.min_p <= 1.0, "--min-p is outside [0, 1]", "Use 0 to switch it off.")
        _require(self.seed >= 0, "--seed is negative", "Use a whole number from 0.")


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Speculation: drafters in use, in any order, and the limits on a draft.

    n_max, n_min, p_min are for drafters with a model: p_min is a floor on each drafted token's own
    confidence, not on their product; a draft shorter than n_min is thrown away. accept: how drafted
    tokens are accepted, "match" keeps plain decoding's tokens, "rejection" the target's
    distribution (engine.decode.rejection). lookup_cache_*: files with the tables of ngram-cache.
    synth_rates, synth_len: accept drafted tokens by chance instead of by the target
    (engine.decode.synthetic); the output is then invalid.
    """

    types: tuple[str, ...] = ()
    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    accept: str = "match"
    ngram_simple: NgramSizes = field(default_factory=NgramSizes)
    ngram_map_k: NgramSizes = field(default_factory=NgramSizes)
    ngram_map_k4v: NgramSizes = field(default_factory=NgramSizes)
    ngram_mod: NgramModOptions = field(default_factory=NgramModOptions)
    lookup_cache_static: str | None = None
    lookup_cache_dynamic: str | None = None
    synth_rates: tuple[float, ...] = ()
    synth_len: float | None = None

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
        _require(
            self.accept in ACCEPT_RULES,
            f"--spec-accept {self.accept} is unknown",
            f"Choose from {', '.join(ACCEPT_RULES)}.",
        )
        # the floor ends a draft for the tokens drawn: throwing it away for that would favour others
        _require(
            self.accept == "match" or self.n_min <= 1 or self.p_min <= 0.0,
            "--spec-accept rejection keeps no distribution when --spec-draft-p-min and "
            "--spec-draft-n-min throw drafts away",
            "Leave one of the two out.",
        )
        self.ngram_simple.check("ngram-simple")
        self.ngram_map_k.check("ngram-map-k")
        self.ngram_map_k4v.check("ngram-map-k4v")
        self.ngram_mod.check()
        acceptance_rates(self.synth_rates, self.synth_len, self.longest)

    @property
    def longest(self) -> int:
        """The longest draft that any of the drafters in use may make."""
        lengths = {
            "ngram-simple": self.ngram_simple.size_m,
            "ngram-map-k": self.ngram_map_k.size_m,
            "ngram-map-k4v": self.ngram_map_k4v.size_m,
            "ngram-mod": self.ngram_mod.n_max,
            "ngram-cache": LOOKUP_CACHE_N_MAX,
        }
        return max((lengths.get(name, self.n_max) for name in self.types), default=0)

    @property
    def synthetic(self) -> tuple[float, ...]:
        """Rates of synthetic acceptance, empty while the target decides."""
        return acceptance_rates(self.synth_rates, self.synth_len, self.longest)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that decides the tokens and the cost of one run.

    parallel: sequences decoded side by side. n_predict: tokens to emit per sequence, -1 = until
    the end token or a full context.
    n_ctx: cells per sequence, 0 = the trained context, at most 4096.
    n_batch: most prompt tokens in one round, together with what is verified in it. n_ubatch: most
    tokens in one forward pass, at most n_batch. n_rs_seq: snapshot planes beyond the live state,
    None = as many as the longest draft of a drafter with a model, and none without one: drafts
    that are looked up may have dozens of tokens, and that many planes would cost more memory than
    they save time. A draft longer than n_rs_seq is preceded by a checkpoint, as in llama.cpp.
    checkpoint_device: where checkpoints are kept.
    replay: "trust" decodes accepted tokens again after a restore, "verify" samples them again;
    tokens accepted by rejection are always trusted.
    faults: bugs of the field switched on to be looked at (FAULTS).
    allow_non_finite: go on where logits are NaN or infinite, with tokens that mean nothing; else
    the run ends there with an error.
    batch_invariant: the logits behind a token have the same bits whatever tokens and sequences
    share its batches; slower.
    """

    parallel: int = 1
    n_predict: int = 128
    n_ctx: int = 0
    n_batch: int = 2048
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
    allow_non_finite: bool = False
    batch_invariant: bool = False

    @property
    def snapshots(self) -> int:
        """Snapshot planes beyond the live state that a run with these drafters keeps."""
        if not self.spec.types:
            return 0
        has_model = bool(set(self.spec.types) & set(MODEL_DRAFTERS))
        return self.snapshots_for(self.spec.n_max if has_model else 0)

    def snapshots_for(self, n_draft: int) -> int:
        """The same where drafts of n_draft tokens are to be undone by snapshots."""
        if self.rollback == "checkpoint":
            return 0
        return n_draft if self.n_rs_seq is None else self.n_rs_seq

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
        _require(self.n_batch >= 1, "-b is below 1", "Use a batch of at least one token.")
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
class CacheOptions:
    """The prompt cache. ctx_checkpoints: recurrent states kept along the text of a sequence, at
    most; 0 = none. checkpoint_min_step: tokens between two of them far from the end of a prompt.
    """

    ctx_checkpoints: int = 32
    checkpoint_min_step: int = 8192

    def __post_init__(self) -> None:
        _require(self.ctx_checkpoints >= 0, "--ctx-checkpoints is negative", "Use 0 for none.")
        _require(
            self.checkpoint_min_step >= 0, "--checkpoint-min-step is negative", "Use 0 for any."
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence to continue, already tokenised. `text` is what a reader sees for it.

    message_starts: indices of the tokens with which a user's messages start, as far as known: good
    places for context checkpoints.
    """

    tokens: tuple[int, ...]
    text: str = ""
    message_starts: tuple[int, ...] = ()


def _require(holds: bool, what: str, remedy: str) -> None:
    if not holds:
        raise OptionError(f"{what}.", remedy)
