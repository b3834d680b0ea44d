"""What the window remembers between starts: a typed view of an INI file."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QByteArray, QSettings

VERSION = 1
N_RECENT = 10
THEME_CHOICES = ("system", "light", "dark")


class Settings:
    """Typed access with defaults; a value of the wrong kind in the file reads as its default."""

    def __init__(self) -> None:
        self._store = QSettings(
            QSettings.Format.IniFormat, QSettings.Scope.UserScope, "Draftscope", "draftscope"
        )
        if not self._store.contains("version"):
            self._store.setValue("version", VERSION)

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
    def layout(self) -> QByteArray:
        return self._bytes("window/layout")

    def save_layout(self, geometry: QByteArray, layout: QByteArray) -> None:
        """Keep the window's place and the docks'."""
        self._store.setValue("window/geometry", geometry)
        self._store.setValue("window/layout", layout)

    # -- files -----------------------------------------------------------------------------

    @property
    def recent_models(self) -> list[Path]:
        """Models opened last, the newest first; some may no longer exist."""
        value = self._store.value("files/recent")
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list):
            return []
        return [Path(name) for name in names if isinstance(name, str) and name][:N_RECENT]

    def add_recent_model(self, path: Path) -> None:
        """Put a model at the top of the list."""
        path = path.absolute()
        kept = [path, *(p for p in self.recent_models if p != path)][:N_RECENT]
        self._store.setValue("files/recent", [str(p) for p in kept])

    def clear_recent_models(self) -> None:
        self._store.remove("files/recent")

    def folder(self, purpose: str) -> Path:
        """Where a file dialog of this purpose was last used; the home folder at first."""
        value = self._text(f"folders/{purpose}")
        return Path(value) if value and Path(value).is_dir() else Path.home()

    def set_folder(self, purpose: str, folder: Path) -> None:
        self._store.setValue(f"folders/{purpose}", str(folder.absolute()))

    # -- internals -------------------------------------------------------------------------

    def sync(self) -> None:
        """Write to disk now."""
        self._store.sync()

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
