"""What `draftscope tune --check-simulator` prints."""

from __future__ import annotations

from app.cli.tune import check_lines
from engine.experiments.tune.lengths import DraftSetting
from engine.experiments.tune.tune import SettingError


def test_lines_tell_the_errors_and_what_the_choice_cost() -> None:
    found = [
        SettingError(
            DraftSetting("draft-mtp", 2), (100.0, 90.0, 110.0), (104.0, 99.0, 99.0), 2.0, 2.0
        ),
        SettingError(DraftSetting("draft-mtp", 3), (80.0,) * 3, (120.0,) * 3, 2.5, 2.4),
        SettingError(DraftSetting("draft-mtp", 4), (90.0,) * 3, (99.0,) * 3, 2.5, 2.5),
    ]
    *_, errors, choice = check_lines("draft-mtp", found)
    assert errors == "median error: 10.0 % in speed, 0.0 % in tokens per round"
    assert choice == (
        "fastest: draft-mtp, n_max 2; by the simulator: draft-mtp, n_max 3, which ran at 80.0 % "
        "of the fastest"
    )
