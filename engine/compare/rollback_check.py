"""Every way that llama.cpp rolls back, at several depths and patterns of acceptance, on one model.

What it guarantees has to be right: a removal of at most the last batch but one token, within its
planes, and every checkpoint. Two removals beyond that it accepts and should not (a whole batch, and
more than the last batch had); a build that refuses them, or gets them right, has mended them.

Then the scripts of resources/scenarios/rollback are played, one for each kind of failure that was
reported. What two ways without any rollback are apart by, at the same settings, is measured first:
no bound of a script is below ten times that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import LaneVerdict
from engine.compare import peer_lane
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LLAMA, LLAMA_POLICIES, LaneSpec
from engine.compare.llama_memory import LlamaScriptEngine
from engine.compare.llama_process import DEFAULT_SETTINGS, LlamaSettings
from engine.compare.memory_player import MemoryPlay
from engine.compare.memory_script import MemoryScript
from engine.compare.memory_script_parser import memory_scripts, parse_script
from engine.errors import DraftscopeError, PeerLibraryError, RollbackRefusedError
from engine.options import Prompt, RunOptions, SpecOptions
from engine.session import Session
from engine.trace.facts import GateFacts
from engine.trace.store import TraceStore
from resources import ROLLBACK_SCRIPTS

RIGHT, WRONG, FAILED, REFUSED, KNOWN, ABSENT, UNREAD = (
    "right",
    "WRONG",
    "FAILED",
    "refused",
    "known defect",
    "no planes",
    "not judged",
)
BAD = (WRONG, FAILED, KNOWN)
DEPTHS = (1, 3, 8)
N_TOKENS = 32
_N_PROMPT = 16
_N_CTX = 256
_MARGIN = 10.0
_NOISE = """
context A n_rs_seq=0
context B n_rs_seq=0
context C n_seqs=2 n_rs_seq=0
decode A 0: pattern[0:12]
decode A 0: pattern[12:16]
decode A 0: pattern[16:25]
replay B 0: pattern[0:25]
decode C 0: pattern[0:12], 1: pattern[0:12]
decode C 0: pattern[12:25], 1: pattern[12:20]
check A 0 0:25 = B 0 nmse<=0
check A 0 0:25 = B 0 max_abs<=0
check A 0 0:25 = B 0 relative<=0
check A 0 = B 0 error<=0
check C 0 0:25 = B 0 nmse<=0
check C 0 0:25 = B 0 max_abs<=0
check C 0 0:25 = B 0 relative<=0
check C 0 = B 0 error<=0
"""
_PLANES = f"{LLAMA},rollback=planes"
_CHECKPOINTS = (f"{LLAMA},rollback=checkpoint", f"{LLAMA},rollback=checkpoint,device")


@dataclass(frozen=True, slots=True)
class CheckedLane:
    """One lane of one scenario, or a script under a policy, which has no verdict of a lane.
    n_rs_seq: planes, 0 for checkpoints. n_undone: rounds that rolled back. outcome: right,
    WRONG, FAILED (could not go on), refused, known defect, no planes, or not judged (its states
    cannot be read, so that nothing but its logits is known). about: the finding or the error, if
    there is one; round: the first that it is about.
    """

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
        """Names it among those of other runs."""
        drafts = f", {self.n_draft} drafted" if self.n_draft else ""
        return f"{self.scenario}, {self.policy}{drafts}"

    @property
    def is_wrong(self) -> bool:
        """Whether a build must not do this."""
        return self.outcome in (WRONG, FAILED)


@dataclass(frozen=True, slots=True)
class _Scenario:
    """accepts: right tokens of the drafts of n tokens. traps: lanes that are not guaranteed."""

    name: str
    accepts: tuple[int, ...]
    n_seqs: int = 1
    traps: tuple[tuple[str, str], ...] = ()


def check_rollback(
    session: Session,
    library: Path | None = None,
    depths: Sequence[int] = DEPTHS,
    n_tokens: int = N_TOKENS,
    trace: TraceStore | None = None,
    *,
    settings: LlamaSettings = DEFAULT_SETTINGS,
    n_slots: int = 2,
    n_ubatch: int = 512,
) -> Generator[CheckedLane, None, None]:
    """Play every scenario with drafts of this many tokens, over planes as many, then every script;
    lanes in order.

    trace: takes all lanes. n_slots: sequences of the scenario with several. Raises what Comparison
    raises.
    """
    for n_draft in depths:
        options = RunOptions(
            n_predict=n_tokens,
            n_ctx=_N_CTX,
            n_ubatch=n_ubatch,
            ignore_eos=True,
            spec=SpecOptions(n_max=n_draft),
        )
        for scenario in _scenarios(n_draft, n_slots):
            yield from _played(session, library, settings, scenario, options, trace)
    yield from play_scripts(session, library, settings=settings)


def play_scripts(
    session: Session,
    library: Path | None = None,
    scripts: Sequence[MemoryScript] | None = None,
    *,
    settings: LlamaSettings = DEFAULT_SETTINGS,
) -> Iterator[CheckedLane]:
    """Play scripts on llama.cpp's memory under its two policies; without any, those of reported
    failures. Raises what LlamaProcess raises."""
    scripts = memory_scripts(ROLLBACK_SCRIPTS) if scripts is None else scripts
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
    """By measure, _MARGIN times what batches of other widths are apart by."""
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
        play = MemoryPlay(script, policy, owner, noise=noise)
        while play.step():
            pass
        if play.failures:
            outcome, first = FAILED if play.error else WRONG, play.failures[0]
            about = f"line {first.statement.line}, {first.statement.text}: {first.message}"
        elif owner.unread:
            outcome, about = UNREAD, owner.unread
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
    """`check_rollback` with its defaults, step by step; the first one is done at once."""

    def __init__(self, session: Session, library: Path | None, trace: TraceStore) -> None:
        self._lanes = check_rollback(session, library, trace=trace)
        self.step()

    def step(self) -> bool:
        """Do the next lane. False when none is left."""
        return next(self._lanes, None) is not None

    def stop(self) -> None:
        """End the lanes."""
        self._lanes.close()


def _scenarios(n: int, n_slots: int) -> Iterator[_Scenario]:
    traps = (
        ("whole batch undone", f"{_PLANES},n_rs_seq={n + 1},undo=batch"),
        ("tokens one by one", f"{_PLANES},step=1"),
    )
    yield _Scenario("every depth", tuple(range(n + 1)), traps=traps)
    yield _Scenario("all rejected", (0,))
    yield _Scenario("mixed", (0, n, min(1, n), 0, 0, min(2, n)))
    name = "two sequences" if n_slots == 2 else f"{n_slots} sequences"
    yield _Scenario(name, (n, *range(n)), n_seqs=n_slots)


def _played(
    session: Session,
    library: Path | None,
    settings: LlamaSettings,
    scenario: _Scenario,
    options: RunOptions,
    trace: TraceStore | None,
) -> Iterator[CheckedLane]:
    lanes = [
        ("planes", _PLANES),
        *zip(("checkpoint", "checkpoint, device"), _CHECKPOINTS, strict=True),
        *scenario.traps,
    ]
    options = replace(options, parallel=scenario.n_seqs)
    comparison = Comparison(
        session,
        [_prompt(session, i) for i in range(scenario.n_seqs)],
        options,
        [LaneSpec.parse(text) for _, text in lanes],
        trace,
        draft_accept=scenario.accepts,
        llama_library=library,
        llama_settings=settings,
    )
    try:
        while comparison.step():
            pass
    finally:
        comparison.stop()
    verdicts = {verdict.lane: verdict for verdict in comparison.results()}
    for policy, text in lanes:
        is_trap = (policy, text) in scenario.traps
        yield _checked(
            comparison.trace, scenario.name, policy, options.spec.n_max, verdicts[text], is_trap
        )


def _prompt(session: Session, which: int) -> Prompt:
    """The same tokens for every model, whatever it knows."""
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
    facts.gate = GateFacts(scenario, policy, n_draft, outcome, about)
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
