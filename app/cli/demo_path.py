"""`draftscope demo-path`: paths of the bundled models."""

from __future__ import annotations

import argparse

from app.cli.output import print_report
from engine.errors import DraftscopeError
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET


def run(args: argparse.Namespace) -> int:
    """Print the paths of target, draft model and EAGLE-3 drafter."""
    for path in (DEMO_TARGET, DEMO_DRAFT, DEMO_EAGLE3):
        if not path.is_file():
            raise DraftscopeError(f"{path} is missing.", "Install Draftscope again.")
    files = {"target": DEMO_TARGET, "draft": DEMO_DRAFT, "eagle3": DEMO_EAGLE3}
    paths = {name: str(path) for name, path in files.items()}
    print_report(args, paths, paths.values())
    return 0
