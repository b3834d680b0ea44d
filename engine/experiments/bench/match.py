"""The match test of llama.cpp #19493: the same texts, one after another and side by side.

Steps are repeated with and without speculation. All others are compared with the first step without
speculation, token by token, so that repeated faults are found too.

Speculation is not the cause of a difference that the control has in the same step, nor of one at a
near tie: there, the two logits are closer than batches as wide as a verified draft move them,
although nothing is drafted or rolled back (WidthControl). With the option batch_invariant there are
no such batches, and every difference counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from engine.batch import Span
from engine.errors import OptionError
from engine.experiments.bench.request import Configuration, run_to_end
from engine.options import Prompt, RunOptions
from engine.run import Run
from engine.session import Session
from engine.trace.records import EMITTED_KINDS


@dataclass(frozen=True, slots=True)
class WidthControl:
    """gap: logit of the expected token minus that of the other, decoded one by one. noise: how much
    batches change the gap between the two most probable tokens, at most, over all positions of the
    output. A gap within the noise is a near tie: either token may win."""

    gap: float
    noise: float

    @property
    def is_tie(self) -> bool:
        """Whether the batch width can flip the choice."""
        return abs(self.gap) <= self.noise


@torch.inference_mode()
def width_control(
    session: Session,
    prompt: Prompt,
    tokens: list[int],
    index: int,
    other: int,
    width: int,
    options: RunOptions,
) -> WidthControl:
    """Decode `tokens` after the prompt; `other` was emitted instead of tokens[index].

    Takes about as long as two plain runs. Raises what Session.context raises.
    """
    pairs: list[Tensor] = []
    alone: list[Tensor] = []
    gap = 0.0
    for row, logits in enumerate(_rows(session, prompt, tokens, 1, 0, options)):
        pairs.append(torch.topk(logits, 2).indices)
        alone.append(logits[pairs[-1]])
        if row == index:
            gap = float(logits[tokens[index]] - logits[other])
    noise = 0.0
    for offset in range(width if width > 1 else 0):
        rows = _rows(session, prompt, tokens, width, offset, options)
        for logits, pair, values in zip(rows, pairs, alone, strict=True):
            moved = logits[pair] - values
            noise = max(noise, abs(float(moved[0] - moved[1])))
    return WidthControl(gap, noise)


def _rows(
    session: Session,
    prompt: Prompt,
    tokens: list[int],
    width: int,
    offset: int,
    options: RunOptions,
) -> Iterator[Tensor]:
    """Logits [n_vocab] that choose each of the tokens: the prompt as in a run, then `offset` tokens
    in one batch, then batches of `width`."""
    memory = session.make_memory(options, 1, session.context([prompt], options), 0)
    n_prompt = len(prompt.tokens)
    spans = [Span(0, 0, prompt.tokens, [n_prompt - 1])]
    start, stop = 0, offset or width
    while start < len(tokens) - 1:
        batch = tokens[start : min(stop, len(tokens) - 1)]
        spans.append(Span(0, n_prompt + start, batch, range(len(batch))))
        start, stop = start + len(batch), start + len(batch) + width
    for span in spans:
        for ubatch in memory.split([span], options.n_ubatch, options.split):
            yield from session.model.forward(ubatch, memory).logits


STEP_KINDS = ("seq", "par")
"""seq: prompts one after another; par: all in parallel, in as many slots as there are."""

CONTROL = "control"
SPECULATION = "speculation"


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first different token. index: in the output, from 0. expected, got: token ids, None if
    that output has ended. top2_gap: gap of the two largest logits there in the first step; None if
    the output had ended."""

    index: int
    expected: int | None
    got: int | None
    top2_gap: float | None


@dataclass(frozen=True, slots=True)
class MatchResult:
    """One prompt in one step. lane: CONTROL or SPECULATION. n_tokens, n_characters: of the text.
    difference: None if equal. in_control: whether the control differs in this step too. width:
    effect of the batch width there, None if not measured: with a temperature, or if one output has
    ended."""

    prompt: str
    lane: str
    step: int
    kind: str
    n_tokens: int
    n_characters: int
    difference: TokenDifference | None
    in_control: bool
    width: WidthControl | None

    @property
    def is_explained(self) -> bool:
        """Whether something other than speculation explains the difference."""
        return self.in_control or (self.width is not None and self.width.is_tie)


@dataclass(frozen=True, slots=True)
class MatchStep:
    """One step of one lane and its duration in seconds. is_baseline: the reference step."""

    lane: str
    step: int
    kind: str
    seconds: float
    is_baseline: bool
    results: list[MatchResult]


_Output = tuple[list[int], str, list[float]]
"""Tokens, their text, and the gap of the two best logits at each."""


class MatchTest:
    """Runs the steps; `steps()` yields each when done, `passed` is the current verdict.

    prompts: names with prompts. kinds: at least one of STEP_KINDS, in order. options: of the lane
    under test; parallel is the number of slots of a par step. Raises OptionError for no or unknown
    steps, and what Session.context raises.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[tuple[str, Prompt]],
        options: RunOptions,
        kinds: Sequence[str],
    ) -> None:
        if not kinds or not set(kinds) <= set(STEP_KINDS):
            raise OptionError(
                f"The steps {','.join(kinds)} are not a list of {' and '.join(STEP_KINDS)}.",
                "Give for example seq,seq,par.",
            )
        session.context([prompt for _, prompt in prompts], options)
        self._session, self._prompts, self._kinds = session, list(prompts), list(kinds)
        self._lanes = {CONTROL: Configuration.plain(options).options}
        if options.spec.types:
            self._lanes[SPECULATION] = options
        self.options = options
        self._baseline: list[_Output] = []
        self._widths: dict[tuple[int, int, int], WidthControl] = {}
        self._control: dict[tuple[int, str], bool] = {}
        self.done: list[MatchStep] = []

    @property
    def lanes(self) -> tuple[str, ...]:
        """CONTROL, and SPECULATION if the options name a drafter."""
        return tuple(self._lanes)

    @property
    def differing(self) -> list[MatchResult]:
        """Differing results: with speculation, or of the control if nothing is drafted."""
        judged = self.lanes[-1]
        results = (result for step in self.done for result in step.results)
        return [r for r in results if r.lane == judged and r.difference is not None]

    @property
    def passed(self) -> bool:
        """Whether every difference is explained. With batch_invariant there must be none."""
        if self.options.batch_invariant:
            return not self.differing
        return all(result.is_explained for result in self.differing)

    def steps(self) -> Iterator[MatchStep]:
        """Each step, first without and then with speculation."""
        for number, kind in enumerate(self._kinds):
            for lane, options in self._lanes.items():
                start = perf_counter()
                outputs = self._decode(kind, options)
                seconds = perf_counter() - start
                is_baseline = not self._baseline
                if is_baseline:
                    self._baseline = outputs
                results = [
                    self._judge(lane, number, index, output) for index, output in enumerate(outputs)
                ]
                step = MatchStep(lane, number, kind, seconds, is_baseline, results)
                self.done.append(step)
                yield step

    def _decode(self, kind: str, options: RunOptions) -> list[_Output]:
        prompts = [prompt for _, prompt in self._prompts]
        batches = [prompts] if kind == "par" else [[prompt] for prompt in prompts]
        return [output for batch in batches for output in _outputs(self._run(batch, options))]

    def _run(self, prompts: list[Prompt], options: RunOptions) -> Run:
        run = self._session.start(prompts, options)
        run_to_end(run)
        return run

    def _judge(self, lane: str, step: int, index: int, output: _Output) -> MatchResult:
        name, (tokens, text, _) = self._prompts[index][0], output
        difference = first_difference(self._baseline[index], output)
        differs = difference is not None
        if lane == CONTROL:
            self._control[step, name] = differs
        return MatchResult(
            name,
            lane,
            step,
            self._kinds[step],
            len(tokens),
            len(text),
            difference,
            differs and self._control[step, name],
            self._width_control(index, difference),
        )

    def _width_control(self, index: int, difference: TokenDifference | None) -> WidthControl | None:
        options = self._lanes[CONTROL]
        if difference is None or difference.got is None or difference.expected is None:
            return None
        if options.sampler.temp > 0 or options.batch_invariant:
            return None
        key = index, difference.index, difference.got
        if key not in self._widths:
            self._widths[key] = width_control(
                self._session,
                self._prompts[index][1],
                self._baseline[index][0],
                difference.index,
                difference.got,
                self.options.spec.n_max + 1,
                options,
            )
        return self._widths[key]


def first_difference(expected: _Output, got: _Output) -> TokenDifference | None:
    """The first token in which two outputs differ, None if they are equal."""
    (tokens, _, gaps), (others, *_) = expected, got
    for i, (token, other, gap) in enumerate(zip_longest(tokens, others, gaps)):
        if token != other:
            return TokenDifference(i, token, other, gap)
    return None


def _outputs(run: Run) -> list[_Output]:
    """What every sequence emitted, and the top-2 gap of the logits that chose each token."""
    tokens = run.trace.tokens
    emitted = np.isin(tokens.texts("kind"), EMITTED_KINDS)
    seq_ids, top = tokens.column("seq_id"), tokens.column("target_top_p")
    outputs = []
    for result in run.results():
        rows = top[emitted & (seq_ids == result.seq_id)]
        outputs.append((result.tokens, result.text, [_gap(row) for row in rows]))
    return outputs


def _gap(probabilities: np.ndarray) -> float:
    """The gap of the two largest logits, from descending raw softmax probabilities."""
    tiniest = float(np.finfo(np.float32).smallest_subnormal)
    first, second = (max(float(p), tiniest) for p in probabilities[:2])
    return math.log(first) - math.log(second)
