"""Models split over several files, `name-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import ModelFileError
from engine.gguf.metadata import TypedMetadata

_NAME = re.compile(r"(?P<stem>.*)-\d{5}-of-\d{5}\.gguf", re.DOTALL)


def part_count(head: TypedMetadata) -> int:
    """Number of files a model consists of, read from the metadata of one of them.

    Raises ModelFileError when that one is not the first.
    """
    count = head.int_("split.count", 0)
    number = head.int_("split.no", 0)
    if count <= 1:
        return 1
    if number != 0:
        raise ModelFileError(
            head.path,
            "key split.no",
            f"this is part {number + 1} of {count}, and a model is opened from part 1",
            f"Open {_part_name(head.path, 1, count) or 'the first part'} instead.",
        )
    return count


def part_paths(first: Path, count: int) -> list[Path]:
    """The files that follow part 1; raises ModelFileError unless all of them are there."""
    if _part_name(first, 1, count) != first.name:
        raise ModelFileError(
            first,
            "file name",
            f"the other {count - 1} parts cannot be found from this name",
            f"Give part 1 its original name, which ends in -00001-of-{count:05d}.gguf.",
        )
    paths: list[Path] = []
    for number in range(2, count + 1):
        path = first.with_name(_part_name(first, number, count) or "")
        if not path.exists():
            raise ModelFileError(
                first,
                f"part {number} of {count}",
                f"{path.name} is missing",
                f"Put {path.name} into the folder of part 1.",
            )
        paths.append(path)
    return paths


def check_part(head: TypedMetadata, number: int, count: int) -> None:
    """Raise ModelFileError unless the metadata say that this is part `number` of `count`."""
    found = head.int_("split.no"), head.int_("split.count")
    if found != (number - 1, count):
        raise ModelFileError(
            head.path,
            "key split.no",
            f"part {number} of {count} is expected here, but this is {found[0] + 1} of {found[1]}",
            "Use parts that belong to one download, under their original names.",
        )


def _part_name(path: Path, number: int, count: int) -> str | None:
    match = _NAME.fullmatch(path.name)
    return f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" if match else None
