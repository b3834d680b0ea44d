"""Prompt files: the bundled sets are what they claim to be, data sets as they are distributed, and
what is said of broken ones."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import OptionError
from engine.experiments.bench.prompts import NamedPrompt, choose, default_set, read_prompts
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from resources import CONVERSATIONS, DEMO_TARGET, MATCHES, SUITES, titled_prompts
from tests.support.counted_calls import counted_calls

SETS: dict[str, tuple[Any, NamedPrompt]] = {
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
        NamedPrompt("HumanEval/0", "def f():", ""),
    ),
    "GSM8K": ({"question": "How many?", "answer": "2"}, NamedPrompt("prompt 1", "How many?", "")),
    "MT-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        NamedPrompt("81", "Write.", "writing"),
    ),
    "SPEED-Bench": (
        {"question_id": "a1", "category": "coding", "sub_category": "x", "turns": ["Code."]},
        NamedPrompt("a1", "Code.", "coding"),
    ),
    "messages": (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        NamedPrompt("prompt 1", "u", ""),
    ),
    "text": ("just a text", NamedPrompt("prompt 1", "just a text", "")),
}


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
    shown = titled_prompts()
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


@pytest.mark.parametrize("name", SETS)
def test_a_prompt_of_each_known_set(tmp_path: Path, name: str) -> None:
    entry, expected = SETS[name]
    lines, listed = tmp_path / "set.jsonl", tmp_path / "set.json"
    packed = tmp_path / "set.jsonl.gz"
    lines.write_text(json.dumps(entry) + "\n\n")
    listed.write_text(json.dumps([entry], indent=1))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    for path in (lines, listed, packed):
        assert read_prompts(path) == [expected]


def test_our_own_sets() -> None:
    for path in SUITES.values():
        prompts = read_prompts(path)
        assert [prompt.name for prompt in prompts] == [
            entry["name"] for entry in json.loads(path.read_text(encoding="utf-8"))
        ]


def test_fields_are_named_and_names_made_unique(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        '{"q": "one", "kind": "a", "text": "no"}\n{"q": "two", "kind": "b", "text": "no"}\n'
    )
    found = read_prompts(path, ("q", "text", "kind"))
    assert found == [NamedPrompt("no", "one", "a"), NamedPrompt("no (2)", "two", "b")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not valid JSON"),
        (b'[\n"a",\n{]', "line 3 is not valid JSON"),
        (b'{"prompt": "a"}\n\n{"answer": "b"}', "line 3 has no field"),
        (b'["a", 7]', "prompt 2 is neither"),
        (b'{"turns": []}', "line 1 has no text"),
        (b'{"prompt": ""}', "line 1 has no text"),
        (b"", "holds no prompts"),
        (b"[]", "holds no prompts"),
        (b"\xff\xfe", "not UTF-8"),
        (b"PAR1....", "Parquet"),
        (b"\x1f\x8b\x08nonsense", "damaged gzip"),
        (b'{"a\\u001b[2J": 1}', "its fields: a\N{REPLACEMENT CHARACTER}"),
        (b"[" * 100_000, "line 1 is not valid JSON"),
        (b'"a"\n"\\ud800"', "line 2 has no text"),
        (b'{"id": "x", "text": "a", "n": ' + b"1" * 5000 + b".e", "line 1 is not valid JSON"),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=said) as raised:
        read_prompts(path)
    assert "bad.jsonl" in raised.value.message
    assert raised.value.remedy
    assert "\n" not in str(raised.value)


def test_what_is_no_file_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('\ufeff[{"name": "a", "text": "ü\\n"}]', encoding="utf-8")
    assert read_prompts(path) == [NamedPrompt("a", "ü\n")]
    with pytest.raises(OptionError, match=r"gone\.json cannot be read"):
        read_prompts(tmp_path / "gone.json")
    for name in ("/dev/zero", tmp_path):
        with pytest.raises(OptionError, match="is not a regular file"):
            read_prompts(Path(name))


def test_many_equal_names_are_told_apart_in_few_calls_each(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"name": "n", "text": "a"}\n' * 20_000 + '{"name": "n (2)", "text": "a"}\n')
    with counted_calls() as count:
        names = [prompt.name for prompt in read_prompts(path)]
    assert count.n < 200 * len(names)
    assert len(set(names)) == 20_001
    assert names[:3] == ["n", "n (2)", "n (3)"] and names[-1] == "n (2) (2)"


@given(st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=3)), max_size=5))
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_prompts_or_one_sentence(changes: list[tuple[int, bytes]]) -> None:
    raw = (
        b'[{"name": "a", "text": "one", "category": "x"},\n "two", {"turns": ["b", {"c": 1}]},\n'
        b' {"messages": [{"role": "user", "content": "d"}]}]\n'
    )
    for at, piece in changes:
        raw = raw[: at % len(raw)] + piece + raw[at % len(raw) + len(piece) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "set.json"
        path.write_bytes(raw)
        try:
            read_prompts(path)
        except OptionError as error:
            said = str(error)
            assert said.startswith(str(path)) and said.isprintable() and len(said) < 1000


def test_a_limit_takes_categories_in_turn_and_a_seed_draws() -> None:
    prompts = [NamedPrompt(f"{kind}{i}", "t", kind) for kind in "ab" for i in range(10)]
    first = choose(prompts, 4, None)
    assert [prompt.name for prompt in first] == ["a0", "a1", "b0", "b1"]
    drawn = choose(prompts, 4, 7)
    assert drawn == choose(prompts, 4, 7) != first
    assert [prompt.category for prompt in drawn] == list("aabb")
    assert any(choose(prompts, 4, seed) != drawn for seed in range(8))
    assert choose(prompts, None, 3) == choose(prompts, 99, 3) == prompts
