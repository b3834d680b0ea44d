"""Whatever writes files, killed anywhere or on a bad disk: the last complete state is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PySide6.QtCore import QCoreApplication, QSettings

from app.saved.autosave import Autosave, read_saved, saved_folders
from app.saved.settings import Settings
from engine.errors import OptionError
from engine.experiments.results.reader import read_results
from engine.experiments.sweep.sweep import Sweep
from engine.files import written_whole
from engine.gguf.content import keep_hash, kept_hash
from engine.gguf.file import GgufFile
from engine.trace.export import export_csv, recover_export
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from kernels import kernel_files
from tests.support.golden_files import DATA
from tests.support.sweeps import instantly, plan_of
from tests.support.trace_builder import TraceBuilder
from tests.torture import disks
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.struck import DONE, KILLED, REFUSED, Strike, done_under, draw_strike

_CODE = b"machine code" * 99
_KEY = "ab" * 20


class _Subject(NamedTuple):
    """play(strike, folder, is_first): one piece of work and what must hold; returns how it ended.
    n_calls: about how many calls of the system it makes."""

    play: Callable[[Strike, Path, bool], str]
    n_calls: int


@cache
def _trace(n_rounds: int) -> TraceStore:
    builder = TraceBuilder()
    builder.prompt(["a", "b"])
    for _ in range(n_rounds):
        builder.draft([" c"], " d", [" e"])
    return builder.store


def _export(strike: Strike, folder: Path, is_first: bool) -> str:
    """An export, in place of an earlier one if this is not the first."""
    target, old, new = folder / "in" / "trace", _trace(2), _trace(400)
    if not is_first:
        export_csv(old, target)
    end = done_under(strike, lambda: export_csv(new, target), folder / "in")
    vanished = strike["how"] == "vanish"
    recover_export(target)
    sizes = {new.size()} if end == DONE else {old.size()} if end == REFUSED else _sizes(old, new)
    if target.exists():
        assert open_trace(target).size() in _sizes(old, new) if vanished else sizes
    else:
        assert vanished or (is_first and end != DONE), f"{end}, and no trace is there"
    export_csv(new, target)
    assert open_trace(target).size() == new.size()
    left = {path.name for path in target.parent.iterdir()} - {"trace"}
    assert not left, f"left behind: {left}"
    return end


def _sizes(*stores: TraceStore) -> set[int]:
    return {store.size() for store in stores}


def _whole_file(strike: Strike, folder: Path, is_first: bool) -> str:
    path = folder / "in" / "file"
    path.parent.mkdir()
    old, new = b"old" * 999, b"new" * 3333
    if not is_first:
        path.write_bytes(old)

    def work() -> None:
        with written_whole(path, OptionError) as part, part.open("wb") as file:
            for i in range(0, len(new), 1000):
                file.write(new[i : i + 1000])
                file.flush()
                os.fsync(file.fileno())

    end = done_under(strike, work, path.parent)
    if strike["how"] != "vanish":
        allowed = {DONE: {new}, REFUSED: {old}, KILLED: {old, new}}[end]
        assert path.read_bytes() in allowed if path.exists() else is_first and end != DONE
        if end != KILLED and strike["how"] not in (disks.READ_ONLY, disks.GONE):
            assert {one.name for one in path.parent.iterdir()} <= {"file"}, "leftovers"
    return end


def _kernel(strike: Strike, folder: Path, is_first: bool) -> str:
    os.environ[kernel_files.VARIABLE] = str(folder / "kernels")
    if not is_first:
        kernel_files.kept("cd" * 20, lambda: _CODE)

    def work() -> None:
        assert kernel_files.kept(_KEY, lambda: _CODE) == _CODE

    end = done_under(strike, work, folder / "kernels")
    assert end in (DONE, KILLED), "a bad disk is not an error here"
    for _ in range(2):
        assert kernel_files.kept(_KEY, lambda: _CODE) == _CODE
    return end


def _hash(strike: Strike, folder: Path, is_first: bool) -> str:
    os.environ["DRAFTSCOPE_DATA_DIR"] = str(folder / "data")
    with GgufFile.open(DATA / "qwen35-a-f32.gguf") as file:
        parts = file.contents
        if not is_first:
            keep_hash(parts, "old")
        before = kept_hash(parts)
        end = done_under(strike, lambda: keep_hash(parts, "new"), folder / "data")
        assert end in (DONE, KILLED), "a bad disk is not an error here"
        assert kept_hash(parts) in (before, "new", None if strike["how"] == "vanish" else before)
        keep_hash(parts, "newer")
        assert kept_hash(parts) == "newer"
    return end


def _autosave(strike: Strike, folder: Path, is_first: bool) -> str:
    """What was saved completely is offered, or what was being saved."""
    new, old = _trace(300), _trace(5)
    stores, savers = [new], []

    def before() -> None:
        owner = QCoreApplication([])
        savers[:] = [owner, Autosave(folder / "saved", lambda: stores, owner)]
        if not is_first:
            stores[:] = [old]
            assert savers[1].keep() is None
            old.findings.append(run_id=0, rule="x", severity="info", message="m", evidence="e")

    end = done_under(strike, lambda: savers[1].keep(), folder / "elsewhere", before)
    folders = saved_folders(folder / "saved")
    assert all(read_saved(path) for path in folders)
    offered = [open_trace(path).size() for path in folders]
    assert len(offered) <= 1
    if is_first:
        assert set(offered) <= _sizes(new), offered
    else:
        n_rows = old.size()
        assert offered, "what was saved completely is not offered"
        assert offered[0] in (n_rows, n_rows + 1), offered
    return end


def _sweep(strike: Strike, folder: Path, is_first: bool) -> str:
    plan = plan_of(folder, 2, 5)

    def work() -> None:
        with Sweep(plan, folder / "out") as sweep:
            for _ in sweep.run(instantly):
                pass

    end = done_under(strike, work, folder / "elsewhere")
    if not is_first and end != DONE:
        done_under({**strike, "at": 3 * strike["at"]}, work, folder / "elsewhere")
    if (folder / "out" / "results.sqlite").exists() and end == DONE:
        assert read_results(folder / "out").n == 10
    with Sweep(plan, folder / "out") as sweep:
        for _ in sweep.run(instantly):
            pass
    results = read_results(folder / "out")
    assert results.columns["number"].tolist() == list(range(1, 11))
    return end


def _settings(strike: Strike, folder: Path, is_first: bool) -> str:
    """Killed at any time, or on a bad disk, a later start reads one of the states written."""
    QSettings.setPath(QSettings.Format.IniFormat, QSettings.Scope.UserScope, str(folder / "config"))

    def write(n: int) -> None:
        for i in range(n):
            settings = Settings()
            settings.text_zoom = i % 20
            settings.open_groups = ["a"] * (i % 20) or ["none"]
            del settings

    if not is_first:
        write(1)
    if strike["how"] not in disks.KINDS:  # Qt makes its calls without Python
        strike = {**strike, "how": "kill late"}
    end = done_under({**strike, "at": -1}, lambda: write(100), folder / "elsewhere")
    settings = Settings()
    zoom, groups = settings.text_zoom, settings.open_groups
    assert zoom in range(20)
    assert set(groups) <= {"a", "none"} and len(groups) <= 20
    assert is_first or groups
    settings.text_zoom = 3
    del settings
    assert Settings().text_zoom == 3, "settings are no longer kept"
    return end


_SUBJECTS = {
    "export": _Subject(_export, 60),
    "whole file": _Subject(_whole_file, 18),
    "kernel": _Subject(_kernel, 14),
    "hash": _Subject(_hash, 8),
    "autosave": _Subject(_autosave, 90),
    "sweep": _Subject(_sweep, 40),
    "settings": _Subject(_settings, 1),
}


def _draw(random: np.random.Generator, number: int) -> Case:
    name = list(_SUBJECTS)[number % len(_SUBJECTS)]
    strike = draw_strike(random, _SUBJECTS[name].n_calls, number // len(_SUBJECTS))
    return {"subject": name, "strike": strike, "is_first": bool(random.random() < 0.4)}


def _play(case: Case, folder: Path) -> Figures:
    # errors of reading are those of this process, which nothing strikes
    subject, strike = _SUBJECTS[case["subject"]], case["strike"]
    figures: Figures = {case["subject"].replace(" ", "_"): 1}
    if strike["how"] not in disks.KINDS:
        return figures | {subject.play(strike, folder, case["is_first"]): 1}
    if _why_no_disks():
        return figures | {"without_a_disk": 1}
    with disks.disk(folder):
        end = subject.play({**strike, "disk": str(folder)}, folder, case["is_first"])
    return figures | {end: 1, "disks": 1}


@cache
def _why_no_disks() -> str:
    return disks.why_none()


def _prepare() -> None:
    _trace(2), _trace(5), _trace(300), _trace(400)
    if why := _why_no_disks():
        sys.stderr.write(f"kill: no disks that get full or read-only are made here: {why}\n")


CAMPAIGN = Campaign(
    "kill",
    "The last complete state is offered, nothing half-written is taken for whole, leftovers go.",
    _draw,
    _play,
    _prepare,
    n_bytes=2**29,
    batch=8,
    n_least=28,
)
