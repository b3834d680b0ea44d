"""Addresses of servers: what is one, and which are this machine."""

from __future__ import annotations

import pytest

from engine.errors import OptionError
from engine.observe.server.address import is_loopback, server_address

KEY = "sk-a-key-that-must-not-show"


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        (" http://localhost:8080/v1/ ", "http://localhost:8080"),
        ("https://host.example/llama/", "https://host.example/llama"),
        ("[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_addresses(written: str, address: str) -> None:
    assert server_address(written) == address


@pytest.mark.parametrize(
    "written",
    ["", "ftp://a", "http://", "h:0", "h:99999", "a b:1", "h/?a=1", "h#x", "[::1", "h" * 200],
)
def test_what_is_no_address(written: str) -> None:
    with pytest.raises(OptionError):
        server_address(written)


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(OptionError) as raised:
        server_address(f"http://me:{KEY}@host:8080")
    assert KEY not in str(raised.value)


def test_this_machine_itself() -> None:
    assert is_loopback("127.0.0.2") and is_loopback("::1") and is_loopback("LOCALHOST")
    assert not is_loopback("10.0.0.1") and not is_loopback("localhost.example")
