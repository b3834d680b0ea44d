"""Forward passes of few tokens, recorded once and then started by one call.

Such a pass consists of hundreds of kernels of a few microseconds each, and Python takes longer to
launch them than they run. A graph (of CUDA, or a table of launches on the CPU) repeats the kernels
with the recorded addresses and numbers. So everything that changes between passes must be values in
tensors at fixed addresses; a pass that differs in anything else has another key and is recorded
separately.
"""

from __future__ import annotations

import bisect
import functools
import logging
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.machine.clock import put_off
from kernels.dispatch import uses_llvm
from kernels.llvm.program import Launch, LaunchTable, watched

_MAKE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# declared as views, but of tensors that are not kept
_MAKE_CONSTANTS = frozenset(("lift", "lift_fresh"))


class RecordOnProcessor:
    """A `Record` on the CPU: the launches of compiled kernels in a computation.

    Recording runs the Python part and computes nothing; it stores which kernel is called with which
    addresses and numbers. So all arithmetic must be done by kernels of kernels.llvm; torch may only
    create tensors and views. The tensors of all recordings share one arena, because passes never
    run concurrently.
    """

    def __init__(self) -> None:
        self._arena = Arena()
        # compiles the loop over launches before any pass is timed
        LaunchTable([])()

    @property
    def n_bytes(self) -> int:
        """Bytes that the tensors of the recordings take."""
        return self._arena.n_bytes

    def __call__(self, compute: Callable[[], PassTensors]) -> tuple[PassTensors, LaunchTable]:
        """Raises NotImplementedError if arithmetic is done outside of kernels; nothing was computed
        then, so the pass can still be run."""
        launches: list[Launch] = []
        with _NothingButViews(self._arena.regions()), watched(launches.append):
            outputs = compute()
        return outputs, LaunchTable(launches)


class _NothingButViews(TorchDispatchMode):
    """Refuses every torch operation except new tensors, which are allocated in an arena, and
    views."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled by torch here; otherwise torch would import its compiler."""
        return False

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self._regions = regions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _makes(func):
            return self._regions.empty_like(func(*args, **(kwargs or {})))
        if _views(func):
            result = func(*args, **(kwargs or {}))
            # reshape, for instance, is not always a view
            if set(_storages((result,))) <= {*_storages(args), *_storages((kwargs or {}).values())}:
                return result
        raise NotImplementedError(f"{func} computes, and is not a kernel of kernels.llvm")


@functools.cache
def _makes(func: Any) -> bool:
    """Whether an operation makes a new tensor."""
    return func.overloadpacket.__name__ in _MAKE


@functools.cache
def _views(func: Any) -> bool:
    """Whether an operation can only return a view of a tensor."""
    is_view = func.is_view and not func._schema.is_mutable
    return is_view and func.overloadpacket.__name__ not in _MAKE_CONSTANTS


def _storages(values: Iterable[Any]) -> Iterator[int]:
    """Addresses of the storage of every tensor among arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage().data_ptr()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)


_BLOCK = 4 << 20
"""Bytes of a block; a larger tensor gets a block of its own."""
_ALIGNED = 64

Region = tuple[int, int, int]
"""Number of a block, first byte, one after the last byte."""


class Arena:
    """Blocks at fixed addresses, as many as the largest recording needs."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    @property
    def n_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def regions(self) -> Regions:
        """The tensors of another recording, which may use the whole arena."""
        return Regions(self._blocks)


class Regions:
    """The tensors of one recording. The space of freed tensors is reused."""

    def __init__(self, blocks: list[np.ndarray]) -> None:
        self._blocks = blocks
        self._free: list[Region] = [(i, 0, block.nbytes) for i, block in enumerate(blocks)]

    def empty_like(self, like: Tensor) -> Tensor:
        """An uninitialised tensor with the sizes, strides and dtype of another one, which has no
        gaps."""
        n_bytes = like.numel() * like.element_size()
        region = self._take(-(-max(n_bytes, 1) // _ALIGNED) * _ALIGNED)
        block, start, _ = region
        held = self._blocks[block][start : start + n_bytes]
        # a tensor and its views keep the array alive, and so the region
        weakref.finalize(held, self._give_back, region).atexit = False
        flat = torch.from_numpy(held).view(like.dtype)
        return flat.as_strided(like.size(), like.stride())

    def _take(self, n_bytes: int) -> Region:
        i = next((i for i, (_, a, b) in enumerate(self._free) if b - a >= n_bytes), None)
        if i is None:
            i, size = len(self._free), max(n_bytes, _BLOCK)
            self._free.append((len(self._blocks), 0, size))
            # torch aligns memory to cache lines
            self._blocks.append(torch.empty(size, dtype=torch.uint8).numpy())
        block, start, stop = self._free[i]
        rest = (block, start + n_bytes, stop)
        self._free[i : i + 1] = [rest] if rest[1] < stop else []
        return block, start, start + n_bytes

    def _give_back(self, region: Region) -> None:
        bisect.insort(self._free, region)
        self._free = list(_joined(self._free))


def _joined(regions: list[Region]) -> Iterator[Region]:
    """Sorted regions, with adjacent ones joined."""
    ends = [i for i, (a, b) in enumerate(pairwise(regions)) if a[0] != b[0] or a[2] != b[1]] + [
        len(regions) - 1
    ]
    first = 0
    for last in ends:
        block, start, _ = regions[first]
        yield block, start, regions[last][2]
        first = last + 1


VARIABLE = "DRAFTSCOPE_GRAPHS"
"""Environment variable; "off" makes every pass launch its kernels one by one."""

MOST_TOKENS = {"cpu": 16, "cuda": 64}
"""Largest pass to record, tokens, by device type: longer ones keep the device busy anyway."""

MOST_GRAPHS = 64

PassTensors = tuple[Tensor, ...]
Record = Callable[[Callable[[], PassTensors]], tuple[PassTensors, Callable[[], None]]]
"""Records a computation; returns the tensors with its results, and a function that repeats it."""

DecodeOn = Callable[[Any, PassTensors], tuple[list[PassTensors], list[float]]]
"""Runs a recorded pass, given by its function and outputs, and passes after it; returns what each
computed and when, in seconds of perf_counter."""

log = logging.getLogger("draftscope.graphs")


class PassInputs(NamedTuple):
    """What a pass depends on other than weights and storage.

    key: everything that requires another recording when it changes. inputs: tensors of this pass
    only, whose values may change; equal keys imply equal number, shapes and dtypes.
    """

    key: Hashable
    inputs: PassTensors = ()


class _Graph(NamedTuple):
    """inputs: the tensors that the recorded kernels read. outputs: those that they write."""

    inputs: PassTensors
    outputs: PassTensors
    replay: Callable[[], None]

    def fits(self, arguments: PassTensors) -> bool:
        """Whether arguments match the last of its inputs."""
        mine = self.inputs[len(self.inputs) - len(arguments) :]
        for a, b in zip(mine, arguments, strict=True):
            if a is not b and (a.shape != b.shape or a.dtype != b.dtype):
                return False
        return True

    def run(self, inputs: PassTensors, *, keeps: bool) -> PassTensors:
        """Its results for other values; keeps: return copies."""
        self.take(inputs)
        self.replay()
        return tuple([x.clone() for x in self.outputs]) if keeps else self.outputs

    def take(self, inputs: PassTensors) -> None:
        """Copy other values into its inputs."""
        for mine, new in zip(self.inputs, inputs, strict=True):
            if mine is not new:
                mine.copy_(new)


class StepGraphs:
    """The recorded passes of one model and one memory.

    A pass with a new key runs normally, which compiles its kernels; the second one is recorded, and
    later ones are replayed. Beyond MOST_GRAPHS the oldest recording is dropped. If recording fails,
    every pass runs normally from then on. most_tokens: largest pass to record. from_first: after
    the very first pass, record new keys at once, if possible.
    """

    def __init__(
        self, record: Record | None, most_tokens: int, *, from_first: bool = False
    ) -> None:
        self._record = record
        self._most_tokens, self._from_first = most_tokens, from_first
        self._seen: set[Hashable] = set()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        # the latest one, with key and number of threads, because most passes repeat it
        self._latest: tuple[Hashable, int, _Graph] | None = None
        self._ahead: deque[tuple[PassTensors, float]] = deque()

    def __deepcopy__(self, memo: object) -> StepGraphs:
        """A copy without recordings, because these are bound to their memory."""
        record: Any = self._record
        fresh = None if record is None else type(record)()
        return StepGraphs(fresh, self._most_tokens, from_first=self._from_first)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded so far."""
        return not self._graphs

    @property
    def n_bytes(self) -> int:
        """Bytes that the recordings take on the processor."""
        return getattr(self._record, "n_bytes", 0)

    def takes(self, n_tokens: int) -> bool:
        """Whether a pass of this many tokens should be recorded, as far as known."""
        return self._record is not None and n_tokens <= self._most_tokens

    @property
    def is_ahead(self) -> bool:
        """Whether the results of the next pass are available already: see `run`."""
        return bool(self._ahead)

    def next_ahead(self) -> PassTensors:
        """The results of the next pass, whose time is counted now."""
        found, seconds = self._ahead.popleft()
        put_off(-seconds)
        return found

    def run(
        self,
        pass_inputs: PassInputs,
        arguments: PassTensors,
        compute: Callable[..., PassTensors],
        decode_on: DecodeOn | None = None,
        *,
        keeps: bool = True,
    ) -> PassTensors:
        """compute(*arguments), which reads `pass_inputs.inputs` by itself.

        It must neither wait for the device nor change anything on the host. Results are copied, so
        that the next pass does not overwrite them, unless `keeps` is False. decode_on: runs a
        recording of the pass and further ones, whose results `next_ahead` then returns.
        """
        # CPU kernels are distributed to threads in advance
        n_threads, latest = torch.get_num_threads(), self._latest
        if (
            latest is not None
            and latest[1] == n_threads
            and latest[0] == pass_inputs.key
            and latest[2].fits(arguments)
        ):
            inputs = (*pass_inputs.inputs, *arguments)
            if decode_on:
                return self._run_on(latest[2], inputs, decode_on)
            return latest[2].run(inputs, keeps=keeps)
        shapes = tuple([(x.shape, x.dtype) for x in arguments])
        key = pass_inputs.key, shapes, n_threads
        graph = self._graphs.get(key)
        if graph is None:
            is_new = key not in self._seen
            may_record = not is_new or (self._from_first and self._seen)
            self._seen.add(key)
            if self._record is None or not may_record:
                return compute(*arguments)
            graph = self._recorded(self._record, pass_inputs, arguments, compute, is_new)
            if graph is None:
                return compute(*arguments)
            self._graphs[key] = graph
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        self._latest = pass_inputs.key, n_threads, graph
        return graph.run((*pass_inputs.inputs, *arguments), keeps=keeps)

    def _run_on(self, graph: _Graph, inputs: PassTensors, decode_on: DecodeOn) -> PassTensors:
        graph.take(inputs)
        start = perf_counter()
        found, times = decode_on(graph.replay, graph.outputs)
        took = [end - begin for begin, end in pairwise((start, *times))]
        self._ahead.extend(zip(found[1:], took[1:], strict=True))
        put_off(sum(took[1:]))
        return found[0]

    def _recorded(
        self,
        record: Record,
        pass_inputs: PassInputs,
        arguments: PassTensors,
        compute: Callable[..., PassTensors],
        is_new: bool,
    ) -> _Graph | None:
        # later passes overwrite the arguments, so others' tensors are cloned; those within an input
        # are not
        held = {x.untyped_storage()._cdata for x in pass_inputs.inputs}
        mine = tuple(x if x.untyped_storage()._cdata in held else x.clone() for x in arguments)
        try:
            outputs, replay = record(partial(compute, *mine))
        except RuntimeError as error:
            if is_new:  # one-time work may have caused it
                return None
            # expected on the CPU, where some compute modes use other kernels
            level = logging.INFO if isinstance(error, NotImplementedError) else logging.WARNING
            log.log(level, "graphs are off, because recording one failed: %s", error)
            self._record = None
            return None
        return _Graph((*pass_inputs.inputs, *mine), outputs, replay)


def graphs_are_on() -> bool:
    """Whether passes are to be recorded where they can be."""
    return os.environ.get(VARIABLE, "").lower() not in ("off", "0", "no")


def graphs_for(device: torch.device) -> StepGraphs | None:
    """Recordings for a memory on this device, None if passes are not recorded."""
    if not graphs_are_on():
        return None
    if device.type == "cuda":
        return StepGraphs(_RecordOnCuda(), MOST_TOKENS["cuda"])
    if not uses_llvm():
        return None
    return StepGraphs(RecordOnProcessor(), MOST_TOKENS["cpu"], from_first=True)


class _RecordOnCuda:
    """Recordings share one memory pool, because they never run concurrently."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(
        self, compute: Callable[[], PassTensors]
    ) -> tuple[PassTensors, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # torch's default capture stream belongs to the device of its first use
        stream = self._stream = self._stream or torch.cuda.Stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # kernels may still be compiled and loaded meanwhile, by this thread or another one
        recording = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="relaxed")
        # the outer context restores the stream if the end of the capture raises
        try:
            with torch.cuda.stream(stream), recording:
                outputs = compute()
        except RuntimeError:
            # after an invalid capture, torch's allocator still allocates for it
            with suppress(RuntimeError):  # raised after a valid one
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise
        return outputs, graph.replay
