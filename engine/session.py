"""The façade of the engine: open models, tokenise, run, look at what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from engine.batch import Span
from engine.decode.held_sequences import PromptCache
from engine.decode.recorder import Recorder
from engine.decode.scheduler import RoundObserver, Scheduler
from engine.draft.adaptive import adapted
from engine.draft.chain import DrafterChain
from engine.draft.draft_files import check_draft
from engine.draft.drafter import Drafter
from engine.draft.registry import DRAFTERS
from engine.draft.spec import DrafterInputs, TokenDraws
from engine.errors import ContextFullError, OptionError
from engine.fork import Fork, LaterParts, Stage, chain_of, followers_of
from engine.gguf.binary import never
from engine.gguf.chat import ChatTemplate
from engine.gguf.content import ContentHash
from engine.gguf.file import GgufFile
from engine.gguf.model_files import ModelFiles
from engine.gguf.tokenizer import Tokenizer
from engine.machine.device import CPU, check_room, meaning_of, read, resolve_device
from engine.machine.graphs import graphs_are_on
from engine.machine.host_memory import give_back_freed_memory
from engine.memory.hybrid import HybridMemory
from engine.memory.policies import memory_sizes
from engine.memory.reuse import LentMemories, MemoryShelf
from engine.memory_need import estimate
from engine.model.config import ModelConfig
from engine.model.drafters.config import DrafterInfo
from engine.model.drafters.kinds import DRAFT_SIMPLE, describe_draft
from engine.model.drafters.loading import LoadedDrafter, load_drafter
from engine.model.families.common import is_mtp_file
from engine.model.hybrid import HybridModel
from engine.model.info import ModelInfo, describe
from engine.model.loader import load_model, resolve_compute
from engine.model.mtp_file import DRAFT_MTP, leave_block
from engine.model.threads import chosen_by
from engine.options import Prompt, RunOptions, SamplerOptions
from engine.progress import ReportProgress, report_part
from engine.run import Auditor, Run
from engine.run_checkpoints import RunCheckpoints, unread
from engine.sampling.grammar import Grammar, GrammarTokens, read_grammar
from engine.trace.run_ref import RunRef, copy_rounds, same_model
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter, this_engine
from engine.warm_up import warm_up, warm_up_drafter
from kernels.dispatch import uses_llvm

_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """What drafts for a target, and the figures of its file. Loaded in memory: a HybridModel for
    draft-simple, the target itself for draft-mtp, else a LoadedDrafter."""

    model: HybridModel | LoadedDrafter
    info: ModelInfo | DrafterInfo


class Session:
    """A target model, perhaps what drafts for it, and their tokenizer, ready to run."""

    def __init__(
        self,
        model: HybridModel,
        info: ModelInfo,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        identity: dict[str, Any],
        drafts: Mapping[str, OpenedDraft] | None = None,
        path: Path | None = None,
        content: ContentHash | None = None,
        files: ModelFiles | None = None,
        mmap: bool | None = None,
        mtp_path: Path | None = None,
    ) -> None:
        """drafts: what was opened next to the model, by the drafter that uses it. files: all that
        was read. mmap: as for `open`, for models that are loaded again with the MTP block of the
        file mtp_path, if there is one."""
        self._mtp_path = mtp_path
        self._model, self.info, self.path = model, info, path
        self.files, self._mmap = files or ModelFiles(), mmap
        self._loaded_again: WeakValueDictionary[tuple[str, bool], HybridModel] = (
            WeakValueDictionary()
        )
        self.tokenizer, self.chat, self.identity = tokenizer, chat, identity
        self.content = content
        """Finds what `identity` does not tell yet, once it is started."""
        self._grammar_tokens: GrammarTokens | None = None
        self.drafts = dict(drafts or {})
        self._shelf = MemoryShelf()

    @classmethod
    def open(
        cls,
        target: Path | str | GgufFile,
        draft: Path | str | Sequence[Path | str | GgufFile] | None = None,
        *,
        compute: str = "auto",
        device: str = "cpu",
        mmap: bool | None = None,
        drafts_by_mtp: bool = False,
        progress: ReportProgress | None = None,
        cancelled: Callable[[], bool] | None = None,
        options: RunOptions | None = None,
    ) -> Session:
        """Load a GGUF file, and files that draft for it, one for each drafter that needs one, to a
        device (engine.machine.device.resolve_device). Files that are open are closed. mmap:
        see engine.model.loader.reader_for.
        drafts_by_mtp: of a whole model that drafts, its MTP block is used, if it has one.
        options: of the runs to come; a CUDA device without room for them is refused at once.

        progress is called with bytes done, bytes in all, and what is being read, over all
        files. Raises OptionError, ModelFileError, UnsupportedModelError, OutOfMemoryError,
        VocabularyMismatchError, or Cancelled once `cancelled` returns True.
        """
        there, cancelled = resolve_device(device), cancelled or never
        paths = [draft] if isinstance(draft, str | Path) else list(draft or ())
        with ExitStack() as opened:
            file, *others = (
                opened.enter_context(
                    path if isinstance(path, GgufFile) else GgufFile.open(path, cancelled)
                )
                for path in (target, *paths)
            )
            tokenizer = Tokenizer.from_gguf(file, cancelled)
            for other in others:
                check_draft(file, tokenizer, other, cancelled, by_mtp=drafts_by_mtp)
            mtp = next((one for one in others if is_mtp_file(one)), None)
            chat, info = ChatTemplate.from_gguf(file), describe(file, has_mtp_file=bool(mtp))
            if there.type == "cuda":
                types = {tensor.type.name for tensor in file.tensors.values()}
                mode = resolve_compute(compute, info.n_params, there, types)
                figures, runs = dict(map(describe_draft, others)), options or RunOptions()
                check_room(estimate(info, figures, runs, runs.parallel or 1, mode).sizes, there)
            total = sum(one.n_bytes for one in (file, *others))
            report = report_part(progress, 0, total) if others else progress
            load = partial(
                _loaded,
                options=options,
                compute=compute,
                device=there,
                cancelled=cancelled,
                mmap=mmap,
            )
            model, start = load(file, progress=report, mtp=mtp), file.n_bytes
            drafts: dict[str, OpenedDraft] = {}
            its_model: HybridModel | LoadedDrafter
            for other in others:
                report = report_part(progress, start, total)
                drafter, its_info = describe_draft(other)
                if drafter in drafts:
                    raise OptionError(f"Two files are for {drafter}.", "Give one of them.")
                if drafter == DRAFT_SIMPLE:
                    its_model = load(other, progress=report)
                elif drafter == DRAFT_MTP:
                    its_model = model
                else:
                    its_model = _loaded_beside(other, model, info, report, cancelled, mmap)
                drafts[drafter] = OpenedDraft(its_model, its_info)
                start += other.n_bytes
            identities = [one.identity() for one in (file, *others)]
            for one, behind in pairwise(identities):
                one["draft"] = behind
            content = ContentHash(
                [
                    (identity, one.contents)
                    for identity, one in zip(identities, (file, *others), strict=True)
                ]
            )
            files = ModelFiles(part for one in (file, *others) for part in one.files)
            give_back_freed_memory()
            mtp_path = mtp.path if mtp else None
            rest = drafts, file.path, content, files, mmap, mtp_path
            return cls(model, info, tokenizer, chat, identities[0], *rest)

    @property
    def config(self) -> ModelConfig:
        """Configuration of the target."""
        return self._model.config

    @property
    def compute(self) -> str:
        """Compute mode in effect."""
        return self._model.compute

    @property
    def device(self) -> torch.device:
        """The device of the models and of every run's memory."""
        return self._model.device

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters with a model that the loaded files make possible; the others always are."""
        has_head = self._model.head is not None
        return tuple(
            name
            for name, spec in DRAFTERS.items()
            if spec.needs and (name in self.drafts if spec.needs.has_file else has_head)
        )

    def prompt(self, text: str, *, parse_special: bool = True) -> Prompt:
        """Tokenise a text to be continued, with the leading token that the vocabulary asks for."""
        tokens = self.tokenizer.encode(text, parse_special=parse_special)
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return Prompt(tuple(tokens), text)

    def logits(self, tokens: Sequence[int], *, n_ubatch: int = 512) -> np.ndarray:
        """Logits after every token: float32 [len(tokens), n_vocab]. Raises OptionError, and
        ModelFileError where the model is mapped from a file that has been written to."""
        self._check_tokens(tokens)
        memory = HybridMemory.for_model(self.config, 1, len(tokens), self.device)
        span = Span(0, 0, tokens, range(len(tokens)))
        parts = [
            self.model.forward(ubatch, memory).logits
            for ubatch in memory.split([span], n_ubatch, "equal")
        ]
        self.files.check()
        return read(torch.cat(parts))[0]

    def start(
        self,
        prompts: Sequence[Prompt],
        options: RunOptions,
        trace: TraceStore | None = None,
        cache: PromptCache | None = None,
        *,
        audit: Auditor | None = None,
        observer: RoundObserver | None = None,
        fork: Fork | None = None,
        checkpoints: RunCheckpoints | None = None,
    ) -> Run:
        """Prepare a run; the first `step` decodes the prompts. Raises OptionError,
        GrammarFileError, and ModelFileError where the model is mapped from a file that has been
        written to.

        fork: decode another run's rounds again, with its options, up to a round, and go on with
        these; not with a cache. checkpoints: where it may go on from, and where those of this run
        are kept.

        audit: observes the run and checks it at its end (engine.audit); observer: observes it only.

        cache: what earlier runs with it left is used where a prompt begins like a text of theirs,
        as long as models and options are the same but for n_predict and, unless drafts are drawn
        (rejection), the sampler. There are options.parallel slots then, even for fewer prompts.
        """
        trace = TraceStore() if trace is None else trace
        why = ""
        if fork and checkpoints:
            restored, why = self._restored(fork, options, trace, checkpoints)
            if restored:
                return restored
        first = fork.begins_with() if fork else options
        """Options that the run begins with."""
        n_ctx = self.context(prompts, first)
        n_slots = first.parallel if cache else min(first.parallel, len(prompts))
        key = self._cache_key(first)
        kept = cache.take(key) if cache else None
        memories = self._memories(first) if cache is None else LentMemories()
        there = kept.drafters if kept else None
        drafters = self.make_drafters(first, n_slots, n_ctx, there, memories)
        n_seqs = n_slots * first.spec.n_branches
        make = partial(self.make_memory, first, n_seqs, n_ctx, first.snapshots)
        memory = kept.memory if kept else memories.take(_of_target(first, n_seqs, n_ctx), make)
        if cache and not kept:
            kept = cache.keep(key, memory, drafters, first)
        grammar = self.grammar(first)
        parts = [LaterParts(first, memory, drafters, grammar)]
        stages = fork.stages(options) if fork else []
        parts += self._later(parts[0], stages, prompts, n_slots)
        run_id = self.begin_run(trace, options, parts[-1].memory, options.snapshots)
        recorder = Recorder(trace, run_id, self.tokenizer.piece, self.files)
        chain = DrafterChain(
            drafters, followers_of(parts), adapted(first.spec.adapt, first.spec.longest)
        )
        trace.runs[run_id].drafters = chain.statistics
        scheduler = Scheduler(
            self.model,
            memory,
            chain,
            prompts,
            first,
            self.tokenizer.eog_ids,
            recorder,
            n_slots,
            held=kept.held if kept else None,
            grammar=grammar,
            observer=audit or observer,
        )
        if fork:
            how = f"rounds 0 to {fork.round - 1} decoded again{why}"
            fork.attach(scheduler, parts, chain, stages, trace.runs[run_id], how)
        if checkpoints and not cache:
            start = fork.round if fork else 0
            checkpoints.keep(scheduler, recorder, RunRef(trace, run_id), start)
        return Run(
            run_id, trace, scheduler, self.tokenizer, self.files, cache, kept, memories, audit
        )

    def _restored(
        self, fork: Fork, options: RunOptions, trace: TraceStore, checkpoints: RunCheckpoints
    ) -> tuple[Run | None, str]:
        """A fork that goes on from a checkpoint; None, and why there is none, where it cannot."""
        found = checkpoints.nearest(fork)
        if found is None:
            return None, ", as no checkpoint before is kept"
        source, scheduler, prompts = RunRef(trace, found.run_id), found.restored(), fork.prompts()
        if not found.is_of(source):
            return None, ", as the trace is another one"
        first, memory, before = scheduler.parts
        stages = fork.stages(options, source)
        n_slots = min(first.parallel, len(prompts))
        parts = [LaterParts(first, memory, before.drafters, self.grammar(first))]
        parts += self._later(parts[0], stages, prompts, n_slots)
        if name := unread(parts):
            return None, f", as {name} has to read the text from its start"
        run_id = self.begin_run(trace, options, parts[-1].memory, options.snapshots)
        copy_rounds(source, run_id, found.round)
        recorder = Recorder(trace, run_id, self.tokenizer.piece, self.files)
        recorder.go_on(found.progress)
        scheduler.restart(recorder)
        chain = chain_of(parts, before)
        scheduler.go_on_with(first, memory, chain, parts[0].grammar)
        trace.runs[run_id].drafters = chain.statistics
        n = fork.round - found.round
        how = f"replayed {n} round{'' if n == 1 else 's'}" if n else "nothing to replay"
        how = f"restored checkpoint of round {found.round}, {how}"
        fork.attach(scheduler, parts, chain, stages, trace.runs[run_id], how)
        checkpoints.keep(scheduler, recorder, RunRef(trace, run_id), fork.round)
        return Run(run_id, trace, scheduler, self.tokenizer, self.files), ""

    def _later(
        self, parts: LaterParts, stages: Sequence[Stage], prompts: Sequence[Prompt], n_slots: int
    ) -> Iterator[LaterParts]:
        """What each stage of a fork goes on with: of the parts before it all those that its other
        options do not change, since these are at the right place by then."""
        for stage in stages:
            before, options = parts.options, stage.options
            if stage.token is not None:
                self._check_tokens([stage.token])
            if options.parallel != before.parallel:
                raise OptionError(
                    f"The run to go on from has --parallel {before.parallel}.",
                    "Leave --parallel out.",
                )
            n_ctx, n_ctx_before = self.context(prompts, options), self.context(prompts, before)
            same = {
                one.name: one
                for one in parts.drafters
                if n_ctx == n_ctx_before
                and _of_drafter(before, one.name) == _of_drafter(options, one.name)
            }
            n_seqs = n_slots * options.spec.n_branches
            held = _of_memory(before, n_slots * before.spec.n_branches, n_ctx_before)
            keeps = held == _of_memory(options, n_seqs, n_ctx)
            parts = LaterParts(
                options,
                parts.memory
                if keeps
                else self.make_memory(options, n_seqs, n_ctx, options.snapshots),
                self.make_drafters(options, n_slots, n_ctx, same),
                self.grammar(options),
            )
            yield parts

    def _memories(self, options: RunOptions) -> LentMemories:
        """Memories of earlier runs, where their recordings are worth it: on a GPU these take memory
        that no one counts. A fault may leave anything after."""
        lends = self.device.type == "cpu" and graphs_are_on() and uses_llvm()
        return LentMemories(self._shelf if lends and not options.faults else None)

    def grammar(self, options: RunOptions) -> Grammar | None:
        """The grammar that the options name, None if they name none.

        Raises GrammarFileError, and OptionError where no token can end the text.
        """
        if not options.sampler.has_grammar:
            return None
        if self._grammar_tokens is None:
            if not self.tokenizer.eog_ids:
                raise OptionError(
                    "The vocabulary has no token that ends a text, which a grammar needs.",
                    "Leave out --json-schema and --grammar-file.",
                )
            self._grammar_tokens = GrammarTokens(self.tokenizer)
        return read_grammar(options.sampler, self._grammar_tokens)

    def _cache_key(self, options: RunOptions) -> tuple[object, ...]:
        """A key that is equal for runs that may use each other's memory."""
        draws = options.spec.accept == "rejection"
        sampler = options.sampler if draws else SamplerOptions()
        models = tuple(draft.model for draft in self.drafts.values())
        return self._model, models, replace(options, n_predict=-1, sampler=sampler)

    @property
    def model(self) -> HybridModel:
        """The target model, to decode with a memory of the caller's own.

        Raises ModelFileError where it is mapped from a file that has been written to.
        """
        self.files.check()
        return self._model

    def model_in(self, compute: str) -> HybridModel:
        """The target in a compute mode: loaded again from its file, shared while anyone holds it.

        Raises OptionError, ModelFileError for a file that has changed, and what `open` raises.
        """
        if compute == self._model.compute:
            return self.model
        return self._again(compute, self.device)

    def model_as_llama_cpp(self) -> HybridModel:
        """The target on the processor with llama.cpp's own arithmetic, but for the order of sums:
        loaded and shared like `model_in`, raises the same."""
        return self._again("q8", CPU, as_llama_cpp=True)

    def _again(
        self, compute: str, device: torch.device, *, as_llama_cpp: bool = False
    ) -> HybridModel:
        key = compute, as_llama_cpp
        model = self._loaded_again.get(key)
        if model is None:
            with ExitStack() as opened:
                file = opened.enter_context(GgufFile.open(self.unchanged_path()))
                if not same_model(file.identity(), {**self.identity, "draft": None}):
                    raise file.files[0].has_changed()
                mtp = (
                    opened.enter_context(GgufFile.open(self._mtp_path)) if self._mtp_path else None
                )
                if mtp is not None:
                    leave_block(mtp)
                model = _loaded(
                    file,
                    compute=compute,
                    device=device,
                    as_llama_cpp=as_llama_cpp,
                    mmap=self._mmap,
                    mtp=mtp,
                )
                self.unchanged_path()
            self.files.parts += [part for part in model.files if part.is_mapped]
            self._loaded_again[key] = model
        return model

    def check_unchanged(self) -> None:
        """Raises ModelFileError where the model's file is not the one opened any more."""
        for part in self._model.files:
            if part.change():
                raise part.has_changed()

    def unchanged_path(self) -> Path:
        """The model's file, to be read again. Raises OptionError where the model came from none,
        and ModelFileError where it is not the one opened any more."""
        if self.path is None:
            raise OptionError(
                "The model came from no file, which is needed again.",
                "Open the model from a GGUF file.",
            )
        self.check_unchanged()
        return self.path

    def continuation(self, prompt: Prompt, options: RunOptions) -> Iterator[int]:
        """Tokens of plain decoding of one prompt, decoded one by one as they are asked for."""
        run, n = self.start([prompt], options.plain), 0
        while not run.done:
            run.step()
            (tokens,) = run.emitted
            yield from tokens[n:]
            n = len(tokens)

    def context(self, prompts: Sequence[Prompt], options: RunOptions) -> int:
        """Cells per sequence. Raises OptionError for a token id outside the vocabulary, and
        ContextFullError for too long a prompt."""
        if not prompts:
            raise OptionError("There is no prompt.", "Give at least one.")
        if options.sampler.logit_bias:
            self._check_tokens([token for token, _ in options.sampler.logit_bias])
        n_ctx = options.n_ctx or min(self.config.n_ctx_train, _DEFAULT_CONTEXT)
        for seq_id, prompt in enumerate(prompts):
            self._check_tokens(prompt.tokens)
            if len(prompt.tokens) >= n_ctx:
                raise ContextFullError(
                    f"Prompt {seq_id} has {len(prompt.tokens)} tokens, the context {n_ctx}.",
                    "Raise -c or shorten the prompt.",
                )
        return n_ctx

    def make_memory(
        self,
        options: RunOptions,
        n_seqs: int,
        n_ctx: int,
        n_rs_seq: int,
        device: torch.device | None = None,
    ) -> HybridMemory:
        """Memory for the target as the options ask for it. device: None = that of the session.

        Raises OutOfMemoryError, with figures, where a CUDA device has no room for all of it."""
        where = device or self.device
        sizes = memory_sizes(self.info, n_seqs, n_rs_seq, n_ctx, options.rollback)
        cells = {"KV": n_seqs * n_ctx * self.info.kv_bytes_per_token, "state": sizes["state"]}
        check_room({**cells, options.rollback: sizes["snapshots"]}, where)
        try:
            return HybridMemory.for_model(
                self.config,
                n_seqs,
                n_ctx,
                where,
                policy=options.rollback,
                n_rs_seq=n_rs_seq,
                unified=options.kv == "unified",
                faults=options.faults,
                batch_invariant=options.batch_invariant,
                types=options.state_types,
            )
        except RuntimeError as error:
            meaning = meaning_of(error, where)
            if meaning is None:
                raise
            raise meaning from error

    def begin_run(
        self,
        trace: TraceStore,
        options: RunOptions,
        memory: HybridMemory,
        n_rs_seq: int,
        model: HybridModel | None = None,
    ) -> int:
        """Register a run with what is known of it before its first row; None: the open model."""
        model = model or self._model
        writer = TraceWriter.begin(
            trace,
            this_engine(),
            {
                "options": asdict(options),
                "compute": model.compute,
                "device": str(model.device),
                "threads": torch.get_num_threads(),
                **({"threads_chosen": chosen} if (chosen := chosen_by()) else {}),
                "model": self.identity,
                "architecture": self.config.architecture,
                "n_ctx": memory.attention.n_ctx,
                "n_rs_seq": n_rs_seq,
                "memory_bytes": memory.n_bytes(),
                "mmap": self.files.is_mapped,
                "synthetic": bool(options.spec.synthetic),
                "weight_bytes": model.weight_bytes,
                "snapshot_bytes": memory.snapshot_bytes(),
                "banned_tokens": sorted(self.tokenizer.eog_ids) if options.ignore_eos else [],
            },
        )
        return writer.run_id

    def make_drafters(
        self,
        options: RunOptions,
        n_slots: int,
        n_ctx: int,
        kept: Mapping[str, Drafter] | None = None,
        memories: LentMemories | None = None,
    ) -> list[Drafter]:
        """The drafters that the options name, in order of priority. kept: those that are there
        already, by name. memories: where they get memory, None = new for each.

        Raises OptionError, and LookupCacheError for a file of ngram-cache.
        """
        draws = None
        if options.spec.accept == "rejection" and options.sampler.temp > 0:
            draws = TokenDraws(options.sampler.temp, options.sampler.seed)
        there, drafters = kept or {}, []
        for name, spec in DRAFTERS.items():
            if name not in options.spec.types:
                continue
            opened = self.drafts.get(name)
            inputs = DrafterInputs(
                self._model,
                opened.model if opened else None,
                spec.options_of(options.spec),
                n_slots,
                n_ctx,
                options.n_ubatch,
                options.batch_invariant,
                draws,
                memories or LentMemories(),
                options.faults,
                options.spec.tree,
            )
            drafters.append(there.get(name) or spec.make(inputs))
        return drafters

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise OptionError("The prompt is empty.", "Give at least one token of text.")
        for token in tokens:
            if not 0 <= token < self.config.n_vocab:
                raise OptionError(
                    f"Token id {token} is outside the vocabulary of {self.config.n_vocab}.",
                    "Use ids of this model; `draftscope tokenize` prints them.",
                )


def _of_memory(options: RunOptions, n_seqs: int, n_ctx: int) -> tuple[object, ...]:
    """All that Session.make_memory depends on."""
    return *_of_target(options, n_seqs, n_ctx), options.faults


def _of_drafter(options: RunOptions, name: str) -> tuple[object, ...]:
    """All that Session.make_drafters makes a drafter of, but for its sizes."""
    return (
        name in options.spec.types,
        DRAFTERS[name].options_of(options.spec),
        options.n_ubatch,
        options.batch_invariant,
        options.faults,
        options.spec.tree,
        options.spec.accept == "rejection" and (options.sampler.temp, options.sampler.seed),
    )


def _of_target(options: RunOptions, n_seqs: int, n_ctx: int) -> tuple[object, ...]:
    """All that Session.make_memory depends on, but for faults."""
    kinds = options.rollback, options.kv, options.batch_invariant, options.state_types
    return "target", n_seqs, n_ctx, options.snapshots, *kinds


def _loaded_beside(
    file: GgufFile,
    target: HybridModel,
    info: ModelInfo,
    progress: ReportProgress | None,
    cancelled: Callable[[], bool],
    mmap: bool | None,
) -> LoadedDrafter:
    """See load_drafter; next to a large target it is then ready to be measured."""
    drafter = load_drafter(file, target, progress=progress, cancelled=cancelled, mmap=mmap)
    if not info.is_small:
        warm_up_drafter(drafter)
    return drafter


def _loaded(
    file: GgufFile,
    progress: ReportProgress | None = None,
    options: RunOptions | None = None,
    **how: Any,
) -> HybridModel:
    """See load_model; a large model is then ready to be measured, in runs with the options."""
    model = load_model(file, progress=progress, **how)
    if not describe(file).is_small:
        if progress:
            progress(file.n_bytes, file.n_bytes, "running once")
        warm_up(model, is_plain=options is not None and not options.spec.types)
    return model
