"""Child processes for programs of llama.cpp and others, which never outlive this process, and
servers among them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.compare.llama_library import how_it_ended
from engine.compare.llama_process import last_words
from engine.errors import OptionError, PeerLibraryError, ServerError
from engine.experiments.bench.server_speed import TimedServer

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SpeculativeWork:
    """A greedy request of n_predict arbitrary tokens, with drafts of len(rates) tokens from the MTP
    head, whose first i tokens are accepted with probability rates[i - 1]. n_ctx: cells of the
    context."""

    prompt: tuple[int, ...]
    n_predict: int
    rates: tuple[float, ...]
    n_ctx: int


@contextmanager
def llama_server(
    folder: Path | None, model: Path, work: SpeculativeWork, n_threads: int
) -> Iterator[TimedServer]:
    """A llama-server ready for this work, on the CPU only; ended after the body.

    folder: see find_program, whose errors it raises. Raises as `served`.
    """
    program = find_program(folder, "llama-server")
    port = free_port()
    words: Sequence[object] = (
        *("-m", model, "--host", _HOST, "--port", port, "-t", n_threads, "-dev", "none"),
        *("-np", 1, "-c", work.n_ctx),
        *("--spec-type", "draft-mtp", "--spec-draft-n-max", len(work.rates)),
        *("--spec-draft-p-min", 0, "--spec-synth-rates", ",".join(map(str, work.rates))),
    )
    with served(program, words, port, LONGEST_S, "Measure a smaller model.") as server:
        yield server


@contextmanager
def served(
    program: Path, words: Sequence[object], port: int, most_s: float, remedy: str, key: str = ""
) -> Iterator[TimedServer]:
    """Start a server program with these arguments and wait until it answers at a local port; ended
    after the body.

    most_s, remedy: see TimedServer.wait; key: see TimedServer. Raises PeerLibraryError if it does
    not come up, or if the body fails because it has ended.
    """
    with started(program, words, subprocess.DEVNULL) as running:
        server = TimedServer(f"http://{_HOST}:{port}", key)
        server.pid = running.process.pid

        def check() -> None:
            if running.process.poll() is not None:
                raise running.ended()

        server.wait(check, most_s, remedy)
        try:
            yield server
        except ServerError:
            check()
            raise


def free_port() -> int:
    """An unused local port."""
    with socket.create_server((_HOST, 0)) as free:
        return int(free.getsockname()[1])


LONGEST_S = 1800.0
"""Time limit of a program for one measurement, including loading."""
_LEAVE_S = 10.0
_PLACES = (".", "bin", "build/bin")
_WATCHER = Path(__file__).with_name("watched_program.py")


@dataclass(frozen=True, slots=True)
class StartedProgram:
    """A running program, and the file with its error output."""

    name: str
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]

    def ended(self) -> PeerLibraryError:
        """The reason of its end: the signal, and its last words."""
        status = self.process.wait()
        how = how_it_ended(status) if status < 0 else ""
        why = "; its last output: ".join(filter(None, (how, last_words(self.stderr))))
        why = why or how_it_ended(status)
        return PeerLibraryError(
            f"{self.name} ended: {why}.", "Check whether this build can open the model."
        )


def find_program(folder: Path | None, name: str) -> Path:
    """A program in a build folder, or in the source folder around it; None: on $PATH. Raises
    OptionError."""
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
def started(
    program: Path,
    words: Sequence[object],
    stdout: int | IO[bytes],
    *,
    stderr: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[StartedProgram]:
    """Start a program; after the body, also with an error, it and all its descendants are ended.

    stdout: as in subprocess. stderr: None, a file of its own. Raises PeerLibraryError if it cannot
    be started.
    """
    command = [str(program), *(str(word) for word in words)]
    held: tuple[int, ...] = ()
    with nullcontext(stderr) if stderr else tempfile.TemporaryFile() as errors, ExitStack() as ends:
        if sys.platform == "linux":
            reader, writer = os.pipe()
            ends.callback(os.close, writer)
            held = (reader,)
            command = [sys.executable, "-I", "-S", str(_WATCHER), str(reader), *command]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=errors,
                env=env,
                start_new_session=True,
                pass_fds=held,
            )
        except OSError as error:
            raise PeerLibraryError(
                f"{program.name} cannot be started: {error.strerror or error}.", "Build it anew."
            ) from error
        finally:
            for one in held:
                os.close(one)
        try:
            yield StartedProgram(program.name, process, errors)
        finally:
            _end(process, ends)


def _end(process: subprocess.Popen[bytes], ends: ExitStack) -> None:
    """Terminate, then kill; afterwards the process is reaped. ends: closing it makes the watcher
    end all descendants."""
    try:
        if process.poll() is None:
            _signal(process, "SIGTERM")
            process.wait(_LEAVE_S)
    except BaseException as error:
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        ends.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_S if sys.platform == "linux" else 0)
        _signal(process, "SIGKILL")
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _signal(process: subprocess.Popen[bytes], name: str) -> None:
    """Send a signal to the process and its group, such as compilers."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, getattr(signal, name))
    elif name == "SIGTERM":
        process.terminate()
    else:
        process.kill()
