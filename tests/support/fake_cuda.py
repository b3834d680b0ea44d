"""A CUDA device that computes shapes only: torch's fake tensors, on a machine without a GPU.

Mixing devices raises, and so does looking at a value on the host, but for
`engine.machine.device.read`, which gets made-up numbers and is counted. What crosses between
host and device is counted too.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import dispatch, linear
from kernels.linear import block_parts
from kernels.rows import ngrams

DEVICE = torch.device("cuda:0")
# functions that keep tensors
_KEPT = (
    (ngrams, "_constants"),
    (block_parts, "_iq4_values"),
    (block_parts, "_of_fifth_bits"),
    (dispatch, "counters"),
)
# indices of c10::DeviceType
_CUDA, _META = 1, 14


@dataclass
class Seen:
    """reads: calls of transfer.read on the device. uploads, downloads: operations that moved
    values. waits: synchronisations for the clock. strays: operations with an argument on each.
    recordings, replays: passes that were recorded, and run again by that. computed: operations of
    torch on the device that are no views. free: bytes that the device says it has. current: the
    device that was made current."""

    reads: int = 0
    waits: int = 0
    recordings: int = 0
    replays: int = 0
    computed: int = 0
    free: int = 8 << 30
    uploads: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    current: torch.device | None = None

    def clear(self) -> None:
        self.__init__()


class _Watch(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, computes = _kind(func)
        taken = {x.device.type for x in tree_leaves((args, kwargs)) if _has_values(x)}
        made = {x.device.type for x in tree_leaves(result) if _has_values(x)}
        if computes and "cuda" in made:
            self._seen.computed += 1
        if name == "aten.copy_.default":
            made, taken = {args[0].device.type}, {args[1].device.type}
        if taken == {"cpu"} and made == {"cuda"}:
            self._seen.uploads.append(name)
        elif taken == {"cuda"} and made == {"cpu"}:
            self._seen.downloads.append(name)
        elif taken == {"cpu", "cuda"}:
            self._seen.strays.append(name)
        return result


@functools.cache
def _kind(func: Any) -> tuple[str, bool]:
    """The name of an operation, and whether it computes."""
    return str(func), not func.is_view and "empty" not in str(func)


def random_values(seed: int) -> Callable[[torch.Tensor], np.ndarray]:
    """Values for `fake_cuda`: numbers 0 .. 1, whole ones 0 or 1, so that drafts fail at any token.
    A matrix of int32 is a record of rows, whose k largest logits are all 1."""
    random = np.random.default_rng(seed)

    def values(tensor: torch.Tensor) -> np.ndarray:
        shape = tuple(tensor.shape)
        if tensor.is_floating_point():
            return random.random(shape, np.float32)
        found = random.integers(0, 2, shape, _DTYPES[tensor.dtype])
        if tensor.dtype == torch.int32:
            k = shape[1] // 3 - 2 + (shape[1] % 3 == 0)
            found[:, k : 3 * k + 3] = np.float32(1).view(np.int32)
            found[:, -1] = np.float32(0.5).view(np.int32)
        return found

    return values


_DTYPES = {torch.int64: np.int64, torch.int32: np.int32}


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _without_value(host: torch.Tensor) -> torch.Tensor:
    """A fake tensor of one element remembers it, and would then be copied in earnest."""
    host.constant = None
    return host


def _has_values(x: object) -> bool:
    """A number without dimensions may come from the host: it is an argument of the kernel."""
    return isinstance(x, torch.Tensor) and x.dim() > 0


@contextmanager
def fake_cuda(
    monkeypatch: pytest.MonkeyPatch, values: Callable[[torch.Tensor], np.ndarray]
) -> Iterator[Seen]:
    """Within the context `cuda:0` exists. values: what `read` finds for a tensor on it."""
    seen = Seen()
    from engine.gguf.reader import TensorReader
    from engine.machine import device as transfer
    from engine.machine import graphs

    real_read = transfer.read

    def read(*tensors: torch.Tensor) -> list[np.ndarray]:
        assert all(tensor.device == DEVICE for tensor in tensors)
        seen.reads += 1
        return [values(tensor) for tensor in tensors]

    def wait(device: torch.device) -> None:
        assert device == DEVICE
        seen.waits += 1

    def record(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """A replay would compute the same shapes again. Nothing crosses in a recorded pass."""
        before = seen.reads, seen.waits, len(seen.uploads), len(seen.downloads)
        try:
            outputs = run()
        except RuntimeError as error:  # which would turn recording off, and no more
            raise AssertionError("a pass cannot be recorded") from error
        assert before == (seen.reads, seen.waits, len(seen.uploads), len(seen.downloads))
        seen.recordings += 1
        return outputs, replay

    def replay() -> None:
        seen.replays += 1

    for name in ("draft_dflash", "draft_dspark", "draft_mtp"):  # imported when first used
        importlib.import_module(f"engine.draft.{name}")
    for module in list(sys.modules.values()):
        if getattr(module, "read", None) is real_read:
            monkeypatch.setattr(module, "read", read)
    monkeypatch.setattr(transfer, "pinned", _without_value)
    # tensors on the processor have no memory here either, and no numbers to decode
    monkeypatch.setattr("kernels.linear.dequant._decoder", lambda type: lambda blocks, out: None)
    # nor a place there
    monkeypatch.setattr("engine.model.weights._in_one_piece", lambda tensors: False)
    monkeypatch.setattr(graphs, "_RecordOnCuda", lambda: record)
    # numbers of a file are checked on the processor, where they have no values here
    monkeypatch.setattr(
        TensorReader, "take_ids", lambda _, name, shape, n: torch.zeros(shape).long()
    )
    # no products have times here
    monkeypatch.setattr(linear, "_try_sizes", lambda block, packed, device: (8,))
    monkeypatch.setattr(linear, "_found", {})
    # tensors that are kept would be those of another fake device
    for module, name in _KEPT:
        again = functools.cache(getattr(module, name).__wrapped__)
        monkeypatch.setattr(module, name, again)
    # tensors on the processor have no memory
    monkeypatch.setattr("kernels.dispatch.uses_llvm", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake 8")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (seen.free, 8 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "set_device", functools.partial(setattr, seen, "current"))
    monkeypatch.setattr("engine.draft.chain.mark", lambda device: None)
    with _guarded(), FakeTensorMode(allow_non_fake_inputs=True), _Watch(seen):
        yield seen


@contextmanager
def _guarded() -> Iterator[None]:
    """A torch without CUDA has no device guard for it, which indexing asks for: lend it the one of
    meta tensors, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before
