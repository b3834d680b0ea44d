"""An exported trace as the bytes of its files, to bring it from one machine to another, and a place
for files on their way."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from engine.errors import OptionError
from engine.trace.export import check_target
from engine.trace.replacing import replacing

_FOLDER = "draftscope-sweep-"
_NAME = re.compile(r"[a-z][a-z0-9_]*\.(csv|json)")


def pack_trace(folder: Path) -> dict[str, bytes]:
    """Its files by name, compressed."""
    return {path.name: zlib.compress(path.read_bytes(), 1) for path in sorted(folder.iterdir())}


def unpack_trace(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files into a folder, in place of an earlier trace. Raises OptionError."""
    try:
        with replacing(folder, check_target, lambda _: set(files)) as stage:
            for name, content in files.items():
                if _NAME.fullmatch(name):
                    (stage / name).write_bytes(zlib.decompress(content))
    except OSError as error:
        raise OptionError(
            f"{folder} cannot be written: {error.strerror or error}.", "Free some space."
        ) from error


def own_folder() -> Path:
    """A new folder of this process for files that are needed for a while.

    What processes left that are gone is removed: a worker may be killed at any moment.
    """
    places = Path(tempfile.gettempdir())
    for left in places.glob(f"{_FOLDER}*-*"):
        pid = left.name.removeprefix(_FOLDER).split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=places))


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # where a signal would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
