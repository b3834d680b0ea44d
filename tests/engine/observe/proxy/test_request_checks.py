"""Host headers that are answered, by where a port listens, and JSON that is too large to parse."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.observe.proxy import request_checks
from engine.observe.proxy.request_checks import (
    MAX_DEPTH,
    MAX_KEYS,
    MAX_SIGNS,
    AllowedHosts,
    json_excess,
)

LOCAL = AllowedHosts("127.0.0.1", "127.0.0.1", 8081)
EVERYWHERE = AllowedHosts("0.0.0.0", "0.0.0.0", 8081)
NAMED = AllowedHosts("Box.Example.", "127.0.1.1", 8081)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8081",
        "localhost.:8081",
        "localhost:",
        "127.0.0.1:8081",
        "127.9.9.9:8081",
        "[::1]:8081",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]:8081",
    ],
)
def test_names_of_the_loopback(host: str) -> None:
    assert LOCAL.fault(host) is None
    assert NAMED.fault(host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8081",
        "localhost.evil.example:8081",
        "evil-localhost:8081",
        "localhost:8080",
        "127.0.0.1:80",
        "127.0.0.1.evil.example",
        "192.168.1.5:8081",
        "0.0.0.0:8081",
        "[::2]:8081",
        "localhost..:8081",
        "box.example:8081",
    ],
)
def test_other_hosts_are_misdirected(host: str) -> None:
    fault = LOCAL.fault(host)
    assert fault is not None and fault[0] == 421 and host in fault[1]


@pytest.mark.parametrize(
    "host",
    [
        "",
        ":8081",
        "localhost:8081:8081",
        "localhost, evil.example",
        "localhost:x",
        "localhost:+8081",
        "localhost:808100",
        "a@localhost:8081",
        "[::1",
        "::1",
        "local host",
        "localhost/",
        "localhost\x00",
        "lócalhost",
    ],
)
def test_malformed_hosts(host: str) -> None:
    fault = LOCAL.fault(host)
    assert fault is not None and fault[0] == 400


def test_the_host_that_the_user_names() -> None:
    assert NAMED.fault("box.example:8081") is None
    assert NAMED.fault("BOX.EXAMPLE.") is None


def test_a_port_for_other_machines_answers_to_addresses_and_its_own_name() -> None:
    for host in ("192.168.1.5:9000", "[fd00::1]:8081", "localhost", socket.gethostname()):
        assert EVERYWHERE.fault(host) is None
    fault = EVERYWHERE.fault("evil.example:8081")
    assert fault is not None and fault[0] == 421


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
    assert json_excess(json.dumps(value).encode()) == ""


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
    assert json_excess(body).startswith(expected)


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
    assert json_excess(text.encode(), n_signs + n_quotes + 1) == ""
    assert n_signs == 0 or json_excess(text.encode(), n_signs) != ""


class CountingSigns:
    """The pattern of signs, with the number of searches."""

    def __init__(self) -> None:
        self.n, self._pattern = 0, request_checks._SIGN

    def search(self, body: bytes, at: int) -> re.Match[bytes] | None:
        self.n += 1
        return self._pattern.search(body, at)


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingSigns()
    monkeypatch.setattr(request_checks, "_SIGN", counting)
    assert json_excess(b"[]" * 2**20, 2**12)
    assert counting.n <= 2**12
