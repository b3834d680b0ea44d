"""The main window: what it is made of, its dialogs, and what its commands do."""

import sys
from typing import Any

import PySide6.QtCore  # noqa: F401


def _leave_sources() -> None:
    """Keep PySide from reading the source of every module that is imported from now on, to see
    whether it may use snake_case names, which none does: a tenth of a start."""
    features: Any = sys.modules.get("shibokensupport.feature")
    if hasattr(features, "_mod_uses_pyside"):
        features._mod_uses_pyside = lambda module: False


_leave_sources()
