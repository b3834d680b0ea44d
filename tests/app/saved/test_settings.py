"""Settings survive a restart, and a spoilt file gives defaults."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from PySide6.QtCore import QByteArray, QSettings

from app.saved.settings import N_RECENT, STEPS, VERSION, Settings, free_settings
from engine import files


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
    assert settings.layout("stream").isEmpty()
    assert settings.layout_name == ""
    assert settings.excel_safe is False
    assert settings.note == ""
    assert settings.folder("model") == Path.home()
    assert int(str(raw().value("version"))) == VERSION


def test_servers_are_remembered_and_their_keys_have_no_place() -> None:
    settings = Settings()
    assert settings.recent_servers == [] and settings.watch_port == 8081
    for port in range(N_RECENT + 2):
        settings.add_recent_server(f"http://h:{port + 1}")
    settings.add_recent_server("http://h:5")
    settings.watch_port = 9000
    settings.sync()
    again = Settings()
    assert again.recent_servers[:2] == ["http://h:5", f"http://h:{N_RECENT + 2}"]
    assert len(again.recent_servers) == N_RECENT and again.watch_port == 9000
    raw().setValue("servers/watch_port", "70000")
    raw().setValue("servers/recent", 3)
    assert Settings().watch_port == 8081 and Settings().recent_servers == []
    again.clear_recent()
    assert Settings().recent_servers == []


def test_the_file_is_written_only_where_something_changes() -> None:
    """The window keeps its place every 15 s."""
    settings = Settings()
    path = Path(settings.store.fileName())
    inodes = []
    for theme in ("dark", "dark", "light"):
        settings.theme, settings.geometry = theme, QByteArray(b"place")
        settings.open_groups, settings.run_form = ["a", "b"], {"n": 1}
        settings.sync()
        inodes.append(path.stat().st_ino)
    assert inodes[0] == inodes[1] != inodes[2]


def test_values_survive_a_restart(tmp_path: Path) -> None:
    settings = Settings()
    settings.theme = "dark"
    settings.ghosts = False
    settings.set_folder("export", tmp_path)
    settings.geometry = QByteArray(b"\x00geo")
    settings.set_layout("rollback", QByteArray(b"\xfflay"))
    settings.excel_safe = True
    settings.add_recent_trace(tmp_path / "trace")
    settings.sync()
    again = Settings()
    assert again.theme == "dark"
    assert again.ghosts is False
    assert again.folder("export") == tmp_path
    assert again.geometry == QByteArray(b"\x00geo")
    assert again.layout_name == "rollback"
    assert again.layout("rollback") == QByteArray(b"\xfflay")
    assert again.layout("stream").isEmpty()
    assert again.excel_safe is True
    assert again.recent_traces == [tmp_path / "trace"]


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
    Settings().clear_recent()
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
        ("files/recent_models", 3.5, "recent_models", []),
        ("window/geometry", "text", "geometry", QByteArray()),
        ("export/excel_safe", 4, "excel_safe", False),
    ],
)
def test_spoilt_values_read_as_defaults(
    key: str, value: object, attribute: str, default: object
) -> None:
    store = raw()
    store.setValue("version", VERSION)
    store.setValue(key, value)
    store.sync()
    assert getattr(Settings(), attribute) == default


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800"])
def test_a_folder_that_can_be_no_name_is_not_offered(name: str) -> None:
    settings = Settings()
    raw().setValue("folders/export", name)
    assert settings.folder("export") == Path.home()


def test_a_folder_that_is_gone_is_not_offered(tmp_path: Path) -> None:
    settings = Settings()
    settings.set_folder("model", tmp_path / "gone")
    assert settings.folder("model") == Path.home()


# -- versions ------------------------------------------------------------------------------


def write(**values: object) -> Path:
    """A settings file as another version left it."""
    store = raw()
    for key, value in values.items():
        store.setValue(key.replace("__", "/"), value)
    store.sync()
    return Path(store.fileName())


def test_there_is_a_step_from_every_version() -> None:
    assert sorted(STEPS) == list(range(1, VERSION))


def test_a_file_of_version_1_keeps_what_it_knew(tmp_path: Path) -> None:
    write(
        version=1,
        window__theme="dark",
        window__layout=QByteArray(b"old"),
        files__recent=[str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")],
    )
    settings = Settings()
    assert settings.note == ""
    assert settings.theme == "dark"
    assert settings.recent_models == [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    assert settings.layout("stream").isEmpty()
    settings.sync()
    assert not raw().contains("files/recent")
    assert int(str(raw().value("version"))) == VERSION
    assert Settings().recent_models == [tmp_path / "a.gguf", tmp_path / "b.gguf"]


def test_a_newer_file_is_set_aside_and_said_so() -> None:
    path = write(version=VERSION + 5, window__theme="dark", window__hologram="on")
    settings = Settings()
    kept = path.with_suffix(f".v{VERSION + 5}.ini")
    assert "newer Draftscope" in settings.note and str(kept) in settings.note
    assert settings.theme == "system"
    assert "hologram" in kept.read_text()
    settings.sync()
    assert Settings().note == ""


def test_one_that_no_room_is_left_for_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(version=VERSION + 5, window__theme="dark")
    monkeypatch.setattr(files, "synced", full)
    settings = Settings()
    assert "No copy of them" in settings.note
    assert settings.theme == "system"


@pytest.mark.parametrize("version", ["soon", -3, "", 0])
def test_a_version_that_never_was_gives_defaults(version: object) -> None:
    path = write(version=version, window__theme="dark")
    settings = Settings()
    assert "could not be read" in settings.note
    assert settings.theme == "system"
    assert path.with_suffix(".unreadable.ini").exists()


def test_a_file_of_garbage_gives_defaults(tmp_path: Path) -> None:
    path = Path(raw().fileName())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x00\xff[[[\nno settings at all\n\x80" * 20)
    settings = Settings()
    assert settings.theme == "system"
    assert settings.note


def test_a_lock_that_names_nobody_is_taken_away() -> None:
    """What a process leaves that is killed while it takes the lock."""
    Settings().text_zoom = 2
    lock = Path(raw().fileName() + ".lock")
    lock.touch()
    assert Settings().text_zoom == 2
    assert not lock.exists()
    lock.write_text("1\nsomebody\nhere\n")
    free_settings(Path(raw().fileName()))
    assert lock.exists()
    lock.unlink()
