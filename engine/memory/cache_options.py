"""What the prompt cache is set by; torch is not needed for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.option_fields import FormRow, NumberRange, check, option


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The prompt cache. ctx_checkpoints: recurrent states kept along the text of a sequence, at
    most; 0 = none. checkpoint_min_step: tokens between two of them far from the end of a prompt.
    """

    ctx_checkpoints: int = option(
        32,
        "-ctxcp --ctx-checkpoints",
        "recurrent states kept along the text, to go on from its middle",
        NumberRange(0, math.inf, "Use 0 for none."),
        FormRow("at most", 0, 10_000, special="none"),
        named="--ctx-checkpoints",
    )
    checkpoint_min_step: int = option(
        8192,
        "-cms --checkpoint-min-step",
        "tokens between two of them, but for those at the end of a prompt and at its last message",
        NumberRange(0, math.inf, "Use 0 for any."),
        FormRow("least step", 0, 1_000_000, special="any"),
        named="--checkpoint-min-step",
    )

    def __post_init__(self) -> None:
        check(self)
