"""What a wheel would hold: every module, and every file that travels with the program."""

from __future__ import annotations

import subprocess
import warnings
import zipfile
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.command.build_py import build_py
from setuptools.config.pyprojecttoml import apply_configuration

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "engine", "kernels", "resources")


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Files of the packages under version control, but for pictures of the README."""
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("no checkout")
    names = set(listed.stdout.splitlines())
    return {name for name in names if not name.startswith("resources/screenshots/")}


@pytest.fixture(scope="module")
def packaged() -> set[str]:
    """What setuptools would copy, by its own reading of pyproject.toml."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of setuptools, which differ by its version
        patch.chdir(ROOT)
        distribution = Distribution({"script_name": "setup.py"})
        apply_configuration(distribution, "pyproject.toml")
        command = build_py(distribution)
        command.finalize_options()
        modules = {path for _, _, path in command.find_all_modules()}
        data = {
            str(Path(folder) / name) for _, folder, _, names in command.data_files for name in names
        }
    return {Path(path).as_posix() for path in modules | data}


def test_nothing_is_left_out(tracked: set[str], packaged: set[str]) -> None:
    assert tracked - packaged == set()


def test_nothing_else_is_taken_along(packaged: set[str]) -> None:
    assert not [name for name in packaged if "__pycache__" in name]
    assert {name.split("/")[0] for name in packaged} == set(PACKAGES)


def test_a_wheel_that_is_there_holds_them(tracked: set[str]) -> None:
    """Where somebody has built one; the suite builds none."""
    wheels = sorted((ROOT / "dist").glob("draftscope-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        pytest.skip("no wheel in dist/")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        assert tracked - set(wheel.namelist()) == set()
