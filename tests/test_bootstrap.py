"""`bootstrap` in a project of its own, with a stand-in for every package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.package_index import PackageIndex, write_wheel

ROOT = Path(__file__).parents[1]
UNCOMPILED = ("PIP_NO_COMPILE", "PYTHONDONTWRITEBYTECODE")
TOOLS = ("cat", "cmp", "cp", "dirname", "env", "grep", "id", "sh", "tr", "uname")
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
# builds a wheel that installs the command `draftscope` and asks for what the real one asks for
BACKEND = """\
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.support.package_index import write_wheel

def build_editable(folder, config_settings=None, metadata_directory=None):
    needs = "Requires-Dist: torch>=2.13,<2.14\\nRequires-Dist: pytest; extra == 'test'\\n"
    main = "def main(): import sys; print('the demo', sys.argv[1:])"
    return write_wheel(
        Path(folder), "draftscope", "1.0", {{"window.py": main}}, "draftscope = window:main",
        needs + "Provides-Extra: test\\n"
    ).name
"""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or Path("/dev/nvidia0").exists(),
    reason="for Linux without an NVIDIA device",
)

Bootstrap = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environment") / ".venv"
    # with pip compiled, which each copy would do otherwise
    environment = {name: value for name, value in os.environ.items() if name not in UNCOMPILED}
    command = [sys.executable, "-m", "venv", path]
    subprocess.run(command, check=True, timeout=300, env=environment)
    return path


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PackageIndex]:
    with PackageIndex(tmp_path / "served") as served:
        served.add("cpu", "torch", "2.13.0+cpu", {"torch.py": ""})
        served.add("cpu", "torch", "2.14.0+cpu", {"torch.py": ""})
        served.add("simple", "torch", "2.13.0", {"torch.py": ""})
        served.add("simple", "pytest", "9.0", {"pytest.py": "print('the tests')"})
        yield served


@pytest.fixture
def project(tmp_path: Path, empty_environment: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    shutil.copy(ROOT / "bootstrap", path)
    (path / "pyproject.toml").write_text(PROJECT)
    (path / "backend.py").write_text(BACKEND.format(root=str(ROOT)))
    shutil.copytree(empty_environment, path / ".venv", symlinks=True)
    return path


@pytest.fixture
def bootstrap(tmp_path: Path, project: Path, index: PackageIndex) -> Bootstrap:
    """Runs it with few tools on the path: there is no apt-get, and no nvidia-smi."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(tools),
            "HOME": str(tmp_path),
            "PYTHON": sys.executable,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{index.url}/simple",
            "DRAFTSCOPE_TORCH_INDEX": f"{index.url}/cpu",
        }
        return subprocess.run(
            ["sh", "bootstrap", *words],
            cwd=project,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def packages(project: Path) -> set[str]:
    """Names and versions of what is in the environment, but for what a new one has."""
    found = {path.name for path in project.glob(".venv/lib/python*/site-packages/*.dist-info")}
    names = {name.removesuffix(".dist-info") for name in found}
    return {name for name in names if not name.startswith(("pip-", "setuptools-"))}


def test_packages_that_an_interrupted_call_left_unpacked_are_configured_first(
    bootstrap: Bootstrap, tmp_path: Path
):
    ran = tmp_path / "ran"
    for name, line in {
        "id": "echo 0",
        "ldconfig": ":",
        "ls": "exit 2",
        "dpkg": f'echo "dpkg $*" >>{ran}',
        "apt-get": f'echo "apt-get $1" >>{ran}; [ "$1" = update ]',
    }.items():
        (tmp_path / "tools" / name).unlink(missing_ok=True)
        (tmp_path / "tools" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "tools" / name).chmod(0o755)
    assert bootstrap("setup").returncode != 0
    assert ran.read_text().splitlines() == [
        "dpkg --configure -a",
        "apt-get update",
        "apt-get install",
    ]


def test_the_demo_needs_a_torch_for_the_cpu_and_no_packages_of_the_tests(bootstrap, project, index):
    demo = bootstrap("demo", "--fast")
    assert demo.returncode == 0, demo.stderr
    assert demo.stdout.splitlines()[-1] == "the demo ['--demo', '--fast']"
    assert packages(project) == {"torch-2.13.0+cpu", "draftscope-1.0"}
    assert index.fetched == ["/cpu/torch/torch-2.13.0%2Bcpu-py3-none-any.whl"]
    lines = demo.stdout.splitlines()
    said = next(i for i, line in enumerate(lines) if "192 MB, 750 on disk" in line)
    fetched = next(i for i, line in enumerate(lines) if "Downloading" in line)
    assert said < fetched

    index.asked.clear()
    tests = bootstrap("test", "-k", "some")
    assert tests.returncode == 0, tests.stderr
    assert tests.stdout.splitlines()[-1] == "the tests"
    assert index.fetched == ["/simple/pytest/pytest-9.0-py3-none-any.whl"]
    assert not any(path.startswith("/cpu") for path in index.asked)

    index.asked.clear()
    for words in (["demo"], ["test", "-k", "some"], ["setup"]):
        assert bootstrap(*words).returncode == 0
    assert index.asked == []


@pytest.mark.parametrize("why", ["no such version", "no server"])
@pytest.mark.thinned(4)
def test_without_an_index_of_torch_the_ordinary_one_is_taken(bootstrap, project, index, why):
    url = f"{index.url}/cpu"
    if why == "no such version":
        (index.folder / "cpu/torch/torch-2.13.0+cpu-py3-none-any.whl").unlink()
    else:
        url = "http://127.0.0.1:9/cpu"
    demo = bootstrap("demo", DRAFTSCOPE_TORCH_INDEX=url)
    assert demo.returncode == 0, demo.stderr
    assert f"{url} cannot be reached or has no torch 2.13.0 for this Python." in demo.stdout
    assert "with CUDA and Triton (2,730 MB, 4,600 on disk)" in demo.stdout
    assert "torch-2.13.0" in packages(project)


def test_with_an_nvidia_device_the_ordinary_index_has_torch(bootstrap, project, tmp_path):
    (tmp_path / "tools/nvidia-smi").symlink_to(shutil.which("true") or "")
    demo = bootstrap("demo", DRAFTSCOPE_TORCH_INDEX="")
    assert demo.returncode == 0, demo.stderr
    assert "cannot be reached" not in demo.stdout
    assert "torch-2.13.0" in packages(project)


def test_a_torch_in_a_folder_of_pips_configuration_is_taken(bootstrap, project, index, tmp_path):
    write_wheel(tmp_path / "wheels", "torch", "2.13.0+mine", {"torch.py": ""})
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[install]\nfind-links = {tmp_path / 'wheels'}\n")
    demo = bootstrap("demo", DRAFTSCOPE_TORCH_INDEX="", PIP_CONFIG_FILE=str(settings))
    assert demo.returncode == 0, demo.stderr
    assert "torch-2.13.0+mine" in packages(project)
    assert not any("/torch/" in path for path in index.asked)


def test_what_was_interrupted_goes_on(bootstrap, project, index):
    # an environment without pip, as while it is made
    for path in project.glob(".venv/lib/python*/site-packages/pip*"):
        shutil.rmtree(path)
    # and an index that fails once torch is there
    (index.folder / "simple/pytest").rename(index.folder / "gone")
    failed = bootstrap("test", "-k", "some")
    assert failed.returncode != 0 and "the tests" not in failed.stdout
    assert "torch-2.13.0+cpu" in packages(project)
    (index.folder / "gone").rename(index.folder / "simple/pytest")
    index.asked.clear()
    again = bootstrap("test", "-k", "some")
    assert again.returncode == 0, again.stderr
    assert index.fetched == ["/simple/pytest/pytest-9.0-py3-none-any.whl"]


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_names_goals_variables_and_sizes(bootstrap, word):
    done = bootstrap(word)
    assert done.returncode == 0
    for part in ("demo ", "test ", "setup ", "PYTHON", "DRAFTSCOPE_TORCH_INDEX", " MB, "):
        assert part in done.stdout


@pytest.mark.parametrize("words", [("demos",), ("setup", "-q")])
def test_an_unknown_goal_is_wrong_usage(bootstrap, words):
    done = bootstrap(*words)
    assert done.returncode == 2 and "usage: sh bootstrap" in done.stderr
