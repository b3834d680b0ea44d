"""Where the golden models are: some in the tree, all of the second set next to it.

The second set, of two folders, has one file or two for each further family. A checkout that is
alone has the smallest of them in tests/data, so that every kind of layer is tested everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.model.families import FAMILIES

_ROOT = Path(__file__).resolve().parents[2]
DATA = _ROOT / "tests" / "data"
BESIDE = tuple(_ROOT.parent / "shared" / name for name in ("golden2", "golden3"))
FIRST_SET = ("qwen35", "qwen35moe", "qwen3next", "qwen3")


def golden_file(name: str) -> Path:
    """A model `NAME.gguf`, or its arrays `NAME.npz`."""
    places = [folder / name for folder in (DATA, *BESIDE)]
    return next((place for place in places if place.exists()), places[-1])


def _architecture(name: str) -> str:
    return re.split("-[a-z]-", name)[0]


def second_set() -> list[str]:
    """Models of families beyond the first four that can be opened, by name."""
    names = {path.stem for folder in (DATA, *BESIDE) for path in folder.glob("*.gguf")}
    families = FAMILIES.keys() - set(FIRST_SET)
    return sorted(name for name in names if _architecture(name) in families)


def with_mtp(names: list[str]) -> list[str]:
    return [name for name in names if "-mtp-" in name]
