"""Runs whose output keeps to a grammar: with every drafter, policy and rule the text fits it, and
is that of plain constrained decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.findings.check import RULES, find
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LaneSpec
from engine.draft.suffix import SuffixOptions
from engine.errors import GrammarFileError, OptionError
from engine.options import (
    REPLAY_MODES,
    ROLLBACK_POLICIES,
    Prompt,
    RunOptions,
    SamplerOptions,
    SpecOptions,
)
from engine.sampling import grammar as grammar_module
from engine.sampling.grammar import GrammarState
from engine.session import Session
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.comparisons import finish, verdicts
from tests.support.golden_runs import MTP_MODELS, decode, prompt_of, session, tokens_of
from tests.support.grammar_runs import (
    LETTERS,
    fits_letters,
    fits_schema,
    plain,
    rules_file,
    schema_file,
)
from tests.support.observed_texts import CAPTURED_TARGET
from tests.support.round_rows import serious

N = 60
TEXTS = ("data = ", "import json\n\nconfig = ", "x = json.loads('", "def f():\n    return ")


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(DEMO_TARGET, DEMO_DRAFT, compute="f32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grammars")


def prompts(opened: Session) -> list[Prompt]:
    return [opened.prompt(text) for text in TEXTS]


@pytest.mark.parametrize(("temp", "slots"), [(0.0, (1, 4, 4, 1)), (0.8, (4, 1, 1, 4))])
@pytest.mark.thinned(4)
def test_every_drafter_gives_the_text_of_plain_constrained_decoding(demo, folder, temp, slots):
    sampler = replace(schema_file(folder), temp=temp)
    base = RunOptions(n_predict=N, sampler=sampler)
    run = decode(demo, prompts(demo), base)
    expected = tokens_of(run)
    assert all(fits_schema(result.text) for result in run.results())
    assert {result.stop for result in run.results()} == {"end"}
    accepted = []
    drafters = (("draft-mtp",), ("draft-simple",), ("suffix",), ("ngram-cache", "draft-mtp"))
    for types, n in zip(drafters, slots, strict=True):
        spec = SpecOptions(types=types, suffix=SuffixOptions(max_spec_factor=2.0))
        again = decode(demo, prompts(demo), replace(base, spec=spec, parallel=n))
        assert tokens_of(again) == expected, (types, n)
        assert find(again.trace) == []
        accepted.append(again.summary()["draft_n_accepted"])
    assert min(accepted) > 0


@pytest.fixture(scope="module")
def penalised(demo, folder) -> tuple[RunOptions, list[list[int]]]:
    """Options of two sequences with a repeat penalty, and the tokens of plain decoding."""
    sampler = replace(schema_file(folder), temp=0.8, repeat_penalty=1.2)
    base = RunOptions(n_predict=N, sampler=sampler, parallel=2)
    return base, tokens_of(decode(demo, prompts(demo)[:3], base))


@pytest.mark.parametrize(
    ("policy", "replay"), [*zip(ROLLBACK_POLICIES, cycle(REPLAY_MODES)), ("checkpoint", "verify")]
)
@pytest.mark.thinned(4)
def test_every_policy_rolls_the_grammar_back_and_the_fault_is_named(
    demo, penalised, policy, replay
):
    """With one snapshot and drafts of five some rollbacks restore a checkpoint, too."""
    base, plain_tokens = penalised
    spec = SpecOptions(types=("draft-mtp",), n_max=5)
    options = replace(base, spec=spec, rollback=policy, replay=replay, n_rs_seq=1)
    run = decode(demo, prompts(demo)[:3], options)
    assert tokens_of(run) == plain_tokens
    assert find(run.trace) == []
    assert run.trace.rounds.column("rollback_depth").max() > 0

    faulty = decode(demo, prompts(demo)[:3], replace(options, faults=("sampler-not-restored",)))
    named = [f for f in find(faulty.trace) if f.rule == "sampler-not-restored"]
    assert named
    for finding in named:
        rounds = faulty.trace.rounds
        mine = (rounds.column("seq_id") == finding.seq_id) & (rounds.column("rollback_depth") > 0)
        assert finding.round == rounds.column("round")[mine][0], "the first rollback"


def test_a_grammar_that_is_not_rolled_back_spoils_the_text(folder):
    opened = Session.open(CAPTURED_TARGET, compute="f32")
    spec = SpecOptions(types=("draft-mtp",), n_max=5)
    options = RunOptions(n_predict=N, sampler=schema_file(folder), spec=spec)
    faulty = decode(
        opened, prompts(opened)[:1], replace(options, faults=("sampler-not-restored",))
    ).results()[0]
    with pytest.raises(ValueError, match="delimiter"):
        fits_schema(faulty.text)


def test_rejection_fits_too(demo, folder):
    sampler = replace(schema_file(folder), temp=0.8)
    for types in (("draft-mtp",), ("suffix", "draft-simple")):
        spec = SpecOptions(types=types, accept="rejection")
        options = RunOptions(n_predict=N, sampler=sampler, spec=spec, parallel=4)
        run = decode(demo, prompts(demo), options)
        assert all(fits_schema(result.text) for result in run.results())
        assert find(run.trace) == []


@pytest.mark.parametrize("name", [*MTP_MODELS[:2], "qwen3-f-f32"])
def test_small_vocabularies(name, folder):
    opened = session(name)
    for sampler in (rules_file(folder, LETTERS), replace(rules_file(folder, LETTERS), temp=0.8)):
        base = RunOptions(n_predict=N, sampler=sampler, parallel=2)
        texts = [prompt_of(name), Prompt(prompt_of(name).tokens[3:])]
        run = decode(opened, texts, plain(base))
        assert all(fits_letters(result.text) for result in run.results())
        types = ("suffix", "draft-mtp") if name in MTP_MODELS else ("suffix",)
        again = decode(opened, texts, replace(base, spec=SpecOptions(types=types)))
        assert tokens_of(again) == tokens_of(run)


def test_what_the_grammar_forbids_is_in_the_trace(demo, folder, tmp_path):
    spec = SpecOptions(types=("draft-mtp",), n_max=4)
    options = RunOptions(n_predict=N, sampler=schema_file(folder), spec=spec)
    run = decode(demo, prompts(demo)[:1], options)
    assert "grammar" in run.trace.drafts.texts("reason")
    tokens = run.trace.tokens
    ids, forbidden = tokens.column("target_top_id"), tokens.column("target_top_forbidden")
    chosen = tokens.column("token_id")[:, None]
    known = forbidden >= 0
    assert (known == (ids >= 0)).all()
    assert forbidden[known].mean() > 0.5, "a model of code seldom wants this JSON"
    emitted = np.isin(tokens.texts("kind"), ("accepted", "replacement", "bonus", "target"))
    assert not forbidden[(ids == chosen) & known & emitted[:, None]].any()
    drafted = tokens.column("draft_top_forbidden")
    assert {0, 1} <= set(drafted[drafted >= 0].tolist())
    # the grammar begins with a brace, and so does the first row
    brace = demo.tokenizer.ids_of_piece(b"{")
    first = np.flatnonzero(known.any(1))[0]
    assert [not known for known in forbidden[first]] == [i in brace for i in ids[first]]
    export_csv(run.trace, tmp_path / "out")
    again = open_trace(tmp_path / "out").tokens
    for name in ("target_top_forbidden", "draft_top_forbidden"):
        assert (again.column(name) == tokens.column(name)).all()


def test_lanes_keep_to_the_grammar(demo, folder):
    spec = SpecOptions(types=("draft-mtp",))
    options = RunOptions(n_predict=N, sampler=schema_file(folder), spec=spec)
    lanes = [LaneSpec.parse(text) for text in ("planes", "ring,free")]
    comparison = finish(Comparison(demo, prompts(demo)[:1], options, lanes))
    assert fits_schema(comparison.texts[0])
    assert serious(find(comparison.trace)) == []
    assert verdicts(comparison)["ring,free"].n_forks == 0


def test_an_error_of_the_grammar_ends_its_sequence_alone(demo, folder, monkeypatch):
    """The second sequence's matcher runs into a limit after its tenth token."""
    whole = decode(demo, prompts(demo)[:2], RunOptions(n_predict=N, sampler=schema_file(folder)))
    states: list[GrammarState] = []
    start = grammar_module.Grammar.start
    allowed = GrammarState.allowed

    def first_ones(grammar):
        states.append(start(grammar))
        states[-1].is_second = len(states) == 2
        return states[-1]

    def limited(state):
        if getattr(state, "is_second", False) and state.n_good == 10:
            state.fail("Too many items")
        return allowed(state)

    monkeypatch.setattr(grammar_module.Grammar, "start", first_ones)
    monkeypatch.setattr(GrammarState, "allowed", limited)
    spec = SpecOptions(types=("draft-mtp",), n_max=4)
    options = RunOptions(n_predict=N, sampler=schema_file(folder), spec=spec, parallel=2)
    run = decode(demo, prompts(demo)[:2], options)
    first, second = run.results()
    assert (first.stop, second.stop) == ("end", "grammar")
    assert first.tokens == tokens_of(whole)[0]
    assert second.tokens == tokens_of(whole)[1][:10]
    (finding,) = find(run.trace)
    assert (finding.rule, finding.seq_id) == ("grammar-failed", 1)
    assert "Too many items" in finding.message
    assert str(len(prompts(demo)[1].tokens) + 10) in finding.evidence
    assert RULES["grammar-failed"].severity == "warning"


def test_a_bias_that_bans_what_the_grammar_needs(demo, folder):
    for bias, stop in ((-1e30, "end"), (-np.inf, "grammar")):
        biases = tuple((token, bias) for token in demo.tokenizer.ids_of_piece(b"{"))
        sampler = replace(schema_file(folder), logit_bias=biases)
        (result,) = decode(demo, prompts(demo)[:1], RunOptions(sampler=sampler)).results()
        assert (result.stop, not result.tokens) == (stop, stop == "grammar")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '\n{"type" "object"}', "a.json: line 2, column 9: no JSON"),
        ("a.json", '{"type": "objekt"}', "a.json: schema: Invalid type: objekt."),
        ("a.json", "[" * 100_000, "a.json: line 1, column 1: no JSON: it is nested more than 64"),
        ("a.json", '{"type": "string", "pattern": "("}', "regex parse error: unclosed group."),
        ("a.lark", 'start: "a" b\n', 'a.lark: line 1, column 8: unknown name: "b".'),
        ("a.lark", 'start: "a"\nb: (\n', "a.lark: line 2, column 5: Expected token"),
        ("a.lark", 'begin: "a"\n', "a.lark: grammar: no start rule found."),
        ("a.lark", "", "a.lark: grammar: Empty grammar."),
        ("a.lark", 'start: "a"\n' * 200_000, "a.lark is larger than 1 MiB."),
        ("a.lark", b"\xff", "a.lark: line 1 is not UTF-8 text."),
        ("a.lark", None, "a.lark cannot be read: No such file or directory."),
    ],
)
def test_a_broken_file_is_named(demo, tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    field = "json_schema" if name.endswith("json") else "grammar_file"
    options = RunOptions(sampler=SamplerOptions(**{field: str(path)}))
    with pytest.raises((GrammarFileError, OptionError)) as caught:
        demo.start(prompts(demo)[:1], options)
    assert message in caught.value.message
    assert caught.value.message.count("\n") == 0


def test_options_that_contradict_a_grammar(folder):
    sampler = schema_file(folder)
    with pytest.raises(OptionError, match="--ignore-eos"):
        RunOptions(sampler=sampler, ignore_eos=True)
    with pytest.raises(OptionError, match="both given"):
        SamplerOptions(json_schema="a", grammar_file="b")
