"""Cases played in forked children, whose memory, time and processes are watched."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.torture import awake, heart
from tests.torture.campaign import Campaign, Case, Figures

_ROOT = Path(__file__).resolve().parents[2]
_MAPPED = 2**36
"""Address space beyond the memory allowed: files are mapped whole, sparse ones too."""
GRACE_S = 2.0
"""How long processes of a child may take to end after it."""
_TELL, _TELL_S = signal.SIGUSR2, 0.5
"""A child that is late tells where it is, and the time that it has for this."""
_TOLD = 2500


@dataclass(frozen=True)
class Outcome:
    """One case played. trouble: what is wrong in a line, empty if nothing is. told: more of it."""

    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str = ""
    told: str = ""

    @property
    def signature(self) -> str:
        """The trouble without its figures: cases that fail alike have the same."""
        return re.sub(r"\d+(\.\d+)?", "N", self.trouble)[:120]


def play(campaign: Campaign, cases: Sequence[Case], scratch: Path) -> Iterator[Outcome]:
    """Play cases in one child, one after another; the first that fails is the last."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    said = scratch / "said"
    reading, writing = os.pipe()
    sys.stdout.flush()
    heart.reset()
    child = os.fork()
    if not child:
        os.close(reading)
        _in_child(campaign, cases, scratch, said, writing)
    os.close(writing)
    outcome: Outcome | None = None
    with open(reading, "rb", buffering=0):
        lines = _Lines(reading, heart.Watch(child))
        for _ in cases:
            if outcome is not None:
                yield outcome
            until = awake.now() + campaign.seconds
            line = lines.next(until)
            if not line.endswith(b"\n"):
                yield _ended(child, awake.now() >= until, said)
                return
            outcome = lines.watched(Outcome(**json.loads(line)), campaign.stalled_s)
            if outcome.trouble:
                _end(child)
                yield outcome
                return
        left = _left_running(child)
    if outcome is not None:
        yield replace(outcome, trouble=f"left running: {left}") if left else outcome


def first_trouble(campaign: Campaign, cases: Sequence[Case], scratch: Path) -> Outcome:
    """What is wrong when a fresh child plays these cases."""
    outcome = Outcome()
    for outcome in play(campaign, cases, scratch):
        if outcome.trouble:
            return outcome
    return outcome


class _Lines:
    """Lines of a pipe; several may come at once. The heart of who writes them is watched."""

    def __init__(self, pipe: int, watch: heart.Watch) -> None:
        self._pipe, self._unread, self._watch = pipe, b"", watch

    def watched(self, outcome: Outcome, limit: float | None) -> Outcome:
        """An outcome with the longest stall so far, which may be what is wrong."""
        if limit is None:
            return outcome
        seconds = self._watch.stalled_s
        figures = {**outcome.figures, "stalled_s_max": seconds}
        late = f"it did not answer for {seconds:.1f} s" if seconds > limit else ""
        return replace(outcome, figures=figures, trouble=outcome.trouble or late)

    def next(self, until: float) -> bytes:
        """The next line with its end; without an end where none comes until the clock says so."""
        while b"\n" not in self._unread:
            self._watch.look()
            if select.select([self._pipe], [], [], awake.LOOK_S)[0]:
                more = os.read(self._pipe, 1 << 16)
                if not more:
                    return self._unread
                self._unread += more
            elif awake.now() >= until:
                return self._unread
        line, _, self._unread = self._unread.partition(b"\n")
        return line + b"\n"


def _in_child(
    campaign: Campaign, cases: Sequence[Case], scratch: Path, said: Path, writing: int
) -> None:
    """Never returns."""
    try:
        os.setsid()
        to = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(to, 1)
        os.dup2(to, 2)
        _limit(campaign.n_bytes)
        faulthandler.register(_TELL, file=sys.__stderr__)
        for number, case in enumerate(cases):
            folder = scratch / str(number)
            folder.mkdir()
            outcome = _played(campaign, case, folder)
            sys.stdout.flush()
            os.write(writing, json.dumps(vars(outcome)).encode() + b"\n")
            if outcome.trouble:
                break
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _played(campaign: Campaign, case: Case, folder: Path) -> Outcome:
    start = awake.now()
    try:
        figures = campaign.play(case, folder)
    except BaseException as error:
        told = traceback.format_exc()[-_TOLD:]
        said = " ".join(str(error).split())[:300]
        what = f"{type(error).__name__} in {_place(error)}: {said}"
        return Outcome({}, awake.now() - start, what, told)
    return Outcome(figures, awake.now() - start)


def _place(error: BaseException) -> str:
    """The last place in this tree that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(str(_ROOT)) and ".venv" not in f.filename]
    last = (ours or frames)[-1]
    return f"{last.filename.removeprefix(f'{_ROOT}/')}, {last.name}"


def _limit(n_bytes: int) -> None:
    with open("/proc/self/status") as file:
        sizes = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB", file.read(), re.MULTILINE))
    for kind, now, more in (
        (resource.RLIMIT_DATA, "VmData", n_bytes),
        (resource.RLIMIT_AS, "VmSize", n_bytes + _MAPPED),
    ):
        limit = int(sizes[now]) * 1024 + more
        resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _ended(child: int, late: bool, said: Path) -> Outcome:
    """What a child reported that sends no outcome, and does not go on after this."""
    if late:
        os.kill(child, _TELL)
        time.sleep(_TELL_S)
        _end(child)
        return Outcome(trouble="no end within its time", told=_tail(said))
    _, status = os.waitpid(child, 0)
    _kill_session(child)
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an exit"
    return Outcome(trouble=f"the process ended by {how}", told=_tail(said))


def _tail(said: Path) -> str:
    return said.read_bytes()[-_TOLD:].decode("utf-8", "replace") if said.exists() else ""


def _left_running(child: int) -> str:
    """Wait for a child that is through; what is left of its session after some grace, killed."""
    os.waitpid(child, 0)
    until = awake.now() + GRACE_S
    while (left := _session(child)) and awake.now() < until:
        time.sleep(0.05)
    _kill_session(child)
    return ", ".join(left.values())


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _kill_session(child)


def _kill_session(session: int) -> None:
    for process in _session(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _session(session: int) -> dict[int, str]:
    """The living processes of a session, by number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text(errors="replace").rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            if int(its_session) == session and state not in "ZX":
                found[int(path.parent.name)] = name.partition("(")[2]
    return found
