"""Small Python functions with a docstring and a test that holds.

What a test expects is worked out by a reference, never written down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from string import Template
from typing import Any

Inputs = Callable[[Random], tuple[Any, ...]]
LISTS = ("items", "values", "numbers", "arr", "data")
WORDS = ("word", "text", "name", "line")
ELEMENT = ("item", "value", "x", "n")


@dataclass(frozen=True, slots=True)
class FunctionFamily:
    """Functions that do the same under several names.

    In `docs` and `body` stand `$f` for the function, `$p`, `$q`, `$r` for its parameters, and the
    keys of `slots` for its variables.
    """

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    docs: tuple[str, ...]
    body: str
    reference: Callable[..., Any]
    inputs: Inputs
    slots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def function(family: FunctionFamily, rng: Random) -> str:
    """A function of the family with its test."""
    slots = {key: rng.choice(pool) for key, pool in family.slots.items()}
    slots["f"] = rng.choice(family.names)
    for key, pool in zip("pqr", family.parameters, strict=False):
        slots[key] = rng.choice([word for word in pool if word not in slots.values()])
    parameters = ", ".join(slots[key] for key, _ in zip("pqr", family.parameters, strict=False))
    lines = [
        f"def {slots['f']}({parameters}):",
        f'    """{Template(rng.choice(family.docs)).substitute(slots)}"""',
        *Template(family.body.strip("\n")).substitute(slots).splitlines(),
        "\n",
        f"def test_{slots['f']}():",
        *[f"    assert {claim}" for claim in _claims(family, slots["f"], rng)],
    ]
    return "\n".join(lines) + "\n"


def _claims(family: FunctionFamily, name: str, rng: Random) -> list[str]:
    """Two, on arguments that never are the same: each claim has a half of them to itself."""
    return [_claim(family, name, rng, half) for half in range(2)]


def _claim(family: FunctionFamily, name: str, rng: Random, half: int) -> str:
    while True:
        given = family.inputs(rng)
        arguments = ", ".join(map(literal, given))
        if sum(arguments.encode()) % 2 == half:
            break
    call = f"{name}({arguments})"
    result = family.reference(*given)
    if isinstance(result, bool):
        return call if result else f"not {call}"
    return f"{call} == {literal(result)}"


def literal(value: object) -> str:
    """A value as source text, strings in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)
