"""The entry in a desktop's applications, in a home of its own."""

from __future__ import annotations

import configparser
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import launch as desktop
from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]
NAMESPACE = "{http://www.freedesktop.org/standards/shared-mime-info}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "data"


def files_in(folder: Path) -> set[str]:
    own = {path for path in folder.rglob("draftscope*") if path.is_file()}
    return {str(path.relative_to(folder)) for path in own}


def test_it_is_written_and_removed(cli: Cli, home: Path) -> None:
    outcome = cli("--install-desktop")
    assert outcome.status == 0
    assert files_in(home) == {
        "applications/draftscope.desktop",
        "mime/packages/draftscope.xml",
        "icons/hicolor/scalable/apps/draftscope.svg",
    }
    assert all(f"written: {home / name}" in outcome.out for name in files_in(home))
    entry = configparser.RawConfigParser()
    entry.optionxform = str  # type: ignore[assignment, method-assign]
    entry.read(home / "applications" / "draftscope.desktop")
    found = dict(entry["Desktop Entry"])
    assert (found["Type"], found["Icon"], found["MimeType"]) == (
        "Application",
        "draftscope",
        "application/x-gguf;",
    )
    *command, files = shlex.split(found["Exec"])
    assert files == "%F" and Path(command[0]).parent == Path(sys.executable).parent
    mime = ElementTree.parse(home / "mime" / "packages" / "draftscope.xml").getroot()
    (kind,) = mime.findall(f"{NAMESPACE}mime-type")
    assert kind.get("type") == "application/x-gguf"
    assert kind.find(f"{NAMESPACE}glob").get("pattern") == "*.gguf"  # type: ignore[union-attr]
    assert cli("--install-desktop").status == 0, "once more changes nothing"
    assert cli("--remove-desktop").status == 0 and not files_in(home)
    assert cli("--remove-desktop").out == ""


def test_a_relative_data_home_counts_for_nothing(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    cli("--install-desktop")
    assert len(files_in(home.parent / ".local" / "share")) == 3


def test_words_of_the_command_are_quoted() -> None:
    assert desktop._quoted("/opt/venv/bin/draftscope") == "/opt/venv/bin/draftscope"
    assert desktop._quoted("/home/a b/100%") == '"/home/a b/100%%"'
    assert desktop._quoted("/a$b") == '"/a\\\\$b"'


def test_other_systems_are_told(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    outcome = cli("--install-desktop")
    assert outcome.status == 2 and "exist only on Linux" in outcome.err and not home.exists()
