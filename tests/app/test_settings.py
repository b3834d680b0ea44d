"""Settings survive a restart, and a spoilt file gives defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QByteArray, QSettings

from app.settings import N_RECENT, VERSION, Settings


def raw() -> QSettings:
    return QSettings(
        QSettings.Format.IniFormat, QSettings.Scope.UserScope, "Draftscope", "draftscope"
    )


def test_file_lies_in_the_test_folder(tmp_path: Path) -> None:
    assert raw().fileName().startswith(str(tmp_path))


def test_defaults() -> None:
    settings = Settings()
    assert settings.theme == "system"
    assert settings.ghosts is True
    assert settings.recent_models == []
    assert settings.geometry.isEmpty()
    assert settings.layout.isEmpty()
    assert settings.folder("model") == Path.home()
    assert int(str(raw().value("version"))) == VERSION


def test_values_survive_a_restart(tmp_path: Path) -> None:
    settings = Settings()
    settings.theme = "dark"
    settings.ghosts = False
    settings.set_folder("export", tmp_path)
    settings.save_layout(QByteArray(b"\x00geo"), QByteArray(b"\xfflay"))
    settings.sync()
    again = Settings()
    assert again.theme == "dark"
    assert again.ghosts is False
    assert again.folder("export") == tmp_path
    assert again.geometry == QByteArray(b"\x00geo")
    assert again.layout == QByteArray(b"\xfflay")


def test_recent_models_are_unique_newest_first_and_few(tmp_path: Path) -> None:
    settings = Settings()
    paths = [tmp_path / f"{i}.gguf" for i in range(N_RECENT + 3)]
    for path in paths:
        settings.add_recent_model(path)
    settings.add_recent_model(paths[5])
    settings.sync()
    recent = Settings().recent_models
    assert recent[0] == paths[5]
    assert len(recent) == len(set(recent)) == N_RECENT
    Settings().clear_recent_models()
    assert Settings().recent_models == []


def test_one_recent_model_is_a_list_too(tmp_path: Path) -> None:
    # QSettings reads a list of one back as a plain string
    Settings().add_recent_model(tmp_path / "only, one.gguf")
    Settings().sync()
    assert Settings().recent_models == [tmp_path / "only, one.gguf"]


@pytest.mark.parametrize(
    ("key", "value", "attribute", "default"),
    [
        ("window/theme", "pink", "theme", "system"),
        ("window/theme", 7, "theme", "system"),
        ("view/ghosts", "perhaps", "ghosts", True),
        ("files/recent", 3.5, "recent_models", []),
        ("window/layout", "text", "layout", QByteArray()),
    ],
)
def test_spoilt_values_read_as_defaults(
    key: str, value: object, attribute: str, default: object
) -> None:
    store = raw()
    store.setValue(key, value)
    store.sync()
    assert getattr(Settings(), attribute) == default


def test_a_folder_that_is_gone_is_not_offered(tmp_path: Path) -> None:
    settings = Settings()
    settings.set_folder("model", tmp_path / "gone")
    assert settings.folder("model") == Path.home()
