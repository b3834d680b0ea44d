"""Memory options: types of recurrent states, prompt cache. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from engine.option_fields import FormRow, NumberRange, check, option

STATE_TYPES = ("f32", "bf16", "f16")


@dataclass(frozen=True, slots=True)
class StateTypes:
    """Types of what recurrent layers store, named as llama.cpp names its caches: s, the states of
    the recurrence (mamba-ssm-dtype elsewhere); r, the convolution windows; and the gates that
    tokens contribute to a state: beta and log decay, or step size and log decay.

    Values are rounded when a pass stores them or before the recurrence reads them; arithmetic and
    storage are float32. So runs show the effect of rounding on the text, not its savings.
    """

    GROUP: ClassVar[str] = "memory"
    s: str = option(
        "f32",
        "--cache-type-s TYPE  recurrent states are rounded to this type whenever a pass stores "
        "them: {choices}",
        FormRow("state type"),
        choices=STATE_TYPES,
    )
    r: str = option(
        "f32",
        "--cache-type-r TYPE  convolution windows are rounded to this type whenever a pass "
        "stores them: {choices}",
        FormRow("window type"),
        choices=STATE_TYPES,
    )
    gates: str = option(
        "f32",
        "--gate-type TYPE  beta (or the step size) and the log decay are rounded to this type "
        "before the recurrence reads them: {choices}",
        FormRow("gate type"),
        choices=STATE_TYPES,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The prompt cache. ctx_checkpoints: most recurrent states kept along the text of a sequence; 0
    = none. checkpoint_min_step: tokens between two of them far from the end of a prompt."""

    ctx_checkpoints: int = option(
        32,
        "-ctxcp, --ctx-checkpoints  recurrent states saved along the text, to continue from there",
        NumberRange(0, math.inf, "Use 0 for none."),
        FormRow("at most", 0, 10_000, special="none"),
        named="--ctx-checkpoints",
    )
    checkpoint_min_step: int = option(
        8192,
        "-cms, --checkpoint-min-step  least tokens between two of them, except at the end of a "
        "prompt and its last message",
        NumberRange(0, math.inf, "Use 0 for any."),
        FormRow("least step", 0, 1_000_000, special="any"),
        named="--checkpoint-min-step",
    )

    def __post_init__(self) -> None:
        check(self)
