"""A logit bias as text: `TOKEN_ID(+/-)BIAS`, as llama.cpp writes it."""

from __future__ import annotations

import math
import re

from engine.errors import OptionError

_FORM = re.compile(r"([0-9]{1,9})([+-][0-9.]+(?:[eE][+-]?[0-9]+)?)")


def parse_bias(text: str) -> tuple[int, float]:
    """Token id and finite bias of a text such as 302+1.5. Raises OptionError."""
    found = _FORM.fullmatch(text)
    try:
        token, bias = (int(found[1]), float(found[2])) if found else (0, math.nan)
    except ValueError:
        bias = math.nan
    if not math.isfinite(bias):
        raise OptionError(
            f"{text!r} is not a token id with a finite bias.", "Write it like 302+1.5 or 302-1000."
        )
    return token, bias
