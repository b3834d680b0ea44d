"""Rollback check of a llama.cpp build: every way it rolls back, at several depths and acceptance
patterns, on one model.

What it guarantees must be right: a removal of at most the last batch minus one token, within its
planes, and every checkpoint. Two further removals are accepted although they should not be (a whole
batch, and more than the last batch had); a build that refuses them, or gets them right, has fixed
them.

Then the scripts of resources/scenarios/rollback are played, one per kind of reported failure. First
the difference between two ways without rollback is measured at the same settings: no bound of a
script is below ten times that. For a model that chooses experts by rank, a failed check still
counts as right if the script's batches without rollback give the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import LaneVerdict
from engine.batch import Span
from engine.compare import peer_lane
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LLAMA, LLAMA_POLICIES, LaneSpec
from engine.compare.llama_memory import LlamaScriptEngine
from engine.compare.llama_process import LlamaEngine
from engine.compare.memory_player import MemoryPlay
from engine.compare.memory_script import MemoryScript
from engine.compare.memory_script_parser import parse_script
from engine.compare.rollback_outcomes import (
    ABSENT,
    FAILED,
    KNOWN,
    REFUSED,
    RIGHT,
    UNREAD,
    WRONG,
    read_baseline,
)
from engine.errors import (
    DraftscopeError,
    OptionError,
    PeerLibraryError,
    RollbackRefusedError,
    UnsupportedModelError,
)
from engine.option_fields import words_of
from engine.options import Prompt, RunOptions, SpecOptions
from engine.options.llama_cpp import DEFAULT_GATE, DEFAULT_SETTINGS, GateOptions, LlamaSettings
from engine.session import Session
from engine.trace.facts import GateFacts, RunFacts
from engine.trace.store import TraceStore

_N_PROMPT = 16
_N_CTX = 256
_MARGIN = 10.0
_LEAST_NMSE = 1e-6
_NOISE = Path(__file__).with_name("noise.memory").read_text(encoding="utf-8")
_SIDECAR = "MTP context"
_CHECKPOINTS = (f"{LLAMA},rollback=checkpoint", f"{LLAMA},rollback=checkpoint,device")


@dataclass(frozen=True, slots=True)
class CheckedLane:
    """One lane of one scenario, or a script under a policy, which has no lane verdict. n_rs_seq:
    planes, 0 for checkpoints. n_undone: rounds with a rollback. outcome: right, WRONG, FAILED
    (could not continue), refused, known defect, no planes, or not judged (states cannot be read,
    so only logits are known). about: the finding or the error, if any; round: the first affected
    one."""

    scenario: str
    policy: str
    n_draft: int
    n_rs_seq: int
    n_undone: int
    verdict: LaneVerdict | None
    outcome: str
    round: int | None
    about: str

    @property
    def name(self) -> str:
        """Its name in results."""
        drafts = f", {self.n_draft} drafted" if self.n_draft else ""
        return f"{self.scenario}, {self.policy}{drafts}"

    @property
    def is_wrong(self) -> bool:
        """Whether this is an error of the build."""
        return self.outcome in (WRONG, FAILED)


_Scenario = tuple[str, tuple[int, ...], int, tuple[tuple[str, str], ...]]
"""Name, right tokens of each draft, number of sequences, and traps: lanes that are not
guaranteed."""


def check_rollback(
    session: Session,
    scripts: Sequence[MemoryScript],
    library: Path | None = None,
    gate: GateOptions = DEFAULT_GATE,
    trace: TraceStore | None = None,
    *,
    only: Collection[str] = (),
) -> Generator[CheckedLane, None, None]:
    """Play every scenario with drafts of this many tokens, over as many planes, then every script;
    yields lanes in order.

    scripts: those of reported failures. trace: receives all lanes. only: names of scenarios and
    scripts, empty for all. Raises like Comparison, and OptionError for an unknown name or an
    invalid baseline.
    """
    settings, words = gate.settings, " ".join(words_of(replace(gate, baseline=None)))
    before = read_baseline(Path(gate.baseline)) if gate.baseline else {}
    names = [*(name for name, *_ in _scenarios(1, gate)), *(one.name for one in scripts)]
    names += [_SIDECAR] if settings.load_mtp else []
    if unknown := [name for name in only if name not in names]:
        raise OptionError(
            f"There is no scenario {unknown[0][:80]!r}.", f"Choose from {', '.join(names)}."
        )
    for n_draft in gate.depths:
        options = RunOptions(
            n_predict=gate.n_predict,
            n_ctx=_N_CTX,
            n_ubatch=gate.n_ubatch,
            ignore_eos=True,
            spec=SpecOptions(n_max=n_draft),
        )
        for scenario in _scenarios(n_draft, gate):
            if only and scenario[0] not in only:
                continue
            for lane, facts in _played(session, library, gate, scenario, options, trace):
                facts.gate = _gate_facts(lane, words, before)
                yield lane
    chosen = [script for script in scripts if not only or script.name in only]
    for lane in play_scripts(session, chosen, library, settings=settings):
        if trace is not None and trace.runs:  # a script has no run of its own
            trace.runs[0].add_to(
                "gate_scripts", msgspec.to_builtins(_gate_facts(lane, words, before))
            )
        yield lane
    if settings.load_mtp and (not only or _SIDECAR in only):
        yield _checked_sidecar(session, library, settings)


def play_scripts(
    session: Session,
    scripts: Sequence[MemoryScript],
    library: Path | None = None,
    *,
    settings: LlamaSettings = DEFAULT_SETTINGS,
) -> Iterator[CheckedLane]:
    """Play scripts on llama.cpp's memory under its two policies. Raises like LlamaProcess."""
    owner: LlamaScriptEngine | None = None
    noise: dict[str, float] = {}
    try:
        for script in scripts:
            for policy in LLAMA_POLICIES:
                if policy not in script.policies:
                    continue
                if owner is None:
                    try:
                        owner = _opened(session, library, settings)
                        noise = _noise_of(owner)
                    except DraftscopeError as error:
                        about = str(error)
                        yield CheckedLane("noise", "none", 0, 0, 0, None, FAILED, None, about)
                        return
                checked = _played_script(owner, script, policy, noise)
                yield checked
                if checked.outcome == FAILED:  # its process may have ended
                    owner.engine.close()
                    owner = None
    finally:
        if owner is not None:
            owner.engine.close()


def _opened(session: Session, library: Path | None, settings: LlamaSettings) -> LlamaScriptEngine:
    return LlamaScriptEngine(
        session, peer_lane.open_llama(session.unchanged_path(), library, settings)
    )


def _noise_of(owner: LlamaScriptEngine) -> dict[str, float]:
    """By measure, _MARGIN times the difference between batches of other widths."""
    play = MemoryPlay(parse_script("noise", "noise.memory", _NOISE), LLAMA_POLICIES[0], owner)
    while play.step():
        pass
    if play.error:
        raise play.error
    owner.close_contexts()
    found: dict[str, float] = {}
    for outcome in play.outcomes:
        if outcome.bound:
            measure, value = outcome.bound.measure, _MARGIN * outcome.value
            found[measure] = max(found.get(measure, 0.0), value)
    return found


def _played_script(
    owner: LlamaScriptEngine, script: MemoryScript, policy: str, noise: dict[str, float]
) -> CheckedLane:
    outcome, about = RIGHT, ""
    try:
        play = MemoryPlay(script, policy, owner, noise=noise, has_ties=owner.has_ties)
        while play.step():
            pass
        if play.failures:
            outcome, first = FAILED if play.error else WRONG, play.failures[0]
            about = f"line {first.statement.line}, {first.statement.text}: {first.message}"
        elif owner.unread:
            outcome, about = UNREAD, owner.unread
        else:
            about = "; ".join(play.tipped)
    except RollbackRefusedError as error:
        outcome, about = ABSENT, str(error)
    except DraftscopeError as error:
        outcome, about = FAILED, str(error)
    if outcome != FAILED:
        try:
            owner.close_contexts()
        except PeerLibraryError as error:
            outcome, about = FAILED, str(error)
    return CheckedLane(script.name, policy, 0, 0, 0, None, outcome, None, about)


class RollbackChecks:
    """`check_rollback` for several settings in turn, step by step; the first one starts at once."""

    def __init__(
        self,
        session: Session,
        scripts: Sequence[MemoryScript],
        library: Path | None,
        trace: TraceStore,
        gates: Sequence[GateOptions] = (DEFAULT_GATE,),
    ) -> None:
        self._lanes = (
            lane
            for gate in gates
            for lane in check_rollback(session, scripts, library, gate, trace)
        )
        self.step()

    def step(self) -> bool:
        """Do the next lane. False when none is left."""
        return next(self._lanes, None) is not None

    def stop(self) -> None:
        """End the lanes."""
        self._lanes.close()


class _WithSidecar:
    """A context with an attached MTP context, which reads what the first decodes."""

    def __init__(self, engine: LlamaEngine, n_rs_seq: int) -> None:
        self._engine, threads = engine, torch.get_num_threads()
        self._trunk, self.n_rs_seq = engine.open_context(1, _N_CTX, 64, n_rs_seq, threads)
        self._mtp, _ = engine.open_context(1, _N_CTX, 64, 0, threads, mtp_of=self._trunk)
        self._pending: np.ndarray | None = None
        self._pos = 0

    def decode(self, n: int, n_kept: int, shift: int = 0) -> np.ndarray:
        """Decode the next n tokens in both, rejected ones shifted, and remove those after n_kept:
        the MTP context's logits [n, n_vocab]."""
        ids = range(self._pos, self._pos + n)
        tokens = [7 * i + 1 + shift * (i >= self._pos + n_kept) for i in ids]
        span = Span(0, self._pos, tokens, range(n))
        self._engine.decode(self._trunk, [span])
        rows = self._engine.nextn(self._trunk, n)
        before = np.zeros_like(rows[:1]) if self._pending is None else self._pending
        logits = self._engine.decode_mtp(self._mtp, span, np.concatenate([before, rows[:-1]]))
        self._pos += n_kept
        for number in (self._trunk, self._mtp) if n_kept < n else ():
            if not self._engine.seq_rm(number, 0, self._pos):
                raise RollbackRefusedError(
                    f"llama.cpp refused to remove {n - n_kept} tokens of {n}.", "Look there."
                )
        self._pending = rows[n_kept - 1 : n_kept]
        return logits


def _checked_sidecar(
    session: Session, library: Path | None, settings: LlamaSettings
) -> CheckedLane:
    """Drafts of three tokens, rolled back in a context and its attached MTP context."""
    outcome, about, n_planes, engine = RIGHT, "", 3, None
    try:
        engine = peer_lane.open_llama(session.unchanged_path(), library, settings)
        tested, clean, singly = (_WithSidecar(engine, n) for n in (n_planes, 0, 0))
        for context in (tested, clean):
            context.decode(12, 12)
        for _ in range(12):
            singly.decode(1, 1)
        tested.decode(4, 2, shift=5)
        tested.decode(4, 1, shift=5)
        clean.decode(3, 3)
        for _ in range(3):
            singly.decode(1, 1)
        found, wide = tested.decode(4, 4), clean.decode(4, 4)
        narrow = np.concatenate([singly.decode(1, 1) for _ in range(4)])
        bound = max(_LEAST_NMSE, _MARGIN * _nmse(wide, narrow))
        if not (worst := _nmse(found, wide)) <= bound:
            outcome, about = WRONG, f"NMSE of its logits is {worst:.1e}, not <= {bound:g}"
    except RollbackRefusedError as error:
        outcome, about = FAILED, str(error)
    except (OptionError, UnsupportedModelError) as error:
        outcome, about = UNREAD, str(error)
    except DraftscopeError as error:
        outcome, about = FAILED, str(error)
    finally:
        if engine is not None:
            engine.close()
    return CheckedLane(_SIDECAR, "planes", 3, n_planes, 2, None, outcome, None, about)


def _nmse(found: np.ndarray, reference: np.ndarray) -> float:
    exact = reference.astype(np.float64)
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


def _scenarios(n: int, gate: GateOptions) -> Iterator[_Scenario]:
    n_slots = gate.n_slots
    traps = (
        ("whole batch undone", f"{_planes(n + 1, gate)},undo=batch"),
        ("tokens one by one", f"{_planes(n, gate)},step=1"),
    )
    yield "every depth", tuple(range(n + 1)), 1, traps
    yield "all rejected", (0,), 1, ()
    yield "mixed", (0, n, min(1, n), 0, 0, min(2, n)), 1, ()
    name = "two sequences" if n_slots == 2 else f"{n_slots} sequences"
    yield name, (n, *range(n)), n_slots, ()


def _planes(n: int, gate: GateOptions) -> str:
    """The lane with enough planes for n tokens."""
    return f"{LLAMA},rollback=planes,n_rs_seq={max(n, gate.n_rs_seq or 0)}"


def _played(
    session: Session,
    library: Path | None,
    gate: GateOptions,
    scenario: _Scenario,
    options: RunOptions,
    trace: TraceStore | None,
) -> Iterator[tuple[CheckedLane, RunFacts]]:
    name, accepts, n_seqs, traps = scenario
    lanes = [
        ("planes", _planes(options.spec.n_max, gate)),
        *zip(("checkpoint", "checkpoint, device"), _CHECKPOINTS, strict=True),
        *traps,
    ]
    options = replace(options, parallel=n_seqs)
    comparison = Comparison(
        session,
        [_prompt(session, i) for i in range(n_seqs)],
        options,
        [LaneSpec.parse(text) for _, text in lanes],
        trace,
        draft_accept=accepts,
        llama_library=library,
        llama_settings=gate.settings,
    )
    try:
        while comparison.step():
            pass
    finally:
        comparison.stop()
    verdicts = {verdict.lane: verdict for verdict in comparison.results()}
    for policy, text in lanes:
        is_trap = (policy, text) in traps
        n_draft, verdict = options.spec.n_max, verdicts[text]
        lane = _checked(comparison.trace, name, policy, n_draft, verdict, is_trap)
        yield lane, comparison.trace.runs[verdict.run_id]


def _prompt(session: Session, which: int) -> Prompt:
    """The same tokens for every model, whatever its vocabulary."""
    n_vocab = session.config.n_vocab
    return Prompt(tuple((7 * i * i + 31 * i + 1 + 97 * which) % n_vocab for i in range(_N_PROMPT)))


def _checked(
    trace: TraceStore, scenario: str, policy: str, n_draft: int, verdict: LaneVerdict, is_trap: bool
) -> CheckedLane:
    rounds, facts = trace.rounds, trace.runs[verdict.run_id]
    mine = rounds.column("run_id") == verdict.run_id
    paths = [path for path, own in zip(rounds.texts("rollback_path"), mine, strict=True) if own]
    found = [
        one for one in recorded(trace) if one.run_id == verdict.run_id and one.severity == "error"
    ]
    number, about, unread = verdict.first_round, verdict.error, facts.lane_unread or ""
    if found and not verdict.error:
        number, about = found[0].round, f"{found[0].rule}: {found[0].message}"
    outcome = RIGHT
    if verdict.error:
        outcome = FAILED
        if "refused" in paths and is_trap:
            outcome = REFUSED
        elif not facts.n_rs_seq and policy not in ("checkpoint", "checkpoint, device"):
            outcome = ABSENT
    elif unread and (is_trap or not verdict.is_beyond):
        outcome, about = UNREAD, unread
    elif verdict.is_beyond or found:
        stale = any(one.rule == "stale-plane" for one in found)
        outcome = KNOWN if is_trap and stale else WRONG
    return CheckedLane(
        scenario,
        policy,
        n_draft,
        facts.n_rs_seq or 0,
        sum(path in ("seq_rm", "restore") for path in paths),
        verdict,
        outcome,
        number,
        about,
    )


def _gate_facts(lane: CheckedLane, settings: str, baseline: Mapping[str, str]) -> GateFacts:
    shown = lane.scenario, lane.policy, lane.n_draft, lane.outcome, lane.about
    return GateFacts(*shown, settings, baseline.get(lane.name, ""))
