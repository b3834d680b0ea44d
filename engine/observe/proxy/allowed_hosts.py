"""The names under which a port may be addressed, so that no web page reaches it through a name of
its own that it lets point here (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
import socket

from engine.observe.server.address import is_loopback

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")


class AllowedHosts:
    """What a Host header may say at a port.

    At a loopback address: names and addresses of the loopback, with the port or none. At another
    address: this machine's name and every address, which unlike a name cannot be made to point
    elsewhere, with any port, because what lies between may translate it. Always the host given.
    """

    def __init__(self, given: str, address: str, port: int) -> None:
        """given: as the user names it. address, port: where the socket listens."""
        self._is_local, self._port = is_loopback(address), port
        self._names = {"localhost", given.lower().rstrip(".")}
        if not self._is_local:
            name = socket.gethostname().lower()
            self._names |= {name, f"{name}.local"}

    def fault(self, authority: str) -> tuple[int, str] | None:
        """Status and sentence for what is not allowed. authority: of a Host header or a target."""
        found = _AUTHORITY.fullmatch(authority)
        if found is None:
            return 400, "The Host header is not a name or an address with or without a port."
        name, port = found[1].lower().removesuffix("."), found[2]
        if self._has_name(name) and (not self._is_local or port in (None, "", str(self._port))):
            return None
        return 421, (
            f"This port does not answer to the host {authority[:80]}. "
            f"Use http://localhost:{self._port}, or start it with that name as its HOST."
        )

    def _has_name(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        mapped = getattr(address, "ipv4_mapped", None) or address
        return not self._is_local or mapped.is_loopback
