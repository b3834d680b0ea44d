"""Where a model runs: the name that `--device` takes, the device it means, and waiting for it."""

from __future__ import annotations

import torch

from engine.errors import OptionError

CPU = torch.device("cpu")
_REMEDY = "Use --device cpu, or auto."


def resolve_device(name: str) -> torch.device:
    """The device meant by "auto", "cpu", "cuda" or "cuda:N"; one of CUDA always has its number.

    "auto" is the first CUDA device if there is one, else the processor. Raises OptionError for
    another name and for a CUDA device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CPU
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise OptionError(
            f"The device {name!r} is unknown.", "Choose from auto, cpu, cuda and cuda:N."
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


def wait_for(device: torch.device) -> None:
    """Return when a CUDA device has done what it was given, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
