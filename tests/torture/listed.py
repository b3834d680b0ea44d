"""The campaigns, by name; each is a module of `tests.torture.campaigns` with its CAMPAIGN."""

from __future__ import annotations

from importlib import import_module

from tests.torture.campaign import Campaign

NAMES = (
    "gguf",
    "truth",
    "mutants",
    "cli",
    "kill",
    "endure",
    "trace",
    "vocab",
    "faults",
    "servers",
    "template",
    "lognumbers",
    "terminal",
    "filechange",
    "proxying",
    "encodings",
    "stopping",
    "altered",
)


def campaign(name: str) -> Campaign:
    found: Campaign = import_module(f"tests.torture.campaigns.{name}").CAMPAIGN
    return found
