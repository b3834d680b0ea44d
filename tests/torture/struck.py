"""A piece of work in a process of its own that is killed, or meets a bad disk, at a chosen call."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import DraftscopeError
from tests.torture import disks

DONE, REFUSED, KILLED = "done", "refused", "killed"
_CALLS = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "open", "utime", "fsync")
_ERRORS = ("ENOSPC", "EROFS", "EACCES", "EIO", "EDQUOT", "EMFILE")
_HOWS = ("kill", "room", disks.FULL, "error", "kill", disks.READ_ONLY, "kill late", disks.GONE)
_HOWS += ("vanish", disks.NO_INODES)
Strike = dict[str, Any]


def draw_strike(random: np.random.Generator, most_calls: int, number: int) -> Strike:
    """What happens, which number chooses in turn, and at which call; to a disk often from the
    beginning, which is call -1."""
    how = _HOWS[number % len(_HOWS)]
    from_the_start = how in disks.KINDS and random.random() < 0.5
    return {
        "how": how,
        "at": -1 if from_the_start else int(random.integers(most_calls)),
        "is_behind": bool(random.random() < 0.5),
        "after_ms": round(float(random.random()) ** 2 * 40, 2),
        "error": str(random.choice(_ERRORS)),
        "n_bytes": int(random.choice([0, 1, 100, 1000, 5000, 20000])),
    }


def done_under(
    strike: Strike,
    work: Callable[[], None],
    folder: Path,
    before: Callable[[], None] = lambda: None,
) -> str:
    """Do it in a forked process. Returns DONE, REFUSED for a DraftscopeError, or KILLED.

    folder: what vanishes. before: done in the same process, before anything can happen to it.
    strike: its entry `disk` is where the disk is that it strikes, which is well again afterwards.
    Raises AssertionError for any other end.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            before()
            _arm(strike, folder)
            work()
            status = 0
        except DraftscopeError as error:
            status = 3 if error.message.isprintable() else 4
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if strike["how"] in disks.KINDS:
        disks.heal(strike["how"], Path(strike["disk"]))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return KILLED
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 3), f"the work ended with {code}"
    return DONE if code == 0 else REFUSED


def _arm(strike: Strike, folder: Path) -> None:
    how = strike["how"]
    if how == "kill late":
        timer = threading.Timer(strike["after_ms"] / 1000, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    elif how == "room":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (strike["n_bytes"], strike["n_bytes"]))
    elif how in disks.KINDS and strike["at"] < 0:  # for what does not call through Python, too
        _strike(strike, folder)
    else:
        _count_calls(strike, folder)


def _count_calls(strike: Strike, folder: Path) -> None:
    n_calls = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*args: Any, **kwargs: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls - 1 != strike["at"]:
                return call(*args, **kwargs)
            if not strike["is_behind"]:
                _strike(strike, folder)
                return call(*args, **kwargs)
            result = call(*args, **kwargs)
            if strike["how"] != "error":  # a call that has worked does not fail
                _strike(strike, folder)
            return result

        return struck

    for name in _CALLS:
        setattr(os, name, wrapped(getattr(os, name)))


def _strike(strike: Strike, folder: Path) -> None:
    if strike["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif strike["how"] == "error":
        number = getattr(errno, strike["error"])
        raise OSError(number, os.strerror(number))
    elif strike["how"] in disks.KINDS:
        disks.strike(strike["how"], Path(strike["disk"]), strike["n_bytes"] // 1000)
    else:
        shutil.rmtree(folder, ignore_errors=True)
