"""Reference and noise lanes, and which of them a list of lanes requires.

Noise is measured without the memory code that lanes are tested for: texts are decoded again in an
empty memory from position 0 on, in one batch, and in short batches of several widths together with
another sequence. Nothing is ever removed, restored or copied, while rollbacks, restores, copies and
verify batches are what a noise lane shares with the lanes it bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.analysis.noise_ceiling import logits_ceiling, rows_beyond, tipped_share
from engine.batch import Span
from engine.compare.divergence import ReferenceLogits
from engine.compare.lane import EngineFollower, EngineLane, Lane, LaneSetup, ReferenceRound
from engine.compare.lane_spec import (
    LLAMA_NOISE_LANE,
    LLAMA_PLAIN_LANE,
    PEER_NOISE_LANES,
    STATE_KEYS,
    LaneSpec,
)
from engine.decode.batching import verify_batches
from engine.decode.forward import Forward, RowsBySequence
from engine.decode.round import Round
from engine.draft.drafter import Draft
from engine.errors import OptionError
from engine.model.hybrid import HybridModel
from engine.model.layers import TargetRows
from engine.options import RunOptions, StateTypes
from engine.session import Session
from engine.trace.records import NOISE, PEER, POLICY, REFERENCE

JITTER = {"f32": 2.0**-20, "blocks": 2.0**-20}
"""Relative error of a noise lane's embeddings: about the error that float32 sums accumulate over a
model's layers."""
JITTER_ROUNDED = 2.0**-16
"""The same for modes that round activations to about 8 bits: a 256th of that rounding, so that some
values of every row are rounded differently."""


class ReferenceLane(EngineLane):
    """Decodes each sequence alone: prompts in the usual ubatches, every further token by itself.

    The owner chooses the tokens and sets `round`.
    """

    def decode(
        self, number: int, seq_id: int, span: Span, *, is_prompt: bool = False
    ) -> tuple[Tensor, TargetRows]:
        """Logits [1, n_vocab] after the last token, and the rows of all."""
        self._holders[span.seq] = seq_id
        logits, of_tokens = self._run(number, [span], is_prompt=is_prompt)
        return logits[span.seq], of_tokens[span.seq]

    def record_drafts(self, number: int, asked: Sequence[tuple[int, Draft]]) -> None:
        """Record every draft requested on behalf of all lanes."""
        self._recorder.drafts(number, asked, self._holders)

    def close(self, round_: ReferenceRound) -> None:
        """Record the chosen tokens."""
        rows = {part.seq: part.rows for part in round_.parts}
        self._record_plain(round_, rows, self.memory, wide=False)
        self.round = round_


class ModeLane(EngineFollower):
    """The reference lane of another compute mode, which leads the lanes of its mode.

    It decodes the reference lane's tokens one by one, so its differences are those of the mode.
    """

    def _follow(self, round_: ReferenceRound) -> None:
        logits = self._one_by_one(round_)
        self._record_plain(round_, logits, self.memory, wide=False)
        for part in round_.parts:
            self._compare(round_, part, logits[part.seq], self.memory)
        parts = [replace(part, logits=logits[part.seq]) for part in round_.parts]
        self.round = ReferenceRound(round_.number, parts, self.memory)


class NoiseLane(EngineFollower):
    """Decodes in other batches, in which kernels sum in another order, and never rolls back.

    Its memory decodes the accepted tokens of all sequences together, so it drifts from the leader's
    like that of any lane with other widths. The compared logits come from a second memory, which
    gets that state before every round and decodes the drafts in the batches, filler included, of a
    lane with enough snapshots. So its differences are those of a correct lane: its states have
    never seen a rejected token.

    Where activations are rounded to bf16 or int8, or routed to experts, most differences are rare:
    a last bit that flips a rounding or a tie. So that they occur here and not only in other lanes,
    its embeddings are jittered, unless the shape of a batch cannot matter anyway.

    A bug in code shared with other lanes must not raise their bound, so there is a ceiling, and the
    fact noise_check measures noise without that code (engine.compare.lanes).
    """

    def __init__(self, setup: LaneSetup, model: HybridModel, leader: Lane) -> None:
        exact, session, options = model, setup.session, setup.options
        if not options.batch_invariant:
            model = model.jittered(JITTER.get(model.compute, JITTER_ROUNDED))
        super().__init__(setup, model, leader)
        self._drafting = session.make_memory(options, setup.n_seqs, setup.n_ctx, 0)
        rounds_states = options.state_types != StateTypes()
        mode = max(model.compute, "bf16" if rounds_states else "f32", key=logits_ceiling)
        share = tipped_share(mode, ranks=session.config.ranks, rounds_states=rounds_states)
        self._check = NoiseCheck(session, exact, options, logits_ceiling(mode), share)
        self.facts.update(noise_check=self._check.found)
        holder = self._holders.__getitem__
        self._verify = Forward(model, self._drafting, options, self._recorder, holder)

    def forget(self, seq: int) -> None:
        super().forget(seq)
        self._drafting.clear(seq)
        if not self.error:
            self._check.finish(self._holders[seq])

    def _follow(self, round_: ReferenceRound) -> None:
        if round_.is_prompt:
            self._prompt(round_)
        else:
            logits = self._logits(round_)
            taken = [Span(part.seq, part.pos0, part.decoded, []) for part in round_.parts]
            self._forward.run(self._forward.split(taken), round_.number, "replay", self._clock)
            self._record_plain(round_, logits, self.memory, wide=True)
            for part in round_.parts:
                self._compare(round_, part, logits[part.seq], self.memory)
        for part in round_.parts:
            self._check.observe(part)
            self._drafting.mirror(part.seq, self.memory, part.pos0)

    def _logits(self, round_: ReferenceRound) -> RowsBySequence:
        """Rows after the first rejected token are ignored: logits do not depend on later tokens."""
        found: RowsBySequence = {}
        spans = [part.span for part in round_.parts]
        for _, ubatches in verify_batches(
            self._verify, spans, self.options.split, rolls_back=False
        ):
            logits, _ = self._verify.run(ubatches, round_.number, "verify", self._clock)
            found |= logits
        return {part.seq: found[part.seq][: len(part.accepted)] for part in round_.parts}


class LaneMode(NamedTuple):
    """What makes logits differ from the reference's without drafts: lanes of a mode are compared
    with that mode's reference lane. compute: of the weights. types: of states."""

    compute: str
    types: StateTypes

    def of(self, spec: LaneSpec) -> LaneMode:
        """The mode of a lane in a comparison of this mode."""
        return LaneMode(spec.compute or self.compute, replace(self.types, **spec.types))

    def lane(self, kind: str, common: LaneMode, *more: str) -> LaneSpec:
        """A lane of this mode, specified relative to the comparison's mode, with further
        settings."""
        own, its = asdict(self.types), asdict(common.types)
        settings = [f"compute={self.compute}"] * (self.compute != common.compute)
        settings += [f"{k}={own[name]}" for k, name in STATE_KEYS.items() if own[name] != its[name]]
        return LaneSpec.parse(",".join((kind, *settings, *more)))


def with_mode_lanes(specs: Sequence[LaneSpec], common: LaneMode) -> list[LaneSpec]:
    """The lanes in order, those of other modes than `common` after a reference lane of their mode,
    a peer lane followed by its noise lanes, and lanes that roll back in llama.cpp after its first
    plain lane and a noise lane.

    Such a mode has a reference lane, and a noise lane if it has policy lanes; both precede the
    mode's first lane, wherever they were given. A policy lane with its own ubatch size follows a
    noise lane with the same size, if its mode has noise lanes at all, because a router may be near
    a tie where a pass is cut. Raises OptionError for a lane given twice and for a second reference
    lane of the same mode.
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
            raise OptionError(f"Lane {spec.name!r} equals the reference lane.", "Leave it out.")
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


_WIDTHS = (2, 3, 5, 1, 4, 8)
_ALL_OF_FIRST = 12
_EVERY = 8
_MOST_ROWS = 32
"""Rows kept of a text: the first ones, which short batches decode, then every eighth."""
_MOST_TEXTS = 3
ONE_BATCH, SHORT_BATCHES = "one batch", "short batches"


_LeaderText = tuple[list[int], dict[int, Tensor]]
"""Tokens of a sequence, and the leader's logits [n_vocab] after some of them, by position; first
those after the prompt."""


class NoiseCheck:
    """Collects what a leader decodes and decodes it again when a sequence ends.

    found: `ceiling` and `share` as in engine.analysis.noise_ceiling, and per kind of batching the
    rows checked, those above the ceiling and the worst NMSE; first: the place of the first of them.
    """

    def __init__(
        self,
        session: Session,
        model: HybridModel,
        options: RunOptions,
        ceiling: float,
        share: float,
    ) -> None:
        self._session, self._model = session, model
        self._options = replace(options, kv="per-seq")
        self.found: dict[str, Any] = {"ceiling": ceiling, "share": share, "batches": []}
        self._texts: dict[int, _LeaderText] = {}
        self._n_checked = 0

    def observe(self, part: Round) -> None:
        """Add a round of the leader."""
        if part.seq_id not in self._texts:
            if not part.is_prompt or len(self._texts) + self._n_checked >= _MOST_TEXTS:
                return
            self._texts[part.seq_id] = [], {}
        tokens, rows = self._texts[part.seq_id]
        tokens += part.decoded
        for pos, row in enumerate(part.rows, part.pos_next - 1):
            n_seen = pos - next(iter(rows), pos)
            if len(rows) < _MOST_ROWS and (n_seen < _ALL_OF_FIRST or n_seen % _EVERY == 0):
                rows[pos] = row.clone()

    @torch.inference_mode()
    def finish(self, seq_id: int) -> None:
        """Check a sequence that has ended."""
        text = self._texts.pop(seq_id, None)
        if text is None:
            return
        self._n_checked += 1
        tokens, rows = text
        wanted = torch.stack(list(rows.values()))
        first = list(rows)[:_ALL_OF_FIRST]
        n_prompt = first[0] + 1
        ways = {
            ONE_BATCH: [(0, len(tokens))],
            SHORT_BATCHES: [(0, n_prompt), *_short(n_prompt, first[-1] + 1)],
        }
        for name, batches in ways.items():
            positions = [pos for pos in rows if pos < batches[-1][1]]
            n = len(positions)
            reference = ReferenceLogits(wanted[:n], wanted[:n].argmax(1).tolist())
            nmse = np.array(reference.difference(self._decode(text, batches)).nmse)
            self._note(seq_id, name, positions, batches, nmse)

    def _decode(self, text: _LeaderText, batches: list[tuple[int, int]]) -> Tensor:
        """Logits [n, n_vocab] after the wanted positions; short batches are decoded together with
        the same text from its second token on, so that mixed-up rows would show."""
        (tokens, rows), model, n_seqs = text, self._model, min(len(batches), 2)
        other = [*tokens[1:], tokens[0]]
        memory = self._session.make_memory(self._options, n_seqs, len(tokens), 0, model.device)
        n_ubatch = min(self._options.n_ubatch, self._options.n_batch)
        found: list[Tensor] = []
        for start, stop in batches:
            outputs = [pos - start for pos in rows if start <= pos < stop]
            spans = [Span(0, start, tokens[start:stop], outputs)]
            spans += [Span(1, start, other[start:stop], [])] * (n_seqs - 1)
            ubatches = memory.split(spans, n_ubatch, "equal")
            found += [model.forward(ubatch, memory).logits for ubatch in ubatches]
        return torch.cat(found)

    def _note(
        self,
        seq_id: int,
        name: str,
        positions: list[int],
        batches: list[tuple[int, int]],
        nmse: np.ndarray,
    ) -> None:
        beyond = rows_beyond(nmse, self.found["ceiling"], self.found["share"])
        found: dict[str, Any] = {
            "seq_id": seq_id,
            "batches": name,
            "rows": len(nmse),
            "beyond": len(beyond),
            "worst": worst if math.isfinite(worst := float(nmse.max(initial=0.0))) else None,
        }
        if beyond.size:
            pos = positions[int(beyond[0])]
            start, stop = next(batch for batch in batches if batch[0] <= pos < batch[1])
            found["first"] = {"pos": pos, "row": pos - start, "width": stop - start}
        self.found["batches"].append(found)


def _short(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Batches of changing widths over positions start .. stop - 1."""
    for width in cycle(_WIDTHS):
        if start >= stop:
            return
        yield start, min(start + width, stop)
        start += width
