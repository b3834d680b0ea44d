"""The child process that renders one chat template: a script with JSON input and output.

It imports none of our modules, so that it starts quickly, and limits itself before it reads the
template. Jinja's sandbox keeps the template from accessing anything; the limits end a template that
computes too much, even inside a single operation such as `10 ** 10 ** 10`.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

MAX_DETAIL = 300  # characters of an error message


def main() -> None:
    """Read a request from standard input and write the reply to standard output.

    request: template, variables, and limits (cpu in seconds, memory in bytes, output in
    characters). reply: {"text"} or {"error", "line", "detail"}, where error is "broken", "refused",
    "output" or "memory".
    """
    request = json.load(sys.stdin.buffer)
    _limit(request["limits"]["cpu"], request["limits"]["memory"])
    try:
        reply = _render(request["template"], request["variables"], request["limits"]["output"])
    except MemoryError:
        reply = {"error": "memory"}
    sys.stdout.write(json.dumps(reply))


def _limit(cpu: int, memory: int) -> None:
    """Lower the limits of this process, if the system has such limits."""
    try:
        import resource
    except ImportError:
        return
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: cpu}
    if sys.platform == "linux":
        wanted[resource.RLIMIT_AS] = memory
    for kind, limit in wanted.items():
        hard = resource.getrlimit(kind)[1]
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


def _render(template: str, variables: dict[str, Any], max_output: int) -> dict[str, Any]:
    """Render in the environment that published templates expect (that of transformers 5)."""
    import jinja2

    try:
        parts: list[str] = []
        size = 0
        for part in _environment().from_string(template).generate(variables):
            parts.append(part)
            size += len(part)
            if size > max_output:
                return {"error": "output"}
        return {"text": "".join(parts)}
    except _RefusalError as error:
        return _failure("refused", None, error)
    except jinja2.TemplateSyntaxError as error:
        return _failure("broken", error.lineno, error.message)
    except MemoryError:
        raise
    except Exception as error:
        # anything that an operator or filter raises in a template is the template's fault
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
        return _failure("broken", lines[-1] if lines else None, error)


def _failure(kind: str, line: int | None, error: object) -> dict[str, Any]:
    detail = " ".join(str(error).split()) or type(error).__name__
    detail = detail[:MAX_DETAIL].rstrip(".").replace(". ", "; ")  # it ends up inside a sentence
    return {"error": kind, "line": line, "detail": detail}


class _RefusalError(Exception):
    """Raised by a template that calls `raise_exception`: it refuses the messages."""


def _raise_exception(message: object = "") -> None:
    raise _RefusalError(message)


def _strftime_now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it is only a scope."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


if __name__ == "__main__":
    main()
