"""Words that a terminal would obey, a model that says them, and what an output has of them."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.golden_runs import DATA, golden
from tests.support.rewrite_gguf import Tensors, rewrite

MODEL = "qwen35-c-v2x-mtp-f32"
IN_A_NAME = "a\x1b]0;b\x07\x9b31m\u202e\u2066\u200f\u061c\r\b\v\f\x7f\u2028\x85\U000e0041\x1bP\nB"
"""As a file may be called: no slash and no NUL."""
HOSTILE = f"{IN_A_NAME}\x00\u2029\ufeff\x90q"
_TEMPLATE = (
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('"
    + IN_A_NAME.replace("\n", "")
    + "') }}{% endif %}{% for one in messages %}{{ one.content }}{% endfor %}"
)
_OURS = re.compile(r"\x1b\[[\d;]+m|\r\x1b\[K")
"""Colours, and the beginning of a progress line."""
_HARMLESS = frozenset("\n\t\u200c\u200d")


def left_of(output: str, *, is_terminal: bool = False) -> set[str]:
    """The characters of an output that no terminal should be sent, apart from its lines and, on a
    terminal, what we send it ourselves."""
    if is_terminal:
        output = _OURS.sub("", output)
    return {
        f"U+{ord(char):04X}"
        for char in set(output) - _HARMLESS
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    }


def hostile_model(folder: Path) -> Path:
    """A small model, also by its file's name, whose metadata and chat template are hostile, and
    which likes to say tokens that are."""
    source = DATA / f"{MODEL}.gguf"
    fields = gguf.GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    liked = np.argsort(-golden(MODEL)["logits"].mean(0))[:16]

    def add_rows(tensors: Tensors) -> None:
        for table in ("token_embd.weight", "output.weight"):
            if table in tensors:
                more = 1.1 * tensors[table][liked]
                tensors[table] = np.concatenate([tensors[table], more.astype(np.float32)])

    keys = {
        "general.name": HOSTILE,
        f"general.{IN_A_NAME}": HOSTILE,
        "tokenizer.chat_template": _TEMPLATE,
        "tokenizer.ggml.tokens": [*tokens, *(f"{HOSTILE}{i}" for i in range(len(liked)))],
        # text as it is, not by bytes
        "tokenizer.ggml.token_type": [*types, *[4] * len(liked)],
    }
    return rewrite(source, folder / f"{IN_A_NAME}.gguf", keys, add_rows)


def write_json(path: Path, *values: Any) -> Path:
    """Values as JSON, one a line."""
    path.write_text("\n".join(map(json.dumps, values)), "utf-8")
    return path
