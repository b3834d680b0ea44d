"""`draftscope conform`: rollback kernels of other engines against the recurrences in f64."""

from __future__ import annotations

import argparse
import sys

from app.cli.option_lines import declare, names_of
from app.cli.output import is_terminal, print_report, show_progress, tell
from engine.errors import OptionError
from engine.files import write_text

_CHECKS = (
    *("depths", "lengths", "subsets", "no-drafts", "rounds", "padding", "trees", "prompts"),
    *("repeat", "batch", "drift", "cost"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, checks=names_of(_CHECKS), all_checks=_CHECKS)
    parser.set_defaults(checks=_CHECKS, device="auto")


def run(args: argparse.Namespace) -> int:
    """Check all kernels of the target; the exit status is the verdict."""
    from engine.conform import adapters, report, runner
    from engine.machine.device import resolve_device
    from engine.report.page import html_page
    from engine.report.text import markdown

    name, place, version = runner.open_target(args.target)
    known = [kernel.name for kernel in runner.kernels(name, place)]
    unknown = [kernel for kernel in args.only if kernel not in known]
    if unknown:
        raise OptionError(
            f"{args.target} has no kernel {unknown[0]}.", f"Known: {', '.join(known)}"
        )
    device = resolve_device(args.device).type
    title = f"{args.target} {version}".strip()
    if name:
        tried = adapters.engine(name).versions
        if tried and version not in tried:
            if version and not args.force:
                raise OptionError(
                    f"{title} is an untested version; tested: {', '.join(tried)}.",
                    "Its kernels may have another interface; run the checks anyway with --force.",
                )
            tell(f"{title} is an untested version; tested: {', '.join(tried)}")
    last, shown = {}, show_progress if is_terminal(sys.stderr) else lambda _: None
    for outcome in runner.run(
        name,
        place,
        seed=args.seed,
        device=device,
        only=args.only,
        checks=args.checks,
        limit_s=args.limit,
    ):
        last[outcome.kernel, outcome.recurrence, outcome.check] = outcome
        shown(f"{outcome.kernel} {outcome.recurrence}: {outcome.check}")
    shown("")
    outcomes = [*last.values()]
    whole = report.report(outcomes, title, args.target, device)
    for path, text in (
        (args.html, html_page(whole)),
        (args.markdown, markdown(whole)),
        (args.junit, report.junit(outcomes, title, args.target)),
    ):
        if path is not None:
            write_text(path, text)
    faults = [fault for outcome in outcomes for fault in outcome.faults if not fault.note]
    if args.script is not None and faults:
        if name == "draftscope":
            raise OptionError(
                "The kernels of this program cannot run without it: no script was written.",
                "Leave out --script; the report has the command that repeats the check.",
            )
        report.write_script(args.script, faults[0], args.target, device)
    n_failed = sum(not outcome.passed for outcome in outcomes)
    where = "on CUDA" if device == "cuda" else "on the CPU"
    sums = f"{title}: {len(report.judged(outcomes))} checks {where}, {n_failed} failed"
    facts = report.facts(outcomes, title, args.target, device)
    print_report(args, facts, (*report.lines(outcomes, args.target), "", sums))
    return int(n_failed > 0)
