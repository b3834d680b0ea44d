"""Options of the drafters on the command line: names, defaults, notes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cli.parser import parser_of
from app.cli.run_arguments import run_options
from engine.draft.spec import MTP_HEAD
from engine.options import DRAFTERS, RunOptions, SpecOptions
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

MTP = ROOT / "tests" / "data" / "qwen35-c-v2x-mtp-f32.gguf"
ALL_IDS = ",".join(map(str, range(384)))
RUN = ("run", MTP, "--tokens", ALL_IDS, "-n", 12, "--compute", "f32", "--threads", 1)


def options(*words: object) -> RunOptions:
    parser = parser_of("run")
    return run_options(parser.parse_args([str(word) for word in words]))


def test_defaults_are_those_of_the_engine() -> None:
    assert options().spec == SpecOptions()
    spec = SpecOptions()
    for sizes in (spec.ngram_simple, spec.ngram_map_k, spec.ngram_map_k4v):
        assert (sizes.size_n, sizes.size_m, sizes.min_hits) == (12, 48, 1)
    assert (spec.ngram_mod.n_match, spec.ngram_mod.n_min, spec.ngram_mod.n_max) == (24, 48, 64)


def test_every_option_has_its_place() -> None:
    words: list[object] = []
    expected: dict[str, Any] = {}
    number = 10
    for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"):
        fields = (
            ("n-match", "n-min", "n-max")
            if name == "ngram-mod"
            else ("size-n", "size-m", "min-hits")
        )
        for field in fields:
            number += 1
            words += [f"--spec-{name}-{field}", number]
            expected[f"{name}.{field}".replace("-", "_")] = number
    for field in ("max-tree-depth", "n-max", "max-cached-requests", "max-spec-factor"):
        number += 1
        words += [f"--spec-suffix-{field}", number]
        expected[f"suffix.{field}".replace("-", "_")] = number
    words += ["--spec-suffix-max-spec-offset", -1, "--spec-suffix-min-token-prob", 0.5]
    expected |= {"suffix.max_spec_offset": -1, "suffix.min_token_prob": 0.5}
    words += ["-lcs", "a.bin", "--lookup-cache-dynamic", "b.bin"]
    spec = options(*words).spec
    for place, value in expected.items():
        drafter, field = place.split(".")
        assert getattr(getattr(spec, drafter), field) == value
    assert (spec.lookup_cache_static, spec.lookup_cache_dynamic) == ("a.bin", "b.bin")


@pytest.mark.parametrize(
    ("words", "types"),
    [
        (["--spec-default"], ("ngram-mod",)),
        (["--spec-default", "--spec-type", "draft-mtp"], ("draft-mtp", "ngram-mod")),
        (["--spec-default", "--spec-type", "ngram-mod"], ("ngram-mod",)),
        (["--spec-default", "--spec-type", "none"], ()),
        (["--spec-type", "draft-mtp,none,ngram-mod"], ()),
        (["--spec-type", "ngram-mod, ngram-cache,ngram-mod"], ("ngram-mod", "ngram-cache")),
    ],
)
def test_types(words: list[str], types: tuple[str, ...]) -> None:
    assert options(*words).spec.types == types


def test_a_chain_runs_and_is_counted(cli: Cli) -> None:
    plain = cli(*RUN, "--json").json
    names = [name for name, spec in DRAFTERS.items() if spec.needs in (None, MTP_HEAD)]
    words = ("--spec-type", ",".join(names))
    outcome = cli(
        *RUN, *words, "--spec-ngram-simple-size-n", 1, "--spec-ngram-simple-size-m", 2, "--json"
    )
    assert outcome.err == ""
    report = outcome.json
    assert report["sequences"][0]["tokens"] == plain["sequences"][0]["tokens"]
    assert report["options"]["synthetic"] is False
    drafters = report["totals"]["drafters"]
    assert list(drafters) == names
    assert drafters["ngram-simple"]["n_gen_tokens"] > 0


def test_synthetic_output_is_marked(cli: Cli) -> None:
    words = (*RUN, "--ignore-eos", "--spec-type", "draft-mtp", "--spec-synth-rates", "1,1,1")
    outcome = cli(*words, "--json")
    assert "note: acceptance is synthetic" in outcome.err
    assert outcome.json["options"]["synthetic"] is True
    assert outcome.json["totals"]["draft_acceptance_rate"] == 1.0
    as_length = cli(
        *RUN, "--ignore-eos", "--spec-type", "draft-mtp", "--spec-synth-len", 4, "--json"
    ).json
    assert as_length["sequences"][0]["tokens"] == outcome.json["sequences"][0]["tokens"]


def test_an_option_of_a_drafter_that_is_not_in_use_is_noted(cli: Cli) -> None:
    words = (*RUN, "--spec-draft-adapt", "step")
    assert "note: --spec-draft-adapt has no effect without a drafter" in cli(*words).err
    assert "no effect" not in cli(*words, "--spec-type", "suffix").err
    sizes = cli(*RUN, "--spec-type", "draft-mtp", "--spec-suffix-n-max", 3).err
    assert "note: --spec-suffix-n-max has no effect without suffix (--spec-type)." in sizes


def test_a_short_match_of_ngram_mod_is_noted(cli: Cli) -> None:
    short = cli(*RUN, "--spec-default", "--spec-ngram-mod-n-match", 15)
    assert short.status == 0
    assert "note: --spec-ngram-mod-n-match below 16" in short.err
    assert cli(*RUN, "--spec-default", "--spec-ngram-mod-n-match", 16).err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--spec-type", "ngram"], "--spec-type ngram is unknown"),
        (["--spec-ngram-simple-size-n", 0], "--spec-ngram-simple-size-n is outside 1..1024"),
        (["--spec-ngram-map-k-size-m", 1025], "--spec-ngram-map-k-size-m is outside 1..1024"),
        (["--spec-ngram-map-k4v-min-hits", 0], "--spec-ngram-map-k4v-min-hits is outside"),
        (["--spec-ngram-mod-n-match", 0], "--spec-ngram-mod-n-match is outside 1..1024"),
        (["--spec-ngram-mod-n-max", 1025], "--spec-ngram-mod-n-max is outside 0..1024"),
        (["--spec-ngram-mod-n-min", -1], "--spec-ngram-mod-n-min is outside 0..1024"),
        (["--spec-suffix-min-token-prob", 2], "--spec-suffix-min-token-prob is outside [0, 1]"),
        (["--spec-synth-len", 2], "no drafter is given"),
        (["--spec-default", "--spec-synth-rates", "0.5,0.4"], "has 2 values. Give 64"),
        (["--spec-default", "--spec-synth-rates", "0.5,x"], "--spec-synth-rates"),
    ],
)
def test_refusals(cli: Cli, words: list[object], message: str) -> None:
    outcome = cli(*RUN, *words)
    assert outcome.status == 2
    assert message in outcome.err


def test_a_broken_lookup_cache_fails(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "static.bin"
    np.array([1, 2, -1, -1, 1, 999_999, 3], "<i4").tofile(path)
    outcome = cli(*RUN, "--spec-type", "ngram-cache", "-lcs", path)
    assert outcome.status == 1
    assert "static.bin: byte 20: token 999999 is outside the vocabulary" in outcome.err
    outcome = cli(*RUN, "--spec-type", "ngram-cache", "-lcd", tmp_path / "none.bin")
    assert outcome.status == 1
    assert "none.bin cannot be read: No such file" in outcome.err


def test_compare_takes_any_drafter(cli: Cli) -> None:
    words = ["compare", *RUN[1:], "--spec-type", "ngram-simple", "--lane", "ring,n_rs_seq=2"]
    outcome = cli(*words, "--spec-ngram-simple-size-n", 1, "--spec-ngram-simple-size-m", 4)
    assert outcome.status == 0
    assert "ring,n_rs_seq=2" in outcome.out
