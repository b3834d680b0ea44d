"""Prompt files: the bundled sets are what they claim to be, and bad files are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import OptionError
from engine.experiments.bench.prompts import NamedPrompt, default_set, read_prompts
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from resources import CONVERSATIONS, DEMO_TARGET, MATCHES, SUITES, demo_prompts


def test_the_suite_has_the_ten_names_in_order() -> None:
    assert [prompt.name for prompt in read_prompts(SUITES["general"])] == [
        "code_python",
        "code_cpp",
        "explain_concept",
        "summarize",
        "qa_factual",
        "translation",
        "creative_short",
        "stepwise_math",
        "high_entropy",
        "long_code_review",
    ]
    texts = {prompt.name: prompt.text for prompt in read_prompts(SUITES["general"])}
    words = {name: len(text.split()) for name, text in texts.items()}
    assert max(words, key=words.__getitem__) == "long_code_review"
    assert words["translation"] <= words["code_python"] <= 15
    assert 350 <= words["long_code_review"] <= 550


@pytest.mark.parametrize(
    ("sets", "n"), [(SUITES, 10), (MATCHES, 3), (CONVERSATIONS, 4)], ids=["suite", "match", "w1"]
)
def test_every_kind_has_a_general_and_a_python_set(sets: dict[str, Path], n: int) -> None:
    for name in ("general", "python"):
        assert len(read_prompts(sets[name])) == n


def test_the_demo_has_prompts_of_its_own_where_it_can() -> None:
    shown = [(one.title, one.text) for one in demo_prompts()]
    assert [(one.name, one.text) for one in read_prompts(SUITES["demo"])] == shown
    assert default_set(SUITES, on_demo=True) == "demo"
    assert default_set(CONVERSATIONS, on_demo=True) == "python"
    assert default_set(SUITES, on_demo=False) == "general"


def test_the_python_sets_fit_the_demo_model() -> None:
    with GgufFile.open(DEMO_TARGET) as file:
        tokenizer = Tokenizer.from_gguf(file)
    for sets in (SUITES, MATCHES, CONVERSATIONS):
        for prompt in read_prompts(sets["python"]):
            assert 1 <= len(tokenizer.encode(prompt.text)) <= 320  # it was trained on 512
            assert not prompt.text.endswith("\n")  # it begins its lines with the line end


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "line 1, column 2"),
        ('[\n{"name": "a"\n', "line 3, column 1"),
        ("[" * 100_000, "nested more than 64 times"),
        (b'["a",\n "\xff"]', "line 2 is not UTF-8 text"),
        ("{}", "no list of prompts"),
        ("[]", "no list of prompts"),
        ('["a"]', "prompt 1 has no name or no text"),
        ('[{"name": "a", "text": "b"}, {"name": "", "text": "b"}]', "prompt 2 has no name"),
        ('[{"name": "a"}]', "prompt 1 has no name or no text"),
        ('[{"name": "a", "text": 3}]', "prompt 1 has no name or no text"),
        ('[{"name": "a", "text": "b"}, {"name": "a", "text": "c"}]', "'a' is given twice"),
        ('[{"name": "a", "text": "\\ud800"}]', "prompt 1 has no name or no text"),
        (json.dumps([{"name": "a" * 201, "text": "b"}]), "prompt 1 has no name or no text"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=message):
        read_prompts(path)


def test_a_good_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"name": "é", "text": "ü\n"}]), encoding="utf-8")
    assert read_prompts(path) == [NamedPrompt("é", "ü\n")]
    path.write_text('\ufeff[{"name": "a", "text": "b"}]', encoding="utf-8")
    assert read_prompts(path) == [NamedPrompt("a", "b")]
    with pytest.raises(OptionError, match=r"gone\.json cannot be read"):
        read_prompts(tmp_path / "gone.json")
    for name in ("/dev/zero", tmp_path):
        with pytest.raises(OptionError, match="is not a regular file"):
            read_prompts(Path(name))
