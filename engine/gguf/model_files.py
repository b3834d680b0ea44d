"""The files of an open model and of what drafts for it, watched while it is in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.gguf.part_file import PartFile

CHANGES = "file_changes"
"""Fact of a run: what became of its model files, a list of objects. file: name. change: WRITTEN or
REPLACED. mapped: whether weights in use were the file's own. round: in which it was found, None
for before the first and after the last one; after: the last round before."""


class ModelFiles:
    """parts: every file, those of drafters too."""

    def __init__(self, parts: Iterable[PartFile] = ()) -> None:
        self.parts = list(parts)

    @property
    def is_mapped(self) -> bool:
        """Whether weights in use are the files' own, and not copies."""
        return any(part.is_mapped for part in self.parts)

    @property
    def changed(self) -> bool:
        """Whether any of the files on the disk is another one by now, or was written to."""
        return any(part.change() for part in self.parts)

    def check(self) -> None:
        """Raises ModelFileError where weights in use are not those that were opened."""
        for part in self.parts:
            part.check()

    def note(self, facts: dict[str, Any], round_: int | None, after: int | None = None) -> None:
        """Add to the facts of a run what has become of the files, once for each."""
        for part in self.parts:
            if change := part.change():
                known = facts.setdefault(CHANGES, [])
                found = {"file": part.path.name, "change": change, "mapped": part.is_mapped}
                if not any(found.items() <= one.items() for one in known):
                    known.append({**found, "round": round_, "after": after})
