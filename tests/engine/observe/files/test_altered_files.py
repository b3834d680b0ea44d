"""Files of other engines, altered: imported and opened again, or refused in a sentence."""

from __future__ import annotations

import os
import resource
import traceback
from pathlib import Path

from tests.support.altered_files import altered, bases
from tests.support.played_import import play

N_SEEDS = 64
# what they import is then imported in every child
_FIRST = ("vllm-metrics.prom", "vllm-summary.json", "mtp.json", "mtp-0.sse", "mtp.log")
_MOST_CPU_S = 60
_MOST_BYTES = 3 << 30


def test_altered_files_are_read_or_refused(tmp_path: Path) -> None:
    for name in _FIRST:
        (tmp_path / name).mkdir()
        play(bases()[name], tmp_path / name)
    faults = []
    for seed in range(N_SEEDS):
        name, data = altered(seed)
        if fault := _played(data, tmp_path / str(seed)):
            faults.append(f"seed {seed} ({name}): {fault}")
    assert not faults, "\n".join(faults)


def _played(data: bytes, folder: Path) -> str:
    """What went wrong in a child with limits of its own, empty if nothing did."""
    folder.mkdir()
    said = folder / "fault"
    # what the process of all tests holds by now is not the reader's
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S + 5))
        most = _MOST_BYTES + held
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            play(data, folder)
        except BaseException:
            said.write_text(traceback.format_exc())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if said.exists():
        return said.read_text()
    return f"ended with status {status}" if status else ""
