"""Where time goes: a clock that counts by section, the sections of a model's forward pass, and the
share of a run's time that goes into recording its trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import isfunction, ismethod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from engine.decode.recorder import Recorder
from engine.experiments.bench.request import Configuration, measure_request
from engine.machine.device import CPU, wait_for
from engine.memory.hybrid import HybridMemory
from engine.model.feed_forward import MixtureOfExperts
from engine.model.hybrid import HybridModel
from engine.model.mixers.attention import Attention
from engine.model.weights import Projection
from engine.options import Prompt

if TYPE_CHECKING:
    from engine.session import Session


MODEL_SECTIONS = ("linears", "recurrent core", "attention", "head", "rest")
"""linears: projections and experts. recurrent core: convolution, delta rule and what the policy
stores. attention: cells, scores, norms and rope. head: final norm and vocabulary. rest: norms,
gates, residuals, embedding."""

# modules of what a trunk is put together from
_PARTS = tuple(f"engine.model.{name}" for name in ("trunks", "layers", "mixers", "feed_forward"))


class SectionClock:
    """Exclusive time per section: a section that is entered stops the one around it.

    sections: their names, among them "rest". Measuring a CUDA device waits for it at every
    stop, which costs it some speed.
    """

    def __init__(
        self, device: torch.device = CPU, sections: Sequence[str] = MODEL_SECTIONS
    ) -> None:
        self._device = device
        self._open = ["rest"]
        self._seconds = dict.fromkeys(sections, 0.0)
        self._since = perf_counter()

    def restart(self) -> None:
        """Forget everything and begin with "rest"."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._since = perf_counter()

    def ms(self) -> dict[str, float]:
        """Milliseconds per section since the restart."""
        self._settle()
        return {name: 1000 * seconds for name, seconds in self._seconds.items()}

    def timed(self, call: Callable[..., Any], section: str) -> Callable[..., Any]:
        """`call` wrapped: its time is counted as this section's."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._settle()
            self._open.append(section)
            try:
                return call(*args, **kwargs)
            finally:
                self._settle()
                self._open.pop()

        return counted

    @contextmanager
    def around(self, owner: object, name: str, section: str) -> Iterator[None]:
        """Within the context, calls of an attribute of `owner` count as this section."""
        own = name in vars(owner)
        call = getattr(owner, name)
        timed = partial(self.timed, section=section)
        is_part = not (isfunction(call) or ismethod(call))
        setattr(owner, name, _Counted(call, timed) if is_part else timed(call))
        try:
            yield
        finally:
            if own:
                setattr(owner, name, call)
            else:
                delattr(owner, name)

    def _settle(self) -> None:
        wait_for(self._device)
        now = perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


class _Counted:
    """A part whose calls, and those of its methods, are counted; layers read what else it has."""

    def __init__(
        self, part: Callable[..., Any], timed: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._part, self._timed, self._call = part, timed, timed(part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return self._timed(value) if ismethod(value) else value


def _sections(part: object) -> Iterator[tuple[object, str, str]]:
    """Of a trunk or a part of one: owner, name and section of every call that has one, those that
    lie deeper first."""
    for name, value in list(vars(part).items()):
        if isinstance(value, Projection):
            yield part, name, "linears"
        elif type(value).__module__.startswith(_PARTS):
            yield from _sections(value)
            if isinstance(value, Attention):
                yield part, name, "attention"
            if isinstance(value, MixtureOfExperts):
                yield part, name, "linears"
        elif isinstance(value, (tuple, list)):
            for each in value:
                if type(each).__module__.startswith(_PARTS):
                    yield from _sections(each)


@contextmanager
def sections_timed(
    model: HybridModel, memories: list[HybridMemory], clock: SectionClock
) -> Iterator[None]:
    """Within the context, forward passes of `model` over these memories switch the clock.

    They are not recorded: a CUDA graph runs without the calls that are timed here.
    """
    with ExitStack() as undo:

        def wrap(owner: object, name: str, section: str) -> None:
            undo.enter_context(clock.around(owner, name, section))

        for owner, name, section in _sections(model._trunk):
            wrap(owner, name, section)
        wrap(model, "_output", "head")
        for memory in memories:
            undo.callback(setattr, memory, "_graphs", memory._graphs)
            memory._graphs = None
            if memory.recurrent is not None:
                for name in ("begin", "advance", "commit"):
                    wrap(memory.recurrent, name, "recurrent core")
        yield


RECORDING_SECTIONS = ("recording", "rest")
"""recording: the recorder's public methods. rest: everything else."""


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
) -> Iterator[dict[str, Any]]:
    """Decode a prompt in one slot, `repeats` times in every configuration; nothing warms up.

    Of each run: configuration, predicted_n (tokens emitted), wall_s (from the first round to the
    end, seconds), recording_s (of them, in the section "recording") and share, one over the other.
    Raises what Session.start raises.
    """
    clock = SectionClock(session.device, RECORDING_SECTIONS)
    for configuration in configurations:
        for _ in range(repeats):
            with recording_timed(clock):
                clock.restart()
                done = measure_request(session, prompt, "", configuration)
                recording_s = clock.ms()["recording"] / 1000
            yield {
                "configuration": configuration.name,
                "predicted_n": done.predicted_n,
                "wall_s": done.wall_s,
                "recording_s": recording_s,
                "share": recording_s / done.wall_s,
            }
