"""Imports point one way: app, then engine, then kernels; Qt stays in app, torch out of start-up."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "app": {"app", "engine", "resources"},
    "engine": {"engine", "kernels"},
    "kernels": {"kernels"},
    "resources": {"resources"},
}
OURS = set(ALLOWED)
QT = ("PySide6", "shiboken6", "pyqtgraph")


def modules(package: str) -> list[Path]:
    """The modules of a package that are imported, as opposed to scripts kept with resources."""
    found = sorted((ROOT / package).rglob("*.py"))
    return [path for path in found if package != "resources" or path.parent == ROOT / package]


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    """The imports and classes of a file, wherever in it."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every module that a file imports, wherever in the file."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.lineno, node.module


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package: str) -> None:
    files = modules(package)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports(path)
        if (top := name.split(".")[0]) in OURS and top not in ALLOWED[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["engine", "kernels", "resources"])
def test_no_qt_outside_app(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(package)
        for line, name in imports(path)
        if name.split(".")[0] in QT
    ]
    assert not wrong


def test_the_command_line_has_no_qt() -> None:
    paths = [ROOT / "app/__main__.py", *sorted((ROOT / "app/cli").rglob("*.py"))]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for line, name in imports(path)
        if name.split(".")[0] in QT
    ]
    assert not wrong


def test_no_two_classes_share_a_name() -> None:
    """Private ones of the adapters aside: each of those files does the same for one library."""
    found: dict[str, set[str]] = {}
    for path in (path for package in ALLOWED for path in modules(package)):
        for node in statements(path):
            if isinstance(node, ast.ClassDef) and not (
                node.name.startswith("_") and path.parent.name == "adapters"
            ):
                found.setdefault(node.name, set()).add(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in found.items() if len(places) > 1}


def loaded_after(code: str) -> set[str]:
    """Top-level modules present in a fresh interpreter after some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_engine_and_kernels_load_without_qt() -> None:
    """Importing every module of both packages brings no Qt in, not even through a dependency."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("engine", "kernels")
        for path in modules(package)
        if "triton" not in path.stem and "bench" not in path.parts
    ]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    loaded = loaded_after(code)
    assert {"engine", "kernels", "torch"} <= loaded
    assert not loaded & set(QT)


FIRST_SECOND = (
    "engine.gguf.file",
    "engine.gguf.tokenizer",
    "engine.gguf.chat",
    "engine.model.info",
    "engine.trace.export",
    "engine.options",
    "engine.observe.server.server_run",
    "engine.observe.proxy.proxy_run",
    "app.engine_thread.worker",
)


def test_modules_of_the_first_second_load_without_torch() -> None:
    """All in one process: loaded by one of them, it is there."""
    assert "torch" not in loaded_after(f"import {', '.join(FIRST_SECOND)}")


def test_what_talks_to_servers_loads_its_libraries_when_it_does() -> None:
    loaded = loaded_after(
        "import engine.observe.server.server_run, engine.observe.proxy.proxy_run, app.window.gui"
    )
    assert loaded.isdisjoint({"httpx", "uvicorn", "prometheus_client", "keyring"})
