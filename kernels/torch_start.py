"""torch without a part of it that takes a third of the time to import it, and is not used here.

`torch._meta_registrations` holds the Python kernels for tensors without data, which compilers of
whole models trace with; it brings torch's decompositions with it. It is left out while torch is
imported, and is itself again for whoever imports it afterwards.
"""

from __future__ import annotations

import sys
from types import ModuleType

_NAME = "torch._meta_registrations"
_nothing = ModuleType(_NAME)


def leave_out() -> None:
    """Before torch is imported; later it has no effect."""
    if "torch" not in sys.modules:
        sys.modules[_NAME] = _nothing


def put_back() -> None:
    """Once torch is imported."""
    if sys.modules.get(_NAME) is _nothing:
        del sys.modules[_NAME]
