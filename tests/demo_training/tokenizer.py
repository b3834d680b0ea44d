"""The demo models' byte-level BPE tokenizer, trained on the same text as the models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_VOCAB = 4096
EOT = N_VOCAB - len(SPECIALS)

# the split of `tokenizer.ggml.pre = qwen35`
SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterable[str]) -> Tokenizer:
    """Train N_VOCAB entries, the last three special, on `texts`."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=EOT, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    if tokenizer.get_vocab_size() != N_VOCAB:
        raise ValueError(f"the corpus is too small for {N_VOCAB} tokens")
    return tokenizer


def load_or_train(path: Path, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer saved at `path`, trained and saved there if it is not."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train(texts).save(str(path))
    return Tokenizer.from_file(str(path))


def from_file(path: Path) -> Tokenizer:
    """The tokenizer of a demo model's file."""
    fields = gguf.GGUFReader(path).fields
    texts, rules = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    pairs = [tuple(rule.split(" ")) for rule in rules]
    vocabulary = {text: i for i, text in enumerate(texts[:EOT])}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def merges(tokenizer: Tokenizer) -> list[str]:
    """The merge rules as GGUF writes them, "left right", best first."""
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]


def entries(tokenizer: Tokenizer) -> list[str]:
    """All token texts by id, in the byte-to-unicode spelling."""
    by_id = {i: text for text, i in tokenizer.get_vocab().items()}
    return [by_id[i] for i in range(N_VOCAB)]
