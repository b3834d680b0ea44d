"""Model files checked before torch is imported, so that a wrong one is refused at once."""

from __future__ import annotations

from pathlib import Path

from engine.draft.vocabulary import check_vocabularies
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.model.info import describe


def check_files(target: Path, draft: Path | None = None) -> None:
    """Refuse files that cannot be used at once, before torch takes its time to be imported.

    Raises what Session.open would: ModelFileError, UnsupportedModelError,
    VocabularyMismatchError.
    """
    with GgufFile.open(target) as file:
        describe(file)
        if draft is not None:
            with GgufFile.open(draft) as second:
                describe(second)
                check_vocabularies(Tokenizer.from_gguf(file), Tokenizer.from_gguf(second))
