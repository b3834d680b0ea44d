"""A run's text decoded plainly once more: logits and intermediate states."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.analysis.noise_ceiling import TIPPED, logits_ceiling, state_ceiling, tipped_share
from engine.batch import Span
from engine.decode.sequences import sampler_for
from engine.machine.device import read
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.layers import TargetRows
from engine.model.recurrence import StateKey
from engine.options import Prompt, RunOptions, StateTypes
from engine.sampling.grammar import Grammar
from engine.sampling.sampler import Sampler
from engine.session import Session
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import RunColumns
from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class PassedPart:
    """The result of a pass over some tokens. logits: [n, n_vocab] after its last n tokens."""

    pos0: int
    n_tokens: int
    logits: Tensor
    rows: TargetRows

    @property
    def first_output(self) -> int:
        """Position of the token whose logits are the first."""
        return self.pos0 + self.n_tokens - len(self.logits)


class PlainPass:
    """Decodes a text from its beginning, part by part. n_tokens: decoded so far."""

    def __init__(
        self, session: Session, options: RunOptions, text: Sequence[int], taps: Sequence[int] = ()
    ) -> None:
        self._plain = options.plain
        self._model: HybridModel = session.model
        self.memory: HybridMemory = session.make_memory(self._plain, 1, len(text) + 1, 0)
        self._text, self._taps = text, taps
        self.n_tokens = 0

    @torch.inference_mode()
    def decode(self, n: int, first_output: int) -> PassedPart:
        """Decode n more tokens in one pass, with logits from first_output on."""
        pos0, tokens = self.n_tokens, list(self._text[self.n_tokens : self.n_tokens + n])
        outputs = range(max(0, first_output - pos0), n)
        (ubatch,) = self.memory.split([Span(0, pos0, tokens, outputs)], n, "equal")
        out = self._model.forward(ubatch, self.memory, taps=self._taps)
        self.n_tokens += n
        return PassedPart(pos0, n, out.logits, out.rows[0])


@dataclass(frozen=True, slots=True)
class StateSample:
    """The states of one sequence after a round, with n_tokens tokens in memory, as a pass with all
    running sequences would read them."""

    round: int
    seq_id: int
    n_tokens: int
    states: Mapping[StateKey, Tensor]


class _Thinned:
    """Evenly spaced rounds of a run of unknown length: every n-th, with n doubled whenever there
    are too many. rounds: those kept."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self._stride, self._seen = 1, 0

    def takes(self, number: int, most: int) -> bool:
        """Whether the next round, with this number, is one of them."""
        is_taken = self._seen % self._stride == 0
        self._seen += 1
        if is_taken:
            if len(self.rounds) >= most:
                self.rounds = self.rounds[::2]
                self._stride *= 2
                is_taken = (self._seen - 1) % self._stride == 0
            if is_taken:
                self.rounds.append(number)
        return is_taken

    @property
    def n_passed(self) -> int:
        """How many of the next rounds are certainly skipped."""
        return -self._seen % self._stride


class StateSamples:
    """Copies of states after up to n rounds, fewer if they would exceed n_bytes: half of them, at
    least one, after a rollback, the others anywhere; with_last: also after the last round of every
    sequence, and at least one anywhere."""

    def __init__(self, memory: HybridMemory, n: int, n_bytes: int, *, with_last: bool) -> None:
        recurrent = memory.recurrent
        size = recurrent.layout.n_bytes * recurrent.n_seqs if recurrent else 0
        n = max(1, min(n, n_bytes // size)) if size else 0
        self._most, self._most_undone = max(n // 2, n > 0 and with_last), -(-n // 2)
        self._with_last = with_last
        self._any, self._undone = _Thinned(), _Thinned()
        self._kept: dict[tuple[int, int], StateSample] = {}
        self._ended: set[tuple[int, int]] = set()

    def look(
        self,
        number: int,
        memory: HybridMemory,
        running: Mapping[int, tuple[int, int]],
        ended: Sequence[int],
        *,
        undone: bool,
    ) -> None:
        """Round `number` is over. running: memory sequence and tokens in memory, by seq_id; ended:
        those of them that have stopped. undone: whether any of them was rolled back."""
        if not self._most_undone or not running:
            return
        takes = self._most > 0 and self._any.takes(number, self._most)
        takes |= undone and self._undone.takes(number, self._most_undone)
        wanted = [*running] if takes else [*ended] if self._with_last else []
        if not wanted:
            return
        # dropped rounds make room for new ones
        rounds = {*self._any.rounds, *self._undone.rounds}
        for key in [key for key in self._kept if key[0] not in rounds and key not in self._ended]:
            del self._kept[key]
        found = memory.inputs([seq for seq, _ in running.values()])
        for (seq_id, (_, n_tokens)), states in zip(running.items(), found, strict=True):
            if seq_id in wanted:
                # one by one, since it may be a copy already
                copies = {key: states.pop(key).clone() for key in list(states)}
                self._kept[number, seq_id] = StateSample(number, seq_id, n_tokens, copies)
        if self._with_last:
            self._ended.update((number, seq_id) for seq_id in ended)

    @property
    def n_unseen(self) -> int:
        """How many of the next rounds it skips unless there is a rollback."""
        return self._any.n_passed if self._most else sys.maxsize

    def of(self, seq_id: int) -> list[StateSample]:
        """The samples of a sequence, in order."""
        return sorted(
            (one for one in self._kept.values() if one.seq_id == seq_id), key=lambda s: s.round
        )


_FEW_ROWS = 3
_LEAST_P = 1e-30


@dataclass(frozen=True, slots=True)
class EmittedRow:
    """A recorded emitted token: its round, position, id, and the target's most probable tokens
    there with their probabilities."""

    round: int
    pos: int
    token_id: int
    top_ids: np.ndarray
    top_p: np.ndarray


@dataclass(slots=True)
class TextCheck:
    """The result of a pass over the text of one sequence. errors: NMSE of the recorded logits by
    position of an emitted token; states: by round the largest relative error and its place; token:
    position of the first token that plain sampling does not give, with the one that it gives.
    log_p: by position the values that the error was computed from, this pass's for the recorded
    tokens, in units of the root mean square of its logits."""

    errors: dict[int, float] = field(default_factory=dict)
    log_p: dict[int, np.ndarray] = field(default_factory=dict)
    states: dict[int, tuple[float, StateKey]] = field(default_factory=dict)
    token: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class AuditedTexts:
    """The texts of a run of these prompts, and the rounding error that its compute mode allows.

    tokens: by sequence, prompt and accepted ones; those after a stop were not emitted. batches: by
    round and sequence the verified batch, its position and tokens. logits_limit: NMSE; state_limit:
    relative error of a state. has_ties: whether rounding may flip a choice inside the model, so
    that a row may be far off.
    """

    session: Session
    prompts: Sequence[Prompt]
    options: RunOptions
    tokens: dict[int, list[int]]
    batches: dict[tuple[int, int], tuple[int, list[int]]]
    logits_limit: float
    state_limit: float
    has_ties: bool

    @classmethod
    def of(cls, session: Session, prompts: Sequence[Prompt], options: RunOptions) -> AuditedTexts:
        """The prompts alone, to be extended."""
        # states of shorter types are rounded as activations are in that mode
        mode = session.compute if options.state_types == StateTypes() else "bf16"
        return cls(
            session,
            prompts,
            options,
            {i: list(prompt.tokens) for i, prompt in enumerate(prompts)},
            {},
            logits_ceiling(mode),
            state_ceiling(mode),
            tipped_share(mode, ranks=session.config.ranks) > 0,
        )

    def passed(self, seq_id: int, taps: Sequence[int] = ()) -> PlainPass:
        """A pass over a sequence's text, from its beginning."""
        return PlainPass(self.session, self.options, self.tokens[seq_id], taps)

    def sampler(self, grammar: Grammar | None, seq_id: int) -> Sampler:
        """A sequence's sampler before the first token."""
        eog_ids = self.session.tokenizer.eog_ids
        return sampler_for(self.prompts[seq_id], self.options, eog_ids, grammar)

    def compare(self, check: TextCheck, part: PassedPart, rows: Sequence[EmittedRow]) -> None:
        """Compare the rows whose logits a pass has given."""
        first = part.first_output + 1  # position that the first logits choose
        here = [row for row in rows if first <= row.pos < first + len(part.logits)]
        if here:
            at = [row.pos - first for row in here]
            errors, log_p = recorded_error([part.logits[i] for i in at], here)
            check.errors |= dict(zip((row.pos for row in here), errors.tolist(), strict=True))
            check.log_p |= dict(zip((row.pos for row in here), log_p, strict=True))

    def is_wrong(self, errors: Mapping[int, float]) -> int | None:
        """The first position whose recorded values cannot be explained by rounding. errors: by
        position.

        If ties inside the model may flip, a row may be far off; then it takes several rows, and
        more than a share of all.
        """
        wrong = sorted(pos for pos, error in errors.items() if not error <= self.logits_limit)
        few = max(_FEW_ROWS, TIPPED * len(errors)) if self.has_ties else 0
        return wrong[0] if len(wrong) > few else None

    def noise(self, one: TextCheck, other: TextCheck) -> float:
        """The largest NMSE between two plain passes over a text."""
        both = one.log_p.keys() & other.log_p.keys()
        apart = (np.mean(np.square(one.log_p[pos] - other.log_p[pos])) for pos in both)
        return max((float(x) for x in apart), default=0.0)


class Redraw:
    """Samples the tokens of a text again from clean logits, as plain decoding does: with the seed,
    one random number per token, and penalties and grammar that see the text alone."""

    def __init__(self, texts: AuditedTexts, seq_id: int, rows: Sequence[EmittedRow]) -> None:
        options = texts.options
        self._sampler = texts.sampler(texts.session.grammar(options), seq_id)
        self._rows = {row.pos: row for row in rows}
        self._next = len(texts.prompts[seq_id].tokens)
        self._margin = 4 * float(np.sqrt(texts.logits_limit))
        # other passes' logits prove nothing about a sample if they may be far off
        self._draws = options.spec.accept == "match" and not options.spec.synthetic
        self._draws &= not texts.has_ties

    def compare(self, check: TextCheck, part: PassedPart) -> None:
        """Sample the tokens that a pass gives logits for; records the first other one."""
        if not self._draws or check.token is not None:
            return
        for i in range(len(part.logits)):
            pos = part.first_output + 1 + i
            row = self._rows.get(pos)
            if row is None or pos != self._next:
                return
            p = self._sampler.rows(part.logits[i : i + 1])(0)
            number = self._sampler.uniform()
            token = p.at(number)
            if token != row.token_id and not self._is_near(p, number, row, part.logits[i], token):
                check.token = pos, token
                return
            self._sampler.accept(row.token_id)
            self._next += 1

    def _is_near(self, p: Any, number: float, row: EmittedRow, logits: Tensor, token: int) -> bool:
        """Whether rounding may have chosen the text's token."""
        if len(p.ids) == 1:
            gap = float((logits[token] - logits[row.token_id]).abs())
            return gap <= self._margin * float(logits.square().mean().sqrt())
        near = {p.at(min(max(number + d, 0.0), 1 - 1e-12)) for d in (-self._margin, self._margin)}
        return row.token_id in near


def emitted_rows(trace: TraceStore, run_id: int) -> dict[int, list[EmittedRow]]:
    """The emitted tokens of a run in a trace, by sequence, in order of their positions."""
    tokens = RunColumns(trace, "tokens", run_id)
    chosen = np.flatnonzero(tokens.is_text("kind", *EMITTED_KINDS))
    names = ("seq_id", "round", "pos", "token_id", "target_top_id", "target_top_p")
    columns = [tokens[name][chosen] for name in names]
    found: dict[int, list[EmittedRow]] = {}
    for seq_id, *rest in zip(*columns, strict=True):
        number, pos, token, ids, p = rest
        row = EmittedRow(int(number), int(pos), int(token), ids, p)
        found.setdefault(int(seq_id), []).append(row)
    return {seq_id: sorted(rows, key=lambda row: row.pos) for seq_id, rows in found.items()}


def recorded_error(
    logits: Sequence[Tensor], rows: Sequence[EmittedRow]
) -> tuple[np.ndarray, np.ndarray]:
    """Per row the mean squared difference between the recorded log-probabilities of the most
    probable tokens and those of n logits [n_vocab], over the mean square of the logits: float64
    [n]; and the latter log-probabilities over its root: [n, N_TOP]. Logits that are not finite
    count as right."""
    ids = torch.from_numpy(np.stack([np.maximum(row.top_ids, 0) for row in rows]).astype(np.int64))
    p = np.stack([row.top_p for row in rows]).astype(np.float64)
    log_p, squares = [], []
    # row by row, since a vocabulary in float64 takes megabytes
    for row, its_ids in zip(logits, ids.to(logits[0].device), strict=True):
        clean = row.double()
        squares.append(clean.square().mean())
        log_p.append(clean[its_ids] - clean.logsumexp(0))
    mine, power = read(torch.stack(log_p), torch.stack(squares))
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = np.isfinite(p) & (p > _LEAST_P)
        apart = np.where(seen, np.square(mine - np.log(p)), 0.0)
        error = apart.sum(1) / np.maximum(seen.sum(1), 1) / power
        scaled = np.where(seen, mine, 0.0) / np.sqrt(power)[:, None]
    return np.where(np.isfinite(power), error, 0.0), np.nan_to_num(scaled)


def state_errors(
    clean: Mapping[StateKey, Tensor], found: Mapping[StateKey, Tensor]
) -> dict[StateKey, float]:
    """Relative error of every state; infinite if one is not finite."""
    like = next(iter(clean.values()))
    room = like.new_empty(max(x.numel() for x in clean.values()), dtype=torch.float64)
    norms = room.new_empty(2, len(clean))
    for i, (key, state) in enumerate(clean.items()):
        # one reused buffer: temporary ones would fragment memory
        x = room[: state.numel()].view(state.shape)
        norms[1, i] = torch.linalg.vector_norm(x.copy_(state))
        norms[0, i] = torch.linalg.vector_norm(x.sub_(found[key]))
    apart, sizes = norms
    errors = torch.where(apart == 0, apart, apart / sizes).nan_to_num(torch.inf, torch.inf)
    return dict(zip(clean, errors.tolist(), strict=True))
