"""What the trace costs: the share of a run's time that goes into recording it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import isfunction
from typing import TYPE_CHECKING

from engine.decode.recorder import Recorder
from engine.experiments.bench.request import Configuration, measure_request
from engine.experiments.bench.sections import SectionClock
from engine.options import Prompt

if TYPE_CHECKING:
    from engine.session import Session

RECORDING_SECTIONS = ("recording", "rest")
"""recording: the recorder's public methods. rest: everything else."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run. predicted_n: tokens emitted. wall_s: from the first round to the end of the run,
    seconds. recording_s: of them, in the section "recording". share: recording_s over wall_s."""

    configuration: str
    predicted_n: int
    wall_s: float
    recording_s: float
    share: float


@contextmanager
def recording_timed(clock: SectionClock) -> Iterator[None]:
    """Within the context, the time that any run spends recording is counted by `clock`, which must
    have RECORDING_SECTIONS."""
    with ExitStack() as undo:
        for name, value in list(vars(Recorder).items()):
            if isfunction(value) and not name.startswith("_"):
                undo.enter_context(clock.around(Recorder, name, "recording"))
        yield


def bench_recording(
    session: Session, prompt: Prompt, configurations: Sequence[Configuration], *, repeats: int = 1
) -> Iterator[RecordedRun]:
    """Decode a prompt in one slot, `repeats` times in every configuration; nothing warms up.

    Raises what Session.start raises.
    """
    clock = SectionClock(session.device, RECORDING_SECTIONS)
    for configuration in configurations:
        for _ in range(repeats):
            with recording_timed(clock):
                clock.restart()
                done = measure_request(session, prompt, "", configuration)
                recording_s = clock.ms()["recording"] / 1000
            yield RecordedRun(
                configuration.name,
                done.predicted_n,
                done.wall_s,
                recording_s,
                recording_s / done.wall_s,
            )
