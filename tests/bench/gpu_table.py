"""python -m tests.bench.gpu_table: whether every family does on a device all that it must.

A row per golden model, a column per cell of tests/support/gpu_cells.py; a cell has the milliseconds
that it took, first uses of kernels included, or FAIL. Each row is played in a process of its own,
and after a failure the rest of it in another one: a crash or a hang costs its cell.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Timer
from time import monotonic
from typing import Any

import torch

from engine.environment import environment
from engine.errors import OptionError
from engine.machine.device import device_name, resolve_device
from tests.support.gpu_cells import CELLS, models

_ROOT = Path(__file__).resolve().parents[2]
_PLAYER = "tests.support.gpu_player"


@dataclass(frozen=True)
class Cell:
    """ms: None if it was not played to an end. passes: forward passes of targets. error: empty if
    all was right."""

    ms: float | None
    passes: int
    error: str


def _play(
    name: str, device: str, cells: Sequence[str], limit: float, until: float
) -> tuple[Cell, ...]:
    """The cells of a row that one process plays; the last one alone may fail."""
    found, late = list[Cell](), Event()
    command = [sys.executable, "-m", _PLAYER, name, device, *cells]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=_ROOT
        ) as player,
    ):
        assert player.stdout

        def end() -> None:
            late.set()
            player.kill()

        for _ in cells:
            seconds = min(limit, until - monotonic())
            if seconds <= 0:
                break
            timer = Timer(seconds, end)
            timer.start()
            line = player.stdout.readline()
            timer.cancel()
            if line:
                found.append(Cell(**json.loads(line)))
            else:
                said.seek(0)
                why = (said.read().strip().splitlines() or ["it said nothing"])[-1]
                if late.is_set():
                    why = f"no end within {seconds:.0f} s"
                found.append(Cell(None, 0, f"{why} (exit status {player.wait()})"))
            if found[-1].error:
                break
        player.kill()
    return tuple(found)


def play_row(
    name: str, device: str, cells: Sequence[str], limit: float, until: float
) -> dict[str, Cell]:
    """Every cell of a row by its name. limit: seconds of a cell. until: when no more is played,
    by time.monotonic."""
    found: list[Cell] = []
    while len(found) < len(cells):
        if monotonic() >= until:
            return dict(zip(cells, found, strict=False)) | {
                cell: Cell(None, 0, "not played: the time is over") for cell in cells[len(found) :]
            }
        found.extend(_play(name, device, cells[len(found) :], limit, until))
    return dict(zip(cells, found, strict=True))


def card(device: torch.device) -> dict[str, Any]:
    """The device as its maker has it, its driver, and what drives it; None where there is none."""
    driver = None
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            driver = said.stdout.split()[0]
        except (OSError, IndexError, subprocess.SubprocessError):
            pass
    import triton

    return {
        "card": device_name(device),
        "driver": driver,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def table(rows: dict[str, dict[str, Cell]]) -> str:
    """Rows and columns, then what failed."""
    names = list(next(iter(rows.values())))
    lines = [["", *names]]
    for name, cells in rows.items():
        texts = ["FAIL" if one.error else f"{one.ms:.0f}" for one in cells.values()]
        lines.append([name, *texts])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    text += [
        f"{name}, {cell}: {one.error}"
        for name, cells in rows.items()
        for cell, one in cells.items()
        if one.error
    ]
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all right, 1 a cell failed, 2 (from argparse) wrong usage."""
    there = models()
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_table", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu rehearses it")
    parser.add_argument("--model", action="append", choices=there, help="this row (repeatable)")
    parser.add_argument("--only", action="append", choices=list(CELLS), help="this column")
    parser.add_argument("--jobs", type=int, default=0, help="rows at once; 0: 8 on a GPU, else 1")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a cell")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all cells there")
    options = parser.parse_args(arguments)
    try:
        device = resolve_device(options.device)
    except OptionError as error:
        parser.error(str(error))
    cells, names = options.only or list(CELLS), options.model or there
    start, on_gpu = monotonic(), device.type == "cuda"
    # kernels are compiled on the processor, which takes more of a first table than the GPU does
    jobs = options.jobs or (min(8, os.cpu_count() or 1) if on_gpu else 1)
    until = start + 60 * options.minutes

    def row(name: str) -> dict[str, Cell]:
        return play_row(name, str(device), cells, options.limit, until)

    with ThreadPoolExecutor(jobs) as pool:
        rows = dict(zip(names, pool.map(row, names), strict=True))
    played = [one for cells in rows.values() for one in cells.values()]
    facts = {
        **environment(),
        **card(device),
        "jobs": jobs,
        "seconds": round(monotonic() - start, 1),
        "cells": len(played),
        "failed": sum(bool(one.error) for one in played),
        "passes": sum(one.passes for one in played),
    }
    print(table(rows))
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json:
        own = {name: {cell: asdict(one) for cell, one in row.items()} for name, row in rows.items()}
        options.json.write_text(json.dumps({**facts, "rows": own}, indent=1) + "\n")
    return int(facts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
