"""Estimating the speed of a run under other settings."""

from __future__ import annotations

from app.engine_thread.job import SideJob
from app.trace_models.tune_surface import SurfaceRequest, TuneSurface, estimate
from engine.progress import ReportProgress


class EstimateSpeeds(SideJob):
    """Estimate them for a request. found: None where the run has no draft, too."""

    found: TuneSurface | None = None

    def __init__(self, request: SurfaceRequest) -> None:
        super().__init__()
        self.request = request

    def run(self, progress: ReportProgress) -> None:
        self.found = estimate(self.request)
