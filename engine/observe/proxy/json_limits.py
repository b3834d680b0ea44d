"""Limits of JSON that others send: a text that exceeds them is not parsed, because that would take
seconds in which nothing else passes.
"""

from __future__ import annotations

import re

MAX_SIGNS = 1 << 19
"""Brackets, colons, commas and quotes of a text; a prompt of token ids has a comma for each."""
MAX_KEYS = 1 << 16
MAX_DEPTH = 128
_SIGN = re.compile(rb'["\[\]{},:]')


def excess(body: bytes, max_signs: int = MAX_SIGNS) -> str:
    """What of a JSON text exceeds the limits, as the end of a sentence; empty for nothing.

    The text need not be valid. Takes linear time and ends at the first excess.
    """
    at = depth = n_keys = 0
    in_string = False
    for _ in range(max_signs):
        if in_string:
            quote = body.find(b'"', at)
            if quote < 0:
                return ""
            before = body[at:quote]
            in_string = (len(before) - len(before.rstrip(b"\\"))) % 2 == 1  # escaped
            at = quote + 1
            continue
        found = _SIGN.search(body, at)
        if found is None:
            return ""
        sign, at = found[0], found.end()
        in_string = sign == b'"'
        depth += (sign in b"[{") - (sign in b"]}")
        n_keys += sign == b":"
        if depth > MAX_DEPTH:
            return f"is nested deeper than {MAX_DEPTH} levels"
        if n_keys > MAX_KEYS:
            return f"has more than {MAX_KEYS} keys"
    return f"has more than {max_signs} values and names"
