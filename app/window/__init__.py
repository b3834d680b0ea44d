"""The main window: its parts, its dialogs, and its commands."""

import sys
from typing import Any

import PySide6.QtCore  # noqa: F401


def _leave_sources() -> None:
    """Keep PySide from reading the source of every module imported from now on for snake_case
    names, which are not used here: a tenth of a start."""
    features: Any = sys.modules.get("shibokensupport.feature")
    if hasattr(features, "_mod_uses_pyside"):
        features._mod_uses_pyside = lambda module: False


_leave_sources()
