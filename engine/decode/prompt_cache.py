"""The prompt cache: what one run leaves in memory for the next (llama.cpp's `--cache-prompt`).

A run takes the memory out of the cache and puts it back at its end. So no two runs ever share
one, and a run that fails, whose memory nobody should trust, just never gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.decode.held_sequences import HeldSequences
from engine.draft.drafter import Drafter
from engine.draft.registry import model_drafters
from engine.memory.hybrid import HybridMemory
from engine.memory.recurrent import RecurrentTraffic
from engine.options import CacheOptions, RunOptions


@dataclass(frozen=True, slots=True)
class CachedRun:
    """What outlives a run. key: models, options and sizes that it was made for. drafters: those
    with a memory of their own, by name."""

    key: tuple[object, ...]
    held: HeldSequences
    drafters: Mapping[str, Drafter]

    @property
    def memory(self) -> HybridMemory:
        """The target's."""
        return self.held.memory


class PromptCache:
    """Given to Session.start, run after run; runs of another kind find it empty."""

    def __init__(self, options: CacheOptions | None = None) -> None:
        self.options = options or CacheOptions()
        self._cached: CachedRun | None = None

    def take(self, key: tuple[object, ...]) -> CachedRun | None:
        """The cached run if it has this key, else None; either way the cache is empty now."""
        cached, self._cached = self._cached, None
        if cached is None or cached.key != key:
            return None
        if recurrent := cached.memory.recurrent:
            recurrent.traffic = RecurrentTraffic()  # every run counts its own
        return cached

    def keep(
        self,
        key: tuple[object, ...],
        memory: HybridMemory,
        drafters: Sequence[Drafter],
        options: RunOptions,
    ) -> CachedRun:
        """A cached run around a new memory, which the caller will `put` back when it has ended."""
        device = torch.device("cpu") if options.checkpoint_device == "host" else None
        n_ubatch = min(options.n_ubatch, options.n_batch)
        held = HeldSequences(memory, self.options, n_ubatch, device, options.faults)
        own = {drafter.name: drafter for drafter in drafters if drafter.name in model_drafters()}
        return CachedRun(key, held, own)

    def put(self, cached: CachedRun) -> None:
        """Leave the memory of a run that has ended to the next one."""
        self._cached = cached
