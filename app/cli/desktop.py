"""The program among the applications of a Linux desktop: menu entry, icon, and the type of GGUF
files, in the user's own data folder (XDG base directories, desktop entry, shared MIME-info).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from app.cli.output import print_line
from engine.errors import OptionError
from engine.files import written_whole
from resources import DESKTOP

NAME = "draftscope"
MIME_TYPE = "application/x-gguf"
_ENTRY = """[Desktop Entry]
Type=Application
Version=1.0
Name=Draftscope
GenericName=Speculative decoding workbench
Comment=Watch speculative decoding on hybrid recurrent language models
Exec={command} %F
Icon={name}
Terminal=false
Categories=Development;Science;
MimeType={mime_type};
StartupWMClass={name}
"""
_MIME = """<?xml version="1.0" encoding="UTF-8"?>
<mime-info xmlns="http://www.freedesktop.org/standards/shared-mime-info">
  <mime-type type="{mime_type}">
    <comment>GGUF model</comment>
    <icon name="{name}"/>
    <magic priority="60"><match type="string" offset="0" value="GGUF"/></magic>
    <glob pattern="*.gguf"/>
  </mime-type>
</mime-info>
"""
_RESERVED = set(" \t\n\"'\\><~|&;$*?#()`")


def install() -> int:
    """Write the entry, the icon and the type, and name them; exit status 0. Raises OptionError on
    a system without such desktops, OSError where the folder takes no files."""
    contents = {
        "applications": _ENTRY.format(command=_command(), name=NAME, mime_type=MIME_TYPE),
        "mime": _MIME.format(name=NAME, mime_type=MIME_TYPE),
        "icons": (DESKTOP / f"{NAME}.svg").read_text(encoding="utf-8"),
    }
    for kind, path in _places().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as part:
            part.write_text(contents[kind], encoding="utf-8")
        print_line(f"written: {path}")
    _tell_desktop()
    return 0


def remove() -> int:
    """Remove what `install` wrote; exit status 0, also where nothing is left of it."""
    for path in _places().values():
        if path.exists():
            path.unlink()
            print_line(f"removed: {path}")
    _tell_desktop()
    return 0


def _data_home() -> Path:
    """$XDG_DATA_HOME; a relative one counts for nothing, as the standard has it."""
    given = os.environ.get("XDG_DATA_HOME", "")
    return Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "share"


def _places() -> dict[str, Path]:
    if not sys.platform.startswith("linux"):
        raise OptionError(
            "Desktop entries are for Linux.", "Start Draftscope by its command, draftscope."
        )
    home = _data_home()
    return {
        "applications": home / "applications" / f"{NAME}.desktop",
        "mime": home / "mime" / "packages" / f"{NAME}.xml",
        "icons": home / "icons" / "hicolor" / "scalable" / "apps" / f"{NAME}.svg",
    }


def _command() -> str:
    """How a desktop starts this very installation."""
    script = Path(sys.executable).with_name(NAME)
    words = [str(script)] if script.is_file() else [sys.executable, "-m", "app"]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word as the key Exec wants it: quoted where it has to be, its percent signs doubled."""
    if _RESERVED & set(word):
        inner = "".join(f"\\{sign}" if sign in '"`$\\' else sign for sign in word)
        word = '"' + inner.replace("\\", "\\\\") + '"'
    return word.replace("%", "%%")


def _tell_desktop() -> None:
    """Have its caches made again where the tools for that are there; without, desktops look for
    themselves sooner or later."""
    for tool, folder in _caches():
        if shutil.which(tool) and folder.is_dir():
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([tool, str(folder)], capture_output=True, timeout=30, check=False)


def _caches() -> Iterator[tuple[str, Path]]:
    home = _data_home()
    yield "update-mime-database", home / "mime"
    yield "update-desktop-database", home / "applications"
