"""States that storage rounds: every policy against a recurrence that casts at the same places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.memory.policies import POLICIES
from engine.memory.recurrent import SnapshotPolicy
from engine.model.recurrence import StateKey, TokenWindow
from engine.model.recurrent_states import stored_as
from tests.support import recurrent_texts
from tests.support.recurrent_texts import CPU, LAYERS, NGRAMS, Layers, copies, decode, same

CASTS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
GATES = {"head gates": (3, 4), "channel gates": (3, 4), "mamba": (1, 2)}
"""Places of the gates among the inputs of a state."""
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS = [*GATES, "averages", "short convolution"]


def cast(x: torch.Tensor, type: str) -> torch.Tensor:
    return x.float().to(CASTS[type]).double()


def law(kind: str, key: StateKey, passes: list[list[int]], s: str, r: str, gates: str):
    """The state after passes of some tokens each, rounded after each of them."""
    layers = LAYERS[kind]
    is_window = layers.layout.states[key].is_window
    state = torch.zeros(layers.layout.states[key].shape, dtype=torch.float64)
    for tokens in passes:
        for token in tokens:
            given = [t.double() for t in layers.of_token(key, token)]
            for i in () if is_window else GATES.get(kind, ()):
                given[i] = cast(given[i], gates)
            state, _ = layers.step(key, state, tuple(given))
        state = cast(state, r if is_window else s)
    return state


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch):
    """A memory of one sequence whose storage rounds, and the layers that fill it."""

    def make(kind: str, policy: str, faults=(), **types: str) -> SnapshotPolicy:
        layers = LAYERS[kind]
        layout = stored_as(layers.layout, **types)
        found: Layers = replace(layers, layout=layout)
        memory = POLICIES[policy](layout, 1, 3, CPU, faults)
        for each in (layout, memory.layout):
            monkeypatch.setitem(recurrent_texts._LAYERS_OF, each, found)
        memory.poison(torch.nan)
        return memory

    return make


def assert_near(memory: SnapshotPolicy, kind: str, passes: list[list[int]], **types: str) -> None:
    """Kernels compute in float32: now and then a number lies on the other side of a rounding."""
    full = {"s": "f32", "r": "f32", "gates": "f32"} | types
    for key, state in memory.live(0).items():
        wanted, is_window = law(kind, key, passes, **full), memory.layout.states[key].is_window
        type = full["r" if is_window else "s"]
        assert torch.equal(cast(state, type), state.double()), "nothing else fits into storage"
        unit = {"f32": 1e-5, "bf16": 2**-7, "f16": 2**-10}[type]
        apart = (state.double() - wanted).abs()
        assert (apart > 1e-5 * (1 + wanted.abs())).sum() <= 2, (key, apart.max())
        assert bool((apart <= 1e-6 + unit * wanted.abs()).all()), key


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_pass_rounds_once(memory_of, kind: str, policy: str, by_index: bool) -> None:
    """Token by token, then a batch of four of which two are undone, then one more."""
    types = {"s": "bf16", "r": "f16", "gates": "f16"}
    memory = memory_of(kind, policy, **types)
    for token in TEXT[:4]:
        decode(memory, {0: [token]}, by_index=by_index)
    assert_near(memory, kind, [[token] for token in TEXT[:4]], **types)
    saved = memory.save(0)
    decode(memory, {0: [*TEXT[4:6], 7, 7]}, by_index=by_index)
    if not memory.seq_rm(0, 6):
        memory.restore(0, saved)
        decode(memory, {0: TEXT[4:6]}, by_index=by_index)
    decode(memory, {0: TEXT[6:7]}, by_index=by_index)
    singles = [[token] for token in TEXT[:4]]
    assert_near(memory, kind, [*singles, TEXT[4:6], TEXT[6:7]], **types)


def test_a_batch_longer_than_the_log_rounds_once_more_in_replay(memory_of) -> None:
    for policy, passes in (("planes", [TEXT]), ("replay", [TEXT[:4], TEXT[4:]])):
        memory = memory_of("head gates", policy, s="bf16")
        decode(memory, {0: TEXT})
        assert_near(memory, "head gates", passes, s="bf16")


@pytest.mark.parametrize("policy", POLICIES)
def test_f32_changes_no_bit(memory_of, policy: str) -> None:
    plain, typed = (memory_of("head gates", policy, s=s, r=s) for s in ("f32", "f32"))
    assert typed.layout.states == plain.layout.states
    exact = POLICIES[policy](LAYERS["head gates"].layout, 1, 3, CPU)
    for memory in (typed, exact):
        decode(memory, {0: TEXT[:5]})
        decode(memory, {0: TEXT[5:]})
    assert same(copies(typed, 0), copies(exact, 0))


def test_states_that_are_put_are_rounded(memory_of) -> None:
    source, memory = memory_of("mamba", "ring"), memory_of("mamba", "ring", s="f16")
    decode(source, {0: TEXT})
    memory.put(0, 7, source.live(0))
    for key, state in memory.live(0).items():
        kept = source.live(0)[key]
        wanted = kept if memory.layout.states[key].is_window else cast(kept, "f16").float()
        assert torch.equal(state, wanted)


def test_tokens_are_never_rounded() -> None:
    found = stored_as(NGRAMS.layout, "bf16", "bf16", "bf16").states
    for key, one in NGRAMS.layout.states.items():
        assert (found[key] is one) == isinstance(one, TokenWindow)


@pytest.mark.parametrize("policy", ["planes", "checkpoint"])
def test_the_fault_rounds_what_is_kept_and_not_what_goes_on(memory_of, policy: str) -> None:
    memory = memory_of("head gates", policy, faults=["bf16-snapshots"])
    decode(memory, {0: TEXT[:4]})
    newest = memory.live(0)
    assert not all(torch.equal(cast(x, "bf16"), x.double()) for x in newest.values())
    assert_near(memory, "head gates", [TEXT[:4]])
    saved = memory.save(0)
    decode(memory, {0: TEXT[4:7]})
    if not memory.seq_rm(0, 5):
        memory.restore(0, saved)
        for key, state in memory.live(0).items():
            assert torch.equal(state.double(), cast(newest[key], "bf16"))
        return
    exact = memory_of("head gates", policy)
    decode(exact, {0: TEXT[:4]})
    decode(exact, {0: TEXT[4:7]})
    assert exact.seq_rm(0, 5)
    for key, state in memory.live(0).items():
        assert torch.equal(state.double(), cast(exact.live(0)[key], "bf16"))
