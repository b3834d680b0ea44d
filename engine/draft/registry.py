"""Every drafter, in the order in which a chain asks them. A new one is its module and a line.

Those with a model are described here: their modules need torch, and are loaded when one is made.
"""

from __future__ import annotations

from engine.draft import ngram_cache, ngram_map, ngram_mod, ngram_simple
from engine.draft.drafter import Drafter
from engine.draft.spec import (
    COMMON_REASONS,
    DRAFT_MODEL,
    MTP_HEAD,
    DrafterInputs,
    DrafterSpec,
    SizeInputs,
)
from engine.draft.with_model import ModelDraftOptions
from engine.memory.policies import memory_sizes


def _simple(inputs: DrafterInputs) -> Drafter:
    from engine.draft.draft_simple import make

    return make(inputs)


def _mtp(inputs: DrafterInputs) -> Drafter:
    from engine.draft.draft_mtp import make

    return make(inputs)


def _simple_bytes(options: ModelDraftOptions, inputs: SizeInputs) -> int:
    """Weights, cells and a ring of states."""
    info = inputs.draft_info
    if info is None:
        return 0
    n_seqs, n_ctx = inputs.n_seqs, inputs.n_ctx
    return memory_sizes(info, n_seqs, options.n_max, n_ctx, "ring", inputs.compute)["total"]


def _n_max(options: ModelDraftOptions) -> int:
    return options.n_max


_SIMPLE = DrafterSpec(
    "draft-simple",
    "what a smaller model of the same vocabulary says",
    _simple,
    ModelDraftOptions,
    _n_max,
    needs=DRAFT_MODEL,
    reasons={"unknown-token": "the draft model lacks the newest token"},
    n_bytes=_simple_bytes,
)
_MTP = DrafterSpec(
    "draft-mtp",
    "what the model's own MTP head says",
    _mtp,
    ModelDraftOptions,
    _n_max,
    needs=MTP_HEAD,
)

_SPECS = (
    ngram_simple.SPEC,
    ngram_map.KEYS,
    ngram_map.KEYS_AND_VALUES,
    ngram_mod.SPEC,
    ngram_cache.SPEC,
    _SIMPLE,
    _MTP,
)
DRAFTERS: dict[str, DrafterSpec] = {spec.name: spec for spec in _SPECS}


def model_drafters() -> list[str]:
    """The drafters that a model file has to bring something for."""
    return [name for name, spec in DRAFTERS.items() if spec.needs]


def meaning(reason: str) -> str:
    """Why a draft is empty or short, in words; empty for a reason that no drafter gives."""
    known = COMMON_REASONS
    for spec in DRAFTERS.values():
        known = {**spec.reasons, **known}
    return known.get(reason, "")
