"""Comparison with llama.cpp: measurements in alternating pairs, and their ratios."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

import torch

from engine.analysis.run_cost import sign_test
from engine.batch import Span
from engine.errors import PeerLibraryError
from engine.experiments.bench.llama_programs import (
    LONGEST_S,
    SpeculativeWork,
    find_program,
    llama_server,
    started,
)
from engine.experiments.bench.request import Configuration, measure_request
from engine.machine.host_memory import forget_peak, give_back_memory, peak_resident
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import Prompt, RunOptions, SamplerOptions
from engine.session import Session

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens per second of both sides, measured one after the other.

    idle_share: share of a core that this process used while it waited for the other.
    """

    theirs: float
    ours: float
    idle_share: float


def take_turns(
    number: int, theirs: Callable[[], _T], ours: Callable[[], _U]
) -> tuple[_T, _U, float]:
    """Both results, and Pair.idle_share. Even and odd pairs start with different sides."""
    if number % 2:
        own = ours()
        other, idle_share = _waiting(theirs)
    else:
        other, idle_share = _waiting(theirs)
        own = ours()
    return other, own, idle_share


def _waiting(theirs: Callable[[], _T]) -> tuple[_T, float]:
    start, used = perf_counter(), process_time()
    result = theirs()
    return result, (process_time() - used) / (perf_counter() - start)


def paired_ratio(pairs: Sequence[Pair]) -> dict[str, float]:
    """Summary of at least one pair. theirs, ours: medians, tokens per second. ratio: the median of
    the pairs' ratios, ours over theirs; low, high: their smallest and largest. p: of the sign test;
    n_pairs."""
    ratios = [pair.ours / pair.theirs for pair in pairs]
    wins, n = sum(ratio > 1 for ratio in ratios), sum(ratio != 1 for ratio in ratios)
    return {
        "theirs": median(pair.theirs for pair in pairs),
        "ours": median(pair.ours for pair in pairs),
        "ratio": median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "p": sign_test(wins, n),
        "n_pairs": len(pairs),
    }


SPECULATIVE = "draft-mtp"
BETTER = f"{SPECULATIVE}, better"
"""Our figures against the better of llama.cpp's plain and speculative decoding."""
_COPIES = 5


class Against:
    """A session's model against a build of llama.cpp, on the same file with as many threads.

    folder: of the build, None = $PATH. works: forward passes. speculative: None leaves it out.
    options: further options of our runs. pairs: measurements so far, by name of the work;
    acceptance: of each pair of requests, (theirs, ours); build: that of llama-bench. memory: peak
    bytes of llama-server, and of this process since its own first request, None if the system does
    not report it. Raises OptionError if a program is missing.
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
        self.pairs: dict[str, list[Pair]] = {}
        self.acceptance: list[tuple[float, float]] = []
        self.build = ""
        self.memory: tuple[int, int] | None = None

    def rows(self) -> dict[str, dict[str, float]]:
        """Ratios of every work, and BETTER once speculation was measured."""
        found = {name: paired_ratio(pairs) for name, pairs in self.pairs.items()}
        if SPECULATIVE in found:
            theirs = found[PLAIN]["theirs"]
            found[BETTER] = paired_ratio(
                [
                    Pair(max(pair.theirs, theirs), pair.ours, pair.idle_share)
                    for pair in self.pairs[SPECULATIVE]
                ]
            )
        return found

    @property
    def idle_share(self) -> float:
        """Largest share of a core that this process used while waiting."""
        return max((pair.idle_share for pairs in self.pairs.values() for pair in pairs), default=0)

    @property
    def n_steps(self) -> int:
        """Number of values that `steps` yields."""
        return self._n_pairs * (len(self._works) + (self._speculative is not None))

    def steps(self) -> Iterator[str]:
        """Measure, adding to pairs. Yields the name of each finished work, pair by pair.

        Raises PeerLibraryError, and what Session.start raises.
        """
        depth = max(work.depth for work in self._works)
        own = OwnPasses(self._session.model, depth, max(work.n_tokens for work in self._works))
        for number in range(self._n_pairs):
            for work in self._works:
                self._pass_pair(number, work, own)
                yield work.name
        del own
        give_back_memory()  # free the passes' memory, which llama-server does not have
        if self._speculative is not None:
            yield from self._speculative_pairs(self._speculative)

    def _pass_pair(self, number: int, work: PassWork, own: OwnPasses) -> None:
        (theirs, self.build), ours, idle_share = take_turns(
            number, lambda: self._bench.measure(work), lambda: own.measure(work)
        )
        self._session.unchanged_path()
        pair = Pair(theirs, ours, idle_share)
        self.pairs.setdefault(work.name, []).append(pair)

    def _speculative_pairs(self, work: SpeculativeWork) -> Iterator[str]:
        path = self._session.unchanged_path()
        with llama_server(self._folder, path, work, self._n_threads) as server:

            def ask() -> tuple[float, float]:
                done = server.ask([work.prompt], work.n_predict, ignore_eos=True)
                return done.speed(), done.acceptance or 0.0

            ask()
            is_known = forget_peak()
            own_request(self._session, self._options, work)
            for number in range(self._n_pairs):
                theirs, ours, idle_share = take_turns(
                    number, ask, lambda: own_request(self._session, self._options, work)
                )
                pair = Pair(theirs[0], ours[0], idle_share)
                self.pairs.setdefault(SPECULATIVE, []).append(pair)
                self.acceptance.append((theirs[1], ours[1]))
                found = peak_resident(server.pid), peak_resident()
                self.memory = found if is_known and all(found) else None
                yield SPECULATIVE


def memory_copy_rate() -> float:
    """Bytes per second that a copy of 256 MiB reads and writes, on the current threads: a median,
    each copy preceded by writes to another array, so that no cache holds the source."""
    evict = torch.zeros(1 << 24)
    source = torch.zeros(1 << 26)
    target = torch.zeros_like(source)
    spent = []
    for _ in range(_COPIES):
        evict.zero_()
        before = perf_counter()
        target.copy_(source)
        spent.append(perf_counter() - before)
    return 2 * source.nbytes / median(spent)


class LlamaBench:
    """llama-bench of a build on one file. folder: see find_program, whose errors it raises."""

    def __init__(self, folder: Path | None, model: Path, n_threads: int) -> None:
        self._program = find_program(folder, "llama-bench")
        self._model, self._n_threads = model, n_threads

    def measure(self, work: PassWork) -> tuple[float, str]:
        """Load the file, do the work once untimed, then timed, on the CPU only. Returns tokens per
        second, the median of the repetitions, and the build: commit and number.

        Raises PeerLibraryError if the program ends without its figures.
        """
        words = ["-m", self._model, "-t", self._n_threads, "-dev", "none", "-o", "json"]
        words += ["-r", work.repeats, "-d", work.depth]
        if work.one_by_one:
            words += ["-p", 0, "-n", work.n_tokens]
        else:
            # with embeddings llama.cpp computes the output, logits included, of every token
            words += ["-p", work.n_tokens, "-n", 0, "-embd", int(work.all_logits)]
        with started(self._program, words, subprocess.PIPE) as program:
            try:
                out, _ = program.process.communicate(timeout=LONGEST_S)
            except subprocess.TimeoutExpired as error:
                raise PeerLibraryError(
                    f"llama-bench did not end within {LONGEST_S / 60:.0f} minutes.",
                    "Measure a smaller model.",
                ) from error
            try:
                (found,) = json.loads(out)
                return _result(found)
            except (ValueError, KeyError, TypeError) as error:
                if program.process.returncode:
                    raise program.ended() from error
                raise PeerLibraryError(
                    "The output format of llama-bench is not known.", "Use a build of 2026."
                ) from error


def _result(found: dict[str, Any]) -> tuple[float, str]:
    speeds = [float(one) for one in found["samples_ts"]]
    return median(speeds), f"{found['build_commit']} ({found['build_number']})"


_UBATCH = 512


class OwnPasses:
    """Forward passes after a constant context.

    depth: its tokens, at least one. n_most: most tokens of a work.
    """

    def __init__(self, model: HybridModel, depth: int, n_most: int) -> None:
        self._model, self._depth = model, max(depth, 1)
        random = torch.Generator().manual_seed(0)
        n_all = self._depth + n_most
        self._tokens = torch.randint(model.config.n_vocab, (n_all,), generator=random).tolist()
        self._memory = HybridMemory.for_model(model.config, 1, n_all, model.device)
        self._decode(0, self._depth, _UBATCH, all_logits=False)
        self._context = self._memory.save(0)

    @torch.inference_mode()
    def measure(self, work: PassWork) -> float:
        """Tokens per second: once untimed, then the median of the repetitions."""
        taken = []
        for _ in range(1 + work.repeats):
            start = perf_counter()
            width = 1 if work.one_by_one else _UBATCH
            self._decode(self._depth, work.n_tokens, width, all_logits=work.all_logits)
            taken.append(perf_counter() - start)
            self._memory.restore(0, self._context)
        return work.n_tokens / median(taken[1:])

    @torch.inference_mode()
    def _decode(self, start: int, n_tokens: int, width: int, *, all_logits: bool) -> None:
        stop = start + n_tokens
        for at in range(start, stop, width):
            tokens = self._tokens[at : min(at + width, stop)]
            wanted = range(len(tokens)) if all_logits else [len(tokens) - 1]
            span = Span(0, at, tokens, wanted)
            (ubatch,) = self._memory.split([span], _UBATCH, "seq")
            self._model.forward(ubatch, self._memory)


def own_request(
    session: Session, options: RunOptions, work: SpeculativeWork
) -> tuple[float, float]:
    """Tokens per second of the request decoded here, and its acceptance. options: sizes, policy and
    so on; the work overrides them. Raises what Session.start raises."""
    spec = replace(
        options.spec,
        types=("draft-mtp",),
        n_max=len(work.rates),
        p_min=0.0,
        synth_rates=work.rates,
        synth_len=None,
    )
    asked = replace(
        options,
        spec=spec,
        n_predict=work.n_predict,
        ignore_eos=True,
        sampler=replace(SamplerOptions(), temp=0.0),
    )
    done = measure_request(session, Prompt(work.prompt, ""), "", Configuration("", asked))
    drafted = done.draft_n
    return done.predicted_per_second, done.draft_n_accepted / drafted if drafted else 0.0


PLAIN = "1 token"
"""The work for plain decoding."""
_DECODED = 32
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class PassWork:
    """n_tokens in one forward pass, or `one_by_one`, `repeats` times, each time after the same
    `depth` tokens; all are random.

    all_logits: computed for every token, as for a draft; else for the last one.
    """

    name: str
    n_tokens: int
    one_by_one: bool = False
    all_logits: bool = False
    repeats: int = 1
    depth: int = 0


def pass_works(widths: tuple[int, ...], n_prompt: int, depth: int) -> list[PassWork]:
    """Plain decoding, verification of these widths, and a prompt."""
    verify = [
        PassWork(f"verify {width}", width, all_logits=True, repeats=_REPEATS, depth=depth)
        for width in widths
    ]
    return [
        PassWork(PLAIN, _DECODED, one_by_one=True, depth=depth),
        *verify,
        PassWork(f"prompt {n_prompt}", n_prompt, depth=depth),
    ]
