"""Plans: which jobs they make, and every way in which one can be wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import OptionError
from engine.experiments.sweep.plan import (
    MOST_JOBS,
    SweepPlan,
    read_plan,
    run_options,
    settings_of,
    typed_values,
)
from engine.experiments.sweep.plan import write_plan as plan_in
from engine.experiments.sweep.worker import SweepWorker
from resources import DEMO_DRAFT, DEMO_SWEEP, DEMO_TARGET
from tests.support.shared_cases import case
from tests.support.sweeps import BUNDLED, write_plan


def plan(folder: Path, text: str, **options: bool) -> SweepPlan:
    return read_plan(write_plan(folder, text), BUNDLED, **options)


def test_a_grid_is_every_combination_and_jobs_are_single_ones(tmp_path: Path) -> None:
    read = plan(
        tmp_path,
        '[settings]\nmodel = "demo"\nn-predict = 8\nlimit = 2\n'
        '[[grid]]\nspec-type = ["draft-mtp", "draft-simple"]\nspec-draft-n-max = [1, 2]\n'
        'rollback = "ring"\n[[jobs]]\nspec-type = "none"\nn-predict = 4\n',
    )
    made = [(j.options.spec.types, j.options.spec.n_max, j.options.rollback) for j in read.jobs]
    assert made == [
        (("draft-mtp",), 1, "ring"),
        (("draft-mtp",), 2, "ring"),
        (("draft-simple",), 1, "ring"),
        (("draft-simple",), 2, "ring"),
        ((), 3, "planes"),
    ]
    assert [job.options.n_predict for job in read.jobs] == [8, 8, 8, 8, 4]
    assert [job.draft for job in read.jobs] == [None, None, DEMO_DRAFT, DEMO_DRAFT, None]
    assert {job.model for job in read.jobs} == {DEMO_TARGET}
    assert all(len(job.prompts) == 2 for job in read.jobs)
    assert [job.number for job in read.jobs] == [1, 2, 3, 4, 5]
    assert len({job.key for job in read.jobs}) == 5


def test_equal_jobs_are_one_and_keys_do_not_depend_on_the_place(tmp_path: Path) -> None:
    first = plan(tmp_path, '[settings]\nmodel = "demo"\n[grid]\nseed = [1, 2, 1]\n')
    assert ([j.options.sampler.seed for j in first.jobs], first.n_equal) == ([1, 2], 1)
    second = plan(tmp_path, '[grid]\nseed = [2, 1]\n[settings]\nmodel = "demo"\n')
    assert [job.key for job in second.jobs] == [job.key for job in reversed(first.jobs)]
    other = plan(tmp_path, '[settings]\nmodel = "demo"\nlimit = 1\n[grid]\nseed = [1, 2]\n')
    assert not {job.key for job in other.jobs} & {job.key for job in first.jobs}


def test_a_changed_prompt_file_makes_other_jobs(tmp_path: Path) -> None:
    text = '[[jobs]]\nmodel = "demo"\nprompts = "mine.json"\n'
    (tmp_path / "mine.json").write_text('[{"name": "a", "text": "one"}]')
    (first,) = plan(tmp_path, text).jobs
    (tmp_path / "mine.json").write_text('[{"name": "a", "text": "two"}]')
    (second,) = plan(tmp_path, text).jobs
    assert (first.prompts, second.prompts) == (("one",), ("two",))
    assert first.key != second.key


def test_the_bundled_plan_and_demo_models_where_none_is_named(tmp_path: Path) -> None:
    assert len(read_plan(DEMO_SWEEP, BUNDLED).jobs) == 7
    text = "[grid]\nseed = [1, 2]\nfault = [['stale-plane', 'stale-logits'], 'stale-plane']\n"
    read = plan(tmp_path, text, on_demo=True)
    assert [job.options.faults for job in read.jobs[:2]] == [
        ("stale-plane", "stale-logits"),
        ("stale-plane",),
    ]
    with pytest.raises(OptionError, match="grid 1, model is missing"):
        plan(tmp_path, text)


def test_files_lie_beside_the_plan_and_may_be_elsewhere(tmp_path: Path) -> None:
    text = '[[jobs]]\nmodel = "models/a.gguf"\nprompt = "x"\n'
    with pytest.raises(OptionError, match=r"names .*models/a\.gguf, which is not a file"):
        plan(tmp_path, text)
    (job,) = plan(tmp_path, text, elsewhere=True).jobs
    assert job.model == tmp_path / "models" / "a.gguf"


JOB = '[[jobs]]\nmodel = "demo"\nprompt = "x"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = [", "plan.toml is not valid TOML"),
        ("[grid]\nseed = [1\nlimit", "at line 3"),
        ('colour = "red"', "plan.toml: colour is unknown"),
        ("title = 3", "title is not text"),
        ("", "has no jobs"),
        ("jobs = 3", "jobs 1 is not a table"),
        ("settings = []", "settings is not a table"),
        (JOB + "n_predict = 3", "jobs 1, n_predict is unknown; do you mean n-predict?"),
        (JOB + "no-such = 3", "jobs 1, no-such is unknown"),
        (JOB + "n-predict = '3'", "jobs 1, n-predict = '3' is not a whole number"),
        (JOB + "n-predict = true", "is not a whole number"),
        (JOB + "n-predict = 0", "jobs 1 cannot be: -n is 0"),
        (JOB + "temp = nan", "is not a finite number"),
        (JOB + "seed = 99999999999999999999", "fits 32 bits"),
        (JOB + "temp = [1.0]", "jobs 1, temp = [1.0] is not a number"),
        (JOB + "ignore-eos = 1", "is neither true nor false"),
        (JOB + "spec-type = 'draft-magic'", "is wrong: --spec-type draft-magic is unknown"),
        (JOB + "spec-draft-n-max = -1", "spec-draft-n-max = -1 is wrong"),
        (JOB + "spec-draft-n-min = 9", "cannot be: --spec-draft-n-min"),
        (JOB + "rollback = 'magic'", "--rollback magic is unknown"),
        (JOB + "compute = 'f64'", "is none of auto, "),
        (JOB + "compute = ['f32']", "is none of auto, "),
        (JOB + "threads = 0", "is not a whole number from 1"),
        (JOB + "repeat = 1001", "is not a whole number from 1 to 1,000"),
        (JOB + "prompts = 'python'", "cannot be combined with prompts"),
        ('[[jobs]]\nmodel = "a\\u0000b"\n', "is not text of 1 to"),
        ('[[jobs]]\nmodel = ""\n', "is not text of 1 to"),
        (f'[[jobs]]\nmodel = "{"x" * 4000}"\n', "which is not a file"),
        (f'[[jobs]]\nmodel = "{"x" * 5000}"\n', "is not text of 1 to 4,096 characters"),
        ('[[jobs]]\nmodel = "~no one-at-all/x"\n', "which is not a file"),
        ('[[jobs]]\nmodel = "demo"\nprompts = "none.json"\n', "none.json, which is not a file"),
        ('[grid]\nmodel = "demo"\nseed = []\n', "grid 1, seed has no values"),
        ('[grid]\nmodel = "demo"\nseed = [1, "two"]\n', "grid 1, seed = 'two' is not a whole"),
        ("[grid]\nseed = 3\n" + "a" * (1 << 20), "larger than 1 MiB"),
        (
            '[[jobs]]\nmodel = "demo"\nprompts = "/dev/zero"\n',
            "names /dev/zero, which is not a file",
        ),
        (
            JOB + '"\\u001b[2J\\n" = 3',
            "jobs 1, \N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER} is",
        ),
        (JOB + "seed = 1979-05-27", "is not a whole number"),
        (JOB + "seed = 0x" + "f" * 5000, "jobs 1, seed = a number is not a number that fits"),
        (JOB + "seed = " + "9" * 5000, "is not valid TOML"),
        (JOB + "[settings]\nspec-synth-rates = '1'", "no drafter is given. Name a drafter"),
        (JOB + "spec-type = '\x80one'", "--spec-type \N{REPLACEMENT CHARACTER}one is unknown"),
        ("[grid]\n" + "x = " + "[" * 5000 + "]" * 5000, "is not valid TOML"),
    ],
)
def test_a_wrong_plan_is_a_sentence_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        plan(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_a_long_prompt_is_not_repeated_in_a_thousand_jobs(tmp_path: Path) -> None:
    text = f'[grid]\nmodel = "demo"\nprompt = "{"x" * 500_000}"\nseed = {list(range(1000))}\n'
    with pytest.raises(OptionError, match="grid 1, prompt makes more than 32 MiB in all jobs"):
        plan(tmp_path, text)


@given(st.lists(st.tuples(st.integers(0, 400), st.characters(max_codepoint=300)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_damaged_plan_is_a_plan_or_one_sentence(changes: list[tuple[int, str]]) -> None:
    text = (
        'title = "lengths"\n[settings]\nmodel = "demo"\nprompt = "x"\nlimit = 2\n[[grid]]\n'
        'spec-type = ["draft-mtp"]\nspec-draft-n-max = [1, 2]\n[[jobs]]\nspec-type = "none"\n'
    )
    for at, char in changes:
        text = f"{text[: at % len(text)]}{char}{text[at % len(text) + 1 :]}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan(Path(folder), text)
        except OptionError as error:
            said = str(error)
        else:
            said = ""
    assert said.isprintable() and len(said) < 1200
    assert not said or said.startswith(("plan.toml", folder))


def test_too_many_jobs_are_counted_not_made(tmp_path: Path) -> None:
    values = list(range(1, 1001))
    text = f'[grid]\nmodel = "demo"\nseed = {values}\nn-predict = {values}\nctx-size = {values}\n'
    with pytest.raises(OptionError, match=f"1,000,000,000 jobs, more than {MOST_JOBS:,}"):
        plan(tmp_path, text)


def test_what_is_no_text_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "plan.toml", tmp_path, tmp_path / "none.toml"):
        with pytest.raises(OptionError):
            read_plan(path, BUNDLED)


def test_an_mtp_file_is_loaded_where_draft_mtp_is_used(tmp_path: Path) -> None:
    folder = case("01-mtp-file-beside-trunk")
    text = (
        f'[settings]\nmodel = "{folder / "trunk.gguf"}"\nprompt = "def f"\nn-predict = 8\n'
        f'spec-draft-model = "{folder / "mtp-only.gguf"}"\nthreads = 1\n'
        '[grid]\nspec-type = ["draft-mtp", "none"]\n'
    )
    first, second = read_plan(write_plan(tmp_path, text), BUNDLED).jobs
    assert [path.name for path in first.files] == ["trunk.gguf", "mtp-only.gguf"]
    assert [path.name for path in second.files] == ["trunk.gguf"]
    done = SweepWorker().run(first, None)
    assert not done.error
    assert done.figures["draft_n"] > 0


def test_settings_of_options_make_these_options_again() -> None:
    options = run_options(
        {
            "spec-type": "draft-mtp,ngram-map-k4v",
            "spec-draft-n-max": 5,
            "spec-tree": "2,1",
            "logit-bias": ["7-0.5", "9+2"],
            "temp": 0.25,
            "ignore-eos": True,
            "fault": ["stale-plane"],
            "parallel": 3,
        }
    )
    assert run_options(settings_of(options)) == options
    assert settings_of(run_options({})) == {}


def test_typed_values_have_the_kind_of_their_key() -> None:
    assert typed_values("spec-draft-n-max", "1, 2,,3") == [1, 2, 3]
    assert typed_values("temp", "0, 0.5") == [0, 0.5]
    assert typed_values("spec-type", "none, draft-mtp+ngram-mod") == ["none", "draft-mtp,ngram-mod"]
    assert typed_values("ignore-eos", "true, false") == [True, False]
    assert typed_values("threads", "1") == [1]
    assert typed_values("logit-bias", "302+1.5") == ["302+1.5"]
    with pytest.raises(OptionError, match="threads: 0 is not a whole number from 1"):
        typed_values("threads", "0")


def test_a_written_plan_is_read_as_it_was_meant(tmp_path: Path) -> None:
    model = tmp_path / 'a "model"\x7f\u00e9 \U0001f600\\n.gguf'
    model.write_bytes(b"")
    common = {"model": str(model)}
    read = plan_in(tmp_path / "new", "t", ["one\r\n", "\x7f"], common, [{"seed": [1, 2]}])
    assert [job.model for job in read.jobs] == [model] * 2
    assert [job.prompts for job in read.jobs] == [("one\r\n", "\x7f")] * 2
    again = read_plan(read.path, BUNDLED)
    assert [job.key for job in again.jobs] == [job.key for job in read.jobs]
    with pytest.raises(OptionError, match="File exists"):
        plan_in(tmp_path / "new", "t", ["one"], common, [{"seed": 1}])
    with pytest.raises(OptionError, match="is missing"):
        plan_in(tmp_path / "other", "t", ["one"], {}, [{"seed": 1}])
    assert not (tmp_path / "other").exists()
