"""Where models run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import OptionError
from engine.machine.device import device_name, read, resolve_device, upload, wait_for

CPU = torch.device("cpu")


@pytest.fixture
def devices(monkeypatch):
    """How many CUDA devices this machine appears to have."""

    def set_up(n: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)

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
        (1, "mps", "device 'mps' is unknown. Choose from auto, cpu, cuda"),
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


def test_the_processor_needs_no_transfer():
    array = np.arange(3)
    assert upload(array, CPU).data_ptr() == array.ctypes.data
    assert upload([[1, 2]], CPU).dtype == torch.int64
    ids, values = read(torch.tensor([[1, 2]]), torch.tensor([0.5]))
    assert ids.tolist() == [[1, 2]] and values.tolist() == [0.5]
    assert device_name(CPU) == "cpu"
    wait_for(CPU)


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
