"""A comparison: the reference lane leads, the others follow round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.compare.lane_spec import DEFAULT_LANES, NOISE, REFERENCE, LaneSpec
from engine.compare.lanes import ReferenceLane, Round, following_lane
from engine.compare.verdict import LaneVerdict, judge, noise_bound
from engine.decode.sampler import Sampler
from engine.decode.slot import Slot
from engine.decode.verify import accept
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, Drafter, DraftRequest
from engine.errors import OptionError
from engine.findings.check import record_findings
from engine.options import Prompt, RunOptions
from engine.session import Session
from engine.trace.store import TraceStore
from engine.trace.timings import summary


class Comparison:
    """Lanes over one session; `step` until it returns False.

    The reference lane decodes token by token. A drafter follows it and proposes; every lane gets
    the same draft and the same accepted tokens, so positions stay comparable however wrong a lane
    is. Each lane is a run in `trace`, `runs[run_id]["lane"]` is its name, and its differences
    are rows of the divergence table.

    drafter: used instead of those that the options name. bound: NMSE that a lane may reach, None =
    what the noise lane explains. Raises OptionError and what Session.start raises.
    """

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        options: RunOptions,
        lanes: Sequence[LaneSpec] = DEFAULT_LANES,
        trace: TraceStore | None = None,
        *,
        drafter: Drafter | None = None,
        bound: float | None = None,
    ) -> None:
        names = [REFERENCE, *(spec.name for spec in lanes)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise OptionError(f"Lane {twice[0]!r} is given twice.", "Give every lane once.")
        self.trace = TraceStore() if trace is None else trace
        self.done = False
        common = replace(options, parallel=1, faults=())
        n_ctx = session.context([prompt], common)
        drafters = [drafter] if drafter else session.make_drafters(common, 1, n_ctx)
        if not drafters:
            raise OptionError("No drafter is chosen.", "Name one with --spec-type.")
        self._chain, self._options, self._bound = DrafterChain(drafters), common, bound
        self._n_ctx, self._tokenizer = n_ctx, session.tokenizer
        end_tokens = session.tokenizer.eog_ids
        banned = end_tokens if common.ignore_eos else ()
        self._end_tokens = frozenset() if common.ignore_eos else frozenset(end_tokens)
        self._slot = Slot(0, 0, prompt, Sampler(common.sampler, banned))
        lead = replace(common, rollback="checkpoint", n_rs_seq=None, split="equal", kv="per-seq")
        lane_options = [spec.options(common) for spec in lanes]
        self._reference = ReferenceLane(session, lead, n_ctx, self.trace)
        self._lanes = [
            following_lane(
                spec.name, session, mine, n_ctx, session.snapshots(mine, True), self.trace,
                self._reference,
            )
            for spec, mine in zip(lanes, lane_options, strict=True)
        ]  # fmt: skip
        self._noise = [lane.run_id for lane in self._lanes if lane.name == NOISE]
        self._round = 0

    @property
    def prompt(self) -> Prompt:
        """What is continued."""
        return self._slot.prompt

    @property
    def tokens(self) -> list[int]:
        """What the reference lane has emitted."""
        return list(self._slot.emitted)

    @property
    def text(self) -> str:
        """The same as text."""
        return self._tokenizer.decode(self._slot.emitted)

    @torch.inference_mode()
    def step(self) -> bool:
        """One round of all lanes. True while more work remains; DraftscopeError ends it."""
        if not self.done:
            try:
                self._step()
            except BaseException:
                self.stop()
                raise
            if self._slot.stop:
                self.stop()
        return not self.done

    def stop(self) -> None:
        """End now; what was recorded stays."""
        if not self.done:
            self.done = True
            self._slot.stop = self._slot.stop or "stopped"
            lanes = (self._reference, *self._lanes)
            record_findings(self.trace, [lane.run_id for lane in lanes])
            for lane in lanes:
                facts = self.trace.runs[lane.run_id]
                facts["summary"] = summary(self.trace, lane.run_id)
                facts["stops"] = [self._slot.stop]

    @property
    def bound(self) -> float:
        """NMSE that a lane may reach, as far as is known now."""
        return noise_bound(self.trace, self._noise) if self._bound is None else self._bound

    def results(self) -> list[LaneVerdict]:
        """Verdicts so far: the reference lane first, then the lanes in the order given."""
        bound = self.bound
        return [judge(self.trace, lane.run_id, bound) for lane in (self._reference, *self._lanes)]

    def _step(self) -> None:
        slot = self._slot
        self._reference.begin()
        round_, hidden = self._decode(slot) if self._round else self._prompt(slot)
        self._reference.close(round_)
        for lane in self._lanes:
            lane.follow(round_)
        self._chain.observe(0, round_.pos0, _decoded(round_), hidden)
        n_next = round_.first_pos
        slot.emit(round_.chosen, n_next, self._options, self._n_ctx, self._end_tokens)
        slot.n_tokens, slot.last = n_next + len(round_.chosen) - 1, round_.chosen[-1]
        self._round += 1

    def _prompt(self, slot: Slot) -> tuple[Round, torch.Tensor]:
        tokens = slot.prompt.tokens
        logits, hidden = self._reference.decode(0, 0, tokens)
        chosen = [slot.sampler.pick(slot.sampler.candidates(logits), 0)]
        return Round(0, 0, tokens, None, chosen, logits, is_prompt=True), hidden

    def _decode(self, slot: Slot) -> tuple[Round, torch.Tensor]:
        draft = self._draft(slot)
        tokens = [slot.last, *(draft.tokens if draft else ())]
        rows: list[torch.Tensor] = []
        hidden: list[torch.Tensor] = []

        def pick(i: int) -> int:
            logits, row = self._reference.decode(self._round, slot.n_tokens + i, [tokens[i]])
            rows.append(logits)
            hidden.append(row)
            return slot.sampler.pick(slot.sampler.candidates(logits), 0)

        chosen = accept(tokens[1:], pick, self._end_tokens)
        round_ = Round(self._round, slot.n_tokens, tokens, draft, chosen, torch.cat(rows))
        return round_, torch.cat(hidden)

    def _draft(self, slot: Slot) -> Draft | None:
        limit = slot.draft_limit(self._options, self._n_ctx)
        if not limit:
            return None
        return self._chain.draft([DraftRequest(0, slot.n_tokens, slot.last, limit)]).get(0)


def _decoded(round_: Round) -> list[int]:
    """The tokens that the target has decoded for good."""
    if round_.is_prompt:
        return list(round_.tokens)
    return [round_.tokens[0], *round_.chosen[:-1]]
