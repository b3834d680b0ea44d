"""The drafters that files of random weights can be written for: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter

from engine.experiments.random_models.random_dflash import (
    add_dflash_keys,
    dflash2_for,
    dflash_for,
    dflash_further,
    dspark_for,
)
from engine.experiments.random_models.random_eagle3 import (
    add_eagle3_keys,
    eagle3_for,
    eagle3_further,
)
from engine.model.config import ModelConfig
from engine.model.parts import Shapes


@dataclass(frozen=True, slots=True)
class RandomDrafter:
    """config_for: its sizes beside a target. add_keys: writes what a file says of them. further:
    tensors that a file may have and this one has."""

    architecture: str
    config_for: Callable[[ModelConfig], Any]
    add_keys: Callable[[GGUFWriter, Any], None]
    further: Callable[[Any], Shapes]


RANDOM_DRAFTERS: Mapping[str, RandomDrafter] = {
    "eagle3": RandomDrafter("eagle3", eagle3_for, add_eagle3_keys, eagle3_further),
    "dflash": RandomDrafter("dflash", dflash_for, add_dflash_keys, dflash_further),
    "dflash2": RandomDrafter("dflash", dflash2_for, add_dflash_keys, dflash_further),
    "dspark": RandomDrafter("dflash", dspark_for, add_dflash_keys, dflash_further),
}
"""By the name of the kind. All lack embedding and head, which are the target's."""
