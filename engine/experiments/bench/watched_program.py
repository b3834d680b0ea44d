"""Watcher of a program: `python -I -S watched_program.py FD PROGRAM ARGUMENT…`, Linux only.

It runs the program and ends with its status. Once the other end of FD is closed, in particular by
the end of the process that holds it, all processes started by the program are ended.
"""

import ctypes
import os
import select
import signal
import sys

_DIE_WITH_PARENT, _ADOPT = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


def main() -> None:
    """Watch until either is over."""
    prctl, held = ctypes.CDLL(None).prctl, int(sys.argv[1])
    prctl(_ADOPT, 1)  # orphans of the program become children of this process
    os.set_inheritable(held, False)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)  # until they are ignored here
    program = os.fork()
    if not program:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
        prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        os.execv(sys.argv[2], sys.argv[2:])
    for number in asked:  # the program decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
    status = None
    while status is None:
        ready, _, _ = select.select([held, reader], [], [])
        if held in ready:
            break
        os.read(reader, 4096)
        status = _ended().get(program)
    while left := _children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        status = _ended(wait=True).get(program, status)
    _end_as(status or 0)


def _ended(*, wait: bool = False) -> dict[int, int]:
    """Exit statuses of ended children, by pid."""
    found, how = dict[int, int](), 0 if wait else os.WNOHANG
    try:
        while True:
            pid, status = os.waitpid(-1, how)
            if not pid:
                return found
            found[pid], how = status, os.WNOHANG
    except ChildProcessError:
        return found


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(name))
    return found


def _end_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource  # not available everywhere

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
