"""`draftscope` without a subcommand: the window; and its desktop entry, icon and GGUF file type on
a Linux desktop (XDG base directories, desktop entry, shared MIME-info)."""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from app.cli.option_lines import declare
from app.cli.output import print_line
from app.cli.parser import SUBCOMMANDS, unknown_command
from engine.errors import DraftscopeError, OptionError
from engine.files import file_head, write_text
from engine.trace.export import SESSION_FILE
from engine.trace.reopen import find_trace
from resources import DESKTOP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Inspect speculative decoding on hybrid recurrent models. No subcommand: the window."
    )
    subcommands = "\n".join(f"  {name:<14} {summary}" for name, summary in SUBCOMMANDS.items())
    declare(parser, __name__, subcommands=subcommands)


def run(args: argparse.Namespace) -> int:
    if args.install_desktop or args.remove_desktop:
        return install_desktop() if args.install_desktop else remove_desktop()
    models = [*args.models, *([args.model_option] if args.model_option else [])]
    traces = _traces(models)
    models = [path for path in models if path not in traces]
    for path in models:
        if not path.is_file():
            raise OptionError(
                f"{path} is neither a file nor a subcommand.", unknown_command(str(path))
            )
    for path in args.spec_draft_model or []:
        if not path.is_file():
            raise OptionError(f"-md {path} is not a file.", "Check the path, or leave -md out.")
    if models and args.demo:
        raise OptionError("Both a model and --demo are given.", "Use one of them.")
    check_display()
    from app.window.gui import run_window

    return run_window(
        models, args.spec_draft_model or [], args.demo, list(dict.fromkeys(traces.values()))
    )


def _traces(paths: list[Path]) -> dict[Path, Path]:
    """Arguments that are not models: folders of exported traces, and files of other engines."""
    traces = {path: folder for path in paths if (folder := find_trace(path)) is not None}
    others = [path for path in paths if path not in traces and path.suffix.lower() != ".gguf"]
    for path in filter(Path.is_dir, others):
        raise OptionError(
            f"{path} is not an exported trace: {SESSION_FILE} is missing.",
            "Name the folder that an export wrote.",
        )
    if others := list(filter(Path.is_file, others)):
        from engine.observe.files.importing import recognise_file

        # readers look further into a text than recognition does, as for a browser's recording
        traces |= {p: p for p in others if b"\0" not in file_head(p, 64) or recognise_file(p)}
    return traces


QT_PACKAGES = (
    "libegl1 libgl1 libglib2.0-0 libdbus-1-3 libfontconfig1 libfreetype6 libxkbcommon0 "
    "libxkbcommon-x11-0 libx11-6 libx11-xcb1 libxcb-cursor0 libxcb-icccm4 libxcb-image0 "
    "libxcb-keysyms1 libxcb-randr0 libxcb-render0 libxcb-render-util0 libxcb-shape0 libxcb-shm0 "
    "libxcb-sync1 libxcb-util1 libxcb-xfixes0 libxcb-xkb1 libwayland-client0 libwayland-cursor0 "
    "fonts-dejavu-core"
)
"""Packages that Qt needs beyond a minimal Debian or Ubuntu, with a font."""

_INSTALL = f"On Debian or Ubuntu: apt-get install {QT_PACKAGES}"
_HEADLESS = "Use a desktop session, or a subcommand (see draftscope --help)."


def check_display() -> None:
    """Raises DraftscopeError naming what is missing: PySide6, a system library, a display."""
    try:
        pyside = import_module("PySide6")
        import_module("PySide6.QtWidgets")
    except ModuleNotFoundError as error:
        raise DraftscopeError(
            f"The Python package {error.name} is missing.", "Install Draftscope again with pip."
        ) from error
    except ImportError as error:
        raise DraftscopeError(
            f"Qt cannot load a system library ({_first_line(error)}).", _INSTALL
        ) from error
    if sys.platform.startswith("linux"):
        _check_platform(Path(str(pyside.__file__)).parent / "Qt" / "plugins" / "platforms")


def _check_platform(plugins: Path) -> None:
    names = _platforms()
    if not names:
        raise DraftscopeError(
            "There is no display: neither DISPLAY nor WAYLAND_DISPLAY is set.", _HEADLESS
        )
    problems = []
    for name in names:
        plugin = plugins / f"libq{name}.so"
        try:
            if plugin.exists():
                ctypes.CDLL(str(plugin))
        except OSError as error:
            problems.append(
                DraftscopeError(
                    f"Qt cannot load a system library for {name} ({_first_line(error)}).", _INSTALL
                )
            )
            continue
        if _answers(name):
            return
        problems.append(DraftscopeError(f"No {name} display server answers.", _HEADLESS))
    raise problems[0]


def _platforms() -> list[str]:
    """Qt platform plugins requested by the environment, in order."""
    chosen = os.environ.get("QT_QPA_PLATFORM", "")
    if chosen:
        return [name.split(":")[0].split("-")[0] for name in chosen.split(";")]
    displays = {"wayland": "WAYLAND_DISPLAY", "xcb": "DISPLAY"}
    return [name for name, variable in displays.items() if os.environ.get(variable)]


def _answers(platform: str) -> bool:
    """Whether a display server can be reached; Qt aborts the process if not."""
    pointer = ctypes.c_void_p
    if platform == "xcb":
        xcb = ctypes.CDLL("libxcb.so.1")
        xcb.xcb_connect.restype = pointer
        xcb.xcb_connect.argtypes = [ctypes.c_char_p, pointer]
        xcb.xcb_connection_has_error.argtypes = [pointer]
        xcb.xcb_disconnect.argtypes = [pointer]
        connection = xcb.xcb_connect(None, None)
        failed = xcb.xcb_connection_has_error(connection)
        xcb.xcb_disconnect(connection)
        return not failed
    if platform == "wayland":
        folder = os.environ.get("XDG_RUNTIME_DIR", "")  # without it the library itself complains
        if not os.path.isabs(os.path.join(folder, os.environ.get("WAYLAND_DISPLAY", ""))):
            return False
        wayland = ctypes.CDLL("libwayland-client.so.0")
        wayland.wl_display_connect.restype = pointer
        wayland.wl_display_disconnect.argtypes = [pointer]
        display = wayland.wl_display_connect(None)
        if display:
            wayland.wl_display_disconnect(display)
        return bool(display)
    return True


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


NAME = "draftscope"
MIME_TYPE = "application/x-gguf"
_RESERVED = set(" \t\n\"'\\><~|&;$*?#()`")


def install_desktop() -> int:
    """Write the entry, the icon and the type, and print their paths; exit status 0. Raises
    OptionError on a system without such desktops, OSError if the folder is not writable."""
    words = {"command": _command(), "name": NAME, "mime_type": MIME_TYPE}
    for source, path in _places().items():
        text = (DESKTOP / source).read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text if source.endswith(".svg") else text.format(**words))
        print_line(f"written: {path}")
    _tell_desktop()
    return 0


def remove_desktop() -> int:
    """Remove what `install_desktop` wrote; exit status 0, also if there is nothing."""
    for path in _places().values():
        if path.exists():
            path.unlink()
            print_line(f"removed: {path}")
    _tell_desktop()
    return 0


def _data_home() -> Path:
    """$XDG_DATA_HOME; a relative one is ignored, as in the standard."""
    given = os.environ.get("XDG_DATA_HOME", "")
    return Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "share"


def _places() -> dict[str, Path]:
    """Target path of each file of resources/desktop."""
    if not sys.platform.startswith("linux"):
        raise OptionError(
            "Desktop entries exist only on Linux.", "Start Draftscope with the command draftscope."
        )
    home = _data_home()
    return {
        f"{NAME}.desktop": home / "applications" / f"{NAME}.desktop",
        f"{NAME}-mime.xml": home / "mime" / "packages" / f"{NAME}.xml",
        f"{NAME}.svg": home / "icons" / "hicolor" / "scalable" / "apps" / f"{NAME}.svg",
    }


def _command() -> str:
    """The command that starts this installation from a desktop."""
    script = Path(sys.executable).with_name(NAME)
    words = [str(script)] if script.is_file() else [sys.executable, "-m", "app"]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word for the key Exec: quoted if necessary, with doubled percent signs."""
    if _RESERVED & set(word):
        inner = "".join(f"\\{sign}" if sign in '"`$\\' else sign for sign in word)
        word = '"' + inner.replace("\\", "\\\\") + '"'
    return word.replace("%", "%%")


def _tell_desktop() -> None:
    """Rebuild the desktop's caches if its tools are installed; otherwise desktops notice
    eventually."""
    kinds = {"update-mime-database": "mime", "update-desktop-database": "applications"}
    for tool, kind in kinds.items():
        folder = _data_home() / kind
        if shutil.which(tool) and folder.is_dir():
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([tool, str(folder)], capture_output=True, timeout=30, check=False)
