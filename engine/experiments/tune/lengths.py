"""Options of a run that drafts with one drafter: the length of its drafts and their confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.draft.registry import DRAFTERS
from engine.options import RunOptions

LOOK_UPS = ("ngram-mod", "suffix")
"""Drafters without a model that are tried in addition to those that the files make possible."""


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """What a user would set. p_min: 0 for drafters that look tokens up."""

    drafter: str
    n_max: int
    p_min: float = 0.0

    @property
    def name(self) -> str:
        """In words, for tables."""
        floor = f", p_min {self.p_min:g}" if self.p_min else ""
        return f"{self.drafter}, n_max {self.n_max}{floor}"


def has_length(drafter: str) -> bool:
    """Whether a drafter's longest draft can be set."""
    spec = DRAFTERS[drafter]
    return bool(spec.needs) or bool(spec.field)


def has_floor(drafter: str) -> bool:
    """Whether --spec-draft-p-min means something to a drafter."""
    return DRAFTERS[drafter].needs is not None


def length_options(setting: DraftSetting) -> dict[str, Any]:
    """The part of the options that a drafter's length is in: values by field."""
    spec = DRAFTERS[setting.drafter]
    if spec.needs:
        return {"n_max": setting.n_max, "p_min": setting.p_min, "n_min": 0}
    known = {field.name for field in fields(spec.options)}
    found: dict[str, Any] = {"size_m" if "size_m" in known else "n_max": setting.n_max}
    if "n_min" in known:
        found["n_min"] = 0
    return found


def drafting(
    base: RunOptions,
    setting: DraftSetting,
    *,
    verify_max: int | None = None,
    rates: Sequence[float] = (),
) -> RunOptions:
    """The options with this drafter alone. rates: of synthetic acceptance, for the longest draft;
    as many as the draft has are used. Raises OptionError for a length out of range."""
    spec, values = DRAFTERS[setting.drafter], length_options(setting)
    if spec.field:
        part = replace(getattr(base.spec, spec.field), **values)
        values = {spec.field: part}
    return replace(
        base,
        parallel=1,
        spec=replace(
            base.spec,
            types=(setting.drafter,),
            verify_max=verify_max,
            synth_rates=tuple(rates[: setting.n_max]),
            **values,
        ),
    )
