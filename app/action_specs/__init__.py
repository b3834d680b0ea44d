"""Every action of the window, registered once: one module for each menu."""

from app.action_specs.file import FILE
from app.action_specs.go import GO
from app.action_specs.help import HELP
from app.action_specs.panels import PANELS
from app.action_specs.plot import PLOT
from app.action_specs.run import RUN
from app.action_specs.spec import ActionSpec
from app.action_specs.view import VIEW

__all__ = ["PANELS", "SPECS", "ActionSpec"]

SPECS: tuple[ActionSpec, ...] = (*FILE, *RUN, *GO, *VIEW, *PANELS, *PLOT, *HELP)
