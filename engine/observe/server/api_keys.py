"""API keys of servers in the system's keyring, by address."""

from __future__ import annotations

SERVICE = "draftscope"
"""The service under which keys are kept, with the server's address as the name."""


def stored_key(address: str) -> str | None:
    """The key that is kept for a server; None without one, or without a keyring."""
    import keyring  # looks for keyrings when it is imported

    try:
        return keyring.get_password(SERVICE, address) or None
    except Exception:  # a keyring's own, beside those that the package knows
        return None


def store_key(address: str, key: str) -> bool:
    """Keep a key; False where there is no keyring that takes it."""
    import keyring

    try:
        keyring.set_password(SERVICE, address, key)
        return keyring.get_password(SERVICE, address) == key
    except Exception:  # a keyring's own, beside those that the package knows
        return False
