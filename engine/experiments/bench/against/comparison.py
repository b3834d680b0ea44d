"""The whole comparison: works in turn, pair by pair, then what the pairs come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.experiments.bench.against.llama_bench import LlamaBench
from engine.experiments.bench.against.llama_server import SpeculativeWork, llama_server
from engine.experiments.bench.against.our_side import OwnPasses, own_request
from engine.experiments.bench.against.pairs import Pair, PairedRatio, paired_ratio, take_turns
from engine.experiments.bench.against.programs import find_program
from engine.experiments.bench.against.tasks import PLAIN, PassWork
from engine.options import RunOptions
from tests.bench.kernels.measure import copy_rate
from tests.bench.kernels.sizes import Sizes

if TYPE_CHECKING:
    from engine.session import Session

SPECULATIVE = "draft-mtp"
BETTER = f"{SPECULATIVE}, better"
"""The same figures of ours against the better of llama.cpp's plain and speculative decoding."""
_COPIES = 5


@dataclass(slots=True)
class AgainstReport:
    """pairs: what was measured so far, by name of the work. acceptance: of each pair, (theirs,
    ours). build: that of llama-bench."""

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    acceptance: list[tuple[float, float]] = field(default_factory=list)
    build: str = ""

    def rows(self) -> dict[str, PairedRatio]:
        """Every work's ratios, and BETTER once there are figures of speculation."""
        found = {name: paired_ratio(pairs) for name, pairs in self.pairs.items()}
        if SPECULATIVE in found:
            theirs = found[PLAIN].theirs
            found[BETTER] = paired_ratio(
                [
                    Pair(max(pair.theirs, theirs), pair.ours, pair.idle_share)
                    for pair in self.pairs[SPECULATIVE]
                ]
            )
        return found

    @property
    def idle_share(self) -> float:
        """The most of a core that this process used while it waited."""
        return max((pair.idle_share for pairs in self.pairs.values() for pair in pairs), default=0)


class Against:
    """A session's model against a build of llama.cpp on the same file and as many threads.

    folder: of the build, None = $PATH. works: forward passes. speculative: None leaves it out.
    options: the rest of what its runs are decoded with. Raises OptionError where a program is
    missing.
    """

    def __init__(
        self,
        session: Session,
        folder: Path | None,
        works: Sequence[PassWork],
        speculative: SpeculativeWork | None,
        options: RunOptions,
        n_pairs: int,
    ) -> None:
        self._session, self._folder, self._n_pairs = session, folder, n_pairs
        self._works, self._speculative, self._options = works, speculative, options
        self._n_threads = torch.get_num_threads()
        self._bench = LlamaBench(folder, session.unchanged_path(), self._n_threads)
        if speculative is not None:
            find_program(folder, "llama-server")
        self.report = AgainstReport()

    @property
    def n_steps(self) -> int:
        """How often `steps` yields."""
        return self._n_pairs * (len(self._works) + (self._speculative is not None))

    def steps(self) -> Iterator[str]:
        """Measure; the report grows. Yields the name of what was done, pair by pair.

        Raises PeerLibraryError, and what Session.start raises.
        """
        depth = max(work.depth for work in self._works)
        own = OwnPasses(self._session.model, depth, max(work.n_tokens for work in self._works))
        for number in range(self._n_pairs):
            for work in self._works:
                self._pass_pair(number, work, own)
                yield work.name
        if self._speculative is not None:
            yield from self._speculative_pairs(self._speculative)

    def _pass_pair(self, number: int, work: PassWork, own: OwnPasses) -> None:
        theirs, ours, idle_share = take_turns(
            number, lambda: self._bench.measure(work), lambda: own.measure(work)
        )
        self._session.unchanged_path()
        self.report.build = theirs.build
        pair = Pair(theirs.tokens_per_second, ours, idle_share)
        self.report.pairs.setdefault(work.name, []).append(pair)

    def _speculative_pairs(self, work: SpeculativeWork) -> Iterator[str]:
        path = self._session.unchanged_path()
        with llama_server(self._folder, path, work, self._n_threads) as server:
            server.measure(work)
            own_request(self._session, self._options, work)
            for number in range(self._n_pairs):
                theirs, ours, idle_share = take_turns(
                    number,
                    lambda: server.measure(work),
                    lambda: own_request(self._session, self._options, work),
                )
                pair = Pair(theirs.tokens_per_second, ours.tokens_per_second, idle_share)
                self.report.pairs.setdefault(SPECULATIVE, []).append(pair)
                self.report.acceptance.append((theirs.acceptance, ours.acceptance))
                yield SPECULATIVE


def memory_copy_rate() -> float:
    """Bytes per second that a large copy reads and writes, on the threads in use."""
    sizes = Sizes()
    evict = torch.empty(sizes.evicted_bytes("cpu") // 4)
    return copy_rate(evict, sizes.copied_bytes, _COPIES)
