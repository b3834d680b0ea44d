"""What the comparison says of a lane without faults.

Up to eight tokens of a pass have the bits they have alone, where kernels run through LLVM: such a
lane is exact. Wider passes sum in another order, and leave it within the noise.
"""

from __future__ import annotations

PASSED = ("exact", "within")


def passed(verdict: str) -> str:
    """A verdict without that difference."""
    return "passed" if verdict in PASSED else verdict
