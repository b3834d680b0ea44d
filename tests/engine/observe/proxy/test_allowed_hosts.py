"""Which Host headers are answered, by where a port listens."""

from __future__ import annotations

import socket

import pytest

from engine.observe.proxy.allowed_hosts import AllowedHosts

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
