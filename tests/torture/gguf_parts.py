"""A GGUF file taken apart into what can be changed by itself, and the files it starts from."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from engine.experiments.random_models.quant_mixes import QUANTS
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_file import RANDOM_DRAFTERS
from engine.experiments.random_models.random_model import write_random_drafter, write_random_model
from engine.gguf.file import GgufFile
from engine.model.families import FAMILIES
from tests.support.gguf_writer import ARRAY, STRING, Tensor, Typed, build
from tests.support.golden_drafters import TARGETS, drafter_file
from tests.support.golden_files import DATA

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MADE, _DRAFTER, _MIXED = "random-", "drafter-", "mix-"
_DRAFTED_FOR = "qwen35"
"""What made drafters are made for."""


@dataclass
class Parts:
    """Metadata in order, and tensors with their data. overrides: other arguments of `build`."""

    metadata: list[tuple[str, Typed]]
    tensors: list[Tensor]
    overrides: dict[str, int] = field(default_factory=dict)

    def bytes(self) -> bytes:
        return build(self.metadata, self.tensors, **self.overrides)

    def copy(self) -> Parts:
        return Parts(list(self.metadata), list(self.tensors), dict(self.overrides))


@cache
def bases() -> list[str]:
    """Names of models, one at least of every architecture; all can be made from this tree."""
    golden = {path.stem: _architecture(path) for path in sorted(DATA.glob("*.gguf"))}
    made = [arch for arch in FAMILIES if arch not in golden.values() or arch == _DRAFTED_FOR]
    return [*golden, *(f"{_MADE}{arch}" for arch in made)]


@cache
def drafter_bases() -> dict[str, str]:
    """Names of files that only draft, one at least of every drafter, and their models."""
    golden = {path.stem: path for path in sorted((DATA / "drafters").glob("*.gguf"))}
    known = {_architecture(path) for path in golden.values()}
    (target, *_) = RANDOM_FAMILIES[_DRAFTED_FOR].values()
    made = [name for name, make in RANDOM_DRAFTERS.items() if make(target).arch not in known]
    own = {f"{_DRAFTER}{name}": f"{_MADE}{_DRAFTED_FOR}" for name in made}
    return {name: TARGETS[name] for name in golden} | own


def mixes() -> list[str]:
    """Names of models, one for each mix of types that files are quantised to."""
    return [f"{_MIXED}{quant}" for quant in QUANTS]


def _architecture(path: Path) -> str:
    with GgufFile.open(path) as file:
        return file.architecture


@cache
def base_file(name: str) -> Path:
    if name in TARGETS:
        return drafter_file(f"{name}.gguf")
    if not name.startswith((_MADE, _DRAFTER, _MIXED)):
        return DATA / f"{name}.gguf"
    path = Path(mkdtemp(prefix="draftscope-torture-models-")) / f"{name}.gguf"
    if name.startswith(_DRAFTER):
        drafter = name.removeprefix(_DRAFTER)
        write_random_drafter(path, drafter=drafter, arch=_DRAFTED_FOR, size="tiny")
    elif name.startswith(_MIXED):
        quant = name.removeprefix(_MIXED)
        write_random_model(path, arch=_DRAFTED_FOR, size="tiny", quant=quant)
    else:
        write_random_model(path, arch=name.removeprefix(_MADE), size="tiny")
    return path


@cache
def parts_of(name: str) -> Parts:
    """A base taken apart; to be copied before it is changed."""
    return taken_apart(base_file(name).read_bytes())


def taken_apart(data: bytes) -> Parts:
    """The parts of a valid file with the usual alignment."""
    reader = _Reader(data)
    n_tensors, n_keys = reader.take("QQ", 8)
    metadata = [(reader.text().decode(), reader.value()) for _ in range(n_keys)]
    found = []
    for _ in range(n_tensors):
        name, (n_dims,) = reader.text(), reader.take("I")
        ne = reader.take(f"{n_dims}Q")
        found.append(Tensor(name, ne, b"", *reader.take("IQ")))
    start = -(-reader.at // 32) * 32
    ends = [*sorted(t.offset for t in found)[1:], len(data) - start]
    order = sorted(range(len(found)), key=lambda i: found[i].offset)
    for i, end in zip(order, ends, strict=True):
        content = data[start + found[i].offset : start + end]
        found[i] = replace(found[i], data=content, offset=None)
    return Parts(metadata, found)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def take(self, form: str, skip: int = 0) -> tuple[int, ...]:
        self.at += skip
        found = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def text(self) -> bytes:
        (n,) = self.take("Q")
        self.at += n
        return self._data[self.at - n : self.at]

    def value(self) -> Typed:
        (kind,) = self.take("I")
        start = self.at
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            item, count = self.take("IQ")
            if item == STRING:
                for _ in range(count):
                    self.text()
            else:
                self.at += count * _SIZES[item]
        else:
            self.at += _SIZES[kind]
        return Typed(kind, self._data[start : self.at])
