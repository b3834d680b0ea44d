"""The version of this program, for `--version`, traces and reports."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path


@cache
def version() -> str:
    """The version that is installed; that of pyproject.toml in a checkout that is not."""
    try:
        return metadata.version("draftscope")
    except metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
