"""Where the golden models are: some in the tree, all of the second set next to it.

The second set has one file or two for each further family. A checkout that is alone has the
smallest of them in tests/data, so that every kind of layer is tested everywhere.
"""

from __future__ import annotations

from pathlib import Path

from engine.model.families import FAMILIES

_ROOT = Path(__file__).resolve().parents[2]
DATA = _ROOT / "tests" / "data"
BESIDE = _ROOT.parent / "shared" / "golden2"
FIRST_SET = ("qwen35", "qwen35moe", "qwen3next", "qwen3")


def golden_file(name: str) -> Path:
    """A model `NAME.gguf`, or its arrays `NAME.npz`."""
    inside = DATA / name
    return inside if inside.exists() else BESIDE / name


def _architecture(name: str) -> str:
    return name.split("-a-")[0].split("-b-")[0]


def second_set() -> list[str]:
    """Models of families beyond the first four that can be opened, by name."""
    names = {path.stem for folder in (DATA, BESIDE) for path in folder.glob("*.gguf")}
    families = FAMILIES.keys() - set(FIRST_SET)
    return sorted(name for name in names if _architecture(name) in families)


def with_mtp(names: list[str]) -> list[str]:
    return [name for name in names if "-mtp-" in name]
