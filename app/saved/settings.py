"""Settings that persist between starts, as a typed view of an INI file; and the program's own
folders with locks that end with their process."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from PySide6.QtCore import QByteArray, QLockFile, QSettings, QStandardPaths

from engine.errors import DraftscopeError
from engine.files import written_whole

N_RECENT = 10
THEME_CHOICES = ("system", "light", "dark")
TEXT_ZOOMS = range(-4, 21)


_T = TypeVar("_T")


class _SettingKey(Generic[_T]):
    """A value under a key. read: converts it, with a default for invalid values; write: converts
    back."""

    def __init__(
        self, key: str, read: Callable[[Any], _T], write: Callable[[_T], object] = lambda one: one
    ) -> None:
        self._key, self._read, self._write = key, read, write

    def __get__(self, settings: Settings, kind: type[Settings]) -> _T:
        return self._read(settings.store.value(self._key))

    def __set__(self, settings: Settings, value: _T) -> None:
        if self.__get__(settings, Settings) != value:  # otherwise the whole file would be rewritten
            settings.store.setValue(self._key, self._write(value))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _bytes(value: object) -> QByteArray:
    return value if isinstance(value, QByteArray) else QByteArray()


def _flag(default: bool) -> Callable[[object], bool]:
    known = {"true": True, "false": False}
    return lambda value: known.get(str(value).lower(), default)


def _whole(allowed: range, default: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        number = int(_text(value)) if re.fullmatch("-?[0-9]{1,6}", _text(value)) else default
        return number if number in allowed else default

    return read


def _words(value: object) -> list[str]:
    return _text(value).split()


def _texts(value: object) -> list[str]:
    found = [value] if isinstance(value, str) else value
    known = found if isinstance(found, list) else []
    return [one for one in known if isinstance(one, str) and one][:N_RECENT]


def _paths(value: object) -> list[Path]:
    return list(map(Path, _texts(value)))


def _form(value: object) -> dict[str, Any]:
    try:
        found = json.loads(_text(value) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rules(value: object) -> list[tuple[str, bool]]:
    lines = _text(value).splitlines()
    return [(line[1:].strip(), line[0] == "+") for line in lines if line[:1] in ("+", "-")]


class Settings:
    """Typed access with defaults; invalid values in the file read as the default.

    `note`: a sentence for the user if the file could not be converted or written, usually empty.
    """

    theme = _SettingKey("window/theme", lambda value: value if value in THEME_CHOICES else "system")
    ghosts = _SettingKey("view/ghosts", _flag(default=True))
    """Whether rejected and ignored draft tokens are shown in the text."""
    tabs = _SettingKey("view/tabs", _flag(default=False))
    """Whether sequences are shown as tabs instead of tiles."""
    text_zoom = _SettingKey("view/text_zoom", _whole(TEXT_ZOOMS, 0), str)
    """Zoom of tokens in tenths, negative for smaller."""
    open_groups = _SettingKey("run/open_groups", _words, " ".join)
    """Names of the expanded groups of the Run panel."""
    pages = _SettingKey("window/pages", _words, " ".join)
    """Names of the front views in shared panels."""
    run_form = _SettingKey("run/form", _form, json.dumps)
    """The latest contents of the Run panel."""
    llama_library = _SettingKey(
        "compare/llama_library",
        lambda value: Path(_text(value)) if _text(value) else None,
        lambda folder: "" if folder is None else str(folder),
    )
    """The build of llama.cpp for its lanes; None = an installed package."""
    break_rules = _SettingKey(
        "run/break_rules",
        _rules,
        lambda entries: "\n".join(f"{'+' if used else '-'} {text}" for text, used in entries),
    )
    """Break rules as text and whether each is enabled, stored as lines starting with + or -."""
    geometry = _SettingKey("window/geometry", _bytes)
    """The window's geometry."""
    layout_name = _SettingKey("window/layout_name", _text)
    """The latest layout, empty before one was chosen."""
    excel_safe = _SettingKey("export/excel_safe", _flag(default=False))
    """Whether the last export was the spreadsheet variant."""
    recent_models = _SettingKey("files/recent_models", _paths, lambda paths: list(map(str, paths)))
    """Recent models, newest first; some may no longer exist."""
    recent_traces = _SettingKey("files/recent_traces", _paths, lambda paths: list(map(str, paths)))
    """Recent trace folders, newest first; some may no longer exist."""
    recent_servers = _SettingKey("servers/recent", _texts)
    """Recent server addresses, newest first."""
    watch_port = _SettingKey("servers/watch_port", _whole(range(1, 65536), 8081), str)
    """Port for watching other programs."""
    server_timeout = _SettingKey("servers/timeout", _whole(range(1, 1_000_000), 600), str)
    """Time limit of a server's replies, seconds."""

    def __init__(self) -> None:
        self.store = QSettings(
            QSettings.Format.IniFormat, QSettings.Scope.UserScope, "Draftscope", "draftscope"
        )
        free_settings(Path(self.store.fileName()))
        self.note = bring_up_to_date(self.store)
        if not self.store.isWritable():
            self.note = self.note or f"{self.store.fileName()} cannot be written."

    def layout(self, name: str) -> QByteArray:
        """Saved dock positions of a layout, empty before its first use."""
        return _bytes(self.store.value(f"layouts/{name}"))

    def set_layout(self, name: str, layout: QByteArray) -> None:
        """Save the dock positions of a layout and make it the current one."""
        self.layout_name = name
        self.store.setValue(f"layouts/{name}", layout)

    def add_recent_model(self, path: Path) -> None:
        self.recent_models = _first(path.absolute(), self.recent_models)

    def add_recent_trace(self, folder: Path) -> None:
        self.recent_traces = _first(folder.absolute(), self.recent_traces)

    def add_recent_server(self, address: str) -> None:
        self.recent_servers = _first(address, self.recent_servers)

    def clear_recent(self) -> None:
        """Clear recent models, traces and servers."""
        for key in ("files/recent_models", "files/recent_traces", "servers/recent"):
            self.store.remove(key)

    def folder(self, purpose: str) -> Path:
        """The last folder of a file dialog with this purpose; the home folder at first."""
        value = _text(self.store.value(f"folders/{purpose}"))
        return Path(value) if os.path.isdir(value) else Path.home()  # False for any invalid name

    def set_folder(self, purpose: str, folder: Path) -> None:
        self.store.setValue(f"folders/{purpose}", str(folder.absolute()))

    def sync(self) -> None:
        self.store.sync()


def _first(one: _T, others: list[_T]) -> list[_T]:
    return [one, *(other for other in others if other != one)][:N_RECENT]


_UNNAMED_S = 0.5
"""Seconds that a lock file may be empty: its holder names itself much sooner, even when busy."""


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
    """Version 1 to 2: one layout became three named ones, and the recent list also holds traces."""
    store.remove("window/layout")  # the docks of version 1 were others
    recent = store.value("files/recent")
    if recent is not None:
        store.setValue("files/recent_models", recent)
    store.remove("files/recent")


STEPS: dict[int, Callable[[QSettings], None]] = {1: _named_layouts}
"""Converters from version n to n + 1."""


def bring_up_to_date(store: QSettings) -> str:
    """Convert the file to VERSION; returns a sentence for the user if impossible, else empty.

    A newer or damaged file, or one without a version, is copied next to itself and cleared:
    guessing its meaning could spoil it for the program that wrote it.
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
    except DraftscopeError:
        where = f"No copy of them could be made next to {path}."
    store.clear()
    store.setValue(VERSION_KEY, VERSION)
    return f"The settings {what}, so defaults are used. {where}"


DATA_VARIABLE = "DRAFTSCOPE_DATA_DIR"
"""Environment variable that names another data folder."""

_PROBE_BYTES = 4096


def data_folder() -> Path:
    """The folder for log, crash notes and autosaved traces. It need not exist, and may be
    impossible to create."""
    location = QStandardPaths.StandardLocation.AppLocalDataLocation
    return Path(os.environ.get(DATA_VARIABLE) or QStandardPaths.writableLocation(location))


def unwritable(folder: Path) -> str:
    """Why a folder cannot be written, in a sentence; empty if it can. It is created if missing."""
    try:
        Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))  # a full disk allows names, but no content
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}."
    return ""


def lock_path(path: Path) -> Path:
    """The lock file of a file or folder, next to it."""
    return path.with_name(f"{path.name}.lock")


def hold(path: Path) -> QLockFile | None:
    """Lock a file or folder until `unlock` or the end of the process; None if a running process
    holds it or the lock file cannot be written."""
    lock = QLockFile(str(lock_path(path)))
    lock.setStaleLockTime(0)  # a lock is stale when its process is gone, however old it is
    return lock if lock.tryLock(0) else None


def is_held(path: Path) -> bool:
    """Whether a running process holds the lock."""
    lock = hold(path)
    if lock is None:
        return True
    lock.unlock()
    return False
