"""Sampler options. Does not import torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from engine.errors import OptionError
from engine.option_fields import FormRow, NumberRange, check, option

_BIAS = re.compile(r"([0-9]{1,9})([+-][0-9.]+(?:[eE][+-]?[0-9]+)?)")


def parse_bias(text: str) -> tuple[int, float]:
    """Token id and finite bias of a text such as 302+1.5, as llama.cpp writes it.

    Raises OptionError.
    """
    found = _BIAS.fullmatch(text)
    try:
        token, bias = (int(found[1]), float(found[2])) if found else (0, math.nan)
    except ValueError:
        bias = math.nan
    if not math.isfinite(bias):
        raise OptionError(
            f"{text!r} is not a token id with a finite bias.", "Write it like 302+1.5 or 302-1000."
        )
    return token, bias


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """The sampler chain, in the order of engine.sampling.sampler; temp <= 0 is greedy.

    repeat_last_n: newest tokens, including the prompt, that the three penalties consider; 0 = none,
    -1 = all. logit_bias: token ids and what is added to their logits. json_schema, grammar_file:
    path of a file with a constraint on the output, at most one of them (engine.sampling.grammar).
    """

    GROUP: ClassVar[str] = "decoding"
    temp: float = option(
        0.0,
        "--temp T  temperature, 0 = greedy",
        FormRow("temperature", 0.0, 5.0, special="0 (greedy)"),
    )
    top_k: int = option(
        40,
        "--top-k  most probable tokens kept, 0 = all",
        NumberRange(0, math.inf, "Use 0 to switch it off."),
        FormRow("top_k", 0, 100_000, special="off"),
    )
    typical_p: float = option(
        1.0,
        "--typical, --typical-p P  probability mass of locally typical tokens kept, 1 = all",
        NumberRange(0.0, 1.0, "Use 1 for off.", is_open=True),
        FormRow("typical_p", 0.01, 1.0),
    )
    top_p: float = option(
        0.95,
        "--top-p P  probability mass kept, 1 = all",
        NumberRange(0.0, 1.0, "Use 1 to switch it off.", is_open=True),
        FormRow("top_p", 0.01, 1.0),
    )
    min_p: float = option(
        0.05,
        "--min-p P  lowest probability kept, relative to the largest one, 0 = all",
        NumberRange(0.0, 1.0, "Use 0 to switch it off."),
        FormRow("min_p", 0.0, 1.0),
    )
    seed: Annotated[int, Meta(ge=0)] = option(
        42,
        "--seed  seed of the sampler",
        NumberRange(0, math.inf, "Use a whole number from 0."),
        FormRow("seed", 0, 2**31 - 1),
    )
    repeat_penalty: float = option(
        1.0,
        "--repeat-penalty R  divides positive logits of recent tokens, 1 = off",
        NumberRange(0.0, math.inf, "Use 1 for off.", is_open=True),
        FormRow("repeat", 0.01, 10.0),
    )
    presence_penalty: float = option(
        0.0,
        "--presence-penalty A  subtracted from the logit of every recent token, 0 = off",
        FormRow("presence", -10.0, 10.0),
    )
    frequency_penalty: float = option(
        0.0,
        "--frequency-penalty A  subtracted from the logit for each occurrence of a recent token, "
        "0 = off",
        FormRow("frequency", -10.0, 10.0),
    )
    repeat_last_n: int = option(
        64,
        "--repeat-last-n  number of recent tokens that the penalties apply to, 0 = none, -1 = all",
        NumberRange(-1, math.inf, "Use 0 for off, -1 for the whole context."),
        FormRow("last_n", -1, 100_000, special="all"),
    )
    logit_bias: tuple[tuple[int, float], ...] = option(
        (),
        "--logit-bias TOKEN_ID(+/-)BIAS  add to the logit of a token, for example 302+1 or "
        "302-1.5; repeatable",
        FormRow("logit bias", text="302+1.5, 15-100"),
        parse=parse_bias,
        repeats=True,
    )

    json_schema: str | None = option(
        None,
        "--json-schema FILE  file with a JSON schema that the output has to match",
        FormRow("JSON schema", text="file"),
    )
    grammar_file: str | None = option(
        None,
        "--grammar-file FILE  file with a grammar that the output has to match, in llguidance's "
        "Lark syntax",
        FormRow("grammar", text="file"),
    )

    def __post_init__(self) -> None:
        check(self)
        if self.json_schema and self.grammar_file:
            raise OptionError(
                "--json-schema and --grammar-file are both given.", "Leave one of them out."
            )

    @property
    def has_grammar(self) -> bool:
        """Whether the output follows a grammar."""
        return bool(self.json_schema or self.grammar_file)
