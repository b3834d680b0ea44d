"""Files that a user names: errors about them, and writing one as a whole or not at all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import DraftscopeError, OptionError


def unreadable(
    path: Path, error: OSError, kind: type[DraftscopeError] = OptionError
) -> DraftscopeError:
    """The error, of this kind, about a file that the system does not let us read."""
    return kind(
        f"{path} cannot be read: {error.strerror or error}.", "Check the path and its rights."
    )


def user_text(path: Path, most_bytes: int) -> str:
    """The text of a file that a user names, without a byte order mark.

    Raises OptionError for what is no file (a device or a pipe might never end), is larger, is not
    UTF-8 or cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no file.", "Name a text file.")
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a name with a null character
        reason = error if isinstance(error, OSError) else OSError(str(error))
        raise unreadable(path, reason) from error
    if len(raw) > most_bytes:
        raise OptionError(f"{path} is larger than {most_bytes >> 20} MiB.", "Split it.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise OptionError(
            f"{path}: line {line} is not UTF-8 text.", "Convert the file to UTF-8."
        ) from error


def is_unicode(text: str) -> bool:
    """Whether a text can be written at all: JSON may hold halves of characters."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextmanager
def written_whole(path: Path, kind: type[DraftscopeError] = OptionError) -> Iterator[Path]:
    """A path beside `path` to write to; the file takes the place of `path` when the body is done.

    After an error in the body nothing is left of it. Raises an error of this kind where the system
    does not let us write.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        try:
            yield part
            part.replace(path)
        except BaseException:
            with suppress(OSError):  # what went wrong before is what is told
                part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise kind(
            f"{path} cannot be written: {error.strerror or error}.",
            "Choose another path, or free some space.",
        ) from error
