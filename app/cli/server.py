"""A server that is named on the command line, and the key that it may want."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from app.cli.output import note
from engine.errors import ApiKeyError, OptionError

if TYPE_CHECKING:
    from engine.observe.rounds.observed_run import ServerFacts
    from engine.observe.server.client import ServerClient


def add_key(group: argparse._ArgumentGroup) -> None:
    """--api-key-env."""
    group.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable that holds the API key (default: the key that the system's "
        "keyring has for this address, if the server asks for one)",
    )


def connect(url: str, key_env: str | None) -> tuple[ServerClient, ServerFacts]:
    """The client, and what the server says of itself once it has loaded its model. key_env: the
    variable with the API key, None for the keyring's. Raises OptionError and ServerError."""
    from engine.observe.server.api_keys import stored_key
    from engine.observe.server.client import ServerClient

    key = None
    if key_env is not None:
        key = os.environ.get(key_env)
        if not key:
            raise OptionError(f"The environment has no {key_env[:80]}.", "Set it to the API key.")
    said: set[str] = set()

    def waiting(sentence: str) -> None:
        if sentence not in said:
            said.add(sentence)
            note(sentence)

    client = ServerClient(url, key)
    try:
        return client, client.facts(waiting)
    except ApiKeyError:
        client.close()
        key = None if key_env is not None else stored_key(client.address)
        if key is None:
            raise
        client = ServerClient(url, key)
        return client, client.facts(waiting)
    except BaseException:
        client.close()
        raise
