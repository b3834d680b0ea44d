"""python -m app.screenshots DIR: the window in every theme, size and state, as PNG files.

The bundled models do all the work, off the screen, with settings of their own, so that the same
tree gives the same pictures but for what is measured: times and speeds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from resources import ROOT

README_FOLDER = ROOT / "screenshots"
_TOKENS = 120
_PAUSE_ROUNDS = 24
_RUN_ROUNDS = 12
THEMES = ("light", "dark")
SIZES = ((1280, 800), (2560, 1440))
STATES = ("empty", "running", "paused", "divergence")


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: what the window shows, in which theme and size, and the file's name."""

    state: str
    theme: str
    size: tuple[int, int]
    name: str


def all_shots() -> list[Shot]:
    """Every theme in every size and state."""
    return [
        Shot(state, theme, size, f"{state}-{theme}-{size[0]}x{size[1]}.png")
        for size, state, theme in product(SIZES, STATES, THEMES)
    ]


def readme_shots() -> list[Shot]:
    """The three that README shows."""
    size = SIZES[0]
    return [
        Shot("paused", "dark", size, "window-dark.png"),
        Shot("paused", "light", size, "window-light.png"),
        Shot("divergence", "dark", size, "divergence-dark.png"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the pictures. Exit status: 0 done, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m app.screenshots", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="folder for the files")
    where.add_argument(
        "--readme", action="store_true", help="take those of README, into resources/screenshots"
    )
    parser.add_argument("--only", metavar="NAME", action="append", help="this file (repeatable)")
    options = parser.parse_args(arguments)
    folder: Path = README_FOLDER if options.readme else options.folder
    shots = readme_shots() if options.readme else all_shots()
    names = [shot.name for shot in shots]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(names)}")
    wanted = [shot for shot in shots if not options.only or shot.name in options.only]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    for path in take(wanted, folder):
        print(path)
    return 0


def take(shots: Sequence[Shot], folder: Path) -> Iterator[Path]:
    """Take pictures, those of one state and size from one window; yields the files."""
    from app.bench.scene import settle, shown_window

    for size, state in dict.fromkeys((shot.size, shot.state) for shot in shots):
        with shown_window(*size) as window:
            _bring_to(state, window)
            for shot in shots:
                if (shot.size, shot.state) == (size, state):
                    window.set_theme(shot.theme)
                    settle(0.5)
                    image = window.grab().toImage()
                    # few colours are on show: an indexed picture looks the same at half the size
                    image.save(str(folder / shot.name))
                    yield folder / shot.name


def _bring_to(state: str, window: object) -> None:
    from app.bench.scene import settle, spin
    from app.events import State
    from app.models.position import Position
    from app.window import MainWindow

    assert isinstance(window, MainWindow)
    if state == "empty":
        return
    bridge, panel = window.bridge, window.run_panel
    window.open_demo()
    spin(lambda: bridge.state is State.READY)
    panel.n_predict.setValue(_TOKENS)
    panel.ignore_eos.setChecked(True)
    if state == "divergence":
        window.set_layout("divergence")
        settle(0.3)
        window.actions_by_id["run.compare"].trigger()
        spin(lambda: bridge.state is State.RUNNING)
        spin(lambda: bridge.state is State.READY)
        window.actions_by_id["go.first_divergence"].trigger()
    else:
        rounds = _PAUSE_ROUNDS if state == "paused" else _RUN_ROUNDS
        bridge.start(panel.texts(), panel.options(), rounds, panel.chat())
        spin(lambda: bridge.state is State.PAUSED)
        if state == "paused":
            window.actions_by_id["go.inspect"].trigger()
            assert bridge.run_id is not None
            window.feed.move_cursor(Position(bridge.run_id, 0, rounds - 3, None))
        else:
            bridge.resume()
            spin(lambda: len(bridge.store.rounds) >= rounds + 20)
    settle(0.7)


if __name__ == "__main__":
    sys.exit(main())
