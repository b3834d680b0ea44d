"""Draft lengths: options of a run with one drafter, and what the rounds of a server predict for
lengths that were not measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from engine.analysis.what_if.recorded import RecordedRounds
from engine.analysis.what_if.rules import FIXED
from engine.analysis.what_if.surface import simulate
from engine.draft.registry import DRAFTERS
from engine.options import RunOptions
from engine.trace.facts import SourceFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

LOOK_UPS = ("ngram-mod", "suffix")
"""Drafters without a model, tried in addition to those that the files allow."""


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """What a user would set. p_min: 0 for drafters that look tokens up."""

    drafter: str
    n_max: int
    p_min: float = 0.0

    @property
    def name(self) -> str:
        """For tables."""
        floor = f", p_min {self.p_min:g}" if self.p_min else ""
        return f"{self.drafter}, n_max {self.n_max}{floor}"


def has_length(drafter: str) -> bool:
    """Whether a drafter's longest draft can be set."""
    spec = DRAFTERS[drafter]
    return bool(spec.needs) or bool(spec.field)


def has_floor(drafter: str) -> bool:
    """Whether --spec-draft-p-min affects a drafter."""
    return DRAFTERS[drafter].needs is not None


def length_options(setting: DraftSetting) -> dict[str, Any]:
    """The options that set a drafter's length: values by field."""
    spec = DRAFTERS[setting.drafter]
    if spec.needs:
        return {"n_max": setting.n_max, "p_min": setting.p_min, "n_min": 0}
    known = {field.name for field in fields(spec.options)}
    found: dict[str, Any] = {"size_m" if "size_m" in known else "n_max": setting.n_max}
    if "n_min" in known:
        found["n_min"] = 0
    return found


def drafting(
    base: RunOptions,
    setting: DraftSetting,
    *,
    verify_max: int | None = None,
    rates: Sequence[float] = (),
) -> RunOptions:
    """The options with this drafter alone. rates: of synthetic acceptance for the longest draft; as
    many as this draft has tokens are used. Raises OptionError for a length out of range."""
    spec, values = DRAFTERS[setting.drafter], length_options(setting)
    if spec.field:
        part = replace(getattr(base.spec, spec.field), **values)
        values = {spec.field: part}
    return replace(
        base,
        parallel=1,
        spec=replace(
            base.spec,
            types=(setting.drafter,),
            verify_max=verify_max,
            synth_rates=tuple(rates[: setting.n_max]),
            **values,
        ),
    )


ServerRounds = Sequence[Sequence[tuple[int, int]]]
"""Tokens drafted and accepted in each round, by answer."""
_FEW = 24
"""Fewest drafts that predict anything."""
_ROUND = (
    *("round", "seq_id", "num_draft_tokens", "num_accepted_draft_tokens"),
    *("num_emitted", "verify_width"),
)


TokensPerRound = Callable[[Sequence[int]], Sequence[float]]
"""Mean tokens per round at each n_max, 0 for plain decoding."""


def recorded(answers: ServerRounds, rates: Sequence[float] = ()) -> TokensPerRound | None:
    """What the simulator predicts from recorded rounds; None if there are too few drafts. rates: of
    synthetic acceptance, which decide it alone."""
    if rates:
        return lambda lengths: [1 + sum(rates[:n]) for n in lengths]
    if sum(drafted > 0 for rounds in answers for drafted, _ in rounds) < _FEW:
        return None
    store = TraceStore()
    writer = TraceWriter.begin(store, SourceFacts("server", ""), {})
    rows: list[Sequence[int | None]] = []
    for seq_id, rounds in enumerate(answers):
        rows.append((len(rows), seq_id, None, None, 1, None))  # the prompt
        for n, k in rounds:
            rows.append((len(rows), seq_id, n, k, k + 1, n + 1))
    writer.append_rows("rounds", _ROUND, [*chain.from_iterable(rows)])
    writer.end(["end"] * len(answers))
    known = RecordedRounds.of(RunRef(store, writer.run_id))

    def played(lengths: Sequence[int]) -> Sequence[float]:
        settings = [{"n_max": n} for n in lengths]
        found: list[float] = simulate(known, None, FIXED, settings).tokens_per_round().tolist()
        return found

    return played


def at_best(
    tokens_per_round: TokensPerRound, measured: Mapping[int, float], lengths: Iterable[int]
) -> dict[int, float]:
    """Upper bound of tokens per second at each n_max. measured: known speeds by n_max, 0 for plain
    decoding. They give the cost of a round by its width of verification. An unmeasured round is
    assumed to cost as much as the dearest narrower one: kernels for few rows end at some width (8
    with llama.cpp's MMVQ), so that the cost may jump anywhere between two measured widths."""
    wanted = sorted({*lengths, *measured})
    per_round = dict(zip(wanted, tokens_per_round(wanted), strict=True))
    found, least_ms = {}, 0.0
    for n in wanted:
        if speed := measured.get(n):
            least_ms = max(least_ms, 1e3 * per_round[n] / speed)
        found[n] = measured.get(n) or (1e3 * per_round[n] / least_ms if least_ms else math.inf)
    return found
