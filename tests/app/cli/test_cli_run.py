"""run: text, JSON and trace of real runs on small models, and every refusal."""

from __future__ import annotations

import csv
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.trace.reopen import open_trace
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

DATA = ROOT / "tests" / "data"
MTP = DATA / "qwen35-c-v2x-mtp-f32.gguf"
PLAIN = DATA / "qwen35-a-f32.gguf"
QUICK = ("--threads", 1)


def golden(path: Path) -> dict[str, Any]:
    with np.load(path.with_suffix(".npz")) as file:
        return {name: file[name] for name in file.files}


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def prompt_of(path: Path) -> str:
    data = golden(path)
    return ",".join(map(str, data["tokens"][: int(data["n_prompt"])].tolist()))


def test_greedy_tokens_are_llama_cpps(cli: Cli) -> None:
    words = ["--tokens", prompt_of(PLAIN), "-n", 40, "--ignore-eos", "--compute", "f32", "--json"]
    report = cli("run", PLAIN, *words, *QUICK).json
    assert set(report) == {"sequences", "options", "totals", "audit", "findings"}
    (sequence,) = report["sequences"]
    assert sequence["tokens"] == golden(PLAIN)["greedy"].tolist()
    assert sequence["prompt_tokens"] == [int(t) for t in prompt_of(PLAIN).split(",")]
    assert sequence["timings"]["predicted_n"] == 40
    assert "draft_n" not in sequence["timings"]
    assert report["options"]["compute"] == "f32"
    assert report["options"]["n_predict"] == 40


def test_speculation_counts_as_llama_cpp_and_gives_the_same_tokens(
    cli: Cli, tmp_path: Path
) -> None:
    data = golden(MTP)
    words = ["--tokens", prompt_of(MTP), "-n", 80, "--ignore-eos", "--compute", "f32"]
    words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", 3, "--trace", tmp_path / "out"]
    outcome = cli("run", MTP, *words, "--json", *QUICK)
    tokens = outcome.json["sequences"][0]["tokens"]
    assert tokens[:40] == data["greedy"].tolist()
    assert f"trace written to {tmp_path / 'out'}" in outcome.err
    rounds = table(tmp_path / "out" / "rounds.csv")[1:]
    steps = len(data["spec_accepted"])
    accepted = [int(row["num_accepted_draft_tokens"]) for row in rounds[:steps]]
    assert accepted == data["spec_accepted"].tolist()
    totals = outcome.json["totals"]
    assert totals["num_spec_steps"] == sum(row["num_draft_tokens"] != "0" for row in rounds)
    tokens_csv = table(tmp_path / "out" / "tokens.csv")
    drafted = [int(row["token_id"]) for row in tokens_csv if row["draft_index"]]
    assert drafted[: 3 * steps] == data["spec_draft"].ravel().tolist()


def test_the_trace_opens_again_with_the_figures_of_the_report(cli: Cli, tmp_path: Path) -> None:
    words = ["--tokens", "5,6,7", "--tokens", "8,9", "--parallel", 2, "-n", 6, "--ignore-eos"]
    report = cli(
        "run",
        MTP,
        *words,
        "--spec-type",
        "draft-mtp",
        "--json",
        *QUICK,
        "--trace",
        tmp_path / "out",
    ).json
    store = open_trace(tmp_path / "out")
    assert store.runs[0]["summary"] == report["totals"]
    for sequence in report["sequences"]:
        chosen = store.tokens.column("seq_id") == sequence["seq_id"]
        kinds = np.array(store.tokens.texts("kind"))[chosen]
        ids = store.tokens.column("token_id")[chosen]
        emitted = np.isin(kinds, ["target", "accepted", "replacement", "bonus"])
        assert ids[emitted].tolist() == sequence["tokens"]
        assert ids[kinds == "prompt"].tolist() == sequence["prompt_tokens"]


def test_prompts_of_all_kinds_keep_their_order(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from file\n", encoding="utf-8")
    (word,) = cli("tokenize", "--demo", "def", "--json").json["tokens"]
    outcome = cli(
        "run",
        "--demo",
        "--tokens",
        word,
        "-p",
        "def",
        "-f",
        tmp_path / "prompt.txt",
        "-n",
        2,
        "--json",
        *QUICK,
    )
    sequences = outcome.json["sequences"]
    assert [s["seq_id"] for s in sequences] == [0, 1, 2]
    assert sequences[0]["prompt_tokens"] == sequences[1]["prompt_tokens"] == [word]
    assert sequences[0]["tokens"] == sequences[1]["tokens"]
    file_ids = cli("tokenize", "--demo", "from file", "--json").json["tokens"]
    assert sequences[2]["prompt_tokens"] == file_ids
    assert outcome.json["totals"]["predicted_n"] == 6


def test_text_is_streamed_then_three_lines_of_figures(cli: Cli) -> None:
    words = ["run", "--demo", "-p", "def quicksort(arr):", "-n", 12, *QUICK]
    plain = cli(*words)
    spec = cli(*words, "--spec-type", "draft-mtp")
    whole = cli(*words, "--json").json["sequences"][0]["text"]
    text, _, figures = plain.out.rpartition("\n\n")
    assert text == f"def quicksort(arr):{whole}"
    first, second, third = figures.splitlines()
    assert first.startswith("12 tokens, ") and first.endswith(" tokens/s")
    assert second.startswith("prompt: ") and "verify" in second
    assert third == "drafts: none, plain decoding"
    text, _, figures = spec.out.rpartition("\n\n")
    assert text == f"def quicksort(arr):{whole}"
    first, second, third = figures.splitlines()
    assert "drafted tokens accepted" in first and "draft " in second
    assert (
        third.startswith("acceptance by position, if reached: ")
        and "rollback depth (rounds): " in third
    )
    assert plain.err == spec.err == ""


STYLED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)


def test_a_run_that_ends_before_its_limit_says_why(cli: Cli) -> None:
    outcome = cli("run", "--demo", "-p", "def quicksort(arr):", "-n", 20, "-c", 16, *QUICK)
    n = int(outcome.out.rpartition("\n\n")[2].split()[0])
    assert n < 20 and outcome.err == (
        f"draftscope: note: The run filled the context of 16 tokens after {n} of 20 requested "
        "tokens; raise -c for more.\n"
    )


def test_a_terminal_shows_drafts_in_colour(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = ["run", "--demo", "-p", "Once upon a time", "-p", "def f(", "-n", 40]
    words += ["--spec-type", "draft-mtp", *QUICK]
    plain = cli(*words, "--trace", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        coloured = cli(*words).out
        patch.setenv("NO_COLOR", "1")
        uncoloured = cli(*words).out
        patch.setenv("NO_COLOR", "")
        patch.setenv("TERM", "dumb")
        dumb = cli(*words).out
    text = plain.out.rpartition("\n\n")[0]
    for out in (uncoloured, dumb):
        assert out.rpartition("\n\n")[0] == text
    kept = STYLED.sub(lambda found: "" if "9" in found[1].split(";") else found[2], coloured)
    assert kept.rpartition("\n\n")[0] == text, "struck out is what is not a part of the text"
    rows = table(tmp_path / "out" / "tokens.csv")
    for style, kind in (("4;38;5;32", "accepted"), ("9;38;5;166", "rejected")):
        n = sum(row["kind"] == kind for row in rows)
        assert sum(found[0] == style for found in STYLED.findall(coloured)) == n > 0


def test_several_sequences_are_printed_one_after_the_other(cli: Cli) -> None:
    out = cli("run", "--demo", "-p", "def a", "-p", "class B", "-n", 3, *QUICK).out
    assert out.index("--- sequence 0\ndef a") < out.index("--- sequence 1\nclass B")


def test_the_demo_draft_model_is_loaded_only_for_draft_simple(cli: Cli) -> None:
    words = ["run", "--demo", "-p", "import", "-n", 8, "--json", *QUICK]
    plain, simple = cli(*words).json, cli(*words, "--spec-type", "draft-simple").json
    assert plain["options"]["draft_model"] is None
    assert simple["options"]["draft_model"] == str(DEMO_DRAFT)
    assert simple["totals"]["draft_n"] > 0
    assert simple["sequences"][0]["tokens"] == plain["sequences"][0]["tokens"]


def test_sampling_options_reach_the_sampler(cli: Cli) -> None:
    words = ["run", "--demo", "-p", "import os\n", "-n", 12, "--temp", 1.5, "--json", *QUICK]

    def tokens(*more: object) -> list[int]:
        return list(cli(*words, *more).json["sequences"][0]["tokens"])

    assert tokens("--seed", 1) == tokens("--seed", 1)
    assert tokens("--seed", 1) != tokens("--seed", 2)
    assert tokens("--seed", 1, "--top-k", 1) == tokens("--seed", 2, "--top-k", 1)


def test_every_sampler_option_arrives(cli: Cli, tmp_path: Path) -> None:
    schema = tmp_path / "any.json"
    schema.write_text("true")
    words = ["--typical", 0.9, "--repeat-penalty", 1.3, "--repeat-last-n", -1]
    words += ["--presence-penalty", 0.5, "--frequency-penalty", -0.25, "--temp", 0.7, "--seed", 3]
    words += ["--top-k", 9, "--top-p", 0.8, "--min-p", 0.1, "--json-schema", schema]
    words += ["--logit-bias", "302+1.5", "--logit-bias", "7-2e1", "--spec-accept", "rejection"]
    report = cli("run", "--demo", "-p", "a", "-n", 1, "--json", *words, *QUICK).json
    assert report["options"]["sampler"] == {
        "temp": 0.7,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "json_schema": str(schema),
        "grammar_file": None,
        "seed": 3,
        "typical_p": 0.9,
        "repeat_penalty": 1.3,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "logit_bias": [[302, 1.5], [7, -20.0]],
    }
    assert report["options"]["spec"]["accept"] == "rejection"
    plain = cli("run", "--demo", "-p", "a", "-n", 1, "--json", *QUICK).json["options"]
    assert plain["spec"]["accept"] == "match"
    assert plain["sampler"]["repeat_last_n"] == 64


def test_a_bias_forces_and_forbids_tokens(cli: Cli) -> None:
    words = ["run", "--demo", "-p", "import", "-n", 3, "--ignore-eos", "--json", *QUICK]
    first = cli(*words).json["sequences"][0]["tokens"]
    assert cli(*words, "--logit-bias", "302+1000").json["sequences"][0]["tokens"] == [302] * 3
    other = cli(*words, "--logit-bias", f"{first[0]}-1000").json["sequences"][0]["tokens"]
    assert first[0] not in other


def test_a_draft_thrown_away_for_its_tokens_cannot_be_rejected_fairly(cli: Cli) -> None:
    words = ["--spec-accept", "rejection", "--spec-draft-p-min", 0.5]
    run = ["run", "--demo", "-p", "a", "-n", 1, *words, *QUICK]
    outcome = cli(*run, "--spec-draft-n-min", 2)
    assert outcome.status == 2
    assert "does not keep the target's distribution" in outcome.err
    assert cli(*run, "--spec-draft-n-min", 1).status == 0


@pytest.mark.parametrize("rollback", ["planes", "checkpoint"])
def test_memory_options_reach_the_engine(cli: Cli, tmp_path: Path, rollback: str) -> None:
    words = ["run", MTP, "--tokens", prompt_of(MTP), "-n", 20, "--ignore-eos", "-c", 200, "-ub", 16]
    words += ["--split", "seq", "--rollback", rollback, "--n-rs-seq", 5, "--spec-type", "draft-mtp"]
    report = cli(*words, "--json", "--trace", tmp_path / "out", *QUICK).json
    assert report["options"]["n_ctx"] == 200
    assert report["options"]["rollback"] == rollback
    assert report["sequences"][0]["tokens"] == golden(MTP)["greedy"][:20].tolist()
    store = open_trace(tmp_path / "out")
    paths = set(store.rounds.texts("rollback_path"))
    assert ("seq_rm" if rollback == "planes" else "restore") in paths
    assert store.ubatches.column("n_seq_tokens").max() <= 16


def test_chat_wraps_the_prompt_in_the_template(cli: Cli) -> None:
    words = ["run", "--demo", "-p", "hello", "-n", 1, "--json", *QUICK]
    plain = cli(*words).json["sequences"][0]["prompt_tokens"]
    chat = cli(*words, "--chat").json["sequences"][0]["prompt_tokens"]
    start = cli("tokenize", "--demo", "<|im_start|>user\n", "--json").json["tokens"]
    assert chat[: len(start)] == start
    assert len(chat) > len(plain)
    text = "".join(map(str, plain))
    assert text in "".join(map(str, chat))


def test_chat_without_a_template_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.gguf.chat.ChatTemplate.from_gguf", lambda file: None)
    outcome = cli("run", PLAIN, "-p", "a", "--chat", *QUICK)
    assert outcome.status == 2
    assert "The model has no chat template. Leave out --chat." in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "There is no prompt"),
        (["-p", ""], "The prompt is empty"),
        (["--tokens", "4096"], "Token id 4096 is outside the vocabulary of 4096"),
        (["--tokens", "-1"], "--tokens"),
        (["-p", "a", "-n", "-2"], "-n is 0 or below -1"),
        (["-p", "a", "-n", "many"], "-n"),
        (["-p", "a", "-c", "-1"], "-c is outside"),
        (["-p", "a", "-ub", "0"], "-ub is below 1"),
        (["-p", "a", "--temp", "nan"], "'nan' is not a finite number"),
        (["-p", "a", "--top-p", "1.5"], "--top-p is outside (0, 1]"),
        (["-p", "a", "--min-p", "-0.1"], "--min-p is outside [0, 1]"),
        (["-p", "a", "--top-k", "-1"], "--top-k is negative"),
        (["-p", "a", "--typical", "0"], "--typical is outside (0, 1]"),
        (["-p", "a", "--repeat-penalty", "0"], "--repeat-penalty is not positive"),
        (["-p", "a", "--repeat-last-n", "-2"], "--repeat-last-n is below -1"),
        (["-p", "a", "--presence-penalty", "inf"], "'inf' is not a finite number"),
        (["-p", "a", "--logit-bias", "12"], "'12' is not a token id with a finite bias"),
        (["-p", "a", "--logit-bias", "12-inf"], "'12-inf' is not a token id with a finite bias"),
        (["-p", "a", "--logit-bias", "12+1.2.3"], "'12+1.2.3' is not a token id"),
        (["-p", "a", "--logit-bias", "999999+1"], "Token id 999999 is outside the vocabulary"),
        (["-p", "a", "--spec-accept", "magic"], "--spec-accept magic is unknown"),
        (["-p", "a", "--parallel", "0"], "--parallel is outside 1..64"),
        (["-p", "a", "--parallel", "1000"], "--parallel is outside"),
        (["-p", "a", "--spec-type", "magic"], "--spec-type magic is unknown"),
        (["-p", "a", "--spec-draft-n-max", "0"], "--spec-draft-n-max is outside"),
        (["-p", "a", "--spec-draft-n-min", "9"], "--spec-draft-n-min"),
        (["-p", "a", "--spec-draft-p-min", "2"], "--spec-draft-p-min is outside [0, 1]"),
        (["-p", "a", "--rollback", "magic"], "--rollback magic is unknown"),
        (["-p", "a", "--split", "magic"], "--split magic is unknown"),
        (["-p", "a", "--kv", "magic"], "--kv magic is unknown"),
        (["-p", "a", "--n-rs-seq", "-1"], "--n-rs-seq is outside"),
        (["-p", "a", "--chat-template-kwargs", "[1]"], "'[1]' is not a JSON object"),
        (["-f", "no-such-file"], "no-such-file cannot be read"),
        (["-p", "a", "-p", ""], "Prompt 1 is empty"),
        (["-p", "a", "--spec-type", "magic"], "Choose from none, ngram-"),
        (["--tokens", "1,a"], "'a' is not a token id; give numbers such as 1,2,3"),
        (["-p", "a", "--threads", str(1 + (os.cpu_count() or 1))], "cores of this machine"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(cli: Cli, words: list[str], message: str) -> None:
    outcome = cli("run", "--demo", *QUICK, *words)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err


def test_a_context_beyond_the_trained_one_is_said_in_one_line(cli: Cli) -> None:
    words = ["run", "--demo", "-p", "a", "-n", 1, "--no-audit", *QUICK, "-c"]
    assert "longer than the 2,048" in cli(*words, 2049).err
    assert "longer" not in cli(*words, 2048).err


def test_the_demo_drafter_drafts_without_being_named(cli: Cli) -> None:
    words = ["run", "--demo", "-p", "def main():", "-n", 16, "--json", *QUICK]
    plain, found = (cli(*words, *more).json for more in ([], ["--spec-type", "draft-eagle3"]))
    assert found["options"]["draft_models"] == [str(DEMO_EAGLE3)]
    assert found["totals"]["draft_n_accepted"] > 0
    assert found["sequences"][0]["tokens"] == plain["sequences"][0]["tokens"]


def test_a_file_that_drafts_says_what_drafts(cli: Cli) -> None:
    words = ["-p", "a", "-n", 2, "--json", *QUICK]
    report = cli("run", DEMO_TARGET, "-md", DEMO_DRAFT, *words).json
    assert report["options"]["spec"]["types"] == ["draft-simple"]
    assert report["options"]["draft_models"] == [str(DEMO_DRAFT)]
    twice = cli("run", DEMO_TARGET, "-md", DEMO_DRAFT, "-md", DEMO_DRAFT, *words)
    assert twice.status == 2
    assert "are for draft-simple" in twice.err


def test_draft_simple_without_a_draft_model_is_refused(cli: Cli) -> None:
    outcome = cli("run", DEMO_TARGET, "-p", "a", "--spec-type", "draft-simple")
    assert outcome.status == 2
    assert "Give one with -md" in outcome.err


def test_a_draft_with_another_vocabulary_is_refused(cli: Cli) -> None:
    outcome = cli("run", DEMO_TARGET, "-md", MTP, "-p", "a", "--spec-type", "draft-simple")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1


def test_none_among_the_drafters_wins(cli: Cli) -> None:
    words = ["--spec-type", "draft-mtp,none", "-md", DEMO_DRAFT]
    report = cli("run", "--demo", "-p", "a", "-n", 2, "--json", *words, *QUICK).json
    assert report["options"]["spec"]["types"] == []
    assert report["options"]["draft_model"] is None


def test_a_trace_folder_with_foreign_files_is_refused_before_the_run(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("x")
    outcome = cli("run", "--demo", "-p", "a", "-n", 100000, "--trace", tmp_path)
    assert outcome.status == 2
    assert "mine.txt" in outcome.err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failing_round_still_exports_what_was_recorded(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.errors import RollbackRefusedError
    from engine.run import Run

    real, calls = Run.step, []

    def step(run: Run) -> bool:
        calls.append(1)
        if len(calls) == 3:
            raise RollbackRefusedError("The rollback was refused.", "Try again.")
        return real(run)

    monkeypatch.setattr(Run, "step", step)
    outcome = cli("run", "--demo", "-p", "a", "-n", 9, "--trace", tmp_path / "out", *QUICK)
    assert outcome.status == 1
    assert "draftscope: error: The rollback was refused. Try again." in outcome.err
    assert len(open_trace(tmp_path / "out").rounds) == 2


def test_the_trace_says_what_is_in_the_tensors(cli: Cli, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    found = []
    for byte in (b"\0", b"\1"):  # in the middle of the weights: the head stays as it was
        data = bytearray(DEMO_DRAFT.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 1] = byte
        model.write_bytes(data)
        words = ["run", model, "-p", "a", "-n", "2", "--trace", tmp_path / "out"]
        assert cli(*words).err.splitlines()[-1].endswith(str(tmp_path / "out"))
        (run,) = json.loads((tmp_path / "out" / "session.json").read_text())["runs"].values()
        found.append(run["model"])
    assert found[0]["sha256"] == found[1]["sha256"]
    assert len(found[0]["content"]) == 64
    assert found[0]["content"] != found[1]["content"]


def test_a_trace_does_not_wait_long_for_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.recorded._CONTENT_S", 0.05)
    monkeypatch.setattr("engine.gguf.content.kept_hash", lambda parts: None)
    monkeypatch.setattr("engine.gguf.file.kept_hash", lambda parts: None)
    held = threading.Event()
    monkeypatch.setattr("engine.gguf.content.hash_tensors", lambda parts, cancelled: held.wait())
    out = tmp_path / "out"
    outcome = cli("run", DEMO_DRAFT, "-p", "a", "-n", "2", "--trace", out)
    held.set()
    assert outcome.err.endswith("without the hash of the tensors, which was not ready yet\n")
    (run,) = json.loads((out / "session.json").read_text())["runs"].values()
    assert run["model"]["content"] is None


def test_a_run_is_audited_unless_that_is_refused(cli: Cli) -> None:
    words = ["run", "--demo", "--tokens", "5,6,7", "-n", 8, "--spec-type", "draft-mtp", "--json"]
    audit = cli(*words, "--audit").json["audit"]
    assert audit["verdict"] == "agrees"
    assert audit["n_tokens"] == audit["n_drawn"] == 8
    assert audit["not_judged"] == []
    assert cli(*words, "--no-audit").json["audit"] is None


def test_the_text_says_what_was_audited(cli: Cli) -> None:
    outcome = cli("run", "--demo", "--tokens", "5,6,7", "-n", 8, "--audit")
    assert "audit: agrees, 8 of 8 tokens compared with plain decoding" in outcome.err
