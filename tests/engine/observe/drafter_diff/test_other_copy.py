"""Another copy of this program decodes in its own process, with its own files, and what cannot be
compared is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import engine
from engine.errors import OptionError
from engine.observe.drafter_diff.other_copy import decode_with_copy
from engine.observe.drafter_diff.sides import sides_of
from engine.observe.drafter_diff.stage_values import values_cause
from engine.options import Prompt
from resources import DEMO_EAGLE3, DEMO_TARGET
from tests.support.drafter_diff_campaign import opened
from tests.support.golden_runs import options_of

_TREE = Path(engine.__path__[0]).parent


def _copy_but(folder: Path, name: str, text: str) -> None:
    """A tree of links, with one file of its own."""
    folder.mkdir()
    inside, _, rest = name.partition("/")
    own = _TREE.joinpath(*folder.parts[folder.parts.index("copy") + 1 :])
    for path in own.iterdir():
        if path.name != inside and path.name != "__pycache__":
            (folder / path.name).symlink_to(path)
    if rest:
        _copy_but(folder / inside, rest, text)
    else:
        (folder / inside).write_text(text)


def test_a_change_of_one_file_of_a_copy_is_named_though_the_copy_prints(tmp_path: Path) -> None:
    name = "engine/draft/draft_eagle3.py"
    own = (_TREE / name).read_text()
    changed = own.replace(
        "return self._model.fused(features,", "return 3 * self._model.fused(features,"
    )
    assert changed != own
    _copy_but(tmp_path / "copy", name, f"{changed}\nprint('loaded')\n")
    session = opened("eagle3")
    options = replace(options_of(6, "draft-eagle3"), ignore_eos=True)
    prompt = Prompt(session.prompt("import os\n\ndef main(").tokens)
    models = [DEMO_TARGET, DEMO_EAGLE3]
    run, values = decode_with_copy(tmp_path / "copy", models, "f32", prompt, options)
    (side,) = sides_of("B", run, session)
    cause = values_cause(session, side, values)
    assert cause is not None and (cause.stage, cause.side) == ("target rows", "B")
    assert "`DraftEagle3._taken`" in cause.about and "3 times the right value" in cause.about


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.stdout.write('values of an older form')", "another version"),
        ("import no_such_module", "failed: ModuleNotFoundError"),
        (None, "not a copy of this program"),
    ],
)
def test_a_copy_that_cannot_be_watched_gets_a_sentence(
    tmp_path: Path, text: str | None, said: str
) -> None:
    folder = tmp_path / "engine" / "observe" / "drafter_diff"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "other_copy.py").write_text(text)
    with pytest.raises(OptionError, match=said) as error:
        decode_with_copy(tmp_path, [DEMO_TARGET], "f32", Prompt((1,)), options_of(2, "draft-mtp"))
    assert error.value.remedy
