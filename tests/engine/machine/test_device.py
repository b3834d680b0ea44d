"""Where models run."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from engine.errors import DeviceLostError, OptionError, OutOfMemoryError
from engine.machine.device import (
    check_room,
    device_memory,
    device_name,
    in_one_transfer,
    read,
    resolve_device,
    upload,
    wait_for,
)

CPU = torch.device("cpu")


@pytest.fixture
def devices(monkeypatch):
    """How many CUDA devices this machine appears to have."""

    def set_up(n: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        names = ["NVIDIA H100 80GB HBM3", "NVIDIA L40S"]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device])

    return set_up


@pytest.mark.parametrize(
    ("n", "name", "meant"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (1, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (2, "cpu", "cpu"),
        (2, "l40", "cuda:1"),
        (2, "H100", "cuda:0"),
    ],
)
def test_names(devices, n, name, meant):
    devices(n)
    assert str(resolve_device(name)) == meant


@pytest.mark.parametrize(
    ("n", "name", "message"),
    [
        (0, "cuda", "--device cuda needs a CUDA device, and .* Use --device cpu"),
        (0, "cuda:1", "--device cuda:1 needs a CUDA device"),
        (2, "cuda:2", "cuda:2 is not there: the last of 2 is cuda:1"),
        (1, "mps", "'mps' is unknown. Choose from auto, cpu, .* cuda:0 .NVIDIA H100 80GB HBM3."),
        (2, "nvidia", "'nvidia' could be cuda:0 or cuda:1. .* cuda:1 .NVIDIA L40S."),
        (1, "cuda:", "is unknown"),
        (1, "cuda:-1", "is unknown"),
        (1, "cuda:x", "is unknown"),
        (1, "", "is unknown"),
    ],
)
def test_refusals(devices, n, name, message):
    devices(n)
    with pytest.raises(OptionError, match=message):
        resolve_device(name)


def test_memory_and_its_room(devices, monkeypatch):
    """What torch has kept counts once it has been given back: that of recordings never is."""
    devices(1)
    there, free, after = torch.device("cuda", 0), [10], [10]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1] << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 << 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.extend(after))
    assert device_memory(there) == ("cuda:0 (H100)", 9 << 30, 10 << 30)
    check_room({"weights": 6 << 30, "KV": 4 << 30}, there)
    assert free == [10]
    sizes = {"weights": 8 << 30, "KV": 4 << 30, "state": 0, "planes": 1 << 30}
    with pytest.raises(OutOfMemoryError, match=r"10.* free.*needed: weights 8.* GiB, KV 4.* GiB"):
        check_room(sizes, there)
    after[:] = [13]
    check_room(sizes, there)
    check_room({"weights": 1 << 60}, CPU)  # which has its own ways
    here = device_memory(CPU)
    assert here and here.name == "cpu" and here.free > 0
    if sys.platform.startswith("linux"):
        assert here.held is not None and here.held > 1 << 20


def test_a_device_that_has_failed_says_nothing(devices, monkeypatch):
    """The window asks for memory after every run, one that a device has ended too."""
    devices(1)

    def lost(device):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    there = torch.device("cuda", 0)
    assert device_memory(there) is None
    with pytest.raises(DeviceLostError, match=r"cuda:0 failed.* Start the program again"):
        check_room({"weights": 1}, there)


def test_the_processor_needs_no_transfer():
    array = np.arange(3)
    assert upload(array, CPU).data_ptr() == array.ctypes.data
    assert upload([[1, 2]], CPU).dtype == torch.int64
    ids, values = read(torch.tensor([[1, 2]]), torch.tensor([0.5]))
    assert ids.tolist() == [[1, 2]] and values.tolist() == [0.5]
    assert device_name(CPU) == "cpu"
    wait_for(CPU)


def test_one_transfer_has_every_value():
    array = np.array([[3, 2**60], [-1, 0]])
    tensors = [torch.tensor([True]), torch.from_numpy(array).t(), torch.tensor(7), torch.rand(3)]
    tensors.append(torch.tensor([-torch.inf, torch.nan, 1e-40]))
    for found, tensor in zip(in_one_transfer(tensors), tensors, strict=True):
        assert found.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(found, tensor.numpy())


@pytest.mark.gpu
def test_there_and_back():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda = resolve_device("cuda")
    there = upload(np.array([[3, 2**40]]), cuda)
    floats = upload(torch.tensor([0.1, -torch.inf, 1e-40]), cuda)
    mask = upload(np.array([True, False]), cuda)
    back = read(there, floats, mask)
    assert [a.dtype for a in back] == [np.int64, np.float32, np.bool_]
    assert back[0].tolist() == [[3, 2**40]] and back[2].tolist() == [True, False]
    assert np.array_equal(back[1], np.array([0.1, -np.inf, 1e-40], np.float32))
    wait_for(cuda)
    assert device_name(cuda).startswith("cuda:0 (")
