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
