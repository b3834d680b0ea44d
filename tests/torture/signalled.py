"""A command in a process of its own that gets a signal once something has happened."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.__main__ import main
from tests.torture import awake

NOT_HEARD, RAISED = 77, 70
END_S, END_CPU_S = 25.0, 8.0
"""How long a command may take to end after a signal, and how much processor time."""
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Signalled:
    """A command that runs. out, err: what it has written so far. wait_for: an event, which
    `happened` counts, and how often it must happen before the signal comes. n_out: bytes of its
    output when that came."""

    words: Sequence[str]
    number: int
    wait_for: tuple[str, int]
    is_twice: bool = False
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    was_sent: threading.Event = field(default_factory=threading.Event)
    pid: int = 0
    n_out: int = 0
    _counts: dict[str, int] = field(default_factory=dict)

    def fork(self) -> None:
        """Fork, which must happen before any thread is started; it waits for `start`."""
        reading, self._go = os.pipe()
        ends = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._go)
            _in_child(self.words, reading, ends[0][1], ends[1][1])
        os.close(reading)
        for _, writing in ends:
            os.close(writing)
        self._ends = ends[0][0], ends[1][0]

    def start(self) -> None:
        """Let it run."""
        self._readers = [
            threading.Thread(target=self._read, args=args, daemon=True)
            for args in zip(self._ends, (self.out, self.err), ("out", "err"), strict=True)
        ]
        for reader in self._readers:
            reader.start()
        os.close(self._go)

    def happened(self, what: str, n: int = 1) -> None:
        """Something has happened this many times more."""
        self._counts[what] = self._counts.get(what, 0) + n
        kind, least = self.wait_for
        if kind == what and self._counts[what] >= least and not self.was_sent.is_set():
            self._send()

    def status(self, seconds: float, while_alive: Callable[[], None] = lambda: None) -> int:
        """Its exit status, negative for a signal that ended it.

        seconds: how long it may run without the event; then the signal comes all the same. Raises
        AssertionError where it does not end after the signal.
        """
        until, cpu_s = awake.now() + seconds, 0.0
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            while_alive()
            if self.wait_for[0] == "cpu":
                self.happened("cpu", int(1e3 * self._cpu_s()) - self._counts.get("cpu", 0))
            if not self.was_sent.is_set():
                if awake.now() > until:
                    self._send()
                continue_until = awake.now() + END_S
                cpu_s = self._cpu_s()
            spent = self._cpu_s() - cpu_s
            if awake.now() > continue_until or spent > END_CPU_S:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(
                    f"{self.words[0]} does not end after signal {self.number}: "
                    f"{bytes(self.err[-300:]).decode('utf-8', 'replace')!r}"
                )
            time.sleep(0.02)
        for reader in self._readers:
            reader.join(5)
        return os.waitstatus_to_exitcode(ended[1])

    def _send(self) -> None:
        self.was_sent.set()
        self.n_out = len(self.out)
        try:
            os.kill(self.pid, self.number)
            if self.is_twice:
                threading.Timer(0.2, self._again).start()
        except ProcessLookupError:
            pass

    def _again(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, self.number)

    def _cpu_s(self) -> float:
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICK

    def _read(self, pipe: int, into: bytearray, name: str) -> None:
        with open(pipe, "rb", buffering=0) as stream:
            while more := stream.read(1 << 16):
                into += more
                self.happened(f"bytes of {name}", len(more))
                self.happened(f"lines of {name}", more.count(b"\n"))


def _in_child(words: Sequence[str], go: int, out: int, err: int) -> None:
    """Never returns."""
    status = RAISED
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, go)
        os.closerange(go + 1, 256)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(fd, "w"), "utf-8", "backslashreplace", line_buffering=by_line
            )
            for fd, by_line in ((1, False), (2, True))
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _not_heard)
        os.read(go, 1)
        status = main(words)
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter's end does
    except SystemExit as ending:
        status = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


def _not_heard(number: int, _: object) -> None:
    """A signal before the command listens, or after its end."""
    os._exit(NOT_HEARD)
