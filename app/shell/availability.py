"""Which actions can do something now."""

from __future__ import annotations

from app.actions.actions import Actions
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.models.compared_lanes import lanes_of
from app.shell.menus import ScenarioMenu
from app.shell.panels import Panels
from engine.trace.run_ref import RunRef

_NEED_RUN = (
    "file.copy_step",
    "go.previous_round",
    "go.next_round",
    "go.inspect",
    "go.find",
    "go.find_next",
    "go.find_previous",
)


def enable_actions(
    actions: Actions, bridge: Bridge, shown: RunRef | None, panels: Panels, scenarios: ScenarioMenu
) -> None:
    """Enable what the bridge and the run on show allow, disable the rest."""
    state, diverges = bridge.state, panels.has_divergences
    going = bridge.can_start or state is State.PAUSED
    single = bridge.has_run and bridge.live is not None and not lanes_of(bridge.live)
    panels.tokens.set_cancellable(bridge.live if single else None)
    for action_id, enabled in (
        ("run.start", going),
        ("run.step", going),
        ("run.pause", state is State.RUNNING),
        ("run.stop", bridge.has_run),
        ("run.compare", bridge.can_start),
        ("run.measure_fidelity", bridge.can_start),
        ("go.first_divergence", diverges),
        ("go.next_divergence", diverges),
        ("go.previous_divergence", diverges),
        ("file.open_draft", bridge.files is not None),
        ("file.export", shown is not None and not bridge.exporting),
        ("file.copy_text", shown is not None),
        *((name, shown is not None) for name in _NEED_RUN),
        ("file.copy_issue", shown is not None),
        ("file.open_trace", not bridge.reading),
        ("file.close_trace", bridge.trace_folder is not None),
    ):
        actions[action_id].setEnabled(enabled)
    scenarios.setEnabled(bridge.can_start)
    actions["run.start"].setText("&Resume" if state is State.PAUSED else "&Run")
