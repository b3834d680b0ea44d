"""Lane specifications as text: `POLICY[,key=value…]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import OptionError
from engine.option_fields import options_in
from engine.options import COMPUTE_MODES, ROLLBACK_POLICIES, RunOptions
from engine.trace.records import NOISE, PEER, PEER_NOISE, POLICY, REFERENCE

LANE_MODES = tuple(mode for mode in COMPUTE_MODES if mode != "auto")
_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n_rs_seq": ("n_rs_seq", int),
    "split": ("split", str),
    "kv": ("kv", str),
    "replay": ("replay", str),
    "ubatch": ("n_ubatch", int),
    "checkpoint_device": ("checkpoint_device", str),
}
STATE_KEYS = {
    one.option.dest: one.field for one in options_in(RunOptions) if one.path[0] == "state_types"
}
"""Keys for types of states, and the field of StateTypes of each."""
_KEYS = {
    POLICY: (*_FIELDS, "fault", "compute", *STATE_KEYS, "batch-invariant", "free", "forks"),
    NOISE: ("split", "kv", "ubatch", "compute", *STATE_KEYS, "batch-invariant"),
    REFERENCE: ("compute", *STATE_KEYS),
    PEER: (),
}
_WORDS = ("batch-invariant", "free", "forks")
"""Keys without a value."""
LLAMA = "llama.cpp"
LLAMA_POLICIES = ("planes", "checkpoint")
LLAMA_ROLLBACKS = (*LLAMA_POLICIES, NOISE)
_LLAMA_KEYS = {
    "planes": ("n_rs_seq", "step", "undo", "show-planes"),
    "checkpoint": ("device",),
    NOISE: (),
}
_LLAMA_WORDS = ("device", "show-planes")
_LLAMA_FORMS = (
    f"Write {LLAMA}, {LLAMA},rollback=planes[,n_rs_seq=K][,step=N][,undo=batch][,show-planes], "
    f"{LLAMA},rollback=checkpoint[,device] or {LLAMA},rollback={NOISE}."
)
_PLAIN: dict[str, Any] = {
    "rollback": "checkpoint",
    "faults": (),
    "n_rs_seq": None,
    "split": "equal",
    "kv": "per-seq",
}


@dataclass(frozen=True, slots=True)
class LlamaRollback:
    """How a lane of llama.cpp rolls back.

    by: planes (llama_memory_seq_rm), checkpoint (saved and restored), or noise: no rollback, each
    round starts from the exact state. on_device: checkpoints stay in the library's buffers. step:
    tokens per batch of a verification, 0 = all in one. undoes_batch: a rejection removes the whole
    batch and decodes the accepted tokens again. shows_planes: every plane is read in every round.
    """

    by: str
    on_device: bool = False
    step: int = 0
    undoes_batch: bool = False
    shows_planes: bool = False


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """What distinguishes a lane. The name is the text it was parsed from.

    kind: policy, noise, reference (of another compute mode or other types of states), peer or peer
    noise. changes: fields of RunOptions that override the comparison's; types: fields of its
    StateTypes. compute: mode of the weights, None = the session's. free: the lane drafts and
    accepts on its own until it emits another token than the reference. forks: its sequences are
    copied and continue in turns with their copies. seed: of the jitter of a peer noise lane. llama:
    for lanes that roll back in llama.cpp; they are policy and noise lanes of its own plain lane.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    kind: str = POLICY
    compute: str | None = None
    free: bool = False
    forks: bool = False
    seed: int = 0
    llama: LlamaRollback | None = None
    types: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> LaneSpec:
        """Parse `POLICY[,key=value…]`; only `fault` may be repeated. Raises OptionError.

        In addition to the policies: `llama.cpp` (also called `peer`), `llama.cpp,rollback=…`,
        `noise` with split, kv, ubatch, compute or types of states, and `reference` with the last
        two.
        """
        first, *settings = (part.strip() for part in text.split(","))
        if first == LLAMA:
            return _llama_lane(text, settings)
        kind = POLICY if first in ROLLBACK_POLICIES else first
        if kind not in _KEYS or (kind in (NOISE, REFERENCE) and not settings):
            raise OptionError(
                f"Lane {text!r}: {first!r} is not a rollback policy.",
                f"Start with one of {', '.join(ROLLBACK_POLICIES)}, or use {LLAMA}.",
            )
        changes = dict(_PLAIN)
        if kind == POLICY:
            changes = {"rollback": first, "faults": ()}
        own: dict[str, str] = {}
        for setting in settings:
            key, value = _setting(text, kind, setting)
            if key == "fault":
                changes["faults"] = (*changes["faults"], value)
            elif key in own:
                raise OptionError(f"Lane {text!r}: {key} is given twice.", "Give it once.")
            else:
                own[key] = value
        for key, (name, convert) in _FIELDS.items():
            try:
                changes |= {name: convert(own[key])} if key in own else {}
            except ValueError as error:
                raise OptionError(
                    f"Lane {text!r}: {key} {own[key]!r} is not a whole number.", "Give a number."
                ) from error
        if "batch-invariant" in own:
            changes["batch_invariant"] = True
        types = {name: own[key] for key, name in STATE_KEYS.items() if key in own}
        if "free" in own and "forks" in own:
            raise OptionError(
                f"Lane {text!r}: a lane with forks follows the reference's tokens.",
                "Leave out free or forks.",
            )
        if changes.get("replay") == "verify" and "free" not in own:
            raise OptionError(
                f"Lane {text!r}: replay=verify samples its own tokens.",
                "Lanes use the reference lane's tokens: use replay=trust, or add free.",
            )
        if own.get("compute", LANE_MODES[0]) not in LANE_MODES:
            raise OptionError(
                f"Lane {text!r}: compute {own['compute']!r} is unknown.",
                f"Choose from {', '.join(LANE_MODES)}.",
            )
        compute = own.get("compute")
        spec = cls(text, changes, kind, compute, "free" in own, "forks" in own, types=types)
        spec.options(RunOptions())
        return spec

    def options(self, common: RunOptions) -> RunOptions:
        """The lane's options. Raises OptionError, naming the lane."""
        try:
            types = replace(common.state_types, **self.types)
            return replace(common, **{**self.changes, "state_types": types})
        except OptionError as error:
            raise OptionError(f"Lane {self.name!r}: {error.message}", error.remedy) from error


NOISE_LANE = LaneSpec(NOISE, dict(_PLAIN), NOISE)
"""Decodes batches of the lanes' widths, each from the reference lane's exact state."""

LLAMA_PLAIN_LANE = LaneSpec(LLAMA, dict(_PLAIN), REFERENCE)
"""llama.cpp token by token, the reference of its lanes with rollback."""

LLAMA_NOISE_LANE = LaneSpec(
    f"{LLAMA},rollback={NOISE}", dict(_PLAIN), NOISE, llama=LlamaRollback(NOISE)
)
"""llama.cpp decoding each round's batch from the exact state."""

PEER_NOISE_LANES = tuple(
    LaneSpec(f"{NOISE},{PEER}={seed}", dict(_PLAIN), PEER_NOISE, seed=seed) for seed in (1, 2, 3)
)
"""Round as llama.cpp does; three of them, because one may miss ties that another meets."""


def _llama_lane(text: str, settings: Sequence[str]) -> LaneSpec:
    if not settings:
        return LaneSpec(text.strip(), dict(_PLAIN), PEER)
    given: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key in given or (bool(equals and value) == (key in _LLAMA_WORDS)):
            raise OptionError(
                f"Lane {text!r}: {setting!r} is not a setting, or given twice.", _LLAMA_FORMS
            )
        given[key] = value
    by = given.pop("rollback", "")
    if by not in LLAMA_ROLLBACKS or (wrong := set(given) - set(_LLAMA_KEYS[by])):
        what = f"rollback {by!r} is unknown" if by not in LLAMA_ROLLBACKS else ""
        raise OptionError(
            f"Lane {text!r}: {what or f'{min(wrong)!r} is not a setting of rollback={by}'}.",
            _LLAMA_FORMS,
        )
    numbers = {key: given[key] for key in ("n_rs_seq", "step") if key in given}
    for key, value in numbers.items():
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 1000):
            raise OptionError(
                f"Lane {text!r}: {key} {value!r} is not a whole number of 1 or more.",
                "Give a number.",
            )
    if given.get("undo", "batch") != "batch":
        raise OptionError(
            f"Lane {text!r}: undo {given['undo']!r} is unknown.", "Use undo=batch, or none."
        )
    llama = LlamaRollback(
        by, "device" in given, int(numbers.get("step", 0)), "undo" in given, "show-planes" in given
    )
    changes = {**_PLAIN, "rollback": "checkpoint" if by == NOISE else by}
    if "n_rs_seq" in numbers:
        changes["n_rs_seq"] = int(numbers["n_rs_seq"])
    if llama.on_device:
        changes["checkpoint_device"] = "device"
    return LaneSpec(text.strip(), changes, NOISE if by == NOISE else POLICY, llama=llama)


def _setting(text: str, kind: str, setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if key in _WORDS:
        equals, value = "=", "1" if setting in (key, f"{key}=1") else ""
    if key not in _KEYS[kind] or not equals or not value:
        keys = ", ".join(_KEYS[kind])
        raise OptionError(
            f"Lane {text!r}: {setting!r} is not a setting.",
            f"Write key=value with one of {keys}; {' and '.join(words)} without a value."
            if (words := [word for word in _WORDS if word in _KEYS[kind]])
            else f"Write key=value with one of {keys}."
            if keys
            else "This lane has no settings.",
        )
    return key, value


DEFAULT_LANES = (NOISE_LANE, *map(LaneSpec.parse, ("checkpoint", "planes", "carry,forks")))
