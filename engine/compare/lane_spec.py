"""A lane as text: `POLICY[,key=value…]`, and the lanes that others need beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import OptionError
from engine.options import COMPUTE_MODES, ROLLBACK_POLICIES, RunOptions
from engine.trace.records import NOISE, PEER, PEER_NOISE, POLICY, REFERENCE

LANE_MODES = tuple(mode for mode in COMPUTE_MODES if mode != "auto")
_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n_rs_seq": ("n_rs_seq", int),
    "split": ("split", str),
    "kv": ("kv", str),
    "fault": ("faults", str),
    "replay": ("replay", str),
    "ubatch": ("n_ubatch", int),
    "checkpoint_device": ("checkpoint_device", str),
}
_KEYS = {
    POLICY: (*_FIELDS, "compute", "batch-invariant", "free"),
    NOISE: ("split", "kv", "ubatch", "compute", "batch-invariant"),
    REFERENCE: ("compute",),
    PEER: (),
}
_WORDS = ("batch-invariant", "free")
"""Keys without a value."""
_PLAIN: dict[str, Any] = {
    "rollback": "checkpoint",
    "faults": (),
    "n_rs_seq": None,
    "split": "equal",
    "kv": "per-seq",
}


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """What a lane does differently. The name is the text it was parsed from.

    kind: policy, noise, reference (of another compute mode), peer or peer noise. changes: fields
    of RunOptions that replace those of the comparison. compute: mode of the weights, None = the
    session's. free: the lane drafts and accepts on its own until it emits another token than the
    reference. seed: of the jitter of a lane of peer noise.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    kind: str = POLICY
    compute: str | None = None
    free: bool = False
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> LaneSpec:
        """Read `POLICY[,key=value…]`; only `fault` may be repeated. Raises OptionError.

        Beside the policies: `peer`, `noise` with split, kv, ubatch or compute, and `reference`
        with compute.
        """
        first, *settings = (part.strip() for part in text.split(","))
        kind = POLICY if first in ROLLBACK_POLICIES else first
        if kind not in _KEYS or (kind in (NOISE, REFERENCE) and not settings):
            raise OptionError(
                f"Lane {text!r}: {first!r} is no rollback policy.",
                f"Begin with one of {', '.join(ROLLBACK_POLICIES)}, or use {PEER}.",
            )
        changes = dict(_PLAIN)
        if kind == POLICY:
            changes = {"rollback": first, "faults": ()}
        own: dict[str, str] = {}
        seen: set[str] = set()
        for setting in settings:
            key, value = _setting(text, kind, setting)
            if key in seen and key != "fault":
                raise OptionError(f"Lane {text!r}: {key} is given twice.", "Give it once.")
            seen.add(key)
            if key in ("compute", "free"):
                own[key] = value
                continue
            if key == "batch-invariant":
                changes["batch_invariant"] = True
                continue
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
        if changes.get("replay") == "verify" and "free" not in own:
            raise OptionError(
                f"Lane {text!r}: replay=verify chooses tokens of its own.",
                "Lanes are led by the reference lane's tokens: use replay=trust, or add free.",
            )
        if own.get("compute", LANE_MODES[0]) not in LANE_MODES:
            raise OptionError(
                f"Lane {text!r}: compute {own['compute']!r} is unknown.",
                f"Choose from {', '.join(LANE_MODES)}.",
            )
        spec = cls(text, changes, kind, own.get("compute"), "free" in own)
        spec.options(RunOptions())
        return spec

    def options(self, common: RunOptions) -> RunOptions:
        """The lane's options. Raises OptionError, naming the lane."""
        try:
            return replace(common, **self.changes)
        except OptionError as error:
            raise OptionError(f"Lane {self.name!r}: {error.message}", error.remedy) from error


NOISE_LANE = LaneSpec(NOISE, dict(_PLAIN), NOISE)
"""Decodes batches of the lanes' widths, each from the reference lane's exact state."""

PEER_LANE = LaneSpec(PEER, dict(_PLAIN), PEER)
"""llama.cpp on the same file and tokens, for which llama-cpp-python has to be installed."""

PEER_NOISE_LANES = tuple(
    LaneSpec(f"{NOISE},{PEER}={seed}", dict(_PLAIN), PEER_NOISE, seed=seed) for seed in (1, 2, 3)
)
"""Round as llama.cpp does; three, since one may not meet the ties that another does."""

DEFAULT_LANES = (NOISE_LANE, LaneSpec.parse("checkpoint"), LaneSpec.parse("planes"))


def with_mode_lanes(specs: Sequence[LaneSpec], compute: str) -> list[LaneSpec]:
    """The lanes in order, those of other compute modes than `compute` led by lanes of their mode,
    a peer lane followed by its noise.

    Such a mode has a reference lane, and a noise lane if it has policy lanes; both come before
    the mode's first lane, wherever they were given. Raises OptionError for a lane given twice and
    for a second reference lane of the same mode.
    """
    names = [REFERENCE, *(spec.name for spec in specs)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"Lane {twice[0]!r} is given twice.", "Give every lane once.")
    made: list[LaneSpec] = []
    for spec in specs:
        mode = spec.compute or compute
        if mode != compute:
            kinds = (REFERENCE, NOISE) if spec.kind == POLICY else (REFERENCE,)
            for kind in kinds:
                if not any((s.kind, s.compute) == (kind, mode) for s in made):
                    given = [s for s in specs if (s.kind, s.compute) == (kind, mode)]
                    made.append((given or [LaneSpec.parse(f"{kind},compute={mode}")])[0])
        elif spec.kind == REFERENCE:
            raise OptionError(f"Lane {spec.name!r} is what the reference lane is.", "Leave it out.")
        if spec not in made:
            made.append(spec)
        if spec.kind == PEER:
            made.extend(PEER_NOISE_LANES)
    if twice := [s.name for s in made if s.kind == REFERENCE and _n_like(made, s) > 1]:
        raise OptionError(f"Lane {twice[0]!r} is given twice.", "Give every lane once.")
    return made


def _setting(text: str, kind: str, setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if key in _WORDS:
        equals, value = "=", "1" if setting in (key, f"{key}=1") else ""
    if key not in _KEYS[kind] or not equals or not value:
        keys = ", ".join(_KEYS[kind])
        raise OptionError(
            f"Lane {text!r}: {setting!r} is no setting.",
            f"Write key=value with one of {keys}; {' and '.join(words)} without a value."
            if (words := [word for word in _WORDS if word in _KEYS[kind]])
            else f"Write key=value with one of {keys}."
            if keys
            else "This lane has no settings.",
        )
    return key, value


def _n_like(specs: Sequence[LaneSpec], spec: LaneSpec) -> int:
    return sum((s.kind, s.compute) == (spec.kind, spec.compute) for s in specs)
