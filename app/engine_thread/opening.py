"""Local engine: models and comparisons in this process; the first import of torch is here."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine_thread.events import (
    Decoding,
    DraftFile,
    OpenedFiles,
    OpenRequest,
    RunRequest,
    TurnRequest,
)
from engine.errors import OptionError
from engine.fork import check_model, prompts_of
from engine.long_work import ReportProgress
from engine.options import Prompt
from engine.trace.store import TraceStore
from resources import ROLLBACK_SCRIPTS

if TYPE_CHECKING:
    from engine.compare.comparison import Comparison
    from engine.compare.memory_player import MemoryPlay
    from engine.compare.memory_script import MemoryScript
    from engine.compare.rollback_check import RollbackChecks
    from engine.conversation.conversation import Conversation, TurnRun
    from engine.decode.held_sequences import PromptCache
    from engine.machine.device import DeviceMemory
    from engine.options.llama_cpp import GateOptions
    from engine.run import Run
    from engine.session import Session


def inspect_files(request: OpenRequest) -> OpenedFiles:
    """Read the metadata of the files, without tensor data and without torch. The last of several
    files for one drafter counts."""
    from engine.gguf.file import GgufFile
    from engine.model.drafters.config import describe_draft
    from engine.model.info import describe
    from engine.model.tensors import DRAFT_MTP

    cancelled = request.cancelled.is_set
    drafts: dict[str, DraftFile] = {}
    with GgufFile.open(request.target, cancelled) as file:
        identity = file.identity()
        has_chat = bool(file.str_("tokenizer.chat_template", ""))
        for path in request.drafts:
            with GgufFile.open(path, cancelled) as draft:
                drafter, draft_info = describe_draft(draft)
            drafts[drafter] = (path, drafter, draft_info)
        info = describe(file, has_mtp_file=DRAFT_MTP in drafts)
    return OpenedFiles(request.target, tuple(drafts.values()), info, identity, has_chat)


def open_engine(request: OpenRequest, progress: ReportProgress) -> Session:
    """`Session.open`, with the threads that suit the model; the current ones stay if opening
    fails."""
    first = "torch" not in sys.modules
    progress(0, 1, "starting torch")

    from engine.session import Session
    from engine.threads import choose_threads, temporary_threads

    if first:
        gc.freeze()  # 170,000 permanent objects: a full collection then takes 5 instead of 130 ms
    with temporary_threads():
        session = Session.open(
            request.target,
            request.drafts,
            compute=request.compute,
            device=request.device,
            mmap=request.mmap,
            progress=progress,
            cancelled=request.cancelled.is_set,
            options=request.options,
        )
    choose_threads(None, session.info, session.model)
    return session


def devices() -> dict[str, str]:
    """See engine.machine.device.cuda_devices; empty until torch is imported."""
    if "torch" not in sys.modules:
        return {}
    from engine.machine.device import cuda_devices

    return cuda_devices()


class LocalEngine:
    """Models in this process, computed with torch."""

    def __init__(self) -> None:
        self._identity: dict[str, Any] = {}
        self._drafts: tuple[Path, ...] = ()

    def inspect(self, request: OpenRequest) -> OpenedFiles:
        found = inspect_files(request)
        self._identity, self._drafts = found.identity, tuple(path for path, *_ in found.drafts)
        return found

    def open(self, request: OpenRequest, progress: ReportProgress) -> LocalSession:
        session = open_engine(replace(request, drafts=self._drafts), progress)
        if session.content is not None:
            session.content.tell(self._identity)
        return LocalSession(session, request.target)


class LocalSession:
    """An engine's Session as the window uses it. target: the file it was opened from."""

    def __init__(self, session: Session, target: Path) -> None:
        from engine.run_checkpoints import RunCheckpoints

        self.engine_session, self.target = session, target
        self._cache: PromptCache | None = None
        self._checkpoints = RunCheckpoints()
        self._held: dict[tuple[int, int, str], Conversation] = {}
        """Conversations by trace, number and prompt formatting."""

    @property
    def compute(self) -> str:
        return self.engine_session.compute

    @property
    def memory(self) -> DeviceMemory | None:
        """See engine.machine.device.device_memory; if threads were chosen by a trial, the name
        includes them."""
        from engine.machine.device import device_memory
        from engine.threads import chosen_by

        memory, chosen = device_memory(self.engine_session.device), chosen_by()
        if memory is None or not chosen:
            return memory
        return memory._replace(name=f"{memory.name} · threads: {chosen}")

    def has(self, target: Path) -> bool:
        """Whether it is of this file in its current version."""
        return self.target == target and not self.engine_session.files.changed

    def start(self, request: RunRequest, trace: TraceStore) -> Decoding:
        """Start a run, one sequence per text."""
        from engine.audit.run_audit import audit_of, note_why_not

        options, fork = request.options, request.fork
        if fork is not None:
            opened = self.engine_session
            fork.check_model(opened.identity, opened.compute, opened.content)
            prompts, kept = fork.prompts(), self._checkpoints
            return self.engine_session.start(prompts, options, trace, fork=fork, checkpoints=kept)
        prompts = self._prompts(request)
        audit = audit_of(self.engine_session, prompts, options, asked=None, in_background=True)
        kept = self._checkpoints
        run = self.engine_session.start(prompts, options, trace, audit=audit, checkpoints=kept)
        note_why_not(trace.runs[run.run_id], prompts, options)
        self._learn_content(run)
        return run

    def say(self, request: TurnRequest, trace: TraceStore) -> Decoding:
        """Start a turn; all conversations share the prompt cache, as on a server."""
        from engine.audit.run_audit import audit_of, note_why_not
        from engine.conversation.conversation import Conversation, Rendering
        from engine.decode.held_sequences import PromptCache

        if self._cache is None or self._cache.options != request.cache:
            self._cache = PromptCache(request.cache)
            self._held.clear()
        values = request.chat
        rendering = Rendering(
            self.engine_session, is_chat=values is not None, template_values=values
        )
        how = repr(values)
        key = id(trace), -1 if request.conversation is None else request.conversation, how
        held = self._held.get(key)
        if held is None:
            held = Conversation(
                self.engine_session, trace, rendering, self._cache, request.conversation
            )
        message = {"role": "user", "content": request.text}
        audit = partial(
            audit_of, self.engine_session, asked=None, can_repeat=False, in_background=True
        )
        turn = held.start([*request.before, message], request.parent, request.options, audit=audit)
        note_why_not(trace.runs[turn.run_id], [turn.prompt], request.options)
        self._held[id(trace), held.number, how] = held
        self._learn_content(turn)
        return turn

    def play(self, script: MemoryScript, policy: str, trace: TraceStore) -> Decoding:
        """Start a memory script."""
        from engine.compare.memory_engine import play_script

        first = len(trace.runs)
        return DecodingLanes(play_script(self.engine_session, script, policy, trace), first)

    def check_rollback(
        self, library: Path | None, gates: tuple[GateOptions, ...], trace: TraceStore
    ) -> Decoding:
        """Start the checks of a llama.cpp build."""
        from engine.compare.memory_script_parser import memory_scripts
        from engine.compare.rollback_check import RollbackChecks

        first, scripts = len(trace.runs), memory_scripts(ROLLBACK_SCRIPTS)
        checks = RollbackChecks(self.engine_session, scripts, library, trace, gates)
        return DecodingLanes(checks, first)

    def compare(self, request: RunRequest, trace: TraceStore) -> Decoding:
        """Start a comparison on the prompts, as many in parallel as the options allow."""
        from engine.compare.comparison import Comparison

        first = len(trace.runs)
        comparison = Comparison(
            self.engine_session,
            self._prompts(request),
            request.options,
            request.lanes,
            trace,
            draft_accept=request.draft_accept or None,
            llama_library=request.llama_library,
        )
        self._learn_content(comparison)
        return DecodingLanes(comparison, first)

    def close(self) -> None:
        if self.engine_session.content is not None:
            self.engine_session.content.cancel()
        self._held.clear()
        self._cache = None
        del self.engine_session

    def _learn_content(self, decoding: Run | Comparison | TurnRun) -> None:
        """Hash the tensors during the run, but not before its first token."""
        if self.engine_session.content is not None:
            self.engine_session.content.start(lambda: decoding.done or any(decoding.emitted))

    def _prompts(self, request: RunRequest) -> list[Prompt]:
        if request.of is not None:
            check_model(request.of, self.engine_session.identity, self.engine_session.content)
            return prompts_of(request.of)
        remedy = "Switch the chat template off."
        make = self.engine_session.message_prompt
        return [make(text, request.chat, remedy) for text in request.texts]


class DecodingLanes:
    """A comparison, or a script, in progress. run_id: its reference lane."""

    def __init__(self, comparison: Comparison | MemoryPlay | RollbackChecks, run_id: int) -> None:
        self._comparison, self.run_id = comparison, run_id

    def step(self) -> bool:
        return self._comparison.step()

    def advance(self) -> bool:
        """Like `step`: a round of all lanes takes long enough."""
        return self._comparison.step()

    def cancel(self, seq_id: int) -> None:
        """Always refused with OptionError: lanes are compared token by token."""
        raise OptionError(
            f"Sequence {seq_id} of a comparison cannot be ended by itself.",
            "Stop the comparison (Shift+F5).",
        )

    def stop(self) -> None:
        self._comparison.stop()
