"""What ends a command from outside: Ctrl-C, a request to end, a terminal that is closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


_AGAIN_S = 0.01


class Interrupted(KeyboardInterrupt):
    """A command ends because of a signal; `status` is what shells give such an end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


def interrupt(number: int) -> None:
    """Raise Interrupted wherever the program is; an `act` for `on_signal`."""
    raise Interrupted(number)


@contextmanager
def signals_wait() -> Iterator[None]:
    """A signal that comes while the body writes what was recorded ends the command after it."""
    came: list[int] = []
    with on_signal(came.append):
        yield
    if came:
        raise Interrupted(came[0])


@contextmanager
def on_signal(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the first of SIGNALS that comes; a second one ends the process at once.

    What is ignored stays ignored, as under nohup. Without effect outside the main thread. A signal
    that comes where nothing can be raised, as while an object is taken away, comes again.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in SIGNALS}
        before = {n: handler for n, handler in found.items() if handler != signal.SIG_IGN}

    def handle(number: int, frame: FrameType | None) -> None:
        for each in before:  # even inside a long forward pass, where no Python code runs
            signal.signal(each, signal.SIG_DFL)
        act(number)

    def again(told: sys.UnraisableHookArgs) -> None:
        if not isinstance(told.exc_value, Interrupted):
            tell(told)
            return
        number = told.exc_value.status - 128
        signal.signal(number, handle)
        late = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
        late.daemon = True
        late.start()

    tell = sys.unraisablehook
    if before:
        sys.unraisablehook = again
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        if before:
            sys.unraisablehook = tell
        for number, handler in before.items():
            signal.signal(number, handler)
