"""Every action of the window, registered once."""

from app.actions.spec import FILE, GO, RUN, ActionSpec
from app.actions.view import HELP, PANELS, PLOT, VIEW

__all__ = ["PANELS", "SPECS", "ActionSpec"]

SPECS: tuple[ActionSpec, ...] = (*FILE, *RUN, *GO, *VIEW, *PANELS, *PLOT, *HELP)
