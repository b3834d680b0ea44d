"""The façade of the engine: open models, tokenise, run, look at what happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.decode.scheduler import Scheduler
from engine.draft.chain import DrafterChain
from engine.draft.draft_mtp import DraftMtp
from engine.draft.draft_simple import DraftSimple
from engine.draft.drafter import Drafter
from engine.draft.vocabulary import check_vocabularies
from engine.errors import ContextFullError, OptionError
from engine.findings.check import record_findings
from engine.gguf.chat import ChatTemplate
from engine.gguf.file import GgufFile
from engine.gguf.reader import Progress
from engine.gguf.tokenizer import Tokenizer
from engine.memory.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model.config import ModelConfig
from engine.model.hybrid import HybridModel
from engine.model.info import ModelInfo, describe
from engine.model.loader import load_model
from engine.options import Prompt, RunOptions
from engine.trace.recorder import Recorder
from engine.trace.store import TraceStore
from engine.trace.timings import summary, timings

_DEFAULT_CONTEXT = 4096
_PRIORITY = ("draft-simple", "draft-mtp")


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One finished or stopped sequence. stop: end, limit, context, stopped, or "" if running."""

    seq_id: int
    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    stop: str
    timings: dict[str, Any]


class Session:
    """A target model, perhaps a draft model, and their tokenizer, ready to run."""

    def __init__(
        self,
        model: HybridModel,
        info: ModelInfo,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        identity: dict[str, Any],
        draft: tuple[HybridModel, ModelInfo] | None = None,
    ) -> None:
        self._model, self.info = model, info
        self.tokenizer, self.chat, self.identity = tokenizer, chat, identity
        self._draft_model = draft[0] if draft else None
        self.draft_info = draft[1] if draft else None

    @classmethod
    def open(
        cls,
        target: Path | str,
        draft: Path | str | None = None,
        *,
        compute: str = "auto",
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Session:
        """Load one or two GGUF files.

        progress is called with bytes done, bytes in all, and what is being read, over both
        files. Raises ModelFileError, UnsupportedModelError, VocabularyMismatchError, or
        Cancelled once `cancelled` returns True.
        """
        with GgufFile.open(target) as file:
            tokenizer = Tokenizer.from_gguf(file)
            chat = ChatTemplate.from_gguf(file)
            info, identity = describe(file), file.identity()
            if draft is None:
                model = load_model(file, compute=compute, progress=progress, cancelled=cancelled)
                return cls(model, info, tokenizer, chat, identity)
            with GgufFile.open(draft) as second:
                check_vocabularies(tokenizer, Tokenizer.from_gguf(second))
                total = file.n_bytes + second.n_bytes
                model = load_model(
                    file, compute=compute, progress=_part(progress, 0, total), cancelled=cancelled
                )
                helper = load_model(
                    second, compute=compute, cancelled=cancelled,
                    progress=_part(progress, file.n_bytes, total),
                )  # fmt: skip
                identity["draft"] = second.identity()
                return cls(model, info, tokenizer, chat, identity, (helper, describe(second)))

    @property
    def config(self) -> ModelConfig:
        """Configuration of the target."""
        return self._model.config

    @property
    def compute(self) -> str:
        """Compute mode in effect."""
        return self._model.compute

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that the loaded files make possible."""
        possible = {
            "draft-simple": self._draft_model is not None,
            "draft-mtp": self._model.head is not None,
        }
        return tuple(name for name in _PRIORITY if possible[name])

    def prompt(self, text: str, *, parse_special: bool = True) -> Prompt:
        """Tokenise a text to be continued, with the leading token that the vocabulary asks for."""
        tokens = self.tokenizer.encode(text, parse_special=parse_special)
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return Prompt(tuple(tokens), text)

    def logits(self, tokens: Sequence[int], *, n_ubatch: int = 512) -> np.ndarray:
        """Logits after every token: float32 [len(tokens), n_vocab]."""
        self._check_tokens(tokens)
        memory = HybridMemory.for_model(self.config, 1, len(tokens), self._device)
        span = Span(0, 0, tokens, range(len(tokens)))
        parts = [
            self._model.forward(ubatch, memory).logits
            for ubatch in memory.split([span], n_ubatch, "equal")
        ]
        return torch.cat(parts).cpu().numpy()

    def start(
        self, prompts: Sequence[Prompt], options: RunOptions, trace: TraceStore | None = None
    ) -> Run:
        """Prepare a run; the first `step` decodes the prompts. Raises OptionError."""
        trace = TraceStore() if trace is None else trace
        n_ctx = self.context(prompts, options)
        n_slots = min(options.parallel, len(prompts))
        drafters = self.make_drafters(options, n_slots, n_ctx)
        n_rs_seq = self.snapshots(options, bool(drafters))
        memory = self.make_memory(options, n_slots, n_ctx, n_rs_seq)
        run_id = self.begin_run(trace, options, memory, n_rs_seq)
        recorder = Recorder(trace, run_id, self.tokenizer.piece)
        chain = DrafterChain(drafters)
        scheduler = Scheduler(
            self._model, memory, chain, prompts, options, self.tokenizer.eog_ids, recorder
        )
        return Run(run_id, trace, scheduler, self.tokenizer)

    @property
    def model(self) -> HybridModel:
        """The target, for whoever decodes with memories of its own."""
        return self._model

    def context(self, prompts: Sequence[Prompt], options: RunOptions) -> int:
        """Cells per sequence. Raises OptionError, and ContextFullError for too long a prompt."""
        if not prompts:
            raise OptionError("There is no prompt.", "Give at least one.")
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
        self, options: RunOptions, n_slots: int, n_ctx: int, n_rs_seq: int
    ) -> HybridMemory:
        """Memory for the target as the options ask for it."""
        return HybridMemory.for_model(
            self.config, n_slots, n_ctx, self._device, policy=options.rollback, n_rs_seq=n_rs_seq,
            unified=options.kv == "unified", faults=options.faults,
        )  # fmt: skip

    def begin_run(
        self, trace: TraceStore, options: RunOptions, memory: HybridMemory, n_rs_seq: int
    ) -> int:
        """Register a run with what is known of it before its first row."""
        return trace.begin_run({
            "options": asdict(options), "compute": self.compute, "model": self.identity,
            "architecture": self.config.architecture, "n_ctx": memory.attention.n_ctx,
            "n_rs_seq": n_rs_seq, "memory_bytes": memory.n_bytes(),
            "snapshot_bytes": memory.snapshot_bytes(), "weight_bytes": self._model.weight_bytes,
            "banned_tokens": sorted(self.tokenizer.eog_ids) if options.ignore_eos else [],
        })  # fmt: skip

    def snapshots(self, options: RunOptions, drafting: bool) -> int:
        """Snapshot planes beyond the live state that the options come to."""
        if options.rollback == "checkpoint" or not drafting:
            return 0
        return options.spec.n_max if options.n_rs_seq is None else options.n_rs_seq

    def make_drafters(self, options: RunOptions, n_slots: int, n_ctx: int) -> list[Drafter]:
        """The drafters that the options name, in order of priority. Raises OptionError."""
        drafters: list[Drafter] = []
        for name in _PRIORITY:
            if name not in options.spec.types:
                continue
            if name == "draft-simple":
                if self._draft_model is None:
                    raise OptionError(
                        "draft-simple needs a draft model.", "Give one with -md or open one."
                    )
                config = self._draft_model.config
                memory = HybridMemory.for_model(
                    config, n_slots, n_ctx, self._device, policy="ring",
                    n_rs_seq=options.spec.n_max,
                )  # fmt: skip
                drafters.append(
                    DraftSimple(self._draft_model, memory, options.n_ubatch, options.spec)
                )
            else:
                if self._model.head is None:
                    raise OptionError(
                        f"draft-mtp needs an MTP head, and {self.info.name} has none.",
                        "Choose draft-simple with a draft model, or a file with nextn tensors.",
                    )
                memory = HybridMemory.for_head(self.config, n_slots, n_ctx, self._device)
                drafters.append(
                    DraftMtp(
                        self._model.head, memory, self.config.n_embd, options.n_ubatch, options.spec
                    )
                )
        return drafters

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise OptionError("The prompt is empty.", "Give at least one token of text.")
        for token in tokens:
            if not 0 <= token < self.config.n_vocab:
                raise OptionError(
                    f"Token id {token} is outside the vocabulary of {self.config.n_vocab}.",
                    "Use ids of this model; `draftscope tokenize` prints them.",
                )


class Run:
    """One run: `step` until it returns False; everything that happened is in `trace`."""

    def __init__(
        self, run_id: int, trace: TraceStore, scheduler: Scheduler, tokenizer: Tokenizer
    ) -> None:
        self.run_id, self.trace = run_id, trace
        self.done = False
        self._scheduler, self._tokenizer = scheduler, tokenizer

    def step(self) -> bool:
        """One scheduler round. True while more work remains; DraftscopeError ends the run."""
        if not self.done:
            try:
                self.done = not self._scheduler.step()
            except BaseException:
                self.stop()
                raise
            if self.done:
                self._close()
        return not self.done

    def stop(self) -> None:
        """End the run now; what was recorded stays."""
        if not self.done:
            self._scheduler.stop()
            self.done = True
            self._close()

    def results(self) -> list[SequenceResult]:
        """What each prompt was continued with, so far."""
        return [
            SequenceResult(
                slot.seq_id, list(slot.prompt.tokens), list(slot.emitted),
                self._tokenizer.decode(slot.emitted), slot.stop,
                timings(self.trace, self.run_id, slot.seq_id),
            )
            for slot in self._scheduler.sequences
        ]  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Figures over all sequences (engine.trace.timings)."""
        return summary(self.trace, self.run_id)

    def _close(self) -> None:
        record_findings(self.trace, [self.run_id])
        self.trace.runs[self.run_id]["summary"] = self.summary()
        self.trace.runs[self.run_id]["stops"] = [s.stop for s in self._scheduler.sequences]


def _part(progress: Progress | None, start: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, _, phase: progress(start + done, total, phase)
