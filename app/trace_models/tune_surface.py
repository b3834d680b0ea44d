"""The speed estimate over (n_max, p_min) for the run on show: request, result and texts; and heat
maps, tables of values shown as colours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PySide6.QtGui import QColor

from app.looks import Theme, mixed
from app.trace_models.shown_text import significant
from engine.analysis.run_cost import speed
from engine.analysis.what_if.recorded import LEAST_TIMES, RecordedRounds, RoundCosts
from engine.analysis.what_if.rules import FIXED, FLOORS, RULES
from engine.analysis.what_if.surface import ASSUMPTIONS, LEAST_GAIN, Surface, gain, surface
from engine.plain_text import counted
from engine.trace.run_ref import RunRef

MOST_ROUNDS = 4000
"""Most rounds used for an estimate, the newest ones."""
_ALL_UP_TO, _MOST_LENGTHS = 16, 20
_APART = 1.25
"""Ratio of measured and estimated speed from which the difference is reported."""
_FLOORED = ("fixed", "accepted-mean", "switch-off")
"""Rules affected by p_min."""


SurfaceRequest = tuple[RunRef, str]
"""A request for a run's estimated speed under one of RULES."""


@dataclass(frozen=True)
class TuneSurface:
    """surface: from n_rounds rounds. current: row and column of the run's own setting, None if it
    is not among them. recorded_floor: the run's p_min, below which nothing was recorded.
    rare_widths: requested verify widths that were timed only a few times. measured: the run's
    tokens per second, 0 for none. gain: of the best over the current setting
    (engine.analysis.what_if.surface)."""

    request: SurfaceRequest
    surface: Surface
    n_rounds: int
    current: tuple[int, int] | None
    recorded_floor: float
    rare_widths: tuple[int, ...]
    measured: float = 0.0
    gain: tuple[float, float] | None = None

    @property
    def is_timed(self) -> bool:
        """Whether there are speeds, or only tokens per round."""
        return self.surface.best is not None

    def setting(self, n: int, p: int) -> tuple[int, float]:
        """n_max and p_min of a cell."""
        return int(self.surface.n_max[n]), float(self.surface.p_min[p])


def estimate(request: SurfaceRequest) -> TuneSurface | None:
    """The surface of a run; None without drafts. Thread-safe."""
    run, rule_name = request
    rounds = RecordedRounds.of(run, newest=MOST_ROUNDS)
    if not rounds.n_drafts:
        return None
    own_n, own_p = recorded_setting(run)
    lengths = _lengths(rounds.n_max, own_n)
    floors = [0.0]
    if rounds.has_confidence and rule_name in _FLOORED:
        floors = sorted({own_p, *(p for p in FLOORS if p >= own_p)})
    rule, costs = RULES[rule_name], RoundCosts.measured(rounds)
    found = surface(rounds, costs, n_max=lengths, p_min=floors, rule=rule)
    if found is None:
        return None
    current = None
    if rule is FIXED and own_n in lengths and own_p in floors:
        current = lengths.index(own_n), floors.index(own_p)
    rare, measured = _rare(costs, lengths[-1] + 1), speed(run.store, run.run_id)
    estimated = TuneSurface(request, found, len(rounds), current, own_p, rare, measured)
    if current is None or found.best is None or found.best == current:
        return estimated
    if _is_guess(estimated, found.best):
        return estimated
    settings = [estimated.setting(*cell) for cell in (found.best, current)]
    best, now = ({"n_max": n, "p_min": p} for n, p in settings)
    return replace(estimated, gain=gain(rounds, best, now))


def _rare(costs: RoundCosts | None, widest: int) -> tuple[int, ...]:
    if costs is None:
        return ()
    passes = zip(costs.verify.at.tolist(), costs.verify.n.tolist(), strict=True)
    return tuple(width for width, n in passes if width <= widest and n < LEAST_TIMES)


def recorded_setting(run: RunRef) -> tuple[int, float]:
    """The effective n_max and p_min, 0 if unknown."""
    spec = run.facts.options.spec if run.facts.options else None
    return (spec.n_max, min(max(spec.p_min, 0.0), 1.0)) if spec else (0, 0.0)


def _lengths(longest: int, own: int) -> list[int]:
    """Draft lengths to estimate: all, or a spaced selection."""
    if longest <= _ALL_UP_TO:
        return list(range(1, longest + 1))
    more = np.geomspace(_ALL_UP_TO // 2, longest, _MOST_LENGTHS - _ALL_UP_TO // 2 + 1)
    chosen = {*range(1, _ALL_UP_TO // 2 + 1), *np.round(more).astype(int).tolist()}
    return sorted(chosen | ({own} if 0 < own <= longest else set()))


def heat_map(found: TuneSurface) -> HeatMap:
    """Tokens per second, or per round if the run was not timed; n_max to the right, p_min up."""
    one = found.surface
    values = (one.tokens_per_second if found.is_timed else one.tokens_per_round).T
    marks = {}
    best = found.surface.best
    if best is not None and _is_shown(found):
        marks[BEST] = (best[1], best[0])
    if found.current is not None:
        marks[CURRENT] = (found.current[1], found.current[0])
    return HeatMap(
        "n_max",
        "p_min",
        tuple(map(str, one.n_max.tolist())),
        tuple(f"{p:g}" for p in one.p_min.tolist()),
        values,
        tuple(tuple(significant(_known(v)) for v in row) for row in values.tolist()),
        marks,
    )


def _is_guess(found: TuneSurface, cell: tuple[int, int]) -> bool:
    """Whether the passes that a setting needs were timed too rarely."""
    return int(found.surface.n_max[cell[0]]) + 1 in found.surface.unmeasured_widths


def _is_shown(found: TuneSurface) -> bool:
    """Whether the best setting is reported as such: the low end of its gain is at least LEAST_GAIN,
    or it is the current one; without a current one, its passes were timed."""
    best = found.surface.best
    if best is None or found.current == best:
        return True
    if found.current is None:
        return not _is_guess(found, best)
    differs = _speed(found, found.current) != _speed(found, best)
    return differs and found.gain is not None and found.gain[0] >= LEAST_GAIN


def headline(found: TuneSurface) -> str:
    """The best setting against the current one and plain decoding."""
    best = found.surface.best
    if best is None:
        why = "a lane's speed is not measured" if found.request[0].facts.lane else "not timed"
        return f"Tokens per round: {why}"
    words = f"Best estimate: {_setting(found, best)} → {_speed(found, best)}"
    highest = words.replace("Best", "Highest", 1)
    if found.current is None:
        return words if _is_shown(found) else f"No verdict: too few passes were timed. {highest}"
    now = f"{_setting(found, found.current)} → {_speed(found, found.current)}"
    if _is_apart(found):
        now += f" in usual rounds, {significant(found.measured)} in all"
    if _speed(found, found.current) == _speed(found, best):
        return f"No setting is estimated to be faster than the current one: {now}"
    if found.gain is None:
        return f"No verdict: too few rounds or passes were timed. {highest}. Now: {now}"
    low, high = found.gain
    if _is_shown(found):
        return f"{words}, {low:.2f} to {high:.2f} times now. Now: {now}"
    return (
        f"No significant difference: {_setting(found, best)} has {low:.2f} to {high:.2f} times "
        f"the current speed. Now: {now}"
    )


def note(found: TuneSurface) -> str:
    """What the estimate is based on."""
    rounds = counted(found.n_rounds, "round")
    words = f"Estimated from {rounds}, the range from the costs of each quarter.{_measured(found)}"
    if rare := found.rare_widths:
        words += f" Passes of {_listed(rare)} tokens were timed fewer than {LEAST_TIMES} times."
    if missing := found.surface.unmeasured_widths:
        words += f" Passes of {_listed(missing)} tokens were not timed {LEAST_TIMES} times: "
        words += "their costs are those of the nearest widths."
    if found.recorded_floor > 0:
        words += f" Below p_min {found.recorded_floor:g} nothing was recorded."
    return f"{words} Assumed: {'; '.join(ASSUMPTIONS)}."


def _measured(found: TuneSurface) -> str:
    """The run's own speed if it differs from the estimate, or why a lane has none."""
    if found.request[0].facts.lane:
        return " Lanes share their drafts, so their speed is not measured."
    if not _is_apart(found):
        return ""
    return (
        f" The run itself had {significant(found.measured)} tok/s: rounds that took much longer "
        "than others are left out here."
    )


def _is_apart(found: TuneSurface) -> bool:
    if found.current is None or not found.is_timed or not found.measured:
        return False
    estimated = float(found.surface.tokens_per_second[found.current])
    return not 1 / _APART < estimated / found.measured < _APART


def _listed(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths[:8])) + (" …" if len(widths) > 8 else "")


def readout(found: TuneSurface, n: int, p: int) -> str:
    """All figures of a cell."""
    one = found.surface
    parts = [_setting(found, (n, p))]
    if found.is_timed:
        parts.append(_speed(found, (n, p)))
    parts.append(f"acceptance {significant(_known(one.acceptance[n, p]))}")
    parts.append(f"{significant(_known(one.tokens_per_round[n, p]))} tokens/round")
    if found.is_timed:
        draft, verify, rest = (
            significant(_known(ms[n, p])) for ms in (one.draft_ms, one.verify_ms, one.rest_ms)
        )
        parts.append(f"draft {draft} + verify {verify} + rest {rest} ms")
    return " · ".join(parts)


def rows(found: TuneSurface) -> tuple[list[str], list[list[object]]]:
    """Every cell as numbers; None = unknown."""
    one = found.surface
    columns: dict[str, Any] = {
        "tokens_per_second": one.tokens_per_second,
        "acceptance": one.acceptance,
        "tokens_per_round": one.tokens_per_round,
        "draft_ms": one.draft_ms,
        "verify_ms": one.verify_ms,
        "rest_ms": one.rest_ms,
    }
    cells = np.ndindex(*one.tokens_per_second.shape)
    return ["n_max", "p_min", *columns], [
        [*found.setting(n, p), *(_known(values[n, p]) for values in columns.values())]
        for n, p in cells
    ]


def _setting(found: TuneSurface, cell: tuple[int, int]) -> str:
    n_max, p_min = found.setting(*cell)
    return f"n_max {n_max}, p_min {p_min:g}" if len(found.surface.p_min) > 1 else f"n_max {n_max}"


def _speed(found: TuneSurface, cell: tuple[int, int]) -> str:
    speed = _known(found.surface.tokens_per_second[cell])
    times = _known(found.surface.speed_up[cell])
    words = f"{significant(speed)} tok/s"
    return words if times is None else f"{words}, {times:.2f}× plain"


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


BEST, CURRENT = "best", "current"
_LEAST = 0.1
"""Colour strength of the lowest value."""


@dataclass(frozen=True)
class HeatMap:
    """values: float [n_y, n_x], NaN if missing; row 0 is at the bottom. y_name: empty for a single
    unnamed row. texts: of the cells, [n_y][n_x]. marks: BEST or CURRENT by (row, column); a cell
    may have both. grounds: theme colours of the cells, [n_y][n_x], overriding those by value."""

    x_name: str
    y_name: str
    x_labels: tuple[str, ...]
    y_labels: tuple[str, ...]
    values: np.ndarray
    texts: tuple[tuple[str, ...], ...]
    marks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    grounds: tuple[tuple[str, ...], ...] = ()

    def place(self, row: int, column: int) -> str:
        """A cell's place in words."""
        across = f"{self.x_name} {self.x_labels[column]}"
        return f"{across}, {self.y_name} {self.y_labels[row]}" if self.y_name else across

    @property
    def shares(self) -> np.ndarray:
        """Each value scaled to 0 (lowest) … 1 (highest); NaN if missing."""
        known = self.values[np.isfinite(self.values)]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        if high <= low:
            return np.where(np.isfinite(self.values), 1.0, np.nan)
        shares: np.ndarray = (self.values - low) / (high - low)
        return shares


def cell_colours(theme: Theme, share: float, name: str = "") -> tuple[QColor, QColor]:
    """Background and text colour of a cell; the background blends into the accent, or has a
    name."""
    ground = theme.color(name or "plot.background")
    if not name:
        ground = mixed(ground, theme.color("ui.accent"), _LEAST + (1 - _LEAST) * share)
    inks = QColor("black"), QColor("white")  # on any background one of them has 4.5 : 1
    return ground, max(inks, key=lambda ink: contrast(ink, ground))


def contrast(one: QColor, other: QColor) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: QColor) -> float:
    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    r, g, b = map(linear, (colour.redF(), colour.greenF(), colour.blueF()))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
