"""The rules under which a draft model's vocabulary serves a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from engine.draft.draft_files import check_vocabularies
from engine.errors import VocabularyMismatchError


@dataclass(frozen=True)
class Vocabulary:
    model: str = "gpt2"
    add_bos: bool = False
    bos_id: int | None = None
    add_eos: bool = False
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
        replace(TARGET, eos_id=8),
    ],
)
def test_accepted(draft):
    check_vocabularies(TARGET, draft)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (replace(TARGET, model="spm"), "tokenizer type differs: target gpt2, draft spm"),
        (replace(TARGET, add_bos=True), "add-BOS flag differs"),
        (replace(TARGET, add_eos=True), "add-EOS flag differs"),
        (replace(TARGET, n_vocab=529), "differ by more than 128"),
        (replace(TARGET, n_vocab=271), "differ by more than 128"),
        (replace(TARGET, changed=5), "token 5 differs"),
        (replace(TARGET, changed=399), "token 399 differs"),
    ],
)
def test_refused_with_the_reason(draft, reason):
    with pytest.raises(VocabularyMismatchError, match=reason):
        check_vocabularies(TARGET, draft)


@pytest.mark.parametrize("token", ["bos", "eos"])
def test_different_ends_matter_only_where_they_are_added(token):
    added = replace(TARGET, **{f"add_{token}": True, f"{token}_id": 1})
    check_vocabularies(added, added)
    reason = f"{token.upper()} id differs: target 1, draft 2"
    with pytest.raises(VocabularyMismatchError, match=reason):
        check_vocabularies(added, replace(added, **{f"{token}_id": 2}))
