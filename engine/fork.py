"""A fork: a run that goes on from a round of another one with other options, or another token.

What model, drafters, samplers and grammar hold at a round is in no trace. It is rebuilt by decoding
the rounds before it again, with the options of that run and in batches of the same shapes, so that
states, cells and random numbers are the same bits where the arithmetic is. The tokens that come of
it are held against the trace; the first other one ends the fork. A drafter, memory or sampler whose
options stay goes on as it is; another one has followed the text, and a memory takes over what the
first one held. Snapshots of the first memory are lost with it, as after a restore.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import OptionError, TraceFileError
from engine.options import Prompt, RunOptions
from engine.trace.facts import RunFacts
from engine.trace.records import EMITTED_KINDS, MISSING, PHASES
from engine.trace.run_columns import RunColumns
from engine.trace.run_ref import RunRef, same_model

if TYPE_CHECKING:
    from engine.decode.scheduler import Scheduler
    from engine.draft.chain import DrafterChain
    from engine.draft.drafter import Drafter
    from engine.memory.hybrid import HybridMemory
    from engine.sampling.grammar import Grammar

_REMEDY = "Fork a run of this program, with the model and the --compute that it had."


@dataclass(frozen=True, slots=True)
class LaterParts:
    """What a fork goes on with."""

    options: RunOptions
    memory: HybridMemory
    drafters: Sequence[Drafter]
    grammar: Grammar | None


@dataclass(frozen=True)
class Fork:
    """Where a run goes on from another one, parent: before its round `round`, from 1 on.

    n_kept: what of the round before stays of sequence seq_id, in tokens that were put out; None =
    all of it. That round then verifies no more than it has to. token: takes the place of the newest
    token of that sequence, None = none does. Raises OptionError for a round that the parent does
    not have, TraceFileError for a parent that tells too little, is not of this program, or began
    with what an earlier one had left in memory.
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
        """After the token at a position, which stays unless another one takes its place. Raises
        OptionError for a position at which nothing was put out, and what `Fork` does."""
        tokens = RunColumns(parent.store, "tokens", parent.run_id)
        is_out = tokens.is_text("kind", *EMITTED_KINDS) & (tokens["seq_id"] == seq_id)
        at = np.flatnonzero(is_out & (tokens["pos"] == position))
        if not len(at):
            raise OptionError(
                f"{parent} put out nothing at position {position} of sequence {seq_id}.",
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
            problem = "does not say what options it had"
        elif facts.lane:
            problem = "is a lane of a comparison"
        elif facts.turn or facts.prompt_reuse:
            problem = "is a turn of a conversation"
        if problem:
            raise TraceFileError(f"{self.parent} {problem}, so it cannot be forked.", _REMEDY)
        rounds = self._rounds["round"]
        last = int(rounds.max()) if len(rounds) else 0
        if not 1 <= self.round <= last + (self.n_kept is not None):
            raise OptionError(
                f"{self.parent} has no round {self.round} to go on from.",
                f"Choose one from 1 to {last}." if last else "Choose a run with several rounds.",
            )
        if not 0 <= self.seq_id < len(self.prompts()):
            raise OptionError(
                f"{self.parent} has no sequence {self.seq_id}.",
                f"Choose one from 0 to {len(self.prompts()) - 1}.",
            )

    def check_model(self, identity: Any, compute: str) -> None:
        """Raises OptionError where the parent had another model or compute mode: then its states
        cannot be rebuilt. identity: of the open files, as Session.identity."""
        theirs, facts = self.parent.facts.model or {}, self.parent.facts
        if not same_model({**theirs, "draft": None}, {**identity, "draft": None}):
            raise OptionError(
                f"{self.parent} had another model, {theirs.get('name', 'of no name')}.",
                "Fork it with the model that it had.",
            )
        if facts.compute not in (None, compute):
            raise OptionError(
                f"{self.parent} was computed in {facts.compute}, and this is {compute}.",
                f"Fork it with --compute {facts.compute}.",
            )

    @property
    def options(self) -> RunOptions:
        """Those of the parent."""
        options = self.parent.facts.options
        assert options is not None  # checked when it was made
        return options

    @cached_property
    def _rounds(self) -> RunColumns:
        return RunColumns(self.parent.store, "rounds", self.parent.run_id)

    @cached_property
    def _tokens(self) -> RunColumns:
        return RunColumns(self.parent.store, "tokens", self.parent.run_id)

    def prompts(self) -> list[Prompt]:
        """Those of the parent, by sequence. Raises TraceFileError where a token has no id."""
        return [Prompt(tuple(tokens)) for tokens in self._by_sequence(("prompt",), None)]

    def _by_sequence(self, kinds: Sequence[str], stop: int | None) -> list[list[int]]:
        table = self._tokens
        n = int(table["seq_id"].max()) + 1 if table.n else 0
        found: list[list[int]] = [[] for _ in range(n)]
        chosen = table.is_text("kind", *kinds)
        if stop is not None:
            chosen = chosen & (table["round"] < stop)
        for seq_id, rows in table.by_sequence(chosen):
            ids = table["token_id"][rows]
            if np.any(ids == MISSING):
                raise TraceFileError(f"{self.parent} has tokens without an id.", _REMEDY)
            found[seq_id] = ids[np.argsort(table["pos"][rows], kind="stable")].tolist()
        return found

    def attach(
        self,
        scheduler: Scheduler,
        memory: HybridMemory,
        chain: DrafterChain,
        grammar: Grammar | None,
        later: LaterParts,
        facts: RunFacts,
    ) -> None:
        """Have the scheduler go on with the later parts at the round. memory, chain, grammar: those
        in use."""
        from engine.draft.adaptive import adapted
        from engine.draft.chain import DrafterChain  # needs torch, and who reads forks does not

        facts["fork"] = self._fact()

        def before(number: int) -> None:
            if self.n_kept is not None and number == self.round - 1:
                self._check(scheduler, number)
                spec = replace(self.options.spec, verify_max=self.n_kept - 1)
                options = replace(self.options, spec=spec)
                scheduler.go_on_with(options, memory, chain, grammar)
            if number != self.round:
                return
            scheduler.before_round = None
            self._check(scheduler, number)
            spec = later.options.spec
            adapt = adapted(spec.adapt, spec.longest)
            goes_on = DrafterChain(later.drafters, adapt=adapt)
            goes_on.carry_on(chain)
            facts.drafters = goes_on.statistics
            scheduler.go_on_with(later.options, later.memory, goes_on, later.grammar)
            if self.token is not None:
                scheduler.replace_newest(self.seq_id, self.token)

        scheduler.before_round = before

    def _check(self, scheduler: Scheduler, stop: int) -> None:
        """Raises OptionError where a text is not the parent's before round `stop`."""
        is_cut = self.n_kept is not None and stop == self.round
        texts = self._by_sequence(EMITTED_KINDS, stop)
        for sequence, text in zip(scheduler.sequences, texts, strict=True):
            found = sequence.emitted
            wanted = text[: len(found)] if is_cut else text
            if found == wanted:
                continue
            pairs = enumerate(zip(found, wanted, strict=False))
            n = next((i for i, (a, b) in pairs if a != b), min(len(found), len(wanted)))
            raise OptionError(
                f"Decoded again, sequence {sequence.seq_id} of {self.parent} has another text from "
                f"position {len(sequence.prompt.tokens) + n} on.",
                "Fork it with the same model, --compute, --device and --threads.",
            )

    def _fact(self) -> dict[str, Any]:
        return {
            "parent": self.parent.run_id,
            "round": self.round,
            "rebuilt": f"rounds 0 to {self.round - 1} decoded again",
            "seq_id": self.seq_id,
            **({} if self.n_kept is None else {"n_kept": self.n_kept}),
            **({} if self.token is None else {"token": self.token}),
        }


def fork_lines(run: RunRef) -> Iterator[str]:
    """How a fork went on next to the rest of the run that it goes on from, in lines."""
    fork = run.facts.fork
    if fork is None or fork.parent not in run.store.runs:
        return
    parent = run.sibling(fork.parent)
    yield f"fork of {parent} before round {fork.round}; {fork.rebuilt}"
    for name, one in (("parent", parent), ("fork", run)):
        yield f"  {name} from there: {_rest(one, fork.round)}"
    texts = [_Text.of(one) for one in (parent, run)]
    for seq_id in sorted(set(texts[0].by_seq) | set(texts[1].by_seq)):
        yield f"  sequence {seq_id}: {texts[0].parting(texts[1], seq_id)}"


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
    each = f", {ms / n_rounds:.1f} ms a round" if n_rounds else ""
    return f"{total('num_emitted')} tokens in {n_rounds} rounds{rate}{each}"


@dataclass(frozen=True)
class _Text:
    """What a run put out: per sequence its tokens by position."""

    by_seq: dict[int, dict[int, int]]

    @classmethod
    def of(cls, run: RunRef) -> _Text:
        tokens = RunColumns(run.store, "tokens", run.run_id)
        chosen = tokens.is_text("kind", *EMITTED_KINDS)
        return cls(
            {
                seq_id: dict(
                    zip(
                        tokens["pos"][rows].tolist(), tokens["token_id"][rows].tolist(), strict=True
                    )
                )
                for seq_id, rows in tokens.by_sequence(chosen)
            }
        )

    def parting(self, other: _Text, seq_id: int) -> str:
        """Where two texts part, in words."""
        mine, theirs = self.by_seq.get(seq_id, {}), other.by_seq.get(seq_id, {})
        for pos in sorted(set(mine) & set(theirs)):
            if mine[pos] != theirs[pos]:
                return f"the texts part at position {pos}"
        if len(mine) == len(theirs):
            return "the same text"
        return f"the same text for {min(len(mine), len(theirs))} tokens, then one ends"
