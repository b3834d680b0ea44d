"""The drafter registry, in the order in which a chain asks drafters. A new one is a module plus a
line.

Drafters with a model are described here: their modules need torch and are imported on use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.draft import ngram_cache, ngram_map, ngram_mod, suffix
from engine.draft.drafter import Drafter
from engine.draft.spec import (
    COMMON_REASONS,
    DFLASH_FILE,
    DRAFT_MODEL,
    DSPARK_FILE,
    EAGLE3_FILE,
    MTP_HEAD,
    DrafterInputs,
    DrafterSpec,
    ModelDraftOptions,
    ModelNeed,
)
from engine.memory.policies import memory_sizes

if TYPE_CHECKING:
    pass


def _with_model(name: str, about: str, needs: ModelNeed, **more: Any) -> DrafterSpec:
    """A drafter with a model; its module and class are found by its name."""

    def make(inputs: DrafterInputs) -> Drafter:
        module = import_module(f"engine.draft.{name.replace('-', '_')}")
        drafter: Drafter = getattr(module, name.title().replace("-", ""))(inputs)
        return drafter

    return DrafterSpec(
        name,
        about,
        make,
        ModelDraftOptions,
        lambda options: options.n_max,
        needs=needs,
        **{"n_bytes": lambda _, info, *sizes: info.n_bytes(*sizes), **more},
    )


_SPECS = (
    ngram_map.SIMPLE,
    ngram_map.KEYS,
    ngram_map.KEYS_AND_VALUES,
    ngram_mod.SPEC,
    ngram_cache.SPEC,
    suffix.SPEC,
    _with_model(
        "draft-simple",
        "tokens of a smaller model with the same vocabulary",
        DRAFT_MODEL,
        reasons={"unknown-token": "the draft model does not have the newest token"},
        # weights, cells and a ring of states
        n_bytes=lambda options, info, n_seqs, n_ctx, compute: memory_sizes(
            info, n_seqs, options.n_max, n_ctx, "ring", compute
        )["total"],
    ),
    _with_model(
        "draft-eagle3",
        "tokens of an EAGLE-3 drafter, which reads the model's layers",
        EAGLE3_FILE,
        branches=True,
    ),
    _with_model(
        "draft-mtp",
        "tokens of the model's MTP head, or of one in a separate file",
        MTP_HEAD,
        branches=True,
    ),
    _with_model(
        "draft-dflash", "tokens of a DFlash or DFlash2 drafter, a block in one pass", DFLASH_FILE
    ),
    _with_model(
        "draft-dspark",
        "tokens of a DSpark drafter, a block in one pass; p_min applies to its confidence head",
        DSPARK_FILE,
        reasons={"confidence": "the confidence head gave the next token less than p_min"},
    ),
)
DRAFTERS: dict[str, DrafterSpec] = {spec.name: spec for spec in _SPECS}


def model_drafters() -> list[str]:
    """Names of drafters that need an MTP head or a drafter file."""
    return [name for name, spec in DRAFTERS.items() if spec.needs]


def meaning(reason: str) -> str:
    """Why a draft is empty or short, in words; empty for an unknown reason."""
    told = (COMMON_REASONS, *(spec.reasons for spec in DRAFTERS.values()))
    return next((reasons[reason] for reasons in told if reason in reasons), "")
