"""Cases that failed once: files that the suite replays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from tests.torture.campaign import Case

FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Entry:
    """cases: the one that fails, after those that it needs before it. seed: what drew it, with
    its number. said: what was wrong."""

    campaign: str
    seed: tuple[int, int]
    said: str
    cases: Sequence[Case]


def save(folder: Path, entry: Entry) -> Path:
    """Write an entry, under a name that its cases decide."""
    text = json.dumps(asdict(entry), indent=1, ensure_ascii=True) + "\n"
    digest = sha256(json.dumps(entry.cases, sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{entry.campaign}-{digest}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path) -> Entry:
    return Entry(**json.loads(path.read_text(encoding="utf-8")))
