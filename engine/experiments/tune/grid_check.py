"""How far a recommendation is from the best of a grid of real runs.

Every setting of the grid is run once, the faster half of them a second time, and the fastest of
those beside the recommended one and plain decoding in pairs: the fastest of a hundred noisy times
is mostly a lucky one, and only the pairs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.experiments.bench.request import PLAIN, Configuration
from engine.experiments.tune.confirm import Confirmed, SpeedComparison, compare, confirm
from engine.experiments.tune.lengths import DraftSetting, drafting, has_floor, has_length
from engine.experiments.tune.record import LONGEST
from engine.options import Prompt, RunOptions

if TYPE_CHECKING:
    from engine.session import Session

LENGTHS = (1, 2, 3, 4, 6, 8, 12)
FLOORS = (0.0, 0.3, 0.6)
_FINALISTS = 5


@dataclass(frozen=True, slots=True)
class GridCheck:
    """settings: of the whole grid, by name. grid: one run or two of each, plain decoding first.
    finalists: of the fastest and the recommended one, in pairs, plain decoding first. chosen: the
    name of what was recommended."""

    settings: dict[str, DraftSetting]
    grid: Sequence[Confirmed]
    finalists: Sequence[Confirmed]
    chosen: str

    @property
    def recommended(self) -> Confirmed:
        """What was recommended, among the finalists."""
        return next(one for one in self.finalists if one.name == self.chosen)

    @property
    def fastest(self) -> Confirmed:
        """The fastest of the finalists; of equal ones the recommended."""
        return max(self.finalists, key=lambda one: (one.median, one.name == self.chosen))

    @property
    def share(self) -> float:
        """Speed of the recommended one over that of the fastest."""
        return self.recommended.median / self.fastest.median

    @property
    def against_fastest(self) -> SpeedComparison | None:
        """The recommended one against the fastest, pair by pair; None where they are the same."""
        if self.fastest is self.recommended:
            return None
        return compare(self.recommended, self.fastest)


def grid_settings(drafters: Sequence[str], rates: Sequence[float] = ()) -> list[DraftSetting]:
    """Every length and floor of every drafter. rates: of synthetic acceptance, which no floor
    knows; as many as the longest draft has tokens."""
    longest = len(rates) or LONGEST
    return [
        DraftSetting(drafter, n, p)
        for drafter in filter(has_length, drafters)
        for n in LENGTHS
        for p in (FLOORS if has_floor(drafter) and not rates else FLOORS[:1])
        if n <= longest
    ]


def check_grid(
    session: Session,
    prompts: Sequence[Prompt],
    base: RunOptions,
    drafters: Sequence[str],
    chosen: DraftSetting | None,
    *,
    pairs: int,
    rates: Sequence[float] = (),
    report: Callable[[str], None] = lambda what: None,
) -> GridCheck:
    """Run the grid, then its fastest and the recommended setting. base: options but for
    speculation. chosen: None for plain decoding. Raises what Session.start raises."""
    settings = {one.name: one for one in grid_settings(drafters, rates)}
    if chosen is not None:
        settings.setdefault(chosen.name, chosen)

    def configurations(names: Sequence[str]) -> list[Configuration]:
        drafted = (Configuration(n, drafting(base, settings[n], rates=rates)) for n in names)
        return [Configuration.plain(base), *drafted]

    report(f"a grid of {len(settings)} settings, a real run of each")
    grid = confirm(session, prompts, configurations(list(settings)), 1)
    half = [one.name for one in _fastest_first(grid[1:])[: (len(grid) + 1) // 2]]
    report(f"the faster {len(half)} once more")
    grid = _joined(grid, confirm(session, prompts, configurations(half), 1))
    drafted = _fastest_first([one for one in grid[1:] if one.name in half])
    names = [one.name for one in drafted[:_FINALISTS]]
    if chosen is not None and chosen.name not in names:
        names.append(chosen.name)
    report(f"the fastest {len(names)}, {pairs} real runs each")
    finalists = confirm(session, prompts, configurations(names), pairs)
    return GridCheck(settings, grid, finalists, chosen.name if chosen else PLAIN)


def _fastest_first(measured: Sequence[Confirmed]) -> list[Confirmed]:
    """By the better of their runs."""
    return sorted(measured, key=lambda one: -max(one.speeds))


def _joined(first: Sequence[Confirmed], again: Sequence[Confirmed]) -> list[Confirmed]:
    """The first runs with those of the ones that were run again."""
    more = {one.name: one for one in again}
    return [
        replace(
            one,
            speeds=(*one.speeds, *more[one.name].speeds),
            runs=(*one.runs, *more[one.name].runs),
        )
        if one.name in more
        else one
        for one in first
    ]
