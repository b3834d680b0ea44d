"""Lanes that roll back in llama.cpp itself, compared with llama.cpp token by token.

Both sides use the same kernels, so the bound is tight: three times the noise lane, which never
rolls back. The contents of a plane are identified by comparison with the plain lane's states, and
recorded in the `memory` table.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import Span
from engine.compare.divergence import LogitsDifference, MemoryDifference
from engine.compare.lane import LaneSetup, ReferenceRound
from engine.compare.lane_spec import LlamaRollback
from engine.compare.llama_cpp import ON_DEVICE, PARTIAL, WHOLE
from engine.compare.peer_lane import LlamaLane, PeerLane
from engine.compare.state_blob import state_difference
from engine.decode.round import Round
from engine.errors import OptionError, RollbackRefusedError
from engine.trace.records import MISSING, NOISE, POLICY

MARGIN = 3.0
"""Allowed multiple of the noise: both sides are llama.cpp on the same tokens."""
REMEMBERED = 4
"""Positions whose states the plain lane remembers, in planes: a rollback over a whole batch ends as
far back in the batch before it."""


class _JudgedByPlain(LlamaLane):
    """A lane compared with the plain lane of llama.cpp, whose engine it uses."""

    def __init__(self, setup: LaneSetup, plain: PeerLane) -> None:
        super().__init__(setup, plain, plain.engine)
        self.plain = plain
        self.facts.lane_margin = MARGIN

    def follow(self) -> None:
        """Decode the plain lane's round; fails without a plain lane."""
        if self.plain.error and not self.error:
            self.facts.lane_error = self.plain.error
        super().follow()

    def _decode_prompts(self, round_: ReferenceRound) -> None:
        logits = {part.seq: self.prompt_of(part) for part in round_.parts}
        self._clock.stop("verify")
        self._record_plain(round_, logits, None, wide=True)
        for part in round_.parts:
            self._append(round_, part, round_.measure(part).difference(logits[part.seq]))

    def _append(self, round_: ReferenceRound, part: Round, measured: LogitsDifference) -> None:
        """Add the rows of a sequence, with the distance of its states from the plain lane's."""
        apart = self._difference(part)
        self._rows.append(round_.number, part.seq_id, part.pos_next, part.accepted, measured, apart)

    def _difference(self, part: Round) -> MemoryDifference | None:
        """Difference of the recurrent states; cells cannot be read."""
        mine, other = self.state(part.seq), self.plain.states[part.seq]
        if mine is None or other is None or self.layout is None:
            return None
        return state_difference(self.layout, other, mine, MISSING)


class LlamaNoiseLane(_JudgedByPlain):
    """Allowed difference of a correct lane: the larger one of two ways without rollback.

    One verifies every draft in one batch from the plain lane's exact state, as planes do. The other
    has a memory of its own that decodes the accepted tokens, in the batches of a checkpoint's
    replay, and drifts likewise; its states are the ones compared.
    """

    def __init__(self, setup: LaneSetup, plain: PeerLane) -> None:
        super().__init__(replace(setup, n_rs_seq=0), plain)
        self.facts.lane_kind = NOISE
        self._verifying, _ = self.engine.open_context(
            setup.n_seqs, setup.n_ctx, setup.options.n_ubatch, 0, self.n_threads
        )

    def forget(self, seq: int) -> None:
        super().forget(seq)
        self._remove_all(self._verifying, seq)

    def _follow(self, round_: ReferenceRound) -> None:
        if round_.is_prompt:
            self._decode_prompts(round_)
            return
        for part in round_.parts:
            self.engine.load(self._verifying, part.seq, self.plain.before[part.seq], WHOLE)
        self._clock.stop("restore")
        rows = torch.from_numpy(
            self.engine.decode(self._verifying, [part.span for part in round_.parts])
        )
        logits = _by_sequence(round_, rows)
        self._clock.stop("verify")
        self._record_plain(round_, logits, None, wide=True)
        for part in round_.parts:
            kept = Span(part.seq, part.pos0, part.decoded, range(len(part.decoded)))
            ways = [
                round_.measure(part).difference(one)
                for one in (logits[part.seq], self.decode([kept]))
            ]
            self._append(round_, part, max(ways, key=lambda way: max(way.nmse)))


class LlamaRollbackLane(_JudgedByPlain):
    """Verifies every draft and rolls rejected tokens back with llama.cpp's own means.

    A refusal stops the lane; nothing is restored instead.
    """

    def __init__(self, setup: LaneSetup, plain: PeerLane) -> None:
        spec, options, n_rs_seq = setup.spec, setup.options, setup.n_rs_seq
        assert spec.llama is not None
        self._way: LlamaRollback = spec.llama
        by_planes = self._way.by == "planes"
        if by_planes and not n_rs_seq < min(options.n_ubatch, setup.n_ctx) - 1:
            raise OptionError(
                f"Lane {spec.name!r}: {n_rs_seq} planes need ubatches of more than {n_rs_seq + 1} "
                "tokens.",
                "Raise -ub, or lower n_rs_seq.",
            )
        if self._way.shows_planes and setup.n_seqs > 1:
            raise OptionError(
                f"Lane {spec.name!r} can read the planes of only one sequence.",
                "Give one prompt, or leave out show-planes.",
            )
        super().__init__(setup if by_planes else replace(setup, n_rs_seq=0), plain)
        self.facts.lane_kind = POLICY
        self._rule = options.spec.accept
        self._slots: dict[int, dict[int, tuple[str, int | None]]] = {}
        # a plane's contents are identified by comparison with the plain lane's states
        self.facts.columns = {"memory": {"state": "derived", "age": "derived"}}
        if by_planes and self.layout and not n_rs_seq:
            self.facts.lane_error = str(
                RollbackRefusedError(
                    f"Lane {spec.name!r} has no snapshot planes (n_rs_seq is 0): none of the "
                    "run's drafters has a model.",
                    "Set n_rs_seq, for example llama.cpp,rollback=planes,n_rs_seq=3.",
                )
            )
        elif by_planes and self.layout and not self.n_rs_seq:
            self.facts.lane_error = str(
                RollbackRefusedError(
                    "llama.cpp has no snapshot planes for the architecture "
                    f"{setup.session.config.architecture} (n_rs_seq is 0).",
                    "Use rollback=checkpoint.",
                )
            )

    def _follow(self, round_: ReferenceRound) -> None:
        if round_.is_prompt:
            self._decode_prompts(round_)
            return
        self._slots = {part.seq_id: {} for part in round_.parts}
        saved = {part.seq: self._save(part) for part in round_.parts}
        self._clock.stop("save")
        logits = _by_sequence(round_, self._verified(round_))
        self._clock.stop("verify")
        rounds, refusals = [], []
        for part in round_.parts:
            mine = self._verified_round(round_.number, part, logits[part.seq], saved[part.seq])
            rounds.append(mine)
            try:
                self._undo(part, mine, logits, saved[part.seq])
            except RollbackRefusedError as error:
                mine.rollback_path = "refused"
                refusals.append(error)
        self._recorder.round(rounds, None, self._clock, n_rs_seq=self.n_rs_seq)
        self._record_slots(round_.number)
        if refusals:
            raise refusals[0]
        for part in round_.parts:
            self._append(round_, part, round_.measure(part).difference(logits[part.seq]))

    def _verified(self, round_: ReferenceRound) -> Tensor:
        if not self._way.step:
            return self.decode([part.span for part in round_.parts])
        rows = []
        for part in round_.parts:
            for i in range(0, len(part.tokens), self._way.step):
                tokens = part.tokens[i : i + self._way.step]
                span = Span(part.seq, part.pos0 + i, tokens, range(len(tokens)))
                rows.append(self.decode([span]))
        return torch.cat(rows)

    def _save(self, part: Round) -> bytes | None:
        """A checkpoint, if a rejection would need one."""
        if self._way.by != "checkpoint" or self.layout is None or part.draft is None:
            return None
        return self.engine.save(self.context, part.seq, self._flags)

    @property
    def _flags(self) -> int:
        return PARTIAL | (ON_DEVICE if self._way.on_device else 0)

    def _verified_round(
        self, number: int, part: Round, logits: Tensor, saved: bytes | None
    ) -> Round:
        """The round before any rollback."""
        n_rejected = len(part.tokens) - len(part.accepted)
        return Round(
            number,
            part.seq_id,
            part.seq,
            part.pos0,
            part.tokens,
            part.draft,
            logits=logits,
            accepted=part.accepted.copy(),
            n_own=1,
            n_emitted=part.n_emitted,
            accept_rule=self._rule if part.draft else "",
            rollback_depth=n_rejected,
            memory_rollback=n_rejected,
            checkpoint_bytes=0 if saved is None else len(saved),
        )

    def _undo(
        self, part: Round, mine: Round, logits: dict[int, Tensor], saved: bytes | None
    ) -> None:
        """Roll back rejected tokens. The sequence's entry in logits becomes the row it continues
        from. Raises RollbackRefusedError."""
        n, kept = len(part.tokens), len(part.accepted)
        if self._way.shows_planes:
            self._show_planes(part)
        if kept == n:
            return
        if saved is not None:
            self.engine.load(self.context, part.seq, saved, self._flags)
            self._remove(part, part.pos0)
            mine.rollback_path, mine.restored_bytes = "restore", len(saved)
            self._clock.stop("restore", [part.seq])
        else:
            depth = n if self._way.undoes_batch else n - kept
            self._remove(part, part.pos0 + n - depth)
            mine.rollback_path, mine.memory_rollback = "seq_rm", depth
            self._clock.stop("rollback", [part.seq])
            self._tell_plane(part, depth)
            if not self._way.undoes_batch:
                return
        mine.n_replays = 1
        logits[part.seq] = self.decode([Span(part.seq, part.pos0, part.tokens[:kept], range(kept))])
        self._clock.stop("replay", [part.seq])

    def _remove(self, part: Round, p0: int) -> None:
        """Raises RollbackRefusedError."""
        if self.engine.seq_rm(self.context, part.seq, p0):
            return
        n, last = part.pos0 + len(part.tokens) - p0, self._way.step or len(part.tokens)
        raise RollbackRefusedError(
            f"llama.cpp refused to remove {n} tokens after a batch of {last} with n_rs_seq "
            f"{self.n_rs_seq}, in sequence {part.seq_id} at position {part.pos0}.",
            "Raise n_rs_seq, or use rollback=checkpoint.",
        )

    def _tell_plane(self, part: Round, depth: int) -> None:
        """Note the plane that the next batch reads after removing this many tokens."""
        state = self.state(part.seq)
        if state is None:
            return
        last = part.pos0 + len(part.tokens) - 1
        pos = self.plain.histories[part.seq].position_of(state)
        age = None if pos is None else last - pos
        self._slots[part.seq_id][depth] = "pending", age

    def _show_planes(self, part: Round) -> None:
        """Record the position in each plane after the batch, before any removal."""
        if self.layout is None:
            return
        last = part.pos0 + len(part.tokens) - 1
        whole = self.engine.save(self.context, part.seq, WHOLE)
        for depth in range(1, min(self.n_rs_seq, last) + 1):
            if not self.engine.seq_rm(self.context, part.seq, last - depth + 1):
                break
            state = self.state(part.seq)
            self.engine.load(self.context, part.seq, whole, WHOLE)
            if state is None:
                break
            pos = self.plain.histories[part.seq].position_of(state)
            if pos is not None:  # unknown for rejected tokens
                kind = "fresh" if last - pos == depth else "stale"
                self._slots[part.seq_id][depth] = kind, last - pos

    def _record_slots(self, number: int) -> None:
        for seq_id, slots in self._slots.items():
            for slot, (state, age) in sorted(slots.items()):
                row = {"round": number, "seq_id": seq_id, "slot": slot}
                self.writer.append("memory", **row, state=state, age=age)


def _by_sequence(round_: ReferenceRound, rows: Tensor) -> dict[int, Tensor]:
    """The rows of each sequence that its tokens are chosen from; batch rows are in the order of its
    spans."""
    found, start = {}, 0
    for part in round_.parts:
        found[part.seq] = rows[start : start + len(part.accepted)]
        start += len(part.tokens)
    return found
