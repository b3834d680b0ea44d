"""Upgrades a settings file from version to version; one that is newer or unreadable is kept beside
it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QSettings

from engine.errors import OptionError
from engine.files import written_whole

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

    A file that is newer, or that names no version that ever was, is copied beside itself and
    begun anew: guessing at its meaning could spoil it for the program that wrote it.
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
        where = f"They could not be kept beside {path}."
    store.clear()
    store.setValue(VERSION_KEY, VERSION)
    return f"The settings {what}, so defaults are used. {where}"
