"""Planted rollback faults in a repository made of llama.cpp's sources, and what bisect finds.

    python -m tests.support.bisect_campaign SOURCES FOLDER [--only NAME …] [--judge WORDS]

SOURCES: a checkout of llama.cpp 0c1e57098, vendored or not. FOLDER takes the repository, the builds
and the verdicts; the same command goes on where it was stopped. Branch `clean` is 31 commits that
change no behaviour: the texts of comments, logs and notes, names of locals, the order of lines that
do not depend on each other, and one that does not compile. Each fault has a branch, on which one
commit more breaks a rollback; what it is said to break first was written down before it was played.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

TABLE = Path(__file__).parents[1] / "data" / "planted_rollbacks.toml"
TAKEN = (
    "AUTHORS",
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "common",
    "ggml",
    "include",
    "licenses",
    "scripts",
    "src",
    "vendor",
)
JUDGE = "check-rollback --depths 3 -n 10 --mtp -t 1"
CMAKE = (
    "'-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG' '-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG' "
    "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
)
"""Quickly compiled, and without AMX, which some virtual machines report and do not have."""
_SECONDS = 1790812800
_WHO = "draftscope <draftscope@localhost>"


class Edit(NamedTuple):
    """A commit: the first place of a text in a file is replaced; an empty one appends a line."""

    title: str
    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A commit that breaks a rollback. after: harmless commits before it; layer, op: the first
    wrong operation, None outside of layers."""

    name: str
    after: int
    edit: Edit
    layer: int | None
    op: str


@dataclass
class Found:
    """What bisect said of a branch. first: its first wrong operation in words; steps: builds judged
    in all; judge_s: of the slowest."""

    name: str
    has_commit: bool = False
    has_operation: bool = False
    first: str = ""
    steps: int = 0
    skipped: int = 0
    judge_s: float = 0.0


def table(path: Path = TABLE) -> tuple[list[Edit], list[Fault]]:
    """The harmless commits and the faults of a table."""
    found = tomllib.loads(path.read_text())
    faults = []
    for row in found["fault"]:
        edit = Edit(*(row[name] for name in Edit._fields))
        faults.append(Fault(row["name"], row["after"], edit, row.get("layer"), row["op"]))
    return [Edit(**row) for row in found["harmless"]], faults


def make_repository(
    sources: Path, repo: Path, harmless: Sequence[Edit], faults: Sequence[Fault]
) -> None:
    """A repository with branches base, clean, and one for each fault. Its hashes depend on the
    sources alone, so that what was built before is found again."""
    if not (repo / ".git").is_dir():
        for name in TAKEN:
            if (sources / name).is_dir():
                shutil.copytree(sources / name, repo / name, symlinks=True)
            elif (sources / name).is_file():
                repo.mkdir(parents=True, exist_ok=True)
                shutil.copy2(sources / name, repo / name)
        _git(repo, "init", "-q", "-b", "base")
        _git(repo, "add", "-A", "-f")
        _git(repo, "commit", "-q", "-m", "sources as they are vendored")
    texts = _texts(repo, [*harmless, *(fault.edit for fault in faults)])
    stream = _branch("clean", texts, harmless)
    for fault in faults:
        edits = (*harmless[: fault.after], fault.edit, *harmless[fault.after :])
        stream += _branch(branch_of(fault), texts, edits)
    _git(repo, "fast-import", "--quiet", "--force", text=stream)


def branch_of(fault: Fault) -> str:
    """The branch on which it is planted."""
    return fault.name.replace(" ", "-")


def _texts(repo: Path, edits: Sequence[Edit]) -> dict[str, str]:
    """The files that are edited as the base has them; one that is not there is empty."""
    there = set(_git(repo, "ls-tree", "-r", "--name-only", "base").splitlines())
    paths = dict.fromkeys(edit.path for edit in edits)
    return {path: _git(repo, "show", f"base:{path}") if path in there else "" for path in paths}


def _branch(name: str, texts: Mapping[str, str], edits: Sequence[Edit]) -> str:
    """Commands of git fast-import. Raises ValueError where a commit does not fit."""
    lines, now = list[str](), dict(texts)
    for edit in edits:
        text = now[edit.path]
        if edit.old not in text:
            raise ValueError(f"{edit.path} has no place for {edit.title!r}")
        new = text.replace(edit.old, edit.new, 1) if edit.old else f"{text}{edit.new}\n"
        now[edit.path] = new
        lines += [f"commit refs/heads/{name}", f"committer {_WHO} {_SECONDS} +0000"]
        lines += [_data(edit.title), *([] if len(lines) > 3 else ["from refs/heads/base^0"])]
        lines += [f"M 100644 inline {edit.path}", _data(new)]
    return "\n".join([*lines, ""])


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def _git(repo: Path, *words: str, text: str = "") -> str:
    name, address = _WHO.rstrip(">").split(" <")
    who = {
        f"GIT_{one}_{what}": value
        for one in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", name), ("EMAIL", address), ("DATE", f"{_SECONDS} +0000"))
    }
    done = subprocess.run(
        ["git", "-C", str(repo), *words],
        input=text.encode(),
        capture_output=True,
        check=True,
        env=os.environ | who | {"GIT_CONFIG_GLOBAL": os.devnull},
    )
    return done.stdout.decode()


def command(repo: Path, work: Path, branch: str, words: Sequence[object]) -> list[str]:
    """Bisect from the base to a branch."""
    ends = ("--repo", repo, "--good", "base", "--bad", branch, "--work", work)
    return [sys.executable, *map(str, ("-m", "app", "bisect", *ends, *words, "--json"))]


def play(repo: Path, work: Path, branch: str, words: Sequence[object]) -> tuple[int, Any, str]:
    """Exit status of the command, its JSON object or None, and what it said."""
    whole = command(repo, work, branch, words)
    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def judged(fault: Fault, repo: Path, reply: Any) -> Found:
    """What a reply of bisect comes to."""
    found = Found(fault.name)
    if reply is None:
        return found
    edits = _git(repo, "log", "--format=%H %s", branch_of(fault), "^base").splitlines()
    [key] = [line.split()[0] for line in edits if line.endswith(f" {fault.edit.title}")]
    accused = [[one["key"] for one in it["suspects"]] for it in reply["faults"]]
    found.has_commit = accused == [[key]] and reply["faults"][0]["is_sure"]
    found.steps = len(reply["judged"])
    found.skipped = sum(bool(one["skipped"]) for one in reply["judged"])
    found.judge_s = max(one["judge_s"] for one in reply["judged"])
    if first := reply["faults"][0]["first_wrong"]:
        found.has_operation = (first["layer"], first["op"]) == (fault.layer, fault.op)
        layer = "-" if first["layer"] is None else first["layer"]
        found.first = f"{layer} {first['op']} {first['node']}: {first['where']}"
    return found


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Play the campaign; 0 where every fault is found and named, and nothing clean accused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--judge", default=JUDGE)
    parser.add_argument("--cmake-args", default=CMAKE, metavar="WORDS")
    args = parser.parse_args()
    repo, work = args.folder / "repo", args.folder / "work"
    harmless, faults = table()
    make_repository(args.sources, repo, harmless, faults)
    words = (
        "--demo",
        "--judge",
        args.judge,
        "--cmake-args",
        args.cmake_args,
        "--jobs",
        os.cpu_count() or 1,
    )
    n_wrong = 0
    for fault in faults:
        if args.only and fault.name not in args.only:
            continue
        began = perf_counter()
        _, reply, said = play(repo, work, branch_of(fault), words)
        one = judged(fault, repo, reply)
        n_wrong += not (one.has_commit and one.has_operation)
        lines = [f"{one}  {perf_counter() - began:.0f} s", *said.splitlines()]
        _say("\n    ".join(lines))
    if not args.only or "clean" in args.only:
        _, reply, said = play(repo, work, "clean", words)
        n_wrong += reply is not None or " the same " not in said
        _say(f"clean: {said}")
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
