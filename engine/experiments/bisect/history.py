"""Histories for a search: git commits with their parents, or a list of builds.

A search starts from any known verdicts, so that it can be resumed. A commit is reported only
between one seen to fail and parents seen to pass.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import OptionError

_MOST_REVISIONS = 1 << 14
_LONGEST_TITLE = 120
_LONGEST_PATH = 60
_GIT_S = 600.0
_FIELDS = "%H%x00%P%x00%s"


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit, or a build. key: its hash, or its path and time; parents: indices in the
    history."""

    key: str
    title: str
    parents: tuple[int, ...]

    @property
    def short(self) -> str:
        """A short name for a line of text."""
        is_hash = len(self.key) >= 40 and not self.key.strip("0123456789abcdef")
        return self.key[:9] if is_hash else self.title

    @property
    def name(self) -> str:
        """With its title."""
        return self.title if self.short == self.title else f"{self.short} {self.title}"


class RevisionHistory:
    """Revisions in topological order; the first is the good end, the last the bad one."""

    def __init__(self, revisions: Sequence[Revision]) -> None:
        self.revisions = revisions
        self.ancestors: list[int] = []
        """Of each revision, including itself, as a bit set."""
        for i, revision in enumerate(revisions):
            mine = 1 << i
            for parent in revision.parents:
                mine |= self.ancestors[parent]
            self.ancestors.append(mine)

    def __len__(self) -> int:
        return len(self.revisions)

    def suspects(self, fails: Mapping[int, bool | None]) -> list[int]:
        """Candidates for the first failure, given known verdicts: True fails, False passes.

        The last revision fails, the first one passes. If a fault was fixed and reintroduced,
        candidates come after the latest pass.
        """
        left = self.ancestors[-1] & ~1
        for i, failed in fails.items():
            if failed is False:
                left &= ~self.ancestors[i]
        for i, failed in fails.items():
            if failed and left >> i & 1:
                left &= self.ancestors[i]
        return [i for i in range(len(self)) if left >> i & 1]

    def next_to_judge(self, fails: Mapping[int, bool | None]) -> int | None:
        """The revision that best halves the suspects, None if none is left to judge.

        Unjudgeable ones (None in `fails`) tend to be adjacent: revisions between two of them are
        tried last, so that such a range remains after as many steps as halving takes.
        """
        suspects = self.suspects(fails)
        left = [i for i in suspects if i not in fails]
        if len(suspects) < 2 or not left:
            return None
        skipped = [i for i in suspects if fails.get(i, True) is None]
        if skipped:
            runs = _runs(suspects, left)
            outer = [run for run in runs if run[-1] < skipped[0] or run[0] > skipped[-1]]
            longest = max(outer or runs, key=len)
            return longest[len(longest) // 2]
        inside = sum(1 << i for i in suspects)
        parts = {i: (self.ancestors[i] & inside).bit_count() for i in left}
        return min(left, key=lambda i: abs(2 * parts[i] - len(suspects)))

    def mended_between(self, fails: Mapping[int, bool | None]) -> tuple[int, int] | None:
        """A failing revision with a passing descendant: the fault was introduced more than once."""
        for later in sorted(i for i, failed in fails.items() if failed is False):
            for earlier in sorted(i for i, failed in fails.items() if failed):
                if earlier != later and self.ancestors[later] >> earlier & 1:
                    return earlier, later
        return None


def _runs(suspects: Sequence[int], left: Sequence[int]) -> list[list[int]]:
    """The remaining ones, in contiguous groups."""
    runs: list[list[int]] = []
    wanted, before = set(left), -1
    for place, i in enumerate(suspects):
        if i in wanted:
            if before != place - 1 or not runs:
                runs.append([])
            runs[-1].append(i)
            before = place
    return runs


def in_a_row(builds: Sequence[Path]) -> RevisionHistory:
    """Builds from oldest to newest, without a repository. Raises OptionError."""
    if len(builds) < 2:
        raise OptionError("At least two builds are needed.", "Name more builds.")
    if missing := [path for path in builds if not path.exists()]:
        raise OptionError(f"There is no build at {str(missing[0])[:80]}.", "Correct its path.")
    return RevisionHistory(
        [
            Revision(f"{path.resolve()}@{_time(path)}", _end_of(str(path)), (i - 1,) if i else ())
            for i, path in enumerate(builds)
        ]
    )


def _end_of(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"…{path[1 - _LONGEST_PATH :]}"


def _time(build: Path) -> int:
    """Build time, by its newest library."""
    files = [build, *build.rglob("*llama*")] if build.is_dir() else [build]
    return max(path.stat().st_mtime_ns for path in files if path.exists())


def commits(repo: Path, good: str, bad: str) -> tuple[RevisionHistory, str]:
    """The commits from a good one to a bad one, and a note if another good end is used.

    Raises OptionError for an unknown repository or commit, and for too long a history.
    """
    if not repo.is_dir():
        raise OptionError(f"There is no folder {str(repo)[:80]}.", "Name a clone with --repo.")
    first, last = _commit(repo, good), _commit(repo, bad)
    base = git(repo, "merge-base", first, last).strip()
    if base == last:
        raise OptionError(
            f"{bad} is an ancestor of {good}.", "Exchange --good and --bad, or name newer ones."
        )
    note = ""
    if base != first:
        note = f"{good} is not an ancestor of {bad}: the search begins at their merge base "
        note += base[:9]
    lines = git(
        repo,
        *("log", "--topo-order", "--reverse", f"--format={_FIELDS}"),
        *(f"--max-count={_MOST_REVISIONS + 1}", last, f"^{base}"),
    ).split("\n")[:-1]
    if len(lines) > _MOST_REVISIONS:
        raise OptionError(
            f"There are more than {_MOST_REVISIONS:,} commits between {good} and {bad}.",
            "Name commits that are closer together.",
        )
    title = git(repo, "log", "-1", "--format=%s", base).strip()
    found = [Revision(base, title[:_LONGEST_TITLE], ())]
    places = {base: 0}
    for line in lines:
        key, parents, title = line.split("\0", 2)
        # older commits than the good end count as good
        known = dict.fromkeys(places.get(parent, 0) for parent in parents.split())
        places[key] = len(found)
        found.append(Revision(key, title[:_LONGEST_TITLE], tuple(known)))
    return RevisionHistory(found), note


def chosen(repo: Path, history: RevisionHistory, texts: Iterable[str]) -> set[int]:
    """The revisions named by REV and A..B. Raises OptionError."""
    places = {revision.key: i for i, revision in enumerate(history.revisions)}
    found = set()
    for text in texts:
        if ".." in text:
            older, _, newer = text.partition("..")
            ends = _commit(repo, older), _commit(repo, newer.lstrip("."))
            keys = git(repo, "rev-list", ends[1], f"^{ends[0]}").split()
        else:
            keys = [_commit(repo, text)]
        found |= {places[key] for key in keys if key in places}
    return found


def git(folder: Path, *words: str) -> str:
    """Output of a git command. Raises OptionError with its last words if it fails.

    The repository's hooks and pagers are disabled.
    """
    try:
        done = subprocess.run(
            ["git", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            env=os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError as error:
        raise OptionError("git is not in $PATH.", "Install git, or use --builds.") from error
    except subprocess.TimeoutExpired as error:
        raise OptionError(
            f"git {words[0]} did not end within {_GIT_S:g} s.", "Check the repository."
        ) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OptionError(
            f"git {words[0]} fails in {str(folder)[:80]}: {(said or ['no message'])[-1][:200]}.",
            "Check the repository.",
        )
    return done.stdout.decode("utf-8", "replace")


def _commit(repo: Path, name: str) -> str:
    try:
        return git(
            repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        ).strip()
    except OptionError as error:
        if "no message" not in error.message:
            raise
        raise OptionError(
            f"{str(repo)[:80]} has no commit {name[:80]!r}.",
            "Name a commit, branch or tag of that repository; a shallow clone may miss it.",
        ) from error
