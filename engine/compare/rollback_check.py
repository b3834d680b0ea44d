"""Every way that llama.cpp rolls back, at several depths and patterns of acceptance, on one model.

What it guarantees has to be right: a removal of at most the last batch but one token, within its
planes, and every checkpoint. Two removals beyond that it accepts and should not (a whole batch, and
more than the last batch had); a build that refuses them, or gets them right, has mended them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import LaneVerdict
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LLAMA, LaneSpec
from engine.options import Prompt, RunOptions, SpecOptions
from engine.session import Session
from engine.trace.facts import GateFacts
from engine.trace.store import TraceStore

RIGHT, WRONG, FAILED, REFUSED, KNOWN, ABSENT, UNREAD = (
    "right",
    "WRONG",
    "FAILED",
    "refused",
    "known defect",
    "no planes",
    "not judged",
)
DEPTHS = (1, 3, 8)
N_TOKENS = 32
_N_PROMPT = 16
_N_CTX = 256
_PLANES = f"{LLAMA},rollback=planes"
_CHECKPOINTS = (f"{LLAMA},rollback=checkpoint", f"{LLAMA},rollback=checkpoint,device")


@dataclass(frozen=True, slots=True)
class CheckedLane:
    """One lane of one scenario. n_rs_seq: planes, 0 for checkpoints. n_undone: rounds that rolled
    back. outcome: right, WRONG, FAILED (could not go on), refused, known defect, no planes, or not
    judged (its states cannot be read, so that nothing but its logits is known). about: the finding
    or the error, if there is one; round: the first that it is about.
    """

    scenario: str
    policy: str
    n_draft: int
    n_rs_seq: int
    n_undone: int
    verdict: LaneVerdict
    outcome: str
    round: int | None
    about: str

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
) -> Generator[CheckedLane, None, None]:
    """Play every scenario with drafts of this many tokens, over planes as many; lanes in order.

    trace: takes all lanes. Raises what Comparison raises.
    """
    for n_draft in depths:
        for scenario in _scenarios(n_draft):
            yield from _played(session, library, scenario, n_draft, n_tokens, trace)


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


def _scenarios(n: int) -> Iterator[_Scenario]:
    traps = (
        ("whole batch undone", f"{_PLANES},n_rs_seq={n + 1},undo=batch"),
        ("tokens one by one", f"{_PLANES},step=1"),
    )
    yield _Scenario("every depth", tuple(range(n + 1)), traps=traps)
    yield _Scenario("all rejected", (0,))
    yield _Scenario("mixed", (0, n, min(1, n), 0, 0, min(2, n)))
    yield _Scenario("two sequences", (n, *range(n)), n_seqs=2)


def _played(
    session: Session,
    library: Path | None,
    scenario: _Scenario,
    n_draft: int,
    n_tokens: int,
    trace: TraceStore | None,
) -> Iterator[CheckedLane]:
    lanes = [
        ("planes", _PLANES),
        *zip(("checkpoint", "checkpoint, device"), _CHECKPOINTS, strict=True),
        *scenario.traps,
    ]
    options = RunOptions(
        n_predict=n_tokens,
        n_ctx=_N_CTX,
        ignore_eos=True,
        parallel=scenario.n_seqs,
        spec=SpecOptions(n_max=n_draft),
    )
    comparison = Comparison(
        session,
        [_prompt(session, i) for i in range(scenario.n_seqs)],
        options,
        [LaneSpec.parse(text) for _, text in lanes],
        trace,
        draft_accept=scenario.accepts,
        llama_library=library,
    )
    try:
        while comparison.step():
            pass
    finally:
        comparison.stop()
    verdicts = {verdict.lane: verdict for verdict in comparison.results()}
    for policy, text in lanes:
        is_trap = (policy, text) in scenario.traps
        yield _checked(comparison.trace, scenario.name, policy, n_draft, verdicts[text], is_trap)


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
