"""The pictures of the window: all of them are named, and one of each kind of state is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtGui import QImage

from app.looks import Theme
from tests.bench.window import screenshots


def test_every_state_theme_and_size_has_a_file_of_its_own() -> None:
    shots = screenshots.all_shots()
    assert len(shots) == len({shot.name for shot in shots}) == 16
    assert {shot.name for shot in screenshots.readme_shots()} == {
        "window-dark.png",
        "window-light.png",
        "divergence-dark.png",
    }


def test_pictures_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["empty-light-1280x800.png", "running-dark-1280x800.png", "running-light-1280x800.png"]
    only = [part for name in names for part in ("--only", name)]
    assert screenshots.main([str(tmp_path / "new"), *only]) == 0
    written = {Path(line).name for line in capsys.readouterr().out.split()}
    assert written == set(names) == {path.name for path in (tmp_path / "new").iterdir()}
    images = {name: QImage(str(tmp_path / "new" / name)) for name in names}
    for name, image in images.items():
        assert (image.width(), image.height()) == (1280, 800)
        theme = Theme(name.split("-")[1])
        colours = {
            image.pixelColor(x, y).name() for x in range(0, 1280, 4) for y in range(0, 800, 4)
        }
        assert theme.color("ui.window").name() in colours
        assert (theme.color("accepted.tint").name() in colours) == name.startswith("running")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments DIR --readme is required"),
        (["x", "--readme"], "not allowed with argument"),
        (["x", "--only", "y.png"], "--only y.png: there are empty-light-1280x800.png"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        screenshots.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
