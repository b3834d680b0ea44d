"""The folder for what the program can do without: found or made anew if it is lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """DRAFTSCOPE_DATA_DIR, or the system's folder for what can go. It need not exist."""
    if chosen := os.environ.get("DRAFTSCOPE_DATA_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        folder = "~/Library/Caches"
    else:
        folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(folder)) / "draftscope"
