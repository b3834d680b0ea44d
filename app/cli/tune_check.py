"""`draftscope tune --check-simulator` and `--check-grid`: what was simulated, and what was
recommended, compared with real runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from app.cli.output import json_text, print_lines
from engine.experiments.tune.lengths import has_floor
from engine.files import written_whole

if TYPE_CHECKING:
    from engine.experiments.tune.checks import GridCheck, SettingError
    from engine.experiments.tune.confirm import Confirmed
    from engine.options import Prompt, RunOptions
    from engine.session import Session

_LINE = "{:<{width}} {:>10} {:>10} {:>7} {:>12} {:>12} {:>7}"


def check(
    args: argparse.Namespace,
    session: Session,
    texts: Sequence[Prompt],
    base: RunOptions,
    drafters: Sequence[str],
    tell: Callable[[str], None],
) -> None:
    """Measure, print, and write where --json says. Of the drafters, those that have a floor."""
    from engine.experiments.tune.checks import simulator_error
    from engine.machine.environment import environment

    data: dict[str, Any] = {
        "kind": "draftscope simulator check",
        "version": 1,
        "model": session.identity,
        "environment": environment(),
        "options": asdict(base),
        "drafters": {},
    }
    for drafter in filter(has_floor, drafters):
        found = simulator_error(
            session,
            texts,
            base,
            drafter,
            repeats=args.pairs,
            rates=args.spec_synth_rates,
            report=tell,
        )
        print_lines(check_lines(drafter, found))
        data["drafters"][drafter] = [asdict(one) for one in found]
    if args.json is not None:
        text = json_text(data) + "\n"
        with written_whole(args.json) as part:
            part.write_text(text, encoding="utf-8")
        tell(f"results written to {args.json}")


def check_lines(drafter: str, found: Sequence[SettingError]) -> Iterator[str]:
    """One line for each setting, the medians of the errors, and what following the simulator would
    have cost."""
    width = max(len(one.setting.name) for one in found)
    yield _LINE.format(
        drafter, "tok/s", "simulated", "error", "tok/round", "simulated", "error", width=width
    )
    for one in found:
        yield _LINE.format(
            one.setting.name,
            f"{median(one.real):.1f}",
            f"{median(one.simulated):.1f}",
            f"{100 * one.error:+.1f} %",
            f"{one.real_per_round:.3f}",
            f"{one.simulated_per_round:.3f}",
            f"{100 * one.error_per_round:+.1f} %",
            width=width,
        )
    speed = median(abs(one.error) for one in found)
    per_round = median(abs(one.error_per_round) for one in found)
    yield f"median error: {100 * speed:.1f} % in speed, {100 * per_round:.1f} % in tokens per round"
    best = max(found, key=lambda one: median(one.real))
    chosen = max(found, key=lambda one: median(one.simulated))
    yield (
        f"fastest: {best.setting.name}; by the simulator: {chosen.setting.name}, which ran at "
        f"{100 * median(chosen.real) / median(best.real):.1f} % of the fastest"
    )


def grid_lines(found: GridCheck) -> Iterator[str]:
    """The finalists from the fastest on, and how far the recommended one is from the best."""
    width = max(len(one.name) for one in found.finalists)
    yield f"grid of {len(found.settings)} settings; its fastest, and the recommended one, in pairs:"
    for one in sorted(found.finalists, key=lambda one: -one.median):
        low, high = min(one.speeds), max(one.speeds)
        mark = "  recommended" if one.name == found.chosen else ""
        yield f"  {one.name:<{width}} {one.median:>9.1f} tok/s ({low:.1f} to {high:.1f}){mark}"
    against = found.against_fastest
    words = "it is the fastest" if against is None else against.words
    yield f"recommended: {found.chosen}, at {100 * found.share:.1f} % of the fastest; {words}"


def grid_data(found: GridCheck) -> dict[str, Any]:
    """The same for a file."""

    def speeds(all_of: Sequence[Confirmed]) -> dict[str, list[float]]:
        return {one.name: list(one.speeds) for one in all_of}

    return {
        "chosen": found.chosen,
        "fastest": found.fastest.name,
        "share": found.share,
        "grid": speeds(found.grid),
        "finalists": speeds(found.finalists),
    }
