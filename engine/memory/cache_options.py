"""What the prompt cache is set by; torch is not needed for it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.option_fields import Within, check, option


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The prompt cache. ctx_checkpoints: recurrent states kept along the text of a sequence, at
    most; 0 = none. checkpoint_min_step: tokens between two of them far from the end of a prompt.
    """

    ctx_checkpoints: int = option(
        32,
        "-ctxcp",
        "--ctx-checkpoints",
        named="--ctx-checkpoints",
        help="recurrent states kept along the text, to go on from its middle",
        group="cache",
        within=Within(0),
        remedy="Use 0 for none.",
    )
    checkpoint_min_step: int = option(
        8192,
        "-cms",
        "--checkpoint-min-step",
        named="--checkpoint-min-step",
        help="tokens between two of them, but for those at the end of a prompt and at its last "
        "message",
        group="cache",
        within=Within(0),
        remedy="Use 0 for any.",
    )

    def __post_init__(self) -> None:
        check(self)
