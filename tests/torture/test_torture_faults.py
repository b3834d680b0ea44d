"""Every stage can fail in everything that the program does, and each of them comes in turn."""

from __future__ import annotations

from tests.torture.campaigns.faults import CAMPAIGN, every_place
from tests.torture.fault import ERRORS, STAGES, Fault
from tests.torture.idle_acts import ACTS


def test_every_place_is_drawn_in_turn() -> None:
    places = every_place()
    doings = {doing for doing, _ in places}
    assert doings == STAGES.keys() | {f"idle: {name}" for name in ACTS}
    assert (
        len(set(places))
        == len(places)
        == sum(len(own) for own in (*STAGES.values(), *(act.stages for act in ACTS.values())))
    )
    drawn = [CAMPAIGN.case(7, number) for number in range(len(places))]
    assert {(case["doing"], case["stage"]) for case in drawn} == set(places)


def test_every_stage_is_a_function_of_the_program() -> None:
    for stage in {stage for _, stage in every_place()}:
        for error in ERRORS:
            fault = Fault(stage, error, 0)
            with fault:
                assert not fault.struck
