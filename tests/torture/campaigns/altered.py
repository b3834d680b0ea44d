"""Altered inputs of every kind that the program reads: texts, models, traces and settings."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PySide6.QtCore import QByteArray, QSettings

import app.cli.compare
from app.saved.settings import Settings
from engine.compare.scenario import read_scenario
from engine.errors import DraftscopeError
from engine.trace.reopen import open_trace
from resources import DEMO_TARGET, MEMORY_SCRIPTS, SCENARIOS
from tests.support.altered_files import altered_binary, altered_text, bases
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.campaigns.encodings import INPUTS, said_of, sources
from tests.torture.commands import Said, said_by
from tests.torture.real_window import RealWindow

_CPU_S = 20.0
_BINARY = ("model", "draft", "lookup", "results")
_OTHERS, _SETTINGS, _SCENARIO = "import others", "settings", "scenario"
_OFTEN = (_OTHERS, "import log", "export", "import capture", _OTHERS, "plan", _SETTINGS, _SCENARIO)
_DECODED = ("turns", "bench prompts", "match prompts")
"""Decoded one by one, thousands of them if a file says so."""
_NAMES = (*(name for name in INPUTS if name not in _DECODED), *_OFTEN * 6)
_N_DECODED = 64
"""Tokens that an altered scenario may ask for and be decoded."""
_shown: list[RealWindow] = []
"""The window of this process, once a case has made it."""


def _draw(random: np.random.Generator, number: int) -> Case:
    return {
        "input": _NAMES[number % len(_NAMES)],
        "which": int(random.integers(1 << 16)),
        "seed": int(random.integers(1 << 31)) if number % 8 else None,
    }


def _play(case: Case, folder: Path) -> Figures:
    os.chdir(folder)
    start = time.process_time()
    if case["input"] == _SETTINGS:
        _read_settings(case, folder)
        done = True
    else:
        said = _scenario(case, folder) if case["input"] == _SCENARIO else _command(case, folder)
        said.check()
        assert "not enough memory" not in said.text, f"{case['input']}: {said.text[-300:]}"
        done = said.status == 0
        assert done or case["seed"] is not None, f"what is not altered: {said.text[-300:]}"
    spent = time.process_time() - start
    assert spent < _CPU_S, f"{spent:.1f} s of processor time"
    return {"altered": case["seed"] is not None, "done": done, "cpu_s_max": spent}


def _altered(case: Case, data: bytes, *, is_binary: bool = False) -> bytes:
    if case["seed"] is None:
        return data
    chosen = random.Random(case["seed"])
    return altered_binary(data, chosen) if is_binary else altered_text(data, chosen)[1]


def _command(case: Case, folder: Path) -> Said:
    if case["input"] == _OTHERS:
        whole = bases()
        name = sorted(whole)[case["which"] % len(whole)]
        (folder / "given").write_bytes(_altered(case, whole[name]))
        trace = folder / "trace"
        said = said_by(["import", str(folder / "given"), "--trace", str(trace)])
        if trace.exists():
            open_trace(trace)
        # a part of a stream by itself has no rounds
        return said if case["seed"] is not None else Said(0, said.out, said.err)
    words, what = INPUTS[case["input"]]
    source = sources()[what]
    if what == "script":
        scripts = sorted(MEMORY_SCRIPTS.glob("*.toml"))
        source = [source, *scripts][case["which"] % (1 + len(scripts))]
    if what == "capture":  # the whole one altered takes more memory than reading it
        source = folder / "whole.json"
        source.write_bytes(bases()["utf8.json"])
    path = folder / source.name
    if case["seed"] is None:
        path = source
    elif source.is_dir():
        shutil.copytree(source, path)
        files = sorted(path.iterdir())
        one = files[case["which"] % len(files)]
        one.write_bytes(_altered(case, one.read_bytes()))
    else:
        path.write_bytes(_altered(case, source.read_bytes(), is_binary=what in _BINARY))
    return said_of(words, str(path))


def _scenario(case: Case, folder: Path) -> Said:
    """Read and listed; played where it asks for little."""
    known = sorted(SCENARIOS.glob("*.toml"))
    source = known[case["which"] % len(known)]
    path = folder / source.name
    path.write_bytes(_altered(case, source.read_bytes()))
    words = ["compare", "--list-scenarios"]
    if case["seed"] is not None and case["which"] % 3 == 0:
        try:
            options = read_scenario(path).options
        except DraftscopeError:
            options = None
        # -1 is as many as there is room for
        if options and 0 <= options.n_predict <= _N_DECODED:
            words = ["compare", str(DEMO_TARGET), "--scenario", path.stem]
    with patch.object(app.cli.compare, "SCENARIOS", folder):
        return said_by(words)


def _read_settings(case: Case, folder: Path) -> None:
    """Every setting reads as something, and a window opens with them."""
    ini, user = QSettings.Format.IniFormat, QSettings.Scope.UserScope
    settings_folder = folder / "settings"
    path = settings_folder / "Draftscope" / "draftscope.ini"
    path.parent.mkdir(parents=True)
    path.write_bytes(_altered(case, _settings()))
    QSettings.setPath(ini, user, str(settings_folder))
    settings = Settings()
    for name in list(vars(Settings)):
        if hasattr(vars(Settings)[name], "__set__"):
            getattr(settings, name)
    settings.layout("stream"), settings.folder("export")
    assert settings.note.isprintable() and len(settings.note) < 600, settings.note
    settings.add_recent_server("http://h:1")
    settings.sync()
    assert Settings().recent_servers[:1] == ["http://h:1"], "settings are no longer kept"
    if case["which"] % 4 == 0 and not _shown:
        _shown.append(RealWindow(folder))
        _shown[0].check()
        _shown[0].close()


@cache
def _settings() -> bytes:
    """A file with every setting in it."""
    folder = Path(tempfile.mkdtemp(prefix="draftscope-torture-altered-"))
    ini, user = QSettings.Format.IniFormat, QSettings.Scope.UserScope
    QSettings.setPath(ini, user, str(folder))
    settings = Settings()
    settings.theme, settings.text_zoom, settings.open_groups = "dark", 3, ["drafting", "memory"]
    settings.ghosts, settings.tabs, settings.excel_safe = False, True, True
    settings.run_form = {"n_predict": 32, "spec.types": ["draft-mtp"], "spec.p_min": 0.5}
    settings.break_rules = [("accepted == 0", True), ("rollback_depth > 3", False)]
    settings.llama_library, settings.watch_port, settings.server_timeout = folder, 8082, 30
    settings.geometry = QByteArray(bytes(range(256)))
    for name in ("stream", "rollback", "compare"):
        settings.set_layout(name, QByteArray(bytes(range(64, 192))))
    for name in ("a.gguf", "b, c.gguf"):
        settings.add_recent_model(folder / name)
        settings.add_recent_trace(folder / name)
    settings.add_recent_server("http://127.0.0.1:8080")
    settings.set_folder("export", folder)
    settings.sync()
    return (folder / "Draftscope" / "draftscope.ini").read_bytes()


def _prepare() -> None:
    sources(), bases(), _settings()
    import app.window.window  # noqa: F401


CAMPAIGN = Campaign(
    "altered",
    "Read, or refused in a sentence: no traceback, no endless run, within 512 MiB.",
    _draw,
    _play,
    _prepare,
    seconds=60.0,
    n_bytes=2**29,
    batch=24,
    n_least=48,
)
