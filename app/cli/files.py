"""Model files: checked before torch is imported, so that a wrong one is refused at once, then
loaded."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.common import loading_line
from engine.draft.draft_files import check_draft
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.model.info import describe

if TYPE_CHECKING:
    from engine.session import Session


def check_files(target: Path, drafts: Sequence[Path] = ()) -> None:
    """Refuse files that cannot be used at once, before torch takes its time to be imported.

    Raises what Session.open would: ModelFileError, UnsupportedModelError,
    VocabularyMismatchError.
    """
    with GgufFile.open(target) as file:
        describe(file)
        tokenizer = Tokenizer.from_gguf(file) if drafts else None
        for path in drafts:
            with GgufFile.open(path) as draft:
                assert tokenizer is not None
                check_draft(file, tokenizer, draft)


def open_session(args: argparse.Namespace, target: Path, drafts: Sequence[Path] = ()) -> Session:
    """Load model files as --compute, --device and --threads say, with progress on a terminal.

    Raises what Session.open does.
    """
    check_files(target, drafts)
    from engine.model.threads import use_threads
    from engine.session import Session

    gc.freeze()  # the modules stay: a full collection takes 5 instead of 130 ms of a run
    session = Session.open(
        target,
        drafts,
        compute=args.compute,
        device=args.device,
        mmap=args.mmap,
        progress=loading_line(),
    )
    use_threads(args.threads, session.info)
    return session
