"""The process that plays cells of a row of tests/bench/gpu_table.py: a line of JSON for each.

Arguments: a golden model, a device, and cells in order. It ends with the first that fails, as a
device may be lost with it.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

from engine.model.hybrid import HybridModel
from tests.support.gpu_cells import CELLS, Row

_LONGEST = 400


def main(name: str, device: str, *cells: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler may print, too
    n_passes, forward = 0, HybridModel.forward

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_passes
        n_passes += 1
        return forward(*args, **options)

    HybridModel.forward = counted  # type: ignore[method-assign]
    row = Row(name, device)
    for cell in cells:
        since, n_passes, error = perf_counter(), 0, ""
        try:
            CELLS[cell](row)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:_LONGEST]
        ms = 1000 * (perf_counter() - since)
        answer = {"ms": round(ms, 1), "passes": n_passes, "error": error}
        print(json.dumps(answer), file=answers, flush=True)
        if error:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
