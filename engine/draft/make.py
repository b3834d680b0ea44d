"""The drafter of a name, with a memory of its own where it needs one."""

from __future__ import annotations

from engine.draft.draft_mtp import DraftMtp
from engine.draft.draft_simple import DraftSimple
from engine.draft.drafter import Drafter
from engine.draft.ngram_drafters import make_ngram_drafter
from engine.draft.token_draws import TokenDraws
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import RunOptions


def make_drafter(
    name: str,
    target: HybridModel,
    draft_model: HybridModel | None,
    options: RunOptions,
    n_slots: int,
    n_ctx: int,
    draws: TokenDraws | None,
) -> Drafter:
    """name: one of engine.options.DRAFTERS. n_ctx: cells per sequence.

    Raises OptionError where the models lack what it drafts with, and LookupCacheError for a file
    of ngram-cache.
    """
    if name == "draft-simple":
        if draft_model is None:
            raise OptionError("draft-simple needs a draft model.", "Give one with -md or open one.")
        memory = HybridMemory.for_model(
            draft_model.config,
            n_slots,
            n_ctx,
            target.device,
            policy="ring",
            n_rs_seq=options.spec.n_max,
            batch_invariant=options.batch_invariant,
        )
        return DraftSimple(
            draft_model, memory, target.config.n_vocab, options.n_ubatch, options.spec, draws
        )
    if name == "draft-mtp":
        config = target.config
        if target.head is None:
            raise OptionError(
                f"draft-mtp needs an MTP head, and {config.name} has none.",
                "Choose draft-simple with a draft model, or a file with nextn tensors.",
            )
        memory = HybridMemory.for_head(
            config, n_slots, n_ctx, target.device, batch_invariant=options.batch_invariant
        )
        return DraftMtp(target.head, memory, config.n_embd, options.n_ubatch, options.spec, draws)
    return make_ngram_drafter(name, options.spec, target.config.n_vocab)
