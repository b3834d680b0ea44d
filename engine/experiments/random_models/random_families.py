"""The architectures that models of random weights can be written in: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gguf import GGUFWriter

from engine.experiments.random_models.random_kda import KDA_SIZES, add_kda_keys
from engine.experiments.random_models.random_mamba import MAMBA_SIZES, add_mamba_keys
from engine.experiments.random_models.random_qwen import CONFIGS, add_qwen_keys
from engine.experiments.random_models.random_qwen4exp import QWEN4EXP_SIZES, add_qwen4exp_keys
from engine.model.config import ModelConfig


class RandomFamily(NamedTuple):
    """sizes: shapes by name, the default first. add_keys: writes what a file says of its sizes.
    tied: the output matrix is the embedding."""

    sizes: Mapping[str, ModelConfig]
    add_keys: Callable[[GGUFWriter, ModelConfig], None]
    tied: bool = True


RANDOM_FAMILIES = {
    "qwen35": RandomFamily(CONFIGS, add_qwen_keys),
    "qwen4exp": RandomFamily(QWEN4EXP_SIZES, add_qwen4exp_keys),
    "bailingmoe3": RandomFamily(KDA_SIZES["bailingmoe3"], add_kda_keys),
    "kimi-linear": RandomFamily(KDA_SIZES["kimi-linear"], add_kda_keys, tied=False),
    "kimi-k3": RandomFamily(KDA_SIZES["kimi-k3"], add_kda_keys, tied=False),
    **{arch: RandomFamily(sizes, add_mamba_keys) for arch, sizes in MAMBA_SIZES.items()},
}
"""By architecture; sizes of qwen35 with a mixture of experts are qwen35moe."""
