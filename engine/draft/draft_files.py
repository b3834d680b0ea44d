"""Files that draft for a target: which drafter each is for, and whether it fits. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.draft.vocabulary import check_same_vocabulary, check_vocabularies
from engine.errors import OptionError
from engine.gguf.binary import never
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.model.drafters.config import check_drafter
from engine.model.drafters.kinds import DRAFT_SIMPLE, KINDS, drafter_of
from engine.model.families import read_config
from engine.model.info import describe


def drafters_of(paths: Sequence[Path | str]) -> dict[str, Path]:
    """Files by the drafter that uses each, in their order.

    Raises OptionError for two of one kind, UnsupportedModelError for one that drafts nothing, and
    ModelFileError.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        with GgufFile.open(path) as file:
            drafter = drafter_of(file)
        if drafter in found:
            raise OptionError(
                f"Both {found[drafter].name} and {path.name} are for {drafter}.",
                "Give one of them.",
            )
        found[drafter] = path
    return found


def check_draft(
    target: GgufFile, tokenizer: Tokenizer, draft: GgufFile, cancelled: Callable[[], bool] = never
) -> None:
    """Hold a file to the target that it is to draft for; no tensor data is read.

    Raises ModelFileError, UnsupportedModelError, VocabularyMismatchError.
    """
    if drafter_of(draft) == DRAFT_SIMPLE:
        describe(draft)
        check_vocabularies(tokenizer, Tokenizer.from_gguf(draft, cancelled))
        return
    check_drafter(draft, KINDS[draft.architecture].read(draft), read_config(target))
    check_same_vocabulary(tokenizer, Tokenizer.from_gguf(draft, cancelled))
