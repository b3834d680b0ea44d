"""Texts that are not parsed, and that it takes a bounded number of steps to see that."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.observe.proxy import json_limits
from engine.observe.proxy.json_limits import MAX_DEPTH, MAX_KEYS, MAX_SIGNS, excess


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"prompt": "a" * 2**20 + '",:[{' * 1000 + "\\"},
        {"prompt": list(range(256 * 1024))},
        {"messages": [{"role": "user", "content": json.dumps({"a": ["b"]} | {"c": '"\\'})}] * 99},
    ],
)
def test_requests_of_clients_are_within_the_limits(value: Any) -> None:
    assert excess(json.dumps(value).encode()) == ""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"[" * 10**6, f"is nested deeper than {MAX_DEPTH} levels"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "is nested deeper"),
        (b"{" + b'"a":1,' * (MAX_KEYS + 1) + b'"b":1}', f"has more than {MAX_KEYS} keys"),
        (b'"' + b'\\"' * MAX_SIGNS, f"has more than {MAX_SIGNS} values"),
    ],
)
def test_an_excess_is_named(body: bytes, expected: str) -> None:
    assert excess(body).startswith(expected)


_TEXTS = st.text('",:[]{}\\ aä', max_size=8)


@given(
    st.recursive(
        _TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner)
    )
)
@settings(max_examples=60, deadline=None)
def test_strings_do_not_count(value: Any) -> None:
    """With signs outside strings alone the limit is met exactly."""
    text = json.dumps(value)
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    n_signs = sum(outside.count(sign) for sign in "[]{},:")
    n_quotes = len(re.findall(r'"', text))
    assert excess(text.encode(), n_signs + n_quotes + 1) == ""
    assert n_signs == 0 or excess(text.encode(), n_signs) != ""


class CountingSigns:
    """The pattern of signs, with the number of searches."""

    def __init__(self) -> None:
        self.n, self._pattern = 0, json_limits._SIGN

    def search(self, body: bytes, at: int) -> re.Match[bytes] | None:
        self.n += 1
        return self._pattern.search(body, at)


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingSigns()
    monkeypatch.setattr(json_limits, "_SIGN", counting)
    assert excess(b"[]" * 2**20, 2**12)
    assert counting.n <= 2**12
