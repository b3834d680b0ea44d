"""Builds of commits: a work tree of its own, CMake and Ninja, only the library.

The user's checkout is never touched. The work tree and the build folder stay from commit to commit,
so that a step compiles what differs; of every build its libraries and headers are kept until the
search needs them no more.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from engine.errors import OptionError
from engine.experiments.bench.llama_programs import started
from engine.experiments.bisect.history import Revision, git

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
    # a commit's name within its library would compile two files more at each step
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
    """Nothing is known of a revision: it does not build, or cannot be judged. The text says why."""


class CMakeBuilds:
    """Builds of a repository's commits in a folder of the cache. limit_s: for one commit.

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
                raise OptionError(
                    f"There is no {name} on $PATH.", f"Install {name}, or use --builds."
                )
        mark = hashlib.sha256("\0".join((target, *options)).encode()).hexdigest()[:8]
        self._repo, self._options, self._target = repo.resolve(), options, target
        self._jobs, self._limit_s = jobs or os.cpu_count() or 1, limit_s
        self.tree = folder / "tree"
        self._build, self._kept = folder / f"build-{mark}", folder / f"kept-{mark}"
        self._logs = folder / "logs"

    def __call__(self, revision: Revision) -> Path:
        """The folder of a commit's build: its libraries in lib, its headers in include.

        Raises SkippedError where it does not build, OptionError where there is no work tree.
        """
        return self._made(revision.key[:16], revision)

    def alone(self, revision: Revision, base: Revision) -> Path:
        """The build of another commit with the change of this one alone, where what comes in
        between cannot be built. Raises as a call does, also where the change does not fit."""
        return self._made(f"{base.key[:16]}+{revision.key[:16]}", base, revision)

    def _made(self, name: str, revision: Revision, change: Revision | None = None) -> Path:
        kept = self._kept / name
        if not kept.is_dir():
            self._check_out(revision.key)
            if change is not None:
                try:
                    git(self.tree, "cherry-pick", "--no-commit", change.key)
                except OptionError as error:
                    raise SkippedError("its change alone does not fit") from error
            self._logs.mkdir(parents=True, exist_ok=True)
            self._make(self._logs / f"{name}.log")
            self._keep(kept)
        return kept

    def forget_all_but(self, revisions: Iterable[Revision]) -> None:
        """Remove the kept builds of all other commits."""
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
        # left by a git that was killed; no other one works in this tree
        lock = Path(git(self.tree, "rev-parse", "--git-path", "index.lock").strip())
        (self.tree / lock).unlink(missing_ok=True)
        git(self.tree, "checkout", "--detach", "--force", "--quiet", key)
        git(self.tree, "clean", "-fdxq")

    def _has_tree(self) -> bool:
        """Whether the work tree is one of this repository."""
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
        # always: sources that a pattern names are looked for anew
        configure = ["-S", self.tree, "-B", self._build, "-G", "Ninja", *options, *self._options]
        log.write_bytes(b"")
        status = self._ran(configure, log, until)
        if status and was_there:  # options of other commits may be in its way
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
        """Copy what a build gave; it is there as a whole or not at all."""
        found = [path for path in self._build.rglob(_SHARED) if not path.is_dir()]
        if not any(path.name == LIBRARY for path in found):
            raise SkippedError(f"its build gives no {LIBRARY}")
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
    """The first line of a log that says what is wrong, without the folders of its file."""
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
    return re.sub(r"\S*/", "", " ".join(words))[:_LONGEST]


def given_build(revision: Revision) -> Path:
    """The build that a revision of a row of builds is."""
    return Path(revision.key.rpartition("@")[0])
