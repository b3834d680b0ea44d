"""Comparisons: the reference lane leads, the others follow round by round. Scenarios start one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.analysis.findings.check import record_findings
from engine.analysis.verdict import LaneVerdict, judge_lanes, noise_against
from engine.batch import Span
from engine.compare.lane import Follower, Lane, LaneSetup, ReferenceRound
from engine.compare.lane_spec import DEFAULT_LANES, LLAMA_PLAIN_LANE, LaneSpec
from engine.compare.lanes import LaneMode, ModeLane, NoiseLane, ReferenceLane, with_mode_lanes
from engine.compare.llama_lanes import REMEMBERED, LlamaNoiseLane, LlamaRollbackLane
from engine.compare.peer_lane import PeerLane, PeerNoiseLane
from engine.compare.policy_lane import ForkLane, FreeLane, PolicyLane
from engine.decode.acceptance import cut_draft, note_grammar_error
from engine.decode.failure import note_non_finite
from engine.decode.plain_acceptance import PLAIN_RULES, draw_along, draw_plainly
from engine.decode.round import Round
from engine.decode.sequences import DecodingSequence, SlotAssignment, sampler_for
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft, Drafter, branch_of
from engine.draft.scripted import ScriptedDrafter
from engine.errors import DeviceLostError, NonFiniteError, OptionError
from engine.machine.device import run_on
from engine.model.layers import TargetRows, join_rows
from engine.options import Prompt, RunOptions
from engine.options.llama_cpp import DEFAULT_SETTINGS, LlamaSettings
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import Sampler
from engine.session import Session
from engine.trace.records import NOISE, PEER, PEER_NOISE, POLICY, REFERENCE
from engine.trace.store import TraceStore


class Comparison:
    """Lanes over one session; call `step` until it returns False.

    The reference lane decodes each sequence alone, token by token, and chooses by
    engine.decode.plain_acceptance: its sampler never sees a draft. A drafter follows it and
    proposes; every lane gets the same drafts and the same accepted tokens, so positions stay
    comparable however wrong a lane is. Of a tree, lanes with a rollback policy get all branches,
    others the one that the reference lane's tokens follow. Lanes decode up to options.parallel
    sequences in joint batches; further prompts wait for a slot. Each lane is a run in `trace`,
    described by the facts listed in engine.compare.lane, and its differences are rows of the
    divergence table.

    drafter: replaces those of the options, within their limits. draft_accept: scripted drafts, with
    this many right tokens in the first, second, … draft (engine.draft.scripted). bound: allowed
    NMSE of a lane, None = what the noise lanes explain. llama_library: a build of llama.cpp, for
    its lanes, under llama_settings. Raises OptionError and what Session.start raises; with lanes of
    other compute modes also what Session.model_in raises, with lanes of llama.cpp PeerLibraryError.
    Runs that have started end with that error.
    """

    def __init__(
        self,
        session: Session,
        prompt: Prompt | Sequence[Prompt],
        options: RunOptions,
        lanes: Sequence[LaneSpec] = DEFAULT_LANES,
        trace: TraceStore | None = None,
        *,
        drafter: Drafter | None = None,
        bound: float | None = None,
        draft_accept: Sequence[int] | None = None,
        llama_library: Path | None = None,
        llama_settings: LlamaSettings = DEFAULT_SETTINGS,
    ) -> None:
        prompts = [prompt] if isinstance(prompt, Prompt) else list(prompt)
        self._mode = LaneMode(session.compute, options.state_types)
        specs = with_mode_lanes(lanes, self._mode)
        self.trace = TraceStore() if trace is None else trace
        self.done = False
        common = replace(options, faults=())
        n_ctx = session.context(prompts, common)
        n_seqs = min(common.parallel, len(prompts))
        grammar = session.grammar(common)
        lead = replace(common, rollback="checkpoint", n_rs_seq=None, split="equal", kv="per-seq")
        setup = LaneSetup(
            session,
            self.trace,
            prompts,
            LaneSpec(REFERENCE, kind=REFERENCE),
            lead,
            n_seqs,
            n_ctx,
            llama_library=llama_library,
            llama_settings=llama_settings,
            grammar=grammar,
        )
        self._setup, self._options, self._bound = setup, common, bound
        self._drafter, self._draft_accept = drafter, draft_accept
        self._chain = DrafterChain(self._drafters())
        end_tokens = session.tokenizer.eog_ids
        self._end_tokens = frozenset() if common.ignore_eos else frozenset(end_tokens)
        self._rule = PLAIN_RULES[common.spec.accept]
        self._slots = SlotAssignment(
            [
                DecodingSequence(i, -1, each, sampler_for(each, common, end_tokens, grammar))
                for i, each in enumerate(prompts)
            ],
            setup.n_seqs,
        )
        self._chain.trim = partial(cut_draft, self._slots) if grammar else None
        lanes_of = [self._setup_of(spec) for spec in specs]
        planes = [one.n_rs_seq for one in lanes_of if one.spec.llama]
        self._n_remembered = REMEMBERED * (max(planes, default=0) + 1) if planes else 0
        self._files = session.files
        self._followers: list[Follower] = []
        n_before = len(self.trace.runs)
        try:
            self._reference = ReferenceLane(setup, session.model, self._chain.taps)
            self._reference.facts.drafters = self._chain.statistics
            leaders: dict[LaneMode, Lane] = {self._mode: self._reference}
            for one in lanes_of:
                self._followers.append(self._follower(one, leaders))
        except BaseException as error:
            for follower in self._followers:
                follower.end([])
            for run_id in range(n_before, len(self.trace.runs)):
                why = str(error) or type(error).__name__
                self.trace.runs[run_id] |= {"lane_error": why, "stops": []}
            raise
        if draft_accept is not None:
            for lane in self._lanes:
                lane.facts.draft_accept = list(draft_accept)
        self._round = 0

    @property
    def emitted(self) -> list[list[int]]:
        """Tokens emitted by the reference lane after each prompt."""
        return [list(sequence.emitted) for sequence in self._slots.sequences]

    @property
    def texts(self) -> list[str]:
        """`emitted` as text."""
        decode = self._setup.session.tokenizer.decode
        return [decode(sequence.emitted) for sequence in self._slots.sequences]

    @property
    def bound(self) -> float:
        """Allowed NMSE of a lane in the session's compute mode, as far as known now."""
        if self._bound is not None:
            return self._bound
        return noise_against(self.trace, self._reference.run_id)

    @torch.inference_mode()
    def step(self) -> bool:
        """Do one round of all lanes; returns whether work remains. A DraftscopeError ends it."""
        if not self.done:
            try:
                run_on(self._setup.session.device, self._step)
            except BaseException as error:
                if isinstance(error, DeviceLostError):
                    for lane in self._lanes:
                        with suppress(RuntimeError):  # rows that wait for it cannot be written
                            lane.settle()
                self.stop()
                if isinstance(error, NonFiniteError):
                    self._files.check()  # damaged weights explain it
                raise
            if not self._slots.is_busy:
                self.stop()
        return not self.done

    def stop(self) -> None:
        """End now; what was recorded stays."""
        if not self.done:
            self.done = True
            self._slots.stop()
            for lane in self._lanes:
                lane.settle()
            record_findings(self.trace, [lane.run_id for lane in self._lanes])
            for lane in self._lanes:
                lane.end([sequence.stop for sequence in self._slots.sequences])

    def results(self) -> list[LaneVerdict]:
        """Verdicts so far: the reference lane first, then lanes in the given order, those of
        another compute mode after the reference and noise lanes of that mode."""
        return judge_lanes(self.trace, [lane.run_id for lane in self._lanes], self._bound)

    @property
    def _lanes(self) -> list[ReferenceLane | Follower]:
        return [self._reference, *self._followers]

    def _drafters(self) -> list[Drafter]:
        """Stateful drafters."""
        setup, options = self._setup, self._options
        session = setup.session
        if self._draft_accept is not None:
            if self._drafter or options.spec.types:
                raise OptionError(
                    "--draft-accept and a drafter are both given.", "Leave one of them out."
                )
            return [
                ScriptedDrafter(
                    self._draft_accept,
                    options.spec.n_max,
                    session.config.n_vocab,
                    lambda tokens: session.continuation(Prompt(tuple(tokens)), options),
                )
            ]
        if self._drafter:
            return [self._drafter]
        drafters = session.make_drafters(options, setup.n_seqs, setup.n_ctx)
        if not drafters:
            raise OptionError("No drafter is chosen.", "Name one with --spec-type.")
        return drafters

    def _follower(self, setup: LaneSetup, leaders: dict[LaneMode, Lane]) -> Follower:
        spec, session = setup.spec, setup.session
        if spec.kind == PEER or spec is LLAMA_PLAIN_LANE:
            return PeerLane(setup, self._reference, self._n_remembered)
        if spec.llama:
            plain = next(one for one in self._followers if isinstance(one, PeerLane))
            if spec.kind == NOISE:
                return LlamaNoiseLane(setup, plain)
            return LlamaRollbackLane(setup, plain)
        if spec.kind == PEER_NOISE:
            return PeerNoiseLane(setup, self._reference)
        mode = self._mode.of(spec)
        model = session.model_in(mode.compute)
        if spec.kind == REFERENCE:
            lane = leaders[mode] = ModeLane(setup, model, self._reference)
            return lane
        leader = leaders[mode]
        if spec.kind == NOISE:
            return NoiseLane(setup, model, leader)
        if not spec.free:
            # the leader decides the tokens: a replay that chose again could only deviate
            setup = replace(setup, options=replace(setup.options, replay="trust"))
            return (ForkLane if spec.forks else PolicyLane)(setup, model, leader)
        if self._drafter:
            raise OptionError(
                f"Lane {spec.name!r} drafts on its own and cannot share the given drafter.",
                "Leave out `free`, or let the options name the drafter.",
            )
        return FreeLane(setup, model, leader, self._drafters())

    def _setup_of(self, spec: LaneSpec) -> LaneSetup:
        """The setup of a lane; lanes that never roll back have no planes."""
        options = spec.options(self._options)
        spec_types, n_max = options.spec.types, options.spec.n_max
        found = options.snapshots if spec_types else options.snapshots_for(n_max)
        # copies undo a batch as a whole
        found += spec.forks and found > 0 and options.n_rs_seq is None
        n_rs_seq = found if spec.kind == POLICY or spec.llama else 0
        return replace(self._setup, spec=spec, options=options, n_rs_seq=n_rs_seq)

    def _step(self) -> None:
        admitted = self._slots.admit()
        running = admitted or self._slots.running
        drafts = {} if admitted else self._draft(running)
        self._reference.begin()
        decode = self._prompt if admitted else self._decode
        parts, of_tokens = [], []
        for sequence in running:
            part, rows = decode(sequence, drafts.get(sequence.index))
            parts.append(part)
            of_tokens.append(rows)
        self._reference.close(ReferenceRound(self._round, parts, self._reference.memory))
        for lane in self._followers:
            lane.follow()
        for sequence, part, rows in zip(running, parts, of_tokens, strict=True):
            if part.draft is not None:
                self._chain.accept(sequence.index, len(part.accepted) - 1)
            self._chain.observe(sequence.index, part.pos0, part.decoded, rows)
            if part.is_prompt:
                self._chain.begin(sequence.index, part.tokens)
        for index in self._slots.release():
            self._chain.forget(index)
            for each in self._lanes:
                each.forget(index)
        self._round += 1

    def _prompt(self, sequence: DecodingSequence, _: Draft | None) -> tuple[Round, TargetRows]:
        tokens = sequence.prompt.tokens
        span = Span(sequence.index, 0, tokens, [len(tokens) - 1])
        before = sequence.sampler.clone()
        logits, of_tokens = self._reference.decode(
            self._round, sequence.seq_id, span, is_prompt=True
        )
        rows = partial(self._row, sequence, len(tokens), logits)
        chosen = draw_plainly(Draft(), rows, sequence.sampler, ())
        part = self._chosen(sequence, tokens, None, chosen, logits, before, is_prompt=True)
        return part, of_tokens

    def _decode(self, sequence: DecodingSequence, draft: Draft | None) -> tuple[Round, TargetRows]:
        tree = draft if draft and draft.parents else None
        tokens = [sequence.last, *(draft.tokens if draft and not tree else ())]
        before = sequence.sampler.clone()
        rows: list[Tensor] = []
        of_tokens: list[TargetRows] = []

        def decode(i: int) -> Distribution:
            span = Span(sequence.index, sequence.n_tokens + i, [tokens[i]], [0])
            logits, row = self._reference.decode(self._round, sequence.seq_id, span)
            rows.append(logits)
            of_tokens.append(row)
            return self._row(sequence, span.pos0 + 1, logits, 0)

        path: list[int] = []
        if tree:
            chosen, path = draw_along(tree, tokens, decode, sequence.sampler, self._end_tokens)
            draft = branch_of(tree, path)
            tokens = [sequence.last, *draft.tokens]
        else:
            chosen = self._rule(draft or Draft(), decode, sequence.sampler, self._end_tokens)
        part = self._chosen(sequence, tokens, draft, chosen, torch.cat(rows), before)
        part.tree, part.path = tree, path
        return part, join_rows(of_tokens)

    def _row(self, sequence: DecodingSequence, pos: int, logits: Tensor, row: int) -> Distribution:
        """The distribution of the token at `pos`, from row `row` of the logits [n, n_vocab]. Raises
        NonFiniteError for non-finite logits, unless allowed."""
        found = sequence.sampler.rows(logits)(row)
        here = self._reference.facts, self._options, self._round, sequence
        note_non_finite(*here, pos - row, "", sequence.sampler.non_finite)
        return found

    def _chosen(
        self,
        sequence: DecodingSequence,
        tokens: Sequence[int],
        draft: Draft | None,
        chosen: list[int],
        logits: Tensor,
        before: Sampler,
        *,
        is_prompt: bool = False,
    ) -> Round:
        """Emit the reference lane's choice. before: the sampler's state before it."""
        pos0 = sequence.n_tokens
        n_decoded = pos0 + (len(tokens) if is_prompt else 1)
        n = sequence.emit(chosen, n_decoded, self._options, self._setup.n_ctx, self._end_tokens)
        note_grammar_error(self._reference.facts, self._round, sequence)
        sequence.n_tokens, sequence.last = n_decoded + len(chosen) - 1, chosen[-1]
        return Round(
            self._round,
            sequence.seq_id,
            sequence.index,
            pos0,
            tokens,
            draft,
            is_prompt=is_prompt,
            logits=logits,
            accepted=chosen,
            n_own=1,
            before=before,
            n_emitted=n,
        )

    def _draft(self, sequences: Sequence[DecodingSequence]) -> dict[int, Draft]:
        longest = min(self._chain.longest, self._options.spec.longest or self._chain.longest)
        limits = longest, self._options, self._setup.n_ctx
        requests = [asked for one in sequences if (asked := one.draft_request(*limits))]
        if not requests:
            return {}
        drafts = self._chain.draft(requests)
        self._reference.record_drafts(self._round, self._chain.asked)
        here = self._reference.facts, self._options, self._round
        by_index = {sequence.index: sequence for sequence in sequences}
        for seq, draft in self._chain.asked:
            pos = by_index[seq].n_tokens + 1
            note_non_finite(*here, by_index[seq], pos, draft.drafter, draft.non_finite)
        return drafts
