"""`draftscope tokenize`: token ids and pieces of a text."""

from __future__ import annotations

import argparse

from app.cli.common import target_path
from app.cli.option_lines import read_text
from app.cli.output import print_json, print_line, print_lines
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.trace.csv_fields import escape_piece


def run(args: argparse.Namespace) -> int:
    """Print the ids, ready for --tokens, then one line per token."""
    path = target_path(args)
    text = read_text(None) if args.text == "-" else args.text
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    ids = tokenizer.encode(text, parse_special=not args.no_special)
    pieces = [tokenizer.piece(token) for token in ids]
    if args.json:
        print_json(
            {
                "tokens": ids,
                "pieces": [escape_piece(piece) for piece in pieces],
                "hex": [piece.hex() for piece in pieces],
            }
        )
        return 0
    print_line(",".join(map(str, ids)))
    print_lines(
        f"{token:>8}  {escape_piece(piece)}" for token, piece in zip(ids, pieces, strict=True)
    )
    return 0
