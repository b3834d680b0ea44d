"""llama.cpp's programs as child processes, none of which outlives this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.compare.llama_library import how_it_ended
from engine.compare.llama_process import last_words
from engine.errors import OptionError, PeerLibraryError

LONGEST_S = 1800.0
"""What a program may take for one measurement, loading the model included."""
_LEAVE_S = 10.0
_PLACES = (".", "bin", "build/bin")
# on Linux the signal (9) comes with the end of the parent, also where that had no time for anything
_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class StartedProgram:
    """A running program, and the file that its error output goes to."""

    name: str
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]

    def ended(self) -> PeerLibraryError:
        """Why it is no longer there, in its own last words."""
        why = last_words(self.stderr) or how_it_ended(self.process.wait())
        return PeerLibraryError(
            f"{self.name} ended: {why}.", "See whether this build opens the model by itself."
        )


def find_program(folder: Path | None, name: str) -> Path:
    """A program in a folder of a build, or in the folder of the sources around it; None: on $PATH.
    Raises OptionError."""
    if folder is None:
        found = shutil.which(name)
        if found is None:
            raise OptionError(
                f"There is no {name} on $PATH.", "Name the folder of a llama.cpp build."
            )
        return Path(found)
    for place in _PLACES:
        path = folder / place / name
        if path.is_file() and os.access(path, os.X_OK):
            return path.resolve()
    raise OptionError(
        f"There is no {name} in {str(folder)[:80]}.", "Name the folder of a llama.cpp build."
    )


@contextmanager
def started(program: Path, words: Sequence[object], stdout: int) -> Iterator[StartedProgram]:
    """The program with these arguments; after the body, or an error in it, it is gone.

    stdout: as in subprocess. Raises PeerLibraryError where the system does not start it.
    """
    command = [str(program), *(str(word) for word in words)]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _WITH_PARENT, *command]
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
        except OSError as error:
            raise PeerLibraryError(
                f"{program.name} cannot be started: {error.strerror or error}.", "Build it anew."
            ) from error
        try:
            yield StartedProgram(program.name, process, stderr)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, then insist; whatever happens, the process is gone and waited for."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(_LEAVE_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
