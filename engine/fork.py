"""A fork: a run that continues another one from a round with other options, or another token.

The state of model, drafters, samplers and grammar at a round is not in a trace. It is rebuilt by
decoding the earlier rounds again, with that run's options and the same batch shapes, so that
states, cells and random numbers are equal bit for bit if the arithmetic is. The tokens are compared
with the trace; the first other one ends the fork. A drafter, memory or sampler whose options stay
is kept; a new drafter has followed the text, and a new memory takes over the contents of the first.
The first memory's snapshots are lost with it, as after a restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.draft.adaptive import adapted
from engine.draft.registry import DRAFTERS
from engine.errors import OptionError, TraceFileError
from engine.gguf.content import HASH_S, ContentHash
from engine.options import Prompt, RunOptions
from engine.trace.facts import ForkOrigin, RunFacts
from engine.trace.prompt_reuse import n_common
from engine.trace.records import EMITTED_KINDS, MISSING, PHASES
from engine.trace.run_ref import RunColumns, RunRef, same_model

if TYPE_CHECKING:
    from engine.decode.scheduler import Scheduler
    from engine.draft.chain import DrafterChain
    from engine.draft.drafter import Drafter
    from engine.memory.hybrid import HybridMemory
    from engine.sampling.grammar import Grammar

_REMEDY = "Fork a run of this program, with the model and compute mode that it had."


@dataclass(frozen=True, slots=True)
class LaterParts:
    """The parts that a fork continues with."""

    options: RunOptions
    memory: HybridMemory
    drafters: Sequence[Drafter]
    grammar: Grammar | None


Stage = tuple["Fork | ForkOrigin", RunOptions]
"""What changes before a round of a run that is decoded again, and the options from there on."""


def check_model(run: RunRef, identity: Any, content: ContentHash | None) -> None:
    """Raises OptionError if a run had another model. identity, content: of the open files, as in
    Session; if only the tensors can tell, as for a copy, they are hashed, for HASH_S at most."""
    theirs = {**(run.facts.model or {}), "draft": None}
    if same_model(theirs, {**identity, "draft": None}):
        return
    if theirs.get("content") and content is not None:
        content.find(HASH_S)
    if not same_model(theirs, {**identity, "draft": None}):
        raise OptionError(
            f"The run had another model, {theirs.get('name', 'of no name')}.",
            "Open the model that it had.",
        )


def prompts_of(run: RunRef) -> list[Prompt]:
    """The prompts of a run, by sequence. Raises TraceFileError if a token has no id."""
    return [Prompt(tuple(tokens)) for tokens in _by_sequence(run, ("prompt",), None)]


def _by_sequence(run: RunRef, kinds: Sequence[str], stop: int | None) -> list[list[int]]:
    table = RunColumns(run.store, "tokens", run.run_id)
    n = int(table["seq_id"].max()) + 1 if table.n else 0
    found: list[list[int]] = [[] for _ in range(n)]
    chosen = table.is_text("kind", *kinds)
    if stop is not None:
        chosen = chosen & (table["round"] < stop)
    for seq_id, rows in table.by_sequence(chosen):
        ids = table["token_id"][rows]
        if np.any(ids == MISSING):
            raise TraceFileError("The run has tokens without an id.", _REMEDY)
        found[seq_id] = ids[np.argsort(table["pos"][rows], kind="stable")].tolist()
    return found


@dataclass(frozen=True)
class Fork:
    """The place in another run, the parent, where a run continues: before its round `round`, from 1
    on.

    n_kept: how many emitted tokens of the previous round sequence seq_id keeps, None = all. That
    round then verifies no more than it has to. token: replaces the newest token of that sequence,
    None = none. Raises OptionError for a round that the parent does not have, TraceFileError for a
    parent that lacks data, is not of this program, or began with an earlier run's memory.
    """

    parent: RunRef
    round: int
    token: int | None = None
    seq_id: int = 0
    n_kept: int | None = None

    @classmethod
    def after(
        cls, parent: RunRef, position: int, seq_id: int = 0, token: int | None = None
    ) -> Fork:
        """The fork after the token at a position, which is kept unless `token` replaces it. Raises
        OptionError for a position without an emitted token, and as `Fork` does."""
        tokens = RunColumns(parent.store, "tokens", parent.run_id)
        is_out = tokens.is_text("kind", *EMITTED_KINDS) & (tokens["seq_id"] == seq_id)
        at = np.flatnonzero(is_out & (tokens["pos"] == position))
        if not len(at):
            raise OptionError(
                f"The run emitted no token at position {position} of sequence {seq_id}.",
                "Choose a position after its prompt and before its end.",
            )
        round_ = int(tokens["round"][at[0]])
        in_round = is_out & (tokens["round"] == round_)
        n_kept = int((in_round & (tokens["pos"] <= position)).sum())
        cut = None if n_kept == int(in_round.sum()) else n_kept
        return cls(parent, round_ + 1, token, seq_id, cut)

    def __post_init__(self) -> None:
        facts = self.parent.facts
        problem = ""
        if facts.source is not None and facts.source.engine not in (None, "draftscope"):
            problem = f"is a run of {facts.source.engine}"
        elif facts.options is None:
            problem = "does not record its options"
        elif facts.lane:
            problem = "is a lane of a comparison"
        elif facts.turn or facts.prompt_reuse:
            problem = "is a turn of a conversation"
        if problem:
            raise TraceFileError(f"The run {problem}, so it cannot be forked.", _REMEDY)
        rounds = self._rounds["round"]
        last = int(rounds.max()) if len(rounds) else 0
        if not 1 <= self.round <= last + (self.n_kept is not None):
            raise OptionError(
                f"The run has no round {self.round} to continue from.",
                f"Choose one from 1 to {last}." if last else "Choose a run with several rounds.",
            )
        if not 0 <= self.seq_id < len(self.prompts()):
            raise OptionError(
                f"The run has no sequence {self.seq_id}.",
                f"Choose one from 0 to {len(self.prompts()) - 1}.",
            )
        self.begins_with()

    def check_model(self, identity: Any, compute: str, content: ContentHash | None = None) -> None:
        """Raises OptionError if the parent had another model or compute mode: its states cannot be
        rebuilt then. identity, content: as for check_model."""
        check_model(self.parent, identity, content)
        facts = self.parent.facts
        if facts.compute not in (None, compute):
            raise OptionError(
                f"The run was computed in {facts.compute}, but the model is loaded in {compute}.",
                f"Fork it with --compute {facts.compute}.",
            )

    @property
    def options(self) -> RunOptions:
        """The parent's options."""
        options = self.parent.facts.options
        assert options is not None  # checked when it was made
        return options

    @cached_property
    def _rounds(self) -> RunColumns:
        return RunColumns(self.parent.store, "rounds", self.parent.run_id)

    def prompts(self) -> list[Prompt]:
        """The parent's prompts, by sequence. Raises TraceFileError if a token has no id."""
        return prompts_of(self.parent)

    def begins_with(self) -> RunOptions:
        """Options of the first round: of the root of the forks."""
        *_, root = self._line()
        assert root.facts.options is not None
        return root.facts.options

    def stages(self, options: RunOptions, since: RunRef | None = None) -> list[Stage]:
        """What changes at which round, in order: the forks between the root and this one, as far as
        they lie before it, and this one with its options. since: an ancestor to begin with, None =
        the root; its own fork is over then. Raises OptionError if more tokens are kept than the
        options allow."""
        for seq_id, text in enumerate(_by_sequence(self.parent, EMITTED_KINDS, self.round)):
            n = len(text)
            if seq_id == self.seq_id and self.n_kept is not None:
                earlier = _by_sequence(self.parent, EMITTED_KINDS, self.round - 1)
                n = len(earlier[seq_id]) + self.n_kept
            if 0 < options.n_predict < n:
                raise OptionError(
                    f"-n {options.n_predict} is less than the {n} tokens of sequence {seq_id} "
                    "that the fork keeps.",
                    "Raise -n, or fork from an earlier round.",
                )
        found: list[Stage] = [(self, options)]
        for run in self._line():
            if run == since:
                break
            at, before = run.facts.fork, run.facts.options
            if at is not None and before is not None and at.round <= self.round:
                found.append((at, before))
        return found[::-1]

    def roots(self) -> Iterator[tuple[RunRef, int]]:
        """The ancestors, and up to which round each one's state is the same."""
        for run in self._line():
            first, _ = self.stages(self.options, run)[0]
            is_cut = first.token is not None or first.n_kept is not None
            yield run, first.round - is_cut

    def _line(self) -> Iterator[RunRef]:
        """The parent, its parent, and so on up to a run that is not a fork."""
        run = self.parent
        yield run
        while (at := run.facts.fork) is not None:
            known = at.parent < run.run_id and at.parent in run.store.runs  # forks come later
            before = run.sibling(at.parent)
            if not known or before.facts.options is None:
                raise TraceFileError(
                    f"{run} is a fork of run {at.parent}, which is not in its trace.", _REMEDY
                )
            run = before
            yield run

    def attach(
        self,
        scheduler: Scheduler,
        parts: Sequence[LaterParts],
        chain: DrafterChain,
        stages: Sequence[Stage],
        facts: RunFacts,
        rebuilt: str,
    ) -> None:
        """Let the scheduler continue with the parts of each stage at its round. parts: the first
        ones, and those of the stages. chain: the first one's. rebuilt: see ForkOrigin."""
        facts.fork = ForkOrigin(
            parent=self.parent.run_id,
            round=self.round,
            rebuilt=rebuilt,
            token=self.token,
            seq_id=self.seq_id,
            n_kept=self.n_kept,
        )
        in_use = chain

        def before(number: int) -> None:
            nonlocal in_use
            for i, (now, (at, _)) in enumerate(zip(parts, stages, strict=False)):
                if number == at.round - 1:
                    self._prepare(scheduler, at, now, in_use)
                elif number == at.round:
                    self._check(scheduler, number, stages[-1][0] if number == self.round else None)
                    in_use = chain_of(parts[i + 1 :], in_use)
                    facts.drafters = in_use.statistics
                    then = parts[i + 1]
                    scheduler.go_on_with(then.options, then.memory, in_use, then.grammar)
            if number >= self.round:
                scheduler.before_round.remove(before)

        scheduler.before_round.append(before)

    def _prepare(
        self, scheduler: Scheduler, at: Fork | ForkOrigin, now: LaterParts, chain: DrafterChain
    ) -> None:
        """Let the round before a stage end where the stage begins."""
        if at.n_kept is not None:
            spec = replace(now.options.spec, verify_max=at.n_kept - 1)
            cut = replace(now.options, spec=spec)
            scheduler.go_on_with(cut, now.memory, chain, now.grammar)
        if at.token is not None:
            scheduler.force_newest(at.seq_id, at.token)

    def _check(self, scheduler: Scheduler, stop: int, last: Fork | ForkOrigin | None) -> None:
        """Raises OptionError if a text differs from the parent's before round `stop`. last: the
        stage that begins there, if it is the last one: the parent does not have its cut and
        token."""
        is_cut = last is not None and last.n_kept is not None
        texts = _by_sequence(self.parent, EMITTED_KINDS, stop)
        for sequence, text in zip(scheduler.sequences, texts, strict=True):
            found = sequence.emitted
            wanted = text[: len(found)] if is_cut else text
            if last and last.token is not None and sequence.seq_id == last.seq_id:
                if found[-1:] != [last.token]:
                    raise OptionError(
                        f"Sequence {last.seq_id} emitted no token in round {stop - 1} that could "
                        "be replaced.",
                        "Choose a round after its prompt and before its end.",
                    )
                wanted = [*wanted[:-1], last.token]
            if found == wanted:
                continue
            n = len(sequence.prompt.tokens) + n_common(found, wanted)
            raise OptionError(
                f"Decoding sequence {sequence.seq_id} of the run again gave another text from "
                f"position {n} on.",
                "Fork it with the same model, --compute, --device and --threads.",
            )


def chain_of(parts: Sequence[LaterParts], before: DrafterChain) -> DrafterChain:
    """The drafter chain of the first of these parts, which replaces another one; drafters of the
    others follow the text."""
    from engine.draft.chain import DrafterChain  # needs torch, and reading forks does not

    spec = parts[0].options.spec
    found = DrafterChain(parts[0].drafters, followers_of(parts), adapted(spec.adapt, spec.longest))
    found.carry_on(before)
    return found


def followers_of(parts: Sequence[LaterParts]) -> list[Drafter]:
    """Drafters of later parts that the first of these parts does not have."""
    every = {id(one): one for part in parts[1:] for one in part.drafters}
    there = {id(one) for one in parts[0].drafters}
    return [one for key, one in every.items() if key not in there]


def fork_lines(run: RunRef) -> Iterator[str]:
    """A comparison, in lines, of a fork with the rest of the run that it continues."""
    fork = run.facts.fork
    if fork is None or fork.parent not in run.store.runs:
        return
    parent = run.sibling(fork.parent)
    yield f"fork of {parent} before round {fork.round}; {fork.rebuilt}"
    for name, one in (("parent", parent), ("fork", run)):
        yield f"  {name} from that round on: {_rest(one, fork.round)}"
    before, after = _text(parent), _text(run)
    for seq_id in sorted(before.keys() | after.keys()):
        apart = _parting(before.get(seq_id, {}), after.get(seq_id, {}))
        yield f"  sequence {seq_id}: {apart}"


def _rest(run: RunRef, start: int) -> str:
    rounds = RunColumns(run.store, "rounds", run.run_id)
    later = rounds["round"] >= start

    def total(name: str) -> int:
        values = rounds[name][later]
        return int(values[values != MISSING].sum())

    drafted, accepted = total("num_draft_tokens"), total("num_accepted_draft_tokens")
    n_rounds = len(np.unique(rounds["round"][later]))
    ms = sum(float(np.nansum(rounds[f"{phase}_ms"][later])) for phase in PHASES)
    rate = f", {accepted} of {drafted} drafted tokens accepted" if drafted else ""
    each = f", {ms / n_rounds:.1f} ms per round" if n_rounds else ""
    return f"{total('num_emitted')} tokens in {n_rounds} rounds{rate}{each}"


def _text(run: RunRef) -> dict[int, dict[int, int]]:
    """The emitted tokens of a run: per sequence by position."""
    tokens = RunColumns(run.store, "tokens", run.run_id)
    return {
        seq_id: dict(
            zip(tokens["pos"][rows].tolist(), tokens["token_id"][rows].tolist(), strict=True)
        )
        for seq_id, rows in tokens.by_sequence(tokens.is_text("kind", *EMITTED_KINDS))
    }


def _parting(mine: dict[int, int], theirs: dict[int, int]) -> str:
    """Where two texts differ first, in words."""
    for pos in sorted(set(mine) & set(theirs)):
        if mine[pos] != theirs[pos]:
            return f"the texts differ from position {pos} on"
    if len(mine) == len(theirs):
        return "the same text"
    return f"the same text for {min(len(mine), len(theirs))} tokens, then one ends"


def later_parts(
    parts: LaterParts,
    stages: Sequence[Stage],
    n_slots: int,
    context: Callable[[RunOptions], int],
    make: Callable[[RunOptions, int, HybridMemory | None, dict[str, Drafter]], LaterParts],
) -> Iterator[LaterParts]:
    """The parts of each stage of a fork: those of the previous stage that its options leave as they
    are, since they are up to date by then, and new ones. context: cells of a sequence. make:
    creates the missing ones from options, cells, and existing memory and drafters."""
    for _, options in stages:
        before = parts.options
        if options.parallel != before.parallel:
            raise OptionError(
                f"The forked run has --parallel {before.parallel}.", "Leave --parallel out."
            )
        n_ctx, n_ctx_before = context(options), context(before)
        same = {
            one.name: one
            for one in parts.drafters
            if n_ctx == n_ctx_before
            and _kept_of_drafter(before, one.name) == _kept_of_drafter(options, one.name)
        }
        held = _kept_of_memory(before, n_slots * before.spec.n_branches, n_ctx_before)
        keeps = held == _kept_of_memory(options, n_slots * options.spec.n_branches, n_ctx)
        parts = make(options, n_ctx, parts.memory if keeps else None, same)
        yield parts


def _kept_of_memory(options: RunOptions, n_seqs: int, n_ctx: int) -> tuple[object, ...]:
    """All that Session.make_memory depends on."""
    return *kept_of_target(options, n_seqs, n_ctx), options.faults


def _kept_of_drafter(options: RunOptions, name: str) -> tuple[object, ...]:
    """All that Session.make_drafters makes a drafter from, except its sizes."""
    return (
        name in options.spec.types,
        DRAFTERS[name].options_of(options.spec),
        options.n_ubatch,
        options.batch_invariant,
        options.faults,
        options.spec.tree,
        options.spec.accept == "rejection" and (options.sampler.temp, options.sampler.seed),
    )


def kept_of_target(options: RunOptions, n_seqs: int, n_ctx: int) -> tuple[object, ...]:
    """All that Session.make_memory depends on, except faults."""
    kinds = options.rollback, options.kv, options.batch_invariant, options.state_types
    return "target", n_seqs, n_ctx, options.snapshots, *kinds
