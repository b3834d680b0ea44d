"""Keys of kernels: equal for equal code, different for anything that changes it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from kernels import processor
from kernels.linear import bytes_with_llvm
from kernels.linear.bytes_with_llvm import _few_body as dots
from kernels.llvm import object_cache as module
from kernels.llvm import program
from kernels.llvm.object_cache import program_key
from kernels.pointwise.with_llvm import _body as swiglu
from kernels.rows import streams


class Pair(NamedTuple):
    a: object
    b: int


@dataclass(frozen=True)
class Record:
    a: object
    b: int


def with_argument(argument: object) -> str | None:
    return program_key(functools.partial(dots, argument))


def test_the_same_kernel_has_the_same_key_and_any_other_another():
    kernels = [
        (dots,),
        (swiglu,),
        (dots, swiglu),
        (dots, 3),
        (dots, 3.0),
        (dots, "3"),
        (dots, None),
        (functools.partial(dots, 3),),
        (functools.partial(dots, 4),),
        (functools.partial(dots, d=3),),
        (functools.partial(swiglu, 3),),
    ]
    keys = [program_key(*parts) for parts in kernels]
    assert keys == [program_key(*parts) for parts in kernels]
    assert None not in keys and len(set(keys)) == len(keys)


def test_arguments_of_several_fields_count_field_by_field():
    arguments = [
        (1, 2),
        (1, (2,)),
        (1, [2]),
        Pair(1, 2),
        Pair((1, 2), 2),
        Record(1, 2),
        Record(True, 2),
        Record(Pair(1, 2), 2),
    ]
    assert len({with_argument(argument) for argument in arguments}) == len(arguments)
    assert with_argument(Record(Pair(1, 2), 2)) == with_argument(Record(Pair(1, 2), 2))


def test_what_a_function_takes_from_around_it_counts():
    def keys(n_rows: int) -> list[object]:
        seen: list[object] = []

        def note(*parts: object) -> None:
            seen.append(program_key(*parts))

        original, bytes_with_llvm.Program = bytes_with_llvm.Program, note
        try:
            for n_integers in (1, 2):
                bytes_with_llvm._few.__wrapped__(n_rows, n_integers)
        finally:
            bytes_with_llvm.Program = original
        return seen

    found = keys(1) + keys(2)
    assert None not in found and len(set(found)) == 4


def test_kernels_differ_by_their_function_and_its_constants(monkeypatch):
    found: list[str | None] = []
    monkeypatch.setattr(
        program, "Program", lambda body, n, before: found.append(program_key(body, n, before))
    )
    for made in (streams._mix_program, streams._add_program):
        for constants in ((2, 16), (2, 32)):
            made.__wrapped__(*constants)
    assert None not in found and len(set(found)) == 4


@pytest.mark.parametrize("unnamed", [object(), {1}, {}, Record({}, 2), lambda: 1, len])
def test_what_cannot_be_told_from_others_gives_no_key(unnamed):
    assert with_argument(unnamed) is None
    assert program_key(unnamed) is None


def test_the_processor_and_its_features_count(monkeypatch):
    here = processor.target()
    keys = set()
    for target in (here, ("another", here[1]), (here[0], {**here[1], "avx2": not here[1]["avx2"]})):
        monkeypatch.setattr(processor, "target", lambda target=target: target)
        keys.add(program_key(dots))
    assert len(keys) == 3


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder in place of this package's source."""
    root = tmp_path / "kernels"
    root.mkdir()
    monkeypatch.setattr(module, "_ROOT", root)
    module._code.cache_clear()
    yield root
    module._code.cache_clear()


def test_any_source_of_the_package_counts(source):
    seen = {program_key(dots)}
    for name, text in [("a.py", "1"), ("a.py", "2"), ("b.py", ""), ("notes.txt", "")]:
        (source / name).write_text(text)
        module._code.cache_clear()
        seen.add(program_key(dots))
    (source / "b.py").rename(source / "c.py")
    module._code.cache_clear()
    seen.add(program_key(dots))
    assert len(seen) == 5, "a text that is not a source counts, or source does not"


def test_the_library_that_compiles_counts(source, monkeypatch):
    before = program_key(dots)
    monkeypatch.setattr(module, "version", lambda name: "0")
    module._code.cache_clear()
    assert program_key(dots) != before
