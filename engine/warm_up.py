"""Loading models, and warm-up passes, so that the first rounds of a run do not wait for kernels.

Kernels are compiled, or read from disk, on their first call, some for every number of rows; the
clock of a run stops meanwhile (engine.machine.clock), but its user waits. The results of the passes
are dropped: on the CPU no kernel is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from engine.batch import Span
from engine.draft.draft_files import check_draft
from engine.draft.drafter import Drafter
from engine.draft.registry import DRAFTERS
from engine.draft.spec import DrafterInputs
from engine.errors import OptionError
from engine.gguf.binary import never
from engine.gguf.chat import ChatTemplate
from engine.gguf.content import ContentHash
from engine.gguf.file import GgufFile
from engine.gguf.part_file import ModelFiles
from engine.gguf.tokenizer import Tokenizer
from engine.long_work import ReportProgress, report_part
from engine.machine.device import CPU, check_room, resolve_device, run_on
from engine.machine.host_memory import give_back_memory
from engine.memory.hybrid import HybridMemory, LentMemories
from engine.memory_need import estimate
from engine.model.drafters.config import DRAFT_SIMPLE, describe_draft
from engine.model.drafters.eagle3 import Eagle3
from engine.model.drafters.loading import LoadedDrafter, load_drafter
from engine.model.families.common import is_mtp_file
from engine.model.hybrid import HybridModel
from engine.model.info import SMALL_MODEL, ModelInfo, describe
from engine.model.loader import load_model, resolve_compute
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import DensePart
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.tensors import DRAFT_MTP, leave_block
from engine.options import RunOptions
from engine.sampling.distribution import TokenDraws
from engine.trace.run_ref import same_model
from kernels.dispatch import uses_llvm
from kernels.llvm.program import Launch, watched

WIDTHS = (25, 1, 2, 3, 4)
"""Widths of a prompt with more rows than are multiplied without panels, of plain decoding, and of
drafts of up to three tokens."""

# parts whose work does not depend on the numbers, unlike experts
_STEADY = (AttentionPart, DeltaNetPart, DensePart)


def warm_up(model: HybridModel, *, is_plain: bool = False) -> None:
    """Decode each of WIDTHS once, with the model and its MTP head, in memory of their own.

    is_plain: nothing is drafted, so single tokens without the head are enough.
    """
    blocks = model.config.all_blocks
    parts = [part for block in blocks for part in (*block.mixers, block.ffn) if part is not None]
    steady = all(isinstance(part, _STEADY) for part in parts)
    with watched(_ignore) if steady and uses_llvm() else nullcontext():
        _decode(model, is_plain)


def _ignore(launch: Launch) -> None:
    """Only load the kernel; do not start it."""


@torch.inference_mode()
def _decode(model: HybridModel, is_plain: bool = False) -> None:
    config, widths = model.config, WIDTHS[:2] if is_plain else WIDTHS
    n_ctx, n_rs_seq = sum(widths), max(widths[1:]) - 1
    memory = HybridMemory.for_model(
        config, 1, n_ctx, model.device, policy="planes", n_rs_seq=n_rs_seq
    )
    of_head = None
    if model.head and not is_plain:
        of_head = HybridMemory.for_layers(config.mtp_cells(), 1, n_ctx, model.device)
    start = 0
    for width in widths:
        asked = range(max(width - WIDTHS[-1], 0), width)  # a prompt's logits would take 15 MB
        (ubatch,) = memory.split([Span(0, start, [0] * width, asked)], width, "seq")
        hidden = model.forward(ubatch, memory).hidden
        if model.head and of_head:
            model.head.forward(ubatch, hidden, of_head)
        start += width


@torch.inference_mode()
def _decode_eagle3(model: Eagle3) -> None:
    config, start = model.config, 0
    memory = HybridMemory.for_layers(config.cells(), 1, sum(WIDTHS), model.device)
    for width in WIDTHS:
        (ubatch,) = memory.split([Span(0, start, [0] * width, [width - 1])], width, "seq")
        rows = torch.zeros(1, width, len(config.taps) * config.n_target, device=model.device)
        model.forward(ubatch, model.fused(rows), memory)
        start += width


def open_models(
    target: Path | str | GgufFile,
    draft: Path | str | Sequence[Path | str | GgufFile] | None,
    *,
    compute: str,
    device: str,
    mmap: bool | None,
    drafts_by_mtp: bool,
    progress: ReportProgress | None,
    cancelled: Callable[[], bool] | None,
    options: RunOptions | None,
) -> tuple[Any, ...]:
    """See Session.open: the parts of a Session, in order."""
    there, cancelled = resolve_device(device), cancelled or never
    paths = [draft] if isinstance(draft, str | Path) else list(draft or ())
    with ExitStack() as opened:
        file, *others = (
            opened.enter_context(
                path if isinstance(path, GgufFile) else GgufFile.open(path, cancelled)
            )
            for path in (target, *paths)
        )
        total = sum(one.n_bytes for one in (file, *others))
        # opening a small model takes less time than returning a little memory
        give_back = partial(give_back_memory, 32 << 20 if total < 256 << 20 else 0)
        give_back()
        tokenizer = Tokenizer.from_gguf(file, cancelled)
        for other in others:
            check_draft(file, tokenizer, other, cancelled, by_mtp=drafts_by_mtp)
        mtp = next((one for one in others if is_mtp_file(one)), None)
        chat = ChatTemplate.from_gguf(file)
        info = describe(file, there.type, has_mtp_file=bool(mtp))
        if there.type == "cuda":
            types = {tensor.type.name for tensor in file.tensors.values()}
            mode = resolve_compute(compute, info.n_params, there, types)
            figures = dict(describe_draft(other, there.type) for other in others)
            runs = options or RunOptions()
            check_room(estimate(info, figures, runs, runs.parallel or 1, mode).sizes, there)
        report = report_part(progress, 0, total) if others else progress
        load = partial(
            load_ready,
            options=options,
            compute=compute,
            device=there,
            cancelled=cancelled,
            mmap=mmap,
        )
        model, start = load(file, progress=report, mtp=mtp), file.n_bytes
        drafts: dict[str, HybridModel | LoadedDrafter] = {}
        for other in others:
            report = report_part(progress, start, total)
            drafter, _ = describe_draft(other)
            if drafter in drafts:
                raise OptionError(f"Two files are for {drafter}.", "Give one of them.")
            if drafter == DRAFT_SIMPLE:
                drafts[drafter] = load(other, progress=report)
            elif drafter == DRAFT_MTP:
                drafts[drafter] = model
            else:
                beside = partial(_load_beside, other, model, info, report, cancelled, mmap)
                drafts[drafter] = run_on(there, beside)
            start += other.n_bytes
        identities = [one.identity() for one in (file, *others)]
        for one, behind in pairwise(identities):
            one["draft"] = behind
        pairs = zip(identities, (file, *others), strict=True)
        content = ContentHash([(identity, one.contents) for identity, one in pairs])
        files = ModelFiles(part for one in (file, *others) for part in one.files)
        give_back()
        rest = drafts, file.path, content, files, mtp.path if mtp else None, mmap
        return (model, info, tokenizer, chat, identities[0], *rest)


def _load_beside(
    file: GgufFile,
    target: HybridModel,
    info: ModelInfo,
    progress: ReportProgress | None,
    cancelled: Callable[[], bool],
    mmap: bool | None,
) -> LoadedDrafter:
    """See load_drafter; for a large target it is then ready for measurements."""
    drafter = load_drafter(file, target, progress=progress, cancelled=cancelled, mmap=mmap)
    if not info.is_small and isinstance(drafter.model, Eagle3):
        with watched(_ignore) if uses_llvm() else nullcontext():
            _decode_eagle3(drafter.model)
    return drafter


def load_ready(
    file: GgufFile,
    progress: ReportProgress | None = None,
    options: RunOptions | None = None,
    **how: Any,
) -> HybridModel:
    """See load_model; a large model is then ready for measurements, in runs with the options."""
    device = how.get("device", CPU)
    model = run_on(device, partial(load_model, file, progress=progress, **how))
    if sum(tensor.n_elements for tensor in file.tensors.values()) >= SMALL_MODEL:
        if progress:
            progress(file.n_bytes, file.n_bytes, "running once")
        give_back_memory()  # memory of imports and loading: the passes need more
        is_plain = options is not None and not options.spec.types
        run_on(device, partial(warm_up, model, is_plain=is_plain))
    return model


def load_again(path: Path, identity: Any, mtp_path: Path | None, **how: Any) -> HybridModel:
    """A model of this identity, loaded from its file again, with the MTP block of its own file.
    how: see load_model. Raises ModelFileError for another file."""
    with ExitStack() as opened:
        file = opened.enter_context(GgufFile.open(path))
        if not same_model(file.identity(), {**identity, "draft": None}):
            raise file.files[0].has_changed()
        mtp = opened.enter_context(GgufFile.open(mtp_path)) if mtp_path else None
        if mtp is not None:
            leave_block(mtp)
        return load_ready(file, mtp=mtp, **how)


def made_drafters(
    options: RunOptions,
    target: HybridModel,
    opened: Mapping[str, Any],
    n_slots: int,
    n_ctx: int,
    kept: Mapping[str, Drafter],
    memories: LentMemories,
) -> list[Drafter]:
    """The drafters of the options, in order of priority; those in `kept` are reused. opened: models
    by drafter name. Raises OptionError, and LookupCacheError for a file of ngram-cache."""
    draws = None
    if options.spec.accept == "rejection" and options.sampler.temp > 0:
        draws = TokenDraws(options.sampler.temp, options.sampler.seed)
    drafters = []
    for name, spec in DRAFTERS.items():
        if name not in options.spec.types:
            continue
        inputs = DrafterInputs(
            target,
            opened.get(name),
            spec.options_of(options.spec),
            n_slots,
            n_ctx,
            options.n_ubatch,
            options.batch_invariant,
            draws,
            memories,
            options.faults,
            options.spec.tree,
        )
        drafters.append(kept.get(name) or spec.make(inputs))
    return drafters
