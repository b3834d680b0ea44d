"""Shared steps of subcommands: loading model files, connecting to servers."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from app.cli.output import is_terminal, note, show_below, show_progress
from engine.errors import ApiKeyError, OptionError
from engine.long_work import ReportProgress, collections_wait
from engine.model.compute_modes import copies_blocks
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET

if TYPE_CHECKING:
    from engine.gguf.file import GgufFile
    from engine.observe.rounds.observed_run import ServerFacts
    from engine.observe.server.client import ServerClient
    from engine.observe.server.reply import TimeLimits
    from engine.options import RunOptions
    from engine.session import Session


def target_path(args: argparse.Namespace) -> Path:
    """The single model given. Raises OptionError for none or several."""
    named = [path for path in (args.model, args.model_option) if path is not None]
    if args.demo:
        named.append(DEMO_TARGET)
    if not named:
        raise OptionError("No model is given.", "Name a GGUF file, or use --demo.")
    if len(named) > 1:
        raise OptionError(
            f"More than one model is given: {', '.join(map(str, named))}.",
            "Name one GGUF file, or use --demo alone.",
        )
    return Path(named[0])


def drafts_by_mtp(types: Sequence[str]) -> bool:
    """Whether these drafters use the MTP block of a whole model given with -md."""
    return "draft-mtp" in types and "draft-simple" not in types


def draft_paths(args: argparse.Namespace) -> dict[str, Path]:
    """Drafter files by drafter: those of -md, else with --demo the bundled ones. Raises like
    engine.draft.draft_files.drafters_of."""
    if args.spec_draft_model is None and args.demo:
        return {"draft-simple": DEMO_DRAFT, "draft-eagle3": DEMO_EAGLE3}
    from engine.draft.draft_files import drafters_of

    return drafters_of(args.spec_draft_model or [])


def loading_line() -> ReportProgress | None:
    """A progress callback that keeps one line on a terminal up to date; None elsewhere."""
    if not is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        return None
    shown = -1

    def progress(done: int, total: int, phase: str) -> None:
        nonlocal shown
        percent = 100 * done // max(1, total)
        if percent != shown:
            shown = percent
            show_progress(f"{percent:3} % {phase}" if done < total else "")

    return progress


def check_files(
    target: Path, drafts: Sequence[Path] = (), *, by_mtp: bool = False
) -> tuple[GgufFile, list[GgufFile]]:
    """Refuse unusable files at once, before torch is imported. by_mtp: see check_draft. The files
    stay open while referenced.

    Raises like Session.open: ModelFileError, UnsupportedModelError, VocabularyMismatchError.
    """
    from engine.draft.draft_files import check_draft
    from engine.gguf.file import GgufFile
    from engine.gguf.tokenizer import Tokenizer
    from engine.model.info import describe

    with ExitStack() as opened:
        file = opened.enter_context(GgufFile.open(target))
        describe(file)
        tokenizer = Tokenizer.from_gguf(file) if drafts else None
        others = [opened.enter_context(GgufFile.open(path)) for path in drafts]
        for draft in others:
            assert tokenizer is not None
            check_draft(file, tokenizer, draft, by_mtp=by_mtp)
        opened.pop_all()
    return file, others


_YOUNG = 20_000
"""New objects before a collection of the youngest generation: some 1,000 rounds."""


def open_session(
    args: argparse.Namespace,
    target: Path,
    drafts: Sequence[Path] = (),
    options: RunOptions | None = None,
) -> Session:
    """Load model files according to --compute, --device and --threads, with progress on a terminal.
    options: see Session.open.

    Raises like Session.open.
    """
    by_mtp = drafts_by_mtp(getattr(args, "spec_type", None) or ())
    with collections_wait():
        files = check_files(target, drafts, by_mtp=by_mtp)
        if copies_blocks(args.compute, args.device, args.mmap, files[0].n_bytes):
            files[0].read_ahead()  # in the background
        from engine.session import Session
        from engine.threads import choose_threads

        gc.freeze()  # modules stay: a full collection then takes 5 instead of 130 ms of a run
        # rounds have no cycles and are freed once written; scanning the pending ones takes a
        # twentieth of a small model's time
        gc.set_threshold(_YOUNG)
        session = Session.open(
            *files,
            compute=args.compute,
            device=args.device,
            mmap=args.mmap,
            drafts_by_mtp=by_mtp,
            progress=loading_line(),
            options=options,
        )
    choose_threads(args.threads, session.info, session.model)
    if said := session.info.note_on_context(getattr(args, "ctx_size", None) or 0):
        note(said)
    return session


_FIRST_LINE_S = 4.0
"""Seconds until a wait is first reported where lines cannot be replaced, doubled each time."""


def api_key(variable: str | None) -> str:
    """The value of an environment variable, empty for none. Raises OptionError."""
    if variable is None:
        return ""
    if not (key := os.environ.get(variable)):
        raise OptionError(f"The variable {variable[:80]} is not set.", "Set it to the API key.")
    return key


def connect(
    url: str, key_env: str | None, limits: TimeLimits, model: str = ""
) -> tuple[ServerClient, ServerFacts]:
    """The client, and the server's description of itself once it has loaded its model. key_env: the
    variable with the API key, None for the keyring's. model: one of the server's models, empty if
    there is no choice. Raises OptionError and ServerError."""
    from engine.observe.server.address import stored_key
    from engine.observe.server.client import ServerClient

    key = api_key(key_env) or None
    line = _WaitingLine()
    client = ServerClient(url, key, limits, line.show, model)
    try:
        try:
            return client, client.facts()
        except ApiKeyError:
            client.close()
            key = None if key_env is not None else stored_key(client.address)
            if key is None:
                raise
            client = ServerClient(url, key, limits, line.show, model)
            return client, client.facts()
    except BaseException:
        client.close()
        raise
    finally:
        line.show("")


class _WaitingLine:
    """Progress of a wait for a server: on a terminal a counting line below the output, elsewhere a
    line from time to time."""

    def __init__(self) -> None:
        self._what, self._since, self._again_s = "", 0.0, 0.0
        self._shown = ""

    def show(self, sentence: str) -> None:
        """Replace the last sentence; an empty one removes it."""
        if is_terminal(sys.stderr):
            if sentence != self._shown:
                self._shown = sentence
                show_below(sentence)
            return
        counted = sentence.rpartition(", ")[0]
        if (counted or sentence) != self._what:
            self._what, self._since = counted or sentence, perf_counter()
            self._again_s = _FIRST_LINE_S if counted else 0.0
        if sentence and perf_counter() - self._since >= self._again_s:
            self._again_s = max(2 * self._again_s, _FIRST_LINE_S)
            note(sentence)
