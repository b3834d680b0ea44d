"""The audit of a run: its text is decoded again, plainly, and compared with the recorded data.

During the run, the sampler and the acceptance of every round are checked on the run's own logits,
and recurrent states are copied at a few rounds. At the end each text is decoded in a fresh memory
in wide passes. The recorded target probabilities of every emitted token, the token itself and the
copied states are compared with these passes. Wide passes round differently from narrow ones, so a
difference is only a suspicion: the run is repeated up to there, next to a memory that decodes its
text token by token (engine.audit.repetition), and that decides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from engine.analysis.findings.audit import GOING_ON, NOT_AUDITED, STOPPED
from engine.audit.draft_models import taps_of
from engine.audit.drafts import audit_drafts
from engine.audit.recorded_drafts import DraftAudit
from engine.audit.repetition import Repetition
from engine.audit.sampler_check import SamplerCheck
from engine.audit.text_check import (
    AuditedTexts,
    EmittedRow,
    Redraw,
    StateSample,
    StateSamples,
    TextCheck,
    emitted_rows,
    state_errors,
)
from engine.decode.round import Round, RoundObserver
from engine.decode.sequences import DecodingSequence
from engine.memory.hybrid import HybridMemory
from engine.model.layers import TargetRows, join_rows
from engine.options import Prompt, RunOptions, StateTypes
from engine.session import Session
from engine.trace.run_ref import RunColumns
from engine.trace.store import TraceStore

SHORT_RUN = 2048
"""Most tokens of all texts of a short run, including prompts."""
SHARE_OF_RUN = 0.03
"""Share of a run's time for decoding its text again if the audit was not requested."""
SHARE_IN_BACKGROUND = 1.0
"""The same if the user reads the result meanwhile and a new run ends the audit."""
_SHARE_OF_TEXT = 0.6
"""The text's share of that time if drafts are made again in the rest."""
_LEAST_PART = 8
"""Tokens after the prompt in the first pass, and the least number in a later one."""
_SAMPLES, _FEW_SAMPLES = 12, 4
"""Rounds whose states are copied, in a full audit and within that time."""
_SAMPLED_BYTES, _FEW_BYTES = 128 << 20, 24 << 20
"""Limit of the copies if the whole text may be decoded again, and if not, bytes."""
_LOGITS_BYTES = 16 << 20


def why_not_by_default(prompts: Sequence[Prompt], options: RunOptions) -> str:
    """Why a run is audited only on request; empty for one of at most SHORT_RUN tokens, of which the
    prompts are at most half, since an audit only reads."""
    n_read = sum(len(prompt.tokens) for prompt in prompts)
    n_written = options.n_predict * len(prompts)
    if options.n_predict < 0:
        return "it has no limit of tokens"
    if n_read + n_written > SHORT_RUN:
        return f"it may have more than {SHORT_RUN:,} tokens"
    return "its prompt is longer than the text that it may generate" if n_read > n_written else ""


def note_why_not(facts: dict[str, Any], prompts: Sequence[Prompt], options: RunOptions) -> None:
    """Record in the facts of a run in progress why it is not audited by default, if it is not."""
    if why := why_not_by_default(prompts, options):
        facts.update(audit={"verdict": NOT_AUDITED, "not_judged": [why]})


def audit_of(
    session: Session,
    prompts: Sequence[Prompt],
    options: RunOptions,
    *,
    asked: bool | None = True,
    can_repeat: bool = True,
    in_background: bool = False,
) -> RunAudit | None:
    """The audit of a run that is about to start. asked: None = only of a short run, and within a
    share of its time, SHARE_IN_BACKGROUND or SHARE_OF_RUN. can_repeat: the run begins with an empty
    memory."""
    if asked is False or (asked is None and why_not_by_default(prompts, options)):
        return None
    share = math.inf if asked else SHARE_IN_BACKGROUND if in_background else SHARE_OF_RUN
    return RunAudit(session, prompts, options, can_repeat=can_repeat, share=share)


class RunAudit(RoundObserver):
    """Observes one run, round by round, and judges it at its end by `steps`; `result` is the fact.

    Observing is cheap: one more sample per token, and copies of states bounded in number and bytes.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Prompt],
        options: RunOptions,
        *,
        can_repeat: bool = True,
        share: float = math.inf,
    ) -> None:
        """can_repeat: the run began with an empty memory, so it can be repeated. share: of the
        run's time, which limits the text decoded again and the few drafts made again; without a
        limit all of it."""
        self._session, self._prompts, self._options = session, list(prompts), options
        self._can_repeat, self._share, self._is_whole = can_repeat, share, share == math.inf
        self._limit_s, self._spent_s, self._n_passed = math.inf, 0.0, 0
        self._samples: StateSamples | None = None
        self._check: SamplerCheck | None = None
        self._undone = False
        self._checks: dict[int, TextCheck] = {}
        self._not_judged: list[str] = []
        self._texts = AuditedTexts.of(session, prompts, options)
        self._rows: dict[int, list[TargetRows]] = {}
        self._taps = taps_of(session, options)
        # drafts depend on states as the run rounds them, which a plain pass does not reproduce
        self._judges_drafts = bool(options.spec.types) and options.state_types == StateTypes()
        self._reads_rows = self._judges_drafts and options.spec.has_model

    # -- while the run goes on -------------------------------------------------------------

    def begin(
        self,
        sequences: Sequence[DecodingSequence],
        memory: HybridMemory,
        end_tokens: Collection[int],
    ) -> None:
        """The run is about to start."""
        n, reads_all = _SAMPLES if self._is_whole else _FEW_SAMPLES, self._share >= 1
        n_bytes = _SAMPLED_BYTES if reads_all else _FEW_BYTES
        self._samples = StateSamples(memory, n, n_bytes, with_last=reads_all)
        grammar = self._session.grammar(self._options)
        make = partial(self._texts.sampler, grammar)
        seq_ids = [sequence.seq_id for sequence in sequences]
        self._check = SamplerCheck(make, seq_ids, self._options, end_tokens)

    def judged(self, sequence: DecodingSequence, round_: Round) -> None:
        if not round_.is_prompt:
            batch = round_.pos0, list(round_.tokens)
            self._texts.batches[round_.number, round_.seq_id] = batch
        self._texts.tokens[round_.seq_id] += round_.accepted
        self._undone |= round_.memory_rollback > 0
        assert self._check is not None
        self._check.judged(sequence, round_)

    def closed(
        self, number: int, memory: HybridMemory, running: Sequence[DecodingSequence]
    ) -> None:
        assert self._samples is not None
        self._samples.look(
            number,
            memory,
            # by its text, since the count of a run may be wrong; the newest token is not decoded
            {s.seq_id: (s.index, len(self._texts.tokens[s.seq_id]) - 1) for s in running},
            [s.seq_id for s in running if s.stop],
            undone=self._undone,
        )
        self._undone = False

    @property
    def n_unseen(self) -> int:
        return self._samples.n_unseen if self._samples else 0

    # -- at its end ------------------------------------------------------------------------

    def steps(self, trace: TraceStore, run_id: int) -> Generator[None]:
        """The audit in small parts; at the end, even an early one, the result is in the facts."""
        trace.runs[run_id].update(audit={"verdict": GOING_ON})
        steps = self._steps(trace, run_id)
        next(steps)  # from here on, closing it leaves a result
        return steps

    def _steps(self, trace: TraceStore, run_id: int) -> Generator[None]:
        started, facts = perf_counter(), trace.runs[run_id]
        result: dict[str, Any] = {"verdict": "not judged", "drafts": []}
        assert self._samples is not None
        assert self._check is not None
        try:
            self._check.settle()
            yield
            if not self._is_whole:
                t_ms = RunColumns(trace, "rounds", run_id)["t_ms"]
                self._limit_s = self._share * float(np.nanmax(t_ms, initial=0.0)) / 1e3
                # a first pass, with its memory, takes up to twice as long as the prompt did
                if 2 * float(np.nanmin(t_ms, initial=math.inf)) / 1e3 > self._limit_s:
                    self._limit_s = 0.0
            reads = self._limit_s or self._judges_drafts
            rows = self._recorded(trace, run_id) if reads else {}
            for seq_id in self._texts.tokens if self._limit_s else ():
                check = self._checks[seq_id] = TextCheck()
                yield from self._pass(seq_id, check, rows.get(seq_id, []))
            suspects = {i for i, one in self._checks.items() if self._is_suspect(one)}
            found: list[dict[str, Any]] = []
            if suspects:
                yield from self._decide(suspects, rows, found)
            origins = [one["state"].pop("origins") for one in found if "state" in one]
            if origins:
                facts.update(state_origins=[one for records in origins for one in records])
            right = {i: rows[i] for i in rows if i not in suspects}
            if self._judges_drafts:
                for draft in self._drafts(trace, run_id, right):
                    result["drafts"].append(asdict(draft))
                    yield
            result["wrong"] = sorted(found, key=lambda one: one["round"])
            differs = found or self._check.notes
            if differs or not self._not_judged:
                result["verdict"] = "differs" if differs else "agrees"
        except Exception as error:  # a faulty engine may fail here, too
            self._not_judged.append(f"The audit failed: {type(error).__name__}: {error}"[:500])
        finally:
            if result["verdict"] == "not judged" and not self._not_judged:
                result["verdict"] = STOPPED
                self._not_judged.append("The audit was stopped.")
            texts = self._texts.tokens.items()
            facts.update(
                audit={
                    **result,
                    "n_rounds_sampled": len(
                        {n for one in self._checks.values() for n in one.states}
                    ),
                    "n_tokens": sum(len(one.errors) for one in self._checks.values()),
                    "n_text": sum(len(text) - len(self._prompts[i].tokens) for i, text in texts),
                    "n_drawn": self._check.n_tokens,
                    "logits_error": max(
                        (e for one in self._checks.values() for e in one.errors.values()),
                        default=0.0,
                    ),
                    "state_error": max(
                        (e for one in self._checks.values() for e, _ in one.states.values()),
                        default=0.0,
                    ),
                    "sampler": self._check.notes,
                    "not_judged": self._not_judged,
                    "seconds": perf_counter() - started,
                }
            )

    def _recorded(self, trace: TraceStore, run_id: int) -> dict[int, list[EmittedRow]]:
        """The recorded tokens up to the first that is not the text's: what follows says nothing
        about the text."""
        rows = emitted_rows(trace, run_id)
        for seq_id, mine in rows.items():
            text = self._texts.tokens[seq_id]
            same = [text[row.pos : row.pos + 1] == [row.token_id] for row in mine]
            if not all(same):
                pos = mine[same.index(False)].pos
                why = f"Sequence {seq_id}: the recorded token at {pos} is not that of the text."
                self._not_judged.append(why)
                del mine[same.index(False) :]
        return rows

    def _pass(self, seq_id: int, check: TextCheck, rows: Sequence[EmittedRow]) -> Iterator[None]:
        """Decode a text in wide passes and compare."""
        assert self._samples is not None
        samples = self._samples.of(seq_id)
        n_prompt = len(self._prompts[seq_id].tokens)
        n_all = max([0, *(row.pos for row in rows), *(s.n_tokens for s in samples)])
        if not n_all:
            return
        width = max(16, min(self._options.n_ubatch, _LOGITS_BYTES // 4 // self._n_vocab))
        plain = self._texts.passed(seq_id, self._taps)
        redraw = Redraw(self._texts, seq_id, rows)
        by_length = {sample.n_tokens: sample for sample in samples}
        while plain.n_tokens < n_all:
            most = self._options.n_ubatch if plain.n_tokens + 1 < n_prompt else width
            n = self._room(min(most, n_all - plain.n_tokens), n_prompt + _LEAST_PART)
            if not n:
                return
            least = 0 if self._is_whole else n_prompt
            cuts = [at - plain.n_tokens for at in by_length if at > least]
            cuts = [at for at in cuts if 0 < at <= n]
            n = (min if self._is_whole else max)(cuts, default=n)
            since = perf_counter()
            part = plain.decode(n, n_prompt - 1)
            self._texts.compare(check, part, rows)
            redraw.compare(check, part)
            if self._reads_rows:
                self._rows.setdefault(seq_id, []).append(part.rows)
            if sample := by_length.get(plain.n_tokens):
                errors = state_errors(plain.memory.inputs((0,))[0], sample.states)
                worst = max(errors, key=errors.__getitem__)
                check.states[sample.round] = errors[worst], worst
            self._n_passed += n
            self._spent_s += perf_counter() - since
            yield

    def _room(self, n: int, first: int) -> int:
        """How many of the next n tokens may be decoded again. first: this many always may."""
        if self._limit_s == math.inf:
            return n
        if not self._n_passed:
            return min(n, first)
        limit_s = self._limit_s * (_SHARE_OF_TEXT if self._reads_rows else 1.0)
        room = int((limit_s - self._spent_s) / self._spent_s * self._n_passed)
        return min(n, room) if room >= min(n, _LEAST_PART) else 0

    @property
    def _n_vocab(self) -> int:
        return self._session.config.n_vocab

    def _is_suspect(self, check: TextCheck) -> bool:
        wrong = any(not error <= self._texts.logits_limit for error in check.errors.values())
        wrong |= any(not error <= self._texts.state_limit for error, _ in check.states.values())
        return wrong or check.token is not None

    def _decide(
        self,
        suspects: Collection[int],
        rows: Mapping[int, Sequence[EmittedRow]],
        found: list[dict[str, Any]],
    ) -> Iterator[None]:
        rounds = {i: self._suspect_rounds(i, rows.get(i, [])) for i in suspects}
        samples = None if self._can_repeat else {i: self._wrong_sample(i) for i in suspects}
        repetition = Repetition(self._texts, rows, rounds, samples, self._checks)
        yield from repetition.parts()
        for seq_id in sorted(suspects):
            wrong = repetition.wrong(seq_id)
            if wrong:
                found.append({"seq_id": seq_id, **wrong})
        self._not_judged += repetition.not_judged

    def _drafts(
        self, trace: TraceStore, run_id: int, rows: Mapping[int, Sequence[EmittedRow]]
    ) -> Iterator[DraftAudit]:
        """The audit of drafts for these sequences (engine.audit.drafts)."""
        texts = {
            i: [*self._prompts[i].tokens, *(row.token_id for row in found)]
            for i, found in rows.items()
        }
        if not self._is_whole:
            n_passed = {i: sum(len(one.hidden) for one in self._rows.get(i, ())) for i in texts}
            texts = {i: text[: n_passed[i] + 1] for i, text in texts.items() if n_passed[i]}
        if not texts:
            return iter(())
        return audit_drafts(
            self._session,
            self._options,
            run_id,
            trace,
            texts,
            lambda seq: join_rows(self._rows[seq]),
            None if self._is_whole else self._has_time,
        )

    def _has_time(self, drafting_s: float, n_tokens: int) -> bool:
        """Whether there is time to make drafts again that took this long, over a text of n_tokens:
        entries take no longer than the text did. Counts the time as spent."""
        seconds = drafting_s + n_tokens * self._spent_s / self._n_passed
        has_time = self._spent_s + seconds <= self._limit_s
        self._spent_s += seconds * has_time
        return has_time

    def _suspect_rounds(self, seq_id: int, rows: Sequence[EmittedRow]) -> list[int]:
        """Rounds of a sequence in which anything is suspect."""
        check = self._checks[seq_id]
        at = {row.pos: row.round for row in rows}
        found = [at[pos] for pos, e in check.errors.items() if not e <= self._texts.logits_limit]
        found += [n for n, (e, _) in check.states.items() if not e <= self._texts.state_limit]
        return sorted([*found, *([at[check.token[0]]] if check.token else [])])

    def _wrong_sample(self, seq_id: int) -> StateSample | None:
        """The first suspect states copied of a sequence."""
        assert self._samples is not None
        errors = self._checks[seq_id].states
        samples = self._samples.of(seq_id)
        return next((s for s in samples if not errors[s.round][0] <= self._texts.state_limit), None)
