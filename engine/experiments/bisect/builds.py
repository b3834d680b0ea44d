"""Builds of commits, in a separate work tree, with CMake and Ninja, of the library only.

The user's checkout is never touched. Work tree and build folder are reused from commit to commit,
so that a step compiles only differences; libraries and headers of every build are kept until the
search no longer needs them. A build is judged by a command of this program that prints JSON, or by
the user's command. Each runs as a child process with a time limit, so that a hanging or crashing
build costs only its step.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.compare.llama_library import environment
from engine.compare.llama_process import last_words
from engine.compare.rollback_outcomes import ABSENT, FAILED, KNOWN, REFUSED, RIGHT, WRONG
from engine.errors import OptionError, PeerLibraryError
from engine.experiments.bench.llama_programs import started
from engine.experiments.bisect.history import Revision, git
from engine.files import file_bytes
from engine.foreign import JsonError, parse_json

LIBRARY = {"win32": "llama.dll", "darwin": "libllama.dylib"}.get(sys.platform, "libllama.so")
_SHARED = {"win32": "*.dll", "darwin": "*.dylib"}.get(sys.platform, "*.so*")
_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=ON",
    "CMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # a copy loads the libraries next to it
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_TOOLS=OFF",
    "LLAMA_BUILD_SERVER=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_COMMON=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_CURL=OFF",
    "LLAMA_OPENSSL=OFF",
    # embedding the commit's name would compile two more files per step
    "GIT_EXE=none",
    "LLAMA_BUILD_COMMIT=unknown",
    "LLAMA_BUILD_NUMBER=0",
)
_HEADER_FOLDERS = (".", "include", "ggml/include")
_HEADERS = ("llama*.h", "ggml*.h", "gguf.h")
_LOG_TAIL = 1 << 18
_LONGEST = 200
_WRONG = re.compile(r"\berror\b|^FAILED:|undefined reference|No space left", re.IGNORECASE)


class SkippedError(Exception):
    """A revision could not be built or judged, for the reason given."""


class CMakeBuilds:
    """CMake builds of a repository's commits in a cache folder. limit_s: per commit.

    Raises OptionError without git, CMake or Ninja.
    """

    def __init__(
        self,
        repo: Path,
        folder: Path,
        options: Sequence[str] = (),
        *,
        target: str = "llama",
        jobs: int | None = None,
        limit_s: float = 3600.0,
    ) -> None:
        for name in ("cmake", "ninja"):
            if shutil.which(name) is None:
                raise OptionError(f"{name} is not in $PATH.", f"Install {name}, or use --builds.")
        mark = hashlib.sha256("\0".join((target, *options)).encode()).hexdigest()[:8]
        self._repo, self._options, self._target = repo.resolve(), options, target
        self._jobs, self._limit_s = jobs or os.cpu_count() or 1, limit_s
        self.tree = folder / "tree"
        self._build, self._kept = folder / f"build-{mark}", folder / f"kept-{mark}"
        self._logs = folder / "logs"

    def __call__(self, revision: Revision) -> Path:
        """The folder of a commit's build: libraries in lib, headers in include.

        Raises SkippedError if it does not build, OptionError without a work tree.
        """
        return self._made(revision.key[:16], revision)

    def alone(self, revision: Revision, base: Revision) -> Path:
        """A build of another commit plus the change of this one alone, if commits in between cannot
        be built. Raises like a call, also if the change does not apply."""
        return self._made(f"{base.key[:16]}+{revision.key[:16]}", base, revision)

    def _made(self, name: str, revision: Revision, change: Revision | None = None) -> Path:
        kept = self._kept / name
        if not kept.is_dir():
            self._check_out(revision.key)
            if change is not None:
                try:
                    git(self.tree, "cherry-pick", "--no-commit", change.key)
                except OptionError as error:
                    raise SkippedError("its change cannot be applied alone") from error
            self._logs.mkdir(parents=True, exist_ok=True)
            self._make(self._logs / f"{name}.log")
            self._keep(kept)
        return kept

    def forget_all_but(self, revisions: Iterable[Revision]) -> None:
        """Remove kept builds of all other commits."""
        wanted = {revision.key[:16] for revision in revisions}
        with suppress(OSError):
            for folder in self._kept.iterdir():
                if folder.name not in wanted:
                    shutil.rmtree(folder, ignore_errors=True)

    def _check_out(self, key: str) -> None:
        if not self._has_tree():
            shutil.rmtree(self.tree, ignore_errors=True)
            self.tree.parent.mkdir(parents=True, exist_ok=True)
            git(self._repo, "worktree", "add", "--detach", "--force", str(self.tree), key)
            return
        # left by a killed git; no other one works in this tree
        lock = Path(git(self.tree, "rev-parse", "--git-path", "index.lock").strip())
        (self.tree / lock).unlink(missing_ok=True)
        git(self.tree, "checkout", "--detach", "--force", "--quiet", key)
        git(self.tree, "clean", "-fdxq")

    def _has_tree(self) -> bool:
        """Whether the work tree belongs to this repository."""
        if not (self.tree / ".git").exists():
            return False
        words = ("rev-parse", "--git-common-dir")
        with suppress(OptionError):
            mine, theirs = git(self.tree, *words).strip(), git(self._repo, *words).strip()
            return (self.tree / mine).resolve() == (self._repo / theirs).resolve()
        return False

    def _make(self, log: Path) -> None:
        until = time.monotonic() + self._limit_s
        was_there = (self._build / "CMakeCache.txt").is_file()
        options = [f"-D{option}" for option in _OPTIONS]
        # always, to rescan sources found by patterns
        configure = ["-S", self.tree, "-B", self._build, "-G", "Ninja", *options, *self._options]
        log.write_bytes(b"")
        status = self._ran(configure, log, until)
        if status and was_there:  # options of other commits may be in the way
            shutil.rmtree(self._build, ignore_errors=True)
            status = self._ran(configure, log, until)
        if not status:
            for path in self._build.rglob(f"{LIBRARY}*"):  # of another commit
                if not path.is_dir():
                    path.unlink()
            build = ["--build", self._build, "--target", self._target, "-j", self._jobs]
            status = self._ran(build, log, until)
        if status:
            raise SkippedError(f"does not build: {_why(log)}")

    def _ran(self, words: Sequence[object], log: Path, until: float) -> int:
        cmake = Path(shutil.which("cmake") or "cmake")
        with log.open("ab") as output, started(cmake, words, output, stderr=output) as running:
            try:
                return running.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise SkippedError(f"did not build within {self._limit_s:g} s") from None

    def _keep(self, kept: Path) -> None:
        """Copy a build's results, atomically."""
        found = [path for path in self._build.rglob(_SHARED) if not path.is_dir()]
        if not any(path.name == LIBRARY for path in found):
            raise SkippedError(f"its build has no {LIBRARY}")
        part = kept.with_name(f".{kept.name}")
        shutil.rmtree(part, ignore_errors=True)
        for name in ("lib", "include"):
            (part / name).mkdir(parents=True)
        for path in found:
            if path.is_symlink() and os.sep in os.readlink(path):
                shutil.copy2(path, part / "lib" / path.name)
            else:
                shutil.copy2(path, part / "lib" / path.name, follow_symlinks=False)
        for folder in _HEADER_FOLDERS:
            for pattern in _HEADERS:
                for path in (self.tree / folder).glob(pattern):
                    shutil.copy2(path, part / "include" / path.name)
        part.rename(kept)


def _why(log: Path) -> str:
    """The first error line of a log, without the file's folders."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    wrong = [i for i, line in enumerate(said) if _WRONG.search(line)]
    compiler = [i for i in wrong if " error: " in said[i]]
    first = next(iter(compiler or wrong), len(said) - 1)
    words = said[first : first + 1] or ["it says nothing"]
    if words[0].startswith("CMake Error"):  # the message is in the next line
        words += said[first + 1 : first + 2]
    return re.sub(r"[^\s\"']*/", "", " ".join(words))[:_LONGEST]


def given_build(revision: Revision) -> Path:
    """The build of a revision in a list of builds."""
    return Path(revision.key.rpartition("@")[0])


RANKS = {RIGHT: 0, REFUSED: 0, ABSENT: 1, KNOWN: 1, WRONG: 2, FAILED: 2}
"""Severity of outcomes. Others mean unknown."""
COMMANDS = ("check-rollback", "compare")
Checks = Mapping[str, tuple[str, str]]
"""Outcome and text by name of the check."""
Judge = Callable[[Path, Collection[str]], Checks]
"""Judges the build in a folder by at least these checks, or all if none are given. Raises
SkippedError if it cannot be judged."""
OWN = "the command"
"""The only check of a user's command."""
_MOST_REPLY = 64 << 20
_MOST_CHECKS = 10_000
_DRAFTED = re.compile(r", (\d+) drafted$")
_SKIP = 125
"""Exit status of a command that cannot judge, as in `git bisect run`."""
_LONGEST_SAID = 400


def judge_of(model: Path, words: Sequence[str], limit_s: float) -> Judge:
    """A judge that runs a command of this program. words: its name and options, except model and
    library. Raises OptionError for an unsuitable command."""
    if not words or words[0] not in COMMANDS:
        raise OptionError(
            f"A build cannot be tested with {' '.join(words)[:80]!r}.",
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
            raise SkippedError(f"cannot be tested: {said[:_LONGEST_SAID]}") from None

    return judge


def judge_command(command: Sequence[str], limit_s: float) -> Judge:
    """A judge that runs the user's command: exit status 0 passes, 125 is undecided, others fail, as
    in `git bisect run`. It gets the build's folder in DRAFTSCOPE_BUILD and in place of {}. Raises
    OptionError for an empty one."""
    if not command:
        raise OptionError("--judge-command is empty.", "Give a command.")

    def judge(build: Path, wanted: Collection[str] = ()) -> Checks:
        shell = [part.replace("{}", str(build)) for part in command]
        settings = os.environ | {"DRAFTSCOPE_BUILD": str(build)}
        status, _, said = _ran(Path("/usr/bin/env"), shell, limit_s, settings)
        if status in (_SKIP, 126, 127):
            raise SkippedError(f"cannot be tested: {said or f'exit status {status}'}")
        return {OWN: (RIGHT if status == 0 else WRONG, said)}

    return judge


def request_words(path: Path, number: int, folder: Path) -> list[str]:
    """Arguments of `compare` for a request of a capture: its prompt, with drafts of every length
    undone by planes and by checkpoints. folder: for the prompt file.

    Raises OptionError for a request without a prompt, TraceFileError if it is not a capture.
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
            raise SkippedError(f"was not tested within {limit_s:g} s") from None
        except PeerLibraryError as error:
            raise OptionError(error.message, "Correct --judge-command.") from error
        output.seek(0)
        reply = output.read(_MOST_REPLY + 1)
        if len(reply) > _MOST_REPLY:
            raise SkippedError("cannot be tested: the output of the test is too long")
        return status, reply, last_words(errors)[:_LONGEST_SAID]


def _checked(found: Any) -> Checks:
    """Of `check-rollback --json`."""
    return {
        lane["name"]: (str(lane["outcome"]), str(lane["about"])[:_LONGEST_SAID])
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
    """From `compare --json`: the judged lanes of llama.cpp."""
    checks = {}
    for lane in found["lanes"][:_MOST_CHECKS]:
        if lane["lane"].startswith("llama.cpp,"):
            outcome = {"suspect": WRONG, "failed": FAILED}.get(lane["verdict"], RIGHT)
            worst = f"NMSE {lane['worst_nmse']}, first at position {lane['first_pos']}"
            checks[lane["lane"]] = outcome, lane["error"] or (worst if outcome == WRONG else "")
    return checks
