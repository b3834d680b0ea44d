"""A model's chat template (`tokenizer.chat_template`, Jinja2), rendered in a child process.

A template is a program from an untrusted file. Jinja's sandbox limits what it can access, but not
how long a single multiplication or padded format takes, and a thread cannot be stopped inside such
a call. So every rendering runs in a child process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ChatTemplateError
from engine.gguf.binary import check_cancelled, never, shorten
from engine.gguf.metadata import TypedMetadata

MAX_TEMPLATE = 1_000_000  # characters
MAX_OUTPUT = 4_000_000  # characters
MAX_MEMORY = 512 << 20  # bytes of address space, on Linux
MAX_CPU = 2  # seconds, on POSIX systems; a rendering takes a tenth
MAX_WALL = 8.0  # seconds; longer than MAX_CPU, for busy machines
MAX_DETAIL = 300  # characters of its error message
LOOK_S = 0.03  # between two checks for cancellation

_STOPPED = (signal.SIGXCPU, signal.SIGKILL) if sys.platform != "win32" else ()
_WORKER = Path(__file__).with_name("chat_worker.py")
_PLAIN = "Send the prompt as plain text, or use another copy of the model."
_CHANGE = "Change the messages, or send the prompt as plain text."


class ChatTemplate:
    """Turns messages into the text of a prompt."""

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        self.source = source
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in named.items() if token is not None}

    @classmethod
    def from_gguf(cls, file: TypedMetadata) -> ChatTemplate | None:
        """The file's template, or None; it is not validated before `render`."""
        source = file.str_("tokenizer.chat_template", "")
        if not source:
            return None
        return cls(source, _token(file, "bos_token_id"), _token(file, "eos_token_id"))

    def render(
        self,
        messages: list[dict[str, Any]],
        cancelled: Callable[[], bool] = never,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Takes about 0.1 s; the values must be representable in JSON.

        kwargs: further variables of the template, for example `enable_thinking` or `documents`;
        they cannot replace the messages. Raises ChatTemplateError for a template that is broken,
        refuses the messages, or takes more time, memory or output than a prompt can need, and
        Cancelled soon after `cancelled` returns True.
        """
        if len(self.source) > MAX_TEMPLATE:
            what = f"is longer than {MAX_TEMPLATE:,} characters"
            raise ChatTemplateError(f"The chat template {what}.", _PLAIN)
        variables = {
            **self._tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
            "messages": messages,
        }
        reply = _ask(self.source, variables, cancelled)
        if "text" not in reply:
            _fail(reply)
        return str(reply["text"])


def _token(file: TypedMetadata, name: str) -> str | None:
    token_id = file.int_(f"tokenizer.ggml.{name}", -1)
    tokens = file.strs("tokenizer.ggml.tokens", [])
    return tokens[token_id] if 0 <= token_id < len(tokens) else None


def _ask(template: str, variables: dict[str, Any], cancelled: Callable[[], bool]) -> dict[str, Any]:
    """The worker's reply; an `error` of its own kind if it was stopped or died."""
    limits = {"cpu": MAX_CPU, "memory": MAX_MEMORY, "output": MAX_OUTPUT}
    request = {"template": template, "variables": variables, "limits": limits}
    try:
        # a file, because communicate() of Python 3.11 does not send the rest of a pipe's input
        # after its first timeout
        with tempfile.TemporaryFile() as asked:
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            worker = subprocess.Popen(
                # -P: our folder must not shadow other modules
                [sys.executable, "-P", str(_WORKER)],
                stdin=asked,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
    except OSError as error:
        return {"error": "died", "detail": error.strerror}
    with worker:
        answer = _answer(worker, cancelled)
    if answer is None or -worker.returncode in _STOPPED:
        return {"error": "time"}
    if worker.returncode != 0:
        return {"error": "died", "detail": f"exit status {worker.returncode}"}
    reply: dict[str, Any] = json.loads(answer)
    return reply


def _answer(worker: subprocess.Popen[bytes], cancelled: Callable[[], bool]) -> bytes | None:
    """The worker's output, None on timeout. The worker has ended in either case."""
    try:
        # attempts are counted, because a clock continues while this process and the worker are
        # stopped
        for _ in range(round(MAX_WALL / LOOK_S)):
            check_cancelled(cancelled)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return worker.communicate(timeout=LOOK_S)[0]
        return None
    finally:
        worker.kill()


def _fail(reply: dict[str, Any]) -> NoReturn:
    kind, line = reply["error"], reply.get("line")
    # text from the template may reach a terminal
    detail = shorten(str(reply.get("detail")), MAX_DETAIL)
    place = f" at line {line}" if line else ""
    message, remedy = {
        "broken": (f"is broken{place}: {detail}", _PLAIN),
        "refused": (f"refuses these messages: {detail}", _CHANGE),
        "output": (f"produces more than {MAX_OUTPUT:,} characters", _PLAIN),
        "memory": (f"needs more than {MAX_MEMORY >> 20} MiB of memory", _PLAIN),
        "time": ("takes too long and was stopped", _PLAIN),
        "died": (f"stopped with an error ({detail})", _PLAIN),
    }[kind]
    raise ChatTemplateError(f"The chat template {message}.", remedy)
