"""How long compiled kernels run, apart from what is done between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from kernels.llvm.program import Launch, watched


class KernelClock:
    """seconds: so long this thread has been inside of compiled kernels."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the context, kernels of this thread are timed; half a microsecond each."""
        with watched(self._run):
            yield

    def _run(self, launch: Launch) -> None:
        start = perf_counter()
        launch.run()
        self.seconds += perf_counter() - start
