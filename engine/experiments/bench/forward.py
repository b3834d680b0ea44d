"""Forward passes: steps of several widths after a context of one token; several sequences per pass
against one sequence per pass; and a clock by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import isfunction, ismethod
from statistics import median
from time import perf_counter
from typing import Any

import torch

from engine.batch import Span
from engine.decode.recorder import Recorder
from engine.experiments.bench.request import Configuration, measure_request
from engine.machine.device import CPU, wait_for
from engine.memory.hybrid import HybridMemory
from engine.model.feed_forward import MixtureOfExperts
from engine.model.hybrid import HybridModel
from engine.model.mixers.attention import Attention
from engine.model.weights import Projection
from engine.options import SPLITS, Prompt, RunOptions
from engine.session import Session
from kernels.dispatch import uses_llvm
from kernels.llvm.program import KernelClock

MODEL_SECTIONS = ("linears", "recurrent core", "attention", "head", "rest")
"""linears: projections and experts. recurrent core: convolution, delta rule and what the policy
stores. attention: cells, scores, norms and rope. head: final norm and vocabulary. rest: norms,
gates, residuals, embedding."""

# modules that trunks are built from
_PARTS = tuple(f"engine.model.{name}" for name in ("trunks", "layers", "mixers", "feed_forward"))


class SectionClock:
    """Exclusive time per section: entering a section stops the enclosing one.

    sections: their names, including "rest". On a CUDA device every stop waits for it, which costs
    some speed.
    """

    def __init__(
        self, device: torch.device = CPU, sections: Sequence[str] = MODEL_SECTIONS
    ) -> None:
        self._device, self._waits = device, device.type != "cpu"
        self._open, self._seconds = ["rest"], dict.fromkeys(sections, 0.0)
        self.restart()

    def restart(self) -> None:
        """Reset, starting with "rest"."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._since = perf_counter()

    def ms(self) -> dict[str, float]:
        """Milliseconds per section since the restart."""
        self._settle()
        return {name: 1000 * seconds for name, seconds in self._seconds.items()}

    def timed(self, call: Callable[..., Any], section: str) -> Callable[..., Any]:
        """`call` wrapped, so that its time counts for this section."""

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
        if self._waits:
            wait_for(self._device)
        now = perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = perf_counter()  # the clock's own time counts for no section


class _Counted:
    """A proxy for a part whose calls and methods are counted; other attributes are passed
    through."""

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
    """Owner, name and section of every timed call in a trunk or part, inner ones first."""
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

    Passes are not recorded, because a CUDA graph would bypass the timed calls.
    """
    parts = [*_sections(model._trunk), (model, "_output", "head")]
    for memory in memories:
        calls = ("begin", "advance", "commit") if memory.recurrent else ()
        parts += [(memory.recurrent, name, "recurrent core") for name in calls]
    with ExitStack() as undo:
        for part in parts:
            undo.enter_context(clock.around(*part))
        for memory in memories:
            undo.callback(setattr, memory, "_graphs", memory._graphs)
            memory._graphs = None
        yield


RECORDING_SECTIONS = ("recording", "rest")
"""recording: the recorder's public methods. rest: everything else."""


@contextmanager
def recording_timed(clock: SectionClock) -> Iterator[None]:
    """Within the context, time that runs spend on recording is counted by `clock`, which must have
    RECORDING_SECTIONS."""
    with ExitStack() as undo:
        for name, value in list(vars(Recorder).items()):
            if isfunction(value) and not name.startswith("_"):
                undo.enter_context(clock.around(Recorder, name, "recording"))
        yield


def bench_recording(
    session: Session, prompt: Prompt, configurations: Sequence[Configuration], *, repeats: int = 1
) -> Iterator[dict[str, Any]]:
    """Decode a prompt in one slot, `repeats` times in every configuration, without warm-up.

    Per run: configuration, predicted_n (tokens emitted), wall_s (from the first round to the end,
    seconds), recording_s (time in the section "recording") and share, their ratio. Raises what
    Session.start raises.
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


# the first compiles kernels, the second is recorded
_WARM_UP = 2


@torch.inference_mode()
def bench_steps(
    model: HybridModel,
    widths: Sequence[int],
    *,
    repeats: int = 7,
    outputs: str = "last",
    batch_invariant: bool = False,
) -> list[dict[str, Any]]:
    """Time one sequence's step of every width, alternating the widths in each repetition.

    outputs: rows whose logits are computed, "last" or "all". batch_invariant: as in RunOptions. Per
    width: width, min_ms and median_ms, tokens_per_second at the median, and kernels_ms, the median
    time in compiled kernels; None if there are none.
    """
    memory = HybridMemory.for_model(
        model.config, 1, max(widths) + 1, model.device, batch_invariant=batch_invariant
    )
    random = torch.Generator().manual_seed(0)
    first, *tokens = torch.randint(
        model.config.n_vocab, (max(widths) + 1,), generator=random
    ).tolist()
    (ubatch,) = memory.split([Span(0, 0, [first], [])], 1, "seq")
    model.forward(ubatch, memory)
    start_of_all = memory.save(0)
    watch = _watch(model.device)
    taken: dict[int, list[tuple[float, float | None]]] = {width: [] for width in widths}
    for _ in range(_WARM_UP + repeats):
        for width, steps in taken.items():
            wanted = range(width) if outputs == "all" else [width - 1]
            (ubatch,) = memory.split([Span(0, 1, tokens[:width], wanted)], width, "seq")
            in_kernels = watch()
            start = perf_counter()
            with in_kernels.running() if in_kernels else nullcontext():
                model.forward(ubatch, memory)
                wait_for(model.device)
            ms = 1000 * (perf_counter() - start)
            steps.append((ms, 1000 * in_kernels.seconds if in_kernels else None))
            memory.restore(0, start_of_all)
    return [_row(width, steps[_WARM_UP:]) for width, steps in taken.items()]


def _watch(device: torch.device) -> Callable[[], KernelClock | None]:
    """A factory of clocks for the kernels of a step, if they can be timed."""
    if device.type != "cpu" or not uses_llvm():
        return lambda: None
    # here, because it loads the compiler
    from kernels.llvm.program import KernelClock

    return KernelClock


def _row(width: int, steps: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """steps: total and kernel milliseconds of each."""
    middle = median(ms for ms, _ in steps)
    inside = [ms for _, ms in steps if ms is not None]
    return {
        "width": width,
        "min_ms": min(ms for ms, _ in steps),
        "median_ms": middle,
        "tokens_per_second": 1000 * width / middle,
        "kernels_ms": median(inside) if inside else None,
    }


@torch.inference_mode()
def bench_splits(
    model: HybridModel, *, n_seqs: int = 5, n_draft: int = 3, rounds: int = 11
) -> dict[str, Any]:
    """Decode verify batches, n_draft + 1 random tokens per sequence, all accepted.

    Both splits decode the same tokens in every round, each with a memory of its own; which is first
    alternates. Returns n_seqs, n_tokens of each, rollback (the policy), figures by split, and
    ratio: speed of "equal" over "seq", median over the rounds. Figures: ms and tokens_per_second of
    the median round over all sequences, n_ubatches per round, and sections: ms per MODEL_SECTIONS.
    """
    options = RunOptions()
    n_tokens = n_draft + 1
    n_turns = _WARM_UP + rounds
    memories = {
        mode: HybridMemory.for_model(
            model.config,
            n_seqs,
            n_turns * n_tokens,
            model.device,
            policy=options.rollback,
            n_rs_seq=n_draft,
        )
        for mode in SPLITS
    }
    random = torch.Generator().manual_seed(0)
    clock = SectionClock(model.device)
    taken: dict[str, list[dict[str, float]]] = {mode: [] for mode in SPLITS}
    n_ubatches: dict[str, int] = {}
    with sections_timed(model, list(memories.values()), clock):
        for turn in range(n_turns):
            tokens = torch.randint(model.config.n_vocab, (n_seqs, n_tokens), generator=random)
            spans = [
                Span(seq, turn * n_tokens, row, range(n_tokens))
                for seq, row in enumerate(tokens.tolist())
            ]
            for mode in SPLITS[:: 1 if turn % 2 else -1]:
                clock.restart()
                n_ubatches[mode] = _decode(model, memories[mode], spans, mode)
                taken[mode].append(clock.ms())
    totals = {mode: [sum(ms.values()) for ms in taken[mode][_WARM_UP:]] for mode in SPLITS}
    figures = {
        mode: _figures(taken[mode][_WARM_UP:], n_seqs * n_tokens, n_ubatches[mode])
        for mode in SPLITS
    }
    ratios = [seq / equal for seq, equal in zip(totals["seq"], totals["equal"], strict=True)]
    return {
        "n_seqs": n_seqs,
        "n_tokens": n_tokens,
        "rollback": options.rollback,
        "figures": figures,
        "ratio": median(ratios),
    }


def _decode(model: HybridModel, memory: HybridMemory, spans: Sequence[Span], mode: str) -> int:
    ubatches = memory.split(spans, RunOptions().n_ubatch, mode)
    for ubatch in ubatches:
        model.forward(ubatch, memory)
    return len(ubatches)


def _figures(taken: list[dict[str, float]], n_tokens: int, n_ubatches: int) -> dict[str, Any]:
    in_order = sorted(taken, key=lambda ms: sum(ms.values()))
    sections = in_order[len(in_order) // 2]
    ms = sum(sections.values())
    speed = 1000 * n_tokens / ms
    return {"ms": ms, "tokens_per_second": speed, "n_ubatches": n_ubatches, "sections": sections}
