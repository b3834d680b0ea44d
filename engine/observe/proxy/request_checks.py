"""Checks of a client's request before it is passed on: its head, its Host header, its JSON."""

from __future__ import annotations

import ipaddress
import re
import socket

from engine.observe.server.address import is_loopback

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")
MAX_HEAD_BYTES = 64 << 10
MAX_HEAD_LINES = 200
_END = re.compile(rb"\n\r?\n")
MAX_SIGNS = 1 << 19
"""Most brackets, colons, commas and quotes of a text; a prompt of token ids has a comma for
each."""
MAX_KEYS = 1 << 16
MAX_DEPTH = 128
_SIGN = re.compile(rb'["\[\]{},:]')


class AllowedHosts:
    """The Host headers that a port accepts, so that web pages cannot reach it through a name of
    their own that resolves to this machine (DNS rebinding).

    At a loopback address: loopback names and addresses, with the port or without. At another
    address: this machine's name and any address, which unlike a name cannot be made to resolve
    elsewhere, with any port, since a NAT may translate it. The given host is always accepted.
    """

    def __init__(self, given: str, address: str, port: int) -> None:
        """given: as the user names it. address, port: where the socket listens."""
        self._is_local, self._port = is_loopback(address), port
        self._names = {"localhost", given.lower().rstrip(".")}
        if not self._is_local:
            name = socket.gethostname().lower()
            self._names |= {name, f"{name}.local"}

    def fault(self, authority: str) -> tuple[int, str] | None:
        """Status and message if not accepted, else None. authority: of a Host header or a
        target."""
        found = _AUTHORITY.fullmatch(authority)
        if found is None:
            return 400, "The Host header is not a name or an address with or without a port."
        name, port = found[1].lower().removesuffix("."), found[2]
        if self._has_name(name) and (not self._is_local or port in (None, "", str(self._port))):
            return None
        return 421, (
            f"This port does not accept the Host header {authority[:80]}. Use "
            f"http://localhost:{self._port}, or start it with that name as its HOST."
        )

    def _has_name(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        mapped = getattr(address, "ipv4_mapped", None) or address
        return not self._is_local or mapped.is_loopback


def head_fault(buffered: bytes) -> tuple[int, str] | None:
    """Status and message for a head that two programs may parse differently (RFC 9112, sections
    5.2, 6.1 and 6.3).

    buffered: the head as far as received, or more. Other checks of the head are left to h11.
    """
    end = _END.search(buffered)
    head = buffered[: end.start()] if end else buffered
    lines = head.split(b"\n")
    if len(head) > MAX_HEAD_BYTES or len(lines) > MAX_HEAD_LINES:
        return 431, (f"The headers exceed {MAX_HEAD_BYTES >> 10} KiB or {MAX_HEAD_LINES} lines.")
    if end is None:
        return None
    version = lines[0].rstrip().rpartition(b" ")[2]
    if version not in (b"HTTP/1.0", b"HTTP/1.1"):
        return 400, "The request is not HTTP/1.1 or HTTP/1.0."
    if any(line[:1] in (b" ", b"\t") for line in lines):
        return 400, "A header continues in the next line."
    names = [line.partition(b":")[0].strip().lower() for line in lines[1:]]
    for name in (b"host", b"content-length", b"transfer-encoding"):
        if names.count(name) > 1:
            return 400, f"The header {name.decode()} comes twice."
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            return 400, "The request has both content-length and transfer-encoding."
        if version != b"HTTP/1.1":
            return 400, "Only HTTP/1.1 requests can have transfer-encoding."
    return None


def json_excess(body: bytes, max_signs: int = MAX_SIGNS) -> str:
    """How a JSON text exceeds the limits, as the end of a sentence; empty if it does not. Parsing
    such a text would block all other traffic for seconds.

    The text need not be valid. Linear time; stops at the first excess.
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
