"""`draftscope` without a subcommand: the window."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli import desktop
from app.cli.common import SUBCOMMANDS
from app.cli.display import check_display
from engine.errors import OptionError
from engine.trace.export import SESSION_FILE
from engine.trace.reopen import find_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The window's options, and the list of subcommands for --help."""
    parser.description = (
        "Watch speculative decoding on hybrid recurrent models. Without a subcommand: the window."
    )
    parser.usage = (
        "draftscope [MODEL.gguf] [-md DRAFT.gguf …] [--demo]\n"
        "       draftscope TRACE_DIR\n       draftscope SUBCOMMAND …"
    )
    parser.epilog = "\n".join(
        [
            "subcommands (draftscope SUBCOMMAND --help):",
            *(f"  {name:<14} {summary}" for name, summary in SUBCOMMANDS.items()),
        ]
    )
    parser.add_argument(
        "models",
        metavar="MODEL.gguf|TRACE_DIR",
        nargs="*",
        type=Path,
        help="model to open, of a multi-part model the first part; or the folder of an "
        "exported trace, or a capture, log or record of another engine, which take no model",
    )
    parser.add_argument(
        "-m",
        "--model",
        dest="model_option",
        metavar="FILE",
        type=Path,
        help="the same as MODEL.gguf",
    )
    parser.add_argument(
        "-md",
        "--spec-draft-model",
        metavar="FILE",
        type=Path,
        action="append",
        help="model that drafts for it, or a drafter that reads its layers; repeatable",
    )
    parser.add_argument(
        "--demo", action="store_true", help="open the bundled models with a prompt ready"
    )
    entry = parser.add_mutually_exclusive_group()
    entry.add_argument(
        "--install-desktop",
        action="store_true",
        help="put Draftscope into the applications of this desktop, for .gguf files too, and end",
    )
    entry.add_argument(
        "--remove-desktop", action="store_true", help="take it out of them again, and end"
    )


def run(args: argparse.Namespace) -> int:
    """Open the window and stay until it is closed."""
    if args.install_desktop or args.remove_desktop:
        return desktop.install() if args.install_desktop else desktop.remove()
    models = [*args.models, *([args.model_option] if args.model_option else [])]
    trace = _trace(models)
    if trace is not None:
        models = []
        if args.demo or args.spec_draft_model:
            raise OptionError("Both a trace and a model are given.", "Use one of them.")
    for path in (*models, *(args.spec_draft_model or [])):
        if not path.is_file():
            raise OptionError(
                f"{path} is neither a file nor a subcommand.",
                f"Name a GGUF file or one of {', '.join(SUBCOMMANDS)}.",
            )
    if models and args.demo:
        raise OptionError("Both a model and --demo are given.", "Use one of them.")
    check_display()
    from app.window.gui import run_window

    return run_window(models, args.spec_draft_model or [], args.demo, trace)


def _trace(paths: list[Path]) -> Path | None:
    """The folder of the trace among the arguments, or what another engine wrote; None when they
    are models."""
    folders = [path for path in paths if path.is_dir()]
    traces = [folder for path in paths if (folder := find_trace(path)) is not None]
    others = [path for path in paths if path.is_file() and path.suffix.lower() != ".gguf"]
    if others and not traces:
        from engine.observe.files.importing import recognise_file

        traces = [path for path in others if recognise_file(path)]
    if folders and not traces:
        raise OptionError(
            f"{folders[0]} is no exported trace: {SESSION_FILE} is missing.",
            "Name the folder that an export wrote.",
        )
    if traces and len(paths) > 1:
        raise OptionError("A trace opens alone.", "Name one trace, or models.")
    return traces[0] if traces else None
