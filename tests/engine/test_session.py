"""The decoding loop against golden traces and against plain decoding."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engine.errors import (
    Cancelled,
    ContextFullError,
    ModelFileError,
    OptionError,
    VocabularyMismatchError,
)
from engine.options import Prompt, RunOptions, SamplerOptions
from engine.session import Session
from resources import DEMO_TARGET
from tests.support.all_pairs import all_pairs
from tests.support.golden_files import second_set, with_mtp
from tests.support.golden_runs import (
    DATA,
    MODELS,
    MTP_MODELS,
    SAMPLED,
    decode,
    golden,
    options_of,
    prompt_of,
    session,
    tokens_of,
)


@pytest.mark.parametrize("name", [*MODELS, *second_set()])
@pytest.mark.thinned(8)
def test_greedy_decoding_gives_the_golden_tokens(name):
    run = decode(session(name), [prompt_of(name)], options_of())
    assert tokens_of(run) == [golden(name)["greedy"].tolist()]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_within_the_golden_bounds(name):
    data = golden(name)
    expected = data.get("logits_deq", data["logits"])
    got = session(name).logits(data["tokens"].tolist())[data["rows"]]
    worst = np.abs(got - expected).max(1)
    assert worst.max() <= 1e-3
    assert np.median(worst) <= 1e-4


@pytest.mark.parametrize("name", [*MTP_MODELS, *with_mtp(second_set())])
@pytest.mark.thinned(4)
def test_mtp_drafts_and_acceptance_follow_the_golden_trace(name):
    data = golden(name)
    run = decode(session(name), [prompt_of(name)], options_of(60, "draft-mtp"))
    assert tokens_of(run)[0][:40] == data["spec_out"].tolist()[:40]
    rounds, tokens = run.trace.rounds, run.trace.tokens
    drafts = tokens.column("draft_index") >= 0
    columns = (data[f"spec_{name}"] for name in ("past", "last", "draft", "accepted"))
    for i, (past, last, draft, accepted) in enumerate(zip(*columns, strict=True)):
        row = rounds.row(i + 1)
        assert row["pos0"] == past
        here = (tokens.column("round") == i + 1) & drafts
        assert tokens.column("token_id")[here].tolist() == draft.tolist()
        assert row["num_accepted_draft_tokens"] == accepted
        emitted = tokens.column("token_id")[tokens.column("pos") == past]
        assert last in emitted


VARIANTS = {
    "planes": {},
    "checkpoint": {"rollback": "checkpoint"},
    "planes too few": {"n_rs_seq": 1},
    "ubatch below draft": {"n_ubatch": 2},
    "one sequence per ubatch": {"split": "seq"},
}


PAIRS = [
    *((name, None, "draft-mtp") for name in MTP_MODELS),
    ("qwen35-b-v2x-tied-f32", "qwen35-a-f32", "draft-simple"),
    ("qwen35-c-v2x-mtp-f32", "qwen35-c-v2x-mtp-f32", "draft-simple"),
    ("qwen3next-e-v2x-f32", "qwen3next-e-v2x-f32", "draft-simple"),
    ("qwen3-f-f32", "qwen3next-e-v2x-f32", "draft-simple"),
    ("qwen3next-e-v2x-f32", "qwen3-f-f32", "draft-simple"),
]


@cache
def plain_tokens(name: str, sampler: SamplerOptions) -> list[list[int]]:
    options = replace(options_of(30), sampler=sampler)
    return tokens_of(decode(session(name), [prompt_of(name)], options))


@pytest.mark.parametrize(
    ("models", "variant", "sampler"), all_pairs(PAIRS, list(VARIANTS), (SamplerOptions(), SAMPLED))
)
@pytest.mark.thinned(8)
def test_drafting_changes_no_token(models, variant, sampler):
    name, draft, drafter = models
    options = replace(options_of(30, drafter), sampler=sampler, **VARIANTS[variant])
    run = decode(session(name, draft), [prompt_of(name)], options)
    assert tokens_of(run) == plain_tokens(name, sampler)
    paths = set(run.trace.rounds.texts("rollback_path"))
    if name == "qwen3-f-f32":
        assert paths <= {"none", "seq_rm"}
    elif variant == "checkpoint":
        assert "seq_rm" not in paths
    elif variant == "planes":
        assert paths <= {"none", "seq_rm"}


def test_restores_happen_and_replay_the_accepted_tokens():
    name = "qwen35-c-v2x-mtp-f32"
    options = replace(options_of(40, "draft-mtp"), rollback="checkpoint")
    trace = decode(session(name), [prompt_of(name)], options).trace
    paths = trace.rounds.texts("rollback_path")
    assert paths.count("restore") > 3
    replayed = [i for i, kind in enumerate(trace.tokens.texts("kind")) if kind == "replayed"]
    for i in replayed:
        row = trace.tokens.row(i)
        assert paths[row["round"]] == "restore"
    assert trace.ubatches.texts("purpose").count("replay") == paths.count("restore")
    saved = trace.rounds.column("checkpoint_bytes")
    assert (saved[trace.rounds.column("num_draft_tokens") > 0] > 0).all()


@pytest.mark.parametrize("parallel", [1, 2, 3])
@pytest.mark.thinned(4)
def test_sequences_side_by_side_give_what_they_give_alone(parallel):
    name = "qwen35-c-v2x-mtp-f32"
    opened, whole = session(name), prompt_of(name).tokens
    prompts = [Prompt(whole[:n]) for n in (32, 9, 20, 5)]
    alone = [tokens_of(decode(opened, [p], options_of(24)))[0] for p in prompts]
    for spec in ((), ("draft-mtp",)):
        run = decode(opened, prompts, replace(options_of(24, *spec), parallel=parallel))
        assert tokens_of(run) == alone


@pytest.mark.parametrize("n_max", [1, 2, 5, 16])
def test_draft_lengths(n_max):
    name = "qwen35-h-v2x-mtp-q8_0"
    run = decode(session(name), [prompt_of(name)], options_of(40, "draft-mtp", n_max=n_max))
    assert tokens_of(run) == [golden(name)["greedy"].tolist()]
    assert run.trace.rounds.column("num_draft_tokens").max() == n_max


def test_accounting_adds_up():
    name = "qwen35-c-v2x-mtp-f32"
    run = decode(session(name), [prompt_of(name)], options_of(40, "draft-mtp"))
    trace, result = run.trace, run.results()[0]
    kinds = np.array(trace.tokens.texts("kind"))
    ids = trace.tokens.column("token_id")
    emitted = np.isin(kinds, ["target", "accepted", "replacement", "bonus"])
    assert ids[emitted].tolist() == result.tokens
    assert ids[kinds == "prompt"].tolist() == result.prompt_tokens
    positions = trace.tokens.column("pos")[emitted]
    assert positions.tolist() == list(range(48, 88))
    rounds = trace.rounds
    drafted, accepted = result.timings["draft_n"], result.timings["draft_n_accepted"]
    assert (kinds == "accepted").sum() == accepted
    assert (trace.tokens.column("draft_index") >= 0).sum() == drafted
    later = rounds.column("round") > 0
    depth = rounds.column("rollback_depth")[later]
    width = rounds.column("verify_width")[later]
    assert (depth == width - 1 - rounds.column("num_accepted_draft_tokens")[later]).all()
    assert rounds.column("num_emitted").sum() == len(result.tokens)
    assert (rounds.column("kv_cells_duplicate") == 0).all()
    assert len(trace.memory) == len(rounds) * 4
    assert set(ids.tolist()) <= set(trace.pieces)


def test_limits_end_a_run():
    name = "qwen35-c-v2x-mtp-f32"
    opened, prompt = session(name), prompt_of(name)
    plain = decode(opened, [prompt], replace(options_of(-1), n_ctx=72, ignore_eos=True))
    assert plain.results()[0].stop == "context"
    drafted = replace(options_of(-1, "draft-mtp"), n_ctx=72, ignore_eos=True)
    assert tokens_of(decode(opened, [prompt], drafted)) == tokens_of(plain)
    run = opened.start([prompt], options_of(1000))
    run.step()
    run.step()
    run.stop()
    assert run.done and run.results()[0].stop == "stopped"
    assert not run.step()
    assert run.trace.runs[0]["summary"]["predicted_n"] == len(run.results()[0].tokens)


def test_a_run_begins_without_what_opening_left_in_memory(monkeypatch):
    said = []
    monkeypatch.setattr("engine.session.give_back_memory", said.append)
    run = session(MODELS[0]).start([prompt_of(MODELS[0])], options_of())
    assert said == [16 << 20]  # so that short runs do not pay for it each time
    while run.advance():
        pass
    assert len(said) == 1


def test_end_token_ends_the_sequence():
    name = "qwen35-h-v2x-mtp-q8_0"
    opened, expected = session(name), golden(name)["greedy"].tolist()
    for position in (3, 7, 10):
        end = expected[position]
        patched = Session(
            opened._model, opened.info, EndingTokenizer(opened.tokenizer, end), None, {}
        )
        first = expected.index(end)
        for types in ((), ("draft-mtp",)):
            run = decode(patched, [prompt_of(name)], options_of(40, *types))
            assert tokens_of(run) == [expected[: first + 1]]
            assert run.results()[0].stop == "end"
            emitted = run.trace.rounds.column("num_emitted").sum()
            assert emitted == first + 1
            kinds = np.array(run.trace.tokens.texts("kind"))
            ids = run.trace.tokens.column("token_id")
            shown = np.isin(kinds, ["target", "accepted", "replacement", "bonus"])
            assert ids[shown].tolist() == expected[: first + 1]


class EndingTokenizer:
    """A tokenizer with another end token."""

    def __init__(self, tokenizer, end: int) -> None:
        self._tokenizer, self.eog_ids = tokenizer, frozenset([end])

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)


def test_refusals():
    mtp, dense = session("qwen35-c-v2x-mtp-f32"), session("qwen3-f-f32")
    prompt = prompt_of("qwen35-c-v2x-mtp-f32")
    with pytest.raises(OptionError, match="needs an MTP head"):
        dense.start([prompt], options_of(4, "draft-mtp"))
    with pytest.raises(OptionError, match="needs a draft model"):
        mtp.start([prompt], options_of(4, "draft-simple"))
    with pytest.raises(OptionError, match="Token id 384"):
        mtp.start([Prompt((1, 384))], options_of(4))
    with pytest.raises(OptionError, match="empty"):
        mtp.start([Prompt(())], options_of(4))
    with pytest.raises(OptionError, match=r"^The prompt is empty"):
        mtp.start([Prompt(())] * 3, options_of(4))
    with pytest.raises(OptionError, match=r"^Prompt 1 is empty"):
        mtp.start([prompt, Prompt(())], options_of(4))
    with pytest.raises(ContextFullError, match="Raise -c"):
        mtp.start([prompt], replace(options_of(4), n_ctx=16))
    with pytest.raises(VocabularyMismatchError, match="sizes differ"):
        Session.open(DEMO_TARGET, DATA / "qwen35-a-f32.gguf", compute="f32")
    with pytest.raises(ModelFileError):
        Session.open(DATA / "qwen35-a-f32.npz")


def test_loading_reports_bytes_and_can_be_cancelled():
    seen = []
    path, draft = DATA / "qwen35-b-v2x-tied-f32.gguf", DATA / "qwen35-a-f32.gguf"
    Session.open(path, draft, compute="f32", progress=lambda *step: seen.append(step))
    done = [step[0] for step in seen]
    assert done == sorted(done) and len({step[1] for step in seen}) == 1
    assert 0.9 * seen[0][1] <= done[-1] <= seen[0][1]
    with pytest.raises(Cancelled):
        Session.open(path, compute="f32", cancelled=lambda: True)


def test_a_pause_does_not_count(monkeypatch):
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    monkeypatch.setattr("engine.decode.recorder.run_clock", clock)
    name = "qwen35-c-v2x-mtp-f32"
    run = session(name).start([prompt_of(name)], options_of(12))
    for _ in range(3):
        run.step()
    now += 1000.0
    while run.step():
        pass
    t_ms = run.trace.rounds.column("t_ms")
    assert (np.diff(t_ms) > 0).all()
    assert t_ms[-1] < 10_000


def test_other_compute_modes_are_loaded_once_and_given_back():
    opened = Session.open(DATA / f"{MTP_MODELS[0]}.gguf", compute="f32")
    assert opened.model_in("f32") is opened.model
    narrow = opened.model_in("int8")
    assert (narrow.compute, opened.compute) == ("int8", "f32")
    assert opened.model_in("int8") is narrow
    assert narrow.weight_bytes < opened.model.weight_bytes
    del narrow
    gc.collect()
    assert not opened._loaded_again


@pytest.mark.parametrize("kind", ["another model", "trained on"])
def test_a_file_that_has_changed_is_not_loaded_again(tmp_path, kind):
    path = tmp_path / "model.gguf"
    data = bytearray((DATA / "qwen35-a-f32.gguf").read_bytes())
    path.write_bytes(data)
    opened = Session.open(path, compute="f32")
    if kind == "another model":
        data = (DATA / "qwen35-b-v2x-tied-f32.gguf").read_bytes()
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="has changed since it was opened"):
        opened.model_in("int8")


def test_weights_without_a_file_cannot_be_loaded_again():
    opened = session(MTP_MODELS[0])
    bare = Session(opened.model, opened.info, opened.tokenizer, None, {})
    with pytest.raises(OptionError, match="was not loaded from a file"):
        bare.model_in("int8")


def test_the_continuation_is_plain_decoding_as_far_as_it_is_asked_for():
    name = MTP_MODELS[0]
    options = options_of(40, "draft-mtp", kv="unified", parallel=3, faults=("stale-logits",))
    tokens = session(name).continuation(prompt_of(name), options)
    assert [next(tokens) for _ in range(7)] == golden(name)["greedy"].tolist()[:7]
    assert len(list(tokens)) == 33


def test_a_file_written_to_while_its_blocks_are_in_use_is_not_run(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes((DATA / "qwen35-g-v2x-q4_k_m.gguf").read_bytes())
    in_blocks, expanded = (
        Session.open(path, compute=mode, mmap=True) for mode in ("blocks", "f32")
    )
    prompt = Prompt((1, 2, 3), "")
    in_blocks.start([prompt], RunOptions(n_predict=2))
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(0, 1))
    for begin in (lambda: in_blocks.start([prompt], RunOptions()), lambda: in_blocks.logits([1])):
        with pytest.raises(ModelFileError, match="has changed since it was opened"):
            begin()
    assert len(expanded.logits([1, 2])) == 2
