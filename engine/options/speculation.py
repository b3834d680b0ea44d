"""Options of speculation: drafters and their settings, and how drafts are judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from engine.draft.adaptive import ADAPT_RULES
from engine.draft.ngram_cache import LookupCacheOptions
from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_mod import NgramModOptions
from engine.draft.registry import DRAFTERS
from engine.draft.spec import DrafterSpec, ModelDraftOptions
from engine.draft.suffix import SuffixOptions
from engine.errors import OptionError
from engine.option_fields import FormRow, NumberRange, check, option, part

ACCEPT_RULES = ("match", "rejection")
_BISECTIONS = 32
_NO_EFFECT = "has no effect, as in llama.cpp"


def _names(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return () if "none" in names else tuple(dict.fromkeys(names))


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise OptionError(
            "--spec-synth-rates has a word that is not a number.", "Write it like 0.8, 0.6, 0.4."
        ) from error


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise OptionError(
            "--spec-tree has a word that is not a whole number.", "Write it like 3,2."
        ) from error


@dataclass(frozen=True)
class SpecOptions(LookupCacheOptions, ModelDraftOptions):
    """Speculation: drafters in any order, their settings, and the acceptance rule.

    adapt: a rule of engine.draft.adaptive. tree: widths of drafted trees. accept: "match" keeps the
    tokens of plain decoding, "rejection" the target's distribution. verify_max: tokens cut off a
    draft are not judged and do not count as drafted. synth_rates, synth_len: accept drafted tokens
    at random instead of by the target; the output is then invalid. See engine.decode.acceptance.
    """

    GROUP: ClassVar[str] = "speculation"
    types: tuple[str, ...] = option(
        (),
        "--spec-type A[,B]  drafters: none, {choices}; of several, the first one in this order "
        "that has a draft is used, whatever order they are given in",
        FormRow("drafters"),
        choices=DRAFTERS,
        parse=_names,
        group="drafters",
    )
    accept: str = option(
        "match",
        "--spec-accept RULE  how drafted tokens are accepted: {either}. match gives the tokens "
        "of plain decoding; rejection sampling only keeps their distribution: the drafter "
        "samples its tokens, and each is accepted with probability p/q",
        FormRow("accept"),
        choices=ACCEPT_RULES,
    )
    adapt: str = option(
        "none",
        "--spec-draft-adapt RULE  adapts the draft length, up to --spec-draft-n-max, to the "
        "acceptance: {choices}",
        FormRow("adapt"),
        choices=("none", *ADAPT_RULES),
    )
    tree: tuple[int, ...] = option(
        (),
        "--spec-tree W1[,W2…]  draft trees: number of branches per token at the first, second, … "
        "level of a draft, one at deeper levels (default: chains)",
        FormRow("tree", text="3, 2"),
        parse=_widths,
    )
    verify_max: int | None = option(
        None,
        "--spec-verify-max N  limit of drafted tokens to verify, for recordings: the trace still "
        "has the whole draft; 0 = verify none (default: all)",
        NumberRange(0, 1024, "Leave it out to verify whole drafts."),
        FormRow("verify at most", -1, 1024, special="whole drafts"),
    )
    ngram_simple: NgramSizes = part(
        NgramSizes, drafter="ngram-simple", hits=_NO_EFFECT, without=["min_hits"]
    )
    ngram_map_k: NgramSizes = part(
        NgramSizes, drafter="ngram-map-k", hits=_NO_EFFECT, without=["min_hits"]
    )
    ngram_map_k4v: NgramSizes = part(
        NgramSizes, drafter="ngram-map-k4v", hits="lookups of a key before it is used for drafts"
    )
    ngram_mod: NgramModOptions = part(NgramModOptions)
    suffix: SuffixOptions = part(SuffixOptions)
    synth_rates: tuple[float, ...] = option(
        (),
        "--spec-synth-rates P0,P1,…  probability that the first 1, 2, … drafted tokens are "
        "accepted, one value per token of the longest draft",
        FormRow("synth rates", text="0.8, 0.6, 0.4"),
        group="synthetic",
        parse=_rates,
    )
    synth_len: float | None = option(
        None,
        "--spec-synth-len L  instead of rates: mean number of tokens emitted per round with a "
        "full draft, including the target's own token",
        FormRow("synth len", 0.0, 1025.0, special="off"),
        group="synthetic",
    )

    def __post_init__(self) -> None:
        check(self)
        if not 0 <= self.n_min <= self.n_max:
            raise OptionError(
                "--spec-draft-n-min is negative or above --spec-draft-n-max.", "Lower it."
            )
        # p_min ends a draft because of the tokens drawn: discarding it for that would favour other
        # tokens
        if self.accept != "match" and self.n_min > 1 and self.p_min > 0.0:
            raise OptionError(
                "--spec-accept rejection does not keep the target's distribution if "
                "--spec-draft-p-min and --spec-draft-n-min discard drafts.",
                "Leave one of the two out.",
            )
        acceptance_rates(self.synth_rates, self.synth_len, self.longest)
        if self.tree:
            self._check_tree()

    def _check_tree(self) -> None:
        if not all(width >= 1 for width in self.tree):
            raise OptionError("--spec-tree has a width below 1.", "Write it like 3,2.")
        able = [name for name, spec in DRAFTERS.items() if spec.branches]
        if other := [name for name in self.types if name not in able]:
            raise OptionError(
                f"--spec-tree does not work with {other[0]}, which drafts only chains.",
                f"Use {', '.join(able)}.",
            )
        for flag, value in (
            ("--spec-accept rejection", self.accept != "match"),
            ("--spec-verify-max", self.verify_max is not None),
            ("--spec-synth-rates", self.synth_rates),
            ("--spec-synth-len", self.synth_len is not None),
        ):
            if value:
                raise OptionError(
                    f"{flag} works only with chains, not with --spec-tree.",
                    "Leave it or --spec-tree out.",
                )

    @property
    def n_branches(self) -> int:
        """Most branches of a draft, each in a sequence of its own."""
        return math.prod(self.tree) if self.types else 1

    @property
    def longest(self) -> int:
        """The longest draft that any of the drafters in use may make."""
        return max((spec.longest(spec.options_of(self)) for spec in self._specs), default=0)

    @property
    def has_model(self) -> bool:
        """Whether any of the drafters in use drafts with a model."""
        return any(spec.needs for spec in self._specs)

    @property
    def _specs(self) -> list[DrafterSpec]:
        """The known ones among the drafters in use; a trace may name others."""
        return [DRAFTERS[name] for name in self.types if name in DRAFTERS]

    @property
    def synthetic(self) -> tuple[float, ...]:
        """Rates of synthetic acceptance, empty if the target decides."""
        return acceptance_rates(self.synth_rates, self.synth_len, self.longest)


def acceptance_rates(rates: Sequence[float], length: float | None, n_max: int) -> tuple[float, ...]:
    """Rates of synthetic acceptance: rate i is the probability that the first i + 1 drafted tokens
    are all accepted.

    rates: these probabilities, one per token of the longest draft n_max. length: instead, the mean
    length of the accepted list of a full draft; rates are then p, p², … Empty if neither is given.
    Raises OptionError.
    """
    if not rates and length is None:
        return ()
    if rates and length is not None:
        raise OptionError(
            "--spec-synth-rates and --spec-synth-len are both given.", "Use one of them."
        )
    if n_max < 1:
        raise OptionError(
            "Synthetic acceptance needs drafts, and no drafter is given.",
            "Name a drafter with --spec-type.",
        )
    if length is not None:
        if not 1.0 <= length <= n_max + 1:
            raise OptionError(
                f"--spec-synth-len is outside 1..{n_max + 1}.",
                f"The longest draft has {n_max} tokens, and the target adds one.",
            )
        p = _rate_for(length, n_max)
        return tuple(p ** (i + 1) for i in range(n_max))
    if len(rates) != n_max:
        raise OptionError(
            f"--spec-synth-rates has {len(rates)} values.",
            f"Give {n_max}, one per token of the longest draft.",
        )
    if not all(math.isfinite(rate) and 0.0 <= rate <= 1.0 for rate in rates):
        raise OptionError("--spec-synth-rates has a value outside [0, 1].", "Give probabilities.")
    if any(after > before for before, after in pairwise(rates)):
        raise OptionError(
            "--spec-synth-rates rises.",
            "Give rates that do not rise: a token is accepted only if all tokens before it are.",
        )
    return tuple(rates)


def _rate_for(length: float, n_max: int) -> float:
    """p with p + p² + … + p^n_max = length - 1."""
    if length in (1.0, n_max + 1.0):
        return float(length > 1.0)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, n_max + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2
