"""Where the program keeps its own files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from PySide6.QtCore import QStandardPaths

DATA_VARIABLE = "DRAFTSCOPE_DATA_DIR"
"""Environment variable that names another data folder."""


def data_folder() -> Path:
    """For log, crash note and autosaved traces; a temporary one where the home takes no files."""
    location = QStandardPaths.StandardLocation.AppLocalDataLocation
    folder = Path(os.environ.get(DATA_VARIABLE) or QStandardPaths.writableLocation(location))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / "draftscope"
    return folder
