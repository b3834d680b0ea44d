"""Options of a tested llama.cpp build, under its own names, and of the rollback checks. Does not
import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from engine.errors import OptionError
from engine.option_fields import FormRow, NumberRange, check, option, part

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
"""llama.cpp's names of cell types, and their numbers in ggml."""
FLASH_ATTENTION = {"off": 0, "on": 1, "auto": -1}
_MOST_DEPTHS, _DEEPEST = 16, 64
DEPTHS = (1, 3, 8)


def _layers(text: str) -> int:
    """A number of layers; -1 and `all` mean all."""
    if text in ("-1", "all"):
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise OptionError(f"{text!r} is not a number of layers.", "Give one, or all.")
    return int(text)


def _depths(text: str) -> tuple[int, ...]:
    """Draft lengths separated by commas; the default for an empty text."""
    words = text.split(",") if text else list(map(str, DEPTHS))
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= _DEEPEST for word in words):
        raise OptionError(
            f"{text!r} is not a list of whole numbers from 1 to {_DEEPEST}.", "Such as 1,3,8."
        )
    if len(words) > _MOST_DEPTHS:
        raise OptionError(f"{text!r} has more than {_MOST_DEPTHS} depths.", "Leave some out.")
    return tuple(dict.fromkeys(map(int, words)))


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings of models and contexts; all others are fixed by what a lane needs. n_batch: tokens
    of a batch, None = those of a ubatch. load_mtp: also load the file's MTP blocks."""

    GROUP: ClassVar[str] = "llama.cpp"
    n_gpu_layers: int = option(
        0,
        "-ngl, --n-gpu-layers  layers that llama.cpp puts on a GPU, or all",
        FormRow("-ngl", -1, 99_999, special="all"),
        parse=_layers,
    )
    devices: str = option(
        "",
        "--llama-device NAME[,NAME…]  llama.cpp's devices, as llama-cli --list-devices names them",
        FormRow("device", text="any"),
        parse=str.strip,
    )
    flash_attn: str = option(
        "off",
        "-fa, --flash-attn WHEN  llama.cpp's flash attention: {choices}",
        FormRow("-fa"),
        choices=FLASH_ATTENTION,
    )
    type_k: str = option(
        "f32",
        "-ctk, --cache-type-k TYPE  type of llama.cpp's K cells: {choices}",
        FormRow("-ctk"),
        choices=tuple(CACHE_TYPES),
    )
    type_v: str = option(
        "f32",
        "-ctv, --cache-type-v TYPE  type of llama.cpp's V cells",
        FormRow("-ctv"),
        choices=tuple(CACHE_TYPES),
    )
    kv_unified: bool = option(
        False, "-kvu, --kv-unified  llama.cpp's sequences share one KV buffer", FormRow("-kvu")
    )
    n_batch: int | None = None
    load_mtp: bool = False

    def __post_init__(self) -> None:
        check(self)


DEFAULT_SETTINGS = LlamaSettings()


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What is checked in a build, and with which settings."""

    GROUP: ClassVar[str] = "gate"
    llama: LlamaSettings = part(LlamaSettings)
    n_batch: int | None = option(
        None,
        "-b, --batch-size  tokens in a batch of llama.cpp (default: those of a ubatch)",
        NumberRange(1, math.inf, "Use a batch of at least one token."),
        FormRow("-b", 0, 1 << 16, special="as -ub"),
    )
    n_ubatch: int = option(
        512,
        "-ub, --ubatch-size  tokens in a ubatch",
        NumberRange(1, math.inf, "Use a batch of at least one token."),
        FormRow("-ub", 1, 1 << 16),
    )
    n_slots: int = option(
        2,
        "-np, --parallel  sequences in the scenario with several sequences",
        NumberRange(2, 64, "Give 2 to 64 sequences."),
        FormRow("-np", 2, 64),
    )
    n_rs_seq: int | None = option(
        None,
        "--n-rs-seq  snapshot planes in addition to the live state, at least the number of "
        "drafted tokens (default: that number)",
        NumberRange(1, 64, "Give 1 to 64 planes."),
        FormRow("n_rs_seq", 0, 64, special="drafted"),
    )
    depths: tuple[int, ...] = option(
        DEPTHS,
        "--depths K[,K…]  numbers of drafted tokens (default 1,3,8)",
        FormRow("depths", text="1,3,8"),
        parse=_depths,
    )
    n_predict: int = option(
        32,
        "-n, --n-predict  tokens of each sequence",
        NumberRange(1, 200, "Give 1 to 200 tokens."),
        FormRow("-n", 1, 200),
    )
    mtp: bool = option(
        False,
        "--mtp  load the MTP block too, and check a context that has an MTP context",
        FormRow("--mtp"),
    )
    baseline: str | None = option(
        None,
        "--baseline FILE  output of --json for an earlier build; only new failures count",
        FormRow("baseline", text="none"),
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def settings(self) -> LlamaSettings:
        """The settings of models and contexts."""
        return replace(self.llama, n_batch=self.n_batch, load_mtp=self.mtp)


DEFAULT_GATE = GateOptions()
