"""The grammars' stories and programs: right, endless, the same for a seed, and not the prompts."""

from __future__ import annotations

from itertools import islice

import pytest

from resources import demo_prompts
from tests.demo_training.texts.generator import FURTHER, texts
from tests.demo_training.texts.reading import holds, is_story

PROGRAM = ("def ", "class ", "import ")


@pytest.fixture(scope="module")
def made() -> list[str]:
    return list(islice(texts(7), 3000))


def test_every_program_passes_its_own_test_and_every_story_keeps_to_a_plot(made: list[str]) -> None:
    programs = [text for text in made if text.startswith(PROGRAM)]
    for text in programs:
        names: dict[str, object] = {}
        exec(text, names)
        tests = [value for name, value in names.items() if name.startswith("test_")]
        assert tests, text
        for test in tests:
            assert callable(test)
            test()
    stories = [text for text in made if not text.startswith(PROGRAM)]
    assert min(len(stories), len(programs)) > 1000
    assert all(is_story(text) for text in stories[:200])


def test_the_same_seed_writes_the_same_and_texts_seldom_come_twice(made: list[str]) -> None:
    assert list(islice(texts(7), 50)) == made[:50]
    assert len(set(made)) > 0.98 * len(made)


def test_what_is_measured_is_not_taught(made: list[str]) -> None:
    prompts = (*demo_prompts(), *FURTHER)
    assert len(prompts) == 16
    assert not [text for text in made if text.startswith(prompts)]


def test_a_story_that_changes_a_name_or_breaks_off_is_none() -> None:
    story = (
        "One sunny morning Tom the rabbit heard a loud crack. His red drum was broken. Tom sat "
        'down in the garden and cried. "What is wrong?" asked Anna the dog.\n\n'
        '"My drum is broken," '
        "said Tom. Anna fetched some ribbon and they set to work. Before dark the red drum was as "
        'good as new. "You are a true friend," said Tom. And Tom was never careless again.'
    )
    assert is_story(story)
    for wrong in (
        story.replace("Before dark the red", "Before dark the blue"),
        story.replace("His red", "Her red"),
        story.replace("said Tom. Anna", "said Max. Anna"),
        story.replace("Anna", "Tom"),
        story[: story.index(" And Tom")],
        story + " And Tom was never careless again.",
    ):
        assert not is_story(wrong), wrong


def test_a_program_holds_if_its_test_passes() -> None:
    program = "def twice(n):\n    return 2 * n\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
    assert holds(program)
    assert not holds(program.replace("== 4", "== 5"))
    assert not holds("def twice(n):\n    return 2 * n\n")
