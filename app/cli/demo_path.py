"""`draftscope demo-path`: where the bundled models are."""

from __future__ import annotations

import argparse

from app.cli.output import print_report
from engine.errors import DraftscopeError
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET


def run(args: argparse.Namespace) -> int:
    """Print the target's path, then the draft model's and the EAGLE-3 drafter's."""
    for path in (DEMO_TARGET, DEMO_DRAFT, DEMO_EAGLE3):
        if not path.is_file():
            raise DraftscopeError(f"{path} is missing.", "Install Draftscope again.")
    files = {"target": DEMO_TARGET, "draft": DEMO_DRAFT, "eagle3": DEMO_EAGLE3}
    paths = {name: str(path) for name, path in files.items()}
    print_report(args, paths, paths.values())
    return 0
