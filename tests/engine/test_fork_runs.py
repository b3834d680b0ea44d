"""Runs that go on from a round of another one: as that one did with the same options, with the text
of plain decoding whatever drafts and undoes, and with a text of their own after another token."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import OptionError, TraceFileError
from engine.fork import Fork, fork_lines
from engine.gguf.content import HASH_S
from engine.options import ROLLBACK_POLICIES, Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.run import Run
from engine.run_checkpoints import RunCheckpoints
from engine.session import Session
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import RunRef
from tests.support.fork_campaign import forked, play, ref, rounds_of
from tests.support.golden_files import golden_file
from tests.support.golden_runs import decode, options_of, prompt_of, session, tokens_of
from tests.support.recorded_runs import assert_same

MTP = "qwen35-c-v2x-mtp-f32"


def recorded_text(run: Run) -> list[int]:
    """What the trace says that the only sequence put out."""
    tokens = run.trace.tokens
    rows = np.flatnonzero(np.isin(tokens.texts("kind"), EMITTED_KINDS))
    order = np.argsort(tokens.column("pos")[rows], kind="stable")
    found: list[int] = tokens.column("token_id")[rows][order].tolist()
    return found


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_with_equal_options_it_is_the_rest_of_its_parent(seed: int) -> None:
    """Any family, drafter, policy, sampler and grammar: every number that is recorded is equal."""
    play(seed)


@settings(max_examples=8, deadline=None)
@given(
    at=st.integers(1, 8),
    policy=st.sampled_from(list(ROLLBACK_POLICIES)),
    drafter=st.sampled_from(["draft-mtp", "ngram-simple", "ngram-mod", "none"]),
    n_max=st.integers(1, 5),
    temp=st.sampled_from([0.0, 0.8]),
)
def test_another_drafter_or_policy_changes_no_token(
    at: int, policy: str, drafter: str, n_max: int, temp: float
) -> None:
    """A drafter that was not there before knows the text; a memory has what the first one held."""
    sampler = SamplerOptions(temp=temp, seed=5, repeat_penalty=1.2)
    options = replace(options_of(24, "draft-mtp"), sampler=sampler)
    parent = decode(session(MTP), [prompt_of(MTP)], options)
    types = () if drafter == "none" else (drafter,)
    later = replace(options, rollback=policy, spec=SpecOptions(types=types, n_max=n_max))
    fork = Fork(ref(parent), min(at, rounds_of(parent)))
    run = forked(session(MTP), fork, later)
    assert tokens_of(run) == tokens_of(parent)
    drafters = run.trace.rounds.texts("drafter")
    numbers = run.trace.rounds.column("round")
    used = {name for name, round_ in zip(drafters, numbers, strict=True) if round_ >= fork.round}
    assert used <= {"", drafter}


def test_drafts_of_a_drafter_that_followed_are_those_of_one_that_was_asked() -> None:
    """Both know the same text, so that the next draft is the same one."""
    name, options = MTP, options_of(24, "draft-mtp", n_max=3)
    parent = decode(session(name), [prompt_of(name)], options)
    at = rounds_of(parent) // 2
    later = replace(options, spec=replace(options.spec, n_max=2))
    run = forked(session(name), Fork(ref(parent), at), later)

    def drafted(of: Run) -> list[int]:
        table = of.trace.tokens
        chosen = (table.column("round") == at) & (table.column("draft_index") >= 0)
        return table.column("token_id")[chosen].tolist()

    assert drafted(run) == drafted(parent)[:2]


@pytest.mark.parametrize(("temp", "replay"), [(0.0, "trust"), (0.8, "trust"), (0.8, "verify")])
def test_a_forced_token_is_followed_by_what_plain_decoding_says(temp: float, replay: str) -> None:
    """At every position, also in the middle of an accepted draft."""
    sampler = SamplerOptions(temp=temp, seed=3, repeat_penalty=1.3)
    policy = "planes" if replay == "trust" else "checkpoint"
    options = replace(
        options_of(14, "draft-simple", n_max=4), sampler=sampler, replay=replay, rollback=policy
    )
    open_, prompt = session(MTP, MTP), prompt_of(MTP)
    parent = decode(open_, [prompt], options)
    (text,) = tokens_of(parent)
    n = len(prompt.tokens)
    for at in range(0, 12, 2):
        token = (text[at] + 7) % open_.config.n_vocab
        fork = Fork.after(ref(parent), n + at, token=token)
        run = forked(open_, fork, options)
        (found,) = tokens_of(run)
        assert found[: at + 1] == [*text[:at], token]
        assert recorded_text(run) == found
        if temp == 0:
            start = Prompt((*prompt.tokens, *text[:at], token))
            plain = decode(open_, [start], replace(options_of(14 - at - 1), sampler=sampler))
            assert found[at + 1 :] == tokens_of(plain)[0]


def test_another_seed_parts_from_the_text_and_only_there() -> None:
    options = replace(options_of(30, "draft-mtp"), sampler=SamplerOptions(temp=1.5, seed=1))
    parent = decode(session(MTP), [prompt_of(MTP)], options)
    later = replace(options, sampler=replace(options.sampler, seed=2))
    fork = Fork(ref(parent), 6)
    run = forked(session(MTP), fork, later, beside=True)
    assert run.trace is parent.trace and run.trace.runs[1].fork is not None
    tokens = run.trace.tokens
    before = int(
        (
            np.isin(tokens.texts("kind"), ("accepted", "replacement", "bonus", "target"))
            & (tokens.column("run_id") == 0)
            & (tokens.column("round") < 6)
        ).sum()
    )
    (ours,), (theirs,) = tokens_of(run), tokens_of(parent)
    assert ours[:before] == theirs[:before] and ours != theirs
    lines = list(fork_lines(RunRef(run.trace, 1)))
    assert "rounds 0 to 5 decoded again" in lines[0]
    position = len(prompt_of(MTP).tokens) + next(
        i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b
    )
    assert lines[-1].endswith(f"differ from position {position} on")


@pytest.mark.parametrize("at", [(3, 7), (7, 3), (5, 5)])
def test_a_fork_is_forked(at: tuple[int, int]) -> None:
    """With its own options it is the rest of that fork again, whichever of the two lies first."""
    options = replace(options_of(30, "draft-mtp"), sampler=SamplerOptions(temp=0.9, seed=1))
    parent = decode(session(MTP), [prompt_of(MTP)], options)
    later = replace(options, spec=replace(options.spec, n_max=2), rollback="ring")
    later = replace(later, sampler=replace(later.sampler, seed=2))
    first = forked(session(MTP), Fork(ref(parent), at[0], token=77), later, beside=True)
    second = forked(session(MTP), Fork(ref(first), at[1]), later, beside=True)
    if at[1] >= at[0]:
        assert tokens_of(second) == tokens_of(first)
        assert_equal_rounds(second, first)
    else:
        assert tokens_of(second) != tokens_of(first) and 77 not in tokens_of(second)[0][:8]
    if at[1] == at[0]:
        other = forked(session(MTP), Fork(ref(first), at[1], token=78), later)
        assert 78 in tokens_of(other)[0] and 77 not in tokens_of(other)[0][:12]
    fork = second.trace.runs[2].fork
    assert fork is not None and fork.parent == 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({}, {"n_max": 5}),
        ({}, {"n_max": 2, "rollback": "checkpoint"}),
        ({}, {"p_min": 0.4, "seed": 9}),
        ({"rollback": "ring"}, {"types": ()}),
        ({"types": ("draft-simple",)}, {"types": ("draft-simple",), "n_max": 5}),
    ],
)
@pytest.mark.thinned(4)
def test_from_a_checkpoint_it_goes_on_as_one_that_was_decoded_again(
    first: dict[str, Any], later: dict[str, Any]
) -> None:
    """Also with other options, a token forced inside a round, and as a fork of a fork."""

    def options(types=("draft-mtp",), n_max=3, p_min=0.0, seed=1, rollback="planes"):
        spec = SpecOptions(types=types, n_max=n_max, p_min=p_min)
        sampler = SamplerOptions(temp=0.9, seed=seed)
        return RunOptions(n_predict=40, spec=spec, sampler=sampler, rollback=rollback)

    kept, open_ = RunCheckpoints(), session(MTP, MTP)
    parent = decode(open_, [prompt_of(MTP)], options(**first), kept)
    others = options(**{**first, **later})
    position = len(prompt_of(MTP).tokens) + 17
    forks = [Fork(ref(parent), 8), Fork.after(ref(parent), position, token=77)]
    again = forked(open_, forks[0], others, beside=True)
    forks.append(Fork(ref(again), rounds_of(again) - 1))
    for fork in forks:
        restored = forked(open_, fork, others, kept)
        decoded = forked(open_, fork, others, beside=True)
        assert_same(restored, decoded)
        origin = restored.trace.runs[restored.run_id].fork
        assert origin is not None and origin.rebuilt.startswith("restored checkpoint of round ")


def test_what_cannot_be_restored_says_why() -> None:
    kept, options = RunCheckpoints(), options_of(24, "draft-mtp")
    parent = decode(session(MTP), [prompt_of(MTP)], options, kept)
    for at, later, why in (
        (2, options, "as no earlier checkpoint is kept"),
        (9, options_of(24, "suffix"), "as suffix has to read the text from its start"),
    ):
        run = forked(session(MTP), Fork(ref(parent), at), later, kept)
        fork = run.trace.runs[run.run_id].fork
        assert fork is not None
        assert fork.rebuilt == f"rounds 0 to {at - 1} decoded again, {why}"


def test_checkpoints_stay_within_their_bounds_and_go_with_their_trace() -> None:
    kept = RunCheckpoints()
    options = options_of(80)
    parent: Run | None = decode(session(MTP), [prompt_of(MTP)], options, kept)
    rounds = [one.round for one in kept]
    assert rounds == [16, 32, 48, 64]
    sizes = [one.n_bytes for one in kept]
    assert min(sizes) > 0
    parent = None
    gc.collect()
    assert not list(kept) and parent is None
    few = RunCheckpoints(sum(sizes[:2]))
    runs = [decode(session(MTP), [prompt_of(MTP)], options, few) for _ in range(2)]
    assert sum(one.n_bytes for one in few) <= sum(sizes[:2])
    assert {one.store() for one in few} == {runs[1].trace}
    none = RunCheckpoints(1)
    assert decode(session(MTP), [prompt_of(MTP)], options, none) and not list(none)


def assert_equal_rounds(one: Run, other: Run) -> None:
    """Drafts and verdicts of two runs of a trace."""
    rounds = one.trace.rounds
    for name in ("round", "num_draft_tokens", "num_accepted_draft_tokens", "rollback_depth"):
        values = [
            rounds.column(name)[rounds.column("run_id") == run.run_id] for run in (one, other)
        ]
        np.testing.assert_array_equal(*values)


def test_a_copy_of_the_model_is_known_by_its_tensors(tmp_path: Path) -> None:
    data = bytearray(golden_file(f"{MTP}.gguf").read_bytes())
    run = ref(decode(session(MTP), [prompt_of(MTP)], options_of(6)))
    mine = session(MTP)
    assert mine.content is not None
    mine.content.find(HASH_S)
    (tmp_path / "copy.gguf").write_bytes(data)
    opened = Session.open(tmp_path / "copy.gguf", compute="f32")
    Fork(run, 1).check_model(opened.identity, "f32", opened.content)
    data[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(data)
    opened = Session.open(tmp_path / "other.gguf", compute="f32")
    with pytest.raises(OptionError, match="The run had another model"):
        Fork(run, 1).check_model(opened.identity, "f32", opened.content)


def test_what_cannot_be_forked_is_refused_in_a_sentence() -> None:
    parent = decode(session(MTP), [prompt_of(MTP)], options_of(6, "draft-mtp"))
    with pytest.raises(OptionError, match="no round 0"):
        Fork(ref(parent), 0)
    with pytest.raises(OptionError, match="no round 99"):
        Fork(ref(parent), 99)
    with pytest.raises(OptionError, match="position 1 "):
        Fork.after(ref(parent), 1)
    with pytest.raises(OptionError, match="The run had another model"):
        Fork(ref(parent), 1).check_model(session("qwen35-a-f32").identity, "f32")
    with pytest.raises(OptionError, match="computed in f32"):
        Fork(ref(parent), 1).check_model(session(MTP).identity, "bf16")
    with pytest.raises(OptionError, match="--parallel"):
        forked(session(MTP), Fork(ref(parent), 1), replace(options_of(6), parallel=2))
    tokens = parent.trace.tokens
    at = int(np.flatnonzero(np.array(tokens.texts("kind")) != "prompt")[0])
    tokens._arrays["token_id"].flags.writeable = True
    tokens._arrays["token_id"][at] += 1  # another text is not what was recorded
    with pytest.raises(OptionError, match="again gave another text"):
        forked(session(MTP), Fork(ref(parent), rounds_of(parent)), options_of(6, "draft-mtp"))
    parent.trace.runs[0]["source"] = {"engine": "llama.cpp"}
    with pytest.raises(TraceFileError, match="llama"):
        Fork(ref(parent), 1)
