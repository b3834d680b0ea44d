"""Which llama.cpp library is used, and whether the Python binding fits it.

llama.cpp takes and returns its parameters as structs by value, and tells no version of them: a
library of another build would read and write other fields than the binding means, or beyond its
memory. So a library that did not come with the binding is looked at first, in a child process that
it may crash: it has to have every function that the binding names, return structs of the binding's
sizes, and give the fields the values that the binding's own library gives them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import OptionError, PeerLibraryError

_NAMES = {"darwin": ("libllama.dylib", "libllama.so"), "win32": ("llama.dll", "libllama.dll")}
_PLACES = (".", "bin", "lib", "build/bin", "src")
_STRUCTS = ("llama_context_default_params", "llama_model_default_params")
_ROOM = 1 << 14
_PADDING = 8
_PROBE_S = 60.0
INSTALL = "Install it with: pip install 'llama-cpp-python>=0.3.36'"
_REMEDY = "Use a build of the sources that this llama-cpp-python was made from."


def missing() -> str:
    """Why there can be no lanes of llama.cpp here, in a sentence; empty if there can."""
    if importlib.util.find_spec("llama_cpp") is not None:
        return ""
    return f"llama.cpp lanes need llama-cpp-python. {INSTALL}"


def folder_of(library: Path) -> Path:
    """The folder with the libllama that a user named: that file, a build's folder, or the folder
    of the sources around it. Raises OptionError."""
    names = _NAMES.get(sys.platform, ("libllama.so",))
    if library.is_file():
        folder = library.resolve().parent
        if any((folder / name).exists() for name in names) and library.name.split(".")[0] in (
            "libllama",
            "llama",
        ):
            return folder
    elif library.is_dir():
        for place in _PLACES:
            if any((library / place / name).is_file() for name in names):
                return (library / place).resolve()
    raise OptionError(
        f"There is no llama.cpp library at {str(library)[:80]}.",
        f"Name the folder of a build with {names[0]} in it, or that file.",
    )


def check_library(folder: Path | None) -> None:
    """Raises OptionError without the binding, PeerLibraryError for a library that it cannot use.

    folder: that of a libllama, None = the binding's own, which fits.
    """
    if folder is None:
        return
    stamps = tuple(sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*llama*")))
    _check(folder, stamps)


@cache
def _check(folder: Path, _stamps: tuple[tuple[str, int], ...]) -> None:
    found = _probe(folder)
    for name, size in found["sizes"].items():
        written = found["written"].get(name)
        if written is not None and not size - _PADDING < written <= size:
            raise PeerLibraryError(
                f"The library in {folder.name} returns {written} bytes from {name} where "
                f"llama-cpp-python expects {size}.",
                _REMEDY,
            )
    own = _probe(None, must_load=False)
    expected = own["fields"] if own else {}
    others = [
        f"{name} {found['fields'].get(name)} for {value}"
        for name, value in expected.items()
        if found["fields"].get(name) != value
    ]
    if others:
        raise PeerLibraryError(
            f"The library in {folder.name} has other default parameters than the one of "
            f"llama-cpp-python ({', '.join(others[:3])}), so their structs are not the same.",
            _REMEDY,
        )


def environment(folder: Path | None) -> dict[str, str]:
    """For a child that loads the library in a folder (None: the binding's own)."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(part or os.getcwd() for part in sys.path)
    found["GGML_NO_BACKTRACE"] = "1"  # which would start a debugger
    found.pop("LLAMA_CPP_LIB_PATH", None)
    if folder is not None:
        found["LLAMA_CPP_LIB_PATH"] = str(folder)
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


def _probe(folder: Path | None, *, must_load: bool = True) -> dict[str, Any]:
    """What a child finds out about a library. Empty if it cannot load and need not."""
    found: dict[str, Any]
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            capture_output=True,
            timeout=_PROBE_S,
            env=environment(folder),
            check=False,
        )
        found = json.loads(child.stdout)
    except subprocess.TimeoutExpired:
        found = {"error": f"it was not loaded within {_PROBE_S:g} s"}
    except ValueError:
        found = {"error": how_it_ended(child.returncode)}
    if "missing" in found:
        raise OptionError(
            f"llama.cpp lanes need llama-cpp-python, which cannot be imported "
            f"({found['missing']}).",
            INSTALL,
        )
    if "error" not in found:
        return found
    if not must_load:
        return {}
    where = "" if folder is None else f" in {folder.name}"
    raise PeerLibraryError(
        f"The library{where} cannot be used by llama-cpp-python: {found['error']}.", _REMEDY
    )


def _look() -> dict[str, Any]:
    """The child: what the binding and the library say of each other."""
    try:
        api: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        return {"missing": str(error)}
    except (AttributeError, OSError, RuntimeError) as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"sizes": {}, "written": {}, "fields": {}}
    library = ctypes.CDLL(api.llama_cpp._lib._name)
    for name in _STRUCTS:
        made = getattr(api, name)
        found["sizes"][name] = ctypes.sizeof(made.restype)
        # in this calling convention the caller passes the place of a struct of more than 16 bytes
        # as the first argument; elsewhere only the values of the fields can be looked at
        if platform.machine() in ("x86_64", "AMD64") and sys.platform != "win32":
            found["written"][name] = _n_written(getattr(library, name))
        if found["written"].get(name, 0) > ctypes.sizeof(made.restype):
            continue  # the binding's own call would write beyond its memory
        values = made()
        for field, _ in values._fields_:
            value = getattr(values, field)
            plain = isinstance(value, int | float)
            found["fields"][f"{name}.{field}"] = value if plain else bool(value)
    return found


def _n_written(function: Any) -> int:
    """Bytes up to the last one that a function returning a struct writes."""
    function.restype, function.argtypes = None, [ctypes.c_void_p]
    seen = []
    for fill in (0xA5, 0x5A):
        buffer = (ctypes.c_ubyte * _ROOM)(*[fill] * _ROOM)
        function(buffer)
        seen.append(bytes(buffer))
    same = [i for i, (a, b) in enumerate(zip(*seen, strict=True)) if a == b]
    return same[-1] + 1 if same else 0


if __name__ == "__main__":
    print(json.dumps(_look()))  # noqa: T201 - the child's answer
