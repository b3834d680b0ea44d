"""Every action of the window, registered once, in one module for each menu (plots and help stand
with view).
"""

from app.actions.file import FILE
from app.actions.go import GO
from app.actions.panels import PANELS
from app.actions.run import RUN
from app.actions.spec import ActionSpec
from app.actions.view import HELP, PLOT, VIEW

__all__ = ["PANELS", "SPECS", "ActionSpec"]

SPECS: tuple[ActionSpec, ...] = (*FILE, *RUN, *GO, *VIEW, *PANELS, *PLOT, *HELP)
