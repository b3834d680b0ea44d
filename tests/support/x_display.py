"""An X display of its own without a screen, and the keys and clicks of somebody before it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = "libX11.so.6", "libXtst.so.6"
_PATIENCE = 20


def lacking() -> str:
    """Why no display can be made here, in a sentence; empty if one can."""
    if shutil.which("Xvfb") is None:
        return "Xvfb is not installed"
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            return str(error)
    return ""


@contextmanager
def x_display(width: int, height: int) -> Iterator[str]:
    """Start a server with one screen; yields the name for DISPLAY."""
    reader, writer = os.pipe()
    size = f"{width}x{height}x24"
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writer), "-screen", "0", size, "-nolisten", "tcp", "-noreset"],
        pass_fds=[writer],
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as told:
            number = told.readline().strip()  # empty if it ends instead
        assert number, "Xvfb does not start"
        yield f":{number}"
    finally:
        server.terminate()
        server.wait(_PATIENCE)


class XUser:
    """Presses keys and the mouse's first button on the display that DISPLAY names, through the
    server as a keyboard and a mouse do."""

    def __init__(self) -> None:
        self._x11, self._test = (ctypes.CDLL(name) for name in _LIBRARIES)
        self._x11.XOpenDisplay.restype = ctypes.c_void_p
        self._x11.XStringToKeysym.restype = ctypes.c_ulong
        self._display = ctypes.c_void_p(self._x11.XOpenDisplay(None))
        assert self._display

    def press(self, *keys: str) -> None:
        """Press keys together, named as X does: Control_L, q."""
        codes = [self._code(key) for key in keys]
        for code in codes:
            self._test.XTestFakeKeyEvent(self._display, code, 1, 0)
        for code in reversed(codes):
            self._test.XTestFakeKeyEvent(self._display, code, 0, 0)
        self._x11.XFlush(self._display)

    def click(self, x: int, y: int) -> None:
        """Click at a pixel of the screen."""
        self._test.XTestFakeMotionEvent(self._display, -1, x, y, 0)
        for pressed in (1, 0):
            self._test.XTestFakeButtonEvent(self._display, 1, pressed, 0)
        self._x11.XFlush(self._display)

    def _code(self, key: str) -> int:
        symbol = ctypes.c_ulong(self._x11.XStringToKeysym(key.encode()))
        code = int(self._x11.XKeysymToKeycode(self._display, symbol))
        assert code, f"no key {key}"
        return code
