"""Whether the vocabulary of a draft model or of a drafter serves a target.

For draft-simple by llama.cpp's rules: the sizes may differ a little, and only ids that both models
have are drafted. Drafters that go with one target read its tokens by their ids, which all have to
mean the same.
"""

from __future__ import annotations

from engine.errors import VocabularyMismatchError
from engine.gguf.tokenizer import Tokenizer

_MAX_SIZE_DIFFERENCE = 128
_FIRST_COMPARED_ID = 5


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """VocabularyMismatchError naming the first rule that is broken."""
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
        f"The draft model's vocabulary does not fit the target's: {what}.",
        "Choose a draft model of the same family and tokenizer.",
    )
