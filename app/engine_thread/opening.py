"""How the engine's thread gets at models and comparisons; torch is first imported here."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app.engine_thread.events import ModelFiles
from app.engine_thread.jobs import CompareRequest, Job, OpenRequest, ScriptRequest, make_prompt
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.session import Session


def inspect_files(request: OpenRequest) -> ModelFiles:
    """Read the metadata of the files; no tensor data is touched and torch is not imported."""
    from engine.gguf.file import GgufFile
    from engine.model.info import describe

    cancelled = request.cancelled.is_set
    with GgufFile.open(request.target, cancelled) as file:
        info, identity = describe(file), file.identity()
    draft_info = None
    if request.draft is not None:
        with GgufFile.open(request.draft, cancelled) as file:
            draft_info = describe(file)
    return ModelFiles(request.target, request.draft, info, draft_info, identity)


def open_engine(
    target: Path,
    draft: Path | None,
    *,
    compute: str,
    progress: Callable[[int, int, str], None],
    cancelled: Callable[[], bool],
) -> Session:
    """`Session.open` on a CUDA device if there is one, and threads as the model needs them; those
    in use stay if it cannot be opened."""
    first = "torch" not in sys.modules
    progress(0, 1, "starting torch")

    from engine.model.threads import all_threads, use_threads
    from engine.session import Session

    if first:
        gc.freeze()  # 170,000 objects that stay: a full collection takes 5 instead of 130 ms
    with all_threads():
        session = Session.open(
            target, draft, compute=compute, device="auto", progress=progress, cancelled=cancelled
        )
    use_threads(None, session.info)
    return session


def open_comparison(
    session: Session, request: CompareRequest | ScriptRequest, trace: TraceStore
) -> Job:
    """A Comparison on the prompts, as many side by side as the options allow, or a script."""
    if isinstance(request, ScriptRequest):
        from engine.compare.memory_engine import play_script

        return play_script(session, request.script, request.policy, trace)
    from engine.compare.comparison import Comparison

    prompts = [make_prompt(session, text, request.chat) for text in request.texts]
    return Comparison(
        session,
        prompts,
        request.options,
        request.lanes,
        trace,
        draft_accept=request.draft_accept or None,
    )
