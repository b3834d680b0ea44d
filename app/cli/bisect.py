"""`draftscope bisect`: the commit or build of llama.cpp that broke its rollback."""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.common import target_path
from app.cli.option_lines import declare, refuse_given
from app.cli.output import is_terminal, print_report, show_progress, tell
from engine.errors import DraftscopeError, OptionError
from engine.experiments.bisect import progress_file
from engine.files import write_text

if TYPE_CHECKING:
    from engine.experiments.bisect.builds import Judge
    from engine.experiments.bisect.history import Revision
    from engine.experiments.bisect.search import Search

_OF_COMMITS = "--skip", "--cmake-args", "--target", "-j, --jobs", "--build-limit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__)
    parser.set_defaults(cmake_args="", judge="check-rollback")


def run(args: argparse.Namespace) -> int:
    """Search; exit status 0 if every fault has its commit."""
    with_repo = args.repo is not None
    if with_repo == (args.builds is not None):
        raise OptionError(
            "No commits or builds to search are given.",
            "Give either --repo with --good and --bad, or --builds.",
        )
    if not with_repo:
        refuse_given(args, "--repo", *_OF_COMMITS)
    if with_repo != (args.good is not None) or with_repo != (args.bad is not None):
        raise OptionError(
            "--good and --bad are commits of a repository, and --repo is not given with both.",
            "Give --repo, --good and --bad together; --builds needs neither.",
        )
    model = target_path(args) if args.judge_command is None else None
    from engine.experiments.bisect import search as report

    search, folder = _search(args, model)
    with _only_one(folder):
        if search.n_known:
            tell(f"{search.n_known} verdicts are known from an earlier search")
        search.begin = lambda revision: _begin(search, revision)
        try:
            for line in search.run():
                if is_terminal(sys.stderr):
                    show_progress("")
                tell(line, name="")
        except (KeyboardInterrupt, DraftscopeError):
            tell(f"verdicts so far are in {folder}; repeat the command to resume")
            raise
    again = shlex.join(["draftscope", *args.words])
    if args.markdown is not None:
        write_text(args.markdown, report.markdown(search, "Which commit broke rollback", again))
    _begin(search, None)
    print_report(args, report.as_json(search), report.lines(search))
    tell(f"builds and logs are in {folder}")
    return int(not all(fault.is_sure for fault in search.faults))


def _begin(search: Search, revision: Revision | None) -> None:
    """Announce the next step, here and to windows."""
    from engine.experiments.bisect import search as report

    now = f"{revision.name}: building and testing" if revision else ""
    if now and is_terminal(sys.stderr):
        show_progress(now)
    path = progress_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(report.progress(search, now)))


def _search(args: argparse.Namespace, model: Path | None) -> tuple[Search, Path]:
    from engine.experiments.bisect.builds import CMakeBuilds, given_build
    from engine.experiments.bisect.first_wrong import find_first_wrong
    from engine.experiments.bisect.history import chosen, commits, in_a_row
    from engine.experiments.bisect.search import Search

    options = _words(args.cmake_args, "--cmake-args")
    if args.builds is not None:
        history, note = in_a_row(args.builds), ""
    else:
        history, note = commits(args.repo, args.good, args.bad)
    if note:
        tell(f"note: {note}")
    where = str(args.repo.resolve()) if args.repo is not None else "builds"
    folder = (args.work or progress_file().parent / _mark(where)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    judge, label = _judge(args, model, folder)
    builds: Callable[[Revision], Path] = given_build
    skip: set[int] = set()
    forget: Callable[[Iterable[Revision]], object] | None = None
    alone: Callable[[Revision, Revision], Path] | None = None
    if args.repo is not None:
        builds = made = CMakeBuilds(
            args.repo, folder, options, target=args.target, jobs=args.jobs, limit_s=args.build_limit
        )
        skip = chosen(args.repo, history, args.skip)
        forget, alone = made.forget_all_but, made.alone
    search = Search(
        history,
        builds,
        judge,
        state=folder / f"verdicts-{_mark(label, args.target, *options)}.json",
        skip=skip,
        retry_skipped=args.retry_skipped,
        forget=forget,
        alone=alone,
        trace=None if model is None else partial(find_first_wrong, judge, model),
    )
    return search, folder


def _judge(args: argparse.Namespace, model: Path | None, folder: Path) -> tuple[Judge, str]:
    """The judge, and what its verdicts depend on."""
    from engine.experiments.bisect.builds import judge_command, judge_of, request_words

    if model is None:
        command = _words(args.judge_command, "--judge-command")
        return judge_command(command, args.judge_limit), args.judge_command
    words = _words(args.judge, "--judge")
    label = args.judge
    if args.request is not None:
        name, _, number = args.request.rpartition(":")
        if not (name and number.isascii() and number.isdigit() and len(number) < 10):
            name, number = args.request, "1"
        words = request_words(Path(name), int(number), folder / f"request-{_mark(args.request)}")
        label = shlex.join(words)
    stamp = model.stat()
    label = f"{label}\0{model.resolve()}\0{stamp.st_size}\0{stamp.st_mtime_ns}"
    return judge_of(model.resolve(), words, args.judge_limit), label


def _words(text: str, option: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise OptionError(f"{option} {text[:80]!r}: {error}.", "Close the quotation.") from error


def _mark(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:12]


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """A lock that keeps other searches out of the folder. Raises OptionError if it is held."""
    with (folder / "lock").open("wb") as lock:
        with suppress(ImportError):  # not available on Windows
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OptionError(
                    f"Another search is running in {folder}.", "Wait for its end, or use --work."
                ) from error
        yield
