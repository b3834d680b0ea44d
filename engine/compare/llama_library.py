"""Builds of llama.cpp: how a user's argument is resolved, and how each build is driven.

A build is a build tree, an install prefix, a folder with `llama.h` and the library, the library
itself, a Python wheel, or the name of an installed package. With headers and a C++ compiler,
llama_driver.cpp is compiled for it once, into the cache folder; else engine.compare.llama_cpp
drives it through ctypes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from engine.errors import OptionError, PeerLibraryError
from kernels.kernel_files import cache_folder

_NAMES = {
    "darwin": ("libllama.dylib", "libllama.so", "xllamacpp.abi3.so"),
    "win32": ("llama.dll", "libllama.dll"),
}
_DEFAULT_NAMES = ("libllama.so", "xllamacpp.abi3.so")
_PLACES = (".", "bin", "lib", "lib64", "build/bin", "build/lib", "src", "build/src")
_PACKAGES = {"llama_cpp": "lib", "xllamacpp": "."}
"""Packages with a library, and its place in the package."""
_SOURCE = Path(__file__).with_name("llama_driver.cpp")
_COMPILERS = ("c++", "clang++", "g++")
_COMPILE_S = 300.0
_MOST_UNPACKED = 1 << 32
_LONGEST = 300
INSTALL = "Name a build with --llama-cpp, or install one: pip install xllamacpp"


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """library: the file with the C interface. headers: folders with llama.h and ggml.h, may be
    empty."""

    library: Path
    headers: tuple[Path, ...] = ()

    @property
    def stamp(self) -> str:
        """A hash of the driver's inputs: its source, the headers, the library file."""
        made_of = hashlib.sha256(_SOURCE.read_bytes())
        for folder in self.headers:
            for path in sorted(folder.glob("*.h")):
                made_of.update(path.read_bytes())
        state = self.library.stat()
        made_of.update(f"{self.library} {state.st_size} {state.st_mtime_ns}".encode())
        return made_of.hexdigest()[:24]


def missing() -> str:
    """Why lanes of llama.cpp are impossible here, in a sentence; empty if they are possible."""
    if any(find_spec(name) for name in _PACKAGES):
        return ""
    return f"llama.cpp lanes need a build of llama.cpp. {INSTALL}"


def find_build(named: Path | None) -> LlamaBuild:
    """The build at a path, in a wheel, or in the named package; None = the first installed package
    that has one. Raises OptionError, naming what is missing."""
    if named is None or str(named) in _PACKAGES:
        return _installed([str(named)] if named else list(_PACKAGES))
    if named.is_file() and named.suffix == ".whl":
        named = _unpacked(named)
    names = _NAMES.get(sys.platform, _DEFAULT_NAMES)
    library, places = None, [named.parent]
    if named.is_file():
        if re.match(r"(lib)?llama\.|xllamacpp\.", named.name):
            library = named
    else:
        package_places = [f"{package}/{place}" for package, place in _PACKAGES.items()]
        places = [named / place for place in (*_PLACES, *package_places)]
        found = (place / name for place in places for name in names)
        library = next((path for path in found if path.is_file()), None)
    if library is None:
        is_static = any((place / "libllama.a").is_file() for place in places)
        why = "only a static one: build with -DBUILD_SHARED_LIBS=ON" if is_static else "none"
        raise OptionError(
            f"There is no llama.cpp library at {str(named)[:80]} ({names[0]}: {why}).",
            "Name a build tree, an install prefix, a wheel, or the folder with that file.",
        )
    return LlamaBuild(library.resolve(), _headers(library.resolve(), named))


def start_words(build: LlamaBuild) -> list[str]:
    """The command that drives a build: the compiled driver, or without headers or compiler, Python
    with ctypes. Raises PeerLibraryError if compilation fails."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if build.headers and compiler and sys.platform != "win32":
        return [str(_compiled(build, compiler))]
    return [sys.executable, "-m", "engine.compare.llama_cpp", str(build.library)]


def environment(folder: Path | None) -> dict[str, str]:
    """Environment of a child that loads a library from a folder."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(part or os.getcwd() for part in sys.path)
    found["GGML_NO_BACKTRACE"] = "1"  # it would start a debugger
    if folder is not None:
        known = found.get("LD_LIBRARY_PATH")
        found["LD_LIBRARY_PATH"] = str(folder) + (os.pathsep + known if known else "")
    return found


def how_it_ended(status: int) -> str:
    """A process's exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _installed(packages: list[str]) -> LlamaBuild:
    for name in packages:
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            return find_build(Path(folder) / _PACKAGES[name])
    raise OptionError(f"The package {' or '.join(packages)} is not installed.", f"{INSTALL}.")


def _headers(library: Path, named: Path) -> tuple[Path, ...]:
    """Folders of llama.h and ggml.h that belong to a library: in the named folder, in parents of
    the library, or in the sources it was built from."""
    roots = [*library.parents[:4]]
    if named.is_dir():
        roots.insert(0, named.resolve())
    for folder in library.parents[:3]:
        cache = folder / "CMakeCache.txt"
        if cache.is_file():
            text = cache.read_text(errors="replace")
            if found := re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", text, re.M):
                roots.insert(0, Path(found[1]))
    for root in roots:
        folders = [root / "include", root / "ggml" / "include", root]
        with_llama = next((one for one in folders if (one / "llama.h").is_file()), None)
        with_ggml = next((one for one in folders if (one / "ggml.h").is_file()), None)
        if with_llama and with_ggml:
            return tuple(dict.fromkeys((with_llama, with_ggml)))
    return ()


def _unpacked(wheel: Path) -> Path:
    """The libraries of a wheel, unpacked once into the cache folder. Raises OptionError."""
    state = wheel.stat()
    key = hashlib.sha256(f"{wheel.resolve()} {state.st_size} {state.st_mtime_ns}".encode())
    folder = cache_folder() / "llama.cpp" / f"wheel-{key.hexdigest()[:24]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            tempfile.TemporaryDirectory(dir=folder.parent) as made,
        ):
            libraries = [
                one
                for one in archive.infolist()
                if re.search(r"\.(so|dylib|dll|h)(\.[\d.]+)?$", one.filename)
            ]
            if sum(one.file_size for one in libraries) > _MOST_UNPACKED:
                raise OptionError(
                    f"{wheel.name} unpacks to more than {_MOST_UNPACKED >> 30} GiB.",
                    "Unpack it and name its folder.",
                )
            archive.extractall(made, libraries)
            Path(made).rename(folder)
            Path(made).mkdir()  # before the temporary folder is deleted
    except (zipfile.BadZipFile, OSError) as error:
        if not folder.is_dir():
            raise OptionError(
                f"{wheel.name} cannot be unpacked: {error}.", "Name a wheel of llama.cpp."
            ) from error
    return folder


def _compiled(build: LlamaBuild, compiler: str) -> Path:
    """Compile the driver of a build. Raises PeerLibraryError."""
    driver = cache_folder() / "llama.cpp" / f"driver-{build.stamp}"
    if driver.is_file():
        return driver
    driver.parent.mkdir(parents=True, exist_ok=True)
    folder = build.library.parent
    found = (
        next(iter(sorted(folder.glob(f"lib{name}.*"))), None) for name in ("ggml", "ggml-base")
    )
    libraries = [str(build.library), *(str(one) for one in found if one)]
    with tempfile.TemporaryDirectory(dir=driver.parent) as made:
        words = [
            *(compiler, "-std=c++17", "-O1", "-o", f"{made}/driver", str(_SOURCE)),
            *(word for one in build.headers for word in ("-I", str(one))),
            *libraries,
            f"-Wl,-rpath,{folder}",
            "-ldl",
        ]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S
            )
            failed = done.stderr if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failed = f"error: {error}"
        if failed:
            lines = [line for line in failed.splitlines() if "error" in line or "undefined" in line]
            why = (lines or failed.splitlines() or ["no reason given"])[0].rpartition("/")[2]
            raise PeerLibraryError(
                f"The driver does not compile against {build.headers[0]}: {why[:_LONGEST]}.",
                "Name a build whose headers and library have the same version.",
            )
        os.replace(f"{made}/driver", driver)
    return driver
