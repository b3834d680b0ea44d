"""A process that takes itself for one on Windows or macOS, as far as that is possible on Linux.

Run as a program: `other_system.py win32|darwin "command of draftscope"...` imports every module of
ours and runs the commands. What others wrote (torch, Qt, the standard library) is imported before
the pretence starts, since it has machine code for Linux. From then on `sys.platform` is the other
system's; modules, functions and constants that Python lacks there are missing, and so are /proc,
/sys, triton and libraries by ctypes. What the other system itself would do differently is not seen.
"""

from __future__ import annotations

import importlib
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = ("app", "engine", "kernels", "resources")

# "Availability" in the documentation of Python's modules
_NO_MODULE = {
    "win32": [
        "fcntl",
        "grp",
        "posix",
        "pty",
        "pwd",
        "readline",
        "resource",
        "syslog",
        "termios",
        "tty",
    ],
    "darwin": [],
}
_LINUX_ONLY: dict[ModuleType, list[str]] = {
    os: [
        "copy_file_range",
        "eventfd",
        "memfd_create",
        "O_DIRECT",
        "O_PATH",
        "O_TMPFILE",
        "pidfd_open",
        "posix_fadvise",
        "posix_fallocate",
        "sched_getaffinity",
        "sched_setaffinity",
        "sendfile",
        "splice",
    ],
    signal: [
        "SIGCLD",
        "SIGPOLL",
        "SIGPWR",
        "SIGRTMAX",
        "SIGRTMIN",
        "SIGSTKFLT",
        "sigtimedwait",
        "sigwaitinfo",
    ],
    mmap: ["MADV_DONTFORK", "MADV_HUGEPAGE", "MADV_POPULATE_READ", "MAP_POPULATE", "MAP_STACK"],
}
_POSIX_ONLY: dict[ModuleType, list[str]] = {
    os: [
        "chown",
        "fchmod",
        "fchown",
        "fork",
        "forkpty",
        "getegid",
        "geteuid",
        "getgid",
        "getloadavg",
        "getpgid",
        "getuid",
        "killpg",
        "mkfifo",
        "O_CLOEXEC",
        "O_DIRECTORY",
        "O_DSYNC",
        "O_NOCTTY",
        "O_NOFOLLOW",
        "O_NONBLOCK",
        "openpty",
        "pread",
        "preadv",
        "pwrite",
        "register_at_fork",
        "setpgid",
        "setsid",
        "statvfs",
        "sync",
        "sysconf",
        "uname",
        "WIFSIGNALED",
        "WTERMSIG",
    ],
    signal: [
        "alarm",
        "pause",
        "pthread_kill",
        "pthread_sigmask",
        "setitimer",
        "SIGALRM",
        "SIGBUS",
        "SIGCHLD",
        "SIGCONT",
        "SIGHUP",
        "siginterrupt",
        "SIGKILL",
        "SIGPIPE",
        "SIGQUIT",
        "SIGSTOP",
        "SIGUSR1",
        "SIGUSR2",
        "SIGXCPU",
        "sigwait",
    ],
    mmap: [name for name in vars(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))],
}
_MISSING = {"darwin": [_LINUX_ONLY], "win32": [_LINUX_ONLY, _POSIX_ONLY]}


def pretend(system: str) -> None:
    """From here on this process is on `system`."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.platform = system
    for module in _NO_MODULE[system]:
        sys.modules[module] = None  # type: ignore[assignment]
    for lists in _MISSING[system]:
        for module, names in lists.items():
            for name in names:
                if hasattr(module, name):
                    delattr(module, name)
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(arguments[0])
    if event == "ctypes.dlopen":
        raise OSError(f"{arguments[0]} is not loaded here")


def our_modules() -> Iterator[str]:
    """Names of all that can be imported without triton and is not a program."""
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1].endswith("with_triton") or parts[-1] in ("triton_setup", "__main__"):
                continue
            if package == "resources" and len(parts) > 2:
                continue
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_errors() -> dict[str, str]:
    """By module, what importing it raised."""
    errors = {}
    for name in our_modules():
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def main(system: str, *commands: str) -> int:
    sys.modules["triton"] = None  # type: ignore[assignment]
    assert not import_errors()
    importlib.import_module("llvmlite.binding")  # imported when something is compiled
    pretend(system)
    if errors := import_errors():
        sys.exit("\n".join(f"{name}: {error}" for name, error in errors.items()))
    # LLVM's kernels need the OpenMP that only torch for Linux brings
    os.environ["DRAFTSCOPE_KERNELS"] = "torch"
    from app.__main__ import main as draftscope

    return max(draftscope(words.split()) for words in commands)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
