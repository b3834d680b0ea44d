"""Writing a report: on a run, on it and a second one, or on the lanes of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from app.engine_thread.job import SideJob
from app.trace_models.run_comparison import compare_runs, text_difference
from app.trace_models.run_facts import run_names
from engine.progress import ReportProgress
from engine.report.parts import Report
from engine.trace.run_ref import RunRef


class WriteReport(SideJob):
    """Write it into a file. runs: the run, or the lanes. overlaid: the second run."""

    is_complete = False

    def __init__(
        self,
        runs: Sequence[RunRef],
        path: Path,
        environment: Mapping[str, str],
        overlaid: RunRef | None = None,
    ) -> None:
        super().__init__()
        self._runs, self._overlaid = runs, overlaid
        self.path, self._environment = path, environment

    def run(self, progress: ReportProgress) -> None:
        from engine.report.compare import compare_report
        from engine.report.run import run_report
        from engine.report.write import write_report

        first = self._runs[0]
        if self._overlaid is not None:
            report = _report_on_two((first, self._overlaid), self._environment)
        elif first.facts.lane:
            report = compare_report(self._runs, self._environment)
        else:
            report = run_report(first, self._environment)
        write_report(report, self.path)
        self.is_complete = True


def _report_on_two(runs: tuple[RunRef, RunRef], environment: Mapping[str, str]) -> Report:
    from engine.report.pair import pair_report

    figures = [
        (pair.label, pair.text(0), pair.text(1), pair.ratio_text) for pair in compare_runs(*runs)
    ]
    return pair_report(runs, run_names(*runs), figures, text_difference(*runs), environment)
