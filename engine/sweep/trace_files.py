"""An exported trace as the bytes of its files, to bring it from one machine to another."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from engine.errors import OptionError
from engine.trace.export import check_target
from engine.trace.replacing import replacing

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
