"""Judges of a build: a command of this program that ends with JSON, or one of the user's.

Each runs as a child with a limit of time, so that a build which hangs or fells its process costs a
step and nothing more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.compare.llama_library import environment
from engine.compare.llama_process import last_words
from engine.compare.rollback_outcomes import ABSENT, FAILED, KNOWN, REFUSED, RIGHT, WRONG
from engine.errors import OptionError, PeerLibraryError
from engine.experiments.bench.llama_programs import started
from engine.experiments.bisect.builds import SkippedError
from engine.files import file_bytes
from engine.foreign_json import JsonError, parse_json

RANKS = {RIGHT: 0, REFUSED: 0, ABSENT: 1, KNOWN: 1, WRONG: 2, FAILED: 2}
"""How bad an outcome is. Of any other nothing is known."""
COMMANDS = ("check-rollback", "compare")
Checks = Mapping[str, tuple[str, str]]
"""By the name of a check: its outcome, and what is said about it."""
Judge = Callable[[Path, Collection[str]], Checks]
"""Judges the build in a folder by these checks and maybe others, by all where none are given.
Raises SkippedError where it cannot be judged."""
OWN = "the command"
"""The one check of a user's command."""
_MOST_REPLY = 64 << 20
_MOST_CHECKS = 10_000
_DRAFTED = re.compile(r", (\d+) drafted$")
_SKIP = 125
"""Exit status of a command that cannot judge, as `git bisect run` has it."""
_LONGEST = 400


def judge_of(model: Path, words: Sequence[str], limit_s: float) -> Judge:
    """Of a command of this program. words: its name and its options, but for the model and the
    library. Raises OptionError for another command."""
    if not words or words[0] not in COMMANDS:
        raise OptionError(
            f"A build cannot be judged by {' '.join(words)[:80]!r}.",
            f"Use {' or '.join(COMMANDS)} with its options, or --judge-command.",
        )
    name, *options = words

    def judge(build: Path, wanted: Collection[str] = ()) -> Checks:
        command = ["-m", "app", name, model, "--llama-cpp", build, "--json", *options]
        if name == "check-rollback":
            command += _only(wanted)
        status, reply, said = _ran(Path(sys.executable), command, limit_s, environment(build))
        try:
            found = parse_json(reply.decode("utf-8", "replace"))
            return (_checked if name == "check-rollback" else _compared)(found)
        except (JsonError, KeyError, TypeError, AttributeError):
            said = said.partition("error: ")[2] or said or f"exit status {status} without a result"
            raise SkippedError(f"cannot be judged: {said[:_LONGEST]}") from None

    return judge


def judge_command(command: Sequence[str], limit_s: float) -> Judge:
    """Of a command of the user's: exit status 0 passes, 125 cannot tell, others fail, as
    `git bisect run` has it. It gets the build's folder in DRAFTSCOPE_BUILD and in place of {}.
    Raises OptionError for an empty one."""
    if not command:
        raise OptionError("--judge-command is empty.", "Give a command.")

    def judge(build: Path, wanted: Collection[str] = ()) -> Checks:
        shell = [part.replace("{}", str(build)) for part in command]
        settings = os.environ | {"DRAFTSCOPE_BUILD": str(build)}
        status, _, said = _ran(Path("/usr/bin/env"), shell, limit_s, settings)
        if status in (_SKIP, 126, 127):
            raise SkippedError(f"cannot be judged: {said or f'exit status {status}'}")
        return {OWN: (RIGHT if status == 0 else WRONG, said)}

    return judge


def request_words(path: Path, number: int, folder: Path) -> list[str]:
    """The words of `compare` for a request of a capture: its prompt, with drafts of every length
    undone by planes and by checkpoints. folder: takes the prompt.

    Raises OptionError for a request without a prompt, TraceFileError for what is not a capture.
    """
    from engine.observe.files.capture import MOST_BYTES, read_capture

    requests = read_capture(file_bytes(path, MOST_BYTES), path.name).requests
    if not 1 <= number <= len(requests):
        raise OptionError(
            f"{path.name} has no request {number}.", f"Choose one from 1 to {len(requests)}."
        )
    body = requests[number - 1].body
    prompt = body.get("prompt")
    words = ["compare"]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        words += ["--tokens", ",".join(map(str, prompt))]
    else:
        messages = body.get("messages")
        if isinstance(messages, list):
            said = [one.get("content") for one in messages if isinstance(one, dict)]
            prompt = "\n".join(text for text in said if isinstance(text, str))
        if not isinstance(prompt, str) or not prompt:
            raise OptionError(
                f"Request {number} of {path.name} has no prompt of text or tokens.",
                "Choose another request.",
            )
        text = folder / "prompt.txt"
        folder.mkdir(parents=True, exist_ok=True)
        text.write_text(prompt, encoding="utf-8")
        words += ["-f", str(text)]
    for rollback in ("planes", "checkpoint"):
        words += ["--lane", f"llama.cpp,rollback={rollback}"]
    return [*words, "-n", "32", "--spec-draft-n-max", "3", "--draft-accept", "0,3,1,2"]


def _ran(
    program: Path, words: Sequence[object], limit_s: float, settings: Mapping[str, str]
) -> tuple[int, bytes, str]:
    """Exit status, standard output and last words."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            with started(program, words, output, stderr=errors, env=settings) as running:
                status = running.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SkippedError(f"was not judged within {limit_s:g} s") from None
        except PeerLibraryError as error:
            raise OptionError(error.message, "Correct --judge-command.") from error
        output.seek(0)
        reply = output.read(_MOST_REPLY + 1)
        if len(reply) > _MOST_REPLY:
            raise SkippedError("cannot be judged: its judge says more than is read")
        return status, reply, last_words(errors)[:_LONGEST]


def _checked(found: Any) -> Checks:
    """Of `check-rollback --json`."""
    return {
        lane["name"]: (str(lane["outcome"]), str(lane["about"])[:_LONGEST])
        for lane in found["lanes"][:_MOST_CHECKS]
    }


def _only(wanted: Collection[str]) -> list[str]:
    """Options of check-rollback for these checks: their scenarios, and the lengths of drafts."""
    words = []
    for scenario in dict.fromkeys(name.partition(", ")[0] for name in wanted):
        words += ["--only", scenario]
    depths = {found[1] for name in wanted if (found := _DRAFTED.search(name))}
    return [*words, "--depths", ",".join(sorted(depths, key=int))] if depths else words


def _compared(found: Any) -> Checks:
    """Of `compare --json`: the lanes of llama.cpp that are judged."""
    checks = {}
    for lane in found["lanes"][:_MOST_CHECKS]:
        if lane["lane"].startswith("llama.cpp,"):
            outcome = {"suspect": WRONG, "failed": FAILED}.get(lane["verdict"], RIGHT)
            worst = f"NMSE {lane['worst_nmse']}, first at position {lane['first_pos']}"
            checks[lane["lane"]] = outcome, lane["error"] or (worst if outcome == WRONG else "")
    return checks
