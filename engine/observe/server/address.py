"""Addresses of servers, their certificates, and API keys in the system's keyring."""

from __future__ import annotations

import functools
import ipaddress
import ssl
from urllib.parse import urlsplit

from engine.errors import OptionError

SERVICE = "draftscope"
"""The keyring's service for API keys; the server's address is the user name."""


def server_address(text: str) -> str:
    """An address as typed, completed with a scheme and without a final /v1.

    Raises OptionError for one that names no server.
    """
    shown, remedy = text.strip()[:80], "Write it like http://127.0.0.1:8080."
    whole = shown if "://" in shown else f"http://{shown}"
    try:
        url = urlsplit(whole)
        is_one = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_one = False
    if not is_one or len(text.strip()) > len(shown) or not whole.isprintable() or " " in whole:
        raise OptionError(f"{shown!r} is not the address of a server.", remedy)
    if "@" in url.netloc:
        raise OptionError("The address has a name or password.", f"{remedy} Use --api-key-env.")
    if url.query or url.fragment:
        raise OptionError(f"{shown!r} has more than an address: a query or a fragment.", remedy)
    path = url.path.rstrip("/").removesuffix("/v1")
    return f"{url.scheme}://{url.netloc}{path}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


@functools.cache
def system_certificates() -> ssl.SSLContext:
    """The system's certificates, loaded once: that takes 60 ms of CPU."""
    return ssl.create_default_context()


def stored_key(address: str) -> str | None:
    """The stored key of a server; None without one, or without a keyring."""
    import keyring  # looks for keyring backends on import

    try:
        return keyring.get_password(SERVICE, address) or None
    except Exception:  # a backend's own errors, in addition to the package's
        return None


def store_key(address: str, key: str) -> bool:
    """Store a key; False if no keyring takes it."""
    import keyring

    try:
        keyring.set_password(SERVICE, address, key)
        return keyring.get_password(SERVICE, address) == key
    except Exception:  # a backend's own errors, in addition to the package's
        return False
