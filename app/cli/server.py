"""A server that is named on the command line, and the key that it may want."""

from __future__ import annotations

import argparse
import os
import sys
from time import perf_counter
from typing import TYPE_CHECKING

from app.cli.option_lines import OptionLines
from app.cli.output import is_terminal, note, show_below
from engine.errors import ApiKeyError, OptionError

if TYPE_CHECKING:
    from engine.observe.rounds.observed_run import ServerFacts
    from engine.observe.server.client import ServerClient
    from engine.observe.server.limits import TimeLimits

_FIRST_LINE_S = 4.0
"""When a wait is first shown where no line can be replaced, then at twice the time, seconds."""


def add_key(group: argparse._ArgumentGroup) -> None:
    """--api-key-env."""
    OptionLines(group).add("""
        --api-key-env NAME  environment variable that holds the API key (default: the key that the
            system's keyring has for this address, if the server asks for one)
    """)


def connect(
    url: str, key_env: str | None, limits: TimeLimits, model: str = ""
) -> tuple[ServerClient, ServerFacts]:
    """The client, and what the server says of itself once it has loaded its model. key_env: the
    variable with the API key, None for the keyring's. model: which of its models is meant, empty
    where that need not be said. Raises OptionError and ServerError."""
    from engine.observe.server.address import stored_key
    from engine.observe.server.client import ServerClient

    key = None
    if key_env is not None:
        key = os.environ.get(key_env)
        if not key:
            raise OptionError(f"The environment has no {key_env[:80]}.", "Set it to the API key.")
    line = _WaitingLine()
    client = ServerClient(url, key, limits, line.show, model)
    try:
        try:
            return client, client.facts()
        except ApiKeyError:
            client.close()
            key = None if key_env is not None else stored_key(client.address)
            if key is None:
                raise
            client = ServerClient(url, key, limits, line.show, model)
            return client, client.facts()
    except BaseException:
        client.close()
        raise
    finally:
        line.show("")


class _WaitingLine:
    """A wait for a server: on a terminal a line that counts, below what is there; elsewhere a line
    from time to time."""

    def __init__(self) -> None:
        self._what, self._since, self._again_s = "", 0.0, 0.0
        self._shown = ""

    def show(self, sentence: str) -> None:
        """Say it in place of what was said last; an empty one takes that away."""
        if is_terminal(sys.stderr):
            if sentence != self._shown:
                self._shown = sentence
                show_below(sentence)
            return
        counted = sentence.rpartition(", ")[0]
        if (counted or sentence) != self._what:
            self._what, self._since = counted or sentence, perf_counter()
            self._again_s = _FIRST_LINE_S if counted else 0.0
        if sentence and perf_counter() - self._since >= self._again_s:
            self._again_s = max(2 * self._again_s, _FIRST_LINE_S)
            note(sentence)
