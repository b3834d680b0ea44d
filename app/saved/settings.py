"""What the window remembers between starts, a typed view of an INI file, and the folders of the
program's own files with the locks on them that end with their process."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from PySide6.QtCore import QByteArray, QLockFile, QSettings, QStandardPaths

from engine.errors import OptionError
from engine.files import written_whole

N_RECENT = 10
THEME_CHOICES = ("system", "light", "dark")
TEXT_ZOOMS = range(-4, 21)


class Settings:
    """Typed access with defaults; a value of the wrong kind in the file reads as its default.

    `note`: a sentence for the user about a file that could not be taken over, or takes nothing,
    mostly empty.
    """

    def __init__(self) -> None:
        self._store = QSettings(
            QSettings.Format.IniFormat, QSettings.Scope.UserScope, "Draftscope", "draftscope"
        )
        free_settings(Path(self._store.fileName()))
        self.note = bring_up_to_date(self._store)
        if not self._store.isWritable():
            self.note = self.note or f"{self._store.fileName()} cannot be written."

    # -- appearance ------------------------------------------------------------------------

    @property
    def theme(self) -> str:
        """One of THEME_CHOICES."""
        value = self._text("window/theme")
        return value if value in THEME_CHOICES else "system"

    @theme.setter
    def theme(self, value: str) -> None:
        self._store.setValue("window/theme", value)

    @property
    def ghosts(self) -> bool:
        """Whether rejected and ignored draft tokens are shown in the text."""
        return self._flag("view/ghosts", default=True)

    @ghosts.setter
    def ghosts(self, value: bool) -> None:
        self._store.setValue("view/ghosts", value)

    @property
    def tabs(self) -> bool:
        return self._flag("view/tabs", default=False)

    @tabs.setter
    def tabs(self, value: bool) -> None:
        self._store.setValue("view/tabs", value)

    @property
    def text_zoom(self) -> int:
        """Tenths by which the tokens are written larger, smaller below 0; one of TEXT_ZOOMS."""
        value = self._text("view/text_zoom")
        zoom = int(value) if re.fullmatch(r"-?\d{1,3}", value) else 0
        return zoom if zoom in TEXT_ZOOMS else 0

    @text_zoom.setter
    def text_zoom(self, value: int) -> None:
        self._store.setValue("view/text_zoom", str(value))

    @property
    def open_groups(self) -> list[str]:
        """Names of the groups of the Run panel that are unfolded."""
        return self._text("run/open_groups").split()

    @open_groups.setter
    def open_groups(self, names: list[str]) -> None:
        self._store.setValue("run/open_groups", " ".join(names))

    @property
    def pages(self) -> list[str]:
        return self._text("window/pages").split()

    @pages.setter
    def pages(self, names: list[str]) -> None:
        self._store.setValue("window/pages", " ".join(names))

    @property
    def run_form(self) -> dict[str, Any]:
        try:
            found = json.loads(self._text("run/form") or "{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @run_form.setter
    def run_form(self, entries: Mapping[str, Any]) -> None:
        self._store.setValue("run/form", json.dumps(entries))

    @property
    def llama_library(self) -> Path | None:
        """The build of llama.cpp for its lanes; None = an installed package."""
        name = self._text("compare/llama_library")
        return Path(name) if name else None

    @llama_library.setter
    def llama_library(self, folder: Path | None) -> None:
        self._store.setValue("compare/llama_library", "" if folder is None else str(folder))

    # -- break rules -----------------------------------------------------------------------

    @property
    def break_rules(self) -> list[tuple[str, bool]]:
        """Rules as text and whether each is in use, kept as lines that begin with + or -."""
        lines = self._text("run/break_rules").splitlines()
        return [(line[1:].strip(), line[0] == "+") for line in lines if line[:1] in ("+", "-")]

    @break_rules.setter
    def break_rules(self, entries: list[tuple[str, bool]]) -> None:
        lines = [f"{'+' if used else '-'} {text}" for text, used in entries]
        self._store.setValue("run/break_rules", "\n".join(lines))

    # -- layout ----------------------------------------------------------------------------

    @property
    def geometry(self) -> QByteArray:
        return self._bytes("window/geometry")

    @property
    def layout_name(self) -> str:
        """The layout in use last, empty before one was chosen."""
        return self._text("window/layout_name")

    def layout(self, name: str) -> QByteArray:
        """Where the docks of a named layout were left, empty before its first use."""
        return self._bytes(f"layouts/{name}")

    def set_layout(self, name: str, layout: QByteArray) -> None:
        """Keep the docks' places of a named layout, which is the one in use."""
        self._store.setValue("window/layout_name", name)
        self._store.setValue(f"layouts/{name}", layout)

    def set_geometry(self, geometry: QByteArray) -> None:
        """Keep the window's place."""
        self._store.setValue("window/geometry", geometry)

    # -- files -----------------------------------------------------------------------------

    @property
    def excel_safe(self) -> bool:
        """Whether the last export was the variant for spreadsheets."""
        return self._flag("export/excel_safe", default=False)

    @excel_safe.setter
    def excel_safe(self, value: bool) -> None:
        self._store.setValue("export/excel_safe", value)

    @property
    def recent_models(self) -> list[Path]:
        """Models opened last, the newest first; some may no longer exist."""
        return self._paths("files/recent_models")

    def add_recent_model(self, path: Path) -> None:
        self._add_path("files/recent_models", path)

    @property
    def recent_traces(self) -> list[Path]:
        """Folders of traces opened last, the newest first; some may no longer exist."""
        return self._paths("files/recent_traces")

    def add_recent_trace(self, folder: Path) -> None:
        self._add_path("files/recent_traces", folder)

    @property
    def recent_servers(self) -> list[str]:
        """Addresses connected to last, the newest first."""
        value = self._store.value("servers/recent")
        found = [value] if isinstance(value, str) else value
        known = found if isinstance(found, list) else []
        return [one for one in known if isinstance(one, str) and one][:N_RECENT]

    def add_recent_server(self, address: str) -> None:
        kept = [address, *(one for one in self.recent_servers if one != address)]
        self._store.setValue("servers/recent", kept[:N_RECENT])

    @property
    def watch_port(self) -> int:
        value = self._text("servers/watch_port")
        return (
            int(value) if value.isascii() and value.isdigit() and 0 < int(value) < 65536 else 8081
        )

    @watch_port.setter
    def watch_port(self, port: int) -> None:
        self._store.setValue("servers/watch_port", str(port))

    @property
    def server_timeout(self) -> int:
        """The time limit of a server's replies, seconds."""
        value = self._text("servers/timeout")
        is_one = value.isascii() and value.isdigit() and len(value) < 7 and int(value) > 0
        return int(value) if is_one else 600

    @server_timeout.setter
    def server_timeout(self, seconds: int) -> None:
        self._store.setValue("servers/timeout", str(seconds))

    def clear_recent(self) -> None:
        """Forget the models, traces and servers opened lately."""
        for key in ("files/recent_models", "files/recent_traces", "servers/recent"):
            self._store.remove(key)

    def folder(self, purpose: str) -> Path:
        """Where a file dialog of this purpose was last used; the home folder at first."""
        value = self._text(f"folders/{purpose}")
        return Path(value) if os.path.isdir(value) else Path.home()  # False for any bad name

    def set_folder(self, purpose: str, folder: Path) -> None:
        self._store.setValue(f"folders/{purpose}", str(folder.absolute()))

    # -- internals -------------------------------------------------------------------------

    def sync(self) -> None:
        self._store.sync()

    def _paths(self, key: str) -> list[Path]:
        value = self._store.value(key)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list):
            return []
        return [Path(name) for name in names if isinstance(name, str) and name][:N_RECENT]

    def _add_path(self, key: str, path: Path) -> None:
        path = path.absolute()
        kept = [path, *(p for p in self._paths(key) if p != path)][:N_RECENT]
        self._store.setValue(key, [str(p) for p in kept])

    def _text(self, key: str) -> str:
        value = self._store.value(key)
        return value if isinstance(value, str) else ""

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._store.value(key)
        return (
            value
            if isinstance(value, bool)
            else {"true": True, "false": False}.get(str(value), default)
        )

    def _bytes(self, key: str) -> QByteArray:
        value = self._store.value(key)
        return value if isinstance(value, QByteArray) else QByteArray()


_UNNAMED_S = 0.5
"""Naming itself takes a holder that lives much less, on a busy machine, too."""


def free_settings(settings: Path) -> None:
    """Remove the lock of a settings file if it is empty and stays so."""
    lock = settings.with_name(f"{settings.name}.lock")
    with suppress(OSError):
        found = lock.stat()
        if found.st_size:
            return
        time.sleep(min(_UNNAMED_S, max(0.0, _UNNAMED_S - (time.time() - found.st_mtime))))
        again = lock.stat()
        if not again.st_size and again.st_ino == found.st_ino:
            lock.unlink()


VERSION = 2
VERSION_KEY = "version"


def _named_layouts(store: QSettings) -> None:
    """1 to 2: one layout became three named ones, and the recent list takes traces too."""
    store.remove("window/layout")  # the docks of version 1 were others
    recent = store.value("files/recent")
    if recent is not None:
        store.setValue("files/recent_models", recent)
    store.remove("files/recent")


STEPS: dict[int, Callable[[QSettings], None]] = {1: _named_layouts}
"""What makes a file of version n one of version n + 1."""


def bring_up_to_date(store: QSettings) -> str:
    """Take the file to VERSION; a sentence for the user where that cannot be done, else empty.

    A file that is newer, or that names no version that ever was, is copied next to itself and
    replaced by an empty one: guessing at its meaning could spoil it for the program that wrote it.
    """
    if not store.allKeys() and store.status() is QSettings.Status.NoError:
        store.setValue(VERSION_KEY, VERSION)
        return ""
    version = _version(store)
    if version is None or version > VERSION or store.status() is not QSettings.Status.NoError:
        newer = version is not None and version > VERSION
        what = (
            f"were written by a newer Draftscope (format {version}, this one reads {VERSION})"
            if newer
            else "could not be read"
        )
        return _begin_anew(store, what, f"v{version}" if newer else "unreadable")
    for step in range(version, VERSION):
        STEPS[step](store)
    store.setValue(VERSION_KEY, VERSION)
    return ""


def _version(store: QSettings) -> int | None:
    try:
        version = int(str(store.value(VERSION_KEY)))
    except ValueError:
        return None
    return version if version > 0 else None


def _begin_anew(store: QSettings, what: str, suffix: str) -> str:
    path = Path(store.fileName())
    kept = path.with_suffix(f".{suffix}{path.suffix}")
    try:
        with written_whole(kept) as part:
            shutil.copyfile(path, part)
        where = f"They are kept as {kept}."
    except OptionError:
        where = f"They could not be copied next to {path}."
    store.clear()
    store.setValue(VERSION_KEY, VERSION)
    return f"The settings {what}, so defaults are used. {where}"


DATA_VARIABLE = "DRAFTSCOPE_DATA_DIR"
"""Environment variable that names another data folder."""

_PROBE_BYTES = 4096


def data_folder() -> Path:
    """For log, crash note and autosaved traces. It need not exist, nor be possible."""
    location = QStandardPaths.StandardLocation.AppLocalDataLocation
    return Path(os.environ.get(DATA_VARIABLE) or QStandardPaths.writableLocation(location))


def unwritable(folder: Path) -> str:
    """Why a folder takes no files, in a sentence; empty if it does. It is made if it is missing."""
    try:
        Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))  # a full disk takes names, but no content
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}."
    return ""


def lock_path(path: Path) -> Path:
    """The lock file of a file or folder, next to it."""
    return path.with_name(f"{path.name}.lock")


def hold(path: Path) -> QLockFile | None:
    """Lock a file or folder until `unlock` or the end of the process; None if a living process
    holds it or the place takes no files."""
    lock = QLockFile(str(lock_path(path)))
    lock.setStaleLockTime(0)  # a lock is stale when its process is gone, however old it is
    return lock if lock.tryLock(0) else None


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock."""
    lock = hold(path)
    if lock is None:
        return True
    lock.unlock()
    return False
