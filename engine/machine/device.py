"""Devices: names of `--device`, waiting, and the meaning of failures. Copies between host and
device: uploads, which do not wait, and `read`, which does."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.errors import DeviceLostError, DraftscopeError, OptionError, OutOfMemoryError
from engine.machine.host_memory import available_memory, resident_memory
from engine.plain_text import size_text

CPU = torch.device("cpu")
_LOST = ("CUDA error", "Triton Error [CUDA]")
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of other libraries that run out of memory."""
_REMEDY = "Use --device cpu, or auto."
_SMALLER = (
    "Lower -c, -np, -ub or --spec-draft-n-max, choose --rollback replay, use a smaller file, close "
    "other programs on it, or use --device cpu."
)


class DeviceMemory(NamedTuple):
    """name: from device_name. Bytes of its memory: held by this program, None if unknown; free for
    any program."""

    name: str
    held: int | None
    free: int


def cuda_devices() -> dict[str, str]:
    """The manufacturer's name of every CUDA device, by its name for --device."""
    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(n)}


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The current memory of a device; None for one that has failed, which answers nothing."""
    if device.type != "cuda":
        return DeviceMemory(device_name(device), resident_memory(), available_memory())
    try:
        free = _free(device)
    except DeviceLostError:
        return None
    return DeviceMemory(device_name(device), torch.cuda.memory_reserved(device), free)


def _free(device: torch.device) -> int:
    """Bytes of a CUDA device that are free. Raises DeviceLostError."""
    return run_on(device, lambda: int(torch.cuda.mem_get_info(device)[0]))


def check_room(sizes: Mapping[str, int], device: torch.device) -> None:
    """Raise OutOfMemoryError if a CUDA device cannot hold these bytes, given by purpose: its driver
    might use host memory instead, a hundred times slower. Raises DeviceLostError."""
    if device.type != "cuda":
        return
    needed, free = sum(sizes.values()), _free(device)
    if needed > free:
        free_unused(device)  # garbage of finished runs, and what torch keeps for later
        free = _free(device)
    if needed > free:
        parts = ", ".join(f"{name} {size_text(n)}" for name, n in sizes.items() if n)
        raise OutOfMemoryError(
            f"{device_name(device)} has {size_text(free)} free, and {size_text(needed)} are "
            f"needed: {parts}.",
            _SMALLER,
        )


def resolve_device(name: str) -> torch.device:
    """The device for "auto", "cpu", "cuda", "cuda:N", or a part of the name of exactly one CUDA
    device, in any case. A CUDA device always gets its number.

    "auto" is the first CUDA device, or the processor if there is none. Raises OptionError for
    another name or a missing CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CPU
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        there = cuda_devices()
        meant = [device for device, its in there.items() if name and name.lower() in its.lower()]
        if len(meant) == 1:
            return torch.device(meant[0])
        are = "".join(f", {device} ({its})" for device, its in there.items())
        why = f"could be {' or '.join(meant)}" if meant else "is unknown"
        raise OptionError(
            f"The device {name!r} {why}.",
            f"Choose from auto, cpu, cuda, cuda:N and a part of a CUDA device's name{are}.",
        )
    if not torch.cuda.is_available():
        why = "PyTorch finds none" if torch.version.cuda else "this PyTorch is built without CUDA"
        raise OptionError(f"--device {name} needs a CUDA device, and {why}.", _REMEDY)
    n_devices, index = torch.cuda.device_count(), int(number or 0)
    if index >= n_devices:
        raise OptionError(
            f"--device {name} is not there: the last of {n_devices} is cuda:{n_devices - 1}.",
            _REMEDY,
        )
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """A device for people: "cpu", "cuda:0 (NVIDIA H200)"."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def make_current(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread: Triton launches on it wherever the tensors
    are, and streams and pinned memory belong to it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


P = ParamSpec("P")
R = TypeVar("R")


def inference_mode(call: Callable[P, R]) -> Callable[P, R]:
    """`torch.inference_mode` as a decorator that costs nothing if the mode is on already."""
    enter = torch.inference_mode()(call)

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return (call if torch.is_inference_mode_enabled() else enter)(*args, **kwargs)

    return run


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device is idle, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Mark = torch.cuda.Event | None
"""A point in the work of a CUDA device; None on the CPU, which works synchronously."""


def mark(device: torch.device | None) -> Mark:
    """A mark after everything submitted to a device so far."""
    if device is None or device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def ms_between(first: Mark, last: Mark) -> float:
    """Milliseconds between two marks that a device has passed."""
    return first.elapsed_time(last) if first and last else 0.0


def meaning_of(
    error: BaseException, device: torch.device, what: str = "The passes of the run"
) -> DraftscopeError | None:
    """The user-visible meaning of an error: no memory for `what`, or device failure; None for
    others."""
    first = str(error).strip().split("\n")[0]
    is_failed = isinstance(error, torch.AcceleratorError) or first.startswith(_LOST)
    is_full = is_failed and any(words in first for words in _FULL)
    if is_full or "DefaultCPUAllocator: " in first or isinstance(error, torch.OutOfMemoryError):
        room = ""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            room = f": {free >> 20} of {total >> 20} MiB are free"
        return OutOfMemoryError(f"{what} take more memory than {device} has{room}.", _SMALLER)
    if is_failed:
        return DeviceLostError(
            f"{device} failed: {first}",
            "The recorded rounds are kept. Start the program again, or use --device cpu.",
        )
    return None


def run_on(device: torch.device, call: Callable[[], R], *what: str) -> R:
    """Return call(). Raises what `meaning_of` finds in its error, without a reference to the frames
    that hold the memory to be freed. what: see meaning_of."""
    try:
        return call()
    except RuntimeError as error:
        failure = meaning_of(error, device, *what)
        if failure is None:
            raise
    if isinstance(failure, OutOfMemoryError):
        free_unused(device)
    try:
        raise failure
    finally:
        del failure  # a cycle with this frame would keep the callers' tensors


def free_unused(device: torch.device) -> None:
    """Release unused cached memory of a CUDA device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


_ALIGNED = 8

HostValues = np.ndarray | Tensor | Sequence[int] | Sequence[Sequence[int]]


def upload(values: HostValues, device: torch.device) -> Tensor:
    """Host values as a tensor on a device; whole numbers in lists become int64.

    Does not wait for the device: a CUDA device copies from pinned memory when it gets there. On the
    processor arrays and tensors are shared, not copied.
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    if device.type == "cpu":
        return host
    return pinned(host).to(device, non_blocking=True)


class Uploads:
    """Arrays uploaded together in each pass. On the CPU arrays of equal shapes are always at the
    same address, where recorded passes find them without a copy; the previous ones are
    overwritten."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[int, ...], ...], _Place] = {}

    def __deepcopy__(self, memo: object) -> Uploads:
        """A fresh instance: arrays and tensors share memory, which copies would not."""
        return Uploads()

    def put(
        self, arrays: Sequence[np.ndarray], device: torch.device
    ) -> tuple[Tensor, list[Tensor]]:
        """Arrays on a device in one upload: the bytes of all, uint8 [n], and each as a view of
        them. Arrays of the same shapes must always have the same types."""
        is_shared = device.type == "cpu"
        shapes = tuple([array.shape for array in arrays])
        place = self._places.get(shapes) if is_shared else None
        if place is None:
            place = _Place.of(arrays)
            if is_shared:
                self._places[shapes] = place
        for part, array in zip(place.parts, arrays, strict=True):
            part[...] = array
        if is_shared:
            return place.together, place.tensors
        there = upload(place.together, device)
        return there, place.seen_in(there)


class _Place(NamedTuple):
    """Host memory for arrays. parts, tensors: views of it. starts: the first byte of each."""

    together: Tensor
    parts: list[np.ndarray]
    starts: list[int]
    tensors: list[Tensor]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> _Place:
        # each is aligned for numbers of 8 bytes
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]
        whole = np.empty(starts[-1], np.uint8)
        parts = [
            np.ndarray(array.shape, array.dtype, whole, start)
            for array, start in zip(arrays, starts, strict=False)
        ]
        place = cls(torch.from_numpy(whole), parts, starts, [])
        place.tensors.extend(place.seen_in(place.together))
        return place

    def seen_in(self, there: Tensor) -> list[Tensor]:
        """The parts as views of a copy of all bytes."""
        types = [torch.from_numpy(part).dtype for part in self.parts]
        return [
            there[start : start + part.nbytes].view(its_type).view(part.shape)
            for part, its_type, start in zip(self.parts, types, self.starts, strict=False)
        ]


def pinned(host: Tensor) -> Tensor:
    """A copy in pinned memory, freed when the device has read it."""
    return host.pin_memory()


def read(*tensors: Tensor) -> list[np.ndarray]:
    """The values of tensors of one device, on the host.

    Waits for the device, so everything needed should be read in one call, which is one transfer.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return in_one_transfer(tensors)


def in_one_transfer(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The values of tensors of one device, by one copy of their concatenated bytes."""
    together = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    parts = np.split(together.cpu().numpy(), list(accumulate(t.nbytes for t in tensors))[:-1])
    return [
        part.view(torch.empty(0, dtype=tensor.dtype).numpy().dtype).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
