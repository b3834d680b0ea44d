"""python -m tests.bench.window.screenshots DIR: the window in every theme, size and state, as PNG
files.

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
from typing import TYPE_CHECKING

from app.engine_thread.jobs.engine import StartRun
from resources import ROOT, demo_prompts

if TYPE_CHECKING:
    from app.window.window import MainWindow

README_FOLDER = ROOT / "screenshots"
_PROMPT = demo_prompts()[0]
_LANES = ("checkpoint", "planes", "planes,fault=no-conv-rollback")
_TOKENS = 256
_RUN_ROUNDS, _PAUSE_ROUNDS = 30, 38
_SETTLE = 1.0
"""Seconds in which everything that is paced has been drawn."""
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
    """The three pictures in README."""
    size = SIZES[0]
    return [
        Shot("paused", "dark", size, "window-dark.png"),
        Shot("paused", "light", size, "window-light.png"),
        Shot("divergence", "dark", size, "divergence-dark.png"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the pictures. Exit status: 0 done, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.window.screenshots", description=__doc__
    )
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
    """Write the pictures into a folder, with one window per state and size; yields each file."""
    from tests.bench.window.scene import HeldEngine, settle, shown_window

    for size, state in dict.fromkeys((shot.size, shot.state) for shot in shots):
        engine = HeldEngine(_RUN_ROUNDS if state == "running" else None)
        with shown_window(*size, engine) as window:
            try:
                _bring_to(state, window)
                for shot in shots:
                    if (shot.size, shot.state) == (size, state):
                        window.appearance.set_theme(shot.theme)
                        settle(_SETTLE)
                        window.grab().save(str(folder / shot.name))
                        yield folder / shot.name
            finally:
                engine.go_on()


def _bring_to(state: str, window: MainWindow) -> None:
    from app.engine_thread.events import State
    from app.trace_models.run_rows import Position
    from tests.bench.window.scene import settle, wait_until

    if state == "empty":
        return
    bridge, panel = window.bridge, window.run_panel
    window.open_demo()
    wait_until(lambda: bridge.state is State.READY)
    panel.prompt.setPlainText(_PROMPT)
    panel.n_predict.setValue(_TOKENS)
    if state == "divergence":
        window.appearance.set_layout("divergence")
        settle(_SETTLE)
        window.divergence.header.editor.text.setPlainText("\n".join(_LANES))
        window.actions_by_id["run.compare"].trigger()
        wait_until(lambda: bridge.state is State.READY)
        window.divergence.header.edit_button.setChecked(False)
        window.actions_by_id["go.first_divergence"].trigger()
    elif state == "running":
        window.actions_by_id["run.start"].trigger()
        wait_until(
            lambda: bridge.store.size() > 0 and window.plots.rollback.plot.n_rounds == _RUN_ROUNDS
        )
    else:
        bridge.ask(StartRun(panel.texts(), panel.options(), _PAUSE_ROUNDS, panel.chat()))
        wait_until(lambda: bridge.state is State.PAUSED)
        assert bridge.live is not None
        window.feed.move_cursor(Position(bridge.live, 0, _PAUSE_ROUNDS - 4, None))
        window.actions_by_id["go.inspect"].trigger()
        settle(_SETTLE)  # the plots have all rounds
        window.actions_by_id["plot.show_all"].trigger()
    settle(_SETTLE)


if __name__ == "__main__":
    sys.exit(main())
