"""What a server says, as it may stand in a sentence of ours."""

from __future__ import annotations

from typing import Any

from engine.gguf.binary import shorten


def server_words(value: Any, limit: int) -> str:
    """One line of printable characters, at most `limit`: it ends up on a terminal."""
    return shorten(" ".join(str(value).split()), limit)
