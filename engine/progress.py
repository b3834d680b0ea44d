"""Telling how far a long piece of work is, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable

ReportProgress = Callable[[int, int, str], None]
"""Called with what is done, what there is to do (bytes or rows, in one unit), and what is being
done, such as "dequantising blk.12"."""


def report_part(progress: ReportProgress | None, start: int, total: int) -> ReportProgress | None:
    """Reports of one part of the work as reports of all of it.

    start: what was done before this part. total: what there is to do in all parts.
    """
    if progress is None:
        return None
    return lambda done, _, phase: progress(start + done, total, phase)
