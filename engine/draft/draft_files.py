"""Draft files: which drafter a file is for, and whether it fits the target. Does not import
torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import OptionError, VocabularyMismatchError
from engine.gguf.binary import never
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.model.drafters.config import DRAFT_SIMPLE, KINDS, check_drafter, drafter_of
from engine.model.families import read_config
from engine.model.info import describe
from engine.model.tensors import DRAFT_MTP, check_mtp_file, has_mtp_block, leave_block


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
    target: GgufFile,
    tokenizer: Tokenizer,
    draft: GgufFile,
    cancelled: Callable[[], bool] = never,
    *,
    by_mtp: bool = False,
) -> None:
    """Check that a file can draft for the target; reads no tensor data. by_mtp: a whole model
    drafts with its MTP block if it has one; its trunk is dropped from `draft` (leave_block).

    Raises ModelFileError, UnsupportedModelError, VocabularyMismatchError.
    """
    if by_mtp and has_mtp_block(draft):
        leave_block(draft)
    drafter = drafter_of(draft)
    if drafter == DRAFT_SIMPLE:
        describe(draft)
        check_vocabularies(tokenizer, Tokenizer.from_gguf(draft, cancelled))
        return
    if drafter == DRAFT_MTP:
        check_mtp_file(draft, read_config(target))
        if "tokenizer.ggml.tokens" not in draft.metadata:
            return  # it uses the target's
    else:
        check_drafter(draft, KINDS[draft.architecture](draft), read_config(target))
    check_same_vocabulary(tokenizer, Tokenizer.from_gguf(draft, cancelled))


_MAX_SIZE_DIFFERENCE = 128
_FIRST_COMPARED_ID = 5


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises VocabularyMismatchError for the first rule that is broken."""
    for what, ours, theirs in (
        ("tokenizer type", target.model, draft.model),
        ("add-BOS flag", target.add_bos, draft.add_bos),
        ("add-EOS flag", target.add_eos, draft.add_eos),
    ):
        if ours != theirs:
            _refuse(f"the {what} differs: target {ours}, draft {theirs}")
    if target.add_bos and target.bos_id != draft.bos_id:
        _refuse(f"the BOS id differs: target {target.bos_id}, draft {draft.bos_id}")
    if target.add_eos and target.eos_id != draft.eos_id:
        _refuse(f"the EOS id differs: target {target.eos_id}, draft {draft.eos_id}")
    if abs(target.n_vocab - draft.n_vocab) > _MAX_SIZE_DIFFERENCE:
        _refuse(
            f"the sizes differ by more than {_MAX_SIZE_DIFFERENCE}: "
            f"target {target.n_vocab}, draft {draft.n_vocab}"
        )
    for token_id in range(_FIRST_COMPARED_ID, min(target.n_vocab, draft.n_vocab)):
        if target.piece(token_id) != draft.piece(token_id):
            _refuse(
                f"token {token_id} differs: target {target.piece(token_id)!r}, "
                f"draft {draft.piece(token_id)!r}"
            )


def check_same_vocabulary(target: Tokenizer, drafter: Tokenizer) -> None:
    """VocabularyMismatchError unless every id means the same text."""
    if target.n_vocab != drafter.n_vocab:
        _refuse(f"the sizes differ: target {target.n_vocab}, drafter {drafter.n_vocab}")
    for token_id in range(target.n_vocab):
        if target.piece(token_id) != drafter.piece(token_id):
            _refuse(
                f"token {token_id} differs: target {target.piece(token_id)!r}, "
                f"drafter {drafter.piece(token_id)!r}"
            )


def _refuse(what: str) -> None:
    raise VocabularyMismatchError(
        f"The draft model's vocabulary does not match the target's: {what}.",
        "Choose a draft model of the same family and tokenizer.",
    )
