"""Grammars for the output: which tokens may come next, and when it is complete.

llguidance does the parsing. A grammar and its vocabulary are shared; every sampler has its own
state, which advances with each chosen token, goes back when one is retracted, and is copied with
the sampler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import llguidance
import numpy as np
import torch

from engine.errors import GrammarFileError
from engine.files import user_text
from engine.foreign import JsonError, parse_json
from engine.sampling.options import SamplerOptions

_QUIET = {"log_level": 0}
UNMET = "the grammar does not allow the token that was chosen"
STUCK = "no token of the vocabulary fits the grammar here"
BANNED = "every token that the grammar allows is banned or has a logit of minus infinity"
MOST_BYTES = 1 << 20
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_LARK_REMEDY = "Correct it; it needs llguidance's Lark syntax, starting with `start:`."
_SCHEMA_REMEDY = "Correct the schema, or leave out what llguidance does not support."


class GrammarTokens:
    """A vocabulary for llguidance. Building it visits every token, so it is made once.

    end_tokens: at least one. piece, encode: of a Tokenizer. Tokens without text fit a grammar only
    by name.
    """

    def __init__(
        self,
        n_vocab: int,
        end_tokens: Collection[int],
        piece: Callable[..., bytes],
        encode: Callable[..., list[int]],
    ) -> None:
        self._encode, self.n_vocab, self.end_tokens = encode, n_vocab, sorted(end_tokens)
        self.eos_token_id, self.bos_token_id = self.end_tokens[0], None
        ids = range(self.n_vocab)
        self.tokens = [piece(i) or b"<[%d]>" % i for i in ids]
        self.special_token_ids = [i for i in ids if not piece(i, special=False)]
        self.handle = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=self.n_vocab, eos_token=self.end_tokens
        )

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text, a callback of the library."""
        return self._encode(text, parse_special=False)


AllowedTokens = np.ndarray
"""Tokens that may come next: uint8, token i is bit i % 8 of entry i // 8."""


def is_allowed(tokens: AllowedTokens, token: int) -> bool:
    """Whether a token is allowed."""
    entry = token >> 3
    return entry < len(tokens) and bool(tokens[entry] >> (token & 7) & 1)


def masked(tokens: AllowedTokens, logits: torch.Tensor) -> torch.Tensor:
    """Logits [n_vocab] with -inf for all other tokens; those given are not changed."""
    allowed = np.unpackbits(tokens, bitorder="little").astype(bool)[: len(logits)]
    missing = len(logits) - len(allowed)
    if missing:
        allowed = np.pad(allowed, (0, missing))
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)


class GrammarState:
    """Progress of a text in a grammar.

    error: why it cannot continue, empty if it can. n_good: tokens accepted before that.
    """

    def __init__(self, matcher: llguidance.LLMatcher, tokens: GrammarTokens) -> None:
        self._matcher, self._tokens = matcher, tokens
        self._ended = False
        self.error = ""
        self.n_good = 0

    @classmethod
    def start(
        cls, text: str, tokens: GrammarTokens, limits: llguidance.LLParserLimits | None = None
    ) -> GrammarState:
        """The state before the first token. text: a valid grammar in llguidance's own format."""
        limits = limits or llguidance.LLParserLimits(verbose_errors=False)
        return cls(llguidance.LLMatcher(tokens.handle, text, limits=limits, **_QUIET), tokens)

    @property
    def end_token(self) -> int:
        """A token that ends the text."""
        return self._tokens.end_tokens[0]

    def clone(self) -> GrammarState:
        """An independent state at the same place."""
        other = GrammarState(self._matcher.deep_copy(), self._tokens)
        other._ended, other.error, other.n_good = self._ended, self.error, self.n_good
        return other

    def __deepcopy__(self, memo: object) -> GrammarState:
        return self.clone()

    def allowed(self) -> AllowedTokens:
        """The tokens that may come next: only end tokens after an end or an error."""
        if not self._ended and not self.error:
            found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                self.fail(_first_line(self._matcher.get_error()))
            elif not found.any():
                self.fail(STUCK)
            else:
                return found
        bits = np.zeros((self._tokens.n_vocab + 7) // 8, np.uint8)
        for token in self._tokens.end_tokens:
            bits[token >> 3] |= 1 << (token & 7)
        return bits

    def accept(self, token: int) -> None:
        """Accept a chosen token; no effect after an end or an error."""
        if self._ended or self.error:
            return
        if token in self._tokens.end_tokens and self._matcher.is_accepting():
            self._ended = True
        elif not self._matcher.consume_token(token):
            self.fail(UNMET)
            return
        self.n_good += 1

    def retract(self) -> None:
        """Take back the newest token."""
        if self.error:
            return
        if self._ended:
            self._ended = False
        elif not self._matcher.rollback(1):
            self.fail(_first_line(self._matcher.get_error()))
            return
        self.n_good -= 1

    def is_as(self, other: GrammarState) -> bool:
        """Whether both have the same progress and allow the same next tokens."""
        if (self._ended, self.error, self.n_good) != (other._ended, other.error, other.n_good):
            return False
        mine, theirs = self.clone().allowed(), other.clone().allowed()
        return bool(np.array_equal(mine, theirs))

    def n_fitting(self, tokens: Sequence[int]) -> int:
        """Number of leading tokens that may come in turn."""
        trial = self.clone()
        for i, token in enumerate(tokens):
            if trial._ended or trial.error:
                return i
            trial.accept(token)
            if trial.error:
                return i
        return len(tokens)

    def fail(self, why: str) -> None:
        """Note that the text cannot continue."""
        self.error = self.error or why


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar over a vocabulary. text: valid, in llguidance's own format."""

    text: str
    tokens: GrammarTokens

    def start(self) -> GrammarState:
        """The state at the start of a text."""
        return GrammarState.start(self.text, self.tokens)


def why_invalid(text: str, tokens: GrammarTokens) -> str:
    """The library's error for a grammar, empty if it is valid."""
    is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, tokens.handle)
    return messages[0] if is_wrong else ""


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0].strip().rstrip(".")


def read_grammar(options: SamplerOptions, tokens: GrammarTokens) -> Grammar | None:
    """The grammar that the options name, None if they name none: a JSON schema, or rules in Lark's
    notation as llguidance reads it. Raises GrammarFileError; OptionError for an unreadable file."""
    if options.json_schema:
        return _schema(Path(options.json_schema), tokens)
    if options.grammar_file:
        return _rules(Path(options.grammar_file), tokens)
    return None


def _schema(path: Path, tokens: GrammarTokens) -> Grammar:
    text = user_text(path, MOST_BYTES)
    try:
        parse_json(text, unique=True)
    except JsonError as error:
        place = f"line {error.line}, column {error.column}"
        raise GrammarFileError(
            path, place, f"no JSON: {error.what}", "Correct the file."
        ) from error
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
    if why := why_invalid(grammar, tokens):
        raise GrammarFileError(path, "schema", _sentence(why), _SCHEMA_REMEDY)
    return Grammar(grammar, tokens)


def _rules(path: Path, tokens: GrammarTokens) -> Grammar:
    grammar = llguidance.LLMatcher.grammar_from_lark(user_text(path, MOST_BYTES))
    if why := why_invalid(grammar, tokens):
        place, found = "grammar", _PLACE.match(why)
        if found:
            place, why = f"line {found[1]}, column {found[2]}", found[3]
        raise GrammarFileError(path, place, _sentence(why), _LARK_REMEDY)
    return Grammar(grammar, tokens)


def _sentence(message: str) -> str:
    """The library's message without its excerpt of the grammar."""
    first, *rest = message.strip().split("\n")
    cause = next((line.strip() for line in rest if line.strip().startswith("error: ")), "")
    return f"{first.strip().rstrip(':.')}{cause.replace('error: ', ': ', 1)}"
