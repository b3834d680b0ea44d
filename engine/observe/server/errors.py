"""Errors of a server as sentences for the user."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

from engine.errors import ApiKeyError, ServerError
from engine.observe.rounds.stream import server_words

_SOON_S = 0.25


def is_loading(status: int, raw: bytes) -> bool:
    """Whether a response says that the server's model is still loading."""
    error = _told_error(raw)
    return status == 503 and (
        error.get("type") == "unavailable_error" or "loading" in str(error.get("message")).lower()
    )


def again_after_s(status: int, raw: bytes, headers: Mapping[str, str]) -> float:
    """Seconds after which a busy server (429, 503) says to retry, 0.0 if it does not say."""
    said = headers.get("Retry-After", "").strip()
    if status not in (429, 503) or is_loading(status, raw):
        return 0.0
    if said.isascii() and said.isdigit():
        return float(said[:9]) or _SOON_S
    try:
        left = parsedate_to_datetime(said).timestamp() - time()
    except (ValueError, OverflowError):
        return 0.0
    return max(left, _SOON_S)


def refusal(address: str, path: str, status: int, raw: bytes) -> ServerError:
    """The error for a response with another status than 200."""
    error = _told_error(raw)
    message = server_words(error.get("message") or "", 300).rstrip(".")
    if status in (401, 403):
        return ApiKeyError(
            f"{address} does not accept the API key.", "Give the key of the server (--api-key-env)."
        )
    if error.get("type") == "exceed_context_size_error":
        n_tokens, n_ctx = (server_words(error.get(k), 20) for k in ("n_prompt_tokens", "n_ctx"))
        return ServerError(
            f"The prompt has {n_tokens} tokens, but {address} has a context of {n_ctx}.",
            "Shorten the prompt, or start the server with a larger -c.",
        )
    if 300 <= status < 400:
        return ServerError(f"{address} redirects {path} to another address.", "Give that address.")
    said = f": {message}" if message else ""
    if status == 404:
        remedy = (
            "Check address and port; name the model if the server lists none (--model-name), and "
            "use --chat if the server only accepts chats."
        )
        return ServerError(f"{address} has no {path}{said}.", remedy)
    return ServerError(
        f"{address} refuses {path} with status {status}{said}.",
        "Change the request, try again later if the server is busy, or read its log.",
    )


def unreachable(address: str, error: BaseException) -> ServerError:
    """The error for a connection that could not be made."""
    import httpx

    if isinstance(error, httpx.TimeoutException):
        why = "it does not answer in time"
    elif "CERTIFICATE" in str(error).upper():
        return ServerError(
            f"{address} has a certificate that this system does not trust.",
            "Add its certificate authority to those of the system.",
        )
    elif isinstance(error, httpx.ProtocolError) and "closed" not in str(error):
        why = "its answer is not HTTP"
    else:
        why = _reason(error)
    return ServerError(
        f"{address} cannot be reached: {why}.", "Start the server, or check address and port."
    )


def cut_short(address: str) -> ServerError:
    """The error for a truncated response."""
    return ServerError(
        f"{address} broke off its reply.", "Check that the server is running; then send it again."
    )


def foreign(address: str, path: str, kind: str = "") -> ServerError:
    """The error for a response that is not a llama-server's. kind: its content type, if any."""
    what = server_words(kind, 80) if kind not in ("", "application/json") else "something"
    return ServerError(
        f"{address} answers {path} with {what} that llama-server does not send.",
        "Name the address and port of a llama-server, or of another server of the OpenAI API.",
    )


def _reason(error: BaseException | None) -> str:
    known: dict[type[BaseException], str] = {
        ConnectionRefusedError: "connection refused",
        socket.gaierror: "the host name is unknown",
        ssl.SSLError: "it does not use TLS",
    }
    while error is not None:
        for kind, said in known.items():
            if isinstance(error, kind):
                return said
        error = error.__cause__ or error.__context__
    return "the connection fails"


def _told_error(raw: bytes) -> dict[str, Any]:
    """The error object of a response, empty without one."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    error = value.get("error") if isinstance(value, dict) else None
    return error if isinstance(error, dict) else {"message": error} if error else {}
