"""The lanes that others need beside them: leaders of another mode, noise of peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from engine.compare.lane_spec import (
    LLAMA_NOISE_LANE,
    LLAMA_PLAIN_LANE,
    PEER_NOISE_LANES,
    STATE_KEYS,
    LaneSpec,
)
from engine.errors import OptionError
from engine.options import StateTypes
from engine.trace.records import NOISE, PEER, POLICY, REFERENCE


class LaneMode(NamedTuple):
    """What makes logits differ from the reference's without any draft: lanes of a mode are measured
    against the mode's own reference lane. compute: of the weights. types: of states."""

    compute: str
    types: StateTypes

    def of(self, spec: LaneSpec) -> LaneMode:
        """The mode of a lane in a comparison of this mode."""
        return LaneMode(spec.compute or self.compute, replace(self.types, **spec.types))

    def lane(self, kind: str, common: LaneMode, *more: str) -> LaneSpec:
        """A lane of this mode, by what differs from the mode of the comparison, and more
        settings."""
        own, its = asdict(self.types), asdict(common.types)
        settings = [f"compute={self.compute}"] * (self.compute != common.compute)
        settings += [f"{k}={own[name]}" for k, name in STATE_KEYS.items() if own[name] != its[name]]
        return LaneSpec.parse(",".join((kind, *settings, *more)))


def with_mode_lanes(specs: Sequence[LaneSpec], common: LaneMode) -> list[LaneSpec]:
    """The lanes in order, those of other modes than `common` led by lanes of their mode, a peer
    lane followed by its noise; lanes that roll back in llama.cpp by the first plain lane of it,
    with a noise lane.

    Such a mode has a reference lane, and a noise lane if it has policy lanes; both come before
    the mode's first lane, wherever they were given. A policy lane with ubatches of its own follows
    a noise lane with the same ones, if its mode has noise lanes at all: where a pass is cut, a
    router may be at a near tie. Raises OptionError for a lane given twice and
    for a second reference lane of the same mode.
    """
    names = [REFERENCE, *(spec.name for spec in specs)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"Lane {twice[0]!r} is given twice.", "Give every lane once.")
    made: list[LaneSpec] = []
    plain = next((spec for spec in specs if spec.kind == PEER), LLAMA_PLAIN_LANE)

    def like(those: Sequence[LaneSpec], kind: str, mode: LaneMode) -> list[LaneSpec]:
        return [one for one in those if (one.kind, common.of(one)) == (kind, mode)]

    for spec in specs:
        if spec.llama:
            others = (plain, LLAMA_NOISE_LANE, spec)
            made.extend(one for one in others if one not in made)
            if plain.kind == PEER and PEER_NOISE_LANES[0] not in made:
                made.extend(PEER_NOISE_LANES)
            continue
        mode = common.of(spec)
        if mode != common:
            kinds = (REFERENCE, NOISE) if spec.kind == POLICY else (REFERENCE,)
            for kind in kinds:
                if not like(made, kind, mode):
                    made.append((like(specs, kind, mode) or [mode.lane(kind, common)])[0])
        elif spec.kind == REFERENCE:
            raise OptionError(f"Lane {spec.name!r} is what the reference lane is.", "Leave it out.")
        n_ubatch = spec.changes.get("n_ubatch")
        noises = like([*made, *specs], NOISE, mode)
        if (
            spec.kind == POLICY
            and n_ubatch is not None
            and noises
            and not any(one.changes.get("n_ubatch") == n_ubatch for one in noises)
        ):
            made.append(mode.lane(NOISE, common, f"ubatch={n_ubatch}"))
        if spec not in made:
            made.append(spec)
        if spec.kind == PEER and PEER_NOISE_LANES[0] not in made:
            made.extend(PEER_NOISE_LANES)
    for spec in made:
        if spec.kind == REFERENCE and len(like(made, REFERENCE, common.of(spec))) > 1:
            raise OptionError(f"Lane {spec.name!r} is given twice.", "Give every lane once.")
    return made
