"""A lock of the settings whose maker was killed before it named itself.

Qt makes a lock file and then writes into it who holds it. One that stays empty tells nobody that
its holder is gone, and Qt waits half a minute for it, before the window is painted.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_UNNAMED_S = 0.5
"""Naming itself takes a holder that lives much less, on a busy machine, too."""


def free_settings(settings: Path) -> None:
    """Take the lock beside a settings file away if it is empty and stays so."""
    lock = settings.with_name(f"{settings.name}.lock")
    with suppress(OSError):
        found = lock.stat()
        if found.st_size:
            return
        time.sleep(min(_UNNAMED_S, max(0.0, _UNNAMED_S - (time.time() - found.st_mtime))))
        again = lock.stat()
        if not again.st_size and again.st_ino == found.st_ino:
            lock.unlink()
