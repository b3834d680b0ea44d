"""The engine's façade: open models, tokenise, run, read the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from engine.batch import Span
from engine.decode.held_sequences import PromptCache
from engine.decode.recorder import Recorder
from engine.decode.round import RoundObserver
from engine.decode.scheduler import Scheduler
from engine.draft.adaptive import adapted
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Drafter
from engine.draft.registry import DRAFTERS
from engine.errors import ContextFullError, OptionError
from engine.fork import Fork, LaterParts, Stage, followers_of, kept_of_target, later_parts
from engine.gguf.chat import ChatTemplate
from engine.gguf.content import ContentHash
from engine.gguf.file import GgufFile
from engine.gguf.part_file import ModelFiles
from engine.gguf.tokenizer import Tokenizer
from engine.long_work import ReportProgress
from engine.machine.device import CPU, check_room, read, run_on
from engine.machine.graphs import graphs_are_on
from engine.machine.host_memory import give_back_memory
from engine.memory.hybrid import HybridMemory, LentMemories, MemoryShelf
from engine.memory.policies import memory_sizes
from engine.model.drafters.loading import LoadedDrafter
from engine.model.hybrid import HybridModel
from engine.model.info import ModelInfo
from engine.options import Prompt, RunOptions, SamplerOptions
from engine.run import Run
from engine.run_checkpoints import RunCheckpoints, unread
from engine.sampling.grammar import Grammar, GrammarTokens, read_grammar
from engine.threads import chosen_by
from engine.trace.run_ref import RunRef, copy_rounds
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter, this_engine
from engine.warm_up import load_again, made_drafters, open_models
from kernels.dispatch import uses_llvm

_DEFAULT_CONTEXT = 4096


class Session:
    """A target model, its drafters if any, and their tokenizer, ready to run.

    config: of the target. compute: the mode in effect. device: of the models and of every run's
    memory.
    """

    def __init__(
        self,
        model: HybridModel,
        info: ModelInfo,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        identity: dict[str, Any],
        drafts: Mapping[str, HybridModel | LoadedDrafter] | None = None,
        path: Path | None = None,
        content: ContentHash | None = None,
        files: ModelFiles | None = None,
        mtp_path: Path | None = None,
        mmap: bool | None = None,
    ) -> None:
        """drafts: draft models by drafter: a model for draft-simple, the model itself for
        draft-mtp. files: all files that were read. mmap: as for `open`, for models that are loaded
        again with the MTP block of the file mtp_path, if there is one."""
        self._mtp_path = mtp_path
        self._model, self.info, self.path = model, info, path
        self.config, self.compute, self.device = model.config, model.compute, model.device
        self.files, self._mmap = files or ModelFiles(), mmap
        self._loaded_again = WeakValueDictionary[tuple[str, bool], HybridModel]()
        self.tokenizer, self.chat, self.identity = tokenizer, chat, identity
        self.content = content
        """Computes what `identity` does not know yet, once it is started."""
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
        """Load a GGUF file, and a draft file for each drafter that needs one, to a device
        (engine.machine.device.resolve_device). Open files are closed. mmap: see
        engine.model.loader.reader_for. drafts_by_mtp: of a full model given as a draft file, use
        the MTP block, if it has one. options: of later runs; a CUDA device without room for them is
        refused at once.

        progress is called with bytes done, bytes in total, and what is being read, over all files.
        Raises OptionError, ModelFileError, UnsupportedModelError, OutOfMemoryError,
        VocabularyMismatchError, or Cancelled once `cancelled` returns True.
        """
        parts = open_models(
            target,
            draft,
            compute=compute,
            device=device,
            mmap=mmap,
            drafts_by_mtp=drafts_by_mtp,
            progress=progress,
            cancelled=cancelled,
            options=options,
        )
        return cls(*parts)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters with a model that the loaded files provide; those without one are always
        there."""
        has_head = self._model.head is not None
        return tuple(
            name
            for name, spec in DRAFTERS.items()
            if spec.needs and (name in self.drafts if spec.has_file else has_head)
        )

    def prompt(self, text: str, *, parse_special: bool = True) -> Prompt:
        """Tokenise a text to continue, with the BOS token if the vocabulary adds one."""
        tokens = self.tokenizer.encode(text, parse_special=parse_special)
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return Prompt(tuple(tokens), text)

    def message_prompt(self, text: str, values: Mapping[str, Any] | None, remedy: str) -> Prompt:
        """A text as a user's message in the model's chat template with these variables; None: as
        `prompt`. Raises OptionError with this remedy for a model without a template,
        ChatTemplateError if it fails."""
        if values is None:
            return self.prompt(text)
        if self.chat is None:
            raise OptionError("The model has no chat template.", remedy)
        return self.prompt(self.chat.render([{"role": "user", "content": text}], **values))

    def logits(self, tokens: Sequence[int], *, n_ubatch: int = 512) -> np.ndarray:
        """Logits after every token: float32 [len(tokens), n_vocab]. Raises OptionError, and
        ModelFileError if the model is mapped from a file that was overwritten."""
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
        audit: RoundObserver | None = None,
        observer: RoundObserver | None = None,
        fork: Fork | None = None,
        checkpoints: RunCheckpoints | None = None,
    ) -> Run:
        """Prepare a run; the first `step` decodes the prompts. Raises OptionError,
        GrammarFileError, and ModelFileError if the model is mapped from a file that was
        overwritten.

        fork: decode another run's rounds again, with its options, up to a round, and continue with
        these; not with a cache. checkpoints: where a fork may start, and where those of this run
        are kept.

        audit: observes the run and checks it at its end (engine.audit); observer: observes it only.

        cache: state that earlier runs left there is used for a prompt with a common prefix, as long
        as models and options are the same except n_predict and, unless drafts are sampled
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
        memory = kept.memory if kept else memories.take(kept_of_target(first, n_seqs, n_ctx), make)
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
        give_back_memory(16 << 20)  # memory of opening and preparing, if it is much
        return Run(
            run_id, trace, scheduler, self.tokenizer, self.files, cache, kept, memories, audit
        )

    def _restored(
        self, fork: Fork, options: RunOptions, trace: TraceStore, checkpoints: RunCheckpoints
    ) -> tuple[Run | None, str]:
        """A fork that continues from a checkpoint; None, and the reason, if it cannot."""
        found = checkpoints.nearest(fork)
        if found is None:
            return None, ", as no earlier checkpoint is kept"
        source, scheduler, prompts = RunRef(trace, found.run_id), found.restored(), fork.prompts()
        if not found.is_of(source):
            return None, ", as the checkpoints are of another trace"
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
        found.go_on(scheduler, recorder, fork, parts, stages, trace.runs[run_id])
        checkpoints.keep(scheduler, recorder, RunRef(trace, run_id), fork.round)
        return Run(run_id, trace, scheduler, self.tokenizer, self.files), ""

    def _later(
        self, parts: LaterParts, stages: Sequence[Stage], prompts: Sequence[Prompt], n_slots: int
    ) -> Iterator[LaterParts]:
        """The parts of each stage of a fork: those of the previous stage that its options leave as
        they are, since they are up to date by then, and new ones."""
        for at, _ in stages:
            if at.token is not None:
                self._check_tokens([at.token])

        def make(
            options: RunOptions, n_ctx: int, memory: HybridMemory | None, same: dict[str, Drafter]
        ) -> LaterParts:
            n_seqs = n_slots * options.spec.n_branches
            memory = memory or self.make_memory(options, n_seqs, n_ctx, options.snapshots)
            drafters = self.make_drafters(options, n_slots, n_ctx, same)
            return LaterParts(options, memory, drafters, self.grammar(options))

        return later_parts(parts, stages, n_slots, partial(self.context, prompts), make)

    def _memories(self, options: RunOptions) -> LentMemories:
        """Memories of earlier runs, where reusing recorded passes pays: on a GPU they take device
        memory. Not after a fault, which may leave anything."""
        lends = self.device.type == "cpu" and graphs_are_on() and uses_llvm()
        return LentMemories(self._shelf if lends and not options.faults else None)

    def grammar(self, options: RunOptions) -> Grammar | None:
        """The grammar of the options, None without one.

        Raises GrammarFileError, and OptionError if no token can end the text.
        """
        if not options.sampler.has_grammar:
            return None
        if self._grammar_tokens is None:
            if not self.tokenizer.eog_ids:
                raise OptionError(
                    "A grammar needs an end-of-generation token, and the vocabulary has none.",
                    "Leave out --json-schema and --grammar-file.",
                )
            t = self.tokenizer
            self._grammar_tokens = GrammarTokens(t.n_vocab, t.eog_ids, t.piece, t.encode)
        return read_grammar(options.sampler, self._grammar_tokens)

    def _cache_key(self, options: RunOptions) -> tuple[object, ...]:
        """A key that is equal for runs that may share memory."""
        draws = options.spec.accept == "rejection"
        sampler = options.sampler if draws else SamplerOptions()
        models = tuple(self.drafts.values())
        return self._model, models, replace(options, n_predict=-1, sampler=sampler)

    @property
    def model(self) -> HybridModel:
        """The target model, to decode with a memory of the caller's own.

        Raises ModelFileError if it is mapped from a file that was overwritten.
        """
        self.files.check()
        return self._model

    def model_in(self, compute: str) -> HybridModel:
        """The target in a compute mode: loaded again from its file, shared while it is referenced.

        Raises OptionError, ModelFileError for a changed file, and as `open` does.
        """
        if compute == self._model.compute:
            return self.model
        return self._again(compute, self.device)

    def model_as_llama_cpp(self) -> HybridModel:
        """The target on the CPU with llama.cpp's arithmetic, except for the order of sums; loaded
        and shared as `model_in`, raises the same."""
        return self._again("q8", CPU, as_llama_cpp=True)

    def _again(
        self, compute: str, device: torch.device, *, as_llama_cpp: bool = False
    ) -> HybridModel:
        key = compute, as_llama_cpp
        model = self._loaded_again.get(key)
        if model is None:
            model = load_again(
                self.unchanged_path(),
                self.identity,
                self._mtp_path,
                compute=compute,
                device=device,
                as_llama_cpp=as_llama_cpp,
                mmap=self._mmap,
            )
            self.unchanged_path()
            self.files.parts += [part for part in model.files if part.is_mapped]
            self._loaded_again[key] = model
        return model

    def check_unchanged(self) -> None:
        """Raises ModelFileError if the model's file has changed since it was opened."""
        for part in self._model.files:
            if part.change():
                raise part.has_changed()

    def unchanged_path(self) -> Path:
        """The model's file, to read it again. Raises OptionError if the model has none, and
        ModelFileError if it has changed since it was opened."""
        if self.path is None:
            raise OptionError(
                "The model has to be read again, but was not loaded from a file.",
                "Open the model from a GGUF file.",
            )
        self.check_unchanged()
        return self.path

    def continuation(self, prompt: Prompt, options: RunOptions) -> Iterator[int]:
        """Tokens of plain decoding of one prompt, decoded on demand."""
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
        is_one = len({one.tokens for one in prompts}) == 1
        for seq_id, one in enumerate(prompts):
            name = "The prompt" if is_one else f"Prompt {seq_id}"
            self._check_tokens(one.tokens, name)
            if len(one.tokens) >= n_ctx:
                raise ContextFullError(
                    f"{name} has {len(one.tokens)} tokens, but the context only {n_ctx}.",
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
        """Memory for the target according to the options. device: None = the session's.

        Raises OutOfMemoryError, with figures, if a CUDA device has no room for it.
        """
        where = device or self.device
        sizes = memory_sizes(self.info, n_seqs, n_rs_seq, n_ctx, options.rollback)
        cells = {"KV": n_seqs * n_ctx * self.info.kv_bytes_per_token, "state": sizes["state"]}
        check_room({**cells, options.rollback: sizes["snapshots"]}, where)
        make = partial(
            HybridMemory.for_model,
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
        return run_on(where, make)

    def begin_run(
        self,
        trace: TraceStore,
        options: RunOptions,
        memory: HybridMemory,
        n_rs_seq: int,
        model: HybridModel | None = None,
    ) -> int:
        """Register a run with the facts known before its first row. model: None = the target."""
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
        """The drafters of the options, in order of priority. kept: existing ones, by name.
        memories: where they get memory, None = a new one each.

        Raises OptionError, LookupCacheError for a file of ngram-cache, and OutOfMemoryError.
        """
        lent = memories or LentMemories()
        of_run = options, self._model, self.drafts, n_slots, n_ctx, kept or {}, lent
        return run_on(self.device, partial(made_drafters, *of_run))

    def _check_tokens(self, tokens: Sequence[int], name: str = "The prompt") -> None:
        if not tokens:
            raise OptionError(f"{name} is empty.", "Give at least one token of text.")
        for token in tokens:
            if not 0 <= token < self.config.n_vocab:
                raise OptionError(
                    f"Token id {token} is outside the vocabulary of {self.config.n_vocab}.",
                    "Use ids of this model; `draftscope tokenize` prints them.",
                )
