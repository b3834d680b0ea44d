"""A lane as text: `POLICY[,key=value…]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import OptionError
from engine.options import ROLLBACK_POLICIES, RunOptions

REFERENCE, NOISE = "reference", "noise"
_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n_rs_seq": ("n_rs_seq", int),
    "split": ("split", str),
    "kv": ("kv", str),
    "fault": ("faults", str),
    "replay": ("replay", str),
    "ubatch": ("n_ubatch", int),
    "checkpoint_device": ("checkpoint_device", str),
}


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """What a lane does differently. The name is the text it was parsed from, or `noise`.

    changes: fields of RunOptions that replace those of the comparison.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> LaneSpec:
        """Read `POLICY[,key=value…]`; only `fault` may be repeated. Raises OptionError."""
        policy, *settings = (part.strip() for part in text.split(","))
        if policy not in ROLLBACK_POLICIES:
            raise OptionError(
                f"Lane {text!r}: {policy!r} is no rollback policy.",
                f"Begin with one of {', '.join(ROLLBACK_POLICIES)}.",
            )
        changes: dict[str, Any] = {"rollback": policy, "faults": ()}
        seen: set[str] = set()
        for setting in settings:
            key, equals, value = setting.partition("=")
            if key not in _FIELDS or not equals or not value:
                raise OptionError(
                    f"Lane {text!r}: {setting!r} is no setting.",
                    f"Write key=value with one of {', '.join(_FIELDS)}.",
                )
            if key in seen and key != "fault":
                raise OptionError(f"Lane {text!r}: {key} is given twice.", "Give it once.")
            seen.add(key)
            name, convert = _FIELDS[key]
            if key == "fault":
                changes[name] = (*changes[name], value)
                continue
            try:
                changes[name] = convert(value)
            except ValueError as error:
                raise OptionError(
                    f"Lane {text!r}: {key} {value!r} is no whole number.", "Give a number."
                ) from error
        if changes.get("replay") == "verify":
            raise OptionError(
                f"Lane {text!r}: replay=verify chooses tokens of its own.",
                "Lanes are led by the reference lane's tokens: use replay=trust.",
            )
        spec = cls(text, changes)
        spec.options(RunOptions())
        return spec

    def options(self, common: RunOptions) -> RunOptions:
        """The lane's options. Raises OptionError, naming the lane."""
        try:
            return replace(common, **self.changes)
        except OptionError as error:
            raise OptionError(f"Lane {self.name!r}: {error.message}", error.remedy) from error


NOISE_LANE = LaneSpec(
    NOISE,
    {"rollback": "checkpoint", "faults": (), "n_rs_seq": None, "split": "equal", "kv": "per-seq"},
)
"""Decodes batches of the lanes' widths, each from the reference lane's exact state."""

DEFAULT_LANES = (NOISE_LANE, LaneSpec.parse("checkpoint"), LaneSpec.parse("planes"))
