"""Plays a campaign for a time, and keeps what fails as small as it can be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.torture import awake, corpus
from tests.torture.campaign import Campaign, Case
from tests.torture.children import Outcome, first_trouble, play
from tests.torture.report import Report
from tests.torture.smallest import smallest

_SMALLEST_S = 60.0


def campaign_for(
    campaign: Campaign,
    seed: int,
    seconds: float,
    scratch: Path,
    keep: Path | None,
    n_least: int | None = None,
) -> Report:
    """Play cases of a campaign that is prepared until the time is over, n_least at least, None =
    the campaign's own number.

    keep: where failures are written, None = nowhere: the first of them ends it.
    """
    start = awake.now()
    report, number = Report(campaign, seed), 0
    n_all = campaign.n_all or sys.maxsize
    least = min(n_all, campaign.n_least if n_least is None else n_least)
    while number < least or (awake.now() - start < seconds and number < n_all):
        if keep is None and report.failures:
            break
        n_next = min(campaign.batch, n_all - number)
        cases = [campaign.case(seed, number + i) for i in range(n_next)]
        n = 0
        for outcome in play(campaign, cases, scratch):
            report.count(outcome)
            n += 1
            if outcome.trouble and outcome.signature not in report.failures:
                drawn = (seed, number + n - 1)
                where = keep and _keep(campaign, drawn, cases[:n], outcome, scratch, keep)
                report.failures[outcome.signature] = f"{outcome.trouble}\n{where or ''}"
        number += n
    report.seconds = round(awake.now() - start, 1)
    return report


def _keep(
    campaign: Campaign,
    seed: tuple[int, int],
    cases: list[Case],
    outcome: Outcome,
    scratch: Path,
    keep: Path,
) -> str:
    """Make a failure small and write it. Returns where, and what it reported."""

    def fails(before: list[Case]) -> Callable[[Case], bool]:
        return lambda case: (
            first_trouble(campaign, [*before, case], scratch).signature == outcome.signature
        )

    before = [] if fails([])(cases[-1]) else cases[:-1]
    last = cases[-1]
    if not before:
        last = smallest(last, fails([]), min(_SMALLEST_S, 20 * campaign.seconds))
    entry = corpus.Entry(campaign.name, seed, outcome.trouble, [*before, last])
    return f"{corpus.save(keep, entry)}\n{outcome.told}"
