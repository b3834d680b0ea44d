"""Limits of time of a server: as options, and what is waited for under them."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from engine.errors import ServerError, ServerTimeoutError
from engine.option_fields import NumberRange, check, option

_SHOWN_AFTER_S = 2.0
_SET_BY = {
    "--connect-timeout": "--connect-timeout",
    "--timeout": "--timeout, in the window the dialog Connect to server,",
}
_SECONDS = NumberRange(0.0, 1e6, "Name a number of seconds up to 1000000.", is_open=True)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a server, seconds. Only what is complete counts as progress: bytes that end no
    header block, event or short reply extend no limit. Raises OptionError."""

    GROUP: ClassVar[str] = "server"
    connect_timeout: float = option(
        10.0,
        "--connect-timeout",
        "seconds within which a connection, or a whole short reply such as that of /props, has to "
        "come",
        _SECONDS,
        metavar="S",
    )
    timeout: float = option(
        600.0,
        "--timeout",
        "seconds that the server may let pass before the headers of a reply, before its first "
        "event, and between two events; on a CPU a long prompt takes minutes",
        _SECONDS,
        metavar="S",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Wait:
    """Something that a server has to deliver. what: such as "the headers of URL". limit: seconds,
    which the option `flag` sets. since: `time.perf_counter`. is_connected: the server was reached.
    """

    what: str
    limit: float
    flag: str
    since: float
    is_connected: bool = True

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return perf_counter() - self.since

    @property
    def sentence(self) -> str:
        """For the user, without a full stop; empty as long as it is short."""
        if self.seconds < _SHOWN_AFTER_S:
            return ""
        return f"waiting for {self.what}, {int(self.seconds)} of {self.limit:g} s"

    @property
    def error(self) -> ServerError:
        """Once the limit is reached."""
        kind = ServerTimeoutError if self.is_connected else ServerError
        return kind(
            f"Waiting for {self.what} took more than {self.limit:g} s.",
            f"See whether the server works; {_SET_BY[self.flag]} sets the limit.",
        )


class Awaited:
    """What a request waits for, replaced by the thread that reads and read by any other."""

    def __init__(self) -> None:
        self._wait: Wait | None = None
        self.loading: Wait | None = None
        """The server's model, which is asked for again and again."""

    @property
    def wait(self) -> Wait | None:
        """What is waited for now."""
        return self.loading or self._wait

    def begin(self, wait: Wait) -> None:
        """Wait for this from now on."""
        self._wait = wait

    def load(self, address: str, limits: TimeLimits) -> None:
        """The server says that its model is being loaded. Raises ServerError at the limit."""
        if self.loading is None:
            what, now = f"{address} to load its model", perf_counter()
            self.loading = Wait(what, limits.timeout, "--timeout", now)
        if self.loading.seconds > self.loading.limit:
            raise self.loading.error
