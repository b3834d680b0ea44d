"""Whether a window can be shown here, found out before Qt would abort the process."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from pathlib import Path

from engine.errors import DraftscopeError

QT_PACKAGES = (
    "libegl1 libgl1 libglib2.0-0 libdbus-1-3 libfontconfig1 libfreetype6 libxkbcommon0 "
    "libxkbcommon-x11-0 libx11-6 libx11-xcb1 libxcb-cursor0 libxcb-icccm4 libxcb-image0 "
    "libxcb-keysyms1 libxcb-randr0 libxcb-render0 libxcb-render-util0 libxcb-shape0 libxcb-shm0 "
    "libxcb-sync1 libxcb-util1 libxcb-xfixes0 libxcb-xkb1 libwayland-client0 libwayland-cursor0 "
    "fonts-dejavu-core"
)
"""What Qt needs beyond a minimal Debian or Ubuntu, with a font to draw text with."""

_INSTALL = f"On Debian or Ubuntu: apt-get install {QT_PACKAGES}"
_HEADLESS = "Use a desktop session, or a subcommand (draftscope --help lists them)."


def check_display() -> None:
    """Raises DraftscopeError naming what is missing: PySide6, a system library, a display."""
    try:
        pyside = import_module("PySide6")
        import_module("PySide6.QtWidgets")
    except ModuleNotFoundError as error:
        raise DraftscopeError(
            f"The Python package {error.name} is missing.", "Install Draftscope again with pip."
        ) from error
    except ImportError as error:
        raise DraftscopeError(
            f"Qt cannot load a system library ({_first_line(error)}).", _INSTALL
        ) from error
    if sys.platform.startswith("linux"):
        _check_platform(Path(str(pyside.__file__)).parent / "Qt" / "plugins" / "platforms")


def _check_platform(plugins: Path) -> None:
    names = _platforms()
    if not names:
        raise DraftscopeError(
            "There is no display: neither DISPLAY nor WAYLAND_DISPLAY is set.", _HEADLESS
        )
    problems = []
    for name in names:
        plugin = plugins / f"libq{name}.so"
        try:
            if plugin.exists():
                ctypes.CDLL(str(plugin))
        except OSError as error:
            problems.append(
                DraftscopeError(
                    f"Qt cannot load a system library for {name} ({_first_line(error)}).", _INSTALL
                )
            )
            continue
        if _answers(name):
            return
        problems.append(DraftscopeError(f"No {name} display server answers.", _HEADLESS))
    raise problems[0]


def _platforms() -> list[str]:
    """Qt's platform plugins that the environment asks for, in order."""
    chosen = os.environ.get("QT_QPA_PLATFORM", "")
    if chosen:
        return [name.split(":")[0].split("-")[0] for name in chosen.split(";")]
    displays = {"wayland": "WAYLAND_DISPLAY", "xcb": "DISPLAY"}
    return [name for name, variable in displays.items() if os.environ.get(variable)]


def _answers(platform: str) -> bool:
    """Whether a display server can be reached; Qt aborts the process when it cannot."""
    pointer = ctypes.c_void_p
    if platform == "xcb":
        xcb = ctypes.CDLL("libxcb.so.1")
        xcb.xcb_connect.restype = pointer
        xcb.xcb_connect.argtypes = [ctypes.c_char_p, pointer]
        xcb.xcb_connection_has_error.argtypes = [pointer]
        xcb.xcb_disconnect.argtypes = [pointer]
        connection = xcb.xcb_connect(None, None)
        failed = xcb.xcb_connection_has_error(connection)
        xcb.xcb_disconnect(connection)
        return not failed
    if platform == "wayland":
        folder = os.environ.get("XDG_RUNTIME_DIR", "")  # without it the library itself complains
        if not os.path.isabs(os.path.join(folder, os.environ.get("WAYLAND_DISPLAY", ""))):
            return False
        wayland = ctypes.CDLL("libwayland-client.so.0")
        wayland.wl_display_connect.restype = pointer
        wayland.wl_display_disconnect.argtypes = [pointer]
        display = wayland.wl_display_connect(None)
        if display:
            wayland.wl_display_disconnect(display)
        return bool(display)
    return True


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
