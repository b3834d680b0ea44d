"""The rules under which a draft model's vocabulary serves a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from engine.draft.vocabulary import check_vocabularies
from engine.errors import VocabularyMismatchError


@dataclass(frozen=True)
class Vocabulary:
    model: str = "gpt2"
    add_bos: bool = False
    bos_id: int | None = None
    eos_id: int | None = 7
    n_vocab: int = 400
    changed: int = -1

    def piece(self, token_id: int) -> bytes:
        return b"?" if token_id == self.changed else b"%d" % token_id


TARGET = Vocabulary()


@pytest.mark.parametrize(
    "draft",
    [
        TARGET,
        replace(TARGET, n_vocab=528),
        replace(TARGET, n_vocab=272),
        replace(TARGET, changed=4),
        replace(TARGET, bos_id=3),
    ],
)
def test_accepted(draft):
    check_vocabularies(TARGET, draft)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (replace(TARGET, model="spm"), "tokenizer type differs: target gpt2, draft spm"),
        (replace(TARGET, add_bos=True), "add-BOS flag differs"),
        (replace(TARGET, eos_id=8), "EOS id differs: target 7, draft 8"),
        (replace(TARGET, n_vocab=529), "differ by more than 128"),
        (replace(TARGET, n_vocab=271), "differ by more than 128"),
        (replace(TARGET, changed=5), "token 5 differs"),
        (replace(TARGET, changed=399), "token 399 differs"),
    ],
)
def test_refused_with_the_reason(draft, reason):
    with pytest.raises(VocabularyMismatchError, match=reason):
        check_vocabularies(TARGET, draft)


def test_different_bos_matters_only_where_it_is_added():
    added = replace(TARGET, add_bos=True, bos_id=1)
    check_vocabularies(added, added)
    with pytest.raises(VocabularyMismatchError, match="BOS id differs"):
        check_vocabularies(added, replace(added, bos_id=2))
