"""Kernel files imported without their engine: stubs, wheels, what is missing."""

from __future__ import annotations

import sys
import tarfile
import zipfile

import pytest

from engine.conform.adapters import Engine
from engine.conform.packages import NoPlatform, open_package
from engine.conform.runner import open_target
from engine.errors import KernelPackageError

KERNELS = """
from somewhere_not_installed import thing
from toyengine.config import Config, LIMIT, register
from toyengine.platforms import current_platform
from .helpers import twice

@register("name")
def four():
    return twice(2)

class Layer(Config):
    pass

fast = current_platform.is_cuda()
newer = Config.version >= (3, 0)
"""


@pytest.fixture
def folder(tmp_path):
    files = {
        "toyengine/__init__.py": "raise RuntimeError('the engine itself was imported')",
        "toyengine/ops/__init__.py": "raise RuntimeError('the engine itself was imported')",
        "toyengine/ops/kernels.py": KERNELS,
        "toyengine/ops/helpers.py": "def twice(x):\n    return 2 * x\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "toyengine-1.2.3.dist-info").mkdir()
    yield tmp_path
    for name in [
        m for m in sys.modules if m.split(".")[0] in ("toyengine", "somewhere_not_installed")
    ]:
        del sys.modules[name]


def loaded(package):
    kept = ("toyengine.ops.kernels", "toyengine.ops.helpers")
    values = {"toyengine.config.LIMIT": 7, "toyengine.platforms.current_platform": NoPlatform()}
    with package.imports(Engine("toyengine", (), kept, values, ())):
        return package.module("toyengine.ops.kernels")


def test_a_kernel_file_runs_with_stubs_around_it(folder):
    package = open_package(str(folder), "toyengine")
    assert package.version == "1.2.3"
    module = loaded(package)
    assert module.four() == 4
    assert module.LIMIT == 7
    assert module.fast is False
    assert module.newer is False
    assert module.Layer.__mro__[-1] is object


def test_a_wheel_is_unpacked(folder, tmp_path):
    wheel = tmp_path / "toyengine-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (folder / "toyengine").rglob("*.py"):
            archive.write(path, path.relative_to(folder))
    package = open_package(str(wheel), "toyengine")
    assert package.version == "1.2.3"
    assert loaded(package).four() == 4


@pytest.mark.parametrize("name", ["toyengine-1.2.3.tar.gz", "toy-engine-1.2.3.tar.gz"])
def test_a_source_archive_is_unpacked(folder, name):
    with tarfile.open(folder / name, "w:gz") as archive:
        archive.add(folder / "toyengine", f"{name.removesuffix('.tar.gz')}/toyengine")
    package = open_package(str(folder / name), "toyengine")
    assert package.version == "1.2.3"
    assert loaded(package).four() == 4


def test_a_moved_kernel_is_an_error_with_a_remedy(folder):
    package = open_package(str(folder), "toyengine")
    with pytest.raises(KernelPackageError, match=r"has no toyengine\.ops\.moved"):
        package.module("toyengine.ops.moved")


def test_a_package_without_kernels_says_where_they_are(tmp_path):
    wheel = tmp_path / "flash_linear_attention-0.6.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fla/layers/kda.py", "from fla.ops.kda import chunk_kda")
    with pytest.raises(KernelPackageError, match=r"fla 0\.6\.0 has no file of kernels.*") as error:
        open_target(str(wheel))
    assert "fla-core" in str(error.value)


@pytest.mark.parametrize("damage", ["text", "other", "leaving"])
def test_a_damaged_wheel_is_an_error(tmp_path, damage):
    wheel = tmp_path / "toyengine-1.0-py3-none-any.whl"
    if damage == "text":
        wheel.write_text("no archive")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("toyengine/../../x.py" if damage == "leaving" else "other/x.py", "1")
    with pytest.raises(KernelPackageError):
        open_package(str(wheel), "toyengine")
    assert not (tmp_path.parent / "x.py").exists()


def test_a_damaged_source_archive_is_an_error(tmp_path):
    archive = tmp_path / "toyengine-1.0.tar.gz"
    archive.write_bytes(b"\x1f\x8b\x08 no archive")
    with pytest.raises(KernelPackageError, match="not a readable"):
        open_package(str(archive), "toyengine")


def test_what_is_nowhere_names_the_remedy():
    with pytest.raises(KernelPackageError, match="pip download"):
        open_package("no_such_engine", "no_such_engine")
